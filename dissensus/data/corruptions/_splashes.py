"""How water drops on a lens catch the light."""

import torch
import torch.nn.functional as F
from torch import Tensor

_FARTHEST = 20
_EMBOSS = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))


def water(liquid: Tensor, wet: Tensor) -> Tensor:
    """Light of the drops, `(batch, 1, height, width)`, from 0 to 1, which the brightest drop reaches.

    The distance to the nearest edge of a drop, spread over all grey values and embossed, times the liquid's
    height. The published code finds edges by Canny's detector; here they are the outermost pixels of the
    drops.
    """
    height = torch.where(wet, liquid, 0.0).mul_(255).floor_()
    relief = _equalise(_mean3(_distance(_edges(wet)).clamp_(max=_FARTHEST)).floor_())
    relief = _mean3(_emboss(relief).clamp_(0.0, 255.0)).round_()
    light = height * relief
    return light / light.amax(dim=(1, 2, 3), keepdim=True).clamp(min=1e-9)


def _edges(wet: Tensor) -> Tensor:
    """Wet pixels with a dry one above, below, left or right."""
    dry = F.pad((~wet).float(), (1, 1, 1, 1))
    beside = dry[..., :-2, 1:-1] + dry[..., 2:, 1:-1] + dry[..., 1:-1, :-2] + dry[..., 1:-1, 2:]
    return wet & (beside > 0)


def _distance(edges: Tensor) -> Tensor:
    """Euclidean distance to the nearest edge, exact up to `_FARTHEST` and at least that beyond it.

    The squared distance separates: first the nearest edge in the same row, then over rows.
    """
    far = float((_FARTHEST + 1) ** 2)
    squared = torch.where(edges, 0.0, far)
    for axis, padding in ((-1, (_FARTHEST, _FARTHEST, 0, 0)), (-2, (0, 0, _FARTHEST, _FARTHEST))):
        padded, size = F.pad(squared, padding, value=far), squared.shape[axis]
        for shift in range(-_FARTHEST, _FARTHEST + 1):
            moved = padded.narrow(axis, _FARTHEST + shift, size) + float(shift**2)
            squared = torch.minimum(squared, moved, out=moved)
    return squared.double().sqrt_()


def _mean3(values: Tensor) -> Tensor:
    """Mean over 3 x 3 pixels, mirrored at the border."""
    return F.avg_pool2d(F.pad(values, (1, 1, 1, 1), mode="reflect"), 3, stride=1)


def _equalise(values: Tensor) -> Tensor:
    """Histogram equalisation of small whole numbers: each image's values spread evenly from 0 to 255."""
    flat = values.flatten(1).long()
    counts = flat.new_zeros(len(flat), _FARTHEST + 2).scatter_add_(1, flat, torch.ones_like(flat))
    below = counts.cumsum(1)
    lowest = counts.gather(1, flat.amin(1, keepdim=True))
    spread = 255.0 * (below - lowest) / (flat.shape[1] - lowest).clamp(min=1)
    return spread.double().add_(0.5).floor_().gather(1, flat).view_as(values)


def _emboss(values: Tensor) -> Tensor:
    kernel = torch.tensor(_EMBOSS, dtype=values.dtype, device=values.device)
    return F.conv2d(F.pad(values, (1, 1, 1, 1), mode="reflect"), kernel[None, None])
