"""What users hand over as data (tensors, arrays, Datasets, DataLoaders): made into tensors or batches, and checked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from dissensus.data.features import CachedFeatures
from dissensus.data.fingerprints import Fingerprint
from dissensus.data.trees import (
    Batch,
    OnDisk,
    Rows,
    Tree,
    as_tensor,
    batch_of,
    is_tree,
    join_rows,
    plain,
    rows_at_once,
    tree_rows,
)
from dissensus.randomness import derive, each_seeded, seeded

Array: TypeAlias = Tensor | np.ndarray
# One array, or several as a network takes them: a tuple, a dictionary, a dataclass.
InputTree: TypeAlias = Array | tuple[Any, ...] | Mapping[str, Any] | Tree
Inputs: TypeAlias = InputTree | Dataset[Any] | DataLoader[Any]
# (inputs, targets), or (inputs, targets, weights of the examples).
Pairs: TypeAlias = tuple[Any, Array] | tuple[Any, Array, Array] | list[Any] | Dataset[Any] | DataLoader[Any]
Triple: TypeAlias = tuple[Batch, Tensor, Tensor | None]


def device_named(device: str | torch.device) -> torch.device:
    """Return the device that was asked for, `"auto"` being a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"`device` must be 'auto', 'cpu', 'cuda' or 'cuda:N'; got {device!r}.") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' was asked for and this machine has no CUDA device. Use device='auto'.")
    return target


def device_of(module: torch.nn.Module) -> torch.device:
    """Return where a module's tensors are; the CPU if it has none."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def input_batches(x: Inputs, batch_size: int) -> Iterator[Batch]:
    """Yield inputs in batches, in order; targets that come with them in a Dataset or loader are passed over."""
    if isinstance(x, CachedFeatures):
        yield from x.batches(batch_size)
    elif (loader := _loader_of(x, batch_size)) is not None:
        yield from map(first_of, each_seeded(loader, 0))
    else:
        rows = x.tensors[0] if isinstance(x, TensorDataset) else tree_rows(x, "x")
        if len(rows) == 0:
            raise ValueError("There is nothing to predict: `x` has no rows.")
        yield from rows.split(batch_size)


def _loader_of(data: Any, batch_size: int) -> DataLoader[Any] | None:
    """Return what gives the batches of data that must be iterated; None for arrays."""
    if isinstance(data, Dataset) and not isinstance(data, TensorDataset):
        return DataLoader(data, batch_size=batch_size, generator=torch.Generator())
    return data if isinstance(data, DataLoader) else None


def num_batches(data: object, batch_size: int) -> int | None:
    """Return in how many batches inputs come; None where only reading them would tell."""
    if is_tree(data):
        data = next(iter(tree_leaves(plain(data))), None)
    if not isinstance(data, Tensor | np.ndarray | TensorDataset):
        return None
    return None if getattr(data, "ndim", 1) == 0 else -(-len(data) // batch_size)


def pair_batches(data: Pairs, batch_size: int) -> Iterator[tuple[Batch, Tensor]]:
    """Yield (inputs, targets) in batches, in order; weights that come with them are passed over."""
    for x, y, _ in weighted_batches(data, batch_size):
        yield x, y


def weighted_batches(data: Pairs, batch_size: int) -> Iterator[Triple]:
    """Yield (inputs, targets, weights) in batches, in order; weights are None where the data has none."""
    if isinstance(data, CachedFeatures):
        yield from ((x, y, None) for x, y in data.pairs(batch_size))
    elif (loader := _loader_of(data, batch_size)) is not None:
        yield from map(triple_of, each_seeded(loader, 0))
    else:
        arrays = arrays_of(data)
        assert arrays is not None
        x, y, weights = arrays
        shares = repeat(None) if weights is None else weights.split(batch_size)
        yield from zip(x.split(batch_size), y.split(batch_size), shares, strict=False)


def _parts(batch: Any) -> Any:
    """Return a batch as (inputs, targets) where it is a dictionary with `labels`, as in Hugging Face's data sets."""
    if not isinstance(batch, Mapping) or "labels" not in batch:
        return batch
    return {name: part for name, part in batch.items() if name != "labels"}, batch["labels"]


def first_of(batch: Any) -> Batch:
    """Return the inputs of a loader's batch."""
    batch = _parts(batch)
    return batch_of(batch[0] if isinstance(batch, tuple | list) else batch)


