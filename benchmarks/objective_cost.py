"""What an objective that compares members adds to a training step, over `Independent()` on the same engine.

    python benchmarks/objective_cost.py [--case mlps|resnet] [--device cuda] [--engines captured,compiled] [--steps 200]

Steps are timed inside `ds.fit`, between two checks of one run, so all that training does is in them; the best of several
such stretches counts.
"""

import argparse
import itertools
import time

import torch

import dissensus as ds
from dissensus import objectives as obj
from dissensus.architectures import mlp, resnet18
from dissensus.data import augment

SIDES = ("independent, own batches", "independent, shared batches", "joint, beta 0.5")


def settings_of(case: str, device: str) -> dict[str, object]:
    """Return what `ds.fit` gets besides the objective."""
    if case == "mlps":
        return {"batch_size": 64, "optimizer": "adam"}
    return {
        "batch_size": 128,
        "optimizer": "sgd",
        "lr": 0.05,
        "optimizer_options": {"momentum": 0.9},
        "augment": augment.Compose((augment.RandomCrop(4), augment.HorizontalFlip())),
        "precision": "bf16" if device == "cuda" else "fp32",
    }


def problem(case: str) -> tuple[ds.DeepEnsemble, tuple[torch.Tensor, torch.Tensor], str]:
    """Return an ensemble, data and a loss."""
    if case == "mlps":
        x = torch.randn(6400, 10)
        return ds.DeepEnsemble(lambda: mlp(10, [30, 30], 1), 20), (x, x.sum(1, keepdim=True).sin()), "mse"
    return (ds.DeepEnsemble(resnet18, 5), (torch.randn(6400, 3, 32, 32), torch.arange(6400) % 10), "cross_entropy")


def milliseconds(case: str, side: str, engine: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return milliseconds a step, and the seconds until the first stretch was over."""
    ens, data, loss = problem(case)
    marks = [time.perf_counter()]

    def mark(run: ds.Run) -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    ds.fit(
        ens,
        data,
        objective=obj.Joint(0.5, loss) if side.startswith("joint") else obj.Independent(loss),
        epochs=-(-options.steps * (options.stretches + 1) * 128 // 6400),
        batches="shared" if "shared" in side else None,
        device=options.device,
        engine=engine,
        check_every=options.steps,
        callback=mark,
        **settings_of(case, options.device),
    )
    times = [after - before for before, after in itertools.pairwise(marks[1:])]
    return min(times) / options.steps * 1e3, marks[1] - marks[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="mlps", choices=("mlps", "resnet"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--engines", default="captured,compiled")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stretches", type=int, default=3)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    for engine in options.engines.split(","):
        base = None
        for side in SIDES:
            value, first = milliseconds(options.case, side, engine, options)
            base = base or value
            print(
                f"{options.case}, {options.device}, {engine}: {side}: {value:.3f} ms a step, {value / base:.3f} of the first "
                f"(first stretch after {first:.1f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
