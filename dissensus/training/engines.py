"""Engines: how training steps are executed. They change speed only, never the numbers.

`eager` runs a step as Python. `captured` traces its tensor operations once and replays them, free of Python's, autograd's and vmap's
overhead; on a GPU as one CUDA graph. `compiled` also compiles what was traced. A run's first step is eager: in it members decide how they
run, and the objective shows what it logs. Nothing is tried that would have to be undone.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dissensus.engines.graphs import capture, in_turn, side_by_side
from dissensus.engines.trace import (
    NotTraceableError,
    alone,
    compile_program,
    no_sources_kept,
    shapes_of,
    split_at_last_input,
    take_out_counters,
    trace,
    work_in,
)
from dissensus.members import Members
from dissensus.objectives.objective import OutputObjective
from dissensus.training.mesh import MeshStep
from dissensus.training.optimizers import SeparateOptimizers
from dissensus.training.state import TrainState
from dissensus.training.step import TrainStep

log = logging.getLogger("dissensus")

EngineName = Literal["auto", "eager", "captured", "compiled"]
ENGINES = get_args(EngineName)
# Calls a function for every index from 0 to a count, one after another or side by side.
FanOut = Callable[[Callable[[int], None], int], None]
# How a step is put together: one program for all members; one member's program, run on every member's tensors; one member's forward
# pass, a program that compares all outputs, and one member's backward pass and update; or these three of a process's members, which
# exchange outputs with those of other processes in between.
Form = Literal["whole", "by member", "in parts", "on mesh"]


def form_of(train_step: TrainStep, state: TrainState) -> Form:
    """Return how a step is put together: each member on its own where that is the same and faster or asked for."""
    if isinstance(train_step, MeshStep):
        return "on mesh"
    members, objective, settings = train_step.members, train_step.objective, train_step.settings
    # Those that convolve do so faster on streams of a GPU.
    on_streams = state.index.is_cuda and any(isinstance(m, torch.nn.modules.conv._ConvNd) for m in members.modules())
    faster = on_streams or members.faster_apart
    if (faster or settings.concurrent_members is not None) and why_not_by_member(train_step, state) is None:
        return "by member"
    on_outputs = isinstance(objective, OutputObjective) and objective.outputs_only
    in_parts = on_outputs and settings.accumulate == 1 and train_step.why_not_single is None
    return "in parts" if faster and in_parts else "whole"


def why_not_by_member(train_step: TrainStep, state: TrainState) -> str | None:
    """Say why the step is not the same as one separate step for each member; None if it is."""
    if train_step.objective.couples:
        return "the objective couples members"
    if any(logged.ndim == 0 for logged in state.sums.values()):
        return "the objective logs values of the whole ensemble"
    return train_step.why_not_single


def single_member_step(train_step: TrainStep) -> TrainStep:
    """Return the step for an ensemble of one member; its tensors come with the state."""
    blocks = [replace(block, stacked=False, members=(0,), flat=block.flat[:1]) for block in train_step.blocks]
    return replace(train_step, members=train_step.members.single(), blocks=blocks)


def _traced(function: Callable[..., Any], state: TrainState, members: Members, *more: Tensor, by: Any = trace) -> Any:
    """Trace a function of a state, and of further tensors, that runs these members."""
    own = state.leaves()
    return by(lambda *given: function(state.with_leaves(given), *given[len(own) :]), [*own, *more], members.parts())


class Replay:
    """A traced step: its programs, bound to the tensors of one state, and run again and again."""

    def __init__(self, train_step: TrainStep, state: TrainState, size: int) -> None:
        self.form = form_of(train_step, state)
        self.train_step, self.state, self.size = train_step, state, size
        self.apart = self.form in ("by member", "in parts")
        # `step`, or `forward`, `judge` and `backward`, and `update` where gradients are exchanged.
        self.programs: dict[str, Any] = {}
        # How much the step adds to BatchNorm's counters, by place in the state, where that was taken out of the programs.
        self.counters: dict[str, int] = {}
        one, given = train_step, state
        if self.apart:
            one, given = single_member_step(train_step), state.row(0, train_step.feed.own)
        (self._trace_parts if self.form in ("in parts", "on mesh") else self._trace_whole)(one, given)
        counted = [(t, self.counters.get(name)) for name, t in zip(state.names(), state.leaves(), strict=True)]
        self._counted = {n: [t for t, added in counted if added == n] for n in set(self.counters.values())}
        self.bind()

    def _trace_whole(self, one: TrainStep, given: TrainState) -> None:
        """Trace a step of one member, or of all, on tensors like the given ones."""

        def step(state: TrainState) -> tuple[()]:
            one(state, self.size, advance=False)
            return ()

        self.programs["step"] = program = _traced(step, given, one.members)
        self.counters = take_out_counters(program, given.names())

    def _trace_parts(self, one: TrainStep, given: TrainState) -> None:
        whole, size, members = self.train_step, self.size, one.members
        if whole.batch_is_cut and any(isinstance(module, torch.nn.SyncBatchNorm) for module in members.parts()):
            raise NotTraceableError("SyncBatchNorm asks other processes in the middle of a pass")

        def forward(state: TrainState) -> tuple[Tensor, list[Tensor]]:
            begun = one.begin(state, size)
            return one.outputs(begun), begun.leaves

        def step(state: TrainState, gradient: Tensor) -> tuple[Tensor | None, ...]:
            begun = one.begin(state, size)
            outputs = one.outputs(begun)
            gradients = one.backward(outputs, begun.leaves, gradient)
            if whole.batch_is_cut:
                return outputs, *gradients
            one.descend(begun, gradients)
            return (outputs,)

        def judge(state: TrainState, outputs: Tensor) -> Tensor:
            return whole.judge(whole.begin(state, size), outputs)

        def update(state: TrainState, *gradients: Tensor) -> tuple[()]:
            one.descend(one.begin(state, size), gradients)
            return ()

        output, leaves = _traced(forward, given, members, by=shapes_of)
        own = torch.zeros(output.shape, dtype=output.dtype, device=given.index.device)
        program = _traced(step, given, members, own)
        self.counters = take_out_counters(program, [*given.names(), ""])
        self.programs["forward"], self.programs["backward"] = split_at_last_input(program)
        if not whole.asks_others:
            count = whole.members.num_trained if whole.compares else len(own)
            judged = own.new_zeros((count, size, *own.shape[2:]))
            self.programs["judge"] = _traced(judge, self.state, whole.members, judged)
        if whole.batch_is_cut:
            gradients = [torch.zeros(t.shape, dtype=t.dtype, device=own.device) for t in leaves]
            self.programs["update"] = _traced(update, given, members, *gradients)

    def bind(self) -> None:
        """Look up the tensors of each run of a program, every member's or all; again where the state has others, such as a batch."""
        own, members = self.train_step.feed.own, range(self.train_step.members.num_trained)
        self.tensors = self.state.leaves()
        self.units = [self.state.row(index, own).leaves() for index in members] if self.apart else [self.tensors]

    @property
    def work(self) -> tuple[int, float]:
        """How many operations a step has, and how many numbers it multiplies and adds; before it is compiled."""
        counts = [work_in(program) for program in self.programs.values()]
        return sum(count for count, _ in counts), sum(work for _, work in counts)

    def compile(self) -> None:
        """Have the programs compiled when they first run."""
        # Comparing members takes many small kernels. Combined, a step of two heads of fifty took 0.83 of the time on an H200.
        combine = self.state.index.is_cuda and self.form == "whole" and self.train_step.objective.couples
        self.programs = {name: compile_program(program, combine) for name, program in self.programs.items()}

    def take(self, state: TrainState, limit: int) -> int:
        """Take one step, or up to `limit` at once where they are one program; return how many."""
        if self.train_step.feed.placed:
            self.bind()
        self.run(in_turn)
        return 1

    def run(self, fan_out: FanOut) -> None:
        """Take one step, and count it and the passes of BatchNorm layers, for all members at once."""
        if "step" in self.programs:
            fan_out(lambda index: self.programs["step"](*self.units[index]), len(self.units))
        else:
            self._run_parts(fan_out)
        torch._foreach_add_([self.state.index, self.state.data["position"]], 1)
        for amount, tensors in self._counted.items():
            torch._foreach_add_(tensors, amount)

    def _run_parts(self, fan_out: FanOut) -> None:
        step, programs, units = self.train_step, self.programs, self.units
        results: list[Any] = [None] * len(units)

        def forward(index: int) -> None:
            results[index] = programs["forward"](*units[index])

        def backward(index: int) -> None:
            own = gradient[index : index + 1] if self.apart else gradient
            found = programs["backward"](*units[index], own, *results[index][1:])
            if isinstance(step, MeshStep) and step.batch_is_cut:
                programs["update"](*units[index], *map(step.mesh.sum_over_data, found))

        fan_out(forward, len(units))
        outputs = step.exchange(torch.cat([result[0] for result in results]), self.size)
        if step.asks_others:
            gradient = step.judge(step.begin(self.state, self.size), outputs)
        else:
            gradient = programs["judge"](*self.tensors, outputs)
        fan_out(backward, len(units))


