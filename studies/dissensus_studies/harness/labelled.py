"""Labelled image sets of a folder, in any of the layouts they usually have: found by name, read as training and test images."""

import lzma
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dissensus.data.files import Loaded, load
from dissensus.data.images import IMAGE_ENDINGS, match_images
from dissensus.data.suites import plain_name

SHAPE = (3, 32, 32)
_PARTS = {"train": ("train", "training", "trainval"), "test": ("test", "val", "validation")}
# Folders that published sets keep their classes' folders in, and how deep these may lie.
_WRAPPERS, _DEEPEST = ("images", "image", "jpg"), 4


class Images(NamedTuple):
    """Labelled images: `x` uint8 `(images, 3, 32, 32)`, `y` int64 `(images,)`. A pair, as `fit` and `evaluate` take it."""

    x: Tensor
    y: Tensor

    def rows(self, index: slice | Tensor) -> "Images":
        """Return some of them."""
        return Images(self.x[index], self.y[index])


class Files(NamedTuple):
    """Where a set is: the files or the folder of each part; `test` is empty where one file or folder holds all."""

    train: list[Path]
    test: list[Path]

    @property
    def has_both(self) -> bool:
        """Whether there are training and test images, in parts of their own or in one file of four arrays."""
        first = self.train[0]
        if self.test or first.suffix.lower() != ".npz":
            return bool(self.test)
        # numpy leaves a file open that it was to open itself and cannot read.
        with first.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {"x_train", "y_train", "x_test", "y_test"} <= set(arrays.files)


def find_files(folder: Path, name: str) -> Files | None:
    """Return where a folder has a set; None where it has none of that name.

    Looked for are `name_train.npz` (or its parts `name_train_1of5.npz`, ...) and `name_test.npz`; one `name.npz`; folders
    `name/train/<class>/` and `name/test/<class>/` (or `val`), or `name/<class>/`, which may lie deeper, in `name/images/`. Case,
    `-` and `_` of names make no difference.
    """
    there = {plain_name(path.name): path for path in sorted(folder.iterdir())}
    train, test = (_files_of(there, name, part) for part in _PARTS)
    if train and test:
        return Files(train, test)
    own = there.get(plain_name(name))
    folders = _find_folders(own) if own is not None and own.is_dir() else None
    if folders is not None and folders.test:
        return folders
    # Published files of a part of a set carry its size behind their name.
    start = plain_name(f"{name}_test")
    sized = [path for key, path in there.items() if key.startswith(start) and key.endswith(".npz")]
    whole = there.get(plain_name(f"{name}.npz"))
    single = [whole] if whole is not None else test or train or sized[:1]
    return Files(single, []) if single else folders


def _files_of(there: Mapping[str, Path], name: str, part: str) -> list[Path]:
    """Return the file of one part of a set, or all its pieces in order."""
    for word in _PARTS[part]:
        start = plain_name(f"{name}_{word}")
        if f"{start}.npz" in there:
            return [there[f"{start}.npz"]]
        pieces = {key: re.fullmatch(rf"{re.escape(start)}(\d+)of(\d+)\.npz", key) for key in there}
        numbered = {int(match[1]): (there[key], int(match[2])) for key, match in pieces.items() if match}
        total = max((total for _, total in numbered.values()), default=0)
        lacking = [str(number) for number in range(1, total + 1) if number not in numbered]
        if lacking:
            raise ValueError(
                f"the {part} images of {name} come in {total} parts; the folder lacks part {', '.join(lacking)}."
            )
        if numbered:
            return [numbered[number][0] for number in sorted(numbered)]
    return []


def _find_folders(folder: Path) -> Files:
    """Return the folders of both parts, or the one folder whose subfolders are the classes."""
    for inner in _inwards(folder):
        subfolders = _subfolders(inner)
        for (train, test), (key, path) in product(product(*_PARTS.values()), subfolders.items()):
            # Both may begin with the same word: cars_train/ and cars_test/.
            other = subfolders.get(f"{key.removesuffix(train)}{test}")
            if key.endswith(train) and other is not None:
                return Files(_inwards(path)[-1:], _inwards(other)[-1:])
    return Files(_inwards(folder)[-1:], [])


def _subfolders(folder: Path) -> dict[str, Path]:
    return {plain_name(path.name): path for path in sorted(folder.iterdir()) if path.is_dir()}


def _inwards(folder: Path) -> list[Path]:
    """Return a folder, and those in it that hold all its images: `images/`, or the only one with images."""
    found = [folder]
    for _ in range(_DEEPEST - 1):
        subfolders = _subfolders(found[-1])
        inner = [subfolders[key] for key in _WRAPPERS if key in subfolders] or list(subfolders.values())
        filled = [path for path in inner if any(each.suffix.lower() in IMAGE_ENDINGS for each in path.rglob("*"))]
        if len(filled) != 1:
            break
        found += filled
    return found


