"""`diversification` with `setting="imagenet"`: the four public configurations, two baselines, and the document's numbers for them.

The public code weighs both terms by one half and averages over the two members drawn, where `LossGuided` multiplies that average by
the number of all members. AdamW's steps do not depend on that; for SGD the learning rate is divided, and the decay of weights
multiplied, by twice the number of members.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import cos, pi
from typing import Any

from dissensus.objectives import Independent, LossGuided, Objective


@dataclass(frozen=True)
class Configuration:
    """One row of the experiment.

    Attributes:
        name: Of the arm.
        num_members: Heads.
        strength: Of the disagreement; None for independent training.
        label_smoothing: In the cross-entropy.
        training: Arguments of `fit`.
        published: The document's numbers in per cent: accuracies "Val", "A", ..., of averaged weights "soup Val", ..., of the best member
            "oracle Val", ..., and AUROCs "BMA C-1", "PDS C-1", ...; and numbers of different answers, "#unique Val", ...
    """

    name: str
    num_members: int = 5
    strength: float | None = None
    label_smoothing: float = 0.0
    training: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)

    @property
    def objective(self) -> Objective:
        """What it minimises: the published form, pairs drawn."""
        if self.strength is None:
            return Independent(label_smoothing=self.label_smoothing)
        return LossGuided(self.strength, active=2, label_smoothing=self.label_smoothing, guard=None)


def released_cosine(epoch: float, epochs: int) -> float:
    """Return the factor on the learning rate of a cosine that would end after 15 epochs for every 10 of the run."""
    return (1 + cos(pi * epoch / (1.5 * epochs))) / 2


def _adamw(lr: float, weight_decay: float, batch_size: int) -> dict[str, Any]:
    return {
        "optimizer": "adamw",
        "lr": lr,
        "weight_decay": weight_decay,
        "batch_size": batch_size,
        "schedule": released_cosine,
    }


def _percent(names: str, *values: float) -> dict[str, float]:
    return dict(zip(names.split(","), values, strict=True))


def _accuracies(way: str, *values: float) -> dict[str, float]:
    """Name accuracies on the five sets by the way in which one answer is made."""
    return {f"{way} {name}": value for name, value in _percent(ACCURACY, *values).items()}


# One half times the average, of the public code, to fifty times the average.
_SCALE_50 = 100
_DETECTION = "BMA C-1,BMA C-5,BMA iNat,BMA OI,PDS C-1,PDS C-5,PDS iNat,PDS OI"
ACCURACY = "Val,A,R,C-1,C-5"
CONFIGURATIONS: Sequence[Configuration] = (
    Configuration(
        "ldr semantic",
        strength=0.5,
        training=_adamw(1e-4, 0.01, 256),
        published=_percent("PDS iNat,PDS OI", 97.7, 94.1)
        | _percent(
            "#unique Val,#unique C-1,#unique C-5,#unique iNat,#unique OI", 1.36, 1.82, 3.53, 4.68, 4.11
        ),
    ),
    Configuration(
        "ldr covariate",
        strength=5.0,
        label_smoothing=0.5,
        training=_adamw(1e-3, 0.1, 32),
        published=_percent("PDS C-1,PDS C-5", 68.1, 89.4),
    ),
    Configuration(
        "ldr generalisation",
        strength=0.0,
        label_smoothing=0.5,
        training=_adamw(1e-3, 0.1, 32),
        published=_percent(ACCURACY, 85.3, 43.0, 48.7, 77.3, 40.7)
        | _accuracies("soup", 85.3, 40.3, 46.1, 77.3, 40.6)
        | _accuracies("oracle", 85.1, 38.3, 45.3, 77.2, 40.4),
    ),
    Configuration(
        "ldr 50 members",
        50,
        strength=0.0,
        training={
            "optimizer": "sgd",
            "optimizer_options": {"momentum": 0.9},
            "lr": 1e-3 / _SCALE_50,
            "weight_decay": 1e-4 * _SCALE_50,
            "batch_size": 16,
        },
        published=_percent(ACCURACY, 83.6, 50.6, 53.8, 75.8, 39.3)
        | _accuracies("soup", 83.5, 39.2, 46.5, 75.8, 39.3)
        | _accuracies("oracle", 82.6, 39.0, 45.8, 74.4, 38.3),
    ),
    Configuration(
        "deep ensemble",
        training=_adamw(1e-4, 0.01, 256),
        published=_percent(ACCURACY, 85.4, 39.9, 46.3, 75.7, 38.6)
        | _accuracies("soup", 85.3, 36.7, 44.6, 75.5, 38.3)
        | _accuracies("oracle", 85.4, 37.9, 44.9, 75.7, 38.6)
        | _percent("#unique Val,#unique C-1,#unique iNat,#unique OI", 1.05, 1.09, 1.31, 1.23)
        | _percent(_DETECTION, 61.9, 83.5, 95.8, 91.1, 56.5, 62.5, 59.2, 58.9),
    ),
    Configuration(
        "one model",
        1,
        training=_adamw(1e-4, 0.01, 256),
        published=_percent(ACCURACY, 85.4, 37.9, 44.7, 75.6, 38.5)
        | _percent("BMA C-1,BMA C-5,BMA iNat,BMA OI", 61.5, 83.3, 95.8, 90.9),
    ),
)
