"""Augmentation on the device, keyed: a batch's changes depend on (seed, member, step) and nothing else.

An augmentation is a function `(x, y, noise) -> (x, y)`. `x` is `(members, batch, ...)` with one key a member, of (seed, member,
step), where members have batches of their own. It is `(batch, ...)` with one scalar key, of (seed, step), where they share batches
(objectives that compare members, Datasets, DataLoaders, `batches="shared"`). Images are `(..., channels, height, width)`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.data.sources import class_targets
from dissensus.randomness import Noise

Augmentation = Callable[[Tensor, Tensor, Noise], tuple[Tensor, Tensor]]


def _per_example(noise: Noise, x: Tensor, *shape: int) -> Tensor:
    """Uniform draws for every example, `leading + shape`."""
    return noise.uniform(x.shape[noise.keys.ndim], *shape)


def _spread(values: Tensor, x: Tensor) -> Tensor:
    """Append axes so that one value an example broadcasts over the example."""
    return values.reshape(*values.shape, *(1 for _ in range(x.ndim - values.ndim)))


def _real(x: Tensor, augmentation: object) -> Tensor:
    """Refuse images of integers where values are computed with."""
    if not x.is_floating_point():
        name = type(augmentation).__name__
        raise ValueError(f"{name} computes with values and wants floating-point inputs; got {x.dtype}. Scale them.")
    return x


@dataclass(frozen=True)
class Compose:
    """One augmentation after another, each with noise of its own."""

    steps: tuple[Augmentation, ...]

    def __call__(self, x: Tensor, y: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Apply all in order."""
        for number, step in enumerate(self.steps):
            x, y = step(x, y, noise.at(number))
        return x, y


