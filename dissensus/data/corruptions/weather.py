"""Weather between camera and scene: uint8 images and per-image keys in, uint8 images out."""

import torch
from torch import Tensor

from dissensus.data.corruptions._clouds import plasma
from dissensus.data.corruptions._draws import integers, normal, uniform
from dissensus.data.corruptions._filters import gaussian, streak, zoom
from dissensus.data.corruptions._frost import textures
from dissensus.data.corruptions._pixels import luma, tint, to_uint8
from dissensus.data.corruptions._splashes import water

_MUD = (63.0, 42.0, 20.0)
_WATER = (175.0, 238.0, 238.0)


def snow(
    images: Tensor,
    keys: Tensor,
    loc: float,
    scale: float,
    flake_size: float,
    threshold: float,
    radius: float,
    sd: float,
    keep: float,
) -> Tensor:
    """Whitens the scene and lays streaked flakes over it: thresholded noise, enlarged, blurred downwards."""
    flakes = _flakes(images, keys, loc, scale, flake_size, threshold)
    fall = streak(flakes, uniform(keys, low=-135.0, high=-45.0, stream=1), radius, sd)
    values = images.float()
    whitened = torch.maximum(values, luma(images) * 1.5 + 127.5)
    scene = (values * keep).add_(whitened.mul_(1 - keep))
    return to_uint8(scene.add_(fall).add_(fall.flip(-2, -1)))


def _flakes(images: Tensor, keys: Tensor, loc: float, scale: float, size: float, threshold: float) -> Tensor:
    """Where flakes are and how bright, bytes `(batch, 1, height, width)`."""
    height, width = images.shape[-2:]
    layer = zoom(normal(keys, (1, height, width)).mul_(scale).add_(loc), size)
    return to_uint8(layer.masked_fill_(layer < threshold, 0.0).mul_(255))


def fog(images: Tensor, keys: Tensor, amount: float, decay: float) -> Tensor:
    """Adds a cloud of height `amount` (image range 0 to 1) and rescales so that the brightest value stays."""
    height, width = images.shape[-2:]
    cloud = plasma(keys, 1 << (max(height, width) - 1).bit_length(), decay)[:, None, :height, :width]
    brightest = images.amax(dim=(1, 2, 3), keepdim=True).float()
    foggy = (cloud * (255 * amount)).add(images.float())
    return to_uint8(foggy.mul_(brightest / (brightest + 255 * amount)))


def frost(
    images: Tensor,
    keys: Tensor,
    image_weight: float,
    frost_weight: float,
    texture_scale: float,
    folder: str | None = None,
) -> Tensor:
    """Weighted sum of the image and a random crop of a random frost texture."""
    height, width = images.shape[-2:]
    pixels, first, heights, widths = (
        part.to(images.device) for part in textures(folder, texture_scale, height, width)
    )
    chosen = integers(keys, len(first))
    top = integers(keys, (heights[chosen] - height + 1), stream=1)
    left = integers(keys, (widths[chosen] - width + 1), stream=2)
    rows = top[:, None] + torch.arange(height, device=images.device)
    # Each line of a crop is one window of the texture's memory.
    lines = first[chosen, None] + rows * widths[chosen, None] + left[:, None]
    planes = torch.arange(3, device=images.device)[:, None] * pixels.shape[1]
    windows = pixels.flatten().unfold(0, width, 1)
    crops = windows.index_select(0, (planes + lines[:, None]).flatten()).view(-1, 3, height, width)
    layer = luma(crops) if images.shape[1] == 1 else crops
    return to_uint8(layer.mul_(frost_weight).add_(images.float().mul_(image_weight)))


def spatter(
    images: Tensor,
    keys: Tensor,
    loc: float,
    scale: float,
    sd: float,
    threshold: float,
    opacity: float,
    mud_sd: float,
) -> Tensor:
    """Drops on the lens: clear water that adds light, or mud (`mud_sd` > 0) that hides the scene."""
    height, width = images.shape[-2:]
    liquid = gaussian(normal(keys, (1, height, width)).mul_(scale).add_(loc), sd)
    wet = liquid > threshold
    if mud_sd == 0:
        return to_uint8((water(liquid, wet) * opacity).float() * tint(_WATER, images) + images.float())
    cover = gaussian(wet.float(), mud_sd)
    cover = (opacity * cover.masked_fill_(cover < 0.8, 0.0)).float()
    return to_uint8(images.float() * (1 - cover) + tint(_MUD, images) * cover)
