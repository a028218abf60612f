"""The main training cases on a CUDA device, each beside its plain PyTorch loop, in one run.

    python benchmarks/gpu_training.py [--cases mlp,heads,resnet] [--output FILE]

mlp     20 networks 10-30-30-1, batch 64, Adam, float32
heads   heads 768-768-1000 on cached features, batch 256, AdamW, two of M members trained a step
resnet  5 ResNet-18 (CIFAR form), batch 128, bf16 autocast, channels-last, SGD with Nesterov momentum, crop and flip

Ours runs through `ds.fit` with data on the device, shuffling, augmentation, history and a schedule; a step's time is the
best epoch's. The loop is the usual eager code with fused optimizers, with and without the same augmentation.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.architectures import resnet18
from dissensus.data import augment
from dissensus.randomness import Noise

AUGMENT = augment.Compose((augment.RandomCrop(4), augment.HorizontalFlip()))


def milliseconds(run: Callable[[], None], steps: int) -> float:
    """Return the time of one call, over `steps` calls."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def plain_loop(
    make: Callable[[], nn.Module],
    members: int,
    data: tuple[Tensor, Tensor],
    batch: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    bf16: bool = False,
    augmented: bool = False,
    steps: int = 20,
) -> tuple[float, float]:
    """Return milliseconds a step of the usual eager loop over modules, and its peak memory in GB."""
    x, y = data
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layout = torch.channels_last if x.ndim == 4 else torch.preserve_format
    nets = [make().cuda().to(memory_format=layout) for _ in range(members)]
    optimizers = [optimizer(net.parameters()) for net in nets]
    clock = torch.zeros((), dtype=torch.int64, device="cuda")

    def step() -> None:
        for net, opt in zip(nets, optimizers, strict=True):
            rows = torch.randint(0, len(x), (batch,), device="cuda")
            inputs, targets = x[rows], y[rows]
            if augmented:
                inputs, targets = AUGMENT(inputs, targets, Noise(clock.add_(1)))
            opt.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                value = loss(net(inputs.contiguous(memory_format=layout)), targets)
            value.backward()
            opt.step()

    milliseconds(step, 5)
    return milliseconds(step, steps), (torch.cuda.max_memory_allocated() - before) / 1e9


def ours(
    make: Callable[[], nn.Module], members: int, data: tuple[Tensor, Tensor], **settings: Any
) -> dict[str, Any]:
    """Return what `ds.fit` took: milliseconds a step, seconds until the first epoch was done, peak memory."""
    stamps: list[tuple[float, int]] = []

    def stamp(run: ds.Run) -> None:
        torch.cuda.synchronize()
        stamps.append((time.perf_counter(), run.step))

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    run = ds.fit(ds.DeepEnsemble(make, members), data, device="cuda", callback=stamp, **settings)
    steps = [(b[0] - a[0]) / (b[1] - a[1]) * 1e3 for a, b in itertools.pairwise(stamps)]
    return {
        "engine": run.engine,
        "ms": min(steps),
        "first_epoch_s": stamps[0][0] - start,
        "peak_GB": (torch.cuda.max_memory_allocated() - before) / 1e9,
    }


class PickTwo(obj.Independent):
    """Trains two members a step, drawn without replacement; nothing else is evaluated."""

    batches = "shared"

    def pick(self, step: obj.Step, num_members: int) -> Tensor:
        """Draw two members."""
        return step.noise(shared=True).uniform(num_members).topk(2).indices


def mlp_case() -> dict[str, Any]:
    """20 small networks."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 1))

    x = torch.randn(64 * 1000, 10, device="cuda")
    data = (x, x[:, :1].sin())
    loop, _ = plain_loop(make, 20, data, 64, F.mse_loss, lambda p: torch.optim.Adam(p, 1e-3, fused=True))
    settings = {"objective": obj.Independent("mse"), "epochs": 5, "batch_size": 64, "optimizer": "adam"}
    out: dict[str, Any] = {"loop_ms": loop}
    for engine in ("captured", "compiled"):
        out[engine] = ours(make, 20, data, engine=engine, schedule="cosine", **settings)
        out[engine]["times_the_loop"] = loop / out[engine]["ms"]
    return out


def heads_case() -> dict[str, Any]:
    """Two of M heads a step."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 1000))

    data = (torch.randn(256 * 400, 768, device="cuda"), torch.randint(0, 1000, (256 * 400,), device="cuda"))
    out: dict[str, Any] = {}
    for members in (2, 50, 1000):
        out[f"M = {members}"] = ours(
            make,
            members,
            data,
            objective=PickTwo(),
            epochs=4,
            batch_size=256,
            lr=1e-3,
            engine="compiled",
            precision="bf16",
        )
    return out


def resnet_case() -> dict[str, Any]:
    """Five ResNet-18."""
    data = (
        torch.randn(128 * 100, 3, 32, 32, device="cuda"),
        torch.randint(0, 10, (128 * 100,), device="cuda"),
    )

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)

    common = {"batch": 128, "loss": F.cross_entropy, "optimizer": sgd, "bf16": True}
    out: dict[str, Any] = {}
    out["one_ms"], out["one_GB"] = plain_loop(resnet18, 1, data, **common)
    out["one_augmented_ms"], _ = plain_loop(resnet18, 1, data, augmented=True, **common)
    out["loop_ms"], _ = plain_loop(resnet18, 5, data, steps=10, **common)
    out["loop_augmented_ms"], _ = plain_loop(resnet18, 5, data, steps=10, augmented=True, **common)
    settings = {
        "epochs": 4,
        "batch_size": 128,
        "optimizer": "sgd",
        "lr": 0.1,
        "optimizer_options": {"momentum": 0.9, "nesterov": True},
        "weight_decay": 5e-4,
        "precision": "bf16",
        "augment": AUGMENT,
        "schedule": "one_cycle",
    }
    out["five"] = ours(resnet18, 5, data, engine="compiled", **settings)
    out["one, same engine"] = ours(resnet18, 1, data, engine="compiled", **settings)
    out["five, two in flight"] = ours(resnet18, 5, data, engine="compiled", concurrent_members=2, **settings)
    five = out["five"]["ms"]
    out["ratios"] = {
        "five to one eager": five / out["one_ms"],
        "five to one eager, augmented": five / out["one_augmented_ms"],
        "loop to five": out["loop_ms"] / five,
        "loop to five, augmented": out["loop_augmented_ms"] / five,
        "five to one, same engine": five / out["one, same engine"]["ms"],
        "memory to five eager models": out["five"]["peak_GB"] / (5 * out["one_GB"]),
    }
    return out


CASES = {"mlp": mlp_case, "heads": heads_case, "resnet": resnet_case}


def main() -> None:
    """Run the cases and print what they took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--output")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for case in arguments.cases.split(","):
        results[case] = CASES[case]()
        print(json.dumps({case: results[case]}, indent=1), flush=True)
        if arguments.output:
            with open(arguments.output, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
