"""`anchoring` with `setting="imagenet"`: the document's tables 10 and 11 on a folder of ImageNet's layout.

The folder has `train/<class>/*` and `val/<class>/*`, and in `ood/` what is there of the unknown sets. Networks are torchvision's (or
timm's). Training follows torchvision's reference recipes in their simple form: crops and flips, no mixing of images and no average of
weights. References are training images spread over all classes, as many as fit; the document takes all of them.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dissensus.data.corruptions import CBAR, STANDARD
from dissensus.data.images import decode, find_pictures, open_picture
from dissensus.data.suites import ANCHORING_IMAGENET, load_suite
from dissensus.html import Section, Table, Text
from dissensus.members import Anchored, DeepEnsemble, Members
from dissensus.randomness import derive, permutation
from dissensus.training import fit
from dissensus.training.schedules import MultiStep
from dissensus_studies.anchoring_arms import SCORES
from dissensus_studies.anchoring_tables import (
    CALIBRATION_IMAGENET_C,
    CALIBRATION_IMAGENET_CBAR,
    OOD_IMAGENET,
    Row,
    as_markdown,
    auroc_of,
    beside,
    smooth_ece,
)
from dissensus_studies.arm_log import Arm, Arms, Record, run_arms
from dissensus_studies.collusion_imagenet import network
from dissensus_studies.image_arms import measure, summary_line, training_record
from dissensus_studies.image_sets import Images, ImageSets, imagenet_folder, normalised
from dissensus_studies.outputs import Outputs, print_table

ALPHAS = (0.025, 0.05, 0.1)
# Usual means and deviations of ImageNet's channels.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, REFERENCES = 224, 1000
# Validation images that are judged by, of 50 000, and of these so many are corrupted.
JUDGED, CORRUPTED = 10_000, 2000
FEW_IMAGES = 5000


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


def _sgd(lr: float, weight_decay: float) -> dict[str, Any]:
    return {
        "optimizer": "sgd",
        "optimizer_options": {"momentum": 0.9},
        "lr": lr,
        "weight_decay": weight_decay,
    }


ARCHITECTURES: Sequence[Architecture] = (
    Architecture(
        "resnet18", partial(network, "resnet18"), ALPHAS, 90, {**_sgd(0.1, 1e-4), "schedule": "steps"}
    ),
    Architecture(
        "regnet", partial(network, "regnet_y_800mf"), (0.1,), 100, {**_sgd(0.2, 5e-5), "schedule": "cosine"}
    ),
    Architecture(
        "vit-b-16",
        partial(network, "vit_b_16"),
        (0.1,),
        300,
        {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "clip_norm": 1.0},
    ),
)


@dataclass(frozen=True)
class FolderImages(Dataset[tuple[Tensor, int]]):
    """Image files as normalised tensors, cropped and flipped at random in training, cropped in the middle otherwise.

    Attributes:
        paths: The files.
        labels: Class of each.
        size: Height and width.
        training: Whether to crop and flip at random; draws come from torch's generator, which `fit` seeds.
    """

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    size: int = SIZE
    training: bool = True

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        picture = _random_crop(path, self.size) if self.training else open_picture(path)
        pixels = decode([picture], [str(path)], self.size)[0].expand(3, -1, -1)
        if self.training and torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        return normalise(pixels[None])[0], self.labels[index]


def _random_crop(path: Path, size: int) -> Any:
    """Return a part of 8 to 100 per cent of a picture, of a shape between 3:4 and 4:3, in the wanted size."""
    picture = open_picture(path).convert("RGB")
    width, height = picture.size
    draw = torch.rand(4).tolist()
    area, shape = width * height * (0.08 + 0.92 * draw[0]), (3 / 4) ** (1 - 2 * draw[1])
    wide, high = min(width, round((area * shape) ** 0.5)), min(height, round((area / shape) ** 0.5))
    left, top = int(draw[2] * (width - wide + 1)), int(draw[3] * (height - high + 1))
    return picture.resize((size, size), box=(left, top, left + max(wide, 1), top + max(high, 1)))


def normalise(x: Tensor) -> Tensor:
    """Return uint8 images as networks take them."""
    return normalised(x, MEAN, STD)


def read_folder(folder: Path, size: int, limit: int | None = None) -> tuple[FolderImages, ImageSets]:
    """Return the training images of a folder, and what networks are judged by: validation and unknown images, uint8."""
    train, val = (find_pictures(folder / part) for part in ("train", "val"))
    if train.labels is None or val.labels is None:
        raise ValueError(f"train/ and val/ of {folder} must have a subfolder for each class.")
    classes = sorted(set(train.labels))
    if not set(val.labels) <= set(classes):
        raise ValueError(f"val/ of {folder} has classes that train/ lacks.")
    number = {name: place for place, name in enumerate(classes)}
    chosen = _spread(len(train.paths), limit)
    images = FolderImages(
        tuple(train.paths[i] for i in chosen), tuple(number[train.labels[i]] for i in chosen), size
    )
    judged = _spread(len(val.paths), min(limit or JUDGED, JUDGED))
    test = Images(
        _pixels([val.paths[i] for i in judged], size), torch.tensor([number[val.labels[i]] for i in judged])
    )
    found = (
        load_suite(ANCHORING_IMAGENET, folder / "ood", (3, size, size)) if (folder / "ood").is_dir() else None
    )
    wanted = [each.name for each in ANCHORING_IMAGENET.sets]
    missing = wanted if found is None else found.missing
    sets = ImageSets(
        "imagenet",
        Images(test.x[:0], test.y[:0]),
        Images(test.x[:0], test.y[:0]),
        test,
        {} if found is None else {name: x[:JUDGED] for name, x in found.sets.items()},
        {} if found is None else found.groups,
        {name: "not found in ood/" for name in missing},
        len(classes),
        MEAN,
        STD,
    )
    return images, sets


def _spread(count: int, limit: int | None) -> list[int]:
    """Return at most so many places, evenly spread: files are in order of their classes."""
    limit = count if limit is None else min(limit, count)
    return [place * count // limit for place in range(limit)]


def _pixels(paths: Sequence[Path], size: int) -> Tensor:
    x = decode(map(open_picture, paths), [str(path) for path in paths], size)
    return x.expand(-1, 3, -1, -1).contiguous()


def references_of(images: FolderImages, seed: int, count: int = REFERENCES) -> Tensor:
    """Return training images of all classes without augmentation, in random order."""
    places = _spread(len(images), count)
    order = permutation(torch.tensor(derive(seed, "references")), len(places)).tolist()
    return normalise(_pixels([images.paths[places[i]] for i in order], images.size))


def run_imagenet(
    output: Path,
    *,
    data: Path | None,
    epochs: int | None = None,
    minutes: float | None = None,
    limit: int | None = None,
    arms: Sequence[str] | None = None,
    seed: int = 0,
    size: int = SIZE,
    architectures: Sequence[Architecture] = ARCHITECTURES,
) -> Path:
    """Train every network plain, anchored and masked; write tables 10 and 11 beside ours."""
    folder = imagenet_folder(data)
    images, sets = read_folder(folder, size, limit)
    outputs = Outputs(output)
    wanted = [
        Arm(
            f"{each.name} {_row(anchored, alpha)}",
            partial(_work, each, anchored, alpha, images, sets, epochs, seed),
            each.name,
        )
        for each in architectures
        for anchored, alpha in ((False, 0.0), (True, 0.0), *((True, alpha) for alpha in each.alphas))
    ]
    identity = {"data": folder.name, "epochs": epochs, "limit": limit, "seed": seed, "size": size}
    found = run_arms(wanted, output, settings=identity, minutes=minutes, only=arms)
    if not found.done:
        raise ValueError(f"No arm was finished: {'; '.join(f'{k}: {v}' for k, v in found.not_run.items())}.")
    tables = _tables(found)
    outputs.sections += [
        Section("Accuracy", _accuracies(found)),
        Section("The document's tables beside ours", _how(sets), *tables),
        Section("Sets", Table(("set", "part", "images", "remark"), sets.describe())),
    ]
    if found.not_run:
        outputs.sections.append(Section("Not run", Table(("arm", "why"), list(found.not_run.items()))))
    (output / "tables.md").write_text("\n".join(map(as_markdown, tables)), encoding="utf-8")
    outputs.results({"arms": found.done, "not_run": found.not_run, "settings": identity})
    shown = _accuracies(found)
    print_table(shown.columns, shown.rows)
    return outputs.page(
        "Masked anchoring on ImageNet",
        "Plain, anchored and masked networks under corruption and on unknown images.",
    )


def _row(anchored: bool, alpha: float) -> str:
    return f"alpha={alpha:g}" if alpha else "anchored" if anchored else "plain"


def _work(
    each: Architecture,
    anchored: bool,
    alpha: float,
    images: FolderImages,
    sets: ImageSets,
    epochs: int | None,
    seed: int,
) -> Record:
    members: Members = DeepEnsemble(partial(each.make, sets.num_classes), 1, seed)
    if anchored:
        assert isinstance(members, DeepEnsemble)
        members = Anchored(
            members, references_of(images, seed), 1, seed, mask_probability=alpha, initialise="fresh"
        )
    run = fit(members, images, **_training(each, images, epochs), seed=seed, progress=False)
    single = DeepEnsemble.from_members([members.member(0)])
    common: dict[str, Any] = {
        "scores": SCORES,
        "transform": normalise,
        "corrupted_images": CORRUPTED,
        "batch_size": 256,
    }
    record = measure(single, sets, corruptions=STANDARD, **common)
    record["cbar"] = measure(single, sets, corruptions=CBAR, **common)["corrupted"]
    record |= {"architecture": each.name, "row": _row(anchored, alpha), "training": training_record(run)}
    record["line"] = summary_line(record)
    return record


def _training(each: Architecture, images: FolderImages, epochs: int | None) -> dict[str, Any]:
    epochs = epochs or each.epochs
    chosen = {"epochs": epochs, "batch_size": 256, **each.training}
    if chosen.get("schedule") == "steps":
        chosen["schedule"] = MultiStep((epochs / 3, 2 * epochs / 3), 0.1)
    few = len(images) < FEW_IMAGES
    return chosen | {
        "workers": 0 if few else min(16, max(1, (os.cpu_count() or 2) - 1)),
        "precision": "bf16" if torch.cuda.is_available() else "fp32",
        "last_batch": "drop" if len(images) >= chosen["batch_size"] else "keep",
    }


def _tables(found: Arms) -> list[Table]:
    records: dict[Row, list[Record]] = {}
    for record in found.done.values():
        records.setdefault((record["architecture"], record["row"]), []).append(record)
    return [
        beside(CALIBRATION_IMAGENET_C, records, smooth_ece),
        beside(CALIBRATION_IMAGENET_CBAR, records, partial(smooth_ece, part="cbar")),
        beside(OOD_IMAGENET, records, auroc_of(SCORES[0])),
    ]


def _accuracies(found: Arms) -> Table:
    rows = [
        (
            name,
            record["test"]["accuracy"][0],
            record["corrupted"]["all"]["accuracy"][0],
            record["cbar"]["all"]["accuracy"][0],
        )
        for name, record in found.done.items()
    ]
    return Table(("arm", "validation", "C", "C-bar"), rows, "Accuracy")


def _how(sets: ImageSets) -> Text:
    return Text(
        f"{len(sets.test.x)} validation images, of which at most {CORRUPTED} are corrupted by our own code, in the manner of "
        f"ImageNet-C and C-bar. AUROC of {SCORES[0]}, one reference. Networks: ResNet-18, RegNet-Y 800 MF (the document does not say "
        "which RegNet) and ViT-B/16, in simpler recipes than those behind published weights."
    )
