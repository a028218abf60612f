"""Layers that mask, pick or put back channels; they sit on the layer whose output they change and act after it."""

from typing import Any

import torch
from torch import Tensor, nn

from dissensus.members.shared import PerRow

NAME = "mask"


class ChannelMask(PerRow):
    """All members' masks of one layer: each row of a batch keeps the channels of its member.

    Attributes:
        values: True where a member keeps the channel, `(members, channels)`.
        kept: The channels that each member keeps, `(members, ones)`.
        axis: Axis of the channels.
    """

    values: Tensor
    kept: Tensor

    def __init__(self, values: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("values", values)
        self.register_buffer("kept", values.nonzero()[:, 1].reshape(len(values), -1))

    def forward(self, x: Tensor) -> Tensor:
        """Set the channels that a row's member drops to zero."""
        return x * self.take(self.values, x, self.axis).to(x.dtype)

    def extra_repr(self) -> str:
        """Show how many channels members keep."""
        return f"{len(self.values)} members, {self.kept.shape[1]} of {self.values.shape[1]} channels"


class FixedMask(nn.Module):
    """One member's mask."""

    kept: Tensor

    def __init__(self, kept: Tensor, width: int, axis: int) -> None:
        super().__init__()
        self.width, self.axis = width, axis
        self.register_buffer("kept", kept)

    def forward(self, x: Tensor) -> Tensor:
        """Set dropped channels to zero."""
        return x * along(_indicator(self.kept, self.width, x.dtype), x, self.axis)

    def extra_repr(self) -> str:
        """Show how many channels are kept."""
        return f"{len(self.kept)} of {self.width} channels"


class Selection(FixedMask):
    """One member's channels alone, where only what follows is smaller."""

    def forward(self, x: Tensor) -> Tensor:
        """Return kept channels only."""
        return x.index_select(self.axis, self.kept)


class Expansion(FixedMask):
    """One member's channels put back among zeros, where only what comes before is smaller."""

    def forward(self, x: Tensor) -> Tensor:
        """Return all channels, dropped ones zero."""
        axis = self.axis % x.ndim
        shape = (*x.shape[:axis], self.width, *x.shape[axis + 1 :])
        return x.new_zeros(shape).index_copy(axis, self.kept, x)


def along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """Return one value a channel, shaped to multiply `x` along `axis`."""
    shape = [1] * x.ndim
    shape[axis] = len(values)
    return values.reshape(shape)


def _indicator(kept: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(width, dtype=dtype, device=kept.device).index_fill(0, kept, 1.0)


def attach(layer: nn.Module, mask: nn.Module) -> None:
    """Have a mask act on what a layer gives: it becomes a part of the layer, whose own names stay as they are."""
    if hasattr(layer, NAME):
        raise ValueError(
            f"A {type(layer).__name__} has an attribute {NAME!r} already, so no mask can be put on it. Mask another layer."
        )
    layer.add_module(NAME, mask)
    layer.register_forward_hook(_act)


def detach(layer: nn.Module) -> None:
    """Undo `attach`."""
    delattr(layer, NAME)
    for key in [key for key, hook in layer._forward_hooks.items() if hook is _act]:
        del layer._forward_hooks[key]


def _act(layer: Any, inputs: object, output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"A mask acts on one tensor; {type(layer).__name__} gives a {type(output).__name__}. Mask another layer."
        )
    masked: Tensor = layer.mask(output)
    return masked
