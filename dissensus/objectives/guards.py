"""How much of the weight of loss-guided disagreement is safe to use: a factor from 0 to 1 for every batch or example."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from dissensus.data.features import CachedFeatures
from dissensus.data.sources import Array, all_inputs, as_tensor, check_pair
from dissensus.objectives.loss_weights import ensemble_losses


@dataclass(frozen=True)
class Seen:
    """What a guard may look at in a step; nothing of it carries a gradient.

    Attributes:
        weights: Weights of the examples before the guard, `(batch,)`.
        losses: The ensemble's loss on each example, `(batch,)`.
        strength: Strength of the disagreement, a scalar.
        held_out: Logits of the members that train, `(members, batch, classes)`, and labels, `(batch,)`, of held-out
            examples; for guards that bring such data.
    """

    weights: Tensor
    losses: Tensor
    strength: Tensor
    held_out: tuple[Tensor, Tensor] | None = None


class Guard(ABC):
    """Keeps disagreement from taking over once members fit their training data.

    The mean weight is one over the mean training loss. On ordinary data that loss goes to zero, the weight without bound
    up, and members are pulled apart on examples that they know.
    """

    @property
    def data(self) -> tuple[Tensor, Tensor] | None:
        """Held-out inputs and labels that the guard wants to see members on; None for most."""
        return None

    @abstractmethod
    def factor(self, seen: Seen) -> Tensor:
        """Return what weights are multiplied by, in [0, 1]: one number for the batch, or one for each example, `(batch,)`."""


@dataclass(frozen=True)
class LossShare(Guard):
    r"""Never weigh an example's disagreement above a share of the pull of its cross-entropy: $\lambda\,\alpha_n \le s\,(1 - p_n)$.

    $p_n = e^{-\ell_n}$ is the ensemble's probability of the true class. The gradient of cross-entropy towards its logit is $1 - p_n$:
    near the loss $\ell_n$ where that is small, and never above 1 however large the loss is. Where two members are right about an example
    and equally sure of it, cross-entropy pulls each one's logits together with that force, and disagreement (`"a2d"`) pulls them apart
    with a force of at most $\lambda\,\alpha_n$ that does not shrink by itself. With $s < 1$ the first stays the larger one, at any
    strength, number of classes and weighting, and however small the loss gets (for `reduction="mean"` and one orientation).

    Args:
        share: The share s.
    """

    # On heads over features of CIFAR-10, 0.5 still cost the worst member 5.6 points, 0.25 cost 0.2.
    share: float = 0.25

    def __post_init__(self) -> None:
        _check_positive("share", self.share)

    def factor(self, seen: Seen) -> Tensor:
        r"""Return $s\,(1 - p_n) / (\lambda\,\alpha_n)$, at most 1, for each example."""
        return _at_most_one(self.share * -torch.expm1(-seen.losses), seen.strength * seen.weights)


@dataclass(frozen=True)
class WeightCap(Guard):
    """Scale the weights of a batch down so that their mean is not above a number.

    Args:
        largest: The largest mean weight.
    """

    largest: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("largest", self.largest)

    def factor(self, seen: Seen) -> Tensor:
        """Return the cap over the mean weight, at most 1."""
        return _at_most_one(torch.full_like(seen.strength, self.largest), seen.weights.mean())


@dataclass(frozen=True)
class HeldOutGuard(Guard):
    """A guard that looks at members on held-out examples, kept as tensors.

    Args:
        x: Held-out inputs: a tensor, an array, or features of `cache_features` for heads that train on such.
        y: Their class indices; None for those that come with the features.
    """

    x: Array | CachedFeatures = field(repr=False)
    y: Array | None = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", self.x)
        inputs, labels = _held_out(self.x, self.y)
        object.__setattr__(self, "x", inputs)
        object.__setattr__(self, "y", labels)
        # Looked up now and kept: a recorded step cannot look at values.
        assert self.num_classes

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The held-out examples."""
        assert isinstance(self.x, Tensor) and isinstance(self.y, Tensor)  # noqa: PT018
        return self.x, self.y

    @cached_property
    def num_classes(self) -> int:
        """How many classes a network must have for the labels."""
        return int(self.data[1].max()) + 1

    def look(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """Return the members' held-out logits and the labels; ValueError where some labels have no output."""
        assert seen.held_out is not None
        logits, labels = seen.held_out
        if self.num_classes > logits.shape[-1]:
            raise ValueError(
                f"The held-out labels of {type(self).__name__} must lie in 0 to {logits.shape[-1] - 1}, the network's outputs; got "
                f"{self.num_classes - 1}. Renumber the classes as in the training data."
            )
        return logits, labels


@dataclass(frozen=True)
class HeldOutLoss(HeldOutGuard):
    """Divide by the squared mean loss on held-out examples instead, where that is larger than on the training batch.

    Costs a forward pass of the members that train, on a held-out batch as large as the training batch. As they alone are looked at,
    drawing members is biased, also with `weights_from="all"`.

    Args:
        x: Held-out inputs: a tensor, an array, or features of `cache_features` for heads that train on such.
        y: Their class indices; may be left out where they come with the features.
    """

    y: Array | None = field(default=None, repr=False)

    def factor(self, seen: Seen) -> Tensor:
        """Return the squared ratio of the two mean losses, at most 1."""
        logits, labels = self.look(seen)
        held_out = ensemble_losses(logits.mean(0), labels).mean()
        return _at_most_one(seen.losses.mean().square(), held_out.square())


@dataclass(frozen=True)
class HeldOutAccuracy(HeldOutGuard):
    """Turn disagreement down as members' held-out accuracy falls, and off where it is `margin` below the reference.

    A controller without memory: each step it looks at the least accurate of the members that train, on a held-out batch as
    large as the training batch (a forward pass more). So it is as noisy as the accuracy on such a batch, and drawing members is
    biased, also with `weights_from="all"`.

    Args:
        x: Held-out inputs: a tensor, an array, or features of `cache_features` for heads that train on such.
        y: Their class indices; None for those that come with the features.
        reference: Accuracy that an independent member has on such data.
        margin: How far below that disagreement is off; it is at full strength at the reference and above.
    """

    reference: float
    margin: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive("margin", self.margin)
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


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` must be positive; got {value}.")


def _held_out(x: Array | CachedFeatures, y: Array | None) -> tuple[Tensor, Tensor]:
    """Return held-out inputs and class indices as tensors; ValueError where they are none."""
    if y is None and isinstance(x, CachedFeatures):
        y = x.targets
    if y is None:
        raise ValueError(
            "A guard's held-out inputs need their class indices; got none. Give them as `y`, or cache features from data that has labels."
        )
    inputs = all_inputs(x, "x") if isinstance(x, CachedFeatures) else as_tensor(x, "x")
    labels = as_tensor(y, "y")
    check_pair(inputs, labels, "held-out")
    if labels.is_floating_point() or labels.ndim != 1:
        raise ValueError(
            "A guard's held-out labels must be one class index, a whole number, for each input; got "
            f"{labels.dtype} shaped {tuple(labels.shape)}. Pass class indices shaped ({len(inputs)},)."
        )
    labels = labels.long()
    if int(labels.min()) < 0:
        raise ValueError(
            f"A guard's held-out labels must be class indices from 0 on; got {int(labels.min())}. Renumber the classes or drop such rows."
        )
    return inputs, labels


GUARDS: Mapping[str, Guard | None] = MappingProxyType(
    {"share": LossShare(), "cap": WeightCap(), "none": None}
)
"""Guards that need no data, by the name that `LossGuided(guard=...)` takes; `"none"` is the published form."""


def guard_of(guard: "Guard | str | None") -> Guard | None:
    """Return the guard of this name, or the guard itself."""
    if guard is None or isinstance(guard, Guard):
        return guard
    if guard not in GUARDS:
        raise ValueError(
            f"`guard` must be one of {', '.join(GUARDS)}, a guard such as LossShare(0.25), or None; got {guard!r}."
        )
    return GUARDS[guard]
