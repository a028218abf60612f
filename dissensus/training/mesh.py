"""Training on several processes of a `torchrun`: a mesh of members x data.

The rule, for every objective that sees outputs only: each process runs its own members on its own part of the batch; the outputs, without
their graph, are gathered; every process judges all of them and takes its part of the outputs' gradient; gradients of parameters are
summed over the data axis. A process trains its members and no others. Before a check, and at the end, the processes hand each other the
weights they trained, so that all decide alike. Into a checkpoint each writes its own members, as a block of their rows.
"""

import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dissensus._signatures import refuse
from dissensus.objectives import Objective, Step
from dissensus.objectives.objective import OutputObjective
from dissensus.randomness import fold
from dissensus.training.state import TrainState
from dissensus.training.step import Begun, Gradients, TrainStep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dissensus.members import Members

log = logging.getLogger("dissensus")


@dataclass(frozen=True)
class Mesh:
    """This process's place among those that train together: members are spread over `members` processes, each batch over `data`."""

    members: int
    data: int

    @cached_property
    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return init_device_mesh(kind, (self.members, self.data), mesh_dim_names=("members", "data"))

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return dist.get_rank() == 0

    @property
    def member_rank(self) -> int:
        """Which part of the members is this process's."""
        return int(self._mesh.get_local_rank("members"))

    @property
    def data_rank(self) -> int:
        """Which part of a batch is this process's."""
        return int(self._mesh.get_local_rank("data"))

    def rows(self, count: int, rank: int | None = None) -> slice:
        """Return the members of a process along the members axis: even parts, the first ones one larger where they do not divide."""
        rank = self.member_rank if rank is None else rank
        each, more = divmod(count, self.members)
        start = rank * each + min(rank, more)
        return slice(start, start + each + (rank < more))

    def part(self, size: int, rank: int | None = None) -> slice:
        """Return a process's part of a batch."""
        rank, each = self.data_rank if rank is None else rank, -(-size // self.data)
        return slice(min(size, rank * each), min(size, (rank + 1) * each))

    def joined(self, own: Tensor, axis: int, along: str, places: list[slice]) -> Tensor:
        """Return the whole, of which each process along "members" or "data" has one of these places on an axis."""
        if len(places) == 1:
            return own
        lengths = [place.stop - place.start for place in places]
        # What is gathered must be of one size.
        missing = own.new_zeros([*own.shape[:axis], max(lengths) - own.shape[axis], *own.shape[axis + 1 :]])
        filled = torch.cat([own, missing], dim=axis)
        parts = [torch.empty_like(filled) for _ in places]
        dist.all_gather(parts, filled, group=self.group(along))
        return torch.cat([part.narrow(axis, 0, length) for part, length in zip(parts, lengths, strict=True)], dim=axis)

    def sum_over_data(self, gradient: Tensor) -> Tensor:
        """Return the sum of a gradient over the parts of the batch."""
        if self.data > 1:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=self.group("data"))
        return gradient

    def share(self, tensors: Mapping[str, Tensor], members: "Members") -> None:
        """Give every process all members' rows of what a state holds, in place."""
        group = self.group("members")
        for name, tensor in tensors.items():
            for rank in range(self.members if _by_member(name, tensor, members) else 0):
                rows = self.rows(members.num_trained, rank)
                part = tensor[rows].contiguous()
                dist.broadcast(part, src=dist.get_global_rank(group, rank), group=group)
                tensor[rows] = part

    def block(self, tensors: Mapping[str, Tensor], members: "Members") -> dict[str, Tensor]:
        """Return this process's part of a checkpoint: its members' rows, and in the first part what belongs to all."""
        rows = self.rows(members.num_trained)
        found = {}
        for name, tensor in tensors.items():
            if name.startswith("separate."):  # an optimizer's own state, by member
                if rows.start <= int(name.split(".")[1]) < rows.stop:
                    found[name] = tensor
            elif _by_member(name.removeprefix("good."), tensor, members):
                found[name] = tensor[rows]
            elif self.member_rank == 0:
                found[name] = tensor
        return found

    def collect(self, digest: str) -> list[str]:
        """Return the digests of all processes along members, once all have one."""
        digests = [digest] * self.members
        dist.all_gather_object(digests, digest, group=self.group("members"))
        return digests

    def wait(self) -> None:
        """Wait until all processes are here."""
        dist.barrier()

    def group(self, axis: str) -> Any:
        """Return the processes along an axis, "members" or "data", that this one works with."""
        return self._mesh.get_group(axis)


