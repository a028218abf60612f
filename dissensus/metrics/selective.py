"""Scores and outcomes -> the risk left when the least certain inputs are handed to someone else."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dissensus._signatures import checked
from dissensus.metrics._inputs import Array, outcomes, vector

Vector: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class RiskCoverageCurve:
    """Error rate of the inputs kept, as float64 tensors of shape `(points,)` on the CPU.

    Attributes:
        coverage: Share of the inputs kept, the most certain first; rising to 1.
        risk: Error rate among them.
        area: Mean risk over all coverages (see `risk_coverage_area`), not of the thinned points.
    """

    coverage: Tensor
    risk: Tensor
    area: float


@checked
def risk_coverage_area(scores: Array, correct: Array) -> float:
    r"""Area under the risk-coverage curve (AURC).

    $$\frac{1}{B}\sum_{k=1}^{B} \mathrm{risk}_k, \qquad
    \mathrm{risk}_k = \text{error rate of the } k \text{ inputs with the lowest scores}$$

    Args:
        scores: Uncertainty of each input, `(batch,)`, higher = less certain.
        correct: Whether the prediction was right, `(batch,)`.

    Returns:
        A number in [0, 1]. Reading: lower is better; a score that knows nothing gives the error rate, and even the best
        one cannot reach 0 unless there are no errors. Equal scores count as if their order were random, in expectation.

    Example:
        >>> round(risk_coverage_area(torch.tensor([0.1, 0.2, 0.3, 0.9]), torch.tensor([1, 1, 1, 0])), 4)
        0.0625

    References:
        Geifman and El-Yaniv, 2017, <https://arxiv.org/abs/1705.08500>.
    """
    return float(_risks(scores, correct).mean())


@checked
def risk_coverage_curve(scores: Array, correct: Array, points: int = 1000) -> RiskCoverageCurve:
    """Error rate against the share of inputs kept, thinned to at most `points` points; other arguments as in `risk_coverage_area`.

    Returns:
        The curve and its area. Reading: the curve should rise to the right; where it is flat, the score does not find
        the errors.

    Example:
        >>> curve = risk_coverage_curve(torch.tensor([0.1, 0.9]), torch.tensor([True, False]))
        >>> curve.coverage.tolist(), curve.risk.tolist()
        ([0.5, 1.0], [0.0, 0.5])
    """
    if points < 2:
        raise ValueError(f"`points` must be at least 2; got {points}.")
    risks = _risks(scores, correct)
    kept = np.unique(np.linspace(1, len(risks), min(points, len(risks))).round().astype(np.intp))
    return RiskCoverageCurve(
        coverage=torch.from_numpy(kept / len(risks)), risk=torch.from_numpy(risks[kept - 1]), area=float(risks.mean())
    )


def _risks(scores: Array, correct: Array) -> Vector:
    """Expected error rate of the k most certain inputs, for k = 1 … batch."""
    uncertain = vector(scores, "scores").cpu().numpy()
    wrong = ~outcomes(correct, "correct", len(uncertain)).cpu().numpy()
    order = np.argsort(uncertain)
    ranked, errors = uncertain[order], np.cumsum(wrong[order], dtype=np.float64)
    kept = np.arange(1, len(ranked) + 1)
    last_of_tie = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    if len(last_of_tie) < len(ranked):
        # In a random order the expected number of errors grows linearly through a tie.
        errors = np.interp(kept, np.append(0, kept[last_of_tie]), np.append(0.0, errors[last_of_tie]))
    return np.divide(errors, kept, out=errors)
