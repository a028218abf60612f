"""Members that lean against the error of the others: negative correlation learning, and gradient-adjusted targets."""

import math
from typing import Literal

from torch import Tensor

from dissensus._checks import compute_dtype
from dissensus._signatures import checked
from dissensus.objectives.diversity import decompose, second_order_diversity
from dissensus.objectives.joint import UNBOUNDED, check_beta, joint_loss
from dissensus.objectives.losses import Loss, errors, like_outputs, output_sum, weighted_mean
from dissensus.types import MemberOutputs, Scalar, Scores


@checked
def correlation_penalty(outputs: MemberOutputs) -> Scores:
    r"""How much members err together: the mean product of a member's deviation with the others' deviations.

    $$p = \frac1M \sum_i (f_i - \bar f)\cdot\sum_{j\neq i}(f_j - \bar f)$$

    Args:
        outputs: Member outputs, `(members, batch, ...)`.

    Returns:
        `(batch,)`. Reading: never positive, and lower means more spread: it is minus the squared-error diversity.

    Example:
        >>> import torch
        >>> correlation_penalty(torch.tensor([[3.0], [-1.0]]))
        tensor([-4.])
    """
    outputs = outputs.to(compute_dtype(outputs))
    deviation = outputs - outputs.mean(0)
    others = deviation.sum(0) - deviation
    return output_sum(deviation * others).mean(0)


@checked
def negative_correlation_loss(
    outputs: MemberOutputs, targets: Tensor, strength: float | Tensor = 0.5, allow_unbounded: bool = False
) -> Scalar:
    r"""Squared error of the members plus a penalty on errors that go together.

    $$\frac1M\sum_i \lVert f_i - y\rVert^2 + \lambda\, p$$

    Exactly `joint_loss(..., beta=strength, loss="mse")`, whose arguments it has, whether the mean inside the penalty carries gradients or
    not. The literature's other parameter, with a member's gradient through its own penalty only, is $\gamma = \lambda M / (2 (M-1))$.

    Returns:
        Scalar, mean over the batch. Reading: lower is better. A member's gradient is $\tfrac2M[(f_i - y) - \lambda (f_i - \bar f)]$; at
        strength 1 it sees the ensemble's error only.

    Example:
        >>> import torch
        >>> negative_correlation_loss(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0]), strength=0.5)
        tensor(2.)

    References:
        Liu and Yao, 1999, <https://doi.org/10.1016/S0893-6080(99)00073-8>; Brown et al., 2005,
        <https://jmlr.org/papers/v6/brown05a.html>.
    """
    check_beta(strength, allow_unbounded, "strength")
    outputs = outputs.to(compute_dtype(outputs))
    error = output_sum((outputs - like_outputs(targets, outputs)).square()).mean(0)
    return (error + strength * correlation_penalty(outputs)).mean()


@checked
def generalised_negative_correlation_loss(
    outputs: MemberOutputs,
    targets: Tensor,
    strength: float | Tensor = 0.5,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    mode: Literal["upper", "second_order"] = "upper",
    weights: Tensor | None = None,
    allow_unbounded: bool = False,
) -> Scalar:
    r"""Negative correlation learning for any twice differentiable loss.

    $$\sum_i w_i \left[L(f_i, y) - \tfrac{\lambda}{2}\, d_i^\top H(\bar f)\, d_i\right],
      \qquad d_i = f_i - \bar f$$

    in the mode "second_order" (published as the exact form, which it is for squared error); the mode "upper" is
    `joint_loss(..., beta=strength)`, with the diversity itself in place of its second-order part. All else is as in `joint_loss`.

    Returns:
        Scalar, mean over the batch. Reading: lower is better; with "second_order" comparable only while members are close. There
        score-averaged cross-entropy, sigmoid and logistic losses have no minimum for *any* positive strength, because members that move
        apart pay linearly and are paid quadratically; `second_order_gap` says how far off it is.

    Example:
        >>> import torch
        >>> outputs, targets = torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0])
        >>> generalised_negative_correlation_loss(outputs, targets, 0.5, loss="mse", mode="second_order")
        tensor(2.)

    References:
        Buschjäger et al., 2020, <https://arxiv.org/abs/2011.02952>.
    """
    if mode == "upper":
        return joint_loss(outputs, targets, strength, loss, average, weights, allow_unbounded)
    check_beta(strength, allow_unbounded, "strength")
    second_order = second_order_diversity(outputs, targets, loss, average, weights)
    member, _ = errors(outputs, targets, loss, average, weights)
    return (weighted_mean(member, weights) - strength * second_order).mean()


