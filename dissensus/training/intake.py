"""What users hand over as data, made into the batches of training and validation, and checked against the members."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dissensus.data.features import CachedFeatures
from dissensus.data.rows import Rows
from dissensus.data.sources import (
    Pairs,
    Triple,
    arrays_of,
    check_labels_fit,
    check_pair,
    check_weights,
    weighted_batches,
)
from dissensus.data.trees import Batch, describe
from dissensus.members import Members
from dissensus.members.modes import evaluation_mode
from dissensus.objectives import Likelihood, Objective
from dissensus.objectives.likelihoods import as_columns, class_axis_of
from dissensus.objectives.objective import Batches
from dissensus.randomness import derive, seeded
from dissensus.training.feeds import ArrayFeed, DatasetFeed, Feed, HostFeed, LoaderFeed, lives_on
from dissensus.training.mapped import FeatureFeed, MappedFeed, fits


def feed_of(
    members: Members,
    data: Pairs,
    objective: Objective,
    batch_size: int | None,
    batches: Batches | None,
    last_batch: str,
    workers: int,
    seed: int,
    device: torch.device,
    accumulate: int = 1,
) -> tuple[Feed, tuple[Batch, Tensor]]:
    """Return where batches come from, each of `accumulate` of the size asked for, and a few examples."""
    if batches == "own" and objective.batches == "shared":
        raise ValueError(
            f"{type(objective).__name__} compares members, so they must share batches. Leave `batches` out."
        )
    size = (batch_size or 128) * accumulate
    if isinstance(data, CachedFeatures):
        return _feature_feed(members, data, objective, size, batches, last_batch, seed, device)
    arrays = arrays_of(data)
    if arrays is None:
        if batches == "own":
            raise ValueError(
                "A Dataset or DataLoader gives shared batches. For batches='own' hand over tensors or arrays."
            )
        if isinstance(data, DataLoader):
            if batch_size is not None:
                raise ValueError("A DataLoader has its own batch size; leave `batch_size` out.")
            loaded = LoaderFeed(data, seed, device, accumulate)
            with seeded(0):
                x, y, _ = next(iter(weighted_batches(data, 1)))
            return loaded, (x[:2], y)
        assert isinstance(data, Dataset)
        if isinstance(data, IterableDataset):
            raise ValueError(
                "An IterableDataset has no length and no order to shuffle. Hand over a DataLoader around one that has a length."
            )
        feed = DatasetFeed(data, size, seed, device, last_batch == "drop", workers)
        with seeded(0):
            x, y, _ = next(iter(weighted_batches(data, 2)))
        return feed, (x, y)
    rows, y, weights = arrays
    return _array_feed(members, rows, y, weights, objective, size, batches, last_batch, workers, seed, device)


def _array_feed(
    members: Members,
    x: Rows,
    y: Tensor,
    weights: Tensor | None,
    objective: Objective,
    size: int,
    batches: Batches | None,
    last_batch: str,
    workers: int,
    seed: int,
    device: torch.device,
) -> tuple[Feed, tuple[Any, Tensor]]:
    """Return batches of arrays, from the device if they fit there."""
    check_pair(x, y, "training")
    check_weights(weights, len(x), "training")
    weights = None if weights is None else weights.float()
    y = _targets(x, y, objective.likelihood)
    wish: Batches = "shared" if members.prefers_shared_batches else objective.batches
    own = (batches or wish) == "own" and members.own_batches
    _check_drop(last_batch, len(x), size)
    keys = _order_keys(members, own, seed, device)
    drop = last_batch == "drop"
    # An objective that measures all inputs first has them read into memory, where that is the device's.
    needs_all = device.type == "cpu" and objective.prepare(x[:2]) is not objective
    if lives_on(x, device) or needs_all:
        there = None if weights is None else weights.to(device)
        return ArrayFeed((x.to(device), y.to(device), there), size, keys, own, drop), (x[:2], y)
    return HostFeed((x, y, weights), size, keys, own, drop, workers or 2), (x[:2], y)


def _feature_feed(
    members: Members,
    data: CachedFeatures,
    objective: Objective,
    size: int,
    batches: Batches | None,
    last_batch: str,
    seed: int,
    device: torch.device,
) -> tuple[Feed, tuple[Batch, Tensor]]:
    """Return batches of features, from the device if they fit there."""
    if data.targets is None:
        raise ValueError("These features have no targets to train on. Cache them from data that has labels.")
    x, y = data.rows(0, 2), _targets(data.rows(0, 2), data.targets, objective.likelihood)
    _check_drop(last_batch, data.num_examples, size)
    drop = last_batch == "drop"
    if fits(data, device):
        own = (batches or objective.batches) == "own" and members.own_batches
        keys = _order_keys(members, own, seed, device)
        return FeatureFeed(data, y.to(device), size, keys, own, drop), (x, y)
    if batches == "own":
        raise ValueError(
            "Features that are streamed from their file come in shared batches. For batches='own' raise their `resident_limit`."
        )
    return MappedFeed(data, y, size, seed, device, drop), (x, y)


def _order_keys(members: Members, own: bool, seed: int, device: torch.device) -> Tensor:
    labels = [derive(seed, "order", m) for m in members.member_ids] if own else derive(seed, "order")
    return torch.tensor(labels, dtype=torch.int64, device=device)


def _check_drop(last_batch: str, count: int, size: int) -> None:
    if last_batch == "drop" and count < size:
        raise ValueError(
            f"last_batch='drop' leaves nothing of {count} examples in batches of {size}. Make `batch_size` smaller."
        )


def _targets(x: Rows, y: Tensor, likelihood: Likelihood) -> Tensor:
    if likelihood.kind == "own":
        return y
    if likelihood.kind == "labels":
        return y.float()
    if likelihood.kind != "classes":
        return _real_targets(x, y)
    return y if y.is_floating_point() else y.long()


def _real_targets(x: Rows, y: Tensor) -> Tensor:
    """Return regression targets as columns of real numbers, in the precision of the inputs where those are real."""
    if not y.is_floating_point():
        y = y.to(x.dtype if x.dtype == torch.float64 else torch.float32)
    return as_columns(y)


def check_outputs(members: Members, x: Batch, y: Tensor, likelihood: Likelihood) -> Tensor:
    """Run two examples through the members and compare what comes out with what the loss wants."""
    if next(members.parameters(), None) is None:
        raise ValueError("There is nothing to train: the members have no parameters.")
    outputs = _outputs(members, x, "")
    check_targets(outputs, y, likelihood)
    return outputs


def _outputs(members: Members, x: Batch, which: str) -> Tensor:
    try:
        with evaluation_mode(members), seeded(0):
            return members(x.to(next(members.parameters()).device))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise ValueError(
            f"The members cannot run on {which}inputs shaped {describe(x)}: {reason}"
        ) from problem


def check_smallest_batch(members: Members, smallest: int | None, x: Batch) -> None:
    """Refuse a batch of one example where BatchNorm layers would take statistics over examples alone."""
    if smallest != 1:
        return
    kind = torch.nn.modules.batchnorm._BatchNorm
    norms = [module for module in members.train().modules() if isinstance(module, kind) and module.training]
    # Over an image's pixels there are statistics of one example too, so what reaches the layers is looked at.
    values: list[int] = []

    def look(_: Any, given: tuple[Tensor, ...]) -> None:
        values.append(given[0].shape[2:].numel())

    hooks = [module.register_forward_pre_hook(look) for module in norms]
    try:
        with evaluation_mode(members), seeded(0):
            members(x.to(next(members.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    if 1 in values:
        raise ValueError(
            "The last batch of an epoch has one example, and BatchNorm layers need two or more. Pass last_batch='drop' (to a "
            "DataLoader drop_last=True), or choose another batch size."
        )


def check_targets(outputs: Tensor, y: Tensor, likelihood: Likelihood, name: str = "training") -> None:
    """Refuse targets that do not fit the members' outputs."""
    if likelihood.kind == "own":
        few = min(len(y), outputs.shape[1])
        likelihood.losses(outputs[:, :few], y[:few].to(outputs.device))
        return
    if likelihood.kind == "labels" or (likelihood.kind == "points" and outputs.ndim > 3):
        _check_alike(outputs, y, likelihood, name)
        return
    if likelihood.kind == "classes" and outputs.ndim > 3:
        _check_positions(outputs, y, likelihood, name)
        return
    if outputs.ndim != 3:
        raise ValueError(
            f"A member must give (batch, outputs); got (members, batch, ...) = {tuple(outputs.shape)}. "
            "Keep one output axis, also for a single output; flatten further ones."
        )
    if likelihood.kind == "classes":
        check_labels_fit(y, outputs.shape[-1], name)
        _check_probabilities(y, name)
        return
    width = outputs.shape[-1] // 2 if likelihood.kind == "density" else outputs.shape[-1]
    given = as_columns(y).shape[-1]
    if given != width or (likelihood.kind == "density" and outputs.shape[-1] % 2):
        wanted = 2 * given if likelihood.kind == "density" else given
        raise ValueError(
            f"{likelihood.name} of {given} targets wants members with {wanted} outputs; they have {outputs.shape[-1]}."
        )


