"""Handwritten digits that come with scikit-learn, the ensemble of the demo, and what it answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dissensus import metrics, scores
from dissensus.members import DeepEnsemble
from dissensus.predictions import predict
from dissensus.randomness import derive
from dissensus.training import Run, fit

KNOWN = 7
"""Digits below this one are known; this one and those above it are never shown in training."""

NEW = "new digits"
"""Name of the set of digits that are never shown."""

_TRAINING_SHARE = 0.6

Corrupt: TypeAlias = Callable[[Tensor, Generator], Tensor]


@dataclass(frozen=True)
class Images:
    """Images `(batch, 1, 8, 8)` in [0, 1] and the digits that they show, `(batch,)`."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Digits:
    """The data of the demo.

    Attributes:
        train: Known digits to learn from.
        test: Known digits that training does not see.
        unknown: By name: digits that are never shown, then the test images under each corruption.
    """

    train: Images
    test: Images
    unknown: Mapping[str, Images]


def noise(images: Tensor, generator: Generator) -> Tensor:
    """Add normal noise, its standard deviation half of full ink."""
    return (images + 0.5 * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def shift(images: Tensor, generator: Generator) -> Tensor:
    """Move each digit two pixels left, right, up or down; what leaves the image is lost."""
    side = images.shape[-1]
    padded = F.pad(images, (2, 2, 2, 2))
    corners = torch.tensor([(2, 0), (2, 4), (0, 2), (4, 2)])
    chosen = corners[torch.randint(0, len(corners), (len(images),), generator=generator)]
    moved = [
        image[:, top : top + side, left : left + side]
        for image, (top, left) in zip(padded, chosen.tolist(), strict=True)
    ]
    return torch.stack(moved)


def cover(images: Tensor, generator: Generator) -> Tensor:
    """Lay a grey square of four by four pixels somewhere over each digit."""
    corners = torch.randint(0, images.shape[-1] - 3, (len(images), 2), generator=generator)
    covered = images.clone()
    for image, (top, left) in zip(covered, corners.tolist(), strict=True):
        image[:, top : top + 4, left : left + 4] = 0.5
    return covered


# The corruptions of `dissensus.data` are made for photographs and need at least 16 pixels a side.
CORRUPTIONS: Mapping[str, Corrupt] = MappingProxyType({"noise": noise, "shift": shift, "cover": cover})


def load(seed: int = 0) -> Digits:
    """Return the digits, split at random into training and test images."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.as_tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.as_tensor(data.target, dtype=torch.int64)
    known = torch.nonzero(y < KNOWN).flatten()
    known = known[torch.randperm(len(known), generator=_generator(seed, "split"))]
    train, test = known.tensor_split([round(_TRAINING_SHARE * len(known))])
    corrupted = {
        name: Images(corrupt(x[test], _generator(seed, name)), y[test])
        for name, corrupt in CORRUPTIONS.items()
    }
    new = Images(x[y >= KNOWN], y[y >= KNOWN])
    return Digits(Images(x[train], y[train]), Images(x[test], y[test]), {NEW: new, **corrupted})


def _generator(seed: int, purpose: str) -> Generator:
    return Generator().manual_seed(derive(seed, "demo", purpose))


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
