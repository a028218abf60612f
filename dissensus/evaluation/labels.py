"""Logits of several labels an input, yes or no each -> columns, one value per input; columns of a whole set -> numbers and curves.

Scores are those of two classes, label by label, and become one an input as those of positions do. Ranks (average precision, AUROC
of a label) need the probability of every label of every input, so these are kept: four bytes each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.evaluation.classification import Columns
from dissensus.evaluation.dense import Over, pooled
from dissensus.evaluation.estimates import (
    BinnedGaps,
    Statistic,
    binned_reliability,
    grouped,
    grouped_ranks,
    in_bins,
    member_means,
    metric_means,
    score_means,
)
from dissensus.evaluation.results import Kind, Number, Reliability
from dissensus.scores import Beliefs, all_scores, as_two_classes, mutual_information


@dataclass(frozen=True)
class Labels:
    """How outputs of a classifier with several labels an input are read.

    Attributes:
        score_names: The scores to compute.
        weights: Member weights, or None.
        loss: Name of the loss, for the record.
        over: How scores of labels become one score an input.
    """

    score_names: tuple[str, ...]
    weights: Tensor | None
    loss: str
    over: Over = "mean"
    task: Literal["labels"] = "labels"

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs of the wrong shape."""
        if outputs.ndim != 3 or not outputs.is_floating_point():
            raise ValueError(
                "Members must return one logit for each label, (batch, labels), which makes (members, batch, labels); the ensemble gave "
                f"{outputs.dtype} of shape {tuple(outputs.shape)}."
            )

    def num_outputs(self, outputs: Tensor) -> int:
        """Return the number of labels."""
        return outputs.shape[-1]

    def check_targets(self, targets: Tensor, outputs: Tensor, name: str, start: int) -> None:
        """Refuse answers that are not 0 or 1 for each label; `start` is the number of the batch's first row."""
        wanted = outputs.shape[-1]
        if targets.ndim != 2 or targets.shape[1] != wanted:
            raise ValueError(
                f"Labels of set {name!r} must be shaped (inputs, {wanted}), one answer for each label; got {tuple(targets.shape)} in "
                "a batch. For one class an input choose loss='cross_entropy'."
            )
        wrong = ((targets != 0) & (targets != 1)).any(1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"Labels of set {name!r} must be 0 or 1; got {targets[row].tolist()} in row {start + row}. Leave it out."
            )

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        """Return all that numbers need of a batch; the last axis of each column is the batch."""
        _, batch, labels = outputs.shape
        beliefs = Beliefs.unchecked(as_two_classes(outputs).flatten(1, 2), self.weights)
        scores = all_scores(beliefs, self.score_names).values()
        no, yes = beliefs.mean_probs.unflatten(0, (batch, labels)).unbind(-1)
        columns = {
            "scores": torch.stack([pooled(score.reshape(batch, labels), self.over) for score in scores]),
            "probs": yes.T,
        }
        if len(outputs) > 1:
            columns["dispute"] = mutual_information(beliefs).reshape(batch, labels).mean(1)
        if targets is not None:
            truth = targets == 1
            own = torch.where(truth, yes, no).clamp(torch.finfo(yes.dtype).tiny, 1.0)
            right = (beliefs.votes == 1).unflatten(1, (batch, labels)) == truth
            columns |= {
                "truth": truth.T,
                "nll": 0.0 - own.double().log().mean(1),
                "member_correct": right.double().mean(2),
            }
        return columns

    def for_diagnosis(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, str]:
        """Return outputs, targets and a loss by which members are diagnosed."""
        return outputs, targets.to(outputs), "sigmoid"

    def statistics(self, kind: Kind, name: str, columns: Columns) -> list[Statistic]:
        """Return the numbers of one set that need no other."""
        scores = score_means(kind, name, self.score_names, columns["scores"])
        if kind == "ood":
            return [scores]
        probs, truth = columns["probs"].double(), columns["truth"]
        right = (probs > 0.5) == truth
        values = {
            "label_accuracy": right.double().mean(0),
            "subset_accuracy": right.all(0),
            "nll": columns["nll"],
            "brier": (probs - truth.double()).square().mean(0),
        }
        found: list[Statistic] = [
            metric_means(kind, name, values),
            scores,
            member_means(kind, name, "label_accuracy", columns["member_correct"]),
            BinnedGaps.of(kind, name, _bins(columns)),
        ]
        both = [label for label, own in enumerate(truth) if own.any() and not own.all()]
        if both:
            found.append(_Ranks.of(kind, name, columns["probs"][both], truth[both], both))
        return found

    def reliability(self, name: str, columns: Columns) -> Reliability:
        """Return confidence against accuracy of a labelled set's answers."""
        return binned_reliability(name, _bins(columns))


