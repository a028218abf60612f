"""Members that run one by one, side by side on a GPU while their passes are being captured."""

from collections.abc import Callable

import torch


def for_each_member(function: Callable[[int], None], count: int) -> None:
    """Call the function for every index below `count`; in a CUDA capture each call gets a stream of its own."""
    if count == 1 or not _capturing():
        for index in range(count):
            function(index)
        return
    main = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in range(count)]
    for index, stream in enumerate(streams):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            function(index)
    for stream in streams:
        main.wait_stream(stream)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
