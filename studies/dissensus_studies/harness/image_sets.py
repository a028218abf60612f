"""A folder of image files in, one labelled image set with training, validation, test and unknown images out."""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dissensus.data.images import match_images
from dissensus.data.suites import Group, Suite, SuiteSet, load_suite, sets_of
from dissensus.data.toy import digits, photographs
from dissensus_studies.harness.labelled import SHAPE, Files, find_files, read_set, unpacked
from dissensus_studies.harness.labelled import Images as Images

VALIDATION_IMAGES = 10_000
# The last digits are not trained on: they are the bundled set's near unknowns.
KNOWN_DIGITS = 8
# A mirrored digit is no digit.
_NOT_MIRRORED = ("digits", "mnist", "svhn")

_NEAR = ("cifar10", "cifar100", "tiny_imagenet", "tiny_imagenet_crop")
_FAR = ("svhn", "textures", "scenes", "isun", "lsun_crop", "lsun_resize", "places", "mnist")


@dataclass(frozen=True)
class ImageSets:
    """What an image study runs on. All images are uint8, `(images, 3, 32, 32)`."""

    name: str  # Name of the known data, such as "cifar10".
    train: Images  # Images to train on.
    validation: Images  # The first images of the training files, held out to select on.
    test: Images  # Images to judge by.
    ood: Mapping[str, Tensor]  # Unknown images by name.
    groups: Mapping[str, Group]  # "near" or "far" for each of them.
    missing: Mapping[str, str]  # Unknown sets that are not there, or cannot be read: name to reason.
    num_classes: int  # Classes of the known data.
    mean: tuple[float, ...]  # Mean of each channel over the training images, in [0, 1].
    std: tuple[float, ...]  # Standard deviation of each channel.
    notes: tuple[str, ...] = ()  # What was done to images or left out, in words.

    @classmethod
    def of(
        cls,
        name: str,
        parts: tuple[Images, Images, Images],
        found: Mapping[str, Tensor | str],
        groups: Mapping[str, Group],
        notes: tuple[str, ...],
        limit: int | None,
    ) -> "ImageSets":
        """Put sets together; what was found of an unknown set is its images, or why there are none."""
        ood = {each: value[:limit] for each, value in found.items() if isinstance(value, Tensor)}
        missing = {each: value for each, value in found.items() if isinstance(value, str)}
        classes = int(max(part.y.max() for part in parts)) + 1
        return cls(
            name, *parts, ood, {each: groups[each] for each in ood}, missing, classes, *_moments(parts[0].x), notes
        )

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
        # Filled on the device, not copied to it: a pass that begins with this can be captured on a GPU.
        shift, scale = (
            torch.cat([x.new_full((1, 1, 1), value, dtype=torch.float32) for value in values])
            for values in (self.mean, self.std)
        )
        return (x.float() / 255 - shift) / scale

    def describe(self) -> list[tuple[str, str, int | None, str]]:
        """Return a row for each set: name, what it is, number of images, remark."""
        rows: list[tuple[str, str, int | None, str]] = [
            (self.name, part, len(images.x), "")
            for part, images in (("train", self.train), ("validation", self.validation), ("test", self.test))
        ]
        rows += [(name, f"unknown, {self.groups[name]}", len(x), "") for name, x in self.ood.items()]
        return rows + [(name, "unknown", None, reason) for name, reason in self.missing.items()]


def load_images(
    data: Path | None,
    *,
    quick: bool = False,
    known: str | None = None,
    limit: int | None = None,
    validation: int = VALIDATION_IMAGES,
) -> ImageSets:
    """Read a labelled image set and what is there of unknown ones; without a folder, the digits that come along.

    The folder (or `images/` in it) holds the known set in one of the layouts of `find_files`, files of arrays or folders such as
    `imagenet/train/<class>/` and `imagenet/val/<class>/`. Images become 3 x 32 x 32. Unknown sets are found by name; missing ones
    are listed, and no error. `quick`, `known` and `limit` are those of `Work`; `validation` is how many of the first training images
    to hold out, a fifth if there are fewer than five times as many.

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
    known, files = _known(folder, known)
    rows = None if limit is None else limit + min(limit, validation)
    train, test, notes = read_set(_first_files(files, rows))
    assert test is not None
    if files.train[0].is_dir():
        # Folders come class by class; the first images are to be of all classes.
        order = [torch.randperm(len(part.x), generator=torch.Generator().manual_seed(0)) for part in (train, test)]
        train, test = train.rows(order[0]), test.rows(order[1])
    train = train.rows(slice(rows))
    held_out = min(validation, len(train.x) // 5 if limit is None else len(train.x) // 2)
    parts = (train.rows(slice(held_out, None)).rows(slice(limit)), train.rows(slice(held_out)), test.rows(slice(limit)))
    suite = _unknown_suite(known)
    groups = {each.name: each.group for each in suite.sets}
    notes = notes if limit is None else (*notes, f"at most {limit} images of each set")
    return ImageSets.of(known, parts, _read_unknown(suite, folder), groups, notes, limit)


def _moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, over 255; counted, so that no float copy is needed."""
    values = torch.arange(256, dtype=torch.float64) / 255
    shares = [torch.bincount(c.reshape(-1).int(), minlength=256).double() / c.numel() for c in x.unbind(1)]
    means = tuple(float(share @ values) for share in shares)
    squares = [float(share @ (values - mean).square()) for share, mean in zip(shares, means, strict=True)]
    return means, tuple(max(square**0.5, 1e-3) for square in squares)


