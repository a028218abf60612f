r"""Columns of per-input values in; numbers, bootstrap replicates and intervals out.

A resample of a set is a vector of how often each of its inputs was drawn. All statistics of an evaluation see the same
resamples, and so do two evaluations of sets with the same names and sizes under one seed: differences of their
replicates are those of a paired bootstrap.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2, pi

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dissensus._machine import one_thread
from dissensus.evaluation.results import ID, LEVEL, Kind, Number, Reliability
from dissensus.metrics import OOD_METRICS, confidence_reliability, risk_coverage_area, smooth_ece
from dissensus.randomness import derive

# Numbers, and resampled values of each, `(numbers, resamples)`.
Found = tuple[list[Number], NDArray[np.float32]]
# Name of a set to how often each resample drew each input, `(inputs, resamples)`.
Draws = Mapping[str, Tensor]

_BINS = 15
_EDGES = torch.arange(_BINS + 1, dtype=torch.float64) / _BINS
_TPR = 0.95
# Scores of more distinct values are resampled in this many groups of neighbours.
_GROUPS = 4096


@dataclass(frozen=True)
class Statistic:
    """Numbers on sets as they are, and the function that computes them anew on resamples, `(numbers, resamples)`."""

    numbers: Sequence[Number]
    resampled: Callable[[Draws], Tensor]


# Metrics that are roots of a mean.
ROOTS = frozenset({"rmse"})


@dataclass(frozen=True)
class SetNumbers:
    """Makes the statistics of one set."""

    kind: Kind
    set: str
    severity: int | None = None

    @property
    def drawn(self) -> str:
        """The set whose draws are followed: of a corruption the clean inputs that it was made of."""
        return ID if self.kind == "corruption" else self.set

    def number(self, metric: str, value: float = 0.0, score: str | None = None, member: int | None = None) -> Number:
        """Return a number about this set."""
        return Number(metric, self.set, self.kind, value, score, self.severity, member)

    def means(self, named: Sequence[Number], values: Tensor, sizes: Tensor | None = None) -> Statistic:
        """Return means of `values`, `(numbers, inputs)`, which are sums where inputs have `sizes`; or, all of them, their roots."""
        rooted, wide = named[0].metric in ROOTS, values.double()
        found = wide.mean(-1) if sizes is None else wide.sum(-1) / (float(sizes.double().sum()) or 1.0)
        exact = (found.sqrt() if rooted else found).tolist()
        values, sizes = values.float(), None if sizes is None else sizes.float()

        def resampled(draws: Draws) -> Tensor:
            counts = draws[self.drawn]
            means = values @ counts / (len(counts) if sizes is None else sizes @ counts)
            return or_estimates(means.sqrt() if rooted else means, exact)

        return Statistic([replace(number, value=value) for number, value in zip(named, exact, strict=True)], resampled)

    def metrics(self, values: Mapping[str, Tensor], sizes: Tensor | None = None) -> Statistic:
        """Return one number for each metric, the mean of its value per input."""
        columns = torch.stack([column.double() for column in values.values()])
        return self.means([self.number(metric) for metric in values], columns, sizes)

    def scores(self, names: Sequence[str], scores: Tensor) -> Statistic:
        """Return the mean of each score, `(scores, inputs)`."""
        return self.means([self.number("mean", score=score) for score in names], scores)

    def calibration_error(self, confidence: Tensor, correct: Tensor) -> Statistic:
        """Return the expected calibration error in bins of equal width, those of `metrics.ece`."""
        place = torch.bucketize(confidence, _EDGES[1:-1].to(confidence.dtype))
        gaps = (confidence - correct.to(confidence)).float()

        def resampled(draws: Draws) -> Tensor:
            counts = draws[self.drawn]
            totals = counts.new_zeros(_BINS, counts.shape[1]).index_add_(0, place, counts * gaps[:, None])
            return totals.abs().sum(0, keepdim=True) / len(counts)

        return Statistic([self.number("ece", confidence_reliability(confidence, correct).ece)], resampled)

    def binned_error(self, bins: Tensor) -> Statistic:
        """Return the same error of several answers an input (positions, labels), which stay together, from what `in_bins` returned."""
        gaps, weight = bins[0] - bins[1], bins[2].sum(0)
        value = float(gaps.sum(-1).abs().sum()) / (float(weight.sum()) or 1.0)
        gaps, weight = gaps.float(), weight.float()

        def resampled(draws: Draws) -> Tensor:
            counts = draws[self.set]
            return or_estimates((gaps @ counts).abs().sum(0, keepdim=True) / (weight @ counts), [value])

        return Statistic([self.number("ece", value)], resampled)

    def smooth_calibration_error(self, confidence: Tensor, correct: Tensor) -> Statistic:
        """Return the smooth calibration error; on resamples as `_smooth_errors` computes it."""
        value = smooth_ece(confidence, correct)
        gaps, stated = (confidence - correct.to(confidence)).float(), confidence.float()
        return Statistic(
            [self.number("smooth_ece", value)],
            lambda draws: _smooth_errors(draws[self.set], stated, gaps, max(value, 1e-4))[None],
        )

    def risk_coverage(self, score: str, scores: Tensor, correct: Tensor) -> Statistic:
        """Return the area under the risk-coverage curve of one score."""
        wrong, groups = (~correct).float()[:, None], cache(lambda: grouped_ranks(scores))

        def resampled(draws: Draws) -> Tensor:
            counts = draws[self.set]
            size = len(counts)
            kept = grouped(groups(), counts).double().cumsum(1)
            errors = grouped(groups(), counts * wrong).double().cumsum(1)
            before, errors_before = (F.pad(cumulative[:, :-1], (1, 0)) for cumulative in (kept, errors))
            # Through a group of equal scores, from `before` inputs on, errors rise evenly by `slope` an input:
            # the risks add up to sum of (errors_before + slope * t) / (before + t) over t = 1 ... group size.
            slope = (errors - errors_before) / (kept - before).clamp_min(1)
            harmonic = F.pad((1 / torch.arange(1, size + 1, dtype=torch.float64)).cumsum(0), (1, 0))
            inverse = harmonic[kept.long()] - harmonic[before.long()]
            area = (errors_before - slope * before) * inverse + slope * (kept - before)
            return (area.sum(1) / size).float()[None]

        return Statistic([self.number("risk_coverage_area", risk_coverage_area(scores, correct), score)], resampled)

    def detection(self, score: str, ood_scores: Tensor, id_scores: Tensor, known: str) -> Statistic:
        """Return every metric of `metrics.OOD_METRICS` for one score, all from one sort; `known` names the set it is told from."""
        size, ood_size = len(id_scores), len(ood_scores)
        scores, once = torch.cat([id_scores, ood_scores]), torch.ones(size + ood_size, 1, dtype=torch.float64)

        def measured(groups: Tensor, known_counts: Tensor, ood_counts: Tensor) -> Tensor:
            total, (known_groups, ood_groups) = int(groups.max()) + 1, groups.tensor_split([size])
            counts = grouped(known_groups, known_counts, total), grouped(ood_groups, ood_counts, total)
            return _detection_metrics(*counts, size, ood_size)

        values = measured(grouped_ranks(scores, size + ood_size), once[:size], once[size:])[:, 0].tolist()
        numbers = [self.number(name, value, score) for name, value in zip(OOD_METRICS, values, strict=True)]
        groups = cache(lambda: grouped_ranks(scores))
        return Statistic(numbers, lambda draws: measured(groups(), draws[known], draws[self.set]))


def or_estimates(values: Tensor, estimates: Sequence[float]) -> Tensor:
    """Return values on resamples, `(numbers, resamples)`; of a resample that says nothing of a number, NaN, the number's estimate."""
    return torch.where(values.isnan(), torch.tensor(estimates).to(values)[:, None], values)


