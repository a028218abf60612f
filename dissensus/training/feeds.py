"""Batches for every step of an epoch: gathered from arrays on the device or on the host, or loaded from elsewhere."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, default_collate

from dissensus.data.features import CachedFeatures
from dissensus.data.fingerprints import digest_of, row_hashes
from dissensus.data.sources import Rows, triple_of
from dissensus.data.trees import join_rows
from dissensus.randomness import bits, derive, fold, permutation, seeded

# A batch or whole data: inputs, targets, and weights where there are any; each a tensor, inputs also a tree of them.
Parts = tuple[Any, ...]
Made = TypeVar("Made")

# Batches that wait for the training step, and copies to the device that may be under way.
_AHEAD, _UNDER_WAY = 3, 2
# Memory of a batch that is being copied, or was given to the step last, is not written to.
_SLOTS = _AHEAD + 1 + _UNDER_WAY


def parts_of(triple: tuple[Any, Any, Any]) -> Parts:
    """Return inputs, targets and weights as parts."""
    return triple if triple[2] is not None else triple[:2]


def prefetched(make: Callable[[int], Made], places: range, threads: int = 1) -> Generator[Made, None, None]:
    """Yield `make(place)` for every place, in order, made ahead by threads; their errors come out here.

    The threads end with the iterator.
    """
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

    def ahead(
        self, make: Callable[[int], Parts | None], places: range, threads: int = 1
    ) -> Generator[Parts, None, None]:
        """Yield the batches of these places on the device, made ahead by threads, until one is None."""
        self._wait(0)

        def ready(place: int) -> Parts | None:
            batch = make(place)
            # Into pinned memory, if it is like the batches before it.
            return batch if batch is None or not self.slots else tree_map(_into, self.slots[place % _SLOTS], batch)

        with closing(prefetched(ready, places, threads)) as made:
            for batch in made:
                if batch is None:
                    return
                if self.device.type == "cuda" and not self.slots and not tree_leaves(batch)[0].is_pinned():
                    self.slots = [tree_map(_pinned_like, batch) for _ in range(_SLOTS)]
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


def _pinned_like(values: Tensor) -> Tensor:
    return torch.empty_like(values, device="cpu", pin_memory=True)


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

    `order_keys` are the keys of the orders: one, or one for each member.
    """

    def __init__(self, data: Parts, batch_size: int, order_keys: Tensor, drop_last: bool) -> None:
        super().__init__(order_keys.device)
        self.data, self.count = data, len(data[0])
        self.own, self.order_keys = order_keys.ndim > 0, order_keys
        self.sizes = self.cut(self.count, batch_size, drop_last)

    def identity(self) -> str:
        """Return sizes, and a digest of all inputs and targets; of inputs in a file, of some thousand rows throughout."""
        step = max(1, self.count // 4096)
        hashes = [
            row_hashes(leaf if isinstance(leaf, Tensor) else leaf[torch.arange(0, self.count, step)])
            for leaf in tree_leaves(self.data)
        ]
        return f"{self.count} examples in batches of {self.batch_size}, {digest_of(hashes)}"

    def order_of(self, number: int) -> Tensor:
        """Return the order of an epoch, `order_keys.shape + (examples,)`."""
        return permutation(fold(self.order_keys, number), self.count)


class ArrayFeed(OrderedFeed):
    """Arrays on the device, from which each step gathers its batch."""

    def __init__(self, data: Parts, batch_size: int, order_keys: Tensor, drop_last: bool = False) -> None:
        super().__init__(data, batch_size, order_keys, drop_last)
        self.stride = self.batch_size
        order = torch.zeros(*order_keys.shape, self.count, dtype=torch.int64, device=data[1].device)
        self.tensors |= {"batch": data, "order": order}

    def _fill(self, number: int, skip: int) -> Iterator[int]:
        self.tensors["order"].copy_(self.order_of(number))
        yield from self.sizes[skip:]


class HostFeed(OrderedFeed):
    """Arrays on the host, in the order that they would have on the device.

    The device holds one step's examples, the members' one after another where each has its own; `order` says which rows are
    whose. Threads gather the next ones meanwhile.
    """

    def __init__(
        self, data: Parts, batch_size: int, order_keys: Tensor, drop_last: bool = False, threads: int = 2
    ) -> None:
        super().__init__(data, batch_size, order_keys, drop_last)
        self.threads, self.carrier = threads, Carrier(order_keys.device)
        self.data = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, data)
        rows, device = order_keys.numel() * self.batch_size, order_keys.device
        self.tensors["batch"] = tree_map(
            lambda leaf: torch.zeros(rows, *leaf.shape[1:], dtype=leaf.dtype, device=device), data
        )
        self.tensors["order"] = torch.arange(rows, device=device).reshape(*order_keys.shape, self.batch_size)

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
                for pair in zip(tree_leaves(self.tensors["batch"]), tree_leaves(batch), strict=True):
                    self._write(*pair, self.sizes[position])
                yield self.sizes[position]

    def _write(self, held: Tensor, values: Tensor, size: int) -> None:
        """Put rows, member by member, where `order` looks for them."""
        members = len(values) // size
        held = held[: members * self.batch_size].unflatten(0, (members, self.batch_size))
        held[:, :size].copy_(values.unflatten(0, (members, size)), non_blocking=True)


