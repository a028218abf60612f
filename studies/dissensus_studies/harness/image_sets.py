"""A folder of image files in, one labelled image set with training, validation, test and unknown images out."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dissensus.data.files import load
from dissensus.data.images import match_images
from dissensus.data.suites import Group, Suite, SuiteSet, load_suite, sets_of
from dissensus.data.toy import digits, photographs

SHAPE = (3, 32, 32)
VALIDATION_IMAGES = 10_000
# The last digits are not trained on: they are the bundled set's near unknowns.
KNOWN_DIGITS = 8
# A mirrored digit is no digit.
_NOT_MIRRORED = ("digits", "mnist", "svhn")

_NEAR = ("cifar10", "cifar100", "tiny_imagenet", "tiny_imagenet_crop")
_FAR = ("svhn", "textures", "scenes", "isun", "lsun_crop", "lsun_resize", "places", "mnist")

T = TypeVar("T")


class Images(NamedTuple):
    """Labelled images: `x` uint8 `(images, 3, 32, 32)`, `y` int64 `(images,)`. A pair, as `fit` and `evaluate` take it."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class ImageSets:
    """What an image study runs on. All images are uint8, `(images, 3, 32, 32)`.

    Attributes:
        name: Name of the known data, such as "cifar10".
        train: Images to train on.
        validation: The first images of the training files, held out to select on.
        test: Images to judge by.
        ood: Unknown images by name.
        groups: "near" or "far" for each of them.
        missing: Unknown sets that are not there, or cannot be read: name to reason.
        num_classes: Classes of the known data.
        mean: Mean of each channel over the training images, in [0, 1].
        std: Standard deviation of each channel.
        notes: What was done to images or left out, in words.
    """

    name: str
    train: Images
    validation: Images
    test: Images
    ood: Mapping[str, Tensor]
    groups: Mapping[str, Group]
    missing: Mapping[str, str]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()

    @property
    def all_train(self) -> Images:
        """Training and validation images together, in their files' order, for runs that select nothing."""
        return Images(*(torch.cat(pair) for pair in zip(self.validation, self.train, strict=True)))

    @property
    def mirrored(self) -> bool:
        """Whether an image's mirror image is as good as the image."""
        return not self.name.startswith(_NOT_MIRRORED)

    @property
    def ood_groups(self) -> dict[str, list[str]]:
        """Names of the near and of the far sets, as `evaluate(groups=...)` takes them."""
        names = {group: [n for n, own in self.groups.items() if own == group] for group in ("near", "far")}
        return {group: found for group, found in names.items() if found}

    def normalise(self, x: Tensor) -> Tensor:
        """Return uint8 images as members that have no `PixelNorm` take them, float32; `transform=` of `evaluate`."""
        return normalised(x, self.mean, self.std)

    def identity(self, *, epochs: int | None, limit: int | None, quick: bool) -> dict[str, object]:
        """Return the settings under which arms are the same arms: others begin anew."""
        return {"data": self.name, "epochs": epochs, "limit": limit, "quick": quick, "images": len(self.train.x)}

    def describe(self) -> list[tuple[str, str, int | None, str]]:
        """Return a row for each set: name, what it is, number of images, remark."""
        rows: list[tuple[str, str, int | None, str]] = [
            (self.name, part, len(images.x), "")
            for part, images in (("train", self.train), ("validation", self.validation), ("test", self.test))
        ]
        rows += [(name, f"unknown, {self.groups[name]}", len(x), "") for name, x in self.ood.items()]
        return rows + [(name, "unknown", None, reason) for name, reason in self.missing.items()]


def imagenet_folder(data: Path | None, *, known: str | None = None, quick: bool = False) -> Path:
    """Return a folder of ImageNet's layout, or say what such a folder has; refuse options that are for other folders."""
    given = [name for name, value in (("known", known), ("quick", quick)) if value]
    if given:
        raise ValueError(
            f"The imagenet setting has no option {' or '.join(given)}: its folder holds one set, and it has no short version. Leave it "
            "out; `limit` and `epochs` make it shorter."
        )
    if data is None or not all((Path(data) / part).is_dir() for part in ("train", "val")):
        raise ValueError(
            f"The imagenet setting needs a folder with train/<class>/ and val/<class>/; got {data}. Name it with `data`."
        )
    return Path(data)