def _check_alike(outputs: Tensor, y: Tensor, likelihood: Likelihood, name: str) -> None:
    """Refuse targets that are not shaped as one member's outputs, or no answers to yes or no."""
    if y.shape[1:] != outputs.shape[2:]:
        raise ValueError(
            f"The {name} targets of {likelihood.name} must be shaped as the outputs, (batch, "
            f"{', '.join(map(str, outputs.shape[2:]))}); got {tuple(y.shape)}."
        )
    if likelihood.kind == "labels" and not bool(((y >= 0) & (y <= 1)).all()):
        raise ValueError(
            f"The {name} targets of {likelihood.name} must be 0 or 1 (or between) for each label; they go from {float(y.min()):g} to "
            f"{float(y.max()):g}."
        )


def _check_positions(outputs: Tensor, y: Tensor, likelihood: Likelihood, name: str) -> None:
    """Refuse targets of dense outputs that are not one class index for each position."""
    if y.is_floating_point():
        raise ValueError(
            f"The {name} targets of outputs with positions must be class indices (integers); got {y.dtype} shaped {tuple(y.shape)}."
        )
    few = outputs[:, :1].expand(-1, 1, *outputs.shape[2:])
    axis = class_axis_of(few, y[:1], likelihood.class_axis)
    counted = y[y != likelihood.ignore_index]
    if len(counted):
        check_labels_fit(counted, outputs.shape[axis], name)


