"""From real numbers back to bytes, and between colour and grey."""

import torch
from torch import Tensor

# The published code truncates. A hair is added first, so that rounding in float32 cannot pull a whole number
# down.
_HAIR = 1 / 128

_LUMA = (0.299, 0.587, 0.114)


def to_uint8(values: Tensor, clamp: bool = True) -> Tensor:
    """Truncates float values of range 0 to 255 to bytes; overwrites its argument.

    Means of bytes cannot leave the range and may skip the clamp.
    """
    values = values.add_(_HAIR)
    # By way of int16: three times as fast on a CPU as the conversion to bytes alone.
    return (values.clamp_(0.0, 255.0) if clamp else values).to(torch.int16).to(torch.uint8)


def luma(images: Tensor) -> Tensor:
    """Grey value, float `(batch, 1, height, width)`; a single channel is its own."""
    values = images if images.is_floating_point() else images.float()
    if values.shape[1] == 1:
        return values
    red, green, blue = _LUMA
    return (values[:, :1] * red).add_(values[:, 1:2] * green).add_(values[:, 2:] * blue)


def tint(colour: tuple[float, float, float], like: Tensor) -> Tensor:
    """A colour as `(channels, 1, 1)`: its three values, or its luma for single-channel images."""
    values = list(colour) if like.shape[1] == 3 else [sum(c * w for c, w in zip(colour, _LUMA, strict=True))]
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None, None]
