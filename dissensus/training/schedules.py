"""Learning-rate schedules: a factor on the base rate for every step of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, isfinite, pi
from numbers import Real

import torch
from torch import Tensor

from dissensus._signatures import checked, real_number, whole_number


class Schedule(ABC):
    """A factor on the learning rate as a function of epochs passed (a real number) and epochs in all."""

    @abstractmethod
    def factor(self, epoch: float, epochs: float) -> float:
        """Return the factor at this point of the run."""


class _OfNumbers:
    """A dataclass whose numbers must be finite and not negative, and some above zero."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for number in value if isinstance(value, tuple | list) else [value] * (value is not None):
                real_number(name, number, above=name in ("every", "period"))


@dataclass(frozen=True)
class Constant(Schedule):
    """The base rate throughout."""

    def factor(self, epoch: float, epochs: float) -> float:
        """Return 1."""
        return 1.0


@checked
@dataclass(frozen=True)
class StepDecay(_OfNumbers, Schedule):
    """Multiply by `factor_each` after every `every` epochs."""

    every: float
    factor_each: float = 0.1

    def factor(self, epoch: float, epochs: float) -> float:
        """Return a power of the factor."""
        return self.factor_each ** int(epoch / self.every + 1e-9)


@checked
@dataclass(frozen=True)
class MultiStep(_OfNumbers, Schedule):
    """Multiply by `factor_each` when each of these numbers of epochs has passed."""

    milestones: tuple[float, ...]
    factor_each: float = 0.1

    def factor(self, epoch: float, epochs: float) -> float:
        """Return a power of the factor."""
        return self.factor_each ** sum(epoch + 1e-9 >= milestone for milestone in self.milestones)


@checked
@dataclass(frozen=True)
class Cosine(_OfNumbers, Schedule):
    """Fall along half a cosine to `final` times the base rate, after a linear warm-up of `warmup` epochs.

    `period` sets the length in epochs where it is not the run's.
    """

    final: float = 0.0
    warmup: float = 0.0
    period: float | None = None

    def factor(self, epoch: float, epochs: float) -> float:
        """Return the factor."""
        if epoch < self.warmup:
            return epoch / self.warmup
        length = (epochs if self.period is None else self.period) - self.warmup
        done = min((epoch - self.warmup) / length, 1.0) if length > 0 else 1.0
        return self.final + (1 - self.final) * (1 + cos(pi * done)) / 2


@checked
@dataclass(frozen=True)
class Cyclic(_OfNumbers, Schedule):
    """Fall along half a cosine to `final` times the base rate, again and again: `cycles` times in a run of any length."""

    cycles: int
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("cycles", self.cycles, 1)

    def factor(self, epoch: float, epochs: float) -> float:
        """Return the factor."""
        done = (epoch / epochs * self.cycles + 1e-9) % 1.0
        return self.final + (1 - self.final) * (1 + cos(pi * done)) / 2


@checked
@dataclass(frozen=True)
class OneCycle(_OfNumbers, Schedule):
    """Rise from `start` to the base rate over the share `rise` of the run, then fall to `final`, along cosines."""

    rise: float = 0.3
    start: float = 0.04
    final: float = 4e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        real_number("rise", self.rise, above=True, below=1.0)

    def factor(self, epoch: float, epochs: float) -> float:
        """Return the factor."""
        done = epoch / epochs
        if done < self.rise:
            return self.start + (1 - self.start) * (1 - cos(pi * done / self.rise)) / 2
        return self.final + (1 - self.final) * (1 + cos(pi * (done - self.rise) / (1 - self.rise))) / 2


@checked
@dataclass(frozen=True)
class Plateau(_OfNumbers):
    """Multiply the rate by `factor_each` when the watched value has not improved for `patience` checks."""

    factor_each: float = 0.1
    patience: int = 10
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("patience", self.patience, 1)


SCHEDULES: Mapping[str, Schedule] = {"constant": Constant(), "cosine": Cosine(), "one_cycle": OneCycle()}

AnySchedule = str | Schedule | Plateau | Callable[[float, float], float]


def factor_table(schedule: AnySchedule, epochs: int, steps_per_epoch: int) -> Tensor:
    """Return the factor of every step of the run, `(steps,)`, so that a captured step can look it up on the device."""
    if isinstance(schedule, Plateau):
        schedule = Constant()
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(
                f"`schedule` must be one of {', '.join(SCHEDULES)}, a Schedule, or a function of (epoch, epochs); got {schedule!r}."
            )
        schedule = SCHEDULES[schedule]
    factor = schedule.factor if isinstance(schedule, Schedule) else schedule
    values = [factor(step / steps_per_epoch, float(epochs)) for step in range(epochs * steps_per_epoch)]
    if not all(isinstance(value, Real | Tensor) and isfinite(value) for value in values):
        raise ValueError("`schedule` must return a finite number, a factor of the rate, for every (epoch, epochs).")
    return torch.tensor(values, dtype=torch.float64)
