"""How much of the weight of loss-guided disagreement is safe to use: a factor from 0 to 1 for every batch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

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
        """Return a scalar in [0, 1] that all weights of the batch are multiplied by."""


@dataclass(frozen=True)
class LossShare(Guard):
    r"""Never weigh an example's disagreement above a share of its own loss: $\lambda\,\alpha_n \le s\,\ell_n$.

    Where two members are right about an example and equally sure of it, cross-entropy pulls each one's logits together with a
    force near the loss $\ell_n$, and disagreement pulls them apart with a force near $\lambda\,\alpha_n$ that does not shrink by itself.
    With $s < 1$ the first stays the larger one, at any strength and however small the loss gets (for `reduction="mean"` and one
    orientation). While the mean loss is above $\sqrt{\lambda / s}$ nothing changes.

    Args:
        share: The share s.
    """

    # On heads over features of CIFAR-10, 0.5 still cost the worst member 5.6 points, 0.25 cost 0.2.
    share: float = 0.25

    def __post_init__(self) -> None:
        _check_positive("share", self.share)

    def factor(self, seen: Seen) -> Tensor:
        r"""Return $s\,\bar\ell^2 / \lambda$, at most 1."""
        return _at_most_one(self.share * seen.losses.mean().square(), seen.strength)


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
class HeldOutLoss(Guard):
    """Divide by the squared mean loss on held-out examples instead, where that is larger than on the training batch.

    Costs a forward pass of the members that train, on a held-out batch as large as the training batch.

    Args:
        x: Held-out inputs.
        y: Their class indices.
    """

    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        _check_pair(self.x, self.y)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The held-out examples."""
        return self.x, self.y

    def factor(self, seen: Seen) -> Tensor:
        """Return the squared ratio of the two mean losses, at most 1."""
        assert seen.held_out is not None
        logits, labels = seen.held_out
        held_out = ensemble_losses(logits.mean(0), labels).mean()
        return _at_most_one(seen.losses.mean().square(), held_out.square())


@dataclass(frozen=True)
class HeldOutAccuracy(Guard):
    """Turn disagreement down as members' held-out accuracy falls, and off where it is `margin` below the reference.

    A controller without memory: each step it looks at the least accurate of the members that train, on a held-out batch as
    large as the training batch (a forward pass more). So it is as noisy as the accuracy on such a batch.

    Args:
        x: Held-out inputs.
        y: Their class indices.
        reference: Accuracy that an independent member has on such data.
        margin: How far below that disagreement is off; it is at full strength at the reference and above.
    """

    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    reference: float
    margin: float = 0.02

    def __post_init__(self) -> None:
        _check_pair(self.x, self.y)
        _check_positive("margin", self.margin)
        if not 0 < self.reference <= 1:
            raise ValueError(f"`reference` is an accuracy, above 0 and at most 1; got {self.reference}.")

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The held-out examples."""
        return self.x, self.y

    def factor(self, seen: Seen) -> Tensor:
        """Return where the accuracy lies between off (0) and the reference (1)."""
        assert seen.held_out is not None
        logits, labels = seen.held_out
        accuracy = (logits.argmax(-1) == labels).to(seen.losses.dtype).mean(-1).amin()
        return ((accuracy - self.reference) / self.margin + 1).clamp(0, 1)


def _at_most_one(above: Tensor, below: Tensor) -> Tensor:
    # Not above / below clamped: both may be 0, and then nothing needs holding back.
    return torch.where(above < below, above / below, torch.ones_like(above))


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` must be positive; got {value}.")


def _check_pair(x: Tensor, y: Tensor) -> None:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            "A guard's held-out data must be two tensors of one length, inputs and class indices."
        )


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
