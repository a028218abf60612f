"""Predicted classes of members -> how differently they err."""

from dataclasses import dataclass
from math import inf, nan
from typing import Literal

import torch
from torch import Tensor

from dissensus._signatures import checked, real_number, whole_number
from dissensus.metrics._inputs import Array, as_tensor, indices


@dataclass(frozen=True)
class DiversityBounds:
    """What `pair_diversity` would be for a perturbed copy (`lower`) and for independent errors (`upper`)."""

    lower: float
    upper: float


@checked
def disagreement(predictions_a: Array, predictions_b: Array) -> float:
    """Fraction of inputs on which two members predict different classes.

    Args:
        predictions_a: Predicted class indices of one member, `(batch,)`.
        predictions_b: Predicted class indices of the other, `(batch,)`.

    Returns:
        A number in [0, 1]. Reading: 0 for copies; at most the sum of the two error rates.

    Example:
        >>> disagreement(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 0]))
        0.25
    """
    first = indices(predictions_a, "predictions_a")
    second = indices(predictions_b, "predictions_b", len(first)).to(first.device)
    return _fraction(first != second)


@checked
def mean_disagreement(predictions: Array) -> float:
    r"""`disagreement` averaged over all pairs of members.

    $$1 - \frac{1}{B}\sum_b \frac{\sum_c n_{bc}(n_{bc} - 1)}{M (M - 1)}$$
    with $n_{bc}$ the number of members that predict class c for input b.

    Args:
        predictions: Predicted class indices, `(members, batch)`, of two members or more.

    Returns:
        A number in [0, 1]. Reading: 0 when all members agree on every input, 1 when no two ever do.

    Example:
        >>> round(mean_disagreement(torch.tensor([[0, 1], [0, 1], [0, 2]])), 4)
        0.3333
    """
    votes = _member_predictions(predictions)
    num_members, batch = votes.shape
    # Contiguous class ids, so that the count table is as wide as the classes that occur.
    classes, votes = torch.unique(votes, return_inverse=True)
    cells = votes + len(classes) * torch.arange(batch, device=votes.device)
    counts = cells.flatten().bincount()
    agreeing = int((counts * (counts - 1)).sum())
    return 1 - agreeing / (batch * num_members * (num_members - 1))


@checked
def existential_disagreement(predictions: Array) -> float:
    """Fraction of inputs on which any two members predict different classes; arguments as in `mean_disagreement`.

    Returns:
        A number in [0, 1]. Reading: 0 when all members agree on every input. Never below `mean_disagreement`, and it
        can only grow with the number of members.

    Example:
        >>> existential_disagreement(torch.tensor([[0, 1], [0, 1], [0, 2]]))
        0.5
    """
    votes = _member_predictions(predictions)
    return _fraction((votes != votes[0]).any(0))


@checked
def ood_disagreement_bound(
    hard_disagreement: float, cluster_mass: float, purity: float, gap: float = 0.0, instability: float = 0.0
) -> float:
    r"""Lower bound on how often members disagree off the training distribution, if they do on hard training examples.

    $$\Pr_Q[\text{some two members disagree}] \ge \alpha_0\,\rho\,(\delta_H - \Gamma) - \bar\eta$$

    Args:
        hard_disagreement: Mean disagreement of pairs on hard training examples, $\delta_H$ (`mean_disagreement`).
        cluster_mass: Least probability, under the other distribution Q, of the ball around one of its points,
            $\alpha_0$.
        purity: Least share of Q among the points on which members disagree, $\rho$.
        gap: How far the measured disagreement may lie above the true one, $\Gamma$.
        instability: How often members that disagree at a point agree nearby, $\bar\eta$.

    Returns:
        The bound; at most 1, possibly negative. Reading: a number at or below 0 says nothing. The constants are
        assumptions about the data that nothing here measures.

    Example:
        >>> round(ood_disagreement_bound(0.8, cluster_mass=0.5, purity=0.9, gap=0.1, instability=0.05), 3)
        0.265
    """
    shares = {"hard_disagreement": hard_disagreement, "cluster_mass": cluster_mass, "purity": purity}
    for name, value in {**shares, "instability": instability}.items():
        if not 0 <= value <= 1:
            raise ValueError(f"`{name}` is a share, from 0 to 1; got {value}.")
    real_number("gap", gap)
    return cluster_mass * purity * (hard_disagreement - gap) - instability