# Steps before a graph is captured: in them libraries choose their kernels, compilers compile.
WARM_UP_STEPS = 3


class GraphReplay(Replay):
    """A traced step as one CUDA graph on fixed memory.

    Members that convolve run as programs of their own, on streams of their own: vmap would turn their convolutions into
    grouped ones, which are slower. Others run as one batched program. `concurrent_members` limits how many members are in
    flight, and so the memory they need.
    """

    def __init__(self, train_step: TrainStep, state: TrainState, size: int) -> None:
        static = state.with_leaves(state.leaves())
        if train_step.feed.placed:
            static.data["batch"] = tree_map(torch.clone, state.data["batch"])
        super().__init__(train_step, static, size)
        count = len(self.units)
        at_once = min(count, train_step.settings.concurrent_members or count)
        self.streams = [torch.cuda.Stream() for _ in range(at_once)]
        self.pace = Pace(train_step.total_steps)
        self.steps, self.side = 0, torch.cuda.Stream()
        # By how many steps they take.
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def take(self, state: TrainState, limit: int) -> int:
        """Take one step, or a graph of several once steps turned out to be short."""
        if self.train_step.feed.placed:
            for held, given in zip(*(tree_leaves(one.data["batch"]) for one in (self.state, state)), strict=True):
                held.copy_(given, non_blocking=True)
        if self.steps < WARM_UP_STEPS:
            self._warm_up()
            return 1
        steps = AT_ONCE if limit >= AT_ONCE and self.pace.short() else 1
        if steps not in self.graphs:
            self.graphs[steps] = self._capture(steps)
        self.graphs[steps].replay()
        return steps

    def _warm_up(self) -> None:
        """Take one step, members in turn, as capturing wants it: on a stream that is not the default one."""
        self.steps += 1
        self.side.wait_stream(torch.cuda.current_stream())
        with alone, _choosing_algorithms(), torch.cuda.stream(self.side):
            self.run(in_turn)
        torch.cuda.current_stream().wait_stream(self.side)

    def _capture(self, steps: int) -> torch.cuda.CUDAGraph:
        def work() -> None:
            for _ in range(steps):
                self.run(partial(side_by_side, streams=self.streams))

        with alone, _choosing_algorithms():
            return capture(work)[0]


