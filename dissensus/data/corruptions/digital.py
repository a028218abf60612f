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

from dissensus.data.corruptions._images import gaussian, positions, sample, separable, to_bytes, to_uint8, uniform

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

# The DCT of eight samples as Loeffler's eleven rounded multiplications make it, over 2^13: half of each row, whose other half is
# its mirror image (with the sign turned in odd rows). The way back is its transpose.
_DCT = (
    (8192, 8192, 8192, 8192),
    (11363, 9633, 6437, 2260),
    (10703, 4433, -4433, -10703),
    (9633, -2259, -11362, -6436),
    (8192, -8192, -8192, 8192),
    (6437, -11362, 2261, 9633),
    (4433, -10704, 10704, -4433),
    (2260, -6436, 9633, -11363),
)
# Bits after the point, and two more in what the first pass hands to the second.
_BITS, _EXTRA = 13, 2

_ONES = torch.ones(1, dtype=torch.float64)


@lru_cache(maxsize=128)
def _quantisation_tables(quality: int) -> tuple[Tensor, Tensor]:
    """Steps for luma and chroma, `(8, 8)`: the standard's tables scaled by quality as libjpeg does."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    luma, chroma = ((torch.tensor(table) * percent + 50) // 100 for table in (_LUMA_TABLE, _CHROMA_TABLE))
    return luma.clamp(1, 255), chroma.clamp(1, 255)


def _mixed(channels: Tensor, constant: int, *weights: int) -> Tensor:
    """Weighted sum of channels plus a constant, all over 2^16, rounded down; exact, as no sum reaches 2^24 / 2^16."""
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
    steps = steps.double().repeat(1, lines // 8)
    # To the nearest multiple of the step, as the transform comes scaled by eight; ties go away from zero, as a hair above one over
    # the step turns them into a bit more than a half, and nothing else is so close to one.
    values = values.mul_((1 + 2.0**-40) / (8 * steps)).round_().mul_(steps)
    values = _rounded(across_backward @ values)
    values = _rounded(values.view(-1, 8) @ backward.T, 128.0).clamp_(0.0, 255.0)
    return values.view(shape)[..., :height, :width]


def _rounded(values: Tensor, offset: float = 0.0) -> Tensor:
    """To the nearest whole number, halves upwards, plus `offset`."""
    return values.add_(0.5 + offset).floor_()


@lru_cache(maxsize=1)
def _transforms() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """DCT of eight samples along a line and across lines, and the way back, scaled as the passes hand them on."""
    half = torch.tensor(_DCT, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)[:, None]
    forward = torch.cat([half, half.flip(1) * signs], dim=1)
    first, second, last = (2.0**-bits for bits in (_BITS - _EXTRA, _BITS + _EXTRA, _BITS + _EXTRA + 3))
    return forward * first, forward * second, forward.T * last, forward.T * first


def contrast(images: Tensor, keys: Tensor, factor: float) -> Tensor:
    """Pulls every value towards its channel's mean."""
    values = images.float()
    pixels = images.shape[2] * images.shape[3]
    # Exact, as float32 holds whole numbers up to 2^24, so the mean does not depend on how a reduction is split.
    exact = torch.float32 if pixels <= 2**16 else torch.float64
    mean = values.sum((2, 3), keepdim=True, dtype=exact).float().div_(pixels)
    return to_uint8(values.sub_(mean).mul_(factor).add_(mean))


def saturate(images: Tensor, keys: Tensor, factor: float, shift: float) -> Tensor:
    """Changes HSV's saturation s to `factor * s + shift`, hue and value kept.

    As in the published code grey pixels count as red hue, so that a `shift` colours them. Grey images come back unchanged.
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

    Three points are moved by up to `affine` pixels each way; displacements are uniform noise smoothed over `sd` pixels times
    `strength`. Both look-ups are bilinear and mirrored at the border.
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
    rows, columns = (_box_and_back(size, int(size * factor)).to(images.device) for size in images.shape[-2:])
    # Pillow rounds after the columns and after the rows. Enlarging only repeats pixels, which commutes with rounding.
    wide = (images.double() @ columns.T).add_(0.5).floor_()
    return to_bytes((rows @ wide).add_(0.5))


@lru_cache(maxsize=128)
def _box_and_back(size: int, smaller: int) -> Tensor:
    return _box_matrix(smaller, size) @ _box_matrix(size, smaller)


def _box_matrix(source: int, target: int) -> Tensor:
    """Means over each target pixel's share of the source, `(target, source)`, in Pillow's 22-bit weights."""
    scale = source / target
    width = max(scale, 1.0)
    centres = (torch.arange(target, dtype=torch.float64)[:, None] + 0.5) * scale
    first = (centres - width / 2 + 0.5).long().clamp(min=0)
    last = (centres + width / 2 + 0.5).long().clamp(max=source)
    pixels = torch.arange(source)
    distance = (pixels + 0.5 - centres) / width
    inside = (pixels >= first) & (pixels < last) & (distance > -0.5) & (distance <= 0.5)
    weights = inside / inside.sum(1, keepdim=True)
    return (weights.double() * 2**22 + 0.5).floor() / 2**22


def jpeg_compression(images: Tensor, keys: Tensor, quality: float) -> Tensor:
    """Stores the image as JPEG of the given quality and reads it back."""
    luma_steps, chroma_steps = (table.to(images.device) for table in _quantisation_tables(round(quality)))
    if images.shape[1] == 1:
        return to_bytes(_stored(images.float(), luma_steps))
    colours, (height, width) = images.float(), images.shape[-2:]
    luma, blue, red = (_mixed(colours, *row) for row in _TO_YCC)
    small = _stored(_halved(torch.stack([blue, red], dim=1)), chroma_steps)[..., : (width + 1) // 2]
    chroma = _enlarged(small, height, width).float().sub_(128.0)
    colours = torch.stack([_mixed(chroma, *row) for row in _TO_RGB], dim=1)
    return to_bytes(colours.add_(_stored(luma[:, None], luma_steps).float()).clamp_(0.0, 255.0))
