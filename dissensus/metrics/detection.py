"""Uncertainty scores -> how well they tell out-of-distribution inputs from others, and wrong answers from right ones: exactly."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dissensus._signatures import checked, whole_number
from dissensus.metrics._inputs import Array, outcomes, scores_pair, vector

Positive = Literal["ood", "id"]


@dataclass(frozen=True)
class RocCurve:
    """Rates at falling thresholds, as float64 tensors of shape `(points,)` on the CPU; from (0, 0) to (1, 1).

    Attributes:
        fpr: Fraction of ID inputs at or above the threshold.
        tpr: Fraction of OOD inputs at or above the threshold.
        threshold: The thresholds; the first is infinite.
    """

    fpr: Tensor
    tpr: Tensor
    threshold: Tensor


@checked
def auroc(ood_scores: Array, id_scores: Array) -> float:
    r"""Probability that a random OOD input scores above a random ID input; ties count one half.

    $$P(s_\mathrm{ood} > s_\mathrm{id}) + \tfrac12 P(s_\mathrm{ood} = s_\mathrm{id})$$

    Args:
        ood_scores: Scores of OOD inputs, `(n_ood,)`, higher = less certain.
        id_scores: Scores of ID inputs, `(n_id,)`.

    Returns:
        A number in [0, 1]. Reading: 1 separates the sets, 0.5 is no better than chance (and exactly 0.5 for a constant
        score), below 0.5 the score points the wrong way.

    Example:
        >>> auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
        0.875

    References:
        Hanley and McNeil, 1982, <https://doi.org/10.1148/radiology.143.1.7063747>.
    """
    ood, known = (_ascending(scores) for scores in scores_pair(ood_scores, id_scores))
    # Both sides sorted, so that the searches walk through memory once; sums of counts stay exact integers.
    below = int(torch.searchsorted(known, ood).sum())
    at_or_below = int(torch.searchsorted(known, ood, right=True).sum())
    return (below + at_or_below) / (2 * len(ood) * len(known))


@checked
def aupr(ood_scores: Array, id_scores: Array, positive: Positive = "ood") -> float:
    r"""Area under the precision-recall curve, as average precision.

    $$\sum_k (R_k - R_{k-1})\,P_k$$
    over the distinct thresholds, without interpolation; scores as in `auroc`. OOD inputs are retrieved by high scores
    (`positive="ood"`, often called AUPR-out), or ID inputs by low ones (`"id"`, AUPR-in).

    Returns:
        A number in (0, 1]. Reading: chance is the share of positive inputs, not 0.5: compare only at equal set sizes.

    Example:
        >>> round(aupr(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0])), 4)
        0.8333

    References:
        Hendrycks and Gimpel, 2017, <https://arxiv.org/abs/1610.02136>.
    """
    wanted, others = (_ascending(scores) for scores in _oriented(ood_scores, id_scores, positive))
    # An input of the wanted set is retrieved together with everything that scores at least as high.
    true = len(wanted) - torch.searchsorted(wanted, wanted)
    false = len(others) - torch.searchsorted(others, wanted)
    return float((true / (true + false).double()).mean())


@checked
def fpr_at_tpr(ood_scores: Array, id_scores: Array, tpr: float = 0.95, positive: Positive = "ood") -> float:
    """False positive rate at the first threshold whose true positive rate reaches `tpr`.

    Args:
        ood_scores: Scores of OOD inputs, `(n_ood,)`, higher = less certain.
        id_scores: Scores of ID inputs, `(n_id,)`.
        tpr: Fraction of positive inputs that must be caught, in (0, 1].
        positive: `"ood"`: the fraction of ID inputs that raise an alarm when `tpr` of the OOD inputs do (OpenOOD).
            `"id"`: the fraction of OOD inputs that pass when `tpr` of the ID inputs do (the ODIN line of work).

    Returns:
        A number in [0, 1]. Reading: 0 is perfect, `tpr` is chance. Always report which set was positive: it can make a
        factor of two.

    Example:
        >>> ood, known = torch.tensor([0.5, 3.0, 4.0, 5.0]), torch.tensor([0.0, 1.0, 2.0, 2.5])
        >>> fpr_at_tpr(ood, known), fpr_at_tpr(ood, known, positive="id")
        (0.75, 0.25)

    References:
        Zhang et al., 2023, OpenOOD v1.5, <https://arxiv.org/abs/2306.09301>; Liang et al., 2018,
        <https://arxiv.org/abs/1706.02690>.
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"`tpr` must lie in (0, 1]; got {tpr}.")
    wanted, others = _oriented(ood_scores, id_scores, positive)
    caught = ceil(tpr * len(wanted))
    # The product may round up past an integer (0.07 * 100), the quotient does not.
    if caught > 1 and (caught - 1) / len(wanted) >= tpr:
        caught -= 1
    threshold = _ascending(wanted)[len(wanted) - caught]
    return int((others >= threshold).sum()) / len(others)


@checked
def roc_curve(ood_scores: Array, id_scores: Array, points: int = 1000) -> RocCurve:
    """ROC curve with OOD inputs positive, thinned to at most `points` points, at least 3; scores as in `auroc`.

    The curve is whole if neither set has half as many distinct scores.

    Returns:
        The curve. Reading: the further above the diagonal, the better; the area below the full curve is `auroc`. Points
        are exact, at thresholds evenly spread over the ranks of both sets.

    Example:
        >>> curve = roc_curve(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
        >>> curve.fpr.tolist(), curve.tpr.tolist()
        ([0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0])
    """
    whole_number("points", points, 3)
    ood, known = (_ascending(scores) for scores in scores_pair(ood_scores, id_scores))
    threshold = torch.unique(torch.cat([_thinned(scores, (points - 1) // 2) for scores in (ood, known)])).flip(0)
    rates = [(len(each) - torch.searchsorted(each, threshold)).double().cpu() / len(each) for each in (known, ood)]
    fpr, tpr = (torch.cat([rate.new_zeros(1), rate]) for rate in rates)
    start = torch.full((1,), torch.inf, dtype=torch.float64)
    return RocCurve(fpr=fpr, tpr=tpr, threshold=torch.cat([start, threshold.double().cpu()]))


def _oriented(ood_scores: Array, id_scores: Array, positive: Positive) -> tuple[Tensor, Tensor]:
    """Scores of the positive set and of the other, higher = more likely positive."""
    ood, known = scores_pair(ood_scores, id_scores)
    return (ood, known) if positive == "ood" else (-known, -ood)


def _ascending(scores: Tensor) -> Tensor:
    # On the CPU numpy's vectorised sort is several times faster than torch's.
    return scores.sort().values if scores.is_cuda else torch.from_numpy(np.sort(scores.numpy()))


def _thinned(ascending: Tensor, count: int) -> Tensor:
    """All distinct values if at most `count`, else `count` values at even ranks, from the smallest on."""
    if int((ascending[1:] != ascending[:-1]).sum()) < count:
        return torch.unique_consecutive(ascending)
    ranks = torch.linspace(0, len(ascending) - 1, count, dtype=torch.float64).round().long()
    return ascending[ranks.to(ascending.device)]


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
    whole_number("points", points, 2)
    risks = _risks(scores, correct)
    kept = np.unique(np.linspace(1, len(risks), min(points, len(risks))).round().astype(np.intp))
    coverage, risk = torch.from_numpy(kept / len(risks)), torch.from_numpy(risks[kept - 1])
    return RiskCoverageCurve(coverage, risk, area=float(risks.mean()))


def _risks(scores: Array, correct: Array) -> NDArray[np.float64]:
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
