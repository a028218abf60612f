"""The arms of `collusion-images`: which ensembles are trained between independent and joint, and how.

The released protocol (SGD at 0.1, decay of weights 5e-4) minimises an average over members; `fit` minimises their sum. The same
steps are had with the learning rate divided by the number of members and the decay of weights multiplied by it. Adam's steps
do not depend on the scale.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal

from torch import Tensor, nn

from dissensus.architectures import ARCHITECTURES
from dissensus.data.sources import weighted_batches
from dissensus.diagnostics import diagnose
from dissensus.members import DeepEnsemble
from dissensus.objectives import Joint, Likelihood, decompose
from dissensus.training import Run
from dissensus.training.validation import validate
from dissensus_studies.harness.arm_log import Arm, Record
from dissensus_studies.harness.image_arms import (
    file_name,
    fit_images,
    measure,
    on_pixels,
    record_of,
    released_steps,
    save_outputs,
    summary_line,
)
from dissensus_studies.harness.image_sets import ImageSets
from dissensus_studies.harness.image_study import Work

BETAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
DROPPED = (0.2, 0.4, 0.6)
EPOCHS, GAP_EPOCHS = 80, 100
QUICK_EPOCHS, QUICK_BATCH = 6, 32
RATE, DECAY, ADAM_RATE = 0.1, 5e-4, 1e-3
# Training images that gap curves look at after every epoch.
WATCHED_IMAGES = 10_000
# The small network stops when its validation error has not fallen for so many epochs.
CNN_PATIENCE = 5


@dataclass(frozen=True)
class JointSetting:
    """One ensemble of the study.

    Attributes:
        architecture: A name of `ARCHITECTURES`.
        num_members: Members.
        beta: From 0, independent, to 1, joint.
        average: What the ensemble averages: probabilities or scores.
        member_dropout: Share of members left out of every training batch.
        experiment: "sweep" selects on validation error; "gap" trains to the end and watches the test images.
        seed: Of the run.
    """

    architecture: str = "resnet18"
    num_members: int = 5
    beta: float = 0.0
    average: Literal["probs", "scores"] = "probs"
    member_dropout: float = 0.0
    experiment: Literal["sweep", "gap"] = "sweep"
    seed: int = 0

    @property
    def family(self) -> str:
        """What it is but for beta, dropped members and seed.

        Example:
            >>> JointSetting(experiment="gap").family, JointSetting(average="scores").family
            ('gap resnet18 M=5', 'resnet18 M=5 scores')
        """
        first = "gap " if self.experiment == "gap" else ""
        last = " scores" if self.average == "scores" else ""
        return f"{first}{self.architecture} M={self.num_members}{last}"

    @property
    def name(self) -> str:
        """Name of the arm."""
        dropped = f" drop={self.member_dropout:g}" if self.member_dropout else ""
        return f"{self.family} beta={self.beta:g}{dropped} seed={self.seed}"


def settings_of(quick: bool, seed: int) -> list[JointSetting]:
    """Return all ensembles in order of importance: every experiment once, then again with other seeds."""
    return list(_quick_settings(seed) if quick else _full_settings(seed))


def _quick_settings(seed: int) -> Iterator[JointSetting]:
    first = JointSetting("cnn", seed=seed)
    yield from (replace(first, beta=beta) for beta in (0.0, 1.0, 0.6))
    yield from (replace(first, beta=beta, experiment="gap") for beta in (0.0, 1.0))
    yield replace(first, beta=1.0, average="scores")
    yield replace(first, beta=1.0, member_dropout=0.4)


def _full_settings(seed: int) -> Iterator[JointSetting]:
    """Repeats are the document's: six of the main figures, five of learner dropout, three of the others."""
    # The ends of the range first: they are what the claims are about.
    betas = (BETAS[0], *reversed(BETAS[1:]))
    experiments: tuple[tuple[int, dict[str, Any], str, Sequence[float]], ...] = (
        (6, {}, "beta", betas),
        (6, {"experiment": "gap"}, "beta", (0.0, 1.0)),
        (5, {"beta": 1.0}, "member_dropout", DROPPED),
        (3, {"architecture": "cnn"}, "beta", betas),
        (3, {"average": "scores"}, "beta", betas),
        (3, {"architecture": "cnn", "num_members": 10}, "beta", betas),
        (6, {"architecture": "resnet34"}, "beta", betas),
        (3, {"architecture": "vgg"}, "beta", betas),
        (3, {"num_members": 10}, "beta", betas),
    )
    for repeat in range(6):
        for repeats, changes, varied, values in experiments:
            if repeat < repeats:
                base = JointSetting(**changes, seed=seed + repeat)
                yield from (replace(base, **{varied: value}) for value in values)  # type: ignore[arg-type]


