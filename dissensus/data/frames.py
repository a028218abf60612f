"""CSV and parquet files as DataFrames of pandas, and the target among their columns."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, repeat, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dissensus._signatures import need
from dissensus.data.tables import columns_of, number_of, texts_of

# Quoted cells; numbers with a decimal comma; those whose comma cannot stand between thousands.
_QUOTED = re.compile(r'(?m)(^|[,;\t])( *)"(?:[^"]|"")*"')
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
_NO_THOUSANDS = re.compile(r"[+-]?(0+,\d+|\d{4,},\d+|\d+,(\d{1,2}|\d{4,}))([eE][+-]?\d+)?")
# How much of a file shows what separates its cells.
_HEAD = 1 << 16


class Part(NamedTuple):
    """Rows of a table: the number of the first, their columns, how much of the file is read, and columns as the file has them."""

    start: int
    frame: Any
    share: float  # from 0 to 1
    carried: Mapping[str, Any]


def read_table(path: Path, texts: Sequence[str] = ()) -> tuple[Any, tuple[str, ...]]:
    """Read a CSV or parquet file as a pandas DataFrame with text column names; also return what was assumed."""
    check_not_a_pipe(path)
    (part,) = table_parts(path, texts)
    return part.frame, () if _is_parquet(path) else _csv_options(path)[1]


def table_parts(
    path: Path, texts: Sequence[str] = (), rows: int | None = None, carried: Sequence[str] = ()
) -> Iterator[Part]:
    """Yield parts of a CSV or parquet file of so many rows, or all at once.

    `texts` are columns of words, whatever one part looks like. Those of `carried` that are there also come as the file has them:
    as lists of texts, or of parquet as arrays of pyarrow.
    """
    parquet = _is_parquet(path)
    need(f"Reading {path.name}", "data", "pandas", *["pyarrow"] * parquet)
    start = 0
    try:
        for frame, share, own in (
            _parquet_parts(path, rows, carried) if parquet else _csv_parts(path, texts, rows, carried)
        ):
            frame.columns = unique_names([str(name) for name in frame.columns])
            yield Part(start, frame, share, own)
            start += len(frame)
    except (ValueError, OSError, csv.Error) as problem:  # pandas' own errors are ValueErrors
        kind = "parquet" if parquet else "a table"
        raise ValueError(f"{path} cannot be read as {kind}: {str(problem).splitlines()[0]}") from None
    if start == 0:
        raise ValueError(f"{path} holds no rows.")


def _is_parquet(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() == ".parquet"


def check_not_a_pipe(path: Path) -> None:
    """Refuse what is no file: to open a pipe waits until somebody writes into it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is no file or folder but a pipe or a device. Write what it gives into a file first.")


def unique_names(names: Sequence[str]) -> list[str]:
    """Number the later ones of columns that share a name, as pandas does: label, label.1, label.2; a number that is taken is passed over.

    Example:
        >>> unique_names(["a", "a.1", "a", "a"])
        ['a', 'a.1', 'a.2', 'a.3']
    """
    taken, unique = set(names), dict[str, None]()
    for name in names:
        if name in unique:
            name = next(each for each in map(f"{name}.{{}}".format, count(1)) if each not in taken)
            taken.add(name)
        unique[name] = None
    return list(unique)


