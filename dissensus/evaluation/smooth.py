r"""Smooth calibration error of many resamples at once.

As in `metrics.smooth_ece`, residuals are put on a grid, where the reflected Gaussian kernel damps cosine mode k by
$e^{-(\pi k \sigma)^2/2}$; here all resamples share one grid, coarse enough for intervals, and one search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2, pi

import torch
from torch import Tensor

from dissensus.evaluation.results import Number

# Grid cells a bandwidth, at the point estimate.
_CELLS_A_BANDWIDTH = 48
_MOST_CELLS = 1 << 13
_STEPS = 9
# How far from the estimate, in either direction and as a factor, the error of a resample is looked for.
_REACH = 8.0


@dataclass(frozen=True)
class SmoothCalibrationError:
    """Smooth calibration error of one set.

    Attributes:
        numbers: The one number.
        set: The set that is resampled.
        confidence: Stated confidence of each input, `(inputs,)`, float32.
        gaps: Confidence less correctness, `(inputs,)`, float32.
    """

    numbers: Sequence[Number]
    set: str
    confidence: Tensor
    gaps: Tensor

    def resampled(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return the error on resamples, `(1, resamples)`."""
        counts, estimate = draws[self.set], max(self.numbers[0].value, 1e-4)
        cells = min(_MOST_CELLS, 1 << max(7, round(log2(_CELLS_A_BANDWIDTH / estimate))))
        modes = self._modes(counts, cells)
        low = torch.full((counts.shape[1],), estimate / _REACH)
        high = torch.full_like(low, min(1.0, max(estimate * _REACH, 0.05)))
        # The smoothed error falls with the bandwidth; where they meet is found by halving on a logarithmic scale.
        for _ in range(_STEPS):
            middle = (low * high).sqrt()
            above = _smoothed(modes, middle) > middle
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return _crossing(modes, low, high)[None]

    def _modes(self, counts: Tensor, cells: int) -> Tensor:
        """Return cosine coefficients of the mean residual density, `(resamples, cells + 1)`."""
        position = self.confidence * cells
        left = position.long().clamp(0, cells - 1)
        to_right = (position - left)[:, None]
        masses = counts * self.gaps[:, None]
        grid = counts.new_zeros(cells + 1, counts.shape[1])
        grid.index_add_(0, left, masses * (1 - to_right)).index_add_(0, left + 1, masses * to_right)
        # A mass on the boundary coincides with its mirror image, and counts twice in the even extension.
        grid[[0, -1]] *= 2
        mirrored = torch.cat([grid, grid[1:-1].flip(0)]).T.contiguous()
        return torch.fft.rfft(mirrored).real / len(counts)


def _smoothed(modes: Tensor, bandwidth: Tensor) -> Tensor:
    """Return the integral of the absolute smoothed residuals at each resample's bandwidth, `(resamples,)`."""
    cells = modes.shape[1] - 1
    # Past this mode the narrowest kernel leaves nothing (e^-18).
    used = min(cells + 1, int(6 / (pi * float(bandwidth.min()))) + 2)
    decay = torch.exp(-0.5 * (pi * bandwidth[:, None] * torch.arange(used)) ** 2)
    density = torch.fft.irfft(modes[:, :used] * decay, 2 * cells) * cells
    return density.abs().mean(1)


def _crossing(modes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return where error and bandwidth are equal between two close bandwidths, by linear interpolation."""
    over, under = _smoothed(modes, low) - low, _smoothed(modes, high) - high
    share = (over / (over - under).clamp_min(1e-12)).clamp(0, 1)
    return low + share * (high - low)
