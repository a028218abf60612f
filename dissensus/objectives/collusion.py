"""Whether members collude: what is measured of their outputs, and the rule by which they are said to.

It stands below training because `fit` warns by it; `dissensus.diagnostics` explains it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, nan, sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dissensus.objectives.diversity import debias, decompose, variance
from dissensus.objectives.losses import (
    CLASS_LOSSES,
    ELEMENTWISE,
    Loss,
    class_labels,
    columns,
    dense_targets,
    errors,
    like_outputs,
    majority_vote,
    shares_of,
    weighted_mean,
)
from dissensus.types import MemberOutputs

# Where the verdict's limits come from is told, with the numbers, in docs/diagnosis.md.
LEAST_CANCELLATION = 0.1
STANDARD_ERRORS = 3.0
LEAST_BIAS_SHARE = 0.1
LEAST_RATIO = 0.5
LEAST_OF_TRIVIAL = 0.1
LARGEST_BIAS_LEFT = 1.0
LARGEST_BIAS_ALONE = 0.8
LEAST_SKILL = 0.2
USELESS = 0.5
LEAST_TRAINING_RATIO = 3.0
LEAST_CLASS_DIVERSITY = 0.04
OF_INDEPENDENT = 0.9
STRONG = 2 / 3
# Fewer examples than this give every member an offset by chance.
EXAMPLES_FOR_OFFSETS = 10

# Relative size of a squared error that is the rounding of float32.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Measures:
    """What the verdict looks at, of one set."""

    num_members: int
    num_examples: int
    member_errors: tuple[float, ...]
    # Their weighted average, ERRbar; the error of the averaged prediction, ERR; and ERRbar - ERR.
    member_error: float
    ensemble_error: float
    diversity: float
    # Of the best constant prediction; None where the loss has no known one.
    trivial_error: float | None
    # Share of the diversity that goes when each member's constant offset is taken away, from 0 to 1.
    bias_share: float
    # Square of the ensemble's mean error over what members with independent offsets would leave of theirs: near 0 offsets cancel.
    bias_left: float = nan
    # Largest share of one member in the members' squared mean errors; near 1 a single member is off.
    bias_alone: float = nan
    # How much smaller the squared error of the average is than if members erred independently: 1 members cancel each other,
    # 0 independent, negative they err alike; with its standard error, from the examples. NaN where there is no such distance.
    cancellation: float = nan
    cancellation_error: float = nan
    # For classes; chance is the accuracy of always naming the commonest one.
    member_accuracies: tuple[float, ...] = ()
    ensemble_accuracy: float | None = None
    chance: float | None = None
    # The best member's agreement with the labels beyond guessing (Cohen's kappa) over the ensemble's; NaN where it has none.
    kept_agreement: float = nan
    # Share of the squared distances between members' probabilities that is the same for all examples of a class, less what
    # chance gives: members that treat whole classes differently.
    class_share: float = nan

    @property
    def diversity_ratio(self) -> float:
        """Diversity over ensemble error; infinite where only the latter is zero, up to rounding."""
        rounding = _ROUNDING * max(abs(self.member_error), abs(self.trivial_error or 0.0))
        above, below = (0.0 if abs(value) <= rounding else value for value in (self.diversity, self.ensemble_error))
        return ratio(above, below)

    @property
    def skill(self) -> float | None:
        """Share of the trivial error that the ensemble explains; for classes, of the accuracy above chance."""
        if self.ensemble_accuracy is not None and self.chance is not None:
            return ratio(self.ensemble_accuracy - self.chance, 1 - self.chance)
        return None if self.trivial_error is None else 1 - ratio(self.ensemble_error, self.trivial_error)

    @property
    def kept_best(self) -> float | None:
        """Share of the ensemble's skill that its best member has alone; None where the ensemble has none."""
        return self._kept(max(self.member_accuracies, default=min(self.member_errors)))

    @property
    def kept_mean(self) -> float | None:
        """Share of the ensemble's skill that its mean member has alone; None where the ensemble has none."""
        own = self.member_accuracies
        return self._kept(sum(own) / len(own) if own else self.member_error)

    def _kept(self, value: float) -> float | None:
        """Place of an accuracy, or an error, between that of a constant, 0, and that of the ensemble, 1."""
        constant, own = self.trivial_error, self.ensemble_error
        if self.ensemble_accuracy is not None:
            constant, own = self.chance, self.ensemble_accuracy
        return (value - constant) / (own - constant) if constant is not None and (self.skill or 0.0) > 0 else None

    @property
    def members_useless(self) -> bool:
        """Whether the mean member keeps less than half of an ensemble's skill that is worth having."""
        return (self.skill or 0.0) >= LEAST_SKILL and (self.kept_mean or 0.0) < USELESS

    @property
    def diversity_is_large(self) -> bool:
        """Whether diversity matters beside the task, and beside the ensemble's error or its skill."""
        if self.trivial_error is None:
            return self.diversity_ratio > LEAST_RATIO
        explained = self.trivial_error - self.ensemble_error
        beside_skill = explained > LEAST_OF_TRIVIAL * self.trivial_error and self.diversity > LEAST_RATIO * explained
        return self._diversity_matters and (self.diversity_ratio > LEAST_RATIO or beside_skill)

    def signs(self, *, trained_on: bool = False) -> tuple[str, ...]:
        """Return the signs of collusion that are there, also those of data that all members were `trained_on`.

        docs/diagnosis.md has their rules, and what each says of members.
        """
        found = {
            "cancelling": self.cancellation > max(LEAST_CANCELLATION, STANDARD_ERRORS * self.cancellation_error),
            "shifted": self._shifted,
            "dependent": self._dependent,
            "unfitted": trained_on and self.diversity_ratio > LEAST_TRAINING_RATIO and self._matters_to_classes,
            "specialised": trained_on and self._specialised,
        }
        return tuple(name for name, there in found.items() if there and self.num_members > 1)

    @property
    def suspicious(self) -> bool:
        """Whether members that are good alone (weak ones cannot know all classes) give up whole ones: what joint training leaves.

        It is no proof: networks that a large rate has broken look the same on held-out data, but not on their training data.
        """
        return self._specialised and (self.kept_mean or 0.0) >= STRONG

    @property
    def _shifted(self) -> bool:
        least = max(LEAST_BIAS_SHARE, EXAMPLES_FOR_OFFSETS / self.num_examples)
        # One member that is off, or offsets that the ensemble inherits, are faults but no collusion. NaN: not known.
        faulty = self.bias_left >= LARGEST_BIAS_LEFT or self.bias_alone > LARGEST_BIAS_ALONE
        return self.bias_share > least and self.diversity_is_large and not faulty

    @property
    def _dependent(self) -> bool:
        # Averaging M independent answers raises signal over noise by sqrt(M), and accuracy above guessing by no more.
        # Members that have hardly begun to learn give nearly the same answer, and their best guess says little.
        alone = self.kept_agreement < OF_INDEPENDENT / sqrt(self.num_members)
        return (self.skill or 0.0) >= LEAST_SKILL and alone and self._matters_to_classes

    @property
    def _specialised(self) -> bool:
        if self.trivial_error is None or self.num_members < 2:
            return False
        by_class = self.class_share * self.diversity
        return self.diversity_ratio > LEAST_RATIO and by_class > LEAST_CLASS_DIVERSITY * self.trivial_error

    @property
    def _matters_to_classes(self) -> bool:
        return self.ensemble_accuracy is not None and self._diversity_matters

    @property
    def _diversity_matters(self) -> bool:
        return self.trivial_error is None or self.diversity > LEAST_OF_TRIVIAL * self.trivial_error


