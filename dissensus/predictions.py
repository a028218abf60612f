"""From an ensemble and inputs to member outputs, and from member outputs to the moments of their mixture."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus._checks import as_weights, check_logits_shape, check_member_logits, compute_dtype, explained
from dissensus._machine import inputs_under
from dissensus._signatures import checked, whole_number
from dissensus.data.files import Loaded, as_data
from dissensus.data.sources import Inputs, device_named, device_of, input_batches, num_batches
from dissensus.data.trees import Batch, Tree, join_rows
from dissensus.engines.graphs import Captured
from dissensus.members import Members
from dissensus.members.members import as_members, evaluation_mode
from dissensus.randomness import seeded
from dissensus.scores import SCORES, Beliefs, Family, all_scores, as_rows, as_two_classes, moments
from dissensus.types import MemberWeights

# Inputs whose logits are looked at: what is wrong with outputs is rarely wrong with some only.
_LOOKED_AT = 8


@checked
def predict(
    members: Members,
    x: Inputs | str | Path | Loaded,
    *,
    batch_size: int = 1024,
    memory_limit: int | None = None,
    device: str | torch.device | None = None,
    outputs: Literal["scored", "all"] = "scored",
) -> Any:
    """Return every member's output for every input, in batches and without gradients.

    On a GPU all members run as one captured program, those that convolve side by side.

    Args:
        members: The ensemble; it is left in the mode (training or evaluation) in which it came.
        x: Inputs as a tensor, an array, or several of them as the networks take them (a tuple, a dictionary, a dataclass); a
            path, or what `dissensus.data.files.load` returned, a Dataset or a DataLoader (targets in them are passed over); or
            the features of `cache_features`, which go to the heads of a HeadEnsemble.
        batch_size: How many inputs go through the members at once.
        memory_limit: Bytes that a pass may allocate beside the ensemble itself: batches are made smaller until they fit.
        device: Where to run; by default where the ensemble is. The ensemble moves there and stays.
        outputs: `"scored"`, or `"all"` for everything that networks return, a tuple or dictionary of `(members, inputs, ...)`.

    Returns:
        `(members, inputs, ...)`, on the device of `x`, or on the CPU if `x` is not a tensor.

    Example:
        >>> from dissensus import DeepEnsemble
        >>> ens = DeepEnsemble(lambda: torch.nn.Linear(3, 2), num_members=5)
        >>> predict(ens, torch.zeros(10, 3)).shape
        torch.Size([5, 10, 2])
    """
    given, home, reader = _opened(members, x, device)
    batch_size = whole_number("batch_size", batch_size, 1)
    run = Captured(reader, members, f"{outputs} outputs", num_batches(given, batch_size))
    # Seeded: loaders, and members that draw even in evaluation, would move the global generators.
    with evaluation_mode(members), seeded(0), members.returning_all(outputs == "all"):
        found = [_kept(_of_rows(run(b), b), home) for b in _batches(members, given, run, batch_size, memory_limit)]
    joined = join_rows(found, axis=1)
    return joined.value() if isinstance(joined, Tree) else joined


@checked
def predict_scores(
    members: Members,
    x: Inputs | str | Path | Loaded,
    names: Iterable[str] | None = None,
    *,
    weights: MemberWeights | Sequence[float] | None = None,
    class_axis: int | None = None,
    loss: Literal["cross_entropy", "binary_cross_entropy"] = "cross_entropy",
    batch_size: int = 1024,
    memory_limit: int | None = None,
    device: str | torch.device | None = None,
) -> dict[str, Tensor]:
    """Return scores of every input without keeping the members' outputs.

    Members and scores run as one program, on a GPU a captured one.

    Args:
        members: The ensemble; its outputs must be logits.
        x: Inputs, as `predict` takes them.
        names: Keys of `scores.SCORES`; all of them by default.
        weights: Member weights with sum 1, as a tensor, an array or a list; equal if None.
        class_axis: Where classes are in outputs with positions, `(members, batch, classes, height, width)`; scores are then those
            of positions, `(inputs, height, width)`.
        loss: How outputs are read, as in `ds.evaluate`: as logits of classes, or with `"binary_cross_entropy"` as one logit for each of
            several labels; a score is then the mean of that of the labels.
        batch_size: How many inputs go through the members at once.
        memory_limit: Bytes that a pass may allocate beside the ensemble itself.
        device: Where to run; by default where the ensemble is. The ensemble moves there and stays.

    Returns:
        Each name with its score, `(inputs,)`, on the device of `x`, or on the CPU if `x` is not a tensor. Reading: higher is
        less certain; see each score.

    Example:
        >>> from dissensus import DeepEnsemble
        >>> ens = DeepEnsemble(lambda: torch.nn.Linear(3, 4), num_members=5)
        >>> predict_scores(ens, torch.zeros(10, 3), ["bma", "mutual_information"])["bma"].shape
        torch.Size([10])
    """
    members, batch_size = as_members(members), whole_number("batch_size", batch_size, 1)
    chosen = list(dict.fromkeys(SCORES if names is None else names))
    if not chosen:
        raise ValueError("`names` must name at least one score; leave it out for all of them.")
    labels = loss == "binary_cross_entropy"
    if labels and class_axis is not None:
        raise ValueError("`class_axis` is where classes are, and loss='binary_cross_entropy' has none. Leave one out.")
    shares = as_weights(weights, members.num_members)
    given, home, reader = _opened(members, x, device)

    def work(batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = reader(batch)
        shape, axis = outputs.shape[1:2], class_axis
        if labels:
            outputs, axis = as_two_classes(outputs), -1
        if axis is not None:
            outputs, shape = as_rows(outputs, axis)
        check_logits_shape(outputs)
        scores = torch.stack(list(all_scores(Beliefs.unchecked(outputs, shares), chosen).values()))
        # A sum is not finite where any output is not; a score may be, for votes are counted all the same.
        finite = outputs.sum((0, 2), dtype=compute_dtype(outputs)).isfinite()
        scores = scores.masked_fill(~finite, torch.nan).unflatten(1, shape)
        return scores.flatten(2).mean(-1) if labels else scores, outputs[:, :_LOOKED_AT]

    run = Captured(work, members, f"scores {chosen} {loss}", num_batches(given, batch_size))
    parts: list[Tensor] = []
    with evaluation_mode(members), seeded(0):
        for batch in _batches(members, given, run, batch_size, memory_limit):
            found, outputs = run(batch)
            if not parts:
                check_member_logits(outputs)
            parts.append(_kept(found, home))
    scores = torch.cat(parts, dim=1)
    if not bool(scores.isfinite().all()):
        row = int((~scores.isfinite()).any(0).nonzero()[0, 0])
        raise ValueError(f"Outputs must be finite; those for input {row} are not. Leave such inputs out.")
    return dict(zip(chosen, scores, strict=True))


def _opened(
    members: Members, x: Inputs | str | Path | Loaded, device: str | torch.device | None
) -> tuple[Inputs, torch.device, Callable[[Any], Tensor]]:
    """Return what to read, the device that results go to, and what of the ensemble, moved to its device, runs on it."""
    members = as_members(members)
    if device is not None:
        members.to(device_named(device))
    given: Inputs = as_data(x, "x", targets=False)
    home = given.device if isinstance(given, Tensor) else torch.device("cpu")
    return given, home, explained(members.reader(given), members)


def _of_rows(result: Any, batch: Batch) -> Any:
    """Return outputs, or say that they are not one a row: what one input without a batch axis makes of a linear layer."""
    if isinstance(result, Tensor) and (result.ndim < 2 or result.shape[1] != len(batch)):
        raise ValueError(
            f"Outputs must be (members, {len(batch)}, ...); got {tuple(result.shape)}. One input alone is `x[None]`."
        )
    return result


def _kept(result: Any, home: torch.device) -> Any:
    """Return a result that stays: a captured program's next run overwrites what it returned."""
    return result.to(home, copy=result.is_cuda)