def triple_of(batch: Any) -> Triple:
    """Return inputs, targets and weights (None where there are none) of a loader's batch, or say what came instead."""
    batch = _parts(batch)
    if isinstance(batch, tuple | list) and len(batch) in (2, 3):
        x, (y, *rest) = batch_of(batch[0]), batch[1:]
        weights = rest[0] if rest else None
        if all(isinstance(part, Tensor) for part in (*tree_leaves(x), y, *rest)):
            return x, y, weights
    raise ValueError(
        "A loader must give batches (inputs, targets) or (inputs, targets, weights) of tensors, where inputs may be a tuple or "
        f"dictionary of tensors, or one dictionary with `labels` in it; got {type(batch).__name__}"
        + (f" of length {len(batch)}." if isinstance(batch, Sequence) else ".")
    )


def arrays_of(data: Any) -> tuple[Rows, Tensor, Tensor | None] | None:
    """Return (inputs, targets, weights or None) of arrays, which may lie in files, or a TensorDataset; None for other data."""
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
    if isinstance(data, Dataset | DataLoader):
        with seeded(0):
            return join_rows(list(input_batches(data, 1024)))
    pair = isinstance(data, tuple | list) and len(data) == 2
    rows = tree_rows(data[0] if pair else data, name)
    return tree_map(lambda part: part.to(torch.device("cpu")) if isinstance(part, OnDisk) else part, rows)


def check_weights(weights: Tensor | None, count: int, name: str) -> None:
    """Refuse weights of examples that are not one finite number of at least zero for each, some of them above."""
    if weights is None:
        return
    usable = weights.shape == (count,) and not weights.is_complex()
    if not usable or not bool((torch.isfinite(weights) & (weights >= 0)).all()) or not bool((weights > 0).any()):
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
        raise ValueError(f"The {name} data needs one target for each of {len(x)} inputs; got shape {tuple(y.shape)}.")
    inputs = [(f"inputs ({part})", leaf) for part, leaf in x.named()] if isinstance(x, Tree) else [("inputs", x)]
    for part, values in (*inputs, ("targets", y)):
        if values.dtype.is_floating_point and (rows := not_finite(values)):
            raise ValueError(
                f"The {name} {part} must be finite; {len(rows)} rows hold NaN or infinity, the first is row {rows[0]}. "
                "Impute or drop them."
            )


def not_finite(values: Tensor | OnDisk) -> list[int]:
    """Return the rows that hold NaN or infinity; a part at a time, as the test needs several times its memory."""
    parts = values.split(rows_at_once(values))
    bad = torch.cat([~torch.isfinite(part).reshape(len(part), -1).all(1) for part in parts])
    return bad.nonzero().flatten().tolist()


def check_labels_fit(y: Tensor, num_classes: int, name: str) -> None:
    """Refuse class labels that the network has no output for."""
    if y.is_floating_point():
        if y.ndim != 2 or y.shape[-1] != num_classes:
            raise ValueError(
                f"The {name} targets must be class indices (integers) or class probabilities (rows, {num_classes}); got "
                f"{y.dtype} shaped {tuple(y.shape)}. For regression pass objective=Independent('mse') or Independent('gaussian_nll')."
            )
        return
    if y.ndim != 1:
        raise ValueError(
            f"The {name} labels must be one class index for each input; got shape {tuple(y.shape)}. "
            "For several labels an input pass objective=Independent('binary_cross_entropy')."
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"The {name} labels must lie in 0 to {num_classes - 1}, the network's outputs; got {low} to {high}. "
            "Renumber the classes or give the network more outputs."
        )


def class_targets(targets: Tensor, num_classes: int) -> Tensor:
    """Return class probabilities `(..., batch, classes)` for class indices; soft labels are returned as they are."""
    if targets.is_floating_point():
        return targets
    # Not F.one_hot: it looks at the values, which a recorded or captured step cannot.
    return (targets.unsqueeze(-1) == torch.arange(num_classes, device=targets.device)).to(torch.float32)


def collate(dataset: Dataset[Any], indices: Sequence[int]) -> Triple:
    """Load these items of a map-style Dataset as one batch."""
    return triple_of(default_collate([dataset[index] for index in indices]))


InOrder: TypeAlias = Iterator[tuple[Batch, Tensor | None]]


@dataclass(frozen=True)
class Arrays:
    """Data in order: inputs, which may lie in a file, and targets if there are any; every pass is the same."""

    x: Any
    y: Tensor | None
    batch_size: int

    def __len__(self) -> int:
        return len(self.x)

    def load(self, rows: range, number: int) -> InOrder:
        """Yield these rows as batches, as they are in pass `number`."""
        for start in rows[:: self.batch_size]:
            part = slice(start, min(start + self.batch_size, rows.stop))
            yield self.x[part], None if self.y is None else self.y[part]

    def digest(self) -> str:
        """Return a hash of everything."""
        return _digest(self.load(range(len(self)), 0))