def load_images(
    data: Path | None,
    *,
    quick: bool = False,
    known: str | None = None,
    limit: int | None = None,
    validation: int = VALIDATION_IMAGES,
) -> ImageSets:
    """Read a labelled image set and what is there of unknown ones; without a folder, the digits that come along.

    The folder (or `images/` in it) holds `<known>_train.npz`, or parts `<known>_train_1of5.npz`, ..., and `<known>_test.npz`;
    or one `<known>.npz` with x_train, y_train, x_test and y_test. Files are packed or plain arrays. Grey and other images
    become 3 x 32 x 32. Unknown sets are found by name; those that are missing are listed, and no error.

    Args:
        data: The folder; None for handwritten digits (0 to 7 known, 8 and 9 near, photographs far).
        quick: Take at most 1000 images of each kind.
        known: Name of the known set; "cifar10", or the only one there, by default. Without a folder there is only "digits".
        limit: Train on so many images, and take at most as many of each other set.
        validation: How many of the first training images to hold out; a fifth if there are fewer than five times as many.

    Returns:
        The sets. `describe()` lists them.

    Example:
        >>> sets = load_images(None, limit=200)
        >>> sets.name, sets.train.x.shape, sets.num_classes, sets.ood_groups["near"]
        ('digits', torch.Size([200, 3, 32, 32]), 8, ['digits 8, 9'])
    """
    if limit is not None and limit < 10:
        raise ValueError(f"`limit` must be at least 10 images; got {limit}.")
    if quick and limit is None:
        limit = 1000
    if data is None:
        if known not in (None, "digits"):
            raise ValueError(
                f"`known` chooses an image set of a folder; got {known!r} and no folder. Name the folder with `data`, or leave `known` "
                "out for the digits that come along."
            )
        return _bundled(limit, validation)
    folder = image_folder(Path(data))
    known = _known(folder, known)
    train, test, notes = _read_known(folder, known, None if limit is None else limit + min(limit, validation))
    held_out = min(validation, len(train.x) // 5 if limit is None else len(train.x) // 2)
    suite = _unknown_suite(known)
    return _made(
        known,
        Images(train.x[held_out:][:limit], train.y[held_out:][:limit]),
        Images(train.x[:held_out], train.y[:held_out]),
        Images(test.x[:limit], test.y[:limit]),
        _read_unknown(suite, folder),
        {each.name: each.group for each in suite.sets},
        notes if limit is None else (*notes, f"at most {limit} images of each set"),
        limit,
    )


def _made(
    name: str,
    train: Images,
    validation: Images,
    test: Images,
    found: Mapping[str, Tensor | str],
    groups: Mapping[str, Group],
    notes: tuple[str, ...],
    limit: int | None,
) -> ImageSets:
    """Put sets together; what was found of an unknown set is its images, or why there are none."""
    ood = {each: value[:limit] for each, value in found.items() if isinstance(value, Tensor)}
    mean, std = _moments(train.x)
    return ImageSets(
        name,
        train,
        validation,
        test,
        MappingProxyType(ood),
        MappingProxyType({each: groups[each] for each in ood}),
        MappingProxyType({each: value for each, value in found.items() if isinstance(value, str)}),
        int(torch.cat([train.y, validation.y, test.y]).max()) + 1,
        mean,
        std,
        notes,
    )


def _moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, over 255; counted, so that no float copy is needed."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in x.unbind(1):
        share = torch.bincount(channel.reshape(-1).int(), minlength=256).double() / channel.numel()
        mean = float(share @ values)
        means.append(mean)
        stds.append(max(float(share @ (values - mean).square()) ** 0.5, 1e-3))
    return tuple(means), tuple(stds)


def image_folder(data: Path) -> Path:
    """Return the folder itself, or `images/` in it: where files of images are."""
    for folder in (data / "images", data):
        if folder.is_dir() and any(folder.glob("*.npz")):
            return folder
    raise ValueError(
        f"{data} holds no image sets: files such as cifar10_train.npz and cifar10_test.npz are wanted, there or in images/."
    )


def _train_files(folder: Path, known: str) -> list[Path]:
    """Return `<known>_train.npz`, or its parts `_1of5` and so on in order."""
    found = {}
    for path in folder.glob(f"{known}_train*.npz"):
        part = re.fullmatch(rf"{re.escape(known)}_train(?:_(\d+)of(\d+))?", path.stem)
        if part is not None:
            found[int(part[1] or 0)] = (path, int(part[2] or 0))
    if 0 in found:
        return [found[0][0]]
    total = max((total for _, total in found.values()), default=0)
    if found and sorted(found) != list(range(1, total + 1)):
        lacking = ", ".join(str(n) for n in range(1, total + 1) if n not in found)
        raise ValueError(f"The training images of {known} come in {total} parts; {folder} lacks part {lacking}.")
    return [found[number][0] for number in sorted(found)]


def _is_whole(path: Path) -> bool:
    """Whether a file holds training and test images of one set."""
    with np.load(path, allow_pickle=False) as arrays:
        return {"x_train", "y_train", "x_test", "y_test"} <= set(arrays.files)


def _known(folder: Path, known: str | None) -> str:
    split = {re.sub(r"_train(_\d+of\d+)?$", "", path.stem) for path in folder.glob("*_train*.npz")}
    names = {name for name in split if (folder / f"{name}_test.npz").is_file()}
    names |= {path.stem for path in folder.glob("*.npz") if "_train" not in path.stem and _is_whole(path)}
    if known is None and ("cifar10" in names or len(names) == 1):
        return "cifar10" if "cifar10" in names else names.pop()
    if known in names:
        return str(known)
    there = f"there are {', '.join(sorted(names))}" if names else "there are none"
    raise ValueError(
        f"{folder} must hold the training and test images of {known or 'one set'}; {there}. "
        "Put <name>_train.npz and <name>_test.npz there, and choose one by its name with `known`."
    )


def _read_known(folder: Path, known: str, rows: int | None) -> tuple[Images, Images, tuple[str, ...]]:
    """Return training images (at least the first `rows`), test images, and what was done to them."""
    whole = folder / f"{known}.npz"
    if whole.is_file() and _is_whole(whole):
        (train, done), (test, _) = _read(whole, "train"), _read(whole, "test")
        return Images(train.x[:rows], train.y[:rows]), test, done
    files = _train_files(folder, known)
    if rows is not None:
        sizes = [_num_labels(path) for path in files]
        files = [path for place, path in enumerate(files) if sum(sizes[:place]) < rows]
    *parts, (test, done) = _side_by_side(_read, [*files, folder / f"{known}_test.npz"])
    x, y = (torch.cat([part[place] for part, _ in parts])[:rows] for place in (0, 1))
    return Images(x, y), test, done


def _num_labels(path: Path) -> int:
    with np.load(path, allow_pickle=False) as arrays:
        return len(arrays["y"]) if "y" in arrays.files else 1


def _read(path: Path, split: str | None = None) -> tuple[Images, tuple[str, ...]]:
    loaded = load(path, split=split)
    if loaded.y is None or loaded.y.is_floating_point() or loaded.x.ndim != 4:
        raise ValueError(f"{path} must hold images with whole numbers as labels, x and y.")
    x, notes = match_images(_as_bytes(loaded.x, path), *SHAPE)
    return Images(x, loaded.y), notes


def _as_bytes(x: Tensor, path: Path) -> Tensor:
    if x.dtype != torch.uint8:
        raise ValueError(f"Images of a study must be uint8, 0 to 255; those of {path.name} are {x.dtype}.")
    return x


def _side_by_side(function: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(function, paths))


def _unknown_suite(known: str) -> Suite:
    """Return the unknown sets for this known one; near ones are near to CIFAR only."""
    near: Group = "near" if known.startswith("cifar") else "far"
    near_sets, far_sets = ([name for name in names if name != known] for names in (_NEAR, _FAR))
    return Suite("image study", known, sets_of(near, near_sets) + sets_of("far", far_sets))


def _read_unknown(suite: Suite, folder: Path) -> dict[str, Tensor | str]:
    def read(each: SuiteSet) -> Tensor | str:
        one = replace(suite, sets=(each,))
        if not one.find(folder):
            return f"not found; a file such as {each.files[0]}.npz is looked for"
        try:
            return load_suite(one, folder, SHAPE).sets[each.name]
        except (ValueError, ImportError) as problem:
            return f"not readable: {problem}"

    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip((each.name for each in suite.sets), pool.map(read, suite.sets), strict=True))


