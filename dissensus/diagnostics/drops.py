"""Member outputs in; metrics of what is left of the ensemble when members are dropped at random out."""

from collections.abc import Callable, Sequence
from math import floor
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.diagnostics.findings import DropCurve
from dissensus.objectives.losses import (
    Loss,
    dense_targets,
    errors,
    like_outputs,
    log_mixture,
    output_sum,
    weighted_mean,
)

# Values that are averaged in all; beyond, the curves are of some of the examples.
_LARGEST_WORK = 2_000_000_000

# As many as `dissensus.metrics.ece` has.
_BINS = 15

# From weights, `(members,)` or `(members, batch)`, to metrics of the ensemble by their names, per example or of the set.
Measure = Callable[[Tensor | None], dict[str, Tensor]]


def drop_counts(num_members: int, fractions: Sequence[float]) -> dict[int, float]:
    """How many members each fraction drops, and the fraction; those that drop none, or all, are left out.

    Example:
        >>> drop_counts(5, (0.1, 0.2, 0.5, 1.0))
        {1: 0.2, 2: 0.5}
    """
    fractions = tuple(map(float, fractions))
    if not all(0 < fraction <= 1 for fraction in fractions):
        raise ValueError(f"`drop_fractions` must lie between 0 and 1; got {fractions}. Use such as (0.2, 0.4, 0.6).")
    # The small number: 0.3 times 10 is a hair below 3.
    counts = {floor(fraction * num_members + 1e-9): fraction for fraction in reversed(fractions)}
    found = {count: fraction for count, fraction in sorted(counts.items()) if 0 < count < num_members}
    return found or ({1: 1 / num_members} if num_members > 1 and fractions else {})


def drop_curves(
    outputs: Tensor,
    targets: Tensor,
    loss: Loss,
    average: str,
    weights: Tensor | None,
    *,
    fractions: Sequence[float],
    repeats: int,
    per: Literal["example", "set"],
    seed: int,
) -> tuple[tuple[DropCurve, ...], int]:
    """Return a curve for each metric, and how many examples they are of."""
    counts = drop_counts(len(outputs), fractions)
    if not counts:
        return (), outputs.shape[1]
    generator = torch.Generator().manual_seed(seed)
    affordable = max(100, _LARGEST_WORK * outputs.shape[1] // (outputs.numel() * len(counts) * repeats))
    if affordable < outputs.shape[1]:
        rows = torch.randperm(outputs.shape[1], generator=generator)[:affordable].sort().values
        outputs, targets = outputs[:, rows.to(outputs.device)], targets[rows.to(targets.device)]
    make = {"cross_entropy": _class_metrics, "brier": _class_metrics, "zero_one": _vote_metrics}
    values = make.get(str(loss), _metrics)(outputs, targets, loss, average)

    def measured(weights: Tensor | None) -> dict[str, float]:
        return {name: float(value.mean()) for name, value in values(weights).items()}

    full = measured(weights)
    runs = [[measured(_kept(outputs, count, weights, per, generator)) for _ in range(repeats)] for count in counts]
    exact: tuple[float, ...] = ()
    if loss == "mse" and weights is None:
        # By the decomposition of the squared error.
        members, diversity = len(outputs), float(output_sum((outputs - outputs.mean(0)).square()).mean())
        exact = tuple(full["error"] + diversity * n / ((members - n) * (members - 1)) for n in counts)
    curves = []
    for name in full:
        found = torch.tensor([[run[name] for run in of_count] for of_count in runs], dtype=torch.float64)
        means, spread = (tuple(values.tolist()) for values in (found.mean(1), found.std(1, correction=0)))
        own = exact if name == "error" else ()
        curves.append(DropCurve(name, tuple(counts.values()), tuple(counts), full[name], means, spread, own))
    return tuple(curves), outputs.shape[1]


def _kept(outputs: Tensor, dropped: int, weights: Tensor | None, per: str, generator: torch.Generator) -> Tensor:
    """Weights of what is left, `(members, batch)`: those of dropped members are zero, the others sum to one."""
    members, batch = outputs.shape[:2]
    draws = torch.rand(batch if per == "example" else 1, members, generator=generator, dtype=torch.float64)
    # Those above the smallest draws stay: one selection a row is faster than two sorts.
    kept = (draws > draws.kthvalue(dropped, dim=1, keepdim=True).values).T.to(outputs)
    own = kept if weights is None else kept * weights[:, None]
    total = own.sum(0)
    # Members of weight zero may be all that is left: then they count alike.
    share = torch.where(total > 0, own / total, kept / kept.sum(0))
    return share.expand(members, batch)


def _metrics(outputs: Tensor, targets: Tensor, loss: Loss, average: str) -> Measure:
    def values(weights: Tensor | None) -> dict[str, Tensor]:
        found = {"error": errors(outputs, targets, loss, average, weights)[1]}
        if loss == "mse":
            found["mae"] = (weighted_mean(outputs, weights) - like_outputs(targets, outputs)).abs()
        return found

    return values


def _vote_metrics(outputs: Tensor, targets: Tensor, loss: Loss, average: str) -> Measure:
    ballots = F.one_hot(outputs.argmax(-1), outputs.shape[-1]).to(outputs)
    labels = targets.argmax(-1) if targets.is_floating_point() else targets

    def values(weights: Tensor | None) -> dict[str, Tensor]:
        # Counts that tie by chance of rounding go to the lowest class, as in the loss.
        winner = weighted_mean(ballots, weights).mul(1e6).round().argmax(-1)
        return {"error": (winner != labels).to(outputs)}

    return values


def _class_metrics(outputs: Tensor, targets: Tensor, loss: Loss, average: str) -> Measure:
    log_probs = outputs.log_softmax(-1)
    probs, tiny = log_probs.exp(), torch.finfo(outputs.dtype).tiny
    truth = dense_targets(targets, outputs)
    labels = truth.argmax(-1)

    def pooled(weights: Tensor | None) -> Tensor:
        if average == "scores":
            return weighted_mean(outputs, weights).log_softmax(-1)
        if weights is None or weights.ndim == 1:
            return log_mixture(log_probs, weights)
        mixed = torch.einsum("mb,mbc->bc", weights, probs)
        # Probabilities underflow where all members that are left rule a class out; logarithms do not, and take longer.
        return mixed.log() if bool((mixed >= tiny).all()) else log_mixture(log_probs, weights)

    def values(weights: Tensor | None) -> dict[str, Tensor]:
        ensemble = pooled(weights)
        nll = -(truth * ensemble).sum(-1)
        brier = (ensemble.exp() - truth).square().sum(-1)
        right = (ensemble.argmax(-1) == labels).to(outputs)
        confidence = ensemble.max(-1).values.exp()
        bins = (confidence * _BINS).ceil().long().clamp(1, _BINS) - 1
        gaps = confidence.new_zeros(_BINS).index_add_(0, bins, confidence - right)
        error, other = ({"error": brier}, {"nll": nll}) if loss == "brier" else ({"error": nll}, {"brier": brier})
        return {**error, "accuracy": right, **other, "ece": gaps.abs().sum() / len(labels)}

    return values
