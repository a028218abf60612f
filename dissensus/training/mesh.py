"""Training on several processes of a `torchrun`: a mesh of members x data.

The rule, for every objective that sees outputs only: each process runs its own members on its own part of the batch; the outputs, without
their graph, are gathered; every process judges all of them and takes its part of the outputs' gradient; gradients of parameters are
summed over the data axis. A process trains its members and no others. Before anybody looks at the state (checks, checkpoints, the end) the
processes hand each other what they trained, so that all decide alike, and a checkpoint is that of a run in one process.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dissensus.objectives import Objective
from dissensus.objectives.objective import OutputObjective
from dissensus.training.engines import Engine
from dissensus.training.state import TrainState
from dissensus.training.step import TrainStep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dissensus.members import Members


@dataclass(frozen=True)
class Mesh:
    """This process's place among those that train together.

    Attributes:
        members: Along how many processes the members are spread.
        data: Along how many each batch is.
    """

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

    def rows(self, count: int, rank: int | None = None) -> range:
        """Return the members of a process along the members axis: even parts, the first ones one larger where they do not divide."""
        rank = self.member_rank if rank is None else rank
        each, more = divmod(count, self.members)
        start = rank * each + min(rank, more)
        return range(start, start + each + (rank < more))

    def part(self, size: int) -> slice:
        """Return this process's part of a batch."""
        each = -(-size // self.data)
        return slice(min(size, self.data_rank * each), min(size, (self.data_rank + 1) * each))

    def gather(self, outputs: Tensor, count: int, size: int) -> Tensor:
        """Return the outputs of all members for the whole batch, `(members, batch, ...)`, without their graph."""
        rows, columns = -(-count // self.members), -(-size // self.data)
        mine = outputs.detach().new_zeros(rows, columns, *outputs.shape[2:])
        mine[: outputs.shape[0], : outputs.shape[1]] = outputs.detach()
        along = _all_gather(mine, self._group("data"), self.data)
        wide = torch.cat(list(along), dim=1)[:, :size].contiguous()
        parts = _all_gather(wide, self._group("members"), self.members)
        return torch.cat([parts[rank, : len(self.rows(count, rank))] for rank in range(self.members)])

    def sum_over_data(self, gradient: Tensor) -> Tensor:
        """Return the sum of a gradient over the parts of the batch."""
        if self.data > 1:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=self._group("data"))
        return gradient

    def share(self, tensor: Tensor, count: int) -> None:
        """Give every process all members' rows of a tensor, in place."""
        group = self._group("members")
        for rank in range(self.members):
            rows = self.rows(count, rank)
            part = tensor[rows.start : rows.stop].contiguous()
            dist.broadcast(part, src=dist.get_global_rank(group, rank), group=group)
            tensor[rows.start : rows.stop] = part

    def wait(self) -> None:
        """Wait until all processes are here."""
        dist.barrier()

    def _group(self, axis: str) -> Any:
        return self._mesh.get_group(axis)


def _all_gather(tensor: Tensor, group: Any, size: int) -> Tensor:
    gathered = tensor.new_empty(size, *tensor.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), tensor, group=group)
    return gathered


def mesh_of(shape: tuple[int, int] | None) -> Mesh | None:
    """Return the mesh that was asked for, or say why there is none; a mesh of one process is none."""
    if shape is None:
        return None
    if len(tuple(shape)) != 2 or any(not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"`mesh` must be (members, data), two numbers of processes; got {shape!r}.")
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "`mesh` needs a process group. Start with `torchrun --nproc-per-node N` and call torch.distributed.init_process_group() first."
        )
    members, data = shape
    if members * data != dist.get_world_size():
        raise ValueError(
            f"`mesh` ({members}, {data}) takes {members * data} processes; this group has {dist.get_world_size()}."
        )
    return Mesh(members, data)


def check_mesh(mesh: Mesh, members: "Members", objective: Objective, picks: bool) -> None:
    """Refuse what cannot be trained in parts."""
    if members.loss_over_members != "sum" or not members.stacked:
        raise ValueError(
            f"`mesh` trains ensembles whose members own their parameters and have one architecture; this is {type(members).__name__}."
        )
    if not isinstance(objective, OutputObjective) or not objective.outputs_only:
        raise ValueError(
            f"`mesh` takes objectives that see the members' outputs only; {type(objective).__name__} needs more. Train it in one process."
        )
    if members.num_trained < mesh.members:
        raise ValueError(
            f"{members.num_trained} members cannot be spread over {mesh.members} processes. Use fewer, or cut batches instead: "
            f"mesh=(1, {mesh.members})."
        )
    if picks and mesh.members > 1:
        raise ValueError(
            f"{type(objective).__name__} draws members anew each step, so they cannot be spread: use mesh=(1, {mesh.members * mesh.data})."
        )
    norms = [m for m in members.parts() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if mesh.data > 1 and any(not isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        raise ValueError(
            f"BatchNorm sees the whole batch, and mesh=(…, {mesh.data}) cuts it. Spread members only, or use SyncBatchNorm or GroupNorm."
        )


class MeshEngine(Engine):
    """Takes the steps of this process's members on its part of each batch."""

    name = "eager"

    def __init__(self, train_step: TrainStep, mesh: Mesh) -> None:
        self.train_step, self.mesh = train_step, mesh

    def take(self, state: TrainState, size: int, limit: int) -> int:
        """Take one step."""
        with named_failures():
            self.train_step.on_mesh(state, size, self.mesh)
        return 1

    def share(self, state: TrainState) -> None:
        """Give every process what the others trained."""
        members = self.train_step.members
        with named_failures():
            for name, tensor in state.saved(without=("sums", "seen", "index", "plateau")).items():
                if tensor.ndim and name.removeprefix("buffers.") not in members.shared_buffers:
                    self.mesh.share(tensor, members.num_trained)


@contextmanager
def named_failures() -> "Iterator[None]":
    """Say which process no longer answers where a collective operation fails."""
    try:
        yield
    except RuntimeError as failure:
        text = str(failure)
        if "gloo" not in text.lower() and "nccl" not in text.lower() and "onnection" not in text:
            raise
        raise RuntimeError(
            f"{_lost()} no longer answers, so training stops; what was written stays. Start it again with resume=True."
        ) from failure


def _lost() -> str:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=15), wait_all_ranks=True)
    except RuntimeError as found:
        text = str(found)
        if "rank" in text.lower():
            return f"A process of the mesh ({text.splitlines()[0][:160]})"
    return "A process of the mesh"


# How long a process waits for the others before it gives up.
PATIENCE = timedelta(seconds=60)


@contextmanager
def together(mesh: str | None) -> "Iterator[tuple[int, int] | None]":
    """Join the processes that `torchrun` started, if it did; gives the mesh, `MxD` or all of them along members.

    Example:
        >>> with together(None) as mesh:  # not under torchrun
        ...     print(mesh)
        None
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if mesh is None and size == 1:
        yield None
        return
    parts = (mesh or f"{size}x1").lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--mesh must be like 2x1, processes along members and along data; got {mesh!r}.")
    if size == 1 and "MASTER_ADDR" not in os.environ:
        raise ValueError(
            "--mesh needs several processes: torchrun --nproc-per-node N -m dissensus train RECIPE.toml"
        )
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE)
    try:
        yield int(parts[0]), int(parts[1])
    finally:
        dist.destroy_process_group()
