"""Engines: how training steps are executed. They change speed only, never the numbers.

`eager` runs a step as Python. `captured` traces its tensor operations once and replays them, free of Python's, autograd's and vmap's
overhead; on a GPU as one CUDA graph. `compiled` also compiles what was traced. A run's first step is eager: in it members decide how they
run, and the objective shows what it logs. Nothing is tried that would have to be undone.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dissensus.engines.graphs import capture, in_turn, side_by_side
from dissensus.engines.trace import (
    NotTraceableError,
    Program,
    alone,
    compile_program,
    no_sources_kept,
    shapes_of,
    split_at_last_input,
    take_out_counters,
    trace,
    work_in,
)
from dissensus.objectives.objective import OutputObjective
from dissensus.training.mesh import MeshStep
from dissensus.training.step import Eager, Engine, TrainState, TrainStep

# Calls a function for every index from 0 to a count, one after another or side by side.
FanOut = Callable[[Callable[[int], None], int], None]


class Plan(ABC):
    """The programs of one step, bound to the tensors of one state.

    Attributes:
        programs: The traced programs by name.
        counters: How much the step adds to BatchNorm's counters, by place in the state, where that was taken out of the programs.
    """

    programs: dict[str, torch.fx.GraphModule]
    counters: dict[str, int]

    def __init__(self, train_step: TrainStep, state: TrainState, size: int) -> None:
        self.state, self.own_order = state, train_step.feed.own
        self.num_trained = train_step.members.num_trained
        self.combine = False
        self._trace(train_step, state, size)
        self.run_program: dict[str, Program] = dict(self.programs)
        self._counted = {
            tensor: self.counters[name]
            for name, tensor in zip(state.names(), state.leaves(), strict=True)
            if name in self.counters
        }
        self.bind()

    @abstractmethod
    def _trace(self, train_step: TrainStep, state: TrainState, size: int) -> None:
        """Trace the programs."""

    @abstractmethod
    def bind(self) -> None:
        """Look up the tensors that programs run on; again where the state has others, such as another batch."""

    @abstractmethod
    def run(self, fan_out: FanOut) -> None:
        """Take one step, but for what `count_step` adds."""

    @property
    def work(self) -> tuple[int, float]:
        """How many operations a step has, and how many numbers it multiplies and adds."""
        counts = [work_in(program) for program in self.programs.values()]
        return sum(count for count, _ in counts), sum(work for _, work in counts)

    def compile(self) -> None:
        """Have the programs compiled when they first run."""
        self.run_program = {name: compile_program(program, self.combine) for name, program in self.programs.items()}

    def count_step(self) -> None:
        """Count the step, and the passes of BatchNorm layers, for all members at once."""
        torch._foreach_add_([self.state.index, self.state.data["position"]], 1)
        for amount in set(self._counted.values()):
            torch._foreach_add_([t for t, added in self._counted.items() if added == amount], amount)

    def _row(self, index: int) -> list[Tensor]:
        return self.state.row(index, self.own_order).leaves()


class Whole(Plan):
    """One program for all members."""

    def _trace(self, train_step: TrainStep, state: TrainState, size: int) -> None:
        def step(*tensors: Tensor) -> tuple[()]:
            train_step(state.with_leaves(tensors), size, advance=False)
            return ()

        program = trace(step, state.leaves(), train_step.members.parts())
        self.counters = take_out_counters(program, state.names())
        self.programs = {"step": program}
        # Comparing members takes many small kernels. Combined, a step of two heads of fifty took 0.83 of the time on an H200.
        self.combine = state.index.is_cuda and train_step.objective.couples

    def bind(self) -> None:
        """Look up all tensors."""
        self.tensors = self.state.leaves()

    def run(self, fan_out: FanOut) -> None:
        """Take one step."""
        self.run_program["step"](*self.tensors)


class ByMember(Plan):
    """One program, run on one member's tensors after another's: nothing is compared, so that is the whole step."""

    def _trace(self, train_step: TrainStep, state: TrainState, size: int) -> None:
        single, row = single_member_step(train_step), state.row(0, self.own_order)

        def step(*tensors: Tensor) -> tuple[()]:
            single(row.with_leaves(tensors), size, advance=False)
            return ()

        program = trace(step, row.leaves(), single.members.parts())
        self.counters = take_out_counters(program, row.names())
        self.programs = {"step": program}

    def bind(self) -> None:
        """Look up every member's tensors."""
        self.rows = [self._row(index) for index in range(self.num_trained)]

    def run(self, fan_out: FanOut) -> None:
        """Take one step of every member."""
        fan_out(lambda index: self.run_program["step"](*self.rows[index]), self.num_trained)


