"""Colour, geometry and storage: uint8 images and per-image keys in, uint8 images out.

JPEG's lossy steps are done in whole numbers; entropy coding loses nothing and is left out. Everything else (colour conversion,
4:2:0 chroma, 8 x 8 DCT, quantisation, and the way back) follows the integer arithmetic that the reference library uses by
default, so the result equals Pillow's byte for byte where Pillow is built on libjpeg-turbo. Between two roundings that
arithmetic is linear: each stretch is a matrix of whole numbers over a power of two, and float64 holds its products exactly.

References:
    ITU-T T.81 (tables of annex K); Loeffler, Ligtenberg and Moschytz, 1989 (the 11-multiplication DCT).
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.data.corruptions._images import box_pixelate, gaussian, positions, sample, separable, to_uint8, uniform

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

# Colours in fixed point, over 2^16, a constant first: luma, blue and red chroma from red, green and blue …
_HALF, _MIDDLE = 1 << 15, 128 << 16
_TO_YCC = (
    (_HALF, 19595, 38470, 7471),
    (_MIDDLE + _HALF - 1, -11059, -21709, 32768),
    (_MIDDLE + _HALF - 1, 32768, -27439, -5329),
)
# … and what blue and red chroma, counted from 128, add to luma in red, green and blue.
_TO_RGB = ((_HALF, 0, 91881), (_HALF, -22554, -46802), (_HALF, 116130, 0))

# Fixed point of the DCT: 13 bits after the point, and two more in what the first pass hands to the second.
_BITS, _EXTRA = 13, 2

_ONES = torch.ones(1, dtype=torch.float64)


def jpeg_roundtrip(images: Tensor, quality: int) -> Tensor:
    """What is left of uint8 images after JPEG compression at `quality` (1 to 100) with 4:2:0 chroma."""
    luma_steps, chroma_steps = (table.to(images.device) for table in quantisation_tables(quality))
    if images.shape[1] == 1:
        return _to_bytes(_stored(images.float(), luma_steps))
    luma, chroma = _from_rgb(images)
    height, width = images.shape[-2:]
    small = _stored(_halved(chroma), chroma_steps)[..., : (width + 1) // 2]
    return _to_rgb(_stored(luma, luma_steps), _enlarged(small, height, width))


@lru_cache(maxsize=128)
def quantisation_tables(quality: int) -> tuple[Tensor, Tensor]:
    """Steps for luma and chroma, int32 `(8, 8)`: the standard's tables scaled by quality as libjpeg does."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    luma, chroma = (torch.tensor(table, dtype=torch.int32) for table in (_LUMA_TABLE, _CHROMA_TABLE))
    return ((luma * percent + 50) // 100).clamp(1, 255), ((chroma * percent + 50) // 100).clamp(1, 255)


def _to_bytes(values: Tensor) -> Tensor:
    return values.to(torch.int16).to(torch.uint8)


def _from_rgb(images: Tensor) -> tuple[Tensor, Tensor]:
    """Luma `(batch, 1, …)` and the two chroma channels `(batch, 2, …)`."""
    colours = images.float()
    luma, blue, red = (_mixed(colours, *row) for row in _TO_YCC)
    return luma[:, None], torch.stack([blue, red], dim=1)


def _to_rgb(luma: Tensor, chroma: Tensor) -> Tensor:
    chroma = chroma.float().sub_(128.0)
    colours = torch.stack([_mixed(chroma, *row) for row in _TO_RGB], dim=1)
    return _to_bytes(colours.add_(luma.float()).clamp_(0.0, 255.0))


def _mixed(channels: Tensor, constant: int, *weights: int) -> Tensor:
    """Weighted sum of channels plus a constant, all over 2^16, rounded down; before that no sum reaches 2^24 / 2^16.

    Float32 therefore holds every one exactly.
    """
    mixed = channels[:, 0] * (weights[0] / 2**16)
    for channel, weight in enumerate(weights[1:], start=1):
        mixed.add_(channels[:, channel], alpha=weight / 2**16)
    return mixed.add_(constant / 2**16).floor_()


def _halved(chroma: Tensor) -> Tensor:
    """Means of 2 x 2 pixels, with whole blocks of columns; ties go down and up in turn along a row."""
    height, width = chroma.shape[-2:]
    rows, columns = _pairs(height, (height + 1) // 2), _pairs(width, (width + -width % 16) // 2)
    bias = 1 + torch.arange(len(columns), device=chroma.device) % 2
    return separable(chroma, rows, columns).add_(bias).mul_(0.25).floor_()


def _enlarged(chroma: Tensor, height: int, width: int) -> Tensor:
    """Twice the size by the triangle filter: three parts of the nearer pixel, one of the farther."""
    rows, columns = _thirds(chroma.shape[-2], height), _thirds(chroma.shape[-1], width)
    bias = 8 - torch.arange(width, device=chroma.device) % 2
    return separable(chroma, rows, columns).add_(bias).mul_(1 / 16).floor_()


@lru_cache(maxsize=64)
def _pairs(source: int, target: int) -> Tensor:
    """Sums of two neighbours, `(target, source)`; the last pixel is repeated."""
    sources = torch.arange(2 * target).clamp(max=source - 1).view(target, 2)
    return torch.zeros(target, source, dtype=torch.float64).scatter_add_(1, sources, _ONES.expand(target, 2))


@lru_cache(maxsize=64)
def _thirds(source: int, target: int) -> Tensor:
    """Three times the pixel itself plus its left or right neighbour in turn, `(target, source)`."""
    target_index = torch.arange(target)
    nearer = target_index // 2
    farther = (nearer + 2 * (target_index % 2) - 1).clamp(0, source - 1)
    matrix = torch.zeros(target, source, dtype=torch.float64)
    matrix.scatter_add_(1, nearer[:, None], 3 * _ONES.expand(target, 1))
    return matrix.scatter_add_(1, farther[:, None], _ONES.expand(target, 1))


def _stored(channels: Tensor, steps: Tensor) -> Tensor:
    """DCT, quantisation and back for each 8 x 8 block, whole numbers from 0 to 255."""
    height, width = channels.shape[-2:]
    bottom, right = -height % 8, -width % 8
    full = F.pad(channels, (0, right, 0, bottom), mode="replicate") if bottom or right else channels
    # Lines are rows of blocks: a product from the right transforms along them, one from the left across.
    lines, shape = full.shape[-1], full.shape
    forward, across_forward, backward, across_backward = (matrix.to(full.device) for matrix in _transforms())
    values = _rounded((full.double() - 128).view(-1, 8) @ forward.T)
    values = _rounded(across_forward @ values.view(-1, 8, lines))
    values = _quantised(values, steps.double().repeat(1, lines // 8))
    values = _rounded(across_backward @ values)
    values = _rounded(values.view(-1, 8) @ backward.T, 128.0).clamp_(0.0, 255.0)
    return values.view(shape)[..., :height, :width]


def _rounded(values: Tensor, offset: float = 0.0) -> Tensor:
    """To the nearest whole number, halves upwards, plus `offset`."""
    return values.add_(0.5 + offset).floor_()


def _quantised(coefficients: Tensor, steps: Tensor) -> Tensor:
    """To the nearest multiple of the step, ties away from zero; the transform comes scaled by eight."""
    # A hair above one over the step: ties turn into a bit more than a half, and nothing else is so close to one.
    return coefficients.mul_((1 + 2.0**-40) / (8 * steps)).round_().mul_(steps)


@lru_cache(maxsize=1)
def _transforms() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """DCT of eight samples along a line and across lines, and the way back, scaled as the passes hand them on."""
    unit = torch.eye(8, dtype=torch.int64).unbind()
    forward, backward = torch.stack(_forward_axis(unit)).double(), torch.stack(_backward_axis(unit)).double()
    first, second, last = (2.0**-bits for bits in (_BITS - _EXTRA, _BITS + _EXTRA, _BITS + _EXTRA + 3))
    return forward * first, forward * second, backward * last, backward * first


def _forward_axis(x: tuple[Tensor, ...]) -> list[Tensor]:
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
    return [value for pair in zip(even, odd, strict=True) for value in pair]


def _backward_axis(c: tuple[Tensor, ...]) -> list[Tensor]:
    """The eight samples of eight DCT coefficients."""
    rotated = (c[2] + c[6]) * 4433
    outer, inner = rotated + c[2] * 6270, rotated - c[6] * 15137
    total, difference = (c[0] + c[4]) << _BITS, (c[0] - c[4]) << _BITS
    even = (total + outer, difference + inner, difference - inner, total - outer)
    odd = _odd_part(c[7], c[5], c[3], c[1])[::-1]
    first_half = [e + o for e, o in zip(even, odd, strict=True)]
    second_half = [e - o for e, o in zip(even, odd, strict=True)]
    return first_half + second_half[::-1]


def _odd_part(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rotations that the odd coefficients share in both directions."""
    common = (a + c + b + d) * 9633
    ad, bc = (a + d) * -7373, (b + c) * -20995
    ac, bd = (a + c) * -16069 + common, (b + d) * -3196 + common
    return a * 2446 + ad + ac, b * 16819 + bc + bd, c * 25172 + bc + ac, d * 12299 + ad + bd


def contrast(images: Tensor, keys: Tensor, factor: float) -> Tensor:
    """Pulls every value towards its channel's mean."""
    values = images.float()
    pixels = images.shape[2] * images.shape[3]
    # Exact, as float32 holds whole numbers up to 2^24, so the mean does not depend on how a reduction is split.
    exact = torch.float32 if pixels <= 2**16 else torch.float64
    mean = values.sum((2, 3), keepdim=True, dtype=exact).float().div_(pixels)
    return to_uint8(values.sub_(mean).mul_(factor).add_(mean))


def brightness(images: Tensor, keys: Tensor, shift: float) -> Tensor:
    """Raises HSV's value by `shift`, hue and saturation kept: all channels grow by one factor."""
    values = images.float()
    value = values.amax(dim=1, keepdim=True)
    brighter = (value + 255 * shift).clamp_(max=255.0)
    factor = brighter / value.clamp(min=1.0)
    # Black has neither hue nor saturation and turns grey.
    grey = brighter.mul_(value.lt_(1.0))
    return to_uint8(values.mul_(factor).add_(grey))


def saturate(images: Tensor, keys: Tensor, factor: float, shift: float) -> Tensor:
    """Changes HSV's saturation s to `factor * s + shift`, hue and value kept.

    As in the published code grey pixels count as red hue, so that a `shift` colours them. Single-channel
    images have no colour and come back unchanged.
    """
    if images.shape[1] == 1:
        return images.clone()
    values = images.float()
    value, least = values.amax(dim=1, keepdim=True), values.amin(dim=1, keepdim=True)
    saturation = (value - least) / value.clamp(min=1.0)
    wanted = (saturation * factor + shift).clamp_(0.0, 1.0)
    # A channel's distance below the value, in units of the largest such distance, is what the hue fixes.
    grey = value == least
    hue = (value - values) / (value - least).clamp(min=1.0)
    hue = torch.where(grey, torch.tensor([0.0, 1.0, 1.0], device=images.device)[:, None, None], hue)
    return to_uint8(value * (1 - wanted * hue))


def elastic_transform(images: Tensor, keys: Tensor, strength: float, sd: float, affine: float) -> Tensor:
    """A random affine map, then a smooth random displacement of every pixel.

    Three points are moved by up to `affine` pixels each way; displacements are uniform noise smoothed over
    `sd` pixels times `strength`. Both look-ups are bilinear and mirrored at the border.
    """
    height, width = images.shape[-2:]
    values = sample(images, *_affine_sources(images, keys, affine), border="mirror")
    if strength > 0:
        noise = uniform(keys, (2, height, width), low=-1.0, high=1.0, stream=1)
        displacement = gaussian(noise, sd, truncate=3.0, border="reflect").mul_(strength).float()
        rows, columns = positions(images)
        values = sample(values, rows + displacement[:, 0], columns + displacement[:, 1], border="reflect")
    return to_uint8(values)


def _affine_sources(images: Tensor, keys: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """Where each pixel of the affinely moved image comes from: rows and columns, `(batch, height, width)`."""
    height, width = images.shape[-2:]
    middle = torch.tensor([height // 2, width // 2], dtype=torch.float64, device=images.device)
    third = min(height, width) // 3
    signs = torch.tensor([[1, 1], [1, -1], [-1, -1]], dtype=torch.float64, device=images.device)
    corners = middle + third * signs
    moved = corners + uniform(keys, (3, 2), low=-reach, high=reach).double()
    # A pixel's coordinates along the moved triangle's sides are those of its source along the original's.
    origin, first, second = moved[:, 0], moved[:, 1] - moved[:, 0], moved[:, 2] - moved[:, 0]
    area = first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0]
    rows, columns = positions(images)
    down = rows.double() - origin[:, 0, None, None]
    right = columns.double() - origin[:, 1, None, None]
    first, second, area = first[:, :, None, None], second[:, :, None, None], area[:, None, None]
    sides = (corners[1:] - corners[0])[:, :, None, None, None]
    # Linear in row and column: two thin parts, added only at the end.
    by_row = (sides[0] * second[:, 1] - sides[1] * first[:, 1]) * (down / area)
    by_column = (sides[1] * first[:, 0] - sides[0] * second[:, 0]) * (right / area)
    source_rows, source_columns = (by_row + corners[0, :, None, None, None]) + by_column
    return source_rows, source_columns


def pixelate(images: Tensor, keys: Tensor, factor: float) -> Tensor:
    """Shrinks by `factor` and enlarges back, both with the box filter: bit for bit Pillow's."""
    height, width = images.shape[-2:]
    return box_pixelate(images, int(height * factor), int(width * factor))


def jpeg_compression(images: Tensor, keys: Tensor, quality: float) -> Tensor:
    """Stores the image as JPEG of the given quality and reads it back."""
    return jpeg_roundtrip(images, round(quality))
