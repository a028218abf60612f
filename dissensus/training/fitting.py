"""`fit`: what users hand over, checked and made into batches, and trained on by the only loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dissensus._machine import threads_for
from dissensus._signatures import checked, refuse
from dissensus.data import sources
from dissensus.data.augment import Augmentation
from dissensus.data.features import CachedFeatures
from dissensus.data.files import Loaded, as_data
from dissensus.data.sources import Pairs, Triple, device_named, device_of
from dissensus.data.trees import Batch, Rows, describe
from dissensus.engines.watching import look_at
from dissensus.members import Members
from dissensus.members.members import as_members, evaluation_mode
from dissensus.objectives import Independent, Likelihood, Objective
from dissensus.objectives.likelihoods import as_columns, class_axis_of, regression_loss
from dissensus.objectives.objective import Batches, as_objective
from dissensus.randomness import derive, seeded
from dissensus.training import feeds
from dissensus.training.engines import EngineName
from dissensus.training.mesh import mesh_of
from dissensus.training.optimizers import Factory
from dissensus.training.schedules import AnySchedule
from dissensus.training.trainer import Run, Settings, Trainer
from dissensus.training.validation import CollusionWatch

Example: TypeAlias = tuple[Batch, Tensor]


@dataclass(frozen=True)
class _Feeding:
    """How training data is to be gone through; see `fit`."""

    members: Members
    objective: Objective
    settings: Settings
    device: torch.device

    @property
    def size(self) -> int:
        """Examples a step: `accumulate` batches of the size asked for."""
        return (self.settings.batch_size or 128) * self.settings.accumulate

    def order(self, count: int, wish: Batches) -> Tensor:
        """Return the key of the order in which so many examples come, or one for each member's own."""
        if self.settings.drop_last and count < self.size:
            raise ValueError(f"last_batch='drop' leaves nothing of {count} examples. Make `batch_size` smaller.")
        own = (self.settings.batches or wish) == "own" and self.members.own_batches
        ids, seed = self.members.member_ids, self.settings.seed
        labels = [derive(seed, "order", m) for m in ids] if own else derive(seed, "order")
        return torch.tensor(labels, dtype=torch.int64, device=self.device)

    def only_shared(self, reason: str) -> None:
        """Refuse batches of members' own, for this reason."""
        if self.settings.batches == "own":
            raise ValueError(reason)

    def feed_of(self, data: Pairs) -> tuple[feeds.Feed, Example]:
        """Return where batches come from, and a few examples."""
        settings, device = self.settings, self.device
        if not self.members.own_batches:
            self.only_shared(f"{type(self.members).__name__} runs all members on one batch. Leave `batches` out.")
        if self.objective.batches == "shared":
            self.only_shared(
                f"{type(self.objective).__name__} compares members, so they must share batches. Leave `batches` out."
            )
        if isinstance(data, CachedFeatures):
            return self._of_features(data)
        if (arrays := sources.arrays_of(data)) is not None:
            return self._of_arrays(*arrays)
        self.only_shared("A Dataset or DataLoader gives shared batches. For batches='own' hand over tensors or arrays.")
        if isinstance(data, IterableDataset):
            raise ValueError("An IterableDataset has no length or order to shuffle. Pass a DataLoader with a length.")
        feed: feeds.Feed
        targets = self.objective.likelihood.targets
        if isinstance(data, DataLoader):
            if settings.batch_size is not None:
                raise ValueError("A DataLoader has its own batch size; leave `batch_size` out.")
            feed = feeds.LoaderFeed(data, settings.seed, device, settings.accumulate, targets)
        else:
            assert isinstance(data, Dataset)
            options = settings.drop_last, settings.workers, targets
            feed = feeds.DatasetFeed(data, self.size, settings.seed, device, *options)
        with seeded(0):
            x, y, _ = next(iter(sources.weighted_batches(data, 2)))
        return feed, (x[:2], targets(x, y))

    def _of_arrays(self, x: Rows, y: Tensor, weights: Tensor | None) -> tuple[feeds.Feed, Example]:
        """Take batches of arrays from the device if they fit there."""
        sources.check_pair(x, y, "training")
        sources.check_weights(weights, len(x), "training")
        objective, settings, device = self.objective, self.settings, self.device
        y = objective.likelihood.targets(x, y)
        keys = self.order(len(x), "shared" if self.members.prefers_shared_batches else objective.batches)
        # An objective that measures all inputs first has them read into memory, where that is the device's.
        needs_all = device.type == "cpu" and objective.prepare(x[:2]) is not objective
        data = (x, y) if weights is None else (x, y, weights.float())
        kind = feeds.ArrayFeed if feeds.lives_on(x, device) or needs_all else feeds.HostFeed
        return kind(data, self.size, keys, settings.drop_last, settings.workers or 2), (x[:2], y)

    def _of_features(self, data: CachedFeatures) -> tuple[feeds.Feed, Example]:
        """Take batches of features from the device if they fit there."""
        if data.targets is None:
            raise ValueError("These features have no targets to train on. Cache them from data that has labels.")
        x, settings, device = data.rows(0, 2), self.settings, self.device
        y = self.objective.likelihood.targets(x, data.targets)
        limit = feeds.free_memory(device) // 2 if data.resident_limit is None else data.resident_limit
        whole = feeds.lives_on(data.stored, device, limit)
        if not whole:
            self.only_shared(
                "Features that are streamed from their file come in shared batches. For batches='own' raise their `resident_limit`."
            )
        keys = self.order(data.num_examples, self.objective.batches if whole else "shared")
        kind = feeds.ArrayFeed if whole else feeds.HostFeed
        options = settings.drop_last, settings.workers or 2, data.passes
        return kind((data.stored, y), self.size, keys, *options), (x, y)


