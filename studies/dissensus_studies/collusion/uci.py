"""Study `collusion-uci`: what becomes of small regression ensembles between independent and joint training.

Four tables, ten runs each: a fresh split, a search for the network, then the same network trained for eleven values of beta.
Each run is stored as it ends; a study that was ended goes on where it was.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from dissensus.members import DeepEnsemble, Members
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
    on_validation_too: bool = (
        False  # Whether each ensemble is trained again with the validation rows, and measured too.
    )


class Trained(NamedTuple):
    """An ensemble as it was at its best epoch, its error on the validation rows, and that epoch."""

    members: Members
    validation_error: float
    epochs: int


def fit_joint(rows: Rows, configuration: Configuration, beta: float, seed: int, epochs: int, **stopping: Any) -> Run:
    """Train an ensemble. Those of other betas differ in nothing else: all start with the same weights and see the same batches."""
    make = partial(mlp, rows.x.shape[1], [configuration["hidden"]] * configuration["layers"], 1)
    ensemble = DeepEnsemble(make, configuration["num_members"], derive(seed, "start"))
    recipe = {name: configuration[name] for name in ("lr", "batch_size", "weight_decay")} | stopping
    # Not "auto", which would compile for all epochs: it cannot know that runs end early.
    engine = "captured" if len(rows.x) >= STEPS_WORTH_RECORDING * configuration["batch_size"] else "eager"
    recipe |= {"optimizer": "adam", "device": "cpu", "engine": engine, "progress": False, "seed": seed}
    return fit(ensemble, rows, objective=Joint(beta, "mse"), epochs=epochs, **recipe)


def train(split: Split, configuration: Configuration, beta: float, settings: Settings, seed: int) -> Trained:
    """Train an ensemble; the epoch with the lowest error on the validation rows is kept."""
    stopping = {"validation": split.validation, "patience": PATIENCE}
    run = fit_joint(split.train, configuration, beta, seed, settings.most_epochs, **stopping)
    assert run.best is not None
    assert run.best_step is not None
    return Trained(run.members, run.best, run.best_step // -(-len(split.train.x) // configuration["batch_size"]))


def train_again(split: Split, configuration: Configuration, beta: float, epochs: int, seed: int) -> Members:
    """Train the same ensemble on the validation rows too, for as many epochs as were best without them."""
    rows = Rows(*map(torch.cat, zip(split.train, split.validation, strict=True)))
    return fit_joint(rows, configuration, beta, seed, epochs).members


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


def measure_split(members: Members, split: Split, seed: int) -> dict[str, Any]:
    """Return every number of an ensemble on the test rows, and its error and diversity on the training rows."""
    on_train, on_test = (predict(members, part.x, batch_size=4096)[..., 0] for part in (split.train, split.test))
    return {
        **measure(on_test, split.test.y[:, 0], seed=seed),
        "train_mse": float((on_train.mean(0) - split.train.y[:, 0]).square().mean()),
        "train_diversity": float(on_train.var(0, correction=0).mean()),
    }


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
        return train(split, configuration, settings.search_beta, settings, key).validation_error

    configuration, tried = search(evaluate, settings.trials, derive(key, "search"))
    middle = time.process_time()
    rows: list[Record] = []
    for beta in settings.betas:
        own = train(split, configuration, beta, settings, key)
        row = {"beta": beta, **measure_split(own.members, split, key)}
        row |= {"validation_mse": own.validation_error, "epochs": own.epochs}
        if settings.on_validation_too:
            again = train_again(split, configuration, beta, own.epochs, key)
            row["again"] = measure_split(again, split, key)
        rows.append(row)
    made = {"set": name, "run": run, "configuration": configuration, "trials": tried}
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
# What counts as harmful, or as an effect: the error changes by more than this share of itself.
HARM = 0.1
# "Around half", in shares of the diversity.
HALF = (1 / 3, 2 / 3)
# "Most β" end here; and the nearest to 1 that is not 1.
ELSEWHERE, NEAR = 0.8, 0.9
# So many times as large is called an explosion.
EXPLOSION = 10
# The set whose error collusion is said to leave alone.
UNAFFECTED = "facebook"
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
    keeps 1000 rows and takes no logarithms; "train+validation" trains each ensemble again on both parts, and judges these too. `runs`
    are those of each set, `epochs` the longest training, and `arms` are runs, such as "weather": several commands may share one folder.
    """
    # The Gaussian process behind the search needs scipy.
    if any(find_spec(name) is None for name in ("optuna", "scipy")):
        raise ModuleNotFoundError("The search needs optuna. Install with: pip install -e ./studies")
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
    again = uci_claims(by_set(found, again=True)) if settings.on_validation_too else []
    points = [(name, beta, row) for name, own in sets.items() for (_, beta), row in own.iterrows()]
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
    tables = [claims_table(claims, "Each set is judged run by run, by an exact sign test at 5 %.")]
    tables += [claims_table(again, "The same, trained again on training and validation rows.")] if again else []
    outputs.sections += [Section("What the document says", *tables), drawing.section(outputs), Section("By β", table)]
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