@checked
def pair_diversity(
    predictions_a: Array, predictions_b: Array, labels: Array, accuracy_of: Literal["pair", "a", "b"] = "pair"
) -> float:
    """Disagreement of two members, divided by their error rate.

    Args:
        predictions_a: Predicted class indices of one member, `(batch,)`.
        predictions_b: Predicted class indices of the other, `(batch,)`.
        labels: True class indices, `(batch,)`.
        accuracy_of: Whose accuracy sets the error rate: the mean of both (`"pair"`), or one of them (`"a"`, `"b"`).

    Returns:
        Reading: 0 for copies, near 1 or above for members that err independently (see `diversity_bounds`). `nan` for a pair without errors,
        `inf` if only the named member is perfect.

    Example:
        >>> labels = torch.zeros(4, dtype=torch.long)
        >>> pair_diversity(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1]), labels, accuracy_of="a")
        0.5

    References:
        Durasov et al., 2021, <https://arxiv.org/abs/2012.08334>, eq. 7, and figure 2 for `diversity_bounds`; Fort et
        al., 2019, <https://arxiv.org/abs/1912.02757>.
    """
    first = indices(predictions_a, "predictions_a")
    second = indices(predictions_b, "predictions_b", len(first)).to(first.device)
    truth = indices(labels, "labels", len(first)).to(first.device)
    errors = {"a": _fraction(first != truth), "b": _fraction(second != truth)}
    error = sum(errors.values()) / 2 if accuracy_of == "pair" else errors[accuracy_of]
    different = _fraction(first != second)
    return different / error if error else nan if different == 0 else inf


@checked
def diversity_bounds(accuracy: float, base_accuracy: float, num_classes: int) -> DiversityBounds:
    r"""`pair_diversity` of two idealised members with these accuracies.

    With $a$ the accuracy, $a^*$ the base accuracy and $C$ classes, members whose errors are independent and
    spread evenly over the wrong classes disagree on
    $$(1-a)a^* + (1-a^*)a + (1-a)(1-a^*)\frac{C-2}{C-1}$$
    of the inputs, and a copy of the better one, a random fraction of whose predictions was redrawn, on
    $$p\,\frac{C-1}{C}, \qquad p = \frac{\max(a, a^*) - \min(a, a^*)}{\max(a, a^*) - 1/C}.$$
    Both are divided by $1 - a$.

    Args:
        accuracy: Accuracy of the member, at least 1/classes and below 1.
        base_accuracy: Accuracy of the member it is compared with, at least 1/classes and at most 1.
        num_classes: Number of classes.

    Returns:
        The two bounds, normalised as `pair_diversity` is. Reading: a member near `upper` found its own solution; one
        near `lower` is a noisy copy of the base. Compare with `pair_diversity(member, base, labels, accuracy_of="a")`.

    Example:
        >>> bounds = diversity_bounds(0.8, 0.9, num_classes=10)
        >>> round(bounds.lower, 4), round(bounds.upper, 4)
        (0.5625, 1.3889)
    """
    whole_number("num_classes", num_classes, 2)
    chance = 1 / num_classes
    if not (chance <= accuracy < 1 and chance <= base_accuracy <= 1):
        came = f"accuracy {accuracy} and base_accuracy {base_accuracy}"
        raise ValueError(f"accuracies must lie between chance, 1/{num_classes}, and 1, `accuracy` below 1; got {came}.")
    error, base_error = 1 - accuracy, 1 - base_accuracy
    same_wrong_class = 1 / (num_classes - 1)
    independent = error * base_accuracy + base_error * accuracy + error * base_error * (1 - same_wrong_class)
    better, worse = max(accuracy, base_accuracy), min(accuracy, base_accuracy)
    redrawn = (better - worse) / (better - chance) if better > worse else 0.0
    return DiversityBounds(lower=redrawn * (1 - chance) / error, upper=independent / error)


def _member_predictions(predictions: Array) -> Tensor:
    votes = as_tensor(predictions, "predictions")
    if votes.is_floating_point() or votes.ndim != 2 or len(votes) < 2:
        came = f"{votes.dtype} of shape {tuple(votes.shape)}; of logits pass `argmax(-1)`"
        raise ValueError(f"`predictions` must be class indices (members, batch) of two members or more; got {came}.")
    return votes


def _fraction(condition: Tensor) -> float:
    return int(condition.sum()) / len(condition)
