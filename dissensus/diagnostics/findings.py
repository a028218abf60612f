"""What a diagnosis found: frozen numbers, a verdict, sentences on how to read them, and JSON and back."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from math import inf, isfinite, isnan, nan, sqrt
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from types import UnionType
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from dissensus._files import read_state, write_state
from dissensus.objectives.collusion import Measures, ratio
from dissensus.objectives.losses import CLASS_LOSSES

Reading: TypeAlias = tuple[str, str, str]

_SUSPICION = "Held out, badly trained members look the same: outputs on training data decide."


def verdict(finding: "Finding") -> str:
    """Return the verdict and its reasons in a few sentences."""
    measures = finding.measures
    size = f"{finding.num_members} members on {measures.num_examples} examples"
    useless = f" {_useless(measures)}" if finding.members_useless else ""
    if finding.num_members == 1:
        return f"Nothing to diagnose ({size}): one member has nobody to collude with."
    if finding.suspected:
        return f"Members may collude ({size}). {sign_words('specialised', measures)} {_SUSPICION}"
    if not finding.colluding:
        weak = " There is no sign that they cancel by design; weak learners look like this." if useless else ""
        return f"Members do not collude, as far as these outputs tell ({size}).{useless}{weak}"
    reasons = [sign_words(sign, measures) for sign in finding.signs]
    for sign in finding.training_signs:
        if sign not in finding.signs:
            words = sign_words(sign, finding.training or measures)
            reasons.append(f"On the training data: {words[0].lower()}{words[1:]}")
    return f"Members collude ({size}). {' '.join(reasons)}{useless}"


def sign_words(sign: str, measures: Measures) -> str:
    """Return what a sign of collusion means, with its number."""
    return {
        "cancelling": f"Their errors cancel: averaging leaves {_percent(1 - measures.cancellation)} of the squared error that "
        "independent errors would leave.",
        "shifted": f"Members sit beside the ensemble by constants that cancel: {_percent(measures.bias_share)} of the diversity "
        "goes when these are taken away.",
        "dependent": f"The best member alone keeps {_percent(measures.kept_agreement)} of the ensemble's accuracy above guessing; "
        f"of {measures.num_members} members that err independently it would keep at least {_percent(1 / sqrt(measures.num_members))}.",
        "unfitted": f"The ensemble fits what its members do not: their mean error is {_number(1 + measures.diversity_ratio)} "
        "times the ensemble's.",
        "specialised": f"Members give up whole classes to each other: {_percent(measures.class_share)} of their differences is the "
        "same for all examples of a class.",
        "watched": "The last check of the run met the rule.",
    }[sign]


def readings(finding: "Finding") -> list[Reading]:
    """Return name, value and reading of each number."""
    return [*_errors(finding), *_diversity(finding), *_dependence(finding)]


def _errors(finding: "Finding") -> Iterator[Reading]:
    measures, loss = finding.measures, finding.loss
    trivial, own = measures.trivial_error, measures.member_accuracies
    constant = "" if trivial is None else f"; the best constant has {_error(trivial, loss)}"
    yield "ensemble error", _error(finding.ensemble_error, loss), f"of the averaged prediction{constant}"
    gain = "averaging takes away"
    yield "mean member error", _error(finding.member_error, loss), f"{gain} {_percent(finding.gain_over_mean)}"
    best = f"{gain} {_percent(finding.gain_over_best)}"
    if finding.gain_over_best < 0:
        best = f"this member alone is better than the ensemble, by {_percent(-finding.gain_over_best)} of its error"
    yield "best member error", _error(finding.best_member_error, loss), best
    if measures.ensemble_accuracy is not None:
        members = f"best member {_percent(max(own))}, mean member {_percent(fmean(own))}"
        yield "accuracy", _percent(measures.ensemble_accuracy), f"{members}, chance {_percent(measures.chance)}"
    if measures.kept_best is not None:
        kept, by_mean = (_percent(max(0.0, share or 0.0)) for share in (measures.kept_best, measures.kept_mean))
        explained = "of what the ensemble explains beyond a constant, by its best member alone"
        yield "skill kept", kept, f"{explained}; {by_mean} by the mean one"


def _diversity(finding: "Finding") -> Iterator[Reading]:
    yield "diversity", _error(finding.diversity, finding.loss), "mean member error less ensemble error"
    usual = "diversity / ensemble error; trained alone mostly below 0.5, colluding often above 10"
    yield "diversity ratio", _number(finding.diversity_ratio), usual
    shares = {
        "bias share": "of the diversity is constant offsets; trained alone mostly below 10 %",
        "scale share": "of it is members stretching the ensemble's own prediction",
        "example share": "of it is more than members that err independently can have",
        "class share": "of the differences between members is constant in each class; fitted well alone, mostly below 10 %",
    }
    values = (finding.bias_share, finding.scale_share, finding.example_share, finding.measures.class_share)
    for (name, reading), share in zip(shares.items(), values, strict=True):
        if not isnan(share):
            yield name, _percent(share), reading
    if not isnan(finding.measures.cancellation):
        scale = "1 errors cancel, 0 independent, negative members err alike"
        yield "cancellation", f"{finding.measures.cancellation:.2f}", scale


def _dependence(finding: "Finding") -> Iterator[Reading]:
    if finding.drops:
        curve = finding.drops[0]
        dropped = f"more error with {curve.dropped[0]} of {finding.num_members} members dropped"
        if curve.exact and isfinite(finding.codependence):
            dropped += f" (exactly {_percent(curve.exact_increase[0] / curve.full)})"
        yield "codependence", _percent(finding.codependence), dropped
    none = f"of examples are answered best by one member; {_percent(1 / finding.num_members)} if none dominates"
    yield "dominance", _percent(finding.dominance), none
    if finding.pairs:
        own, upper, lower = (_number(fmean(map(attrgetter(n), finding.pairs))) for n in ("diversity", "upper", "lower"))
        yield "pair diversity", own, f"disagreement / error; {lower} for noisy copies, {upper} for independent errors"
    if finding.training is not None:
        reading = "the same on the training data; for classes above 3 is a sign"
        yield "ratio in training", _number(finding.training.diversity_ratio), reading
    if finding.checks and isfinite(finding.checks[-1].gap):
        first, last = (_number(finding.checks[end].gap) for end in (0, -1))
        yield "generalisation gap", last, f"held-out less training error of the ensemble; {first} at the first check"


def advice(finding: "Finding") -> str:
    """Return what to do about it."""
    if finding.num_members == 1:
        return "Give the outputs of all members, (members, batch, ...)."
    if finding.colluding:
        return (
            "Do not drop members, do not use them alone, and do not read their disagreement as uncertainty. Train them "
            "more for themselves: Independent(), a smaller beta of Joint, or less weight on disagreement."
        )
    if finding.loss in CLASS_LOSSES and finding.average == "probs" and not (finding.training or finding.checks):
        return (
            "Members whose probabilities are averaged may collude on their training data only: give `training=` outputs, "
            "or the history of fit(..., watch_collusion=True), to be sure."
        )
    return (
        "Nothing here speaks against reading their disagreement as uncertainty. Members can be dropped at the price that the "
        "drop curves show."
    )


def _useless(measures: Measures) -> str:
    text = "Members are of little use alone while the ensemble looks fine: "
    if measures.kept_best is not None and measures.kept_best <= 0:
        return f"{text}even the best is no better than a constant."
    kept = (
        f"keeps {_percent(measures.kept_mean)}" if (measures.kept_mean or 0.0) > 0 else "is no better than a constant"
    )
    return f"{text}of what it explains the mean member {kept}, the best {_percent(measures.kept_best)}."


def _number(value: float) -> str:
    return f"{value:.3g}" if isfinite(value) else "infinite" if value > 0 else str(value)


def _error(value: float, loss: str) -> str:
    """Return a loss; a large squared error as the square of a number in the target's units."""
    if loss != "mse" or not 1e3 <= value < 1e24:
        return _number(value)
    root = float(f"{sqrt(value):.3g}")
    return (f"{root:,.0f}" if root >= 1e4 else f"{root:g}").replace(",", "\u202f") + "²"


