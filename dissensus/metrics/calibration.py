"""Stated confidences and outcomes, sorted into bins -> how far they are apart."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dissensus.metrics._inputs import Array, confidences_and_correct, one_of, probabilities_and_labels

Binning = Literal["width", "mass"]


@dataclass(frozen=True)
class ReliabilityCurve:
    """Confidence and accuracy of each bin that holds inputs: float64 tensors `(bins,)` on the CPU.

    Attributes:
        confidence: Mean stated confidence.
        accuracy: Fraction that was right.
        weight: Share of all inputs; sums to 1.
        lower: Left edge, not part of the bin (except 0).
        upper: Right edge, part of the bin.
    """

    confidence: Tensor
    accuracy: Tensor
    weight: Tensor
    lower: Tensor
    upper: Tensor

    @property
    def ece(self) -> float:
        """Expected calibration error: the weighted mean gap between confidence and accuracy."""
        return float((self.weight * (self.confidence - self.accuracy).abs()).sum())


def ece(probs: Array, labels: Array, bins: int = 15, binning: Binning = "width") -> float:
    r"""Expected calibration error of the most probable class.

    $$\sum_k \frac{|B_k|}{B}\,\big|\mathrm{conf}(B_k) - \mathrm{acc}(B_k)\big|$$

    Reading: the average gap, in probability, between what the model says and how often it is right. It
    depends on the bins and is biased upwards for few inputs: `smooth_ece` is neither to the same degree.

    Args:
        probs: Predicted probabilities, `(batch, classes)`.
        labels: True class indices, `(batch,)`.
        bins: Number of bins.
        binning: Bins of equal `"width"`, or of equal `"mass"` (number of inputs; equal confidences stay
            together). Bins are right-closed, (lower, upper]: a confidence of exactly 1 is in the last. Edges
            are taken in the precision of `probs`.

    Returns:
        A number in [0, 1].

    Example:
        >>> probs = torch.tensor([[0.8, 0.2]]).repeat(10, 1)
        >>> labels = torch.tensor([0] * 6 + [1] * 4)
        >>> round(ece(probs, labels), 4)
        0.2

    References:
        Guo et al., 2017, <https://arxiv.org/abs/1706.04599>.
    """
    return reliability_curve(probs, labels, bins, binning).ece


def reliability_curve(
    probs: Array, labels: Array, bins: int = 15, binning: Binning = "width"
) -> ReliabilityCurve:
    """Confidence against accuracy of the most probable class, bin by bin.

    Reading: points below the diagonal (accuracy < confidence) are overconfident.

    Args:
        probs: Predicted probabilities, `(batch, classes)`.
        labels: True class indices, `(batch,)`.
        bins: Number of bins.
        binning: As for `ece`.

    Returns:
        The curve; bins without inputs are left out.

    Example:
        >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6]])
        >>> curve = reliability_curve(probs, torch.tensor([0, 1, 1]), bins=2)
        >>> curve.accuracy, curve.weight
        (tensor([0.6667], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    return _curve(*top_confidences(probs, labels), bins, binning)


def confidence_reliability(
    confidence: Array, correct: Array, bins: int = 15, binning: Binning = "width"
) -> ReliabilityCurve:
    """`reliability_curve` of confidences that are already at hand.

    Reading: as `reliability_curve`; its `.ece` is the `ece` of the same inputs.

    Args:
        confidence: Stated probability of being right, `(batch,)`, in [0, 1].
        correct: Whether it was right, `(batch,)`.
        bins: Number of bins.
        binning: As for `ece`.

    Returns:
        The curve; bins without inputs are left out.

    Example:
        >>> curve = confidence_reliability(torch.tensor([0.9, 0.9]), torch.tensor([True, False]))
        >>> round(curve.ece, 4)
        0.4
    """
    return _curve(*confidences_and_correct(confidence, correct), bins, binning)


def classwise_ece(probs: Array, labels: Array, bins: int = 15, binning: Binning = "width") -> float:
    r"""Calibration error of every class's probability, averaged over classes.

    $$\frac{1}{C}\sum_c \sum_k \frac{|B_{ck}|}{B}\,
    \big|\overline{p_c}(B_{ck}) - \overline{1[y = c]}(B_{ck})\big|$$

    Reading: as `ece`, but it also sees the probabilities of classes that were not predicted. Most of them are
    near zero, so values fall with the number of classes: compare only between models of the same task.

    Args:
        probs: Predicted probabilities, `(batch, classes)`.
        labels: True class indices, `(batch,)`.
        bins: Number of bins.
        binning: As for `ece`.

    Returns:
        A number in [0, 1].

    Example:
        >>> probs = torch.tensor([[0.8, 0.2]]).repeat(10, 1)
        >>> labels = torch.tensor([0] * 6 + [1] * 4)
        >>> round(classwise_ece(probs, labels), 4)
        0.2

    References:
        Kull et al., 2019, <https://arxiv.org/abs/1910.12656>.
    """
    rows, truth = probabilities_and_labels(probs, labels)
    errors = [_curve(rows[:, c].contiguous(), truth == c, bins, binning).ece for c in range(rows.shape[1])]
    return sum(errors) / len(errors)


def top_confidences(probs: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """The largest probability of each input, and whether its class is the true one.

    Reading: what `smooth_ece`, `confidence_reliability` and `risk_coverage_area` need of a classifier's
    output.

    Args:
        probs: Predicted probabilities, `(batch, classes)`.
        labels: True class indices, `(batch,)`.

    Returns:
        Confidences and booleans, `(batch,)` each.

    Example:
        >>> top_confidences(torch.tensor([[0.75, 0.25]]), torch.tensor([1]))
        (tensor([0.7500]), tensor([False]))
    """
    rows, truth = probabilities_and_labels(probs, labels)
    confidence, predicted = rows.max(1)
    return confidence.clamp(max=1.0), predicted == truth


def _curve(confidence: Tensor, correct: Tensor, bins: int, binning: Binning) -> ReliabilityCurve:
    one_of(binning, "binning", ("width", "mass"))
    if bins < 1:
        raise ValueError(f"`bins` must be at least 1; got {bins}.")
    # On the CPU, where bin sums are taken in a fixed order.
    confidence, correct = confidence.cpu(), correct.cpu()
    inner = _width_edges(confidence, bins) if binning == "width" else _mass_edges(confidence, bins)
    position = torch.bucketize(confidence, inner)
    num_bins = len(inner) + 1
    count = torch.bincount(position, minlength=num_bins).double()
    stated = torch.bincount(position, confidence.double(), num_bins)
    right = torch.bincount(position[correct], minlength=num_bins).double()
    edges = torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)]).double()
    used = count > 0
    return ReliabilityCurve(
        confidence=(stated / count)[used],
        accuracy=(right / count)[used],
        weight=count[used] / len(confidence),
        lower=edges[:-1][used],
        upper=edges[1:][used],
    )


def _width_edges(confidence: Tensor, bins: int) -> Tensor:
    return (torch.arange(1, bins, dtype=torch.float64) / bins).to(confidence.dtype)


def _mass_edges(confidence: Tensor, bins: int) -> Tensor:
    size = len(confidence)
    last_of_bin = -(-size * np.arange(1, bins) // bins) - 1
    return torch.from_numpy(np.unique(np.sort(confidence.numpy())[last_of_bin]))
