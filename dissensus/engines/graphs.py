"""CUDA graphs: what a function does on the device, captured once and replayed; functions side by side on streams.

Evaluation passes become one graph for each shape; on a CPU, and where a function cannot be captured, it runs as it is written.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from dissensus.engines.watching import draws

Result = TypeVar("Result")


def capture(function: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return a graph of what the function does, and what it returned: memory that replays write to."""
    # Not torch.cuda.graph, which collects garbage first: that takes longer than all else here.
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        # Of this thread alone: loaders pin memory in others.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph, result


def capturing() -> bool:
    """Whether this thread is capturing a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def in_turn(function: Callable[[int], None], count: int) -> None:
    """Call the function for every index below `count`."""
    for index in range(count):
        function(index)


def side_by_side(
    function: Callable[[int], None], count: int, streams: Sequence[torch.cuda.Stream] | None = None
) -> None:
    """Call the function for every index below `count`, as many at a time as there are streams; by default each on its own."""
    if count == 1 or (streams is not None and len(streams) == 1):
        in_turn(function, count)
        return
    streams = [torch.cuda.Stream() for _ in range(count)] if streams is None else streams
    main = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(main)
    for index in range(count):
        with torch.cuda.stream(streams[index % len(streams)]):
            function(index)
    for stream in streams:
        main.wait_stream(stream)


def for_each_member(function: Callable[[int], None], count: int) -> None:
    """Call the function for every index below `count`; in a capture side by side."""
    if capturing():
        side_by_side(function, count)
    else:
        in_turn(function, count)


log = logging.getLogger("dissensus")
# A capture takes as long as some four passes, and a replay about a third of a pass that waits for the host: it repays within so many.
# Where the device is busy it gains and costs little. Where nobody knows how many passes come, it waits for half of them.
_REPAYS = 6

# What is known of a function on certain shapes: it was run once (ensembles find out in their first pass how they run best, and
# look at values for it), or whether it can be captured.
Known = Literal["met", "can", "cannot"]
_KNOWN: WeakKeyDictionary[Module, dict[tuple[Any, ...], Known]] = WeakKeyDictionary()


class Captured(Generic[Result]):
    """A function of tensors that is captured when a shape comes again and again, and replayed from then on.

    What it returns is valid until the next call: copy what must stay. The function must give the same operations for the
    same shapes. Its second call with a shape is watched, to see that it neither reads values on the host nor draws random
    numbers; what was found is remembered with the owner, so that its next function of this name is not watched. Programs are
    not: they would keep the memory that they ran in, and see nothing of what changes in the ensemble but its weights.

    Args:
        function: Takes a batch and further tensors (or trees of them, or None), returns tensors in lists, tuples or dictionaries.
        owner: An ensemble whose passes these are.
        name: What the function does with the owner.
        passes: How many calls there will be; None if nobody knows.
    """

    def __init__(
        self, function: Callable[..., Result], owner: Module | None = None, name: str = "", passes: int | None = None
    ) -> None:
        self.function, self.name, self.passes = function, name, passes
        self._known = {} if owner is None else _KNOWN.setdefault(owner, {})
        self.why_not: str | None = None
        self._passes: dict[tuple[Any, ...], int] = {}
        self._graphs: dict[tuple[Any, ...], _Graph[Result]] = {}

    def __call__(self, *given: Any) -> Result:
        """Run the function, or the program it has become."""
        if self.why_not is not None or not _on_gpu(given[0]) or torch.is_grad_enabled():
            return self.function(*given)
        leaves, spec = tree_flatten(given)
        shapes = [None if t is None else (t.shape, t.dtype, t.stride()) for t in leaves]
        kind = (self.name, torch.is_autocast_enabled("cuda"), str(spec), *shapes)
        if kind in self._graphs:
            return self._graphs[kind].replay(leaves)
        number = self._passes[kind] = self._passes.get(kind, 0) + 1
        known = self._known.get(kind)
        if known == "met":
            return self._watched(kind, given)
        self._known.setdefault(kind, "met")
        if known == "can" and self._repays(number):
            try:
                self._graphs[kind] = _Graph(self.function, leaves, spec)
            except Exception as failure:  # whatever a user's module does that cannot be captured
                self._give_up(kind, (str(failure).splitlines() or [type(failure).__name__])[0])
            else:
                return self._graphs[kind].replay(leaves)
        return self.function(*given)

    def expect(self, passes: int | None) -> None:
        """Begin another set, which takes so many calls; programs stay."""
        self.passes = passes
        self._passes.clear()

    def _repays(self, number: int) -> bool:
        return number > _REPAYS // 2 if self.passes is None else self.passes - number >= _REPAYS

    def _watched(self, kind: tuple[Any, ...], given: tuple[Any, ...]) -> Result:
        with _Watch() as watch:  # type: ignore[no-untyped-call]
            result = self.function(*given)
        self._known[kind] = "can"
        if watch.found is not None or not watch.computes:
            self._give_up(kind, watch.found or "there is nothing to compute")
        return result

    def _give_up(self, kind: tuple[Any, ...], reason: str) -> None:
        self.why_not, self._known[kind] = reason, "cannot"
        log.info("predictions run uncaptured: %s", reason)


def _on_gpu(batch: Any) -> bool:
    return bool(batch.is_cuda)


class _Graph(Generic[Result]):
    """One captured call on memory of its own."""

    def __init__(self, function: Callable[..., Result], tensors: list[Tensor | None], spec: TreeSpec) -> None:
        self.inputs = [None if t is None else torch.empty_like(t).copy_(t) for t in tensors]
        # Weights that autocast cast during a capture live in the graph's memory; no later pass may find them.
        on, kind = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda", kind, cache_enabled=False) if on else nullcontext():
            self.graph, self.result = capture(lambda: function(*tree_unflatten(self.inputs, spec)))

    def replay(self, tensors: list[Tensor | None]) -> Result:
        for own, given in zip(self.inputs, tensors, strict=True):
            if own is not None and given is not None:
                own.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.result


class _Watch(TorchDispatchMode):
    """Looks for operations that a capture would freeze or cannot hold."""

    found: str | None = None  # what the first such operation does
    computes: bool = False  # whether there is any but views, which are not worth a capture: it would be empty

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
    return f"data moves between host and device ({func})" if {"cpu", "cuda"} <= places else None
