"""What users hand over as data (tensors, arrays, Datasets, DataLoaders), made into tensors or batches, and checked."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dissensus.data.features import CachedFeatures
from dissensus.data.rows import OnDisk, rows_at_once, rows_of
from dissensus.data.rows import as_tensor as as_tensor
from dissensus.randomness import seeded

Array: TypeAlias = Tensor | np.ndarray
Inputs: TypeAlias = Array | Dataset[Any] | DataLoader[Any]
Pairs: TypeAlias = tuple[Array, Array] | list[Array] | Dataset[Any] | DataLoader[Any]


def device_of(module: torch.nn.Module) -> torch.device:
    """Return where a module's tensors are; the CPU if it has none."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def input_batches(x: Inputs, batch_size: int) -> Iterator[Tensor]:
    """Yield inputs in batches, in order; targets that come with them are passed over."""
    if isinstance(x, DataLoader):
        for batch in x:
            yield first_of(batch)
        return
    if isinstance(x, CachedFeatures):
        yield from x.batches(batch_size)
        return
    if isinstance(x, Dataset) and not isinstance(x, TensorDataset):
        loader = DataLoader(x, batch_size=batch_size, generator=torch.Generator())
        for batch in loader:
            yield first_of(batch)
        return
    rows = x.tensors[0] if isinstance(x, TensorDataset) else rows_of(x, "x")
    if len(rows) == 0:
        raise ValueError("There is nothing to predict: `x` has no rows.")
    yield from rows.split(batch_size)


def num_batches(data: object, batch_size: int) -> int | None:
    """Return in how many batches inputs, or pairs of inputs and targets, come; None where only reading them would tell."""
    if isinstance(data, tuple) and len(data) == 2:
        data = data[0]
    if not isinstance(data, Tensor | np.ndarray | TensorDataset):
        return None
    return -(-len(data) // batch_size)


def pair_batches(data: Pairs, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) in batches, in order."""
    if isinstance(data, DataLoader):
        yield from (pair_of(batch) for batch in data)
    elif isinstance(data, CachedFeatures):
        yield from data.pairs(batch_size)
    elif (arrays := arrays_of(data)) is not None:
        x, y = arrays
        yield from zip(x.split(batch_size), y.split(batch_size), strict=True)
    else:
        assert isinstance(data, Dataset)
        yield from (
            pair_of(batch) for batch in DataLoader(data, batch_size=batch_size, generator=torch.Generator())
        )


def first_of(batch: Any) -> Tensor:
    """Return the inputs of a loader's batch."""
    return batch[0] if isinstance(batch, tuple | list) else batch


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a loader's batch, or say what came instead."""
    if (
        not isinstance(batch, tuple | list)
        or len(batch) != 2
        or not all(isinstance(part, Tensor) for part in batch)
    ):
        raise ValueError(
            f"A loader must give batches (inputs, targets) of tensors; got {type(batch).__name__}"
            + (f" of length {len(batch)}." if isinstance(batch, Sequence) else ".")
        )
    return batch[0], batch[1]


def arrays_of(data: Any) -> tuple[Tensor | OnDisk, Tensor] | None:
    """Return (inputs, targets) where data is a pair of arrays or a TensorDataset of two; None where it must be iterated.

    Inputs that lie in a file stay there.
    """
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Dataset | DataLoader):
        return None
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ValueError(
            "Data must be a pair (inputs, targets) of tensors or arrays, a Dataset or a DataLoader; got "
            f"{type(data).__name__}" + (f" of length {len(data)}." if isinstance(data, tuple | list) else ".")
        )
    return rows_of(data[0], "inputs"), as_tensor(data[1], "targets")


def all_inputs(data: Any, name: str) -> Tensor:
    """Return all inputs of any data as one tensor; targets are passed over."""
    if isinstance(data, tuple | list) and len(data) == 2 and not isinstance(data, TensorDataset):
        return as_tensor(data[0], name)
    if isinstance(data, Dataset | DataLoader):
        with seeded(0):
            return torch.cat(list(input_batches(data, 1024)))
    return as_tensor(data, name)


def check_pair(x: Tensor | OnDisk, y: Tensor, name: str) -> None:
    """Refuse data that cannot be trained on, in one sentence."""
    if len(x) == 0:
        raise ValueError(f"The {name} data is empty: inputs are shaped {tuple(x.shape)}.")
    if y.ndim == 0 or len(x) != len(y):
        raise ValueError(
            f"The {name} data needs one target for each input; got {len(x)} inputs and targets shaped {tuple(y.shape)}."
        )
    parts: tuple[tuple[str, Tensor | OnDisk], ...] = (("inputs", x), ("targets", y))
    for part, values in parts:
        if values.dtype.is_floating_point and (rows := _not_finite(values)):
            raise ValueError(
                f"The {name} {part} must be finite; {len(rows)} rows hold NaN or infinity, the first is row {rows[0]}. "
                "Impute or drop them."
            )


def _not_finite(values: Tensor | OnDisk) -> list[int]:
    """Return the rows that hold NaN or infinity; a part at a time, as the test needs several times its memory."""
    found: list[int] = []
    start = 0
    for part in values.split(rows_at_once(values)):
        finite = torch.isfinite(part)
        if not bool(finite.all()):
            bad = ~finite.reshape(len(part), -1).all(1)
            found += (bad.nonzero().flatten() + start).tolist()
        start += len(part)
    return found


def check_labels_fit(y: Tensor, num_classes: int, name: str) -> None:
    """Refuse class labels that the network has no output for."""
    if y.is_floating_point():
        if y.ndim < 2 or y.shape[-1] != num_classes:
            raise ValueError(
                f"The {name} targets must be class indices (integers) or class probabilities (rows, {num_classes}); got "
                f"{y.dtype} shaped {tuple(y.shape)}. For regression choose loss='mse' or 'gaussian_nll'."
            )
        return
    if y.ndim != 1:
        raise ValueError(
            f"The {name} labels must be one class index for each input; got shape {tuple(y.shape)}."
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"The {name} labels must lie in 0 to {num_classes - 1}, the network's outputs; got {low} to {high}. "
            "Renumber the classes or give the network more outputs."
        )


def collate(dataset: Dataset[Any], indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Load these items of a map-style Dataset as one batch."""
    return pair_of(default_collate([dataset[index] for index in indices]))