def _outputs(members: Members, x: Batch, which: str = "") -> Tensor:
    """Return what members make of a few inputs, or say why they cannot run on them."""
    try:
        with evaluation_mode(members), seeded(0):
            return members(x.to(device_of(members)))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise ValueError(f"The members cannot run on {which}inputs shaped {describe(x)}: {reason}") from problem


def check_smallest_batch(members: Members, smallest: int | None, accumulate: int, x: Batch) -> None:
    """Refuse a batch, or one of `accumulate` parts of it, of one example where BatchNorm layers take statistics over examples alone."""
    if smallest is None or smallest // accumulate > 1:
        return
    kind = torch.nn.modules.batchnorm._BatchNorm
    norms = [module for module in members.train().modules() if isinstance(module, kind) and module.training]
    # Over an image's pixels there are statistics of one example too, so what reaches the layers is looked at.
    values: list[int] = []

    def look(_: Any, given: tuple[Tensor, ...]) -> None:
        values.append(given[0].shape[2:].numel())

    with ExitStack() as hooks:
        for module in norms:
            hooks.enter_context(module.register_forward_pre_hook(look))
        _outputs(members, x)
    if 1 in values:
        raise ValueError(
            "The last batch of an epoch has one example, and BatchNorm layers need two or more. Pass last_batch='drop' (to a "
            "DataLoader drop_last=True), or choose another batch size."
        )


# What bfloat16, the coarsest format, leaves of a row of probabilities that sums to one: 8 bits of each.
_ROUNDED = 0.01


@dataclass(frozen=True)
class TargetValues:
    """What values targets of a loss may have; one of the user's own sees to its own.

    Attributes:
        kind: Of the likelihood.
        loss: Its name.
        classes: How many classes the network has, if it has any.
        ignored: Class index of positions that do not count, of outputs with positions; None of others.
    """

    kind: str
    loss: str
    classes: int
    ignored: int | None

    def check(self, y: Tensor, name: str) -> None:
        """Refuse labels that are no classes, answers to yes or no that are none, and counts below zero."""
        if self.kind == "classes":
            self._check_classes(y if y.is_floating_point() else y.long(), name)
        elif self.kind == "labels" and not bool(((y >= 0) & (y <= 1)).all()):
            came = f"got {float(y.min()):g} to {float(y.max()):g}"
            raise ValueError(f"The {name} targets of {self.loss} must be 0 or 1 (or between); {came}.")
        elif self.kind == "points" and self.loss == "poisson" and bool((y < 0).any()):
            raise ValueError(f"The {name} targets of poisson are counts, 0 or more; got {float(y.min()):g}.")

    def _check_classes(self, y: Tensor, name: str) -> None:
        """Refuse labels that are no classes, and real targets whose rows are no distributions over classes."""
        counted = y if self.ignored is None else y[y != self.ignored]
        if self.ignored is None or len(counted):
            sources.check_labels_fit(counted, self.classes, name)
        if not y.is_floating_point():
            return
        sums, lowest = y.sum(-1, dtype=torch.float32), y.amin(-1).float()
        wrong = ((sums - 1).abs() > _ROUNDED) | (lowest < -_ROUNDED)
        if bool(wrong.any()):
            raise ValueError(
                f"The {name} targets must be class indices (integers) or class probabilities, rows that are not negative and sum to 1; "
                f"{int(wrong.sum())} of {len(y)} rows are not, the first sums to {float(sums[wrong][0]):.4g}. Normalise them, or "
                "for regression pass objective=Independent('mse') or Independent('gaussian_nll')."
            )


