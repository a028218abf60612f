"""Study `collusion-uci`: what becomes of small regression ensembles between independent and joint training.

Four tables, ten runs each: a fresh split, a search for the network, then the same network trained for eleven values of beta.
Each run is stored as it ends; a study that was ended goes on where it was.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dissensus._machine import one_thread
from dissensus.architectures import mlp
from dissensus.data.frames import read_table
from dissensus.data.toy import diabetes
from dissensus.diagnostics import diagnose
from dissensus.html import Section, Table
from dissensus.members import DeepEnsemble
from dissensus.objectives import Joint
from dissensus.predictions import predict
from dissensus.randomness import derive, permutation
from dissensus.training import Run, fit
from dissensus_studies.deep_ensembles.uci import find_sets
from dissensus_studies.harness.arm_log import Arm, Record, run_arms
from dissensus_studies.harness.claims import Case, Claim, claims_table
from dissensus_studies.harness.figures import sweep
from dissensus_studies.harness.outputs import Outputs, print_table
from dissensus_studies.harness.statistics import Comparison, Summary

Preparation = Literal["document", "tangos"]

NUM_RUNS, QUICK_RUNS = 10, 3
QUICK: dict[str, Any] = {"trials": 6, "most_epochs": 60}
BETAS = tuple(tenth / 10 for tenth in range(11))
DROP_SHARES = (0.2, 0.4, 0.6)
# Of all rows, and of the rest.
TEST_SHARE = VALIDATION_SHARE = 0.2
# A feature counts as skewed above this; the document names no number.
SKEWED = 1.0
# The other preparation keeps this many rows of the two larger sets, in their order.
TANGOS_ROWS = 1000
PATIENCE = 5
# The document names no largest number of epochs.
MOST_EPOCHS = 300
# Recording a step takes as long as some hundred steps, which runs with fewer steps an epoch than this do not win back.
STEPS_WORTH_RECORDING = 50


class Source(NamedTuple):
    """How a file becomes a regression problem."""

    file: str  # Name of the file.
    target: str  # Column to predict.
    drop: tuple[str, ...]  # Columns that are no features.
    categories: tuple[str, ...]  # Columns that become one 0/1 feature for each of their values.
    large: bool = False  # Whether the first of those is left out, and the other preparation keeps its first rows only.


_NO_FEATURES, _WORDS = ("#CAS", "SMILES", "Set", "Class"), ("nHM", "N-072", "B02[C-N]", "F04[C-O]")
SOURCES: Mapping[str, Source] = {
    "bioconcentration": Source("Grisoni_et_al_2016_EnvInt88.csv", "logBCF", _NO_FEATURES, _WORDS),
    "weather": Source("Bias_correction_ucl.csv", "Next_Tmax", ("Date", "Next_Tmin"), ("station",), large=True),
    "facebook": Source("dataset_Facebook.csv", "Lifetime Post Total Impressions", (), ("Type",)),
    "abalone": Source("abalone.csv", "Rings", (), ("Sex",), large=True),
}


class Rows(NamedTuple):
    """Features `(rows, features)` and targets `(rows,)`; of a part of a split, which is standardised, `(rows, 1)`."""

    x: Tensor
    y: Tensor


class Split(NamedTuple):
    """One run's rows, standardised on the training part."""

    train: Rows
    validation: Rows
    test: Rows


def load_problem(name: str, path: Path, preparation: Preparation) -> Rows:
    """Read one of the four sets; rows with missing values are left out."""
    source = SOURCES[name]
    frame = read_table(path)[0].dropna()
    if preparation == "tangos" and source.large:
        frame = frame[:TANGOS_ROWS]
    inputs = frame.drop(columns=[source.target, *source.drop])
    words = [n for n in inputs if n in source.categories or inputs[n].dtype.kind not in "iuf"]
    # A 0/1 column for each value of a category, in the order of the values as texts.
    parts = [
        pd.get_dummies(inputs[n].astype(str), drop_first=source.large) if n in words else inputs[[n]] for n in inputs
    ]
    x = np.concatenate([part.to_numpy(np.float32) for part in parts], axis=1)
    return Rows(*(torch.from_numpy(part).double() for part in (x, frame[source.target].to_numpy(np.float32))))