class _Seeded(Dataset[Any]):
    """The items of a Dataset; what is random in them is a function of (seed, pass, index)."""

    def __init__(self, dataset: Dataset[Any], key: int) -> None:
        self.dataset, self.key = dataset, key

    def __getitem__(self, index: int) -> Any:
        with seeded(derive(self.key, index), alone=True):
            return self.dataset[index]


@dataclass(frozen=True)
class Items:
    """Data in order: a map-style Dataset, and how its items become a batch; loaded ahead if there are workers."""

    dataset: Dataset[Any]
    batch_size: int
    key: int
    workers: int
    collate: Callable[[list[Any]], Any] | None = None

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def load(self, rows: Sequence[int], number: int) -> InOrder:
        """Yield these items as batches, as they are in pass `number`."""
        loader: DataLoader[Any] = DataLoader(
            _Seeded(self.dataset, derive(self.key, "items", number)),
            self.batch_size,
            sampler=rows,
            num_workers=self.workers if len(rows) > _LOOKED_AT else 0,
            collate_fn=self.collate,
            generator=torch.Generator(),
        )
        yield from map(_pair, loader)

    def digest(self) -> str:
        """Return a hash of the number of items and of some that lie evenly among them."""
        some = np.linspace(0, len(self) - 1, min(_LOOKED_AT, len(self))).astype(int).tolist()
        return f"{len(self)} items, {_digest(self.load(some, 0))}"


Source: TypeAlias = Arrays | Items

# Items of a Dataset that are read to recognise it, and few enough to need no workers; all of them would take as long as caching.
_LOOKED_AT = 32


def source_of(data: Any, batch_size: int, key: int, workers: int) -> Source:
    """Return data in order, of a DataLoader what it loads and how; `key` decides what random transforms draw."""
    if isinstance(data, CachedFeatures):
        raise ValueError("These are features already. Hand over the data that the backbone reads.")
    collate = None
    if isinstance(data, DataLoader):
        batches = data.batch_sampler  # of one's own it leaves `data.sampler` at its default
        in_order = type(batches) is BatchSampler and isinstance(batches.sampler, SequentialSampler)
        if not in_order and not isinstance(data.dataset, IterableDataset):
            raise ValueError("A DataLoader must give batches of its items in order: hand over its dataset.")
        collate = None if data.collate_fn is default_collate else data.collate_fn
        data, workers = data.dataset, workers or data.num_workers
    if isinstance(data, IterableDataset):
        raise ValueError(
            "An IterableDataset has no items by number, which caching needs to go on where it stopped. Hand over a Dataset "
            "with __len__ and __getitem__, or arrays."
        )
    arrays = not isinstance(data, Dataset) or (isinstance(data, TensorDataset) and collate is None)
    source = _arrays_in_order(data, batch_size) if arrays else Items(data, batch_size, key, workers, collate)
    if len(source) == 0:
        raise ValueError("There is nothing to cache: the data is empty.")
    return source


def _arrays_in_order(data: Any, batch_size: int) -> Arrays:
    if isinstance(data, TensorDataset):
        data = data.tensors if len(data.tensors) > 1 else data.tensors[0]
    if not isinstance(data, tuple | list):
        return Arrays(tree_rows(data, "x"), None, batch_size)
    x, y, _ = arrays_of(data)  # type: ignore[misc]
    if y.shape[:1] != (len(x),):
        raise ValueError(f"There must be one target for each of {len(x)} inputs; got targets shaped {tuple(y.shape)}.")
    return Arrays(x, y, batch_size)


def _pair(batch: Any) -> tuple[Batch, Tensor | None]:
    """Return inputs and targets of a batch of items; what comes after them is passed over."""
    batch = _parts(batch)
    x = first_of(batch) if batch is not None else None
    if not isinstance(x, Tensor | Tree):
        raise ValueError(
            "A Dataset must give inputs, or pairs (input, target), that become tensors as a batch; its batches, or the inputs in "
            f"them, are of type {type(x).__name__}. Wrap it in one that returns such pairs."
        )
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        return x, None
    try:
        return x, torch.as_tensor(batch[1])
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"Targets of a Dataset must be numbers; as a batch they are {batch[1]!r:.60}. Wrap it in one that numbers them."
        ) from None


def _kind(x: Batch) -> str:
    if isinstance(x, Tree):
        return f"{x.spec} {', '.join(map(_kind, x.leaves))}"
    return f"{x.dtype} {tuple(x.shape[1:])}".removeprefix("torch.")


def _digest(batches: InOrder) -> str:
    """Return a hash of rows, and of their shape and type: the same bytes in another shape are other inputs."""
    fingerprint, kinds = Fingerprint(), dict[str, None]()
    for x, y in batches:
        fingerprint.add(x, y)
        kinds[_kind(x)] = None
    return f"{fingerprint.whole()} {', '.join(kinds)}"
