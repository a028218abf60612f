"""Records of arms in, what pages of image studies have in common out: tables with intervals, means over seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from dissensus.html import Table
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.statistics import Summary


def with_interval(value: Sequence[float | None] | None) -> str | None:
    """Return `[value, low, high]` of a record as text; None stays None.

    Example:
        >>> with_interval([0.91234, 0.9, 0.92]).split()
        ['0.9123', '[0.9000,', '0.9200]']
    """
    if value is None or value[0] is None:
        return None
    middle, *ends = (None if each is None else f"{each:.4f}" for each in value)
    # Spaces that do not break keep a value and its interval on one line.
    return middle if None in ends or not ends else f"{middle}\u00a0[{ends[0]},\u00a0{ends[1]}]"


def at(*keys: str) -> Callable[[Any], Any]:
    """Return what reads a place of a record, keys one inside the other; it gives None where there is nothing."""
    return lambda record: reduce(lambda found, key: (found or {}).get(key), keys, record)


def arms_table(
    records: Mapping[str, Record], columns: Mapping[str, Callable[[Record], object]], caption: str = ""
) -> Table:
    """Return a row for each arm: its name, and what each column's function makes of its record, `[value, low, high]` as text."""
    cells = {name: [read(record) for read in columns.values()] for name, record in records.items()}
    rows = [(name, *(with_interval(v) if isinstance(v, list) else v for v in own)) for name, own in cells.items()]
    return Table(("arm", *columns), rows, caption)


def auroc_tables(records: Mapping[str, Record], captions: Mapping[str, str]) -> list[Table]:
    """Return a table for each score, by its caption: its AUROC on each unknown set that some arm has."""
    parts = dict.fromkeys(part for record in records.values() for part in record["auroc"])
    return [
        arms_table(records, {part: at("auroc", part, score) for part in parts}, caption)
        for score, caption in captions.items()
        if parts
    ]


def over_seeds(records: Iterable[tuple[Any, Record]], read: Callable[[Record], float]) -> dict[Any, Summary]:
    """Return a quantity's values over repeats for each key (a beta, a strength, ...), in order of first appearance.

    Example:
        >>> over_seeds([(0.0, {"a": 1.0}), (0.5, {"a": 4.0}), (0.0, {"a": 3.0})], lambda record: record["a"])[0.0].mean
        2.0
    """
    values: dict[Any, list[float]] = {}
    for key, record in records:
        values.setdefault(key, []).append(read(record))
    return {key: Summary(tuple(found)) for key, found in values.items()}
