"""Rows of the record in, what pages say of them out: what the pages of all studies share.

Intervals are 95 % ones over seeds, by Student's law; where there is one seed there is none, and the text says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.statistics import Summary, ece_floor, typical_confidence

# What pages say around their tables.
TEMPLATES = Path(__file__).parents[1] / "pages"
# Groups of unknown sets.
GROUPS = ("near", "far")


def template(name: str) -> str:
    """Return a file of `studies/pages`."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], rule: str = "", wide: bool = False) -> str:
    """Return a table in Markdown; a rule with spaces is for cells that are all as wide as that, `wide` the usual one of these.

    Example:
        >>> print(markdown(["a", "b"], [["1", ""]]))
        | a | b |
        |---|---|
        | 1 | |
    """
    lines = list(lines)
    assert all(len(line) == len(header) for line in lines), "a line has more or fewer cells than there are columns"
    rule = rule or ("| " + " | ".join(["---"] * len(header)) + " |" if wide else "|" + "---|" * len(header))
    wide = " --- " in rule
    rows = ["|" + "".join(f" {cell} |" if cell or wide else " |" for cell in line) for line in (header, *lines)]
    return "\n".join([rows[0], rule, *rows[1:]])


def fold(summary: str, text: str) -> str:
    """Return a text in Markdown that a page shows when it is asked for."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def noise_sentence(arms: Mapping[str, Mapping[str, float]], images: int) -> str:
    """Say how large a calibration error is by chance, and which arms are not told apart from the best one.

    Of each arm `"accuracy"`, `"ECE"` and, where it is known, the `"floor"` of a calibrated model of its confidences.
    """
    floors = {
        name: own.get("floor") or ece_floor(typical_confidence(own["accuracy"], images)) for name, own in arms.items()
    }
    best = min(arms, key=lambda name: arms[name]["ECE"])
    noise = [name for name, own in arms.items() if name != best and own["ECE"] - arms[best]["ECE"] < floors[name]]
    return (
        f"A perfectly calibrated model of these accuracies has an ECE of {min(floors.values()):.3f} to {max(floors.values()):.3f} on "
        f"{images} images, by chance alone. Within that noise of the least ({best}): {'; '.join(noise) or 'none'}."
    )


def mean_text(found: Summary, digits: int = 3, signed: bool = False) -> str:
    """Return a mean over seeds and half its interval's width, without zeros before the point.

    Example:
        >>> mean_text(Summary((0.71, 0.72, 0.73))), mean_text(Summary((0.5,)))
        ('.720 ± .025', '.500')
    """
    middle = bare(found.mean, digits, "+" if signed else "")
    return middle if len(found.values) == 1 else f"{middle} ± {bare(found.half, digits)}"


def with_half(found: Summary) -> str:
    """Return the same with its zeros."""
    return f"{found.mean:.3f}" + (f" ± {found.half:.3f}" if len(found.values) > 1 else "")


def bare(value: float, digits: int = 3, sign: str = "") -> str:
    """Return a number without a zero before the point."""
    number = f"{value:{sign}.{digits}f}"
    return number.replace("0.", ".", 1) if number.lstrip("+-").startswith("0.") else number


def runs(rows: Iterable[Record], study: str) -> list[Record]:
    """Return what the arms of a study's runs measured, with numbers as floats."""
    return [as_floats(row["numbers"]) for row in rows if row["table"] == f"{study}/runs"]


def whole_runs(rows: Iterable[Record], study: str, data: str) -> list[Record]:
    """Return the lines of a study's runs that were trained on all images of a set: no smoke runs."""
    return [
        row
        for row in rows
        if row["table"] == f"{study}/runs"
        and row["setting"].get("data") == data
        and not row["setting"]["quick"]
        and row["setting"].get("limit") is None
    ]


def made(rows: Sequence[Record]) -> str:
    """Say how many arms were run, how long they took, on what and when."""
    machines, versions = ({row["machine"]: None for row in rows}, {row["versions"]["torch"]: None for row in rows})
    minutes, dates = sum(row["seconds"] for row in rows) / 60, span(row["date"] for row in rows)
    return f"{len(rows)} arms in {minutes:.0f} minutes, {', '.join(machines)}, torch {', '.join(versions)}, {dates}"


def span(values: Iterable[Any]) -> str:
    """Return the least and the largest of values as text; one where they are the same.

    Example:
        >>> span([3, 1, 2]), span([1, 1])
        ('1 to 3', '1')
    """
    found = sorted(values)
    return " to ".join(map(str, dict.fromkeys((found[0], found[-1]))))


def as_floats(value: Any) -> Any:
    """Return what the record has with its numbers as floats."""
    if isinstance(value, Mapping):
        return {key: as_floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_floats(each) for each in value]
    return value if isinstance(value, str | bool | None) else float(value)


def value_of(value: Any) -> float:
    """Return a number of an arm's record, which has it with the ends of its interval, or alone where these are not known.

    Example:
        >>> value_of([0.9, 0.88, 0.92]), value_of(0.9)
        (0.9, 0.9)
    """
    return float(value[0] if isinstance(value, list) else value)


def framed(records: Sequence[Record]) -> pd.DataFrame:
    """Return records as rows, their numbers as columns such as `"auroc.near.bma"`; `"worst"` is the least accurate member's accuracy."""
    return pd.json_normalize(records).assign(worst=lambda frame: frame["members"].map(min))


def paired(first: pd.DataFrame, second: pd.DataFrame, name: str, other: str = "") -> Summary:
    """Return by how much the first arm's number is above the second's, over the seeds that both have."""
    return Summary.of((first[name] - second[other or name]).dropna())
