r"""Stated confidences and outcomes, smoothed by a kernel -> a calibration error without bins.

With the Gaussian kernel reflected at 0 and 1, smoothing is heat flow on the unit interval: cosine mode k
decays by $e^{-(\pi k \sigma)^2 / 2}$. The residuals are put on a fine grid once; each bandwidth then costs
one FFT of fixed length, whatever the number of inputs.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dissensus.metrics._inputs import Array, confidences_and_correct

Vector: TypeAlias = NDArray[np.float64]

CELLS = 2**14
# Below this the grid would show: linear binning adds at most 1/(4 CELLS^2) to the kernel's variance.
SMALLEST_BANDWIDTH = 4 / CELLS
CHUNK = 2**16


def smooth_ece(
    confidence: Array, correct: Array, truncate: float | None = None, bandwidth: float | None = None
) -> float:
    r"""Smooth calibration error, at the bandwidth that equals it.

    $$\mathrm{smECE}_\sigma = \int_0^1 \Big|\frac{1}{B}\sum_b K_\sigma(t, f_b)(f_b - y_b)\Big|\,dt,
    \qquad \mathrm{smECE} = \mathrm{smECE}_{\sigma^*} = \sigma^*$$
    with f the confidence, y whether it was right, and $K_\sigma$ a Gaussian reflected at 0 and 1, which keeps
    all its mass. The integral falls with $\sigma$, so the fixed point is unique.

    Reading: the average gap, in probability, between confidence and accuracy, without a choice of bins.
    Compute it on the whole set: averages over batches are biased upwards. For a classifier,
    `smooth_ece(*top_confidences(probs, labels))`.

    Args:
        confidence: Stated probability of being right, `(batch,)`, in [0, 1].
        correct: Whether it was right, `(batch,)`.
        truncate: Cuts the kernel at this distance, at most 1. `0.5` gives the values of the relplot package,
            with its other conventions: a grid of about 1000 cells, on which confidences within one cell of 0
            or 1 lose up to half their weight; bandwidths that are multiples of 1/1024. They differ from the
            exact ones when the error is large (above about 0.15) or when many confidences are saturated.
        bandwidth: Uses this $\sigma$ instead of the fixed point.

    Returns:
        A number in [0, 1].

    Example:
        >>> import torch
        >>> round(smooth_ece(torch.full((400,), 0.9), torch.arange(400) < 300), 4)
        0.15

    References:
        Blasiok and Nakkiran, 2023, <https://arxiv.org/abs/2309.12236>.
    """
    if truncate is not None and not 0 < truncate <= 1:
        raise ValueError(f"`truncate` must lie in (0, 1], or be None for the exact kernel; got {truncate}.")
    if bandwidth is not None and not SMALLEST_BANDWIDTH <= bandwidth <= 1:
        raise ValueError(f"`bandwidth` must lie in [{SMALLEST_BANDWIDTH:.2g}, 1]; got {bandwidth}.")
    stated, outcome = (values.cpu().numpy() for values in confidences_and_correct(confidence, correct))
    residuals = _grid(stated, outcome)
    if truncate is None:
        exact = _Reflected.of(residuals, len(stated))
        return exact.error(bandwidth) if bandwidth is not None else exact.fixed_point()
    cut = _Truncated(residuals, _grid(stated, None), truncate)
    return cut.error(bandwidth) if bandwidth is not None else cut.fixed_point()


@dataclass(frozen=True)
class _Reflected:
    """Cosine coefficients of the mean residual density; the exact kernel acts on each of them alone."""

    coefficients: Vector

    @classmethod
    def of(cls, masses: Vector, size: int) -> "_Reflected":
        # A point mass on the boundary coincides with its mirror image, and counts twice in the extension.
        ends = np.zeros_like(masses)
        ends[[0, -1]] = masses[[0, -1]]
        return cls(np.fft.rfft(_mirror(masses + ends)).real / size)

    def error(self, bandwidth: float) -> float:
        # A wide kernel leaves few modes: 64 cells a bandwidth integrate |r| to about 1e-5 of its value.
        cells = CELLS
        while cells * bandwidth > 128:
            cells //= 2
        decay = np.exp(-0.5 * (np.pi * bandwidth * np.arange(cells + 1)) ** 2)
        density = np.fft.irfft(self.coefficients[: cells + 1] * decay, 2 * cells) * cells
        # The mean over the even extension is the trapezoidal rule on [0, 1].
        return float(np.abs(density).mean())

    def fixed_point(self) -> float:
        low, high = SMALLEST_BANDWIDTH, 1.0
        if self.error(low) <= low:
            return self.error(low)
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if middle < self.error(middle) else (low, middle)
        return self.error(high)


@dataclass(frozen=True)
class _Truncated:
    """Residual and count masses, smoothed in the way of relplot so that its numbers can be compared with."""

    residuals: Vector
    counts: Vector
    truncate: float

    def error(self, bandwidth: float) -> float:
        cells = max(2000, round(20 / bandwidth)) // 2
        mesh = np.linspace(0, 1, max(200, round(10 / bandwidth)))
        residual, density = (
            np.interp(mesh, np.arange(cells + 1) / cells, self._smooth(masses, cells, bandwidth))
            for masses in (self.residuals, self.counts)
        )
        return float(np.abs(residual).sum() / density.sum())

    def _smooth(self, masses: Vector, cells: int, bandwidth: float) -> Vector:
        nodes = np.arange(CELLS + 1) / CELLS
        values = _mirror(_spread(nodes, masses, cells))
        distance = np.minimum(np.arange(2 * cells), 2 * cells - np.arange(2 * cells)) / cells
        kernel = np.exp(-0.5 * (distance / bandwidth) ** 2) * (distance <= self.truncate)
        return np.fft.irfft(np.fft.rfft(values) * np.fft.rfft(kernel), 2 * cells)[: cells + 1]

    def fixed_point(self) -> float:
        low, high = 0, 1024
        while high - low > 1:
            middle = (low + high) // 2
            bandwidth = middle / 1024
            low, high = (middle, high) if bandwidth < self.error(bandwidth) else (low, middle)
        return self.error(high / 1024)


def _grid(confidence: NDArray[Any], correct: NDArray[Any] | None) -> Vector:
    """Residuals (or counts, without outcomes) as masses on the nodes of the fine grid."""
    masses = np.zeros(CELLS + 1)
    for start in range(0, len(confidence), CHUNK):
        part = confidence[start : start + CHUNK].astype(np.float64)
        weight = np.ones_like(part) if correct is None else part - correct[start : start + CHUNK]
        masses += _spread(part, weight, CELLS)
    return masses


def _spread(position: Vector, weight: Vector, cells: int) -> Vector:
    """Masses on `cells + 1` nodes of [0, 1]; each weight is shared by the two nodes around its position."""
    scaled = position * cells
    left = np.minimum(scaled.astype(np.intp), cells - 1)
    to_right = np.bincount(left, weight * (scaled - left), cells)
    masses = np.append(np.bincount(left, weight, cells) - to_right, 0.0)
    masses[1:] += to_right
    return masses


def _mirror(values: Vector) -> Vector:
    """One period of the even extension: nodes 0 … n, then n-1 … 1."""
    return np.concatenate([values, values[-2:0:-1]])