def image_folder(data: Path) -> Path:
    """Return the folder itself, or `images/` in it: where image sets are."""
    for folder in (data / "images", data):
        if folder.is_dir() and any(path.suffix == ".npz" or path.is_dir() for path in folder.iterdir()):
            return folder
    raise ValueError(
        f"{data} holds no image sets: files such as cifar10_train.npz and cifar10_test.npz are wanted, there or in images/."
    )


def _known(folder: Path, known: str | None) -> tuple[str, Files]:
    """Return the name of the set to train on and where it is."""
    split = {re.sub(r"_train(_\d+of\d+)?$", "", path.stem) for path in folder.glob("*_train*.npz")}
    names = {name for name in split if (folder / f"{name}_test.npz").is_file()}
    whole = [path for path in folder.glob("*.npz") if "_train" not in path.stem]
    names |= {path.stem for path in whole if Files([path], []).has_both}
    if known is None and ("cifar10" in names or len(names) == 1):
        known = "cifar10" if "cifar10" in names else names.pop()
    files = None if known is None else find_files(folder, known)
    if known is not None and files is not None and files.has_both:
        return known, files
    there = f"there are {', '.join(sorted(names))}" if names else "there are none"
    raise ValueError(
        f"{folder} must hold the training and test images of {known or 'one set'}; {there}. "
        "Put <name>_train.npz and <name>_test.npz there, and choose one by its name with `known`."
    )


def _first_files(files: Files, rows: int | None) -> Files:
    """Return no more of a set's training files than hold so many images: to unpack one takes seconds."""
    if rows is None or len(files.train) == 1:
        return files
    kept, count = [], 0
    for path in files.train:
        if count < rows:
            kept.append(path)
        with np.load(path, allow_pickle=False) as arrays:
            count += len(arrays["y"])
    return Files(kept, files.test)


def _unknown_suite(known: str) -> Suite:
    """Return the unknown sets for this known one; near ones are near to CIFAR only."""
    near: Group = "near" if known.startswith("cifar") else "far"
    near_sets, far_sets = ([name for name in names if name != known] for names in (_NEAR, _FAR))
    return Suite("image study", known, sets_of(near, near_sets) + sets_of("far", far_sets))


def _read_unknown(suite: Suite, folder: Path) -> dict[str, Tensor | str]:
    def read(each: SuiteSet) -> Tensor | str:
        one = replace(suite, sets=(each,))
        path = one.find(folder).get(each.name)
        if path is None:
            return f"not found; a file such as {each.files[0]}.npz is looked for"
        try:
            packed = unpacked(path)
            return match_images(packed.x, *SHAPE)[0] if packed else load_suite(one, folder, SHAPE).sets[each.name]
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
    size = SHAPE[1]
    try:
        # Cut into squares of the known images' size.
        cut = [picture.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4) for picture in photographs()]
        found["photographs"] = torch.cat([squares.flatten(0, 1) for squares in cut]).contiguous()
    except ImportError as problem:
        found["photographs"] = f"not readable: {problem}"
    images = Images(x[known], loaded.y[known])
    # The files' order mixes writers only slowly; a fixed stride gives all parts every writer.
    places = torch.arange(len(images.x)) % 5
    train, held_out, test = (images.rows(which) for which in (places < 3, places == 3, places == 4))
    held_out = held_out.rows(slice(min(limit or validation, validation)))
    parts = (train.rows(slice(limit)), held_out, test.rows(slice(limit)))
    return ImageSets.of("digits", parts, found, {unknown: "near", "photographs": "far"}, notes, limit)
