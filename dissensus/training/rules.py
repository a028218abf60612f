"""Update rules of optimizers, written for one row a member."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dissensus.training.packing import computed_once
from dissensus.training.row_updates import runs_as_kernel, update_by_adam

Slots = Mapping[str, Tensor]


@dataclass(frozen=True)
class Given:
    """What a step gives a rule, for each row that it updates.

    Attributes:
        gradient: `(rows, columns)`.
        count: Number of the step, from 1, `(rows, 1)`.
        lr: Learning rate, `(rows, 1)` or `(rows, columns)`.
        decay: Decay of the values, likewise; None for none.
    """

    gradient: Tensor
    count: Tensor
    lr: Tensor
    decay: Tensor | None


@dataclass(frozen=True)
class Rule(ABC):
    """An elementwise update, the same arithmetic as torch's optimizer of that name, on `(rows, columns)`."""

    slots: ClassVar[tuple[str, ...]]

    @abstractmethod
    def update(self, values: Tensor, slots: Slots, given: Given) -> None:
        """Change values and slots, `(rows, columns)`, in place."""

    def update_rows(self, values: Tensor, slots: Slots, rows: Tensor, given: Given) -> None:
        """Change some rows of values and slots, all different, in place; what is given is for these rows."""
        new = values.index_select(0, rows)
        new_slots = {name: slot.index_select(0, rows) for name, slot in slots.items()}
        self.update(new, new_slots, given)
        values.index_copy_(0, rows, new)
        for name, slot in slots.items():
            slot.index_copy_(0, rows, new_slots[name])


@dataclass(frozen=True)
class SGD(Rule):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def update(self, values: Tensor, slots: Slots, given: Given) -> None:
        """Take one step."""
        gradient = given.gradient
        if given.decay is not None:
            gradient = gradient + given.decay.to(values.dtype) * values
        if self.momentum:
            buffer = slots["momentum"]
            fresh = gradient
            if self.dampening:
                fresh = torch.where(given.count == 1, gradient, gradient * (1 - self.dampening))
            buffer.mul_(self.momentum).add_(fresh)
            gradient = gradient + self.momentum * buffer if self.nesterov else buffer
        values.addcmul_(gradient, -given.lr.to(values.dtype))


@dataclass(frozen=True)
class Adam(Rule):
    """Adam with L2 decay added to the gradient, as `torch.optim.Adam`."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    slots: ClassVar[tuple[str, ...]] = ("first", "second")
    decoupled: ClassVar[bool] = False

    def update(self, values: Tensor, slots: Slots, given: Given) -> None:
        """Take one step."""
        kept, decay, rate, floor = self._factors(given, values.dtype)
        gradient = given.gradient if decay is None else given.gradient + decay * values
        if kept is not None:
            values.mul_(kept)
        first, second = slots["first"], slots["second"]
        first.lerp_(gradient, 1 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        scaled = first / second.sqrt().add_(floor)
        values.addcmul_(scaled, rate)

    def update_rows(self, values: Tensor, slots: Slots, rows: Tensor, given: Given) -> None:
        """Take one step on some rows, where a kernel can without a copy of them."""
        if not runs_as_kernel(values) or given.lr.shape[1] > 1:
            super().update_rows(values, slots, rows, given)
            return
        factors = self._factors(given, values.dtype)
        update_by_adam(values, slots["first"], slots["second"], [given.gradient], rows, *factors, *self.betas)

    def _factors(
        self, given: Given, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
        """Return the factor on the values, the share of them in the gradient, the rate, and what is added to the root."""
        # In float64 the corrections, close to 1, stay exact where count is large.
        lr, decay, exact = given.lr, given.decay, given.count.double()
        # torch divides the root by `spread` before it adds eps; multiplied out, that takes fewer passes over the rows.
        spread = (1 - self.betas[1] ** exact).sqrt()
        numbers = [-lr * spread / (1 - self.betas[0] ** exact), spread * self.eps]
        if decay is not None and self.decoupled:
            rate, floor, kept = _once_a_row([*numbers, 1 - lr * decay], dtype)
            return kept, None, rate, floor
        rate, floor = _once_a_row(numbers, dtype)
        return None, None if decay is None else decay.to(dtype), rate, floor


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled decay, as `torch.optim.AdamW`."""

    decoupled: ClassVar[bool] = True


def _once_a_row(numbers: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the numbers, each `(rows, 1)` or `(rows, columns)`, in the precision of the values they act on."""
    cast = [number.to(dtype) for number in numbers]
    return [computed_once(number) if number.shape[1] == 1 else number for number in cast]


RULES: Mapping[str, type[Rule]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
TORCH_RULES: Mapping[type[Optimizer], type[Rule]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}
DEFAULT_DECAY: Mapping[type[Rule], float] = {SGD: 0.0, Adam: 0.0, AdamW: 1e-2}
