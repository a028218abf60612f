"""A finding in, sentences out: the verdict, the numbers, and how to read them."""

from collections.abc import Iterator, Sequence
from math import isfinite, isnan, sqrt
from typing import TYPE_CHECKING, TypeAlias

from dissensus.objectives.collusion import CLASS_LOSSES

if TYPE_CHECKING:
    from dissensus.diagnostics.findings import Finding
    from dissensus.objectives.collusion import Measures

Reading: TypeAlias = tuple[str, str, str]

_SUSPICION = "Held out, badly trained members look the same: outputs on training data decide."


def explanation(finding: "Finding") -> str:
    """Return verdict, numbers and readings as text."""
    lines = [verdict(finding), ""]
    width = max(len(name) for name, _, _ in readings(finding))
    lines += [f"{name:<{width}}  {value:>10}  {reading}" for name, value, reading in readings(finding)]
    return "\n".join([*lines, "", advice(finding)])


def verdict(finding: "Finding") -> str:
    """Return the verdict and its reasons in a few sentences."""
    size = f"{finding.num_members} members on {finding.measures.num_examples} examples"
    if finding.num_members == 1:
        return f"Nothing to diagnose ({size}): one member has nobody to collude with."
    if finding.suspected:
        return f"Members may collude ({size}). {sign_words('specialised', finding.measures)} {_SUSPICION}"
    if not finding.colluding:
        text = f"Members do not collude, as far as these outputs tell ({size})."
        if finding.members_useless:
            text += f" {_useless(finding.measures)} There is no sign that they cancel by design; weak learners look like this."
        return text
    reasons = [sign_words(sign, finding.measures) for sign in finding.signs]
    reasons += [
        "On the training data: " + _lower(sign_words(sign, finding.training or finding.measures))
        for sign in finding.training_signs
        if sign not in finding.signs
    ]
    text = f"Members collude ({size}). " + " ".join(reasons)
    return f"{text} {_useless(finding.measures)}" if finding.members_useless else text


def sign_words(sign: str, measures: "Measures") -> str:
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
    return [*_errors(finding), *_diversity(finding), *_dependence(finding), *_training(finding)]


def _errors(finding: "Finding") -> Iterator[Reading]:
    measures = finding.measures
    yield "ensemble error", _error(finding.ensemble_error, finding.loss), _against_trivial(finding)
    gain = f"averaging takes away {_percent(finding.gain_over_mean)}"
    yield "mean member error", _error(finding.member_error, finding.loss), gain
    yield "best member error", _error(finding.best_member_error, finding.loss), _against_best(finding)
    if measures.ensemble_accuracy is not None:
        best, mean = max(measures.member_accuracies), _mean(measures.member_accuracies)
        beside = (
            f"best member {_percent(best)}, mean member {_percent(mean)}, chance {_percent(measures.chance)}"
        )
        yield "accuracy", _percent(measures.ensemble_accuracy), beside
    if measures.kept_best is not None:
        kept, by_mean = (
            _percent(max(0.0, share or 0.0)) for share in (measures.kept_best, measures.kept_mean)
        )
        reading = f"of what the ensemble explains beyond a constant, by its best member alone; {by_mean} by the mean one"
        yield "skill kept", kept, reading


def _diversity(finding: "Finding") -> Iterator[Reading]:
    yield "diversity", _error(finding.diversity, finding.loss), "mean member error less ensemble error"
    usual = "diversity / ensemble error; trained alone mostly below 0.5, colluding often above 10"
    yield "diversity ratio", _number(finding.diversity_ratio), usual
    constant = "of the diversity is constant offsets; trained alone mostly below 10 %"
    yield "bias share", _percent(finding.bias_share), constant
    stretched = "of it is members stretching the ensemble's own prediction"
    yield "scale share", _percent(finding.scale_share), stretched
    beyond = "of it is more than members that err independently can have"
    yield "example share", _percent(finding.example_share), beyond
    if not isnan(finding.measures.class_share):
        by_class = "of the differences between members is constant in each class; fitted well alone, mostly below 10 %"
        yield "class share", _percent(finding.measures.class_share), by_class
    if not isnan(finding.measures.cancellation):
        scale = "1 errors cancel, 0 independent, negative members err alike"
        yield "cancellation", f"{finding.measures.cancellation:.2f}", scale