@dataclass(frozen=True)
class OtherProcesses:
    """The members that other processes run, of which an objective needs no more than means."""

    count: int
    rows: slice
    group: Any

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over processes; each takes the gradient of its own part."""
        return _Total.apply(values, self.group)  # type: ignore[no-untyped-call]

    def maximum(self, values: Tensor) -> Tensor:
        """Return the largest over processes."""
        values = values.contiguous()
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values


class _Total(torch.autograd.Function):
    # torch's own would sum the gradients, which are the same everywhere: every process computes the whole loss.
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _by_member(name: str, tensor: Tensor, members: "Members") -> bool:
    """Whether the first axis of what a state holds under this name is the member."""
    return tensor.ndim > 0 and name.removeprefix("buffers.") not in members.shared_buffers


def mesh_of(shape: tuple[int, int] | None) -> Mesh | None:
    """Return the mesh that was asked for, None if there was none, or say why it cannot be."""
    if shape is None:
        return None
    if len(tuple(shape)) != 2 or any(not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"`mesh` must be (members, data), two numbers of processes; got {shape!r}.")
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("`mesh` needs a process group: `torchrun`, and torch.distributed.init_process_group() first.")
    members, data = shape
    if members * data != dist.get_world_size():
        raise ValueError(f"`mesh` ({members}, {data}) takes {members * data} processes; got {dist.get_world_size()}.")
    return Mesh(members, data)


def check_mesh(mesh: Mesh, members: "Members", objective: Objective, picks: bool) -> None:
    """Refuse what cannot be trained in parts."""
    kind, name = type(members).__name__, type(objective).__name__
    apart = members.loss_over_members == "sum" and members.stacked
    on_outputs = isinstance(objective, OutputObjective) and objective.outputs_only
    norms = [m for m in members.parts() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    cuts_norms = mesh.data > 1 and not all(isinstance(norm, nn.SyncBatchNorm) for norm in norms)
    reasons = {
        f"`mesh` trains members of one architecture that own their parameters; this is {kind}.": not apart,
        f"`mesh` takes objectives that see the members' outputs only; {name} needs more.": not on_outputs,
        f"{members.num_trained} members cannot be spread over {mesh.members} processes. Use fewer, or cut batches instead: "
        f"mesh=(1, {mesh.members}).": members.num_trained < mesh.members,
        f"{name} draws members anew each step: use mesh=(1, {mesh.members * mesh.data}).": picks and mesh.members > 1,
        f"BatchNorm sees the whole batch, and mesh=(…, {mesh.data}) cuts it. Use SyncBatchNorm or GroupNorm.": cuts_norms,
    }
    refuse(reasons)


@dataclass
class MeshStep(TrainStep):
    """A step of which this process takes its part: its members, on its part of the batch, beside the outputs of all others."""

    def __post_init__(self) -> None:
        assert self.settings.mesh is not None
        self.mesh, needs = self.settings.mesh, getattr(self.objective, "needs", "outputs")
        beside = self.mesh.group("data")  # made now, not in the middle of tracing
        for norm in _own_norms(self.members):
            norm.process_group = beside
        # Whether every process judges the outputs of all members, and whether it takes means over those of other processes.
        self.compares = self.mesh.members > 1 and needs == "outputs"
        self.asks_others = self.mesh.members > 1 and needs == "means"
        self.batch_is_cut = self.mesh.data > 1

    def begin(self, state: TrainState, size: int) -> Begun:
        """Return the step with this process's part of the inputs, all targets, and the members that this process trains."""
        begun = super().begin(state, size)
        mine, part = self.mesh.rows(self.members.num_trained), self.mesh.part(size)
        if begun.rows is None:  # drawn ones are not spread along members, which would have to be done anew each step
            begun.rows = torch.arange(mine.start, mine.stop, device=state.index.device)
        begun.x = begun.x[begun.rows][:, part] if begun.step.own else begun.x[part]
        return begun

    def _pass_keys(self, step: Step, rows: Tensor | None) -> Tensor:
        """Rows of another part of the batch draw other noise."""
        keys = super()._pass_keys(step, rows)
        return fold(keys, self.mesh.data_rank) if self.batch_is_cut else keys

    def exchange(self, outputs: Tensor, size: int) -> Tensor:
        """Return the outputs that this process judges, for the whole batch."""
        mesh, count = self.mesh, self.members.num_trained
        judged = mesh.joined(outputs.detach(), 1, "data", [mesh.part(size, rank) for rank in range(mesh.data)])
        if not self.compares:
            return judged
        return mesh.joined(judged, 0, "members", [mesh.rows(count, rank) for rank in range(mesh.members)])

    def judge(self, begun: Begun, outputs: Tensor) -> Tensor:
        """Log the parts of the objective on exchanged outputs; return its gradient with respect to this process's own."""
        step, y = begun.step, begun.y
        mine, part = self.mesh.rows(self.members.num_trained), self.mesh.part(y.shape[step.own])
        if self.mesh.members > 1 and not self.compares:
            step = replace(step, others=OtherProcesses(self.members.num_trained, mine, self.mesh.group("members")))
            if step.own:
                y, step.weights = y[mine], None if step.weights is None else step.weights[mine]
        rows = None if self.compares else begun.rows
        gradient = super().judge(replace(begun, step=step, y=y, rows=rows), outputs)
        return gradient[mine, part] if self.compares else gradient[:, part]

    def _gradients(self, begun: Begun) -> tuple[Gradients, Mapping[str, Tensor]]:
        """Return the gradients of the objective on the whole batch; its parts are logged already."""
        outputs = self.outputs(begun)
        gradient = self.judge(begun, self.exchange(outputs, begun.y.shape[begun.step.own]))
        return list(map(self.mesh.sum_over_data, self.backward(outputs, begun.leaves, gradient))), {}

    def backward(self, outputs: Tensor, leaves: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the leaves, for this part of the batch, from that of the outputs."""
        return torch.autograd.grad(outputs, leaves, gradient, materialize_grads=True)


def _own_norms(members: "Members") -> list[nn.SyncBatchNorm]:
    """Return the layers that normalise over processes and were not told over which."""
    return [m for m in members.parts() if isinstance(m, nn.SyncBatchNorm) and m.process_group is None]


@contextmanager
def training_on(mesh: Mesh, members: "Members") -> "Iterator[None]":
    """Train as one of a mesh's processes: the first one speaks, and one that is lost is named by the others."""
    norms, first, over = _own_norms(members), mesh.first, Event()

    def speaks(record: logging.LogRecord) -> bool:
        return first

    log.addFilter(speaks)
    Thread(target=_answer, args=(_store(), dist.get_rank(), over), daemon=True).start()
    try:
        yield
    except RuntimeError as failure:
        text = str(failure)
        if "gloo" not in text.lower() and "nccl" not in text.lower() and "onnection" not in text:
            raise
        raise RuntimeError(f"{_lost()} no longer answers; what was written stays. Go on with resume=True.") from failure
    finally:
        over.set()
        log.removeFilter(speaks)
        for norm in norms:
            norm.process_group = None


def _lost() -> str:
    """Ask in the store that all processes share; those that do not answer are gone."""
    store = _store()
    missing, end = set(range(dist.get_world_size())), time.monotonic() + 10
    try:
        store.set("dissensus/who", "")
        while len(missing) > 1 and time.monotonic() < end:
            time.sleep(0.1)
            missing = {rank for rank in missing if not store.check([f"dissensus/here/{rank}"])}
    except RuntimeError:
        missing = {0}  # it keeps the store where torchrun does not
    return f"Process {' and '.join(map(str, sorted(missing)))}" if missing else "Some process"


def _answer(store: Any, rank: int, over: Event) -> None:
    """Answer, in a thread, who asks in the store: this process may wait in a collective operation meanwhile."""
    with suppress(RuntimeError):
        while not over.wait(0.5):
            if store.check(["dissensus/who"]):
                store.set(f"dissensus/here/{rank}", "")
                return


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


# How long a process waits for the others before it gives up.
PATIENCE = timedelta(seconds=60)


@contextmanager
def together(mesh: str | None) -> "Iterator[tuple[int, int] | None]":
    """Join the processes that `torchrun` started, if it did; gives the mesh, `MxD` or all of them along members."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if mesh is None and size == 1:
        yield None
        return
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", (mesh or f"{size}x1").lower())
    if found is None:
        raise ValueError(f"--mesh must be like 2x1, processes along members and along data; got {mesh!r}.")
    if size == 1 and "MASTER_ADDR" not in os.environ:
        raise ValueError("--mesh needs several processes: torchrun --nproc-per-node N -m dissensus train RECIPE.toml")
    if torch.cuda.is_available():
        here, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if here >= gpus:
            raise ValueError(f"Each process needs a GPU, and this machine has {gpus}: torchrun --nproc-per-node {gpus}")
        torch.cuda.set_device(here)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    try:
        yield int(found[1]), int(found[2])
    finally:
        dist.destroy_process_group()
