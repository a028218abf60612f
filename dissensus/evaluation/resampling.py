"""Statistics of sets in, bootstrap replicates and intervals out.

A resample of a set is a vector of how often each of its inputs was drawn. All statistics of an evaluation see the
same resamples, and so do two evaluations of sets with the same names and sizes under one seed: differences of
their replicates are those of a paired bootstrap.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dissensus._threads import one_thread
from dissensus.evaluation.results import LEVEL, Number
from dissensus.randomness import derive

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
    values = torch.tensor(
        [number.value for part in statistics for number in part.numbers], dtype=torch.float64
    )
    whole = {name: torch.ones(size, 1) for name, size in sizes.items()}
    with one_thread():
        # Statistics may take short cuts (scores in groups, float32); replicates are shifted to the exact value.
        shift = values[:, None] - torch.cat([part.resampled(whole) for part in statistics])
        parts = [
            torch.cat([part.resampled(draws) for part in statistics])
            for draws in draw_counts(sizes, count, seed)
        ]
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