class Recorded:
    """Traces a step once for each shape of batches and replays it, compiled or not."""

    def __init__(self, train_step: TrainStep) -> None:
        self.train_step, self.name = train_step, "captured"
        self.replays: dict[tuple[Any, ...], Replay] = {}

    def prepare(self, state: TrainState, size: int) -> Replay:
        """Return the program for batches of this shape, traced when first asked for."""
        batch = state.data["batch"] if self.train_step.feed.placed else ()
        shape = (size, *(leaf.shape for leaf in tree_leaves(batch)))
        if shape not in self.replays:
            # What processes exchange goes between programs, not into a graph.
            graphs = state.index.is_cuda and not isinstance(self.train_step, MeshStep)
            kind = GraphReplay if graphs else Replay
            with alone, no_sources_kept():
                self.replays[shape] = kind(self.train_step, state, size)
        return self.replays[shape]


# Between two graphs the device waits for about 5 us. Capturing more steps as one takes tens of milliseconds, so it is for
# short steps of long runs.
AT_ONCE, SHORT_MS, MANY_STEPS = 8, 0.5, 5000


class Pace:
    """How long a step takes on the device, found from some of the first ones without waiting for them."""

    first, last = 8, 24

    def __init__(self, total_steps: int) -> None:
        self.calls = 0
        self.found: bool | None = None if total_steps >= MANY_STEPS else False
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def short(self) -> bool:
        """Count a step that is about to begin; whether steps are known to be short."""
        if self.found is None:
            self.calls += 1
            if self.calls == self.first:
                self.start.record()
            elif self.calls == self.last:
                self.end.record()
            elif self.calls > self.last and self.end.query():
                milliseconds = self.start.elapsed_time(self.end) / (self.last - self.first)
                self.found = milliseconds < SHORT_MS
        return bool(self.found)