def ratio(above: float, below: float) -> float:
    """Return a quotient; of zero by zero zero, and infinity where only the divisor is zero."""
    if below == 0 or not isfinite(below):
        return 0.0 if above == 0 else inf if above > 0 else -inf
    return above / below


# In doubles up to here (400 MB); beyond, in the precision that came.
_LARGE = 50_000_000


def measure(
    outputs: MemberOutputs,
    targets: Tensor,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    weights: Tensor | None = None,
) -> Measures:
    """Return what the verdict on collusion looks at; arguments are those of `decompose`."""
    outputs = wide(outputs)
    weights = None if weights is None else weights.detach().to(outputs)
    parts = decompose(outputs, targets, loss, average, weights)
    member, _ = errors(outputs, targets, loss, average, weights)
    member_error, ensemble_error = float(parts.member_error.mean()), float(parts.ensemble_error.mean())
    predicted = predictions(outputs, targets, loss, average, weights)
    return Measures(
        num_members=len(outputs),
        num_examples=outputs.shape[1],
        member_errors=tuple(member.mean(1).tolist()),
        member_error=member_error,
        ensemble_error=ensemble_error,
        diversity=member_error - ensemble_error,
        trivial_error=trivial_error(outputs, targets, loss),
        bias_share=_bias_share(outputs, targets, loss, average, weights, predicted),
        **({} if predicted is None else _of_errors(*predicted, weights)),
        **(_of_classes(outputs, targets, average, weights, str(loss)) if loss in CLASS_LOSSES else {}),
    )