def in_bins(confidence: Tensor, correct: Tensor, weights: Tensor) -> Tensor:
    """Return sums of confidence, correctness and weight in bins of confidence, `(3, bins, inputs)`, of `(inputs, answers)` each."""
    place = torch.bucketize(confidence.contiguous(), _EDGES[1:-1].to(confidence))
    values = torch.stack([confidence.double(), correct.double(), torch.ones_like(weights)]) * weights
    empty = weights.new_zeros(3, len(confidence), _BINS)
    return empty.scatter_add_(2, place.expand(3, -1, -1), values).movedim(1, -1)


def binned_reliability(name: str, bins: Tensor) -> Reliability:
    """Return confidence against accuracy from what `in_bins` returned for a whole set."""
    confidence, correct, weight = bins.sum(-1)
    kept = weight > 0
    values = (confidence / weight, correct / weight, weight / weight.sum(), _EDGES[:-1], _EDGES[1:])
    return Reliability(name, *(tuple(column[kept].tolist()) for column in values))


# Grid cells a bandwidth, at the point estimate.
_CELLS_A_BANDWIDTH = 48
_MOST_CELLS = 1 << 13
_STEPS = 9
# How far from the estimate, in either direction and as a factor, the error of a resample is looked for.
_REACH = 8.0


def _smooth_errors(counts: Tensor, confidence: Tensor, gaps: Tensor, estimate: float) -> Tensor:
    """Return smooth calibration errors of many resamples: `metrics.smooth_ece` in one search on one coarse grid, enough for intervals."""
    cells = min(_MOST_CELLS, 1 << max(7, round(log2(_CELLS_A_BANDWIDTH / estimate))))
    position = confidence * cells
    left = position.long().clamp(0, cells - 1)
    to_right = (position - left)[:, None]
    masses = counts * gaps[:, None]
    grid = counts.new_zeros(cells + 1, counts.shape[1])
    grid.index_add_(0, left, masses * (1 - to_right)).index_add_(0, left + 1, masses * to_right)
    # A mass on the boundary coincides with its mirror image, and counts twice in the even extension.
    grid[[0, -1]] *= 2
    mirrored = torch.cat([grid, grid[1:-1].flip(0)]).T.contiguous()
    modes = torch.fft.rfft(mirrored).real / len(counts)
    low = torch.full((counts.shape[1],), estimate / _REACH)
    high = torch.full_like(low, min(1.0, max(estimate * _REACH, 0.05)))
    # The smoothed error falls with the bandwidth; where they meet is found by halving on a logarithmic scale.
    for _ in range(_STEPS):
        middle = (low * high).sqrt()
        above = _smoothed(modes, middle) > middle
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    over, under = _smoothed(modes, low) - low, _smoothed(modes, high) - high
    share = (over / (over - under).clamp_min(1e-12)).clamp(0, 1)
    return low + share * (high - low)


