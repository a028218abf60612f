"""What users hand in, checked: each function returns nothing, or says what was wanted, what came, what to do.

Values are looked at through a few whole-tensor reductions that reach the host together, so a check waits for
the device once. Where a bad value sits is searched for only after one was found.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dissensus._signatures import check_dense, warn


def check_member_logits(logits: Tensor, weights: Tensor | None = None) -> None:
    """Refuse what is not finite `(members, batch, classes)` logits, and bad weights; warn if they look like probabilities."""
    check_logits_shape(logits)
    row_sums = logits.detach().sum(-1, dtype=compute_dtype(logits))
    lowest, highest, distance_from_one = _checked_facts(weights, (row_sums - 1).abs().amax(), logits=logits)
    if lowest >= 0 and highest <= 1 and distance_from_one <= _sum_tolerance(logits):
        warn(
            "`logits` lie in [0, 1] and sum to 1, so they look like probabilities, but are read as logits. "
            "If they are probabilities, pass their logarithm."
        )


def check_logits_shape(logits: Tensor) -> None:
    """Refuse what is not `(members, batch, classes)`, without a look at the values."""
    check_tensor("logits", logits)
    if logits.ndim != 3:
        raise ValueError(
            f"`logits` must be shaped (members, batch, classes); got {tuple(logits.shape)}. One model: `logits[None]`."
        )
    if logits.shape[-1] < 2:
        raise ValueError(
            f"`logits` must have at least two classes; got shape {tuple(logits.shape)}. "
            "For a binary model with one output z, pass `torch.cat([torch.zeros_like(z), z], -1)`; for regression see "
            "`scores.REGRESSION_SCORES`, and loss='mse' where a function takes it."
        )


def check_weights(weights: Tensor, num_members: int) -> None:
    """Refuse what is not one non-negative weight per member with sum 1.

    Example:
        >>> check_weights(torch.tensor([0.5, 0.6]), 2)
        Traceback (most recent call last):
        ValueError: `weights` must sum to 1; got sum 1.1. Pass `weights / weights.sum()`.
    """
    _check_weight_facts(weights, _to_host(_weight_facts(weights, num_members)))


def as_weights(weights: Any, num_members: int) -> Tensor | None:
    """Return member weights, given as a tensor, an array or a list, as a checked tensor of real numbers; None stays None."""
    if weights is None:
        return None
    if not isinstance(weights, Tensor):
        try:
            weights = torch.as_tensor(np.asarray(weights, dtype=np.float64))
        except (TypeError, ValueError):
            raise ValueError(
                f"`weights` must be numbers, one for each member; got {weights!r}. Pass a tensor, an array or a list."
            ) from None
    if not weights.is_floating_point() and not weights.is_complex():
        weights = weights.double()
    check_weights(weights, num_members)
    return weights


def check_labels(labels: Tensor, num: int, classes: int | None = None) -> None:
    """Refuse what is not `num` integer class labels from 0 to `classes - 1`; without `classes`, values are not looked at."""
    if not isinstance(labels, Tensor):
        raise ValueError(f"`labels` must be a torch tensor; got {type(labels).__name__}. Convert it first.")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"`labels` must be integers; got {labels.dtype}. Use `labels.long()`.")
    if labels.shape != (num,):
        raise ValueError(f"`labels` must be shaped ({num},); got {tuple(labels.shape)}. Pass one per input.")
    if num == 0:
        raise ValueError("`labels` must not be empty; got 0 labels. Pass at least one input.")
    if classes is None:
        return
    lowest, highest = _to_host([*labels.aminmax()])
    if lowest < 0 or highest >= classes:
        row = int(((labels < 0) | (labels >= classes)).nonzero()[0])
        raise ValueError(f"`labels` must lie in 0..{classes - 1}; got {int(labels[row])} in row {row}. Count from 0.")


def check_mean_and_scale(mean: Tensor, scale: Tensor, weights: Tensor | None = None) -> None:
    """Refuse what is not a finite mean and a non-negative scale per member, input and output, and bad weights."""
    check_tensor("mean", mean)
    check_tensor("scale", scale)
    if mean.ndim < 2:
        raise ValueError(
            f"`mean` must be shaped (members, batch, ...); got {tuple(mean.shape)}. One model: `mean[None]`."
        )
    if scale.shape != mean.shape:
        raise ValueError(f"`scale` must be shaped as `mean`, {tuple(mean.shape)}; got {tuple(scale.shape)}. Expand it.")
    if (lowest := _checked_facts(weights, mean=mean, scale=scale)[2]) < 0:
        raise ValueError(f"`scale` must not be negative; got {lowest:g} at the least. Pass softplus of the raw output.")


def check_tensor(name: str, values: Tensor) -> None:
    """Refuse what is not a dense floating-point tensor that holds something, without a look at the values."""
    if not isinstance(values, Tensor):
        raise ValueError(f"`{name}` must be a torch tensor; got {type(values).__name__}. Convert it first.")
    if not values.is_floating_point():
        raise ValueError(f"`{name}` must be floating point; got {values.dtype}. Use `{name}.float()`.")
    check_dense(name, values)
    if values.numel() == 0:
        raise ValueError(f"`{name}` must not be empty; got shape {tuple(values.shape)}. Pass one input or more.")


def check_features(features: Tensor) -> None:
    """Refuse what is not a finite `(batch, features)` table."""
    check_tensor("features", features)
    if features.ndim != 2:
        raise ValueError(f"`features` must be shaped (batch, features); got {tuple(features.shape)}. Use `flatten(1)`.")
    _checked_facts(None, features=features)


def explained(read: Callable[[Any], Tensor], network: nn.Module) -> Callable[[Any], Tensor]:
    """Read inputs as before; where that fails on inputs of another dtype or shape than the network's, say so.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> explained(net, net)(torch.zeros(3, 2, dtype=torch.float64))
        Traceback (most recent call last):
        ValueError: The network computes in torch.float32 and cannot read inputs of torch.float64: mat1 and mat2 must have...
    """

    def reading(x: Any) -> Tensor:
        try:
            return read(x)
        except (RuntimeError, NotImplementedError) as problem:
            # Kinds of RuntimeError are about something else: memory that is out, a device that failed.
            if not isinstance(x, Tensor) or type(problem) not in (RuntimeError, NotImplementedError):
                raise
            wanted = next((own.dtype for own in network.parameters() if own.is_floating_point()), x.dtype)
            if x.dtype == wanted:
                raise ValueError(
                    f"The network cannot read inputs shaped {tuple(x.shape)}: {problem}. "
                    "Give inputs as in training; one input alone is `x[None]`."
                ) from problem
            scaled = ", scaled as in training" if x.dtype == torch.uint8 else ""
            raise ValueError(
                f"The network computes in {wanted} and cannot read inputs of {x.dtype}: {problem}. "
                f"Pass `x.to({wanted})`{scaled}."
            ) from problem

    return reading


def can_be_read(values: Tensor) -> bool:
    """Return whether values may be looked at: not while a program is recorded, mapped over members or differentiated."""
    plain = type(values) is Tensor and not values.requires_grad and not torch.compiler.is_compiling()
    mapped = torch._C._functorch.is_functorch_wrapped_tensor(values)
    return plain and not mapped and not (values.is_cuda and torch.cuda.is_current_stream_capturing())


def compute_dtype(values: Tensor) -> torch.dtype:
    """The dtype to compute in: float32 for half precision, else the tensor's own."""
    return torch.promote_types(values.dtype, torch.float32)


