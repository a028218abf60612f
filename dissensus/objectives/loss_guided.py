"""Members that are made to disagree on training examples that the ensemble finds hard, and guards on how much of it is safe."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from dissensus._checks import check_logits_shape
from dissensus._signatures import checked, real_number
from dissensus.data.features import CachedFeatures
from dissensus.data.sources import Array, all_inputs, check_pair
from dissensus.data.trees import as_tensor
from dissensus.members import View
from dissensus.objectives.disagreement import DrawsMembers, Orientation, PairTerm, divdis
from dissensus.objectives.likelihoods import LIKELIHOODS, full
from dissensus.objectives.losses import class_labels
from dissensus.objectives.objective import OutputObjective, Parts, Step, as_rows, mean_over, one_answer
from dissensus.types import Labels, MemberLogits, Scores

Weighting: TypeAlias = Literal["loss", "inverse_probability"]


@checked
def loss_guided_weights(logits: MemberLogits, labels: Labels) -> Scores:
    r"""Weight of each example in loss-guided disagreement: its loss over the squared mean loss of the batch.

    $$\alpha_n = \frac{\ell_n}{\big(\frac1B\sum_b \ell_b\big)^2},\qquad
      \ell_n = -\log \mathrm{softmax}\Big(\frac1M \sum_m f^m(x_n)\Big)_{y_n}$$

    Args:
        logits: Member logits, `(members, batch, classes)`; they are averaged.
        labels: True class indices, `(batch,)`.

    Returns:
        `(batch,)`, without gradient. Reading: their mean is one over the mean loss, without bound once the ensemble fits its training data.

    Example:
        >>> weights = loss_guided_weights(torch.zeros(3, 4, 10), torch.arange(4))
        >>> [round(weight, 4) for weight in weights.tolist()]  # every loss is log 10
        [0.4343, 0.4343, 0.4343, 0.4343]
    """
    check_logits_shape(logits)
    return weights_from_losses(ensemble_losses(logits.mean(0), class_labels(labels, logits)))


def ensemble_losses(mean_logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits averaged over members, `(batch, classes)` to `(batch,)`, without gradient."""
    return LIKELIHOODS["cross_entropy"].per_example(full(mean_logits.detach()), targets)


def weights_from_losses(losses: Tensor, weighting: Weighting = "loss", examples: Tensor | None = None) -> Tensor:
    """Return weights with mean one over the mean loss: in proportion to the loss, or to one over the true class's probability.

    Means are by weights of the `examples`, where there are any.
    """
    mean = mean_over(losses, examples)
    if weighting == "loss":
        share = losses / mean
    elif examples is None:
        share = losses.softmax(-1) * len(losses)
    else:
        # What counts nothing may have the largest loss.
        inverse = (losses - losses.where(examples > 0, -torch.inf).amax()).clamp_max(0).exp()
        share = inverse / mean_over(inverse, examples)
    # Not the loss over the squared mean: the square of a small mean underflows.
    return torch.where(mean > 0, share / mean, 0.0)


