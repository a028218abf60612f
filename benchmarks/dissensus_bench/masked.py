"""One network with masks beside what it is made of: the plain network's step, and its members' forward passes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dissensus as ds
from dissensus_bench.problems import Problem
from dissensus_bench.rivals import Turn, plain_loop
from dissensus_bench.timing import Stopwatch, time_fit

ENSEMBLE, MEMBERS = "ds.predict", "forward passes of the trimmed members"
SPLIT, PLAIN, LOOP = "masked network, split batches", "plain network", "plain network, eager loop"


def masked_training(what: str, problem: Problem, members: int, engine: str, repeats: int) -> dict[str, Any]:
    """Time a training step of a masked network beside that of the plain one.

    Args:
        what: The job in words.
        problem: The plain network's training; one member.
        members: Masks.
        engine: Engine of `ds.fit`, for both.
        repeats: Epochs that count.

    Returns:
        A result as in `dissensus_bench.cases`. At a ratio of 1 a masked network's step costs what the plain one's does.
    """
    loops = []
    sides: dict[str, dict[str, Any]] = {}
    for name in (SPLIT, PLAIN):
        ensemble = ds.Masksembles(problem.make(), members) if name == SPLIT else None
        watch = Stopwatch({LOOP: plain_loop(problem)}, problem.device)
        sides[name] = time_fit(problem, engine, watch, repeats=repeats, members=ensemble)
        loops.append(watch.best[LOOP] * 1e3)
    sides[LOOP] = {"ms": loops[0]}
    # Not timed in turns: on a CPU, whose speed changes with its neighbours, the loop beside both is the measure.
    drift = 1.0 if problem.x.is_cuda else loops[0] / loops[1]
    ours = sides[SPLIT]["ms"]
    return {
        "case": "masksembles",
        "what": what,
        "sides": sides,
        "ratios": {
            f"{engine} against {PLAIN}, {engine}": sides[PLAIN]["ms"] * drift / ours,
            f"{engine} against {LOOP}": loops[0] / ours,
        },
        "missing": {},
    }


def masked_inference(
    what: str,
    make: Callable[[], nn.Module],
    members: int,
    shape: tuple[int, ...],
    inputs: int,
    batch: int,
    *,
    device: str,
    repeats: int,
) -> dict[str, Any]:
    """Time predictions of a masked network beside the forward passes of its members as the smaller networks they are.

    Args:
        what: The job in words.
        make: Makes the network.
        members: Masks.
        shape: Shape of one input.
        inputs: How many inputs.
        batch: Inputs at once, on every side.
        device: Where to run; on a GPU all sides run under bf16 autocast.
        repeats: Turns of each side.

    Returns:
        A result as in `dissensus_bench.cases`; `ms` is for all inputs.
    """
    place = torch.device(device)
    layout = torch.channels_last if place.type == "cuda" else torch.preserve_format
    x = torch.randn(inputs, *shape, generator=torch.Generator().manual_seed(0)).to(place)
    x = x.contiguous(memory_format=layout)
    ens = ds.Masksembles(make(), members).to(place).eval()
    nets = [ens.member(index).to(memory_format=layout) for index in range(members)]  # type: ignore[call-overload]
    tiled = ds.Masksembles(make(), members, execution="tiled").to(place).eval()

    def apart() -> None:
        for rows in x.split(batch):
            for net in nets:
                net(rows)

    sides = {
        MEMBERS: apart,
        ENSEMBLE: lambda: _predict(ens, x, batch),
        "rows of one batch": lambda: _predict(tiled, x, batch),
    }
    with torch.no_grad(), torch.autocast(place.type, torch.bfloat16, enabled=place.type == "cuda"):
        watch = Stopwatch({name: Turn(run) for name, run in sides.items()}, place)
        for _ in range(repeats):
            watch.round()
    best = {name: value * 1e3 for name, value in watch.best.items()}
    return {
        "case": "masksembles",
        "what": f"{what}, {inputs} inputs, batch {batch}",
        "sides": {name: {"ms": ms, "inputs_per_s": inputs / ms * 1e3} for name, ms in best.items()},
        "ratios": {f"{ENSEMBLE} against {MEMBERS}": best[MEMBERS] / best[ENSEMBLE]},
        "missing": {},
    }


def _predict(ens: ds.Members, x: torch.Tensor, batch: int) -> None:
    ds.predict(ens, x, batch_size=batch)