class PlacedFeed(Feed):
    """Batches from elsewhere that are placed among the tensors one by one; all members share them.

    `ahead` says whether a thread takes them while the step before them runs.
    """

    placed = True
    ahead = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.carrier = Carrier(device)

    def _fill(self, number: int, skip: int) -> Iterator[int]:
        taken = self.batches(number, skip)
        places = range(skip, self.steps_per_epoch)
        moved = self.carrier.ahead(lambda _: next(taken, None), places) if self.ahead else map(self.carrier.move, taken)
        for batch in moved:
            self.tensors["batch"] = batch
            yield len(batch[0])

    @abstractmethod
    def batches(self, number: int, skip: int) -> Iterator[Parts]:
        """Return each batch of the epoch after the first `skip`, on any device."""


class LoaderFeed(PlacedFeed):
    """A user's DataLoader, in its own order."""

    def __init__(self, loader: DataLoader[Any], seed: int, device: torch.device, accumulate: int = 1) -> None:
        super().__init__(device)
        self.accumulate = accumulate
        try:
            self.steps_per_epoch = -(-len(loader) // accumulate)
        except TypeError:
            raise ValueError(
                "The DataLoader has no length, which schedules and epochs need. Give its dataset a `__len__`."
            ) from None
        if self.steps_per_epoch == 0:
            raise ValueError("The training data is empty: the DataLoader gives no batch.")
        self.loader, self.seed, self.ahead = loader, seed, _loads_elsewhere(loader)
        self.smallest = _smallest(loader, accumulate)

    def batches(self, number: int, skip: int) -> Iterator[Parts]:
        """Return what the loader gives; its own shuffling is seeded by (seed, epoch)."""
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
            if not taken:
                return
            yield tuple(map(join_rows, zip(*taken, strict=True)))


def _loads_elsewhere(loader: DataLoader[Any]) -> bool:
    """Whether taking a batch draws no random numbers in this process, so that a thread may do it beside training."""
    # Torch's own samplers draw when an epoch begins; what is random in a dataset happens in the loader's processes.
    samplers = (loader.sampler, loader.batch_sampler)
    own = all(s is None or type(s).__module__.startswith("torch.utils.data") for s in samplers)
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


class DatasetFeed(PlacedFeed):
    """A map-style Dataset, loaded item by item in a seeded order."""

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, seed: int, device: torch.device, drop_last: bool, workers: int = 0
    ) -> None:
        super().__init__(device)
        count = len(dataset)  # type: ignore[arg-type]
        if count == 0:
            raise ValueError("The training data is empty: the Dataset has no items.")
        self.count, self.seed = count, seed
        self.cut(count, batch_size, drop_last)
        self.jobs: list[Job] = []
        self.ahead = workers > 0
        # Its processes stay from epoch to epoch; each epoch it goes through the jobs that the list then holds.
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 4}
        self.loader: DataLoader[Any] = DataLoader(
            _SeededBatches(dataset),
            batch_size=None,
            sampler=self.jobs,
            generator=torch.Generator(),
            **options if workers else {},
        )

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


def lives_on(x: Rows, device: torch.device) -> bool:
    """Whether inputs are on a device whole: those that are, and up to half of the memory that is free on a GPU."""
    leaves = tree_leaves(x)
    if device.type == "cpu":
        return all(isinstance(leaf, Tensor) for leaf in leaves)
    there = [isinstance(leaf, Tensor) and leaf.device.type == device.type for leaf in leaves]
    return all(there) or sum(leaf.nbytes for leaf in leaves) <= free_memory(device) // 2


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


# Rows that lie together in the file are read together, so many bytes of them, in an order of their own.
CHUNK_BYTES = 1 << 20
# Chunks that are in memory at once, so many bytes of them: rows are shuffled among them.
BUFFER_BYTES = 256 << 20


