"""Predictions with every score, beside the bare forward passes of the members."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import stack_module_state

import dissensus as ds
from dissensus_bench.peers import join_predictors
from dissensus_bench.rivals import Turn, stacked_forward
from dissensus_bench.timing import Stopwatch

BARE, PREDICT, SCORED = "bare forward passes", "ds.predict", "ds.predict_scores"


def compare_inference(
    what: str,
    members: int,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    inputs: int,
    batch: int,
    *,
    device: str,
    repeats: int,
) -> dict[str, Any]:
    """Time predictions of one ensemble in several ways.

    Args:
        what: The job in words.
        members: Networks.
        make: Makes one of them; its outputs are logits.
        shape: Shape of one input.
        inputs: How many inputs.
        batch: Inputs that go through the members at once, on every side.
        device: Where to run; on a GPU all sides run under bf16 autocast.
        repeats: Turns of each side.

    Returns:
        A result as in `dissensus_bench.cases`; `ms` is for all inputs.
    """
    place = torch.device(device)
    layout = torch.channels_last if len(shape) == 3 and place.type == "cuda" else torch.preserve_format
    x = torch.randn(inputs, *shape, generator=torch.Generator().manual_seed(0)).to(place)
    x = x.contiguous(memory_format=layout)
    ens = ds.DeepEnsemble(make, members).to(place)
    nets = [ens.member(index).to(place, memory_format=layout).eval() for index in range(members)]  # type: ignore[call-overload]
    parameters, buffers = stack_module_state(nets)
    forward = stacked_forward(nets[0], shared_inputs=True)

    def bare() -> None:
        for rows in x.split(batch):
            for net in nets:
                net(rows)

    def stacked() -> None:
        for rows in x.split(batch):
            forward(parameters, buffers, rows)

    def predict() -> None:
        ds.predict(ens, x, batch_size=batch)

    def scored() -> None:
        ds.predict_scores(ens, x, batch_size=batch)

    theirs, missing = join_predictors(nets, x, batch)
    sides = {BARE: bare, "vmap by hand": stacked, PREDICT: predict, SCORED: scored, **theirs}
    turns = {name: Turn(run) for name, run in sides.items()}
    with torch.no_grad(), torch.autocast(place.type, torch.bfloat16, enabled=place.type == "cuda"):
        watch = Stopwatch(turns, place)
        for _ in range(repeats):
            watch.round()
    best = {name: value * 1e3 for name, value in watch.best.items()}
    return {
        "case": "inference",
        "what": f"{what}, {inputs} inputs, batch {batch}",
        "sides": {name: {"ms": ms, "inputs_per_s": inputs / ms * 1e3} for name, ms in best.items()},
        "ratios": {
            f"{ours} against {other}": best[other] / best[ours]
            for ours in (PREDICT, SCORED)
            for other in (BARE, "vmap by hand", *theirs)
        },
        "missing": missing,
    }
