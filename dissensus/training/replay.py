"""Recorded steps, ready to run: as Python functions one after another, or as one CUDA graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dissensus.members import DeepEnsemble
from dissensus.training.programs import ByMember, InParts, Whole, Work
from dissensus.training.recording import why_not_by_member, why_not_in_parts
from dissensus.training.step import State, TrainStep
from dissensus.training.undoing import clone


class Replay:
    """The recorded step as a function of the state's tensors."""

    def __init__(
        self, train_step: TrainStep, state: State, size: int, compiled: bool, concurrent: int | None = None
    ) -> None:
        kind = kind_of_work(train_step, state, concurrent)
        self.work = kind(train_step, state, size, compiled, count=kind is Whole, parallel=1)
        self.work.warm_up(clone(state))

    @property
    def key(self) -> str:
        """A name for the step under which its times are remembered."""
        return self.work.key

    def run(self, state: State) -> None:
        """Take one step."""
        self.work.run(state, _in_turn)
        self.work.count_step(state)

    def take(self, state: State, limit: int) -> int:
        """Take one step; return how many were taken."""
        self.run(state)
        return 1


def _in_turn(function: Callable[[int], None], count: int) -> None:
    for index in range(count):
        function(index)


class GraphReplay(Replay):
    """The recorded step as one CUDA graph on fixed memory.

    Members that convolve run as programs of their own, on streams of their own: vmap would turn their convolutions into
    grouped ones, which are slower. Others run as one batched program. `concurrent` limits how many members are in flight,
    and so the memory they need.
    """

    def __init__(
        self, train_step: TrainStep, state: State, size: int, compiled: bool, concurrent: int | None = None
    ) -> None:
        self.static = dict(state)
        for name in ("batch.x", "batch.y"):
            if name in state:
                self.static[name] = state[name].clone()
        kind = kind_of_work(train_step, state, concurrent)
        count = 1 if kind is Whole else train_step.members.num_trained
        parallel = min(count, concurrent or count)
        streams = [torch.cuda.Stream() for _ in range(parallel)]

        def side_by_side(function: Callable[[int], None], count: int) -> None:
            _fan_out(function, count, streams)

        # cuDNN may try its algorithms here, once for each convolution, unless the user wants determinism.
        with _choosing_algorithms(not torch.are_deterministic_algorithms_enabled()):
            # Capturing wants recording, compiling and warming up done on a stream that is not the default one.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.work = kind(train_step, self.static, size, compiled, count=False, parallel=parallel)
                for _ in range(3):
                    self.work.warm_up(clone(self.static))
            torch.cuda.current_stream().wait_stream(side)
            self.fan_out = side_by_side
            self.graph = self._capture(1)
        self.pace = Pace(train_step.total_steps)
        self.several: torch.cuda.CUDAGraph | None = None

    def _capture(self, steps: int) -> torch.cuda.CUDAGraph:
        # Not torch.cuda.graph, which collects garbage first: that takes longer than all else here.
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            # Of this thread alone: loaders pin memory in others.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(steps):
                    self.work.run(self.static, self.fan_out)
                    self.work.count_step(self.static)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return graph

    def run(self, state: State) -> None:
        """Take one step."""
        for name in ("batch.x", "batch.y"):
            if name in state:
                self.static[name].copy_(state[name], non_blocking=True)
        self.graph.replay()

    def take(self, state: State, limit: int) -> int:
        """Take one step, or a graph of several once steps turned out to be short."""
        if limit < AT_ONCE or not self.pace.short():
            self.run(state)
            return 1
        if self.several is None:
            self.several = self._capture(AT_ONCE)
        self.several.replay()
        return AT_ONCE


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


def _fan_out(function: Callable[[int], None], count: int, streams: list[torch.cuda.Stream]) -> None:
    """Call the function for every index, as many side by side as there are streams."""
    if len(streams) == 1:
        _in_turn(function, count)
        return
    main = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(main)
    for index in range(count):
        with torch.cuda.stream(streams[index % len(streams)]):
            function(index)
    for stream in streams:
        main.wait_stream(stream)


def kind_of_work(train_step: TrainStep, state: State, concurrent: int | None) -> type[Work]:
    """Return how a step is put together: each member on its own where that is the same and faster or asked for."""
    members = train_step.members
    on_streams = state["index"].is_cuda and any(
        isinstance(m, torch.nn.modules.conv._ConvNd) for m in members.modules()
    )
    faster = on_streams or (isinstance(members, DeepEnsemble) and members.faster_apart)
    if (faster or concurrent is not None) and why_not_by_member(train_step, state) is None:
        return ByMember
    return InParts if faster and why_not_in_parts(train_step, state) is None else Whole
