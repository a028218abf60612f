"""The record in, the pages of `docs/results` out: every table, verdict and claim on them is written from `studies/records`.

`studies/records/NAME.jsonl` has a line for each arm that was ever reported: its setting, seeds, machine, versions, seconds and all
numbers; `"source"` is `"run"`, or `"page"` where the raw record is lost and only the page had the number. `claims.jsonl` has a line for
each claim of the documents. `studies/pages` has the words around them and how each table is laid out.

    python -m dissensus_studies.results                           # write the pages; `make results`
    python -m dissensus_studies.results add runs/masksembles      # add the arms of a run to the record
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dissensus_studies.noise import ece_floor, typical_confidence
from dissensus_studies.tabular_page import read_records, write_report

if TYPE_CHECKING:
    import matplotlib.figure

STUDIES = Path(__file__).parents[1]
RECORDS, TEMPLATES, PAGES = STUDIES / "records", STUDIES / "pages", STUDIES.parent / "docs" / "results"

Verdict = Literal["reproduced", "not reproduced", "within noise", "not tested at the document's length"]
VERDICTS: tuple[str, ...] = get_args(Verdict)

Record = dict[str, Any]


def load(name: str, folder: Path = RECORDS) -> list[Record]:
    """Return the lines of one record; numbers keep the digits that they were written with."""
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_float=Decimal, parse_int=Decimal) for line in lines]


def pages(records: Path = RECORDS, templates: Path = TEMPLATES) -> dict[str, str]:
    """Return the text of every page by its file name."""
    layouts = json.loads((templates / "tables.json").read_text(encoding="utf-8"))
    claims = load("claims", records)
    found = {}
    for template in sorted(templates.glob("*.md")):
        rows = load(template.stem, records)
        lines = template.read_text(encoding="utf-8").split("\n")
        found[template.name] = "\n".join(_filled(line, rows, claims, layouts) for line in lines)
    tables = write_report(read_records(records / "tabular.jsonl"))
    return {**found, "claims.md": claims_page(claims), "tabular.md": tables}


def _filled(line: str, rows: Sequence[Record], claims: Sequence[Record], layouts: Mapping[str, Any]) -> str:
    """Return a line of a template, or what it asks for: `<!-- table ID -->`, `<!-- claims ID -->`, `<!-- floor ID images -->`."""
    words = line.split()
    if words[:1] != ["<!--"] or words[1] not in ("table", "claims", "floor"):
        return line
    kind, name = words[1:3]
    if kind == "floor":
        return floor_sentence([row for row in rows if row["table"] == name], int(words[3]))
    layout = layouts[name]
    if kind == "claims":
        return claims_table([claim for claim in claims if claim["table"] == name], layout)
    rows = [row for row in rows if row["table"] == name]
    return by_columns(rows, layout) if layout["kind"] == "transposed" else by_rows(rows, layout)


def by_rows(rows: Sequence[Record], layout: Mapping[str, Any]) -> str:
    """Return a table with a line for each record."""
    lines, before = [], ""
    for row in rows:
        names = list(row["arm"])
        if layout["fill"] and names[0] == before:
            names[0] = ""
        else:
            before = names[0]
        cells = [
            _cell(row, name, layout["patterns"].get(name, "{}"), layout["style"].get(name, "full"))
            for name in layout["names"]
        ]
        lines.append([*names, *cells])
    return _table(layout["header"], layout["rule"], lines)


def by_columns(rows: Sequence[Record], layout: Mapping[str, Any]) -> str:
    """Return a table with a column for each record."""
    lines = []
    for line in layout["rows"]:
        if "group" in line:
            lines.append([line["group"], *("" for _ in rows)])
        else:
            lines.append(
                [line["label"], *(_cell(row, line["key"], line["pattern"], line["style"]) for row in rows)]
            )
    return _table([layout["corner"], *(row["arm"][0] for row in rows)], layout["rule"], lines)


def _cell(row: Record, name: str, pattern: str, style: str) -> str:
    """Return what a record has under a name: nothing, words, one number or several."""
    value = row["numbers"].get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    numbers = value if isinstance(value, list) else [value]
    shown = [
        str(number).replace("0.", ".", 1) if style == "bare" and abs(number) < 1 else str(number)
        for number in numbers
    ]
    text = pattern.format(*shown) if pattern.count("{}") == len(shown) else " / ".join(shown)
    return f"**{text}**" if name in row.get("best", ()) else text


def _table(header: Sequence[str], rule: str, lines: Sequence[Sequence[str]]) -> str:
    rows = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in (header, *lines)]
    wide = " --- " in rule
    if wide:
        rows = ["|" + "".join(f" {cell} |" for cell in line) for line in (header, *lines)]
    return "\n".join([rows[0], rule, *rows[1:]])


def floor_sentence(rows: Sequence[Record], images: int) -> str:
    """Say how large a calibration error is by chance, and which arms are not told apart from the best one."""
    floors = {
        row["arm"][0]: ece_floor(typical_confidence(float(row["numbers"]["accuracy"]), images))
        for row in rows
    }
    errors = {row["arm"][0]: float(row["numbers"]["ECE"]) for row in rows}
    best = min(errors, key=errors.__getitem__)
    noise = [name for name, error in errors.items() if name != best and error - errors[best] < floors[name]]
    return (
        f"A perfectly calibrated model of these accuracies has an ECE of {min(floors.values()):.3f} to {max(floors.values()):.3f} on "
        f"{images} images, by chance alone. Within that noise of the least ({best}): {', '.join(noise) or 'none'}."
    )


def diversity_figure(rows: Sequence[Record], num_classes: int = 10) -> "matplotlib.figure.Figure":
    """Draw the arms of the Masksembles study, diversity against accuracy, below two members that err independently."""
    from dissensus import metrics, plots

    figure, (ax,) = plots.panels(width=6.4, height=4.0)
    accuracies = [float(row["numbers"]["mean member"]) for row in rows]
    places = [min(accuracies) + (max(accuracies) - min(accuracies)) * share / 50 for share in range(51)]
    upper = [metrics.diversity_bounds(place, place, num_classes).upper for place in places]
    ax.plot(places, upper, "--", color=plots.NOTE_COLOUR, label="independent errors")
    for index, (row, accuracy) in enumerate(zip(rows, accuracies, strict=True)):
        style: dict[str, Any] = {
            "color": plots.COLOURS[index % len(plots.COLOURS)],
            "marker": "osD^vP*X"[index % 8],
        }
        ax.scatter(accuracy, float(row["numbers"]["diversity"]), label=row["arm"][0], **style)
    ax.set(
        xlabel="mean accuracy of members", ylabel="diversity: disagreement / error rate", ylim=(-0.05, None)
    )
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def claims_table(claims: Sequence[Record], layout: Mapping[str, Any]) -> str:
    """Return the claims of one part of a page: what the document says, what was measured, the verdict and what it rests on."""
    header = [*layout["columns"][:-1], "verdict", "in words"]
    lines = [
        [claim["group"], *("" for _ in header[1:])]
        if "group" in claim
        else [claim["claim"], *claim["measured"], claim["verdict"], claim["note"]]
        for claim in claims
    ]
    return _table(header, "|" + "---|" * len(header), lines)


def claims_page(claims: Sequence[Record]) -> str:
    """Return the page of all claims, one row each."""
    claims = [claim for claim in claims if "claim" in claim]
    counts = Counter(claim["verdict"] for claim in claims)
    lines = [
        [
            claim["document"],
            claim["claim"],
            f"**{claim['verdict']}**"
            # A note may point to a place of its own page.
            + (f": {claim['note']}" if claim["note"] not in ("", claim["verdict"]) else "").replace(
                "](#", f"]({claim['table'].split('/')[0]}.md#"
            ),
            "; ".join(filter(None, claim["measured"])),
            str(claim["seeds"] or ""),
            claim["setting"],
            f"`{claim['command']}`",
            f"`{claim['table'].split('/')[0]}.jsonl`",
        ]
        for claim in claims
    ]
    header = ["document", "claim", "verdict", "numbers", "seeds", "setting", "command", "record"]
    return "\n".join(
        [
            "# Every claim of the five documents",
            "",
            f"{len(claims)} claims: "
            + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
            + ".",
            "",
            "*Reproduced* is said only of what held wherever the document claims it, at the document's own length. *Within noise* is a "
            "difference that repeats, or the floor of its measure, do not tell from none. What shorter runs say of claims that were not "
            "tested at the document's length follows the verdict; it is no verdict. Documents: 000 Masksembles, 001 joint training and "
            "collusion, 002 loss-guided diversification, 003 masked anchoring, 004 deep ensembles. The page is written from "
            "`studies/records` by `make results`.",
            "",
            _table(header, "|" + "---|" * len(header), lines),
            "",
        ]
    )


def _judged(claim: Record) -> str:
    verdict, note = claim["verdict"], claim["note"]
    if note in ("", verdict):
        return f"**{verdict}**"
    return f"**{verdict}**{'; shorter runs' if verdict == VERDICTS[-1] else ''}: {note}"


def write(folder: Path = PAGES) -> list[str]:
    """Write all pages; return the names of those that changed."""
    changed = []
    for name, text in pages().items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    rows = [row for row in load("masksembles") if row["table"] == "masksembles/diversity-and-calibration"]
    diversity_figure(rows).savefig(
        folder / "masksembles-diversity.svg", bbox_inches="tight", metadata={"Date": None}
    )
    return changed


def add(run: Path, records: Path = RECORDS) -> int:
    """Add the arms of a run's folder to the record of its study; arms that it has with the same settings are replaced."""
    study = run.name
    path = records / f"{study}.jsonl"
    kept = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    arms = [json.loads(line) for line in (run / "arms.jsonl").read_text(encoding="utf-8").splitlines()]
    new = [as_record(study, arm) for arm in arms]
    names = {(tuple(row["arm"]), json.dumps(row["setting"])) for row in new}
    kept = [line for line in kept if _name_of(json.loads(line)) not in names]
    path.write_text(
        "\n".join([*kept, *(json.dumps(row, ensure_ascii=False) for row in new)]) + "\n", encoding="utf-8"
    )
    return len(new)


