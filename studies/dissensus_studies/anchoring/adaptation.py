"""Labelled sets that a trained network is adapted to: which there are, and which of them a folder holds."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from dissensus.data.files import Loaded, load
from dissensus.data.images import IMAGE_ENDINGS, match_images
from dissensus.data.suites import Suite, SuiteSet, plain_name

_PARTS = {"train": ("train", "training", "trainval"), "test": ("test", "val", "validation")}
# Folders that published sets keep their classes' folders in, and how deep these may lie.
_WRAPPERS, _DEEPEST = ("images", "image", "jpg"), 4
# A probe needs training images of which it can hold some out.
_FEWEST = 3
# How the reason begins why a set that is there is not taken.
UNUSABLE = "cannot be used"
_UNREADABLE = (ValueError, ImportError, OSError, EOFError, KeyError, BadZipFile)


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
        missing: Sets that are not there, or cannot be used: name to reason.
    """

    found: Mapping[str, Task]
    missing: Mapping[str, str]


def _labelled_suite(name: str, sets: Mapping[str, tuple[str, ...]]) -> Suite:
    return Suite(name, "", tuple(SuiteSet(each, "far", files) for each, files in sets.items()))


ADAPTATION = _labelled_suite(
    "anchoring-adaptation",
    {
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
    },
)
"""The seven sets of the study of masked anchoring, and four more that are often at hand. Case, `-` and `_` make no difference."""


def load_tasks(
    folder: str | Path, shape: tuple[int, int, int], *, without: Sequence[str] = (), limit: int | None = None
) -> Tasks:
    """Load the labelled sets that a folder holds, with channels and size of the network's own images.

    For a set `name` these are looked for: `name_train.npz` (or its parts `name_train_1of5.npz`, ...) and `name_test.npz`; one
    `name.npz` with x_train, y_train, x_test and y_test; folders `name/train/<class>/` and `name/test/<class>/`. Where there is one
    part only (`name.npz`, `name_test.npz`, `name/<class>/`, `name/train/<class>/`), every second image of it is trained on and the
    others are the test. Classes may lie deeper, in `name/images/<class>/`. Case, `-` and `_` of names make no difference.

    Args:
        folder: Where the sets are.
        shape: Channels, height and width of the network's images.
        without: Names to leave out, such as the set that the network was trained on.
        limit: Take at most so many images of each part, evenly spread.

    Returns:
        What is there and can be used, and why others are not.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"The folder of labelled sets, {folder}, does not exist.")
    found: dict[str, Task] = {}
    missing: dict[str, str] = {}
    for each in ADAPTATION.sets:
        if each.name in without:
            continue
        try:
            task = _load_task(folder, each, shape, limit)
        except _UNREADABLE as problem:
            missing[each.name] = f"{UNUSABLE}: {problem}"
            continue
        if task is None:
            missing[each.name] = f"not found; files such as {each.files[0]}_train.npz are looked for"
        else:
            found[each.name] = task
    return Tasks(MappingProxyType(found), MappingProxyType(missing))


def _load_task(folder: Path, each: SuiteSet, shape: tuple[int, int, int], limit: int | None) -> Task | None:
    """Return the first of a set's files that can be used; None where there are none."""
    first: Exception | None = None
    for name in each.files:
        try:
            files = _find(folder, name)
            if files is not None:
                return _usable(_read_task(files, shape), limit)
        except _UNREADABLE as problem:
            first = first or problem
    if first is not None:
        raise first
    return None


class _Files(NamedTuple):
    """Where a set is: the files or the folder of each part; `test` is empty where there is one part only."""

    train: list[Path]
    test: list[Path]


def _find(folder: Path, name: str) -> _Files | None:
    there = {plain_name(path.name): path for path in sorted(folder.iterdir())}
    train, test = (_files_of(there, name, part) for part in ("train", "test"))
    if train and test:
        return _Files(train, test)
    own = there.get(plain_name(name))
    folders = _find_folders(own) if own is not None and own.is_dir() else None
    if folders is not None and folders.test:
        return folders
    # Published files of a part of a set carry its size behind their name.
    sized = [path for key, path in there.items() if _is_sized(key, name)]
    whole = there.get(plain_name(f"{name}.npz"))
    single = [whole] if whole is not None else test or train or sized[:1]
    return _Files(single, []) if single else folders


def _files_of(there: Mapping[str, Path], name: str, part: str) -> list[Path]:
    """Return the file of one part of a set, or all its pieces in order."""
    for word in _PARTS[part]:
        start = plain_name(f"{name}_{word}")
        if f"{start}.npz" in there:
            return [there[f"{start}.npz"]]
        pieces = {key: re.fullmatch(rf"{re.escape(start)}(\d+)of(\d+)\.npz", key) for key in there}
        numbered = {int(match[1]): (there[key], match[2]) for key, match in pieces.items() if match}
        if numbered and {total for _, total in numbered.values()} == {str(len(numbered))}:
            return [numbered[number][0] for number in sorted(numbered)]
    return []


def _is_sized(key: str, name: str) -> bool:
    return key.startswith(plain_name(f"{name}_test")) and key.endswith(".npz")


def _find_folders(folder: Path) -> _Files:
    """Return the folders of both parts, or the one folder whose subfolders are the classes."""
    for inner in _inwards(folder):
        subfolders = _subfolders(inner)
        parts = _parts(subfolders)
        if parts is not None:
            train, test = (list(_inwards(path))[-1] for path in parts)
            return _Files([train], [test])
    return _Files([list(_inwards(folder))[-1]], [])


def _subfolders(folder: Path) -> dict[str, Path]:
    return {plain_name(path.name): path for path in sorted(folder.iterdir()) if path.is_dir()}


