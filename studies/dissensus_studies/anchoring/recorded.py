"""Rows of the record in; what the page of masked anchoring shows of networks of the document's length, and verdicts on claims, out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import fmean, stdev
from typing import Any

from dissensus_studies.anchoring import (
    CALIBRATION,
    CLEAN,
    DETECTION,
    MASKED,
    PROBES,
    ROBUSTNESS,
    Records,
    claims_of,
    same_sets,
)
from dissensus_studies.anchoring.arms import EPOCHS, SCORES
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.claims import in_one_word
from dissensus_studies.harness.image_study import at
from dissensus_studies.recorded import as_floats, made, span, whole_runs

Numbers = dict[str, str]
Networks = Mapping[str, Records]
# Rows without which nothing is said of a known set and an architecture; of mining, the last of them.
NEEDED = ("plain", "anchored", "alpha=0.25")
ARCHITECTURES = {"resnet18": "ResNet-18", "wrn-40-2": "WRN-40-2"}
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
# What claims are about: what their lines of the record end with, and which the document's own numbers bear out there.
_ADAPT = "Masked networks adapt"
SUBJECTS = {
    ("cifar10", "resnet18"): ("", ("",)),
    ("cifar100", "resnet18"): (" (CIFAR-100)", ("Masking detects unknown images better than a plain", _ADAPT)),
    ("cifar100", "wrn-40-2"): (" (CIFAR-100, WRN-40-2)", ("Masked anchoring lowers the smooth ECE", _ADAPT)),
}
# Columns of the document's tables by the name of a set in a record.
TITLES = {
    "lsun_crop": "LSUN (C)",
    "lsun_resize": "LSUN (R)",
    "isun": "iSUN",
    "textures": "Textures",
    "places": "Places365",
    "tiny_imagenet": "Tiny ImageNet",
    "cifar100": "CIFAR-100",
    "cifar10": "CIFAR-10",
}
PROBED = {
    "ucf101": "UCF101",
    "food101": "Food101",
    "flowers102": "Flowers102",
    "cars": "Stanford Cars",
    "pets": "Oxford Pets",
    "dtd": "DTD",
    "cifar10": "CIFAR-10",
}
FIGURE = "anchoring-alpha"
# Panels of the figure: title, what is drawn, and how the last panel, of changes, names it.
DRAWN: Sequence[tuple[str, Callable[[Record], float], str]] = (
    ("test accuracy", CLEAN.value, ""),
    ("accuracy under corruption", ROBUSTNESS.value, "under corruption"),
    ("1 − smooth ECE under corruption", lambda record: 1 - CALIBRATION.value(record), "1 − smooth ECE"),
    ("accuracy of linear probes", PROBES.value, "linear probes"),
    ("mean AUROC", DETECTION.value, "AUROC"),
)
COLOURS = {"1 − smooth ECE": 1, "linear probes": 2, "under corruption": 3, "AUROC": 4}


def networks(rows: Sequence[Record], data: str, architecture: str) -> dict[str, list[Record]]:
    """Return the networks that were trained at the document's length, by row, with the sets that all of them have."""
    found = {}
    for row in whole_runs(rows, "anchoring", data):
        record = as_floats(row["numbers"])
        asked = record["setting"]["architecture"] == architecture and record["training"]["epochs"] == EPOCHS
        if asked and "together" not in record:
            found[row["arm"][0]] = _with_ends(record) | {"source": row}
    by_row: dict[str, list[Record]] = {}
    for record in same_sets(found)[0].values():
        by_row.setdefault(record["row"], []).append(record)
    return by_row


def _with_ends(record: Record) -> Record:
    """Return a record as the study wrote it: a value whose interval is not known stands bare in the file."""

    def ended(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: ended(each) for name, each in value.items()}
        return value if isinstance(value, list) else [value, None, None]

    return record | {part: ended(record[part]) for part in ("test", "corrupted", "auroc")}


def complete(rows: Sequence[Record], data: str) -> dict[tuple[str, str], list[Record]]:
    """Return networks by architecture and row, of architectures that have all that the document compares."""
    found = {architecture: networks(rows, data, architecture) for architecture in ARCHITECTURES}
    return {
        (architecture, row): records
        for architecture, own in found.items()
        if set(NEEDED) <= set(own)
        for row, records in own.items()
    }


