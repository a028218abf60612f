"""An exported file, and what requests and answers are to it: rows in, arrays through, rows out."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dissensus.data.tables import TableEncoder
from dissensus.onnx_files import Session

Arrays = dict[str, NDArray[Any]]

# What onnxruntime calls tensor(float) and so on: its name in KServe's protocol, numpy's type, and the kinds of numbers it takes.
_DATATYPES = {
    "tensor(float)": ("FP32", np.float32, "iuf"),
    "tensor(double)": ("FP64", np.float64, "iuf"),
    "tensor(float16)": ("FP16", np.float16, "iuf"),
    "tensor(int64)": ("INT64", np.int64, "iu"),
    "tensor(int32)": ("INT32", np.int32, "iu"),
    "tensor(uint8)": ("UINT8", np.uint8, "iu"),
    "tensor(bool)": ("BOOL", np.bool_, "iub"),
}


class BadInput(ValueError):
    """What a request got wrong, in one sentence."""


@dataclass(frozen=True)
class Field:
    """One input or output of a file."""

    name: str
    datatype: str  # as KServe's protocol calls it
    dtype: Any  # the same for numpy
    kinds: str  # of numbers that it takes, as numpy names them
    shape: tuple[int | None, ...]  # of one row; None where an axis is free

    @classmethod
    def of(cls, value: Any) -> "Field":
        """Describe what onnxruntime lists."""
        if value.type not in _DATATYPES:
            raise ValueError(f"{value.name!r} of the file is a {value.type}, which is not served.")
        shape = tuple(size if isinstance(size, int) else None for size in value.shape[1:])
        return cls(value.name, *_DATATYPES[value.type], shape)

    def to_json(self) -> dict[str, Any]:
        """Return it as the protocol lists it; -1 is an axis of any size."""
        shape = [-1, *(-1 if n is None else n for n in self.shape)]
        return {"name": self.name, "datatype": self.datatype, "shape": shape}

    def tensor(self, values: NDArray[Any]) -> dict[str, Any]:
        """Return an answer as the protocol has it."""
        shape = list(values.shape)
        return {"name": self.name, "datatype": self.datatype, "shape": shape, "data": values.ravel().tolist()}

    def array(self, values: Any, rows: int | None = None, shape: Sequence[int] | None = None) -> NDArray[Any]:
        """Return numbers from a request, nested as they are or in a shape that they have, as an array `(rows, ...)`."""
        wanted = f"{self.name!r} takes rows of {_described(self.shape)}"
        try:
            array = np.asarray(values)
        except (ValueError, OverflowError):
            raise BadInput(f"{wanted}; not all of these rows have one shape.") from None
        if array.dtype.kind not in self.kinds or ("b" not in self.kinds and _has_booleans(values)):
            raise BadInput(f"{wanted}; it must hold {'numbers' if self.floats else 'whole numbers'} only.")
        array = self._shaped(array, shape)
        if not _fits(array.shape, (None, *self.shape)):
            raise BadInput(f"{wanted}; got an array shaped {list(array.shape)}.")
        if len(array) != (rows or max(len(array), 1)):
            raise BadInput(f"{wanted}, {rows or 'at least one'} of them; got {len(array)}.")
        return self._converted(array)

    def _shaped(self, array: NDArray[Any], shape: Sequence[int] | None) -> NDArray[Any]:
        if shape is None:
            return array
        if array.size != (count := prod(shape)) or array.ndim not in (1, len(shape)):
            raise BadInput(f'"data" of {self.name!r} must have {count} numbers, as its shape says; got {array.size}.')
        return array.reshape(shape)

    @property
    def floats(self) -> bool:
        """Whether it holds fractions."""
        return "f" in self.kinds

    def _converted(self, array: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            found = array.astype(self.dtype)
        fits, kind = (np.isfinite(found), "finite") if self.floats else (found == array, "whole")
        if not fits.all():
            row = int(np.argwhere(~fits)[0][0])
            raise BadInput(f"{self.name!r} must hold {kind} numbers of {self.datatype}; row {row} does not.")
        return found


def _has_booleans(values: Any) -> bool:
    """Whether lists hold true or false, which beside numbers numpy would read as 1 and 0."""
    if not isinstance(values, list):
        return False
    kinds = set(map(type, values))
    return bool in kinds or (list in kinds and any(map(_has_booleans, values)))


def _fits(given: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(given) == len(wanted) and all(n is None or n == m for n, m in zip(wanted, given, strict=True))


def _described(shape: Sequence[int | None]) -> str:
    if len(shape) == 1:
        return f"{'any number of' if shape[0] is None else shape[0]} values"
    return "one value" if not shape else " x ".join("any" if n is None else str(n) for n in shape) + " values"


class Model:
    """An exported file that answers requests, with so many processor threads; 0 for all."""

    def __init__(self, path: str | Path, threads: int = 0) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"There is no file {self.path}. Write one with: dissensus export RUN --to onnx")
        try:
            self._session = Session(self.path, threads)
        except Exception as problem:
            raise ValueError(f"{self.path} cannot be read as ONNX: {str(problem).splitlines()[0]}") from None
        self.facts = self._session.facts
        if "dissensus" not in self.facts:
            raise ValueError(f"{self.path} was not written by dissensus export, so its outputs cannot be told.")
        self.inputs = {name: Field.of(each) for name, each in self._session.inputs.items()}
        self.outputs = {name: Field.of(each) for name, each in self._session.outputs.items()}
        self.classes: list[str] | None = self.facts.get("classes")
        self.limit: float | None = self.facts.get("false_alarms")
        columns = self.facts.get("columns")
        # Reads rows of named columns, where the file was made from a table.
        self.table = None if columns is None else TableEncoder.from_json(columns)

    def run(self, feed: Arrays) -> Arrays:
        """Return the outputs of a batch."""
        return self._session.run(feed)

    def read_rows(self, rows: list[Any]) -> Arrays:
        """Return the inputs of `/score`: one row or more, each an array, or an object of columns or of inputs."""
        if self.table is not None:
            return {"x": self._encode(rows)}
        if len(self.inputs) == 1 and not isinstance(rows[0], dict):
            ((name, field),) = self.inputs.items()
            return {name: field.array(rows)}
        for number, row in enumerate(rows):
            if not isinstance(row, dict) or row.keys() != self.inputs.keys():
                wanted, got = ", ".join(map(repr, self.inputs)), repr(row)
                raise BadInput(f"Each row must be an object with {wanted}; row {number} is {got:.200}.")
        return {name: field.array([row[name] for row in rows], len(rows)) for name, field in self.inputs.items()}

    def _encode(self, rows: list[Any]) -> NDArray[Any]:
        """Return rows of named columns as the numbers that the file takes, missing values as NaN."""
        assert self.table is not None
        names = self.table.names
        known = {column.name for column in self.table.columns} | {self.facts.get("target")}
        named = [self._named(row, number, names, known) for number, row in enumerate(rows)]
        table = {name: [row[name] for row in named] for name in names}
        try:
            codes, problems = self.table.codes(table)
        except (ValueError, OverflowError):
            raise BadInput("The rows hold numbers that are too large.") from None
        if problems:
            row, why = next(iter(problems.items()))
            raise BadInput(f"Row {row} cannot be read: {why}.")
        return codes.astype(self.inputs["x"].dtype)

    def _named(self, row: Any, number: int, names: tuple[str, ...], known: set[Any]) -> dict[str, Any]:
        if isinstance(row, list) and len(row) == len(names):
            row = dict(zip(names, row, strict=True))
        if not isinstance(row, dict):
            raise BadInput(
                f"Each row must be an object by name of column, or a list of {len(names)} values; row {number} is neither."
            )
        if unknown := row.keys() - known:
            raise BadInput(f"Row {number} has a column {min(unknown)[:60]!r}, which training had not.")
        if missing := [name for name in names if name not in row]:
            raise BadInput(f"Row {number} lacks the column {missing[0]!r}; null says that its value is missing.")
        for name, value in row.items():
            if not isinstance(value, str | int | float | None):
                raise BadInput(f"Column {name!r} of row {number} must be a number, a text or null.")
        return row

    def answers(self, found: Arrays, members: bool) -> list[dict[str, Any]]:
        """Return one object a row, for `/score`."""
        columns = {name: values.tolist() for name, values in found.items() if members or name != "members"}
        answers = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        for answer in answers:
            values = answer["prediction"]
            if self.facts["task"] == "classification":
                best = max(range(len(values)), key=values.__getitem__)
                answer |= {"probabilities": values, "prediction": self.classes[best] if self.classes else best}
            elif len(values) == 1:
                answer["prediction"] = values[0]
        return answers
