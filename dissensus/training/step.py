"""One training step as a function of a typed state, so that it can run as it is, traced, compiled or captured.

`TrainStep.__call__` is the walk: the batch, the members' outputs, the objective, gradients, the update of the parameters, the log.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dissensus._signatures import real_number
from dissensus.data.features import as_real
from dissensus.data.sources import Triple
from dissensus.data.trees import Tree, batch_of
from dissensus.engines.row_updates import runs_as_kernel, update_by_adam
from dissensus.members import Members, View
from dissensus.objectives import Objective, Step
from dissensus.objectives.objective import OutputObjective, Whole
from dissensus.randomness import bits, derive, fold
from dissensus.training.feeds import Feed
from dissensus.training.state import TrainState

if TYPE_CHECKING:
    from dissensus.training.optimizers import SeparateOptimizers
    from dissensus.training.trainer import Settings

Gradients: TypeAlias = Sequence[Tensor | None]


# Columns are padded to a multiple of this, so that every row starts where vector loads and cuDNN want it.
ALIGNMENT = 64


@dataclass
class Begun:
    """A step that has begun: the state it changes, where it stands, its batch, and the members it trains, None for all."""

    blocks: "list[Block]"
    state: TrainState
    step: Step
    x: Any
    y: Tensor
    rows: Tensor | None

    @cached_property
    def leaves(self) -> list[Tensor]:
        """The parameters of these members, as leaves of the step's graph."""
        rows = self.rows
        return [
            (flat if rows is None or not block.stacked else flat.index_select(0, rows)).detach().requires_grad_()
            for flat, block in zip(self.state.parameters, self.blocks, strict=True)
        ]


