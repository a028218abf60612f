"""Training between independent and joint: the objective that `fit` takes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.objectives.joint import check_beta
from dissensus.objectives.likelihoods import Likelihood, full, likelihood_of
from dissensus.objectives.losses import errors, like_outputs, weighted_mean
from dissensus.objectives.objective import OutputObjective, Parts, Step

LOSSES = ("cross_entropy", "brier", "mse")


@dataclass(frozen=True)
class Joint(OutputObjective):
    r"""Train members between each for itself (`beta=0`) and all as one model (`beta=1`).

    $$M\left[(1-\beta)\,\overline{\mathrm{ERR}} + \beta\,\mathrm{ERR}\right]$$

    The factor M keeps each member's gradient at the scale of that member trained alone. Near 1 members collude: look at
    `diversity` in the history, and at each member's own loss.

    Args:
        beta: A number in [0, 1], or a function of the run's progress (a tensor from 0 towards 1) that gives one, such as
            `lambda progress: 0.9 * progress`.
        loss: `"cross_entropy"`, `"brier"` or `"mse"`.
        average: What the ensemble averages: `"probs"` or `"scores"` (logits).
        weights: Weight of each member in both errors, summing to one; uniform by default.
        member_dropout: Share of members left out at random.
        dropout_per: Leave out `int(members * share)` members of every `"batch"`, or each member of every `"example"` with
            that probability (examples with none left do not count).
        label_smoothing: Share of each target given to the uniform distribution.
        allow_unbounded: Run with `beta > 1` although the objective then has no minimum.

    References:
        Jeffares et al., 2023, <https://arxiv.org/abs/2301.11323>.
    """

    beta: float | Callable[[Tensor], Tensor] = 0.5
    loss: str = "cross_entropy"
    average: Literal["probs", "scores"] = "probs"
    weights: tuple[float, ...] | None = None
    member_dropout: float = 0.0
    dropout_per: Literal["batch", "example"] = "batch"
    label_smoothing: float = 0.0
    allow_unbounded: bool = False

    couples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for beta in _values(self.beta):
            check_beta(beta, self.allow_unbounded)
        if self.loss not in LOSSES:
            raise ValueError(f"`loss` must be one of {', '.join(LOSSES)}; got {self.loss!r}.")
        if self.average not in ("probs", "scores"):
            raise ValueError(f"`average` must be 'probs' or 'scores'; got {self.average!r}.")
        if not 0.0 <= self.member_dropout < 1.0:
            raise ValueError(f"`member_dropout` must be in [0, 1); got {self.member_dropout}.")
        if self.dropout_per not in ("batch", "example"):
            raise ValueError(f"`dropout_per` must be 'batch' or 'example'; got {self.dropout_per!r}.")
        if self.weights is not None and (min(self.weights) < 0 or abs(sum(self.weights) - 1) > 1e-6):
            raise ValueError(f"`weights` must be non-negative and sum to 1; got {self.weights}.")

    @property
    def likelihood(self) -> Likelihood:
        """What outputs mean, and the error of the ensemble as it is averaged in training: by probabilities or scores, with weights."""
        return replace(likelihood_of(self.loss), mixture=self._ensemble_error, pooled=self._pooled)

    def _pooled(self, outputs: Tensor) -> Tensor:
        answers = full(outputs)
        if self.average == "probs":
            answers = answers.softmax(-1)
        return weighted_mean(answers, self._own_weights(outputs))

    def _ensemble_error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return errors(outputs, targets, self.loss, self.average, self._own_weights(outputs))[1]

    def on_outputs(self, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return M times the interpolated error, and its parts."""
        weights, counts = self._weights(outputs, step)
        losses, own, error = self._errors(outputs, y, weights, counts)
        beta = torch.as_tensor(self.beta(step.progress)).to(own) if callable(self.beta) else self.beta
        parts = {
            "loss": losses.detach(),
            "ensemble_error": error.detach(),
            "diversity": (own - error).detach(),
        }
        return len(outputs) * own.lerp(error, beta), parts

    def _errors(
        self, outputs: Tensor, y: Tensor, weights: Tensor | None, counts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Means over the batch: of each member's error, of their average, and of the ensemble's error."""
        if self.loss == "mse" and weights is None:
            return _squared_errors(outputs, y)
        member, ensemble = errors(outputs, y, self.loss, self.average, weights, self.label_smoothing)
        losses, error = member.mean(-1), _mean(ensemble, counts)
        if counts is None:
            return losses, weighted_mean(losses, weights), error
        return losses, _mean(weighted_mean(member, weights), counts), error

    def _weights(self, outputs: Tensor, step: Step) -> tuple[Tensor | None, Tensor | None]:
        """Return the members' weights, and which examples count where some lost all their members."""
        count, batch = outputs.shape[:2]
        base = self._own_weights(outputs)
        if self.member_dropout == 0.0:
            return base, None
        base = torch.full((count,), 1 / count, device=outputs.device) if base is None else base
        noise = step.noise(shared=True)
        if self.dropout_per == "batch":
            # Members in a random order; the first int(M p) are left out.
            places = noise.uniform(count).argsort().argsort()
            kept = base * (places >= int(count * self.member_dropout))
            # Members of weight zero may be all that is left.
            return torch.where(kept.sum() > 0, kept / kept.sum().clamp_min(1e-12), base), None
        kept = base[:, None] * (noise.uniform(count, batch) >= self.member_dropout)
        total = kept.sum(0)
        counts = total > 0
        return torch.where(counts, kept / total.clamp_min(1e-12), base[:, None]), counts

    def _own_weights(self, outputs: Tensor) -> Tensor | None:
        if self.weights is None:
            return None
        if len(self.weights) != len(outputs):
            raise ValueError(
                f"`weights` must be one number for each of {len(outputs)} members; got {len(self.weights)}."
            )
        return torch.tensor(self.weights, dtype=torch.float32, device=outputs.device)


def _values(beta: float | Callable[[Tensor], Tensor]) -> list[float]:
    """What beta is, or at what moments of a run it is looked at: every hundredth."""
    if not callable(beta):
        return [beta]
    return [float(beta(torch.tensor(percent / 100))) for percent in range(101)]


def _mean(values: Tensor, counts: Tensor | None) -> Tensor:
    """Average over the examples that count."""
    if counts is None:
        return values.mean()
    return torch.where(counts, values, 0.0).sum() / counts.sum().clamp_min(1)


def _squared_errors(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The means of `Joint._errors` for squared error and equal weights.

    A step of small networks takes as long as it has operations. Here the gradient is one operation for all members and one for
    their average; each member's own error, which is only logged, needs none.
    """
    outputs = full(outputs)
    targets = like_outputs(y, outputs)
    copies = targets.expand_as(outputs)
    own, error = F.mse_loss(outputs, copies), F.mse_loss(outputs.mean(0), targets)
    losses = F.mse_loss(outputs.detach(), copies, reduction="none").mean(tuple(range(1, outputs.ndim)))
    # Errors of several outputs add up, and these are means over outputs too.
    width = prod(outputs.shape[2:])
    return (losses, own, error) if width == 1 else (width * losses, width * own, width * error)