@checked
def second_order_gap(
    outputs: MemberOutputs,
    targets: Tensor,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    weights: Tensor | None = None,
) -> Scores:
    r"""What the second-order form of diversity leaves out; arguments are those of `decompose`, for losses that have a curvature.

    $$\mathrm{DIV} - \tfrac12 \sum_j w_j\, d_j^\top H(\bar f)\, d_j$$

    Returns:
        `(batch,)`. Reading: 0 for mse; elsewhere third order in the members' distance. Negative where the second-order form pays for
        diversity that is not there.

    Example:
        >>> import torch
        >>> second_order_gap(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0]), loss="mse")
        tensor([0.])
    """
    diversity = decompose(outputs, targets, loss, average, weights).diversity
    return diversity - second_order_diversity(outputs, targets, loss, average, weights)


@checked
def gradient_adjusted_loss(
    outputs: MemberOutputs,
    targets: Tensor,
    step: float | Tensor = 1.0,
    others_only: bool = False,
    detach: bool = False,
    allow_unbounded: bool = False,
) -> Scalar:
    r"""Squared error of each member against a target moved against the error of the ensemble.

    $$\frac1M\sum_i \lVert f_i - \tilde y_i\rVert^2, \qquad \tilde y_i = y - \alpha\,(\bar f_{(i)} - y)$$

    where $\bar f_{(i)}$ is the mean of all members, or of all but member $i$. It is the joint objective in disguise: with the target part
    of the graph its value is $(1+\alpha)^2 L^\beta$; with the target detached its *gradient* is $(1+\alpha)$ times that of $L^\beta$ (its
    value is not a multiple of it), with the `beta` that `beta_from_step` gives.

    Args:
        outputs: Member outputs, `(members, batch, outputs)`.
        targets: Targets, `(batch, outputs)`.
        step: How far targets move, at least 0; a tensor is not looked at (so that nothing waits for the device).
        others_only: Leave a member's own error out of its target.
        detach: Treat the moved targets as constants.
        allow_unbounded: Run a detached others-only target with `step > members - 1` although it then acts as a `beta` above 1.

    Returns:
        Scalar, mean over the batch. Reading: 0 when every member hits its own moved target. A larger step is more joint training *and* a
        longer gradient; divide the learning rate by the factor to compare with `joint_loss`.

    Example:
        >>> import torch
        >>> outputs, targets = torch.tensor([[[3.0]], [[0.0]]]), torch.tensor([[1.0]])
        >>> gradient_adjusted_loss(outputs, targets, step=1.0)  # = 4 * joint_loss(..., beta=0.75)
        tensor(3.2500)

    References:
        Jeffares et al., 2023, appendix D (`beta_from_step`: theorems D.1 and D.3), <https://arxiv.org/abs/2301.11323>.
    """
    num_members = len(outputs)
    if others_only:
        _check_others(num_members)
    if not isinstance(step, Tensor):
        _check_step(step)
        if others_only and detach and step > num_members - 1 and not allow_unbounded:
            beta = beta_from_step(step, num_members, others_only, detach)
            raise ValueError(
                f"`step` must be at most members - 1 = {num_members - 1} for a detached target from the "
                f"others; got {step:g}, which acts as beta = {beta:g}. {UNBOUNDED}"
            )
    outputs = outputs.to(compute_dtype(outputs))
    targets = like_outputs(targets, outputs)
    consulted = outputs.mean(0)
    if others_only:
        consulted = (outputs.sum(0) - outputs) / (num_members - 1)
    adjusted = targets - step * (consulted - targets)
    if detach:
        adjusted = adjusted.detach()
    return output_sum((outputs - adjusted).square()).mean()