@dataclass
class TrainStep:
    """Everything about a step that does not change: `step(state, size)` changes the state in place.

    `outputs`, `judge` and `backward` are the step of an objective on outputs in three parts, so that members can run as programs of
    their own, or in processes of their own, around the part in which they are compared.
    """

    members: Members
    objective: Objective
    blocks: "list[Block]"
    optimizer: "RowOptimizer | SeparateOptimizers"
    feed: Feed
    total_steps: int
    settings: "Settings"

    # Whether `judge` takes the outputs of all members, whether it asks other processes, and whether gradients are of a part of the
    # batch; see `MeshStep`.
    compares, asks_others, batch_is_cut = True, False, False

    @cached_property
    def picks(self) -> bool:
        """Whether the objective trains only some members a step."""
        zero = torch.zeros((), dtype=torch.int64, device=self.blocks[0].flat.device)
        count = self.members.num_trained
        step = Step(zero, self.total_steps, self.feed.own, zero.expand(count), zero)
        return self.objective.pick(step, count) is not None

    @cached_property
    def why_not_single(self) -> str | None:
        """Why one member's program on every member's tensors is not the ensemble; None if it is."""
        return self.members.why_not_single() or ("the objective picks members" if self.picks else None)

    def _rows(self, values: Tensor) -> Tensor:
        """Return one value a row; where there may be programs of single rows, each aligned in memory as a new tensor is."""
        if values.ndim != 1 or self.why_not_single is not None:
            return values
        return values.new_zeros(len(values), ALIGNMENT)[:, 0].copy_(values)

    def initial_state(self, factors: Tensor, streams: Mapping[str, Tensor]) -> TrainState:
        """Return the state before the first step."""
        device, seed = self.blocks[0].flat.device, self.settings.seed
        trained = set[str]().union(*(block.names for block in self.blocks))
        keys = [derive(seed, "noise", member) for member in self.members.member_ids]
        return TrainState(
            parameters=[block.flat for block in self.blocks],
            optimizer=[{name: self._rows(t) for name, t in slots.items()} for slots in self.optimizer.tensors],
            averages=[self._no_average(block.flat) for block in self.blocks if self.settings.ema is not None],
            columns=self.optimizer.columns,
            buffers=dict(self.members.named_buffers()),
            frozen={n: p.detach() for n, p in self.members.named_parameters() if n not in trained},
            sums={},
            seen={},
            noise_keys=self._rows(torch.tensor(keys, device=device)),
            shared_key=torch.tensor(derive(seed, "shared noise"), device=device),
            index=torch.zeros((), dtype=torch.int64, device=device),
            plateau=torch.ones((), dtype=torch.float64, device=device),
            factors=factors.to(device),
            data=self.feed.tensors,
            streams=dict(streams),
        )

    def _no_average(self, flat: Tensor) -> dict[str, Tensor]:
        count = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
        return {"mean": flat.detach().clone(), "count": self._rows(count)}

    def __call__(self, state: TrainState, size: int, *, advance: bool = True) -> None:
        """Take one step on a batch of `size` examples; without `advance` the step's number stays as it is."""
        begun = self.begin(state, size)
        gradients, parts = self._gradients(begun) if self.settings.accumulate == 1 else self._accumulated(begun, size)
        with torch.no_grad():
            self.descend(begun, gradients)
            self._log(begun, parts)
            if advance:
                state.index.add_(1)
                state.data["position"].add_(1)

    def begin(self, state: TrainState, size: int) -> Begun:
        """Return the step with its batch."""
        step = Step(state.index, self.total_steps, self.feed.own, state.noise_keys, state.shared_key)
        # Streams with one name before a dot, such as inputs and their targets, are drawn row by row together.
        sources = dict.fromkeys(name.partition(".")[0] for name in state.streams)
        keys = {source: step.noise(shared=not self.feed.own).keys for source in sources}
        step.streams = {
            name: _drawn(values, keys[name.partition(".")[0]], size) for name, values in state.streams.items()
        }
        x, y, step.weights = read_batch(self.feed, state.data, size)
        if (augment := self.settings.augment) is not None:
            given = x.value() if isinstance(x, Tree) else x
            changed = augment(given, y, step.noise(shared=not self.feed.own))
            if not isinstance(changed, tuple) or len(changed) != 2:
                raise ValueError(f"`augment` must return inputs and targets, (x, y); got {type(changed).__name__}.")
            x, y = batch_of(changed[0]), changed[1]
        rows = self.objective.pick(step, self.members.num_trained)
        return Begun(self.blocks, state, step, x, y, None if rows is None else computed_once(rows))

    def _view(self, begun: Begun, *, whole: bool = False) -> View:
        """Return the members as the step finds them: those that it trains, or the whole ensemble without gradients."""
        state, leaves, rows = begun.state, begun.leaves, begun.rows
        if whole:
            leaves, rows = state.parameters, None
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
            keys=lambda: self._pass_keys(begun.step, rows),
            rows=rows,
            together=self.objective.couples,
            whole=None if rows is None else partial(self._view, begun, whole=True),
        )

    def _pass_keys(self, step: Step, rows: Tensor | None) -> Tensor:
        return step.pass_keys(rows)

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        # The cache of cast weights would outlive a captured step.
        on = self.settings.bf16
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if on else nullcontext()

    def _gradients(self, begun: Begun) -> tuple[Gradients, Mapping[str, Tensor]]:
        """Return the gradients of the objective on a batch, and its logged parts; buffers are as the pass leaves them."""
        view = self._view(begun)
        with self._precision(begun.x.device):
            loss, parts = _loss_and_parts(self.objective(view, begun.x, begun.y, begun.step), view.num_members)
            if self.members.loss_over_members == "mean":
                # Members are one network's views: their mean trains it as that network alone.
                loss = loss / view.num_members
        gradients = torch.autograd.grad(loss, begun.leaves, allow_unused=True)
        self._keep_buffers(begun, view)
        return gradients, parts

    def _keep_buffers(self, begun: Begun, view: View) -> None:
        if begun.rows is not None:
            with torch.no_grad():
                self.members.put_rows(begun.state.buffers, begun.rows, view.buffers)

    def _accumulated(self, begun: Begun, size: int) -> tuple[Gradients, Mapping[str, Tensor]]:
        """Return gradients and logged parts of a batch from those of equal parts of it, one after another: a pass has the memory of one."""
        step, inner = begun.step, copy(begun)
        total: list[Tensor | None] = [None] * len(begun.leaves)
        logged: dict[str, Tensor] = {}
        count = min(self.settings.accumulate, size)
        for place in range(count):
            part = slice(place * size // count, (place + 1) * size // count)
            where = (slice(None), part) if self.feed.own else part
            share = (part.stop - part.start) / size
            # Not the step's own noise again: parts would share their dropout and perturbations.
            inner.x, inner.y = begun.x[where], begun.y[where]
            weights = None if step.weights is None else step.weights[where]
            inner.step = replace(
                step,
                member_keys=fold(step.member_keys, place),
                shared_key=fold(step.shared_key, place),
                streams={name: stream[where] for name, stream in step.streams.items()},
                weights=weights,
                whole=Whole(begun.y, step.weights, inner.y, weights, share),
            )
            gradients, parts = self._gradients(inner)
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    before = total[index]
                    total[index] = share * gradient if before is None else before + share * gradient
            for name, value in parts.items():
                logged[name] = logged.get(name, 0.0) + share * value.detach()
        return total, logged

    def outputs(self, begun: Begun) -> Tensor:
        """Return the members' outputs for the step's batch, with their graph."""
        view = self._view(begun)
        with self._precision(begun.x.device):
            outputs = view.each(begun.x) if begun.step.own else view(begun.x)
        self._keep_buffers(begun, view)
        return outputs

    def exchange(self, outputs: Tensor, size: int) -> Tensor:
        """Return the outputs that are judged from the members' own."""
        return outputs

    def judge(self, begun: Begun, outputs: Tensor) -> Tensor:
        """Log the parts of the objective on these outputs; return its gradient with respect to them."""
        assert isinstance(self.objective, OutputObjective)
        outputs = outputs.detach().requires_grad_()
        with self._precision(outputs.device):
            loss, parts = _loss_and_parts(self.objective.on_outputs(outputs, begun.y, begun.step), len(outputs))
        (gradient,) = torch.autograd.grad(loss, outputs)
        with torch.no_grad():
            self._log(begun, parts)
        return gradient

    def backward(self, outputs: Tensor, leaves: list[Tensor], gradient: Tensor) -> Gradients:
        """Return the gradients of the leaves from that of the outputs."""
        return torch.autograd.grad(outputs, leaves, gradient, allow_unused=True)

    @torch.no_grad()
    def descend(self, begun: Begun, gradients: Gradients) -> None:
        """Have the optimizer take its step on every block of parameters."""
        state, rows = begun.state, begun.rows
        factor, ema = state.factors.index_select(0, state.index.reshape(1)) * state.plateau, self.settings.ema
        updated: list[tuple[int, Tensor | None]] = []
        for index, gradient in enumerate(self._clipped(gradients, rows)):
            block = self.blocks[index]
            block_rows = rows if block.stacked else None
            own = () if block.stacked else block.members or ()
            if own and (gradient is None or (rows is not None and own[0] not in rows.tolist())):
                continue  # a network of its own that the step did not reach, or did not pick
            if gradient is None:
                # As for a parameter without a gradient beside others in a row: decay and momentum go on.
                count = len(block.flat) if block_rows is None else len(block_rows)
                gradient = block.flat.new_zeros(()).expand(count, block.flat.shape[1])
            self.optimizer.update(state, index, gradient, factor, block_rows)
            updated.append((index, block_rows))
        if not isinstance(self.optimizer, RowOptimizer):
            self.optimizer.step()
        if ema is not None:
            for index, block_rows in updated:
                _average(state.averages[index], state.parameters[index], ema, block_rows)

    def _clipped(self, gradients: Gradients, rows: Tensor | None) -> Gradients:
        """Keep each number of a gradient within the largest value allowed, then scale each member's down to the largest norm."""
        if (limit := self.settings.clip_value) is not None:
            gradients = [None if gradient is None else gradient.clamp(-limit, limit) for gradient in gradients]
        limit = self.settings.clip_norm
        return gradients if limit is None else self._within_norm(gradients, limit, rows)

    def _within_norm(self, gradients: Gradients, limit: float, rows: Tensor | None) -> Gradients:
        count = self.members.num_trained if rows is None or not self.blocks[0].stacked else len(rows)
        squares = torch.zeros(count, dtype=torch.float32, device=self.blocks[0].flat.device)
        pairs = list(zip(gradients, (block.owners for block in self.blocks), strict=True))
        for gradient, owners in pairs:
            if gradient is not None:
                squares[owners] += gradient.float().square().sum(1)
        scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        return [
            None if gradient is None else gradient * scale[owners][:, None].to(gradient.dtype)
            for gradient, owners in pairs
        ]

    def _log(self, begun: Begun, parts: Mapping[str, Tensor]) -> None:
        state = begun.state
        for name, value in parts.items():
            value = value.detach().float()
            picked = begun.rows if value.ndim else None
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
            sums[name] = self._rows(torch.zeros(tuple(shape), dtype=torch.float32, device=state.index.device))


def _loss_and_parts(found: Any, members: int) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return what an objective returned; one of somebody's own may have returned something else."""
    wanted = "An objective must return (loss, parts): a scalar tensor that depends on the members, and a dictionary of tensors"
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
        came = (
            f"({', '.join(type(one).__name__ for one in found)})" if isinstance(found, tuple) else type(found).__name__
        )
        raise ValueError(f"{wanted}; got {came}. Return `loss, {{}}` where there is nothing to log.")
    loss, parts = found
    if not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad):
        came = (
            f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise ValueError(f"{wanted}; got a loss of {came}. Sum it over members, and detach none of it.")
    for name, part in parts.items():
        if not (isinstance(part, Tensor) and part.shape in ((), (members,))):
            came = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(
                f"Parts of an objective must be tensors, scalars or ({members},); got {came} for {name!r}."
            )
    return loss, parts


def read_batch(feed: Feed, data: Mapping[str, Any], size: int) -> Triple:
    """Return inputs, targets and weights (None without any): the rows that the order names, or what the feed placed.

    They are `(size, ...)`, or `(members, size, ...)` if members have orders of their own.
    """
    batch = data["batch"]
    if (order := data.get("order")) is not None:
        columns = data["position"] * feed.stride + torch.arange(size, device=order.device)
        batch = tree_map(partial(_gathered, index=order.index_select(-1, columns)), batch)
    x, y, *weights = batch
    return as_real(x) if feed.as_real else x, y, weights[0] if weights else None


def _gathered(values: Tensor, index: Tensor) -> Tensor:
    """Return rows, `index.shape + (...)`."""
    return values.index_select(0, index.reshape(-1)).reshape(*index.shape, *values.shape[1:])


def _drawn(values: Tensor, keys: Tensor, size: int) -> Tensor:
    """Return a batch of a second stream, drawn with replacement: `keys.shape + (size, ...)`."""
    return _gathered(values, bits(keys, size).remainder(len(values)))


def _average(average: Mapping[str, Tensor], values: Tensor, decay: float, rows: Tensor | None) -> None:
    """Take values into their exponential average, in place, whose weights sum to one from the first step on."""
    mean, count = average["mean"], average["count"]
    old, steps = (mean, count) if rows is None else (mean.index_select(0, rows), count.index_select(0, rows))
    steps = steps + 1
    share = computed_once(((1 - decay) / (1 - decay ** steps.double()))[:, None].to(old.dtype))
    new = old + share * ((values if rows is None else values.index_select(0, rows)) - old)
    for whole, part in ((mean, new), (count, steps)):
        whole.copy_(part) if rows is None else whole.index_copy_(0, rows, part)


def computed_once(values: Tensor) -> Tensor:
    """Return few values by way of a reduction that changes nothing.

    A compiler keeps the result of a reduction; what leads to it without one, it computes again for every weight that it is
    used with. Powers and roots of a step count took three times as long so as the update itself.
    """
    return values[..., None].expand(*values.shape, 16).amax(-1)


@dataclass(frozen=True)
class Block:
    """Parameters of one dtype that share their rows: `flat` is `(rows, columns)`, each parameter a range of columns.

    Weights of 2-D convolutions lie in channels-last order, in which GPUs convolve fastest; it is an order of memory only.
    """

    names: tuple[str, ...]  # registered ones, in column order
    shapes: tuple[torch.Size, ...]  # of each parameter's row
    stacked: bool  # whether a parameter's first axis is the row; if not there is one row, the whole parameter
    members: tuple[int, ...] | None  # which member each row belongs to; None where members share the row
    flat: Tensor

    @property
    def sizes(self) -> list[int]:
        """Number of columns of each parameter."""
        return [prod(shape) for shape in self.shapes]

    @property
    def padding(self) -> int:
        """Number of columns at the end that belong to no parameter."""
        return -sum(self.sizes) % ALIGNMENT

    @property
    def owners(self) -> slice:
        """The members that rows belong to: all, or one whose parameters are a block of their own."""
        if self.stacked:
            return slice(None)
        assert self.members is not None
        return slice(self.members[0], self.members[0] + 1)

    def rows_of(self, members: Collection[int]) -> list[int]:
        """Return the rows of these members, by their places in the ensemble."""
        return [row for row, member in enumerate(self.members or ()) if member in members]

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters as views of `flat`, which may hold fewer rows than the block."""
        # One split: its backward is a single concatenation, the gradient of the whole row.
        parts = torch.split(flat, [*self.sizes, self.padding], dim=1)
        lead = (len(flat),) if self.stacked else ()
        return {
            name: _shaped(part, lead, shape) for name, shape, part in zip(self.names, self.shapes, parts, strict=False)
        }


def _shaped(part: Tensor, lead: tuple[int, ...], shape: torch.Size) -> Tensor:
    """Return one parameter's columns in its own shape."""
    if len(shape) != 4:
        return part.reshape((*lead, *shape))
    out, channels, height, width = shape
    return part.reshape(*lead, out, height, width, channels).movedim(-1, -3)


Slots = Mapping[str, Tensor]


@dataclass(frozen=True)
class Given:
    """What a step gives a rule for each row that it updates: `(rows, columns)`, or `(rows, 1)`."""

    gradient: Tensor
    count: Tensor  # number of the step, from 1
    lr: Tensor
    decay: Tensor | None


@dataclass(frozen=True)
class Rule(ABC):
    """An elementwise update, the same arithmetic as torch's optimizer of that name, on `(rows, columns)`."""

    slots: ClassVar[tuple[str, ...]]
    default_decay: ClassVar[float] = 0.0

    @abstractmethod
    def update(self, values: Tensor, slots: Slots, given: Given) -> None:
        """Change values and slots, `(rows, columns)`, in place."""

    def update_rows(self, values: Tensor, slots: Slots, rows: Tensor, given: Given) -> None:
        """Change some rows of values and slots, all different, in place; what is given is for these rows."""
        new = values.index_select(0, rows)
        new_slots = {name: slot.index_select(0, rows) for name, slot in slots.items()}
        self.update(new, new_slots, given)
        values.index_copy_(0, rows, new)
        for name, slot in slots.items():
            slot.index_copy_(0, rows, new_slots[name])


@dataclass(frozen=True)
class SGD(Rule):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        for name in ("momentum", "dampening"):
            object.__setattr__(self, name, real_number(name, getattr(self, name)))
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"`nesterov` must be True or False; got {self.nesterov!r}.")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"`nesterov` needs a momentum above 0 and no dampening; got momentum={self.momentum:g} and dampening="
                f"{self.dampening:g}. Set `momentum` in `optimizer_options` too, or leave `nesterov` out."
            )

    def update(self, values: Tensor, slots: Slots, given: Given) -> None:
        """Take one step."""
        gradient = given.gradient
        if given.decay is not None:
            gradient = gradient + given.decay.to(values.dtype) * values
        if self.momentum:
            buffer = slots["momentum"]
            fresh = gradient
            if self.dampening:
                fresh = torch.where(given.count == 1, gradient, gradient * (1 - self.dampening))
            buffer.mul_(self.momentum).add_(fresh)
            gradient = gradient + self.momentum * buffer if self.nesterov else buffer
        values.addcmul_(gradient, -given.lr.to(values.dtype))