def wide(outputs: Tensor) -> Tensor:
    """Return outputs without gradient in the precision to diagnose in: doubles, unless they are very many."""
    dtype = torch.float64 if outputs.numel() <= _LARGE else torch.promote_types(outputs.dtype, torch.float32)
    # Doubles exist on a CPU and on CUDA; elsewhere the numbers come to the CPU.
    device = outputs.device if outputs.device.type in ("cpu", "cuda") else torch.device("cpu")
    return outputs.detach().to(device, dtype)


Predicted: TypeAlias = tuple[Tensor, Tensor, Tensor]
# What members predict of their outputs, by loss.
_LINKS: Mapping[Loss, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(CLASS_LOSSES, partial(torch.softmax, dim=-1)),
    **{"mse": lambda values: values, "poisson": torch.exp, "sigmoid": torch.sigmoid, "logistic": torch.sigmoid},
}


def predictions(outputs: Tensor, targets: Tensor, loss: Loss, average: str, weights: Tensor | None) -> Predicted | None:
    """What members predict, `(members, batch, values)`, the targets on the same scale, and the pooled prediction.

    Classes are predicted by probabilities. None where the two have no common scale: margins, and losses of the user's.
    """
    if loss not in _LINKS:
        return None
    link = _LINKS[loss]
    members = link(outputs)
    truth = (dense_targets if loss in CLASS_LOSSES else like_outputs)(targets, outputs)
    if loss == "logistic":
        truth = (truth + 1) / 2
    by_probs = average == "probs" and loss != "logistic"
    pooled = weighted_mean(members, weights) if by_probs else link(weighted_mean(outputs, weights))
    return columns(members, 2), columns(truth), columns(pooled)


def trivial_error(outputs: Tensor, targets: Tensor, loss: Loss) -> float | None:
    """Return the error of the best constant prediction: what an ensemble must beat to have learned anything."""
    if callable(loss):
        return None
    values = dense_targets(targets, outputs) if loss in CLASS_LOSSES else columns(like_outputs(targets, outputs))
    mean = values.mean(0)
    share = (mean + 1) / 2 if loss in ("logistic", "exponential") else mean
    of_loss: dict[str, Callable[[], Tensor]] = {
        "cross_entropy": lambda: -torch.xlogy(share, share).sum(),
        "zero_one": lambda: 1 - share.max(),
        **dict.fromkeys(("mse", "brier"), lambda: (values - mean).square().sum(1).mean()),
        "poisson": lambda: (mean - torch.xlogy(values, mean) + torch.lgamma(values + 1)).sum(1).mean(),
        "exponential": lambda: 2 * (share * (1 - share)).sqrt().sum(),
        **dict.fromkeys(
            ("sigmoid", "logistic"), lambda: -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share)).sum()
        ),
    }
    return float(of_loss[loss]())


