"""One training step as a function of a dictionary of tensors, so that it can run as it is, traced, compiled or captured."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.data.augment import Augmentation
from dissensus.members import Members, View
from dissensus.objectives import Objective, Step
from dissensus.objectives.objective import OutputObjective
from dissensus.randomness import derive
from dissensus.training.feeds import Feed, stream_batch
from dissensus.training.optimizers import AnyOptimizer
from dissensus.training.packing import Block, aligned_rows, computed_once

State = dict[str, Tensor]


@dataclass
class TrainStep:
    """Everything about a step that does not change: `step(state, size)` changes the state in place.

    The state holds the flat parameters (`flat.*`), buffers (`buffer.*`), frozen parameters (`frozen.*`), the optimizer's
    tensors (`optimizer.*`), the data, the step's number (`index`) and place in the epoch (`position`), and sums of the
    logged parts since the last check (`sum.*`, `seen.*`).
    """

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
    bf16: bool = False

    def initial_state(self, factors: Tensor, streams: Mapping[str, Tensor]) -> State:
        """Return the state before the first step."""
        device = self.blocks[0].flat.device
        trained = {name for block in self.blocks for name in block.names}
        state: State = {f"flat.{index}": block.flat for index, block in enumerate(self.blocks)}
        state |= {f"buffer.{name}": buffer for name, buffer in self.members.named_buffers()}
        state |= {f"frozen.{n}": p.detach() for n, p in self.members.named_parameters() if n not in trained}
        state |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.tensors.items()}
        state |= {f"stream.{name}": tensor for name, tensor in streams.items()}
        state |= self.feed.tensors
        state["factors"] = factors.to(device)
        state["plateau"] = torch.ones((), dtype=torch.float64, device=device)
        state["index"] = torch.zeros((), dtype=torch.int64, device=device)
        state["position"] = torch.zeros((), dtype=torch.int64, device=device)
        keys = [derive(self.seed, "noise", member) for member in self.members.member_ids]
        state["noise_keys"] = aligned_rows(torch.tensor(keys, device=device))
        state["shared_key"] = torch.tensor(derive(self.seed, "shared noise"), device=device)
        return state

    def __call__(self, state: State, size: int, *, advance: bool = True) -> None:
        """Take one step on a batch of `size` examples; without `advance` the step's number stays as it is."""
        step, x, y, rows = self._begin(state, size)
        leaves = self._leaves(state, rows)
        view = self._view(state, leaves, rows, step)
        with self._precision(x.device):
            loss, parts = self.objective(view, x, y, step)
            if not self.members.owns_parameters:
                # Members that share parameters are one network's views: their mean trains it as that network alone.
                loss = loss / view.num_members
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        with torch.no_grad():
            if rows is not None:
                self.members.put_rows(_with_prefix(state, "buffer."), rows, view.buffers)
            self._descend(state, gradients, rows)
            self._log(state, parts, rows)
            if advance:
                state["index"].add_(1)
                state["position"].add_(1)

    def run_forward(self, state: State, size: int) -> tuple[Tensor, list[Tensor]]:
        """Return the members' outputs for the step's batch, with their graph, and the leaves they depend on.

        This, `judge` and `run_backward` are the step of an objective on outputs in three parts, so that members can run as
        programs of their own around the part in which they are compared.
        """
        step, x, _, rows = self._begin(state, size)
        leaves = self._leaves(state, rows)
        view = self._view(state, leaves, rows, step)
        with self._precision(x.device):
            return (view.each(x) if step.own else view(x)), leaves

    def judge(self, state: State, size: int, outputs: Tensor) -> Tensor:
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

    def run_backward(
        self, state: State, outputs: Tensor, leaves: list[Tensor], output_gradient: Tensor
    ) -> None:
        """Descend along the gradient that the outputs' gradient gives."""
        gradients = torch.autograd.grad(outputs, leaves, output_gradient, allow_unused=True)
        with torch.no_grad():
            self._descend(state, gradients, None)

    def _begin(self, state: State, size: int) -> tuple[Step, Tensor, Tensor, Tensor | None]:
        """Return the step, its batch, and the members it trains."""
        step = self._step(state, size)
        x, y = self.feed.batch(state, size)
        if self.augment is not None:
            x, y = self.augment(x, y, step.noise(shared=not self.feed.own))
        rows = self.objective.pick(step, self.members.num_trained)
        return step, x, y, None if rows is None else computed_once(rows)

    def _leaves(self, state: State, rows: Tensor | None) -> list[Tensor]:
        return [_leaf(state[f"flat.{index}"], block, rows) for index, block in enumerate(self.blocks)]

    def picks(self, state: State) -> bool:
        """Whether the objective trains only some members a step."""
        return self._picked(state) is not None

    def picks_few(self, state: State) -> bool:
        """Whether these are at most a tenth of all."""
        rows = self._picked(state)
        return rows is not None and 10 * len(rows) <= self.members.num_trained

    def _picked(self, state: State) -> Tensor | None:
        step = Step(state["index"], self.total_steps, self.feed.own, state["noise_keys"], state["shared_key"])
        return self.objective.pick(step, self.members.num_trained)

    def _step(self, state: State, size: int) -> Step:
        step = Step(state["index"], self.total_steps, self.feed.own, state["noise_keys"], state["shared_key"])
        streams = _with_prefix(state, "stream.")
        # Streams with one name before a dot, such as inputs and their targets, are drawn row by row together.
        sources = dict.fromkeys(name.partition(".")[0] for name in streams)
        keys = {source: step.noise(shared=not self.feed.own).keys for source in sources}
        step.streams = {
            name: stream_batch(values, keys[name.partition(".")[0]], size) for name, values in streams.items()
        }
        return step

    def _view(self, state: State, leaves: list[Tensor], rows: Tensor | None, step: Step) -> View:
        parameters = dict(_with_prefix(state, "frozen."))
        buffers = _with_prefix(state, "buffer.")
        if rows is not None:
            parameters = self.members.rows_of(parameters, rows)
            buffers = self.members.rows_of(buffers, rows)
        for block, leaf in zip(self.blocks, leaves, strict=True):
            parameters.update(block.unpack(leaf))
        return View(
            self.members,
            parameters,
            buffers,
            keys=lambda: step.pass_keys(rows),
            rows=rows,
            together=self.objective.couples,
            whole=None if rows is None else lambda: self._whole(state, step),
        )

    def _whole(self, state: State, step: Step) -> View:
        """Return all members as they are before the step, without gradients."""
        leaves = [state[f"flat.{index}"] for index in range(len(self.blocks))]
        return self._view(state, leaves, None, step)

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        # The cache of cast weights would outlive a captured step.
        return (
            torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if self.bf16 else nullcontext()
        )

    def _descend(self, state: State, gradients: tuple[Tensor | None, ...], rows: Tensor | None) -> None:
        gradients = self._clipped(gradients, rows)
        factor = state["factors"].index_select(0, state["index"].reshape(1)) * state["plateau"]
        tensors = _with_prefix(state, "optimizer.")
        for index, (block, gradient) in enumerate(zip(self.blocks, gradients, strict=True)):
            block_rows = rows if block.stacked else None
            if gradient is None:
                if block.members is not None and not block.stacked:
                    continue
                # As for a parameter without a gradient beside others in a row: decay and momentum go on.
                count = len(block.flat) if block_rows is None else len(block_rows)
                gradient = block.flat.new_zeros(()).expand(count, block.flat.shape[1])
            if (
                not block.stacked
                and rows is not None
                and block.members is not None
                and block.members[0] not in rows.tolist()
            ):
                continue
            self.optimizer.update(tensors, index, state[f"flat.{index}"], gradient, factor, block_rows)

    def _clipped(
        self, gradients: tuple[Tensor | None, ...], rows: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Scale each member's gradient down to the largest norm allowed; members are clipped on their own."""
        if self.clip_norm is None:
            return gradients
        count = self.members.num_trained if rows is None or not self.blocks[0].stacked else len(rows)
        squares = torch.zeros(count, dtype=torch.float32, device=self.blocks[0].flat.device)
        places = []
        for block, gradient in zip(self.blocks, gradients, strict=True):
            assert block.members is not None
            place = (
                torch.arange(count, device=squares.device)
                if block.stacked
                else torch.tensor(block.members, device=squares.device)
            )
            places.append(place)
            if gradient is not None:
                squares = squares.index_add(0, place, gradient.float().square().sum(1))
        scale = (self.clip_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        return tuple(
            None if gradient is None else gradient * scale[place][:, None].to(gradient.dtype)
            for gradient, place in zip(gradients, places, strict=True)
        )

    def _log(self, state: State, parts: Mapping[str, Tensor], rows: Tensor | None) -> None:
        for name, value in parts.items():
            value = value.detach().float()
            count = (self.members.num_trained,) if value.ndim and rows is not None else value.shape
            for kind in ("sum", "seen"):
                if f"{kind}.{name}" not in state:
                    state[f"{kind}.{name}"] = torch.zeros(count, dtype=torch.float32, device=value.device)
            total, seen = state[f"sum.{name}"], state[f"seen.{name}"]
            if value.ndim and rows is not None:
                total.index_add_(0, rows, value)
                seen.index_add_(0, rows, torch.ones_like(value))
            else:
                total.add_(value)
                seen.add_(1.0)


def _leaf(flat: Tensor, block: Block, rows: Tensor | None) -> Tensor:
    chosen = flat if rows is None or not block.stacked else flat.index_select(0, rows)
    return chosen.detach().requires_grad_()


def _with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
