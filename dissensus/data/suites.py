"""Named suites of out-of-distribution sets: which sets belong to them, and which of those a folder holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from dissensus.data.files import TABLE_ENDINGS, TAR_ENDINGS, load
from dissensus.data.images import describe_shape, match_images

Group = Literal["near", "far"]

_ENDINGS = (".npz", ".npy", *TABLE_ENDINGS, *TAR_ENDINGS, "")
_LISTS, _PICTURES = "benchmark_imglist", "images_classic"


@dataclass(frozen=True)
class SuiteSet:
    """One set of a suite: near to the known data or far from it; `files` are looked for by name, without ending."""

    name: str
    group: Group
    files: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """Out-of-distribution sets that are evaluated together.

    Attributes:
        name: How it is called on the command line.
        known: The in-distribution data that it is made for, as its published lists call it.
        sets: Its sets, in order.
    """

    name: str
    known: str
    sets: tuple[SuiteSet, ...]

    def find(self, folder: str | Path) -> dict[str, Path]:
        """Return where each set lies in a folder; sets that are not there are left out.

        The suite's published lists (`benchmark_imglist/...` beside `images_classic/`) go before other files: they leave
        out images that show a known class.
        """
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise ValueError(f"The folder of the suite {self.name}, {folder}, does not exist.")
        candidates = [*sorted((folder / _PICTURES).glob("*")), *sorted(folder.iterdir())]
        there = {plain_name(path.name): path for path in candidates}
        lists, found = folder / _LISTS / self.known, {}
        for each in self.sets:
            listed = [path for name in each.files if (path := lists / f"test_{name}.txt").exists()]
            plain = [there.get(plain_name(name + ending)) for name in each.files for ending in _ENDINGS]
            found[each.name] = next(filter(None, (*listed, *plain)), None)
        return {name: path for name, path in found.items() if path is not None}


@dataclass(frozen=True)
class LoadedSuite:
    """What of a suite is there.

    Attributes:
        sets: Images of each set, made like the known data.
        groups: "near" or "far" for each set.
        missing: Sets that were not found.
        notes: For each set what was done to its images.
    """

    sets: Mapping[str, Tensor]
    groups: Mapping[str, Group]
    missing: tuple[str, ...]
    notes: Mapping[str, tuple[str, ...]]

    @property
    def grouped(self) -> dict[str, tuple[str, ...]]:
        """The sets of each group, "near" and "far"; a group without sets is left out."""
        names = dict.fromkeys(self.groups.values())
        return {group: tuple(each for each, own in self.groups.items() if own == group) for group in names}

    def explain(self) -> str:
        """Say in words what is there, what is missing and what was changed."""
        lines = [
            f"{name} ({self.groups[name]}): {len(x)} images" + "".join(f", {note}" for note in self.notes[name])
            for name, x in self.sets.items()
        ]
        if self.missing:
            lines.append(f"missing: {', '.join(self.missing)}")
        return "\n".join(lines)


def load_suite(suite: Suite, folder: str | Path, shape: tuple[int, int, int]) -> LoadedSuite:
    """Load what a folder holds of a suite, with channels and size of the known data.

    Args:
        suite: One of `SUITES`.
        folder: Holds a file (.npz, .npy, .parquet) or a folder of images for each set, or the suite's published lists.
        shape: Channels, height and width of the known images.

    Returns:
        The sets that are there, and the names of those that are not.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/MNIST.npz", x=np.zeros((2, 28, 28), np.uint8))
        ...     print(load_suite(OPENOOD_CIFAR10, folder, (3, 32, 32)).explain())
        mnist (far): 2 images, grey repeated in 3 channels, resized from 28 x 28 to 32 x 32
        missing: cifar100, tiny_imagenet, svhn, textures, places
    """
    folder = Path(folder).expanduser()
    found = suite.find(folder)
    if not found:
        wanted = ", ".join(each.name for each in suite.sets)
        raise ValueError(
            f"{folder} holds none of the sets of {suite.name}: {wanted}. Put for each a file such as "
            f"{suite.sets[0].files[0]}.npz, or a folder of images {suite.sets[0].files[0]}/, there."
        )
    sets, notes = {}, {}
    for name, path in found.items():
        # Arrays are made like the known data below; pictures of many sizes need one to be arrays.
        size = None if shape[1] != shape[2] or path.suffix in (".npz", ".npy", ".parquet") else shape[1]
        try:
            loaded = load(path, split="test", root=folder / _PICTURES, size=size, strict=False)
            if loaded.x.ndim != 4:
                raise ValueError(f"{path.name} must hold images; it holds {describe_shape(loaded.x.shape[1:])}.")
            sets[name], changes = match_images(loaded.x, *shape)
        except ValueError as problem:
            raise ValueError(f"The set {name} of {suite.name}: {problem}") from None
        notes[name] = (*loaded.notes, *changes)
    groups = {each.name: each.group for each in suite.sets if each.name in found}
    missing = tuple(each.name for each in suite.sets if each.name not in found)
    return LoadedSuite(sets, groups, missing, notes)


def plain_name(name: str) -> str:
    """Return a file's name without what makes no difference: case, `-` and `_`.

    Example:
        >>> plain_name("Oxford-IIIT_Pet.npz")
        'oxfordiiitpet.npz'
    """
    return name.lower().replace("-", "").replace("_", "")


FILES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cifar10": ("cifar10_test", "cifar10"),
        "cifar100": ("cifar100_test", "cifar100"),
        "tiny_imagenet": (
            *("tin", "tiny_imagenet", "tiny_imagenet_200", "tiny_imagenet_test", "tiny_imagenet_val"),
            "tin_val_resize32_5k",
        ),
        "tiny_imagenet_crop": ("tin_crop", "tiny_imagenet_crop", "tin_val_crop32_2.5k"),
        "ninco": ("ninco",),
        "svhn": ("svhn_test", "svhn", "svhn_part1083"),
        "textures": ("textures", "texture", "dtd", "dtd_test", "dtd10_32"),
        "scenes": ("scenes", "intel_scenes_test_32"),
        "isun": ("isun",),
        "lsun_crop": ("lsun_c", "lsun_crop"),
        "lsun_resize": ("lsun_r", "lsun_resize"),
        "places": ("places365", "place365", "places", "places365_test"),
        "mnist": ("mnist_test", "mnist"),
    }
)
"""Names that files of well-known image sets have, without ending; the first one that is there is taken."""


def sets_of(group: Group, names: Iterable[str]) -> tuple[SuiteSet, ...]:
    """Return well-known sets as those of a suite."""
    return tuple(SuiteSet(name, group, FILES[name]) for name in names)


def _suite(name: str, known: str, near: Iterable[str], far: Iterable[str]) -> Suite:
    return Suite(name, known, sets_of("near", near) + sets_of("far", far))


_OPENOOD_FAR = ("mnist", "svhn", "textures", "places")
_ANCHORING_FAR = ("lsun_crop", "lsun_resize", "isun", "textures", "places")

OPENOOD_CIFAR10 = _suite("openood-cifar10", "cifar10", ("cifar100", "tiny_imagenet"), _OPENOOD_FAR)
"""Near and far sets of the OpenOOD benchmark for CIFAR-10 (Yang et al., 2022, <https://arxiv.org/abs/2210.07242>)."""
OPENOOD_CIFAR100 = _suite("openood-cifar100", "cifar100", ("cifar10", "tiny_imagenet"), _OPENOOD_FAR)
"""Near and far sets of the OpenOOD benchmark for CIFAR-100."""
ANCHORING_CIFAR10 = _suite("anchoring-cifar10", "cifar10", ("tiny_imagenet", "cifar100"), _ANCHORING_FAR)
"""What networks trained on CIFAR-10 are judged by in the study of masked anchoring."""
ANCHORING_CIFAR100 = _suite("anchoring-cifar100", "cifar100", ("tiny_imagenet", "cifar10"), _ANCHORING_FAR)
"""The same for CIFAR-100."""
ANCHORING_IMAGENET = _suite("anchoring-imagenet", "imagenet", ("ninco",), _ANCHORING_FAR)
"""The same for ImageNet."""

_ALL = (OPENOOD_CIFAR10, OPENOOD_CIFAR100, ANCHORING_CIFAR10, ANCHORING_CIFAR100, ANCHORING_IMAGENET)

SUITES: Mapping[str, Suite] = MappingProxyType({suite.name: suite for suite in _ALL})
