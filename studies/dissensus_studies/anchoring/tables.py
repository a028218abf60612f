"""The document's tables 6 to 9 (`published.json`) beside what was measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from dissensus.html import Table
from dissensus_studies.harness.arm_log import Record

# Rows are named as those of `AnchorSetting.row`.
Row = tuple[str, str]
Rows = Mapping[Row, Sequence[Record]]


@dataclass(frozen=True)
class Published:
    """A table of the document."""

    title: str  # What it shows, of which networks.
    columns: Mapping[str, str]  # What our sets or severities are called, to what the document calls them.
    rows: Mapping[Row, Sequence[float | None]]  # (architecture, row) to its numbers; None where the document has none.
    digits: int  # Digits behind the point.
    part: str  # Part of a record that has a column's numbers: "auroc", "corrupted" or "adaptation".
    metric: str  # Which of them.

    def ours(self, records: Sequence[Record], name: str) -> str | None:
        """Return our mean over seeds in a column; None where there is nothing."""
        found = [record[self.part].get(name, {}).get(self.metric) for record in records]
        values = [value[0] if isinstance(value, list) else value for value in found if value is not None]
        known = [value for value in values if value is not None]
        # Two digits are per cent.
        return f"{fmean(known) * (100 if self.digits == 2 else 1):.{self.digits}f}" if known else None


def _read() -> dict[str, Published]:
    found = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
    return {
        name: Published(**{**table, "rows": {(row[0], row[1]): row[2:] for row in table["rows"]}})
        for name, table in found.items()
    }


PUBLISHED = _read()


def published_tables(known: str, records: Rows) -> list[Table]:
    """Return the document's tables about this image set beside ours; tables without published numbers where it has none."""
    main = {row: found for row, found in records.items() if "tail=" not in row[1]}
    data = "cifar100" if known == "cifar100" else "cifar10"
    tables = {name: PUBLISHED[name] for name in (f"ood {data}", f"calibration {data}")}
    tables |= {name: PUBLISHED[name] for name in ("adaptation accuracy", "adaptation ece")}
    found = []
    for name, table in tables.items():
        trained_on = data if name.endswith(data) else "cifar100"
        if known != trained_on:
            title = table.title.partition(": ")[2].partition(" on networks")[0].partition(" of networks")[0]
            columns = table.columns if table.part == "corrupted" else {}
            table = replace(table, title=title, columns=columns, rows={})
        found.append(beside(table, main))
    return found


def beside(published: Published, records: Rows) -> Table:
    """Return a table of the document with our means over seeds, and our further columns behind its own."""
    parts = [record[published.part] for found in records.values() for record in found]
    ours = {name for part in parts for name in part} if published.part != "corrupted" else set()
    further = [
        name
        for name in sorted(ours - {*published.columns, "near", "far"})
        if any(published.ours(found, name) is not None for found in records.values())
    ]
    head: list[str] = []
    for title in published.columns.values():
        head += [title, "ours"] if published.rows else [title]
    rows = []
    for row in dict.fromkeys([*published.rows, *records]):
        cells: list[object] = [*row]
        found = records.get(row, ())
        numbers = published.rows.get(row, [None] * len(published.columns))
        for number, name in zip(numbers, published.columns, strict=True):
            if published.rows:
                cells.append(None if number is None else f"{number:.{published.digits}f}")
            cells.append(published.ours(found, name))
        rows.append([*cells, *(published.ours(found, name) for name in further)])
    return Table(("architecture", "row", *head, *(f"{name}, ours" for name in further)), rows, published.title)


def by_severity(records: Rows, metric: str, title: str) -> Table:
    """Return a metric under corruption, mean over corruptions and runs: a row for each network, a column for each severity."""
    levels = sorted({level for found in records.values() for record in found for level in record["corrupted"]})
    reader = Published(title, {}, {}, 4, "corrupted", metric)
    rows = [(*row, len(found), *(reader.ours(found, level) for level in levels)) for row, found in records.items()]
    names = [f"severity {level}" if level.isdigit() else "mean of all" for level in levels]
    return Table(("architecture", "row", "runs", *names), rows, title)