def arms_of(work: Work) -> list[Arm]:
    """Return an arm for every ensemble: it is trained, measured, and its outputs are kept in `outputs/`."""
    return [
        Arm(each.name, partial(train_and_measure, each, work), like=each.family)
        for each in settings_of(work.quick, work.seed)
    ]


def training_of(setting: JointSetting, epochs: int | None, quick: bool) -> dict[str, Any]:
    """Return the arguments of `fit_images`."""
    gap = setting.experiment == "gap"
    if epochs is None:
        epochs = QUICK_EPOCHS if quick else GAP_EPOCHS if gap else EPOCHS
    elif gap:
        epochs = max(1, round(epochs * GAP_EPOCHS / EPOCHS))
    chosen: dict[str, Any] = {"epochs": epochs, "changes": "crop+rotation", "seed": setting.seed}
    if quick:
        chosen |= {"batch_size": QUICK_BATCH, "changes": "crop"}
    if gap or setting.architecture == "cnn":
        chosen |= {"optimizer": "adam", "lr": ADAM_RATE, "weight_decay": 0.0, "schedule": "constant"}
    else:
        chosen |= {
            "lr": RATE / setting.num_members,
            "weight_decay": DECAY * setting.num_members,
            "schedule": released_steps(epochs),
        }
    if gap:
        return chosen | {"all_train": True, "watch": "test"}
    if setting.architecture == "cnn":
        chosen["patience"] = CNN_PATIENCE
    return chosen | {"select": "ensemble_loss"}


def train_and_measure(setting: JointSetting, work: Work) -> Record:
    """Train one ensemble; return its record."""
    sets, training = work.sets, training_of(setting, work.epochs, work.quick)

    def network() -> nn.Module:
        return on_pixels(ARCHITECTURES[setting.architecture](classes=sets.num_classes), sets)

    ensemble = DeepEnsemble(network, setting.num_members, setting.seed)
    objective = Joint(beta=setting.beta, average=setting.average, member_dropout=setting.member_dropout)
    train_watch = TrainWatch(sets, objective.likelihood)
    if setting.experiment == "gap":
        training["callback"] = train_watch
    run = fit_images(ensemble, sets, objective, **training)
    record = measure(ensemble, sets, name=setting.name, seed=setting.seed)
    logits = save_outputs(ensemble, sets, work.output / "outputs" / f"{file_name(setting.name)}.npz")
    record |= {
        **record_of(setting, run),
        "family": setting.family,
        **joint_numbers(logits, sets.test.y, setting.average),
        "diagnosis": diagnosis(logits, sets.test.y, setting.average),
    }
    record["training"]["clean"] = train_watch.values
    record["line"] = summary_line(record) + f", diversity {record['diversity']:.4f}"
    return record


class TrainWatch:
    """Looks at training images as at test images after every epoch: not augmented, without dropout, all members at one moment.

    Attributes:
        values: Columns of the training images' errors, one value an epoch.
    """

    def __init__(self, sets: ImageSets, likelihood: Likelihood, images: int = WATCHED_IMAGES) -> None:
        self.batches = list(weighted_batches((sets.train.x[:images], sets.train.y[:images]), 2048))
        self.likelihood = likelihood
        self.values: dict[str, list[float]] = {"ensemble_error": [], "member_error": []}

    def __call__(self, run: Run) -> None:
        """Add the errors of this moment."""
        members, whole = validate(run.members, self.batches, self.likelihood)
        self.values["ensemble_error"].append(whole["ensemble_loss"])
        self.values["member_error"].append(fmean(members["validation_loss"]))


def joint_numbers(logits: Tensor, labels: Tensor, average: str) -> dict[str, float]:
    """Return test numbers of the ensemble as it was trained to average: accuracy, ERR, ERRbar and DIV."""
    parts = decompose(logits.double(), labels, average=average)
    pooled = logits.softmax(-1).mean(0) if average == "probs" else logits.mean(0)
    return {
        "accuracy": float((pooled.argmax(-1) == labels).double().mean()),
        "member_accuracy": float((logits.argmax(-1) == labels).double().mean()),
        "ensemble_error": float(parts.ensemble_error.mean()),
        "member_error": float(parts.member_error.mean()),
        "diversity": float(parts.diversity.mean()),
    }


def diagnosis(logits: Tensor, labels: Tensor, average: Literal["probs", "scores"]) -> dict[str, Any]:
    """Return the verdict on test outputs, and the numbers that it rests on."""
    finding = diagnose(logits, labels, average=average, repeats=20)
    return {
        "verdict": ", ".join(finding.signs) or ("suspected" if finding.suspected else "no sign"),
        "diversity_ratio": finding.diversity_ratio,
        "bias_share": finding.bias_share,
        "class_share": finding.measures.class_share,
        "kept_mean": finding.measures.kept_mean,
        "codependence": finding.codependence,
    }
