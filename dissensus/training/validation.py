"""Looking at a run from outside: validation, collusion, the best moment so far, and when to stop."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dissensus.data.features import CachedFeatures
from dissensus.data.sources import Pairs, Triple, arrays_of, collate, device_of, pair_batches
from dissensus.data.trees import Batch, join_rows
from dissensus.members import Members
from dissensus.members.members import evaluation_mode
from dissensus.objectives import Likelihood, Objective
from dissensus.objectives.collusion import measure
from dissensus.objectives.losses import errors, weighted_mean
from dissensus.randomness import seeded
from dissensus.training.history import Row

# A sample large enough for two digits, and outputs of it that take no time beside an epoch.
_LARGEST_SAMPLE = 1024
_SMALLEST_SAMPLE = 64
_LARGEST_OUTPUTS = 4_000_000


@dataclass(frozen=True)
class CollusionWatch:
    """What a run is watched by: a sample of the training data on the device, and how the members' outputs for it are judged.

    The loss is the objective's for classes, labels and counts, else the squared error of predictions: where outputs are (mean, rho), of
    the means. Of dense outputs each position is an example.
    """

    x: Batch
    y: Tensor
    loss: str
    average: str
    weights: Tensor | None
    likelihood: Likelihood

    @classmethod
    def of(cls, members: Members, data: Pairs, objective: Objective, outputs: Tensor) -> "CollusionWatch":
        """Take a sample of the training data, the same in every sitting; `outputs` are the members' for a few inputs."""
        likelihood, place = objective.likelihood, device_of(members)
        if likelihood.kind == "own":
            raise ValueError(
                "watch_collusion=True judges members by a loss of classes, labels, counts or real numbers; got quantiles or a loss of your "
                "own. Leave it out."
            )
        size = _LARGEST_OUTPUTS // max(members.num_members * outputs.shape[2:].numel(), 1)
        # One map has many examples.
        least = 1 if likelihood.has_positions(outputs) else _SMALLEST_SAMPLE
        x, y = _sample(data, max(least, min(_LARGEST_SAMPLE, size)))
        y = likelihood.targets(x, y)
        if likelihood.has_positions(outputs) and not bool((y != likelihood.ignore_index).any()):
            raise ValueError(
                f"watch_collusion=True looks at {len(y)} training examples, in which no label counts. Leave it out."
            )
        return cls(
            x.to(place),
            y.to(place),
            _watched_loss(likelihood),
            likelihood.average,
            likelihood.member_weights(outputs.to(place)),
            likelihood,
        )

    def errors(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean member error and ensemble error of a batch, `(batch,)` each."""
        member, ensemble = errors(self.likelihood.mean_and_scale(outputs)[0], y, self.loss, self.average, self.weights)
        return weighted_mean(member, self.weights), ensemble

    def check(self, members: Members, history: Iterable[Row]) -> tuple[dict[str, float], str]:
        """Return what the history keeps of a look at the sample, and a warning the first time that members collude."""
        with evaluation_mode(members):
            outputs, y, counts = self.likelihood.rows(members(self.x), self.y)
        if counts is not None:
            outputs, y = outputs[:, counts > 0], y[counts > 0]
        measures = measure(self.likelihood.mean_and_scale(outputs)[0], y, self.loss, self.average, self.weights)
        signs = measures.signs(trained_on=True)
        found = {
            "train_member_error": measures.member_error,
            "train_ensemble_error": measures.ensemble_error,
            "train_diversity": measures.diversity,
            "colluding": float(bool(signs)),
        }
        if not signs or any(row.get("colluding") for row in history):
            return found, ""
        return found, (
            f"members collude on the training data ({', '.join(signs)}): their mean error is {measures.member_error:.3g}, "
            f"the ensemble's {measures.ensemble_error:.3g}. `ds.diagnose` tells more."
        )


def _watched_loss(likelihood: Likelihood) -> str:
    """Return the loss of `decompose` by which members are judged."""
    if likelihood.kind == "classes" or likelihood.name == "poisson":
        return likelihood.name
    return "sigmoid" if likelihood.kind == "labels" else "mse"


def _sample(data: Pairs, size: int) -> tuple[Batch, Tensor]:
    """Return examples spread evenly over the data; of a loader, and of features in a file, the first ones."""
    with seeded(0):
        if isinstance(data, DataLoader | CachedFeatures):
            parts: list[tuple[Batch, Tensor]] = []
            for pair in pair_batches(data, size):
                parts.append(pair)
                if sum(len(x) for x, _ in parts) >= size:
                    break
            return join_rows([x for x, _ in parts])[:size], torch.cat([y for _, y in parts])[:size]
        arrays = arrays_of(data)
        count: int = len(data if arrays is None else arrays[0])  # type: ignore[arg-type]
        rows = torch.linspace(0, count - 1, min(count, size), dtype=torch.float64).round().long()
        if arrays is not None:
            return arrays[0][rows], arrays[1][rows]
        assert isinstance(data, Dataset)
        return collate(data, rows.tolist())[:2]


Validation = Iterable[Triple]


def validate(
    members: Members, batches: Validation, likelihood: Likelihood, collusion: CollusionWatch | None = None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return validation values for each member and for the ensemble."""
    place = device_of(members)
    sums: dict[str, Tensor] = {}
    total = 0.0
    with evaluation_mode(members):
        for x, y, weights in batches:
            x = x.to(place)
            y = likelihood.targets(x, y.to(place))
            weights = None if weights is None else weights.to(place).double()
            outputs, y, weights = likelihood.rows(members(x), y, weights)
            total += outputs.shape[1] if weights is None else float(weights.sum())
            for name, values in _measured(likelihood, outputs, y, collusion).items():
                weighted = values if weights is None else weights * values
                sums[name] = sums.get(name, torch.zeros(())) + weighted.sum(-1).double().cpu()
    means = {name: value / total for name, value in sums.items()}
    return (
        # Where several members are one trained network's, its value is their mean.
        {name: v.reshape(members.num_trained, -1).mean(1).tolist() for name, v in means.items() if v.ndim},
        {name: float(value) for name, value in means.items() if not value.ndim},
    )


def _measured(
    likelihood: Likelihood, outputs: Tensor, y: Tensor, collusion: CollusionWatch | None
) -> dict[str, Tensor]:
    """Return what is measured of each example: by members `(members, batch)`, by the ensemble `(batch,)`."""
    found = {"validation_loss": likelihood.losses(outputs, y), "ensemble_loss": likelihood.mixture(outputs, y)}
    if collusion is not None:
        own, together = collusion.errors(outputs, y)
        found["validation_member_error"], found["validation_ensemble_error"] = own, together
        found["validation_diversity"] = own - together
    if likelihood.kind == "classes":
        labels = y.argmax(-1) if y.is_floating_point() else y
        found["validation_accuracy"] = outputs.argmax(-1) == labels
        found["ensemble_accuracy"] = likelihood.probabilities(outputs).argmax(-1) == labels
    elif likelihood.kind == "labels":
        # The share of labels that are answered rightly.
        found["validation_accuracy"] = ((outputs > 0) == (y > 0.5)).double().mean(-1)
        found["ensemble_accuracy"] = ((likelihood.probabilities(outputs) > 0.5) == (y > 0.5)).double().mean(-1)
    return found


@dataclass
class Watch:
    """The best value so far of one watched quantity, and for how many checks it has not improved."""

    name: str
    best: float | None = None
    best_step: int | None = None
    stale: int = 0

    def see(self, value: float, step: int) -> bool:
        """Take a new value; return whether it is the best so far."""
        rises = self.name.endswith("accuracy")  # losses fall
        better = self.best is None or (value > self.best if rises else value < self.best)
        # Nothing compares with a first value that is no number.
        better = better or (isnan(self.best or 0.0) and not isnan(value))
        if better:
            self.best, self.best_step, self.stale = value, step, 0
        else:
            self.stale += 1
        return better
