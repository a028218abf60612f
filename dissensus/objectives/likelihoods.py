"""What members are fitted to: losses per example, for one member or many, and for the ensemble as a mixture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log, pi
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE_FLOOR = 1e-6


def mean_and_scale(outputs: Tensor) -> tuple[Tensor, Tensor]:
    r"""Read a likelihood head: the first half of the last axis is the mean, the second half $\rho$.

    $$\text{scale} = \log(1 + e^{\rho}) + 10^{-6}$$

    Args:
        outputs: `(..., 2 * outputs)`.

    Returns:
        Mean and scale (a standard deviation, or a Laplace's b; never a variance), `(..., outputs)` each.

    Example:
        >>> mean, scale = mean_and_scale(torch.zeros(4, 8, 2))
        >>> mean.shape, round(scale[0, 0, 0].item(), 4)
        (torch.Size([4, 8, 1]), 0.6931)
    """
    if outputs.shape[-1] % 2:
        raise ValueError(
            "A likelihood head gives a mean and a rho for each target, so its last axis is even; got shape "
            f"{tuple(outputs.shape)}. Give the network twice as many outputs as there are targets."
        )
    mean, rho = outputs.chunk(2, dim=-1)
    return mean, F.softplus(rho) + SCALE_FLOOR


def gaussian_nll(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    r"""Negative log-likelihood under a normal distribution, element by element.

    $$\tfrac12 \log(2\pi\sigma^2) + \frac{(y-\mu)^2}{2\sigma^2}$$

    Args:
        mean: Predicted mean.
        scale: Predicted standard deviation, not a variance.
        target: Observed value.

    Returns:
        Nats; lower is better. It can be negative: a density can exceed one.

    Example:
        >>> round(gaussian_nll(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(0.0)).item(), 4)
        0.9189
    """
    return 0.5 * log(2 * pi) + scale.log() + 0.5 * ((target - mean) / scale).square()


def laplace_nll(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    r"""Negative log-likelihood under a Laplace distribution, element by element.

    $$\log(2b) + \frac{|y-\mu|}{b}$$

    Args:
        mean: Predicted mean.
        scale: Predicted scale b; the variance is 2 b².
        target: Observed value.

    Returns:
        Nats; lower is better.

    Example:
        >>> round(laplace_nll(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(2.0)).item(), 4)
        2.6931
    """
    return log(2) + scale.log() + (target - mean).abs() / scale


def full(outputs: Tensor) -> Tensor:
    """Return half-precision outputs as float32; others as they are."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


@dataclass(frozen=True)
class Likelihood:
    """A loss by name, in all the forms that training needs.

    Attributes:
        name: As `Independent(loss=...)` takes it.
        kind: What outputs are: class logits, point predictions, or a likelihood head's (mean, rho).
        per_example: Loss of each output, `(..., batch, outputs)` and targets, class indices `(..., batch)` or
            values `(..., batch, outputs)`, to `(..., batch)`.
        mixture: Loss of the ensemble's prediction, `(members, batch, outputs)` to `(batch,)`.
        divergence: How far outputs q are from outputs p, `(..., batch)`; zero where they are equal.
        pooled: What members of class logits say together, `(batch, classes)`; the largest is the ensemble's answer.
    """

    name: str
    kind: Literal["classes", "points", "density"]
    per_example: Callable[[Tensor, Tensor], Tensor]
    mixture: Callable[[Tensor, Tensor], Tensor]
    divergence: Callable[[Tensor, Tensor], Tensor]
    pooled: Callable[[Tensor], Tensor] = field(default_factory=lambda: _mean_probabilities, kw_only=True)


def _mean_probabilities(logits: Tensor) -> Tensor:
    return full(logits).softmax(-1).mean(0)


def class_targets(targets: Tensor, num_classes: int) -> Tensor:
    """Return class probabilities `(..., batch, classes)` for class indices; soft labels are returned as they are."""
    if targets.is_floating_point():
        return targets
    # Not F.one_hot: it looks at the values, which a recorded or captured step cannot.
    return (targets.unsqueeze(-1) == torch.arange(num_classes, device=targets.device)).to(torch.float32)


def smooth_labels(targets: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Mix targets with the uniform distribution; class indices stay indices where there is nothing to mix."""
    if smoothing == 0.0:
        return targets
    return class_targets(targets, num_classes) * (1.0 - smoothing) + smoothing / num_classes


def _expected(log_probs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return (log_probs * targets).sum(-1)
    labels = targets.expand(log_probs.shape[:-1]).unsqueeze(-1)
    return log_probs.gather(-1, labels).squeeze(-1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -_expected(full(logits).log_softmax(-1), targets)


def _mixture_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    # logsumexp, not log(mean(softmax)): a confident wrong member underflows its probability to 0.
    return -_expected(full(logits).log_softmax(-1).logsumexp(0) - log(len(logits)), targets)


def _brier(logits: Tensor, targets: Tensor) -> Tensor:
    return (full(logits).softmax(-1) - class_targets(targets, logits.shape[-1])).square().sum(-1)


def _mixture_brier(logits: Tensor, targets: Tensor) -> Tensor:
    return (full(logits).softmax(-1).mean(0) - class_targets(targets, logits.shape[-1])).square().sum(-1)


def _class_divergence(p: Tensor, q: Tensor) -> Tensor:
    log_p, log_q = full(p).log_softmax(-1), full(q).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def as_columns(targets: Tensor) -> Tensor:
    """Return regression targets with an explicit last axis: `(batch,)` becomes `(batch, 1)`."""
    return targets.unsqueeze(-1) if targets.ndim == 1 else targets


def _points(error: Callable[[Tensor], Tensor]) -> tuple[Callable[[Tensor, Tensor], Tensor], ...]:
    def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
        return error(full(outputs) - as_columns(targets)).sum(-1)

    def mixture(outputs: Tensor, targets: Tensor) -> Tensor:
        return per_example(full(outputs).mean(0), targets)

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return error(full(q) - full(p)).sum(-1)

    return per_example, mixture, divergence


def _density(
    nll: Callable[[Tensor, Tensor, Tensor], Tensor],
    divergence: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> tuple[Callable[[Tensor, Tensor], Tensor], ...]:
    def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
        mean, scale = mean_and_scale(full(outputs))
        return nll(mean, scale, as_columns(targets)).sum(-1)

    def mixture(outputs: Tensor, targets: Tensor) -> Tensor:
        return log(len(outputs)) - (-per_example(outputs, targets)).logsumexp(0)

    def between(p: Tensor, q: Tensor) -> Tensor:
        return divergence(*mean_and_scale(full(p)), *mean_and_scale(full(q))).sum(-1)

    return per_example, mixture, between


def _gaussian_divergence(mean: Tensor, scale: Tensor, other_mean: Tensor, other_scale: Tensor) -> Tensor:
    return (
        (other_scale / scale).log()
        + (scale.square() + (mean - other_mean).square()) / (2 * other_scale.square())
        - 0.5
    )


def _laplace_divergence(mean: Tensor, scale: Tensor, other_mean: Tensor, other_scale: Tensor) -> Tensor:
    gap = (mean - other_mean).abs()
    return (other_scale / scale).log() + (scale * (-gap / scale).exp() + gap) / other_scale - 1.0


LIKELIHOODS: Mapping[str, Likelihood] = MappingProxyType(
    {
        likelihood.name: likelihood
        for likelihood in (
            Likelihood("cross_entropy", "classes", _cross_entropy, _mixture_cross_entropy, _class_divergence),
            Likelihood("brier", "classes", _brier, _mixture_brier, _class_divergence),
            Likelihood("mse", "points", *_points(torch.square)),
            Likelihood("mae", "points", *_points(torch.abs)),
            Likelihood("gaussian_nll", "density", *_density(gaussian_nll, _gaussian_divergence)),
            Likelihood("laplace_nll", "density", *_density(laplace_nll, _laplace_divergence)),
        )
    }
)


def likelihood_of(loss: str) -> Likelihood:
    """Return the likelihood of this name, or say which names there are."""
    if loss not in LIKELIHOODS:
        raise ValueError(f"`loss` must be one of {', '.join(sorted(LIKELIHOODS))}; got {loss!r}.")
    return LIKELIHOODS[loss]
