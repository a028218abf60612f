"""Member logits of a batch -> columns, one value per input; columns of a whole set -> numbers and curves."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dissensus import metrics
from dissensus._checks import check_member_logits
from dissensus.evaluation.estimates import (
    CalibrationError,
    Means,
    SmoothCalibrationError,
    Statistic,
    member_means,
    metric_means,
    placements,
    risk_coverage,
    score_means,
)
from dissensus.evaluation.results import ID, Kind, Number, Reliability, floats
from dissensus.scores import KNOWLEDGE_SCORES, SCORES, Beliefs, all_scores, mutual_information

Columns = dict[str, Tensor]
# From so many members on, the pairs of `jensen_shannon` cost more than everything else together.
_MANY_MEMBERS = 50
_COUNTING_MEMBERS = frozenset({"predictive_diversity", "num_unique"})


@dataclass(frozen=True)
class Classification:
    """How outputs of a classifier are read.

    Attributes:
        score_names: The scores to compute.
        weights: Member weights, or None.
        loss: Name of the loss, for the record.
    """

    score_names: tuple[str, ...]
    weights: Tensor | None
    loss: str
    task: Literal["classification"] = "classification"

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs that are no logits; warn where they look like probabilities."""
        if not bool(outputs.isfinite().all()):
            return  # said later, with the row's number in the whole set
        # Up to whoever called `evaluate`: through the check of a batch's shape, of a batch, its columns, the reader.
        check_member_logits(outputs, stacklevel=10)

    def num_outputs(self, outputs: Tensor) -> int:
        """Return the number of classes."""
        return outputs.shape[-1]

    def check_targets(self, targets: Tensor, outputs: Tensor, name: str, start: int) -> None:
        """Refuse labels that are not class indices; `start` is the number of the batch's first row."""
        classes = outputs.shape[-1]
        if targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
            flat = targets.ndim == 1 and targets.dtype == torch.bool
            raise ValueError(
                f"Labels of set {name!r} must be one class index for each input; got {targets.dtype} of shape "
                f"{tuple(targets.shape)}. "
                + (
                    "Pass `labels.long()`."
                    if flat
                    else "For regression choose loss='gaussian_nll' or 'mse', for several "
                    "labels an input 'binary_cross_entropy'."
                )
            )
        low, high = targets.aminmax()
        if int(low) < 0 or int(high) >= classes:
            row = int(((targets < 0) | (targets >= classes)).nonzero()[0])
            raise ValueError(
                f"Labels of set {name!r} must lie in 0 to {classes - 1}; got {int(targets[row])} in row {start + row}. "
                "Renumber the classes, or give a set with other classes as `ood`."
            )

    def columns(self, outputs: Tensor, targets: Tensor | None) -> Columns:
        """Return all that numbers need of a batch; the last axis of each column is the batch."""
        beliefs = Beliefs.unchecked(outputs, self.weights)
        probs = beliefs.mean_probs
        confidence, predicted = beliefs.answer
        columns = {
            "scores": torch.stack(list(all_scores(beliefs, self.score_names).values())),
            "confidence": confidence.clamp(max=1.0),
            "votes": beliefs.votes,
            "predicted": predicted.int(),
        }
        if len(outputs) > 1:
            columns["dispute"] = mutual_information(beliefs)
            columns["disagreement"] = _pair_disagreement(beliefs.votes, outputs.shape[-1])
        if targets is not None:
            labels = targets.long()
            columns |= {
                "own": probs.gather(1, labels[:, None])[:, 0],
                "others": probs.square().scatter(1, labels[:, None], 0.0).sum(1),
                "truth": labels.int(),
                "correct": predicted == labels,
                "member_correct": beliefs.votes == labels,
            }
        return columns

    def for_diagnosis(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, str]:
        """Return outputs, targets and a loss by which members are diagnosed."""
        return outputs, targets, self.loss

    def statistics(self, kind: Kind, name: str, columns: Columns) -> list[Statistic]:
        """Return the numbers of one set that need no other."""
        parts: list[Statistic] = [metric_means(kind, name, self.averaged(columns))]
        parts.append(score_means(kind, name, self.score_names, columns["scores"]))
        if kind == "ood":
            return parts
        parts.append(member_means(kind, name, "accuracy", columns["member_correct"]))
        ece, smooth = self._calibration(kind, name, columns)
        confidence, correct = columns["confidence"], columns["correct"]
        gaps = (confidence - correct.to(confidence)).float()
        parts.append(CalibrationError.of(ece, name, confidence, correct))
        parts.append(SmoothCalibrationError([smooth], name, confidence.float(), gaps))
        parts += [
            risk_coverage(kind, name, score, own, correct)
            for score, own in zip(self.score_names, columns["scores"], strict=True)
        ]
        return parts

    def corrupted(
        self, name: str, severity: int, columns: Columns, clean: Columns
    ) -> tuple[list[Statistic], list[Number]]:
        """Return the numbers of one corruption at one severity, and those without replicates.

        Corrupted images are resampled together with the clean ones that they came from.
        """
        kind: Kind = "corruption"
        ece, smooth = (replace(number, severity=severity) for number in self._calibration(kind, name, columns))
        values, numbers = [], []
        for score, own, known in zip(self.score_names, columns["scores"], clean["scores"], strict=True):
            auroc = metrics.auroc(own, known)
            of_corrupted, of_clean = placements(own, known)
            values.append(torch.from_numpy(of_corrupted + of_clean - auroc).float())
            numbers.append(Number("auroc", name, kind, auroc, score, severity))
        parts: list[Statistic] = [
            metric_means(kind, name, self.averaged(columns), resampled=ID, severity=severity),
            score_means(kind, name, self.score_names, columns["scores"], ID, severity),
            Means(numbers, ID, torch.stack(values)),
            CalibrationError.of(ece, ID, columns["confidence"], columns["correct"]),
        ]
        return parts, [smooth]

    def reliability(self, name: str, columns: Columns) -> Reliability:
        """Return confidence against accuracy of a labelled set."""
        curve = metrics.confidence_reliability(columns["confidence"], columns["correct"])
        return Reliability(
            name,
            *(
                floats(values.numpy())
                for values in (curve.confidence, curve.accuracy, curve.weight, curve.lower, curve.upper)
            ),
        )

    def averaged(self, columns: Columns) -> dict[str, Tensor]:
        """Return values per input whose means are metrics, by the metric's name."""
        values = {}
        if "correct" in columns:
            own = columns["own"]
            values["accuracy"] = columns["correct"].double()
            values["nll"] = 0.0 - own.clamp(torch.finfo(own.dtype).tiny, 1.0).double().log()
            values["brier"] = (1 - own.double()).square() + columns["others"].double()
        if "correct" in columns and len(columns["member_correct"]) > 1:
            values["member_accuracy"] = columns["member_correct"].double().mean(0)
        values["confidence"] = columns["confidence"].double()
        if "disagreement" in columns:
            values["disagreement"] = columns["disagreement"].double()
        return values

    def _calibration(self, kind: Kind, name: str, columns: Columns) -> tuple[Number, Number]:
        confidence, correct = columns["confidence"], columns["correct"]
        ece = metrics.confidence_reliability(confidence, correct).ece
        smooth = metrics.smooth_ece(confidence, correct)
        return Number("ece", name, kind, ece), Number("smooth_ece", name, kind, smooth)


