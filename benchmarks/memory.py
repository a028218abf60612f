"""How much memory training takes at its peak, as a share of what the members would take one by one.

    python benchmarks/memory.py [--device cuda] [--case mlp|resnet] [--engines eager,captured,compiled,auto] [--members 5]

Every side is a process of its own, which trains a few steps and reports its peak beyond what it had before the networks were
made. The plain side is one network and one torch optimizer; an ensemble's aim is at most 1.1 times the plain side times the
number of members. On a GPU the peak is that of torch's allocator. On a CPU (Linux) it is resident memory, with an allocator
that hands freed memory back to the system, so that what is used counts and not what is kept for later.
"""

import argparse
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds
from dissensus.architectures import mlp, resnet18

STEPS = 6
BATCHES = {"mlp": 128, "resnet": 16}
# Wide enough that what libraries take for themselves (workspaces of matrix products, 33 MB for each stream) does not show.
WIDTHS = {"cpu": 1500, "cuda": 4096}
RATES = {"sgd": 0.01, "adam": 1e-3}


def problem(case: str, device: str) -> tuple[Callable[[], nn.Module], Tensor, Tensor]:
    """Return what makes a network, inputs and labels."""
    count = STEPS * BATCHES[case]
    shape = (256,) if case == "mlp" else (3, 32, 32)
    labels = torch.arange(count) % 10
    width = WIDTHS[device]
    make = (lambda: mlp(256, [width] * 3, 10)) if case == "mlp" else resnet18
    return make, torch.randn(count, *shape).to(device), labels.to(device)


def train_plainly(make: Callable[[], nn.Module], x: Tensor, y: Tensor, optimizer: str, batch: int) -> None:
    """Train one network as one would by hand."""
    net = make().to(x.device)
    rate = RATES[optimizer]
    if optimizer == "sgd":
        descent: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    else:
        descent = torch.optim.Adam(net.parameters(), lr=rate)
    for start in range(0, len(x), batch):
        descent.zero_grad()
        F.cross_entropy(net(x[start : start + batch]), y[start : start + batch]).backward()
        descent.step()


def train(make: Callable[[], nn.Module], x: Tensor, y: Tensor, options: argparse.Namespace) -> None:
    """Train an ensemble."""
    ensemble = ds.DeepEnsemble(make, options.members).to(x.device)
    momentum = {"momentum": 0.9} if options.optimizer == "sgd" else {}
    ds.fit(
        ensemble,
        (x, y),
        epochs=2,
        batch_size=BATCHES[options.case],
        optimizer=options.optimizer,
        optimizer_options=momentum,
        lr=RATES[options.optimizer],
        engine=options.side,
        device=options.device,
        progress=False,
    )


def peak_bytes(options: argparse.Namespace) -> int:
    """Train one side; return its peak beyond what there was before."""
    make, x, y = problem(options.case, options.device)
    # What torch and the engines load when first used is not training's.
    train_plainly(lambda: nn.Linear(4, 2), torch.zeros(4, 4, device=x.device), y[:4] % 2, options.optimizer, 4)
    tiny = ds.DeepEnsemble(lambda: nn.Linear(4, 2), 2).to(x.device)
    engine = "captured" if options.side in ("plain", "auto") else options.side
    ds.fit(tiny, (torch.zeros(4, 4), torch.arange(4) % 2), epochs=2, batch_size=4, engine=engine, progress=False)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
    if options.side == "plain":
        train_plainly(make, x, y, options.optimizer, BATCHES[options.case])
    else:
        train(make, x, y, options)
    return (torch.cuda.max_memory_allocated() if options.device == "cuda" else resident("VmHWM")) - before


def resident(field: str) -> int:
    """Return a memory field of this process, in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def measured(side: str, optimizer: str, options: argparse.Namespace) -> int:
    """Return the peak of one side, measured in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--optimizer", optimizer]
    for name in ("device", "case", "members"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        raise RuntimeError(f"{side} failed:\n{result.stderr}")
    return int(result.stdout.split()[-1])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--case", default="mlp", choices=tuple(BATCHES))
    parser.add_argument("--engines", default="eager,captured,auto")
    parser.add_argument("--optimizers", default="sgd,adam")
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--optimizer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(peak_bytes(options))
        return
    for optimizer in options.optimizers.split(","):
        plain = measured("plain", optimizer, options)
        print(f"{options.case}, {optimizer}: one network {plain / 1e6:.0f} MB", flush=True)
        for engine in options.engines.split(","):
            peak = measured(engine, optimizer, options)
            share = peak / (options.members * plain)
            print(f"  {options.members} members, {engine}: {peak / 1e6:.0f} MB, {share:.2f} x", flush=True)


if __name__ == "__main__":
    main()