class InParts(Plan):
    """Each member's forward pass, one program that compares all outputs, each member's backward pass and update."""

    def _trace(self, train_step: TrainStep, state: TrainState, size: int) -> None:
        single, row = single_member_step(train_step), state.row(0, self.own_order)

        def step(*tensors: Tensor) -> Tensor:
            given = row.with_leaves(tensors[:-1])
            result, leaves = single.run_forward(given, size)
            single.run_backward(given, result, leaves, tensors[-1])
            return result

        def judge(*tensors: Tensor) -> Tensor:
            return train_step.judge(state.with_leaves(tensors[:-1]), size, tensors[-1])

        modules = list(single.members.parts())
        shape = shapes_of(lambda *tensors: single.run_forward(row.with_leaves(tensors), size)[0], row.leaves(), modules)
        output = torch.zeros(shape.shape, dtype=shape.dtype, device=state.index.device)
        program = trace(step, [*row.leaves(), output], modules)
        self.counters = take_out_counters(program, [*row.names(), ""])
        forward, backward = split_at_last_input(program)
        outputs = torch.cat([output] * self.num_trained)
        judging = trace(judge, [*state.leaves(), outputs], train_step.members.parts())
        self.programs = {"forward": forward, "judge": judging, "backward": backward}

    def bind(self) -> None:
        """Look up all tensors, and every member's."""
        self.tensors = self.state.leaves()
        self.rows = [self._row(index) for index in range(self.num_trained)]

    def run(self, fan_out: FanOut) -> None:
        """Take one step."""
        programs = self.run_program
        results: list[Any] = [None] * self.num_trained

        def forward(index: int) -> None:
            results[index] = programs["forward"](*self.rows[index])

        def backward(index: int) -> None:
            programs["backward"](*self.rows[index], gradients[index : index + 1], *results[index][1:])

        fan_out(forward, self.num_trained)
        outputs = torch.cat([result[0] for result in results])
        gradients = programs["judge"](*self.tensors, outputs)
        fan_out(backward, self.num_trained)