def _name_of(row: Record) -> tuple[tuple[str, ...], str]:
    return tuple(row["arm"]), json.dumps(row["setting"]) if row["source"] == "run" else "page"


def as_record(study: str, arm: Record) -> Record:
    """Return a line of `arms.jsonl` as a line of the record: the same numbers, without curves and lists of examples."""
    made = arm["record"]["made"]
    numbers = {
        key: value
        for key, value in arm["record"].items()
        if key not in ("line", "made", "arm_seconds")
        and (
            isinstance(value, int | float | str)
            or (isinstance(value, list | dict) and len(str(value)) < 4000)
        )
    }
    return {
        "study": study,
        "table": f"{study}/runs",
        "arm": [arm["arm"]],
        "machine": made["device"],
        "versions": {"torch": made["torch"]},
        "date": made["date"],
        "seeds": 1,
        "setting": arm.get("settings", {}),
        "seconds": arm["record"].get("arm_seconds"),
        "source": "run",
        "numbers": numbers,
    }


def main(words: Sequence[str]) -> None:
    """Write the pages, after adding the arms of runs: `add DIR ...`."""
    if words and (words[0] != "add" or len(words) < 2):
        raise SystemExit("Say nothing to write the pages, or: add RUN_FOLDER ...")
    for folder in words[1:]:
        print(f"{add(Path(folder))} arms of {folder} are in the record")
    print("Written anew:", ", ".join(write()) or "nothing; all pages are as the record says")


if __name__ == "__main__":
    main(sys.argv[1:])
