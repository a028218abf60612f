"""Repeats in, means with errors and whether two arms differ out; 95 % intervals; how large a calibration error is by chance."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import comb, inf, isnan, sqrt
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

# Ends of a 95 % interval, in standard errors.
NORMAL_95 = 1.959964
# The same by Student's law, by the number of repeats.
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
Interval = list[float]
# `[value, low, high]` of a record; ends may be missing.
Value = Sequence[float | None]
# Below this a standard error is that of equal values.
_NO_ERROR = 1e-12
# Of answers of a calibrated model.
DRAWS = 200


@dataclass(frozen=True)
class Summary:
    """Measurements of one quantity, one for each repeat.

    Example:
        >>> str(Summary((1.0, 2.0, 3.0))).split()
        ['2.000', '±', '0.577']
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> "Summary":
        """Summarise measurements."""
        return cls(tuple(values))

    @property
    def mean(self) -> float:
        """Mean over repeats."""
        return fmean(self.values)

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN for a single repeat."""
        return stdev(self.values) / sqrt(len(self.values)) if len(self.values) > 1 else float("nan")

    @property
    def half(self) -> float:
        """Half the width of a 95 % interval by Student's law; infinite for a single repeat."""
        return STUDENT_95[len(self.values)] * self.error if len(self.values) > 1 else inf

    @property
    def sign(self) -> int:
        """1 or -1 where that interval lies on one side of 0, else 0."""
        return 0 if abs(self.mean) <= self.half else (1 if self.mean > 0 else -1)

    @property
    def median(self) -> float:
        """Median over repeats: what a few runaway members do not move."""
        return median(self.values)

    def as_json(self) -> dict[str, Any]:
        """Return everything, for a results file."""
        error = self.error if len(self.values) > 1 else None
        return {"mean": self.mean, "error": error, "median": self.median, "values": list(self.values)}

    def __str__(self) -> str:
        size = max(abs(self.mean), self.error) if len(self.values) > 1 else abs(self.mean)
        # Spaces that do not break keep both numbers on one line of a table.
        return f"{_digits(self.mean, size)}\u00a0±\u00a0{_digits(self.error, size)}"


@dataclass(frozen=True)
class Comparison:
    """Paired measurements of two arms: in how many of the repeats that differ the second is lower, by how much, and p of a sign test.

    Example:
        >>> compared = Comparison.of([2.0] * 8, [1.0] * 8)
        >>> compared.lower, compared.p, compared.verdict
        (8, 0.0078125, 'lower')
    """

    lower: int
    repeats: int
    difference: float
    p: float

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> "Comparison":
        """Compare two arms, repeat by repeat."""
        differences = [after - before for before, after in zip(first, second, strict=True)]
        lower = sum(difference < 0 for difference in differences)
        count = sum(difference != 0 for difference in differences)
        tail = sum(comb(count, k) for k in range(min(lower, count - lower) + 1)) / 2**count
        return cls(lower, count, median(differences), min(1.0, 2 * tail))

    @property
    def verdict(self) -> str:
        """`"lower"`, `"higher"`, or `"unresolved"` where the sign test cannot tell at 5 %."""
        if self.p >= 0.05:
            return "unresolved"
        return "lower" if 2 * self.lower > self.repeats else "higher"

    def tells(self, expected: str) -> bool | None:
        """Return whether the second is as expected, "lower" or "higher"; None where that is unresolved."""
        return None if self.verdict == "unresolved" else self.verdict == expected

    def __str__(self) -> str:
        count = self.repeats - self.lower if self.verdict == "higher" else self.lower
        word = "lower " if self.verdict == "unresolved" else ""
        where = f"{word}in {count} of {self.repeats} repeats"
        return f"{self.verdict} ({where}, median difference {_digits(self.difference)}, p = {self.p:.1g})"


def over_seeds(records: Iterable[tuple[Any, Any]], read: Callable[[Any], float]) -> dict[Any, Summary]:
    """Return a quantity's values over repeats for each key (a beta, a strength, ...), in order of first appearance.

    Example:
        >>> over_seeds([(0.0, {"a": 1.0}), (0.5, {"a": 4.0}), (0.0, {"a": 3.0})], lambda record: record["a"])[0.0].mean
        2.0
    """
    values: dict[Any, list[float]] = {}
    for key, record in records:
        values.setdefault(key, []).append(read(record))
    return {key: Summary.of(found) for key, found in values.items()}


