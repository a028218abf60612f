"""CSV and parquet files as DataFrames of pandas, and the target among their columns."""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus._signatures import need
from dissensus.data.tables import columns_of, number_of, texts_of


def read_table(path: Path) -> tuple[Any, tuple[str, ...]]:
    """Read a CSV or parquet file as a pandas DataFrame with text column names; also return what was assumed."""
    check_not_a_pipe(path)
    ((_, frame, _),) = table_parts(path)
    return frame, () if _is_parquet(path) else _csv_options(path)[1]


def table_parts(path: Path, texts: Sequence[str] = (), rows: int | None = None) -> Iterator[tuple[int, Any, float]]:
    """Yield parts of a CSV or parquet file of so many rows, or all at once, after the number of the first row, with the share read.

    `texts` are columns of words, whatever one part looks like.
    """
    parquet = _is_parquet(path)
    need(f"Reading {path.name}", "data", "pandas", *["pyarrow"] * parquet)
    start = 0
    try:
        for frame, share in _parquet_parts(path, rows) if parquet else _csv_parts(path, texts, rows):
            frame.columns = unique_names([str(name) for name in frame.columns])
            yield start, frame, share
            start += len(frame)
    except (ValueError, OSError) as problem:  # pandas' own errors are ValueErrors
        kind = "parquet" if parquet else "a table"
        raise ValueError(f"{path} cannot be read as {kind}: {str(problem).splitlines()[0]}") from None
    if start == 0:
        raise ValueError(f"{path} holds no rows.")


def _is_parquet(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".parquet"


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
    """Return how pandas is to read a CSV file, by its first line; also what was assumed."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        first = file.readline()
    separator = "\t" if path.suffix == ".tsv" else max(",;\t", key=first.count)
    cells = [cell.strip().strip('"') for cell in first.strip().split(separator)]
    headless = bool(first.strip()) and all(number_of(cell) is not None for cell in cells)
    options = {"sep": separator, "header": None if headless else 0, "skipinitialspace": True}
    notes = (f"its first line holds numbers, so columns are called 0 to {len(cells) - 1}",) if headless else ()
    return {**options, "encoding": "utf-8-sig"}, notes


def _csv_parts(path: Path, texts: Sequence[str], rows: int | None) -> Iterator[tuple[Any, float]]:
    import pandas

    options, _ = _csv_options(path)
    named = {} if options["header"] is None else {"dtype": dict.fromkeys(texts, str)}
    with open(path, "rb") as file:
        # Not in pandas' own parts: there a column's cells would be numbers in one and texts in another.
        found = pandas.read_csv(file, chunksize=rows, low_memory=False, **options, **named)
        for frame in [found] if rows is None else found:
            yield frame, file.tell() / max(path.stat().st_size, 1)


def _parquet_parts(path: Path, rows: int | None) -> Iterator[tuple[Any, float]]:
    if rows is None:
        import pandas

        yield pandas.read_parquet(path), 1.0
        return
    from pyarrow import parquet

    # Buffered ahead, all that was read would stay in memory.
    with parquet.ParquetFile(path, pre_buffer=False) as file:
        done = 0
        for batch in file.iter_batches(rows):
            done += len(batch)
            yield batch.to_pandas(), done / max(file.metadata.num_rows, 1)


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