def by_set(found: Sequence[Mapping[str, Any]], again: bool = False) -> dict[str, Runs]:
    """Return runs by the set they belong to; `again`, the ensembles that were trained on the validation rows too."""
    rows = [
        {"set": result["set"], "run": result["run"], **row, **(row["again"] if again else {})}
        for result in found
        for row in result["betas"]
    ]
    return {} if not rows else dict(list(pd.DataFrame(rows).set_index(["run", "beta"]).groupby("set", sort=False)))


class Statement(NamedTuple):
    """What the document says of figures 2 to 4, and how one set is judged: most of its runs must agree, by a sign test."""

    claim: str
    judge: Callable[[Runs], Case]
    speaks_of: Callable[[str], bool] = lambda name: True  # Whether it speaks of a set.
    most: bool = False  # Whether it is said of most sets, not of all.
    regime: str | None = None  # Where the document says it of something else.

    def cases(self, sets: Mapping[str, Runs]) -> dict[str, Case]:
        """Return what it finds on each set that it speaks of."""
        return {name: self.judge(runs) for name, runs in sets.items() if self.speaks_of(name)}


def uci_claims(sets: Mapping[str, Runs]) -> list[Claim]:
    """Judge the document's statements."""
    found = {each.claim: each.cases(sets) for each in STATEMENTS}
    return [Claim.over(claim, cases) for claim, cases in found.items() if cases]


def _beyond(values: "pd.Series[float]", limit: float, side: Literal["higher", "lower"], text: str) -> Case:
    """Judge that a quantity, one value a run, is beyond a limit; `text` is what is said of its median."""
    compared = Comparison.of([limit] * len(values), [*values])
    count = compared.lower if side == "lower" else compared.repeats - compared.lower
    return _told(text, values, count), compared.tells(side)


def _told(text: str, values: "pd.Series[float]", count: int) -> str:
    """Return a median in words, zero without a sign, and in how many runs a statement holds."""
    return f"{text.format(values.median()).replace('-0 %', '0 %').replace('+0 %', '0 %')}, {count} of {len(values)}"


def _within(values: "pd.Series[float]", low: float, high: float, text: str) -> Case:
    """Judge that a quantity lies between two limits; it does not where it is told to be beyond one of them."""
    (_, above), (_, below) = _beyond(values, low, "higher", ""), _beyond(values, high, "lower", "")
    holds = False if False in (above, below) else None if None in (above, below) else True
    return _told(text, values, values.between(low, high).sum()), holds


def _change(runs: Runs) -> "pd.Series[float]":
    """Return how much larger the ensemble's error is at beta 1 than at 0, in shares of the latter, run by run."""
    return _at(runs["mse"], 1.0) / _at(runs["mse"], 0.0) - 1