def _dependence(finding: "Finding") -> Iterator[Reading]:
    if finding.drops:
        yield "codependence", _percent(finding.codependence), _dropping(finding)
    none = (
        f"of examples are answered best by one member; {_percent(1 / finding.num_members)} if none dominates"
    )
    yield "dominance", _percent(finding.dominance), none
    if finding.pairs:
        yield (
            "pair diversity",
            _number(_mean([pair.diversity for pair in finding.pairs])),
            _pair_words(finding),
        )


def _training(finding: "Finding") -> Iterator[Reading]:
    if finding.training is not None:
        ratio = _number(finding.training.diversity_ratio)
        yield "ratio in training", ratio, "the same on the training data; for classes above 3 is a sign"
    if finding.checks and isfinite(finding.checks[-1].gap):
        first, last = finding.checks[0].gap, finding.checks[-1].gap
        reading = f"held-out less training error of the ensemble; {_number(first)} at the first check"
        yield "generalisation gap", _number(last), reading


def advice(finding: "Finding") -> str:
    """Return what to do about it."""
    if finding.num_members == 1:
        return "Give the outputs of all members, (members, batch, ...)."
    if finding.colluding:
        return (
            "Do not drop members, do not use them alone, and do not read their disagreement as uncertainty. Train them "
            "more for themselves: Independent(), a smaller beta of Joint, or less weight on disagreement."
        )
    in_training = finding.training is not None or finding.checks
    if finding.loss in CLASS_LOSSES and finding.average == "probs" and not in_training:
        return (
            "Members whose probabilities are averaged may collude on their training data only: give `training=` outputs, "
            "or the history of fit(..., watch_collusion=True), to be sure."
        )
    return (
        "Nothing here speaks against reading their disagreement as uncertainty. Members can be dropped at the price that the "
        "drop curves show."
    )


def _useless(measures: "Measures") -> str:
    text = "Members are of little use alone while the ensemble looks fine: "
    if measures.kept_best is not None and measures.kept_best <= 0:
        return f"{text}even the best is no better than a constant."
    kept = (
        "is no better than a constant"
        if (measures.kept_mean or 0.0) <= 0
        else f"keeps {_percent(measures.kept_mean)}"
    )
    return f"{text}of what it explains the mean member {kept}, the best {_percent(measures.kept_best)}."


def _against_trivial(finding: "Finding") -> str:
    trivial = finding.measures.trivial_error
    if trivial is None:
        return "of the averaged prediction"
    return f"of the averaged prediction; the best constant has {_error(trivial, finding.loss)}"


def _against_best(finding: "Finding") -> str:
    gain = finding.gain_over_best
    if gain < 0:
        return f"this member alone is better than the ensemble, by {_percent(-gain)} of its error"
    return f"averaging takes away {_percent(gain)}"


def _dropping(finding: "Finding") -> str:
    curve = finding.drops[0]
    known = curve.exact and isfinite(finding.codependence)
    exact = curve.exact_increase[0] / curve.full if known else None
    shown = "" if exact is None else f" (exactly {_percent(exact)})"
    return f"more error with {curve.dropped[0]} of {finding.num_members} members dropped{shown}"


def _pair_words(finding: "Finding") -> str:
    upper, lower = (_mean([getattr(pair, name) for pair in finding.pairs]) for name in ("upper", "lower"))
    return f"disagreement / error; {_number(lower)} for noisy copies, {_number(upper)} for independent errors"


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(value: float) -> str:
    return f"{value:.3g}" if isfinite(value) else "infinite" if value > 0 else str(value)


def _error(value: float, loss: str) -> str:
    """Return a loss; a large squared error as the square of a number in the target's units."""
    if loss != "mse" or not 1e4 <= value < 1e24:
        return _number(value)
    root = float(f"{sqrt(value):.3g}")
    return (f"{root:,.0f}" if root >= 1e4 else f"{root:g}").replace(",", "\u202f") + "²"


def _percent(share: float | None) -> str:
    if share is None or not isfinite(share):
        return "–" if share is None or isnan(share) else "infinite"
    if abs(share) >= 10:
        return f"{share:.3g} times"
    return (
        f"{100 * share:.0f} %" if abs(share) >= 1 else f"{100 * share:.3g} %" if abs(share) > 1e-5 else "0 %"
    )
