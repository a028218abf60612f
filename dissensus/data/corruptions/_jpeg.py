"""JPEG's lossy steps in integers: bytes in, the bytes that a JPEG file would give back out.

The entropy coding of a JPEG file loses nothing, so it is left out. Everything else (colour conversion, 4:2:0
chroma, 8 x 8 DCT, quantisation, and the way back) follows the integer arithmetic that the reference library
uses by default, so the result equals Pillow's byte for byte where Pillow is built on libjpeg-turbo.

References:
    ITU-T T.81 (tables of annex K); Loeffler, Ligtenberg and Moschytz, 1989 (the 11-multiplication DCT).
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_LUMA_TABLE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA_TABLE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *(((99,) * 8,) * 4),
)

# Fixed point of the DCT: 13 bits after the point, and two more in what the first pass hands to the second.
_BITS, _EXTRA = 13, 2


def jpeg_roundtrip(images: Tensor, quality: int) -> Tensor:
    """What is left of uint8 images after JPEG compression at `quality` (1 to 100) with 4:2:0 chroma."""
    luma_steps, chroma_steps = (table.to(images.device) for table in quantisation_tables(quality))
    if images.shape[1] == 1:
        return _store(images.int(), luma_steps).to(torch.uint8)
    luma, chroma = _from_rgb(images.int())
    luma = _store(luma, luma_steps)
    height, width = images.shape[-2:]
    small = _store(_halve(chroma), chroma_steps)[..., : (width + 1) // 2]
    return _to_rgb(luma, _enlarge(small)[..., :height, :width])


@lru_cache(maxsize=128)
def quantisation_tables(quality: int) -> tuple[Tensor, Tensor]:
    """Steps for luma and chroma, int32 `(8, 8)`: the standard's tables scaled by quality as libjpeg does."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    luma, chroma = (torch.tensor(table, dtype=torch.int32) for table in (_LUMA_TABLE, _CHROMA_TABLE))
    return ((luma * percent + 50) // 100).clamp(1, 255), ((chroma * percent + 50) // 100).clamp(1, 255)


def _from_rgb(images: Tensor) -> tuple[Tensor, Tensor]:
    """Luma `(batch, 1, …)` and the two chroma channels `(batch, 2, …)`, in 16-bit fixed point."""
    red, green, blue = images.unbind(1)
    luma = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16
    middle = (128 << 16) + 32767
    chroma_blue = (-11059 * red - 21709 * green + 32768 * blue + middle) >> 16
    chroma_red = (32768 * red - 27439 * green - 5329 * blue + middle) >> 16
    return luma[:, None], torch.stack([chroma_blue, chroma_red], dim=1)


def _to_rgb(luma: Tensor, chroma: Tensor) -> Tensor:
    luma, blueness, redness = luma[:, 0], chroma[:, 0] - 128, chroma[:, 1] - 128
    red = luma + ((91881 * redness + 32768) >> 16)
    green = luma + ((-22554 * blueness - 46802 * redness + 32768) >> 16)
    blue = luma + ((116130 * blueness + 32768) >> 16)
    return torch.stack([red, green, blue], dim=1).clamp_(0, 255).to(torch.uint8)


def _pad(channels: Tensor, bottom: int, right: int) -> Tensor:
    """Repeats the last row and column."""
    # Padding is defined for floats; bytes survive the trip.
    return (
        F.pad(channels.float(), (0, right, 0, bottom), mode="replicate").int()
        if bottom or right
        else channels
    )


def _halve(chroma: Tensor) -> Tensor:
    """Means of 2 x 2 pixels, with whole blocks of columns; ties go down and up in turn along a row."""
    height, width = chroma.shape[-2:]
    full = _pad(chroma, height % 2, -width % 16)
    sums = full[..., ::2, ::2] + full[..., 1::2, ::2] + full[..., ::2, 1::2] + full[..., 1::2, 1::2]
    bias = 1 + torch.arange(sums.shape[-1], dtype=torch.int32, device=chroma.device) % 2
    return (sums + bias) >> 2


def _enlarge(chroma: Tensor) -> Tensor:
    """Twice the size by the triangle filter: three parts of the nearer pixel, one of the farther."""
    padded = F.pad(chroma.float(), (1, 1, 1, 1), mode="replicate").int()
    middle, above, below = padded[..., 1:-1, :], padded[..., :-2, :], padded[..., 2:, :]
    rows = torch.stack([3 * middle + above, 3 * middle + below], dim=-2).flatten(-3, -2)
    centre, left, right = rows[..., 1:-1], rows[..., :-2], rows[..., 2:]
    columns = [(3 * centre + left + 8) >> 4, (3 * centre + right + 7) >> 4]
    return torch.stack(columns, dim=-1).flatten(-2)


def _store(channels: Tensor, steps: Tensor) -> Tensor:
    """DCT, quantisation and back for each 8 x 8 block, int32 of range 0 to 255."""
    height, width = channels.shape[-2:]
    full = _pad(channels, -height % 8, -width % 8)
    tall, wide = full.shape[-2] // 8, full.shape[-1] // 8
    # (row in block, column in block, everything else): the transforms then work on contiguous slices.
    blocks = full.reshape(*full.shape[:2], tall, 8, wide, 8).permute(3, 5, 0, 1, 2, 4).contiguous()
    blocks = _quantised(_forward(blocks - 128), steps[:, :, None, None, None, None])
    restored = (_backward(blocks) + 128).clamp_(0, 255)
    return restored.permute(2, 3, 4, 0, 5, 1).reshape_as(full)[..., :height, :width]


def _quantised(coefficients: Tensor, steps: Tensor) -> Tensor:
    """To the nearest multiple of the step, ties away from zero; the transform comes scaled by eight."""
    # Both are below 2^16, where a float32 quotient cannot be rounded across a whole number.
    halves = coefficients.sign() * (steps * 4)
    return ((coefficients + halves).float() / (steps * 8)).int() * steps


def _forward(blocks: Tensor) -> Tensor:
    rows = _forward_axis(blocks.unbind(1), _BITS - _EXTRA)
    return torch.stack(_forward_axis(torch.stack(rows, 1).unbind(0), _BITS + _EXTRA))


def _backward(blocks: Tensor) -> Tensor:
    columns = _backward_axis(blocks.unbind(0), _BITS - _EXTRA)
    return torch.stack(_backward_axis(torch.stack(columns).unbind(1), _BITS + _EXTRA + 3), 1)


def _descale(values: Tensor, bits: int) -> Tensor:
    return (values + (1 << (bits - 1))) >> bits


def _forward_axis(x: tuple[Tensor, ...], bits: int) -> list[Tensor]:
    """The eight DCT coefficients of eight samples."""
    sum07, sum16, sum25, sum34 = (x[i] + x[7 - i] for i in range(4))
    outer, inner = sum07 - sum34, sum16 - sum25
    rotated = (outer + inner) * 4433
    even = (
        (sum07 + sum34 + sum16 + sum25) << _BITS,
        rotated + outer * 6270,
        (sum07 + sum34 - sum16 - sum25) << _BITS,
        rotated - inner * 15137,
    )
    seventh, fifth, third, first = _odd_part(x[3] - x[4], x[2] - x[5], x[1] - x[6], x[0] - x[7])
    odd = (first, third, fifth, seventh)
    return [_descale(value, bits) for pair in zip(even, odd, strict=True) for value in pair]


def _backward_axis(c: tuple[Tensor, ...], bits: int) -> list[Tensor]:
    """The eight samples of eight DCT coefficients."""
    rotated = (c[2] + c[6]) * 4433
    outer, inner = rotated + c[2] * 6270, rotated - c[6] * 15137
    total, difference = (c[0] + c[4]) << _BITS, (c[0] - c[4]) << _BITS
    even = (total + outer, difference + inner, difference - inner, total - outer)
    odd = _odd_part(c[7], c[5], c[3], c[1])[::-1]
    first_half = [_descale(e + o, bits) for e, o in zip(even, odd, strict=True)]
    second_half = [_descale(e - o, bits) for e, o in zip(even, odd, strict=True)]
    return first_half + second_half[::-1]


def _odd_part(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rotations that the odd coefficients share in both directions."""
    common = (a + c + b + d) * 9633
    ad, bc = (a + d) * -7373, (b + c) * -20995
    ac, bd = (a + c) * -16069 + common, (b + d) * -3196 + common
    return a * 2446 + ad + ac, b * 16819 + bc + bd, c * 25172 + bc + ac, d * 12299 + ad + bd
