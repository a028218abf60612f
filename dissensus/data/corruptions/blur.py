"""Blurs: uint8 images and per-image keys in, uint8 images out."""

import math

import torch
from torch import Tensor

from dissensus.data.corruptions._images import (
    correlate,
    disk_kernel,
    gaussian,
    integers,
    streak,
    to_bytes,
    to_uint8,
    uniform,
    zoom,
)


def gaussian_blur(images: Tensor, keys: Tensor, sd: float) -> Tensor:
    """Gaussian blur of `sd` pixels, cut at four standard deviations, edge pixels repeated."""
    return to_uint8(gaussian(images, sd), clamp=False)


def defocus_blur(images: Tensor, keys: Tensor, radius: float, alias_sd: float) -> Tensor:
    """Correlation with a disk of `radius` pixels, softened by a Gaussian of `alias_sd` pixels."""
    return to_uint8(correlate(images.float(), disk_kernel(radius, alias_sd)), clamp=False)


def motion_blur(images: Tensor, keys: Tensor, radius: float, sd: float) -> Tensor:
    """One-sided Gaussian streak in a direction drawn between -45 and 45 degrees for each image."""
    degrees = uniform(keys, low=-45.0, high=45.0)
    return to_bytes(streak(images, degrees, radius, sd).add_(0.5))


def zoom_blur(images: Tensor, keys: Tensor, stop: float, step: float) -> Tensor:
    """Mean of the image and of its central enlargements by 1, 1 + `step`, … below `stop`."""
    # The published factors come from a floating-point range, which twice reaches `stop` and once rounds a
    # size up where the exact factor would not; both are kept.
    count, increment = math.ceil((stop - 1) / step), (1 + step) - 1
    total = images.double()
    for i in range(count):
        total += zoom(images, 1 + i * increment)
    return to_uint8(total.div_(count + 1), clamp=False)


def glass_blur(images: Tensor, keys: Tensor, sd: float, reach: float, rounds: float) -> Tensor:
    """Blurs, moves pixels about by up to `reach`, `rounds` times over, and blurs again.

    As in the published code, pixels are visited from the lower right to the upper left; each takes the value of a neighbour at
    an offset drawn from `-reach … reach - 1` in both directions, and the neighbour keeps its own.
    """
    batch, channels, height, width = images.shape
    pixels = to_uint8(gaussian(images, sd), clamp=False).permute(0, 2, 3, 1).reshape(-1, channels)
    first = torch.arange(batch, device=images.device)[:, None] * (height * width)
    for i in range(round(rounds)):
        source = _glass_sources(keys, height, width, max(1, round(reach)), stream=i)
        pixels = pixels.index_select(0, (source + first).flatten())
    moved = pixels.view(batch, height, width, channels).permute(0, 3, 1, 2)
    return to_uint8(gaussian(moved, sd), clamp=False)


def _glass_sources(keys: Tensor, height: int, width: int, reach: int, stream: int) -> Tensor:
    """Where each pixel's value comes from after one round of visits, `(batch, height * width)`.

    A visited pixel copies a neighbour: one not yet visited still has its own value, one visited before passes on what it
    copied. To follow such chains needs no walk over the pixels: pointers are doubled until they all rest.
    """
    pixel = torch.arange(height * width, device=keys.device)
    row, column = pixel // width, pixel % width
    offset = integers(keys, 2 * reach, (2, height * width), stream).sub_(reach)
    visited = (row > reach) & (row <= height - reach) & (column > reach) & (column <= width - reach)
    neighbour = torch.where(visited, pixel + offset[:, 0] * width + offset[:, 1], pixel)
    if reach == 1:  # all neighbours lie above or to the left: none has been visited
        return neighbour
    # Pointers below n stand for values after the round, those from n on for values before it, where chains end.
    num_pixels = height * width
    ends = torch.where((neighbour > pixel) & visited[neighbour], neighbour, neighbour + num_pixels)
    pointers = torch.cat([ends, (pixel + num_pixels).expand_as(ends)], dim=1)
    for _ in range(num_pixels.bit_length()):
        pointers = pointers.gather(1, pointers)
    return pointers[:, :num_pixels] - num_pixels
