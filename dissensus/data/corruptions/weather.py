"""Weather between camera and scene (clouds, frost, water on the lens): uint8 images and per-image keys in, uint8 images out."""

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.data.corruptions._images import (
    correlate,
    gaussian,
    image_keys,
    integers,
    luma,
    normal,
    streak,
    tint,
    to_uint8,
    uniform,
    zoom,
)
from dissensus.data.images import IMAGE_ENDINGS, open_picture


def plasma(keys: Tensor, size: int, decay: float) -> Tensor:
    """Diamond-square clouds on a torus, `(batch, size, size)` from 0 to 1; `size` is a power of two.

    Each halving of the step fills the centres of squares and then of diamonds with the mean of their four neighbours plus uniform
    noise, whose amplitude falls by `decay` squared from one step to the next.
    """
    draws = uniform(keys, (size * size,), low=-1.0, high=1.0)
    field = draws.new_zeros(len(keys), size, size)
    step, amplitude, used = size, 100.0, 0
    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        cells = corners.shape[1] ** 2
        noise = draws[:, used : used + 3 * cells].reshape(-1, 3, *corners.shape[1:]) * amplitude**2
        used += 3 * cells
        right, below = corners.roll(-1, 2), corners.roll(-1, 1)
        centres = (corners + right + below + right.roll(-1, 1)) / 4 + noise[:, 0]
        field[:, half::step, half::step] = centres
        field[:, ::step, half::step] = (corners + right + centres + centres.roll(1, 1)) / 4 + noise[:, 1]
        field[:, half::step, ::step] = (corners + below + centres + centres.roll(1, 2)) / 4 + noise[:, 2]
        step, amplitude = half, amplitude / decay
    field -= field.amin((1, 2), keepdim=True)
    return field / field.amax((1, 2), keepdim=True)


_SIDE = 640
# Background, how far clouds and crystals rise above it, and the colour of the light, one line a texture, as in photographs of
# frosted windows.
_LOOKS = (
    (30.0, 90.0, 150.0, (0.70, 1.0, 1.08)),
    (125.0, 60.0, 75.0, (0.97, 1.0, 1.04)),
    (55.0, 60.0, 170.0, (0.92, 1.0, 1.07)),
    (20.0, 100.0, 190.0, (0.88, 1.0, 1.10)),
    (85.0, 60.0, 140.0, (0.93, 1.0, 1.07)),
)


@lru_cache(maxsize=4)
def _textures(folder: str | None, scale: float, height: int, width: int) -> list[Tensor]:
    """All textures at `scale`, or larger where they would be smaller than `(height, width)`, as crops are taken from them."""
    scaled = []
    for picture in _grown_textures() if folder is None else _read_textures(folder):
        enough = max(scale, height / picture.shape[1], width / picture.shape[2])
        size = [max(round(n * enough), least) for n, least in zip(picture.shape[1:], (height, width), strict=True)]
        # Bilinear without smoothing, as in the published code.
        scaled.append(F.interpolate(picture[None], size=size, mode="bilinear", align_corners=False)[0])
    return scaled


def _read_textures(folder: str) -> list[Tensor]:
    """Every picture of a folder in the order of its name, float32 `(3, height, width)` each."""
    paths = sorted(path for path in Path(folder).glob("*") if path.suffix.lower() in IMAGE_ENDINGS)
    if not paths:
        raise ValueError(
            f"`frost_folder` must hold pictures; found none in {str(folder)!r}. Pass another folder, or None for grown textures."
        )
    pictures = [np.array(open_picture(path).convert("RGB")) for path in paths]
    return [torch.from_numpy(picture).permute(2, 0, 1).float() for picture in pictures]


@lru_cache(maxsize=1)
def _grown_textures() -> tuple[Tensor, ...]:
    """Five textures of ice ferns over clouds of rime, float32 `(3, 640, 640)` each; always the same five."""
    keys = image_keys(0, "frost textures", 0, torch.arange(len(_LOOKS)))
    clouds = plasma(keys, 1024, decay=1.6)[:, :_SIDE, :_SIDE].double()
    grown = []
    for key, cloud, (base, cloud_height, fern_height, colour) in zip(keys, clouds, _LOOKS, strict=True):
        ferns = _ferns(key[None])
        grain = gaussian(normal(key[None], (_SIDE, _SIDE), stream=7)[0], 0.7) * 22
        light = base + cloud_height * cloud + fern_height * ferns * (0.4 + cloud) + grain
        tinted = light * torch.tensor(colour)[:, None, None]
        grown.append(tinted.clamp(0.0, 255.0).float())
    return tuple(grown)


