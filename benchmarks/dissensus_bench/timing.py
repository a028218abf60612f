"""Times of several sides, taken in turns in one run, so that what else the machine does meets all of them."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import dissensus as ds
from dissensus import objectives as obj
from dissensus.objectives.objective import Batches
from dissensus_bench.problems import Problem
from dissensus_bench.rivals import Turn


def seconds_a_step(turn: Turn, device: torch.device) -> float:
    """Return how long a step of a turn took, to the end of what it started on the device."""
    start = clock(device)
    counted = turn.run()
    spent = clock(device) - start if counted is None else counted
    return spent / turn.steps


def clock(device: torch.device) -> float:
    """Return the time in seconds: on a GPU the clock's once all work is done, on a CPU what this process has used.

    All sides use one thread, so processor time is what the clock would show on an idle machine; a neighbour's share of a
    busy one is not in it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


class Stopwatch:
    """The best time of each rival so far; other work on the machine only ever adds time."""

    def __init__(self, rivals: Mapping[str, Turn], device: torch.device) -> None:
        self.rivals, self.device = dict(rivals), device
        self.best = dict.fromkeys(rivals, float("inf"))
        for turn in self.rivals.values():
            seconds_a_step(turn, device)

    def round(self) -> None:
        """Give each rival a turn."""
        for name, turn in self.rivals.items():
            self.best[name] = min(self.best[name], seconds_a_step(turn, self.device))


@dataclass(frozen=True)
class PickSome(obj.Independent):
    """Trains a few members a step, drawn without replacement; nothing else is evaluated."""

    count: int = 2
    batches: ClassVar[Batches] = "shared"

    def pick(self, step: obj.Step, num_members: int) -> Tensor:
        """Draw the members."""
        return step.noise(shared=True).uniform(num_members).topk(self.count).indices


def time_fit(
    problem: Problem,
    engine: str,
    watch: Stopwatch,
    *,
    repeats: int = 5,
    concurrent: int | None = None,
    members: ds.Members | None = None,
    data: Any = None,
    objective: obj.Objective | None = None,
) -> dict[str, Any]:
    """Train by `ds.fit`, and between its epochs give the rivals a turn.

    Args:
        problem: What to train.
        engine: Engine of `ds.fit`.
        watch: The rivals.
        repeats: Epochs that count, after one that does not.
        concurrent: Members in flight at once; all by default.
        members: The ensemble, where it is not a deep one of the problem's networks.
        data: What it trains on, where it is not the problem's inputs and targets.
        objective: What it minimises, where that is not the problem's loss alone.

    Returns:
        `ms` a step in the best epoch, `first_epoch_s` with set-up and compilation, and on a GPU `peak_GB` beyond what
        the rivals hold.
    """
    stamps: list[tuple[float, float]] = []
    timed: dict[str, Any] = {}
    memory = PeakMemory(problem.device)

    def between(run: ds.Run) -> None:
        ended = clock(problem.device)
        if not stamps:
            timed["first_epoch_s"] = time.perf_counter() - start
        if stamps:
            with memory.set_aside():
                watch.round()
        stamps.append((ended, clock(problem.device)))

    if objective is None:
        objective = obj.Independent(problem.loss)
        if problem.picked is not None:
            objective = PickSome(problem.loss, count=problem.picked)
    options = dict(problem.options)
    start = time.perf_counter()
    run = ds.fit(
        ds.DeepEnsemble(problem.make, problem.members, output=problem.output) if members is None else members,
        (problem.x, problem.y) if data is None else data,
        objective=objective,
        epochs=repeats + 1,
        batch_size=problem.batch,
        optimizer=problem.optimizer,
        lr=problem.lr,
        weight_decay=options.pop("weight_decay", None),
        optimizer_options=options,
        schedule="cosine",
        precision="bf16" if problem.bf16 else "fp32",
        augment=problem.augment,
        device=problem.device,
        engine=engine,  # type: ignore[arg-type]
        concurrent_members=concurrent,
        progress=False,
        callback=between,
    )
    epochs = [ended - began for (_, began), (ended, _) in itertools.pairwise(stamps)]
    steps = run.step / (repeats + 1)
    timed["ms"] = min(epochs) / steps * 1e3
    if problem.y.is_cuda:
        timed["peak_GB"] = memory.peak() / 1e9
    return timed


class PeakMemory:
    """The most GPU memory in use since the start, beyond what was in use then; a block can be set aside."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.highest = device.type == "cuda", 0
        self.others = self._restart() if self.cuda else 0

    def _restart(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Return the peak in bytes."""
        if self.cuda:
            self.highest = max(self.highest, torch.cuda.max_memory_allocated() - self.others)
        return self.highest

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Leave out what a block uses, and what it keeps."""
        self.peak()
        before = torch.cuda.memory_allocated() if self.cuda else 0
        yield
        if self.cuda:
            self.others += self._restart() - before


def compare(
    problem: Problem, engines: Sequence[str], rivals: Mapping[str, Turn], *, repeats: int = 5
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Time `ds.fit` with each engine beside the rivals.

    Returns:
        Each side's times, and ratios: how many times faster than each rival each engine took its steps. Both sides of a
        ratio are best times of one run.
    """
    watch = Stopwatch(rivals, problem.device)
    ours = {engine: time_fit(problem, engine, watch, repeats=repeats) for engine in engines}
    theirs = {name: best * 1e3 for name, best in watch.best.items()}
    sides: dict[str, dict[str, Any]] = {f"ds.fit, {engine}": timed for engine, timed in ours.items()}
    sides |= {name: {"ms": ms} for name, ms in theirs.items()}
    ratios = {
        f"{engine} against {name}": ms / timed["ms"] for engine, timed in ours.items() for name, ms in theirs.items()
    }
    return sides, ratios
