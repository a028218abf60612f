"""How a step is put together from traced programs: one for all members, one each, or parts around a comparison."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dissensus.engines.rewriting import split_at_last_input, take_out_counters
from dissensus.engines.trace import Program, compile_program, shapes_of, trace, work_in
from dissensus.objectives.objective import OutputObjective
from dissensus.training.state import TrainState
from dissensus.training.step import TrainStep

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
        self.run_program = {
            name: compile_program(program, self.combine) for name, program in self.programs.items()
        }

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
        shape = shapes_of(
            lambda *tensors: single.run_forward(row.with_leaves(tensors), size)[0], row.leaves(), modules
        )
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


def plan_of(train_step: TrainStep, state: TrainState, concurrent: int | None) -> type[Plan]:
    """Return how a step is put together: each member on its own where that is the same and faster or asked for."""
    members = train_step.members
    on_streams = state.index.is_cuda and any(
        isinstance(m, torch.nn.modules.conv._ConvNd) for m in members.modules()
    )
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
