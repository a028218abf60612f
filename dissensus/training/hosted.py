"""Batches of arrays that stay on the host, in memory or in a file, because the device has no room for them."""

import os
from collections.abc import Iterator, MutableMapping
from contextlib import closing

import torch
from torch import Tensor

from dissensus.training.ahead import Carrier, Pair
from dissensus.training.feeds import OrderedFeed, Rows, gather


def lives_on(x: Rows, device: torch.device) -> bool:
    """Whether inputs are on a device whole: those that are, and up to half of the memory that is free on a GPU."""
    if device.type == "cpu":
        return isinstance(x, Tensor)
    there = isinstance(x, Tensor) and x.device.type == device.type
    return there or x.nbytes <= free_memory(device) // 2


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


class HostFeed(OrderedFeed):
    """Arrays on the host, in the order that they would have on the device.

    The device holds one step's examples, the members' one after another where each has its own; `order` says which rows are
    whose. Threads gather the next ones meanwhile.
    """

    def __init__(
        self,
        x: Rows,
        y: Tensor,
        batch_size: int,
        order_keys: Tensor,
        own: bool,
        drop_last: bool = False,
        threads: int = 2,
    ) -> None:
        super().__init__(x, y, batch_size, order_keys, own, drop_last)
        self.x, self.y, self.threads = x, y.cpu(), threads
        device = order_keys.device
        self.carrier = Carrier(device)
        rows = order_keys.numel() * self.batch_size
        self.tensors = {
            "data.x": torch.zeros(rows, *x.shape[1:], dtype=x.dtype, device=device),
            "data.y": torch.zeros(rows, *y.shape[1:], dtype=y.dtype, device=device),
            "order": torch.arange(rows, device=device).reshape(*order_keys.shape, self.batch_size),
        }

    def epoch(self, number: int, skip: int, state: MutableMapping[str, Tensor]) -> Iterator[int]:
        """Yield batch sizes once their rows are on the device."""
        order = self.order_of(number).cpu()
        # Members may have been dropped since the epoch before, and the others moved up.
        state["order"].copy_(torch.arange(state["order"].numel()).reshape(state["order"].shape))

        def rows(position: int) -> Pair:
            start = position * self.batch_size
            chosen = order[..., start : start + self.sizes[position]].reshape(-1)
            return self.x[chosen], self.y[chosen]

        places = range(skip, self.steps_per_epoch)
        with closing(self.carrier.ahead(rows, places, self.threads)) as batches:
            for position, pair in zip(places, batches, strict=True):
                for name, values in zip(("data.x", "data.y"), pair, strict=True):
                    self._write(state[name], values, self.sizes[position])
                yield self.sizes[position]

    def _write(self, held: Tensor, values: Tensor, size: int) -> None:
        """Put rows, member by member, where `order` looks for them."""
        members = len(values) // size
        held = held[: members * self.batch_size].unflatten(0, (members, self.batch_size))
        held[:, :size].copy_(values.unflatten(0, (members, size)), non_blocking=True)

    def batch(self, state: MutableMapping[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """Return the examples that the device holds."""
        chosen = state["order"][..., :size]
        return gather(state["data.x"], chosen), gather(state["data.y"], chosen)