class OnMesh(Plan):
    """This process's members' forward pass, one program that compares the exchanged outputs, and its members' backward pass and update.

    Outputs are exchanged between programs; so are gradients, before the update, where batches are cut.
    """

    def _trace(self, train_step: TrainStep, state: TrainState, size: int) -> None:
        assert isinstance(train_step, MeshStep)
        self.step, self.size = train_step, size
        modules = list(train_step.members.parts())
        batch_is_cut = train_step.mesh.data > 1
        if batch_is_cut and any(isinstance(module, torch.nn.SyncBatchNorm) for module in modules):
            raise NotTraceableError("SyncBatchNorm asks other processes in the middle of a pass")

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = state.with_leaves(tensors[:-1])
            outputs, leaves, rows = train_step.forward(given, size)
            gradients = torch.autograd.grad(outputs, leaves, tensors[-1], materialize_grads=True)
            if batch_is_cut:
                return outputs, *gradients
            train_step.update(given, gradients, rows)
            return (outputs,)

        def judge(*tensors: Tensor) -> Tensor:
            return train_step.judge(state.with_leaves(tensors[:-1]), size, tensors[-1])

        def update(*tensors: Tensor) -> tuple[()]:
            given = state.with_leaves(tensors[: -len(state.parameters)])
            train_step.update(given, tensors[-len(state.parameters) :], train_step.rows(given, size))
            return ()

        def forward(*tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
            outputs, leaves, _ = train_step.forward(state.with_leaves(tensors), size)
            return outputs, leaves

        output, leaves = shapes_of(forward, state.leaves(), modules)
        own = torch.zeros(output.shape, dtype=output.dtype, device=state.index.device)
        program = trace(step, [*state.leaves(), own], modules)
        self.counters = take_out_counters(program, [*state.names(), ""])
        self.programs = dict(zip(("forward", "backward"), split_at_last_input(program), strict=True))
        if not train_step.asks_others:
            count = self.num_trained if train_step.compares else len(own)
            judged = own.new_zeros((count, size, *own.shape[2:]))
            self.programs["judge"] = trace(judge, [*state.leaves(), judged], modules)
        if batch_is_cut:
            gradients = [torch.zeros(t.shape, dtype=t.dtype, device=own.device) for t in leaves]
            self.programs["update"] = trace(update, [*state.leaves(), *gradients], modules)

    def bind(self) -> None:
        """Look up all tensors."""
        self.tensors = self.state.leaves()

    def run(self, fan_out: FanOut) -> None:
        """Take this process's part of one step."""
        programs, step = self.run_program, self.step
        outputs, *kept = programs["forward"](*self.tensors)
        judged = step.exchange(outputs, self.size)
        if step.asks_others:
            gradient = step.judge(self.state, self.size, judged)
        else:
            gradient = programs["judge"](*self.tensors, judged)
        gradients = programs["backward"](*self.tensors, gradient, *kept)
        if gradients:
            programs["update"](*self.tensors, *map(step.mesh.sum_over_data, gradients))


def plan_of(train_step: TrainStep, state: TrainState, concurrent: int | None) -> type[Plan]:
    """Return how a step is put together: each member on its own where that is the same and faster or asked for."""
    if isinstance(train_step, MeshStep):
        return OnMesh
    members = train_step.members
    on_streams = state.index.is_cuda and any(isinstance(m, torch.nn.modules.conv._ConvNd) for m in members.modules())
    faster = on_streams or members.faster_apart
    if (faster or concurrent is not None) and why_not_by_member(train_step, state) is None:
        return ByMember
    return InParts if faster and why_not_in_parts(train_step, state) is None else Whole


def why_not_by_member(train_step: TrainStep, state: TrainState) -> str | None:
    """Say why the step is not the same as one separate step for each member; None if it is."""
    if train_step.objective.couples:
        return "the objective couples members"
    if any(logged.ndim == 0 for logged in state.sums.values()):
        return "the objective logs values of the whole ensemble"
    return _why_not_one_program_each(train_step, state)


def why_not_in_parts(train_step: TrainStep, state: TrainState) -> str | None:
    """Say why the step is not members' forward passes, a comparison of outputs, and members' backward passes."""
    if not isinstance(train_step.objective, OutputObjective) or not train_step.objective.outputs_only:
        return "the objective needs more than the members' outputs"
    if train_step.accumulate > 1:
        return "gradients are added up over parts of a batch"
    return _why_not_one_program_each(train_step, state)


def _why_not_one_program_each(train_step: TrainStep, state: TrainState) -> str | None:
    """Say why one member's program on every member's tensors is not the ensemble; None if it is."""
    members = train_step.members
    if (reason := members.why_not_single()) is not None:
        return reason
    if train_step.picks(state):
        return "the objective picks members"
    return None


def single_member_step(train_step: TrainStep) -> TrainStep:
    """Return the step for an ensemble of one member; its tensors come with the state."""
    blocks = [replace(block, stacked=False, members=(0,), flat=block.flat[:1]) for block in train_step.blocks]
    return replace(train_step, members=train_step.members.single(), blocks=blocks)


log = logging.getLogger("dissensus")

EngineName = Literal["auto", "eager", "captured", "compiled"]
ENGINES = get_args(EngineName)


class Recorded(Engine):
    """Traces a step once for each shape of batches and replays it, compiled or not."""

    def __init__(self, train_step: TrainStep, concurrent: int | None = None) -> None:
        self.train_step, self.concurrent = train_step, concurrent
        self.name = "captured"
        self.replays: dict[tuple[Any, ...], Replay] = {}

    def prepare(self, state: TrainState, size: int) -> "Replay":
        """Return the program for batches of this shape, traced when first asked for."""
        shape = (size, *(t.shape for name, t in state.data.items() if name.startswith("batch.")))
        if shape not in self.replays:
            # What processes exchange goes between programs, not into a graph.
            graphs = state.index.is_cuda and not isinstance(self.train_step, MeshStep)
            kind = GraphReplay if graphs else Replay
            with alone, no_sources_kept():
                self.replays[shape] = kind(self.train_step, state, size, self.concurrent)
        return self.replays[shape]

    def compile(self, state: TrainState, size: int) -> "Recorded":
        """Compile the step for batches of this shape; a smaller last batch is not worth it."""
        self.name = "compiled"
        self.prepare(state, size).plan.compile()
        return self

    def take(self, state: TrainState, size: int, limit: int) -> int:
        """Take one step, or several where they are one program."""
        return self.prepare(state, size).take(state, limit)


class Replay:
    """A traced step as a function of the state's tensors."""

    def __init__(self, train_step: TrainStep, state: TrainState, size: int, concurrent: int | None) -> None:
        self.plan: Plan = plan_of(train_step, state, concurrent)(train_step, state, size)
        self.batch = [name for name in state.data if name.startswith("batch.")]

    def take(self, state: TrainState, limit: int) -> int:
        """Take one step; return how many were taken."""
        if self.batch:
            self.plan.bind()
        self.plan.run(in_turn)
        self.plan.count_step()
        return 1


# Steps before a graph is captured: in them libraries choose their kernels, compilers compile.
WARM_UP_STEPS = 3


class GraphReplay(Replay):
    """A traced step as one CUDA graph on fixed memory.

    Members that convolve run as programs of their own, on streams of their own: vmap would turn their convolutions into
    grouped ones, which are slower. Others run as one batched program. `concurrent` limits how many members are in flight,
    and so the memory they need.
    """

    def __init__(self, train_step: TrainStep, state: TrainState, size: int, concurrent: int | None) -> None:
        static = state.with_leaves(state.leaves())
        for name in [name for name in state.data if name.startswith("batch.")]:
            static.data[name] = state.data[name].clone()
        super().__init__(train_step, static, size, concurrent)
        count = 1 if isinstance(self.plan, Whole) else train_step.members.num_trained
        self.streams = [torch.cuda.Stream() for _ in range(min(count, concurrent or count))]
        self.pace = Pace(train_step.total_steps)
        self.steps, self.side = 0, torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.several: torch.cuda.CUDAGraph | None = None

    def take(self, state: TrainState, limit: int) -> int:
        """Take one step, or a graph of several once steps turned out to be short."""
        for name in self.batch:
            self.plan.state.data[name].copy_(state.data[name], non_blocking=True)
        if self.steps < WARM_UP_STEPS:
            self._warm_up()
            return 1
        if self.graph is None:
            self.graph = self._capture(1)
        if limit < AT_ONCE or not self.pace.short():
            self.graph.replay()
            return 1
        if self.several is None:
            self.several = self._capture(AT_ONCE)
        self.several.replay()
        return AT_ONCE

    def _warm_up(self) -> None:
        """Take one step, members in turn, as capturing wants it: on a stream that is not the default one."""
        self.steps += 1
        self.side.wait_stream(torch.cuda.current_stream())
        # cuDNN may try its algorithms here, once for each convolution, unless the user wants determinism.
        with (
            alone,
            _choosing_algorithms(not torch.are_deterministic_algorithms_enabled()),
            torch.cuda.stream(self.side),
        ):
            self._step(in_turn)
        torch.cuda.current_stream().wait_stream(self.side)

    def _step(self, fan_out: Callable[[Callable[[int], None], int], None]) -> None:
        self.plan.run(fan_out)
        self.plan.count_step()

    def _capture(self, steps: int) -> torch.cuda.CUDAGraph:
        def work() -> None:
            for _ in range(steps):
                self._step(partial(side_by_side, streams=self.streams))

        with alone, _choosing_algorithms(not torch.are_deterministic_algorithms_enabled()):
            return capture(work)[0]


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
def _choosing_algorithms(choose: bool) -> Iterator[None]:
    # Not cudnn.flags: it also sets what it is not told, the use of TF32 among it.
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or choose
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


def check_engine(name: str, traceable: bool) -> None:
    """Refuse an engine that the optimizer cannot run with."""
    if not traceable:
        raise ValueError(f"engine={name!r} needs sgd, adam or adamw; other optimizers run with engine='eager'.")


def choose_engine(
    name: str, train_step: TrainStep, state: TrainState, size: int, steps: int, concurrent: int | None = None
) -> Engine:
    """Return the engine asked for (other than the eager one), or by a rule the one that will finish `steps` steps soonest."""
    free = name == "auto" and concurrent is None
    if free and (steps < TRACE_STEPS or not train_step.optimizer.traceable):
        return Eager(train_step)
    if concurrent:
        _prepare_by_member(train_step, state, size)
    engine = Recorded(train_step, concurrent)
    try:
        plan = engine.prepare(state, size).plan
    except NotTraceableError as problem:
        reason = _random_members(train_step) or str(problem)
        if not free:
            raise ValueError(f"The step cannot be traced: {reason}. Use engine='eager'.") from problem
        log.info("training runs eagerly: the step cannot be traced (%s)", reason)
        return Eager(train_step)
    if name == "auto":
        # Not on a mesh: others would wait for one process that compiles.
        pays = not isinstance(plan, OnMesh) and compiling_pays(plan, steps)
        name = "compiled" if pays else "captured"
    return engine.compile(state, size) if name == "compiled" else engine


def compiling_pays(plan: Plan, steps: int) -> bool:
    """Whether so many steps gain more by a compiled program than compiling it takes."""
    operations, work = plan.work
    device = plan.state.index.device.type
    seconds = operations * OPERATION_SECONDS[device] + work / WORK_A_SECOND[device]
    if not isinstance(plan, Whole):
        seconds *= plan.num_trained
    return steps * seconds * (1 - 1 / COMPILE_GAIN) > COMPILE_SECONDS + operations * COMPILE_SECONDS_EACH


def _random_members(train_step: TrainStep) -> str | None:
    """Say that members draw random numbers, which are made to follow their seeds one by one; None if they do not."""
    reason = getattr(train_step.members, "execution_reason", None) or ""
    return reason if "draws random numbers" in reason else None


def _prepare_by_member(train_step: TrainStep, state: TrainState, size: int) -> None:
    """Give what one member logs its place in the state, or say why members do not train one by one; nothing is computed."""
    reason = why_not_by_member(train_step, state)
    if reason is None and not state.sums:
        single, row = single_member_step(train_step), state.row(0, train_step.feed.own)

        def logged(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            given = row.with_leaves(tensors)
            single(given, size, advance=False)
            return given.sums

        for name, value in shapes_of(logged, row.leaves(), single.members.parts()).items():
            train_step.make_sum(state, name, (train_step.members.num_trained,) if value.ndim else ())
        reason = why_not_by_member(train_step, state)
    if reason is not None:
        raise ValueError(f"`concurrent_members` trains members one by one, and {reason}. Leave it out.")