def read_set(files: Files) -> tuple[Images, Images | None, tuple[str, ...]]:
    """Return training images, test images (None where one part holds all), and what was done to them."""
    if files.has_both and not files.test:
        train, test = ([load(files.train[0], split=part)] for part in ("train", "test"))
    else:
        train, test = _loaded(files.train), _loaded(files.test)
    named = [each.classes for each in train if each.classes is not None]
    classes = tuple(sorted({name for names in named for name in names})) if named and test else None
    images, notes = _joined(train, classes)
    return images, _joined(test, classes)[0] if test else None, notes


def _loaded(paths: Sequence[Path]) -> list[Loaded]:
    with ThreadPoolExecutor(max_workers=8) as pool:
        loaded = list(
            pool.map(lambda path: unpacked(path) or load(path, size=SHAPE[1] if path.is_dir() else None), paths)
        )
    for path, each in zip(paths, loaded, strict=True):
        if path.is_dir() and each.y is None:
            wanted = "that are not in folders of their classes; put those of each class into its own"
            raise ValueError(f"{path.name}/ holds images {wanted}")
    return loaded


def _joined(loaded: Sequence[Loaded], classes: tuple[str, ...] | None) -> tuple[Images, tuple[str, ...]]:
    """Return one part from its files; classes that have names get their place among `classes`."""
    parts: list[tuple[Tensor, Tensor]] = []
    notes: tuple[str, ...] = ()
    for each in loaded:
        y = each.y
        if y is None or y.is_floating_point() or y.ndim != 1 or each.x.ndim != 4:
            raise ValueError("images with whole numbers as class labels are wanted")
        if each.x.dtype != torch.uint8:
            raise ValueError(f"images must be uint8, 0 to 255; they are {each.x.dtype}")
        if each.classes is not None and classes is not None and each.classes != classes:
            # A part that lacks a class would count on from another one.
            if unknown := sorted(set(each.classes) - set(classes)):
                raise ValueError(f"the test images have the class {unknown[0]!r}, which the training images lack")
            y = torch.tensor([classes.index(name) for name in each.classes])[y]
        x, notes = match_images(each.x, *SHAPE)
        parts.append((x, y))
    return Images(*(torch.cat(columns) for columns in zip(*parts, strict=True))), notes


def unpacked(path: Path) -> Loaded | None:
    """Return the images of an `.npz` of packed ones; None where it is something else.

    Packed are `shape`, (images, height, width, 3), and `xz`, a stream of residues modulo 256 of three planes (red less green, green,
    blue less green; each images x height x width), predicted pixel by pixel from the neighbours.
    """
    if path.suffix.lower() != ".npz":
        return None
    # numpy leaves a file open that it was to open itself and cannot read.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        if "xz" not in arrays.files:
            return None
        (images, *frame, _), raw = arrays["shape"].tolist(), lzma.decompress(arrays["xz"].tobytes())
        y = torch.from_numpy(arrays["y"].astype(np.int64)) if "y" in arrays.files else None
    planes = np.frombuffer(raw, np.int8).reshape(3, images, *frame)
    parts = [_pixels(planes[:, start : start + _AT_ONCE]) for start in range(0, images, _AT_ONCE)]
    return Loaded(torch.from_numpy(np.concatenate(parts)), y)


# Images unpacked at once: enough for numpy to be busy with each pixel, few enough to stay in a processor's cache.
_AT_ONCE = 2500


def _pixels(planes: np.ndarray) -> np.ndarray:
    """Return `(images, 3, height, width)` of residues `(3, images, height, width)`."""
    _, images, height, width = planes.shape
    residues = np.ascontiguousarray(planes.transpose(2, 3, 0, 1))
    # A frame of zeros above and to the left makes the first row and column no exception.
    values = np.zeros((height + 1, width + 1, 3, images), np.int16)
    for row, column in product(range(height), range(width)):
        left, above, corner = values[row + 1, column], values[row, column + 1], values[row, column]
        # The middle one of left, above and left + above - corner: an edge is followed, a slope continued.
        low, high = np.minimum(left, above), np.maximum(left, above)
        value = np.minimum(np.maximum(left + above - corner, low), high) + residues[row, column]
        green = value[1] & 255
        # Of all numbers with this residue a difference to green is the one whose colour lies in 0 to 255.
        value = ((value + green) & 255) - green
        value[1] = green
        values[row + 1, column + 1] = value
    values = values[1:, 1:]
    values[:, :, ::2] += values[:, :, 1:2]
    return np.ascontiguousarray(values.astype(np.uint8).transpose(3, 2, 0, 1))
