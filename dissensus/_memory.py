"""How much memory a pass needs, measured on a few inputs, and how many inputs then fit under a limit."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
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
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _address(tensor) not in given | self._known:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        address, size = _address(tensor), tensor.untyped_storage().nbytes()
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
