"""Engines: how training steps are executed. They change speed only, never the numbers.

`eager` runs a step as Python. `captured` records its tensor operations once and replays them, free of Python's, autograd's
and vmap's overhead; on a GPU as one CUDA graph. `compiled` also compiles what was recorded.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus.training.recording import (
    Program,
    clone,
    compile_program,
    record,
    row_of,
    single_member_step,
    why_not_by_member,
)
from dissensus.training.step import State, TrainStep

log = logging.getLogger("dissensus")

EngineName = Literal["auto", "eager", "captured", "compiled"]
ENGINES = ("auto", "eager", "captured", "compiled")


class Engine(ABC):
    """Takes steps."""

    name: str

    @abstractmethod
    def step(self, state: State, size: int) -> None:
        """Take one step on a batch of `size` examples, changing the state in place."""


class Eager(Engine):
    """The step as it is written."""

    name = "eager"

    def __init__(self, train_step: TrainStep) -> None:
        self.train_step = train_step

    def step(self, state: State, size: int) -> None:
        """Take one step."""
        self.train_step(state, size)


class Recorded(Engine):
    """Records the operations of a step once for each batch shape and replays them, compiled or not."""

    def __init__(self, train_step: TrainStep, compiled: bool) -> None:
        self.train_step, self.compiled = train_step, compiled
        self.name = "compiled" if compiled else "captured"
        self.programs: dict[tuple[Any, ...], _Replay] = {}

    def prepare(self, state: State, size: int) -> "_Replay":
        """Return the program for batches of this shape, recorded when first asked for."""
        shape = (size, *(state[name].shape for name in ("batch.x", "batch.y") if name in state))
        if shape not in self.programs:
            kind = _GraphReplay if state["index"].is_cuda else _Replay
            self.programs[shape] = kind(self.train_step, state, size, self.compiled)
        return self.programs[shape]

    def step(self, state: State, size: int) -> None:
        """Take one step."""
        self.prepare(state, size).run(state)


class _Replay:
    """The recorded step as a Python function of the state's tensors."""

    def __init__(self, train_step: TrainStep, state: State, size: int, compiled: bool) -> None:
        self.names = sorted(state)
        recorded = record(train_step, state, self.names, size)
        self.program: Program = recorded
        if compiled:
            self.program = compile_program(recorded)
            scratch = clone(state)
            self.program(*(scratch[name] for name in self.names))

    def run(self, state: State) -> None:
        self.program(*(state[name] for name in self.names))


class _GraphReplay(_Replay):
    """The recorded step as one CUDA graph on fixed memory.

    Members that are large and do not depend on each other run as one program each, on streams of their own: vmap would
    turn their convolutions into grouped ones, which are slower. Small ones run as one batched program.
    """

    def __init__(self, train_step: TrainStep, state: State, size: int, compiled: bool) -> None:
        self.static = dict(state)
        for name in ("batch.x", "batch.y"):
            if name in state:
                self.static[name] = state[name].clone()
        self.by_member = has_convolutions(train_step) and why_not_by_member(train_step, state) is None
        rows = [row_of(self.static, i, train_step.feed) for i in range(train_step.members.num_members)]
        tensors = rows if self.by_member else [self.static]
        source = single_member_step(train_step) if self.by_member else train_step
        self.names = sorted(state)
        recorded = record(source, tensors[0], self.names, size, advance=False)
        program: Program = compile_program(recorded) if compiled else recorded
        self.graph = torch.cuda.CUDAGraph()
        streams = [torch.cuda.Stream() for _ in tensors]
        # cuDNN may try its algorithms here, once for each convolution, unless the user wants determinism.
        benchmark = torch.backends.cudnn.benchmark or not torch.are_deterministic_algorithms_enabled()
        with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
            self._warm_up(program, tensors[0])
            with torch.cuda.graph(self.graph):
                _fan_out(program, [[each[name] for name in self.names] for each in tensors], streams)
                self.static["index"].add_(1)
                self.static["position"].add_(1)

    def _warm_up(self, program: Program, tensors: State) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                scratch = clone(tensors)
                program(*(scratch[name] for name in self.names))
        torch.cuda.current_stream().wait_stream(stream)

    def run(self, state: State) -> None:
        for name in ("batch.x", "batch.y"):
            if name in state:
                self.static[name].copy_(state[name], non_blocking=True)
        self.graph.replay()


def _fan_out(
    program: Program, arguments: Sequence[Sequence[Tensor]], streams: Sequence[torch.cuda.Stream]
) -> None:
    """Run the program on each list of tensors, side by side."""
    if len(arguments) == 1:
        program(*arguments[0])
        return
    main = torch.cuda.current_stream()
    for tensors, stream in zip(arguments, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            program(*tensors)
    for stream in streams:
        main.wait_stream(stream)


def has_convolutions(train_step: TrainStep) -> bool:
    """Whether the members' work is in convolutions."""
    return any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in train_step.members.modules())


def warm_up(train_step: TrainStep, state: State, size: int) -> None:
    """Take one eager step on a copy, so that lazy choices are made and every logged part has its place in the state."""
    scratch = clone(state)
    train_step(scratch, size)
    for name, tensor in scratch.items():
        if name not in state:
            state[name] = torch.zeros_like(tensor)


def why_not_recorded(train_step: TrainStep, state: State, size: int) -> str | None:
    """Take one eager step on a copy and say why a recording of it would not stay true; None if it would."""
    before = train_step.members.python_state()
    train_step(clone(state), size)
    if train_step.members.python_state() != before:
        return "its modules change Python attributes from step to step"
    return None


RECORD_SECONDS = 0.3


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
    if name == "auto":
        seconds = _time_step(train_step, state, size)
        # Steps that take long on a CPU spend their time in arithmetic, which recording does not shorten.
        slow = seconds > 0.05 and not state["index"].is_cuda
        if slow or seconds * steps < 2 * RECORD_SECONDS:
            return Eager(train_step)
    engine = Recorded(train_step, compiled=name == "compiled")
    problem = why_not_recorded(train_step, state, size)
    if problem is None:
        try:
            engine.prepare(state, size)
            return engine
        except Exception as failure:  # whatever a user's module does that cannot be recorded
            problem = (str(failure).splitlines() or [type(failure).__name__])[0]
    if name != "auto":
        raise ValueError(f"The step cannot be recorded: {problem}. Use engine='eager'.")
    log.info("training runs eagerly: the step cannot be recorded (%s)", problem)
    return Eager(train_step)


def _time_step(train_step: TrainStep, state: State, size: int) -> float:
    scratch = clone(state)
    _synchronize(state)
    start = time.perf_counter()
    train_step(scratch, size)
    _synchronize(state)
    return time.perf_counter() - start


def _synchronize(state: State) -> None:
    if state["index"].is_cuda:
        torch.cuda.synchronize()