def _batches(
    members: Members, x: Inputs, run: Callable[[Any], object], batch_size: int, memory_limit: int | None
) -> Iterator[Batch]:
    """Yield batches on the ensemble's device, none larger than fits under the limit."""
    place, fitting, batch = device_of(members), None, None
    for batch in input_batches(x, batch_size):
        batch = batch.to(place)
        if memory_limit is not None and fitting is None:
            fitting = inputs_under(memory_limit, run, batch)
        yield from batch.split(len(batch) if fitting is None else fitting)
    if batch is None:
        raise ValueError("There is nothing to predict: `x` gives no batch.")


@checked
def mixture(
    mean: Tensor, scale: Tensor, family: Family = "gaussian", weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return mean and standard deviation of the mixture of the members' distributions.

    $$\mu_* = \sum_m w_m \mu_m,\qquad \sigma_*^2 = \sum_m w_m(\sigma_m^2 + \mu_m^2) - \mu_*^2$$

    where $\sigma_m^2$ is the scale squared for a normal and twice that for a Laplace distribution.

    Args:
        mean: Members' means, `(members, batch, ...)`.
        scale: Members' scales (sigma of a normal, b of a Laplace distribution), same shape.
        family: `"gaussian"` or `"laplace"`.
        weights: Weights of the members, `(members,)`, summing to one; uniform by default.

    Returns:
        Mean and standard deviation, `(batch, ...)`; half precision becomes float32. The variance is the members' mean variance
        (data uncertainty) plus the variance of their means (knowledge uncertainty).

    Example:
        >>> mean, std = mixture(torch.tensor([[0.0], [2.0]]), torch.ones(2, 1))
        >>> mean.item(), round(std.item() ** 2, 4)
        (1.0, 2.0)
    """
    if isinstance(mean, Tensor) and isinstance(scale, Tensor) and mean.ndim == scale.ndim == 1:  # of one input
        centre, std = mixture(mean[:, None], scale[:, None], family=family, weights=weights)
        return centre[0], std[0]
    centre, data, knowledge = moments(mean, scale, family, weights)
    return centre, (data + knowledge).sqrt()
