"""`fit`: the only training loop."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dissensus.data.augment import Augmentation
from dissensus.data.sources import (
    Pairs,
    all_inputs,
    arrays_of,
    check_labels_fit,
    check_pair,
    pair_batches,
)
from dissensus.members import Members
from dissensus.objectives import Independent, Likelihood, Objective
from dissensus.objectives.likelihoods import as_columns
from dissensus.objectives.objective import Batches
from dissensus.predictions import evaluation_mode
from dissensus.randomness import derive, seeded
from dissensus.training.engines import EngineName
from dissensus.training.feeds import ArrayFeed, DatasetFeed, Feed, LoaderFeed
from dissensus.training.optimizers import Factory
from dissensus.training.run import Run, Settings
from dissensus.training.schedules import AnySchedule
from dissensus.training.trainer import Trainer


def fit(
    members: Members,
    data: Pairs,
    *,
    objective: Objective | None = None,
    epochs: int = 10,
    batch_size: int | None = None,
    optimizer: str | type[Optimizer] | Factory = "adamw",
    lr: float | Sequence[float] = 1e-3,
    weight_decay: float | Sequence[float] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    schedule: AnySchedule = "constant",
    clip_norm: float | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    batches: Batches | None = None,
    last_batch: Literal["keep", "drop"] = "keep",
    workers: int = 0,
    augment: Augmentation | None = None,
    unlabelled: Any = None,
    validation: Pairs | None = None,
    check_every: Literal["epoch"] | int = "epoch",
    select: str | None = None,
    patience: int | None = None,
    seed: int = 0,
    device: str | torch.device = "auto",
    engine: EngineName = "auto",
    concurrent_members: int | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 1,
    resume: bool = False,
    on_divergence: Literal["stop", "drop"] = "stop",
    progress: bool | None = None,
    callback: Callable[[Run], None] | None = None,
) -> Run:
    """Train an ensemble as one program.

    The loss is summed over members, so each member's gradient is that of the member trained alone, whatever their number.

    Args:
        members: The ensemble; it is trained in place and stays on `device`.
        data: A pair (inputs, targets) of tensors or arrays, which move to the device whole; a map-style Dataset; or a
            DataLoader, whose batches (in its own order) all members share.
        objective: What to minimise; `Independent()` by default. See `dissensus.objectives`.
        epochs: How often the data is gone through.
        batch_size: Examples a step (128 by default); not together with a DataLoader, which has its own.
        optimizer: `"sgd"`, `"adam"`, `"adamw"`, a torch optimizer class, or a function that makes a torch optimizer from
            one member's named parameters (parameter groups and all).
        lr: Learning rate: one number, or one for each member.
        weight_decay: Likewise; the optimizer's own default if left out.
        optimizer_options: Further options, such as `{"momentum": 0.9, "nesterov": True}`.
        schedule: `"constant"`, `"cosine"`, `"one_cycle"`, an object of `dissensus.schedules` (StepDecay, MultiStep, Cosine,
            OneCycle, Plateau), or a function of (epoch, epochs) that gives a factor on `lr`.
        clip_norm: Largest norm of each member's gradient.
        precision: `"fp32"`, or `"bf16"` for autocast with float32 weights.
        batches: `"own"`: each member goes through the data in its own order; `"shared"`: all see the same batch. The
            objective's wish by default (members that train independently: own).
        last_batch: Keep or drop the smaller batch at an epoch's end.
        workers: Processes that load the items of a Dataset ahead of training (a DataLoader has its own).
        augment: A function `(x, y, noise) -> (x, y)` on batches; see `dissensus.data.augment`.
        unlabelled: Inputs without labels, a second stream for objectives that read it.
        validation: Held-out data, looked at every check.
        check_every: `"epoch"`, or a number of steps between checks.
        select: Column to select the best check by (`"ensemble_loss"`, `"validation_loss"`, `"ensemble_accuracy"`,
            `"validation_accuracy"`); the weights of that check are the result. Per-member columns count by their mean.
        patience: Stop after this many checks without improvement (selects by `"ensemble_loss"` unless told otherwise).
        seed: Decides everything: weights' noise, data order, augmentation. Member j depends on (seed, j) only, where the
            objective does not couple members.
        device: `"auto"` takes a GPU if there is one.
        engine: `"auto"` measures and picks; `"eager"`, `"captured"` (recorded once, replayed; a CUDA graph on a GPU) or
            `"compiled"` (captured and compiled). It changes speed only.
        concurrent_members: Have at most this many members in flight (on a CPU one): slower, but the memory of so many.
            For members that own their parameters and objectives that do not couple them.
        checkpoint_dir: Folder for checkpoints and `history.csv`.
        checkpoint_every: Epochs between checkpoints.
        resume: Go on from the folder's last checkpoint, if it has one; ends in exactly the weights of an uninterrupted run.
        on_divergence: When a member's loss is no longer finite: `"stop"` with an error, or `"drop"` that member and go on.
        progress: Show progress; by default on a terminal only.
        callback: Called with the run after every check.

    Returns:
        The run: `.history`, `.best`, `.dropped`, `.engine`, `.seconds`, ...

    Example:
        >>> from dissensus import DeepEnsemble
        >>> x, y = torch.randn(64, 3), torch.randint(0, 2, (64,))
        >>> run = fit(DeepEnsemble(lambda: torch.nn.Linear(3, 2), 4), (x, y), epochs=2, device="cpu")
        >>> len(run.history), run.history.columns[:4]
        (8, ['epoch', 'step', 'member', 'loss'])
    """
    objective = Independent() if objective is None else objective
    if not isinstance(objective, Objective):
        raise ValueError(
            "`objective` must be an objective of dissensus.objectives, such as Independent('mse'); got "
            f"{objective!r:.80}."
        )
    seed = int(seed)
    _one_of("precision", precision, ("fp32", "bf16"))
    _one_of("last_batch", last_batch, ("keep", "drop"))
    _check_numbers(
        epochs, batch_size, patience, checkpoint_every, concurrent_members, check_every, clip_norm, lr
    )
    target = _device(device)
    members.to(target)
    feed, sample = _feed(members, data, objective, batch_size, batches, last_batch, workers, seed, target)
    outputs = _check_outputs(members, *sample, objective.likelihood)
    if isinstance(feed, ArrayFeed):
        objective = objective.prepare(feed.tensors["data.x"])
    elif objective.prepare(sample[0]) is not objective:
        raise ValueError(
            f"{type(objective).__name__} needs to know the ranges of all inputs. Hand over tensors or arrays, or set epsilon "
            "as a number."
        )
    streams = {}
    if unlabelled is not None:
        if "unlabelled" not in objective.streams:
            raise ValueError(
                f"{type(objective).__name__} does not read unlabelled data. Wrap it in VirtualAdversarial, or leave `unlabelled` out."
            )
        streams["unlabelled"] = all_inputs(unlabelled, "unlabelled").to(target)
    settings = Settings(
        epochs=epochs,
        optimizer=optimizer,
        lr=lr,
        weight_decay=weight_decay,
        optimizer_options=dict(optimizer_options or {}),
        schedule=schedule,
        clip_norm=clip_norm,
        bf16=precision == "bf16",
        augment=augment,
        check_every=check_every,
        select="ensemble_loss" if select is None and patience is not None else select,
        patience=patience,
        seed=seed,
        engine=engine,
        concurrent_members=concurrent_members,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        resume=resume,
        on_divergence=on_divergence,
        progress=progress,
        callback=callback,
    )
    held_out = None if validation is None else list_batches(validation, objective.likelihood, outputs)
    return Trainer(members, objective, feed, streams, held_out, settings).run()


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be {' or '.join(map(repr, allowed))}; got {value!r}.")


def _check_numbers(
    epochs: int,
    batch_size: int | None,
    patience: int | None,
    checkpoint_every: int,
    concurrent_members: int | None,
    check_every: str | int,
    clip_norm: float | None,
    lr: Any,
) -> None:
    wanted = {
        "epochs": epochs,
        "batch_size": batch_size,
        "patience": patience,
        "checkpoint_every": checkpoint_every,
        "concurrent_members": concurrent_members,
    }
    if check_every != "epoch":
        wanted["check_every"] = check_every if isinstance(check_every, int) else -1
    for name, value in wanted.items():
        if value is not None and (value < 1 or value != int(value)):
            raise ValueError(
                f"`{name}` must be at least 1"
                + (" or 'epoch'" if name == "check_every" else "")
                + f"; got {value}."
            )
    if any(float(rate) < 0 for rate in (lr if hasattr(lr, "__len__") else [lr])):
        raise ValueError(f"`lr` must not be negative; got {lr}.")
    if clip_norm is not None and clip_norm <= 0:
        raise ValueError(f"`clip_norm` must be positive; got {clip_norm}.")


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ValueError(f"`device` must be 'auto', 'cpu', 'cuda' or 'cuda:N'; got {device!r}.") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device='cuda' was asked for and this machine has no CUDA device. Use device='auto'."
        )
    return target


def _feed(
    members: Members,
    data: Pairs,
    objective: Objective,
    batch_size: int | None,
    batches: Batches | None,
    last_batch: str,
    workers: int,
    seed: int,
    device: torch.device,
) -> tuple[Feed, tuple[Tensor, Tensor]]:
    """Return where batches come from, and a few examples."""
    if batches is not None:
        _one_of("batches", batches, ("own", "shared"))
    if batches == "own" and objective.batches == "shared":
        raise ValueError(
            f"{type(objective).__name__} compares members, so they must share batches. Leave `batches` out."
        )
    arrays = arrays_of(data)
    if arrays is None:
        if batches == "own":
            raise ValueError(
                "A Dataset or DataLoader gives shared batches. For batches='own' hand over tensors or arrays."
            )
        if isinstance(data, DataLoader):
            if batch_size is not None:
                raise ValueError("A DataLoader has its own batch size; leave `batch_size` out.")
            feed = LoaderFeed(data, seed, device)
            with seeded(0):
                sample = next(iter(pair_batches(data, 1)))
            return feed, (sample[0][:2], sample[1])
        assert isinstance(data, Dataset)
        feed = DatasetFeed(data, batch_size or 128, seed, device, last_batch == "drop", workers)
        with seeded(0):
            sample = next(iter(pair_batches(data, 2)))
        return feed, sample
    x, y = arrays
    check_pair(x, y, "training")
    if objective.likelihood.kind != "classes":
        y = _real_targets(x, y)
    elif not y.is_floating_point():
        y = y.long()
    own = (batches or objective.batches) == "own" and members.owns_parameters
    size = batch_size or 128
    if last_batch == "drop" and len(x) < size:
        raise ValueError(
            f"last_batch='drop' leaves nothing of {len(x)} examples in batches of {size}. Make `batch_size` smaller."
        )
    labels = [derive(seed, "order", m) for m in members.member_ids] if own else derive(seed, "order")
    keys = torch.tensor(labels, dtype=torch.int64, device=device)
    return ArrayFeed(x.to(device), y.to(device), size, keys, own, last_batch == "drop"), (x[:2], y)


def _real_targets(x: Tensor, y: Tensor) -> Tensor:
    """Return regression targets as columns of real numbers, in the precision of the inputs where those are real."""
    if not y.is_floating_point():
        y = y.to(x.dtype if x.dtype == torch.float64 else torch.float32)
    return as_columns(y)


def _check_outputs(members: Members, x: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """Run two examples through the members and compare what comes out with what the loss wants."""
    place = next(members.parameters()).device
    try:
        with evaluation_mode(members):
            outputs = members(x.to(place))
    except (RuntimeError, TypeError) as problem:
        raise ValueError(
            f"The members cannot run on inputs shaped (batch, {', '.join(map(str, x.shape[1:]))}) of {x.dtype}: "
            f"{str(problem).strip().splitlines()[0]}"
        ) from problem
    check_targets(outputs, y, likelihood)
    return outputs


def check_targets(outputs: Tensor, y: Tensor, likelihood: Likelihood, name: str = "training") -> None:
    """Refuse targets that do not fit the members' outputs."""
    if outputs.ndim != 3:
        raise ValueError(
            f"A member must give (batch, outputs); got (members, batch, ...) = {tuple(outputs.shape)}. "
            "Keep one output axis, also for a single output; flatten further ones."
        )
    if likelihood.kind == "classes":
        check_labels_fit(y, outputs.shape[-1], name)
        return
    width = outputs.shape[-1] // 2 if likelihood.kind == "density" else outputs.shape[-1]
    given = as_columns(y).shape[-1]
    if given != width or (likelihood.kind == "density" and outputs.shape[-1] % 2):
        wanted = 2 * given if likelihood.kind == "density" else given
        raise ValueError(
            f"{likelihood.name} of {given} targets wants members with {wanted} outputs; they have {outputs.shape[-1]}."
        )


def list_batches(validation: Pairs, likelihood: Likelihood, outputs: Tensor) -> Any:
    """Return validation batches that can be gone through again and again."""
    arrays = arrays_of(validation)
    if arrays is None:
        return _Again(validation)
    x, y = arrays
    check_pair(x, y, "validation")
    y = _real_targets(x, y) if likelihood.kind != "classes" else y if y.is_floating_point() else y.long()
    check_targets(outputs, y, likelihood, "validation")
    return list(zip(torch.split(x, 2048), torch.split(y, 2048), strict=True))


class _Again:
    """Batches of a Dataset or loader, from the start each time."""

    def __init__(self, data: Pairs) -> None:
        self.data = data

    def __iter__(self) -> Any:
        with seeded(0):
            yield from pair_batches(self.data, 1024)