def _bins(columns: Columns) -> Tensor:
    probs, truth = columns["probs"].double().T, columns["truth"].T
    confidence = torch.maximum(probs, 1 - probs)
    return in_bins(confidence, (probs > 0.5) == truth, torch.ones_like(probs))


@dataclass(frozen=True)
class _Ranks:
    """Average precision and AUROC of each label, and their means over labels.

    Attributes:
        numbers: The two means, then average precision and AUROC label by label.
        set: The set that is resampled.
        probs: Probability of each label, `(labels, inputs)`.
        truth: Whether each input has it, of which there are some that do and some that do not.
    """

    numbers: Sequence[Number]
    set: str
    probs: Tensor
    truth: Tensor

    @classmethod
    def of(cls, kind: Kind, name: str, probs: Tensor, truth: Tensor, labels: Sequence[int]) -> "_Ranks":
        """Compute both for each of these labels."""
        values = [
            (metrics.aupr(p[has], p[~has], positive="ood"), metrics.auroc(p[has], p[~has]))
            for p, has in zip(probs, truth, strict=True)
        ]
        means = torch.tensor(values, dtype=torch.float64).mean(0).tolist()
        numbers = [
            Number(metric, name, kind, value)
            for metric, value in zip(("mean_average_precision", "macro_auroc"), means, strict=True)
        ]
        for label, pair in zip(labels, values, strict=True):
            numbers += [
                Number(metric, name, kind, value, label=label)
                for metric, value in zip(("average_precision", "label_auroc"), pair, strict=True)
            ]
        return cls(numbers, name, probs, truth)

    @cached_property
    def groups(self) -> list[Tensor]:
        """Rank of each input's probability, label by label."""
        return [grouped_ranks(own) for own in self.probs]

    def resampled(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return all numbers on resamples, `(numbers, resamples)`."""
        counts = draws[self.set]
        single = torch.stack(
            [
                _ranking(grouped(groups, counts * ~has[:, None]), grouped(groups, counts * has[:, None]))
                for groups, has in zip(self.groups, self.truth, strict=True)
            ]
        )
        every = torch.cat([single.nanmean(0), single.flatten(0, 1)])
        # A resample in which nobody, or everybody, has a label says nothing of it.
        estimates = torch.tensor([number.value for number in self.numbers]).to(every)[:, None]
        return torch.where(every.isnan(), estimates, every)


def _ranking(no: Tensor, yes: Tensor) -> Tensor:
    """Return average precision and AUROC, `(2, resamples)`, from counts in groups of rising probabilities, `(resamples, groups)`.

    NaN where one of the two is missing.
    """
    without, having = no.sum(1), yes.sum(1)
    at_least = (yes.flip(1).cumsum(1) / (yes + no).flip(1).cumsum(1).clamp_min(1)).flip(1)
    precision = (at_least * yes).sum(1) / having
    auroc = ((no.cumsum(1) - no / 2) * yes).sum(1) / (without * having)
    missing = (without == 0) | (having == 0)
    return torch.where(missing, torch.nan, torch.stack([precision, auroc]))
