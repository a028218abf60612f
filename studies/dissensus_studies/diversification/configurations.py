"""`diversification` with `setting="imagenet"`: the four public configurations, two baselines, and the document's numbers for them.

The public code weighs both terms by one half and averages over the two members drawn, where `LossGuided` multiplies that average by
the number of all members. AdamW's steps do not depend on that; for SGD the learning rate is divided, and the decay of weights
multiplied, by twice the number of members.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import cos, pi
from pathlib import Path
from typing import Any

from dissensus.objectives import Independent, LossGuided, Objective
from dissensus_studies.harness.imagenet import SGD


@dataclass(frozen=True)
class Configuration:
    """One row of the experiment.

    Attributes:
        name: Of the arm.
        num_members: Heads.
        strength: Of the disagreement; None for independent training.
        label_smoothing: In the cross-entropy.
        training: Arguments of `fit`.
    """

    name: str
    num_members: int = 5
    strength: float | None = None
    label_smoothing: float = 0.0
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def published(self) -> Mapping[str, float]:
        """The document's numbers in per cent: accuracies, also of averaged weights (soup) and the best member (oracle); AUROCs; #unique."""
        return PUBLISHED.get(self.name, {})

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


_HERE = Path(__file__).parent
PUBLISHED: Mapping[str, Mapping[str, float]] = json.loads((_HERE / "published.json").read_text("utf-8"))
# One half times the average, of the public code, to fifty times the average.
_SCALE_50 = 100
ACCURACY = ("Val", "A", "R", "C-1", "C-5")
CONFIGURATIONS: Sequence[Configuration] = (
    Configuration("ldr semantic", 5, 0.5, training=_adamw(1e-4, 0.01, 256)),
    Configuration("ldr covariate", 5, 5.0, label_smoothing=0.5, training=_adamw(1e-3, 0.1, 32)),
    Configuration("ldr generalisation", 5, 0.0, label_smoothing=0.5, training=_adamw(1e-3, 0.1, 32)),
    Configuration(
        "ldr 50 members",
        50,
        0.0,
        training={**SGD, "lr": 1e-3 / _SCALE_50, "weight_decay": 1e-4 * _SCALE_50, "batch_size": 16},
    ),
    Configuration("deep ensemble", training=_adamw(1e-4, 0.01, 256)),
    Configuration("one model", 1, training=_adamw(1e-4, 0.01, 256)),
)