def _csv_options(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return how pandas is to read a CSV file, by its first lines; also what was assumed."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        head = file.readline() + file.read(_HEAD)
    separator = "\t" if path.suffix.lower() == ".tsv" else _separator(_QUOTED.sub(r"\1\2", head).split("\n"))
    options: dict[str, Any] = {"sep": separator, "header": 0, "skipinitialspace": True, "encoding": "utf-8-sig"}
    notes: tuple[str, ...] = ()
    if separator != ",":
        notes = _told_commas(head.split("\n")[:-1], separator)
    cells = next(csv.reader(head.split("\n")[:1], delimiter=separator, skipinitialspace=True), [])
    if cells and all(_is_number(cell.strip(), separator) for cell in cells):
        options["header"] = None
        notes = (*notes, f"its first line holds numbers, so columns are called 0 to {len(cells) - 1}")
    return options, notes


def _separator(lines: Sequence[str]) -> str:
    """Return what separates the cells of lines that have lost their quoted ones.

    Of what is in the first line: that which makes numbers of all its cells, or is in the next lines as often, or is there most often.
    """

    def fits(separator: str) -> tuple[bool, bool, int]:
        counts = {line.count(separator) for line in lines[:-1][:20] if line.strip()}
        numbers = separator != "," and all(_is_number(cell, separator) for cell in lines[0].split(separator))
        return numbers, counts == {lines[0].count(separator)}, lines[0].count(separator)

    return max((each for each in "\t;," if each in lines[0]), key=fits, default=",")


def _is_number(text: str, separator: str) -> bool:
    """Whether a cell is a number, where commas are not what separates cells also one with a decimal comma."""
    return number_of(text) is not None or (separator != "," and _DECIMAL_COMMA.fullmatch(text) is not None)


def _told_commas(lines: Sequence[str], separator: str) -> tuple[str, ...]:
    """Return what is to be said of commas in the numbers of a file's first lines."""
    rows = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    columns = [[cell.strip() for cell in column if cell.strip()] for column in zip_longest(*rows, fillvalue="")]
    told = [_check_commas(column[1:] or column) for column in columns]  # the first line may be names
    return tuple(f"commas in its numbers stand between thousands: {one}" for one in filter(None, told))[:1]


def _check_columns(frame: Any) -> None:
    """Refuse columns of numbers with decimal commas."""
    for place, kind in enumerate(frame.dtypes):
        if kind.kind == "O":
            _check_commas([str(cell).strip() for cell in frame.iloc[:, place].dropna().unique()])


def _check_commas(cells: Sequence[str]) -> str | None:
    """Refuse numbers with decimal commas, which would be words or a thousand times as large; return one with commas between thousands."""
    if not all(_is_number(cell, ";") for cell in cells):
        return None
    if told := next(filter(_NO_THOUSANDS.fullmatch, cells), None):
        raise ValueError(f"Its numbers have decimal commas ({told}). Write them with points.")
    return next((cell for cell in cells if "," in cell), None)


def _csv_parts(
    path: Path, texts: Sequence[str], rows: int | None, carried: Sequence[str]
) -> Iterator[tuple[Any, float, dict[str, Any]]]:
    import pandas

    options, _ = _csv_options(path)
    names = texts if options["header"] == 0 else [int(name) for name in texts if name.isdecimal()]
    own: Iterator[dict[str, Any]] | None = None
    with open(path, "rb") as file:
        # Not in pandas' own parts: there a column's cells would be numbers in one and texts in another.
        found = pandas.read_csv(file, chunksize=rows, low_memory=False, dtype=dict.fromkeys(names, str), **options)
        for frame in [found] if rows is None else found:
            if options["sep"] != ",":
                _check_columns(frame)
            own = own or _carried_cells(path, options, rows, frame, carried)
            yield frame, file.tell() / max(path.stat().st_size, 1), next(own)


def _carried_cells(
    path: Path, options: Mapping[str, Any], rows: int | None, frame: Any, carried: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield some columns of the file that a frame is the first part of, part by part, as their cells are written."""
    import pandas

    names = unique_names([str(name) for name in frame.columns])
    places = sorted({names.index(name) for name in carried if name in names})
    if not places:
        yield from repeat({})
    # Lines may begin with a cell that has no name; then columns cannot be chosen by their place.
    chosen = places if isinstance(frame.index, pandas.RangeIndex) else None
    with open(path, "rb") as file:
        found = pandas.read_csv(file, chunksize=rows, dtype=str, na_filter=False, usecols=chosen, **options)
        for part in [found] if rows is None else found:
            own = part.iloc[:, places] if chosen is None else part
            yield {names[place]: own.iloc[:, number].tolist() for number, place in enumerate(places)}


def _parquet_parts(path: Path, rows: int | None, carried: Sequence[str]) -> Iterator[tuple[Any, float, dict[str, Any]]]:
    if rows is None:
        import pandas

        yield pandas.read_parquet(path), 1.0, {}
        return
    from pyarrow import parquet

    # Buffered ahead, all that was read would stay in memory.
    with parquet.ParquetFile(path, pre_buffer=False) as file:
        done, names = 0, unique_names(file.schema_arrow.names)
        for batch in file.iter_batches(rows):
            done += len(batch)
            own = {name: batch.column(names.index(name)) for name in carried if name in names}
            yield batch.to_pandas(), done / max(file.metadata.num_rows, 1), own


def target_of(frame: Any, target: str) -> tuple[Tensor, tuple[str, ...] | None, np.ndarray]:
    """Return the targets that are there, the names of classes where they are words and not all numbers, and where they are missing."""
    values = columns_of(frame[[target]])[target]
    texts = texts_of(values)
    missing = np.array([text is None for text in texts])
    known = [text for text in texts if text is not None]
    numbers = [None] if values.dtype.kind == "b" else list(map(number_of, known))
    if not known or None in numbers:
        return (*label_indices(known), missing)
    array = np.array(numbers, dtype=np.float64)
    # Numbers that pandas made floats of only because some were missing are whole ones.
    floats = values.dtype.kind == "f" and not missing.any()
    whole = not floats and np.equal(np.floor(array), array).all()
    return torch.from_numpy(array.astype(np.int64 if whole else np.float32)), None, missing


def label_indices(labels: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Number text labels by their place in the sorted list of all; return that list too."""
    classes = tuple(sorted(set(labels)))
    place = {name: index for index, name in enumerate(classes)}
    return torch.tensor([place[label] for label in labels], dtype=torch.int64), classes
