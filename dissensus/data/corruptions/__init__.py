"""Common corruptions at five severities: uint8 images `(batch, channels, height, width)` in, the same out.

The 15 standard and 4 extra corruptions of CIFAR-10-C and ImageNet-C and the ten named by CIFAR-10-C-bar, each one vectorised
expression over the batch, on CPU or CUDA. What is drawn for an image depends on `(seed, name, severity, index of the image)` alone.
Results are *CIFAR-10-C style*: the parameters are the published ones, the pixels are not those of the official files
(`load_corrupted` reads those).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus._signatures import checked
from dissensus.data.corruptions import blur, cbar, digital, noise, weather
from dissensus.data.corruptions._images import image_keys
from dissensus.data.corruptions._parameters import PARAMETERS, Values

__all__ = ["CBAR", "CORRUPTIONS", "EXTRA", "SEVERITIES", "STANDARD", "Corruption", "corrupt", "load_corrupted"]

SEVERITIES = (1, 2, 3, 4, 5)

# The widest kernel at small sizes mirrors up to this many pixels.
_SMALLEST_SIDE = 16
# Values worked on at once: on a CPU they stay in the cache; on a GPU they fill the machine, with about a dozen temporaries.
_CHUNK_VALUES = {"cpu": 3 << 16, "cuda": 3 << 23}


@dataclass(frozen=True)
class Corruption:
    """One corruption at all its severities.

    Attributes:
        name: Its name in the tables, as in the published file names.
        family: "noise", "blur", "weather", "digital" or "cbar".
        apply: `(images, keys, **parameters) -> images` for one chunk.
        parameters: What the severities mean for each of its keyword arguments, at each image size.
    """

    name: str
    family: str
    apply: Callable[..., Tensor]
    parameters: Mapping[str, Values]

    @property
    def about(self) -> str:
        """One line that says what it does."""
        return (self.apply.__doc__ or "").strip().split("\n")[0]

    def __call__(
        self, images: Tensor, severity: int, seed: int = 0, index: Tensor | Sequence[int] | None = None
    ) -> Tensor:
        """Same as `corrupt` with this corruption's name."""
        return corrupt(images, self.name, severity, seed=seed, index=index)


# A corruption is the function of its name in the file of its family.
_FAMILIES = {"noise": noise, "blur": blur, "weather": weather, "digital": digital, "cbar": cbar}

CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType(
    {
        name: Corruption(name, family, vars(module)[name], parameters)
        for name, parameters in PARAMETERS.items()
        for family, module in _FAMILIES.items()
        if name in vars(module)
    }
)

STANDARD: tuple[str, ...] = tuple(CORRUPTIONS)[:15]
EXTRA: tuple[str, ...] = tuple(CORRUPTIONS)[15:19]
CBAR: tuple[str, ...] = tuple(CORRUPTIONS)[19:]


