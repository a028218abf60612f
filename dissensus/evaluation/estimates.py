r"""Columns of per-input values in; numbers, bootstrap replicates and intervals out.

A resample of a set is a vector of how often each of its inputs was drawn. All statistics of an evaluation see the
same resamples, and so do two evaluations of sets with the same names and sizes under one seed: differences of
their replicates are those of a paired bootstrap.

The smooth calibration error of many resamples is computed at once: as in `metrics.smooth_ece`, residuals are put on a grid, where
the reflected Gaussian kernel damps cosine mode k by $e^{-(\pi k \sigma)^2/2}$; here all resamples share one grid, coarse enough
for intervals, and one search.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2, pi
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dissensus._machine import one_thread
from dissensus.evaluation.results import LEVEL, Kind, Number, Reliability
from dissensus.metrics import OOD_METRICS, risk_coverage_area
from dissensus.randomness import derive

# Grid cells a bandwidth, at the point estimate.
_CELLS_A_BANDWIDTH = 48
_MOST_CELLS = 1 << 13
_STEPS = 9
# How far from the estimate, in either direction and as a factor, the error of a resample is looked for.
_REACH = 8.0


@dataclass(frozen=True)
class SmoothCalibrationError:
    """Smooth calibration error of one set.

    Attributes:
        numbers: The one number.
        set: The set that is resampled.
        confidence: Stated confidence of each input, `(inputs,)`, float32.
        gaps: Confidence less correctness, `(inputs,)`, float32.
    """

    numbers: Sequence[Number]
    set: str
    confidence: Tensor
    gaps: Tensor

    def resampled(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return the error on resamples, `(1, resamples)`."""
        counts, estimate = draws[self.set], max(self.numbers[0].value, 1e-4)
        cells = min(_MOST_CELLS, 1 << max(7, round(log2(_CELLS_A_BANDWIDTH / estimate))))
        modes = self._modes(counts, cells)
        low = torch.full((counts.shape[1],), estimate / _REACH)
        high = torch.full_like(low, min(1.0, max(estimate * _REACH, 0.05)))
        # The smoothed error falls with the bandwidth; where they meet is found by halving on a logarithmic scale.
        for _ in range(_STEPS):
            middle = (low * high).sqrt()
            above = _smoothed(modes, middle) > middle
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return _crossing(modes, low, high)[None]

    def _modes(self, counts: Tensor, cells: int) -> Tensor:
        """Return cosine coefficients of the mean residual density, `(resamples, cells + 1)`."""
        position = self.confidence * cells
        left = position.long().clamp(0, cells - 1)
        to_right = (position - left)[:, None]
        masses = counts * self.gaps[:, None]
        grid = counts.new_zeros(cells + 1, counts.shape[1])
        grid.index_add_(0, left, masses * (1 - to_right)).index_add_(0, left + 1, masses * to_right)
        # A mass on the boundary coincides with its mirror image, and counts twice in the even extension.
        grid[[0, -1]] *= 2
        mirrored = torch.cat([grid, grid[1:-1].flip(0)]).T.contiguous()
        return torch.fft.rfft(mirrored).real / len(counts)


def _smoothed(modes: Tensor, bandwidth: Tensor) -> Tensor:
    """Return the integral of the absolute smoothed residuals at each resample's bandwidth, `(resamples,)`."""
    cells = modes.shape[1] - 1
    # Past this mode the narrowest kernel leaves nothing (e^-18).
    used = min(cells + 1, int(6 / (pi * float(bandwidth.min()))) + 2)
    decay = torch.exp(-0.5 * (pi * bandwidth[:, None] * torch.arange(used)) ** 2)
    density = torch.fft.irfft(modes[:, :used] * decay, 2 * cells) * cells
    return density.abs().mean(1)


