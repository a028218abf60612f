"""Frost textures: grown by a small program, or read from a folder of pictures."""

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.data.corruptions._clouds import plasma
from dissensus.data.corruptions._draws import image_keys, normal, uniform
from dissensus.data.corruptions._filters import gaussian

_SIDE = 640
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# Background, how far clouds and crystals rise above it, and the colour of the light, one line a texture.
# Means and contrasts lie in the range of photographs of frosted windows.
_LOOKS = (
    (30.0, 90.0, 150.0, (0.70, 1.0, 1.08)),
    (125.0, 60.0, 75.0, (0.97, 1.0, 1.04)),
    (55.0, 60.0, 170.0, (0.92, 1.0, 1.07)),
    (20.0, 100.0, 190.0, (0.88, 1.0, 1.10)),
    (85.0, 60.0, 140.0, (0.93, 1.0, 1.07)),
)


@lru_cache(maxsize=4)
def textures(
    folder: str | None, scale: float, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All textures at `scale`, each at least `(height, width)`, laid end to end.

    Returns:
        Pixels `(3, total)` of range 0 to 255, and for each texture its first pixel, its height and its width.
    """
    pictures = grown_textures() if folder is None else read_textures(folder)
    scaled = [_resized(picture, scale, height, width) for picture in pictures]
    heights, widths = (torch.tensor([picture.shape[axis] for picture in scaled]) for axis in (1, 2))
    first = (heights * widths).cumsum(0) - heights * widths
    return torch.cat([picture.flatten(1) for picture in scaled], dim=1), first, heights, widths


def _resized(picture: Tensor, scale: float, height: int, width: int) -> Tensor:
    """Bilinear without smoothing, as in the published code; never smaller than the crop taken from it."""
    enough = max(scale, height / picture.shape[1], width / picture.shape[2])
    size = [
        max(round(n * enough), least) for n, least in zip(picture.shape[1:], (height, width), strict=True)
    ]
    return F.interpolate(picture[None], size=size, mode="bilinear", align_corners=False)[0]


def read_textures(folder: str) -> list[Tensor]:
    """Every picture of a folder in the order of its name, float32 `(3, height, width)` each."""
    paths = sorted(path for path in Path(folder).glob("*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise ValueError(
            f"`frost_folder` must hold pictures ({', '.join(_SUFFIXES)}); found none in {str(folder)!r}. "
            "Pass another folder, or None for grown textures."
        )
    from PIL import Image

    pictures = []
    for path in paths:
        with Image.open(path) as image:
            pictures.append(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float())
    return pictures


@lru_cache(maxsize=1)
def grown_textures() -> tuple[Tensor, ...]:
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
