"""Member outputs and targets in; member error, ensemble error and diversity out, example by example."""

from dataclasses import dataclass

from torch import Tensor

from dissensus._checks import check_weights, compute_dtype
from dissensus.objectives.losses import Loss, errors, weighted_mean
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

    Reading: diversity is what averaging gains over the average member. It is never negative where the loss is
    convex in what is averaged; far above the ensemble error it says that members cancel each other rather
    than know different things.

    | loss | outputs | targets | averaged |
    |---|---|---|---|
    | mse | any `(members, batch, ...)` | the same, less members; squared norm over the outputs | outputs |
    | cross_entropy, brier | logits `(members, batch, classes)` | labels, `(batch, classes)` | as `average` |
    | zero_one | logits `(members, batch, classes)` | labels | votes; ties go to the lowest class |
    | sigmoid | logits, one per yes/no question | in [0, 1] | as `average` |
    | poisson | log-rates | counts | as `average` |
    | logistic, exponential | margins | -1 or +1 | outputs |
    | a callable | whatever it takes | whatever it takes | outputs |

    Several outputs of one example add up. Here target values are checked, which waits for the device;
    `joint_loss` does not.

    Args:
        outputs: Member outputs, `(members, batch, ...)`.
        targets: Targets as in the table.
        loss: A name of the table, or a callable `loss(outputs, targets)` from `(batch, ...)` to `(batch,)`.
        average: "probs" averages the members' probabilities, "scores" what comes before the softmax, sigmoid
            or exponential.
        weights: Non-negative member weights with sum 1, `(members,)`; `None` is uniform.
        label_smoothing: Share of the target spread evenly over the classes (cross_entropy and brier).

    Returns:
        A `Decomposition` of three `(batch,)` tensors, in nats for the likelihood losses. They are
        differentiable. In float32 a diversity much smaller than the errors loses digits:
        `diversity_closed_form` keeps them.

    Example:
        >>> import torch
        >>> d = decompose(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0]), loss="mse")
        >>> d.member_error.item(), d.ensemble_error.item(), d.diversity.item()
        (4.0, 0.0, 4.0)

    References:
        Jeffares et al., 2023, definitions 4.1 and 4.2, <https://arxiv.org/abs/2301.11323>.
    """
    if weights is not None:
        check_weights(weights, len(outputs))
    member, ensemble = errors(outputs, targets, loss, average, weights, label_smoothing)
    _check_target_values(targets, loss)
    member_error = weighted_mean(member, weights)
    return Decomposition(member_error, ensemble, member_error - ensemble)


@dataclass(frozen=True, eq=False)
class Debiased:
    """Member outputs without each member's constant offset.

    Attributes:
        outputs: The debiased outputs, `(members, batch, ...)`; their average is the average of the originals.
        bias: What was taken from each member, `(members, ...)`; its average over the members is zero.
    """

    outputs: Tensor
    bias: Tensor


def debias(outputs: MemberOutputs, weights: Tensor | None = None) -> Debiased:
    r"""Take from each member the constant by which it sits beside the ensemble.

    $$b_j = \frac1N\sum_i \left(f_j(x_i) - \bar f(x_i)\right), \qquad f_j - b_j$$

    Reading: of all constants that leave the ensemble as it is, these take away the most squared-error
    diversity, exactly $\sum_j w_j \lVert b_j\rVert^2$. A large share means members that are shifted, not
    members that differ.

    Args:
        outputs: Member outputs on the whole set looked at, `(members, batch, ...)`. The offsets are means
            over that set, so they use the inputs to be predicted (never their targets).
        weights: Non-negative member weights with sum 1, `(members,)`; `None` is uniform.

    Returns:
        A `Debiased` with the outputs and the offsets.

    Example:
        >>> import torch
        >>> debiased = debias(torch.tensor([[5.0, 6.0], [1.0, 2.0]]))
        >>> debiased.bias.tolist(), debiased.outputs.tolist()
        ([2.0, -2.0], [[3.0, 4.0], [3.0, 4.0]])

    References:
        Jeffares et al., 2023, section 6.1 and appendix C.1, <https://arxiv.org/abs/2301.11323>.
    """
    outputs = outputs.to(compute_dtype(outputs))
    if weights is not None:
        check_weights(weights, len(outputs))
        weights = weights.to(outputs)
    bias = (outputs - weighted_mean(outputs, weights)).mean(1)
    return Debiased(outputs - bias[:, None], bias)


def _check_target_values(targets: Tensor, loss: Loss) -> None:
    """Refuse targets coded for another loss, which would give a number all the same."""
    if loss in ("logistic", "exponential") and not bool((targets.abs() == 1).all()):
        raise ValueError(
            f"`targets` of the {loss} loss must be -1 or +1; got other values. "
            "For labels 0 and 1, pass `2 * y - 1`."
        )
    if loss == "sigmoid" and not bool(((targets >= 0) & (targets <= 1)).all()):
        raise ValueError(
            "`targets` of the sigmoid loss must lie in [0, 1]; got other values. "
            "For labels -1 and +1, pass `(y + 1) / 2`."
        )
    if loss == "poisson" and not bool((targets >= 0).all()):
        raise ValueError(
            "`targets` of the poisson loss must be counts; got negative values. "
            "Pass counts, not their logarithm."
        )
    if loss in ("cross_entropy", "brier") and targets.is_floating_point():
        # Loose enough for rows stored in bfloat16.
        normalised = (targets.float().sum(-1) - 1).abs() < 1e-2
        if not bool(normalised.all() & (targets >= 0).all()):
            raise ValueError(
                "Soft `targets` must be non-negative and sum to 1 over the classes; these do not. "
                "Normalise each row."
            )
