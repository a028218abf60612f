"""The arms of `masksembles`: one network as an ensemble at each scale, and what lies at both ends of the dial."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, Literal

from torch import Tensor, nn

from dissensus import metrics
from dissensus.architectures import resnet18
from dissensus.members import BatchEnsemble, DeepEnsemble, Masksembles, MCDropout, Members
from dissensus.randomness import derive, seeded
from dissensus_studies.harness.arm_log import Arm, Record
from dissensus_studies.harness.image_arms import (
    BATCH_SIZE,
    file_name,
    fit_images,
    measure,
    on_pixels,
    record_of,
    save_outputs,
    summary_line,
)
from dissensus_studies.harness.image_study import Work
from dissensus_studies.harness.statistics import ece_floor

NUM_MEMBERS = 4
SCALES = (1.0, 2.0, 3.0, 4.0, 5.0)
DROPOUT = 0.2
EPOCHS, QUICK_EPOCHS = 40, 10
RATE = 0.1
REPEATS = 3
QUICK_BATCH = 32
BINS = 15

Kind = Literal["deep", "masks", "dropout", "batch"]


@dataclass(frozen=True)
class MaskSetting:
    """One ensemble of the study.

    Attributes:
        kind: Deep ensemble, masks, MC dropout or BatchEnsemble.
        scale: Of the masks.
        grow: Whether masked layers are widened, so that members are as large as the single network.
        batches: Whether members of masks train on shares of a batch, as the document's, or on all of it, as a deep
            ensemble's do.
        seed: Of the run.
    """

    kind: Kind
    scale: float | None = None
    grow: bool = True
    batches: Literal["split", "whole"] = "split"
    seed: int = 0

    @property
    def family(self) -> str:
        """What it is but for the seed.

        Example:
            >>> MaskSetting("masks", 2.0).family, MaskSetting("masks", 2.0, grow=False, batches="whole").family
            ('masks S=2', 'thin masks S=2, whole batches')
        """
        names = {"deep": "deep ensemble", "dropout": f"MC dropout p={DROPOUT:g}", "batch": "BatchEnsemble"}
        if self.kind != "masks":
            return names[self.kind]
        last = ", whole batches" if self.batches == "whole" else ""
        return f"{'' if self.grow else 'thin '}masks S={self.scale:g}{last}"

    @property
    def name(self) -> str:
        """Name of the arm."""
        return f"{self.family} seed={self.seed}"


def settings_of(quick: bool, seed: int) -> list[MaskSetting]:
    """Return all ensembles in order of importance: everything once, then again with other seeds."""
    if quick:
        # A few hundred images make so few steps that a quarter of each batch would not train a member.
        masks = [MaskSetting("masks", scale, batches="whole", seed=seed) for scale in SCALES]
        return [MaskSetting("deep", seed=seed), *masks, MaskSetting("dropout", seed=seed)]
    # The ends of the dial first: they are what the claims are about.
    scales = sorted(SCALES, key=lambda scale: (scale not in (SCALES[0], SCALES[-1]), scale))
    once = [
        MaskSetting("deep"),
        *(MaskSetting("masks", scale) for scale in scales),
        MaskSetting("dropout"),
        *(MaskSetting("masks", scale, batches="whole") for scale in scales[1:]),
        MaskSetting("batch"),
        *(MaskSetting("masks", scale, grow=False) for scale in SCALES[1:]),
    ]
    return [replace(each, seed=seed + repeat) for repeat in range(REPEATS) for each in once]


def arms_of(work: Work) -> list[Arm]:
    """Return an arm for every ensemble: it is trained, measured, and its outputs are kept in `outputs/`."""
    return [
        Arm(each.name, partial(train_and_measure, each, work), like=each.family)
        for each in settings_of(work.quick, work.seed)
    ]


def train_and_measure(setting: MaskSetting, work: Work) -> Record:
    """Train one ensemble; return its record."""
    sets, quick = work.sets, work.quick
    network = small_network if quick else resnet18
    members = make_members(setting, lambda: on_pixels(network(sets.num_classes), sets), NUM_MEMBERS)
    run = fit_images(
        members,
        sets,
        all_train=True,
        watch="nothing",
        seed=setting.seed,
        epochs=work.epochs or (QUICK_EPOCHS if quick else EPOCHS),
        lr=RATE,
        batch_size=QUICK_BATCH if quick else BATCH_SIZE,
    )
    record = measure(members, sets, name=setting.name, seed=setting.seed)
    logits = save_outputs(members, sets, work.output / "outputs" / f"{file_name(setting.name)}.npz")
    record |= {
        **record_of(setting, run),
        "family": setting.family,
        "parameters": sum(parameter.numel() for parameter in members.parameters()),
        "member_parameters": sum(parameter.numel() for parameter in members.member(0).parameters()),
        **ensemble_numbers(logits, sets.test.y),
    }
    record["line"] = f"{summary_line(record)}, diversity {record['diversity']:.4f}"
    return record


def small_network(classes: int) -> nn.Module:
    """Make the network of the quick study: three convolutions and two linear layers, on images of a quarter of the area."""
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    for before, width, stride in ((3, 16, 1), (16, 32, 2), (32, 32, 2)):
        convolution = nn.Conv2d(before, width, kernel_size=3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes)]
    return nn.Sequential(*layers, *head)


def make_members(setting: MaskSetting, make: Callable[[], nn.Module], num_members: int) -> Members:
    """Make an untrained ensemble; all kinds of one seed start from the same first network."""
    if setting.kind == "deep":
        return DeepEnsemble(make, num_members, setting.seed)
    if setting.kind == "batch":
        return BatchEnsemble(make, num_members, setting.seed)
    with seeded(derive(setting.seed, "initial weights", 0)):
        net = make()
    if setting.kind == "dropout":
        return MCDropout(with_dropout(net, DROPOUT), num_members, setting.seed)
    assert setting.scale is not None
    return Masksembles(net, num_members, setting.scale, seed=setting.seed, grow=setting.grow, batches=setting.batches)


def with_dropout(net: nn.Module, rate: float) -> nn.Module:
    """Put dropout where masks would be, in place; return the network."""
    for layer in Masksembles(net, 2, 1.0, grow=True).masked_layers:
        parent, _, name = layer.name.rpartition(".")
        owner = net.get_submodule(parent)
        setattr(owner, name, nn.Sequential(owner.get_submodule(name), nn.Dropout(rate)))
    return net


def ensemble_numbers(logits: Tensor, labels: Tensor) -> Record:
    """Return accuracy and diversity of every pair of members, calibration of the ensemble and of its members.

    Args:
        logits: Members' outputs, `(members, images, classes)`.
        labels: True classes.
    """
    predictions, probs = logits.argmax(-1), logits.double().softmax(-1)
    accuracies = [float(accuracy) for accuracy in (predictions == labels).double().mean(1)]
    pairs: list[dict[str, Any]] = [
        {
            "members": [a, b],
            "accuracy": (accuracies[a] + accuracies[b]) / 2,
            "disagreement": metrics.disagreement(predictions[a], predictions[b]),
            "diversity": metrics.pair_diversity(predictions[a], predictions[b], labels),
        }
        for a, b in combinations(range(len(logits)), 2)
    ]
    return {
        "pairs": pairs,
        "diversity": sum(pair["diversity"] for pair in pairs) / len(pairs),
        "curve": _curve(probs.mean(0), labels),
        "member_curve": _curve(probs[0], labels),
        "member_ece": sum(float(metrics.ece(member, labels, BINS)) for member in probs) / len(probs),
        "ece": float(metrics.ece(probs.mean(0), labels, BINS)),
        "ece_floor": ece_floor(probs.mean(0).amax(-1).numpy(force=True), BINS),
    }


def _curve(probs: Tensor, labels: Tensor) -> dict[str, list[float]]:
    found = metrics.reliability_curve(probs, labels, bins=BINS)
    parts = {"confidence": found.confidence, "accuracy": found.accuracy, "weight": found.weight}
    return {name: [round(float(value), 6) for value in values] for name, values in parts.items()}