def _ferns(key: Tensor, stems: int = 420, barbs: int = 12) -> Tensor:
    """Stems in random directions with barbs at about sixty degrees, 0 where bare to 1, `(640, 640)`."""

    def draw(shape: tuple[int, ...], low: float, high: float, stream: int) -> Tensor:
        return uniform(key, shape, low, high, stream)[0].double()

    root = draw((stems, 1, 2), 0.0, float(_SIDE), stream=1)
    angle = draw((stems, 1), 0.0, 2 * math.pi, stream=2)
    length = draw((stems, 1), 0.04, 0.18, stream=3) * _SIDE
    along = torch.linspace(0.05, 1.0, barbs, dtype=torch.float64).repeat(2)
    side = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat_interleave(barbs) * (math.pi / 3)
    joint = root + _heading(angle) * (length * along)[..., None]
    barb_angle = angle + side + draw((stems, 2 * barbs), -0.25, 0.25, stream=4)
    # Barbs shorten towards the tip, which gives the fern its outline.
    barb_length = 0.4 * length * (1 - 0.85 * along) * draw((stems, 2 * barbs), 0.3, 1.0, stream=5)
    ice = _drawn(root, angle, length) * 1.6 + _drawn(joint, barb_angle, barb_length)
    ice = gaussian(ice, 0.7) + 0.6 * gaussian(ice, 2.5)
    return ice / (ice + 0.6)


def _heading(angle: Tensor) -> Tensor:
    return torch.stack([angle.sin(), angle.cos()], dim=-1)


def _drawn(start: Tensor, angle: Tensor, length: Tensor, points: int = 96) -> Tensor:
    """How much of the lines (start, angle, length) runs through each pixel, `(640, 640)`."""
    reach = torch.linspace(0.0, 1.0, points, dtype=torch.float64)
    path = start[..., None, :] + _heading(angle)[..., None, :] * (length[..., None] * reach)[..., None]
    weight = (length / points)[..., None].expand(path.shape[:-1])
    row, column = (path.floor().long() % _SIDE).unbind(-1)
    return torch.bincount((row * _SIDE + column).flatten(), weight.flatten(), _SIDE**2).view(_SIDE, _SIDE)


_FARTHEST = 20
_EMBOSS = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))


def _water(liquid: Tensor, wet: Tensor) -> Tensor:
    """Light of the drops, `(batch, 1, height, width)`, from 0 to 1, which the brightest drop reaches.

    The distance to the nearest edge of a drop, spread over all grey values and embossed, times the liquid's height. The
    published code finds edges by Canny's detector; here they are the outermost pixels of the drops.
    """
    height = torch.where(wet, liquid, 0.0).mul_(255).floor_()
    dry = F.pad(~wet, (1, 1, 1, 1))
    edges = wet & (dry[..., :-2, 1:-1] | dry[..., 2:, 1:-1] | dry[..., 1:-1, :-2] | dry[..., 1:-1, 2:])
    relief = _equalise(_mean3(_distance(edges).clamp_(max=_FARTHEST)).floor_())
    relief = _mean3(correlate(relief, torch.tensor(_EMBOSS)).clamp_(0.0, 255.0)).round_()
    light = height * relief
    return light / light.amax(dim=(1, 2, 3), keepdim=True).clamp(min=1e-9)


