"""Batches made ready by threads while the training step runs, and carried to the device while it computes."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import torch
from torch import Tensor

# The tensors of a batch: inputs, targets, and weights where there are any.
Parts = tuple[Tensor, ...]
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
        self.slots: list[Parts] = []
        self.under_way: deque[torch.cuda.Event] = deque()
        self.stream: torch.cuda.Stream | None = None

    def ahead(
        self, make: Callable[[int], Parts | None], places: range, threads: int = 1
    ) -> Generator[Parts, None, None]:
        """Yield the batches of these places on the device, made ahead by threads, until one is None."""
        self._wait(0)

        def ready(place: int) -> Parts | None:
            parts = make(place)
            return None if parts is None else self._hold(place, parts)

        with closing(in_order(ready, places, threads)) as made:
            for parts in made:
                if parts is None:
                    return
                self._make_slots(parts)
                yield self.move(parts)

    def move(self, parts: Parts) -> Parts:
        """Return a batch on the device; the host does not wait for the copy."""
        if self.device.type != "cuda" or any(values.is_cuda for values in parts):
            return tuple(values.to(self.device) for values in parts)
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.stream):
            moved = tuple(map(self._copy, parts))
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

    def _make_slots(self, like: Parts) -> None:
        """Have pinned memory for threads to write to, unless batches come in such memory."""
        if self.device.type == "cuda" and not self.slots and not like[0].is_pinned():
            self.slots = [tuple(map(_pinned_like, like)) for _ in range(_SLOTS)]

    def _hold(self, place: int, parts: Parts) -> Parts:
        """Return a batch in pinned memory, if it is like those before it; called by threads."""
        if not self.slots:
            return parts
        return tuple(map(_into, self.slots[place % _SLOTS], parts))

    def _wait(self, left: int) -> None:
        """Wait until no more than so many copies are under way."""
        while len(self.under_way) > left:
            self.under_way.popleft().synchronize()


def _pinned_like(values: Tensor) -> Tensor:
    return torch.empty_like(values, device="cpu", pin_memory=True)


def _into(slot: Tensor, values: Tensor) -> Tensor:
    like = values.dtype == slot.dtype and values.shape[1:] == slot.shape[1:] and len(values) <= len(slot)
    return slot[: len(values)].copy_(values) if like else values
