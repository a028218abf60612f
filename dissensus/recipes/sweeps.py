"""The table `[sweep]` of a recipe: a run for each combination of values, or those that a search tries, side by side.

Each arm is trained by `dissensus train` into a folder of its own, where its result appears in one step. So a sweep that was stopped goes
on where it was, and several processes, also on machines that share the folder, can work on one.
"""

import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import islice, product
from pathlib import Path
from typing import Any

from dissensus._files import replace_file
from dissensus._signatures import need
from dissensus.recipes.recipe import Recipe, is_finished
from dissensus.recipes.settings import toml_value

SWEEP, JOURNAL = "sweep.json", "search.journal"
_NUMBERS = ("repeats", "trials")
# What an arm's own process says where another one trains it.
_BUSY = "Another process is training"


def sweep_of(recipe: Path) -> dict[str, Any] | None:
    """Return the table `[sweep]` of a recipe; None where it has none."""
    tables: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # reading the recipe itself says what is wrong
        tables = tomllib.loads(recipe.read_text(encoding="utf-8-sig"))
    if not isinstance(sweep := tables.get("sweep"), dict | None):
        raise ValueError(f"sweep must be a table, [sweep]; got {sweep!r}.")
    return sweep


def settings_of(sweep: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a sweep varies, checked: lists of values, or ranges where it is a search."""
    _check_numbers(sweep)
    settings = {key: values for key, values in sweep.items() if key not in _NUMBERS}
    for key, values in settings.items():
        if "." not in key or not _fits(values, "trials" in sweep):
            raise ValueError(
                '[sweep] takes lists of values by table and key, such as "training.lr" = [1e-3, 1e-2], and with `trials` also ranges, '
                f'"training.lr" = {{low = 1e-4, high = 1e-1, log = true}}; got {key} = {values!r}.'
            )
        _check_names(key, values)
    return settings


def _check_names(key: str, values: Any) -> None:
    """Refuse values of which an arm's folder would not tell which one it has."""
    there: dict[str, Any] = {}
    for value in values if isinstance(values, list) else ():
        name = _arm({key: toml_value(value)})[0]
        if name in there:
            raise ValueError(f"Two arms would be called {name!r}: {key} = {there[name]!r} and {value!r}. Change one.")
        there[name] = value


def _check_numbers(sweep: Mapping[str, Any]) -> None:
    for name in _NUMBERS:
        if type(number := sweep.get(name, 1)) is not int or number < 1:
            raise ValueError(f"{name} in [sweep] must be a whole number from 1; got {number!r}.")
    beside = {"trials", "ensemble.seed"} & sweep.keys()
    if "repeats" in sweep and beside:
        raise ValueError(
            f"repeats in [sweep] is a number of seeds for a grid without seeds of its own; it does not go with {min(beside)}. Leave it "
            'out, or name the seeds: "ensemble.seed" = [0, 1, 2].'
        )


def _fits(values: Any, search: bool) -> bool:
    """Whether these are values to try, or for a search the ends of a range."""
    if search and isinstance(values, dict):
        return {"low", "high"} <= values.keys() <= {"low", "high", "log"}
    return isinstance(values, list) and bool(values)


def arms_of(sweep: Mapping[str, Any], seed: int = 0) -> dict[str, list[str]]:
    """Return the changes of each arm of a grid by its name; repeats begin with a seed.

    Example:
        >>> arms_of({"training.lr": [0.1, 0.2], "repeats": 1})
        {'lr=0.1-seed=0': ['training.lr=0.1', 'ensemble.seed=0'], 'lr=0.2-seed=0': ['training.lr=0.2', 'ensemble.seed=0']}
    """
    settings = settings_of(sweep)
    settings["ensemble.seed"] = sweep.get("ensemble.seed") or [seed + each for each in range(sweep.get("repeats", 1))]
    return dict(_arm(dict(zip(settings, map(toml_value, each), strict=True))) for each in product(*settings.values()))


def _arm(values: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return an arm's name, which is also its folder's, and its changes."""
    name = "-".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
    return re.sub(r"[^\w=.-]", "_", name), [f"{key}={value}" for key, value in values.items()]


def _grid(recipe: Path, sweep: Mapping[str, Any], changes: Sequence[str]) -> dict[str, list[str]]:
    """Return the arms of a grid, none of a search; refuse a slip in the recipe, as changed, before anything is trained."""
    settings = settings_of(sweep)
    for key in (change.partition("=")[0].strip() for change in changes):
        if varied := [each for each in settings if f"{key}.".startswith(f"{each}.")]:
            raise ValueError(
                f"[sweep] varies {varied[0]}, and --set would give all arms one value. Leave one of them out."
            )
    firsts = {key: toml_value(each["low"] if isinstance(each, Mapping) else each[0]) for key, each in settings.items()}
    first = Recipe.read(recipe, [*changes, *_arm(firsts)[1]])
    grid = {} if "trials" in sweep else arms_of(sweep, first.ensemble["seed"])
    for own in grid.values():
        Recipe.read(recipe, [*changes, *own])
    return grid


def run_sweep(
    recipe: Path,
    folder: Path,
    sweep: Mapping[str, Any],
    *,
    jobs: int,
    changes: Sequence[str],
    options: Sequence[str],
    say: Callable[[str], None],
    ray: bool = False,
) -> None:
    """Train every arm of a grid, or with `trials` of a search by optuna, that is not finished.

    Each is trained by the recipe with `changes` and its own, and with further options of `train`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("Arms of a [sweep] are runs of their own: start them without torchrun, with --jobs or --ray.")
    grid = _grid(recipe, sweep, changes)
    folder.mkdir(parents=True, exist_ok=True)
    study = None if grid else _study(folder)
    tried = grid if study is None else dict(_arm(trial.params) for trial in study.get_trials(deepcopy=False))
    _check_finished(recipe, folder, tried, changes)
    replace_file(folder / SWEEP, json.dumps(list(grid)))
    arms = iter(grid.items()) if study is None else _asked(study, settings_of(sweep), sweep["trials"])
    local = partial(train_arm, recipe.absolute(), folder.absolute(), [*options], [*changes])
    train, jobs = (_on_ray(local), len(grid) or jobs) if ray else (local, jobs)
    failed = []
    for (name, _, *tell), answer in _in_threads(train, arms, jobs):
        if not answer.startswith(_BUSY):  # else a process that shares the folder has it
            failed += [] if is_finished(folder / name) else [name]
            answer += tell[0](folder / name) if tell else ""
        say(f"{name}: {answer}")
    if failed:
        raise ValueError(f"{len(failed)} arms failed: {', '.join(failed)}. Call the same command again to go on.")


def _check_finished(recipe: Path, folder: Path, arms: Mapping[str, list[str]], changes: Sequence[str]) -> None:
    """Refuse to go on beside finished arms that another recipe, or one with other changes, trained."""
    for name, own in arms.items():
        if is_finished(folder / name):
            Recipe.read(recipe, [*changes, *own]).check_same(Recipe.read(folder / name), folder / name, moved=True)


def train_arm(
    recipe: Path, folder: Path, options: Sequence[str], changes: Sequence[str], name: str, own: Sequence[str]
) -> str:
    """Train one arm, by the changes of all and its own, unless it is finished; return what became of it."""
    if is_finished(folder / name):
        return "is there already"
    command = [sys.executable, "-m", "dissensus", "train", str(recipe), "-o", str(folder / name), "--resume"]
    settings = [f"--set={change}" for change in (*changes, *own)]
    done = subprocess.run([*command, "--one", *settings, *options], capture_output=True, text=True)
    lines = done.stderr.strip().splitlines() or ["failed"]
    return "done" if done.returncode == 0 else next((line for line in lines if _BUSY in line), lines[-1])


def _in_threads(train: Callable[..., str], arms: Iterator[Any], jobs: int) -> Iterator[tuple[Any, str]]:
    """Yield each arm, a tuple of name, changes and whatever else, with its answer; then ask for the next one."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(train, *arm[:2]): arm for arm in islice(arms, jobs)}
        while waiting:
            done = next(as_completed(waiting))
            yield waiting.pop(done), done.result()
            waiting |= {pool.submit(train, *arm[:2]): arm for arm in islice(arms, 1)}


def _on_ray(train: "partial[str]") -> Callable[..., str]:
    """Return the same as tasks of a Ray cluster."""
    ray, task = ray_task(train.func)
    return lambda *arm: str(ray.get(task.remote(*train.args, *arm)))


def ray_task(function: Callable[..., Any]) -> tuple[Any, Any]:
    """Return Ray, on the cluster that RAY_ADDRESS names or on this machine, and a function as its task: on a GPU, or else a CPU."""
    need("--ray", "ray", "ray")
    ray: Any = import_module("ray")
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    return ray, ray.remote(num_cpus=1, num_gpus=1 if ray.cluster_resources().get("GPU") else 0)(function)


def _asked(study: Any, settings: Mapping[str, Any], trials: int) -> Iterator[tuple[Any, ...]]:
    """Yield arms that optuna chooses by the validation loss of earlier ones, and what tells it that of each; as many as asked for."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=[TrialState.RUNNING]):  # left by a process that was stopped
        yield *_arm(trial.params), partial(_tell, study, trial.number)
    while len(study.get_trials(deepcopy=False)) < trials:
        trial = study.ask()
        chosen = {key: _suggested(trial, key, values) for key, values in settings.items()}
        yield *_arm(chosen), partial(_tell, study, trial.number)


def _tell(study: Any, trial: int, arm: Path) -> str:
    """Tell optuna how an arm did; return it in words."""
    from optuna.trial import TrialState

    value = _validation_loss(arm) if is_finished(arm) else None
    study.tell(trial, value, state=TrialState.FAIL if value is None else None)
    return "" if value is None else f", validation loss {value:.4f}"


def _study(folder: Path) -> Any:
    need("`trials` in [sweep]", "search", "optuna")
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    study = optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)
    # Processes that share the journal begin at other places, and keep away from what others are trying.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials), constant_liar=True)
    return study


def _suggested(trial: Any, key: str, values: Any) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(key, [toml_value(value) for value in values])
    whole = type(values["low"]) is int and type(values["high"]) is int
    suggest = trial.suggest_int if whole else trial.suggest_float
    return suggest(key, values["low"], values["high"], log=values.get("log", False))


def _validation_loss(arm: Path) -> float:
    """Return the lowest validation loss of an arm's ensemble."""
    with open(arm / "history.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if "ensemble_loss" not in rows[0]:
        raise ValueError("A search compares validation losses. Keep rows for it: validation = 0.1 in [data].")
    return min(float(row["ensemble_loss"]) for row in rows)


def arms_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of a sweep's arms that are finished, and of those that are not; the folder itself where it is no sweep."""
    if not (folder / SWEEP).is_file():
        return [folder], []
    names = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
    names = names or sorted(path.name for path in folder.iterdir() if path.is_dir())
    arms = [folder / name for name in names]
    return [arm for arm in arms if is_finished(arm)], [arm for arm in arms if not is_finished(arm)]
