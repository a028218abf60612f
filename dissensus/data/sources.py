"""What users hand over as data (tensors, arrays, Datasets, DataLoaders), made into tensors or batches, and checked."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dissensus.data.features import CachedFeatures
from dissensus.data.rows import OnDisk, Rows, rows_at_once, tree_rows
from dissensus.data.rows import as_tensor as as_tensor
from dissensus.data.trees import Batch, Tree, batch_of, is_tree, join_rows, plain
from dissensus.randomness import seeded

Array: TypeAlias = Tensor | np.ndarray
# One array, or several as a network takes them: a tuple, a dictionary, a dataclass.
InputTree: TypeAlias = Array | tuple[Any, ...] | Mapping[str, Any] | Tree
Inputs: TypeAlias = InputTree | Dataset[Any] | DataLoader[Any]
# (inputs, targets), or (inputs, targets, weights of the examples).
Pairs: TypeAlias = tuple[Any, Array] | tuple[Any, Array, Array] | list[Any] | Dataset[Any] | DataLoader[Any]
Triple: TypeAlias = tuple[Batch, Tensor, Tensor | None]


def device_of(module: torch.nn.Module) -> torch.device:
    """Return where a module's tensors are; the CPU if it has none."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def input_batches(x: Inputs, batch_size: int) -> Iterator[Batch]:
    """Yield inputs in batches, in order; targets that come with them in a Dataset or loader are passed over."""
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
    rows = x.tensors[0] if isinstance(x, TensorDataset) else tree_rows(x, "x")
    if len(rows) == 0:
        raise ValueError("There is nothing to predict: `x` has no rows.")
    yield from rows.split(batch_size)


def num_batches(data: object, batch_size: int) -> int | None:
    """Return in how many batches inputs come; None where only reading them would tell."""
    if is_tree(data):
        data = next(iter(tree_leaves(plain(data))), None)
    if not isinstance(data, Tensor | np.ndarray | TensorDataset):
        return None
    return -(-len(data) // batch_size)


def pair_batches(data: Pairs, batch_size: int) -> Iterator[tuple[Batch, Tensor]]:
    """Yield (inputs, targets) in batches, in order; weights that come with them are passed over."""
    for x, y, _ in weighted_batches(data, batch_size):
        yield x, y


def weighted_batches(data: Pairs, batch_size: int) -> Iterator[Triple]:
    """Yield (inputs, targets, weights) in batches, in order; weights are None where the data has none."""
    if isinstance(data, DataLoader):
        yield from map(triple_of, data)
    elif isinstance(data, CachedFeatures):
        yield from ((x, y, None) for x, y in data.pairs(batch_size))
    elif (arrays := arrays_of(data)) is not None:
        x, y, weights = arrays
        shares = repeat(None) if weights is None else weights.split(batch_size)
        yield from zip(x.split(batch_size), y.split(batch_size), shares, strict=False)
    else:
        assert isinstance(data, Dataset)
        loader = DataLoader(data, batch_size=batch_size, generator=torch.Generator())
        yield from map(triple_of, loader)


def first_of(batch: Any) -> Batch:
    """Return the inputs of a loader's batch."""
    return batch_of(batch[0] if isinstance(batch, tuple | list) else batch)


def triple_of(batch: Any) -> Triple:
    """Return inputs, targets and weights (None where there are none) of a loader's batch, or say what came instead."""
    if isinstance(batch, tuple | list) and len(batch) in (2, 3):
        x, (y, *rest) = batch_of(batch[0]), batch[1:]
        weights = rest[0] if rest else None
        if all(isinstance(part, Tensor) for part in (*tree_leaves(x), y, *rest)):
            return x, y, weights
    raise ValueError(
        "A loader must give batches (inputs, targets) or (inputs, targets, weights) of tensors, where inputs may be a tuple or "
        f"dictionary of tensors; got {type(batch).__name__}"
        + (f" of length {len(batch)}." if isinstance(batch, Sequence) else ".")
    )


def arrays_of(data: Any) -> tuple[Rows, Tensor, Tensor | None] | None:
    """Return (inputs, targets, weights or None) where data is such arrays or a TensorDataset; None where it must be iterated.

    Inputs that lie in a file stay there.
    """
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Dataset | DataLoader):
        return None
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        raise ValueError(
            "Data must be a pair (inputs, targets) of tensors or arrays, with weights of the examples as a third part if you like, a "
            f"Dataset or a DataLoader; got {type(data).__name__}"
            + (f" of length {len(data)}." if isinstance(data, tuple | list) else ".")
        )
    weights = as_tensor(data[2], "weights") if len(data) == 3 else None
    return tree_rows(data[0], "inputs"), as_tensor(data[1], "targets"), weights


def all_inputs(data: Any, name: str) -> Any:
    """Return all inputs of any data as one tensor (a `Tree` where inputs are several); targets are passed over."""
    if isinstance(data, tuple | list) and len(data) == 2 and not isinstance(data, TensorDataset):
        return _in_memory(tree_rows(data[0], name))
    if isinstance(data, Dataset | DataLoader):
        with seeded(0):
            return join_rows(list(input_batches(data, 1024)))
    return _in_memory(tree_rows(data, name))


def _in_memory(rows: Rows) -> Batch:
    if isinstance(rows, Tree):
        return rows.map(_in_memory)
    return rows if isinstance(rows, Tensor) else rows.to(torch.device("cpu"))


def check_weights(weights: Tensor | None, count: int, name: str) -> None:
    """Refuse weights of examples that are not one finite number of at least zero for each, some of them above."""
    if weights is None:
        return
    usable = weights.shape == (count,) and not weights.is_complex()
    if (
        not usable
        or not bool((torch.isfinite(weights) & (weights >= 0)).all())
        or not bool((weights > 0).any())
    ):
        raise ValueError(
            f"The {name} weights must be one number for each of {count} examples, none negative, not all zero; got "
            f"{weights.dtype} shaped {tuple(weights.shape)}"
            + (f" from {float(weights.min()):g} to {float(weights.max()):g}." if usable else ".")
        )


def check_pair(x: Rows, y: Tensor, name: str) -> None:
    """Refuse data that cannot be trained on, in one sentence."""
    if len(x) == 0:
        raise ValueError(f"The {name} data is empty: inputs are shaped {tuple(x.shape)}.")
    if y.ndim == 0 or len(x) != len(y):
        raise ValueError(
            f"The {name} data needs one target for each input; got {len(x)} inputs and targets shaped {tuple(y.shape)}."
        )
    inputs: dict[str, Any] = {"inputs": x}
    if isinstance(x, Tree):
        inputs = {f"inputs ({part})": leaf for part, leaf in zip(x.names(), x.leaves, strict=True)}
    for part, values in {**inputs, "targets": y}.items():
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
                f"{y.dtype} shaped {tuple(y.shape)}. For regression pass objective=Independent('mse') or Independent('gaussian_nll')."
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


def collate(dataset: Dataset[Any], indices: Sequence[int]) -> Triple:
    """Load these items of a map-style Dataset as one batch."""
    return triple_of(default_collate([dataset[index] for index in indices]))
