"""Member outputs and targets in; negative correlation learning, for squared error and for any loss, out."""

from torch import Tensor

from dissensus._checks import compute_dtype
from dissensus.objectives.decomposition import decompose
from dissensus.objectives.diversity import second_order_diversity
from dissensus.objectives.joint import check_beta, joint_loss
from dissensus.objectives.losses import Loss, errors, like_outputs, output_sum, weighted_mean
from dissensus.types import MemberOutputs, Scalar, Scores


def correlation_penalty(outputs: MemberOutputs) -> Scores:
    r"""How much members err together: the mean product of a member's deviation with the others' deviations.

    $$p = \frac1M \sum_i (f_i - \bar f)\cdot\sum_{j\neq i}(f_j - \bar f)$$

    Reading: never positive, and lower means more spread. Deviations sum to zero, so this is minus the
    squared-error diversity.

    Args:
        outputs: Member outputs, `(members, batch, ...)`.

    Returns:
        The penalty, `(batch,)`.

    Example:
        >>> import torch
        >>> correlation_penalty(torch.tensor([[3.0], [-1.0]]))
        tensor([-4.])

    References:
        Liu and Yao, 1999, <https://doi.org/10.1016/S0893-6080(99)00073-8>.
    """
    outputs = outputs.to(compute_dtype(outputs))
    deviation = outputs - outputs.mean(0)
    others = deviation.sum(0) - deviation
    return output_sum(deviation * others).mean(0)


def negative_correlation_loss(
    outputs: MemberOutputs, targets: Tensor, strength: float | Tensor = 0.5, allow_unbounded: bool = False
) -> Scalar:
    r"""Squared error of the members plus a penalty on errors that go together.

    $$\frac1M\sum_i \lVert f_i - y\rVert^2 + \lambda\, p$$

    Exactly `joint_loss(..., beta=strength, loss="mse")`, whether the mean inside the penalty carries
    gradients or not. The literature's other parameter, with a member's gradient through its own penalty only,
    is $\gamma = \lambda M / (2 (M-1))$.

    Reading: a member's gradient is $\tfrac2M[(f_i - y) - \lambda (f_i - \bar f)]$; at strength 1 it sees the
    ensemble's error only.

    Args:
        outputs: Member outputs, `(members, batch, ...)`.
        targets: Targets, `(batch, ...)`.
        strength: Weight of the penalty, in [0, 1]; a tensor is not looked at (so that nothing waits for the
            device).
        allow_unbounded: Run with `strength > 1` although the objective then has no minimum.

    Returns:
        Scalar, mean over the batch. Lower is better.

    Example:
        >>> import torch
        >>> negative_correlation_loss(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0]), strength=0.5)
        tensor(2.)

    References:
        Liu and Yao, 1999, <https://doi.org/10.1016/S0893-6080(99)00073-8>; Brown et al., 2005,
        <https://jmlr.org/papers/v6/brown05a.html>.
    """
    if not isinstance(strength, Tensor):
        check_beta(strength, allow_unbounded, "strength")
    outputs = outputs.to(compute_dtype(outputs))
    error = output_sum((outputs - like_outputs(targets, outputs)).square()).mean(0)
    return (error + strength * correlation_penalty(outputs)).mean()


def generalised_negative_correlation_loss(
    outputs: MemberOutputs,
    targets: Tensor,
    strength: float | Tensor = 0.5,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    mode: str = "upper",
    weights: Tensor | None = None,
    allow_unbounded: bool = False,
) -> Scalar:
    r"""Negative correlation learning for any twice differentiable loss.

    $$\sum_i w_i \left[L(f_i, y) - \tfrac{\lambda}{2}\, d_i^\top H(\bar f)\, d_i\right],
      \qquad d_i = f_i - \bar f$$

    in mode "second_order" (published as the exact form, which it is for squared error); mode "upper" is
    `joint_loss(..., beta=strength)`, with the diversity itself in place of its second-order part.

    Reading: with "upper", as `joint_loss`. With "second_order" the value is comparable only while members are
    close: for score-averaged cross-entropy, sigmoid and logistic losses it has no minimum for *any* positive
    strength, because members that move apart pay linearly and are paid quadratically. `second_order_gap` says
    how far off it is.

    Args:
        outputs: Member outputs, `(members, batch, ...)`; see `decompose` for what each loss reads.
        targets: Targets; see `decompose`.
        strength: Weight of the diversity, in [0, 1]; a tensor is not looked at (so that nothing waits for the
            device).
        loss: A name other than zero_one, or a callable; see `decompose`.
        average: "probs" or "scores"; see `decompose`.
        mode: "upper" or "second_order".
        weights: Non-negative member weights with sum 1, `(members,)`; `None` is uniform.
        allow_unbounded: Run with `strength > 1` although the objective then has no minimum.

    Returns:
        Scalar, mean over the batch. Lower is better.

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
    if mode != "second_order":
        raise ValueError(f'`mode` must be "upper" or "second_order"; got {mode!r}. Pick one of these.')
    if not isinstance(strength, Tensor):
        check_beta(strength, allow_unbounded, "strength")
    second_order = second_order_diversity(outputs, targets, loss, average, weights)
    member, _ = errors(outputs, targets, loss, average, weights)
    return (weighted_mean(member, weights) - strength * second_order).mean()


def second_order_gap(
    outputs: MemberOutputs,
    targets: Tensor,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    weights: Tensor | None = None,
) -> Scores:
    r"""What the second-order form of diversity leaves out.

    $$\mathrm{DIV} - \tfrac12 \sum_j w_j\, d_j^\top H(\bar f)\, d_j$$

    Reading: 0 for mse; elsewhere third order in the members' distance. Negative where the second-order form
    pays for diversity that is not there.

    Args:
        outputs: Member outputs, `(members, batch, ...)`; see `decompose`.
        targets: Targets; see `decompose`.
        loss: A name other than zero_one, or a callable; see `decompose`.
        average: "probs" or "scores"; see `decompose`.
        weights: Non-negative member weights with sum 1, `(members,)`; `None` is uniform.

    Returns:
        The gap, `(batch,)`.

    Example:
        >>> import torch
        >>> second_order_gap(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0]), loss="mse")
        tensor([0.])

    References:
        Buschjäger et al., 2020, <https://arxiv.org/abs/2011.02952>.
    """
    diversity = decompose(outputs, targets, loss, average, weights).diversity
    return diversity - second_order_diversity(outputs, targets, loss, average, weights)
