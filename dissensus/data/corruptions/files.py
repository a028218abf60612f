"""The official corrupted test sets, read from the user's own copy."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_corrupted(folder: str | Path, name: str, severity: int, rows: slice = slice(None)) -> Tensor:
    """Read one corruption at one severity from CIFAR-10-C, CIFAR-100-C or CIFAR-10-C-bar files.

    Such a folder holds one array a corruption, `NAME.npy`, uint8 `(5 n, height, width, 3)`: the test set of n
    images at severity 1, then at severity 2, and so on.

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
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"`severity` must be 1, 2, 3, 4 or 5; got {severity!r}.")
    path = Path(folder) / f"{name}.npy"
    if not path.exists():
        there = ", ".join(sorted(other.stem for other in Path(folder).glob("*.npy"))) or "no .npy file"
        raise ValueError(
            f"`folder` must hold {name}.npy; {str(folder)!r} holds {there}. Check the folder and the name."
        )
    images = np.load(path, mmap_mode="r")
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) % 5:
        raise ValueError(
            f"{path.name} must be uint8 (5 n, height, width, channels); got {images.dtype} of shape "
            f"{images.shape}. Was it made by another program?"
        )
    per_severity = len(images) // 5
    part = images[(severity - 1) * per_severity : severity * per_severity][rows]
    return torch.from_numpy(np.array(part.transpose(0, 3, 1, 2), order="C"))
