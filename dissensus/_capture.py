"""Evaluation passes without their overhead: on a GPU a function of tensors becomes a CUDA graph, one for each shape.

On a CPU, and where a function cannot be captured, it runs as it is written.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dissensus.members.probe import draws

log = logging.getLogger("dissensus")
Result = TypeVar("Result")


# A pass counts as waiting for the host when starting it takes this share of the whole.
_LAUNCHING = 0.7
# Functions and shapes of each ensemble for which the device is busy anyway.
_BUSY: WeakKeyDictionary[Module, set[tuple[Any, ...]]] = WeakKeyDictionary()


class Captured(Generic[Result]):
    """A function of tensors that is captured when a shape comes again and again, and replayed from then on.

    What it returns is valid until the next call: copy what must stay. The function must give the same operations for the
    same shapes. Its first call with a shape is watched, to see that it neither reads values on the host nor draws random
    numbers; its second is timed: a capture costs a few passes and gains nothing where the device is busy anyway.

    Args:
        function: Takes tensors on one device (or None), returns tensors in lists, tuples or dictionaries.
        owner: An ensemble whose passes these are. For which shapes a capture gains nothing is remembered with it, so that
            the next function of the same name is neither watched nor timed for them.
        name: What the function does with the owner.
    """

    def __init__(self, function: Callable[..., Result], owner: Module | None = None, name: str = "") -> None:
        self.function, self.name = function, name
        self._busy = set() if owner is None else _BUSY.setdefault(owner, set())
        self.why_not: str | None = None
        self._passes: dict[tuple[Any, ...], int] = {}
        self._launching: dict[tuple[Any, ...], bool] = {}
        self._graphs: dict[tuple[Any, ...], _Graph[Result]] = {}

    def __call__(self, *tensors: Tensor | None) -> Result:
        """Run the function, or the program it has become."""
        first = next(tensor for tensor in tensors if tensor is not None)
        if not first.is_cuda or self.why_not is not None or torch.is_grad_enabled():
            return self.function(*tensors)
        kind = (
            torch.is_autocast_enabled("cuda"),
            *(None if t is None else (t.shape, t.dtype, t.stride()) for t in tensors),
        )
        if kind in self._graphs:
            return self._graphs[kind].replay(tensors)
        if (self.name, kind) in self._busy:
            return self.function(*tensors)
        number = self._passes[kind] = self._passes.get(kind, 0) + 1
        if number == 1:
            return self._watched(tensors)
        if number == 2:
            return self._timed(kind, tensors)
        if not self._launching[kind]:
            return self.function(*tensors)
        try:
            self._graphs[kind] = _Graph(self.function, tensors)
        except Exception as failure:  # whatever a user's module does that cannot be captured
            self._give_up((str(failure).splitlines() or [type(failure).__name__])[0])
            return self.function(*tensors)
        return self._graphs[kind].replay(tensors)

    def _timed(self, kind: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> Result:
        """Run, and find out whether the device waits for the host."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = self.function(*tensors)
        started = time.perf_counter() - start
        torch.cuda.synchronize()
        self._launching[kind] = started > _LAUNCHING * (time.perf_counter() - start)
        if not self._launching[kind]:
            self._busy.add((self.name, kind))
        return result

    def _watched(self, tensors: tuple[Tensor | None, ...]) -> Result:
        with _Watch() as watch:  # type: ignore[no-untyped-call]
            result = self.function(*tensors)
        if watch.found is not None or not watch.computes:
            self._give_up(watch.found or "there is nothing to compute")
        return result

    def _give_up(self, reason: str) -> None:
        self.why_not = reason
        log.info("predictions run uncaptured: %s", reason)


class _Graph(Generic[Result]):
    """One captured call on memory of its own."""

    def __init__(self, function: Callable[..., Result], tensors: tuple[Tensor | None, ...]) -> None:
        self.inputs = [None if t is None else torch.empty_like(t).copy_(t) for t in tensors]
        with _without_weight_cache():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                function(*self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = function(*self.inputs)

    def replay(self, tensors: tuple[Tensor | None, ...]) -> Result:
        for own, given in zip(self.inputs, tensors, strict=True):
            if own is not None and given is not None:
                own.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.result


def _without_weight_cache() -> AbstractContextManager[Any]:
    # Weights that autocast cast during a capture live in the graph's memory; no later pass may find them.
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cuda", torch.get_autocast_dtype("cuda"), cache_enabled=False)


class _Watch(TorchDispatchMode):
    """Looks for operations that a capture would freeze or cannot hold.

    Attributes:
        found: What the first such operation does; None if there is none.
        computes: Whether there is any operation but views, which are not worth a capture: it would be empty.
    """

    found: str | None = None
    computes: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.computes = self.computes or not getattr(func, "is_view", False)
        if self.found is None:
            self.found = _why_not(func, args, kwargs, result)
        return result


def _why_not(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> str | None:
    aten = torch.ops.aten
    if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
        return f"a value is read on the host ({func})"
    if draws(func, args, kwargs):
        return f"random numbers are drawn ({func})"
    if func is aten.lift_fresh.default and result.device.type != "cpu":
        # `x.new_tensor([1.0])` hides its copy from here, but shows what it made.
        return "numbers move from the host to the device"
    places = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
    if {"cpu", "cuda"} <= places:
        return f"data moves between host and device ({func})"
    return None