def check_targets(outputs: Tensor, y: Tensor, likelihood: Likelihood, name: str = "training") -> TargetValues:
    """Refuse targets that do not fit the members' outputs, `(members, batch, outputs)` or with positions; return what values fit."""
    kind, has_positions, classes = likelihood.kind, outputs.ndim > 3, outputs.shape[-1]
    if kind == "own":
        few = min(len(y), outputs.shape[1])
        likelihood.losses(outputs[:, :few], y[:few].to(outputs.device))
    elif kind == "labels" or (kind == "points" and has_positions):
        _check_alike(outputs, y, likelihood, name)
    elif kind == "classes" and has_positions:
        classes = _classes_of_positions(outputs, y, likelihood, name)
    elif outputs.ndim != 3:
        raise ValueError(
            f"A member must give (batch, outputs); got (members, batch, ...) = {tuple(outputs.shape)}. "
            "Keep one output axis, also for a single output; flatten further ones."
        )
    elif kind != "classes":
        given = as_columns(y).shape[-1]
        wanted = 2 * given if kind == "density" else given  # a mean and a rho each
        if outputs.shape[-1] != wanted:
            raise ValueError(f"{likelihood.name} of {given} targets wants {wanted} outputs; got {outputs.shape[-1]}.")
    likelihood.check_ignored(outputs)
    values = TargetValues(kind, likelihood.name, classes, likelihood.ignore_index if has_positions else None)
    values.check(y, name)
    return values


def _check_alike(outputs: Tensor, y: Tensor, likelihood: Likelihood, name: str) -> None:
    """Refuse targets that are not shaped as one member's outputs."""
    if y.shape[1:] != outputs.shape[2:]:
        raise ValueError(
            f"The {name} targets of {likelihood.name} must be shaped as the outputs, (batch, "
            f"{', '.join(map(str, outputs.shape[2:]))}); got {tuple(y.shape)}."
        )


def _classes_of_positions(outputs: Tensor, y: Tensor, likelihood: Likelihood, name: str) -> int:
    """Return how many classes outputs with positions have, or refuse targets that are not one class index for each position."""
    if y.is_floating_point():
        raise ValueError(
            f"The {name} targets of outputs with positions must be class indices (integers); got {y.dtype}."
        )
    few = outputs[:, :1].expand(-1, 1, *outputs.shape[2:])
    return outputs.shape[class_axis_of(few, y[:1], likelihood.class_axis)]


@dataclass(frozen=True)
class _Held:
    """Validation batches, from the start each time; what lies in a file is read anew, and targets that come in batches are checked."""

    data: Pairs
    values: TargetValues | None = None

    def __iter__(self) -> Iterator[Triple]:
        arrays = isinstance(self.data, tuple)
        with nullcontext() if arrays else seeded(0):
            for x, y, weights in sources.weighted_batches(self.data, 2048 if arrays else 1024):
                if self.values is not None:
                    self.values.check(y, "validation")
                yield x, y, weights


