"""What the machine has: how many inputs fit into memory, measured on a few, and how many threads a step keeps busy."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dissensus.data.trees import Batch, repeat_rows

_FEW = 8


def inputs_under(limit: int, run: Callable[[Any], object], x: Batch) -> int:
    """Return how many inputs a pass may take so that what it allocates stays under `limit` bytes.

    The pass is measured on a few inputs and on half of them; what does not grow with their number counts once.
    """
    few = x[:_FEW]
    if len(few) == 1:
        few = repeat_rows(few, 2)
    half = len(few) // 2
    large, small = peak_bytes(run, few), peak_bytes(run, few[:half])
    each = max((large - small) / (len(few) - half), 1.0)
    fixed = max(large - each * len(few), 0.0)
    fitting = int((limit - fixed) / each)
    if fitting < 1:
        raise ValueError(
            f"A pass on one input allocates about {fixed + each:,.0f} bytes, more than the limit of {limit:,}. Raise `memory_limit`."
        )
    return fitting


def peak_bytes(run: Callable[[Any], object], x: Batch) -> int:
    """Return the largest number of bytes that were alive at one time during `run(x)`, the result included."""
    with torch.no_grad(), _Living() as living:
        run(x)
    return living.peak


class _Living(TorchDispatchMode):
    """Counts the bytes of tensors that operations made and that still live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._sizes |= {storage: size for storage, size in _storages(result).items() if storage not in given}
        self._sizes = {storage: size for storage, size in self._sizes.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def _storages(tree: Any) -> dict[StorageWeakRef, int]:
    """Return the size in bytes of each storage that tensors lie in."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


log = logging.getLogger("dissensus")

# Numbers multiplied and added in a step for each thread that shares it: about 10 ms of one core. Waking threads costs some
# microseconds an operation on an idle machine and milliseconds on one that does other work (a fit of 13 s took 109 s so).
WORK_OF_A_THREAD = 2e8


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Have torch use so many threads in a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Many small operations on several threads spend their time waiting for each other.
one_thread = partial(threads, 1)


@contextmanager
def threads_for(work: float) -> Iterator[None]:
    """Have torch use as many threads as steps of so many multiplications and additions keep busy, of those that it may use."""
    most = torch.get_num_threads()
    count = max(1, min(most, round(work / WORK_OF_A_THREAD)))
    if count < most:
        log.info("training uses %d of %d threads: a step takes about %.1g operations", count, most, work)
    with threads(count):
        yield
