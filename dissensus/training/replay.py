"""Recorded steps, ready to run: as a Python function, member by member, or as one CUDA graph."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dissensus.members import DeepEnsemble
from dissensus.training import timings
from dissensus.training.recording import (
    Program,
    clone,
    compile_program,
    record,
    row_of,
    single_member_step,
    take_out_counters,
    why_not_by_member,
)
from dissensus.training.step import State, TrainStep


class Replay:
    """The recorded step as a function of the state's tensors."""

    key: str

    def __init__(self, train_step: TrainStep, state: State, size: int, compiled: bool) -> None:
        self.names = sorted(state)
        self.program = self._record(train_step, state, size, compiled, parallel=1, advance=True)

    def _record(
        self, train_step: TrainStep, state: State, size: int, compiled: bool, parallel: int, advance: bool
    ) -> Program:
        recorded = record(train_step, state, self.names, size, advance=advance)
        self.counters = {} if advance else take_out_counters(recorded, self.names)
        self.key = timings.step_key(recorded.code, [state[name] for name in self.names], parallel)
        scratch = clone(state)
        with warnings.catch_warnings():
            # Compiling warns of torch's own affairs: deprecations inside it, settings that might be faster.
            warnings.simplefilter("ignore")
            program: Program = compile_program(recorded) if compiled else recorded
            program(*(scratch[name] for name in self.names))
        return program

    def run(self, state: State) -> None:
        """Take one step."""
        self.program(*(state[name] for name in self.names))

    def count_step(self, state: State) -> None:
        """Count the step, and the passes of BatchNorm layers, for all members at once."""
        state["index"].add_(1)
        state["position"].add_(1)
        for amount in set(self.counters.values()):
            torch._foreach_add_(
                [state[name] for name, added in self.counters.items() if added == amount], amount
            )


class ByMemberReplay(Replay):
    """One program, run for one member after another: the memory of one member at a time."""

    def __init__(self, train_step: TrainStep, state: State, size: int, compiled: bool) -> None:
        self.names = sorted(state)
        self.feed, self.count = train_step.feed, train_step.members.num_trained
        row = row_of(state, 0, self.feed)
        self.program = self._record(single_member_step(train_step), row, size, compiled, 1, advance=False)

    def run(self, state: State) -> None:
        """Take one step of every member."""
        for index in range(self.count):
            row = row_of(state, index, self.feed)
            self.program(*(row[name] for name in self.names))
        self.count_step(state)


class GraphReplay(Replay):
    """The recorded step as one CUDA graph on fixed memory.

    Members that are large and do not depend on each other run as one program each, on streams of their own: vmap would
    turn their convolutions into grouped ones, which are slower. Small ones run as one batched program. `concurrent` limits
    how many members are in flight, and so the memory they need.
    """

    def __init__(
        self, train_step: TrainStep, state: State, size: int, compiled: bool, concurrent: int | None = None
    ) -> None:
        self.names = sorted(state)
        self.static = dict(state)
        for name in ("batch.x", "batch.y"):
            if name in state:
                self.static[name] = state[name].clone()
        count = train_step.members.num_trained
        if runs_by_member(train_step, state, concurrent):
            tensors = [row_of(self.static, index, train_step.feed) for index in range(count)]
            train_step = single_member_step(train_step)
        else:
            tensors = [self.static]
        parallel = min(len(tensors), concurrent or len(tensors))
        # cuDNN may try its algorithms here, once for each convolution, unless the user wants determinism.
        with _choosing_algorithms(not torch.are_deterministic_algorithms_enabled()):
            program = self._on_side_stream(train_step, tensors[0], size, compiled, parallel)
            self.graph = torch.cuda.CUDAGraph()
            streams = [torch.cuda.Stream() for _ in range(parallel)]
            with torch.cuda.graph(self.graph):
                _fan_out(program, [[each[name] for name in self.names] for each in tensors], streams)
                self.count_step(self.static)

    def _on_side_stream(
        self, train_step: TrainStep, tensors: State, size: int, compiled: bool, parallel: int
    ) -> Program:
        """Record, compile and warm up on a stream that is not the default one, as capturing wants."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            program = self._record(train_step, tensors, size, compiled, parallel, advance=False)
            for _ in range(2):
                scratch = clone(tensors)
                program(*(scratch[name] for name in self.names))
        torch.cuda.current_stream().wait_stream(stream)
        return program

    def run(self, state: State) -> None:
        """Take one step."""
        for name in ("batch.x", "batch.y"):
            if name in state:
                self.static[name].copy_(state[name], non_blocking=True)
        self.graph.replay()


@contextmanager
def _choosing_algorithms(choose: bool) -> Iterator[None]:
    # Not cudnn.flags: it also sets what it is not told, the use of TF32 among it.
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or choose
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _fan_out(
    program: Program, arguments: Sequence[Sequence[Tensor]], streams: Sequence[torch.cuda.Stream]
) -> None:
    """Run the program on each list of tensors, as many side by side as there are streams."""
    if len(streams) == 1:
        for tensors in arguments:
            program(*tensors)
        return
    main = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(main)
    for index, tensors in enumerate(arguments):
        with torch.cuda.stream(streams[index % len(streams)]):
            program(*tensors)
    for stream in streams:
        main.wait_stream(stream)


def runs_by_member(train_step: TrainStep, state: State, concurrent: int | None) -> bool:
    """Whether each member gets a program of its own: asked for, or faster, as for convolutions; and the same thing."""
    members = train_step.members
    on_streams = state["index"].is_cuda and any(
        isinstance(m, torch.nn.modules.conv._ConvNd) for m in members.modules()
    )
    faster = on_streams or (isinstance(members, DeepEnsemble) and members.faster_apart)
    return (faster or concurrent is not None) and why_not_by_member(train_step, state) is None