def _distance(edges: Tensor) -> Tensor:
    """Euclidean distance to the nearest edge, exact up to `_FARTHEST` and at least that beyond it."""
    # The squared distance separates: first the nearest edge in the same row, then over rows.
    far = _FARTHEST + 1
    along = (~edges).to(torch.int16).mul_(far)
    # Any distance is a sum of powers of two, so doubled steps reach it.
    for step in (1, 2, 4, 8, 16):
        padded = F.pad(along, (step, step), value=far)
        ahead, behind = padded[..., 2 * step :], padded[..., : -2 * step]
        along = torch.minimum(along, torch.minimum(ahead, behind).add_(step))
    squared, height = along * along, edges.shape[-2]
    padded = F.pad(squared, (0, 0, _FARTHEST, _FARTHEST), value=far**2)
    for shift in range(1, _FARTHEST + 1):
        below = padded.narrow(-2, _FARTHEST + shift, height)
        above = padded.narrow(-2, _FARTHEST - shift, height)
        squared = torch.minimum(squared, torch.minimum(above, below).add_(shift**2))
    return squared.double().sqrt_()


def _mean3(values: Tensor) -> Tensor:
    """Mean over 3 x 3 pixels, mirrored at the border."""
    padded = F.pad(values, (1, 1, 1, 1), mode="reflect")
    rows = padded[..., :-2, :] + padded[..., 1:-1, :]
    rows.add_(padded[..., 2:, :])
    return (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:]).div_(9)


def _equalise(values: Tensor) -> Tensor:
    """Histogram equalisation of small whole numbers: each image's values spread evenly from 0 to 255."""
    flat = values.flatten(1).long()
    counts = flat.new_zeros(len(flat), _FARTHEST + 2).scatter_add_(1, flat, torch.ones_like(flat))
    below = counts.cumsum(1)
    lowest = counts.gather(1, flat.amin(1, keepdim=True))
    spread = 255.0 * (below - lowest) / (flat.shape[1] - lowest).clamp(min=1)
    return spread.double().add_(0.5).floor_().gather(1, flat).view_as(values)


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
    layer = zoom(normal(keys, (1, *images.shape[-2:])).mul_(scale).add_(loc), flake_size)
    flakes = to_uint8(layer.masked_fill_(layer < threshold, 0.0).mul_(255))
    fall = streak(flakes, uniform(keys, low=-135.0, high=-45.0, stream=1), radius, sd)
    values = images.float()
    whitened = torch.maximum(values, luma(images) * 1.5 + 127.5)
    scene = (values * keep).add_(whitened.mul_(1 - keep))
    return to_uint8(scene.add_(fall).add_(fall.flip(-2, -1)))


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
    textures = [each.to(images.device) for each in _textures(folder, texture_scale, height, width)]
    chosen = integers(keys, len(textures))
    spare = torch.tensor([(t.shape[1] - height + 1, t.shape[2] - width + 1) for t in textures], device=images.device)
    top, left = (integers(keys, spare[chosen, axis], stream=axis + 1).tolist() for axis in (0, 1))
    places = zip(chosen.tolist(), top, left, strict=True)
    crops = torch.stack([textures[which][:, y : y + height, x : x + width] for which, y, x in places])
    layer = luma(crops) if images.shape[1] == 1 else crops
    return to_uint8(layer.mul_(frost_weight).add_(images.float().mul_(image_weight)))


def brightness(images: Tensor, keys: Tensor, shift: float) -> Tensor:
    """Raises HSV's value by `shift`, hue and saturation kept: all channels grow by one factor."""
    values = images.float()
    value = values.amax(dim=1, keepdim=True)
    brighter = (value + 255 * shift).clamp_(max=255.0)
    factor = brighter / value.clamp(min=1.0)
    # Black has neither hue nor saturation and turns grey.
    grey = brighter.mul_(value.lt_(1.0))
    return to_uint8(values.mul_(factor).add_(grey))


def spatter(
    images: Tensor, keys: Tensor, loc: float, scale: float, sd: float, threshold: float, opacity: float, mud_sd: float
) -> Tensor:
    """Drops on the lens: clear water that adds light, or mud (`mud_sd` > 0) that hides the scene."""
    height, width = images.shape[-2:]
    liquid = gaussian(normal(keys, (1, height, width)).mul_(scale).add_(loc), sd)
    wet = liquid > threshold
    if mud_sd == 0:
        return to_uint8((_water(liquid, wet) * opacity).float() * tint(_WATER, images) + images.float())
    cover = gaussian(wet.float(), mud_sd)
    cover = (opacity * cover.masked_fill_(cover < 0.8, 0.0)).float()
    return to_uint8(images.float() * (1 - cover) + tint(_MUD, images) * cover)