@dataclass(frozen=True)
class Seen:
    """What a guard may look at in a step; nothing of it carries a gradient.

    Attributes:
        weights: Weights of the examples before the guard, `(batch,)`.
        losses: The ensemble's loss on each example, `(batch,)`.
        strength: Strength of the disagreement, a scalar.
        held_out: For guards that bring such data: logits of the members that train, `(members, batch, classes)`, and labels, `(batch,)`.
        examples: How much each example counts in means, `(batch,)`; None where all count the same.
    """

    weights: Tensor
    losses: Tensor
    strength: Tensor
    held_out: tuple[Tensor, Tensor] | None = None
    examples: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of values of the examples, `(batch,)`."""
        return mean_over(values, self.examples)


class Guard(ABC):
    """Keeps disagreement from taking over once members fit their training data and the mean weight, one over their loss, goes up."""

    @property
    def data(self) -> tuple[Any, Any] | None:
        """Held-out inputs and labels that the guard wants to see members on; None for most."""
        return None

    @abstractmethod
    def factor(self, seen: Seen) -> Tensor:
        """Return what weights are multiplied by, in [0, 1]: one number for the batch, or one for each example, `(batch,)`."""


@checked
@dataclass(frozen=True)
class LossShare(Guard):
    r"""Never weigh an example's disagreement above a share of the pull of its cross-entropy: $\lambda\,\alpha_n \le s\,(1 - p_n)$.

    $p_n = e^{-\ell_n}$ is the ensemble's probability of the true class, and $1 - p_n$ the force with which cross-entropy pulls two members
    together; `"a2d"` pulls them apart with at most $\lambda\,\alpha_n$, the smaller one for $s < 1$, however small the loss gets.

    Args:
        share: The share s.
    """

    # On heads over features of CIFAR-10, 0.5 still cost the worst member 5.6 points, 0.25 cost 0.2.
    share: float = 0.25

    def __post_init__(self) -> None:
        real_number("share", self.share, above=True)

    def factor(self, seen: Seen) -> Tensor:
        r"""Return $s\,(1 - p_n) / (\lambda\,\alpha_n)$, at most 1, for each example."""
        return _at_most_one(self.share * -torch.expm1(-seen.losses), seen.strength * seen.weights)


@checked
@dataclass(frozen=True)
class WeightCap(Guard):
    """Scale the weights of a batch down so that their mean is not above a number.

    Args:
        largest: The largest mean weight.
    """

    largest: float = 1.0

    def __post_init__(self) -> None:
        real_number("largest", self.largest, above=True)

    def factor(self, seen: Seen) -> Tensor:
        """Return the cap over the mean weight, at most 1."""
        return _at_most_one(torch.full_like(seen.strength, self.largest), seen.mean(seen.weights))


@dataclass(frozen=True)
class HeldOutGuard(Guard):
    """A guard that looks at members on held-out examples, kept as tensors; see `HeldOutLoss`."""

    x: Array | CachedFeatures = field(repr=False)
    y: Array | None = field(repr=False)

    def __post_init__(self) -> None:
        inputs, y = self.x, self.y
        if isinstance(inputs, CachedFeatures):
            inputs, y = all_inputs(inputs, "x"), inputs.targets if y is None else y
        if y is None:
            raise ValueError("A guard's held-out inputs need their class indices, as `y` or in the features.")
        inputs, labels = as_tensor(inputs, "x"), as_tensor(y, "y")
        check_pair(inputs, labels, "held-out")
        if labels.is_floating_point() or labels.ndim != 1 or int(labels.min()) < 0:
            came = f"{labels.dtype} shaped {tuple(labels.shape)}, the least {labels.min():g}"
            raise ValueError(f"Held-out labels must be whole numbers from 0 on, one for each input; got {came}.")
        # The number of classes is looked up now and kept: a recorded step cannot look at values.
        self.__dict__.update(given=self.x, x=inputs, y=labels.long(), num_classes=int(labels.max()) + 1)

    @property
    def data(self) -> tuple[Any, Any]:
        """The held-out inputs, as they came, and labels."""
        return self.__dict__["given"], self.y

    def look(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """Return the members' held-out logits and the labels; ValueError where some labels have no output."""
        assert seen.held_out is not None
        logits, labels = seen.held_out
        if (wanted := self.__dict__["num_classes"]) > logits.shape[-1]:
            within = f"0 to {logits.shape[-1] - 1}, the network's outputs"
            raise ValueError(f"The held-out labels of {type(self).__name__} must lie in {within}; got {wanted - 1}.")
        return logits, labels


@checked
@dataclass(frozen=True)
class HeldOutLoss(HeldOutGuard):
    """Divide by the squared mean loss on held-out examples instead, where that is larger than on the training batch.

    Costs a forward pass of the members that train on a held-out batch; drawing members is then biased, also with `weights_from="all"`.

    Args:
        x: Held-out inputs: a tensor, an array, or features of `cache_features` for heads that train on such.
        y: Their class indices; None for those that come with the features.
    """

    y: Array | None = field(default=None, repr=False)

    def factor(self, seen: Seen) -> Tensor:
        """Return the squared ratio of the two mean losses, at most 1."""
        logits, labels = self.look(seen)
        held_out = ensemble_losses(logits.mean(0), labels).mean()
        return _at_most_one(seen.mean(seen.losses).square(), held_out.square())


