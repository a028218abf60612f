"""Engines: how training steps are executed. They change speed only, never the numbers.

`eager` runs a step as Python. `captured` records its tensor operations once and replays them, free of Python's, autograd's
and vmap's overhead; on a GPU as one CUDA graph. `compiled` also compiles what was recorded.
"""

import logging
import random
import time
from abc import ABC, abstractmethod
from threading import RLock
from typing import Any, Literal

import numpy as np
import torch

from dissensus.members.members import kept_as_is
from dissensus.randomness import seeded
from dissensus.training import timings
from dissensus.training.packing import aligned_rows
from dissensus.training.programs import ByMember
from dissensus.training.recording import row_of, single_member_step, why_not_by_member
from dissensus.training.replay import GraphReplay, Replay, kind_of_work
from dissensus.training.step import State, TrainStep
from dissensus.training.undoing import clone, restore, undone

log = logging.getLogger("dissensus")

EngineName = Literal["auto", "eager", "captured", "compiled"]
ENGINES = ("auto", "eager", "captured", "compiled")


class Engine(ABC):
    """Takes steps."""

    name: str

    @abstractmethod
    def step(self, state: State, size: int) -> None:
        """Take one step on a batch of `size` examples, changing the state in place."""

    def take(self, state: State, size: int, limit: int) -> int:
        """Take one step, or up to `limit` at once where that is faster; return how many."""
        self.step(state, size)
        return 1


class Eager(Engine):
    """The step as it is written."""

    name = "eager"

    def __init__(self, train_step: TrainStep) -> None:
        self.train_step = train_step

    def step(self, state: State, size: int) -> None:
        """Take one step."""
        self.train_step(state, size)


_recording = RLock()


class Recorded(Engine):
    """Records the operations of a step once for each batch shape and replays them, compiled or not."""

    def __init__(self, train_step: TrainStep, compiled: bool, concurrent: int | None = None) -> None:
        self.train_step, self.compiled, self.concurrent = train_step, compiled, concurrent
        self.name = "compiled" if compiled else "captured"
        self.programs: dict[tuple[Any, ...], Replay] = {}

    def prepare(self, state: State, size: int) -> Replay:
        """Return the program for batches of this shape, recorded when first asked for; inside `undone`, then."""
        shape = _batch_shape(state, size)
        if shape not in self.programs:
            self.programs[shape] = self._record(state, size)
        return self.programs[shape]

    def _record(self, state: State, size: int) -> Replay:
        kind = GraphReplay if state["index"].is_cuda else Replay
        # Recording and capturing change torch for all threads.
        with _recording:
            return kind(self.train_step, state, size, self.compiled, self.concurrent)

    def step(self, state: State, size: int) -> None:
        """Take one step."""
        self._program(state, size).run(state)

    def take(self, state: State, size: int, limit: int) -> int:
        """Take several steps where they are one program."""
        return self._program(state, size).take(state, limit)

    def _program(self, state: State, size: int) -> Replay:
        known = self.programs.get(_batch_shape(state, size))
        if known is not None:
            return known
        with undone(state, stay=self.train_step.picks_few(state)):
            return self.prepare(state, size)


def _batch_shape(state: State, size: int) -> tuple[Any, ...]:
    return (size, *(state[name].shape for name in ("batch.x", "batch.y") if name in state))


def try_out(
    train_step: TrainStep, state: State, size: int, concurrent: int | None
) -> tuple[State, str | None]:
    """Take one eager step on a copy; return the copy and what changed in Python, which a recording would not change again.

    Where each member will get a program of its own one member is enough, and takes one member's memory.
    """
    if kind_of_work(train_step, state, concurrent) is ByMember:
        state, train_step = row_of(state, 0, train_step.feed), single_member_step(train_step)
    for _ in range(3):
        scratch = clone(state)
        before, drawn = train_step.members.python_state(), _generators()
        train_step(scratch, size)
        if train_step.members.python_state() != before:
            return scratch, "its modules change Python attributes from step to step"
        if _generators() == drawn:
            return scratch, None
        # Another thread may have drawn: only what happens every time is the step's.
    return scratch, "it draws from Python's or NumPy's generator"