def _share(runs: Runs, name: str) -> "pd.Series[float]":
    """Return a quantity in shares of the ensemble's error, by run and beta."""
    return runs[name] / runs["mse"]


def _largest(values: "pd.Series[float]") -> "pd.Series[float]":
    """Return the largest value up to where "most β" end, run by run."""
    return values[values.index.get_level_values("beta") <= ELSEWHERE].groupby("run").max()


def _less_near_one(runs: Runs) -> Case:
    """Judge that debiasing removes less of the diversity just below 1 than at 1."""
    near = _at(runs["bias_share"], NEAR)
    return _beyond(near - _at(runs["bias_share"], 1.0), 0.0, "lower", f"{100 * near.median():.0f} %")


def _wider_gap(runs: Runs) -> Case:
    """Judge that test and training error are further apart at beta 1 than at 0."""
    gap = runs["mse"] - runs["train_mse"]
    return _beyond(_at(gap, 1.0) - _at(gap, 0.0), 0.0, "higher", "{:+.3f}")


_DROPPED = f"{100 * DROP_SHARES[-1]:.0f} % dropped"
STATEMENTS = (
    Statement(
        "Joint training (β = 1) has a larger test error than independent training: median change, runs with a larger one",
        lambda runs: _beyond(100 * _change(runs), 0.0, "higher", "{:+.0f} %"),
        lambda name: name != UNAFFECTED,
    ),
    Statement(
        f"Facebook's error is hardly affected: median change, runs within {100 * HARM:.0f} %",
        lambda runs: _within(100 * _change(runs), -100 * HARM, 100 * HARM, "{:+.0f} %"),
        lambda name: name == UNAFFECTED,
    ),
    Statement(
        f"Diversity stays low for most β: largest ratio to the MSE up to β = {ELSEWHERE:g}, runs below 1",
        lambda runs: _beyond(_largest(_share(runs, "diversity")), 1.0, "lower", "{:.2f}"),
    ),
    Statement(
        f"It explodes as β → 1: β = 1 against β = 0, runs above {EXPLOSION} times",
        lambda runs: _beyond(
            _at(runs["diversity"], 1.0) / _at(runs["diversity"], 0.0), EXPLOSION, "higher", "{:.0f} ×"
        ),
    ),
    Statement(
        "… to levels that are often above the MSE (on most sets): ratio at β = 1, runs above 1",
        lambda runs: _beyond(_at(_share(runs, "diversity"), 1.0), 1.0, "higher", "{:.1f} ×"),
        most=True,
    ),
    Statement(
        "Debiasing typically (on most sets) removes around half of the diversity at β = 1: runs within a third to two thirds",
        lambda runs: _within(100 * _at(runs["bias_share"], 1.0), 100 * HALF[0], 100 * HALF[1], "{:.0f} %"),
        most=True,
    ),
    Statement(f"It removes less elsewhere: at β = {NEAR:g}, runs with less", _less_near_one),
    Statement(
        f"Dropping members harms at β = 1: rise of the MSE with {_DROPPED}, runs above {100 * HARM:.0f} %",
        lambda runs: _beyond(100 * _at(_share(runs, MOST_DROPPED), 1.0), 100 * HARM, "higher", "{:+.0f} %"),
    ),
    Statement(
        f"… and hardly elsewhere: largest rise up to β = {ELSEWHERE:g}, runs below {100 * HARM:.0f} %",
        lambda runs: _beyond(100 * _largest(_share(runs, MOST_DROPPED)), 100 * HARM, "lower", "{:+.1f} %"),
    ),
    Statement(
        "Joint training has the larger generalisation gap (the document shows it for images): median difference, runs with a larger one",
        _wider_gap,
        regime="tables",
    ),
)


def _at(values: "pd.Series[float]", beta: float) -> "pd.Series[float]":
    """Return a quantity at one beta, run by run."""
    return values.xs(beta, level="beta")
