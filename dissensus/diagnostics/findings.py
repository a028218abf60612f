"""What a diagnosis found: frozen numbers, a verdict, words, and JSON and back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any, Literal

from dissensus.objectives.collusion import Measures, ratio

FORMAT = "dissensus diagnosis 1"


@dataclass(frozen=True)
class DropCurve:
    """One metric as members are left out at random at test time.

    Attributes:
        metric: "error" is the loss that was diagnosed; others by the name they have in `dissensus.metrics`.
        fractions: Shares of the members that were asked to be dropped.
        dropped: How many members these are.
        full: The metric with all members.
        values: The metric with so many dropped, mean over the repeats.
        deviations: Standard deviation over the repeats.
        exact: Expected values in closed form, for the squared error of equally weighted members; else empty.
    """

    metric: str
    fractions: tuple[float, ...]
    dropped: tuple[int, ...]
    full: float
    values: tuple[float, ...]
    deviations: tuple[float, ...]
    exact: tuple[float, ...] = ()

    @property
    def increase(self) -> tuple[float, ...]:
        """How much the metric rises for each number of members dropped."""
        return tuple(value - self.full for value in self.values)

    @property
    def exact_increase(self) -> tuple[float, ...]:
        r"""The same in closed form, $\mathrm{DIV}\,(M-m)/(m(M-1))$ with m members kept; empty where there is none."""
        return tuple(value - self.full for value in self.exact)


@dataclass(frozen=True)
class Pair:
    """How differently two members err, between a noisy copy and independent errors.

    Attributes:
        members: The two, the less accurate one first.
        accuracy: Accuracy of the first.
        base_accuracy: Accuracy of the second.
        diversity: Share of inputs on which they differ, over the first one's error rate.
        lower: What it would be for a randomly perturbed copy of the second.
        upper: What it would be if both erred independently; beyond it, they avoid each other's answers.
    """

    members: tuple[int, int]
    accuracy: float
    base_accuracy: float
    diversity: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Check:
    """Errors at one moment of training, on training and held-out data.

    Attributes:
        epoch: Epoch of the check.
        step: Step of the check.
        train_member_error: Mean error of the members on training data.
        train_ensemble_error: Error of the averaged prediction there.
        validation_member_error: Mean error of the members on held-out data; NaN without any.
        validation_ensemble_error: Error of the averaged prediction there.
    """

    epoch: int
    step: int
    train_member_error: float
    train_ensemble_error: float
    validation_member_error: float = nan
    validation_ensemble_error: float = nan

    @property
    def train_diversity(self) -> float:
        """Diversity on training data."""
        return self.train_member_error - self.train_ensemble_error

    @property
    def validation_diversity(self) -> float:
        """Diversity on held-out data."""
        return self.validation_member_error - self.validation_ensemble_error

    @property
    def gap(self) -> float:
        """Generalisation gap: how much larger the ensemble's error is on held-out than on training data."""
        return self.validation_ensemble_error - self.train_ensemble_error


