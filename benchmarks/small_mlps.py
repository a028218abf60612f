"""Many small networks on one CPU thread: `ds.fit` against a plain Python loop over as many modules, in one run.

    python benchmarks/small_mlps.py [--engines eager,captured,compiled] [--output FILE]

Two cases: 20 networks 10-30-30-1, batch 64, Adam (bound by overhead) and 10 networks 10-128-128-1, batch 256 (bound by
arithmetic). Both sides shuffle; ours also logs every member's loss. Times are the best epoch of each side, taken in turns.
"""

import argparse
import itertools
import json
import platform
import time

import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds

CASES = {"20 small": (20, 30, 64, 60), "10 wide": (10, 128, 256, 30)}


def make(hidden: int) -> nn.Module:
    """Return a network of two hidden layers."""
    return nn.Sequential(
        nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
    )


def loop_seconds(
    members: int, hidden: int, batch: int, steps: int, x: torch.Tensor, y: torch.Tensor
) -> float:
    """Return the seconds a step of the plain loop takes, at best."""
    nets = [make(hidden) for _ in range(members)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in nets]
    best = float("inf")
    for _ in range(3):
        orders = [torch.randperm(len(x)) for _ in nets]
        start = time.perf_counter()
        for step in range(steps):
            for net, optimizer, order in zip(nets, optimizers, orders, strict=True):
                rows = order[step * batch : (step + 1) * batch]
                optimizer.zero_grad()
                F.mse_loss(net(x[rows]), y[rows]).backward()
                optimizer.step()
        best = min(best, (time.perf_counter() - start) / steps)
    return best


def fit_seconds(
    members: int, hidden: int, batch: int, steps: int, x: torch.Tensor, y: torch.Tensor, engine: str
) -> float:
    """Return the seconds a step of `ds.fit` takes, at best over epochs (set-up apart)."""
    stamps: list[float] = []
    ds.fit(
        ds.DeepEnsemble(lambda: make(hidden), members),
        (x, y),
        objective=ds.objectives.Independent("mse"),
        epochs=8,
        batch_size=batch,
        optimizer="adam",
        lr=1e-3,
        engine=engine,  # type: ignore[arg-type]
        device="cpu",
        callback=lambda run: stamps.append(time.perf_counter()),
    )
    return min(b - a for a, b in itertools.pairwise(stamps)) / steps


def measure(engines: list[str]) -> dict[str, dict[str, float]]:
    """Return, for each case, milliseconds a step and how many times faster than the loop each engine is."""
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for case, (members, hidden, batch, steps) in CASES.items():
        x = torch.randn(batch * steps, 10)
        y = x[:, :1].sin()
        loop = loop_seconds(members, hidden, batch, steps, x, y)
        results[case] = {"loop_ms": loop * 1e3}
        for engine in engines:
            seconds = fit_seconds(members, hidden, batch, steps, x, y, engine)
            again = loop_seconds(members, hidden, batch, steps, x, y)
            results[case] |= {f"{engine}_ms": seconds * 1e3, f"{engine}_ratio": min(loop, again) / seconds}
    return results


def main() -> None:
    """Print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="eager,captured")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    results = measure(arguments.engines.split(","))
    for case, values in results.items():
        print(case, " ".join(f"{name} {value:.3g}" for name, value in values.items()))
    if arguments.output:
        about = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        with open(arguments.output, "w") as file:
            json.dump({"about": about, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
