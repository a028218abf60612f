"""What the tests of corruptions share: small photographs, the parameters in force, and a comparison."""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor

from dissensus.data.corruptions._parameters import PARAMETERS


@lru_cache(maxsize=8)
def photographs(count: int = 24, side: int = 32, width: int | None = None) -> Tensor:
    """Random windows of four times the size, reduced, uint8 `(count, 3, side, width)`; always the same."""
    wanted = (side, width or side)
    generator = np.random.default_rng(0)
    pictures = [torch.from_numpy(picture.copy()).permute(2, 0, 1) for picture in load_sample_images().images]
    windows = []
    for i in range(count):
        picture = pictures[i % 2]
        height, breadth = (min(4 * n, whole) for n, whole in zip(wanted, picture.shape[1:], strict=True))
        top = generator.integers(picture.shape[1] - height + 1)
        left = generator.integers(picture.shape[2] - breadth + 1)
        window = picture[:, top : top + height, left : left + breadth].float()
        windows.append(F.interpolate(window[None], size=wanted, mode="area")[0])
    return torch.stack(windows).round().to(torch.uint8)


def flat(level: int, count: int = 40) -> Tensor:
    """Images of one grey value."""
    return torch.full((count, 3, 32, 32), level, dtype=torch.uint8)


def setting(name: str, severity: int, side: int = 32) -> tuple[float, ...]:
    """The parameters of a corruption at a severity and an image size."""
    return tuple(values.at(severity, side) for values in PARAMETERS[name].values())


def assert_one_level_apart(result: Tensor, expected: np.ndarray, share: float = 0.08) -> None:
    """Truncation may fall on the other side of a whole number, but no further."""
    difference = np.abs(result.numpy().astype(int) - expected.astype(np.uint8).astype(int))
    assert difference.max() <= 1
    assert (difference > 0).mean() < share