# What bfloat16, the coarsest format, leaves of a row of probabilities that sums to one: 8 bits of each.
_ROUNDED = 0.01


def _check_probabilities(y: Tensor, name: str) -> None:
    """Refuse real targets of a classifier whose rows are no distributions over classes."""
    if not y.is_floating_point():
        return
    if y.ndim != 2:
        raise ValueError(
            f"The {name} targets must be one row of class probabilities for each input; got shape {tuple(y.shape)}. Flatten further axes."
        )
    sums, lowest = y.sum(-1, dtype=torch.float32), y.amin(-1).float()
    wrong = ((sums - 1).abs() > _ROUNDED) | (lowest < -_ROUNDED)
    if bool(wrong.any()):
        raise ValueError(
            f"The {name} targets must be class indices (integers) or class probabilities, rows that are not negative and sum to 1; "
            f"{int(wrong.sum())} of {len(y)} rows are not, the first sums to {float(sums[wrong][0]):.4g}. Normalise them, or "
            "for regression pass objective=Independent('mse') or Independent('gaussian_nll')."
        )


def list_batches(validation: Pairs, members: Members, likelihood: Likelihood, outputs: Tensor) -> Any:
    """Return validation batches that can be gone through again and again."""
    arrays = arrays_of(validation)
    if arrays is None:
        return _Again(validation)
    x, y, weights = arrays
    check_pair(x, y, "validation")
    check_weights(weights, len(x), "validation")
    y = _targets(x, y, likelihood)
    check_targets(outputs, y, likelihood, "validation")
    _outputs(members, next(iter(x.split(2))), "validation ")
    return _Slices(x, y, weights)


@dataclass(frozen=True)
class _Slices:
    """Batches of arrays, from the start each time; what lies in a file is read anew."""

    x: Rows
    y: Tensor
    weights: Tensor | None

    def __iter__(self) -> Iterator[Triple]:
        yield from weighted_batches(
            (self.x, self.y) if self.weights is None else (self.x, self.y, self.weights), 2048
        )


class _Again:
    """Batches of a Dataset or loader, from the start each time."""

    def __init__(self, data: Pairs) -> None:
        self.data = data

    def __iter__(self) -> Any:
        with seeded(0):
            yield from weighted_batches(self.data, 1024)
