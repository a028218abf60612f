"""Batches made ready by threads while the training step runs, and carried to the device while it computes."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Made = TypeVar("Made")

# Batches that wait for the training step, and copies to the device that may be under way.
_AHEAD, _UNDER_WAY = 3, 2
# Memory of a batch that is being copied, or was given to the step last, is not written to.
_SLOTS = _AHEAD + 1 + _UNDER_WAY


def in_order(make: Callable[[int], Made], places: range, threads: int = 1) -> Generator[Made, None, None]:
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
        self.slots: list[Pair] = []
        self.under_way: deque[torch.cuda.Event] = deque()
        self.stream: torch.cuda.Stream | None = None

    def ahead(
        self, make: Callable[[int], Pair | None], places: range, threads: int = 1
    ) -> Generator[Pair, None, None]:
        """Yield the batches of these places on the device, made ahead by threads, until one is None."""
        self._wait(0)

        def ready(place: int) -> Pair | None:
            pair = make(place)
            return None if pair is None else self._hold(place, pair)

        with closing(in_order(ready, places, threads)) as made:
            for pair in made:
                if pair is None:
                    return
                self._make_slots(pair)
                yield self.move(pair)

    def move(self, pair: Pair) -> Pair:
        """Return a batch on the device; the host does not wait for the copy."""
        x, y = pair
        if self.device.type != "cuda" or x.is_cuda or y.is_cuda:
            return x.to(self.device), y.to(self.device)
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.stream):
            moved = self._copy(x), self._copy(y)
            self.under_way.append(self.stream.record_event())
        here = torch.cuda.current_stream(self.device)
        here.wait_event(self.under_way[-1])
        for values in moved:
            values.record_stream(here)
        self._wait(_UNDER_WAY)
        return moved

    def _copy(self, values: Tensor) -> Tensor:
        pinned = values if values.is_pinned() else values.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def _make_slots(self, like: Pair) -> None:
        """Have pinned memory for threads to write to, unless batches come in such memory."""
        if self.device.type == "cuda" and not self.slots and not like[0].is_pinned():
            x, y = like
            self.slots = [(_pinned_like(x), _pinned_like(y)) for _ in range(_SLOTS)]

    def _hold(self, place: int, pair: Pair) -> Pair:
        """Return a batch in pinned memory, if it is like those before it; called by threads."""
        if not self.slots:
            return pair
        slots = self.slots[place % _SLOTS]
        return _into(slots[0], pair[0]), _into(slots[1], pair[1])

    def _wait(self, left: int) -> None:
        """Wait until no more than so many copies are under way."""
        while len(self.under_way) > left:
            self.under_way.popleft().synchronize()


def _pinned_like(values: Tensor) -> Tensor:
    return torch.empty_like(values, device="cpu", pin_memory=True)


def _into(slot: Tensor, values: Tensor) -> Tensor:
    like = values.dtype == slot.dtype and values.shape[1:] == slot.shape[1:] and len(values) <= len(slot)
    return slot[: len(values)].copy_(values) if like else values