def _bias_share(
    outputs: Tensor, targets: Tensor, loss: Loss, average: str, weights: Tensor | None, predicted: Predicted | None
) -> float:
    """Share of the diversity that constants explain: of what is averaged, by the loss itself where that can be."""
    if predicted is None or loss in ELEMENTWISE or (average == "scores" and loss != "zero_one"):
        before = decompose(outputs, targets, loss, average, weights).diversity.mean()
        after = decompose(debias(outputs, weights).outputs, targets, loss, average, weights).diversity.mean()
    else:
        # Probabilities less a constant need not be probabilities: their squared distance stands in for the loss.
        members = predicted[0]
        before, after = (variance(own, weights).mean() for own in (members, debias(members, weights).outputs))
    # Rounding, and losses other than squared error, can leave more than there was.
    return min(1.0, max(0.0, 1 - ratio(float(after), float(before)))) if before > 0 else 0.0


def _of_errors(members: Tensor, truth: Tensor, pooled: Tensor, weights: Tensor | None) -> dict[str, Any]:
    """Return the numbers that only predictions with distances have: of their mean errors, and of errors that cancel."""
    shares, error = shares_of(weights, members), members - truth
    own = shares.square() * error.mean(1).square().sum(-1)
    whole, alone, total = float((pooled - truth).mean(0).square().sum()), float(own.max()), float(own.sum())
    found = {"bias_left": ratio(whole, total), "bias_alone": ratio(alone, total)}
    averaged = weighted_mean(error, weights).square().sum(-1)
    # What independent errors leave of the squared error of the average.
    independent = (shares.square()[:, None] * error.square().sum(-1)).sum(0)
    scale = float(independent.mean())
    # Members that are all right to the last digits have no errors to compare.
    if scale <= 1e-20 * float(truth.square().sum(-1).mean() + 1):
        return found
    left = float(averaged.mean()) / scale
    deviation = averaged - left * independent
    standard_error = float(deviation.square().mean().sqrt()) / (scale * sqrt(max(len(deviation) - 1, 1)))
    return {**found, "cancellation": 1 - left, "cancellation_error": standard_error}


def _of_classes(outputs: Tensor, targets: Tensor, average: str, weights: Tensor | None, loss: str) -> dict[str, Any]:
    """Return the numbers that only classes have."""
    labels = targets.argmax(-1) if targets.is_floating_point() else class_labels(targets, outputs)
    members, ensemble = majority_vote(outputs, weights)
    if loss != "zero_one":
        ensemble = weighted_mean(outputs.softmax(-1) if average == "probs" else outputs, weights).argmax(-1)
    kappas = _agreement(torch.cat([members, ensemble[None]]), labels, outputs.shape[-1]).tolist()
    return {
        "member_accuracies": tuple((members == labels).to(outputs).mean(1).tolist()),
        "ensemble_accuracy": float((ensemble == labels).to(outputs).mean()),
        "chance": float(dense_targets(targets, outputs).mean(0).max()),
        "kept_agreement": max(kappas[:-1]) / kappas[-1] if kappas[-1] > 0 else nan,
        "class_share": _class_share(outputs.softmax(-1), labels, weights),
    }


def _agreement(answers: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Cohen's kappa of each row of answers: accuracy above that of guessing with the same frequencies, 1 at most."""
    rows = torch.stack([torch.bincount(row, minlength=classes) for row in (*answers, labels)]).double()
    named, truth = rows[:-1] / len(labels), rows[-1] / len(labels)
    guessing = named @ truth
    accuracy = (answers == labels).double().mean(-1)
    return torch.where(guessing < 1, (accuracy - guessing) / (1 - guessing).clamp_min(1e-12), 0.0)


def _class_share(probs: Tensor, labels: Tensor, weights: Tensor | None) -> float:
    """Share of the members' spread that is constant in each class, less what as many examples give by chance."""
    classes, examples = probs.shape[-1], len(labels)
    counts = torch.bincount(labels, minlength=classes).to(probs)
    chance = float((counts > 0).sum()) / examples
    spread = float(variance(probs, weights).mean())
    if spread <= 0 or chance >= 1:
        return 0.0
    deviation = probs - weighted_mean(probs, weights)
    sums = probs.new_zeros(len(probs), classes, classes).index_add_(1, labels, deviation)
    constant = (sums.square().sum(-1) / counts.clamp_min(1)).sum(1) / examples
    share = float(weighted_mean(constant, weights)) / spread
    return max(0.0, (share - chance) / (1 - chance))
