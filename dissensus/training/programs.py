"""How a step is put together from recorded programs: one for all members, one each, or parts around a comparison."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dissensus.training import timings
from dissensus.training.recording import (
    Program,
    compile_program,
    has_foreign_code,
    record,
    record_function,
    row_of,
    single_member_step,
)
from dissensus.training.rewriting import take_out_counters
from dissensus.training.splitting import split_at_last_input
from dissensus.training.step import State, TrainStep
from dissensus.training.undoing import clone

# Calls a function for every index from 0 to a count, one after another or side by side.
FanOut = Callable[[Callable[[int], None], int], None]


class Work(ABC):
    """The recorded programs of one step.

    Attributes:
        key: Name of the step under which its times are remembered.
        counters: How much the step adds to BatchNorm's counters, where that was taken out of the programs.
    """

    key: str
    counters: dict[str, int]

    @abstractmethod
    def __init__(
        self, train_step: TrainStep, state: State, size: int, compiled: bool, *, count: bool, parallel: int
    ) -> None:
        """Record, and compile if asked; `count`: the program itself counts steps and passes."""

    @abstractmethod
    def run(self, state: State, fan_out: FanOut) -> None:
        """Take one step, but for what `count_step` adds."""

    @abstractmethod
    def warm_up(self, state: State) -> None:
        """Run every program once on a state that is thrown away."""

    def count_step(self, state: State) -> None:
        """Count the step, and the passes of BatchNorm layers, for all members at once."""
        torch._foreach_add_([state["index"], state["position"]], 1)
        for amount in set(self.counters.values()):
            torch._foreach_add_(
                [state[name] for name, added in self.counters.items() if added == amount], amount
            )


class Whole(Work):
    """One program for all members."""

    def __init__(
        self, train_step: TrainStep, state: State, size: int, compiled: bool, *, count: bool, parallel: int
    ) -> None:
        self.names, self.counts_itself = sorted(state), count
        recorded = record(train_step, state, self.names, size, advance=count)
        self.counters = {} if count else take_out_counters(recorded, self.names)
        self.key = _key(recorded.code, state, self.names, parallel)
        # Comparing members takes many small kernels. Combined, a step of two heads of fifty took 0.83 of the time on an H200.
        combine = state["index"].is_cuda and train_step.objective.couples
        self.program = _finished(recorded, compiled, combine)

    def run(self, state: State, fan_out: FanOut) -> None:
        """Take one step."""
        self.program(*(state[name] for name in self.names))

    def warm_up(self, state: State) -> None:
        """Run the program once."""
        self.program(*(state[name] for name in self.names))

    def count_step(self, state: State) -> None:
        """Count the step, unless the program does."""
        if not self.counts_itself:
            super().count_step(state)


class ByMember(Work):
    """One program, run on one member's tensors after another's: nothing is compared, so that is the whole step."""

    def __init__(
        self, train_step: TrainStep, state: State, size: int, compiled: bool, *, count: bool, parallel: int
    ) -> None:
        self.names = sorted(state)
        self.feed, self.num_trained = train_step.feed, train_step.members.num_trained
        row = row_of(state, 0, self.feed)
        recorded = record(single_member_step(train_step), row, self.names, size, advance=False)
        self.counters = take_out_counters(recorded, self.names)
        self.key = _key(recorded.code, row, self.names, parallel)
        self.program = _finished(recorded, compiled)

    def run(self, state: State, fan_out: FanOut) -> None:
        """Take one step of every member."""

        def step(index: int) -> None:
            row = row_of(state, index, self.feed)
            self.program(*(row[name] for name in self.names))

        fan_out(step, self.num_trained)

    def warm_up(self, state: State) -> None:
        """Take one member's step."""
        row = row_of(state, 0, self.feed)
        self.program(*(row[name] for name in self.names))


class InParts(Work):
    """Each member's forward pass, one program that compares all outputs, each member's backward pass and update."""

    def __init__(
        self, train_step: TrainStep, state: State, size: int, compiled: bool, *, count: bool, parallel: int
    ) -> None:
        self.names = sorted(state)
        self.feed, self.num_trained = train_step.feed, train_step.members.num_trained
        row = row_of(state, 0, self.feed)
        single = single_member_step(train_step)
        with torch.no_grad():
            output, _ = single.run_forward(clone(row), size)

        def step(*tensors: Tensor) -> Tensor:
            given = dict(zip(self.names, tensors[:-1], strict=True))
            result, leaves = single.run_forward(given, size)
            single.run_backward(given, result, leaves, tensors[-1])
            return result

        def judge(*tensors: Tensor) -> Tensor:
            return train_step.judge(dict(zip(self.names, tensors[:-1], strict=True)), size, tensors[-1])

        def one(weights: float) -> list[Tensor]:
            copies = clone(row, weights)
            return [*(copies[n] for n in self.names), torch.zeros_like(output)]

        def everyone(weights: float) -> list[Tensor]:
            copies = clone(state)
            return [*(copies[n] for n in self.names), torch.cat([weights * output] * self.num_trained)]

        foreign = has_foreign_code(train_step)
        recorded = record_function(step, one, twice=foreign)
        self.counters = take_out_counters(recorded, [*self.names, ""])
        forward, backward = split_at_last_input(recorded)
        judging = record_function(judge, everyone, twice=foreign)
        self.key = _key(recorded.code + judging.code, state, self.names, parallel)
        self.forward, self.judge = _finished(forward, compiled), _finished(judging, compiled)
        self.backward = _finished(backward, compiled)

    def run(self, state: State, fan_out: FanOut) -> None:
        """Take one step."""
        results: list[Any] = [None] * self.num_trained

        def forward(index: int) -> None:
            results[index] = self.forward(*self._row(state, index))

        def backward(index: int) -> None:
            self.backward(*self._row(state, index), gradients[index : index + 1], *results[index][1:])

        fan_out(forward, self.num_trained)
        outputs = torch.cat([result[0] for result in results])
        gradients = self.judge(*(state[name] for name in self.names), outputs)
        fan_out(backward, self.num_trained)

    def warm_up(self, state: State) -> None:
        """Take one member's step, with its outputs standing for everyone's."""
        row = self._row(state, 0)
        result = self.forward(*row)
        gradients = self.judge(*(state[n] for n in self.names), torch.cat([result[0]] * self.num_trained))
        self.backward(*row, gradients[:1], *result[1:])

    def _row(self, state: State, index: int) -> list[Tensor]:
        row = row_of(state, index, self.feed)
        return [row[name] for name in self.names]


def _key(code: str, state: State, names: list[str], parallel: int) -> str:
    # Not the schedule's factors, one for each step of the run: a longer run is of the same steps.
    return timings.step_key(code, [state[name] for name in names if name != "factors"], parallel)


def _finished(recorded: torch.fx.GraphModule, compiled: bool, combine: bool = False) -> Program:
    if not compiled:
        return recorded
    with warnings.catch_warnings():
        # Compiling warns of torch's own affairs: deprecations inside it, settings that might be faster.
        warnings.simplefilter("ignore")
        return compile_program(recorded, combine)
