"""Data in order: arrays, Datasets and loaders as batches from any row on, and what they are recognised by."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
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
from dissensus.data.rows import tree_rows
from dissensus.data.sources import as_tensor, first_of
from dissensus.data.trees import Batch, Tree
from dissensus.randomness import derive, seeded

# Items of a Dataset that are read to recognise it; all of them would take as long as caching itself.
_LOOKED_AT = 32

Batches = Iterator[tuple[Batch, Tensor | None]]


class Source(Protocol):
    """Data in order."""

    @property
    def count(self) -> int:
        """How many rows a pass has."""

    def digest(self) -> str:
        """Return what the data is recognised by."""

    def first(self) -> tuple[Batch, Tensor | None]:
        """Return the first row of the first pass as a batch."""

    def batches(self, number: int, start: int) -> Batches:
        """Yield the batches of a pass from a row on."""


@dataclass(frozen=True)
class Arrays:
    """Inputs, and targets if there are any, as arrays; they may be memory-mapped."""

    x: Any
    y: Any
    batch_size: int

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.x)

    def digest(self) -> str:
        """Return a hash of everything."""
        return _digest(self.batches(0, 0))

    def first(self) -> tuple[Batch, Tensor | None]:
        """Return the first row as a batch."""
        return self._rows(slice(1))

    def batches(self, number: int, start: int) -> Batches:
        """Yield slices; every pass is the same."""
        for first in range(start, self.count, self.batch_size):
            yield self._rows(slice(first, first + self.batch_size))

    def _rows(self, rows: slice) -> tuple[Batch, Tensor | None]:
        return self.x[rows], None if self.y is None else as_tensor(self.y[rows], "y")


class _Items(Dataset[Any]):
    """Items of a Dataset from some index on; what is random in them is a function of (seed, pass, index)."""

    def __init__(self, dataset: Dataset[Any], indices: range | list[int], key: int) -> None:
        self.dataset, self.indices, self.key = dataset, indices, key

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> Any:
        index = self.indices[place]
        with seeded(derive(self.key, index)):
            return self.dataset[index]


@dataclass(frozen=True)
class Items:
    """A map-style Dataset, and how its items become a batch."""

    dataset: Dataset[Any]
    batch_size: int
    key: int
    workers: int
    collate: Callable[[list[Any]], Any] | None = None

    @property
    def count(self) -> int:
        """How many items there are."""
        return len(self.dataset)  # type: ignore[arg-type]

    def digest(self) -> str:
        """Return a hash of the number of items and of some that lie evenly among them."""
        some = np.linspace(0, self.count - 1, min(_LOOKED_AT, self.count)).astype(int).tolist()
        return f"{self.count} items, {_digest(self._load(some, 0, workers=0))}"

    def first(self) -> tuple[Batch, Tensor | None]:
        """Return the first item, as it is in the first pass, as a batch."""
        return next(self._load([0], 0, workers=0))

    def batches(self, number: int, start: int) -> Batches:
        """Yield items as batches, loaded ahead if there are workers."""
        yield from self._load(range(start, self.count), number, self.workers)

    def _load(self, indices: range | list[int], number: int, workers: int) -> Batches:
        items = _Items(self.dataset, indices, derive(self.key, "items", number))
        loader: DataLoader[Any] = DataLoader(
            items,
            self.batch_size,
            num_workers=workers,
            collate_fn=self.collate,
            generator=torch.Generator(),
        )
        yield from map(_pair, loader)


def source_of(data: Any, batch_size: int, key: int, workers: int) -> Source:
    """Return data in order; `key` decides what random transforms draw.

    Of a DataLoader its dataset, its collate function and its workers are used.
    """
    if isinstance(data, CachedFeatures):
        raise ValueError("These are features already. Hand over the data that the backbone reads.")
    collate = None
    if isinstance(data, DataLoader):
        _check_in_order(data)
        collate = None if data.collate_fn is default_collate else data.collate_fn
        data, workers = data.dataset, workers or data.num_workers
    if isinstance(data, IterableDataset):
        raise ValueError(
            "An IterableDataset has no items by number, which caching needs to go on where it stopped. Hand over a Dataset "
            "with __len__ and __getitem__, or arrays."
        )
    if isinstance(data, TensorDataset) and collate is None:
        data = data.tensors if len(data.tensors) > 1 else data.tensors[0]
    source: Source
    if isinstance(data, Dataset):
        source = Items(data, batch_size, key, workers, collate)
    elif isinstance(data, tuple | list):
        parts = [tree_rows(part, name) for part, name in zip(data, ("x", "y", "weights"), strict=False)]
        if len(data) != 2 or len(parts[0]) != len(parts[1]):
            sizes = ", ".join(str(len(part)) for part in parts)
            raise ValueError(
                f"Data must be a pair (inputs, targets) with one target for each input; got lengths {sizes}."
            )
        source = Arrays(parts[0], data[1], batch_size)
    else:
        source = Arrays(tree_rows(data, "x"), None, batch_size)
    if source.count == 0:
        raise ValueError("There is nothing to cache: the data is empty.")
    return source


def _check_in_order(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        return  # refused for what it is
    if loader.batch_sampler is None:
        raise ValueError(
            "A DataLoader with batch_size=None gives no batches of examples. Hand over its dataset."
        )
    # A batch sampler of one's own leaves `loader.sampler` at its default.
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if type(loader.batch_sampler) is not BatchSampler or not isinstance(sampler, SequentialSampler):
        raise ValueError(
            "A DataLoader must give its items in order. Leave shuffling out, or hand over its dataset."
        )


def _pair(batch: Any) -> tuple[Batch, Tensor | None]:
    """Return inputs and targets of a batch of items; what comes after them is passed over."""
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


def _digest(batches: Batches) -> str:
    """Return a hash of rows, and of their shape and type: the same bytes in another shape are other inputs."""
    fingerprint, kinds = Fingerprint(), dict[str, None]()
    for x, y in batches:
        fingerprint.add(x, y)
        kinds[_kind(x)] = None
    return f"{fingerprint.whole()} {', '.join(kinds)}"