def split_problem(problem: Rows, preparation: Preparation, *key: int | str) -> Split:
    """Draw test, validation and training rows by a key, and prepare all on the training rows."""
    rows = permutation(torch.tensor(derive(*key)), len(problem.x))
    num_test = round(TEST_SHARE * len(rows))
    num_validation = round(VALIDATION_SHARE * (len(rows) - num_test))
    test, validation, train = rows.split([num_test, num_validation, len(rows) - num_test - num_validation])
    x = log_skewed(problem.x, train) if preparation == "document" else problem.x
    x, y = (standardised(values, train) for values in (x, problem.y[:, None]))
    return Split(*(Rows(x[part], y[part]) for part in (train, validation, test)))


def log_skewed(x: Tensor, train: Tensor) -> Tensor:
    """Return features; those of more than two values whose skewness on the training rows exceeds 1 become log(1 + x - min)."""
    moved = x[train] - x[train].mean(0)
    skewness = moved.pow(3).mean(0) / moved.square().mean(0).clamp_min(1e-12).pow(1.5)
    logs = (x - x[train].amin(0)).clamp_min(0).log1p()
    measured = torch.tensor([len(column.unique()) > 2 for column in x.T])
    return torch.where(measured & (skewness > SKEWED), logs, x)


def standardised(values: Tensor, train: Tensor) -> Tensor:
    """Return `(rows, columns)` with mean 0 and standard deviation 1 on the training rows, in float32."""
    centre, spread = values[train].mean(0), values[train].std(0, correction=0)
    # A category that no training row has is constant there; divided by its deviation it would be NaN.
    return ((values - centre) / torch.where(spread > 0, spread, 1.0)).float()


# What the search decides: a value of each.
Configuration = Mapping[str, Any]
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


class Trained(NamedTuple):
    """An ensemble as it was at its best epoch: outputs `(members, rows)`, its error on the validation rows, and that epoch."""

    train_outputs: Tensor
    test_outputs: Tensor
    validation_error: float
    epochs: int


def train(split: Split, configuration: Configuration, beta: float, settings: Settings, seed: int) -> Trained:
    """Train an ensemble; its best epoch on the validation rows is kept, or found and then trained again `on_validation_too`.

    Those of other betas differ in nothing else: member j of each starts with the same weights and all see the same batches.
    """
    widths = [configuration["hidden"]] * configuration["layers"]
    recipe: dict[str, Any] = {name: configuration[name] for name in ("lr", "batch_size", "weight_decay")}
    recipe |= {"optimizer": "adam", "device": "cpu", "progress": False, "objective": Joint(beta, "mse"), "seed": seed}

    def fit_joint(rows: Rows, epochs: int, **stopping: Any) -> Run:
        make = partial(mlp, rows.x.shape[1], widths, 1)
        ensemble = DeepEnsemble(make, configuration["num_members"], derive(seed, "start"))
        # Not "auto", which would compile for all epochs: it cannot know that runs end early.
        recorded = len(rows.x) >= STEPS_WORTH_RECORDING * configuration["batch_size"]
        return fit(ensemble, rows, epochs=epochs, engine="captured" if recorded else "eager", **recipe, **stopping)

    run = fit_joint(split.train, settings.most_epochs, validation=split.validation, patience=PATIENCE)
    assert run.best is not None
    assert run.best_step is not None
    epochs, members = run.best_step // -(-len(split.train.x) // configuration["batch_size"]), run.members
    if settings.on_validation_too:
        members = fit_joint(Rows(*map(torch.cat, zip(split.train, split.validation, strict=True))), epochs).members
    on_train, on_test = (predict(members, part.x, batch_size=4096)[..., 0] for part in (split.train, split.test))
    return Trained(on_train, on_test, run.best, epochs)


