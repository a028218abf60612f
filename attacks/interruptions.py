"""Runs that die, are damaged, are trained twice at once, or go on with other settings."""

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attacks.training_runs import RUNS, Child, held_out, train, x, y

# The calls by which files come to be, change and go.
CALLS = ("open", "fsync", "replace", "unlink", "chmod", "mkdir")


def deaths(kinds: list[str], every: int, scratch: Path) -> dict[str, int]:
    """Die at every (n-th) call that touches files, resume, and compare with the run that was left alone."""
    counts = {"died": 0, "the same after": 0}
    for kind in kinds:
        wanted = Child(lambda kind=kind: train(kind, scratch / "whole")).wait()
        place = 1
        while True:
            folder = scratch / "run"
            said = Child(lambda kind=kind, folder=folder, place=place: _dying(kind, folder, place)).wait()
            if said is not None:
                _expect(said == wanted, f"{kind}: {said}")
                break
            again = Child(lambda kind=kind, folder=folder: train(kind, folder)).wait()
            counts["died"] += 1
            counts["the same after"] += _expect(
                again == wanted, f"{kind}, died at call {place}: {again} instead of {wanted}"
            )
            shutil.rmtree(folder, ignore_errors=True)
            place += every
        _clear(scratch)
    return counts


def _dying(kind: str, folder: Path, place: int) -> str:
    left = [place]

    def dies(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os._exit(137)
            return call(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, dies(getattr(os, name)))
    return train(kind, folder)


def random_kills(kinds: list[str], rounds: int, scratch: Path, seed: int = 0) -> dict[str, int]:
    """Kill at moments of the clock until the run ends by itself, and compare."""
    counts = {"kills": 0, "runs": 0, "the same after": 0}
    draw = random.Random(seed)
    for kind in kinds:
        wanted = Child(lambda kind=kind: train(kind, scratch / "whole", epochs=40)).wait()
        for _ in range(rounds):
            said, patience = None, 0.3
            while said is None:
                child = Child(lambda kind=kind: train(kind, scratch / "run", epochs=40))
                patience *= 1.3  # a busy machine may not come to the first checkpoint in the time of a quiet one
                time.sleep(draw.uniform(0.02, patience))
                child.kill()
                said = child.wait()
                counts["kills"] += said is None
            counts["runs"] += 1
            counts["the same after"] += _expect(said == wanted, f"{kind}, killed: {said}")
            shutil.rmtree(scratch / "run", ignore_errors=True)
        _clear(scratch)
    return counts


def damage(kinds: list[str], flips: int, scratch: Path, seed: int = 0) -> dict[str, int]:
    """Truncate and flip every file of a half-done run: it goes on to the same end, or is refused in a sentence."""
    counts = {"damaged": 0, "the same after": 0, "refused": 0}
    draw = random.Random(seed)
    for kind in kinds:
        wanted = Child(lambda kind=kind: train(kind, scratch / "whole")).wait()
        Child(lambda kind=kind: _interrupted(kind, scratch / "half")).wait()
        for path in sorted((scratch / "half").iterdir()):
            size = path.stat().st_size
            ends = [("truncated", size * part // 4) for part in range(4)]
            for what, where in ends + [("flipped", draw.randrange(size)) for _ in range(flips) if size]:
                shutil.copytree(scratch / "half", scratch / "run")
                _break(scratch / "run" / path.name, what, where, draw)
                said = Child(lambda kind=kind: train(kind, scratch / "run")).wait()
                counts["damaged"] += 1
                refused = (said or "").startswith("refused: ")
                _expect(said == wanted or refused, f"{kind}, {path.name} {what} at {where}: {said}")
                counts["the same after"] += said == wanted
                counts["refused"] += refused
                shutil.rmtree(scratch / "run", ignore_errors=True)
        _clear(scratch)
    return counts


class _Stop(Exception):
    pass


def _interrupted(kind: str, folder: Path) -> str:
    def callback(run: Any) -> None:
        if run.epoch >= 3:
            raise _Stop

    try:
        return train(kind, folder, callback=callback)
    except _Stop:
        return "half"


def _break(path: Path, what: str, where: int, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if what == "truncated":
        data = data[:where]
    else:
        data[where] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(data))


def in_company(rounds: int, scratch: Path) -> dict[str, int]:
    """Train into one folder from two processes at once: each ends as if alone, or is refused in a sentence."""
    counts = {"pairs": 0, "sound": 0}
    wanted = Child(lambda: train("deep", scratch / "whole", epochs=20)).wait()
    for _ in range(rounds):
        pair = [Child(lambda: train("deep", scratch / "run", epochs=20)) for _ in range(2)]
        said = [child.wait() or "" for child in pair]
        counts["pairs"] += 1
        counts["sound"] += _expect(
            wanted in said and all(s == wanted or s.startswith("refused: Another") for s in said), str(said)
        )
        shutil.rmtree(scratch / "run", ignore_errors=True)
    _clear(scratch)
    return counts


def _moved(values: torch.Tensor, row: int) -> torch.Tensor:
    values = values.clone()
    values[row] += 1
    return values


# What somebody may change between two calls and must hear of.
CHANGES: dict[str, dict[str, Any]] = {
    "learning rate": {"lr": 0.03},
    "epochs": {"epochs": 5},
    "batch size": {"batch_size": 30},
    "optimizer": {"optimizer": "sgd"},
    "weight decay": {"weight_decay": 0.5},
    "schedule": {"schedule": "cosine"},
    "clipping": {"clip_norm": 1.0},
    "precision": {"precision": "bf16"},
    "seed": {"seed": 7},
    "inputs": {"data": (_moved(x, 50), y)},
    "targets": {"data": (x, 1 - y)},
    "number of rows": {"data": (x[:40], y[:40])},
    "validation": {"validation": held_out},
    "selection": {"validation": held_out, "select": "ensemble_loss"},
}


def changed_settings(scratch: Path) -> dict[str, int]:
    """Go on with a half-done run under other settings: refused, each time."""
    counts = {"changes": 0, "refused": 0}
    Child(lambda: _interrupted("deep", scratch / "half")).wait()
    for name, change in CHANGES.items():
        shutil.copytree(scratch / "half", scratch / "run")
        said = Child(lambda change=change: train("deep", scratch / "run", **change)).wait() or "died"
        counts["changes"] += 1
        counts["refused"] += _expect(said.startswith("refused: "), f"{name}: {said}")
        shutil.rmtree(scratch / "run", ignore_errors=True)
    _clear(scratch)
    return counts


PROBLEMS: list[str] = []


def _expect(holds: bool, otherwise: str) -> bool:
    if not holds:
        PROBLEMS.append(otherwise)
    return holds


def _clear(scratch: Path) -> None:
    for path in scratch.iterdir():
        shutil.rmtree(path)


def attack(long: bool) -> dict[str, dict[str, int]]:
    """Run all of them; return their counts."""
    some = list(RUNS) if long else ["deep"]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for kind in some:
            train(kind, scratch / "first", epochs=1)  # imports what children would else import one by one
            _clear(scratch)
        return {
            "deaths at calls that touch files": deaths(some, 1 if long else 7, scratch),
            "kills at random moments": random_kills(some, 3 if long else 1, scratch),
            "files truncated and flipped": damage(some, 40 if long else 4, scratch),
            "two processes in one folder": in_company(50 if long else 3, scratch),
            "changed settings": changed_settings(scratch),
        }
