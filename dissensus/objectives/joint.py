"""Training between independent and joint: the loss on outputs, and the objective that `fit` takes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus._signatures import checked, real_number
from dissensus.objectives.likelihoods import (
    IGNORED,
    Likelihood,
    check_class_weights,
    class_weighted,
    full,
    likelihood_of,
)
from dissensus.objectives.losses import Loss, check_host_weights, errors, like_outputs, weighted_mean
from dissensus.objectives.objective import OutputObjective, Parts, Step
from dissensus.types import MemberOutputs, Scalar


@checked
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

    Args:
        outputs: Member outputs, `(members, batch, ...)`; see `decompose` for what each loss reads.
        targets: Targets; see `decompose`.
        beta: A number in [0, 1], or a scalar tensor, which is not looked at (so that nothing waits for the device).
        loss: A name or a callable; see `decompose`.
        average: "probs" or "scores"; see `decompose`.
        weights: Non-negative member weights with sum 1, `(members,)`; `None` is uniform. On an accelerator only their shape is checked.
        allow_unbounded: Run with `beta > 1` although the objective then has no minimum.
        label_smoothing: Share of the target spread evenly over the classes (cross_entropy and brier).

    Returns:
        Scalar, mean over the batch. Reading: lower is better. The larger `beta`, the less it matters whether a member is right by itself;
        near 1 members collude: they err in ways that cancel on the training data only. Start at 0, and watch the diversity if you go up.

    Example:
        >>> import torch
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
    "Above beta = 1 the loss is not bounded from below (theorem 5.1 of Jeffares et al., 2023): members that move apart while their average "
    "stays put raise the member error without end, and (1 - beta) times it falls without end. Use less, or pass `allow_unbounded=True` to "
    "see it happen."
)


def check_beta(beta: float | Tensor, allow_unbounded: bool = False, name: str = "beta") -> None:
    """Refuse a share of joint training below 0, and above 1 unless the caller insists; a tensor is not looked at."""
    # Written so that NaN, for which every comparison is false, is refused too.
    if not isinstance(beta, Tensor) and (not beta >= 0 or (beta > 1 and not allow_unbounded)):
        why = UNBOUNDED if beta > 1 else "Use 0 for independent training."
        raise ValueError(f"`{name}` must lie in [0, 1]; got {beta:g}. {why}")


_LOSSES = ("cross_entropy", "brier", "mse", "poisson", "binary_cross_entropy")


@checked
@dataclass(frozen=True)
class Joint(OutputObjective):
    r"""Train members between each for itself (`beta=0`) and all as one model (`beta=1`).

    $$M\left[(1-\beta)\,\overline{\mathrm{ERR}} + \beta\,\mathrm{ERR}\right]$$

    The factor M keeps each member's gradient at the scale of that member trained alone. Near 1 members collude: look at
    `diversity` in the history, and at each member's own loss.

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
        label_smoothing: Share of each target given to the uniform distribution.
        allow_unbounded: Run with `beta > 1` although the objective then has no minimum.
        class_weights: Weight of each class, as in torch's `cross_entropy`: examples count by that of their label.
        class_axis: Where classes are in outputs with positions; see `Independent`.
        ignore_index: Class index of positions that do not count.

    References:
        Jeffares et al., 2023, <https://arxiv.org/abs/2301.11323>.
    """

    beta: float | Callable[[Tensor], Tensor] = 0.5
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

    couples: ClassVar[bool] = True
    needs = "means"

    def __post_init__(self) -> None:
        # A function of the run's progress is looked at every hundredth of the way.
        moments = [torch.tensor(percent / 100) for percent in range(101)]
        for beta in map(self.beta, moments) if callable(self.beta) else (self.beta,):
            check_beta(float(beta), self.allow_unbounded)
        if not callable(self.loss) and self.loss not in _LOSSES:
            raise ValueError(f"`loss` must be one of {', '.join(_LOSSES)} or a function; got {self.loss!r}.")
        check_class_weights(self.class_weights, likelihood_of(self.loss))
        real_number("member_dropout", self.member_dropout, below=1.0)
        if self.weights is not None and (min(self.weights) < 0 or abs(sum(self.weights) - 1) > 1e-6):
            raise ValueError(f"`weights` must be non-negative and sum to 1; got {self.weights}.")

    @property
    def likelihood(self) -> Likelihood:
        """What outputs mean, and the error of the ensemble as it is averaged in training: by probabilities or scores, with weights."""
        return replace(
            likelihood_of(self.loss),
            mixture=self._ensemble_error,
            pooled=self._pooled,
            class_axis=self.class_axis,
            ignore_index=self.ignore_index,
        )

    @property
    def _loss(self) -> str | Callable[[Tensor, Tensor], Tensor]:
        return "sigmoid" if self.loss == "binary_cross_entropy" else self.loss

    def _pooled(self, outputs: Tensor) -> Tensor:
        answers = full(outputs)
        if self.average == "probs":
            answers = answers.sigmoid() if self.loss == "binary_cross_entropy" else answers.softmax(-1)
        return weighted_mean(answers, self._own_weights(len(outputs), outputs.device))

    def _ensemble_error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = self._own_weights(len(outputs), outputs.device)
        return errors(outputs, targets, self._loss, self.average, weights)[1]

    def on_outputs(self, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return M times the interpolated error, and its parts."""
        outputs, y, shares = self.likelihood.rows(outputs, y, step.weights)
        step = replace(step, weights=class_weighted(self.class_weights, outputs, y, shares))
        weights, counts = self._weights(outputs, step)
        if self.loss == "mse" and weights is None and step.weights is None:
            losses, own, error = _squared_errors(outputs, y)
        else:
            member, ensemble = errors(outputs, y, self._loss, self.average, weights, self.label_smoothing, step.others)
            losses, error = step.mean(member), step.mean(ensemble, counts)
            if counts is None:
                own = weighted_mean(losses, weights, step.others)
            else:
                own = step.mean(weighted_mean(member, weights, step.others), counts)
        beta = torch.as_tensor(self.beta(step.progress)).to(own) if callable(self.beta) else self.beta
        parts = {"loss": losses.detach(), "ensemble_error": error.detach(), "diversity": (own - error).detach()}
        return _count(outputs, step) * own.lerp(error, beta), parts

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
    """Means over the batch of each member's squared error, of their average, and of the ensemble's squared error.

    A step of small networks takes as long as it has operations. Here the gradient is one operation for all members and one for their
    average; each member's own error, which is only logged, needs none.
    """
    outputs = full(outputs)
    targets = like_outputs(y, outputs)
    copies = targets.expand_as(outputs)
    own, error = F.mse_loss(outputs, copies), F.mse_loss(outputs.mean(0), targets)
    losses = F.mse_loss(outputs.detach(), copies, reduction="none").mean(tuple(range(1, outputs.ndim)))
    # Errors of several outputs add up, and these are means over outputs too.
    width = prod(outputs.shape[2:])
    return (losses, own, error) if width == 1 else (width * losses, width * own, width * error)
