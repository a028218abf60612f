"""Engines: how a training step is executed. They change speed only, never the numbers.

`eager` runs the step as Python. `traced` records its tensor operations once and replays them, free of Python's, autograd's
and vmap's overhead. `compiled` hands the record to torch.compile.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dissensus.training.step import State, TrainStep

log = logging.getLogger("dissensus")

EngineName = Literal["auto", "eager", "traced", "compiled"]
ENGINES = ("auto", "eager", "traced", "compiled")


class Engine(Protocol):
    """Takes steps."""

    name: str

    def step(self, state: State, size: int) -> None:
        """Take one step on a batch of `size` examples, changing the state in place."""


class Eager:
    """The step as it is written."""

    name = "eager"

    def __init__(self, train_step: TrainStep) -> None:
        self.train_step = train_step

    def step(self, state: State, size: int) -> None:
        """Take one step."""
        self.train_step(state, size)


class Traced:
    """Records the operations of a step once for each batch shape and replays them."""

    name = "traced"

    def __init__(self, train_step: TrainStep) -> None:
        self.train_step = train_step
        self.programs: dict[tuple[Any, ...], tuple[list[str], Callable[..., Any]]] = {}

    def step(self, state: State, size: int) -> None:
        """Take one step; the first of its shape is recorded."""
        shape = (size, *(state[name].shape for name in ("batch.x", "batch.y") if name in state))
        if shape not in self.programs:
            names = sorted(state)
            self.programs[shape] = names, self.build(state, names, size)
        names, program = self.programs[shape]
        program(*(state[name] for name in names))

    def build(self, state: State, names: list[str], size: int) -> Callable[..., Any]:
        """Return a callable that takes one step on the named tensors."""
        return record(self.train_step, state, names, size)


class Compiled(Traced):
    """The recorded step, compiled."""

    name = "compiled"

    def build(self, state: State, names: list[str], size: int) -> Callable[..., Any]:
        """Record, then compile."""
        program = torch.compile(record(self.train_step, state, names, size), dynamic=False)
        scratch = clone(state)
        with torch.no_grad():
            program(*(scratch[name] for name in names))

        def run(*tensors: Tensor) -> None:
            with torch.no_grad():
                program(*tensors)

        return run


def record(train_step: TrainStep, state: State, names: list[str], size: int) -> torch.fx.GraphModule:
    """Return the step's tensor operations, with every tensor of the state as an input that is changed in place."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(*tensors: Tensor) -> tuple[()]:
        train_step(dict(zip(names, tensors, strict=True)), size)
        return ()

    scratch = clone(state)
    program = make_fx(step)(*(scratch[name] for name in names))
    _simplify(program.graph)
    program.recompile()
    return program


def _simplify(graph: torch.fx.Graph) -> None:
    """Remove operations that do nothing when replayed: detaching, and views that keep the shape."""
    aten = torch.ops.aten
    views = (aten.view.default, aten.expand.default, aten._unsafe_view.default)
    for node in list(graph.nodes):
        if node.target is not aten.detach.default and node.target not in views:
            continue
        source = node.args[0]
        if node.target is aten.detach.default or source.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def clone(state: State) -> State:
    """Return a copy of everything that a step changes; data is shared."""
    return {
        name: tensor if name.startswith(("data.", "stream.", "frozen.", "batch.")) else tensor.clone()
        for name, tensor in state.items()
    }


def warm_up(train_step: TrainStep, state: State, size: int) -> None:
    """Take one eager step on a copy, so that lazy choices are made and every logged part has its place in the state."""
    scratch = clone(state)
    train_step(scratch, size)
    for name, tensor in scratch.items():
        if name not in state:
            state[name] = torch.zeros_like(tensor)


TRACE_SECONDS = 0.3


def choose_engine(name: str, train_step: TrainStep, state: State, size: int, steps: int) -> Engine:
    """Return the engine asked for, or the one that will finish `steps` steps soonest."""
    if name not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}; got {name!r}.")
    if not train_step.optimizer.traceable:
        if name not in ("auto", "eager"):
            raise ValueError(
                f"engine={name!r} needs sgd, adam or adamw; other optimizers run with engine='eager'."
            )
        return Eager(train_step)
    warm_up(train_step, state, size)
    if name == "eager":
        return Eager(train_step)
    if name == "compiled":
        return Compiled(train_step)
    if name == "auto":
        scratch = clone(state)
        start = time.perf_counter()
        train_step(scratch, size)
        seconds = time.perf_counter() - start
        # Steps that take long spend their time in arithmetic, which recording does not shorten.
        if seconds > 0.05 or seconds * steps < 2 * TRACE_SECONDS:
            return Eager(train_step)
    traced = Traced(train_step)
    try:
        traced.step(clone(state), size)
    except Exception as problem:
        if name != "auto":
            raise ValueError(f"The step cannot be recorded ({problem}). Use engine='eager'.") from problem
        log.info("training runs eagerly: the step cannot be recorded (%s)", str(problem).splitlines()[0])
        return Eager(train_step)
    return traced
