"""Binary masks over the channels of a layer: their laws, and an exact sampler for a given width.

Masksembles draw masks with `ones` of `ones * scale` slots each and trim slots that no mask uses. Given the width that is left, all matrices
with `ones` ones a row and no empty column are equally likely, as each comes from equally many untrimmed ones: so `scale` matters only
through `ones`, and `solve` finds the `ones` whose expected width is `width`.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dissensus._signatures import checked
from dissensus.types import Bool, Float

Masks: TypeAlias = Bool[Tensor, "num_masks width"]


@dataclass(frozen=True)
class MaskSettings:
    """Settings that fit together: at `scale`, the expected trimmed width is `width`."""

    width: int
    num_masks: int
    ones: int
    scale: float


@checked
def generate(width: int, num_masks: int, scale: float, seed: int = 0) -> Masks:
    r"""Draw masks for a layer of `width` channels, uniform among all that use every channel.

    With $a_k(w)$ the number of such sets of $k$ masks on $w$ channels, and $m$ ones a mask,
    $$a_k(w) = \binom{w}{m} \sum_d \binom{m}{d}\, a_{k-1}(w-d), \qquad a_1(m) = 1:$$
    the last mask takes any $m$ channels, $d$ of them are its own, the other masks fill the remaining $w-d$.
    Drawing $d$ in proportion to its term, mask after mask, is exact: no rejection, so the time is bounded.

    Args:
        width: Channels of the layer.
        num_masks: Number of masks, one a member.
        scale: 1 makes all masks alike, more lets them overlap less, `math.inf` makes them disjoint.
        seed: Decides the masks, any whole number; global random state is neither read nor changed.

    Returns:
        True where a member keeps the channel: `solve(...).ones` in every row, at least one in every column.

    Example:
        >>> masks = generate(width=64, num_masks=4, scale=2.0)
        >>> masks.sum(1).tolist(), masks.any(0).all().item(), round(effective_scale(masks), 3)
        ([34, 34, 34, 34], True, 2.011)

    References:
        Durasov et al., 2021, <https://arxiv.org/abs/2012.08334>.
    """
    ones = solve(width, num_masks=num_masks, scale=scale).ones
    counts = _log_counts(width, num_masks, ones)
    rng = np.random.Generator(np.random.Philox(seed % 2**64))
    keys, levels = rng.random((num_masks, width)), rng.random(num_masks)
    masks, columns = np.zeros((num_masks, width), dtype=bool), np.arange(width)
    for k in range(num_masks - 1, 0, -1):
        order = keys[k, : len(columns)].argsort()
        masks[k, columns[order[:ones]]] = True
        unions, log_counts = counts[k - 1]
        log_weights = _log_choose(ones, len(columns) - np.array(unions)) + log_counts
        cumulative = np.exp(log_weights - log_weights.max()).cumsum()
        # 1 - level lies in (0, 1], so that a union of zero weight is never taken.
        union = unions[np.searchsorted(cumulative, (1.0 - levels[k]) * cumulative[-1])]
        columns = np.delete(columns, order[: len(columns) - union])
    masks[0, columns] = True
    return torch.from_numpy(masks)


@checked
def solve(
    width: int, *, ones: int | None = None, scale: float | None = None, num_masks: int | None = None
) -> MaskSettings:
    """Find the third of `ones`, `scale` and `num_masks` for a layer of `width` channels.

    Ones and masks are whole numbers, so a given `scale` comes back as the nearest possible one: nearest in
    1 / scale, the chance that a slot is on, because disjoint masks have an infinite scale.

    Args:
        width: Channels of the layer.
        ones: Channels that each mask keeps.
        scale: From 1 (all masks alike) to `math.inf` (disjoint).
        num_masks: Number of masks.

    Returns:
        All four settings; `expected_width` of them is `width`.

    Example:
        >>> solve(60, num_masks=4, scale=2.0)
        MaskSettings(width=60, num_masks=4, ones=32, scale=2.0)
        >>> solve(60, num_masks=4, ones=15).scale, solve(60, ones=32, scale=2.0).num_masks
        (inf, 4)
    """
    match ones, scale, num_masks:
        case None, (float() | int()) as asked, int() as masks:
            _check_reach(width, masks, asked)
            exact = width / expected_width(1, asked, masks)
            pairs = [(n, masks) for n in _enough(exact, masks, width)]
        case int() as kept, (float() | int()) as asked, None:
            _check(width=width, ones=kept, scale=asked)
            on = 1.0 / asked
            if not width * on < kept <= width:
                wanted = f"above width / scale = {width * on:.6g} and at most {width}, and `scale` above 1"
                raise ValueError(f"`ones` must be {wanted}; got {kept}. Take ones={min(width, int(width * on) + 1)}.")
            exact = math.log1p(-width * on / kept) / math.log1p(-on) if on else width / kept
            pairs = [(kept, n) for n in _enough(exact, kept, width)]
        case int() as kept, None, int() as masks:
            pairs = [(kept, masks)]
        case _:
            raise ValueError(f"Give two of `ones`, `scale` and `num_masks`; got {ones=}, {scale=}, {num_masks=}.")
    found = [MaskSettings(width, n, m, _implied_scale(width, n, m)) for m, n in pairs]
    return min(found, key=lambda s: abs(1.0 / s.scale - 1.0 / (scale or s.scale)))


def _enough(exact: float, other: int, width: int) -> list[int]:
    """Return the whole numbers beside one of which the product with the other reaches the width."""
    return [n for n in (math.floor(exact), math.ceil(exact)) if n * other >= width]


@checked
def effective_scale(masks: Masks) -> float:
    """Scale at which the width of these masks is the expected one: 1 if all are alike, infinite if disjoint.

    Args:
        masks: `(num_masks, width)`, equally many ones a mask; channels that no mask uses do not count.

    Returns:
        The scale; in narrow layers it differs from the one asked of `generate`, which rounds to whole ones.

    Example:
        >>> effective_scale(torch.tensor([[True, True, False], [False, True, True]]))
        2.0
    """
    ones = sorted(set(masks.sum(1).tolist()))
    if len(ones) != 1 or ones[0] == 0:
        raise ValueError(f"All masks must have the same number of ones, not 0; got {ones}. Use `generate`.")
    return _implied_scale(int(masks.any(0).sum()), len(masks), ones[0])


@checked
def expected_width(ones: int, scale: float, num_masks: int) -> float:
    r"""Average number of slots in use: what trimming leaves of `ones * scale`.

    $$M S \left[1 - (1 - 1/S)^N\right] = M \sum_{k<N} (1 - 1/S)^k$$

    Args:
        ones: Ones a mask, M.
        scale: Slots per one, S.
        num_masks: Number of masks, N.

    Returns:
        The mean width: `ones` at scale 1, `num_masks * ones` at an infinite one (disjoint masks).

    Example:
        >>> expected_width(ones=32, scale=2.0, num_masks=4)
        60.0
    """
    _check(ones=ones, scale=scale, num_masks=num_masks)
    return ones * math.fsum((1.0 - 1.0 / scale) ** k for k in range(num_masks))


@checked
def width_variance(ones: int, scale: float, num_masks: int) -> float:
    r"""Variance of the trimmed width, $z$ being the chance that a slot stays empty and $z_2$ that two do.

    $$T z (1 - z) + T (T - 1) (z_2 - z^2), \qquad z = (1 - M/T)^N$$

    Arguments are those of `expected_width`; T is `round(ones * scale)`.

    Returns:
        The variance; its root is by how much an unconditioned draw typically misses the expected width.

    Example:
        >>> round(width_variance(ones=32, scale=2.0, num_masks=4) ** 0.5, 2)
        1.67
    """
    _check(ones=ones, scale=scale, num_masks=num_masks)
    if math.isinf(scale) or round(ones * scale) == ones:
        return 0.0
    slots = round(ones * scale)
    log_z = num_masks * math.log1p(-ones / slots)
    # z2 / z^2 = (1 - pair)^N: written so, the difference of two near numbers keeps its digits.
    pair = ones / ((slots - ones) * (slots - 1))
    excess = math.expm1(num_masks * math.log1p(-pair)) if pair < 1 else -1.0
    return max(0.0, slots * math.exp(log_z) * ((slots - 1) * math.exp(log_z) * excess - math.expm1(log_z)))


@checked
def expected_iou(scale: float, ones: int | None = None) -> float:
    r"""Average overlap (intersection over union) of two masks; $I$ is the hypergeometric intersection.

    $$\frac{1}{2S - 1} \qquad\text{or, exactly,}\qquad \sum_k P(I = k)\, \frac{k}{2M - k}$$

    Args:
        scale: Slots per one, S.
        ones: Ones a mask, M; if given, the value is exact, for `round(ones * scale)` slots.

    Returns:
        From 1 (alike) to 0 (disjoint). The approximation is a little low (Jensen), the more so for few ones.

    Example:
        >>> round(expected_iou(scale=2.0), 4), round(expected_iou(scale=2.0, ones=32), 4)
        (0.3333, 0.3357)
    """
    _check(scale=scale, ones=1 if ones is None else ones)
    if ones is None or math.isinf(scale):
        return 1.0 / (2.0 * scale - 1.0)
    shared = np.arange(ones + 1)
    log_weights = _log_choose(ones, shared) + _log_choose(round(ones * scale) - ones, ones - shared)
    weights = np.exp(log_weights - log_weights.max())
    return float((weights * shared / (2 * ones - shared)).sum() / weights.sum())


@checked
def overlap(masks: Masks) -> Float[Tensor, "num_masks num_masks"]:
    """Intersection over union of every pair of masks: 1 for equal ones (the diagonal), 0 for disjoint ones.

    Args:
        masks: `(num_masks, width)`, at least one channel a mask.

    Returns:
        Symmetric matrix; the mean off its diagonal is near `expected_iou(effective_scale(masks))`.

    Example:
        >>> overlap(torch.tensor([[True, True, False], [False, True, True]]))[0]
        tensor([1.0000, 0.3333])
    """
    if masks.ndim != 2:
        raise ValueError(f"`masks` must be shaped (num_masks, width); got {tuple(masks.shape)}.")
    shared = masks.float() @ masks.float().T
    return shared / (shared.diagonal()[:, None] + shared.diagonal() - shared)


def _log_counts(width: int, num_masks: int, ones: int) -> list[tuple[range, NDArray[np.float64]]]:
    """For k = 1, 2, ... masks: the unions w that can matter, and log a_k(w) of `generate`."""
    scale = _implied_scale(width, num_masks, ones)
    counts = [(range(ones, ones + 1), np.zeros(1))]
    for k in range(2, num_masks + 1):
        # Slots in use before trimming are negatively associated, so Bernstein's inequality holds: a union is
        # further than `reach` from its mean with probability e^-60 or so, far below float64's resolution.
        mean = expected_width(ones, scale, k)
        reach = 20.0 + math.sqrt(20.0**2 + 2 * 60.0 * mean * (1 - mean / (ones * scale)))
        low = max(ones, width - (num_masks - k) * ones, math.floor(mean - reach))
        unions = range(low, min(width, k * ones, math.ceil(mean + reach)) + 1)
        before, log_before = counts[-1]
        # Row w of the window view, its columns reversed, is log C(ones, w - w') for all w' in `before`.
        log_private = _log_choose(ones, np.arange(low - before[-1], unions[-1] - before[0] + 1))
        terms = np.lib.stride_tricks.sliding_window_view(log_private, len(before)) + log_before[::-1]
        counts.append((unions, _log_choose(np.array(unions), ones) + np.logaddexp.reduce(terms, axis=1)))
    return counts


def _log_choose(n: int | NDArray[np.int64], k: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Log of binomial coefficients; minus infinity where k is not in 0..n."""
    n, k = np.broadcast_arrays(n, k)
    table = np.concatenate(([0.0], np.log(np.arange(1, n.max() + 1)).cumsum()))  # of log factorials
    inside, k = (k >= 0) & (k <= n), k.clip(0, n)
    return np.where(inside, table[n] - table[k] - table[n - k], -np.inf)


