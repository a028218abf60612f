"""One number from each repeat in; means with standard errors, and whether two arms really differ, out."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean, median, stdev
from typing import Any


@dataclass(frozen=True)
class Summary:
    """Repeated measurements of one quantity.

    Attributes:
        values: One for each repeat.

    Example:
        >>> str(Summary((1.0, 2.0, 3.0))).split()
        ['2.000', '±', '0.577']
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over repeats."""
        return fmean(self.values)

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN for a single repeat."""
        return stdev(self.values) / sqrt(len(self.values)) if len(self.values) > 1 else float("nan")

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
    """Paired measurements of two arms: does the second have smaller values?

    Attributes:
        lower: In how many repeats the second arm's value is smaller.
        repeats: How many repeats differ at all.
        difference: Median of second minus first.
        p: Two-sided probability of so uneven a count if neither arm were better (sign test, exact).

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

    def __str__(self) -> str:
        count = self.repeats - self.lower if self.verdict == "higher" else self.lower
        word = "lower " if self.verdict == "unresolved" else ""
        where = f"{word}in {count} of {self.repeats} repeats"
        return f"{self.verdict} ({where}, median difference {_digits(self.difference)}, p = {self.p:.1g})"


def _digits(value: float, size: float | None = None) -> str:
    """Return a number with three digits or more, as many decimals as a number of this size wants (its own by default)."""
    size = abs(value) if size is None else size
    if size >= 1e6:
        return f"{value:.1e}"
    decimals = next(
        (decimals for least, decimals in ((100, 0), (10, 2), (0.1, 3), (0.01, 4)) if size >= least), 5
    )
    return f"{value:.{decimals}f}"