def largest_value(values: Tensor) -> float:
    """The largest size of values of this dtype whose squares and differences do not overflow."""
    return float(torch.finfo(compute_dtype(values)).max ** 0.5)


def brought(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return values in another place and dtype. A GPU's own order sees to it that they arrive first; a CPU has to wait for them."""
    return values.to(device, dtype, non_blocking=device.type == "cuda")


def _checked_facts(weights: Tensor | None, *more: Tensor, **tensors: Tensor) -> list[float]:
    """Refuse bad weights and what is not finite; return the smallest and largest value of each tensor, then `more`."""
    extremes = [extreme for tensor in tensors.values() for extreme in tensor.detach().aminmax()]
    own = _weight_facts(weights, len(next(iter(tensors.values()))))
    facts = _to_host([*extremes, *more, *own])
    for place, (name, tensor) in enumerate(tensors.items()):
        _check_finite(name, tensor.detach(), *facts[2 * place : 2 * place + 2])
    _check_weight_facts(weights, facts[len(facts) - len(own) :])
    return facts[: len(facts) - len(own)]


def _weight_facts(weights: Tensor | None, num_members: int) -> list[Tensor]:
    """Check the shape of weights; return what `_check_weight_facts` wants to know of their values."""
    if weights is None:
        return []
    check_tensor("weights", weights)
    if weights.shape != (num_members,):
        raise ValueError(f"`weights` must be shaped ({num_members},), one per member; got {tuple(weights.shape)}.")
    return [weights.amin(), weights.sum(dtype=compute_dtype(weights))]


def _check_weight_facts(weights: Tensor | None, facts: list[float]) -> None:
    if weights is None:
        return
    lowest, total = facts
    if lowest < 0:
        raise ValueError(f"`weights` must not be negative; got {lowest:g}. Leave such members out.")
    # Not `>`: NaN, for which every comparison is false, must be refused too.
    if not abs(total - 1) <= _sum_tolerance(weights):
        raise ValueError(f"`weights` must sum to 1; got sum {total:g}. Pass `weights / weights.sum()`.")


def _sum_tolerance(values: Tensor) -> float:
    """How far a sum of probabilities stored in this dtype may be from 1."""
    return 1e-4 if torch.finfo(values.dtype).eps < 1e-5 else 1e-2


def _to_host(facts: list[Tensor]) -> list[float]:
    """Numbers of any dtype and device, read with one wait for the device."""
    device = facts[0].device
    dtype = reduce(torch.promote_types, (fact.dtype for fact in facts))
    together = torch.stack([brought(fact, device, dtype) for fact in facts])
    return [float(fact) for fact in together.tolist()]


def _check_finite(name: str, values: Tensor, lowest: float, highest: float) -> None:
    """Refuse NaN, infinity, and what is so large that squares and differences overflow, which would give infinite scores."""
    largest = largest_value(values)
    # `aminmax` passes NaN on, and with NaN no comparison holds.
    if -largest <= lowest and highest <= largest:
        return
    position = (~(values.to(compute_dtype(values)).abs() <= largest)).nonzero()[0].tolist()
    of_member = name != "features"
    where = f"row {position[1]} of member {position[0]}" if of_member else f"row {position[0]}"
    raise ValueError(
        f"`{name}` must be finite and at most {largest:.0e} in size; {where} holds {values[tuple(position)].item():g}. "
        f"Leave such rows out{', or train that member again' if of_member else ''}."
    )
