"""How large a calibration error is by chance alone."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS = 200


def ece_floor(confidence: ArrayLike, bins: int = 15, seed: int = 0) -> float:
    """Mean expected calibration error of a model that is perfectly calibrated and has these confidences.

    Reading: a calibration error near it, or two that differ by less, are no finding.

    Args:
        confidence: Confidence in each answer, `(inputs,)`.
        bins: Bins of equal width, as those of the error that it is compared with.
        seed: Decides which answers are right in each draw.

    Example:
        >>> round(ece_floor(typical_confidence(0.91, 10_000)), 3), round(ece_floor(typical_confidence(0.91, 1000)), 2)
        (0.007, 0.02)
    """
    confidence = np.asarray(confidence, dtype=float)
    right = np.random.default_rng(seed).random((DRAWS, len(confidence))) < confidence
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.stack([((right - confidence) * (which == index)).sum(1) for index in np.unique(which)])
    return float(np.abs(gaps).sum(0).mean() / len(confidence))


def typical_confidence(accuracy: float, inputs: int, chance: float = 0.1) -> NDArray[np.float64]:
    """Return confidences as a calibrated network of this accuracy may have them, where the real ones were not stored.

    They are quantiles of a beta law with that mean and weight 2; weights from 1 to 4 change the floor by a tenth.
    """
    draws = np.random.default_rng(0).beta(2 * accuracy, 2 * (1 - accuracy), inputs)
    return np.maximum(draws, chance)
