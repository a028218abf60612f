"""Times the three main training cases of the engine side by side on a CUDA device."""

import argparse
import copy
import json
import time

import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds


def resnet(width=64, classes=10):
    from dissensus.architectures import resnet18

    return resnet18(classes=classes, width=width)


def events(run, steps):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def plain_loop(make, members, x, y, batch, bf16, steps, loss, lr=0.1, optimizer="sgd"):
    nets = [make().cuda().to(memory_format=torch.channels_last) if x.ndim == 4 else make().cuda() for _ in range(members)]
    opts = [
        torch.optim.SGD(n.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, fused=True)
        if optimizer == "sgd"
        else torch.optim.Adam(n.parameters(), lr=lr, fused=True)
        for n in nets
    ]

    def step():
        for net, opt in zip(nets, opts):
            idx = torch.randint(0, len(x), (batch,), device="cuda")
            inputs, labels = x[idx], y[idx]
            if x.ndim == 4:
                inputs = inputs.to(memory_format=torch.channels_last)
            opt.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                value = loss(net(inputs), labels)
            value.backward()
            opt.step()

    for _ in range(5):
        step()
    return events(step, steps)


def ours(make, members, x, y, batch, bf16, epochs, objective, engine, lr=0.1, augment=None, profile=False, **options):
    ens = ds.DeepEnsemble(make, members)
    stamps = []

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def stamp(run):
        torch.cuda.synchronize()
        stamps.append((time.perf_counter(), run.step))
        if profile and len(stamps) == epochs - 1:
            profiler.start()
        if profile and len(stamps) == epochs:
            profiler.stop()
            steps = stamps[-1][1] - stamps[-2][1]
            rows = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
            print("kernel ms a step", sum(e.self_device_time_total for e in rows) / steps / 1e3, "kernels", sum(e.count for e in rows) / steps)
            for e in rows[:25]:
                print(f"{e.self_device_time_total / steps / 1e3:8.3f} ms {e.count / steps:7.1f} x {e.key[:110]}")

    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run = ds.fit(
        ens, (x, y), objective=objective, epochs=epochs, batch_size=batch, lr=lr, engine=engine,
        precision="bf16" if bf16 else "fp32", augment=augment, callback=stamp, device="cuda",
        schedule="one_cycle", **options,
    )
    times = [(b[0] - a[0]) / (b[1] - a[1]) * 1e3 for a, b in zip(stamps, stamps[1:])]
    return {
        "engine": run.engine,
        "ms_per_step": min(times),
        "all": [round(t, 4) for t in times],
        "setup_s": stamps[0][0] - start,
        "peak_GB": torch.cuda.max_memory_allocated() / 1e9,
        "loss": run.history.by_epoch("loss")[-1],
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="mlp,resnet")
    parser.add_argument("--engines", default="captured,compiled")
    parser.add_argument("--options", default="{}")
    args = parser.parse_args()
    from dissensus.training import recording
    recording.COMPILE_OPTIONS.update(json.loads(args.options))
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    out = {}
    if "mlp" in args.cases:
        def mlp():
            return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 1))
        x = torch.randn(64 * 500, 10, device="cuda")
        y = x[:, :1].sin()
        out["mlp loop"] = plain_loop(mlp, 20, x, y, 64, False, 20, lambda p, t: F.mse_loss(p, t), 1e-3, "adam")
        print("mlp loop", out["mlp loop"], flush=True)
        for engine in args.engines.split(","):
            try:
                out[f"mlp {engine}"] = ours(mlp, 20, x, y, 64, False, 5, ds.objectives.Independent("mse"), engine, 1e-3, optimizer="adam")
            except Exception as e:
                out[f"mlp {engine}"] = repr(e)[:2000]
            print(f"mlp {engine}", out[f"mlp {engine}"], flush=True)
    if "resnet" in args.cases:
        x = torch.randn(128 * 60, 3, 32, 32, device="cuda")
        y = torch.randint(0, 10, (len(x),), device="cuda")
        from dissensus.data import augment
        aug = augment.Compose((augment.RandomCrop(4), augment.HorizontalFlip()))
        out["one resnet"] = plain_loop(resnet, 1, x, y, 128, True, 20, F.cross_entropy)
        out["resnet loop"] = plain_loop(resnet, 5, x, y, 128, True, 10, F.cross_entropy)
        print("one", out["one resnet"], "loop", out["resnet loop"], flush=True)
        for engine in args.engines.split(","):
            try:
                out[f"resnet {engine}"] = ours(
                    resnet, 5, x, y, 128, True, 4, ds.objectives.Independent(), engine, 0.1, aug,
                    optimizer="sgd", optimizer_options={"momentum": 0.9, "nesterov": True}, weight_decay=5e-4,
                    profile=engine == "compiled")
            except Exception as e:
                import traceback
                traceback.print_exc()
                out[f"resnet {engine}"] = repr(e)[:2000]
            print(f"resnet {engine}", out[f"resnet {engine}"], flush=True)
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
