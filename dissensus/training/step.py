"""One training step as a function of a typed state, so that it can run as it is, traced, compiled or captured."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor

from dissensus.data.augment import Augmentation
from dissensus.data.trees import Tree, batch_of
from dissensus.members import Members, View
from dissensus.objectives import Objective, Step
from dissensus.objectives.objective import OutputObjective
from dissensus.randomness import derive, fold
from dissensus.training.feeds import Feed, stream_batch
from dissensus.training.optimizers import AnyOptimizer, Block, aligned_rows, computed_once

# How one member's part is taken: without its axis (what its network sees), as one row, or the whole, which members share.
Rows = Literal["member", "row", "shared"]


# A step that has begun: where it stands, its inputs and targets, and the members it trains, None for all.
Begun: TypeAlias = tuple[Step, Any, Tensor, Tensor | None]


@dataclass(frozen=True)
class Part:
    """What of a part is one member's, and whether checkpoints hold it."""

    rows: Rows
    saved: bool


@dataclass
class TrainState:
    """What a step is a function of, changed by it in place.

    Attributes:
        parameters: The trained parameters, one flat array `(rows, columns)` for each block.
        optimizer: What the optimizer keeps of each block: moments, counts, rates, by name.
        averages: The running average of each block's parameters and its number of steps, where one is kept.
        columns: Rates and decays of single columns, for each block, where parameter groups differ.
        buffers: Buffers of the networks by name.
        frozen: Parameters that are not trained, by name.
        sums: Logged parts, summed since the last check: `()`, or one number a member.
        seen: How many steps each sum is of.
        noise_keys: Key of each member's noise.
        shared_key: Key of the noise that all members share.
        index: Number of the step.
        plateau: Factor on the learning rate that a plateau has left.
        factors: The schedule's factor for every step.
        data: What the feed put here: data, its order, the position in the epoch, or one batch.
        streams: Further data, such as unlabelled inputs, by name.
    """

    parameters: Annotated[list[Tensor], Part("row", saved=True)]
    optimizer: Annotated[list[dict[str, Tensor]], Part("row", saved=True)]
    averages: Annotated[list[dict[str, Tensor]], Part("row", saved=True)]
    columns: Annotated[list[dict[str, Tensor]], Part("shared", saved=False)]
    buffers: Annotated[dict[str, Tensor], Part("member", saved=True)]
    frozen: Annotated[dict[str, Tensor], Part("member", saved=False)]
    sums: Annotated[dict[str, Tensor], Part("row", saved=True)]
    seen: Annotated[dict[str, Tensor], Part("row", saved=True)]
    noise_keys: Annotated[Tensor, Part("row", saved=False)]
    shared_key: Annotated[Tensor, Part("shared", saved=False)]
    index: Annotated[Tensor, Part("shared", saved=True)]
    plateau: Annotated[Tensor, Part("shared", saved=True)]
    factors: Annotated[Tensor, Part("shared", saved=False)]
    data: Annotated[dict[str, Tensor], Part("shared", saved=False)]
    streams: Annotated[dict[str, Tensor], Part("shared", saved=False)]

    def leaves(self) -> list[Tensor]:
        """Return every tensor, in a fixed order."""
        return [tensor for part in PARTS for _, tensor in _walk(getattr(self, part))]

    def names(self) -> list[str]:
        """Return where each of the leaves is, such as `buffers.net.1.running_mean`."""
        return [name for part in PARTS for name, _ in _walk(getattr(self, part), part)]

    def with_leaves(self, leaves: Sequence[Tensor]) -> "TrainState":
        """Return a state like this one of other tensors."""
        left = iter(leaves)
        return self._changed(lambda *_: next(left))

    def row(self, index: int, own_order: bool) -> "TrainState":
        """Return one member's part as views; `own_order`: whether members go through the data each in its own order."""

        def part(rows: Rows, tensor: Tensor) -> Tensor:
            if tensor.ndim == 0 or rows == "shared":
                return tensor
            return tensor[index] if rows == "member" else tensor[index : index + 1]

        one = self._changed(part)
        if own_order:
            one.data = {**self.data, "order": self.data["order"][index : index + 1]}
        return one

    def saved(self, *, without: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return what a checkpoint holds, by name, except these parts."""
        return {
            name: tensor
            for part, kind in PARTS.items()
            if kind.saved and part not in without
            for name, tensor in _walk(getattr(self, part), part)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Take in place what `saved` gave; return what does not fit, None if all does.

        Parts that are logged may not be here yet; what an ended run no longer keeps may be missing.
        """
        known = self.saved()
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if name in known and known[name].shape == tensor.shape:
                known[name].copy_(tensor)
            elif part in ("sums", "seen"):
                tensor = tensor.to(self.index.device)
                getattr(self, part)[rest] = aligned_rows(tensor) if tensor.ndim else tensor
            else:
                return name
        return None

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors that make the ensemble what it is, by name."""
        return self.saved(without=("optimizer", "averages", "sums", "seen", "index", "plateau"))

    def carry_over(self, old: "TrainState", blocks: Sequence[Block], keep: Sequence[int]) -> None:
        """Go on from a state with more members, whose parameters lay in these blocks: position, logged sums, the optimizer's rows."""
        self.index.copy_(old.index)
        self.plateau.copy_(old.plateau)
        self.data["position"].copy_(old.data["position"])
        self.data.update({name: tensor for name, tensor in old.data.items() if name.startswith("batch.")})
        rows = list(keep)
        for logged, kept in ((old.sums, self.sums), (old.seen, self.seen)):
            kept.update({name: _of_rows(tensor, rows) for name, tensor in logged.items()})
        left = [(place, rows) for place, block in enumerate(blocks) if (rows := block.rows_of(keep))]
        for now, before in ((self.optimizer, old.optimizer), (self.averages, old.averages)):
            for slots, (place, rows) in zip(now, left, strict=False):
                for name, tensor in slots.items():
                    tensor.copy_(before[place][name][rows])

    def _changed(self, change: Callable[[Rows, Tensor], Tensor]) -> "TrainState":
        return replace(
            self, **{name: _rebuilt(getattr(self, name), partial(change, part.rows)) for name, part in PARTS.items()}
        )


PARTS: dict[str, Part] = {part.name: part.type.__metadata__[0] for part in fields(TrainState)}  # type: ignore[union-attr]


def _of_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    return aligned_rows(tensor[rows]) if tensor.ndim else tensor


def _walk(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of lists and dictionaries with their places."""
    if isinstance(value, Tensor):
        yield name, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _walk(inner, f"{name}.{key}")


def _rebuilt(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _rebuilt(inner, change) for key, inner in value.items()}
    return [_rebuilt(inner, change) for inner in value]


@dataclass
class TrainStep:
    """Everything about a step that does not change: `step(state, size)` changes the state in place."""

    members: Members
    objective: Objective
    blocks: list[Block]
    optimizer: AnyOptimizer
    feed: Feed
    batch_size: int
    total_steps: int
    seed: int
    augment: Augmentation | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    bf16: bool = False
    accumulate: int = 1
    ema: float | None = None

    def initial_state(self, factors: Tensor, streams: Mapping[str, Tensor]) -> TrainState:
        """Return the state before the first step."""
        device = self.blocks[0].flat.device
        trained = {name for block in self.blocks for name in block.names}
        keys = [derive(self.seed, "noise", member) for member in self.members.member_ids]
        return TrainState(
            parameters=[block.flat for block in self.blocks],
            optimizer=self.optimizer.tensors,
            averages=[] if self.ema is None else [_no_average(block.flat) for block in self.blocks],
            columns=self.optimizer.columns,
            buffers=dict(self.members.named_buffers()),
            frozen={n: p.detach() for n, p in self.members.named_parameters() if n not in trained},
            sums={},
            seen={},
            noise_keys=aligned_rows(torch.tensor(keys, device=device)),
            shared_key=torch.tensor(derive(self.seed, "shared noise"), device=device),
            index=torch.zeros((), dtype=torch.int64, device=device),
            plateau=torch.ones((), dtype=torch.float64, device=device),
            factors=factors.to(device),
            data={**self.feed.tensors, "position": torch.zeros((), dtype=torch.int64, device=device)},
            streams=dict(streams),
        )

    def __call__(self, state: TrainState, size: int, *, advance: bool = True) -> None:
        """Take one step on a batch of `size` examples; without `advance` the step's number stays as it is."""
        step, x, y, rows = self._begin(state, size)
        leaves = self._leaves(state, rows)
        if self.accumulate == 1:
            gradients, parts = self._gradients(state, leaves, rows, step, x, y)
        else:
            gradients, parts = self._accumulated(state, leaves, rows, step, x, y, size)
        with torch.no_grad():
            self._descend(state, gradients, rows)
            self._log(state, parts, rows)
            if advance:
                state.index.add_(1)
                state.data["position"].add_(1)

    def _gradients(
        self, state: TrainState, leaves: list[Tensor], rows: Tensor | None, step: Step, x: Any, y: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Mapping[str, Tensor]]:
        """Return the gradients of the objective on a batch, and its logged parts; buffers are as the pass leaves them."""
        view = self._view(state, leaves, rows, step)
        with self._precision(x.device):
            loss, parts = self.objective(view, x, y, step)
            if self.members.loss_over_members == "mean":
                # Members are one network's views: their mean trains it as that network alone.
                loss = loss / view.num_members
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        if rows is not None:
            with torch.no_grad():
                self.members.put_rows(state.buffers, rows, view.buffers)
        return gradients, parts

    def _accumulated(
        self, state: TrainState, leaves: list[Tensor], rows: Tensor | None, step: Step, x: Any, y: Tensor, size: int
    ) -> tuple[tuple[Tensor | None, ...], Mapping[str, Tensor]]:
        """Return the mean of the gradients on equal parts of a batch, one after another: a pass has the memory of one part."""
        total: list[Tensor | None] = [None] * len(leaves)
        logged: dict[str, Tensor] = {}
        count, own = min(self.accumulate, size), int(self.feed.own)
        for place in range(count):
            part = slice(place * size // count, (place + 1) * size // count)
            where = (slice(None), part) if own else part
            # Not the step's own noise again: parts would share their dropout and perturbations.
            inner = replace(
                step,
                member_keys=fold(step.member_keys, place),
                shared_key=fold(step.shared_key, place),
                streams={name: stream[where] for name, stream in step.streams.items()},
                weights=None if step.weights is None else step.weights[where],
            )
            gradients, parts = self._gradients(state, leaves, rows, inner, x[where], y[where])
            share = (part.stop - part.start) / size
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    scaled = gradient * (share if step.weights is None else self._share(step, inner, index, rows))
                    before = total[index]
                    total[index] = scaled if before is None else before + scaled
            for name, value in parts.items():
                logged[name] = logged.get(name, 0.0) + share * value.detach()
        return tuple(total), logged

    def _share(self, step: Step, part: Step, index: int, rows: Tensor | None) -> Tensor:
        """Return how much a part of the batch counts in the whole by its examples' weights: one number, or one for each row of a block."""
        assert step.weights is not None
        assert part.weights is not None
        block = self.blocks[index]
        share = part.weights.double().sum(-1) / step.weights.double().sum(-1).clamp_min(1e-300)
        share = share.to(block.flat.dtype)
        if share.ndim == 0:
            return share
        if not block.stacked:
            assert block.members is not None
            return share[list(block.members)][:, None]
        return (share if rows is None else share[rows])[:, None]

    def run_forward(self, state: TrainState, size: int) -> tuple[Tensor, list[Tensor]]:
        """Return the members' outputs for the step's batch, with their graph, and the leaves they depend on.

        This, `judge` and `run_backward` are the step of an objective on outputs in three parts, so that members can run as
        programs of their own around the part in which they are compared.
        """
        step, x, _, rows = self._begin(state, size)
        leaves = self._leaves(state, rows)
        view = self._view(state, leaves, rows, step)
        with self._precision(x.device):
            return (view.each(x) if step.own else view(x)), leaves

    def judge(self, state: TrainState, size: int, outputs: Tensor) -> Tensor:
        """Log the parts of the objective on these outputs; return its gradient with respect to them."""
        assert isinstance(self.objective, OutputObjective)
        step, x, y, rows = self._begin(state, size)
        outputs = outputs.detach().requires_grad_()
        with self._precision(x.device):
            loss, parts = self.objective.on_outputs(outputs, y, step)
        (gradient,) = torch.autograd.grad(loss, outputs)
        with torch.no_grad():
            self._log(state, parts, rows)
        return gradient

    def run_backward(self, state: TrainState, outputs: Tensor, leaves: list[Tensor], output_gradient: Tensor) -> None:
        """Descend along the gradient that the outputs' gradient gives."""
        gradients = torch.autograd.grad(outputs, leaves, output_gradient, allow_unused=True)
        with torch.no_grad():
            self._descend(state, gradients, None)

    def _begin(self, state: TrainState, size: int) -> Begun:
        """Return the step, its batch, and the members it trains."""
        step = self._step(state, size)
        x, y, step.weights = self.feed.batch(state.data, size)
        if self.augment is not None:
            given = x.value() if isinstance(x, Tree) else x
            changed = self.augment(given, y, step.noise(shared=not self.feed.own))
            if not isinstance(changed, tuple) or len(changed) != 2:
                raise ValueError(
                    f"`augment` must return what it made of inputs and targets, (x, y); got {type(changed).__name__}."
                )
            x, y = batch_of(changed[0]), changed[1]
        rows = self.objective.pick(step, self.members.num_trained)
        return step, x, y, None if rows is None else computed_once(rows)

    def _leaves(self, state: TrainState, rows: Tensor | None) -> list[Tensor]:
        return [_leaf(flat, block, rows) for flat, block in zip(state.parameters, self.blocks, strict=True)]

    def picks(self, state: TrainState) -> bool:
        """Whether the objective trains only some members a step."""
        return self._picked(state) is not None

    def _picked(self, state: TrainState) -> Tensor | None:
        step = Step(state.index, self.total_steps, self.feed.own, state.noise_keys, state.shared_key)
        return self.objective.pick(step, self.members.num_trained)

    def _step(self, state: TrainState, size: int) -> Step:
        step = Step(state.index, self.total_steps, self.feed.own, state.noise_keys, state.shared_key)
        # Streams with one name before a dot, such as inputs and their targets, are drawn row by row together.
        sources = dict.fromkeys(name.partition(".")[0] for name in state.streams)
        keys = {source: step.noise(shared=not self.feed.own).keys for source in sources}
        step.streams = {
            name: stream_batch(values, keys[name.partition(".")[0]], size) for name, values in state.streams.items()
        }
        return step

    def _view(
        self, state: TrainState, leaves: list[Tensor], rows: Tensor | None, step: Step, part: int | None = None
    ) -> View:
        """Return the members as the step finds them; rows of another part of the batch draw other noise."""
        parameters, buffers = dict(state.frozen), dict(state.buffers)
        if rows is not None:
            parameters = self.members.rows_of(parameters, rows)
            buffers = self.members.rows_of(buffers, rows)
        for block, leaf in zip(self.blocks, leaves, strict=True):
            parameters.update(block.unpack(leaf))
        return View(
            self.members,
            parameters,
            buffers,
            keys=lambda: step.pass_keys(rows) if part is None else fold(step.pass_keys(rows), part),
            rows=rows,
            together=self.objective.couples,
            whole=None if rows is None else lambda: self._whole(state, step),
        )

    def _whole(self, state: TrainState, step: Step) -> View:
        """Return all members as they are before the step, without gradients."""
        return self._view(state, state.parameters, None, step)

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        # The cache of cast weights would outlive a captured step.
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if self.bf16 else nullcontext()

    def _descend(self, state: TrainState, gradients: tuple[Tensor | None, ...], rows: Tensor | None) -> None:
        """Have the optimizer take its step on every block of parameters."""
        factor = state.factors.index_select(0, state.index.reshape(1)) * state.plateau
        for index, gradient in enumerate(self._clipped(gradients, rows)):
            block, values = self.blocks[index], state.parameters[index]
            block_rows = rows if block.stacked else None
            if _stays(block, gradient, rows):
                continue
            if gradient is None:
                # As for a parameter without a gradient beside others in a row: decay and momentum go on.
                count = len(block.flat) if block_rows is None else len(block_rows)
                gradient = block.flat.new_zeros(()).expand(count, block.flat.shape[1])
            tensors = {**state.optimizer[index], **state.columns[index]}
            self.optimizer.update(tensors, index, values, gradient, factor, block_rows)
            if self.ema is not None:
                _average(state.averages[index], values, self.ema, block_rows)

    def _clipped(self, gradients: tuple[Tensor | None, ...], rows: Tensor | None) -> tuple[Tensor | None, ...]:
        """Keep each number of a gradient within the largest value allowed, then scale each member's down to the largest norm."""
        if (limit := self.clip_value) is not None:
            gradients = tuple(None if gradient is None else gradient.clamp(-limit, limit) for gradient in gradients)
        return gradients if self.clip_norm is None else self._within_norm(self.clip_norm, gradients, rows)

    def _within_norm(
        self, limit: float, gradients: tuple[Tensor | None, ...], rows: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Scale each member's gradient down to the largest norm allowed."""
        count = self.members.num_trained if rows is None or not self.blocks[0].stacked else len(rows)
        squares = torch.zeros(count, dtype=torch.float32, device=self.blocks[0].flat.device)
        # Whose norm each row of a block is part of.
        places = [
            torch.arange(count, device=squares.device)
            if block.stacked
            else torch.tensor(block.members, device=squares.device)
            for block in self.blocks
        ]
        for place, gradient in zip(places, gradients, strict=True):
            if gradient is not None:
                squares = squares.index_add(0, place, gradient.float().square().sum(1))
        scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        return tuple(
            None if gradient is None else gradient * scale[place][:, None].to(gradient.dtype)
            for gradient, place in zip(gradients, places, strict=True)
        )

    def _log(self, state: TrainState, parts: Mapping[str, Tensor], rows: Tensor | None) -> None:
        for name, value in parts.items():
            value = value.detach().float()
            picked = rows if value.ndim else None
            if name not in state.sums:
                self.make_sum(state, name, value.shape if picked is None else (self.members.num_trained,))
            total, seen = state.sums[name], state.seen[name]
            if picked is None:
                total.add_(value)
                seen.add_(1.0)
            else:
                total.index_add_(0, picked, value)
                seen.index_add_(0, picked, torch.ones_like(value))

    def make_sum(self, state: TrainState, name: str, shape: Sequence[int]) -> None:
        """Give a logged part its place in the state."""
        for sums in (state.sums, state.seen):
            zeros = torch.zeros(tuple(shape), dtype=torch.float32, device=state.index.device)
            sums[name] = aligned_rows(zeros) if zeros.ndim else zeros


def _no_average(flat: Tensor) -> dict[str, Tensor]:
    count = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
    return {"mean": flat.detach().clone(), "count": aligned_rows(count)}


def _average(average: Mapping[str, Tensor], values: Tensor, decay: float, rows: Tensor | None) -> None:
    """Take values into their exponential average, in place, whose weights sum to one from the first step on."""
    mean, count = average["mean"], average["count"]
    if rows is not None:
        values, old, steps = (t.index_select(0, rows) for t in (values, mean, count))
    else:
        old, steps = mean, count
    steps = steps + 1
    share = (1 - decay) / (1 - decay ** steps.double())
    new = old + computed_once(share[:, None].to(old.dtype)) * (values - old)
    if rows is None:
        mean.copy_(new)
        count.copy_(steps)
    else:
        mean.index_copy_(0, rows, new)
        count.index_copy_(0, rows, steps)


def _stays(block: Block, gradient: Tensor | None, rows: Tensor | None) -> bool:
    """Whether a block is a network of its own that the step did not reach, or did not pick."""
    if block.members is None or block.stacked:
        return False
    return gradient is None or (rows is not None and block.members[0] not in rows.tolist())


def _leaf(flat: Tensor, block: Block, rows: Tensor | None) -> Tensor:
    chosen = flat if rows is None or not block.stacked else flat.index_select(0, rows)
    return chosen.detach().requires_grad_()


class Engine(ABC):
    """How training steps are executed."""

    name: str

    @abstractmethod
    def take(self, state: TrainState, size: int, limit: int) -> int:
        """Take one step on a batch of `size` examples, changing the state in place, or up to `limit` at once; return how many."""


class Eager(Engine):
    """The step as it is written."""

    name = "eager"

    def __init__(self, train_step: TrainStep) -> None:
        self.train_step = train_step

    def take(self, state: TrainState, size: int, limit: int) -> int:
        """Take one step."""
        self.train_step(state, size)
        return 1
