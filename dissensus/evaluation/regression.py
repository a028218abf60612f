"""Member means (and scales) of a batch -> columns, one value per input; columns of a whole set -> numbers and curves."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import log, pi, sqrt
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from dissensus._beliefs import deviations, member_mean
from dissensus.evaluation.classification import Columns, checked_names
from dissensus.evaluation.estimates import Means, Statistic, member_means, metric_means, score_means
from dissensus.evaluation.results import COVERAGE_LEVELS, Kind, Number, Reliability
from dissensus.objectives.likelihoods import (
    LIKELIHOODS,
    Likelihood,
    as_columns,
    full,
    gaussian_losses,
    laplace_losses,
    mean_and_scale,
)
from dissensus.scores import REGRESSION_SCORES

Elementwise = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Family:
    """A location-scale family of distributions.

    Attributes:
        name: As in `ds.mixture`.
        variance: Variance at scale one.
        nll: Negative log-likelihood of (mean, scale, target), element by element.
        crps: Continuous ranked probability score of the same.
        half_width: Half the width of the central interval of this probability, at scale one.
    """

    name: str
    variance: float
    nll: Elementwise
    crps: Elementwise
    half_width: Callable[[float], float]


def _gaussian_crps(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    z = (target - mean) / scale
    density = torch.exp(-z.square() / 2) / sqrt(2 * pi)
    return scale * (z * torch.erf(z / sqrt(2)) + 2 * density - 1 / sqrt(pi))


def _laplace_crps(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    distance = ((target - mean) / scale).abs()
    return scale * (distance + torch.exp(-distance) - 0.75)


def _gaussian_half_width(level: float) -> float:
    return sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gaussian_nll": Family("gaussian", 1.0, gaussian_losses, _gaussian_crps, _gaussian_half_width),
        "laplace_nll": Family("laplace", 2.0, laplace_losses, _laplace_crps, lambda level: -log(1 - level)),
    }
)


@dataclass(frozen=True)
class Regression:
    """How outputs of a regression ensemble are read.

    Attributes:
        score_names: The variances to compute.
        weights: Member weights, or None.
        loss: "gaussian_nll" or "laplace_nll" for likelihood heads, "mse" or "mae" for point predictions, "poisson" for logs of rates.
        task: "density" or "points".
    """

    score_names: tuple[str, ...]
    weights: Tensor | None
    loss: str
    task: Literal["density", "points"]

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs of the wrong shape."""
        _check_three_axes(outputs)
        if self.task == "density" and outputs.shape[-1] % 2:
            raise ValueError(
                f"With loss={self.loss!r} members have twice as many outputs as targets, a mean and a scale each; got "
                f"{outputs.shape[-1]} outputs. Add the scales, or choose loss='mse'."
            )

    def num_outputs(self, outputs: Tensor) -> int:
        """Return the number of targets."""
        return outputs.shape[-1] // 2 if self.task == "density" else outputs.shape[-1]

    def check_targets(self, targets: Tensor, outputs: Tensor, name: str, start: int) -> None:
        """Refuse targets that do not fit the outputs, or are not finite."""
        wanted, got = self.num_outputs(outputs), tuple(as_columns(targets).shape[1:])
        if got != (wanted,):
            raise ValueError(
                f"Targets of set {name!r} must be shaped (inputs, {wanted}), as the outputs say; got "
                f"{tuple(targets.shape)} in a batch."
            )
        _check_finite(as_columns(targets).isfinite().all(1), name, start)
        if self.loss == "poisson" and bool((targets < 0).any()):
            raise ValueError(f"Targets of set {name!r} are counts, 0 or more; got {float(targets.min()):g}.")

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        """Return all that numbers need of a batch; the last axis of each column is the batch."""
        outputs = full(outputs)
        weights = None if self.weights is None else self.weights.to(outputs)
        mean, scale, spread = self._moments(outputs)
        centre = member_mean(mean, weights)
        knowledge = member_mean(deviations(mean, weights).square(), weights)
        data = member_mean(spread, weights)
        variances = {"total_variance": data + knowledge, "data_variance": data, "knowledge_variance": knowledge}
        columns = {
            "scores": torch.stack([variances[name].mean(-1) for name in self.score_names]),
            "predicted": centre[:, 0],
        }
        if targets is not None:
            truth = as_columns(targets).to(centre)
            columns |= {
                "truth": truth[:, 0],
                "mse": (centre - truth).square().mean(-1),
                "mae": (centre - truth).abs().mean(-1),
                "member_mse": (mean - truth).square().mean(-1),
            }
            if self.loss == "poisson":
                columns["mixture_nll"] = _mixture(LIKELIHOODS[self.loss].per_example(outputs, truth), weights)
            if self.task == "density":
                deviation = (data + knowledge).sqrt()
                columns |= self._density_columns(mean, scale, centre, deviation, truth, weights)
        return columns

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, scales and variances of what members predict; points have neither, counts are as spread as they are large."""
        if self.task == "density":
            mean, scale = mean_and_scale(outputs)
            return mean, scale, scale.square() * FAMILIES[self.loss].variance
        if self.loss == "poisson":
            rates = outputs.exp()
            return rates, rates.sqrt(), rates
        nothing = torch.zeros_like(outputs)
        return outputs, nothing, nothing

    def _density_columns(
        self, mean: Tensor, scale: Tensor, centre: Tensor, deviation: Tensor, truth: Tensor, weights: Tensor | None
    ) -> Columns:
        family = FAMILIES[self.loss]
        pooled = deviation / sqrt(family.variance)
        distance = (truth - centre).abs() / pooled
        levels = torch.tensor([family.half_width(level) for level in COVERAGE_LEVELS])
        inside = distance <= levels.to(distance)[:, None, None]
        return {
            # Nats of an example: those of its targets together, as the mixture has them.
            "nll": family.nll(centre, pooled, truth).sum(-1),
            "crps": family.crps(centre, pooled, truth).mean(-1),
            "mixture_nll": _mixture(family.nll(mean, scale, truth).sum(-1), weights),
            "inside": inside.to(mean.dtype).mean(-1),
            "scale": pooled.mean(-1),
        }

    def for_diagnosis(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, str]:
        """Return outputs, targets and a loss by which members are diagnosed."""
        if self.loss == "poisson":
            return outputs, targets.reshape(outputs.shape[1:]).to(outputs), "poisson"
        means = mean_and_scale(outputs)[0] if self.task == "density" else outputs
        return means, targets.reshape(means.shape[1:]), "mse"

    def statistics(self, kind: Kind, name: str, columns: Columns) -> list[Statistic]:
        """Return the numbers of one set that need no other."""
        scores = score_means(kind, name, self.score_names, columns["scores"])
        if kind == "ood":
            return [scores]
        rmse = Means.of([Number("rmse", name, kind, 0.0)], columns["mse"][None], root=True)
        members = member_means(kind, name, "rmse", columns["member_mse"], root=True)
        return [metric_means(kind, name, self._averaged(columns)), rmse, members, scores]

    def _averaged(self, columns: Columns) -> dict[str, Tensor]:
        values = {"mae": columns["mae"]}
        if self.loss == "poisson":
            values["mixture_nll"] = columns["mixture_nll"]
        if self.task == "density":
            family = FAMILIES[self.loss]
            place = COVERAGE_LEVELS.index(0.9)
            values |= {
                f"{family.name}_nll": columns["nll"],
                "mixture_nll": columns["mixture_nll"],
                f"{family.name}_crps": columns["crps"],
                "coverage_90": columns["inside"][place],
                "width_90": 2 * family.half_width(0.9) * columns["scale"],
            }
        return values

    def reliability(self, name: str, columns: Columns) -> Reliability | None:
        """Return the share of targets inside central intervals of a labelled set; None without densities."""
        if self.task == "points":
            return None
        inside = tuple(columns["inside"].double().mean(-1).tolist())
        return Reliability(name, COVERAGE_LEVELS, inside, (1.0,) * len(inside), COVERAGE_LEVELS, COVERAGE_LEVELS)


@dataclass(frozen=True)
class OwnLoss:
    """How outputs of a loss of one's own are read: what it says of the members' mean output, and how far members are apart.

    Attributes:
        score_names: `knowledge_variance` alone: only members' spread has a meaning that does not depend on the loss.
        weights: Member weights, or None.
        likelihood: The loss.
    """

    score_names: tuple[str, ...]
    weights: Tensor | None
    likelihood: Likelihood
    task: Literal["own"] = "own"

    @property
    def loss(self) -> str:
        """The loss's name."""
        return self.likelihood.name

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs of the wrong shape."""
        _check_three_axes(outputs)

    def num_outputs(self, outputs: Tensor) -> int:
        """Return the number of outputs."""
        return outputs.shape[-1]

    def check_targets(self, targets: Tensor, outputs: Tensor, name: str, start: int) -> None:
        """Refuse targets that are not finite; what else they must be, the loss knows."""
        usable = targets.isfinite().flatten(1).all(1) if targets.ndim > 1 else targets.isfinite()
        _check_finite(usable, name, start)

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        """Return all that numbers need of a batch; the last axis of each column is the batch."""
        outputs = full(outputs)
        weights = None if self.weights is None else self.weights.to(outputs)
        centre = member_mean(outputs, weights)
        spread = member_mean(deviations(outputs, weights).square(), weights).mean(-1)
        columns = {"scores": torch.stack([spread for _ in self.score_names])}
        if targets is not None:
            columns |= {
                "loss": self.likelihood.per_example(centre, targets),
                "member_loss": self.likelihood.losses(outputs, targets),
            }
            if self.likelihood.quantiles is not None:
                columns["below"] = (targets.reshape(-1, 1) <= centre).T
        return columns

    def for_diagnosis(self, outputs: Tensor, targets: Tensor) -> None:
        """Return nothing: the diagnosis knows its losses by name."""

    def statistics(self, kind: Kind, name: str, columns: Columns) -> list[Statistic]:
        """Return the numbers of one set that need no other."""
        scores = score_means(kind, name, self.score_names, columns["scores"])
        if kind == "ood":
            return [scores]
        members = member_means(kind, name, "loss", columns["member_loss"])
        return [metric_means(kind, name, {"loss": columns["loss"]}), members, scores]

    def reliability(self, name: str, columns: Columns) -> Reliability | None:
        """Return the share of targets below each quantile; None of other losses."""
        if self.likelihood.quantiles is None:
            return None
        levels = self.likelihood.quantiles.levels_of(len(columns["below"]))
        share = tuple(columns["below"].double().mean(-1).tolist())
        return Reliability(name, levels, share, (1.0,) * len(share), levels, levels)


def _check_three_axes(outputs: Tensor) -> None:
    if outputs.ndim != 3:
        raise ValueError(
            "Members must return (batch, outputs), which makes (members, batch, outputs); the ensemble gave "
            f"{tuple(outputs.shape)}. Add a last axis of size one to a single output."
        )


def _check_finite(usable: Tensor, name: str, start: int) -> None:
    """Name the first row, `start` being that of the batch's first, whose targets cannot be used."""
    if not bool(usable.all()):
        row = int((~usable).nonzero()[0])
        raise ValueError(f"Targets of set {name!r} must be finite; row {start + row} is not. Leave it out.")


def _mixture(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Return the negative log-likelihood of the members' mixture, `(batch,)`, from theirs, `(members, batch)`."""
    shares = torch.full_like(losses[:, 0], 1 / len(losses)) if weights is None else weights
    return -(shares.log()[:, None] - losses).logsumexp(0)


def variance_names(names: Iterable[str] | None, loss: str, num_members: int) -> tuple[str, ...]:
    """Return the variances to compute: those asked for, or all that say something of their own."""
    known = tuple(REGRESSION_SCORES) if loss in (*FAMILIES, "poisson") else ("knowledge_variance",)
    if names is not None:
        return checked_names(names, known)
    # A single distribution does not disagree with itself: all its variance is that of the data.
    return ("total_variance",) if len(known) > 1 and num_members == 1 else known
