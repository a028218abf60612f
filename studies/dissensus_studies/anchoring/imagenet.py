"""`anchoring` with `setting="imagenet"`: the document's tables 10 and 11 on a folder of ImageNet's layout.

The folder has `train/<class>/*` and `val/<class>/*`, and in `ood/` what is there of the unknown sets. Networks are torchvision's (or
timm's). Training follows torchvision's reference recipes in their simple form: crops and flips, no mixing of images and no average of
weights. References are training images spread over all classes, as many as fit; the document takes all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.data.corruptions import CBAR, STANDARD
from dissensus.data.suites import ANCHORING_IMAGENET, load_suite
from dissensus.html import Section, Table, Text
from dissensus.members import Anchored, DeepEnsemble, Members
from dissensus.randomness import derive, permutation
from dissensus.training.schedules import MultiStep
from dissensus_studies.anchoring.arms import SCORES
from dissensus_studies.anchoring.tables import PUBLISHED, Row, auroc_of, beside, under_corruption
from dissensus_studies.harness.arm_log import Arm, Arms, Record
from dissensus_studies.harness.image_arms import measure, summary_line, training_record
from dissensus_studies.harness.image_sets import Images, ImageSets
from dissensus_studies.harness.image_study import Options
from dissensus_studies.harness.imagenet import (
    MEAN,
    SGD,
    SIZE,
    STD,
    FolderImages,
    fit_folder,
    network,
    normalise,
    read_folder,
    run_folder,
)

REFERENCES = 1000
# Validation images that are judged by, of 50 000, and of these so many are corrupted.
JUDGED, CORRUPTED = 10_000, 2000


@dataclass(frozen=True)
class Architecture:
    """A network of the document's tables and how it is trained.

    Attributes:
        name: What the tables call it.
        make: Makes one, given the number of classes.
        alphas: Masking probabilities.
        epochs: Of its usual recipe.
        training: Arguments of `fit`.
    """

    name: str
    make: Callable[[int], nn.Module]
    alphas: tuple[float, ...] = (0.1,)
    epochs: int = 90
    training: dict[str, Any] = field(default_factory=dict)


ARCHITECTURES: Sequence[Architecture] = (
    Architecture(
        "resnet18",
        partial(network, "resnet18"),
        (0.025, 0.05, 0.1),
        90,
        {**SGD, "lr": 0.1, "weight_decay": 1e-4, "schedule": "steps"},
    ),
    Architecture(
        "regnet",
        partial(network, "regnet_y_800mf"),
        (0.1,),
        100,
        {**SGD, "lr": 0.2, "weight_decay": 5e-5, "schedule": "cosine"},
    ),
    Architecture(
        "vit-b-16",
        partial(network, "vit_b_16"),
        (0.1,),
        300,
        {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "clip_norm": 1.0},
    ),
)


def read_sets(folder: Path, size: int, limit: int | None = None) -> tuple[FolderImages, ImageSets]:
    """Return the training images of a folder, and what networks are judged by: validation and unknown images, uint8."""
    train, validation, classes = read_folder(folder, size)
    judged = validation.spread(min(limit or JUDGED, JUDGED))
    test = Images(judged.pixels(), torch.tensor(judged.labels))
    none = Images(test.x[:0], test.y[:0])
    ood, groups, missing = {}, {}, [each.name for each in ANCHORING_IMAGENET.sets]
    if (folder / "ood").is_dir():
        found = load_suite(ANCHORING_IMAGENET, folder / "ood", (3, size, size))
        ood, groups = {name: x[:JUDGED] for name, x in found.sets.items()}, dict(found.groups)
        missing = list(found.missing)
    absent = {name: "not found in ood/" for name in missing}
    sets = ImageSets("imagenet", none, none, test, ood, groups, absent, len(classes), MEAN, STD)
    return train.spread(limit), sets


def references_of(images: FolderImages, seed: int, count: int = REFERENCES) -> Tensor:
    """Return training images of all classes without augmentation, in random order."""
    chosen = normalise(images.spread(count).pixels())
    return chosen[permutation(torch.tensor(derive(seed, "references")), len(chosen))]


def run_imagenet(options: Options, size: int = SIZE, architectures: Sequence[Architecture] = ARCHITECTURES) -> Path:
    """Train every network plain, anchored and masked; write tables 10 and 11 beside ours."""
    read: list[ImageSets] = []

    def arms(folder: Path) -> list[Arm]:
        images, sets = read_sets(folder, size, options.limit)
        read.append(sets)
        return [
            Arm(f"{each.name} {_row(alpha)}", partial(_work, each, alpha, images, sets, options), each.name)
            for each in architectures
            for alpha in (None, 0.0, *each.alphas)
        ]

    return run_folder(
        options,
        "Masked anchoring on ImageNet",
        "Plain, anchored and masked networks under corruption and on unknown images.",
        arms,
        lambda found, outputs: _sections(found, read[0]),
        settings={"size": size},
    )


def _row(alpha: float | None) -> str:
    return f"alpha={alpha:g}" if alpha else "plain" if alpha is None else "anchored"


def _work(each: Architecture, alpha: float | None, images: FolderImages, sets: ImageSets, options: Options) -> Record:
    """Train and measure one network, with references unless `alpha` is None."""
    seed, epochs = options.seed, options.epochs or each.epochs
    members: Members = DeepEnsemble(partial(each.make, sets.num_classes), 1, seed)
    if alpha is not None:
        references = references_of(images, seed)
        members = Anchored(members, references, 1, seed, mask_probability=alpha, initialise="fresh")
    training = {"epochs": epochs, "batch_size": 256, **each.training}
    if training.get("schedule") == "steps":
        training["schedule"] = MultiStep((epochs / 3, 2 * epochs / 3), 0.1)
    run = fit_folder(members, images, seed=seed, **training)
    single = DeepEnsemble.from_members([members.member(0)])
    common: dict[str, Any] = {
        "scores": SCORES,
        "transform": normalise,
        "corrupted_images": CORRUPTED,
        "batch_size": 256,
    }
    record = measure(single, sets, corruptions=STANDARD, **common)
    record["cbar"] = measure(single, sets, corruptions=CBAR, **common)["corrupted"]
    record |= {"architecture": each.name, "row": _row(alpha), "training": training_record(run)}
    record["line"] = summary_line(record)
    return record


def _sections(found: Arms, sets: ImageSets) -> tuple[list[Table], list[Section]]:
    records: dict[Row, list[Record]] = {}
    for record in found.done.values():
        records.setdefault((record["architecture"], record["row"]), []).append(record)
    parts = ("test", "corrupted", "cbar")
    rows = [
        (name, *((record[part] if part == "test" else record[part]["all"])["accuracy"][0] for part in parts))
        for name, record in found.done.items()
    ]
    accuracies = Table(("arm", "validation", "C", "C-bar"), rows, "Accuracy")
    published = [
        beside(PUBLISHED["calibration imagenet-c"], records, under_corruption("smooth_ece")),
        beside(PUBLISHED["calibration imagenet-c-bar"], records, under_corruption("smooth_ece", "cbar")),
        beside(PUBLISHED["ood imagenet"], records, auroc_of(SCORES[0])),
    ]
    how = Text(
        f"{len(sets.test.x)} validation images, of which at most {CORRUPTED} are corrupted by our own code, in the manner of "
        f"ImageNet-C and C-bar. AUROC of {SCORES[0]}, one reference. Networks: ResNet-18, RegNet-Y 800 MF (the document does not say "
        "which RegNet) and ViT-B/16, in simpler recipes than those behind published weights."
    )
    return [accuracies, *published], [
        Section("Accuracy", accuracies),
        Section("The document's tables beside ours", how, *published),
        Section("Sets", Table(("set", "part", "images", "remark"), sets.describe())),
    ]