@dataclass(frozen=True)
class Adam(Rule):
    """Adam with L2 decay added to the gradient, as `torch.optim.Adam`."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    slots: ClassVar[tuple[str, ...]] = ("first", "second")
    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ValueError(f"`betas` must be two numbers, such as (0.9, 0.999); got {self.betas!r}.")
        betas = tuple(real_number(f"betas[{place}]", beta, below=1.0) for place, beta in enumerate(self.betas))
        object.__setattr__(self, "betas", betas)
        object.__setattr__(self, "eps", real_number("eps", self.eps))

    def update(self, values: Tensor, slots: Slots, given: Given) -> None:
        """Take one step."""
        kept, decay, rate, floor = self._factors(given, values.dtype)
        gradient = given.gradient if decay is None else given.gradient + decay * values
        if kept is not None:
            values.mul_(kept)
        first, second = slots["first"], slots["second"]
        first.lerp_(gradient, 1 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        scaled = first / second.sqrt().add_(floor)
        values.addcmul_(scaled, rate)

    def update_rows(self, values: Tensor, slots: Slots, rows: Tensor, given: Given) -> None:
        """Take one step on some rows, where a kernel can without a copy of them."""
        if not runs_as_kernel(values) or given.lr.shape[1] > 1:
            super().update_rows(values, slots, rows, given)
            return
        factors = self._factors(given, values.dtype)
        update_by_adam(values, slots["first"], slots["second"], [given.gradient], rows, *factors, *self.betas)

    def _factors(self, given: Given, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
        """Return the factor on the values, the share of them in the gradient, the rate, and what is added to the root."""
        # In float64 the corrections, close to 1, stay exact where count is large.
        lr, decay, exact = given.lr, given.decay, given.count.double()
        # torch divides the root by `spread` before it adds eps; multiplied out, that takes fewer passes over the rows.
        spread = (1 - self.betas[1] ** exact).sqrt()
        numbers = [-lr * spread / (1 - self.betas[0] ** exact), spread * self.eps]
        if decay is not None and self.decoupled:
            rate, floor, kept = _once_a_row([*numbers, 1 - lr * decay], dtype)
            return kept, None, rate, floor
        rate, floor = _once_a_row(numbers, dtype)
        return None, None if decay is None else decay.to(dtype), rate, floor


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled decay, as `torch.optim.AdamW`."""

    decoupled: ClassVar[bool] = True
    default_decay: ClassVar[float] = 1e-2


