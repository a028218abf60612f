"""Steps that leave no trace: what they change is copied first, where it takes no memory that training needs."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from dissensus.training.step import State

log = logging.getLogger("dissensus")

# Bytes of a state up to which a copy of it does not matter, and of a tensor that is copied in any case.
SMALL_STATE, SMALL_TENSOR = 64 * 2**20, 2**20

# What may be large and changes; what is logged comes later and is small.
_LARGE = ("flat.", "optimizer.", "buffer.")
# A step reads these and never changes them.
_ONLY_READ = ("data.", "stream.", "frozen.", "batch.", "factors")


def clone(state: State, weights: float = 1.0) -> State:
    """Return a state to try steps on, weights times a factor; data is shared.

    Of a large state the large tensors are shared too: try steps on it inside `undone` only.
    """
    shared = _large(state)
    copies = {
        name: tensor if name in shared or name.startswith(_ONLY_READ) else _copy(tensor)
        for name, tensor in state.items()
    }
    if weights != 1.0:
        for name in copies:
            if name.startswith("flat."):
                copies[name].mul_(weights)
    return copies


def restore(state: State, saved: State) -> None:
    """Put back, in place, what `clone` copied."""
    for name, tensor in saved.items():
        if tensor is not state[name]:
            state[name].copy_(tensor)


@contextmanager
def undone(state: State, *, stay: bool = False) -> Iterator[None]:
    """Give the large tensors of a large state back, after a block, the values that they had.

    They are copied to the host's memory from a GPU, to a temporary file from the host: a copy beside them would be the most memory
    that the whole run takes.

    Args:
        state: What steps inside the block change.
        stay: Keep copies on a GPU; for states of which a step touches only a small part, far larger than what training needs beside.
    """
    large = _large(state)
    put_back = _set_aside(large, stay) if large else _nothing
    try:
        yield
    finally:
        put_back()


def _large(state: State) -> dict[str, Tensor]:
    """Return the tensors that are not copied for a trial."""
    changing = {name: tensor for name, tensor in state.items() if name.startswith(_LARGE)}
    if sum(tensor.nbytes for tensor in changing.values()) <= SMALL_STATE:
        return {}
    return {n: t for n, t in changing.items() if t.nbytes > SMALL_TENSOR and t.is_contiguous()}


def _copy(tensor: Tensor) -> Tensor:
    # With the same strides, for which a program is compiled; `Tensor.clone` would close the gaps between rows.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def _beside(tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Callable[[], None]:
    """Copy tensors to a device, their own if none is given; return what puts the values back."""
    copies = {
        name: tensor.detach().to(device or tensor.device, copy=True) for name, tensor in tensors.items()
    }

    def put_back() -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(copies[name])

    return put_back


def _nothing() -> None:
    """Put nothing back."""


def _set_aside(tensors: Mapping[str, Tensor], stay: bool) -> Callable[[], None]:
    """Copy tensors to where memory is cheaper; return what puts the values back."""
    if any(tensor.device.type != "cpu" for tensor in tensors.values()):
        return _beside(tensors, None if stay else torch.device("cpu"))
    try:
        file = _written(tensors)
    except OSError as problem:
        log.info(
            "trial steps take memory for a copy of the state: no room in the temporary folder (%s)", problem
        )
        return _beside(tensors)

    def put_back() -> None:
        with file:
            file.seek(0)
            for tensor in tensors.values():
                if file.readinto(_bytes_of(tensor)) != tensor.nbytes:
                    raise OSError(
                        "The temporary file with the ensemble's state was cut short by something else."
                    )

    return put_back


def _written(tensors: Mapping[str, Tensor]) -> Any:
    file = TemporaryFile(prefix="dissensus-")  # noqa: SIM115, closed when the values are back
    try:
        for tensor in tensors.values():
            file.write(_bytes_of(tensor))
        file.flush()
    except OSError:
        file.close()
        raise
    return file


def _bytes_of(tensor: Tensor) -> Any:
    """Return a tensor's memory, to be read or written."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
