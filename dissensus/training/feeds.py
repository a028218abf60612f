"""Batches for every step of an epoch: gathered from arrays on the device or on the host, or loaded from elsewhere."""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, default_collate

from dissensus.data.fingerprints import digest_of, row_hashes
from dissensus.data.sources import triple_of
from dissensus.data.trees import Rows, join_rows
from dissensus.randomness import bits, derive, fold, permutation, seeded

# A batch or whole data: inputs, targets, and weights where there are any; each a tensor, inputs also a tree of them.
Parts = tuple[Any, ...]
Made = TypeVar("Made")

# Batches that wait for the training step, and copies to the device that may be under way.
_AHEAD, _UNDER_WAY = 3, 2
# Memory of a batch that is being copied, or was given to the step last, is not written to.
_SLOTS = _AHEAD + 1 + _UNDER_WAY

# Rows of features that lie together in a file are read near each other, so many bytes of them, and shuffled among so many.
CHUNK_BYTES, BUFFER_BYTES = 1 << 20, 256 << 20


def parts_of(triple: tuple[Any, Any, Any]) -> Parts:
    """Return inputs, targets and weights as parts."""
    return triple if triple[2] is not None else triple[:2]


def prefetched(make: Callable[[int], Made], places: range, threads: int = 1) -> Generator[Made, None, None]:
    """Yield `make(place)` for every place, in order, made ahead by threads, which end with the iterator; errors come out here."""
    with ThreadPoolExecutor(threads, thread_name_prefix="dissensus data") as pool:
        waiting: deque[Future[Made]] = deque()
        try:
            for place in places:
                waiting.append(pool.submit(make, place))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class Carrier:
    """Brings batches to a device: to a GPU from pinned memory, on a stream of its own.

    Threads only write to pinned memory that is there already and call nothing of CUDA's: while the training thread captures a
    graph, calls from elsewhere can spoil it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: list[Parts] = []
        self.under_way: deque[torch.cuda.Event] = deque()
        self.stream: torch.cuda.Stream | None = None

    def ahead(self, make: Callable[[int], Parts], places: range, threads: int = 1) -> Generator[Parts, None, None]:
        """Yield the batches of these places on the device, made ahead by threads."""
        self._wait(0)

        def ready(place: int) -> Parts:
            batch = make(place)
            # Into pinned memory, if it is like the batches before it.
            return tree_map(_into, self.slots[place % _SLOTS], batch) if self.slots else batch

        with closing(prefetched(ready, places, threads)) as made:
            for batch in made:
                if self.device.type == "cuda" and not self.slots and not tree_leaves(batch)[0].is_pinned():
                    pinned = partial(torch.empty_like, device="cpu", pin_memory=True)
                    self.slots = [tree_map(pinned, batch) for _ in range(_SLOTS)]
                yield self.move(batch)

    def move(self, batch: Parts) -> Parts:
        """Return a batch on the device; the host does not wait for the copy."""
        leaves, spec = tree_flatten(batch)
        if self.device.type != "cuda" or any(values.is_cuda for values in leaves):
            return tree_unflatten([values.to(self.device) for values in leaves], spec)
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.stream):
            pinned = [values if values.is_pinned() else values.pin_memory() for values in leaves]
            moved = [values.to(self.device, non_blocking=True) for values in pinned]
            self.under_way.append(self.stream.record_event())
        here = torch.cuda.current_stream(self.device)
        here.wait_event(self.under_way[-1])
        for values in moved:
            values.record_stream(here)
        self._wait(_UNDER_WAY)
        return tree_unflatten(moved, spec)

    def _wait(self, left: int) -> None:
        """Wait until no more than so many copies are under way."""
        while len(self.under_way) > left:
            self.under_way.popleft().synchronize()


def _into(slot: Tensor, values: Tensor) -> Tensor:
    like = values.dtype == slot.dtype and values.shape[1:] == slot.shape[1:] and len(values) <= len(slot)
    return slot[: len(values)].copy_(values) if like else values


class Feed(ABC):
    """Where batches come from. Its tensors are part of the training state, from which a step reads its batch.

    Attributes:
        own: Whether each member has batches of its own, in orders by `order_keys`.
        count: How many examples there are, where that is known.
        batch_size: Examples a batch, where that is settled here.
        stride: How far in the order a step is from the one before it.
        as_real: Whether inputs are made float32 where they are less precise.
        steps_per_epoch: Batches in an epoch.
        smallest: Size of the smallest batch, where it is known.
        placed: Whether `batch` is another one in each step.
        check: Refuses targets of a batch that comes from elsewhere, before it goes to the device.
        tensors: `position` in the epoch, `batch`, and `order`, in which a step finds the rows of its batch; without an order
            `batch` is what the step takes.
    """

    own: bool = False
    order_keys: Tensor
    count: int
    batch_size: int = 0
    stride: int = 0
    as_real: bool = False
    steps_per_epoch: int
    smallest: int | None = None
    placed: bool = False

    def __init__(self, device: torch.device) -> None:
        self.check: Callable[[Tensor], None] = unchecked
        self.tensors: dict[str, Any] = {"position": torch.zeros((), dtype=torch.int64, device=device)}

    def identity(self) -> str:
        """Return a text that tells this data from other data, as far as that is cheap to see."""
        return "unknown"

    def cut(self, count: int, batch_size: int, drop_last: bool) -> list[int]:
        """Settle how many batches so many examples make; return the size of each."""
        self.batch_size = min(batch_size, count)
        full, rest = divmod(count, self.batch_size)
        sizes = [self.batch_size] * full + ([rest] if rest and not drop_last else [])
        self.steps_per_epoch, self.smallest = len(sizes), sizes[-1]
        return sizes

    def epoch(self, number: int, skip: int) -> Iterator[int]:
        """Yield the size of each batch of the epoch after the first `skip`, once it can be read from the tensors."""
        self.tensors["position"].fill_(skip)
        yield from self._fill(number, skip)

    @abstractmethod
    def _fill(self, number: int, skip: int) -> Iterator[int]:
        """Have the tensors of each batch in place, one after another, and yield its size."""

    def keep_members(self, keep: Sequence[int]) -> None:
        """Let go of the data orders of members that are gone, where each has its own."""
        if self.own:
            self.order_keys = self.order_keys[list(keep)]
            self.tensors["order"] = self.tensors["order"][list(keep)].clone()

    def alike(self, position: int) -> int:
        """Return how many steps from this place in the epoch on have batches of one size and need nothing but the tensors."""
        return max(1, self.count // self.batch_size - position) if self.stride else 1


class OrderedFeed(Feed):
    """Arrays in an order that depends on (seed, member, epoch), or on (seed, epoch) if shared.

    `order_keys`, on the device of the steps, are the keys of the orders: one, or one for each member. Of cached features the rows of
    all `passes` lie one after another; an epoch takes every example once, from another pass than the epoch before. Where a `chunk` is
    more than one row, an epoch goes through the chunks in a shuffled order, and shuffles rows among as many as a buffer holds.
    """

    data: Parts
    chunk = chunks_at_once = 1

    def __init__(
        self,
        data: Parts,
        batch_size: int,
        order_keys: Tensor,
        drop_last: bool = False,
        threads: int = 2,
        passes: int | None = None,
    ) -> None:
        super().__init__(order_keys.device)
        self.threads, self.passes, self.as_real = threads, passes or 1, passes is not None
        self.count = len(data[0]) // self.passes
        self.own, self.order_keys = order_keys.ndim > 0, order_keys
        self.sizes = self.cut(self.count, batch_size, drop_last)
        self._hold(data, order_keys.device)

    @abstractmethod
    def _hold(self, data: Parts, device: torch.device) -> None:
        """Have data and tensors where batches are taken from them."""

    def identity(self) -> str:
        """Return sizes, and a digest of all inputs and targets; of inputs in a file, of some thousand rows throughout."""
        step = max(1, self.count // 4096)
        hashes = [
            row_hashes(leaf[: self.count] if isinstance(leaf, Tensor) else leaf[torch.arange(0, self.count, step)])
            for leaf in tree_leaves(self.data)
        ]
        features = f"features, {self.passes} passes, chunks of {self.chunk}, " if self.as_real else ""
        return f"{features}{self.count} examples in batches of {self.batch_size}, {digest_of(hashes)}"

    def order_of(self, number: int) -> Tensor:
        """Return the order of an epoch, `order_keys.shape + (examples,)`."""
        key = fold(self.order_keys, number)
        order = permutation(key, self.count)
        chunks = -(-self.count // self.chunk)
        if self.chunk > 1:
            buffers = permutation(fold(key, -3), chunks).gather(-1, order // self.chunk) // self.chunks_at_once
            order = order.gather(-1, buffers.argsort(dim=-1, stable=True))
        if self.passes == 1:
            return order
        first = bits(fold(self.order_keys, -2), chunks).remainder(self.passes)
        return order + self.count * (first.gather(-1, order // self.chunk) + number).remainder(self.passes)


class ArrayFeed(OrderedFeed):
    """Arrays on the device, from which each step gathers its batch."""

    def _hold(self, data: Parts, device: torch.device) -> None:
        self.data, self.stride = tuple(part.to(device) for part in data), self.batch_size
        order = torch.zeros(*self.order_keys.shape, self.count, dtype=torch.int64, device=device)
        self.tensors |= {"batch": self.data, "order": order}

    def _fill(self, number: int, skip: int) -> Iterator[int]:
        self.tensors["order"].copy_(self.order_of(number))
        yield from self.sizes[skip:]


class HostFeed(OrderedFeed):
    """Arrays on the host, in the order that they would have on the device.

    The device holds one step's examples, the members' one after another where each has its own; `order` says which rows are
    whose. Threads gather the next ones meanwhile.
    """

    def _hold(self, data: Parts, device: torch.device) -> None:
        self.carrier = Carrier(device)
        if self.as_real:
            row = max(1, data[0].nbytes // len(data[0]))
            self.chunk = max(1, CHUNK_BYTES // row)
            self.chunks_at_once = max(1, BUFFER_BYTES // (self.chunk * row))
        self.data = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, data)
        rows = self.order_keys.numel() * self.batch_size
        self.tensors["batch"] = tree_map(
            lambda leaf: torch.zeros(rows, *leaf.shape[1:], dtype=leaf.dtype, device=device), data
        )
        self.tensors["order"] = torch.arange(rows, device=device).reshape(*self.order_keys.shape, self.batch_size)

    def _fill(self, number: int, skip: int) -> Iterator[int]:
        order, held = self.order_of(number).cpu(), self.tensors["order"]
        # Members may have been dropped since the epoch before, and the others moved up.
        held.copy_(torch.arange(held.numel()).reshape(held.shape))

        def rows(position: int) -> Parts:
            start = position * self.batch_size
            chosen = order[..., start : start + self.sizes[position]].reshape(-1)
            return tree_map(lambda leaf: leaf[chosen], self.data)

        places = range(skip, self.steps_per_epoch)
        with closing(self.carrier.ahead(rows, places, self.threads)) as batches:
            for position, batch in zip(places, batches, strict=True):
                size = self.sizes[position]
                for place, values in zip(tree_leaves(self.tensors["batch"]), tree_leaves(batch), strict=True):
                    # Member by member, where `order` looks for them.
                    rows_of = place[: len(values) // size * self.batch_size].unflatten(0, (-1, self.batch_size))
                    rows_of[:, :size].copy_(values.unflatten(0, (-1, size)), non_blocking=True)
                yield size


# From inputs and targets of a batch to targets in the type that the loss wants.
Targets: TypeAlias = Callable[[Any, Tensor], Tensor]


def as_they_come(x: Any, y: Tensor) -> Tensor:
    """Return targets as they are."""
    return y


def unchecked(y: Tensor) -> None:
    """Take any targets."""


class LoaderFeed(Feed):
    """A user's DataLoader, in its own order; all members share its batches, which are placed among the tensors one by one."""

    placed = True

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        device: torch.device,
        accumulate: int = 1,
        targets: Targets = as_they_come,
    ) -> None:
        super().__init__(device)
        self.accumulate, self.carrier, self.targets = accumulate, Carrier(device), targets
        try:
            self.length = len(loader)
        except TypeError:
            raise ValueError("The DataLoader has no length, which epochs need. Give its dataset a `__len__`.") from None
        self.steps_per_epoch = -(-self.length // accumulate)
        if self.steps_per_epoch == 0:
            raise ValueError("The training data is empty: the DataLoader gives no batch.")
        self.loader, self.seed, self.ahead = loader, seed, _loads_elsewhere(loader)
        self.smallest = _smallest(loader, accumulate)

    def _fill(self, number: int, skip: int) -> Iterator[int]:
        taken = map(self._checked, self.batches(number, skip))
        places = range(skip, self.steps_per_epoch)
        moved = self.carrier.ahead(lambda _: next(taken), places) if self.ahead else map(self.carrier.move, taken)
        for x, y, *weights in moved:
            self.tensors["batch"] = (x, self.targets(x, y), *weights)
            yield len(x)

    def _checked(self, batch: Parts) -> Parts:
        self.check(batch[1])
        return batch

    def batches(self, number: int, skip: int) -> Iterator[Parts]:
        """Return each batch of the epoch after the first `skip`; the loader's own shuffling is seeded by (seed, epoch)."""
        with seeded(derive(self.seed, "loader", number), alone=True):
            batches = iter(self.loader)
        return islice(self._joined(batches, number), skip, None)

    def _joined(self, batches: Iterator[Any], number: int) -> Iterator[Parts]:
        """Yield batches of which each is `accumulate` of the loader's."""
        for position in range(self.steps_per_epoch):
            # A sampler may draw lazily from the global generator: here each draw happens under a seed of its own.
            draws = seeded(derive(self.seed, "loader", number, position), alone=True)
            with nullcontext() if self.ahead else draws:
                taken = [parts_of(triple_of(batch)) for batch in islice(batches, self.accumulate)]
            given = position * self.accumulate + len(taken)
            if given < min((position + 1) * self.accumulate, self.length):
                raise ValueError(
                    f"The DataLoader says it has {self.length} batches and gave {given} in epoch {number + 1}. Have the `__len__` of its "
                    "dataset or sampler count what every epoch gives."
                )
            yield tuple(map(join_rows, zip(*taken, strict=True)))


def _loads_elsewhere(loader: DataLoader[Any]) -> bool:
    """Whether taking a batch draws no random numbers in this process, so that a thread may do it beside training."""
    # Torch's own samplers draw when an epoch begins; what is random in a dataset happens in the loader's processes.
    samplers = (loader.sampler, loader.batch_sampler)
    own = all(s is None or type(s) is list or type(s).__module__.startswith("torch.utils.data") for s in samplers)
    return loader.num_workers > 0 and own


def _smallest(loader: DataLoader[Any], accumulate: int) -> int | None:
    """Return the size of an epoch's last batch, of so many of the loader's, if these are of so many examples and tell their number."""
    try:
        count: int = len(loader.sampler)  # type: ignore[arg-type]
        each: int = loader.batch_size + 0  # type: ignore[operator]
    except (TypeError, AttributeError):
        return None
    count -= count % each if loader.drop_last else 0
    return count % (each * accumulate) or each * accumulate


class DatasetFeed(LoaderFeed):
    """A map-style Dataset, loaded item by item in a seeded order."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        seed: int,
        device: torch.device,
        drop_last: bool,
        workers: int = 0,
        targets: Targets = as_they_come,
    ) -> None:
        self.count = len(dataset)  # type: ignore[arg-type]
        if self.count == 0:
            raise ValueError("The training data is empty: the Dataset has no items.")
        sizes = self.cut(self.count, batch_size, drop_last)
        self.jobs: list[Job] = [(0, [])] * len(sizes)
        # Its processes stay from epoch to epoch; each epoch it goes through the jobs that the list then holds.
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 4}
        loader: DataLoader[Any] = DataLoader(
            _SeededBatches(dataset),
            batch_size=None,
            sampler=self.jobs,
            generator=torch.Generator(),
            **options if workers else {},
        )
        super().__init__(loader, seed, device, targets=targets)
        self.smallest = sizes[-1]

    def batches(self, number: int, skip: int) -> Iterator[Parts]:
        """Return items as batches; random transforms in the dataset draw under seeds of (seed, epoch, batch)."""
        order = permutation(torch.tensor(derive(self.seed, "order", number)), self.count).tolist()
        self.jobs[:] = [
            (derive(self.seed, "items", number, place), order[place * self.batch_size : (place + 1) * self.batch_size])
            for place in range(skip, self.steps_per_epoch)
        ]
        return map(parts_of, map(triple_of, self.loader))


Job: TypeAlias = tuple[int, list[int]]


class _SeededBatches(Dataset[Any]):
    """Batches of a Dataset: what is random in one is a function of its seed, wherever it is loaded."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, job: Job) -> Any:
        seed, indices = job
        with seeded(seed, alone=True):
            return default_collate([self.dataset[index] for index in indices])


def lives_on(x: Rows, device: torch.device, limit: int | None = None) -> bool:
    """Whether inputs are on a device whole: those that are, and others of up to `limit` bytes, by default half of a GPU's free memory."""
    leaves = tree_leaves(x)
    if limit is None:
        limit = 0 if device.type == "cpu" else free_memory(device) // 2
    there = [isinstance(leaf, Tensor) and device.type in ("cpu", leaf.device.type) for leaf in leaves]
    return all(there) or sum(leaf.nbytes for leaf in leaves) <= limit


def free_memory(device: torch.device) -> int:
    """Return how many bytes of a device's memory nobody uses."""
    if device.type == "cuda":
        # What torch holds for later counts as free too.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 4 << 30
