"""What each process of a torchrun does in the tests of meshes: trains, and the first one writes what came out."""

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dissensus as ds
from dissensus import objectives as obj

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


class Gathered(obj.Joint):
    """Joint training by the rule for any objective: every process judges all outputs."""

    needs = "outputs"


OBJECTIVES = {
    "independent": obj.Independent,
    "joint": lambda: obj.Joint(0.5),
    "joint, gathered": lambda: Gathered(0.5),
    "joint, dropped": lambda: obj.Joint(0.5, member_dropout=0.4),
    "joint, dropped examples": lambda: obj.Joint(0.5, member_dropout=0.6, dropout_per="example"),
    "joint, brier": lambda: obj.Joint(1.0, loss="brier", weights=(0.1, 0.2, 0.3, 0.4)),
    "joint, scores": lambda: obj.Joint(0.9, average="scores"),
    "joint, smooth": lambda: obj.Joint(0.7, label_smoothing=0.1),
    "loss-guided": lambda: obj.LossGuided(0.5, active=4),
    "loss-guided, two": lambda: obj.LossGuided(0.5, active=2),
    "adversarial": lambda: obj.Adversarial(obj.Independent(), epsilon=0.1),
}


class Reads(nn.Identity):
    """A layer that looks at values, so that a step cannot be traced."""

    def forward(self, x):
        return x if float(x.detach().sum()) < 1e9 else -x


NORMS = {"none": lambda _: nn.Identity(), "batch": nn.BatchNorm1d, "sync": nn.SyncBatchNorm}
NORMS |= {"sharded": NORMS["none"], "wrapped": NORMS["none"], "reads": lambda _: Reads()}


class Stopped(ValueError):
    """Training that was broken off."""


def train(objective, mesh, *, members=4, norm="none", plateau=False, stop=None, rmsprop=False, **settings):
    """Train four members for 24 steps of AdamW, or break off after so many epochs."""

    def net():
        # A bias before BatchNorm has no gradient of its own, only rounding.
        whole = nn.Sequential(nn.Linear(4, 8, bias=norm == "none"), NORMS[norm](8), nn.ReLU(), nn.Linear(8, 3))
        return SHARDED.get(norm, lambda net: net)(whole)

    ens = ds.DeepEnsemble(net, members, seed=0)
    given = {"epochs": 6, "batch_size": 12, "lr": 1e-2, "engine": "eager", "device": "cpu"} | settings
    if plateau:
        given["schedule"] = ds.schedules.Plateau(patience=1)
    if rmsprop:
        given["optimizer"] = torch.optim.RMSprop
    if stop is not None:

        def callback(run):
            if run.epoch == stop:
                raise Stopped(f"in epoch {stop}")

        given["callback"] = callback
    held_out = (x[:20], y[:20])
    run = ds.fit(ens, (x, y), objective=OBJECTIVES[objective](), mesh=mesh, validation=held_out, **given)
    return ens, run


def sharded(net):
    """Return a network as FSDP keeps it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def wrapped(net):
    """Return a network as the first FSDP wraps it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(net, device_id=torch.device("cpu"))


SHARDED = {"sharded": sharded, "wrapped": wrapped}


def seen_of(ens, run):
    """Return what a test compares."""
    history = {name: run.history[name] for name in run.history.columns if name != "seconds"}
    weights = {name: value.tolist() for name, value in ens.state_dict().items()}
    return {
        "outputs": ds.predict(ens, x).tolist(),
        "weights": weights,
        "history": history,
        "dropped": run.dropped,
        "best_step": run.best_step,
        "engine": run.engine,
    }


SAID = []  # what was logged


class Listener(logging.Handler):
    """Keeps what was logged."""

    def emit(self, record):
        SAID.append(record.getMessage())


class Traffic:
    """Counts the numbers that a process hands to collective operations."""

    names = ("all_gather", "all_reduce")

    def __init__(self):
        self.numbers = dict.fromkeys(self.names, 0)
        for name in self.names:
            setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name, function):
        def counted(*arguments, **options):
            tensor = arguments[0]
            self.numbers[name] += sum(map(torch.numel, tensor)) if isinstance(tensor, list) else tensor.numel()
            return function(*arguments, **options)

        return counted


def part_of_case(objective, mesh, settings, traffic):
    """Train on the mesh; return what came out, or what was said instead."""
    before = dict(traffic.numbers)
    SAID.clear()
    try:
        found = seen_of(*train(objective, tuple(mesh), **settings))
    except ValueError as refusal:
        found = {"refused": str(refusal)}
    everybody = [None] * dist.get_world_size()
    traffic.numbers, spent = before, traffic.numbers
    dist.all_gather_object(everybody, json.dumps(found))
    found["alike"] = len(set(everybody)) == 1
    found["said"] = list(SAID)
    found["numbers"] = {name: spent[name] - before[name] for name in spent}
    return found


def lose_one():
    """Train, and have the last process gone in the middle of it; return what the others say and after how long."""
    gone = {}

    def callback(run):
        if run.step >= 8 and dist.get_rank() == dist.get_world_size() - 1:
            os._exit(0)
        gone.setdefault(run.step, time.monotonic())

    try:
        train("joint", (dist.get_world_size(), 1), callback=callback, epochs=50)
    except RuntimeError as failure:
        return {"said": str(failure), "seconds": time.monotonic() - max(gone.values())}
    return {}


def groups(backend):
    """Yield after joining a group of two processes, of those that torchrun started, and then of all: starting them takes longest."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world)
    for size in sorted({min(2, world), world}):
        if rank < size:
            own = dist.PrefixStore(str(size), store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=size)
            yield
            if size < world:
                dist.destroy_process_group()


def main():
    """Run the cases that were asked for; four processes then lose one."""
    torch.set_num_threads(1)
    cases, folder, backend = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    traffic, found = Traffic(), {}
    for _ in groups(backend):
        for name, objective, mesh, settings in cases:
            if dist.get_world_size() == mesh[0] * mesh[1]:
                found[name] = part_of_case(objective, mesh, settings, traffic)
    rank, found["lost"] = dist.get_rank(), lose_one() if dist.get_world_size() == 4 else {}
    (folder / f"{rank}.json").write_text(json.dumps(found if rank == 0 else found["lost"]))
    # Without a farewell, which would wait for the process that is gone.
    os._exit(0)


if __name__ == "__main__":
    logging.getLogger("dissensus").setLevel(logging.INFO)
    logging.getLogger("dissensus").addHandler(Listener())
    main()
