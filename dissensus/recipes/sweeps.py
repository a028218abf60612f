"""The table `[sweep]` of a recipe: one run for each combination of values and each repeat, side by side in processes."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from dissensus.recipes.runs import is_finished
from dissensus.recipes.settings import changed

SWEEP = "sweep.json"


def sweep_of(recipe: Path) -> dict[str, Any] | None:
    """Return the table `[sweep]` of a recipe; None where it has none."""
    if not recipe.is_file():
        return None
    try:
        return tomllib.loads(recipe.read_text(encoding="utf-8")).get("sweep")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return None  # reading the recipe itself says what is wrong


def arms_of(sweep: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the changes of each arm by its name.

    Example:
        >>> arms_of({"training.lr": [0.1, 0.2], "repeats": 1})
        {'lr=0.1-seed=0': ['training.lr=0.1', 'ensemble.seed=0'], 'lr=0.2-seed=0': ['training.lr=0.2', 'ensemble.seed=0']}
    """
    repeats = sweep.get("repeats", 1)
    if type(repeats) is not int or repeats < 1:
        raise ValueError(f"repeats in [sweep] must be a whole number from 1; got {repeats!r}.")
    settings = dict(sweep)
    settings.pop("repeats", None)
    for key, values in settings.items():
        if not isinstance(values, list) or not values or "." not in key:
            raise ValueError(
                f'[sweep] takes lists of values by table and key, such as "training.lr" = [1e-3, 1e-2]; got {key} = {values!r}.'
            )
    settings["ensemble.seed"] = sweep.get("ensemble.seed") or list(range(repeats))
    arms = {}
    for values in product(*settings.values()):
        pairs = list(zip(settings, map(json.dumps, values), strict=True))
        name = "-".join(f"{key.rpartition('.')[2]}={value}" for key, value in pairs)
        arms[re.sub(r"[^\w=.-]", "_", name)] = [f"{k}={v}" for k, v in pairs]
    changed({}, [change for changes in arms.values() for change in changes])
    return arms


def run_sweep(
    recipe: Path,
    folder: Path,
    sweep: Mapping[str, Any],
    *,
    jobs: int,
    options: list[str],
    say: Callable[[str], None],
) -> list[str]:
    """Train every arm that is not finished, each in a folder and a process of its own.

    Args:
        recipe: The recipe.
        folder: Folder for the arms' folders.
        sweep: Its table `[sweep]`.
        jobs: How many arms run at a time.
        options: Further arguments of `dissensus train` for each.
        say: Called with what happens.

    Returns:
        Names of the arms that failed.
    """
    arms = arms_of(sweep)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SWEEP).write_text(json.dumps(list(arms)), encoding="utf-8")

    def train(name: str) -> bool:
        if is_finished(folder / name):
            say(f"{name}: is there already")
            return True
        command = [
            sys.executable,
            "-m",
            "dissensus",
            "train",
            str(recipe),
            "-o",
            str(folder / name),
            "--resume",
            "--one",
        ]
        changes = [part for change in arms[name] for part in ("--set", change)]
        done = subprocess.run([*command, *changes, *options], capture_output=True, text=True)
        problem = (done.stderr.strip().splitlines() or ["failed"])[-1]
        say(f"{name}: {'done' if done.returncode == 0 else problem}")
        return done.returncode == 0

    with ThreadPoolExecutor(jobs) as pool:
        worked = list(pool.map(train, arms))
    return [name for name, well in zip(arms, worked, strict=True) if not well]


def arms_in(folder: Path) -> list[Path]:
    """Return the folders of a sweep's finished arms; the folder itself where it is no sweep."""
    if not (folder / SWEEP).is_file():
        return [folder]
    names = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
    return [folder / name for name in names if is_finished(folder / name)]