@dataclass(frozen=True)
class HorizontalFlip:
    """Mirror each image left to right with this probability."""

    probability: float = 0.5

    def __call__(self, x: Tensor, y: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Flip some of the images."""
        flip = _spread(_per_example(noise, x) < self.probability, x)
        return torch.where(flip, x.flip(-1), x), y


@dataclass(frozen=True)
class RandomCrop:
    """Pad each image by this many pixels of zeros and cut its own size out again, anywhere."""

    padding: int = 4

    def __call__(self, x: Tensor, y: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Shift the images."""
        height, width = x.shape[-2:]
        top, left = (_per_example(noise, x, 2) * (2 * self.padding + 1)).long().unbind(-1)
        padded = F.pad(x, (self.padding,) * 4)
        rows = top[..., None] + torch.arange(height, device=x.device)
        columns = left[..., None] + torch.arange(width, device=x.device)
        # One gather an axis; images of a batch are shifted by different amounts.
        padded = padded.gather(-2, rows[..., None, :, None].expand(*padded.shape[:-2], height, padded.shape[-1]))
        return padded.gather(-1, columns[..., None, None, :].expand(*padded.shape[:-1], width)), y


@dataclass(frozen=True)
class GaussianNoise:
    """Add normal noise of this standard deviation to every value."""

    scale: float

    def __call__(self, x: Tensor, y: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Add the noise."""
        return _real(x, self) + self.scale * noise.normal(*x.shape[noise.keys.ndim :]).to(x.dtype), y


@dataclass(frozen=True)
class Rotation:
    """Turn each image by an angle drawn from [-degrees, degrees], bilinear, zeros outside."""

    degrees: float

    def __call__(self, x: Tensor, y: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Turn the images."""
        angles = (_per_example(noise, x) * 2 - 1).reshape(-1) * math.radians(self.degrees)
        flat = _real(x, self).reshape(-1, *x.shape[-3:])
        height, width = x.shape[-2:]
        cos, sin = angles.cos(), angles.sin()
        # The sampling grid is in units of half the image, so turning a rectangle needs its aspect ratio.
        zero = torch.zeros_like(cos)
        turn = torch.stack([cos, -sin * height / width, zero, sin * width / height, cos, zero], -1).view(-1, 2, 3)
        grid = F.affine_grid(turn.to(flat.dtype), list(flat.shape), align_corners=False)
        return F.grid_sample(flat, grid, align_corners=False).reshape(x.shape), y


@dataclass(frozen=True)
class ColourJitter:
    """Scale brightness, contrast and saturation of each image by factors drawn from [1 - strength, 1 + strength]."""

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __call__(self, x: Tensor, y: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Change the colours of images of 3 channels."""
        draws = _per_example(noise, x, 3) * 2 - 1
        brightness, contrast, saturation = (
            _spread(1 + strength * draw, x)
            for strength, draw in zip((self.brightness, self.contrast, self.saturation), draws.unbind(-1), strict=True)
        )
        x = _real(x, self) * brightness
        grey = x.mean(-3, keepdim=True)
        middle = grey.mean((-2, -1), keepdim=True)
        x = middle + (x - middle) * contrast
        grey = x.mean(-3, keepdim=True)
        return grey + (x - grey) * saturation, y


@dataclass(frozen=True)
class Mixup:
    """Blend each example with another of its batch, inputs and labels alike.

    The share is Beta(strength, strength), one draw a batch.

    References:
        Zhang et al., 2018, <https://arxiv.org/abs/1710.09412>.
    """

    num_classes: int
    strength: float = 0.2

    def __call__(self, x: Tensor, y: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Return blended inputs and class probabilities."""
        x = _real(x, self)
        share = _beta(noise.at(0), self.strength)
        partner = _per_example(noise.at(1), x).argsort(-1)
        targets = class_targets(y, self.num_classes)
        return _blend(x, partner, share.to(x.dtype)), _blend(targets, partner, share)


@dataclass(frozen=True)
class CutMix:
    """Paste a rectangle of another image of the batch into each image; labels mix by area.

    References:
        Yun et al., 2019, <https://arxiv.org/abs/1905.04899>.
    """

    num_classes: int
    strength: float = 1.0

    def __call__(self, x: Tensor, y: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Return pasted images and class probabilities."""
        share = _beta(noise.at(0), self.strength)
        partner = _per_example(noise.at(1), x).argsort(-1)
        height, width = x.shape[-2:]
        centre = noise.at(2).uniform(2)
        half = (1 - share).sqrt() / 2
        rows = _inside(centre[..., 0], half, height)
        columns = _inside(centre[..., 1], half, width)
        patch = rows[..., :, None] & columns[..., None, :]
        kept = 1 - patch.to(torch.float32).mean((-2, -1))
        patch = patch[..., None, None, :, :]
        targets = class_targets(y, self.num_classes)
        return torch.where(patch, _take(x, partner), x), _blend(targets, partner, kept)


def _take(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(index.ndim - 1, _spread(index, values).expand_as(values))


def _blend(values: Tensor, partner: Tensor, share: Tensor) -> Tensor:
    share = _spread(share, values)
    return share * values + (1 - share) * _take(values, partner)


def _inside(centre: Tensor, half: Tensor, size: int) -> Tensor:
    position = (torch.arange(size, device=centre.device) + 0.5) / size
    return (position - centre[..., None]).abs() < half[..., None]


def _beta(noise: Noise, strength: float, grid: int = 512) -> Tensor:
    """Draw Beta(strength, strength) by inverting its distribution function on a grid, so that it stays keyed."""
    # The grid is dense at both ends, where the density of a small strength has its mass.
    t = torch.linspace(0, 1, grid, dtype=torch.float64, device=noise.keys.device)
    points = torch.sin(t * math.pi / 2).square()
    middle = (points[1:] + points[:-1]) / 2
    weight = (middle * (1 - middle)).pow(strength - 1) * points.diff()
    cumulative = torch.cat([t[:1] * 0, weight.cumsum(0)])
    cumulative = (cumulative / cumulative[-1]).contiguous()
    u = noise.uniform().double()
    upper = torch.searchsorted(cumulative, u.contiguous()).clamp(1, grid - 1)
    low, high = _at(cumulative, upper - 1), _at(cumulative, upper)
    fraction = (u - low) / (high - low).clamp_min(1e-12)
    left, right = _at(points, upper - 1), _at(points, upper)
    return (left + fraction * (right - left)).float()


def _at(values: Tensor, places: Tensor) -> Tensor:
    # Not values[places]: of a single place it reads the number, which a recorded or captured step cannot.
    return values.index_select(0, places.reshape(-1)).reshape(places.shape)