@checked
def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    seed: int = 0,
    index: Tensor | Sequence[int] | None = None,
    frost_folder: str | None = None,
) -> Tensor:
    """Corrupt images as named, at a severity from 1 (mild) to 5 (strong).

    Reading: at 32 px severity s has the published CIFAR-10-C parameters, at 224 px ImageNet-C's, which are harsher; other sizes
    scale them.

    Args:
        images: uint8 `(batch, channels, height, width)`, one or three channels, on CPU or CUDA.
        name: A key of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: Decides, with `name`, `severity` and an image's index, all that is random about that image.
        index: Which image each one is, integers `(batch,)`; the position in the batch where it is `None`.
            Give it when images come in several batches or in another order.
        frost_folder: A folder of pictures to take "frost" from; grown textures where it is `None`.

    Returns:
        uint8 of the same shape, on the same device.

    Example:
        >>> grey = torch.full((2, 3, 32, 32), 128, dtype=torch.uint8)
        >>> noisy = corrupt(grey, "gaussian_noise", severity=5)
        >>> noisy.shape, round(noisy.float().std().item() / 255, 2)
        (torch.Size([2, 3, 32, 32]), 0.1)
        >>> alone = corrupt(grey[1:], "gaussian_noise", severity=5, index=[1])
        >>> torch.equal(alone, noisy[1:])
        True

    References:
        Hendrycks and Dietterich, 2019, <https://arxiv.org/abs/1903.12261>; Mintun et al., 2021,
        <https://arxiv.org/abs/2102.11273>.
    """
    corruption = _checked(images, name, severity, frost_folder)
    index = _checked_index(index, images)
    parameters: dict[str, Any] = {
        key: values.at(severity, min(images.shape[-2:])) for key, values in corruption.parameters.items()
    }
    if frost_folder is not None:
        parameters["folder"] = str(frost_folder)
    result = torch.empty(images.shape, dtype=torch.uint8, device=images.device)
    values = _CHUNK_VALUES.get(images.device.type, _CHUNK_VALUES["cpu"])
    size = max(1, values // max(1, images[:1].numel()))
    for start in range(0, len(images), size):
        chunk = slice(start, start + size)
        keys = image_keys(seed, name, severity, index[chunk])
        result[chunk] = corruption.apply(images[chunk].contiguous(), keys, **parameters)
    return result


def _checked(images: Tensor, name: str, severity: int, frost_folder: str | None) -> Corruption:
    if name not in CORRUPTIONS:
        raise ValueError(f"`name` must be one of {', '.join(CORRUPTIONS)}; got {name!r}.")
    _check_severity(severity)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            "`images` must be shaped (batch, channels, height, width) with 1 or 3 channels; got shape "
            f"{tuple(images.shape)}. Add a batch axis with `images[None]`, or move a last channel axis with `images.movedim(-1, 1)`."
        )
    if images.dtype != torch.uint8:
        raise ValueError(
            f"`images` must be uint8 of range 0 to 255; got {images.dtype}. "
            "For floats of range 0 to 1 pass `(255 * images).round().to(torch.uint8)`."
        )
    if min(images.shape[2:]) < _SMALLEST_SIDE:
        raise ValueError(
            f"`images` must be at least {_SMALLEST_SIDE} pixels on each side; got {tuple(images.shape[2:])}. Enlarge them first."
        )
    if frost_folder is not None and name != "frost":
        raise ValueError(f"`frost_folder` is for the corruption 'frost' only; got it with {name!r}. Leave it out.")
    return CORRUPTIONS[name]


def _check_severity(severity: int) -> None:
    if severity not in SEVERITIES:
        raise ValueError(f"`severity` must be 1, 2, 3, 4 or 5; got {severity!r}.")


def _checked_index(index: Tensor | Sequence[int] | None, images: Tensor) -> Tensor:
    if index is None:
        return torch.arange(len(images), device=images.device)
    index = torch.as_tensor(index, device=images.device)
    if index.shape != (len(images),) or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(
            f"`index` must be {len(images)} integers, one an image; got {index.dtype} of shape "
            f"{tuple(index.shape)}. Pass each image's number in the whole set."
        )
    return index


def load_corrupted(folder: str | Path, name: str, severity: int, rows: slice = slice(None)) -> Tensor:
    """Read one corruption at one severity from CIFAR-10-C, CIFAR-100-C or CIFAR-10-C-bar files.

    Such a folder holds one array a corruption, `NAME.npy`, uint8 `(5 n, height, width, 3)`: the test set of n images at severity
    1, then at severity 2, and so on.

    Args:
        folder: Where the `.npy` files are.
        name: The file's name without its ending, for example "fog".
        severity: 1 to 5.
        rows: Which images of the test set to read; all of them by default.

    Returns:
        uint8 `(n, 3, height, width)`, in the order of the test set.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/fog.npy", np.zeros((10, 32, 32, 3), dtype=np.uint8))
        ...     load_corrupted(folder, "fog", severity=3).shape
        torch.Size([2, 3, 32, 32])

    References:
        Hendrycks and Dietterich, 2019, <https://arxiv.org/abs/1903.12261>.
    """
    _check_severity(severity)
    path = Path(folder) / f"{name}.npy"
    if not path.exists():
        there = ", ".join(sorted(other.stem for other in Path(folder).glob("*.npy"))) or "no .npy file"
        raise ValueError(f"`folder` must hold {name}.npy; {str(folder)!r} holds {there}. Check folder and name.")
    images = np.load(path, mmap_mode="r")
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) % 5:
        raise ValueError(
            f"{path.name} must be uint8 (5 n, height, width, channels); got {images.dtype} of shape "
            f"{images.shape}. Was it made by another program?"
        )
    per_severity = len(images) // 5
    part = images[(severity - 1) * per_severity : severity * per_severity][rows]
    return torch.from_numpy(np.array(part.transpose(0, 3, 1, 2), order="C"))
