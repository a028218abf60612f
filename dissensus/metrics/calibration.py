"""Stated confidences and outcomes -> how far they are apart, in bins or smoothed, and temperatures that bring them together."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dissensus._checks import check_member_logits
from dissensus._signatures import checked, whole_number
from dissensus.metrics._inputs import Array, class_indices, confidences_and_correct, floats, probabilities_and_labels

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


@checked
def ece(probs: Array, labels: Array, bins: int = 15, binning: Binning = "width") -> float:
    r"""Expected calibration error of the most probable class.

    $$\sum_k \frac{|B_k|}{B}\,\big|\mathrm{conf}(B_k) - \mathrm{acc}(B_k)\big|$$

    Args:
        probs: Predicted probabilities, `(batch, classes)`.
        labels: True class indices, `(batch,)`.
        bins: Number of bins.
        binning: Bins of equal `"width"`, or of equal `"mass"` (number of inputs; equal confidences stay together); right-closed,
            (lower, upper], with edges in the precision of `probs`.

    Returns:
        A number in [0, 1]. Reading: the average gap, in probability, between what the model says and how often it is
        right. It depends on the bins and is biased upwards for few inputs: `smooth_ece` is neither to the same degree.

    Example:
        >>> probs = torch.tensor([[0.8, 0.2]]).repeat(10, 1)
        >>> labels = torch.tensor([0] * 6 + [1] * 4)
        >>> round(ece(probs, labels), 4)
        0.2

    References:
        Guo et al., 2017, <https://arxiv.org/abs/1706.04599>.
    """
    return reliability_curve(probs, labels, bins, binning).ece


@checked
def reliability_curve(probs: Array, labels: Array, bins: int = 15, binning: Binning = "width") -> ReliabilityCurve:
    """Confidence against accuracy of the most probable class, bin by bin; arguments as in `ece`.

    Returns:
        The curve; bins without inputs are left out. Reading: points below the diagonal (accuracy < confidence) are
        overconfident.

    Example:
        >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6]])
        >>> curve = reliability_curve(probs, torch.tensor([0, 1, 1]), bins=2)
        >>> curve.accuracy, curve.weight
        (tensor([0.6667], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    return _curve(*top_confidences(probs, labels), bins, binning)


@checked
def confidence_reliability(
    confidence: Array, correct: Array, bins: int = 15, binning: Binning = "width"
) -> ReliabilityCurve:
    """`reliability_curve` of confidences that are already at hand, as `smooth_ece` takes them.

    Example:
        >>> curve = confidence_reliability(torch.tensor([0.9, 0.9]), torch.tensor([True, False]))
        >>> round(curve.ece, 4)
        0.4
    """
    return _curve(*confidences_and_correct(confidence, correct), bins, binning)


@checked
def classwise_ece(probs: Array, labels: Array, bins: int = 15, binning: Binning = "width") -> float:
    r"""Calibration error of every class's probability, averaged over classes; arguments as in `ece`.

    $$\frac{1}{C}\sum_c \sum_k \frac{|B_{ck}|}{B}\,
    \big|\overline{p_c}(B_{ck}) - \overline{1[y = c]}(B_{ck})\big|$$

    Returns:
        A number in [0, 1]. Reading: as `ece`, but it also sees the probabilities of classes that were not predicted.
        Values fall with the number of classes: compare only between models of the same task.

    Example:
        >>> probs = torch.tensor([[0.8, 0.2]]).repeat(10, 1)
        >>> labels = torch.tensor([0] * 6 + [1] * 4)
        >>> round(classwise_ece(probs, labels), 4)
        0.2

    References:
        Kull et al., 2019, <https://arxiv.org/abs/1910.12656>.
    """
    rows, truth = probabilities_and_labels(probs, labels)
    errors = [_curve(rows[:, c], truth == c, bins, binning).ece for c in range(rows.shape[1])]
    return sum(errors) / len(errors)


@checked
def top_confidences(probs: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """The largest probability of each input, and whether its class is the true one, `(batch,)` each; arguments as in `ece`.

    Example:
        >>> top_confidences(torch.tensor([[0.75, 0.25]]), torch.tensor([1]))
        (tensor([0.7500]), tensor([False]))
    """
    rows, truth = probabilities_and_labels(probs, labels)
    confidence, predicted = rows.max(1)
    return confidence.clamp(max=1.0), predicted == truth


def _curve(confidence: Tensor, correct: Tensor, bins: int, binning: Binning) -> ReliabilityCurve:
    whole_number("bins", bins, 1)
    # On the CPU, where bin sums are taken in a fixed order.
    confidence, correct = confidence.cpu().contiguous(), correct.cpu()
    if binning == "width":
        inner = (torch.arange(1, bins, dtype=torch.float64) / bins).to(confidence.dtype)
    else:
        last_of_bin = -(-len(confidence) * np.arange(1, bins) // bins) - 1
        inner = torch.from_numpy(np.unique(np.sort(confidence.numpy())[last_of_bin]))
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


Vector: TypeAlias = NDArray[np.float64]

CELLS = 2**14
# Below this the grid would show: linear binning adds at most 1/(4 CELLS^2) to the kernel's variance.
SMALLEST_BANDWIDTH = 4 / CELLS
CHUNK = 2**16


@checked
def smooth_ece(
    confidence: Array, correct: Array, truncate: float | None = None, bandwidth: float | None = None
) -> float:
    r"""Smooth calibration error, at the bandwidth that equals it.

    $$\mathrm{smECE}_\sigma = \int_0^1 \Big|\frac{1}{B}\sum_b K_\sigma(t, f_b)(f_b - y_b)\Big|\,dt,
    \qquad \mathrm{smECE} = \mathrm{smECE}_{\sigma^*} = \sigma^*$$
    with f the confidence, y whether it was right, and $K_\sigma$ a Gaussian reflected at 0 and 1, which keeps
    all its mass. The integral falls with $\sigma$, so the fixed point is unique.

    Args:
        confidence: Stated probability of being right, `(batch,)`, in [0, 1].
        correct: Whether it was right, `(batch,)`.
        truncate: Cuts the kernel at this distance, at most 1. `0.5` gives the values of the relplot package, grid and
            bandwidths included, which differ when the error is above about 0.15 or many confidences are saturated.
        bandwidth: Uses this $\sigma$ instead of the fixed point.

    Returns:
        A number in [0, 1]. Reading: the average gap, in probability, between confidence and accuracy, without a choice of bins. Averages
        over batches are biased upwards. For a classifier, `smooth_ece(*top_confidences(probs, labels))`.

    Example:
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
        error, low, halvings = _reflected(residuals, len(stated)), SMALLEST_BANDWIDTH, 24
    else:
        # Relplot takes bandwidths that are multiples of 1/1024.
        error, low, halvings = _truncated(residuals, _grid(stated, None), truncate), 0.0, 10
    return error(_fixed_point(error, low, halvings) if bandwidth is None else bandwidth)


def _fixed_point(error: Callable[[float], float], low: float, halvings: int) -> float:
    if low and error(low) <= low:
        return low
    high = 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if middle < error(middle) else (low, middle)
    return high


def _reflected(masses: Vector, size: int) -> Callable[[float], float]:
    r"""Return the smoothed error by bandwidth: by heat flow, in which cosine mode k decays by $e^{-(\pi k \sigma)^2 / 2}$."""
    # A point mass on the boundary coincides with its mirror image, and counts twice in the extension.
    ends = np.zeros_like(masses)
    ends[[0, -1]] = masses[[0, -1]]
    coefficients = np.fft.rfft(_mirror(masses + ends)).real / size

    def error(bandwidth: float) -> float:
        # A wide kernel leaves few modes: 64 cells a bandwidth integrate |r| to about 1e-5 of its value.
        cells = CELLS
        while cells * bandwidth > 128:
            cells //= 2
        decay = np.exp(-0.5 * (np.pi * bandwidth * np.arange(cells + 1)) ** 2)
        density = np.fft.irfft(coefficients[: cells + 1] * decay, 2 * cells) * cells
        # The mean over the even extension is the trapezoidal rule on [0, 1].
        return float(np.abs(density).mean())

    return error


def _truncated(residuals: Vector, counts: Vector, truncate: float) -> Callable[[float], float]:
    """Return the smoothed error by bandwidth in the way of relplot, whose about 1000 cells halve the weight of those at the ends."""

    def smooth(masses: Vector, cells: int, bandwidth: float) -> Vector:
        values = _mirror(_spread(np.arange(CELLS + 1) / CELLS, masses, cells))
        distance = np.minimum(np.arange(2 * cells), 2 * cells - np.arange(2 * cells)) / cells
        kernel = np.exp(-0.5 * (distance / bandwidth) ** 2) * (distance <= truncate)
        return np.fft.irfft(np.fft.rfft(values) * np.fft.rfft(kernel), 2 * cells)[: cells + 1]

    def error(bandwidth: float) -> float:
        cells = max(2000, round(20 / bandwidth)) // 2
        mesh = np.linspace(0, 1, max(200, round(10 / bandwidth)))
        residual, density = (
            np.interp(mesh, np.arange(cells + 1) / cells, smooth(masses, cells, bandwidth))
            for masses in (residuals, counts)
        )
        return float(np.abs(residual).sum() / density.sum())

    return error


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


logger = logging.getLogger("dissensus")

LOWEST, HIGHEST = 1e-2, 1e2
# Rows are widened to float64 a piece at a time: the copies stay small however large the validation set.
CHUNK_VALUES = 2**22


@checked
@dataclass(frozen=True)
class Temperature:
    """Temperatures fitted by `fit_temperature`, which says how to read them.

    Attributes:
        value: One temperature a member, `(members,)`; of the pool, `(1,)`. Float64, on the CPU, positive.
        of: `"members"` or `"pool"`.
    """

    value: Tensor
    of: Literal["members", "pool"]

    def __post_init__(self) -> None:
        if self.value.ndim != 1 or (self.of == "pool" and len(self.value) != 1):
            came = f"one axis, not {tuple(self.value.shape)}"
            raise ValueError(f"`value` must be one temperature a member, or one for the pool, on {came}.")
        if not bool(((self.value > 0) & self.value.isfinite()).all()):
            raise ValueError(f"Temperatures must be positive and finite; got {self.value.tolist()}.")

    @property
    def determined(self) -> bool:
        """Whether every temperature lies inside the range that is searched; at an end of it, the labels set none."""
        return bool(((self.value > 1.001 * LOWEST) & (self.value < 0.999 * HIGHEST)).all())

    def apply(self, logits: Tensor) -> Tensor:
        """Scale member outputs `(members, batch, classes)`.

        Returns:
            Logits of the same dtype, of which a softmax gives the calibrated probabilities: of each member, or of the pool,
            `(1, batch, classes)`.
        """
        if logits.ndim != 3 or (self.of == "members" and len(logits) != len(self.value)):
            fitted = f" with the {len(self.value)} members that were fitted" if self.of == "members" else ""
            raise ValueError(f"`logits` must be shaped (members, batch, classes){fitted}; got {tuple(logits.shape)}.")
        if self.of == "pool":
            return (_pooled(logits) / self.value.item()).to(logits.dtype)[None]
        return logits / self.value.to(logits.device, logits.dtype)[:, None, None]


@checked
def fit_temperature(logits: Array, labels: Array, of: Literal["members", "pool"] = "members") -> Temperature:
    r"""Temperature that minimises the negative log-likelihood of held-out labels.

    $$\min_T\; -\frac{1}{B}\sum_b \log \operatorname{softmax}(z_b / T)_{y_b}$$
    with $z$ a member's logits, or the log of the members' mean probabilities. The most probable class does not change.

    Args:
        logits: Member outputs on validation inputs that were not trained on, `(members, batch, classes)`.
        labels: Their true class indices, `(batch,)`.
        of: `"members"`: each member gets its own. `"pool"`: one for the averaged prediction, which is what an ensemble needs.

    Returns:
        The temperatures, to `.apply` to other logits. Reading: above 1 the predictions were overconfident, below 1 underconfident. At an
        end of [0.01, 100] the labels do not determine one (all right, or none): `.determined` says so, and take more validation inputs.

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0]]]).repeat(1, 4, 1)
        >>> fitted = fit_temperature(logits, torch.tensor([0, 0, 0, 1]))  # right three times in four
        >>> [round(p, 4) for p in fitted.apply(logits)[0, 0].softmax(-1).tolist()]
        [0.75, 0.25]

    References:
        Guo et al., 2017, <https://arxiv.org/abs/1706.04599>; Rahaman and Thiery, 2021,
        <https://arxiv.org/abs/2007.08792>.
    """
    outputs = floats(logits, "logits")
    check_member_logits(outputs)
    truth = class_indices(labels, "labels", *outputs.shape[1:]).to(outputs.device)
    fitted = outputs if of == "members" else _pooled(outputs)[None]
    found = [_best_temperature(member, truth) for member in fitted]
    result = Temperature(torch.tensor(found, dtype=torch.float64), of)
    if not result.determined:
        ends = ", ".join(f"{one:.3g}" for one in found)
        text = "%d validation labels do not determine a temperature: it ends at %s, of a range from %g to %g"
        logger.warning(text, len(truth), ends, LOWEST, HIGHEST)
    return result


def _best_temperature(logits: Tensor, labels: Tensor) -> float:
    """Root of the slope in 1/T: a Newton step where it makes progress, else the middle of the bracket."""
    low, high = 1 / HIGHEST, 1 / LOWEST
    inverse, moved = 1.0, inf
    while moved > 1e-10:
        slope, curvature = _slope(logits, labels, inverse)
        if slope == 0:
            break
        low, high = (inverse, high) if slope < 0 else (low, inverse)
        step = inverse - slope / curvature if curvature > 0 else 0.0
        # Where the slope only decays, as for labels that are all right, Newton would creep.
        if not low < step < high or abs(log(step / inverse)) > moved / 2:
            step = sqrt(low * high)
        inverse, moved = step, abs(log(step / inverse))
    return 1 / inverse


def _slope(logits: Tensor, labels: Tensor, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean NLL of `softmax(inverse * logits)`, in `inverse`."""
    slope = curvature = 0.0
    size = max(1, CHUNK_VALUES // logits.shape[1])
    for part, truth in zip(torch.split(logits, size), torch.split(labels, size), strict=True):
        rows = part.double()
        # Measured from the true class, so that the slope is not a difference of large numbers.
        ahead = rows - rows.gather(1, truth[:, None])
        probs = (inverse * ahead).softmax(1)
        mean = (probs * ahead).sum(1)
        slope += float(mean.sum())
        curvature += float((probs * (ahead - mean[:, None]).square()).sum())
    return slope / len(labels), curvature / len(labels)


def _pooled(logits: Tensor) -> Tensor:
    """Log of the members' mean probabilities, `(batch, classes)`; finite however far apart the logits are."""
    total = logits[0].double().log_softmax(-1)
    for member in logits[1:]:
        total = torch.logaddexp(total, member.double().log_softmax(-1))
    return total - log(len(logits))
