"""Validation logits and labels -> temperatures that make the probabilities fit, and nothing else change."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Literal

import torch
from torch import Tensor

from dissensus._checks import check_member_logits
from dissensus.metrics._inputs import Array, class_indices, floats, one_of

logger = logging.getLogger("dissensus")

LOWEST, HIGHEST = 1e-2, 1e2
# Rows are widened to float64 a piece at a time: the copies stay small however large the validation set.
CHUNK_VALUES = 2**22


@dataclass(frozen=True)
class Temperature:
    """Temperatures fitted by `fit_temperature`.

    Reading: above 1 the predictions were overconfident, below 1 underconfident.

    Attributes:
        value: One temperature a member, `(members,)`; of the pool, `(1,)`. Float64, on the CPU, positive.
        of: `"members"` or `"pool"`.
    """

    value: Tensor
    of: Literal["members", "pool"]

    def __post_init__(self) -> None:
        one_of(self.of, "of", ("members", "pool"))
        if self.value.ndim != 1 or (self.of == "pool" and len(self.value) != 1):
            raise ValueError(
                "`value` must hold one temperature for each member, or one for the pool, on one axis; got shape "
                f"{tuple(self.value.shape)}."
            )
        if not bool(((self.value > 0) & self.value.isfinite()).all()):
            raise ValueError(f"Temperatures must be positive and finite; got {self.value.tolist()}.")

    @property
    def determined(self) -> bool:
        """Whether every temperature lies inside the range that is searched; at an end of it, the labels set none."""
        return bool(((self.value > 1.001 * LOWEST) & (self.value < 0.999 * HIGHEST)).all())

    def apply(self, logits: Tensor) -> Tensor:
        """Scale logits.

        Args:
            logits: Unnormalised member outputs, `(members, batch, classes)`.

        Returns:
            Logits of the same dtype: `(members, batch, classes)` where members were fitted, each divided by
            its temperature; `(1, batch, classes)` where the pool was, the pooled log-probabilities divided by
            the temperature. A softmax gives the calibrated probabilities.
        """
        if logits.ndim != 3 or (self.of == "members" and len(logits) != len(self.value)):
            fitted = f" with the {len(self.value)} members that were fitted" if self.of == "members" else ""
            raise ValueError(
                f"`logits` must be shaped (members, batch, classes){fitted}; got shape {tuple(logits.shape)}."
            )
        if self.of == "pool":
            return (_pooled(logits) / self.value.item()).to(logits.dtype)[None]
        return logits / self.value.to(logits.device, logits.dtype)[:, None, None]


def fit_temperature(logits: Array, labels: Array, of: Literal["members", "pool"] = "members") -> Temperature:
    r"""Temperature that minimises the negative log-likelihood of held-out labels.

    $$\min_T\; -\frac{1}{B}\sum_b \log \operatorname{softmax}(z_b / T)_{y_b}$$
    with $z$ a member's logits, or the log of the members' mean probabilities. The objective is convex in
    $1/T$; its slope is brought to zero by Newton steps inside a bracket. Predictions (the most probable
    class) do not change.

    Reading: above 1 the predictions were overconfident, below 1 underconfident. Values are searched in [0.01,
    100]: an end of that range means that the labels do not determine a temperature (all right, or none), which
    `.determined` says and a line of the log warns of; take more validation inputs then.

    Args:
        logits: Member outputs on validation inputs that were not trained on, `(members, batch, classes)`.
        labels: Their true class indices, `(batch,)`.
        of: `"members"`: each member gets its own. `"pool"`: one temperature for the averaged prediction,
            which is what an ensemble needs, for averaging calibrated members gives an underconfident pool.

    Returns:
        The temperatures, ready to `.apply` to other logits.

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0]]]).repeat(1, 4, 1)
        >>> fitted = fit_temperature(logits, torch.tensor([0, 0, 0, 1]))  # right three times in four
        >>> [round(p, 4) for p in fitted.apply(logits)[0, 0].softmax(-1).tolist()]
        [0.75, 0.25]

    References:
        Guo et al., 2017, <https://arxiv.org/abs/1706.04599>; Rahaman and Thiery, 2021,
        <https://arxiv.org/abs/2007.08792>.
    """
    one_of(of, "of", ("members", "pool"))
    outputs = floats(logits, "logits")
    check_member_logits(outputs, stacklevel=3)
    truth = class_indices(labels, "labels", *outputs.shape[1:]).to(outputs.device)
    fitted = outputs if of == "members" else _pooled(outputs)[None]
    value = torch.tensor([_best_temperature(member, truth) for member in fitted], dtype=torch.float64)
    result = Temperature(value=value, of=of)
    if not result.determined:
        logger.warning(
            "%d validation labels do not determine a temperature: it ends at %s, of a range from %g to %g",
            len(truth),
            ", ".join(f"{one:.3g}" for one in value.tolist()),
            LOWEST,
            HIGHEST,
        )
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
    for rows, truth in _chunks(logits, labels):
        # Measured from the true class, so that the slope is not a difference of large numbers.
        ahead = rows - rows.gather(1, truth[:, None])
        probs = (inverse * ahead).softmax(1)
        mean = (probs * ahead).sum(1)
        slope += float(mean.sum())
        curvature += float((probs * (ahead - mean[:, None]).square()).sum())
    return slope / len(labels), curvature / len(labels)


def _chunks(logits: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(1, CHUNK_VALUES // logits.shape[1])
    for rows, truth in zip(torch.split(logits, size), torch.split(labels, size), strict=True):
        yield rows.double(), truth


def _pooled(logits: Tensor) -> Tensor:
    """Log of the members' mean probabilities, `(batch, classes)`; finite however far apart the logits are."""
    total = logits[0].double().log_softmax(-1)
    for member in logits[1:]:
        total = torch.logaddexp(total, member.double().log_softmax(-1))
    return total - log(len(logits))
