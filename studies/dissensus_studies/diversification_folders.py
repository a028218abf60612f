"""`diversification` with `setting="imagenet"`: images of a folder, a backbone to cut, and its features in files."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dissensus.caching import cache_features
from dissensus.data.corruptions import STANDARD, corrupt
from dissensus.data.features import CachedFeatures
from dissensus.data.images import find_pictures, open_picture
from dissensus.members import cut
from dissensus_studies.anchoring_imagenet import FEW_IMAGES, SIZE, FolderImages, normalise

PASSES = 4
SEVERITIES = (1, 5)
# Sets beside train/ and val/, by the name of their folder: labelled ones, and those of unknown classes.
LABELLED = {"A": "imagenet-a", "R": "imagenet-r"}
UNKNOWN = {"iNat": "inaturalist", "OI": "openimages-o"}


@dataclass(frozen=True)
class Backbone:
    """A network to cut heads from.

    Attributes:
        make: Makes it, trained.
        at: First layer of the heads.
        token: Which token crosses the cut.
    """

    make: Callable[[], nn.Module]
    at: str
    token: int = 0

    def parts(self, classes: int) -> tuple[nn.Module, Callable[[], nn.Module]]:
        """Return the frozen part, and what makes a head for so many classes."""
        return cut(self.make(), self.at, token=self.token, outputs=classes)


def deit3_base() -> nn.Module:
    """Load timm's DeiT-III base: pre-trained on ImageNet-21k, then trained on ImageNet-1k."""
    try:
        import timm
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "The imagenet setting takes its backbone from timm, which this environment lacks. Install with: pip install timm"
        ) from None
    model: nn.Module = timm.create_model("deit3_base_patch16_224.fb_in22k_ft_in1k", pretrained=True)
    return model


DEIT3 = Backbone(deit3_base, "blocks.11.norm2")


@dataclass(frozen=True)
class MiddleImages(Dataset[tuple[Tensor, int]]):
    """Image files as normalised tensors: the short side made 256/224 of the wanted one, the middle cut out, corrupted if so told.

    Attributes:
        paths: The files.
        labels: Class of each; -1 where it has none.
        size: Height and width.
        corruption: Name and severity of a corruption.
    """

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    size: int = SIZE
    corruption: tuple[str, int] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = open_picture(self.paths[index]).convert("RGB")
        width, height = picture.size
        scale = self.size * 256 / 224 / min(width, height)
        picture = picture.resize(
            (max(self.size, round(width * scale)), max(self.size, round(height * scale))), 3
        )
        left, top = (picture.size[0] - self.size) // 2, (picture.size[1] - self.size) // 2
        pixels = np.array(picture.crop((left, top, left + self.size, top + self.size)))
        x = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        if self.corruption is not None:
            name, severity = self.corruption
            x = corrupt(x[None], name, severity, index=[index])[0]
        return normalise(x[None])[0], self.labels[index]


@dataclass(frozen=True)
class Folders:
    """The images of a folder.

    Attributes:
        train: Training images.
        labelled: "Val" and what is there of the other labelled sets.
        corrupted: Validation images under every corruption: severity ("C-5") and name.
        unknown: What is there of the unknown sets.
        classes: How many there are.
        restricted: The classes of labelled sets that do not have all.
        missing: Sets that are not there.
    """

    train: FolderImages
    labelled: Mapping[str, MiddleImages]
    corrupted: Mapping[str, Mapping[str, MiddleImages]]
    unknown: Mapping[str, MiddleImages]
    classes: int
    restricted: Mapping[str, list[int]]
    missing: Sequence[str]


def read_folders(
    folder: Path, size: int, limit: int | None = None, corruptions: Sequence[str] = STANDARD
) -> Folders:
    """Find the images of all sets; `limit` takes so many of each, evenly spread."""
    found = {part: find_pictures(folder / part) for part in ("train", "val")}
    if any(pictures.labels is None for pictures in found.values()):
        raise ValueError(f"train/ and val/ of {folder} must have a subfolder for each class.")
    names = sorted(set(found["train"].labels or ()))
    number = {name: place for place, name in enumerate(names)}

    def part(name: str, known: bool) -> MiddleImages:
        pictures = find_pictures(folder / name)
        labels = pictures.labels or ("",) * len(pictures.paths)
        strange = sorted(set(labels) - set(number)) if known else []
        if strange:
            raise ValueError(f"{name}/ of {folder} has classes that train/ lacks: {', '.join(strange[:3])}.")
        chosen = _spread(len(pictures.paths), limit)
        return MiddleImages(
            tuple(pictures.paths[i] for i in chosen), tuple(number.get(labels[i], -1) for i in chosen), size
        )

    there = {name: place for name, place in LABELLED.items() if (folder / place).is_dir()}
    unknown = {name: place for name, place in UNKNOWN.items() if (folder / place).is_dir()}
    labelled = {"Val": part("val", True), **{name: part(place, True) for name, place in there.items()}}
    val = labelled["Val"]
    spread = _spread(len(found["train"].paths), limit)
    train_labels = found["train"].labels or ()
    return Folders(
        FolderImages(
            tuple(found["train"].paths[i] for i in spread),
            tuple(number[train_labels[i]] for i in spread),
            size,
        ),
        labelled,
        {
            f"C-{level}": {
                name: MiddleImages(val.paths, val.labels, size, (name, level)) for name in corruptions
            }
            for level in SEVERITIES
        },
        {name: part(place, False) for name, place in unknown.items()},
        len(names),
        {name: sorted(set(labelled[name].labels)) for name in there},
        [place for name, place in {**LABELLED, **UNKNOWN}.items() if name not in {**there, **unknown}],
    )


def _spread(count: int, limit: int | None) -> list[int]:
    """Return at most so many places, evenly spread: files are in order of their classes."""
    limit = count if limit is None else min(limit, count)
    return [place * count // limit for place in range(limit)]


class FeatureStore:
    """Features of all sets, cached in a folder; the backbone runs where they are not there yet."""

    def __init__(self, folder: Path, images: Folders, backbone: nn.Module, device: torch.device) -> None:
        self.folder, self.images, self.backbone, self.device = folder, images, backbone.to(device), device
        # To open a cache is to hash the backbone and some images: once a run, not once a configuration.
        self._opened: dict[str, CachedFeatures] = {}

    def of(self, name: str, data: Dataset[Any], passes: int = 1) -> CachedFeatures:
        """Return the features of one set."""
        if name not in self._opened:
            self._opened[name] = self._cached(name, data, passes)
        return self._opened[name]

    def _cached(self, name: str, data: Dataset[Any], passes: int) -> CachedFeatures:
        few = len(data) < FEW_IMAGES  # type: ignore[arg-type]
        return cache_features(
            self.backbone,
            data,
            self.folder / name.replace(" ", "_"),
            passes=passes,
            dtype=torch.float16,
            precision="bf16" if self.device.type == "cuda" else "fp32",
            workers=0 if few else min(32, max(1, (os.cpu_count() or 2) - 1)),
        )

    def train(self) -> CachedFeatures:
        """Return the augmented passes of the training images."""
        return self.of("train", self.images.train, PASSES)
