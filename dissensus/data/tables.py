"""Tables of columns, from CSV or parquet, as numbers: text columns become one column for each of their values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Missing = Literal["error", "drop"]

MOST_LEVELS = 100
"""A text column with more different values than this is a name or free text, not a category."""


@dataclass(frozen=True)
class Columns:
    """How the columns of a table become features, so that another table can be read in the same way.

    Attributes:
        names: Columns that are read, in order.
        levels: For each text column its values; it becomes one 0/1 feature for each.
    """

    names: tuple[str, ...]
    levels: Mapping[str, tuple[str, ...]]

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features, in order.

        Example:
            >>> Columns(("age", "sex"), {"sex": ("f", "m")}).features
            ('age', 'sex=f', 'sex=m')
        """
        return tuple(
            feature
            for name in self.names
            for feature in (
                [f"{name}={level}" for level in self.levels[name]] if name in self.levels else [name]
            )
        )


def read_table(path: Path) -> tuple[Any, tuple[str, ...]]:
    """Read a CSV or parquet file as a pandas DataFrame with text column names; also return what was assumed."""
    pandas = _pandas(path)
    notes: tuple[str, ...] = ()
    if path.is_dir() or path.suffix == ".parquet":
        frame = _read_parquet(pandas, path)
    else:
        frame, notes = _read_csv(pandas, path)
    frame.columns = [str(name) for name in frame.columns]
    if frame.empty:
        raise ValueError(f"{path} holds no rows.")
    return frame, notes


def _pandas(path: Path) -> Any:
    try:
        import pandas
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"Reading {path.name} needs pandas, which this environment lacks. Install with: pip install 'dissensus[data]'"
        ) from None
    return pandas


def _read_parquet(pandas: Any, path: Path) -> Any:
    try:
        return pandas.read_parquet(path)
    except ImportError:
        raise ModuleNotFoundError(
            f"Reading {path.name} needs pyarrow, which this environment lacks. Install with: pip install 'dissensus[data]'"
        ) from None
    except (ValueError, OSError) as problem:
        raise ValueError(f"{path} cannot be read as parquet: {str(problem).splitlines()[0]}") from None


def _read_csv(pandas: Any, path: Path) -> tuple[Any, tuple[str, ...]]:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        first = file.readline()
    separator = "\t" if path.suffix == ".tsv" else max(",;\t", key=first.count)
    cells = [cell.strip().strip('"') for cell in first.strip().split(separator)]
    headless = bool(first.strip()) and all(_is_number(cell) for cell in cells)
    try:
        frame = pandas.read_csv(
            path, sep=separator, header=None if headless else 0, skipinitialspace=True, encoding="utf-8-sig"
        )
    except (ValueError, UnicodeDecodeError) as problem:  # pandas' own errors are ValueErrors
        raise ValueError(f"{path} cannot be read as a table: {str(problem).splitlines()[0]}") from None
    if not headless:
        return frame, ()
    return frame, (f"its first line holds numbers, so columns are called 0 to {len(cells) - 1}",)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def learn_columns(frame: Any, target: str | None, drop: Sequence[str], name: str) -> Columns:
    """Decide how the columns of a table become features."""
    for column in drop:
        _check_column(frame, column, name)
    names = tuple(column for column in frame.columns if column != target and column not in drop)
    if not names:
        raise ValueError(
            f"{name} has no column left for features; its columns are {', '.join(frame.columns)}."
        )
    levels = {column: _levels(frame[column], column) for column in names if not _is_numeric(frame[column])}
    return Columns(names, levels)


def _levels(values: Any, column: str) -> tuple[str, ...]:
    if values.dtype.kind in "mM":
        raise ValueError(
            f"Column {column!r} holds dates or times. Leave it out with drop, or make it a number first."
        )
    levels = tuple(sorted({str(value) for value in values.dropna()}))
    if len(levels) > MOST_LEVELS:
        raise ValueError(
            f"Column {column!r} holds {len(levels)} different texts, too many for a category (at most {MOST_LEVELS}). "
            f"Leave it out: drop = [{column!r}]."
        )
    return levels