def _crossing(modes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return where error and bandwidth are equal between two close bandwidths, by linear interpolation."""
    over, under = _smoothed(modes, low) - low, _smoothed(modes, high) - high
    share = (over / (over - under).clamp_min(1e-12)).clamp(0, 1)
    return low + share * (high - low)


# Scores of more distinct values are resampled in this many groups of neighbours.
_GROUPS = 4096
_BINS = 15
_TPR = 0.95


@dataclass(frozen=True)
class Means:
    """Numbers that are means over one set of a value per input, or roots of such means.

    Attributes:
        numbers: The numbers.
        set: The set that is resampled.
        values: What is averaged, `(numbers, inputs)`, float32.
        root: Whether the numbers are roots of the means.
        sizes: How much each input counts, `(inputs,)`, where values are sums over so much of it; None where inputs count alike.
    """

    numbers: Sequence[Number]
    set: str
    values: Tensor
    root: bool = False
    sizes: Tensor | None = None

    @classmethod
    def of(
        cls,
        named: Sequence[Number],
        columns: Tensor,
        *,
        resampled: str | None = None,
        root: bool = False,
        sizes: Tensor | None = None,
    ) -> "Means":
        """Fill in the values of numbers, one for each row of `columns`; `resampled` is the set whose resamples they follow."""
        found = columns.double().mean(-1)
        if sizes is not None:
            found = columns.double().sum(-1) / (float(sizes.double().sum()) or 1.0)
        values = (found.sqrt() if root else found).tolist()
        numbers = [replace(number, value=value) for number, value in zip(named, values, strict=True)]
        follows = resampled or numbers[0].set
        return cls(numbers, follows, columns.float(), root, None if sizes is None else sizes.float())

    def resampled(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return weighted means, `(numbers, resamples)`."""
        counts = draws[self.set]
        means = self.values @ counts / (len(counts) if self.sizes is None else self.sizes @ counts)
        return means.sqrt() if self.root else means


def metric_means(
    kind: Kind,
    name: str,
    values: Mapping[str, Tensor],
    *,
    resampled: str | None = None,
    severity: int | None = None,
    sizes: Tensor | None = None,
) -> Means:
    """Return one number for each metric of a set, the mean of its value per input."""
    named = [Number(metric, name, kind, 0.0, severity=severity) for metric in values]
    columns = torch.stack([column.double() for column in values.values()])
    return Means.of(named, columns, resampled=resampled, sizes=sizes)


def score_means(
    kind: Kind,
    name: str,
    names: Sequence[str],
    scores: Tensor,
    resampled: str | None = None,
    severity: int | None = None,
) -> Means:
    """Return the mean of each score, `(scores, inputs)`, on a set."""
    named = [Number("mean", name, kind, 0.0, score, severity) for score in names]
    return Means.of(named, scores, resampled=resampled)


def member_means(
    kind: Kind, name: str, metric: str, values: Tensor, *, root: bool = False, sizes: Tensor | None = None
) -> Means:
    """Return a metric of each member on a set, from values `(members, inputs)`."""
    named = [Number(metric, name, kind, 0.0, member=place) for place in range(len(values))]
    return Means.of(named, values, root=root, sizes=sizes)


@dataclass(frozen=True)
class BinnedGaps:
    """Expected calibration error of several answers an input (positions, labels), whose resamples keep an input's together.

    Attributes:
        numbers: The one number.
        set: The set that is resampled.
        gaps: Sums of confidence less correctness in bins, `(bins, inputs)`, float32.
        sizes: How many answers of each input count, `(inputs,)`.
    """

    numbers: Sequence[Number]
    set: str
    gaps: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, kind: Kind, name: str, bins: Tensor) -> "BinnedGaps":
        """Make it from sums of confidence, correctness and weight, `(3, bins, inputs)`, as `in_bins` returns them."""
        gaps, weight = bins[0] - bins[1], bins[2].sum(0)
        value = float(gaps.sum(-1).abs().sum()) / (float(weight.sum()) or 1.0)
        return cls([Number("ece", name, kind, value)], name, gaps.float(), weight.float())

    def resampled(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return the error on resamples, `(1, resamples)`."""
        counts = draws[self.set]
        return (self.gaps @ counts).abs().sum(0, keepdim=True) / (self.sizes @ counts)


def in_bins(confidence: Tensor, correct: Tensor, weights: Tensor) -> Tensor:
    """Return sums of confidence, correctness and weight in bins of confidence, `(3, bins, inputs)`, of `(inputs, answers)` each."""
    edges = (torch.arange(1, _BINS, dtype=torch.float64) / _BINS).to(confidence)
    place = torch.bucketize(confidence.contiguous(), edges)
    values = torch.stack([confidence.double(), correct.double(), torch.ones_like(weights)]) * weights
    empty = weights.new_zeros(3, len(confidence), _BINS)
    return empty.scatter_add_(2, place.expand(3, -1, -1), values).movedim(1, -1)


def binned_reliability(name: str, bins: Tensor) -> Reliability:
    """Return confidence against accuracy from what `in_bins` returned for a whole set."""
    confidence, correct, weight = bins.sum(-1)
    kept = weight > 0
    edges = torch.arange(_BINS + 1, dtype=torch.float64) / _BINS
    values = (confidence / weight, correct / weight, weight / weight.sum(), edges[:-1], edges[1:])
    return Reliability(name, *(tuple(column[kept].tolist()) for column in values))


@dataclass(frozen=True)
class CalibrationError:
    """Expected calibration error in bins of equal width.

    Attributes:
        numbers: The one number.
        set: The set that is resampled.
        bins: Bin of each input, `(inputs,)`.
        gaps: Confidence less correctness of each input, `(inputs,)`.
    """

    numbers: Sequence[Number]
    set: str
    bins: Tensor
    gaps: Tensor

    @classmethod
    def of(cls, number: Number, resampled: str, confidence: Tensor, correct: Tensor) -> "CalibrationError":
        """Make it from confidences and outcomes, with the bins of `metrics.ece`."""
        edges = (torch.arange(1, _BINS, dtype=torch.float64) / _BINS).to(confidence.dtype)
        return cls(
            [number], resampled, torch.bucketize(confidence, edges), (confidence - correct.to(confidence)).float()
        )

    def resampled(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return the error on resamples, `(1, resamples)`."""
        counts = draws[self.set]
        totals = counts.new_zeros(_BINS, counts.shape[1]).index_add_(0, self.bins, counts * self.gaps[:, None])
        return totals.abs().sum(0, keepdim=True) / len(counts)


@dataclass(frozen=True)
class RiskCoverage:
    """Area under the risk-coverage curve of one score.

    Attributes:
        numbers: The one number.
        set: The set that is resampled.
        scores: Score of each input, `(inputs,)`.
        wrong: Whether each prediction was wrong, `(inputs, 1)`, as float32.
    """

    numbers: Sequence[Number]
    set: str
    scores: Tensor
    wrong: Tensor

    @cached_property
    def groups(self) -> Tensor:
        """Rank of each input's score among the distinct ones, `(inputs,)`."""
        return grouped_ranks(self.scores)

    def resampled(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return the area on resamples, `(1, resamples)`."""
        counts = draws[self.set]
        size = len(counts)
        kept = grouped(self.groups, counts).double().cumsum(1)
        errors = grouped(self.groups, counts * self.wrong).double().cumsum(1)
        before, errors_before = _shifted(kept), _shifted(errors)
        # Through a group of equal scores, from `before` inputs on, errors rise evenly by `slope` an input:
        # the risks add up to sum of (errors_before + slope * t) / (before + t) over t = 1 ... group size.
        slope = (errors - errors_before) / (kept - before).clamp_min(1)
        harmonic = torch.cat([kept.new_zeros(1), (1 / torch.arange(1, size + 1, dtype=torch.float64)).cumsum(0)])
        inverse = harmonic[kept.long()] - harmonic[before.long()]
        area = (errors_before - slope * before) * inverse + slope * (kept - before)
        return (area.sum(1) / size).float()[None]


@dataclass(frozen=True)
class Detection:
    """AUROC, AUPR and FPR of one score that should tell a set from the known inputs.

    Attributes:
        numbers: One for each entry of `metrics.OOD_METRICS`, in its order.
        known: Name of the set of known inputs.
        unknown: Name of the other set.
        known_scores: Score of each known input, `(inputs,)`.
        unknown_scores: The same for the other set.
    """

    numbers: Sequence[Number]
    known: str
    unknown: str
    known_scores: Tensor
    unknown_scores: Tensor

    @cached_property
    def groups(self) -> Tensor:
        """Rank of each score among all distinct ones, known inputs first."""
        return grouped_ranks(torch.cat([self.known_scores, self.unknown_scores]))

    def resampled(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return all metrics on resamples, `(metrics, resamples)`."""
        total = int(self.groups.max()) + 1
        known_groups, unknown_groups = self.groups.tensor_split([len(self.known_scores)])
        known = grouped(known_groups, draws[self.known], total)
        ood = grouped(unknown_groups, draws[self.unknown], total)
        return _detection_metrics(known, ood, len(draws[self.known]), len(draws[self.unknown]))


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
    bounds = cumulative.new_full((len(cumulative), 1), bound)
    return torch.searchsorted(cumulative, bounds, right=True)


def detection(kind: Kind, unknown: str, score: str, ood_scores: Tensor, id_scores: Tensor, known: str) -> Detection:
    """Return every metric of `metrics.OOD_METRICS` for one score and set, all from one sort."""
    size, ood_size = len(id_scores), len(ood_scores)
    # Values sort several times faster than places, and two sorted halves merge fast.
    scores = np.concatenate([np.sort(part.numpy()) for part in (id_scores, ood_scores)])
    order = scores.argsort(kind="stable")
    ranked = scores[order]
    # Up to the last of each group of equal scores: how many inputs, and how many known ones.
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    known_to = np.cumsum(order < size, dtype=np.float64)[ends]
    counts = np.diff(np.stack([known_to, ends + 1 - known_to]), prepend=0.0)
    known_counts, ood_counts = torch.from_numpy(counts)[:, None]
    values = _detection_metrics(known_counts, ood_counts, size, ood_size)[:, 0].tolist()
    numbers = [Number(name, unknown, kind, value, score) for name, value in zip(OOD_METRICS, values, strict=True)]
    return Detection(numbers, known, unknown, id_scores, ood_scores)


def risk_coverage(kind: Kind, name: str, score: str, scores: Tensor, correct: Tensor) -> RiskCoverage:
    """Return the area under the risk-coverage curve of one score on one labelled set."""
    value = risk_coverage_area(scores, correct)
    number = Number("risk_coverage_area", name, kind, value, score)
    return RiskCoverage([number], name, scores, (~correct).float()[:, None])


def grouped_ranks(scores: Tensor) -> Tensor:
    """Return each score's place among the distinct ones, from 0, or, where there are too many, groups of neighbours."""
    ranks = np.unique(scores.numpy(), return_inverse=True)[1].reshape(-1)
    counts = np.bincount(ranks)
    if len(counts) > _GROUPS:
        # By their share of the inputs, not of the distinct values, so that groups are of one size.
        below = np.append(0, np.cumsum(counts)[:-1])
        ranks = (below * _GROUPS // len(ranks))[ranks]
    return torch.from_numpy(ranks)


def placements(ood_scores: Tensor, id_scores: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return each input's part in the AUROC: the share of known inputs below each OOD one, of OOD ones above each known.

    Both have the AUROC as mean, ties counting one half. Their means on a resample, added, less the AUROC, are the
    AUROC of the resample up to a term that vanishes as 1/inputs.
    """
    ood, known = ood_scores.numpy(), id_scores.numpy()
    return _share_below(ood, known), 1 - _share_below(known, ood)


def _share_below(values: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    ranked = np.sort(others)
    return (np.searchsorted(ranked, values, "left") + np.searchsorted(ranked, values, "right")) / (2 * len(others))


def grouped(groups: Tensor, counts: Tensor, total: int | None = None) -> Tensor:
    """Return counts summed within groups, `(resamples, groups)`."""
    total = int(groups.max()) + 1 if total is None else total
    return counts.new_zeros(total, counts.shape[1]).index_add_(0, groups, counts).T.contiguous()


def _shifted(cumulative: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(cumulative[:, :1]), cumulative[:, :-1]], dim=1)


# Resamples worked on at once; fewer for large sets, whose draws then fill this many numbers.
_AT_ONCE = 64
_NUMBERS_AT_ONCE = 1 << 23
# A resample carries the noise of the sample and as much again of its own, and these metrics count noise as error.
BIASED = frozenset({"ece", "smooth_ece"})


@runtime_checkable
class Statistic(Protocol):
    """Numbers of one or two sets that can be computed anew on resamples.

    Attributes:
        numbers: The numbers on the sets as they are.
    """

    @property
    def numbers(self) -> Sequence[Number]:
        """The numbers on the sets as they are."""

    def resampled(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers on resamples, `(numbers, resamples)`; `draws` maps sets to `(inputs, resamples)`."""


def replicates_of(
    statistics: Sequence[Statistic], sizes: Mapping[str, int], count: int, seed: int
) -> NDArray[np.float32]:
    """Return all numbers of all statistics on `count` resamples of each set, `(numbers, count)`."""
    values = torch.tensor([number.value for part in statistics for number in part.numbers], dtype=torch.float64)
    whole = {name: torch.ones(size, 1) for name, size in sizes.items()}
    with one_thread():
        # Statistics may take short cuts (scores in groups, float32); replicates are shifted to the exact value.
        shift = values[:, None] - torch.cat([part.resampled(whole) for part in statistics])
        parts = [torch.cat([part.resampled(draws) for part in statistics]) for draws in draw_counts(sizes, count, seed)]
    return (torch.cat(parts, dim=1) + shift).numpy().astype(np.float32)


def draw_counts(sizes: Mapping[str, int], count: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield resamples of every set, float32 `(inputs, some resamples)`, until there are `count` of each."""
    generators = {name: np.random.default_rng(derive(seed, "bootstrap", name) % 2**63) for name in sizes}
    at_once = max(1, min(_AT_ONCE, _NUMBERS_AT_ONCE // max(sizes.values())))
    for start in range(0, count, at_once):
        width = min(at_once, count - start)
        yield {name: _counts(generators[name], size, width) for name, size in sizes.items()}


def _counts(generator: np.random.Generator, size: int, width: int) -> Tensor:
    # Resample by resample, so that how many are drawn at once changes nothing.
    drawn = generator.integers(0, size, (width, size))
    cells = drawn * width + np.arange(width)[:, None]
    counts = np.bincount(cells.ravel(), minlength=size * width).reshape(size, width)
    return torch.from_numpy(counts.astype(np.float32))


def with_intervals(numbers: Sequence[Number], replicates: NDArray[np.float32]) -> list[Number]:
    """Return the numbers with intervals from their replicates, row by row."""
    if replicates.shape[1] == 0:
        return list(numbers)
    low, high = np.quantile(replicates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    pairs = (
        interval(number.metric, number.value, float(first), float(last))
        for number, first, last in zip(numbers, low, high, strict=True)
    )
    return [replace(number, low=low, high=high) for number, (low, high) in zip(numbers, pairs, strict=True)]


def interval(metric: str, value: float, low: float, high: float) -> tuple[float, float]:
    """Return an interval from quantiles of replicates; for a metric with a bias, reflected around its value."""
    if metric in BIASED:
        # Replicates lie as far above the value as the value above the truth; the value itself stays inside.
        low, high = max(0.0, min(value, 2 * value - high)), max(value, 2 * value - low)
    return without_rounding(value, low, high)


# Replicates are float32: ends of intervals that differ by less are the same.
ROUNDING = 1e-6


def without_rounding(value: float, low: float, high: float) -> tuple[float, float]:
    """Return the ends of an interval, put on the value, 0 or 1 where only rounding keeps them from it.

    Example:
        >>> without_rounding(0.003, -8e-11, 0.003 + 1e-9)
        (0.0, 0.003)
    """
    tolerance = ROUNDING * max(1.0, abs(value))
    marks = (value, 0.0, 1.0)
    return (
        next((mark for mark in marks if abs(low - mark) <= tolerance), low),
        next((mark for mark in marks if abs(high - mark) <= tolerance), high),
    )


def average(
    numbers: Sequence[Number], replicates: NDArray[np.float32], like: Number
) -> tuple[Number, NDArray[np.float32]]:
    """Return the plain mean of numbers, named as `like`, and of their replicates, `(numbers, resamples)`."""
    value = sum(number.value for number in numbers) / len(numbers)
    rows: NDArray[np.float32] = replicates.mean(axis=0, dtype=np.float64).astype(np.float32)
    return replace(like, value=value), rows