def _generators() -> list[object]:
    """Return the state of the generators outside torch."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return [random.getstate(), numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["has_gauss"]]


def warm_up(train_step: TrainStep, state: State, size: int, concurrent: int | None = None) -> None:
    """Have lazy choices made, and give every logged part its place in the state."""
    scratch, _ = try_out(train_step, state, size, concurrent)
    for name, tensor in scratch.items():
        if name not in state:
            rows = tensor.new_zeros(train_step.members.num_trained) if tensor.ndim else tensor.new_zeros(())
            state[name] = aligned_rows(rows) if rows.ndim else rows


def choose_engine(
    name: str, train_step: TrainStep, state: State, size: int, steps: int, concurrent: int | None = None
) -> Engine:
    """Return the engine asked for, or the one that will finish `steps` steps soonest."""
    if name not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}; got {name!r}.")
    if not train_step.optimizer.traceable:
        if name not in ("auto", "eager") or concurrent is not None:
            raise ValueError(
                f"engine={name!r} needs sgd, adam or adamw; other optimizers run with engine='eager'."
            )
        return Eager(train_step)
    if name == "eager" and concurrent is None:
        return Eager(train_step)
    # Steps taken to find out must not count.
    with (
        kept_as_is(train_step.members),
        seeded(train_step.seed),
        undone(state, stay=train_step.picks_few(state)),
    ):
        return _chosen(name, train_step, state, size, steps, concurrent)


def _chosen(
    name: str, train_step: TrainStep, state: State, size: int, steps: int, concurrent: int | None
) -> Engine:
    warm_up(train_step, state, size, concurrent)
    if concurrent is not None and (reason := why_not_by_member(train_step, state)) is not None:
        raise ValueError(f"`concurrent_members` trains members one by one, and {reason}. Leave it out.")
    if name in ("captured", "compiled"):
        problem, engine = _try(train_step, state, size, name == "compiled", concurrent)
        if engine is None:
            raise ValueError(f"The step cannot be recorded: {problem}. Use engine='eager'.")
        return engine
    return _fastest(train_step, state, size, steps, concurrent)


def _try(
    train_step: TrainStep, state: State, size: int, compiled: bool, concurrent: int | None
) -> tuple[str | None, Recorded | None]:
    """Return the engine, ready for batches of this size, or why there is none."""
    _, change = try_out(train_step, state, size, concurrent)
    if change is not None:
        return change, None
    engine = Recorded(train_step, compiled, concurrent)
    try:
        engine.prepare(state, size)
    except Exception as failure:  # whatever a user's module does that cannot be recorded
        return _in_words(failure, train_step), None
    return None, engine


def _in_words(failure: Exception, train_step: TrainStep) -> str:
    """Say in one line why a step cannot be recorded."""
    reason = getattr(train_step.members, "execution_reason", None) or ""
    if "draws random numbers" in reason:  # each member's are made to follow its seed, one by one
        return reason
    text = str(failure)
    if "_local_scalar_dense" in text:
        return "it reads the value of a tensor, for a branch or a number"
    return (text.splitlines() or [type(failure).__name__])[0]


# Recording takes about half a second; compiling a step took 5 to 30 s where we measured it, and made it 1.6 to 3 times faster.
RECORD_SECONDS, COMPILE_SECONDS, COMPILE_GAIN = 0.5, 30.0, 1.6


def _fastest(train_step: TrainStep, state: State, size: int, steps: int, concurrent: int | None) -> Engine:
    """Measure, and compile only where the run is long enough to pay for it."""
    eager = Eager(train_step)
    eager_seconds = _seconds_a_step(eager, state, size, repeats=1)
    if concurrent is None and eager_seconds * steps < 2 * RECORD_SECONDS:
        return eager
    problem, captured = _try(train_step, state, size, compiled=False, concurrent=concurrent)
    if captured is None:
        log.info("training runs eagerly: the step cannot be recorded (%s)", problem)
        return eager
    replay = captured.prepare(state, size)
    known = timings.recall(replay.key) or {}
    if "captured" not in known:
        known["captured"] = _seconds_a_step(captured, state, size)
    captured_seconds = known["captured"]
    compiled_seconds = known.get("compiled", captured_seconds / COMPILE_GAIN)
    gain = (captured_seconds - compiled_seconds) * steps
    if gain > known.get("compiling", COMPILE_SECONDS):
        start = time.perf_counter()
        problem, compiled = _try(train_step, state, size, compiled=True, concurrent=concurrent)
        if compiled is not None:
            known["compiling"] = time.perf_counter() - start
            known["compiled"] = _seconds_a_step(compiled, state, size)
            timings.remember(replay.key, known)
            if known["compiled"] < captured_seconds:
                return compiled
        else:
            log.info("training runs uncompiled: %s", problem)
            known |= {"compiling": float("inf"), "compiled": float("inf")}
    timings.remember(replay.key, known)
    return captured if concurrent is not None or captured_seconds < eager_seconds else eager


def _seconds_a_step(engine: Engine, state: State, size: int, repeats: int = 5) -> float:
    """Return the time of a step, and leave the state as it was."""
    saved = clone(state)
    cuda = state["index"].is_cuda
    best = float("inf")
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        engine.step(state, size)
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        restore(state, saved)
    return best
