"""Labelled sets that a trained network is adapted to: which there are, and which of them a folder holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import torch

from dissensus_studies.harness.labelled import Files, Images, find_files, read_set

# A probe needs training images of which it can hold some out.
_FEWEST = 3
# How the reason begins why a set that is there is not taken.
UNUSABLE = "cannot be used"
_UNREADABLE = (ValueError, ImportError, OSError, EOFError, KeyError, BadZipFile)
# The seven sets of the document, and four more that are often at hand, under the names that files of them have.
ADAPTATION: Mapping[str, tuple[str, ...]] = {
    "ucf101": ("ucf101", "ucf101_midframes"),
    "food101": ("food101",),
    "flowers102": ("flowers102", "oxford_flowers102", "oxford_flowers", "102flowers", "flowers"),
    "cars": ("stanford_cars", "cars196", "cars", "stanford_car_dataset_by_classes_folder"),
    "pets": ("oxford_iiit_pet", "oxford_iiit_pets", "oxford_pets", "pets"),
    "dtd": ("dtd", "describable_textures", "textures", "dtd10_32"),
    "cifar10": ("cifar10",),
    "cifar100": ("cifar100",),
    "scenes": ("scenes", "intel_scenes", "intel_image_classification"),
    "fashion_mnist": ("fashion_mnist", "fashion_mnist_20k"),
    "mnist": ("mnist",),
}


@dataclass(frozen=True)
class Task:
    """A labelled set to adapt to: what a classifier is fitted to, what it is measured on, and what was done to get there."""

    train: Images
    test: Images
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tasks:
    """Labelled sets that are there, and why others are not or cannot be used, by name."""

    found: Mapping[str, Task]
    missing: Mapping[str, str]


def load_tasks(folder: Path, *, without: Sequence[str] = (), limit: int | None = None) -> Tasks:
    """Load the labelled sets that a folder holds in one of the layouts of `find_files`, but for those `without`.

    Where there is one part only, every second image is trained on, the others are the test; `limit` images of each part, evenly spread.
    """
    found: dict[str, Task] = {}
    missing: dict[str, str] = {}
    for name, files in ADAPTATION.items():
        if name in without:
            continue
        missing[name] = f"not found; files such as {files[0]}_train.npz are looked for"
        for each in files:
            try:
                if (there := find_files(folder, each)) is not None:
                    found[name] = _load_task(there, limit)
                    break
            except _UNREADABLE as problem:
                if not missing[name].startswith(UNUSABLE):
                    missing[name] = f"{UNUSABLE}: {problem}"
    return Tasks(found, {name: reason for name, reason in missing.items() if name not in found})


def _load_task(files: Files, limit: int | None) -> Task:
    """Return a set with at most `limit` images of each part; refuse what no classifier can be fitted to and measured on."""
    train, test, notes = read_set(files)
    if test is None:
        # In order of the classes, as images of a folder are, every second image is still half of each class.
        order = train.y.argsort(stable=True)
        train, test = train.rows(order[::2]), train.rows(order[1::2])
        notes = (*notes, "one part only: trained on half of it")
    train, test = _few(train, limit), _few(test, limit)
    known = torch.isin(test.y, train.y)
    if not known.all():
        # Few images of many classes do not have them all.
        notes = (*notes, f"{int((~known).sum())} test images of classes that were not trained on left out")
        test = test.rows(known)
    if len(train.y) < _FEWEST or not len(test.y):
        raise ValueError(
            f"{_FEWEST} training images and a test image are the least; there are {len(train.y)} and {len(test.y)}"
        )
    if len(train.y.unique()) < 2:
        raise ValueError("all training images are of one class")
    return Task(train, test, notes)


def _few(part: Images, limit: int | None) -> Images:
    if limit is None or limit >= len(part.x):
        return part
    return part.rows(torch.arange(limit) * len(part.x) // limit)
