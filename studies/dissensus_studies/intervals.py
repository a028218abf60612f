"""Values, or a number with its standard error, in; 95 % intervals that stay where such numbers can be out."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan, sqrt

from torch import Tensor

from dissensus_studies.repeats import Summary

# Ends of a 95 % interval, in standard errors.
NORMAL_95 = 1.959964
Interval = list[float]
# `[value, low, high]` of a record; ends may be missing.
Value = Sequence[float | None]
# Below this a standard error is that of equal values.
_NO_ERROR = 1e-12


def mean_interval(values: Tensor) -> Interval:
    """Return the mean of values with its 95 % interval, by their spread."""
    mean, error = _mean_and_error(values)
    return [round(mean + sign * NORMAL_95 * error, 6) for sign in (0, -1, 1)]


def share_interval(shares: Tensor) -> Interval:
    """Return the mean of shares with its 95 % interval, which lies in [0, 1].

    Args:
        shares: For each input a number from 0 to 1: 1 for a right answer, or the share of right ones among several, `(inputs,)`.

    Example:
        >>> import torch
        >>> share_interval(torch.ones(100))
        [1.0, 0.963007, 1.0]
    """
    mean, error = _mean_and_error(shares)
    return [round(value, 6) for value in (mean, *share_ends(mean, error, len(shares)))]


def share_ends(share: float, error: float, least: float = 0.0) -> tuple[float, float]:
    r"""Return the ends of a share's 95 % interval from its standard error; both lie in [0, 1].

    Wilson's interval of the number of answers that such an error speaks of, $n = p(1-p)/e^2$.

    Args:
        share: The share p, from 0 to 1.
        error: Its standard error e.
        least: Of so many answers the share is at least: what is left to go by where all are alike.

    Example:
        >>> [round(end, 4) for end in share_ends(0.9, sqrt(0.9 * 0.1 / 10))]
        [0.5958, 0.9821]
    """
    known = error > _NO_ERROR
    if not known and least == 0:
        return share, share
    count = max(least, share * (1 - share) / error**2 if known else 0.0)
    squared = NORMAL_95**2
    middle = (share * count + squared / 2) / (count + squared)
    half = NORMAL_95 * sqrt(share * (1 - share) * count + squared / 4) / (count + squared)
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    exact, count = values.double(), len(values)
    return float(exact.mean()), float(exact.std()) / sqrt(count) if count > 1 else 0.0


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error, over repeats where there are several, over inputs where there is one run.

    Attributes:
        value: The number.
        error: Its standard error; NaN where it is not known.
        ends: Ends of its 95 % interval; None where it is not known.
    """

    value: float
    error: float
    ends: tuple[float, float] | None = None

    @classmethod
    def of(cls, values: Sequence[Value], share: bool = False) -> "Estimate":
        """Pool the values of repeats, each `[value, low, high]`.

        Args:
            values: One for each repeat.
            share: Whether they lie in [0, 1].

        Example:
            >>> Estimate.of([[0.5, 0.4, 0.6]]).text
            '0.5000 [0.4000, 0.6000]'
        """
        middle = Summary(tuple(float(value[0]) for value in values if value[0] is not None))
        mean = middle.mean
        if len(middle.values) > 1:
            around = (mean - NORMAL_95 * middle.error, mean + NORMAL_95 * middle.error)
            return cls(mean, middle.error, share_ends(mean, middle.error) if share else around)
        low, high = (values[0][1], values[0][2]) if len(values[0]) == 3 else (None, None)
        if low is None or high is None:
            return cls(mean, nan)
        # Records of earlier versions may have ends outside.
        ends = (max(low, 0.0), min(high, 1.0)) if share else (low, high)
        return cls(mean, (high - low) / (2 * NORMAL_95), ends)

    @property
    def text(self) -> str:
        """The value and its 95 % interval."""
        if self.ends is None:
            return f"{self.value:.4f}"
        return f"{self.value:.4f} [{self.ends[0]:.4f}, {self.ends[1]:.4f}]"

    def above(self, other: "Estimate | None" = None) -> bool | None:
        """Whether this is larger, than 0 by itself; None where the difference is within two standard errors. Without errors, as it is."""
        other = other or Estimate(0.0, 0.0)
        difference = self.value - other.value
        errors = [0.0 if each.error != each.error else each.error for each in (self, other)]
        return None if abs(difference) <= 2 * sqrt(sum(e**2 for e in errors)) else difference > 0
