"""Member outputs and targets in; one loss between independent and joint training out."""

from numbers import Real

from torch import Tensor

from dissensus.objectives.losses import Loss, check_host_weights, errors, weighted_mean
from dissensus.types import MemberOutputs, Scalar


def joint_loss(
    outputs: MemberOutputs,
    targets: Tensor,
    beta: float | Tensor,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    weights: Tensor | None = None,
    allow_unbounded: bool = False,
    label_smoothing: float = 0.0,
) -> Scalar:
    r"""Loss between independent training (`beta=0`) and joint training (`beta=1`).

    $$L^\beta = \overline{\mathrm{ERR}} - \beta\,\mathrm{DIV}
      = (1-\beta)\,\overline{\mathrm{ERR}} + \beta\,\mathrm{ERR}$$

    Reading: the larger `beta`, the less it matters whether a member is right by itself. Near 1 members
    collude: they err in ways that cancel on the training data only. Start at 0, and watch the diversity if
    you go up.

    Args:
        outputs: Member outputs, `(members, batch, ...)`; see `decompose` for what each loss reads.
        targets: Targets; see `decompose`.
        beta: A number in [0, 1], or a scalar tensor, which is not looked at (so that nothing waits for the
            device).
        loss: A name or a callable; see `decompose`.
        average: "probs" or "scores"; see `decompose`.
        weights: Non-negative member weights with sum 1, `(members,)`; `None` is uniform. On an accelerator
            only their shape is checked.
        allow_unbounded: Run with `beta > 1` although the objective then has no minimum.
        label_smoothing: Share of the target spread evenly over the classes (cross_entropy and brier).

    Returns:
        Scalar, mean over the batch. Lower is better.

    Example:
        >>> import torch
        >>> outputs, targets = torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0])
        >>> [joint_loss(outputs, targets, beta, loss="mse").item() for beta in (0.0, 0.5, 1.0)]
        [4.0, 2.0, 0.0]

    References:
        Jeffares et al., 2023, equation 2 and theorem 5.1, <https://arxiv.org/abs/2301.11323>.
    """
    if not isinstance(beta, Tensor):
        check_beta(beta, allow_unbounded)
    if weights is not None:
        check_host_weights(weights, len(outputs))
    member, ensemble = errors(outputs, targets, loss, average, weights, label_smoothing)
    member_error = weighted_mean(member, weights)
    share = beta.to(member_error) if isinstance(beta, Tensor) else beta
    return member_error.lerp(ensemble, share).mean()


UNBOUNDED = (
    "Above beta = 1 the loss is not bounded from below (theorem 5.1 of Jeffares et al., 2023): members that "
    "move apart while their average stays put raise the member error without end, and (1 - beta) times it "
    "falls without end. Use less, or pass `allow_unbounded=True` to see it happen."
)


def check_beta(beta: float, allow_unbounded: bool = False, name: str = "beta") -> None:
    """Refuse a share of joint training below 0, and above 1 unless the caller insists."""
    if not isinstance(beta, Real):
        raise ValueError(f"`{name}` must be a number in [0, 1], or a schedule; got {beta!r}.")
    # Written so that NaN, for which every comparison is false, is refused too.
    if not beta >= 0:
        raise ValueError(f"`{name}` must lie in [0, 1]; got {beta:g}. Use 0 for independent training.")
    if beta > 1 and not allow_unbounded:
        raise ValueError(f"`{name}` must lie in [0, 1]; got {beta:g}. {UNBOUNDED}")
