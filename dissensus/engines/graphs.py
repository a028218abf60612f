"""CUDA graphs: what a function does on the device, captured once and replayed; functions side by side on streams."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")


def capture(function: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return a graph of what the function does, and what it returned: memory that replays write to."""
    # Not torch.cuda.graph, which collects garbage first: that takes longer than all else here.
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        # Of this thread alone: loaders pin memory in others.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph, result


def capturing() -> bool:
    """Whether this thread is capturing a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def in_turn(function: Callable[[int], None], count: int) -> None:
    """Call the function for every index below `count`."""
    for index in range(count):
        function(index)


def side_by_side(
    function: Callable[[int], None], count: int, streams: Sequence[torch.cuda.Stream] | None = None
) -> None:
    """Call the function for every index below `count`, as many at a time as there are streams; by default each on its own."""
    if count == 1 or (streams is not None and len(streams) == 1):
        in_turn(function, count)
        return
    streams = [torch.cuda.Stream() for _ in range(count)] if streams is None else streams
    main = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(main)
    for index in range(count):
        with torch.cuda.stream(streams[index % len(streams)]):
            function(index)
    for stream in streams:
        main.wait_stream(stream)


def for_each_member(function: Callable[[int], None], count: int) -> None:
    """Call the function for every index below `count`; in a capture side by side."""
    if capturing():
        side_by_side(function, count)
    else:
        in_turn(function, count)
