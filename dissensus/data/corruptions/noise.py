"""Noise on every pixel: uint8 images and per-image keys in, uint8 images out."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dissensus.data.corruptions._images import bits, normal, share_below, to_uint8

_SIGN = -(2**31)


def gaussian_noise(images: Tensor, keys: Tensor, sd: float) -> Tensor:
    """Adds normal noise of standard deviation `sd` (image range 0 to 1) to every value."""
    return to_uint8(normal(keys, tuple(images.shape[1:])).mul_(255 * sd).add_(images.float()))


def speckle_noise(images: Tensor, keys: Tensor, sd: float) -> Tensor:
    """Multiplies every value by `1 + sd * z`, z standard normal."""
    return to_uint8(normal(keys, tuple(images.shape[1:])).mul_(sd).add_(1.0).mul_(images.float()))


def impulse_noise(images: Tensor, keys: Tensor, amount: float) -> Tensor:
    """Replaces a fraction `amount` of all values by 0 or 255, each with equal chance."""
    draws = bits(keys, tuple(images.shape[1:]))
    # Comparisons in place keep the type and vectorise; as masks of bits they then need no branch.
    struck = draws.clone().lt_(share_below(amount)).neg_().to(torch.uint8)
    spared = draws.lt_(share_below(amount / 2)).sub_(1).to(torch.uint8)
    return struck.bitwise_or_(images).bitwise_and_(spared)


def shot_noise(images: Tensor, keys: Tensor, photons: float) -> Tensor:
    """Counts photons: value x becomes Poisson(`photons` * x) / `photons`.

    Exact draws by Walker's alias method: each of 256 levels has its own table of columns, and a column holds one count up to a
    threshold and another above it. One 32-bit number picks the column (low bits) and the side of the threshold (high bits).
    """
    table, log_columns = _poisson_columns(photons)
    low = (1 << log_columns) - 1
    random = bits(keys, tuple(images.shape[1:]))
    column = random & low
    place = images.int().bitwise_left_shift_(log_columns).bitwise_or_(column).flatten()
    cell = table.to(images.device).index_select(0, place).view_as(random)
    alias = cell & low
    # With the sign bits flipped, signed numbers compare as the unsigned ones that are meant.
    accepted = random.bitwise_xor_(_SIGN).lt_(cell.bitwise_and_(~low).bitwise_xor_(_SIGN))
    counts = column.sub_(alias).mul_(accepted).add_(alias)
    return to_uint8(counts.float().mul_(255 / photons))


@lru_cache(maxsize=16)
def _poisson_columns(photons: float) -> tuple[Tensor, int]:
    """Alias tables of Poisson(photons * level / 255) for all 256 levels, threshold and alias in one word, and log2 of their width."""
    # The largest mean is `photons`; ten standard deviations above it nothing is left in double precision's sight.
    log_columns = math.ceil(math.log2(photons + 10 * math.sqrt(photons) + 20))
    thresholds, aliases = alias_tables(poisson_probabilities(photons, 1 << log_columns))
    levels = 1 << (32 - log_columns)
    packed = ((thresholds * levels).round().long().clamp_(max=levels - 1) << log_columns) + aliases
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).flatten(), log_columns


def poisson_probabilities(photons: float, columns: int) -> Tensor:
    """Probability of each count below `columns` at each of the 256 levels, float64 `(256, columns)`."""
    means = torch.arange(256, dtype=torch.float64)[:, None] * (photons / 255)
    counts = torch.arange(columns, dtype=torch.float64)
    return torch.exp(torch.xlogy(counts, means) - means - torch.lgamma(counts + 1))


def alias_tables(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Walker's tables of each row: column j keeps the share `thresholds[j]`, the rest is `aliases[j]`'s.

    One sweep closes a column of every row at a time: a light one (below the mean), filled up from the current heavy one, or the
    current heavy one once it has become light itself, filled up from the next.
    """
    columns = probabilities.shape[1]
    row = np.arange(len(probabilities))
    weights = (probabilities / probabilities.sum(1, keepdim=True)).numpy() * columns
    thresholds, aliases = np.ones_like(weights), np.tile(np.arange(columns), (len(row), 1))
    lights = np.argsort(weights > 1, axis=1, kind="stable")
    heavies = np.argsort(weights <= 1, axis=1, kind="stable")
    num_lights = (weights <= 1).sum(1)
    light_at, heavy_at = np.zeros_like(row), np.zeros_like(row)
    left = weights[row, heavies[row, 0]]
    for _ in range(columns - 1):
        heavy, following = heavies[row, heavy_at], heavies[row, np.minimum(heavy_at + 1, columns - 1)]
        light = lights[row, np.minimum(light_at, columns - 1)]
        take_light = (left > 1) & (light_at < num_lights)
        closed = np.where(take_light, light, heavy)
        thresholds[row, closed] = np.where(take_light, weights[row, light], left)
        aliases[row, closed] = np.where(take_light, heavy, following)
        left = left - 1 + np.where(take_light, weights[row, light], weights[row, following])
        light_at, heavy_at = light_at + take_light, heavy_at + ~take_light
    return torch.from_numpy(thresholds).clamp_(0.0, 1.0), torch.from_numpy(aliases)
