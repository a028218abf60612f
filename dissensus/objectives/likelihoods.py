"""What members are fitted to: losses per example, for one member or many, and for the ensemble as a mixture."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, log, pi
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus._checks import can_be_read, compute_dtype
from dissensus._signatures import checked
from dissensus.data.sources import class_targets
from dissensus.objectives.losses import log_mixture, own_losses, weighted_mean

SCALE_FLOOR = 1e-6
# As torch's cross_entropy has it.
IGNORED = -100


@checked
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
    if not outputs.is_floating_point() or outputs.shape[-1:].numel() % 2 or not outputs.ndim:
        came = f"got {outputs.dtype} shaped {tuple(outputs.shape)}"
        raise ValueError(f"A likelihood head gives a mean and a rho for each target, an even number; {came}.")
    mean, rho = outputs.chunk(2, dim=-1)
    return mean, F.softplus(rho) + SCALE_FLOOR


@checked
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
    _check_elementwise(mean, scale, target)
    return gaussian_losses(mean, scale, target)


@checked
def laplace_nll(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    r"""Negative log-likelihood under a Laplace distribution, element by element; arguments and reading as in `gaussian_nll`.

    $$\log(2b) + \frac{|y-\mu|}{b}$$

    The `scale` is b; the variance is 2 b².

    Example:
        >>> round(laplace_nll(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(2.0)).item(), 4)
        2.6931
    """
    _check_elementwise(mean, scale, target)
    return laplace_losses(mean, scale, target)


def gaussian_losses(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    """Return `gaussian_nll` without a look at what came in."""
    return 0.5 * log(2 * pi) + scale.log() + 0.5 * ((target - mean) / scale).square()


def laplace_losses(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    """Return `laplace_nll` without a look at what came in."""
    return log(2) + scale.log() + (target - mean).abs() / scale


def _check_elementwise(mean: Tensor, scale: Tensor, target: Tensor) -> None:
    """Refuse shapes that would make a table of pairs, (batch,) beside (batch, 1), and scales that are none."""
    if not mean.is_floating_point():
        raise ValueError(f"`mean` must be floating point; got {mean.dtype}. Use `mean.float()`.")
    # A target is the same for all members, so the mean may have an axis before.
    fits = target.ndim <= mean.ndim and mean.shape[mean.ndim - target.ndim :] == target.shape
    if not fits or scale.shape not in (mean.shape, ()):
        came = f"{tuple(mean.shape)}, {tuple(scale.shape)} and {tuple(target.shape)}"
        raise ValueError(f"`mean` and `scale` must be shaped as `target`, or with members before; got {came}.")
    if can_be_read(scale) and not bool((scale > 0).all()):
        raise ValueError(f"`scale` must be positive; got {scale.min().item():g}. Pass softplus of the raw output.")


def full(outputs: Tensor) -> Tensor:
    """Return half-precision outputs as float32; others as they are."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def in_full_precision(values: Tensor) -> AbstractContextManager[Any]:
    """Return a block without autocast where values are."""
    place = values.device.type
    return torch.autocast(place, enabled=False) if torch.amp.is_autocast_available(place) else nullcontext()


Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Map: TypeAlias = Callable[[Tensor], Tensor]
Kind: TypeAlias = Literal["classes", "points", "density", "labels", "own"]


