"""The protocol of the collusion study: search, train one network for every beta, measure; each run stored as it ends."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus._machine import one_thread
from dissensus.architectures import mlp
from dissensus.members import DeepEnsemble
from dissensus.objectives import Joint, debias, decompose
from dissensus.predictions import predict
from dissensus.randomness import bits, derive
from dissensus.training import Run, fit
from dissensus_studies.collusion.uci_data import Preparation, Problem, Split, split_problem
from dissensus_studies.harness.arm_log import Arm, Record, run_arms

DROP_SHARES = (0.2, 0.4, 0.6)
DROP_REPEATS = 100
PATIENCE = 5
# The document names no largest number of epochs.
MOST_EPOCHS = 300
# Recording a step takes as long as some hundred steps, which runs with fewer steps an epoch than this do not win back.
STEPS_WORTH_RECORDING = 50


@dataclass(frozen=True)
class Configuration:
    """What the search decides."""

    lr: float
    batch_size: int
    weight_decay: float
    num_members: int
    hidden: int
    layers: int


class Trained(NamedTuple):
    """An ensemble as it was at its best epoch: outputs `(members, rows)`, its error on the validation rows, and that epoch."""

    train_outputs: Tensor
    test_outputs: Tensor
    validation_error: float
    epochs: int


def train(
    split: Split,
    configuration: Configuration,
    beta: float,
    *,
    seed: int,
    most_epochs: int = MOST_EPOCHS,
    on_validation_too: bool = False,
) -> Trained:
    """Train an ensemble; its best epoch on the validation rows is kept.

    Those of other betas differ in nothing else: member j of each starts with the same weights and all see the same batches. With
    `on_validation_too` it is then trained again on training and validation rows, for its best number of epochs.
    """
    widths = [configuration.hidden] * configuration.layers

    def fit_joint(x: Tensor, y: Tensor, epochs: int, **stopping: Any) -> Run:
        start = derive(seed, "start")
        return fit(
            DeepEnsemble(lambda: mlp(x.shape[1], widths, 1), configuration.num_members, start),
            (x, y),
            objective=Joint(beta, "mse"),
            epochs=epochs,
            batch_size=configuration.batch_size,
            optimizer="adam",
            lr=configuration.lr,
            weight_decay=configuration.weight_decay,
            seed=seed,
            device="cpu",
            # Not "auto", which would compile for all epochs: it cannot know that runs end early.
            engine="captured" if len(x) >= STEPS_WORTH_RECORDING * configuration.batch_size else "eager",
            progress=False,
            **stopping,
        )

    validation = (split.validation_x, split.validation_y)
    run = fit_joint(split.x, split.y, most_epochs, validation=validation, patience=PATIENCE)
    assert run.best is not None
    assert run.best_step is not None
    epochs, members = run.best_step // -(-len(split.x) // configuration.batch_size), run.members
    if on_validation_too:
        both = (torch.cat([split.x, split.validation_x]), torch.cat([split.y, split.validation_y]))
        members = fit_joint(*both, epochs).members
    on_train, on_test = (predict(members, x, batch_size=4096)[..., 0] for x in (split.x, split.test_x))
    return Trained(on_train, on_test, run.best, epochs)


def measure(outputs: Tensor, targets: Tensor, *, seed: int = 0) -> dict[str, Any]:
    """Return every number of figures 2 to 4 for one ensemble, of its members' predictions `(members, rows)` and targets `(rows,)`."""
    outputs, targets = outputs.double(), targets.double()
    parts = decompose(outputs, targets, loss="mse")
    found: dict[str, Any] = {
        "mse": float(parts.ensemble_error.mean()),
        "member_mse": float(parts.member_error.mean()),
        "best_member_mse": float((outputs - targets).square().mean(1).min()),
        "diversity": float(parts.diversity.mean()),
        "bias_share": bias_share(outputs),
    }
    for share in DROP_SHARES:
        found[f"drop_{share:g}"] = drop_increase(outputs, targets, share, seed=seed)
        found[f"drop_{share:g}_expected"] = expected_drop_increase(outputs, share)
    return found


def bias_share(outputs: Tensor) -> float:
    """Return the share of diversity that goes when each member's constant offset is taken away.

    Reading: 0 where members differ from row to row, 1 where they are shifted copies of each other.

    Example:
        >>> bias_share(torch.tensor([[5.0, 6.0], [1.0, 2.0]]))
        1.0
    """
    return 1 - spread(debias(outputs).outputs) / spread(outputs)


def spread(outputs: Tensor) -> float:
    """Return the mean variance of members around their mean: diversity for squared error."""
    return float(outputs.var(0, correction=0).mean())


