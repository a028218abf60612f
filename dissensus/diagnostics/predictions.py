"""A file of stored member outputs and targets in; tensors to diagnose out."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

OUTPUT_NAMES = ("outputs", "logits", "predictions")
TARGET_NAMES = ("targets", "target", "labels", "label", "y")
TRAINING_NAMES = ("training_outputs", "training_targets")

_COLUMN = re.compile(r"(?:output|member)_(\d+)(?:_(\d+))?")


class Predictions(NamedTuple):
    """Member outputs `(members, batch, ...)`, and targets; and the same of training data, where a file has them."""

    outputs: Tensor
    targets: Tensor
    training: tuple[Tensor, Tensor] | None = None

    @property
    def loss(self) -> str:
        """The loss that such targets have: cross-entropy for whole numbers beside several outputs, else squared error."""
        classes = (
            not self.targets.is_floating_point() and self.outputs.ndim == 3 and self.outputs.shape[-1] > 1
        )
        return "cross_entropy" if classes else "mse"


def read_predictions(path: Path | str) -> Predictions:
    """Read stored predictions.

    | file | outputs | targets |
    |---|---|---|
    | `.npz` | array `outputs` (or `logits`), `(members, batch, ...)` | array `targets` (or `labels`, `y`) |
    | `.parquet`, `.csv` | columns `output_MEMBER_CLASS`, or `output_MEMBER` | column `target` (or `label`, `y`) |

    Members and classes are counted from 0; tables have a row an input. Arrays `training_outputs` and `training_targets` of a `.npz` are
    outputs on data that every member was trained on.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/p.npz", outputs=np.zeros((3, 8, 2)), targets=np.arange(8) % 2)
        ...     found = read_predictions(f"{folder}/p.npz")
        >>> found.outputs.shape, found.loss
        (torch.Size([3, 8, 2]), 'cross_entropy')
    """
    source = Path(path)
    if not source.is_file():
        raise ValueError(f"There is no file {source}.")
    readers = {".npz": _read_npz, ".parquet": _read_table, ".csv": _read_table}
    if source.suffix not in readers:
        raise ValueError(
            f"Predictions are read from {', '.join(readers)}; got {source.name!r}. For a run, give its folder."
        )
    held_out = _pair(*readers[source.suffix](source), source)
    training = _read_training(source) if source.suffix == ".npz" else None
    return Predictions(*held_out, None if training is None else _pair(*training, source))


def _pair(outputs: Any, targets: Any, source: Path) -> tuple[Tensor, Tensor]:
    pair = _numbers(outputs, "outputs", source), _numbers(targets, "targets", source)
    if pair[0].ndim < 2 or len(pair[1]) != pair[0].shape[1]:
        raise ValueError(
            f"Outputs in {source.name} must be shaped (members, batch, ...), with a target for each of the batch; got "
            f"{tuple(pair[0].shape)} and targets {tuple(pair[1].shape)}."
        )
    return pair


def _numbers(values: Any, name: str, source: Path) -> Tensor:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"The {name} in {source.name} must be numbers; got {array.dtype}. Number the classes from 0."
        )
    real = name == "outputs" or array.dtype.kind == "f"
    # A copy: what pandas and npz files give may not be written to, which torch warns about.
    return torch.from_numpy(np.array(array, dtype=np.float64 if real else np.int64, order="C"))


def _read_npz(source: Path) -> tuple[Any, Any]:
    with np.load(source, allow_pickle=False) as arrays:
        outputs, targets = (_first(arrays.files, names, source) for names in (OUTPUT_NAMES, TARGET_NAMES))
        return arrays[outputs], arrays[targets]


def _read_training(source: Path) -> tuple[Any, Any] | None:
    with np.load(source, allow_pickle=False) as arrays:
        there = [name for name in TRAINING_NAMES if name in arrays.files]
        if len(there) == 1:
            raise ValueError(
                f"{source.name} has {there[0]} alone; give {' and '.join(TRAINING_NAMES)}, or neither."
            )
        return (arrays[there[0]], arrays[there[1]]) if there else None


def _read_table(source: Path) -> tuple[Any, Any]:
    import pandas as pd

    frame = pd.read_parquet(source) if source.suffix == ".parquet" else pd.read_csv(source)
    columns = {
        tuple(match.groups()): name for name in frame.columns if (match := _COLUMN.fullmatch(str(name)))
    }
    members = sorted({int(member) for member, _ in columns})
    outputs = sorted({int(output) for _, output in columns if output is not None})
    # One output a member has no second number.
    seconds: list[str | None] = [*map(str, outputs)] or [None]
    wanted = [(str(member), second) for member in members for second in seconds]
    if not columns or set(wanted) != set(columns):
        raise ValueError(
            f"{source.name} must have columns output_0_0, output_0_1, ... (member, then class), or output_0, output_1, ... "
            f"(member), without gaps; it has {', '.join(map(str, frame.columns[:8]))}."
        )
    values = np.stack([frame[columns[key]].to_numpy() for key in wanted])
    shaped = values.reshape(len(members), -1, len(frame)).transpose(0, 2, 1)
    return shaped, frame[_first(list(frame.columns), TARGET_NAMES, source)].to_numpy()


def _first(found: list[str], names: tuple[str, ...], source: Path) -> str:
    for name in names:
        if name in found:
            return name
    raise ValueError(
        f"{source.name} has none of {', '.join(names)}; it has {', '.join(map(str, found[:8]))}."
    )