@cache
def _implied_scale(width: int, num_masks: int, ones: int) -> float:
    """The scale at which `width` is the expected width, by bisection on 1 / scale."""
    _check(width=width, num_masks=num_masks, ones=ones)
    fewest = math.ceil(width / num_masks)
    if not fewest <= ones <= width:
        wanted = f"from {fewest} to {width} for {num_masks} masks to cover a width of {width}"
        raise ValueError(f"`ones` must be {wanted}; got {ones}. Take ones={min(max(ones, fewest), width)}.")
    if ones == width or ones * num_masks == width:
        return 1.0 if ones == width else math.inf
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        too_wide = expected_width(ones, 1.0 / middle, num_masks) > width
        low, high = (middle, high) if too_wide else (low, middle)
    return float(f"{1.0 / high:.12g}")  # the digits that rounding in the sum leaves


def _check_reach(width: int, num_masks: int, scale: float) -> None:
    def reaches(width: int, num_masks: int) -> bool:
        # The thinnest masks that can cover the width must not be, at this scale, wider than it (rounded).
        return expected_width(math.ceil(width / num_masks), scale, num_masks) <= width + 0.5

    _check(width=width, num_masks=num_masks, scale=scale)
    if not reaches(width, num_masks):
        largest = float(f"{_implied_scale(width, num_masks, math.ceil(width / num_masks)):.4g}")
        near = sorted(range(-64, 65), key=abs)
        widths = [f" or width={n}" for n in (width + d for d in near) if n > 1 and reaches(n, num_masks)]
        counts = [f" or num_masks={n}" for n in (num_masks + d for d in near) if n > 1 and reaches(width, n)]
        raise ValueError(
            f"`scale` must be at most {largest} for {num_masks} masks that cover a width of {width}; got {scale}. Take "
            f"scale={largest}{''.join([*widths[:1], *counts[:1]])}."
        )


def _check(**settings: int | float) -> None:
    for name, value in settings.items():
        if not value >= 1:
            raise ValueError(f"`{name}` must be at least 1; got {value}. Take {name}=1 or more.")
