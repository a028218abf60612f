"""Predicted means, scales, samples or intervals, and targets -> how good the predictions are.

All arguments of a function have one shape, `(batch,)` or any other; the result is the mean over all entries, except for
likelihoods, which are nats an *example*: those of several targets, `(batch, targets)`, are summed. `scale` is the
standard deviation of a Gaussian or the b of a Laplace distribution, never a variance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log, pi, sqrt
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from dissensus._signatures import checked
from dissensus.metrics._inputs import Array, alike, floats
from dissensus.objectives.likelihoods import gaussian_losses, laplace_losses


@dataclass(frozen=True)
class Family:
    """A location-scale family of distributions."""

    variance: float  # at scale one
    nll: Callable[[Tensor, Tensor, Tensor], Tensor]  # of (mean, scale, target), element by element
    crps: Callable[[Tensor, Tensor], Tensor]  # of (scale, standardised error), element by element
    half_width: Callable[[float], float]  # of the central interval of this probability, at scale one


def _gaussian_crps(scale: Tensor, z: Tensor) -> Tensor:
    density = torch.exp(-z.square() / 2) / sqrt(2 * pi)
    return scale * (z * torch.erf(z / sqrt(2)) + 2 * density - 1 / sqrt(pi))


def _laplace_crps(scale: Tensor, z: Tensor) -> Tensor:
    return scale * (z.abs() + torch.exp(-z.abs()) - 0.75)


def _gaussian_half_width(level: float) -> float:
    return sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gaussian": Family(1.0, gaussian_losses, _gaussian_crps, _gaussian_half_width),
        "laplace": Family(2.0, laplace_losses, _laplace_crps, lambda level: -log(1 - level)),
    }
)


@checked
def rmse(prediction: Array, target: Array) -> float:
    """Root mean squared error.

    Args:
        prediction: Predicted values.
        target: True values.

    Returns:
        A number that is not negative. Reading: typical error, in units of the target, with large errors weighing more.

    Example:
        >>> round(rmse(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0])), 4)
        3.5355
    """
    return sqrt(float(_errors(prediction, target).square().mean()))


@checked
def mae(prediction: Array, target: Array) -> float:
    """Mean absolute error, in units of the target; arguments as in `rmse`.

    Example:
        >>> mae(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0]))
        3.5
    """
    return float(_errors(prediction, target).abs().mean())


@checked
def gaussian_nll(mean: Array, scale: Array, target: Array) -> float:
    r"""Mean negative log-likelihood under Gaussians, in nats an example, with the constant.

    $$\tfrac12\log(2\pi\sigma^2) + \frac{(y-\mu)^2}{2\sigma^2}$$

    Args:
        mean: Predicted means.
        scale: Predicted standard deviations, positive.
        target: True values.

    Returns:
        Nats. Reading: lower is better; it depends on the units of the target, and may be negative.

    Example:
        >>> zero, one = torch.zeros(3), torch.ones(3)
        >>> round(gaussian_nll(zero, one, zero), 4)
        0.9189
    """
    spread, standard = _standardised(mean, scale, target)
    return _per_example(spread.log() + standard.square() / 2 + log(2 * pi) / 2)


@checked
def laplace_nll(mean: Array, scale: Array, target: Array) -> float:
    r"""Mean negative log-likelihood under Laplace distributions, in nats an example; arguments and reading as in `gaussian_nll`.

    $$\log(2b) + \frac{|y-\mu|}{b}$$

    The `scale` is b; the variance is 2b².

    Example:
        >>> zero, one = torch.zeros(3), torch.ones(3)
        >>> round(laplace_nll(zero, one, zero), 4)
        0.6931
    """
    spread, standard = _standardised(mean, scale, target)
    return _per_example(spread.log() + standard.abs() + log(2))


@checked
def gaussian_crps(mean: Array, scale: Array, target: Array) -> float:
    r"""Mean continuous ranked probability score of Gaussians; arguments as in `gaussian_nll`.

    $$\sigma\Big[z\,(2\Phi(z) - 1) + 2\varphi(z) - \frac{1}{\sqrt\pi}\Big], \qquad z = \frac{y-\mu}{\sigma}$$

    Returns:
        A number that is not negative. Reading: in units of the target, lower is better; the absolute error, generalised
        to a distribution.

    Example:
        >>> zero, one = torch.zeros(3), torch.ones(3)
        >>> round(gaussian_crps(zero, one, zero), 4)
        0.2337

    References:
        Gneiting and Raftery, 2007, <https://doi.org/10.1198/016214506000001437>.
    """
    return float(_gaussian_crps(*_standardised(mean, scale, target)).mean())


@checked
def laplace_crps(mean: Array, scale: Array, target: Array) -> float:
    r"""Mean continuous ranked probability score of Laplace distributions; arguments as in `laplace_nll`, reading as in `gaussian_crps`.

    $$b\,\Big[|z| + e^{-|z|} - \tfrac34\Big], \qquad z = \frac{y-\mu}{b}$$

    Example:
        >>> zero, one = torch.zeros(3), torch.ones(3)
        >>> laplace_crps(zero, one, zero)
        0.25

    References:
        Jordan, Krüger and Lerch, 2019, <https://doi.org/10.18637/jss.v090.i12>.
    """
    return float(_laplace_crps(*_standardised(mean, scale, target)).mean())


@checked
def ensemble_crps(samples: Array, target: Array, fair: bool = False) -> float:
    r"""Mean continuous ranked probability score of the empirical distribution of samples or members.

    $$\frac1M\sum_m |x_m - y| - \frac{1}{2M^2}\sum_{m,n}|x_m - x_n|$$

    Args:
        samples: Member predictions or draws, `(members, …)`.
        target: True values, of the shape of one member's predictions.
        fair: Divides the second sum by M(M-1) instead of M², which estimates without bias the score of the distribution
            that the members were drawn from. Needs two members.

    Returns:
        A number; not negative unless `fair`. Reading: in units of the target, lower is better; for one member it is the
        absolute error.

    Example:
        >>> ensemble_crps(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
        0.5

    References:
        Gneiting and Raftery, 2007, <https://doi.org/10.1198/016214506000001437>; Ferro, 2014,
        <https://doi.org/10.1002/qj.2270>.
    """
    draws = floats(samples, "samples")
    num_members = len(draws) if draws.ndim else 0
    if draws.ndim < 2 or (fair and num_members < 2):
        raise ValueError(f"`samples` must be (members, batch), two members if `fair`; got {tuple(draws.shape)}.")
    _, truth = alike(samples=draws[0], target=target)
    draws = draws.double()
    distance = (draws - truth).abs().mean(0)
    # Of the differences between sorted values, rank r enters r - 1 with plus and M - r with minus.
    ranks = torch.arange(1, num_members + 1, dtype=torch.float64, device=draws.device)
    weights = (2 * ranks - num_members - 1).view(-1, *[1] * truth.ndim)
    pairs = num_members * (num_members - 1) if fair else num_members**2
    return float((distance - (weights * draws.sort(0).values).sum(0) / pairs).mean())


@checked
def interval_coverage(lower: Array, upper: Array, target: Array) -> float:
    """Fraction of targets inside their predicted intervals, ends included.

    Args:
        lower: Lower ends.
        upper: Upper ends, not below the lower ones.
        target: True values.

    Returns:
        A number in [0, 1]. Reading: should equal the level that the intervals claim; below it they are too narrow.

    Example:
        >>> interval_coverage(torch.zeros(4), torch.ones(4), torch.tensor([0.0, 0.5, 1.0, 1.5]))
        0.75
    """
    low, high, truth = _interval(lower=lower, upper=upper, target=target)
    return int(((low <= truth) & (truth <= high)).sum()) / truth.numel()


@checked
def interval_width(lower: Array, upper: Array) -> float:
    """Mean width of predicted intervals; arguments as in `interval_coverage`.

    Returns:
        A number that is not negative. Reading: in units of the target; of two sets of intervals with the right
        coverage, the narrower is better.

    Example:
        >>> interval_width(torch.zeros(2), torch.tensor([1.0, 2.0]))
        1.5
    """
    low, high = _interval(lower=lower, upper=upper)
    return float((high.double() - low.double()).mean())


@checked
def central_interval(
    mean: Array, scale: Array, level: float = 0.9, family: Literal["gaussian", "laplace"] = "gaussian"
) -> tuple[Tensor, Tensor]:
    """Interval around the mean that holds `level` of the predicted distribution.

    Args:
        mean: Predicted means.
        scale: Predicted standard deviations, or the b of Laplace distributions; positive.
        level: Probability inside, in (0, 1).
        family: `"gaussian"` or `"laplace"`.

    Returns:
        Lower and upper ends, of the shape of `mean`. Reading: what `interval_coverage` and `interval_width` take.

    Example:
        >>> lower, upper = central_interval(torch.zeros(1), torch.ones(1), level=0.95)
        >>> round(upper.item(), 4)
        1.96
    """
    if not 0 < level < 1:
        raise ValueError(f"`level` must lie strictly between 0 and 1; got {level}.")
    centre, spread = alike(mean=mean, scale=scale)
    _positive(spread)
    half = FAMILIES[family].half_width(level)
    return centre - half * spread, centre + half * spread


def _errors(prediction: Array, target: Array) -> Tensor:
    predicted, truth = alike(prediction=prediction, target=target)
    return predicted.double() - truth.double()


def _per_example(losses: Tensor) -> float:
    """Return the mean over examples, the first axis, of what their entries sum to."""
    return float(losses.sum()) / (len(losses) if losses.ndim else 1)


def _standardised(mean: Array, scale: Array, target: Array) -> tuple[Tensor, Tensor]:
    """The scales, and the errors divided by them, in float64."""
    centre, spread, truth = alike(mean=mean, scale=scale, target=target)
    _positive(spread)
    spread = spread.double()
    return spread, (truth.double() - centre.double()) / spread


def _positive(scale: Tensor) -> None:
    if not (scale > 0).all():
        raise ValueError(f"`scale` must be positive; the smallest value is {float(scale.min()):.4g}.")


def _interval(**values: Array) -> list[Tensor]:
    low, high, *_ = tensors = alike(**values)
    if (high < low).any():
        raise ValueError("`upper` must not lie below `lower`; swap the two arguments, or sort each pair.")
    return tensors