def _smoothed(modes: Tensor, bandwidth: Tensor) -> Tensor:
    """Return the integral of the absolute smoothed residuals at each resample's bandwidth, from their cosine coefficients."""
    cells = modes.shape[1] - 1
    # Past this mode the narrowest kernel leaves nothing (e^-18).
    used = min(cells + 1, int(6 / (pi * float(bandwidth.min()))) + 2)
    decay = torch.exp(-0.5 * (pi * bandwidth[:, None] * torch.arange(used)) ** 2)
    density = torch.fft.irfft(modes[:, :used] * decay, 2 * cells) * cells
    return density.abs().mean(1)


def _detection_metrics(known: Tensor, ood: Tensor, size: int, ood_size: int) -> Tensor:
    """Return the metrics of `metrics.OOD_METRICS` from counts in groups of rising scores, `(resamples, groups)`."""
    known_to, ood_to = known.cumsum(1), ood.cumsum(1)
    auroc = (known / -2).add_(known_to).mul_(ood).sum(1) / (size * ood_size)
    all_to = known_to + ood_to
    all_from = (known + ood).sub_(all_to).add_(size + ood_size)
    aupr_out = (ood - ood_to).add_(ood_size).mul_(ood).div_(all_from.clamp_min_(1)).sum(1) / ood_size
    aupr_in = (known * known_to).div_(all_to.clamp_min_(1)).sum(1) / size
    # The strictest threshold that still catches enough: unknown inputs from above, known ones from below.
    caught, kept = ceil(_TPR * ood_size - 1e-9), ceil(_TPR * size - 1e-9)
    threshold = _first_above(ood_to, ood_size - caught)
    alarms = (size - known_to.gather(1, threshold) + known.gather(1, threshold))[:, 0] / size
    threshold = _first_above(known_to, kept - 0.5)
    passed = ood_to.gather(1, threshold)[:, 0] / ood_size
    return torch.stack([auroc, aupr_out, aupr_in, alarms, passed])


def _first_above(cumulative: Tensor, bound: float) -> Tensor:
    """Return the place of the first value above the bound in each row of rising ones, `(rows, 1)`."""
    return torch.searchsorted(cumulative, cumulative.new_full((len(cumulative), 1), bound), right=True)