def _once_a_row(numbers: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the numbers, each `(rows, 1)` or `(rows, columns)`, in the precision of the values they act on."""
    cast = [number.to(dtype) for number in numbers]
    return [computed_once(number) if number.shape[1] == 1 else number for number in cast]


class RowOptimizer:
    """A rule for every block. Its tensors (slots, counts, rates) are handed in, so that a step is a function of them."""

    def __init__(
        self,
        rule: Rule,
        blocks: Sequence[Block],
        lr: Sequence[float],
        decay: Sequence[float],
        columns: Sequence[dict[str, Tensor]] | None = None,
    ) -> None:
        self.rule, self.blocks = rule, blocks
        self.columns = list(columns or [{} for _ in blocks])
        self.decays = any(decay) or any(bool(groups["column_decay"].any()) for groups in self.columns if groups)
        self.slots = () if isinstance(rule, SGD) and not rule.momentum else rule.slots
        self.tensors = [
            {
                **{slot: torch.zeros_like(block.flat) for slot in self.slots},
                "count": torch.zeros(len(block.flat), dtype=torch.int64, device=block.flat.device),
                "lr": _rows(lr, block),
                "decay": _rows(decay, block),
            }
            for block in blocks
        ]

    def update(self, state: TrainState, index: int, gradient: Tensor, factor: Tensor, rows: Tensor | None) -> None:
        """Take one step on block `index`, in place; `rows` says to which of its rows `gradient` belongs, None: to all."""
        values, tensors, columns = state.parameters[index], state.optimizer[index], state.columns[index]
        slots = {slot: tensors[slot] for slot in self.slots}
        count, lr, decay = (tensors[name] for name in ("count", "lr", "decay"))
        if rows is None:
            count.add_(1)
        else:
            # Rows differ from each other. Adding at an index, which allows for repeats, takes ten kernels on a GPU.
            now = count.index_select(0, rows) + 1
            count.index_copy_(0, rows, now)
            count, lr, decay = now, lr.index_select(0, rows), decay.index_select(0, rows)
        rates = (lr * factor)[:, None]
        decays = decay[:, None] if self.decays else None
        if columns:
            rates, decays = rates * columns["column_lr"], columns["column_decay"]
        given = Given(gradient, count[:, None], rates, decays)
        if rows is None:
            self.rule.update(values, slots, given)
        else:
            self.rule.update_rows(values, slots, rows, given)


def _rows(values: Sequence[float], block: Block) -> Tensor:
    chosen = [values[0]] if block.members is None else [values[member] for member in block.members]
    return torch.tensor(chosen, dtype=torch.float64, device=block.flat.device)
