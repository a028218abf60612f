"""Member outputs and targets in; the loss of every member and of their average out, example by example."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus._checks import can_be_read, check_labels, check_weights, compute_dtype
from dissensus.types import MemberOutputs

Loss: TypeAlias = str | Callable[[Tensor, Tensor], Tensor]
# `log_prob(scores)` gives the log-probabilities of some events on a new last axis; `mass` is how much of the
# target each holds, `None` if each counts once.
Events: TypeAlias = tuple[Callable[[Tensor], Tensor], Tensor | None]


class Others(Protocol):
    """Members that run elsewhere, beside those whose outputs are here: what is averaged over members goes through it.

    Attributes:
        count: How many members there are, here and elsewhere.
        rows: Which of them are here.
    """

    @property
    def count(self) -> int: ...  # noqa: D102
    @property
    def rows(self) -> slice: ...  # noqa: D102

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of what each place has; a gradient goes through as it is, for each place takes its own members'."""

    def maximum(self, values: Tensor) -> Tensor:
        """Return the largest of what each place has, without its graph."""


def errors(
    outputs: MemberOutputs,
    targets: Tensor,
    loss: Loss = "cross_entropy",
    average: str = "probs",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    others: Others | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of every member, `(members, batch)`, and of the ensemble, `(batch,)`; arguments are those of `decompose`.

    It looks at shapes but never at values, so it runs under `vmap`, `torch.compile` and CUDA graphs. `weights` may also be
    `(members, batch)`; `others` are the ensemble's other members, where some run elsewhere, and `weights` then sum to one with theirs.
    """
    check_arguments(outputs, loss, average, label_smoothing)
    # A difference of two losses has no correct digit in bfloat16.
    outputs = outputs.to(compute_dtype(outputs))
    if weights is not None:
        weights = matching_weights(weights, outputs)
    if loss == "zero_one":
        labels, (votes, winner) = class_labels(targets, outputs), majority_vote(outputs, weights)
        return (votes != labels).to(outputs), (winner != labels).to(outputs)
    values, judge = averaged(outputs, targets, loss, average, label_smoothing)
    pool = log_mixture if loss in EVENT_LOSSES and average == "probs" else weighted_mean
    return judge(values), judge(pool(values, weights, others)[None])[0]


def averaged(
    outputs: Tensor, targets: Tensor, loss: Loss, average: str, label_smoothing: float
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What the ensemble averages, `(members, batch, ...)` (log-probabilities of events), and its loss, to `(members, batch)`."""
    if callable(loss):
        return outputs, lambda members: torch.stack([own_losses(loss, one, targets) for one in members])
    if loss in ELEMENTWISE:
        wanted = like_outputs(targets, outputs)
        return outputs, lambda values: output_sum(ELEMENTWISE[loss](values, wanted))
    if loss == "brier":
        target_probs = dense_targets(targets, outputs, label_smoothing)
        if average == "probs":
            return outputs.softmax(-1), lambda probs: (probs - target_probs).square().sum(-1)
        return outputs, lambda logits: (logits.softmax(-1) - target_probs).square().sum(-1)
    log_prob, mass = events(loss, outputs, targets, label_smoothing)
    if average == "probs":
        return log_prob(outputs), lambda log_probs: -event_sum(log_probs, mass)
    return outputs, lambda scores: -event_sum(log_prob(scores), mass)


def own_losses(loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of each example by a function of the user's, `(batch,)`, if it returns that."""
    losses = loss(outputs, targets)
    if not isinstance(losses, Tensor) or losses.shape != outputs.shape[:1]:
        came = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"A loss of your own must return one value for each of {len(outputs)} examples; got {came}.")
    return losses


def weighted_mean(values: Tensor, weights: Tensor | None = None, others: Others | None = None) -> Tensor:
    """Average over the members, the first axis of `values`, and others elsewhere."""
    if weights is None:
        return values.mean(0)
    here = (_aligned(weights, values) * values).sum(0)
    return here if others is None else others.total(here)


def shares_of(weights: Tensor | None, like: Tensor) -> Tensor:
    """Return the members' weights, equal ones where none are given."""
    return like.new_full((len(like),), 1 / len(like)) if weights is None else weights


def output_sum(values: Tensor, leading: int = 2) -> Tensor:
    """Sum over what comes after the first `leading` axes, if anything does."""
    if values.ndim <= leading:
        return values
    values = values.flatten(leading)
    return values.squeeze(-1) if values.shape[-1] == 1 else values.sum(-1)


def columns(values: Tensor, leading: int = 1) -> Tensor:
    """Return values with one axis after the first `leading` axes."""
    return values.flatten(leading) if values.ndim > leading else values[..., None]


def event_sum(values: Tensor, mass: Tensor | None) -> Tensor:
    """Sum over events and outputs, each event counted by its mass; `None` counts every event once."""
    return output_sum(values if mass is None else mass * values)


def check_host_weights(weights: Tensor | None, num_members: int) -> None:
    """Check the values of weights where a look at them is free; `errors` checks the shape everywhere."""
    if weights is not None and weights.device.type == "cpu" and not torch.compiler.is_compiling():
        check_weights(weights, num_members)


def matching_weights(weights: Tensor, outputs: Tensor) -> Tensor:
    """Weights in the precision and on the device of `outputs`: one per member, or per member and example."""
    # Checked because a wrong shape may broadcast: one weight for five members, say.
    if weights.shape not in (outputs.shape[:1], outputs.shape[:2]):
        raise ValueError(f"`weights` must be shaped ({len(outputs)},), one per member; got {tuple(weights.shape)}.")
    return weights.to(outputs)


def log_mixture(log_probs: Tensor, weights: Tensor | None = None, others: Others | None = None) -> Tensor:
    """Logarithm of the average probability over the members, the first axis, and others elsewhere."""
    # logsumexp, not log(mean(exp)): one confident wrong member underflows to 0, and with all of them wrong the loss is inf.
    if weights is None:
        return log_probs.logsumexp(0) - math.log(len(log_probs))
    shares = log_probs + _aligned(weights.log(), log_probs)
    if others is None:
        return shares.logsumexp(0)
    largest = others.maximum(shares.detach().amax(0))
    return largest + others.total((shares - largest).exp().sum(0)).log()


def events(loss: str, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Events:
    """What a likelihood loss scores: scores to log-probabilities of events, and the target's mass on each."""
    if loss == "cross_entropy":
        if targets.is_floating_point() or label_smoothing:
            return partial(torch.log_softmax, dim=-1), dense_targets(targets, outputs, label_smoothing)
        labels = class_labels(targets, outputs)[:, None]
        return lambda logits: logits.log_softmax(-1).gather(-1, labels.expand(*logits.shape[:-1], 1)), None
    targets = like_outputs(targets, outputs)
    if loss == "sigmoid":
        yes_and_no = torch.stack([targets, 1 - targets], dim=-1)
        return lambda scores: torch.stack([F.logsigmoid(scores), F.logsigmoid(-scores)], dim=-1), yes_and_no
    return lambda rates: (targets * rates - rates.exp() - torch.lgamma(targets + 1))[..., None], None


def class_labels(targets: Tensor, outputs: Tensor) -> Tensor:
    """Integer labels `(batch,)`, checked against `outputs` `(members, batch, classes)`."""
    if targets.is_floating_point() or targets.dtype == torch.bool or targets.shape != outputs.shape[1:2]:
        came = f"{targets.dtype} shaped {tuple(targets.shape)}"
        raise ValueError(f"`targets` must be integer labels shaped (batch,) = {tuple(outputs.shape[1:2])}; got {came}.")
    # Where a look at values is free. On a GPU a label out of range stops the device.
    if targets.device.type == "cpu" and can_be_read(targets):
        check_labels(targets, len(targets), outputs.shape[-1])
    return targets.long()


def dense_targets(targets: Tensor, outputs: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Targets as distributions over the classes, `(batch, classes)`."""
    num_classes = outputs.shape[-1]
    if not targets.is_floating_point():
        labels = class_labels(targets, outputs)
        targets = labels[:, None] == torch.arange(num_classes, device=labels.device)
    elif targets.shape != outputs.shape[1:]:
        wanted = f"(batch, classes) = {tuple(outputs.shape[1:])}, or integer labels (batch,)"
        raise ValueError(f"Soft `targets` must be shaped {wanted}; got {tuple(targets.shape)}.")
    return (1 - label_smoothing) * targets.to(outputs) + label_smoothing / num_classes


def like_outputs(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets in shape and precision of one member's output; `(batch,)` also serves a single column."""
    wanted = outputs.shape[1:]
    if targets.shape != wanted and (*targets.shape, 1) == tuple(wanted):
        targets = targets[..., None]
    # Not broadcast: (batch, 1) against (batch,) would quietly compare every example with every other.
    if targets.shape != wanted:
        raise ValueError(f"Reshape `targets` to a member's outputs, {tuple(wanted)}; got {tuple(targets.shape)}.")
    return targets.to(outputs)


def check_arguments(outputs: Tensor, loss: Loss, average: str, label_smoothing: float) -> None:
    """Refuse unknown names and shapes that cannot be meant."""
    if not callable(loss) and loss not in LOSSES:
        raise ValueError(f"`loss` must be a callable or one of {', '.join(LOSSES)}; got {loss!r}. Pick one of these.")
    if average not in ("probs", "scores"):
        raise ValueError(f'`average` must be "probs" or "scores"; got {average!r}. Pick one of these.')
    classes = loss in CLASS_LOSSES
    if outputs.ndim != 3 if classes else outputs.ndim < 2:
        wanted = f"(members, batch, {'classes' if classes else '...'})"
        raise ValueError(f"`outputs` must be shaped {wanted}; got {tuple(outputs.shape)}. One model: `outputs[None]`.")
    if not 0 <= label_smoothing < 1 or (label_smoothing and loss not in ("cross_entropy", "brier")):
        came = f"{label_smoothing} with loss {loss!r}"
        raise ValueError(f"`label_smoothing` must lie in [0, 1) and needs loss cross_entropy or brier; got {came}.")


def majority_vote(outputs: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Classes the members choose `(members, batch)`, and the winner `(batch,)`, the lowest in a tie."""
    votes = outputs.argmax(-1)
    ballots = (votes[..., None] == torch.arange(outputs.shape[-1], device=outputs.device)).to(outputs)
    # Counts, not fractions, where the vote is uniform: they are exact, so a tie is a tie.
    tally = ballots.sum(0) if weights is None else weighted_mean(ballots, weights)
    return votes, tally.argmax(-1)


def _aligned(weights: Tensor, values: Tensor) -> Tensor:
    return weights.to(values).reshape(*weights.shape, *(1,) * (values.ndim - weights.ndim))


ELEMENTWISE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        # One operation each way, where a difference squared takes two and three: they are most of a small network's step.
        "mse": lambda outputs, targets: F.mse_loss(outputs, targets.expand_as(outputs), reduction="none"),
        "logistic": lambda margins, signs: -F.logsigmoid(signs * margins),
        "exponential": lambda margins, signs: torch.exp(-signs * margins),
    }
)

EVENT_LOSSES = ("cross_entropy", "sigmoid", "poisson")
CLASS_LOSSES = ("cross_entropy", "brier", "zero_one")
LOSSES = ("mse", *CLASS_LOSSES, "sigmoid", "poisson", "logistic", "exponential")