def measure(outputs: Tensor, targets: Tensor, *, seed: int = 0) -> dict[str, Any]:
    """Return every number of figures 2 to 4 for one ensemble, of its members' predictions `(members, rows)` and targets `(rows,)`."""
    found = diagnose(outputs.double(), targets.double(), loss="mse", drop_fractions=DROP_SHARES, seed=seed)
    dropped = found.drop_curve()
    numbers = {
        "mse": found.ensemble_error,
        "member_mse": found.member_error,
        "best_member_mse": found.best_member_error,
        "diversity": found.diversity,
        "bias_share": found.bias_share,
    }
    for share, risen, expected in zip(dropped.fractions, dropped.increase, dropped.exact_increase, strict=True):
        numbers |= {f"drop_{share:g}": risen, f"drop_{share:g}_expected": expected}
    return numbers


def search(evaluate: Callable[[Configuration], float], trials: int, seed: int) -> tuple[Configuration, list[Record]]:
    """Look for the configuration with the lowest value by Bayesian optimisation; return it, and every trial with its value."""
    import optuna

    tried: list[Record] = []

    def objective(trial: Any) -> float:
        # Places in the space, not values: the process then knows their order.
        places = {name: trial.suggest_int(name, 0, len(choices) - 1) for name, choices in SEARCH_SPACE.items()}
        configuration = {name: SEARCH_SPACE[name][place] for name, place in places.items()}
        tried.append({**configuration, "value": (value := evaluate(configuration))})
        return value

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.GPSampler(seed=seed & 0xFFFFFFFF, n_startup_trials=STARTUP_TRIALS)
    optuna.create_study(sampler=sampler).optimize(objective, n_trials=trials)
    best = min(tried, key=itemgetter("value"))
    return {name: best[name] for name in SEARCH_SPACE}, tried


def measure_run(name: str, run: int, problem: Rows, settings: Settings) -> Record:
    """Search, retrain and measure one run on one set; return everything that is kept of it."""
    key = derive(settings.seed, name, run)
    split = split_problem(problem, settings.preparation, key, "split")
    # Processor time: with one thread it is what a run would take on a core of its own.
    start = time.process_time()

    def evaluate(configuration: Configuration) -> float:
        once = replace(settings, on_validation_too=False)
        return train(split, configuration, settings.search_beta, once, key).validation_error

    configuration, tried = search(evaluate, settings.trials, derive(key, "search"))
    middle = time.process_time()
    rows: list[Record] = []
    for beta in settings.betas:
        own = train(split, configuration, beta, settings, key)
        rows.append(
            {
                "beta": beta,
                **measure(own.test_outputs, split.test.y[:, 0], seed=key),
                "train_mse": float((own.train_outputs.mean(0) - split.train.y[:, 0]).square().mean()),
                "train_diversity": float(own.train_outputs.var(0, correction=0).mean()),
                "validation_mse": own.validation_error,
                "epochs": own.epochs,
            }
        )
    made = {"set": name, "run": run, "settings": asdict(settings), "configuration": configuration, "trials": tried}
    seconds = {"search_seconds": middle - start, "retrain_seconds": time.process_time() - middle}
    return {**made, "betas": rows, **seconds}


def measure_all(
    problems: Mapping[str, Rows], num_runs: int, settings: Settings, folder: Path, **limits: Any
) -> list[Record]:
    """Measure every run of every set that the folder's `arms.jsonl` has not yet; return all that ended, set by set; see `run_arms`."""
    arms = [
        Arm(f"{name} run={run}", partial(measure_run, name, run, problem, settings), like=name)
        for run in range(num_runs)
        for name, problem in problems.items()
    ]
    # Networks this small gain nothing from a second thread.
    with one_thread():
        found = run_arms(arms, folder, settings=asdict(settings), **limits)
    return sorted(found.done.values(), key=lambda result: list(problems).index(result["set"]))