@checked
@dataclass(frozen=True)
class HeldOutAccuracy(HeldOutGuard):
    """Turn disagreement down as the least accurate member's held-out accuracy falls, and off where it is `margin` below the reference.

    It looks at one held-out batch a step and is as noisy as that. Cost and bias are those of `HeldOutLoss`.

    Args:
        x: Held-out inputs, as for `HeldOutLoss`.
        y: Their class indices; None for those that come with the features.
        reference: Accuracy that an independent member has on such data.
        margin: How far below that disagreement is off; it is at full strength at the reference and above.
    """

    reference: float
    margin: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        real_number("margin", self.margin, above=True)
        if not 0 < self.reference <= 1:
            raise ValueError(f"`reference` is an accuracy, above 0 and at most 1; got {self.reference}.")

    def factor(self, seen: Seen) -> Tensor:
        """Return where the accuracy lies between off (0) and the reference (1)."""
        logits, labels = self.look(seen)
        accuracy = (logits.argmax(-1) == labels).to(seen.losses.dtype).mean(-1).amin()
        return ((accuracy - self.reference) / self.margin + 1).clamp(0, 1)


def _at_most_one(above: Tensor, below: Tensor) -> Tensor:
    # Not above / below clamped: both may be 0, and then nothing needs holding back.
    return torch.where(above < below, above / below, torch.ones_like(above))


GUARDS: Mapping[str, Guard | None] = MappingProxyType({"share": LossShare(), "cap": WeightCap(), "none": None})
"""Guards that need no data, by the name that `LossGuided(guard=...)` takes; `"none"` is the published form."""