def judged_claims(rows: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Return what replaces a claim's line, by table and text, for the claims that runs speak of."""
    found = {}
    for (data, architecture), (ending, said) in SUBJECTS.items():
        own = networks(rows, data, architecture)
        compared = {row: own[row] for row in (*NEEDED[:2], *MASKED) if row in own} if set(NEEDED) <= set(own) else {}
        mined = {row: records for row, records in own.items() if row == NEEDED[-1] or "tail=" in row}
        for part in (compared, mined):
            place = f"{DATA[data]}, {ARCHITECTURES[architecture]}: {', '.join(part)}; {EPOCHS} epochs"
            known = "" if data == "cifar10" else f" --known {data}"
            for claim in claims_of(part):
                if claim.statement.startswith(said) and not claim.verdict.startswith("not tested"):
                    found[claim.statement.removesuffix(".") + ending + "."] = {
                        "measured": [claim.measured],
                        "verdict": in_one_word(claim.verdict),
                        "note": claim.verdict.replace("unresolved", "within noise"),
                        "seeds": min(map(len, part.values())),
                        "setting": place,
                        "command": f"dissensus study anchoring --data DIR{known}",
                    }
    return {"anchoring/claims": found}


def _mean(records: Records, pattern: str, *keys: str) -> str:
    """Return the mean over networks of what their records have at a place; a pattern with `%` gives it in per cent, without the sign."""
    values = [at(*keys)(record) for record in records]
    text = pattern.format(fmean(value[0] if isinstance(value, list) else value for value in values))
    return text.removesuffix("%")


def _auroc(records: Records) -> Numbers:
    sets = records[0]["auroc"]
    return {f"{TITLES.get(n, n)}, ours": _mean(records, "{:.2%}", "auroc", n, SCORES[0]) for n in sets}


def _probe_accuracy(records: Records, titles: Mapping[str, str]) -> Numbers:
    tasks = records[0]["adaptation"]
    return {f"{titles.get(n, n)}, ours": _mean(records, "{:.2%}", "adaptation", n, "accuracy") for n in tasks}


def _probe_ece(records: Records, titles: Mapping[str, str]) -> Numbers:
    tasks = records[0]["adaptation"]
    return {f"{titles.get(n, n)}, ours": _mean(records, "{:.3f}", "adaptation", n, "ece") for n in tasks}


def _severities(records: Records, metric: str, ending: str = "") -> Numbers:
    places = {f"severity {level}{ending}": str(level) for level in range(1, 6)} | {"mean of all": "all"}
    return {title: _mean(records, "{:.3f}", "corrupted", place, metric) for title, place in places.items()}


def _counted(records: Records, metric: str) -> Numbers:
    return {"runs": str(len(records)), **_severities(records, metric)}


_TABLE = "anchoring/masked-anchoring-beside-its-document"
# Tables of each known set, and what they have of ours.
TABLES: Mapping[str, Mapping[str, Callable[[Records], Numbers]]] = {
    "cifar10": {
        _TABLE: _auroc,
        f"{_TABLE}-2": partial(_severities, metric="smooth_ece", ending=", ours"),
        f"{_TABLE}-7": partial(_probe_accuracy, titles={}),
        f"{_TABLE}-8": partial(_probe_ece, titles={}),
        f"{_TABLE}-9": partial(_counted, metric="accuracy"),
        f"{_TABLE}-10": partial(_counted, metric="smooth_ece"),
    },
    "cifar100": {
        f"{_TABLE}-3": _auroc,
        f"{_TABLE}-4": partial(_probe_accuracy, titles=PROBED),
        f"{_TABLE}-5": partial(_probe_ece, titles=PROBED),
        f"{_TABLE}-6": partial(_severities, metric="smooth_ece", ending=", ours"),
    },
}
# Tables that have nothing but ours.
_OURS = (f"{_TABLE}-9", f"{_TABLE}-10")


def shown(rows: Sequence[Record]) -> list[Record]:
    """Return the record as the page shows it: runs in place of what was read off an earlier page, in each table of their known set."""
    found = list(rows)
    for data, tables in TABLES.items():
        if own := complete(rows, data):
            for table, read in tables.items():
                before = {tuple(row["arm"]): row["numbers"] for row in rows if row["table"] == table}
                numbers = {arm: {} if table in _OURS else _documents(theirs) for arm, theirs in before.items()}
                for arm, records in own.items():
                    numbers[arm] = numbers.get(arm, {}) | read(records)
                arms = sorted((arm for arm in numbers if numbers[arm]), key=lambda arm: [*ARCHITECTURES].index(arm[0]))
                new = [{"study": "anchoring", "table": table, "arm": [*arm], "numbers": numbers[arm]} for arm in arms]
                found = [*(row for row in found if row["table"] != table), *new]
        else:
            found = _with_full_length(found, rows, data)
    if lines := list(figure_lines(networks(rows, "cifar10", "resnet18"))):
        found = [*(row for row in found if row["arm"][0] != FIGURE), *lines]
    return found


def _with_full_length(found: Sequence[Record], rows: Sequence[Record], data: str) -> list[Record]:
    """Return the record with a line for each row of networks of the document's length, below that of short runs."""
    found = list(found)
    for (table, read), architecture in product(TABLES[data].items(), ARCHITECTURES):
        for row, records in networks(rows, data, architecture).items():
            place = next(
                (i for i, each in enumerate(found) if each["table"] == table and each["arm"] == [architecture, row]),
                None,
            )
            if place is not None:
                known, numbers = found[place]["numbers"], read(records)
                arm = [architecture, f"{row}, {EPOCHS} epochs"]
                shared = {name: value for name, value in numbers.items() if name in known}
                found.insert(place + 1, {"study": "anchoring", "table": table, "arm": arm, "numbers": shared})
    return found


def _documents(numbers: Record) -> Record:
    return {name: value for name, value in numbers.items() if not name.endswith(", ours")}


def figure_lines(own: Networks) -> Iterator[Record]:
    """Yield the lines of the figure: every quality against the masking probability, with two standard errors, beside plain networks."""
    if not set(NEEDED) <= set(own):
        return
    masked = {records[0]["setting"]["alpha"]: records for row, records in own.items() if row in ("anchored", *MASKED)}
    masked = dict(sorted(masked.items()))
    ends, last = [0.0, max(masked)], "change against the plain network, %"

    def line(panel: str, name: str, look: tuple[int | None, str], **numbers: list[float]) -> Record:
        drawn = {"line": dict(zip(("colour", "style"), look, strict=True)), "numbers": numbers}
        return {"study": "anchoring", "table": "anchoring/figures", "arm": [FIGURE, panel, name], **drawn}

    for panel, read, _ in DRAWN:
        means, low, high = zip(*(_band(records, read) for records in masked.values()), strict=True)
        level, below, above = _band(own["plain"], read)
        yield line(panel, "anchored", (0, "o-"), x=list(masked), y=[*means], low=[*low], high=[*high])
        yield line(panel, "plain", (None, "--"), x=ends, y=[level] * 2, low=[below] * 2, high=[above] * 2)
    yield line(last, "plain", (None, "--"), x=ends, y=[0.0, 0.0])
    for _, read, name in DRAWN:
        if name:
            base = fmean(map(read, own["plain"]))
            change = [100 * (fmean(map(read, records)) / base - 1) for records in masked.values()]
            yield line(last, name, (COLOURS[name], "o-"), x=list(masked), y=change)


def _band(records: Records, read: Callable[[Record], float]) -> tuple[float, float, float]:
    """Return the mean over seeds and two standard errors to both sides."""
    values = list(map(read, records))
    half = 2 * stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return fmean(values), fmean(values) - half, fmean(values) + half


SHORT = (
    "**Ours hold short runs**: 10 epochs of one cycle up to 0.2 where the document trains 200 (one H200, torch 2.11, bf16, 2026-11-16). "
    "The plain, the anchored and the three masked ResNet-18 have three seeds, and their cells are means; everything else has one."
)


def sentence(rows: Sequence[Record]) -> str:
    """Say what our columns rest on."""
    parts = []
    for data, name in DATA.items():
        if own := complete(rows, data):
            parts.append(_rests_on(own, name))
        elif data == "cifar10":
            parts.append(SHORT)
            parts += [_full_length(architecture, networks(rows, data, architecture)) for architecture in ARCHITECTURES]
    return " ".join(filter(None, parts))


def _full_length(architecture: str, own: Networks) -> str:
    """Say which networks have the document's length."""
    if not own:
        return ""
    counted = ", ".join(f"{row} ({len(records)} seeds)" for row, records in own.items())
    arms = [record["source"] for records in own.values() for record in records]
    return f"Of the document's {EPOCHS} epochs there are, for {ARCHITECTURES[architecture]}: {counted}; {made(arms)}, bf16."


def _rests_on(own: Mapping[tuple[str, str], Records], name: str) -> str:
    seeds = span(map(len, own.values()))
    return (
        f"**Ours on {name} are means over {seeds} seed{'' if seeds == '1' else 's'} of {EPOCHS} epochs, as the document's**: "
        f"{made([record['source'] for records in own.values() for record in records])}, bf16."
    )
