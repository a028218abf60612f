"""Labelled sets that a trained network is adapted to: which there are, and which of them a folder holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dissensus.data.files import Loaded, load
from dissensus.data.images import match_images
from dissensus.data.suites import Suite, SuiteSet

_PARTS = {"train": ("train", "training", "trainval"), "test": ("test", "val", "validation")}


class Labelled(NamedTuple):
    """Images, uint8 `(images, channels, height, width)`, and class indices: a pair as `linear_probe` takes it."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Task:
    """A labelled set to adapt to.

    Attributes:
        train: What a classifier is fitted to.
        test: What it is measured on.
        notes: What was done to get there.
    """

    train: Labelled
    test: Labelled
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tasks:
    """What of a suite of labelled sets is there.

    Attributes:
        found: The sets by name.
        missing: Sets that are not there, or cannot be read: name to reason.
    """

    found: Mapping[str, Task]
    missing: Mapping[str, str]


def _labelled_suite(name: str, sets: Mapping[str, tuple[str, ...]]) -> Suite:
    return Suite(name, "", tuple(SuiteSet(each, "far", files) for each, files in sets.items()))


ADAPTATION = _labelled_suite(
    "anchoring-adaptation",
    {
        "ucf101": ("ucf101", "ucf_101"),
        "food101": ("food101", "food_101"),
        "flowers102": ("flowers102", "oxford_flowers", "flowers"),
        "cars": ("stanford_cars", "cars", "cars196"),
        "pets": ("oxford_pets", "oxford_iiit_pet", "pets"),
        "dtd": ("dtd", "textures", "dtd10_32"),
        "cifar10": ("cifar10",),
        "cifar100": ("cifar100",),
        "scenes": ("scenes", "intel_scenes"),
        "fashion_mnist": ("fashion_mnist", "fashion_mnist_20k"),
        "mnist": ("mnist",),
    },
)
"""The seven sets of the study of masked anchoring, and four more that are often at hand."""


