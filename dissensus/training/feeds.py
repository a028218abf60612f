"""Batches for every step of an epoch: gathered on the device from arrays that live there, or loaded from elsewhere."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dissensus.data.rows import OnDisk
from dissensus.data.sources import collate, pair_of
from dissensus.randomness import bits, derive, fold, permutation, seeded
from dissensus.training.ahead import Carrier, Pair

Rows: TypeAlias = Tensor | OnDisk


class Feed(ABC):
    """Where batches come from. `tensors` joins the training state; `batch` reads from that state only."""

    own: bool
    steps_per_epoch: int
    # Size of the smallest batch, where it is known.
    smallest: int | None = None
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


class OrderedFeed(Feed):
    """Arrays in an order that depends on (seed, member, epoch), or on (seed, epoch) if shared."""

    def __init__(
        self, x: Rows, y: Tensor, batch_size: int, order_keys: Tensor, own: bool, drop_last: bool = False
    ) -> None:
        self.first, self.count = (x[:32], y[:4096]), len(x)
        self.batch_size = min(batch_size, self.count)
        self.own = own
        self.order_keys = order_keys
        self.full, rest = divmod(self.count, self.batch_size)
        self.sizes = [self.batch_size] * self.full + ([rest] if rest and not drop_last else [])
        self.steps_per_epoch, self.smallest = len(self.sizes), self.sizes[-1]

    def identity(self) -> str:
        """Return sizes, and a digest of the first inputs and targets."""
        digest = hashlib.sha256()
        for values in self.first:
            digest.update(values.detach().cpu().contiguous().numpy().tobytes())
        return f"{self.count} examples in batches of {self.batch_size}, {digest.hexdigest()[:12]}"

    def order_of(self, number: int) -> Tensor:
        """Return the order of an epoch, `order_keys.shape + (examples,)`."""
        return permutation(fold(self.order_keys, number), self.count)


class ArrayFeed(OrderedFeed):
    """Arrays on the device, from which each step gathers its batch."""

    def __init__(
        self, x: Tensor, y: Tensor, batch_size: int, order_keys: Tensor, own: bool, drop_last: bool = False
    ) -> None:
        super().__init__(x, y, batch_size, order_keys, own, drop_last)
        order = torch.zeros(*order_keys.shape, self.count, dtype=torch.int64, device=x.device)
        self.tensors = {"data.x": x, "data.y": y, "order": order}

    def epoch(self, number: int, skip: int, state: MutableMapping[str, Tensor]) -> Iterator[int]:
        """Draw the epoch's order, then yield batch sizes."""
        state["order"].copy_(self.order_of(number))
        yield from self.sizes[skip:]

    def alike(self, position: int) -> int:
        """Return how many batches of the same size follow, this one included."""
        return max(1, self.full - position)

    def batch(self, state: MutableMapping[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """Gather the batch: `(size, ...)`, or `(members, size, ...)` if members have orders of their own."""
        columns = state["position"] * self.batch_size + torch.arange(size, device=state["order"].device)
        chosen = state["order"].index_select(-1, columns)
        return gather(state["data.x"], chosen), gather(state["data.y"], chosen)


def gather(values: Tensor, index: Tensor) -> Tensor:
    """Return rows, `index.shape + (...)`."""
    return values.index_select(0, index.reshape(-1)).reshape(*index.shape, *values.shape[1:])


class PlacedFeed(Feed):
    """Batches from elsewhere that are placed in the state one by one; all members share them."""

    own = False

    def __init__(self, device: torch.device) -> None:
        self.carrier = Carrier(device)
        self.tensors = {}

    def place(self, pair: Pair, state: MutableMapping[str, Tensor]) -> int:
        """Put a batch that is on the device into the state; return its size."""
        state["batch.x"], state["batch.y"] = pair
        return len(pair[0])

    def batch(self, state: MutableMapping[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """Return the batch that was placed."""
        return state["batch.x"], state["batch.y"]


class LoaderFeed(PlacedFeed):
    """A user's DataLoader, in its own order."""

    def __init__(self, loader: DataLoader[Any], seed: int, device: torch.device) -> None:
        super().__init__(device)
        try:
            self.steps_per_epoch = len(loader)
        except TypeError:
            raise ValueError(
                "The DataLoader has no length, which schedules and epochs need. Give its dataset a `__len__`."
            ) from None
        if self.steps_per_epoch == 0:
            raise ValueError("The training data is empty: the DataLoader gives no batch.")
        self.loader, self.seed = loader, seed
        self.smallest = _smallest(loader)

    def epoch(self, number: int, skip: int, state: MutableMapping[str, Tensor]) -> Iterator[int]:
        """Yield batch sizes as the loader gives batches; its own shuffling is seeded by (seed, epoch)."""
        with seeded(derive(self.seed, "loader", number)):
            batches = iter(self.loader)
        load = self._ahead if _loads_elsewhere(self.loader) else self._here
        for position, pair in enumerate(load(batches, number)):
            if position >= skip:
                yield self.place(pair, state)

    def _ahead(self, batches: Iterator[Any], number: int) -> Iterator[Pair]:
        yield from self.carrier.ahead(lambda _: _next_pair(batches), range(self.steps_per_epoch))

    def _here(self, batches: Iterator[Any], number: int) -> Iterator[Pair]:
        for position in range(self.steps_per_epoch):
            # The sampler draws lazily from the global generator: each draw happens under a seed of its own.
            with seeded(derive(self.seed, "loader", number, position)):
                pair = _next_pair(batches)
            if pair is None:
                return
            yield self.carrier.move(pair)


def _next_pair(batches: Iterator[Any]) -> Pair | None:
    batch = next(batches, None)
    return None if batch is None else pair_of(batch)


def _loads_elsewhere(loader: DataLoader[Any]) -> bool:
    """Whether taking a batch draws no random numbers in this process, so that a thread may do it beside training.

    Torch's own samplers draw when an epoch begins; what is random in a dataset then happens in the loader's processes.
    """
    samplers = (loader.sampler, loader.batch_sampler)
    own = all(s is None or type(s).__module__.startswith("torch.utils.data") for s in samplers)
    return loader.num_workers > 0 and own


def _smallest(loader: DataLoader[Any]) -> int | None:
    """Return the size of a loader's last batch, if it is one of so many examples and tells their number."""
    try:
        rest = len(loader.sampler) % loader.batch_size  # type: ignore[arg-type, operator]
    except (TypeError, AttributeError):
        return None
    return loader.batch_size if loader.drop_last or rest == 0 else rest


class DatasetFeed(PlacedFeed):
    """A map-style Dataset, loaded item by item in a seeded order."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        seed: int,
        device: torch.device,
        drop_last: bool,
        workers: int = 0,
    ) -> None:
        super().__init__(device)
        count = len(dataset)  # type: ignore[arg-type]
        if count == 0:
            raise ValueError("The training data is empty: the Dataset has no items.")
        self.count, self.seed = count, seed
        self.batch_size = min(batch_size, count)
        full, rest = divmod(count, self.batch_size)
        self.steps_per_epoch = full + bool(rest and not drop_last)
        self.smallest = rest if rest and not drop_last else self.batch_size
        self.batches = _SeededBatches(dataset)
        self.jobs: list[Job] = []
        self.loader = _in_processes(self.batches, self.jobs, workers) if workers else None

    def epoch(self, number: int, skip: int, state: MutableMapping[str, Tensor]) -> Iterator[int]:
        """Yield batch sizes; random transforms in the dataset draw under seeds of (seed, epoch, batch)."""
        order = permutation(torch.tensor(derive(self.seed, "order", number)), self.count).tolist()
        places = range(skip, self.steps_per_epoch)
        self.jobs[:] = [
            (
                derive(self.seed, "items", number, place),
                order[place * self.batch_size : (place + 1) * self.batch_size],
            )
            for place in places
        ]
        if self.loader is None:
            pairs = (self.carrier.move(self.batches[job]) for job in self.jobs)
        else:
            loaded = iter(self.loader)
            pairs = self.carrier.ahead(lambda _: _next_pair(loaded), places)
        for pair in pairs:
            yield self.place(pair, state)


Job: TypeAlias = tuple[int, list[int]]


class _SeededBatches(Dataset[Pair]):
    """Batches of a Dataset: what is random in one is a function of its seed, wherever it is loaded."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, job: Job) -> Pair:
        seed, indices = job
        with seeded(seed):
            return collate(self.dataset, indices)


def _in_processes(batches: _SeededBatches, jobs: list[Job], workers: int) -> DataLoader[Any]:
    """Return a loader whose processes stay from epoch to epoch; each epoch it goes through the jobs that the list then holds."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=jobs,
        num_workers=workers,
        persistent_workers=True,
        prefetch_factor=4,
        generator=torch.Generator(),
    )


def stream_batch(values: Tensor, keys: Tensor, size: int) -> Tensor:
    """Return a batch of a second stream, drawn with replacement: `keys.shape + (size, ...)`."""
    return gather(values, bits(keys, size).remainder(len(values)))
