"""The ensemble of the demo: how it is trained, what it answers, and how good the answers are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from dissensus import metrics, scores
from dissensus.demo.digits import CORRUPTIONS, KNOWN, Digits
from dissensus.members import DeepEnsemble
from dissensus.predictions import predict
from dissensus.training import Run, fit

Numbers: TypeAlias = Mapping[str, Mapping[str, float | None]]

KNOWN_DIGITS = "known digits"
ONE_MEMBER = "one member"
ENSEMBLE = "ensemble"

QUALITY: Mapping[str, Callable[[Tensor, Tensor], float]] = MappingProxyType(
    {"accuracy": metrics.accuracy, "NLL": metrics.nll, "Brier": metrics.brier, "ECE": metrics.ece}
)
UNCERTAINTY: Mapping[str, scores.Score] = MappingProxyType(
    {
        "total": scores.total_entropy,
        "data": scores.expected_entropy,
        "knowledge": scores.mutual_information,
    }
)
ONE_MEMBER_ENTROPY = "one member's entropy"
DETECTORS: Mapping[str, scores.Score] = MappingProxyType(
    {
        "total uncertainty": scores.total_entropy,
        "data uncertainty": scores.expected_entropy,
        "knowledge uncertainty": scores.mutual_information,
        "doubt (bma)": scores.bma,
        "predictive diversity": scores.predictive_diversity,
    }
)


@dataclass(frozen=True)
class Answers:
    """What a trained ensemble says about the digits.

    Attributes:
        digits: The data.
        run: The training run.
        known: Logits for the test images, `(members, batch, classes)`.
        unknown: Logits for unknown images, by the names of `digits.unknown`.
    """

    digits: Digits
    run: Run
    known: Tensor
    unknown: Mapping[str, Tensor]

    @property
    def num_members(self) -> int:
        """Number of members."""
        return len(self.known)

    @property
    def corrupted(self) -> tuple[Tensor, Tensor]:
        """Logits and labels of all corrupted digits."""
        logits = torch.cat([self.unknown[name] for name in CORRUPTIONS], dim=1)
        return logits, torch.cat([self.digits.unknown[name].y for name in CORRUPTIONS])


def make_member() -> nn.Module:
    """Return a small convolutional network with one output a known digit."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 64),
        nn.ReLU(),
        nn.Linear(64, KNOWN),
    )


def ask(digits: Digits, *, num_members: int, epochs: int, seed: int) -> Answers:
    """Train an ensemble on the known digits and return its answers to all others."""
    ensemble = DeepEnsemble(make_member, num_members=num_members, seed=seed)
    run = fit(
        ensemble,
        (digits.train.x, digits.train.y),
        epochs=epochs,
        batch_size=64,
        lr=5e-3,
        schedule="cosine",
        # For the curves only: nothing is selected or stopped by it, so the test images stay unseen.
        validation=(digits.test.x, digits.test.y),
        seed=seed,
        device="cpu",  # a GPU would not shorten steps this small
    )
    unknown = {name: predict(ensemble, images.x) for name, images in digits.unknown.items()}
    return Answers(digits, run, predict(ensemble, digits.test.x), unknown)


def quality(answers: Answers) -> Numbers:
    """Return accuracy, NLL, Brier score and ECE on known digits: mean of the members, and the ensemble."""
    probs, labels = answers.known.softmax(-1), answers.digits.test.y
    members = {name: fmean(metric(own, labels) for own in probs) for name, metric in QUALITY.items()}
    together = {name: metric(probs.mean(0), labels) for name, metric in QUALITY.items()}
    return {ONE_MEMBER: members, ENSEMBLE: together}


def uncertainty(answers: Answers) -> Numbers:
    """Return each set's accuracy (None where no answer can be right) and mean uncertainties, in nats."""
    sets = {KNOWN_DIGITS: answers.known, **answers.unknown}
    labels = {
        KNOWN_DIGITS: answers.digits.test.y,
        **{name: images.y for name, images in answers.digits.unknown.items()},
    }
    return {
        name: {
            "accuracy": accuracy(logits, labels[name]),
            **{kind: float(score(logits).mean()) for kind, score in UNCERTAINTY.items()},
        }
        for name, logits in sets.items()
    }


def accuracy(logits: Tensor, labels: Tensor) -> float | None:
    """Return the ensemble's accuracy, or None if it has no class for what the images show."""
    return metrics.accuracy(logits.softmax(-1).mean(0), labels) if int(labels.max()) < KNOWN else None


def detection(answers: Answers) -> Numbers:
    """Return the AUROC of each score, known against each kind of unknown digits and against all of them."""
    sets = {**answers.unknown, "all": torch.cat(list(answers.unknown.values()), dim=1)}

    def apart(score: scores.Score, unknown: Tensor, known: Tensor) -> float:
        return metrics.auroc(score(unknown), score(known))

    single = {
        name: fmean(
            apart(scores.total_entropy, unknown[[member]], answers.known[[member]])
            for member in range(answers.num_members)
        )
        for name, unknown in sets.items()
    }
    together = {
        detector: {name: apart(score, unknown, answers.known) for name, unknown in sets.items()}
        for detector, score in DETECTORS.items()
    }
    return {ONE_MEMBER_ENTROPY: single, **together}
