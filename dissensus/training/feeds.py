"""Batches for every step of an epoch: gathered on the device from arrays that live there, or loaded from elsewhere."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dissensus.data.sources import collate, pair_of
from dissensus.randomness import bits, derive, fold, permutation, seeded


class Feed(ABC):
    """Where batches come from. `tensors` joins the training state; `batch` reads from that state only."""

    own: bool
    steps_per_epoch: int
    tensors: dict[str, Tensor]

    def identity(self) -> str:
        """Return a text that tells this data from other data, as far as that is cheap to see."""
        return "unknown"

    @abstractmethod
    def epoch(self, number: int, skip: int, state: MutableMapping[str, Tensor]) -> Iterator[int]:
        """Yield the size of each batch of the epoch after the first `skip`, once it can be read from the state."""

    def alike(self, position: int) -> int:
        """Return how many steps from this place in the epoch on have batches of one size and need nothing but the state."""
        return 1

    @abstractmethod
    def batch(self, state: MutableMapping[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the step at `state["position"]`."""


class ArrayFeed(Feed):
    """Arrays on the device, in an order that depends on (seed, member, epoch), or on (seed, epoch) if shared."""

    def __init__(
        self, x: Tensor, y: Tensor, batch_size: int, order_keys: Tensor, own: bool, drop_last: bool = False
    ) -> None:
        count = len(x)
        self.batch_size = min(batch_size, count)
        self.own = own
        self.order_keys = order_keys
        self.full, rest = divmod(count, self.batch_size)
        self.sizes = [self.batch_size] * self.full + ([rest] if rest and not drop_last else [])
        self.steps_per_epoch = len(self.sizes)
        order = torch.zeros(*order_keys.shape, count, dtype=torch.int64, device=x.device)
        self.tensors = {"data.x": x, "data.y": y, "order": order}

    def identity(self) -> str:
        """Return sizes, and a digest of the first inputs and targets."""
        x, y = self.tensors["data.x"], self.tensors["data.y"]
        digest = hashlib.sha256()
        for values in (x[:32], y[:4096]):
            digest.update(values.detach().cpu().contiguous().numpy().tobytes())
        return f"{len(x)} examples in batches of {self.batch_size}, {digest.hexdigest()[:12]}"

    def epoch(self, number: int, skip: int, state: MutableMapping[str, Tensor]) -> Iterator[int]:
        """Draw the epoch's order, then yield batch sizes."""
        state["order"].copy_(permutation(fold(self.order_keys, number), state["order"].shape[-1]))
        yield from self.sizes[skip:]

    def alike(self, position: int) -> int:
        """Return how many batches of the same size follow, this one included."""
        return max(1, self.full - position)

    def batch(self, state: MutableMapping[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """Gather the batch: `(size, ...)`, or `(members, size, ...)` if members have orders of their own."""
        columns = state["position"] * self.batch_size + torch.arange(size, device=state["order"].device)
        chosen = state["order"].index_select(-1, columns)
        return _gather(state["data.x"], chosen), _gather(state["data.y"], chosen)


def _gather(values: Tensor, index: Tensor) -> Tensor:
    return values.index_select(0, index.reshape(-1)).reshape(*index.shape, *values.shape[1:])


class LoaderFeed(Feed):
    """A user's DataLoader, in its own order: all members share its batches."""

    own = False

    def __init__(self, loader: DataLoader[Any], seed: int, device: torch.device) -> None:
        try:
            self.steps_per_epoch = len(loader)
        except TypeError:
            raise ValueError(
                "The DataLoader has no length, which schedules and epochs need. Give its dataset a `__len__`."
            ) from None
        if self.steps_per_epoch == 0:
            raise ValueError("The training data is empty: the DataLoader gives no batch.")
        self.loader, self.seed, self.device = loader, seed, device
        self.tensors = {}

    def epoch(self, number: int, skip: int, state: MutableMapping[str, Tensor]) -> Iterator[int]:
        """Yield batch sizes as the loader gives batches; its own shuffling is seeded by (seed, epoch)."""
        with seeded(derive(self.seed, "loader", number)):
            batches = iter(self.loader)
        for position in range(self.steps_per_epoch):
            # The sampler draws lazily from the global generator: each draw happens under a seed of its own.
            with seeded(derive(self.seed, "loader", number, position)):
                pair = next(batches, None)
            if pair is None:
                return
            if position >= skip:
                yield self.place(pair, state)

    def place(self, pair: Any, state: MutableMapping[str, Tensor]) -> int:
        """Put a batch into the state; return its size."""
        x, y = pair_of(pair)
        state["batch.x"] = x.to(self.device, non_blocking=True)
        state["batch.y"] = y.to(self.device, non_blocking=True)
        return len(x)

    def batch(self, state: MutableMapping[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """Return the batch that was placed."""
        return state["batch.x"], state["batch.y"]


class DatasetFeed(LoaderFeed):
    """A map-style Dataset, loaded item by item in a seeded order that all members share."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        seed: int,
        device: torch.device,
        drop_last: bool,
        workers: int = 0,
    ) -> None:
        count = len(dataset)  # type: ignore[arg-type]
        if count == 0:
            raise ValueError("The training data is empty: the Dataset has no items.")
        self.dataset, self.count, self.workers = dataset, count, workers
        self.batch_size = min(batch_size, count)
        full, rest = divmod(count, self.batch_size)
        self.steps_per_epoch = full + bool(rest and not drop_last)
        self.seed, self.device = seed, device
        self.tensors = {}

    def epoch(self, number: int, skip: int, state: MutableMapping[str, Tensor]) -> Iterator[int]:
        """Yield batch sizes; random transforms in the dataset draw under seeds of (seed, epoch)."""
        order = permutation(torch.tensor(derive(self.seed, "order", number)), self.count).tolist()
        starts = range(0, self.steps_per_epoch * self.batch_size, self.batch_size)
        batches = [order[start : start + self.batch_size] for start in starts]
        load = self._in_processes if self.workers else self._here
        for pair in load(batches, number, skip):
            yield self.place(pair, state)

    def _here(self, batches: list[list[int]], number: int, skip: int) -> Iterator[Any]:
        for position in range(skip, len(batches)):
            with seeded(derive(self.seed, "items", number, position)):
                pair = collate(self.dataset, batches[position])
            yield pair

    def _in_processes(self, batches: list[list[int]], number: int, skip: int) -> Iterator[Any]:
        """Load ahead in other processes; a resumed epoch loads what it skips, so that their generators stand as before."""
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=batches,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4,
            generator=torch.Generator().manual_seed(derive(self.seed, "items", number) & 0x7FFFFFFFFFFFFFFF),
        )
        for position, pair in enumerate(loader):
            if position >= skip:
                yield pair


def stream_batch(values: Tensor, keys: Tensor, size: int) -> Tensor:
    """Return a batch of a second stream, drawn with replacement: `keys.shape + (size, ...)`."""
    return _gather(values, bits(keys, size).remainder(len(values)))
