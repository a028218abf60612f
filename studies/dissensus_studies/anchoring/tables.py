"""The document's tables 6 to 9 (`published.json`) beside what was measured."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dissensus.html import Table
from dissensus_studies.harness.arm_log import Record

# Rows are named as those of `AnchorSetting.row`.
Row = tuple[str, str]
Rows = Mapping[Row, Sequence[Record]]
Read = Callable[[Record, str], float | None]


@dataclass(frozen=True)
class Published:
    """A table of the document.

    Attributes:
        title: What it shows.
        columns: What our sets or severities are called, to what the document calls them.
        rows: (architecture, row) to its numbers; None where the document has none.
        digits: Digits behind the point.
        part: Where a record has the columns that are ours alone: `"auroc"` or `"adaptation"`; None if there are none.
    """

    title: str
    columns: Mapping[str, str]
    rows: Mapping[Row, Sequence[float | None]]
    digits: int
    part: str | None


def _read() -> dict[str, Published]:
    found = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
    return {
        name: Published(**{**table, "rows": {(row[0], row[1]): row[2:] for row in table["rows"]}})
        for name, table in found.items()
    }


PUBLISHED = _read()


def auroc_of(score: str) -> Read:
    """Return a reader of the AUROC of a score on a set, in per cent."""

    def read(record: Record, name: str) -> float | None:
        found = record["auroc"].get(name, {}).get(score)
        return None if found is None or found[0] is None else 100 * found[0]

    return read


def under_corruption(metric: str) -> Read:
    """Return a reader of a metric at a severity, averaged over corruptions."""

    def read(record: Record, severity: str) -> float | None:
        found = record["corrupted"].get(severity, {}).get(metric)
        return None if found is None else found[0]

    return read


def adaptation(metric: str, factor: float = 1.0) -> Read:
    """Return a reader of a metric of the linear probe on a set."""

    def read(record: Record, name: str) -> float | None:
        found = record["adaptation"].get(name)
        return None if found is None else factor * found[metric]

    return read


def beside(published: Published, records: Rows, read: Read) -> Table:
    """Return a table of the document with our means over seeds, and our further columns behind its own.

    Args:
        published: The table.
        records: (architecture, row) to the records of all seeds.
        read: The quantity, of a record and a column.
    """

    def mean(row: Row, name: str) -> str | None:
        return _mean(records.get(row, ()), read, name, published.digits)

    ours = {
        name
        for found in records.values()
        for record in found
        for name in (record.get(published.part, {}) if published.part else ())
    }
    further = [
        name
        for name in sorted(ours - {*published.columns, "near", "far"})
        if any(mean(row, name) is not None for row in records)
    ]
    head: list[str] = []
    for title in published.columns.values():
        head += [title, "ours"] if published.rows else [title]
    rows = []
    for row in dict.fromkeys([*published.rows, *records]):
        cells: list[object] = [*row]
        numbers = published.rows.get(row, [None] * len(published.columns))
        for number, name in zip(numbers, published.columns, strict=True):
            if published.rows:
                cells.append(None if number is None else f"{number:.{published.digits}f}")
            cells.append(mean(row, name))
        rows.append([*cells, *(mean(row, name) for name in further)])
    return Table(("architecture", "row", *head, *(f"{name}, ours" for name in further)), rows, published.title)


def by_severity(records: Rows, metric: str, title: str) -> Table:
    """Return a metric under corruption, mean over corruptions and runs: a row for each network, a column for each severity."""
    levels = sorted({level for found in records.values() for record in found for level in record["corrupted"]})
    rows = [
        (*row, len(found), *(_mean(found, under_corruption(metric), level, 4) for level in levels))
        for row, found in records.items()
    ]
    names = [f"severity {level}" if level.isdigit() else "mean of all" for level in levels]
    return Table(("architecture", "row", "runs", *names), rows, title)


def _mean(records: Sequence[Record], read: Read, name: str, digits: int) -> str | None:
    values = [value for record in records if (value := read(record, name)) is not None]
    return f"{fmean(values):.{digits}f}" if values else None
