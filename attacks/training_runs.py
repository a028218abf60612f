"""Small runs to attack, and children in which they live and die."""

import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus import objectives as obj

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
held_out = (x[:20], y[:20])


def plain() -> nn.Module:
    """A small network with dropout."""
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 2))


def normed() -> nn.Module:
    """A small network with BatchNorm."""
    return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=20, shuffle=False)


# name -> (ensemble, arguments of fit)
RUNS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "deep": lambda: (ds.DeepEnsemble(plain, 3), {"data": (x, y)}),
    "bf16 with BatchNorm": lambda: (ds.DeepEnsemble(normed, 3), {"data": (x, y), "precision": "bf16"}),
    "captured": lambda: (ds.DeepEnsemble(plain, 3), {"data": (x, y), "engine": "captured"}),
    "joint, best check": lambda: (
        ds.DeepEnsemble(plain, 3),
        {"data": (x, y), "objective": obj.Joint(0.5), "validation": held_out, "select": "ensemble_loss"},
    ),
    "masks": lambda: (ds.Masksembles(normed(), 3), {"data": (x, y)}),
    "loader": lambda: (ds.DeepEnsemble(plain, 3), {"data": _loader()}),
    "other optimizer": lambda: (ds.DeepEnsemble(plain, 3), {"data": (x, y), "optimizer": torch.optim.RMSprop}),
}


def train(kind: str, folder: Path, epochs: int = 4, **changes: Any) -> str:
    """Train a run to its end, or on from where it was; return a digest of what the ensemble then answers and its history."""
    ensemble, settings = RUNS[kind]()
    if "batch_size" not in changes and not isinstance(settings["data"], DataLoader):
        settings["batch_size"] = 20
    settings |= {"engine": settings.get("engine", "eager"), "epochs": epochs, "lr": 0.02, "device": "cpu"}
    run = ds.fit(ensemble, checkpoint_dir=folder, resume=True, **{**settings, **changes})
    losses = [float(value).hex() for value in run.history["loss"]]
    return hashlib.sha256(ds.predict(ensemble, x).numpy().tobytes() + repr(losses).encode()).hexdigest()


class Child:
    """A function in a process of its own, forked, so that it can be killed without harm to ours."""

    def __init__(self, function: Callable[[], str]) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        self.number = os.fork()
        if self.number == 0:
            os.close(reading)
            os.write(writing, _said(function).encode()[:60_000])
            os._exit(0)
        os.close(writing)
        self.pipe = reading

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.number, signal.SIGKILL)

    def wait(self) -> str | None:
        """Return what the function returned, `error: ...` if it raised, None if it was killed."""
        with open(self.pipe, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(self.number, 0)
        return said or None


def _said(function: Callable[[], str]) -> str:
    try:
        return function()
    except Exception as error:
        kind = "refused" if isinstance(error, ValueError | OSError) else "error"
        return f"{kind}: {error}\n{traceback.format_exc() if kind == 'error' else ''}"
