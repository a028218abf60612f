"""Colour, geometry and storage: uint8 images and per-image keys in, uint8 images out."""

import torch
from torch import Tensor

from dissensus.data.corruptions._draws import uniform
from dissensus.data.corruptions._filters import box_pixelate, gaussian
from dissensus.data.corruptions._jpeg import jpeg_roundtrip
from dissensus.data.corruptions._pixels import to_uint8
from dissensus.data.corruptions._warps import positions, sample


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
