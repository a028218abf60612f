"""Handwritten digits that come with scikit-learn: some known, some never shown, some corrupted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from dissensus.randomness import derive

KNOWN = 7
"""Digits below this one are known; this one and those above it are never shown in training."""

NEW = "new digits"
"""Name of the set of digits that are never shown."""

_TRAINING_SHARE = 0.6

Corrupt: TypeAlias = Callable[[Tensor, Generator], Tensor]


@dataclass(frozen=True)
class Images:
    """Images `(batch, 1, 8, 8)` in [0, 1] and the digits that they show, `(batch,)`."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Digits:
    """The data of the demo.

    Attributes:
        train: Known digits to learn from.
        test: Known digits that training does not see.
        unknown: By name: digits that are never shown, then the test images under each corruption.
    """

    train: Images
    test: Images
    unknown: Mapping[str, Images]


def noise(images: Tensor, generator: Generator) -> Tensor:
    """Add normal noise, its standard deviation half of full ink."""
    return (images + 0.5 * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def shift(images: Tensor, generator: Generator) -> Tensor:
    """Move each digit two pixels left, right, up or down; what leaves the image is lost."""
    side = images.shape[-1]
    padded = F.pad(images, (2, 2, 2, 2))
    corners = torch.tensor([(2, 0), (2, 4), (0, 2), (4, 2)])
    chosen = corners[torch.randint(0, len(corners), (len(images),), generator=generator)]
    moved = [
        image[:, top : top + side, left : left + side]
        for image, (top, left) in zip(padded, chosen.tolist(), strict=True)
    ]
    return torch.stack(moved)


def cover(images: Tensor, generator: Generator) -> Tensor:
    """Lay a grey square of four by four pixels somewhere over each digit."""
    corners = torch.randint(0, images.shape[-1] - 3, (len(images), 2), generator=generator)
    covered = images.clone()
    for image, (top, left) in zip(covered, corners.tolist(), strict=True):
        image[:, top : top + 4, left : left + 4] = 0.5
    return covered


# The corruptions of `dissensus.data` are made for photographs and need at least 16 pixels a side.
CORRUPTIONS: Mapping[str, Corrupt] = MappingProxyType({"noise": noise, "shift": shift, "cover": cover})


def load(seed: int = 0) -> Digits:
    """Return the digits, split at random into training and test images."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.as_tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.as_tensor(data.target, dtype=torch.int64)
    known = torch.nonzero(y < KNOWN).flatten()
    known = known[torch.randperm(len(known), generator=_generator(seed, "split"))]
    train, test = known.tensor_split([round(_TRAINING_SHARE * len(known))])
    corrupted = {
        name: Images(corrupt(x[test], _generator(seed, name)), y[test])
        for name, corrupt in CORRUPTIONS.items()
    }
    new = Images(x[y >= KNOWN], y[y >= KNOWN])
    return Digits(Images(x[train], y[train]), Images(x[test], y[test]), {NEW: new, **corrupted})


def _generator(seed: int, purpose: str) -> Generator:
    return Generator().manual_seed(derive(seed, "demo", purpose))