SHOWN_BETAS = (0.0, 0.5, 0.8, 0.9, 1.0)
# What counts as harmful: the error rises by more than this share of itself.
HARM = 0.1
# "Around half", in shares of the diversity.
HALF = (1 / 3, 2 / 3)
# "Elsewhere", as against near 1.
ELSEWHERE = 0.8
MOST_DROPPED = f"drop_{DROP_SHARES[-1]:g}"


def run(
    output: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    data: Path | None = None,
    runs: int | None = None,
    setting: str | None = None,
    epochs: int | None = None,
    minutes: float | None = None,
    arms: Sequence[str] | None = None,
) -> Path:
    """Run the study; see `dissensus_studies.Study.run`. One that was ended goes on from the runs that the folder holds.

    `quick` makes three runs with a short search, on data that comes with scikit-learn or on the small sets of `data`. `setting` "tangos"
    keeps 1000 rows and takes no logarithms; "train+validation" trains the chosen networks again on both parts. `runs` are those of each
    set, `epochs` the longest training, and `arms` are runs, such as "weather": several commands may share one folder.
    """
    # The Gaussian process behind the search needs scipy.
    if any(find_spec(name) is None for name in ("optuna", "scipy")):
        raise ModuleNotFoundError("The search needs optuna. Install with: pip install 'dissensus[studies]'")
    if setting not in (None, "tangos", "train+validation"):
        raise ValueError(f"`setting` must be 'tangos', 'train+validation' or left out; got {setting!r}.")
    preparation: Preparation = "tangos" if setting == "tangos" else "document"
    shorter = (QUICK if quick else {}) | ({} if epochs is None else {"most_epochs": epochs})
    settings = Settings(preparation, seed=seed, on_validation_too=setting == "train+validation", **shorter)
    problems = find_problems(data, quick, preparation)
    outputs = Outputs(output)
    num_runs = runs or (QUICK_RUNS if quick else NUM_RUNS)
    found = measure_all(problems, num_runs, settings, outputs.folder, minutes=minutes, only=arms)
    if not found:
        raise ValueError("No run ended in the time given. Run it again for longer, or with quick.")
    sets = by_set(found)
    claims = uci_claims(sets)
    points = [(result["set"], row["beta"], row) for result in found for row in result["betas"]]
    names = ("mse", "diversity", "member_mse", "bias_share", MOST_DROPPED)
    panels = {n.replace("_", " "): itemgetter(n) for n in names}
    drawing = sweep("collusion_uci", "Over β", points, panels, "β")
    columns = ("set", "β", "MSE", "diversity", "members' MSE", "removed by debiasing", "rise if 60 % are dropped")
    rows = [
        [name, f"{beta:g}", *(str(Summary(tuple(_at(own[column], beta)))) for column in names)]
        for name, own in sets.items()
        for beta in SHOWN_BETAS
    ]
    table = Table(columns, rows, "Mean over runs ± standard error, on standardised targets")
    made = {"claims": claims, "settings": asdict(settings), "quick": quick, "optuna": version("optuna")}
    outputs.results({**made, "runs": found})
    outputs.sections += [
        Section("What the document says", claims_table(claims, "Comparisons are judged by an exact sign test at 5 %.")),
        drawing.section(outputs),
        Section("By β", table),
    ]
    print_table(table)
    lead = "Members trained to be right together become wrong apart: how soon, by how much, and what it costs."
    return outputs.page("Between independent and joint training: tabular regression", lead)


def find_problems(data: Path | None, quick: bool = False, preparation: Preparation = "document") -> dict[str, Rows]:
    """Return the sets that a folder, `../shared/data` by default, holds by itself or in `uci`; patients for the quick form without one."""
    if quick and data is None:
        loaded = diabetes()
        assert loaded.y is not None
        return {"diabetes": Rows(loaded.x.double(), loaded.y.double())}
    files = find_sets(data, {name: source.file for name, source in SOURCES.items()}, ("uci", ""))
    small = {name: path for name, path in files.items() if quick and not SOURCES[name].large}
    return {name: load_problem(name, path, preparation) for name, path in (small or files).items()}