@contextmanager
def _choosing_algorithms() -> Iterator[None]:
    """Have cuDNN try its algorithms, once for each convolution, unless the user wants determinism."""
    # Not cudnn.flags: it also sets what it is not told, the use of TF32 among it.
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


# Tracing takes as long as the overhead that a program saves in so many eager steps: 0.4 to 0.9 s against 1.5 to 3 ms a step
# for MLPs on one core of an AMD EPYC; both grow with the number of operations.
TRACE_STEPS = 400
# Compiling: 8 s for an MLP's hundred operations and 43 s for the fifteen hundred of a ResNet-18 (H200, cold), and so for a CPU.
COMPILE_SECONDS, COMPILE_SECONDS_EACH = 5.0, 0.025
# What a replayed operation and its arithmetic take: of a core and of an H200. A compiled step takes 1/1.6 of it, or less.
OPERATION_SECONDS = {"cpu": 5e-6, "cuda": 2e-6}
WORK_A_SECOND = {"cpu": 2e10, "cuda": 3e13}
COMPILE_GAIN = 1.6


def choose_engine(name: str, train_step: TrainStep, state: TrainState, size: int, steps: int) -> Recorded | None:
    """Return the engine asked for, or by a rule the one that will finish `steps` steps soonest; None for steps as they are written."""
    concurrent = train_step.settings.concurrent_members is not None
    free = name == "auto" and not concurrent
    if free and (steps < TRACE_STEPS or isinstance(train_step.optimizer, SeparateOptimizers)):
        return None
    engine = Recorded(train_step)
    try:
        if concurrent:
            _prepare_by_member(train_step, state, size)
        replay = engine.prepare(state, size)
    except NotTraceableError as problem:
        # Members that draw random numbers follow their seeds one by one.
        reason = getattr(train_step.members, "execution_reason", None) or ""
        reason = reason if "draws random numbers" in reason else str(problem)
        if not free:
            recorded = name not in ("auto", "eager")
            advice = ["leave `concurrent_members` out"] * concurrent + ["use engine='eager'"] * recorded
            raise ValueError(f"The step cannot be traced: {reason}. To train, {' and '.join(advice)}.") from problem
        log.info("training runs eagerly: the step cannot be traced (%s)", reason)
        return None
    if name == "compiled" or (name == "auto" and compiling_pays(replay, steps)):
        # For batches of this shape; a smaller last batch is not worth it.
        replay.compile()
        engine.name = "compiled"
    return engine


def compiling_pays(replay: Replay, steps: int) -> bool:
    """Whether so many steps gain more by a compiled program than compiling it takes."""
    if replay.form == "on mesh":  # others would wait for the process that compiles
        return False
    operations, work = replay.work
    device = replay.state.index.device.type
    seconds = (operations * OPERATION_SECONDS[device] + work / WORK_A_SECOND[device]) * len(replay.units)
    return steps * seconds * (1 - 1 / COMPILE_GAIN) > COMPILE_SECONDS + operations * COMPILE_SECONDS_EACH


def _prepare_by_member(train_step: TrainStep, state: TrainState, size: int) -> None:
    """Give what one member logs its place in the state, or say why members do not train one by one; nothing is computed."""
    reason = why_not_by_member(train_step, state)
    if reason is None and not state.sums:
        single, row = single_member_step(train_step), state.row(0, train_step.feed.own)

        def logged(given: TrainState) -> dict[str, Tensor]:
            single(given, size, advance=False)
            return given.sums

        for name, value in _traced(logged, row, single.members, by=shapes_of).items():
            train_step.make_sum(state, name, (train_step.members.num_trained,) if value.ndim else ())
        reason = why_not_by_member(train_step, state)
    if reason is not None:
        raise ValueError(f"`concurrent_members` trains members one by one, and {reason}. Leave it out.")