@checked
@dataclass(frozen=True)
class LossGuided(DrawsMembers, OutputObjective):
    r"""Train members to fit the data and to disagree on those examples that the ensemble gets wrong.

    $$M\left[\frac1A \sum_{m \in I} \mathrm{CE}_m + \frac{\lambda}{B}\sum_n \alpha_n \frac{1}{|P|} \sum_{(m, l) \in P}
      G\big(p^m(x_n), p^l(x_n)\big)\right]$$

    with I the A of M members drawn for the step, P their pairs, G a pair term and $\alpha_n$ the weights of `loss_guided_weights`,
    which carry no gradient. Only the drawn members are run and changed; of members that share parameters the mean over those is trained.

    A drawn member's gradient is M/A times that of the member alone, in A/M of the steps: for SGD divide the learning rate by M/A, and
    train longer. Look at each member's own accuracy: at large strength members become useless while the ensemble still looks fine.

    Args:
        strength: $\lambda$; or a function of the run's progress (a tensor from 0 towards 1) and of nothing else that gives it: a recorded
            step asks it once. One that reads the progress in Python (`if t > 0.5`) runs eagerly.
        active: Members drawn for a step, without replacement; None, or as many as there are, for all.
        regulariser: A name of `PAIR_TERMS`, `"divdis"` (weighted by $\alpha$ over the batch, times the mean weight), or a function of two
            members' log-probabilities.
        weights_from: Whose average prediction decides the weights: the `"active"` members', or that of `"all"`, run forward.
        reduction: `"mean"` over pairs, or `"document"`: the published formula, whose constant makes it half of that.
        weighting: In proportion to the `"loss"`, or to the `"inverse_probability"` of the true class, with the same mean.
        orientation: Which member of a pair names the class (or comes first in another term): the `"first"` by number, the `"second"`,
            or `"both"`, summed.
        label_smoothing: Share of each target given to the uniform distribution in the cross-entropy; weights use the label itself.
        guard: Keeps disagreement from taking over once the training loss is small: a guard, or a name of `GUARDS`.
        class_weights: Weight of each class in the cross-entropy: examples count by that of their label.

    Example:
        >>> import dissensus as ds
        >>> ens = ds.DeepEnsemble(lambda: torch.nn.Linear(2, 3), num_members=10)
        >>> data = torch.randn(64, 2), torch.randint(0, 3, (64,))
        >>> run = ds.fit(ens, data, objective=LossGuided(0.5), epochs=2, device="cpu")
        >>> run.history.columns[3:6]
        ['loss', 'pair_term', 'weight']
    """

    strength: float | Callable[[Tensor], Tensor | float] = 0.5
    active: int | None = 2
    regulariser: str | PairTerm = "a2d"
    weights_from: Literal["active", "all"] = "active"
    reduction: Literal["mean", "document"] = "mean"
    weighting: Weighting = "loss"
    orientation: Orientation = "first"
    label_smoothing: float = 0.0
    guard: Guard | str | None = "share"
    class_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.guard, str) and self.guard not in GUARDS:
            raise ValueError(f"`guard` must be a guard, None or one of {', '.join(GUARDS)}; got {self.guard!r}.")

    @property
    def _guard(self) -> Guard | None:
        return GUARDS[self.guard] if isinstance(self.guard, str) else self.guard

    @property
    def outputs_only(self) -> bool:
        """Whether outputs on the batch are enough; a guard may want to see held-out examples too."""
        return self._guard is None or self._guard.data is None

    def stream_data(self) -> Mapping[str, Any]:
        """Return the guard's held-out data."""
        data = None if self._guard is None else self._guard.data
        return {} if data is None else {"held_out.x": data[0], "held_out.y": data[1]}

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Run the drawn members, and what else the weights depend on."""
        outputs = members(x)
        total = outputs.detach().sum(0)
        count = len(outputs)
        if self.weights_from == "all" and members.rows is not None:
            others = members.whole.pick(_others(members.rows, members.whole.num_members))
            with torch.no_grad(), others.perturbed():
                total = total + others(x).sum(0)
            count += others.num_members
        held_out = None
        if not self.outputs_only:
            with members.evaluating():
                held_out = one_answer(self, members(step.inputs("held_out.x", x))), step.streams["held_out.y"]
        return self._judge(members, outputs, y, step, total / count, held_out)

    def on_outputs(self, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the loss of outputs of members that own their parameters, where nothing else needs to be run."""
        return self.on_outputs_of(None, outputs, y, step)

    def on_outputs_of(self, members: View | None, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the loss of these members' outputs, where nothing else needs to be run."""
        if not self.outputs_only or (self.weights_from == "all" and len(outputs) < len(step.member_keys)):
            raise ValueError("This guard, or weights_from='all', runs members: use LossGuided by itself.")
        return self._judge(members, outputs, y, step, outputs.detach().mean(0))

    def _judge(
        self, members: View | None, outputs: Tensor, y: Tensor, step: Step, mean_logits: Tensor, held_out: Any = None
    ) -> tuple[Tensor, Parts]:
        scale, outputs = self.scale(step, outputs, members), full(outputs)
        losses = self.member_losses(outputs, y, step)
        strength = self._strength(step, losses)
        mean_logits = self.likelihood.rows(mean_logits[None], y)[0][0]
        outputs, y, step = as_rows(self.likelihood, None, outputs, y, step)
        with torch.no_grad():
            hardness = ensemble_losses(mean_logits, y)
            weights = weights_from_losses(hardness, self.weighting, step.weights)
            if self._guard is not None:
                weights = weights * self._guard.factor(Seen(weights, hardness, strength, held_out, step.weights))
        weighted, value = self._regulariser(outputs, weights, step)
        loss = losses.mean() + strength * weighted
        parts = {"loss": losses.detach(), "pair_term": value.detach(), "weight": step.mean(weights)}
        return scale * len(outputs) * loss, parts

    def _strength(self, step: Step, like: Tensor) -> Tensor:
        strength = self.strength(step.progress) if callable(self.strength) else self.strength
        if isinstance(strength, Tensor) and strength.numel() == 1:
            return strength.reshape(()).to(like)
        return torch.full((), real_number("strength", strength), dtype=like.dtype, device=like.device)

    def _regulariser(self, logits: Tensor, weights: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Return the weighted term, and the unweighted one for the log."""
        half = 0.5 if self.reduction == "document" else 1.0
        if self.regulariser == "divdis":
            counted = weights if step.weights is None else weights * step.weights
            value = divdis(logits.softmax(-1), weights=counted)
            return half * step.mean(weights) * value, value
        values = self.mean_over_pairs(logits)
        return half * step.mean(weights * values), step.mean(values)


def _others(rows: Tensor, num_members: int) -> Tensor:
    """Return the members that are not among the rows; their number is known beforehand."""
    drawn = torch.zeros(num_members, dtype=torch.int64, device=rows.device).index_fill(0, rows, 1)
    return drawn.argsort(stable=True)[: num_members - len(rows)]
