"""Images read at other places: one bilinear look-up a pixel."""

import torch
import torch.nn.functional as F
from torch import Tensor


def positions(images: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every pixel, float32 `(height, 1)` and `(1, width)`."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, dtype=torch.float32, device=images.device)[:, None]
    return rows, torch.arange(width, dtype=torch.float32, device=images.device)[None]


def sample(images: Tensor, rows: Tensor, columns: Tensor, border: str = "mirror") -> Tensor:
    """Bilinear values of the images, float32, at `(rows, columns)` in pixels, `(batch, height, width)` each.

    Beyond the border: "mirror" reflects about the last pixel's centre, "reflect" about its outer side.
    """
    height, width = images.shape[-2:]
    mirror = border == "mirror"
    if mirror:
        across, down = columns * (2 / (width - 1)) - 1, rows * (2 / (height - 1)) - 1
    else:
        across, down = (columns + 0.5) * (2 / width) - 1, (rows + 0.5) * (2 / height) - 1
    # Places that all images share are stored once.
    grid = torch.empty(*torch.broadcast_shapes(across.shape, down.shape), 2, device=images.device)
    grid[..., 0], grid[..., 1] = across, down
    grid = grid.expand(len(images), -1, -1, -1)
    return F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=mirror)
