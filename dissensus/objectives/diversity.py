"""Member outputs and targets in; diversity out: by its definition, by closed forms and by curvature."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dissensus._checks import check_weights, compute_dtype
from dissensus._signatures import checked, whole_number
from dissensus.objectives.likelihoods import LIKELIHOODS
from dissensus.objectives.losses import (
    EVENT_LOSSES,
    Loss,
    averaged,
    check_arguments,
    check_host_weights,
    class_labels,
    columns,
    errors,
    event_sum,
    events,
    log_mixture,
    majority_vote,
    matching_weights,
    output_sum,
    weighted_mean,
)
from dissensus.types import MemberOutputs, Scores


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Where an ensemble's error comes from, one number per example.

    Attributes:
        member_error: Weighted average of the members' losses (ERRbar), `(batch,)`.
        ensemble_error: Loss of the averaged prediction (ERR), `(batch,)`.
        diversity: What averaging gains, `member_error - ensemble_error` (DIV), `(batch,)`.
    """

    member_error: Scores
    ensemble_error: Scores
    diversity: Scores


@checked
def decompose(
    outputs: MemberOutputs,
    targets: Tensor,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Decomposition:
    r"""Split the error of an ensemble into the error of its members and their diversity.

    $$\underbrace{L(\bar f, y)}_{\mathrm{ERR}} =
      \underbrace{\textstyle\sum_j w_j L(f_j, y)}_{\overline{\mathrm{ERR}}} - \mathrm{DIV}$$

    Several outputs of one example add up. Target values are checked, which waits for the device.

    Args:
        outputs: Member outputs, `(members, batch, ...)`; class logits on the last axis.
        targets: Class labels, or class probabilities `(batch, classes)`; for other losses shaped as one member's outputs.
        loss: "mse", "cross_entropy", "brier", "zero_one" (members vote; ties go to the lowest class), "sigmoid" (logits of yes or
            no, targets in [0, 1]), "poisson" (log-rates, counts), "logistic" or "exponential" (margins, targets -1 or +1), or a
            callable `loss(outputs, targets)` from `(batch, ...)` to `(batch,)`. docs/joint_terms.md has them in a table.
        average: "probs" averages the members' probabilities, "scores" what comes before the softmax, sigmoid
            or exponential; margins, "mse" and callables average outputs either way.
        weights: Non-negative member weights with sum 1, `(members,)`; `None` is uniform.
        label_smoothing: Share of the target spread evenly over the classes (cross_entropy and brier).

    Returns:
        A `Decomposition`, `(batch,)` each, in nats for the likelihood losses, differentiable. Reading: diversity is what averaging gains
        over the average member, never negative where the loss is convex in what is averaged; far above the ensemble error members cancel
        each other. Much smaller than the errors it loses digits, which `diversity_closed_form` keeps.

    Example:
        >>> d = decompose(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0]), loss="mse")
        >>> d.member_error.item(), d.ensemble_error.item(), d.diversity.item()
        (4.0, 0.0, 4.0)

    References:
        Jeffares et al., 2023, <https://arxiv.org/abs/2301.11323>: definitions 4.1 and 4.2 (for `debias` section 6.1 and appendix C.1,
        for `diversity_closed_form` equation 1 and theorem 4.3, for `hessian_diversity` theorem 4.5).
    """
    if weights is not None:
        check_weights(weights, len(outputs))
    member, ensemble = errors(outputs, targets, loss, average, weights, label_smoothing)
    _check_target_values(targets, loss)
    member_error = weighted_mean(member, weights)
    return Decomposition(member_error, ensemble, member_error - ensemble)


@dataclass(frozen=True, eq=False)
class Debiased:
    """Member outputs without each member's constant offset, `(members, batch, ...)`, and the offsets, `(members, ...)`, of average zero."""

    outputs: Tensor
    bias: Tensor


@checked
def debias(outputs: MemberOutputs, weights: Tensor | None = None) -> Debiased:
    r"""Take from each member the constant by which it sits beside the ensemble.

    $$b_j = \frac1N\sum_i \left(f_j(x_i) - \bar f(x_i)\right), \qquad f_j - b_j$$

    Args:
        outputs: Member outputs on the whole set looked at, `(members, batch, ...)`; the offsets are means over it.
        weights: Non-negative member weights with sum 1, `(members,)`; `None` is uniform.

    Returns:
        A `Debiased`. Reading: of all constants that leave the ensemble as it is, these take away the most squared-error diversity, exactly
        $\sum_j w_j \lVert b_j\rVert^2$. A large share means members that are shifted, not that differ.

    Example:
        >>> debiased = debias(torch.tensor([[5.0, 6.0], [1.0, 2.0]]))
        >>> debiased.bias.tolist(), debiased.outputs.tolist()
        ([2.0, -2.0], [[3.0, 4.0], [3.0, 4.0]])
    """
    outputs = outputs.to(compute_dtype(outputs))
    if weights is not None:
        check_weights(weights, len(outputs))
    bias = (outputs - weighted_mean(outputs, weights)).mean(1)
    return Debiased(outputs - bias[:, None], bias)


# Losses whose targets have values of their own: which fit, in words, and what to do where they do not.
_SIGNS = (lambda y: y.abs() == 1, "be -1 or +1", "For labels 0 and 1, pass `2 * y - 1`.")
_TARGETS: Mapping[Loss, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "logistic": _SIGNS,
    "exponential": _SIGNS,
    "sigmoid": (lambda y: (y >= 0) & (y <= 1), "lie in [0, 1]", "For labels -1 and +1, pass `(y + 1) / 2`."),
    "poisson": (lambda y: y >= 0, "be counts", "Pass counts, not their logarithm."),
}


def _check_target_values(targets: Tensor, loss: Loss) -> None:
    """Refuse targets coded for another loss, which would give a number all the same."""
    if loss in _TARGETS:
        fit, wanted, advice = _TARGETS[loss]
        if not bool(fit(targets).all()):
            raise ValueError(f"`targets` of the {loss} loss must {wanted}; got other values. {advice}")
    if loss in ("cross_entropy", "brier") and targets.is_floating_point():
        # Loose enough for rows stored in bfloat16.
        normalised = (targets.float().sum(-1) - 1).abs() < 1e-2
        if not bool(normalised.all() & (targets >= 0).all()):
            raise ValueError("Soft `targets` must be non-negative and sum to 1 over the classes; these do not.")


@checked
def diversity_closed_form(
    outputs: MemberOutputs,
    targets: Tensor | None = None,
    loss: str = "cross_entropy",
    average: str = "probs",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Scores:
    r"""Diversity as a variance, a divergence from the pool, or a log-ratio, whichever the loss has (docs/joint_terms.md).

    Arguments are those of `decompose`. Without `targets`: mse; brier on probabilities; cross_entropy, sigmoid and poisson on scores;
    logistic.

    Returns:
        `(batch,)`, in nats for the likelihood losses. Reading: equal to `decompose(...).diversity`, with no two large numbers subtracted;
        zero when all members agree.

    Example:
        >>> diversity_closed_form(torch.tensor([[3.0], [-1.0]]), loss="mse")
        tensor([4.])
    """
    outputs, weights = _prepared(outputs, loss, average, weights, label_smoothing)
    if loss == "mse":
        return variance(outputs, weights)
    if loss == "brier" and average == "probs":
        return variance(outputs.softmax(-1), weights)
    if loss == "logistic" or (loss in EVENT_LOSSES and average == "scores"):
        return _divergence_from_pool(outputs, loss, weights)
    if loss not in (*EVENT_LOSSES, "zero_one"):
        raise ValueError(f"There is no closed form for loss {loss!r} with average {average!r}. Use `decompose`.")
    if targets is None:
        raise ValueError(f"`targets` are needed for the diversity of {loss} here; got None. Pass the labels.")
    if loss == "zero_one":
        return _signed_disagreement(outputs, class_labels(targets, outputs), weights)
    log_prob, mass = events(loss, outputs, targets, label_smoothing)
    log_probs = log_prob(outputs)
    log_ratio = log_mixture(log_probs, weights) - log_probs
    return weighted_mean(event_sum(log_ratio, mass), weights)


@checked
def hessian_diversity(
    outputs: MemberOutputs,
    targets: Tensor,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    nodes: int = 32,
) -> Scores:
    r"""Diversity as a curvature-weighted variance around the ensemble, for any twice differentiable loss.

    $$\mathrm{DIV} = \sum_j w_j \int_0^1 (1-t)\; d_j^\top H(\bar f + t d_j)\, d_j \,\mathrm{d}t,
      \qquad d_j = f_j - \bar f$$

    The integral, Taylor's remainder, is taken by Gauss-Legendre quadrature with so many `nodes`. Other arguments are those of `decompose`;
    the loss of an example must not depend on others.

    Returns:
        `(batch,)`. Reading: equal to `decompose(...).diversity`; a check, not a fast path. Nearly singular curvature (a probability
        close to 0 under probability averaging) needs more nodes.

    Example:
        >>> diversity = hessian_diversity(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0]), loss="mse")
        >>> round(diversity.item(), 4)
        4.0
    """
    outputs, weights = _prepared(outputs, loss, average, weights, label_smoothing)
    values, judge = _smooth(outputs, targets, loss, average, label_smoothing)
    abscissae, quadrature = np.polynomial.legendre.leggauss(whole_number("nodes", nodes, 1))
    # From [-1, 1] to [0, 1]; half the interval is also half of each quadrature weight.
    remainder = sum(
        float(weight / 2 * (1 - time)) * _curvature(values, judge, weights, float(time))
        for time, weight in zip((abscissae + 1) / 2, quadrature, strict=True)
    )
    return weighted_mean(torch.as_tensor(remainder), weights)


@checked
def second_order_diversity(
    outputs: MemberOutputs,
    targets: Tensor,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Scores:
    r"""Diversity to second order: the variance around the ensemble, weighted by the curvature there.

    $$\tfrac12 \sum_j w_j\, d_j^\top H(\bar f)\, d_j, \qquad d_j = f_j - \bar f$$

    Arguments are those of `decompose`; the loss of an example must not depend on others.

    Returns:
        `(batch,)`, differentiable. Reading: equal to diversity for mse and for brier on averaged probabilities, close to it elsewhere while
        members are close, and arbitrarily far off where they are not.

    Example:
        >>> second_order_diversity(torch.tensor([[0.5], [-0.5]]), torch.tensor([1.0]), loss="logistic")
        tensor([0.0312])

    References:
        Buschjäger et al., 2020, <https://arxiv.org/abs/2011.02952>.
    """
    outputs, weights = _prepared(outputs, loss, average, weights, label_smoothing)
    if loss == "mse":
        return variance(outputs, weights)
    if loss in EVENT_LOSSES and average == "probs":
        # H = diag(y / pbar^2), so the form is the squared relative deviation; in logarithms it cannot overflow.
        log_prob, mass = events(str(loss), outputs, targets, label_smoothing)
        log_probs = log_prob(outputs)
        relative = torch.expm1(log_probs - log_mixture(log_probs, weights))
        return weighted_mean(event_sum(relative.square(), mass), weights) / 2
    if loss == "cross_entropy":
        # H = diag(q) - q q', so the form is the variance of the deviation under the pooled prediction.
        mean = weighted_mean(outputs, weights)
        deviation, pooled = outputs - mean, mean.softmax(-1)
        centred = deviation - (pooled * deviation).sum(-1, keepdim=True)
        return weighted_mean((pooled * centred.square()).sum(-1), weights) / 2
    values, judge = _smooth(outputs, targets, loss, average, label_smoothing)
    return weighted_mean(_curvature(values, judge, weights, 0.0), weights) / 2


def _prepared(
    outputs: Tensor, loss: Loss, average: str, weights: Tensor | None, label_smoothing: float
) -> tuple[Tensor, Tensor | None]:
    check_arguments(outputs, loss, average, label_smoothing)
    outputs = outputs.to(compute_dtype(outputs))
    check_host_weights(weights, len(outputs))
    return outputs, None if weights is None else matching_weights(weights, outputs)


def variance(values: Tensor, weights: Tensor | None) -> Tensor:
    """Mean squared distance of the members from their average, `(batch,)`."""
    deviation = values - weighted_mean(values, weights)
    return weighted_mean(output_sum(deviation.square()), weights)


def _divergence_from_pool(scores: Tensor, loss: str, weights: Tensor | None) -> Tensor:
    """Mean Kullback-Leibler divergence of the members from the distribution at the mean score."""
    name = loss if loss in ("cross_entropy", "poisson") else "binary_cross_entropy"
    scores = columns(scores, 2)
    return weighted_mean(LIKELIHOODS[name].divergence(weighted_mean(scores, weights), scores), weights)


def _signed_disagreement(outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    votes, winner = majority_vote(outputs, weights)
    outvoted_wrong = weighted_mean((votes != labels).to(outputs), weights)
    outvoted_right = weighted_mean((votes == labels).to(outputs), weights)
    return torch.where(winner == labels, outvoted_wrong, -outvoted_right)


def _smooth(
    outputs: Tensor, targets: Tensor, loss: Loss, average: str, label_smoothing: float
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What the ensemble averages, not in logarithms, and the loss of it."""
    if loss == "zero_one":
        raise ValueError("The zero_one loss has no second derivative. Use `decompose` or `diversity_closed_form`.")
    values, judge = averaged(outputs, targets, loss, average, label_smoothing)
    if loss in EVENT_LOSSES and average == "probs":
        return values.exp(), lambda probs: judge(probs.log())
    return values, judge


def _curvature(values: Tensor, judge: Callable[[Tensor], Tensor], weights: Tensor | None, time: float) -> Tensor:
    """Second derivative of the loss along each deviation, `time` of the way from ensemble to member."""
    mean = weighted_mean(values, weights)
    deviation = values - mean

    def total_loss(times: Tensor) -> Tensor:
        return judge(mean + times.reshape(*times.shape, *(1,) * (mean.ndim - 1)) * deviation).sum()

    # Each (member, example) has its own time and only its own loss depends on it, so the derivative of the
    # summed slope is the diagonal of the Hessian in the times: d' H d.
    def total_slope(times: Tensor) -> Tensor:
        return torch.func.grad(total_loss)(times).sum()

    return torch.func.grad(total_slope)(values.new_full(values.shape[:2], time))
