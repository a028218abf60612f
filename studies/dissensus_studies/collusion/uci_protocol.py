"""The protocol of the collusion study: search, retrain for every beta, measure; each run stored as it ends."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from dissensus._machine import one_thread
from dissensus.randomness import derive
from dissensus_studies.collusion.uci_data import Preparation, Problem, Split, split_problem
from dissensus_studies.collusion.uci_training import MOST_EPOCHS, Configuration, measure, spread, train
from dissensus_studies.harness.arm_log import keep, read_records

BETAS = tuple(tenth / 10 for tenth in range(11))

SEARCH_SPACE: Mapping[str, tuple[float, ...]] = {
    "lr": (0.001, 0.005, 0.01),
    "batch_size": (16, 32, 64),
    "weight_decay": (0.0, 0.001, 0.01),
    "num_members": (5, 10, 15, 20),
    "hidden": (10, 20, 30),
    "layers": (1, 2, 3),
}
# The first configurations are drawn at random; the others where a Gaussian process expects an improvement.
STARTUP_TRIALS = 5


@dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run.

    Attributes:
        preparation: How features are prepared.
        trials: Configurations tried in each run's search.
        search_beta: The beta with which they are tried.
        betas: Those that the best configuration is trained with.
        most_epochs: Where training ends that has not stopped by itself.
        seed: Decides splits, weights, batches and the search.
        on_validation_too: Train the chosen configuration on training and validation rows, for the epochs found without the latter.
    """

    preparation: Preparation = "document"
    trials: int = 20
    search_beta: float = 0.5
    betas: tuple[float, ...] = BETAS
    most_epochs: int = MOST_EPOCHS
    seed: int = 0
    on_validation_too: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON gives it back: tuples become lists."""
        settings: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return settings


@dataclass(frozen=True)
class Job:
    """One run on one set."""

    name: str
    run: int
    problem: Problem
    settings: Settings


Found = dict[str, Any]


def search(evaluate: Callable[[Configuration], float], trials: int, seed: int) -> tuple[Configuration, list[Found]]:
    """Look for the configuration with the lowest value by Bayesian optimisation; return it, and every trial with its value."""
    optuna = import_optuna()
    tried: list[Found] = []

    def objective(trial: Any) -> float:
        # Places in the space, not values: the process then knows their order.
        places = {name: trial.suggest_int(name, 0, len(choices) - 1) for name, choices in SEARCH_SPACE.items()}
        configuration = Configuration(**{name: SEARCH_SPACE[name][place] for name, place in places.items()})
        value = evaluate(configuration)
        tried.append({**asdict(configuration), "value": value})
        return value

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        sampler = optuna.samplers.GPSampler(seed=seed & 0xFFFFFFFF, n_startup_trials=STARTUP_TRIALS)
        optuna.create_study(sampler=sampler).optimize(objective, n_trials=trials)
    finally:
        optuna.logging.set_verbosity(before)
    best = min(tried, key=lambda trial: trial["value"])
    return Configuration(**{name: best[name] for name in SEARCH_SPACE}), tried


def import_optuna() -> Any:
    """Return the library that searches, or say how to get it."""
    # The Gaussian process behind its search needs scipy.
    if any(find_spec(name) is None for name in ("optuna", "scipy")):
        raise ModuleNotFoundError(
            "The search for configurations is optuna's, which this environment lacks. Install with: pip install 'dissensus[studies]'"
        )
    return import_module("optuna")


def measure_run(job: Job) -> Found:
    """Search, retrain and measure one run; return everything that is kept of it."""
    settings = job.settings
    key = derive(settings.seed, job.name, job.run)
    split = split_problem(job.problem, settings.preparation, key, "split")
    # Processor time: with one thread it is what a run would take on a core of its own.
    start = time.process_time()

    def evaluate(configuration: Configuration) -> float:
        tried = train(split, configuration, [settings.search_beta], seed=key, most_epochs=settings.most_epochs)
        return float(tried.validation_errors[0])

    configuration, tried = search(evaluate, settings.trials, derive(key, "search"))
    middle = time.process_time()
    rows = measure_betas(split, configuration, settings, seed=key)
    return {
        "set": job.name,
        "run": job.run,
        "settings": settings.as_json(),
        "configuration": asdict(configuration),
        "trials": tried,
        "betas": rows,
        "search_seconds": middle - start,
        "retrain_seconds": time.process_time() - middle,
    }


def measure_betas(split: Split, configuration: Configuration, settings: Settings, seed: int) -> list[Found]:
    """Train one configuration for every beta and measure each ensemble on the test rows."""
    trained = train(
        split,
        configuration,
        settings.betas,
        seed=seed,
        most_epochs=settings.most_epochs,
        on_validation_too=settings.on_validation_too,
    )
    train_y, test_y = split.y[:, 0], split.test_y[:, 0]
    return [
        {
            "beta": beta,
            **measure(trained.test_outputs[place], test_y, seed=seed),
            "train_mse": float((trained.train_outputs[place].mean(0) - train_y).square().mean()),
            "train_diversity": spread(trained.train_outputs[place]),
            "validation_mse": float(trained.validation_errors[place]),
            "epochs": int(trained.epochs[place]),
        }
        for place, beta in enumerate(settings.betas)
    ]


def measure_all(
    problems: Mapping[str, Problem],
    num_runs: int,
    settings: Settings,
    folder: Path,
    *,
    workers: int = 1,
    minutes: float | None = None,
) -> list[Found]:
    """Measure every run of every set that the folder's `arms.jsonl` has not yet; return all that have ended, set by set.

    Several workers are processes that measure runs side by side; no run begins after so many minutes.
    """
    path, plain = folder / "arms.jsonl", settings.as_json()
    jobs = {
        f"{name} run={run}": Job(name, run, problems[name], settings) for run in range(num_runs) for name in problems
    }
    found = {arm: record for arm, record in read_records(path, plain).items() if arm in jobs}
    deadline = float("inf") if minutes is None else time.time() + 60 * minutes
    for result in _results([job for arm, job in jobs.items() if arm not in found], workers, deadline):
        arm = f"{result['set']} run={result['run']}"
        found[arm] = keep(path, arm, plain, result)
        seconds = result["search_seconds"] + result["retrain_seconds"]
        line = f"{len(found)} of {len(jobs)}: {result['set']}, run {result['run'] + 1}, {seconds:.0f} s"
        print(line, file=sys.stderr, flush=True)
    order = list(problems)
    return sorted(found.values(), key=lambda result: (order.index(result["set"]), result["run"]))


def _results(jobs: Sequence[Job], workers: int, deadline: float) -> Iterator[Found]:
    """Give each run's results as it ends."""
    if workers <= 1 or len(jobs) <= 1:
        # Networks this small gain nothing from a second thread.
        with one_thread():
            yield from filter(None, (_measure_until(deadline, job) for job in jobs))
        return
    # Not forked: a child would inherit torch's threads in whatever state they are.
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        try:
            for ended in as_completed([pool.submit(_measure_until, deadline, job) for job in jobs]):
                if (result := ended.result()) is not None:
                    yield result
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _measure_until(deadline: float, job: Job) -> Found | None:
    """Measure a run, unless it would begin after the time."""
    return None if time.time() > deadline else measure_run(job)