def score_names(names: Iterable[str] | None, num_members: int) -> tuple[str, ...]:
    """Return the scores to compute: those asked for, or all that say something at an affordable price."""
    if names is None:
        left_out = {"jensen_shannon"} if num_members >= _MANY_MEMBERS else set()
        if num_members == 1:
            # A single member cannot disagree: these are constant.
            left_out = {*KNOWLEDGE_SCORES, *_COUNTING_MEMBERS}
        return tuple(name for name in SCORES if name not in left_out)
    return checked_names(names, SCORES)


def checked_names(names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return names of scores; refuse unknown ones, none at all, and one given twice."""
    chosen = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(
            f"`scores` must name each score once, among {', '.join(known)}; got {', '.join(map(str, chosen)) or 'none'}."
        )
    return tuple(chosen)


def _pair_disagreement(votes: Tensor, num_classes: int) -> Tensor:
    """Return the share of pairs of members that predict different classes, `(batch,)`."""
    num_members, batch = votes.shape
    tally = torch.zeros(batch, num_classes, dtype=torch.int32, device=votes.device)
    tally = tally.scatter_add(1, votes.T, torch.ones_like(votes.T, dtype=torch.int32))
    agreeing = (tally * (tally - 1)).sum(1)
    return 1 - agreeing / (num_members * (num_members - 1))
