"""Looking at a run from outside: validation, the best moment so far, and when to stop."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dissensus.data.sources import Triple, device_of
from dissensus.members import Members
from dissensus.members.modes import evaluation_mode
from dissensus.objectives import Likelihood
from dissensus.training.watching import CollusionWatch

Validation = Iterable[Triple]


def validate(
    members: Members, batches: Validation, likelihood: Likelihood, collusion: CollusionWatch | None = None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return validation values for each member and for the ensemble."""
    place = device_of(members)
    sums: dict[str, Tensor] = {}
    total = 0.0

    def add(name: str, values: Tensor, weights: Tensor | None) -> None:
        sums[name] = (
            sums.get(name, torch.zeros(()))
            + (values if weights is None else weights * values).sum(-1).double().cpu()
        )

    with evaluation_mode(members):
        for x, y, weights in batches:
            x, y = x.to(place), y.to(place)
            weights = None if weights is None else weights.to(place).double()
            outputs, y, weights = likelihood.rows(members(x), y, weights)
            total += outputs.shape[1] if weights is None else float(weights.sum())
            add("validation_loss", likelihood.losses(outputs, y), weights)
            add("ensemble_loss", likelihood.mixture(outputs, y), weights)
            if collusion is not None:
                own, together = collusion.errors(outputs, y)
                add("validation_member_error", own, weights)
                add("validation_ensemble_error", together, weights)
                add("validation_diversity", own - together, weights)
            if likelihood.kind == "classes":
                labels = y.argmax(-1) if y.is_floating_point() else y
                add("validation_accuracy", outputs.argmax(-1) == labels, weights)
                add("ensemble_accuracy", likelihood.pooled(outputs).argmax(-1) == labels, weights)
            elif likelihood.kind == "labels":
                # The share of labels that are answered rightly.
                add("validation_accuracy", ((outputs > 0) == (y > 0.5)).double().mean(-1), weights)
                add(
                    "ensemble_accuracy",
                    ((likelihood.pooled(outputs) > 0.5) == (y > 0.5)).double().mean(-1),
                    weights,
                )
    means = {name: value / total for name, value in sums.items()}
    return (
        # Where several members are one trained network's, its value is their mean.
        {name: v.reshape(members.num_trained, -1).mean(1).tolist() for name, v in means.items() if v.ndim},
        {name: float(value) for name, value in means.items() if not value.ndim},
    )


@dataclass
class Watch:
    """The best value so far of one watched quantity, and for how many checks it has not improved."""

    name: str
    best: float | None = None
    best_step: int | None = None
    stale: int = 0

    @property
    def larger_is_better(self) -> bool:
        """Accuracies should rise, losses fall."""
        return self.name.endswith("accuracy")

    def see(self, value: float, step: int) -> bool:
        """Take a new value; return whether it is the best so far."""
        better = self.best is None or (value > self.best if self.larger_is_better else value < self.best)
        if better:
            self.best, self.best_step, self.stale = value, step, 0
        else:
            self.stale += 1
        return better