def _percent(share: float | None) -> str:
    if share is None or not isfinite(share):
        return "–" if share is None or isnan(share) else "infinite"
    if abs(share) >= 10:
        return f"{share:.3g} times"
    return f"{100 * share:.0f} %" if abs(share) >= 1 else f"{100 * share:.3g} %" if abs(share) > 1e-5 else "0 %"


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

    Its numbers by their short names: `num_members`, `member_error` (mean of the members), `ensemble_error` (of the averaged prediction),
    `diversity` (what averaging gains), `diversity_ratio` (diversity over ensemble error: above 1, members are further from each other than
    the ensemble from the truth), `bias_share` (of the diversity that goes with the members' constant offsets) and `members_useless`
    (whether the mean member keeps less than half of the skill of an ensemble that is fine).

    Attributes:
        loss: The loss that was looked at; "custom" for one of the user's.
        average: What the ensemble averages.
        weights: Weights of the members; empty if they are equal.
        measures: Errors, diversity and what the verdict looks at, on the outputs given.
        training: The same on training data, where that was given.
        signs: Signs of collusion on the outputs given: "cancelling", "shifted", "dependent".
        training_signs: Signs on training data, where that or a watched history was given; also "unfitted" and "specialised".
        offsets: Size of the constant by which each member sits beside the ensemble.
        scale_share: Further share of the diversity, in squared distances, that goes when each member may also be stretched: deviations
            that are a multiple of the ensemble's own prediction.
        example_share: Share of the diversity, in squared distances, that is neither constant nor possible for members that err
            independently: the least part of it that must be collusion example by example.
        codependence: Share by which the error rises when the smallest of the drop fractions is dropped.
        drops: One curve for each metric.
        drop_per: Whether a fresh choice of members was dropped for each "example" or for the whole "set".
        drop_examples: How many examples the curves are of.
        dominance: Largest share of examples on which one member has the lowest error; 1/members if none dominates.
        error_spread: (largest - smallest member error) / mean member error.
        num_classes: Number of classes; 0 where there are none.
        pairs: Diversity of pairs of members, for classes.
        checks: Errors over training, from a history.
        ensemble: Digest of the run's ensemble that was looked at; empty where it is of no run.
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
    ensemble: str = field(default="", compare=False)

    @property
    def colluding(self) -> bool:
        """Whether there is any sign that members collude."""
        return bool(self.signs or self.training_signs)

    @property
    def suspected(self) -> bool:
        """Whether members whose probabilities are averaged may collude: training data would decide, and was not given."""
        known = self.colluding or self.training is not None or bool(self.checks)
        return not known and self.average == "probs" and self.measures.suspicious

    members_useless = property(attrgetter("measures.members_useless"))
    num_members = property(attrgetter("measures.num_members"))
    member_error = property(attrgetter("measures.member_error"))
    ensemble_error = property(attrgetter("measures.ensemble_error"))
    diversity = property(attrgetter("measures.diversity"))
    diversity_ratio = property(attrgetter("measures.diversity_ratio"))
    bias_share = property(attrgetter("measures.bias_share"))

    @property
    def best_member_error(self) -> float:
        """Error of the best member."""
        return min(self.measures.member_errors)

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
        found = {curve.metric: curve for curve in self.drops}
        if metric not in found:
            raise ValueError(f"There is no drop curve of {metric!r}; there are {', '.join(found) or 'none'}.")
        return found[metric]

    def explain(self) -> str:
        """Return the numbers, the verdict, and how to read both, as text."""
        rows = readings(self)
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{name:<{width}}  {value:>10}  {reading}" for name, value, reading in rows]
        return "\n".join([verdict(self), "", *lines, "", advice(self)])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold."""
        verdicts = {name: getattr(self, name) for name in ("colluding", "suspected", "members_useless")}
        return {**_plain(asdict(self)), **verdicts}

    def save(self, path: Path | str) -> Path:
        """Write everything as a JSON file; folders on the way to it are made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_state(path, FORMAT, self.to_dict())
        return Path(path)

    @classmethod
    def load(cls, path: Path | str) -> "Finding":
        """Read what `save` wrote."""
        try:
            return cls.from_dict(read_state(path, FORMAT))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no diagnosis that can be read: {error} Diagnose again.") from None

    @classmethod
    def from_dict(cls, whole: Mapping[str, Any]) -> "Finding":
        """Return the finding that `to_dict` was called on."""
        found: Finding = restored(cls, whole)
        return found


# The very `nan` that fields begin with: findings that hold it are equal.
_NAMES = {"inf": inf, "-inf": -inf, "nan": nan}
_hints = cache(get_type_hints)


def _plain(value: Any) -> Any:
    """Numbers that JSON has no word for become text."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def restored(kind: Any, value: Any) -> Any:
    """Return what JSON holds as the annotation says: dataclasses of objects (what they do not know is left out), tuples of lists."""
    origin, parts = get_origin(kind), get_args(kind)
    if value is None:
        return None
    if origin is UnionType:
        return restored(parts[0], value)
    if hasattr(kind, "__dataclass_fields__"):
        hints = _hints(kind)
        return kind(**{name: restored(hints[name], part) for name, part in value.items() if name in hints})
    if origin is tuple:
        return tuple(restored(parts[0], part) for part in value)
    if origin is Mapping:
        return {name: restored(parts[1], part) for name, part in value.items()}
    return _NAMES.get(value, value) if kind is float else value
