"""Recorded steps, ready to run: as Python functions one after another, or as one CUDA graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dissensus.members import DeepEnsemble
from dissensus.training.programs import ByMember, InParts, Whole, Work
from dissensus.training.recording import clone, why_not_by_member, why_not_in_parts
from dissensus.training.step import State, TrainStep


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
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.work.run(self.static, side_by_side)
                self.work.count_step(self.static)

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