def _digits(value: float, size: float | None = None) -> str:
    """Return a number with three digits or more, as many decimals as a number of this size wants (its own by default)."""
    size = abs(value) if size is None else size
    if size >= 1e6:
        return f"{value:.1e}"
    decimals = next((decimals for least, decimals in ((100, 0), (10, 2), (0.1, 3), (0.01, 4)) if size >= least), 5)
    return f"{value:.{decimals}f}"


def mean_interval(values: Tensor) -> Interval:
    """Return the mean of values with its 95 % interval, by their spread."""
    mean, error = _mean_and_error(values)
    return [round(mean + sign * NORMAL_95 * error, 6) for sign in (0, -1, 1)]


def share_interval(shares: Tensor) -> Interval:
    """Return the mean of numbers from 0 to 1, one for each input, with its 95 % interval, which lies there too.

    Example:
        >>> import torch
        >>> share_interval(torch.ones(100))
        [1.0, 0.963007, 1.0]
    """
    mean, error = _mean_and_error(shares)
    return [round(value, 6) for value in (mean, *share_ends(mean, error, len(shares)))]


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    exact, count = values.double(), len(values)
    return float(exact.mean()), float(exact.std()) / sqrt(count) if count > 1 else 0.0


def share_ends(share: float, error: float, least: float = 0.0) -> tuple[float, float]:
    r"""Return the ends of a share's 95 % interval from its standard error; both lie in [0, 1].

    Wilson's interval of the number of answers that such an error speaks of, $n = p(1-p)/e^2$, of `least` at least: what is left to go
    by where all are alike.

    Example:
        >>> [round(end, 4) for end in share_ends(0.9, sqrt(0.9 * 0.1 / 10))]
        [0.5958, 0.9821]
    """
    known = error > _NO_ERROR
    if not known and least == 0:
        return share, share
    count, squared = max(least, share * (1 - share) / error**2 if known else 0.0), NORMAL_95**2
    middle = (share * count + squared / 2) / (count + squared)
    half = NORMAL_95 * sqrt(share * (1 - share) * count + squared / 4) / (count + squared)
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error (NaN where it is not known), over repeats, or over inputs of one run."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[Value]) -> "Estimate":
        """Pool the values of repeats, each `[value, low, high]`.

        Example:
            >>> round(Estimate.of([[0.5, 0.4, 0.6]]).error, 3)
            0.051
        """
        middle, ends = Summary(tuple(float(v[0]) for v in values if v[0] is not None)), values[0][1:]
        if len(middle.values) > 1 or not ends or None in ends:
            return cls(middle.mean, middle.error)
        return cls(middle.mean, (ends[1] - ends[0]) / (2 * NORMAL_95))  # type: ignore[operator]

    def above(self, other: "Estimate") -> bool | None:
        """Whether this is larger; None where the difference is within two standard errors. Without errors, as it is."""
        difference = self.value - other.value
        return None if abs(difference) <= self.noise(other) else difference > 0

    def noise(self, other: "Estimate") -> float:
        """Two standard errors of the difference; 0 where none is known."""
        return 2 * sqrt(sum(error**2 for error in (self.error, other.error) if not isnan(error)))


def ece_floor(confidence: ArrayLike, bins: int = 15, seed: int = 0) -> float:
    """Mean expected calibration error of a model that is perfectly calibrated and has these confidences.

    Reading: a calibration error near it, with as many bins, or two that differ by less, are no finding.

    Example:
        >>> round(ece_floor(typical_confidence(0.91, 10_000)), 3), round(ece_floor(typical_confidence(0.91, 1000)), 2)
        (0.006, 0.02)
    """
    confidence = np.asarray(confidence, dtype=float)
    right = np.random.default_rng(seed).random((DRAWS, len(confidence))) < confidence
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.stack([((right - confidence) * (which == index)).sum(1) for index in np.unique(which)])
    return float(np.abs(gaps).sum(0).mean() / len(confidence))


def typical_confidence(accuracy: float, inputs: int, chance: float = 0.1) -> NDArray[np.float64]:
    """Return confidences as a calibrated network of this accuracy may have them, where the real ones were not stored.

    They are quantiles of a beta law with that mean and weight 2; weights from 1 to 4 change the floor by a tenth.
    """
    return np.maximum(np.random.default_rng(0).beta(2 * accuracy, 2 * (1 - accuracy), inputs), chance)
