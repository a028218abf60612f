"""What one-pass evaluation costs over the predictions alone, and what its bootstrap intervals cost.

    python benchmarks/evaluation_cost.py [--network resnet18] [--members 5] [--inputs 500] [--device cuda]

Three sets (known, and two unknown ones) go through the same ensemble, once with `ds.predict` alone and once with
`evaluate` without intervals: the ratio is what scores, metrics and checks add. Intervals are timed apart, on sets of
`--resampled` inputs and a network that costs nothing. Each time is the best of the repeats, taken in turns.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable

import torch
from torch import nn

import dissensus as ds
from dissensus.architectures import cnn, resnet18
from dissensus.evaluation import evaluate

NETWORKS: dict[str, Callable[[], nn.Module]] = {"narrow": lambda: resnet18(width=8), "cnn": cnn, "resnet18": resnet18}
CLASSES = 10


# On a machine that is busy with other work, time on the processor says more than time on the wall.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(call: Callable[[], object], options: argparse.Namespace) -> float:
    clock = CLOCKS[options.clock]
    start = clock()
    call()
    if torch.device(options.device).type == "cuda":
        torch.cuda.synchronize(options.device)
    return clock() - start


def prediction_ratio(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(0)
    sets = [torch.randn(options.inputs, 3, 32, 32, generator=generator).to(device) for _ in ("id", "far", "near")]
    labels = torch.randint(CLASSES, (options.inputs,), generator=generator)
    ens = ds.DeepEnsemble(NETWORKS[options.network], num_members=options.members, seed=0).to(device)

    def predictions() -> None:
        for x in sets:
            ds.predict(ens, x, batch_size=options.batch_size)

    def evaluation() -> None:
        evaluate(ens, (sets[0], labels), {"far": sets[1], "near": sets[2]}, batch_size=options.batch_size, bootstrap=0)

    predictions(), evaluation()
    times = [(seconds(predictions, options), seconds(evaluation, options)) for _ in range(options.repeats)]
    alone, whole = (min(column) for column in zip(*times, strict=True))
    print(
        f"{options.members} x {options.network}, 3 sets of {options.inputs}, all scores: predictions {alone:.3f} s, "
        f"evaluation {whole:.3f} s, ratio {whole / alone:.3f}"
    )


def bootstrap_seconds(options: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    known, far, near = (scale * torch.randn(options.resampled, 8, generator=generator) for scale in (1.0, 3.0, 1.5))
    labels = torch.randint(CLASSES, (options.resampled,), generator=generator)
    ens = ds.DeepEnsemble(lambda: nn.Linear(8, CLASSES), num_members=options.members, seed=0)

    def run(count: int) -> float:
        return seconds(lambda: evaluate(ens, (known, labels), {"far": far, "near": near}, bootstrap=count), options)

    run(0)
    without, with_intervals = (min(run(count) for _ in range(options.repeats)) for count in (0, 1000))
    print(
        f"intervals of all numbers, 3 sets of {options.resampled}, 1000 resamples: {with_intervals - without:.2f} s "
        f"(all else {without:.2f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, default="narrow")
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--inputs", type=int, default=500, help="inputs of each set that is predicted")
    parser.add_argument("--resampled", type=int, default=10_000, help="inputs of each set that is resampled")
    parser.add_argument("--batch-size", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {options.threads} threads, "
        f"predictions on {options.device}"
    )
    prediction_ratio(options)
    bootstrap_seconds(options)


if __name__ == "__main__":
    main()