def _is_numeric(values: Any) -> bool:
    from pandas.api.types import is_numeric_dtype

    return bool(is_numeric_dtype(values.dtype))


def features_of(frame: Any, columns: Columns, name: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return the features of a table, `(rows, features)`, and what is worth knowing about them."""
    parts, notes = [], []
    for column in columns.names:
        _check_column(frame, column, name)
        if column in columns.levels:
            part, note = _one_hot(frame[column], columns.levels[column], column)
            notes.extend(note)
        else:
            part = _numbers(frame[column], column, name)[:, None]
        parts.append(part)
    return torch.from_numpy(np.concatenate(parts, axis=1)), tuple(notes)


def _numbers(values: Any, column: str, name: str) -> np.ndarray:
    if not _is_numeric(values):
        text = next(str(value) for value in values if not _is_number(str(value)))
        raise ValueError(f"Column {column!r} must hold numbers, as in training; {name} holds {text!r} there.")
    return values.to_numpy(dtype=np.float32, na_value=np.nan)


def _one_hot(values: Any, levels: Sequence[str], column: str) -> tuple[np.ndarray, list[str]]:
    text = values.astype(str).to_numpy()
    hot = (text[:, None] == np.asarray(levels, dtype=object)[None, :]).astype(np.float32)
    new = sorted(set(text[hot.sum(1) == 0].tolist()))
    if not new:
        return hot, []
    shown = ", ".join(map(repr, new[:3])) + (", ..." if len(new) > 3 else "")
    return hot, [
        f"column {column!r} holds values that training never saw ({shown}), which are read as none of its own"
    ]


def target_of(frame: Any, target: str, name: str) -> tuple[Tensor, tuple[str, ...] | None]:
    """Return the target column, and the names of its classes where it holds text."""
    _check_column(frame, target, name)
    values = frame[target]
    if values.isna().any():
        row = int(values.isna().to_numpy().argmax())
        raise ValueError(
            f"Column {target!r} of {name} has {int(values.isna().sum())} missing values, the first in row {row}. "
            "Fill them in, or set missing = 'drop'."
        )
    if values.dtype.kind == "b" or not _is_numeric(values):
        return label_indices([str(value) for value in values])
    array = values.to_numpy()
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64)), None
    return torch.from_numpy(array.astype(np.float32)), None


def label_indices(labels: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Number text labels by their place in the sorted list of all.

    Example:
        >>> label_indices(["cat", "ant", "cat"])
        (tensor([1, 0, 1]), ('ant', 'cat'))
    """
    classes = tuple(sorted(set(labels)))
    place = {name: index for index, name in enumerate(classes)}
    return torch.tensor([place[label] for label in labels]), classes


def without_missing(
    frame: Any, wanted: Sequence[str], missing: Missing, name: str
) -> tuple[Any, tuple[str, ...]]:
    """Drop the rows in which a wanted column is empty, or refuse them."""
    holes = frame[[column for column in wanted if column in frame.columns]].isna()
    rows = holes.any(axis=1).to_numpy()
    if not rows.any():
        return frame, ()
    if missing == "error":
        column = holes.columns[int(holes.to_numpy()[rows.argmax()].argmax())]
        raise ValueError(
            f"{int(rows.sum())} of the {len(rows)} rows of {name} have missing values; the first is row {int(rows.argmax())}, "
            f"column {column!r}. Fill them in, or set missing = 'drop'."
        )
    if rows.all():
        raise ValueError(
            f"Every row of {name} has a missing value. Leave columns out with drop, or fill them in."
        )
    return frame[~rows], (f"{int(rows.sum())} of {len(rows)} rows with missing values left out",)


def _check_column(frame: Any, column: str, name: str) -> None:
    if column not in frame.columns:
        raise ValueError(f"{name} has no column {column!r}; its columns are {', '.join(frame.columns)}.")
