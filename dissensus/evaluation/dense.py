"""Outputs with positions (pixels, tokens) -> columns, one value per input: sums over its positions, and scores pooled over them.

Metrics are those of the positions, each an example of its own, but only their sums for each input are kept: memory grows with inputs, not
with pixels. Intervals resample inputs, since the positions of one are not independent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus.evaluation.classification import Classification, Columns
from dissensus.evaluation.estimates import (
    BinnedGaps,
    Means,
    Statistic,
    binned_reliability,
    in_bins,
    member_means,
    metric_means,
    score_means,
)
from dissensus.evaluation.regression import Regression
from dissensus.evaluation.results import Kind, Number, Reliability
from dissensus.objectives.likelihoods import class_axis_of
from dissensus.scores import as_two_classes, over_positions

# One score an input: the mean or the largest of its positions, or the share of those above a number.
Over = Literal["mean", "max"] | float


@dataclass(frozen=True)
class Positions:
    """How outputs with positions are read.

    Attributes:
        over: How scores of positions become one score an input.
        class_axis: Axis of the classes in `(members, batch, ...)`; None to find it by the targets' shape.
        ignore_index: Label of positions that do not count.
        class_weights: How much a position counts by its true class.
    """

    over: Over = "mean"
    class_axis: int | None = None
    ignore_index: int = -100
    class_weights: Sequence[float] | None = None


@dataclass(frozen=True)
class Dense:
    """How dense outputs are read: as `inner` reads one position.

    Attributes:
        inner: What a position's outputs are.
        positions: How positions are read.
        axis: Axis of the classes; 0 for point predictions, which have none.
        size: Number of classes; 1 for point predictions.
        binary: Whether outputs are one logit of yes or no for each position, and so without an axis of classes.
    """

    inner: Classification | Regression
    positions: Positions
    axis: int
    size: int
    binary: bool = False

    @classmethod
    def of(cls, inner: Any, positions: Positions, outputs: Tensor, targets: Tensor | None) -> "Dense":
        """Find the class axis by the first batch."""
        if inner.task not in ("classification", "labels", "points"):
            raise ValueError(
                f"`evaluate` reads maps of class logits and of point predictions, and of yes or no; the loss is {inner.loss!r}. Take "
                "`ds.predict` and scores of its outputs."
            )
        if inner.task == "points":
            return cls(inner, positions, 0, 1)
        binary = inner.task == "labels"
        if binary:
            inner, outputs = (Classification(inner.score_names, inner.weights, inner.loss), as_two_classes(outputs))
        # The known inputs come first, and have labels.
        assert targets is not None
        axis = class_axis_of(outputs, targets, -1 if binary else positions.class_axis)
        if positions.class_weights is not None and len(positions.class_weights) != outputs.shape[axis]:
            raise ValueError(
                f"`class_weights` must be one number for each of {outputs.shape[axis]} classes; got {len(positions.class_weights)}."
            )
        return cls(inner, positions, axis, outputs.shape[axis], binary)

    @property
    def task(self) -> Literal["classification", "density", "points"]:
        """That of a position."""
        return self.inner.task

    @property
    def loss(self) -> str:
        """That of a position."""
        return self.inner.loss

    @property
    def score_names(self) -> tuple[str, ...]:
        """The scores to compute."""
        return self.inner.score_names

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs of other classes than before; their positions may differ, as those of padded batches do."""
        classes = self.size if self.binary or not self.axis else outputs.shape[self.axis]
        if outputs.ndim <= 3 or classes != self.size:
            raise ValueError(
                f"Outputs must have {self.size} classes at axis {self.axis} and positions beside them, as before; got "
                f"{tuple(outputs.shape)}."
            )

    def num_outputs(self, outputs: Tensor) -> int:
        """Return the number of classes, or 1."""
        return self.size

    def check_targets(self, targets: Tensor, outputs: Tensor, name: str, start: int) -> None:
        """Refuse labels that are no classes, or targets that are not finite; `start` is the number of the batch's first row."""
        if not self.axis:
            if not bool(targets.isfinite().all()):
                raise ValueError(f"Targets of set {name!r} must be finite; some from row {start} on are not.")
            return
        counted = targets[targets != self.positions.ignore_index]
        classes = (counted >= 0) & (counted < self.size) & (counted == counted.long())
        if (targets.is_floating_point() and not self.binary) or not bool(classes.all()):
            raise ValueError(
                f"Labels of set {name!r} must be class indices from 0 to {self.size - 1}, or {self.positions.ignore_index} where one "
                f"does not count; got {targets.dtype} from {targets.min().item()} to {targets.max().item()}."
            )

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
            raise ValueError(
                f"Labels of outputs with positions must be shaped {tuple(last.shape[1:-1])}, as the outputs without their classes; got "
                f"{tuple(targets.shape)}."
            )
        counts = targets != self.positions.ignore_index
        return rows, torch.where(counts, targets.long(), 0).flatten(), counts

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        """Return all that numbers need of a batch; the last axis of each column is the batch."""
        rows, truth, counts = self.flat(outputs, targets)
        inner = self.inner.columns(rows, truth)
        per_input = counts.flatten(1)
        batch, (weights, classes) = len(per_input), (per_input.double(), self.positions.class_weights)
        if classes is not None and truth is not None:
            weights = weights * torch.tensor(classes, dtype=torch.float64, device=rows.device)[truth].reshape(batch, -1)

        def summed(values: Tensor) -> Tensor:
            values = values.double().unflatten(-1, (batch, -1))
            return torch.where(per_input, values, 0.0).mul(weights).sum(-1)

        per_input_scores = [
            pooled(score.reshape(counts.shape), self.positions.over, counts) for score in inner["scores"]
        ]
        columns = {"scores": torch.stack(per_input_scores), "size": weights.sum(-1)}
        if isinstance(self.inner, Classification):
            columns |= {f"sum {metric}": summed(values) for metric, values in self.inner.averaged(inner).items()}
            if "dispute" in inner:
                columns["dispute"] = over_positions(inner["dispute"].reshape(counts.shape), counts=counts)
                maps = inner["dispute"].reshape(counts.shape)
                columns["map"] = (maps.mean(1) if self.binary else maps).movedim(0, -1)
            if truth is not None:
                columns |= self._labelled(inner, truth, per_input, weights)
                columns["member_sums"] = summed(inner["member_correct"])
        elif truth is not None:
            columns |= {f"sum {metric}": summed(inner[metric]) for metric in ("mse", "mae")}
            columns["member_sums"] = summed(inner["member_mse"])
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

    def for_diagnosis(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, str]:
        """Return outputs, targets and a loss by which members are diagnosed; positions are rows here."""
        rows, truth, loss = self.inner.for_diagnosis(outputs, targets)
        return rows, truth, "cross_entropy" if self.binary else loss

    def statistics(self, kind: Kind, name: str, columns: Columns) -> list[Statistic]:
        """Return the numbers of one set that need no other."""
        sums = {key.removeprefix("sum "): values for key, values in columns.items() if key.startswith("sum ")}
        found: list[Statistic] = [score_means(kind, name, self.score_names, columns["scores"])]
        size = columns["size"]
        if isinstance(self.inner, Regression):
            if kind != "ood":
                found.append(metric_means(kind, name, {"mae": sums["mae"]}, sizes=size))
                rmse = [Number("rmse", name, kind, 0.0)]
                found.append(Means.of(rmse, sums["mse"][None], root=True, sizes=size))
                found.append(member_means(kind, name, "rmse", columns["member_sums"], root=True, sizes=size))
            return found
        found.append(metric_means(kind, name, sums, sizes=size))
        if kind != "ood":
            found.append(member_means(kind, name, "accuracy", columns["member_sums"], sizes=size))
            found.append(BinnedGaps.of(kind, name, columns["bins"]))
            overlap = columns["overlap"]
            iou = float(_mean_iou(overlap.sum(-1, keepdim=True)))
            found.append(_Overlap([Number("mean_iou", name, kind, iou)], name, overlap.float()))
        return found

    def reliability(self, name: str, columns: Columns) -> Reliability | None:
        """Return confidence against accuracy of a labelled set's positions."""
        return binned_reliability(name, columns["bins"]) if "bins" in columns else None


def pooled(score: Tensor, over: Over, counts: Tensor | None = None) -> Tensor:
    """Return one score an input, `(batch,)`, of those of its positions or labels, `(batch, ...)`."""
    if isinstance(over, str):
        return over_positions(score, over, counts=counts)
    return over_positions(score, "share", limit=float(over), counts=counts)


@dataclass(frozen=True)
class _Overlap:
    """Mean over classes of intersection over union, from counts of both, `(2, classes, inputs)`."""

    numbers: Sequence[Number]
    set: str
    overlap: Tensor

    def resampled(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return it on resamples, `(1, resamples)`."""
        return _mean_iou(self.overlap @ draws[self.set])[None]


def _mean_iou(overlap: Tensor) -> Tensor:
    """Return the mean over classes that occur, `(columns,)`, of `(2, classes, columns)` counts."""
    both, union = overlap
    occurs = union > 0
    return torch.where(occurs, both / union.clamp_min(1e-12), 0.0).sum(0) / occurs.sum(0).clamp_min(1)
