"""Member outputs of a batch -> columns, one value per input; columns of a set -> numbers and curves: a class for each kind of output."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus import metrics
from dissensus._beliefs import deviations
from dissensus._checks import check_member_logits
from dissensus.evaluation import results
from dissensus.evaluation.corrupting import Cell
from dissensus.evaluation.estimates import (
    ROOTS,
    Draws,
    SetNumbers,
    Statistic,
    binned_reliability,
    grouped,
    grouped_ranks,
    in_bins,
    or_estimates,
    placements,
)
from dissensus.evaluation.inputs import check_each_once
from dissensus.evaluation.results import COVERAGE_LEVELS, Number, Reliability, floats
from dissensus.metrics.regression import FAMILIES, Family
from dissensus.objectives.likelihoods import LIKELIHOODS, Likelihood, as_columns, class_axis_of, full
from dissensus.objectives.losses import weighted_mean
from dissensus.scores import (
    KNOWLEDGE_SCORES,
    REGRESSION_SCORES,
    SCORES,
    Beliefs,
    all_scores,
    as_two_classes,
    mutual_information,
    over_positions,
)

Columns = dict[str, Tensor]
# One score an input: the mean or the largest of its positions or labels, or the share of those above a number.
Over = Literal["mean", "max"] | float
# From so many members on, the pairs of `jensen_shannon` cost more than everything else together.
_MANY_MEMBERS = 50
_COUNTING_MEMBERS = frozenset({"predictive_diversity", "num_unique"})


def first_row(bad: Tensor) -> int | None:
    """Return the number of the first row, `(batch, ...)`, in which something is bad."""
    rows = bad.flatten(1).any(1) if bad.ndim > 1 else bad
    return int(rows.nonzero()[0]) if bool(rows.any()) else None


@dataclass(frozen=True)
class Task:
    """How outputs are read, by the loss that says what they are: which scores are computed, and with which weights of members.

    The last four are the arguments of `evaluate` for outputs with several answers an input.
    """

    score_names: tuple[str, ...]
    weights: Tensor | None
    likelihood: Likelihood
    over: Over = "mean"
    class_axis: int | None = None
    ignore_index: int = -100
    class_weights: Sequence[float] | None = None

    @property
    def loss(self) -> str:
        return self.likelihood.name

    @property
    def task(self) -> results.Task:
        return "classification" if self.likelihood.kind == "classes" else self.likelihood.kind

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs of the wrong shape."""
        if outputs.ndim != 3 or not outputs.is_floating_point():
            raise ValueError(
                f"Members must return (batch, outputs); together they gave {outputs.dtype} of shape {tuple(outputs.shape)}. "
                "Add a last axis of size one to a single output."
            )

    def num_outputs(self, width: int) -> int:
        """Return the number of classes, labels or targets that so many outputs are about."""
        return width

    def check_targets(self, targets: Tensor, width: int, name: str, start: int) -> None:
        """Refuse targets that do not fit so many outputs; `start` is the number of the batch's first row."""
        if (row := first_row(~targets.isfinite())) is not None:
            raise ValueError(f"Targets of set {name!r} must be finite; row {start + row} is not. Leave it out.")

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        """Return all that numbers need of a batch; the last axis of each column is the batch."""
        raise NotImplementedError

    def for_diagnosis(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, str] | None:
        """Return outputs, targets and a loss by which members are diagnosed; None where they cannot be."""
        return outputs, targets, self.loss

    def pooled(self, score: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return one score an input, `(batch,)`, of those of its positions or labels, `(batch, ...)`."""
        if isinstance(self.over, str):
            return over_positions(score, self.over, counts=counts)
        return over_positions(score, "share", limit=float(self.over), counts=counts)

    def averaged(self, columns: Columns) -> Columns:
        """Return values per input whose means (of `ROOTS`, their roots) are metrics, by the metric's name: columns "mean ..."."""
        return {key.removeprefix("mean "): values for key, values in columns.items() if key.startswith("mean ")}

    def statistics(self, on: SetNumbers, columns: Columns) -> list[Statistic]:
        """Return the numbers of one set that need no other."""
        values, size = self.averaged(columns), columns.get("size")
        roots = {metric: values.pop(metric) for metric in list(values) if metric in ROOTS}
        found = [on.metrics(part, size) for part in (values, roots) if part]
        found.append(on.scores(self.score_names, columns["scores"]))
        if on.kind == "ood":
            return found
        own = columns["member"]
        members = [on.number(results.MEMBER_METRICS[self.task], member=place) for place in range(len(own))]
        return [*found, on.means(members, own, size), *self.labelled_statistics(on, columns)]

    def labelled_statistics(self, on: SetNumbers, columns: Columns) -> list[Statistic]:
        """Return those that are no means, of a labelled set."""
        return []

    def reliability(self, name: str, columns: Columns) -> Reliability | None:
        """Return what was claimed against what came true on a labelled set."""
        return None


class Classification(Task):
    """Logits of one class an input."""

    def check(self, outputs: Tensor) -> None:
        # Values that are not finite are named later, with the row's number in the whole set.
        if bool(outputs.isfinite().all()):
            check_member_logits(outputs)

    def check_targets(self, targets: Tensor, width: int, name: str, start: int) -> None:
        if targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
            raise ValueError(
                f"Labels of set {name!r} must be one class index for each input; got {targets.dtype} of shape {tuple(targets.shape)}. "
                "Pass `labels.long()`, or choose loss='gaussian_nll' or 'mse', for several labels 'binary_cross_entropy'."
            )
        if (row := first_row((targets < 0) | (targets >= width))) is not None:
            raise ValueError(
                f"Labels of set {name!r} must lie in 0 to {width - 1}; got {int(targets[row])} in row {start + row}. "
                "Renumber the classes, or give a set with other classes as `ood`."
            )

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        beliefs = Beliefs.unchecked(outputs, self.weights)
        probs = beliefs.mean_probs
        confidence, predicted = beliefs.answer
        columns = {
            "scores": torch.stack(list(all_scores(beliefs, self.score_names).values())),
            "confidence": confidence.clamp(max=1.0),
            "votes": beliefs.votes,
            "predicted": predicted.int(),
        }
        if targets is not None:
            labels = targets.long()
            own = probs.gather(1, labels[:, None])[:, 0]
            others = probs.square().scatter(1, labels[:, None], 0.0).sum(1)
            columns |= {
                "truth": labels.int(),
                "correct": predicted == labels,
                "member": beliefs.votes == labels,
                "mean accuracy": predicted == labels,
                "mean nll": 0.0 - own.clamp(torch.finfo(own.dtype).tiny, 1.0).double().log(),
                "mean brier": (1 - own.double()).square() + others.double(),
            }
            if len(outputs) > 1:
                columns["mean member_accuracy"] = columns["member"].double().mean(0)
        columns["mean confidence"] = columns["confidence"]
        if len(outputs) > 1:
            columns["dispute"] = mutual_information(beliefs)
            columns["mean disagreement"] = _pair_disagreement(beliefs.votes, outputs.shape[-1])
        return columns

    def labelled_statistics(self, on: SetNumbers, columns: Columns) -> list[Statistic]:
        confidence, correct = columns["confidence"], columns["correct"]
        risks = [on.risk_coverage(*pair, correct) for pair in zip(self.score_names, columns["scores"], strict=True)]
        return [on.calibration_error(confidence, correct), on.smooth_calibration_error(confidence, correct), *risks]

    def corrupted(self, clean: Columns, cells: Mapping[Cell, Columns]) -> tuple[list[Statistic], list[Number]]:
        """Return numbers of each corrupted copy, resampled together with the clean images that it is of, and those without replicates."""
        found: list[Statistic] = []
        without: list[Number] = []
        for (name, severity), columns in cells.items():
            on, pair = SetNumbers("corruption", name, severity), (columns["confidence"], columns["correct"])
            values, numbers = [], []
            for score, own, known in zip(self.score_names, columns["scores"], clean["scores"], strict=True):
                auroc = metrics.auroc(own, known)
                of_corrupted, of_clean = placements(own, known)
                values.append((of_corrupted + of_clean - auroc).float())
                numbers.append(on.number("auroc", auroc, score))
            found += [on.metrics(self.averaged(columns)), on.scores(self.score_names, columns["scores"])]
            found += [Statistic(numbers, on.means(numbers, torch.stack(values)).resampled), on.calibration_error(*pair)]
            without += on.smooth_calibration_error(*pair).numbers
        return found, without

    def reliability(self, name: str, columns: Columns) -> Reliability:
        curve = metrics.confidence_reliability(columns["confidence"], columns["correct"])
        shown = (curve.confidence, curve.accuracy, curve.weight, curve.lower, curve.upper)
        return Reliability(name, *(floats(values.numpy()) for values in shown))


def _pair_disagreement(votes: Tensor, num_classes: int) -> Tensor:
    """Return the share of pairs of members that predict different classes, `(batch,)`."""
    num_members, batch = votes.shape
    tally = torch.zeros(batch, num_classes, dtype=torch.int32, device=votes.device)
    tally = tally.scatter_add(1, votes.T, torch.ones_like(votes.T, dtype=torch.int32))
    agreeing = (tally * (tally - 1)).sum(1)
    return 1 - agreeing / (num_members * (num_members - 1))


class Labels(Task):
    """Logits of several labels an input, yes or no each.

    Scores are those of two classes, label by label, and become one an input as those of positions do. Ranks (average
    precision, AUROC of a label) need the probability of every label of every input, so these are kept: four bytes each.
    """

    def check_targets(self, targets: Tensor, width: int, name: str, start: int) -> None:
        if targets.ndim != 2 or targets.shape[1] != width:
            raise ValueError(
                f"Labels of set {name!r} must be shaped (inputs, {width}), one answer for each label; got {tuple(targets.shape)}. "
                "For one class an input choose loss='cross_entropy'."
            )
        if (row := first_row((targets != 0) & (targets != 1))) is not None:
            got = f"got {targets[row].tolist()} in row {start + row}"
            raise ValueError(f"Labels of set {name!r} must be 0 or 1; {got}. Leave it out.")

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        _, batch, labels = outputs.shape
        beliefs = Beliefs.unchecked(as_two_classes(outputs).flatten(1, 2), self.weights)
        scores = all_scores(beliefs, self.score_names).values()
        no, yes = beliefs.mean_probs.unflatten(0, (batch, labels)).unbind(-1)
        columns = {
            "scores": torch.stack([self.pooled(score.reshape(batch, labels)) for score in scores]),
            "probs": yes.T,
        }
        if len(outputs) > 1:
            columns["dispute"] = mutual_information(beliefs).reshape(batch, labels).mean(1)
        if targets is not None:
            truth = targets == 1
            own = torch.where(truth, yes, no).clamp(torch.finfo(yes.dtype).tiny, 1.0)
            right = (yes > 0.5) == truth
            members = (beliefs.votes == 1).unflatten(1, (batch, labels)) == truth
            columns |= {
                "truth": truth.T,
                "mean label_accuracy": right.double().mean(1),
                "mean subset_accuracy": right.all(1),
                "mean nll": 0.0 - own.double().log().mean(1),
                "mean brier": (yes.double() - truth.double()).square().mean(1),
                "member": members.double().mean(2),
            }
        return columns

    def for_diagnosis(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, str]:
        return outputs, targets.to(outputs), "sigmoid"

    def labelled_statistics(self, on: SetNumbers, columns: Columns) -> list[Statistic]:
        truth, error = columns["truth"], on.binned_error(self._bins(columns))
        both = [label for label, own in enumerate(truth) if own.any() and not own.all()]
        return [error, _ranks(on, columns["probs"][both], truth[both], both)] if both else [error]

    def _bins(self, columns: Columns) -> Tensor:
        probs, truth = columns["probs"].double().T, columns["truth"].T
        return in_bins(torch.maximum(probs, 1 - probs), (probs > 0.5) == truth, torch.ones_like(probs))

    def reliability(self, name: str, columns: Columns) -> Reliability:
        return binned_reliability(name, self._bins(columns))


def _ranks(on: SetNumbers, probs: Tensor, truth: Tensor, labels: Sequence[int]) -> Statistic:
    """Return average precision and AUROC: their means over labels, then of each; some have a label and some do not, `(labels, inputs)`."""
    apart = [(p[has], p[~has]) for p, has in zip(probs, truth, strict=True)]
    values = [(metrics.aupr(*pair, positive="ood"), metrics.auroc(*pair)) for pair in apart]
    means = torch.tensor(values, dtype=torch.float64).mean(0).tolist()
    numbers = [on.number("mean_average_precision", means[0]), on.number("macro_auroc", means[1])]
    for label, pair in zip(labels, values, strict=True):
        named = zip(("average_precision", "label_auroc"), pair, strict=True)
        numbers += [Number(metric, on.set, on.kind, value, label=label) for metric, value in named]
    groups = cache(lambda: [grouped_ranks(own) for own in probs])

    def resampled(draws: Draws) -> Tensor:
        counts = draws[on.set]
        pairs = ((own, counts * ~has[:, None], counts * has[:, None]) for own, has in zip(groups(), truth, strict=True))
        single = torch.stack([_ranking(grouped(own, no), grouped(own, yes)) for own, no, yes in pairs])
        # A resample in which nobody, or everybody, has a label says nothing of it.
        every = torch.cat([single.nanmean(0), single.flatten(0, 1)])
        return or_estimates(every, [number.value for number in numbers])

    return Statistic(numbers, resampled)


def _ranking(no: Tensor, yes: Tensor) -> Tensor:
    """Average precision and AUROC, `(2, resamples)`, of counts `(resamples, groups)` by rising probability; NaN without any no or yes."""
    without, having = no.sum(1), yes.sum(1)
    at_least = (yes.flip(1).cumsum(1) / (yes + no).flip(1).cumsum(1).clamp_min(1)).flip(1)
    precision = (at_least * yes).sum(1) / having
    auroc = ((no.cumsum(1) - no / 2) * yes).sum(1) / (without * having)
    missing = (without == 0) | (having == 0)
    return torch.where(missing, torch.nan, torch.stack([precision, auroc]))


class Regression(Task):
    """Means and scales of densities, point predictions, or logs of rates ("poisson")."""

    def check(self, outputs: Tensor) -> None:
        super().check(outputs)
        if self.task == "density" and outputs.shape[-1] % 2:
            raise ValueError(
                f"With loss={self.loss!r} members have twice as many outputs as targets; got {outputs.shape[-1]} outputs. "
                "Add the scales, or choose loss='mse'."
            )

    def num_outputs(self, width: int) -> int:
        return width // 2 if self.task == "density" else width

    def check_targets(self, targets: Tensor, width: int, name: str, start: int) -> None:
        wanted, got = self.num_outputs(width), tuple(as_columns(targets).shape[1:])
        if got != (wanted,):
            raise ValueError(
                f"Targets of set {name!r} must be shaped (inputs, {wanted}), as the outputs say; got {tuple(targets.shape)}."
            )
        super().check_targets(targets, width, name, start)
        if self.loss == "poisson" and bool((targets < 0).any()):
            raise ValueError(f"Targets of set {name!r} are counts, 0 or more; got {float(targets.min()):g}.")

    @property
    def _family(self) -> Family:
        return FAMILIES[self.likelihood.family]

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        outputs = full(outputs)
        weights = None if self.weights is None else self.weights.to(outputs)
        mean, spread = self._moments(outputs)
        centre = weighted_mean(mean, weights)
        knowledge = weighted_mean(deviations(mean, weights).square(), weights)
        data = weighted_mean(spread, weights)
        variances = {"total_variance": data + knowledge, "data_variance": data, "knowledge_variance": knowledge}
        scores = torch.stack([variances[name].mean(-1) for name in self.score_names])
        columns = {"scores": scores, "predicted": centre[:, 0]}
        if targets is not None:
            truth = as_columns(targets).to(centre)
            columns |= {
                "truth": truth[:, 0],
                "mean mae": (centre - truth).abs().mean(-1),
                "mean rmse": (centre - truth).square().mean(-1),
                "member": (mean - truth).square().mean(-1),
            }
            if self.task == "density" or self.loss == "poisson":
                losses = self.likelihood.per_example(outputs, truth)
                shares = torch.full_like(losses[:, 0], 1 / len(losses)) if weights is None else weights
                columns["mean mixture_nll"] = -(shares.log()[:, None] - losses).logsumexp(0)
            if self.task == "density":
                columns |= self._density_columns(centre, (data + knowledge).sqrt(), truth)
        return columns

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances of what members predict; points have no variance, counts are as spread as they are large."""
        if self.loss == "poisson":
            return outputs.exp(), outputs.exp()
        mean, scale = self.likelihood.mean_and_scale(outputs)
        return mean, scale.square() * (self._family.variance if self.task == "density" else 0.0)

    def _density_columns(self, centre: Tensor, deviation: Tensor, truth: Tensor) -> Columns:
        family, name = self._family, self.likelihood.family
        pooled = deviation / sqrt(family.variance)
        distance = (truth - centre).abs() / pooled
        levels = torch.tensor([family.half_width(level) for level in COVERAGE_LEVELS])
        inside = (distance <= levels.to(distance)[:, None, None]).to(centre.dtype).mean(-1)
        return {
            "inside": inside,
            # Nats of an example: those of its targets together, as the mixture has them.
            f"mean {name}_nll": family.nll(centre, pooled, truth).sum(-1),
            f"mean {name}_crps": family.crps(pooled, (truth - centre) / pooled).mean(-1),
            "mean coverage_90": inside[COVERAGE_LEVELS.index(0.9)],
            "mean width_90": 2 * family.half_width(0.9) * pooled.mean(-1),
        }

    def for_diagnosis(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, str]:
        if self.loss == "poisson":
            return outputs, targets.reshape(outputs.shape[1:]).to(outputs), "poisson"
        means, _ = self.likelihood.mean_and_scale(outputs)
        return means, targets.reshape(means.shape[1:]), "mse"

    def reliability(self, name: str, columns: Columns) -> Reliability | None:
        return _coverage(name, COVERAGE_LEVELS, columns["inside"]) if "inside" in columns else None


def _coverage(name: str, levels: tuple[float, ...], inside: Tensor) -> Reliability:
    share = tuple(inside.double().mean(-1).tolist())
    return Reliability(name, levels, share, (1.0,) * len(share), levels, levels)


class OwnLoss(Task):
    """Outputs of a loss of one's own: what it says of the members' mean output, and how far members are apart."""

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        outputs = full(outputs)
        weights = None if self.weights is None else self.weights.to(outputs)
        centre = weighted_mean(outputs, weights)
        spread = weighted_mean(deviations(outputs, weights).square(), weights).mean(-1)
        columns = {"scores": torch.stack([spread for _ in self.score_names])}
        if targets is not None:
            losses = self.likelihood.losses(outputs, targets)
            columns |= {"mean loss": self.likelihood.per_example(centre, targets), "member": losses}
            if self.likelihood.quantiles is not None:
                columns["below"] = (targets.reshape(-1, 1) <= centre).T
        return columns

    def for_diagnosis(self, outputs: Tensor, targets: Tensor) -> None:
        """Return nothing: the diagnosis knows its losses by name."""

    def reliability(self, name: str, columns: Columns) -> Reliability | None:
        if self.likelihood.quantiles is None:
            return None
        return _coverage(name, self.likelihood.quantiles.levels_of(len(columns["below"])), columns["below"])


@dataclass(frozen=True)
class Dense(Task):
    """Outputs with positions (pixels, tokens), each read as `inner` reads an input.

    Metrics are those of the positions, each an example of its own, but only their sums for each input are kept: memory
    grows with inputs, not with pixels. Intervals resample inputs, since the positions of one are not independent.
    """

    inner: Task = field(kw_only=True)
    axis: int = 0  # of the classes; 0 for point predictions, which have none
    size: int = 1  # number of classes; 1 for point predictions
    binary: bool = False  # one logit of yes or no for each position, without an axis of classes

    @classmethod
    def of(cls, inner: Task, outputs: Tensor, targets: Tensor | None) -> "Dense":
        """Find the class axis by the first batch."""
        given = vars(inner)
        if inner.task not in ("classification", "labels", "points"):
            raise ValueError(
                f"`evaluate` reads maps of class logits and of point predictions, or yes or no; the loss is {inner.loss!r}. "
                "Take `ds.predict` and scores of its outputs."
            )
        if inner.task == "points":
            return cls(**given, inner=inner)
        binary = inner.task == "labels"
        if binary:
            inner = Classification(**given | {"likelihood": LIKELIHOODS["cross_entropy"]})
            outputs = as_two_classes(outputs)
        # The known inputs come first, and have labels.
        assert targets is not None
        axis = class_axis_of(outputs, targets, -1 if binary else inner.class_axis)
        size, weights = outputs.shape[axis], inner.class_weights
        if weights is not None and len(weights) != size:
            raise ValueError(f"`class_weights` must be one number for each of {size} classes; got {len(weights)}.")
        return cls(**given, inner=inner, axis=axis, size=size, binary=binary)

    @property
    def task(self) -> results.Task:
        return self.inner.task

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs of other classes than before; their positions may differ, as those of padded batches do."""
        classes = self.size if self.binary or not self.axis else outputs.shape[self.axis]
        if outputs.ndim <= 3 or classes != self.size:
            wanted = f"{self.size} classes at axis {self.axis} and positions beside them, as before"
            raise ValueError(f"Outputs must have {wanted}; got {tuple(outputs.shape)}.")

    def check_targets(self, targets: Tensor, width: int, name: str, start: int) -> None:
        if not self.axis:
            return super().check_targets(targets, width, name, start)
        counted = targets[targets != self.ignore_index]
        classes = (counted >= 0) & (counted < self.size) & (counted == counted.long())
        if (targets.is_floating_point() and not self.binary) or not bool(classes.all()):
            wanted = f"class indices from 0 to {self.size - 1}, or {self.ignore_index} where one does not count"
            got = f"{targets.dtype} from {targets.min().item()} to {targets.max().item()}"
            raise ValueError(f"Labels of set {name!r} must be {wanted}; got {got}.")

    def flat(self, outputs: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return outputs and targets of positions as rows, `(members, batch * positions, outputs)`, and which count, `(batch, ...)`."""
        if not self.axis:
            counts = torch.ones(outputs.shape[1:], dtype=torch.bool, device=outputs.device)
            truth = None if targets is None else targets.reshape(outputs.shape[1:]).flatten()[:, None]
            return outputs.flatten(1)[..., None], truth, counts
        last = as_two_classes(outputs) if self.binary else outputs.movedim(self.axis, -1)
        rows = last.flatten(1, -2)
        if targets is None:
            return rows, None, torch.ones(last.shape[1:-1], dtype=torch.bool, device=outputs.device)
        if targets.shape != last.shape[1:-1]:
            wanted = f"{tuple(last.shape[1:-1])}, as the outputs without their classes"
            raise ValueError(f"Labels of outputs with positions must be shaped {wanted}; got {tuple(targets.shape)}.")
        counts = targets != self.ignore_index
        return rows, torch.where(counts, targets.long(), 0).flatten(), counts

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        rows, truth, counts = self.flat(outputs, targets)
        inner = self.inner.columns(rows, truth)
        per_input = counts.flatten(1)
        batch, (weights, classes) = len(per_input), (per_input.double(), self.class_weights)
        if classes is not None and truth is not None:
            weights = weights * torch.tensor(classes, dtype=torch.float64, device=rows.device)[truth].reshape(batch, -1)

        def summed(values: Tensor) -> Tensor:
            values = values.double().unflatten(-1, (batch, -1))
            return torch.where(per_input, values, 0.0).mul(weights).sum(-1)

        scores = torch.stack([self.pooled(score.reshape(counts.shape), counts) for score in inner["scores"]])
        columns = {"scores": scores, "size": weights.sum(-1)}
        columns |= {f"mean {metric}": summed(values) for metric, values in self.inner.averaged(inner).items()}
        if "dispute" in inner:
            maps = inner["dispute"].reshape(counts.shape)
            columns["dispute"] = over_positions(maps, counts=counts)
            columns["map"] = (maps.mean(1) if self.binary else maps).movedim(0, -1)
        if truth is not None:
            columns["member"] = summed(inner["member"])
            if self.axis:
                columns |= self._labelled(inner, truth, per_input, weights)
        return columns

    def _labelled(self, inner: Columns, truth: Tensor, counts: Tensor, weights: Tensor) -> Columns:
        """Return what calibration needs of a batch, and how classes overlap, `(2, classes, batch)`."""
        batch = len(counts)
        bins = in_bins(inner["confidence"].reshape(batch, -1), inner["correct"].reshape(batch, -1), weights)
        one = counts.double()
        labels, said = truth.reshape(batch, -1), inner["predicted"].reshape(batch, -1)
        empty = one.new_zeros(batch, self.size)
        both = empty.scatter_add(1, labels, one * (labels == said))
        union = empty.scatter_add(1, labels, one).scatter_add(1, said, one) - both
        return {"bins": bins, "overlap": torch.stack([both, union]).movedim(1, -1)}

    def for_diagnosis(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, str] | None:
        return self.inner.for_diagnosis(outputs, targets)

    def labelled_statistics(self, on: SetNumbers, columns: Columns) -> list[Statistic]:
        if not self.axis:
            return []
        if not columns["size"].any():
            raise ValueError(f"No label of set {on.set!r} counts: all are {self.ignore_index}. Leave it out.")
        counts = columns["overlap"].float()
        iou = on.number("mean_iou", float(_mean_iou(columns["overlap"].sum(-1, keepdim=True))))
        return [
            on.binned_error(columns["bins"]),
            Statistic([iou], lambda draws: or_estimates(_mean_iou(counts @ draws[on.set])[None], [iou.value])),
        ]

    def reliability(self, name: str, columns: Columns) -> Reliability | None:
        return binned_reliability(name, columns["bins"]) if "bins" in columns else None


def check_used(task: Task, outputs: Tensor) -> None:
    """Refuse arguments for several answers an input that outputs have no use for."""
    classes = isinstance(task, Dense) and task.axis > 0
    logits = isinstance(task, Dense) and task.axis > 0 and not task.binary
    for name, given, used, what in (
        ("over", task.over != "mean", isinstance(task, Dense | Labels), "outputs with positions or several labels"),
        ("class_axis", task.class_axis is not None, logits, "class logits with positions"),
        ("ignore_index", task.ignore_index != Task.ignore_index, classes, "class labels of positions"),
        ("class_weights", task.class_weights is not None, classes, "class labels of positions"),
    ):
        if given and not used:
            shape = f"shaped {tuple(outputs.shape)} and read by loss={task.loss!r}"
            raise ValueError(f"`{name}` is for {what}; outputs are {shape}, which have no use for it. Leave it out.")


def _mean_iou(overlap: Tensor) -> Tensor:
    """Return the mean over classes that occur, NaN without any, of intersection over union: `(columns,)`, of `(2, classes, columns)`."""
    both, union = overlap
    occurs = union > 0
    return torch.where(occurs, both / union.clamp_min(1e-12), 0.0).sum(0) / occurs.sum(0)


_KINDS: dict[str, type[Task]] = {
    "classes": Classification,
    "labels": Labels,
    "points": Regression,
    "density": Regression,
    "own": OwnLoss,
}


def task_of(
    likelihood: Likelihood, scores: Iterable[str] | None, weights: Tensor | None, num_members: int, **positions: Any
) -> Task:
    """Return how outputs are read, by what the loss says that they are, and with the scores asked for, or all worth their price."""
    known, constant = ["knowledge_variance"], set[str]()
    # What does not tell inputs apart where a single member cannot disagree, and all its variance is that of the data.
    if likelihood.kind in ("classes", "labels"):
        known, constant = list(SCORES), {*KNOWLEDGE_SCORES, *_COUNTING_MEMBERS}
    elif likelihood.kind == "density" or likelihood.name == "poisson":
        known, constant = list(REGRESSION_SCORES), {"data_variance", "knowledge_variance"}
    costly = {"jensen_shannon"} if num_members >= _MANY_MEMBERS else set()
    left_out = constant if num_members == 1 else costly
    chosen = [name for name in known if name not in left_out]
    if scores is not None:
        chosen = [scores] if isinstance(scores, str) else list(scores)
    check_each_once("`scores` must name each score once", chosen, known)
    return _KINDS[likelihood.kind](tuple(chosen), weights, likelihood, **positions)