def _held_out(
    validation: Pairs | None, members: Members, likelihood: Likelihood, outputs: Tensor, values: TargetValues
) -> _Held | None:
    """Return validation batches, if there are any, that can be gone through again and again."""
    if validation is None:
        return None
    if (arrays := sources.arrays_of(validation)) is None:
        return _Held(validation, values)
    x, y, weights = arrays
    sources.check_pair(x, y, "validation")
    sources.check_weights(weights, len(x), "validation")
    y = likelihood.targets(x, y)
    check_targets(outputs, y, likelihood, "validation")
    _outputs(members, next(iter(x.split(2))), "validation ")
    return _Held((x, y) if weights is None else (x, y, weights))


@checked
def fit(
    members: Members,
    data: Pairs,
    *,
    objective: Objective | Callable[..., Any] | None = None,
    epochs: int = 10,
    batch_size: int | None = None,
    optimizer: str | type[Optimizer] | Factory = "adamw",
    lr: float | Sequence[float] = 1e-3,
    weight_decay: float | Sequence[float] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    schedule: AnySchedule = "constant",
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    ema: float | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    batches: Batches | None = None,
    last_batch: Literal["keep", "drop"] = "keep",
    workers: int = 0,
    augment: Augmentation | None = None,
    unlabelled: Any = None,
    validation: Pairs | str | Path | Loaded | None = None,
    watch_collusion: bool = False,
    check_every: Literal["epoch"] | int = "epoch",
    select: str | None = None,
    patience: int | None = None,
    per_member: bool = False,
    seed: int = 0,
    device: str | torch.device = "auto",
    engine: EngineName = "auto",
    concurrent_members: int | None = None,
    mesh: tuple[int, int] | None = None,
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
        data: A pair (inputs, targets) of tensors or arrays, which move to the device whole where they fit and are fed from
            the host, in the same order, where they do not (memory maps are not read into memory); a path, or what
            `dissensus.data.files.load` returned; a map-style Dataset; a DataLoader, whose batches (in its own order, in every
            epoch as many as its length says) all members share; or features of `cache_features`, on which a HeadEnsemble
            trains its heads. Inputs may be several tensors, as the networks take them: a tuple for `net(a, b)`, a dictionary
            for `net(a=..., b=...)`. A third part are weights of the examples: a batch's loss is then sum(w · loss) / sum(w).
        objective: What to minimise; by default `Independent()`, and `Independent("mse")` where targets are real numbers, as many as the
            network's outputs. See `dissensus.objectives`; also a function `(members, x, y, step) -> (loss, parts)`,
            which may have `batches`, `streams`, `couples` and `likelihood` as attributes.
        epochs: How often the data is gone through.
        batch_size: Examples a step (128 by default); not together with a DataLoader, which has its own.
        optimizer: `"sgd"`, `"adam"`, `"adamw"`, a torch optimizer class, or a function that makes a torch optimizer from
            one member's named parameters, those that train, as its network names them (parameter groups and all).
        lr: Learning rate: one number, or one for each member.
        weight_decay: Likewise; the optimizer's own default if left out.
        optimizer_options: Further options, such as `{"momentum": 0.9, "nesterov": True}`.
        schedule: `"constant"`, `"cosine"`, `"one_cycle"`, an object of `dissensus.schedules` (StepDecay, MultiStep, Cosine,
            OneCycle, Plateau), or a function of (epoch, epochs) that gives a factor on `lr`.
        clip_norm: Largest norm of each member's gradient.
        clip_value: Largest size of each number in a gradient.
        accumulate: How many batches a step takes one after another, adding up their gradients: as one batch of that many times the
            size, also where examples, classes or positions count by weights, with the memory of one. But for BatchNorm, objectives that
            compare examples or leave some out, and those of your own that change targets or take weighted means other than by
            `step.mean`.
        ema: Decay of an exponential average of the weights over steps, such as 0.999. Validation, selection and the result are
            then of the averaged weights; buffers (BatchNorm's statistics) are the last ones. Not for members that are weights on
            the way (snapshots, SWAG).
        precision: `"fp32"`, or `"bf16"` for autocast with float32 weights.
        batches: `"own"`: each member goes through the data in its own order (not of kinds that run all members on one batch);
            `"shared"`: all see the same batch. The objective's wish by default (members that train independently: own).
        last_batch: Keep or drop the smaller batch at an epoch's end.
        workers: Processes that load the items of a Dataset ahead of training (a DataLoader has its own); threads that gather
            batches of arrays that do not fit on the device.
        augment: A function `(x, y, noise) -> (x, y)` on batches, on the device; see `dissensus.data.augment`. Members with
            batches of their own augment each in their own way, by (seed, member); on shared batches (objectives that compare
            members, Datasets, DataLoaders) all see the same augmented batch.
        unlabelled: Inputs without labels, a second stream for objectives that read it.
        validation: Held-out data, looked at every check.
        watch_collusion: At every check, put member error, ensemble error and diversity on a fixed sample of the training data
            (`train_member_error`, `train_ensemble_error`, `train_diversity`) and on the validation data (`validation_...`)
            into the history, and warn when members collude; see `diagnose`. Labels and counts are judged by their loss, real numbers by
            the squared error of predictions; quantiles and losses of your own are refused.
        check_every: `"epoch"`, or a number of steps between checks.
        select: Column to select the best check by (`"ensemble_loss"`, `"validation_loss"`, `"ensemble_accuracy"`,
            `"validation_accuracy"`); the weights of that check are the result. Per-member columns count by their mean.
        patience: Stop after this many checks without improvement (selects by `"ensemble_loss"` unless told otherwise).
        per_member: Select and stop each member by its own column (`"validation_loss"`, the default, or `"validation_accuracy"`): it stays,
            bit for bit, what it was at its best check while others go on.
        seed: Decides everything: weights' noise, data order, augmentation. Member j depends on (seed, j) only, where the
            objective does not couple members.
        device: `"auto"` takes a GPU if there is one.
        engine: `"auto"` picks by a rule; `"eager"`, `"captured"` (traced once, replayed; a CUDA graph on a GPU) or
            `"compiled"` (captured and compiled). It changes speed only.
        concurrent_members: Have at most this many members in flight (on a CPU one): slower, but the memory of so many.
            For deep ensembles and objectives that do not couple members.
        mesh: Inside a process group of `torchrun`: over how many processes members, and over how many each batch, are spread. Every
            process calls `fit` with the same arguments, and ends with all members; the first one writes.
        checkpoint_dir: Folder for checkpoints and `history.csv`.
        checkpoint_every: Epochs between checkpoints.
        resume: Go on from the folder's last checkpoint, if it has one; ends in exactly the weights of an uninterrupted run.
        on_divergence: When a member's loss is no longer finite: `"stop"` with an error, or `"drop"` that member and go on
            (with sgd, adam or adamw).
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
    members, data, held = as_members(members), _loaded(data, "data"), _loaded(validation, "validation")
    minimised = members.adapt(_objective_of(members, data, objective))
    # What a run is asked for are these arguments, by their names.
    asked = locals() | {
        "bf16": precision == "bf16",
        "drop_last": last_batch == "drop",
        "mesh": None if mesh is None else mesh_of(mesh),
        "optimizer_options": dict(optimizer_options or {}),
    }
    settings = Settings(**{field.name: asked[field.name] for field in fields(Settings)})
    target = device_named(device)
    _place(members, target)
    whole, members = members, members.reader(data)
    if held is not None and whole.reader(held) is not members:
        raise ValueError("Training and validation data must both be inputs or both cached features of the backbone.")
    for name, side in (*minimised.stream_data().items(), ("unlabelled", unlabelled)):
        whole.check_beside(data, side, name)
    feed, (few, targets) = _Feeding(members, minimised, settings, target).feed_of(data)
    outputs = _outputs(members, few)
    values = check_targets(outputs, targets, minimised.likelihood)
    feed.check = partial(values.check, name="training")
    check_smallest_batch(members, feed.smallest, settings.accumulate, few)
    minimised = _prepared(minimised, feed, few)
    streams = _streams_of(minimised, unlabelled, few, target)
    held_out = _held_out(held, members, minimised.likelihood, outputs, values)
    watch = CollusionWatch.of(members, data, minimised, outputs) if watch_collusion else None
    trainer = Trainer(members, minimised, feed, streams, held_out, settings, watch)
    trainer.result.members = whole.train()
    try:
        with _threads_of(members, few, (feed.batch_size or 128) // settings.accumulate):
            run = trainer.run()
    finally:
        whole.catch_up()
    whole.after_training(data)
    return run


def _place(members: Members, device: torch.device) -> None:
    """Put an ensemble on a device where it is not all there."""
    if {tensor.device for tensor in (*members.parameters(), *members.buffers())} - {device}:
        members.to(device)


def _loaded(data: Any, name: str) -> Any:
    """Return the tensors of a path, or of what was loaded from one; all else as it came."""
    return as_data(data, name) if isinstance(data, str | Path | Loaded) else data


def _objective_of(members: Members, data: Any, given: Any) -> Objective:
    """Return the objective that is given, or a function as one; where none is, the usual one."""
    if isinstance(given, Objective):
        return given
    usual = _usual_objective(members, data)
    return usual if given is None else as_objective(given, usual.likelihood)


def _usual_objective(members: Members, data: Any) -> Objective:
    """Return squared errors where float targets cannot be anything else, else the cross-entropy."""
    arrays = None if isinstance(data, CachedFeatures) else sources.arrays_of(data)
    if arrays is None or not arrays[1].is_floating_point() or not len(arrays[1]):
        return Independent()
    y, x = arrays[1], arrays[0][:2]
    shares = y.ndim > 1 and y.shape[-1] > 1 and bool(((y[:2].sum(-1) - 1).abs() < 1e-3).all())  # class probabilities
    fits = regression_loss(_outputs(members, x).shape[-1], y) == "mse"
    return Independent("mse") if fits and not shares else Independent()


def _threads_of(members: Members, x: Batch, batch_size: int) -> AbstractContextManager[None]:
    """Return a block in which torch uses as many threads as a step keeps busy; `x`: a few inputs."""
    if device_of(members).type != "cpu" or torch.get_num_threads() == 1:
        return nullcontext()
    _, work = look_at(lambda: _outputs(members, x))
    # A backward pass takes twice the work of the pass itself.
    return threads_for(3 * work * batch_size / len(x))


def _prepared(objective: Objective, feed: feeds.Feed, x: Batch) -> Objective:
    """Return the objective with what it measures of all training inputs; `x`: a few of them."""
    if isinstance(feed, feeds.ArrayFeed):
        return objective.prepare(feed.data[0][: feed.count])
    if objective.prepare(x) is not objective:
        raise ValueError(
            f"{type(objective).__name__} measures all training inputs before it begins (`of_range` of Adversarial, "
            "`statistics='training'` of HardDelta), and this data comes in batches. Hand over arrays that fit on the device."
        )
    return objective


def _streams_of(objective: Objective, unlabelled: Any, x: Batch, device: torch.device) -> dict[str, Tensor]:
    """Return further inputs that the objective reads, tensor by tensor, on the device, checked against the training inputs."""
    streams = {name: sources.all_inputs(values, name).to(device) for name, values in objective.stream_data().items()}
    if unlabelled is not None:
        name, reads, brings = type(objective).__name__, "unlabelled" in objective.streams, "unlabelled" in streams
        refuse(
            {
                f"{name} does not read unlabelled data. Wrap it in VirtualAdversarial, or leave `unlabelled` out.": not reads,
                f"{name} brings its own unlabelled data. Give it there, or here as `unlabelled`, not both.": brings,
            }
        )
        streams["unlabelled"] = sources.all_inputs(unlabelled, "unlabelled").to(device)
    for name, values in streams.items():
        if len(values) == 0:
            raise ValueError(f"The {name} data are empty; leave them out.")
        if not name.endswith(".y") and _looks(values) != _looks(x):
            raise ValueError(
                f"The {name.removesuffix('.x')} inputs must be shaped as the training inputs, and real numbers where those are, "
                f"{describe(x)}; got {describe(values)}."
            )
    return {
        name if isinstance(values, Tensor) else f"{name}.{place}": leaf
        for name, values in streams.items()
        for place, leaf in enumerate(tree_leaves(values))
    }


def _looks(batch: Batch) -> tuple[list[tuple[torch.Size, bool]], Any]:
    """Return the shape of each input of a batch, and whether it is of real numbers."""
    leaves, spec = tree_flatten(batch)
    return [(leaf.shape[1:], leaf.is_floating_point()) for leaf in leaves], spec