def grouped_ranks(scores: Tensor, most: int = _GROUPS) -> Tensor:
    """Return each score's place among the distinct ones, from 0, or, where there are too many, groups of neighbours."""
    ranks = np.unique(scores.numpy(), return_inverse=True)[1].reshape(-1)
    counts = np.bincount(ranks)
    if len(counts) > most:
        # By their share of the inputs, not of the distinct values, so that groups are of one size.
        below = np.append(0, np.cumsum(counts)[:-1])
        ranks = (below * most // len(ranks))[ranks]
    return torch.from_numpy(ranks)


def grouped(groups: Tensor, counts: Tensor, total: int | None = None) -> Tensor:
    """Return counts summed within groups, `(resamples, groups)`."""
    total = int(groups.max()) + 1 if total is None else total
    return counts.new_zeros(total, counts.shape[1]).index_add_(0, groups, counts).T.contiguous()


def placements(ood_scores: Tensor, id_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return each input's part in the AUROC: the share of known inputs below each OOD one, of OOD ones above each known.

    Both have the AUROC as mean, ties counting one half. Their means on a resample, added, less the AUROC, are the AUROC
    of the resample up to a term that vanishes as 1/inputs.
    """

    def below(values: Tensor, others: Tensor) -> Tensor:
        ranked = np.sort(others.numpy())
        places = (np.searchsorted(ranked, values.numpy(), side) for side in ("left", "right"))
        return torch.from_numpy(sum(places) / (2 * len(others)))

    return below(ood_scores, id_scores), 1 - below(id_scores, ood_scores)


# Resamples worked on at once; fewer for large sets, whose draws then fill this many numbers.
_AT_ONCE = 64
_NUMBERS_AT_ONCE = 1 << 23


def replicates_of(statistics: Sequence[Statistic], sizes: Mapping[str, int], count: int, seed: int) -> Found:
    """Return all numbers of all statistics, and their values on `count` resamples of each set."""
    numbers = [number for part in statistics for number in part.numbers]
    if not count or not numbers:
        return numbers, np.zeros((len(numbers), count), np.float32)
    values = torch.tensor([number.value for number in numbers], dtype=torch.float64)
    whole = {name: torch.ones(size, 1) for name, size in sizes.items()}
    with one_thread():
        # Statistics may take short cuts (scores in groups, float32); replicates are shifted to the exact value.
        shift = values[:, None] - torch.cat([part.resampled(whole) for part in statistics])
        parts = [torch.cat([part.resampled(draws) for part in statistics]) for draws in draw_counts(sizes, count, seed)]
    return numbers, (torch.cat(parts, dim=1) + shift).numpy().astype(np.float32)


def draw_counts(sizes: Mapping[str, int], count: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield resamples of every set, float32 `(inputs, some resamples)`, until there are `count` of each."""
    generators = {name: np.random.default_rng(derive(seed, "bootstrap", name) % 2**63) for name in sizes}
    at_once = max(1, min(_AT_ONCE, _NUMBERS_AT_ONCE // max(sizes.values())))
    for start in range(0, count, at_once):
        width = min(at_once, count - start)
        drawn = {}
        for name, size in sizes.items():
            # Resample by resample, so that how many are drawn at once changes nothing.
            cells = generators[name].integers(0, size, (width, size)) * width + np.arange(width)[:, None]
            counts = np.bincount(cells.ravel(), minlength=size * width).reshape(size, width)
            drawn[name] = torch.from_numpy(counts.astype(np.float32))
        yield drawn


def averages(found: Found, rows: Mapping[Number, list[int]]) -> Found:
    """Return plain means over rows of numbers and of their replicates, one for each key, which names it."""
    numbers, replicates = found
    named = [replace(like, value=sum(numbers[row].value for row in own) / len(own)) for like, own in rows.items()]
    means = [replicates[own].mean(axis=0, dtype=np.float64).astype(np.float32) for own in rows.values()]
    return named, np.stack(means) if means else replicates[:0]


# A resample carries the noise of the sample and as much again of its own, and these metrics count noise as error.
BIASED = frozenset({"ece", "smooth_ece"})
# Metrics in the target's units. These and the other ones named below can be as small as they like; all else is about 1, or nats.
IN_UNITS = frozenset({"rmse", "mae", "gaussian_crps", "laplace_crps", "width_90"})
_OF_ANY_SIZE = IN_UNITS | {"mean", "loss", "risk_coverage_area"}
_ROUNDING = 1e-6


def rounding(metric: str, value: float) -> float:
    """Return by how much replicates of a number, which are float32, may differ and be the same."""
    return _ROUNDING * (abs(value) if metric in _OF_ANY_SIZE else max(1.0, abs(value)))


def with_intervals(found: Found) -> list[Number]:
    """Return the numbers with intervals from their replicates."""
    numbers, replicates = found
    if replicates.shape[1] == 0:
        return list(numbers)
    ends = np.quantile(replicates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    pairs = (interval(n.metric, n.value, low, high) for n, low, high in zip(numbers, *ends.tolist(), strict=True))
    return [replace(number, low=low, high=high) for number, (low, high) in zip(numbers, pairs, strict=True)]


def interval(metric: str, value: float, low: float, high: float) -> tuple[float, float]:
    """Return an interval from quantiles of replicates; for a metric with a bias, reflected around its value.

    Ends that only rounding keeps from the value, from 0 or from 1 are put there.

    Example:
        >>> interval("nll", 0.003, -8e-11, 0.003 + 1e-9)
        (0.0, 0.003)
        >>> interval("rmse", 3e-8, 2e-8, 4e-8)
        (2e-08, 4e-08)
    """
    if metric in BIASED:
        # Replicates lie as far above the value as the value above the truth; the value itself stays inside.
        low, high = max(0.0, min(value, 2 * value - high)), max(value, 2 * value - low)
    tolerance = rounding(metric, value)
    low, high = (next((mark for mark in (value, 0.0, 1.0) if abs(end - mark) <= tolerance), end) for end in (low, high))
    return low, high