def load_tasks(
    folder: str | Path,
    shape: tuple[int, int, int],
    *,
    without: Sequence[str] = (),
    limit: int | None = None,
    suite: Suite = ADAPTATION,
) -> Tasks:
    """Load the labelled sets that a folder holds, with channels and size of the network's own images.

    For a set `name` these are looked for: `name_train.npz` (or its parts `name_train_1of5.npz`, ...) and `name_test.npz`; one
    `name.npz` with x_train, y_train, x_test and y_test; folders `name/train/<class>/` and `name/test/<class>/`. Where there is one
    part only (`name.npz`, `name_test.npz`, `name/<class>/`), every second image of it is trained on and the others are the test.

    Args:
        folder: Where the sets are.
        shape: Channels, height and width of the network's images.
        without: Names to leave out, such as the set that the network was trained on.
        limit: Take at most so many images of each part, evenly spread.
        suite: Which sets.

    Returns:
        What is there, and why others are not.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"The folder of labelled sets, {folder}, does not exist.")
    found: dict[str, Task] = {}
    missing: dict[str, str] = {}
    for each in suite.sets:
        if each.name in without:
            continue
        try:
            task = _load_task(folder, each, shape, limit)
        except (ValueError, ImportError) as problem:
            missing[each.name] = f"not readable: {problem}"
            continue
        if task is None:
            missing[each.name] = f"not found; files such as {each.files[0]}_train.npz are looked for"
        else:
            found[each.name] = task
    return Tasks(MappingProxyType(found), MappingProxyType(missing))


def _load_task(folder: Path, each: SuiteSet, shape: tuple[int, int, int], limit: int | None) -> Task | None:
    for name in each.files:
        train, test = (_paths(folder, name, part) for part in ("train", "test"))
        if train and test:
            known, other = _joined(train, test, shape)
            return _task(known, other, limit)
        single = _single(folder, name)
        if single is None:
            continue
        if single.suffix == ".npz" and _has_both(single):
            first, second = (load(single, split=part) for part in ("train", "test"))
            return _task(_read(first, shape), _read(_numbered(second, first.classes), shape), limit)
        return _halves(_read(load(single, size=_size(single, shape)), shape), limit)
    return None


def _paths(folder: Path, name: str, part: str) -> list[Path]:
    """Return the files or the folder of one part of a set."""
    for word in _PARTS[part]:
        if (folder / f"{name}_{word}.npz").is_file():
            return [folder / f"{name}_{word}.npz"]
        if (folder / name / word).is_dir():
            return [folder / name / word]
        pieces = sorted(folder.glob(f"{name}_{word}_*of*.npz"))
        total = {path.stem.rpartition("of")[2] for path in pieces}
        if pieces and total == {str(len(pieces))}:
            return pieces
    return []


def _single(folder: Path, name: str) -> Path | None:
    """Return the one file or folder of a set that is there in one part."""
    plain = [folder / f"{name}.npz", *(folder / f"{name}_{word}.npz" for word in _PARTS["test"])]
    # Published files of a part of a set carry its size behind their name.
    plain += sorted(folder.glob(f"{name}_test_*.npz"))
    plain += [folder / name] if (folder / name).is_dir() else []
    return next((path for path in plain if path.exists()), None)


def _has_both(path: Path) -> bool:
    with np.load(path, allow_pickle=False) as arrays:
        return {"x_train", "y_train", "x_test", "y_test"} <= set(arrays.files)


def _size(path: Path, shape: tuple[int, int, int]) -> int | None:
    return shape[1] if path.is_dir() and shape[1] == shape[2] else None


def _joined(
    train: Sequence[Path], test: Sequence[Path], shape: tuple[int, int, int]
) -> list[tuple[Labelled, tuple[str, ...]]]:
    """Return both parts, each from its files; classes that have names get the same number in all of them."""
    known, other = ([load(path, size=_size(path, shape)) for path in paths] for paths in (train, test))
    named = [each.classes for each in known if each.classes is not None]
    classes = tuple(sorted({name for names in named for name in names})) if named else None
    joined = []
    for loaded in (known, other):
        parts = [_read(_numbered(each, classes), shape) for each in loaded]
        x, y = (torch.cat([pair[place] for pair, _ in parts]) for place in (0, 1))
        joined.append((Labelled(x, y), parts[0][1]))
    return joined


def _numbered(loaded: Loaded, classes: tuple[str, ...] | None) -> Loaded:
    """Number classes that have names as others do: a part that lacks a class would count on from another one."""
    if loaded.y is None or loaded.classes is None or classes is None or loaded.classes == classes:
        return loaded
    if unknown := sorted(set(loaded.classes) - set(classes)):
        raise ValueError(f"the test images have the class {unknown[0]!r}, which the training images lack")
    return replace(
        loaded, y=torch.tensor([classes.index(name) for name in loaded.classes])[loaded.y], classes=classes
    )


def _read(loaded: Loaded, shape: tuple[int, int, int]) -> tuple[Labelled, tuple[str, ...]]:
    if loaded.y is None or loaded.y.is_floating_point() or loaded.x.ndim != 4:
        raise ValueError("images with class labels are wanted")
    x, notes = match_images(loaded.x, *shape)
    return Labelled(x, loaded.y), notes


def _task(
    train: tuple[Labelled, tuple[str, ...]], test: tuple[Labelled, tuple[str, ...]], limit: int | None
) -> Task:
    return Task(_few(train[0], limit), _few(test[0], limit), train[1])


def _halves(whole: tuple[Labelled, tuple[str, ...]], limit: int | None) -> Task:
    # In order of the classes, as images of a folder are, every second image is still half of each class.
    order = whole[0].y.argsort(stable=True)
    parts = [Labelled(whole[0].x[rows], whole[0].y[rows]) for rows in (order[::2], order[1::2])]
    task = _task((parts[0], whole[1]), (parts[1], ()), limit)
    return replace(task, notes=(*task.notes, "one part only: trained on half of it"))


def _few(pair: Labelled, limit: int | None) -> Labelled:
    if limit is None or limit >= len(pair.x):
        return pair
    rows = torch.arange(limit) * len(pair.x) // limit
    return Labelled(pair.x[rows], pair.y[rows])