def drop_increase(
    outputs: Tensor, targets: Tensor, share: float, *, repeats: int = DROP_REPEATS, seed: int = 0
) -> float:
    """Return by how much the squared error rises when a share of the members is dropped at random, of each row others."""
    left = len(outputs) - int(len(outputs) * share)
    total = 0.0
    for repeat in range(repeats):
        # Members in a random order for each row; the first ones stay.
        key = torch.tensor(derive(seed, "drop", repeat))
        chosen = bits(key, *outputs.shape).argsort(0)[:left]
        total += float((outputs.gather(0, chosen).mean(0) - targets).square().mean())
    return total / repeats - float((outputs.mean(0) - targets).square().mean())


def expected_drop_increase(outputs: Tensor, share: float) -> float:
    r"""Return what `drop_increase` is on average over all choices of members.

    $$\mathrm{DIV}\;\frac{M-m}{m\,(M-1)}$$

    with m of M members left: for squared error it depends on the diversity alone.

    Example:
        >>> expected_drop_increase(torch.tensor([[1.0], [-1.0]]), 0.5)
        1.0
    """
    count, left = len(outputs), len(outputs) - int(len(outputs) * share)
    return spread(outputs) * (count - left) / (left * (count - 1))


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
    """What decides the numbers of a run."""

    preparation: Preparation = "document"  # How features are prepared.
    trials: int = 20  # Configurations tried in each run's search.
    search_beta: float = 0.5  # The beta with which they are tried.
    betas: tuple[float, ...] = BETAS  # Those that the best configuration is trained with.
    most_epochs: int = MOST_EPOCHS  # Where training ends that has not stopped by itself.
    seed: int = 0  # Decides splits, weights, batches and the search.
    on_validation_too: bool = False  # Whether the best configuration is trained again with the validation rows.

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON gives it back: tuples become lists."""
        settings: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return settings


def search(evaluate: Callable[[Configuration], float], trials: int, seed: int) -> tuple[Configuration, list[Record]]:
    """Look for the configuration with the lowest value by Bayesian optimisation; return it, and every trial with its value."""
    optuna = import_optuna()
    tried: list[Record] = []

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


def measure_run(name: str, run: int, problem: Problem, settings: Settings) -> Record:
    """Search, retrain and measure one run on one set; return everything that is kept of it."""
    key = derive(settings.seed, name, run)
    split = split_problem(problem, settings.preparation, key, "split")
    # Processor time: with one thread it is what a run would take on a core of its own.
    start = time.process_time()

    def evaluate(configuration: Configuration) -> float:
        return train(
            split, configuration, settings.search_beta, seed=key, most_epochs=settings.most_epochs
        ).validation_error

    configuration, tried = search(evaluate, settings.trials, derive(key, "search"))
    middle = time.process_time()
    return {
        "set": name,
        "run": run,
        "settings": settings.as_json(),
        "configuration": asdict(configuration),
        "trials": tried,
        "betas": measure_betas(split, configuration, settings, seed=key),
        "search_seconds": middle - start,
        "retrain_seconds": time.process_time() - middle,
    }


def measure_betas(split: Split, configuration: Configuration, settings: Settings, seed: int) -> list[Record]:
    """Train one configuration for every beta and measure each ensemble on the test rows."""
    options: dict[str, Any] = {"most_epochs": settings.most_epochs, "on_validation_too": settings.on_validation_too}
    rows = []
    for beta in settings.betas:
        trained = train(split, configuration, beta, seed=seed, **options)
        rows.append(
            {
                "beta": beta,
                **measure(trained.test_outputs, split.test_y[:, 0], seed=seed),
                "train_mse": float((trained.train_outputs.mean(0) - split.y[:, 0]).square().mean()),
                "train_diversity": spread(trained.train_outputs),
                "validation_mse": trained.validation_error,
                "epochs": trained.epochs,
            }
        )
    return rows


def measure_all(
    problems: Mapping[str, Problem],
    num_runs: int,
    settings: Settings,
    folder: Path,
    *,
    minutes: float | None = None,
    only: Sequence[str] | None = None,
) -> list[Record]:
    """Measure every run of every set that the folder's `arms.jsonl` has not yet (see `run_arms`); return all that ended, set by set."""
    arms = [
        Arm(f"{name} run={run}", partial(measure_run, name, run, problem, settings), like=name)
        for run in range(num_runs)
        for name, problem in problems.items()
    ]
    # Networks this small gain nothing from a second thread.
    with one_thread():
        found = run_arms(arms, folder, settings=settings.as_json(), minutes=minutes, only=only)
    order = list(problems)
    return sorted(found.done.values(), key=lambda result: order.index(result["set"]))
