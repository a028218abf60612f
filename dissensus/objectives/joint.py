"""Training between independent and joint: losses on outputs, some of them in disguise, and the objective that `fit` takes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus._checks import compute_dtype
from dissensus._signatures import checked, real_number
from dissensus.objectives.diversity import decompose, second_order_diversity
from dissensus.objectives.likelihoods import IGNORED, Likelihood, class_table, full, likelihood_of, smooth_answers
from dissensus.objectives.losses import Loss, check_host_weights, errors, like_outputs, output_sum, weighted_mean
from dissensus.objectives.objective import OutputObjective, Parts, Step, as_rows, check_class_settings
from dissensus.types import MemberOutputs, Scalar, Scores


@checked
def joint_loss(
    outputs: MemberOutputs,
    targets: Tensor,
    beta: float | Tensor = 0.4,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    weights: Tensor | None = None,
    allow_unbounded: bool = False,
    label_smoothing: float = 0.0,
) -> Scalar:
    r"""Loss between independent training (`beta=0`) and joint training (`beta=1`).

    $$L^\beta = \overline{\mathrm{ERR}} - \beta\,\mathrm{DIV}
      = (1-\beta)\,\overline{\mathrm{ERR}} + \beta\,\mathrm{ERR}$$

    `beta` is a number in [0, 1] (above it only with `allow_unbounded`), or a scalar tensor, which is not looked at. Other arguments are
    those of `decompose`; of `weights` on an accelerator only the shape is checked.

    Returns:
        Scalar, mean over the batch. Reading: lower is better. Near `beta=1` members collude: their errors cancel on the training data only.

    Example:
        >>> outputs, targets = torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0])
        >>> [joint_loss(outputs, targets, beta, loss="mse").item() for beta in (0.0, 0.5, 1.0)]
        [4.0, 2.0, 0.0]

    References:
        Jeffares et al., 2023, equation 2 and theorem 5.1, <https://arxiv.org/abs/2301.11323>.
    """
    check_beta(beta, allow_unbounded)
    check_host_weights(weights, len(outputs))
    member, ensemble = errors(outputs, targets, loss, average, weights, label_smoothing)
    member_error = weighted_mean(member, weights)
    share = beta.to(member_error) if isinstance(beta, Tensor) else beta
    return member_error.lerp(ensemble, share).mean()


UNBOUNDED = (
    "Above beta = 1 the loss has no minimum (theorem 5.1 of Jeffares et al., 2023): members can move apart without end while their average "
    "stays put. Use less, or pass `allow_unbounded=True`."
)


def check_beta(beta: float | Tensor, allow_unbounded: bool = False, name: str = "beta") -> None:
    """Refuse a share of joint training below 0, and above 1 unless the caller insists; a tensor is not looked at."""
    # Written so that NaN, for which every comparison is false, is refused too.
    if not isinstance(beta, Tensor) and (not beta >= 0 or (beta > 1 and not allow_unbounded)):
        why = UNBOUNDED if beta > 1 else "Use 0 for independent training."
        raise ValueError(f"`{name}` must lie in [0, 1]; got {beta:g}. {why}")


@checked
def correlation_penalty(outputs: MemberOutputs) -> Scores:
    r"""How much members err together: the mean product of a member's deviation with the others' deviations.

    $$p = \frac1M \sum_i (f_i - \bar f)\cdot\sum_{j\neq i}(f_j - \bar f)$$

    Args:
        outputs: Member outputs, `(members, batch, ...)`.

    Returns:
        `(batch,)`. Reading: never positive, and lower means more spread: it is minus the squared-error diversity.

    Example:
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

    It is `joint_loss(..., beta=strength, loss="mse")`, whose arguments it has. The literature's other parameter, with a member's gradient
    through its own penalty only, is $\gamma = \lambda M / (2 (M-1))$.

    Returns:
        Scalar, mean over the batch. Reading: lower is better; at strength 1 members see the ensemble's error only.

    Example:
        >>> negative_correlation_loss(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0]), strength=0.5)
        tensor(2.)

    References:
        Liu and Yao, 1999, <https://doi.org/10.1016/S0893-6080(99)00073-8>; Brown et al., 2005,
        <https://jmlr.org/papers/v6/brown05a.html>.
    """
    check_beta(strength, allow_unbounded, "strength")
    return joint_loss(outputs, targets, strength, "mse", allow_unbounded=allow_unbounded)


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
    `joint_loss(..., beta=strength)`. All else is as in `joint_loss`.

    Returns:
        Scalar, mean over the batch. Reading: lower is better; with "second_order" comparable only while members are close, and without a
        minimum on averaged scores (docs/joint_terms.md); `second_order_gap` says how far off it is.

    Example:
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

    where $\bar f_{(i)}$ is the mean of all members, or of all but member $i$. It is the joint objective, with the `beta` of
    `beta_from_step`: with the target part of the graph its value is $(1+\alpha)^2 L^\beta$; detached its *gradient* is $(1+\alpha)$ times
    that of $L^\beta$ (its value is not a multiple of it).

    Args:
        outputs: Member outputs, `(members, batch, outputs)`.
        targets: Targets, `(batch, outputs)`.
        step: How far targets move, at least 0; a tensor is not looked at (so that nothing waits for the device).
        others_only: Leave a member's own error out of its target.
        detach: Treat the moved targets as constants.
        allow_unbounded: Run a detached others-only target with `step > members - 1` although it then acts as a `beta` above 1.

    Returns:
        Scalar, mean over the batch. Reading: 0 when every member hits its own moved target.

    Example:
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
        real_number("step", step)
        if others_only and detach and step > num_members - 1 and not allow_unbounded:
            beta = beta_from_step(step, num_members, others_only, detach)
            most = f"at most members - 1 = {num_members - 1} for a detached target from the others"
            raise ValueError(f"`step` must be {most}; got {step:g}, which acts as beta = {beta:g}. {UNBOUNDED}")
    outputs = outputs.to(compute_dtype(outputs))
    targets = like_outputs(targets, outputs)
    consulted = (outputs.sum(0) - outputs) / (num_members - 1) if others_only else outputs.mean(0)
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
        The equivalent `beta`. Reading: 0 is independent training, 1 joint training. With the other members only and attached it is 1 at
        `step = members - 1` and falls again beyond; detached it goes on above 1.

    Example:
        >>> beta_from_step(1.0), beta_from_step(1.0, detach=True)
        (0.75, 0.5)
        >>> beta_from_step(1.0, num_members=2, others_only=True)
        1.0
    """
    real_number("step", step)
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
        The step. Reading: how far targets must move; without end towards `beta=1` where all members are consulted.

    Example:
        >>> step_from_beta(0.75), step_from_beta(0.5, detach=True)
        (1.0, 1.0)
        >>> step_from_beta(1.0, num_members=5, others_only=True)
        4.0
    """
    # Without the hint at `allow_unbounded`, which only losses have.
    if not 0 <= beta <= 1:
        raise ValueError(f"`beta` must lie in [0, 1]; got {beta:g}. Above 1 the loss has no minimum (theorem 5.1).")
    if not others_only:
        if beta == 1:
            raise ValueError("`beta` must be below 1 where all members are consulted: no finite step reaches 1.")
        return beta / (1 - beta) if detach else 1 / sqrt(1 - beta) - 1
    others = _check_others(num_members)
    if detach:
        return beta * others / (others + 1 - beta * others)
    root = sqrt(1 - beta)
    return others * (1 - root) / (1 + root * others)


def _check_others(num_members: int | None) -> int:
    """The number of other members, at least one."""
    if num_members is None or num_members < 2:
        raise ValueError(f"`others_only` needs at least 2 members; got {num_members}. Pass `num_members`.")
    return num_members - 1


_LOSSES = ("cross_entropy", "brier", "mse", "poisson", "binary_cross_entropy")


@checked
@dataclass(frozen=True)
class Joint(OutputObjective):
    r"""Train members between each for itself (`beta=0`) and all as one model (`beta=1`).

    $$M\left[(1-\beta)\,\overline{\mathrm{ERR}} + \beta\,\mathrm{ERR}\right]$$

    M times `joint_loss`: each member's gradient has the scale of that member trained alone. Near 1 members collude: look at `diversity`
    in the history, and at each member's own loss.

    Args:
        beta: A number in [0, 1], or a function of the run's progress (a tensor from 0 towards 1) that gives one, such as
            `lambda progress: 0.9 * progress`.
        loss: `"cross_entropy"`, `"brier"`, `"mse"`, `"poisson"`, `"binary_cross_entropy"`, or your own, a function of (output,
            target) that returns one value for each example; the ensemble then averages outputs.
        average: What the ensemble averages: `"probs"` or `"scores"` (logits).
        weights: Weight of each member in both errors, summing to one; uniform by default.
        member_dropout: Share of members left out at random.
        dropout_per: Leave out `int(members * share)` members of every `"batch"`, or each member of every `"example"` with
            that probability (examples with none left do not count).
        label_smoothing: As in `Independent`; so are `class_weights`, `class_axis` and `ignore_index`.
        allow_unbounded: Run with `beta > 1` although the objective then has no minimum.
    """

    beta: float | Callable[[Tensor], Tensor] = 0.4
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy"
    average: Literal["probs", "scores"] = "probs"
    weights: tuple[float, ...] | None = None
    member_dropout: float = 0.0
    dropout_per: Literal["batch", "example"] = "batch"
    label_smoothing: float = 0.0
    allow_unbounded: bool = False
    class_weights: tuple[float, ...] | None = None
    class_axis: int | None = None
    ignore_index: int = IGNORED

    needs = "means"

    def __post_init__(self) -> None:
        # A function of the run's progress is looked at every hundredth of the way.
        moments = [torch.tensor(percent / 100) for percent in range(101)]
        for beta in map(self.beta, moments) if callable(self.beta) else (self.beta,):
            check_beta(float(beta), self.allow_unbounded)
        if not callable(self.loss) and self.loss not in _LOSSES:
            raise ValueError(f"`loss` must be one of {', '.join(_LOSSES)} or a function; got {self.loss!r}.")
        check_class_settings(self)
        real_number("member_dropout", self.member_dropout, below=1.0)
        if self.weights is not None and (min(self.weights) < 0 or abs(sum(self.weights) - 1) > 1e-6):
            raise ValueError(f"`weights` must be non-negative and sum to 1; got {self.weights}.")

    @property
    def likelihood(self) -> Likelihood:
        """What outputs mean, and the error of the ensemble as it is averaged in training: by probabilities or scores, with weights."""
        own = replace(likelihood_of(self.loss), class_axis=self.class_axis, ignore_index=self.ignore_index)
        return replace(own, mixture=self._ensemble_error, average=self.average, weights=self.weights)

    @property
    def _loss(self) -> str | Callable[[Tensor, Tensor], Tensor]:
        return "sigmoid" if self.loss == "binary_cross_entropy" else self.loss

    def _ensemble_error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return errors(outputs, targets, self._loss, self.average, self.likelihood.member_weights(outputs))[1]

    def on_outputs(self, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return M times the interpolated error, and its parts."""
        outputs, y, step = as_rows(self.likelihood, self.class_weights, outputs, y, step)
        weights, counts = self._weights(outputs, step)
        if self.loss == "mse" and weights is None and step.weights is None:
            losses, own, error = _squared_errors(outputs, y)
        else:
            member, ensemble = self._errors(outputs, y, weights, step)
            losses, error = step.mean(member), step.mean(ensemble, counts)
            if counts is None:
                own = weighted_mean(losses, weights, step.others)
            else:
                own = step.mean(weighted_mean(member, weights, step.others), counts)
        beta = torch.as_tensor(self.beta(step.progress)).to(own) if callable(self.beta) else self.beta
        parts = {"loss": losses.detach(), "ensemble_error": error.detach(), "diversity": (own - error).detach()}
        return _count(outputs, step) * own.lerp(error, beta), parts

    def _errors(self, outputs: Tensor, y: Tensor, weights: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """Return `errors`, with the error on each label of several times its weight."""
        if self.loss != "binary_cross_entropy":
            return errors(outputs, y, self._loss, self.average, weights, self.label_smoothing, step.others)
        y = smooth_answers(y, self.label_smoothing)
        if self.class_weights is None:
            return errors(outputs, y, self._loss, self.average, weights, others=step.others)
        table = class_table(self.class_weights, outputs, compute_dtype(outputs))
        if weights is not None and weights.ndim > 1:
            weights = weights.repeat_interleave(len(table), 1)
        # Each label as an example of its own.
        outputs, y = outputs.flatten(1), y.flatten()
        found = errors(outputs, y, self._loss, self.average, weights, others=step.others)
        member, ensemble = (error.unflatten(-1, (-1, len(table))) @ table for error in found)
        return member, ensemble

    def _weights(self, outputs: Tensor, step: Step) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of the members here, and those of examples where some lost all their members."""
        count = _count(outputs, step)
        weights, counts = self._own_weights(count, outputs.device), None
        if weights is None:
            if step.others is None and not self.member_dropout:
                return None, None
            weights = torch.full((count,), 1 / count, device=outputs.device)
        if self.member_dropout:
            weights, counts = self._after_dropout(weights, outputs.shape[1], step)
        return weights if step.others is None else weights[step.others.rows], counts

    def _after_dropout(self, base: Tensor, batch: int, step: Step) -> tuple[Tensor, Tensor | None]:
        noise = step.noise(shared=True)
        if self.dropout_per == "batch":
            # Members in a random order; the first int(M p) are left out.
            places = noise.uniform(len(base)).argsort().argsort()
            kept = base * (places >= int(len(base) * self.member_dropout))
            # Members of weight zero may be all that is left.
            return torch.where(kept.sum() > 0, kept / kept.sum().clamp_min(1e-12), base), None
        kept = base[:, None] * (noise.uniform(len(base), batch) >= self.member_dropout)
        total = kept.sum(0)
        weights = torch.where(total > 0, kept / total.clamp_min(1e-12), base[:, None])
        return weights, total > 0 if step.weights is None else (total > 0) * step.weights

    def _own_weights(self, count: int, device: torch.device) -> Tensor | None:
        if self.weights is None:
            return None
        if len(self.weights) != count:
            raise ValueError(f"`weights` must be one number for each of {count} members; got {len(self.weights)}.")
        return torch.tensor(self.weights, dtype=torch.float32, device=device)


def _count(outputs: Tensor, step: Step) -> int:
    """How many members there are, here and elsewhere."""
    return len(outputs) if step.others is None else step.others.count


def _squared_errors(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means over the batch of each member's squared error, of their average, and of the ensemble's squared error."""
    # In few operations, which are what a step of small networks takes long for; only logged, a member's own error needs no gradient.
    outputs = full(outputs)
    targets = like_outputs(y, outputs)
    copies = targets.expand_as(outputs)
    own, error = F.mse_loss(outputs, copies), F.mse_loss(outputs.mean(0), targets)
    losses = F.mse_loss(outputs.detach(), copies, reduction="none").mean(tuple(range(1, outputs.ndim)))
    # Errors of several outputs add up, and these are means over outputs too.
    width = prod(outputs.shape[2:])
    return (losses, own, error) if width == 1 else (width * losses, width * own, width * error)