@dataclass(frozen=True)
class Likelihood:
    """A loss by name, in all the forms that training needs.

    Attributes:
        name: As `Independent(loss=...)` takes it.
        kind: What outputs are: class logits, point predictions, a likelihood head's (mean, rho), logits of yes or no for each of
            several labels, or whatever a user's own loss takes.
        per_example: From outputs `(..., batch, outputs)` and targets `(..., batch)` or `(..., batch, outputs)` to losses `(..., batch)`.
        mixture: Loss of the ensemble's prediction, `(members, batch, outputs)` to `(batch,)`.
        divergence: How far outputs q are from outputs p, `(..., batch)`; zero where they are equal.
        average: What the ensemble averages: probabilities or scores (logits).
        weights: Weight of each member in that average; None where all count the same.
        class_axis: Where classes are in outputs with positions, `(members, batch, classes, height, width)`; None to find out.
        ignore_index: Class index of positions that do not count.
        quantiles: The levels of outputs that are quantiles; None of others.
    """

    name: str
    kind: Kind
    per_example: Loss
    mixture: Loss
    divergence: Loss
    average: Literal["probs", "scores"] = field(default="probs", kw_only=True)
    weights: tuple[float, ...] | None = field(default=None, kw_only=True)
    class_axis: int | None = field(default=None, kw_only=True)
    ignore_index: int = field(default=IGNORED, kw_only=True)
    quantiles: "Pinball | None" = field(default=None, kw_only=True)

    @property
    def family(self) -> Literal["gaussian", "laplace"]:
        """What the distribution of a likelihood head is called."""
        return "laplace" if self.name == "laplace_nll" else "gaussian"

    def mean_and_scale(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is predicted, and its scale: zero where outputs are points."""
        return mean_and_scale(outputs) if self.kind == "density" else (outputs, torch.zeros_like(outputs))

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return what members of class or label logits say together, `(batch, classes)`, or `(batch, labels)` of yes."""
        says: Map = torch.sigmoid if self.kind == "labels" else partial(torch.softmax, dim=-1)
        outputs, weights = full(outputs), self.member_weights(outputs)
        return (
            weighted_mean(says(outputs), weights) if self.average == "probs" else says(weighted_mean(outputs, weights))
        )

    def member_weights(self, outputs: Tensor) -> Tensor | None:
        """Return the weight of each member, `(members,)`; of those that are one network's each has its share of that network's."""
        if self.weights is None:
            return None
        each, rest = divmod(len(outputs), len(self.weights))
        if rest or not each:
            raise ValueError(
                f"`weights` must be one number for each of {len(outputs)} members; got {len(self.weights)}."
            )
        shares = [weight / each for weight in self.weights for _ in range(each)]
        return torch.tensor(shares, dtype=compute_dtype(outputs), device=outputs.device)

    def targets(self, x: Any, y: Tensor) -> Tensor:
        """Return targets in the type that the loss wants: real ones as columns, in the precision of the inputs where those are real."""
        if self.kind == "own":
            return y
        if self.kind == "labels":
            return y.float()
        if self.kind == "classes":
            return y if y.is_floating_point() else y.long()
        if not y.is_floating_point():
            y = y.to(x.dtype if x.dtype == torch.float64 else torch.float32)
        return as_columns(y)

    def rows(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None, *, own: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return outputs, targets and weights with every position of dense outputs as an example of its own.

        Targets are `(batch, ...)` and weights of examples `(batch,)`, both with a member axis if members have batches of their `own`.
        """
        if not self.has_positions(outputs):
            return outputs, targets, weights
        if self.kind == "classes":
            axis = class_axis_of(outputs, targets[0] if own else targets, self.class_axis)
            return outputs.movedim(axis, -1).flatten(1, -2), *self.positions(targets, weights, own=own)
        return outputs.flatten(1)[..., None], *self.positions(targets, weights, own=own)

    def has_positions(self, outputs: Tensor) -> bool:
        """Whether outputs are dense, of a loss that is one of each position."""
        return self.kind in ("classes", "points", "labels") and outputs.ndim > 3

    def check_ignored(self, outputs: Tensor) -> None:
        """Refuse an `ignore_index` where there are no positions that it could leave out."""
        if self.kind == "classes" and self.ignore_index != IGNORED and not self.has_positions(outputs):
            raise ValueError(
                f"`ignore_index` leaves out positions, and these outputs have none, {tuple(outputs.shape)}. Leave such examples out, or "
                "give them weight zero."
            )

    def positions(self, targets: Tensor, weights: Tensor | None, *, own: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the targets and weights that `rows` gives of dense outputs; what is ignored has weight zero."""
        batch = int(own)
        if weights is not None:
            weights = weights.reshape(*weights.shape, *(1,) * (targets.ndim - weights.ndim)).expand(targets.shape)
        if self.kind != "classes":
            return targets.flatten(batch)[..., None], None if weights is None else weights.flatten(batch)
        valid = (targets != self.ignore_index).to(torch.float32)
        counts = valid if weights is None else valid * weights
        return torch.where(valid == 0, 0, targets).flatten(batch), counts.flatten(batch)

    def losses(self, outputs: Tensor, targets: Tensor, *, own: bool = False) -> Tensor:
        """Return the loss of every member and example, `(members, batch)`; arguments as those of `rows`."""
        if self.kind != "own":
            return self.per_example(outputs, targets)
        # One call for all members: a loss is a function of each example.
        given = targets if own else targets.expand(len(outputs), *targets.shape)
        return self.per_example(outputs.flatten(0, 1), given.flatten(0, 1)).unflatten(0, outputs.shape[:2])


def regression_loss(outputs: int, targets: Tensor | None) -> str | None:
    """Return the loss that float targets tell, with one output a target or a mean and a rho; None where they tell none."""
    if targets is None or not targets.is_floating_point():
        return None
    wanted = 1 if targets.ndim == 1 else targets.shape[-1]
    return "mse" if outputs in (1, wanted) else "gaussian_nll" if outputs == 2 * wanted else None


def class_axis_of(outputs: Tensor, targets: Tensor, class_axis: int | None) -> int:
    """Return the axis of `(members, batch, ...)` outputs without which they are shaped as the targets `(batch, ...)`."""
    shape = tuple(outputs.shape)
    fitting = [axis for axis in range(2, len(shape)) if (*shape[1:axis], *shape[axis + 1 :]) == tuple(targets.shape)]
    meant = [axis for axis in fitting if class_axis is None or axis == class_axis % len(shape)]
    if len(meant) == 1:
        return meant[0]
    why = f"axes {fitting} fit: name it, class_axis={fitting[0]}." if fitting else "none fits."
    raise ValueError(
        f"Outputs shaped (members, batch, ...) = {shape} must have one axis of classes beside those of the targets, "
        f"{tuple(targets.shape)}; {why if class_axis is None else f'axis {class_axis} is not it.'}"
    )


def smooth_labels(targets: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Mix targets with the uniform distribution; class indices stay indices where there is nothing to mix."""
    if smoothing == 0.0:
        return targets
    return class_targets(targets, num_classes) * (1.0 - smoothing) + smoothing / num_classes


def smooth_answers(targets: Tensor, smoothing: float) -> Tensor:
    """Mix answers to yes or no, 1 or 0, with one half."""
    return targets * (1.0 - smoothing) + 0.5 * smoothing


def _log_probs(logits: Tensor) -> Tensor:
    return full(logits).log_softmax(-1)


def _cross_entropy(log_probs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return -(log_probs * targets).sum(-1)
    labels = targets.expand(log_probs.shape[:-1]).unsqueeze(-1)
    return -log_probs.gather(-1, labels).squeeze(-1)


def _brier(probs: Tensor, targets: Tensor) -> Tensor:
    return (probs - class_targets(targets, probs.shape[-1])).square().sum(-1)


def _class_kl(p: Tensor, q: Tensor) -> Tensor:
    log_p, log_q = _log_probs(p), _log_probs(q)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def as_columns(targets: Tensor) -> Tensor:
    """Return regression targets with an explicit last axis: `(batch,)` becomes `(batch, 1)`."""
    return targets.unsqueeze(-1) if targets.ndim == 1 else targets


def _pooling(name: str, kind: Kind, says: Map, pool: Map, judge: Loss, between: Loss) -> Likelihood:
    """The likelihood of members that say something of outputs: the ensemble says the pool of it, and is judged as a member is."""
    return Likelihood(
        name,
        kind,
        lambda outputs, targets: judge(says(outputs), targets),
        lambda outputs, targets: judge(pool(says(outputs)), targets),
        between,
    )


def _points(name: str, error: Map) -> Likelihood:
    def judge(outputs: Tensor, targets: Tensor) -> Tensor:
        return error(outputs - as_columns(targets)).sum(-1)

    return _pooling(name, "points", full, weighted_mean, judge, lambda p, q: judge(full(q), full(p)))


def _of_mean_density(per_example: Loss) -> Loss:
    """The negative log-likelihood of an ensemble whose densities are averaged."""
    return lambda outputs, targets: log(len(outputs)) - (-per_example(outputs, targets)).logsumexp(0)


def _density(name: str, nll: Callable[..., Tensor], divergence: Callable[..., Tensor]) -> Likelihood:
    def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
        return nll(*mean_and_scale(full(outputs)), as_columns(targets)).sum(-1)

    def between(p: Tensor, q: Tensor) -> Tensor:
        return divergence(*mean_and_scale(full(p)), *mean_and_scale(full(q))).sum(-1)

    return Likelihood(name, "density", per_example, _of_mean_density(per_example), between)


def _gaussian_kl(mean: Tensor, scale: Tensor, other_mean: Tensor, other_scale: Tensor) -> Tensor:
    apart = scale.square() + (mean - other_mean).square()
    return (other_scale / scale).log() + apart / (2 * other_scale.square()) - 0.5


def _laplace_kl(mean: Tensor, scale: Tensor, other_mean: Tensor, other_scale: Tensor) -> Tensor:
    gap = (mean - other_mean).abs()
    return (other_scale / scale).log() + (scale * (-gap / scale).exp() + gap) / other_scale - 1.0


def binary_losses(logits: Tensor, targets: Tensor, class_weights: tuple[float, ...] | None = None) -> Tensor:
    """Return the sum over labels of the cross-entropy of yes or no, each label's times its weight."""
    logits = full(logits)
    targets = targets.to(logits.dtype).expand_as(logits)
    weights = None if class_weights is None else class_table(class_weights, logits, logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, weights, reduction="none").sum(-1)


def _binary_mixture(logits: Tensor, targets: Tensor) -> Tensor:
    logits = full(logits)
    yes, no = (log_mixture(F.logsigmoid(sign * logits)) for sign in (1, -1))
    targets = targets.to(logits.dtype)
    return -(targets * yes + (1 - targets) * no).sum(-1)


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    p, q = full(p), full(q)
    yes, no = F.logsigmoid(p) - F.logsigmoid(q), F.logsigmoid(-p) - F.logsigmoid(-q)
    return (p.sigmoid() * yes + (-p).sigmoid() * no).sum(-1)


def _poisson(log_rates: Tensor, counts: Tensor) -> Tensor:
    log_rates, counts = full(log_rates), as_columns(counts)
    return (log_rates.exp() - counts * log_rates + torch.lgamma(counts + 1)).sum(-1)


def _poisson_kl(p: Tensor, q: Tensor) -> Tensor:
    p, q = full(p), full(q)
    return (p.exp() * (p - q) + q.exp() - p.exp()).sum(-1)


@checked
@dataclass(frozen=True)
class Pinball:
    r"""Quantile loss: output k of a network, $q_k$, becomes the quantile at level $\tau_k$.

    $$\sum_k \max(\tau_k (y - q_k), (\tau_k - 1)(y - q_k))$$

    Args:
        levels: Of the quantiles, between 0 and 1; by default as many as there are outputs, evenly spaced: (2k + 1) / 2K.

    Example:
        >>> loss = Pinball((0.1, 0.9))
        >>> loss(torch.tensor([[0.0, 2.0]]), torch.tensor([1.0]))
        tensor([0.2000])
    """

    levels: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.levels is not None and not (len(self.levels) and all(0 < level < 1 for level in self.levels)):
            raise ValueError(f"`levels` of quantiles must be one or more between 0 and 1; got {self.levels}.")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of outputs `(batch, levels)` for targets `(batch,)`."""
        levels = self.levels_of(outputs.shape[-1])
        if targets.numel() != len(outputs):
            raise ValueError(f"Quantiles are of one target for each example, (batch,); got {tuple(targets.shape)}.")
        error = targets.reshape(len(outputs), 1) - full(outputs)
        tau = torch.tensor(levels, dtype=error.dtype, device=error.device)
        return torch.maximum(tau * error, (tau - 1) * error).sum(-1)

    def levels_of(self, count: int) -> tuple[float, ...]:
        """Return the level of each of so many outputs."""
        levels = self.levels or tuple((2 * k + 1) / (2 * count) for k in range(count))
        if len(levels) != count:
            raise ValueError(f"Quantiles at {len(levels)} levels want as many outputs; the network has {count}.")
        return levels


def _own_loss(loss: Loss) -> Likelihood:
    """Return the likelihood of a user's own loss, which the ensemble's average output is judged by too."""

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        raise ValueError(f"The loss {name} does not say how far two outputs are apart. Use a named one, not 'pinball'.")

    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    quantiles = loss if isinstance(loss, Pinball) else None
    judge = partial(own_losses, loss)
    return replace(_pooling(name, "own", full, weighted_mean, judge, divergence), quantiles=quantiles)


_LIKELIHOODS = [
    _pooling("cross_entropy", "classes", _log_probs, log_mixture, _cross_entropy, _class_kl),
    _pooling("brier", "classes", lambda z: full(z).softmax(-1), weighted_mean, _brier, _class_kl),
    _points("mse", torch.square),
    _points("mae", torch.abs),
    _density("gaussian_nll", gaussian_losses, _gaussian_kl),
    _density("laplace_nll", laplace_losses, _laplace_kl),
    Likelihood("poisson", "points", _poisson, _of_mean_density(_poisson), _poisson_kl),
    Likelihood("binary_cross_entropy", "labels", binary_losses, _binary_mixture, _binary_kl),
    replace(_own_loss(Pinball()), name="pinball"),
]
LIKELIHOODS: Mapping[str, Likelihood] = MappingProxyType({likelihood.name: likelihood for likelihood in _LIKELIHOODS})


@checked
def likelihood_of(loss: str | Loss) -> Likelihood:
    """Return the likelihood of this name or of a user's own loss, or say which names there are."""
    if callable(loss):
        return _own_loss(loss)
    if loss not in LIKELIHOODS:
        wanted = f"{', '.join(sorted(LIKELIHOODS))}, or a function of (output, target) that returns one value for each example"
        raise ValueError(f"`loss` must be one of {wanted}; got {loss!r}.")
    return LIKELIHOODS[loss]


def check_class_weights(weights: tuple[float, ...] | None, likelihood: Likelihood) -> None:
    """Refuse weights of classes that are negative or all zero, or where there are no classes."""
    if weights is None:
        return
    if likelihood.kind not in ("classes", "labels"):
        raise ValueError(f"`class_weights` are for class labels; the loss is {likelihood.name!r}. Weigh examples.")
    if min(weights) < 0 or max(weights) == 0 or not all(map(isfinite, weights)):
        raise ValueError(f"`class_weights` must be finite, not negative and not all zero; got {weights}.")


def class_weighted(
    weights: tuple[float, ...] | None, outputs: Tensor, targets: Tensor, given: Tensor | None
) -> Tensor | None:
    """Return weights of examples by their class times those that were given: torch's own rule for `cross_entropy(weight=...)`."""
    if weights is None:
        return given
    table = class_table(weights, outputs)
    own = targets.float() @ table if targets.is_floating_point() else table[targets]
    return own if given is None else own * given


def class_table(weights: tuple[float, ...], outputs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return weights of the classes, or labels, of outputs `(..., classes)`."""
    if len(weights) != (classes := outputs.shape[-1]):
        raise ValueError(f"`class_weights` must be one number for each of {classes} classes; got {len(weights)}.")
    return torch.tensor(weights, dtype=dtype, device=outputs.device)
