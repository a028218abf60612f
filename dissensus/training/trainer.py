"""The life of one run: what it was asked for, steps, checks, checkpoints, and what it found."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dissensus._files import only_writer
from dissensus._signatures import real_number, real_numbers, refuse, whole_number
from dissensus.data.augment import Augmentation
from dissensus.members import Members
from dissensus.members.members import under
from dissensus.members.stacking import copies_of
from dissensus.objectives import Objective
from dissensus.objectives.objective import Batches
from dissensus.randomness import derive, seeded
from dissensus.training.checkpoints import CheckpointError, CheckpointFolder, architecture, check_same_run, fingerprint
from dissensus.training.engines import EngineName, Recorded, choose_engine
from dissensus.training.feeds import Feed
from dissensus.training.history import History, Progress, mean_of
from dissensus.training.mesh import Mesh, MeshStep, check_mesh, training_on
from dissensus.training.optimizers import Factory, SeparateOptimizers, check_attached, detach, make_optimizer, pack
from dissensus.training.schedules import AnySchedule, Plateau, factor_table
from dissensus.training.state import PARTS, TrainState
from dissensus.training.step import Block, RowOptimizer, TrainStep
from dissensus.training.validation import CollusionWatch, Validation, Watch, validate


class DivergedError(RuntimeError):
    """A member's loss is no longer a finite number."""


_positive = partial(whole_number, least=1)
# What a number must be where there is one.
_NUMBERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("epochs", "batch_size", "checkpoint_every", "patience"), _positive),
    **dict.fromkeys(("concurrent_members", "accumulate"), _positive),
    **dict.fromkeys(("lr", "weight_decay"), real_numbers),
    **dict.fromkeys(("clip_norm", "clip_value"), partial(real_number, above=True)),
    "workers": partial(whole_number, least=0),
    "check_every": partial(whole_number, least=1, tail=" or 'epoch'"),
    "ema": partial(real_number, below=1.0),
}
# What processes that train together do not do, and how it is left out.
_OFF_ON_MESH = {"accumulate": 1, "concurrent_members": None, "ema": None, "per_member": False}


@dataclass(frozen=True)
class Settings:
    """What `fit` was asked for."""

    epochs: int
    batch_size: int | None
    batches: Batches | None
    drop_last: bool
    workers: int
    optimizer: str | type[Optimizer] | Factory
    lr: float | Sequence[float]
    weight_decay: float | Sequence[float] | None
    optimizer_options: Mapping[str, Any]
    schedule: AnySchedule
    clip_norm: float | None
    clip_value: float | None
    bf16: bool
    augment: Augmentation | None
    check_every: Literal["epoch"] | int
    select: str | None
    patience: int | None
    per_member: bool
    accumulate: int
    ema: float | None
    seed: int
    engine: EngineName
    concurrent_members: int | None
    mesh: Mesh | None
    checkpoint_dir: str | Path | None
    checkpoint_every: int
    resume: bool
    on_divergence: Literal["stop", "drop"]
    progress: bool | None
    callback: "Callable[[Run], None] | None"

    def __post_init__(self) -> None:
        """Refuse what means nothing; numbers of any origin become Python's own."""
        for name, check in _NUMBERS.items():
            if not isinstance(value := getattr(self, name), str | None):
                object.__setattr__(self, name, check(name, value))
        if self.select is None and (self.per_member or self.patience is not None):
            object.__setattr__(self, "select", "validation_loss" if self.per_member else "ensemble_loss")
        alone = [f"`{name}`" for name, off in _OFF_ON_MESH.items() if getattr(self, name) != off]
        refuse(
            {
                f"`mesh` goes without {', '.join(alone)}. Train in one process, or leave that out.": alone
                and self.mesh,
                "`checkpoint_dir` must be a folder's path or None; got ''.": self.checkpoint_dir == "",
                "resume=True goes on from a folder: pass `checkpoint_dir` too.": self.resume
                and not self.checkpoint_dir,
            }
        )