def fits(cached: CachedFeatures, device: torch.device) -> bool:
    """Whether features are moved to the device whole: up to their limit, or half of the memory that is free there."""
    limit = cached.resident_limit
    if limit is None:
        limit = free_memory(device) // 2
    return isinstance(cached.features, Tensor) or cached.nbytes <= limit


class FeatureFeed(ArrayFeed):
    """Features on the device. Each epoch takes every example once, from another pass than the epoch before."""

    as_real = True

    def __init__(
        self, cached: CachedFeatures, y: Tensor, batch_size: int, order_keys: Tensor, drop_last: bool = False
    ) -> None:
        x, count = cached.resident(order_keys.device), cached.num_examples
        self.passes = cached.passes
        super().__init__((x[:count], y[:count]), batch_size, order_keys, drop_last)
        self.tensors["batch"] = (x, y)

    def identity(self) -> str:
        """Return what tells other features apart, and how often the data was gone through for them."""
        return f"features, {self.passes} passes, {super().identity()}"

    def order_of(self, number: int) -> Tensor:
        """Return the epoch's order, each example from one of the passes."""
        order = super().order_of(number)
        if self.passes == 1:
            return order
        first = bits(fold(self.order_keys, -2), self.count).remainder(self.passes)
        return order + self.count * (first.gather(-1, order) + number).remainder(self.passes)


class MappedFeed(PlacedFeed):
    """Features read from their file by a thread that is ahead of training; all members share the batches.

    Chunks of neighbouring rows are read in a shuffled order, and rows are shuffled among as many chunks as the buffer
    holds: the order is a function of (seed, epoch). Each epoch takes every example once; a chunk comes from another pass
    than in the epoch before.
    """

    def __init__(
        self,
        cached: CachedFeatures,
        y: Tensor,
        batch_size: int,
        seed: int,
        device: torch.device,
        drop_last: bool = False,
    ) -> None:
        super().__init__(device)
        self.cached, self.y, self.seed = cached, y, seed
        self.cut(cached.num_examples, batch_size, drop_last)
        row_bytes = max(1, cached.nbytes // len(cached))
        self.chunk = max(1, CHUNK_BYTES // row_bytes)
        self.chunks_at_once = max(1, BUFFER_BYTES // (self.chunk * row_bytes))

    def identity(self) -> str:
        """Return sizes, and a digest of the first rows and targets."""
        digest = hashlib.sha256(self.cached.stored_rows(0, 32).cpu().numpy().tobytes())
        digest.update(self.y[:4096].cpu().numpy().tobytes())
        return (
            f"features from a file, {self.cached.passes} passes, {self.cached.num_examples} examples in batches of "
            f"{self.batch_size}, chunks of {self.chunk} by {self.chunks_at_once}, {digest.hexdigest()[:12]}"
        )

    def batches(self, number: int, skip: int) -> Iterator[Parts]:
        """Return batches, joined across the ends of buffers."""
        return islice(self._joined(number), skip, self.steps_per_epoch)

    def _joined(self, number: int) -> Iterator[Parts]:
        waiting: list[Parts] = []
        missing = self.batch_size
        for x, y, order in self._buffers(number):
            while len(order):
                rows, order = order[:missing], order[missing:]
                waiting.append((x.index_select(0, rows), y.index_select(0, rows)))
                missing -= len(rows)
                if missing == 0:
                    yield tuple(map(join_rows, zip(*waiting, strict=True)))
                    waiting, missing = [], self.batch_size
        if waiting:
            yield tuple(map(join_rows, zip(*waiting, strict=True)))

    def _buffers(self, number: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the epoch's rows, buffer by buffer, and the order in which to take them."""
        count, passes = self.cached.num_examples, self.cached.passes
        key = torch.tensor(derive(self.seed, "chunks", number))
        starts = range(0, count, self.chunk)
        chunks = permutation(key, len(starts)).tolist()
        first = bits(torch.tensor(derive(self.seed, "passes")), len(starts)).remainder(passes)
        from_pass = (first + number).remainder(passes).tolist()
        for place in range(0, len(chunks), self.chunks_at_once):
            spans = []
            for chunk in chunks[place : place + self.chunks_at_once]:
                start, stop = starts[chunk], min(starts[chunk] + self.chunk, count)
                spans.append(slice(from_pass[chunk] * count + start, from_pass[chunk] * count + stop))
            x, y = self.cached.spans(spans), torch.cat([self.y[span] for span in spans])
            yield x, y, permutation(fold(key, place), len(x))
