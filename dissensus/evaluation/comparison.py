"""Two evaluations of the same inputs -> every difference, with a paired interval."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from dissensus._signatures import checked
from dissensus.evaluation.estimates import BIASED, rounding
from dissensus.evaluation.results import ID, LEVEL, Evaluation, Kind, Number, SetInfo, find
from dissensus.metrics import HIGHER_IS_BETTER


@dataclass(frozen=True)
class Difference:
    """How much larger a number is in the second evaluation.

    Attributes:
        metric: As in `Number`, and so `set`, `kind`, `score`, `severity`, `member` and `label`.
        first: The number in the first evaluation.
        second: The number in the second.
        value: Second less first.
        low: Lower end of the 95 % interval of the difference.
        high: Upper end.
    """

    metric: str
    set: str
    kind: Kind
    score: str | None
    severity: int | None
    member: int | None
    label: int | None
    first: float
    second: float
    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0

    @property
    def better(self) -> str:
        """Say "first" or "second" where the difference is clear and the metric has a good direction; else ""."""
        if not self.clear or self.metric in UNDIRECTED:
            return ""
        return "second" if (self.value > 0) == (self.metric in BEST_HIGH) else "first"


BEST_HIGH = HIGHER_IS_BETTER | {
    "member_accuracy",
    "mean_iou",
    "label_accuracy",
    "subset_accuracy",
    "mean_average_precision",
    "macro_auroc",
    "average_precision",
    "label_auroc",
}
# Neither high nor low is good in itself: means of scores, confidence, disagreement, coverage and width.
UNDIRECTED = frozenset({"mean", "confidence", "disagreement", "coverage_90", "width_90"})


@dataclass(frozen=True)
class Comparison:
    """Differences between two evaluations.

    Attributes:
        first: Name of the first ensemble.
        second: Name of the second.
        differences: One for each number that both have; averages are compared where they are over the same sets of a group, or the
            same corruptions and severities.
    """

    first: str
    second: str
    differences: tuple[Difference, ...]

    def difference(
        self,
        metric: str,
        set: str = ID,
        *,
        score: str | None = None,
        severity: int | None = None,
        member: int | None = None,
        label: int | None = None,
    ) -> Difference:
        """Return one difference; arguments as in `Evaluation.number`."""
        found = find(self.differences, metric, set, score=score, severity=severity, member=member, label=label)
        if found is not None:
            return found
        about = f"score {score!r}, severity {severity!r}, member {member!r} and label {label!r}"
        raise ValueError(
            f"The two evaluations have no {metric!r} of set {set!r} with {about} in common, or it is an average over other sets in "
            "each. Evaluate both on the same."
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return every difference as a dict."""
        return [asdict(one) for one in self.differences]

    def to_pandas(self) -> Any:
        """Return every difference as a row of a pandas DataFrame (pandas must be installed)."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def table(self) -> str:
        """Return the differences of predictions and AUROCs as text."""
        from dissensus.evaluation.tables import comparison_table, text_table

        return text_table(*comparison_table(self))


@checked
def compare(first: Evaluation, second: Evaluation, *, same_inputs: bool = False) -> Comparison:
    """Compare two evaluations of the same inputs, number by number, with paired intervals.

    Both evaluations drew the same resamples, so that what makes an input hard for both cancels in the difference: the
    interval is narrower than two separate ones suggest.

    Args:
        first: One evaluation.
        second: Another, of the same sets, made with the same `bootstrap` and `seed`.
        same_inputs: Set it to vouch that sets of one name hold the same inputs in the same order, where they were
            prepared in two ways (each normalised for its own network, say) and so look different. Their targets must be
            the same all the same.

    Returns:
        The differences, second less first. Reading: where an interval leaves out zero, the difference is more than the
        choice of test inputs explains; the choice of training seed is another matter.

    Example:
        >>> import torch
        >>> from dissensus import DeepEnsemble
        >>> from dissensus.evaluation import evaluate
        >>> x, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> runs = [
        ...     evaluate(DeepEnsemble(lambda: torch.nn.Linear(2, 3), 2, seed=s), (x, y), bootstrap=50) for s in (0, 1)
        ... ]
        >>> one = compare(*runs).difference("nll")
        >>> one.low <= one.value <= one.high
        True
    """
    if not first.bootstrap or (first.bootstrap, first.seed) != (second.bootstrap, second.seed):
        got = f"got bootstrap {first.bootstrap} and {second.bootstrap}, seed {first.seed} and {second.seed}"
        raise ValueError(f"Two evaluations must have as many resamples, not 0, and one seed; {got}. Evaluate again.")
    if first.task != second.task:
        raise ValueError(f"Two evaluations must be of one task; got {first.task} and {second.task}.")
    for part, other in product(first.sets, second.sets):
        if part.name == other.name:
            _check_same(part, other, same_inputs)
    rows = {what: place for place, what in enumerate(_subjects(second))}
    pairs = [(place, rows[what]) for place, what in enumerate(_subjects(first)) if what in rows]
    ours, theirs = np.array(pairs, dtype=np.intp).T
    spread = second.replicates[theirs].astype(np.float64) - first.replicates[ours]
    ends = np.quantile(spread, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    differences = (
        _difference(first.numbers[a], second.numbers[b], float(low), float(high))
        for (a, b), low, high in zip(pairs, *ends, strict=True)
    )
    return Comparison(first.name, second.name, tuple(differences))


def _subjects(result: Evaluation) -> Iterator[tuple[object, ...]]:
    """Yield what each number with replicates is about: its key, and the sets or corruptions that it is an average over."""
    cells = {(number.set, number.severity) for number in result.numbers if number.kind == "corruption"}
    for number in result.numbers[: len(result.replicates)]:
        over: frozenset[object] = frozenset(result.groups[number.set] if number.kind == "group" else ())
        if number.kind == "corruptions":
            over = frozenset(cell for cell in cells if number.severity in (None, cell[1]))
        yield number.key, over


def _difference(first: Number, second: Number, low: float, high: float) -> Difference:
    value = second.value - first.value
    if first.metric in BIASED:
        low, high = min(value, 2 * value - high), max(value, 2 * value - low)
    if max(abs(end) for end in (value, low, high)) <= rounding(first.metric, first.value):
        # All of it is rounding: the interval must not leave out zero.
        low, high = min(low, 0.0), max(high, 0.0)
    return Difference(*first.key, first.value, second.value, value, low, high)


def _check_same(part: SetInfo, other: SetInfo, same_inputs: bool) -> None:
    held = f"Set {part.name!r} must hold the same inputs and targets in both evaluations"
    if part.size != other.size:
        raise ValueError(f"{held}; got {part.size} and {other.size} inputs, so they cannot be paired. Take one set.")
    if not (same_inputs or part.fingerprint == other.fingerprint):
        raise ValueError(f"{held}; they differ. If only their preparation does, pass same_inputs=True.")
    if part.targets and other.targets and part.targets != other.targets:
        raise ValueError(f"{held}, also with same_inputs=True; the targets differ. Evaluate both on one set.")