# All runs of one set by run and beta, a column for each quantity.
Runs: TypeAlias = pd.DataFrame


def by_set(found: Sequence[Mapping[str, Any]]) -> dict[str, Runs]:
    """Return runs by the set they belong to."""
    rows = [{"set": result["set"], "run": result["run"], **row} for result in found for row in result["betas"]]
    return dict(list(pd.DataFrame(rows).set_index(["run", "beta"]).groupby("set", sort=False)))


def uci_claims(sets: Mapping[str, Runs]) -> list[Claim]:
    """Judge the document's statements on figures 2 to 4."""
    found = {name: _cases(runs) for name, runs in sets.items()}
    statements = next(iter(found.values()))
    claims = [Claim.over(each, {name: own[each] for name, own in found.items()}) for each in statements]
    worst = {name: runs["mse"].groupby("beta").mean().idxmax() for name, runs in sets.items()}
    measured = "; ".join(f"{name} is worst at β = {beta:g}" for name, beta in worst.items())
    most = 2 * sum(beta == 1.0 for beta in worst.values()) > len(worst)
    of_all = Claim.checked("β = 1 has the largest mean test error of all β, for most sets", measured, most)
    return [claims[0], of_all, *claims[1:]]


def _cases(runs: Runs) -> dict[str, Case]:
    """Return what each statement finds on one set."""
    # Medians over runs, by beta, in shares of the MSE.
    diversity, harm = ((runs[name] / runs["mse"]).groupby("beta").median() for name in ("diversity", MOST_DROPPED))
    low, far = diversity.loc[:ELSEWHERE].max(), harm.loc[:ELSEWHERE].max()
    growth = (_at(runs["diversity"], 1.0) / _at(runs["diversity"], 0.0)).median()
    removed, spread = _at(runs["bias_share"], 1.0).mean(), _at(runs["bias_share"], 1.0).std(ddof=0)
    harms = (
        f"Dropping members harms only near β = 1 ({100 * DROP_SHARES[-1]:.0f} % dropped raise the MSE by over {100 * HARM:.0f} % there, "
        f"by less up to {ELSEWHERE:g})"
    )
    return {
        "Joint training (β = 1) has a larger test error than independent training": _higher(runs["mse"]),
        "Diversity at β = 1 is far above the ensemble's error (its median is above the MSE)": (
            f"{diversity[1.0]:.1f} × the MSE, {growth:.0f} × that of β = 0",
            diversity[1.0] > 1,
        ),
        f"It stays low for most β (below the MSE for all β ≤ {ELSEWHERE:g})": (f"{low:.2f} × the MSE", low < 1),
        "Debiasing removes around half of the diversity at β = 1 (a third to two thirds)": (
            f"{100 * removed:.0f} ± {100 * spread:.0f} %",
            HALF[0] <= removed <= HALF[1],
        ),
        "Debiasing removes more at β = 1 than at β = 0": _higher(runs["bias_share"]),
        harms: (
            f"+{100 * harm[1.0]:.0f} % at β = 1, at most +{100 * far:.1f} % up to {ELSEWHERE:g}",
            harm[1.0] > HARM > far,
        ),
        "Joint training has the larger generalisation gap (test minus training error)": _higher(
            runs["mse"] - runs["train_mse"]
        ),
    }


def _at(values: "pd.Series[float]", beta: float) -> "pd.Series[float]":
    """Return a quantity at one beta, run by run."""
    return values.xs(beta, level="beta")


def _higher(values: "pd.Series[float]") -> Case:
    """Judge that a quantity is higher at beta 1 than at 0."""
    compared = Comparison.of(_at(values, 0.0), _at(values, 1.0))
    return str(compared), compared.tells("higher")