@dataclass(frozen=True)
class Finding:
    """What `diagnose` found about an ensemble. `print(finding.explain())` says it in words.

    Attributes:
        loss: The loss that was looked at; "custom" for one of the user's.
        average: What the ensemble averages.
        weights: Weights of the members; empty if they are equal.
        measures: Errors, diversity and what the verdict looks at, on the outputs given.
        training: The same on training data, where that was given.
        signs: Signs of collusion on the outputs given: "cancelling", "shifted", "dependent".
        training_signs: Signs on training data, where that or a watched history was given; also "unfitted" and "specialised".
        offsets: Size of the constant by which each member sits beside the ensemble.
        scale_share: Further share of the diversity that goes when each member may also be stretched: deviations that
            are a multiple of the ensemble's own prediction. It is of squared distances.
        example_share: Share of the diversity that is neither constant nor possible for members that err independently:
            the least part of it that must be collusion example by example. It is of squared distances.
        codependence: Share by which the error rises when the smallest of the drop fractions is dropped.
        drops: One curve for each metric.
        drop_per: Whether a fresh choice of members was dropped for each "example" or for the whole "set".
        drop_examples: How many examples the curves are of.
        dominance: Largest share of examples on which one member has the lowest error; 1/members if none dominates.
        error_spread: (largest - smallest member error) / mean member error.
        num_classes: Number of classes; 0 where there are none.
        pairs: Diversity of pairs of members, for classes.
        checks: Errors over training, from a history.
    """

    loss: str
    average: str
    weights: tuple[float, ...]
    measures: Measures
    training: Measures | None
    signs: tuple[str, ...]
    training_signs: tuple[str, ...]
    offsets: tuple[float, ...]
    scale_share: float
    example_share: float
    codependence: float
    drops: tuple[DropCurve, ...] = field(repr=False)
    drop_per: Literal["example", "set"]
    drop_examples: int
    dominance: float
    error_spread: float
    num_classes: int
    pairs: tuple[Pair, ...] = field(repr=False)
    checks: tuple[Check, ...] = field(repr=False)

    @property
    def colluding(self) -> bool:
        """Whether there is any sign that members collude."""
        return bool(self.signs or self.training_signs)

    @property
    def suspected(self) -> bool:
        """Whether members whose probabilities are averaged may collude: training data would decide, and was not given."""
        known = self.colluding or self.training is not None or bool(self.checks)
        return not known and self.average == "probs" and self.measures.suspicious

    @property
    def members_useless(self) -> bool:
        """Whether the ensemble is fine and yet its mean member keeps less than half of its skill."""
        return self.measures.members_useless

    @property
    def num_members(self) -> int:
        """Number of members."""
        return self.measures.num_members

    @property
    def member_error(self) -> float:
        """Mean error of the members."""
        return self.measures.member_error

    @property
    def best_member_error(self) -> float:
        """Error of the best member."""
        return min(self.measures.member_errors)

    @property
    def ensemble_error(self) -> float:
        """Error of the averaged prediction."""
        return self.measures.ensemble_error

    @property
    def diversity(self) -> float:
        """What averaging gains over the mean member."""
        return self.measures.diversity

    @property
    def diversity_ratio(self) -> float:
        """Diversity over ensemble error: above 1, members are further from each other than the ensemble from the truth."""
        return self.measures.diversity_ratio

    @property
    def bias_share(self) -> float:
        """Share of the diversity that goes with the members' constant offsets."""
        return self.measures.bias_share

    @property
    def gain_over_mean(self) -> float:
        """Share of the mean member's error that averaging takes away."""
        return ratio(self.diversity, self.member_error)

    @property
    def gain_over_best(self) -> float:
        """Share of the best member's error that averaging takes away; negative if that member is better alone."""
        return ratio(self.best_member_error - self.ensemble_error, self.best_member_error)

    def drop_curve(self, metric: str = "error") -> DropCurve:
        """Return the drop curve of a metric."""
        for curve in self.drops:
            if curve.metric == metric:
                return curve
        raise ValueError(
            f"There is no drop curve of {metric!r}; there are {', '.join(c.metric for c in self.drops) or 'none'}."
        )

    def explain(self) -> str:
        """Return the numbers, the verdict, and how to read both, as text."""
        from dissensus.diagnostics.words import explanation

        return explanation(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold."""
        whole: dict[str, Any] = _plain(asdict(self))
        verdicts = {name: getattr(self, name) for name in ("colluding", "suspected", "members_useless")}
        return {**whole, **verdicts}

    def save(self, path: Path | str) -> Path:
        """Write everything as a JSON file; folders on the way to it are made."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **self.to_dict()}, indent=1, allow_nan=False)
        target.write_text(text + "\n", encoding="utf-8")
        return target

    @classmethod
    def load(cls, path: Path | str) -> "Finding":
        """Read what `save` wrote."""
        try:
            whole = json.loads(Path(path).read_text(encoding="utf-8"))
            if whole.pop("format", None) != FORMAT:
                raise KeyError(f"its format is not {FORMAT!r}")
            return cls.from_dict(whole)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} holds no diagnosis that can be read: {error}. Diagnose again."
            ) from None

    @classmethod
    def from_dict(cls, whole: Mapping[str, Any]) -> "Finding":
        """Return the finding that `to_dict` was called on."""
        values = {entry.name: _restored(whole[entry.name]) for entry in fields(cls)}
        values["measures"] = Measures(**values["measures"])
        if values["training"] is not None:
            values["training"] = Measures(**values["training"])
        kinds: dict[str, Callable[..., Any]] = {"drops": DropCurve, "pairs": Pair, "checks": Check}
        for name, kind in kinds.items():
            values[name] = tuple(kind(**part) for part in values[name])
        return cls(**values)


_NAMES = {"inf": inf, "-inf": -inf, "nan": nan}


def _plain(value: Any) -> Any:
    """Numbers that JSON has no word for become text."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return "nan" if isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return tuple(_restored(item) for item in value)
    return _NAMES.get(value, value) if isinstance(value, str) else value