def _bundled(limit: int | None, validation: int) -> ImageSets:
    loaded = digits()
    assert loaded.y is not None
    x, notes = match_images(loaded.x, *SHAPE)
    known = loaded.y < KNOWN_DIGITS
    unknown = "digits " + ", ".join(str(digit) for digit in range(KNOWN_DIGITS, 10))
    found: dict[str, Tensor | str] = {unknown: x[~known]}
    try:
        found["photographs"] = _patches(photographs())
    except ImportError as problem:
        found["photographs"] = f"not readable: {problem}"
    x, y = x[known], loaded.y[known]
    # The files' order mixes writers only slowly; a fixed stride gives all parts every writer.
    places = torch.arange(len(x)) % 5
    train, held_out, test = places < 3, places == 3, places == 4
    most = len(x) if limit is None else limit
    return _made(
        "digits",
        Images(x[train][:most], y[train][:most]),
        Images(x[held_out][: min(most, validation)], y[held_out][: min(most, validation)]),
        Images(x[test][:most], y[test][:most]),
        found,
        {unknown: "near", "photographs": "far"},
        notes,
        limit,
    )


def _patches(pictures: Iterable[Tensor]) -> Tensor:
    """Cut pictures `(3, height, width)` into squares of the known images' size."""
    _, height, width = SHAPE
    cut = [
        picture.unfold(1, height, height).unfold(2, width, width).permute(1, 2, 0, 3, 4).flatten(0, 1)
        for picture in pictures
    ]
    return torch.cat(cut).contiguous()


def normalised(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return uint8 images as float32 with these means and deviations, over 255, taken out of their channels."""
    # Filled on the device, not copied to it: a pass that begins with this can be captured on a GPU.
    shift, scale = (
        torch.cat([x.new_full((1, 1, 1), value, dtype=torch.float32) for value in values]) for values in (mean, std)
    )
    return (x.float() / 255 - shift) / scale