@dataclass
class Run:
    """A training run and what it found.

    Attributes:
        members: The trained ensemble.
        history: One row for each check and member.
        best: Value of the selected column at the best check, None if nothing was selected.
        best_step: Step of that check.
        best_steps: The same of each member, by its number, where members were selected one by one.
        dropped: Members that diverged and were left out.
        engine: How steps were executed.
        seconds: Time in training, over all sittings.
        stopped_early: Whether patience ran out.
        step: Steps taken.
        epoch: Epochs finished.
    """

    members: Members
    history: History = field(default_factory=History)
    best: float | None = None
    best_step: int | None = None
    best_steps: dict[int, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    engine: str = ""
    seconds: float = 0.0
    stopped_early: bool = False
    step: int = 0
    epoch: int = 0

    def __repr__(self) -> str:
        at = "" if self.best_step is None else f" at step {self.best_step}"
        found = "" if self.best is None else f", best {self.best:.4g}{at}"
        return f"Run({self.members.num_members} members, {self.epoch} epochs, {self.seconds:.1f} s, engine {self.engine}{found})"


# What a checkpoint keeps of a run, beside its history.
_KEPT = ("epoch", "step", "engine", "seconds", "stopped_early", "dropped")

log = logging.getLogger("dissensus")

# Tracing a step takes as long as some hundred eager ones, and a program its memory: so many shapes of batches are traced.
PROGRAMS = 16


@dataclass
class Trainer:
    """Runs one training from its first step, or from a checkpoint, to its end."""

    members: Members
    objective: Objective
    feed: Feed
    streams: Mapping[str, Tensor]
    validation: Validation | None
    settings: Settings
    collusion: CollusionWatch | None

    def __post_init__(self) -> None:
        settings, members = self.settings, self.members
        self.result = Run(members)
        self.first_ids = members.member_ids
        # What is selected by: one column for all, or each member's own.
        count = len(self.first_ids) if settings.per_member else 1
        self.watches = [Watch(settings.select or "ensemble_loss") for _ in range(count)]
        self.plateau = Watch("ensemble_loss")
        self.folder = None if settings.checkpoint_dir is None else CheckpointFolder(settings.checkpoint_dir)
        self.good: dict[str, Tensor] | None = None
        self.state: TrainState
        self.blocks: list[Block] = []
        self.checked_step = self.shared_step = 0
        # Shapes of an example in the order they came: those of padded batches differ.
        self.shapes: list[str] = []
        # Of processes that train together one writes for all.
        self.writes = settings.mesh is None or settings.mesh.first
        self._check_settings()

    def _check_settings(self) -> None:
        """Refuse settings that this ensemble, objective or data cannot be trained with."""
        settings, separate = self.settings, self.members.separate
        apart, drops = separate and not self.objective.couples, settings.on_divergence == "drop"
        clips, looks = settings.clip_norm is not None, settings.select or isinstance(settings.schedule, Plateau)
        measured = ["loss", "accuracy"] if self.objective.likelihood.kind in ("classes", "labels") else ["loss"]
        of_whom = ["validation"] if settings.per_member else ["ensemble", "validation"]
        columns = list(map("_".join, product(of_whom, measured)))
        refuse(
            {
                "on_divergence='drop' needs members that own their parameters and an objective that does not couple them; "
                "otherwise one member's divergence is every member's. Use on_divergence='stop'.": drops and not apart,
                "`clip_norm` clips members one by one, and these share their parameters.": clips and not separate,
                f"`ema` averages the weights that training ends with, and {type(self.members).__name__} keeps members of those it "
                "passes through. Leave it out.": settings.ema is not None and self.members.keeps_weights,
                "per_member=True needs members that own their parameters, an objective that does not couple them and "
                "on_divergence='stop'. Leave it out.": settings.per_member and (drops or not apart),
                "Selecting, stopping early and reducing the rate on a plateau look at validation data; give "
                "`validation=`.": looks and self.validation is None,
                f"`select` must be one of {', '.join(columns)}; got {settings.select!r}.": settings.select
                not in (None, *columns),
            }
        )

    @torch.enable_grad()
    def run(self) -> Run:
        """Train to the end; leave the ensemble with the last weights, or the best if a column was selected."""
        mesh, result = self.settings.mesh, self.result
        alone = nullcontext() if self.folder is None or not self.writes else only_writer(self.folder.folder)
        beside = nullcontext() if mesh is None else training_on(mesh, self.members)
        # Networks may draw from global generators.
        with alone, beside, seeded(derive(self.settings.seed, "run")):
            try:
                self.total_steps = self.settings.epochs * self.feed.steps_per_epoch
                stored = self._stored()
                self._build()
                if stored is not None:
                    self._restore(*stored)
                self.members.train()
                if mesh is not None:  # nobody writes into the folder while others still read it
                    mesh.wait()
                show = self.settings.progress if self.writes else False
                with closing(Progress(self.total_steps, self.settings.epochs, result.step, show=show)) as self.progress:
                    self._loop()
            finally:
                if self.good is not None:
                    self.state.load(self.good)
                detach(self.members, self.blocks)
        asked = self.settings.engine
        result.engine = result.engine or ("eager" if asked == "auto" else asked)
        return result

    def _build(self) -> None:
        settings, members = self.settings, self.members
        self.blocks = pack(members)
        lr, decay = self._left(settings.lr), self._left(settings.weight_decay)
        optimizer = make_optimizer(settings.optimizer, members, self.blocks, lr, decay, settings.optimizer_options)
        factors = factor_table(settings.schedule, settings.epochs, self.feed.steps_per_epoch)
        if isinstance(optimizer, SeparateOptimizers):
            concurrent, drops = settings.concurrent_members is not None, settings.on_divergence == "drop"
            recorded = settings.engine not in ("auto", "eager")
            refuse(
                {
                    "`concurrent_members` needs sgd, adam or adamw. Leave it out.": concurrent,
                    f"engine={settings.engine!r} needs sgd, adam or adamw; others run with engine='eager'.": recorded,
                    "per_member=True needs sgd, adam or adamw, whose members have rates of their own.": settings.per_member,
                    "on_divergence='drop' needs sgd, adam or adamw. Use one of them, or on_divergence='stop'.": drops,
                }
            )
        kind = TrainStep if settings.mesh is None else MeshStep
        self.step = kind(members, self.objective, self.blocks, optimizer, self.feed, self.total_steps, settings)
        self.state = self.step.initial_state(factors, self.streams)
        if settings.mesh is not None:
            check_mesh(settings.mesh, members, self.objective, self.step.picks)
        self.engine: Recorded | None = None
        self.chosen = False

    def _left(self, values: Any) -> Any:
        """Return the values of the members that are left, where some were dropped and each has its own."""
        if not self.result.dropped or values is None or isinstance(values, int | float):
            return values
        return [values[self.first_ids.index(member)] for member in self.members.member_ids]

    def _loop(self) -> None:
        result = self.result
        self.clock = time.monotonic()
        while not self._has_ended():
            self._go_through_data()
            if not result.stopped_early:
                result.epoch += 1
                self.members.after_epoch(result.epoch, self.settings.epochs)
                if self.settings.check_every == "epoch":
                    self._check()
            if last := self._has_ended():
                if self.checked_step < result.step:
                    self._check()
                self._swap_averages()
            if self.folder is not None and (last or result.epoch % self.settings.checkpoint_every == 0):
                self._share()
                self._handle_divergence()
                self._save(self.folder, last)

    def _has_ended(self) -> bool:
        return self.result.stopped_early or self.result.epoch >= self.settings.epochs

    def _go_through_data(self) -> None:
        """Take the steps of one epoch that are left, until patience runs out."""
        result, every = self.result, self.settings.check_every
        sizes = self.feed.epoch(result.epoch, result.step % self.feed.steps_per_epoch)
        for size in sizes:
            ahead = self._take_steps(size) - 1
            deque(islice(sizes, ahead), maxlen=0)
            self.progress.update(result.step, result.epoch + 1)
            if every != "epoch" and result.step % every == 0:
                self._check()
                if result.stopped_early:
                    break

    def _take_steps(self, size: int) -> int:
        """Take one step, or as many as the engine takes at once; return how many."""
        engine, taken = None if self._as_written() else self._engine(size), 1
        if engine is None:
            self.step(self.state, size)
            if (
                self.folder is not None
                and self.result.step == 0
                and isinstance(self.step.optimizer, SeparateOptimizers)
            ):
                self.step.optimizer.state()  # which says whether it can be kept, before an epoch is spent
        else:
            limit = self.feed.alike(self.result.step % self.feed.steps_per_epoch)
            if (every := self.settings.check_every) != "epoch":
                limit = min(limit, every - self.result.step % every)
            taken = engine.prepare(self.state, size).take(self.state, limit)
        self.result.step += taken
        return taken

    def _engine(self, size: int) -> Recorded | None:
        """Return what executes steps other than as they are written, chosen when first asked for."""
        settings, asked = self.settings, self.result.engine or self.settings.engine
        if not self.chosen:
            if asked != "eager" or settings.concurrent_members is not None:
                left = self.total_steps - self.result.step
                self.engine = choose_engine(asked, self.step, self.state, size, left)
            self.chosen, self.result.engine = True, "eager" if self.engine is None else self.engine.name
        return self.engine

    def _as_written(self) -> bool:
        """Whether the step is eager, whatever the engine: the first one with examples of a shape, and all those beyond many shapes."""
        # In the first one members decide how they run, and the objective shows what it logs. Checkpoints keep the shapes.
        if self.settings.concurrent_members is not None:
            return False
        batch = self.feed.tensors["batch"] if self.feed.placed else ()
        shape = " ".join(str(list(leaf.shape[1:])) for leaf in tree_leaves(batch))
        known = shape in self.shapes
        if not known:
            self.shapes.append(shape)
            if len(self.shapes) == 2:
                text = "batches come in several shapes: where steps are traced, the first %d get a program each and others run eagerly"
                log.info(text, PROGRAMS)
        return not known or self.shapes.index(shape) >= PROGRAMS

    def _check(self) -> None:
        """Read the sums, validate, and decide what follows."""
        self.checked_step = self.result.step
        self._share()
        self._handle_divergence()
        per_member, whole = self._read_sums()
        self.result.seconds += time.monotonic() - self.clock
        whole["lr_factor"] = float(self.state.factors[self.result.step - 1] * self.state.plateau)
        whole["seconds"] = self.result.seconds
        self._swap_averages()
        self._leave_stopped()
        if self.validation is not None:
            seen = validate(self.members, self.validation, self.objective.likelihood, self.collusion)
            per_member, whole = per_member | seen[0], whole | seen[1]
        if self.collusion is not None:
            found, warning = self.collusion.check(self.members, self.result.history)
            whole |= found
            if warning:
                log.warning("step %d: %s", self.result.step, warning)
                self.progress.note(f"step {self.result.step}: {warning}")
        head = {"epoch": -(-self.result.step // self.feed.steps_per_epoch), "step": self.result.step}
        self.result.history.add(head, self.members.member_ids, per_member, whole)
        if self.folder is not None and self.writes:
            self.result.history.save(self.folder.folder / "history.csv")
        values = {name: mean_of(v) for name, v in per_member.items()} | whole
        self.progress.values(values)
        self._reduce_rate(values)
        self._select(values, per_member)
        self._swap_averages()
        if self.settings.callback is not None:
            if self.result.members is not self.members:
                self.result.members.catch_up()
            self.settings.callback(self.result)
            if not self.members.training:
                self.members.train()
            check_attached(self.members, self.blocks)
        self.clock = time.monotonic()

    def _share(self) -> None:
        """Have what other processes trained, where several train together."""
        mesh = self.settings.mesh
        if mesh is not None and self.shared_step < self.result.step:
            self.shared_step = self.result.step
            # What the optimizer keeps is each process's own affair.
            mesh.share(self.state.saved(without=("optimizer", "index", "plateau")), self.members)

    def _read_sums(self) -> tuple[dict[str, list[float]], dict[str, float]]:
        sums, seen = self.state.sums, self.state.seen
        means = {name: (total / seen[name]).cpu() for name, total in sums.items()}
        for tensor in (*sums.values(), *seen.values()):
            tensor.zero_()
        # Kinds whose members share a pass in training log one value for all of them.
        per_member = {n: mean.expand(self.members.num_trained).tolist() for n, mean in means.items() if mean.ndim}
        return per_member, {name: float(mean) for name, mean in means.items() if not mean.ndim}

    def _handle_divergence(self) -> None:
        """Stop, or go on without them, if the sum of some members' losses is no longer finite."""
        bad = self._not_finite()
        if not bad:
            return
        names = ", ".join(f"member {self.members.member_ids[place]}" for place in bad)
        when = f"epoch {-(-self.result.step // self.feed.steps_per_epoch)}"
        if self.settings.on_divergence == "stop" or len(bad) == self.members.num_trained:
            there = self.folder is not None and self.folder.exists("last")
            last = f"The last checkpoint in {self.settings.checkpoint_dir} is from before it."
            drops = ", or go on without such members with on_divergence='drop'" if self._could_drop(bad) else ""
            raise DivergedError(
                f"The loss of {names} was no longer finite in {when}. {last if there else 'There is no checkpoint before it.'} Lower the "
                f"learning rate or clip gradients with clip_norm{drops}."
            )
        log.warning("dropped %s: its loss was no longer finite in %s", names, when)
        self._drop(bad)

    def _could_drop(self, bad: Sequence[int]) -> bool:
        """Whether the run would go on without these members if it had been asked to."""
        apart = self.members.separate and not self.objective.couples and not self.settings.per_member
        asked, left = self.settings.on_divergence == "drop", len(bad) < self.members.num_trained
        return apart and left and not asked and isinstance(self.step.optimizer, RowOptimizer)

    def _not_finite(self) -> list[int]:
        """Return the places of members whose loss or weights are no longer finite."""
        count = self.members.num_trained
        bad = torch.zeros(count, dtype=torch.bool, device=self.state.index.device)
        if (losses := self.state.sums.get("loss")) is not None:
            bad |= ~torch.isfinite(losses)
        for block in (block for block in self.blocks if block.flat.numel()):
            # The largest size in each row: one pass, and no temporary as large as all weights.
            broken = ~torch.isfinite(torch.linalg.vector_norm(block.flat, torch.inf, dim=1))
            bad[list(block.members) if block.members is not None else slice(None)] |= broken
        return bad.nonzero().flatten().tolist()

    def _drop(self, bad: Sequence[int]) -> None:
        keep = [place for place in range(self.members.num_trained) if place not in bad]
        self.result.dropped += [self.members.member_ids[place] for place in bad]
        if self.settings.mesh is not None:  # those that are left are spread anew
            others = tuple(part for part in PARTS if part != "optimizer")
            self.settings.mesh.share(self.state.saved(without=others), self.members)
        old_state, old_blocks = self.state, self.blocks
        self.members.keep_members(keep)
        self.feed.keep_members(keep)
        self._build()
        for name, total in old_state.sums.items():
            self.step.make_sum(self.state, name, total[keep].shape if total.ndim else ())
        self.state.carry_over(old_state, old_blocks, keep)
        # The best so far was the best of other members too: the search begins again.
        self.good, self.watches = None, [Watch(self.watches[0].name)]

    def _swap_averages(self) -> None:
        """Exchange the parameters and their averages, where these are kept."""
        for values, average in zip(self.state.parameters, self.state.averages, strict=False):
            held = values.clone()
            values.copy_(average["mean"])
            average["mean"].copy_(held)

    def _reduce_rate(self, values: Mapping[str, float]) -> None:
        """Train more slowly, if the schedule says so, where the validation loss has not fallen for long."""
        schedule = self.settings.schedule
        if isinstance(schedule, Plateau):
            self.plateau.see(values["ensemble_loss"], self.result.step)
            if self.plateau.stale >= schedule.patience:
                self.state.plateau.fill_(max(float(self.state.plateau) * schedule.factor_each, schedule.floor))
                self.plateau.stale = 0

    def _select(self, values: Mapping[str, float], per_member: Mapping[str, list[float]]) -> None:
        settings = self.settings
        if settings.select is None:
            return
        found = per_member[settings.select] if settings.per_member else [values[settings.select]]
        better = [
            place
            for place, (watch, value) in enumerate(zip(self.watches, found, strict=True))
            if not self._has_stopped(watch) and watch.see(value, self.result.step)
        ]
        now = self.state.weights()
        if self.good is None or (better and not settings.per_member):
            self.good = copies_of(now)
        else:
            for place in better:
                self._copy_member(place, now, self.good)
        self._leave_stopped()
        self._note_best()
        self.result.stopped_early = all(map(self._has_stopped, self.watches))

    def _note_best(self) -> None:
        result, steps = self.result, [watch.best_step for watch in self.watches if watch.best_step is not None]
        if len(steps) < len(self.watches):
            return
        result.best = mean_of([watch.best or 0.0 for watch in self.watches])
        if self.settings.per_member:
            result.best_steps = dict(zip(self.first_ids, steps, strict=True))
        else:
            result.best_step = steps[0]

    def _has_stopped(self, watch: Watch) -> bool:
        return self.settings.patience is not None and watch.stale >= self.settings.patience

    def _leave_stopped(self) -> None:
        """Have members that stopped be what they were at their best, at a rate of zero; buffers would go on with every pass."""
        for place, watch in enumerate(self.watches):
            if not self.settings.per_member or not self._has_stopped(watch):
                continue
            assert self.good is not None
            self._copy_member(place, self.good, self.state.weights())
            for index, block in enumerate(self.blocks):
                for row in block.rows_of([place]):
                    self.state.optimizer[index]["lr"][row] = 0.0
                    if self.state.averages:
                        self.state.averages[index]["mean"][row] = block.flat[row]

    def _copy_member(self, place: int, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Copy one member's parameters and buffers, in place."""
        for name, tensor in target.items():
            part, _, rest = name.partition(".")
            if part == "parameters":
                rows = self.blocks[int(rest)].rows_of([place])
                tensor[rows] = source[name][rows]
            elif not self.members.stacked:
                if rest.startswith(self.members.prefix(place)):
                    tensor.copy_(source[name])
            elif rest not in self.members.shared_buffers:
                tensor[place] = source[name][place]

    def _save(self, folder: CheckpointFolder, final: bool) -> None:
        # Nothing goes on from a run that has ended, whose weights are enough.
        mesh, tensors = self.settings.mesh, self.state.saved(without=("optimizer", "averages") if final else ())
        if isinstance(self.step.optimizer, SeparateOptimizers) and not final:
            tensors |= {f"separate.{name}": tensor for name, tensor in self.step.optimizer.state().items()}
        tensors |= {f"good.{name}": tensor for name, tensor in (self.good or {}).items()}
        if mesh is not None:
            tensors = mesh.block(tensors, self.members)
        facts = {
            **self.identity,
            "members": list(self.members.member_ids),
            **{name: getattr(self.result, name) for name in _KEPT},
            "decisions": self.members.all_decisions(),
            "shapes": self.shapes,
            "watches": [asdict(watch) for watch in self.watches],
            "plateau": asdict(self.plateau),
            "history": self.result.history.rows,
            "torch": torch.__version__,
        }
        folder.save("last", self.result.step, tensors, facts, final, mesh)

    def _stored(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if self.folder is None:
            return None
        # Of the network as it came: a backbone may change something in a pass, and hashing it takes time.
        settings = fingerprint(self.settings, self.objective, self.feed, self.streams, self.validation)
        self.identity = {"architecture": architecture(self.members), "settings": settings}
        if not self.folder.exists("last"):
            return None
        if not self.settings.resume:
            raise ValueError(f"{self.folder.folder} already holds a run. Pass resume=True, or choose another folder.")
        tensors, facts, problem = self.folder.load("last")
        if problem is not None:
            log.warning("%s Going on from the checkpoint before it, at step %d.", problem, facts["step"])
        where = f"The checkpoint in {self.folder.folder}"
        began_with = sorted([*facts["members"], *facts["dropped"]])
        if began_with != sorted(self.first_ids):
            raise CheckpointError(f"{where} is of {len(began_with)} members; this ensemble has {len(self.first_ids)}.")
        check_same_run(facts, where, self.identity)
        if facts["dropped"]:
            self.result.dropped = facts["dropped"]
            keep = [self.first_ids.index(member) for member in facts["members"]]
            self.members.keep_members(keep)
            self.feed.keep_members(keep)
        return tensors, facts

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go on from what `_save` wrote."""
        separate, good = under("separate.", tensors), under("good.", tensors)
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(("separate.", "good."))}
        for name, tensor in under("sums.", tensors).items():
            self.step.make_sum(self.state, name, tensor.shape)
        stranger = self.state.load(own)
        if isinstance(self.step.optimizer, SeparateOptimizers):
            stranger = stranger or self.step.optimizer.load(separate)
        if stranger is not None:
            raise CheckpointError(
                f"The checkpoint in {self.settings.checkpoint_dir} is of another version of dissensus (by {stranger}). "
                "Begin again in another folder, or go on with that version."
            )
        self.good = {name: t.to(self.state.index.device) for name, t in good.items()} or None
        result = self.result
        result.history = History(facts["history"])
        self.checked_step = max((int(row["step"]) for row in facts["history"]), default=0)
        for name in _KEPT:
            setattr(result, name, facts[name])
        self.members.decide_as(facts["decisions"])
        self.shapes, self.plateau = facts["shapes"], Watch(**facts["plateau"])
        self.watches = [Watch(**watch) for watch in facts["watches"]]
        self._note_best()