def _parts(subfolders: Mapping[str, Path]) -> tuple[Path, Path] | None:
    """Return `train/` and `test/`, which may both begin with the same word: `cars_train/`, `cars_test/`."""
    for train, test in product(*_PARTS.values()):
        for key in subfolders:
            other = f"{key.removesuffix(train)}{test}"
            if key.endswith(train) and other in subfolders:
                return subfolders[key], subfolders[other]
    return None


def _inwards(folder: Path) -> Iterator[Path]:
    """Yield a folder, and those in it that hold all its images: `images/`, or the only one with images."""
    for _ in range(_DEEPEST):
        yield folder
        subfolders = _subfolders(folder)
        named = [subfolders[key] for key in _WRAPPERS if key in subfolders]
        filled = [path for path in named or subfolders.values() if _has_images(path)]
        if len(filled) != 1:
            return
        folder = filled[0]


def _has_images(folder: Path) -> bool:
    return any(path.suffix.lower() in IMAGE_ENDINGS for path in folder.rglob("*"))


def _read_task(files: _Files, shape: tuple[int, int, int]) -> Task:
    first = files.train[0]
    if files.test:
        train, test = _loaded(files.train, shape), _loaded(files.test, shape)
    elif first.suffix.lower() == ".npz" and _has_both(first):
        train, test = [load(first, split="train")], [load(first, split="test")]
    else:
        return _halves(*_joined(_loaded(files.train, shape), None, shape))
    named = [each.classes for each in train if each.classes is not None]
    classes = tuple(sorted({name for names in named for name in names})) if named else None
    pair, notes = _joined(train, classes, shape)
    return Task(pair, _joined(test, classes, shape)[0], notes)


def _loaded(paths: Sequence[Path], shape: tuple[int, int, int]) -> list[Loaded]:
    loaded = [load(path, size=_size(path, shape)) for path in paths]
    for path, each in zip(paths, loaded, strict=True):
        if path.is_dir() and each.y is None:
            raise ValueError(
                f"{path.name}/ holds images that are not in folders of their classes; put those of each class into its own"
            )
    return loaded


def _has_both(path: Path) -> bool:
    # numpy leaves a file open that it was to open itself and cannot read.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {"x_train", "y_train", "x_test", "y_test"} <= set(arrays.files)


def _size(path: Path, shape: tuple[int, int, int]) -> int | None:
    return shape[1] if path.is_dir() and shape[1] == shape[2] else None


def _joined(
    loaded: Sequence[Loaded], classes: tuple[str, ...] | None, shape: tuple[int, int, int]
) -> tuple[Labelled, tuple[str, ...]]:
    """Return one part from its files; classes that have names get their place among `classes`."""
    parts = [_read(_numbered(each, classes), shape) for each in loaded]
    x, y = (torch.cat([pair[place] for pair, _ in parts]) for place in (0, 1))
    return Labelled(x, y), parts[0][1]


def _numbered(loaded: Loaded, classes: tuple[str, ...] | None) -> Loaded:
    """Number classes that have names as others do: a part that lacks a class would count on from another one."""
    if loaded.y is None or loaded.classes is None or classes is None or loaded.classes == classes:
        return loaded
    if unknown := sorted(set(loaded.classes) - set(classes)):
        raise ValueError(f"the test images have the class {unknown[0]!r}, which the training images lack")
    return replace(loaded, y=torch.tensor([classes.index(name) for name in loaded.classes])[loaded.y], classes=classes)


def _read(loaded: Loaded, shape: tuple[int, int, int]) -> tuple[Labelled, tuple[str, ...]]:
    if loaded.y is None or loaded.y.is_floating_point() or loaded.y.ndim != 1 or loaded.x.ndim != 4:
        raise ValueError("images with class labels are wanted")
    if loaded.x.dtype != torch.uint8:
        raise ValueError(f"images must be uint8, 0 to 255; they are {loaded.x.dtype}")
    x, notes = match_images(loaded.x, *shape)
    return Labelled(x, loaded.y), notes


def _halves(whole: Labelled, notes: tuple[str, ...]) -> Task:
    # In order of the classes, as images of a folder are, every second image is still half of each class.
    order = whole.y.argsort(stable=True)
    train, test = (Labelled(whole.x[rows], whole.y[rows]) for rows in (order[::2], order[1::2]))
    return Task(train, test, (*notes, "one part only: trained on half of it"))


def _usable(task: Task, limit: int | None) -> Task:
    """Return at most `limit` images of each part; refuse what no classifier can be fitted to and measured on."""
    _check_labels(task)
    train, test, notes = _few(task.train, limit), _few(task.test, limit), task.notes
    known = torch.isin(test.y, train.y)
    if not known.all():
        # Few images of many classes do not have them all.
        notes = (*notes, f"{int((~known).sum())} test images of classes that were not trained on left out")
        test = Labelled(test.x[known], test.y[known])
    smaller = Task(train, test, notes)
    _check_labels(smaller)
    return smaller


def _check_labels(task: Task) -> None:
    train, test = (part.y.unique() for part in (task.train, task.test))
    if len(task.train.y) < _FEWEST or not len(test):
        raise ValueError(
            f"{_FEWEST} training images and a test image are the least; there are {len(task.train.y)} and {len(task.test.y)}"
        )
    if len(train) < 2:
        raise ValueError("all training images are of one class")
    if int(min(train[0], test[0])) < 0:
        raise ValueError("class labels must not be negative")


def _few(pair: Labelled, limit: int | None) -> Labelled:
    if limit is None or limit >= len(pair.x):
        return pair
    rows = torch.arange(limit) * len(pair.x) // limit
    return Labelled(pair.x[rows], pair.y[rows])
