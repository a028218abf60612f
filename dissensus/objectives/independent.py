"""Members that know nothing of each other: the deep ensemble, and a penalty on each one's weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from dissensus.members import View
from dissensus.objectives.likelihoods import (
    IGNORED,
    Likelihood,
    check_class_weights,
    class_weighted,
    likelihood_of,
    smooth_labels,
)
from dissensus.objectives.objective import Batches, OutputObjective, Parts, Step, Wrapper


@dataclass(frozen=True)
class Independent(OutputObjective):
    r"""Train every member on its own.

    $$\sum_m \frac1B \sum_b \ell(f_m(x_{mb}), y_{mb})$$

    Args:
        loss: `"cross_entropy"`, `"brier"` (outputs are logits), `"mse"`, `"mae"`, `"gaussian_nll"` or `"laplace_nll"`
            (the last two want a head that gives mean and rho on its last axis), `"poisson"` (log-rates), `"pinball"` (quantiles,
            see `Pinball`), `"binary_cross_entropy"` (several labels, yes or no each); or your own, a function of (output, target)
            that returns one value for each example, `(batch,)`. Losses of several targets are summed.
        label_smoothing: Share of each target given to the uniform distribution (classification).
        over_classes: Divide by the number of classes, as a mean over batch *and* classes does. This only rescales the loss
            against other terms; it is here to reproduce experiments that did so.
        class_weights: Weight of each class, as in torch's `cross_entropy`: examples count by that of their label.
        class_axis: Where classes are in outputs with positions, such as 2 of `(members, batch, classes, height, width)`; by default
            the axis whose removal leaves the targets' shape.
        ignore_index: Class index of positions that do not count.

    Example:
        >>> Independent("gaussian_nll").likelihood.kind
        'density'
    """

    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy"
    label_smoothing: float = 0.0
    over_classes: bool = False
    class_weights: tuple[float, ...] | None = None
    class_axis: int | None = None
    ignore_index: int = IGNORED

    batches: ClassVar[Batches] = "own"
    couples: ClassVar[bool] = False
    needs = "nothing"

    def __post_init__(self) -> None:
        kind = likelihood_of(self.loss).kind
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"`label_smoothing` must be in [0, 1); got {self.label_smoothing}.")
        check_class_weights(self.class_weights, likelihood_of(self.loss))
        if kind == "labels" and not self.over_classes:
            return
        if kind != "classes" and (self.label_smoothing or self.over_classes):
            raise ValueError(
                f"`label_smoothing` and `over_classes` are for class labels; the loss is {self.loss!r}."
            )

    @property
    def likelihood(self) -> Likelihood:
        """What outputs mean."""
        return replace(likelihood_of(self.loss), class_axis=self.class_axis, ignore_index=self.ignore_index)

    def on_outputs(self, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the sum of the members' mean losses, and each one's."""
        likelihood = self.likelihood
        outputs, y, weights = likelihood.rows(outputs, y, step.weights, own=step.own)
        if likelihood.kind == "labels":
            targets = y * (1.0 - self.label_smoothing) + 0.5 * self.label_smoothing
        else:
            targets = smooth_labels(y, outputs.shape[-1], self.label_smoothing)
        weights = class_weighted(self.class_weights, outputs, y, weights)
        losses = step.mean(likelihood.losses(outputs, targets, own=step.own), weights)
        if self.over_classes:
            losses = losses / outputs.shape[-1]
        return losses.sum(), {"loss": losses.detach()}


@dataclass(frozen=True)
class NormPenalty(Wrapper):
    r"""Add the norm of each member's parameters, not squared: $w\,\lVert\theta_m\rVert_2$.

    Weight decay in optimizers acts on the squared norm; this form pulls with constant force whatever the size.
    """

    weight: float

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the inner loss plus the weighted norms."""
        loss, parts = self.inner(members, x, y, step)
        norms = members.parameter_norms()
        return loss + self.weight * norms.sum(), {**parts, "norm": norms.detach()}