@checked
def beta_from_step(
    step: float, num_members: int | None = None, others_only: bool = False, detach: bool = False
) -> float:
    r"""The `beta` that a gradient-adjusted step amounts to; `others_only`, which needs `num_members`, and `detach` as in the loss.

    | | all members | other members only |
    |---|---|---|
    | attached | $1-\frac1{(1+\alpha)^2}$ | $1-\left(\frac{M-1-\alpha}{(M-1)(1+\alpha)}\right)^2$ |
    | detached | $\frac{\alpha}{1+\alpha}$ | $\frac{\alpha M}{(M-1)(1+\alpha)}$ |

    Returns:
        The equivalent `beta`. Reading: 0 is independent training, 1 joint training. With the other members only and attached it rises to 1
        at `step = members - 1` and falls again beyond; detached it goes on above 1, where the objective has no minimum.

    Example:
        >>> beta_from_step(1.0), beta_from_step(1.0, detach=True)
        (0.75, 0.5)
        >>> beta_from_step(1.0, num_members=2, others_only=True)
        1.0
    """
    _check_step(step)
    if not others_only:
        return step / (1 + step) if detach else 1 - 1 / (1 + step) ** 2
    others = _check_others(num_members)
    if detach:
        return step * (others + 1) / (others * (1 + step))
    return 1 - ((others - step) / (others * (1 + step))) ** 2


@checked
def step_from_beta(
    beta: float, num_members: int | None = None, others_only: bool = False, detach: bool = False
) -> float:
    r"""The gradient-adjusted step that amounts to a `beta` in [0, 1]: the inverse of `beta_from_step`.

    For an attached target from the other members two steps give the same `beta`; the smaller one, at most `members - 1`, is returned.

    Returns:
        The step. Reading: how far targets must move; it grows like $(1-\beta)^{-1/2}$ (attached) or $(1-\beta)^{-1}$ (detached) where all
        members are consulted, and stays at most `members - 1` where only the others are.

    Example:
        >>> step_from_beta(0.75), step_from_beta(0.5, detach=True)
        (1.0, 1.0)
        >>> step_from_beta(1.0, num_members=5, others_only=True)
        4.0
    """
    # Without the hint at `allow_unbounded`, which only losses have.
    if not 0 <= beta <= 1:
        raise ValueError(
            f"`beta` must lie in [0, 1]; got {beta:g}. Above 1 the loss has no minimum (theorem 5.1 of Jeffares et al., 2023)."
        )
    if not others_only:
        if beta == 1:
            raise ValueError(
                "`beta` must be below 1 where all members are consulted; got 1, which no finite step reaches. Use `joint_loss`."
            )
        return beta / (1 - beta) if detach else 1 / math.sqrt(1 - beta) - 1
    others = _check_others(num_members)
    if detach:
        return beta * others / (others + 1 - beta * others)
    root = math.sqrt(1 - beta)
    return others * (1 - root) / (1 + root * others)


def _check_step(step: float) -> None:
    # Written so that NaN, for which every comparison is false, is refused too.
    if not step >= 0:
        raise ValueError(f"`step` must be at least 0; got {step:g}. Use 0 for independent training.")


def _check_others(num_members: int | None) -> int:
    """The number of other members, at least one."""
    if num_members is None or num_members < 2:
        raise ValueError(
            f"`others_only` needs at least 2 members; got {num_members}. Pass `num_members`, or consult all."
        )
    return num_members - 1
