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
    dry = F.pad(~wet, (1, 1, 1, 1))
    return wet & (dry[..., :-2, 1:-1] | dry[..., 2:, 1:-1] | dry[..., 1:-1, :-2] | dry[..., 1:-1, 2:])


def _distance(edges: Tensor) -> Tensor:
    """Euclidean distance to the nearest edge, exact up to `_FARTHEST` and at least that beyond it.

    The squared distance separates: first the nearest edge in the same row, then over rows.
    """
    far = _FARTHEST + 1
    along = (~edges).to(torch.int16).mul_(far)
    # Any distance is a sum of powers of two, so doubled steps reach it.
    for step in (1, 2, 4, 8, 16):
        padded = F.pad(along, (step, step), value=far)
        ahead, behind = padded[..., 2 * step :], padded[..., : -2 * step]
        along = torch.minimum(along, torch.minimum(ahead, behind).add_(step))
    squared, height = along * along, edges.shape[-2]
    padded = F.pad(squared, (0, 0, _FARTHEST, _FARTHEST), value=far**2)
    for shift in range(1, _FARTHEST + 1):
        below = padded.narrow(-2, _FARTHEST + shift, height)
        above = padded.narrow(-2, _FARTHEST - shift, height)
        squared = torch.minimum(squared, torch.minimum(above, below).add_(shift**2))
    return squared.double().sqrt_()


def _mean3(values: Tensor) -> Tensor:
    """Mean over 3 x 3 pixels, mirrored at the border."""
    padded = F.pad(values, (1, 1, 1, 1), mode="reflect")
    rows = padded[..., :-2, :] + padded[..., 1:-1, :]
    rows.add_(padded[..., 2:, :])
    return (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:]).div_(9)


def _equalise(values: Tensor) -> Tensor:
    """Histogram equalisation of small whole numbers: each image's values spread evenly from 0 to 255."""
    flat = values.flatten(1).long()
    counts = flat.new_zeros(len(flat), _FARTHEST + 2).scatter_add_(1, flat, torch.ones_like(flat))
    below = counts.cumsum(1)
    lowest = counts.gather(1, flat.amin(1, keepdim=True))
    spread = 255.0 * (below - lowest) / (flat.shape[1] - lowest).clamp(min=1)
    return spread.double().add_(0.5).floor_().gather(1, flat).view_as(values)


def _emboss(values: Tensor) -> Tensor:
    height, width = values.shape[-2:]
    padded, embossed = F.pad(values, (1, 1, 1, 1), mode="reflect"), torch.zeros_like(values)
    for row, weights in enumerate(_EMBOSS):
        for column, weight in enumerate(weights):
            if weight:
                embossed.add_(padded[..., row : row + height, column : column + width], alpha=weight)
    return embossed
