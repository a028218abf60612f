"""Study `tabular`: the estimators with their defaults beside those of scikit-learn, on fifteen tables.

Every method gets the same 600 training rows; scikit-learn's get them as our encoder reads them, standardised. What is measured lands
in `records.jsonl`, a line for each table, repeat and method, as it comes: a run that is stopped goes on where it was. The page is made
from those lines and nothing else.
"""

import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from sklearn import datasets, ensemble
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.neural_network import MLPClassifier, MLPRegressor

from dissensus import metrics, plots
from dissensus.conformal import intervals
from dissensus.data.tables import columns_of
from dissensus.estimators import EnsembleClassifier, EnsembleRegressor, Features
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.statistics import Summary
from dissensus_studies.recorded import markdown, span, template

if TYPE_CHECKING:
    import matplotlib.figure

TRAINING_ROWS, TEST_ROWS = 600, 300
LEAST_PROBABILITY = 1e-3
OURS = "ensemble"
REPEATS = 3
COVERAGE = 0.9


class Table(NamedTuple):
    """Rows and targets; targets of whole numbers are classes."""

    x: pd.DataFrame
    y: np.ndarray

    @property
    def classes(self) -> bool:
        """Whether targets are classes."""
        return self.y.dtype.kind in "iu"


def named(rows: tuple[np.ndarray, np.ndarray], classes: bool = False) -> Table:
    """Return features and targets as a table, with names for its columns; classes are numbered."""
    x, y = rows
    return Table(pd.DataFrame(x).add_prefix("x"), np.unique(y, return_inverse=True)[1] if classes else y)


def _bundled(load: Callable[..., Any]) -> Table:
    x, y = load(return_X_y=True, as_frame=True)
    return Table(x, y.to_numpy())


def _uci(folder: Path, name: str, least: float | None = None) -> Table:
    stored = np.load(folder / "dropout_splits" / f"{name}.npz")
    y = stored["y"].ravel().astype(np.float64)
    return named((stored["X"], y if least is None else (y >= least).astype(np.int64)))


def _csv(folder: Path, name: str, target: str, drop: Sequence[str] = ()) -> Table:
    frame = pd.read_csv(folder / name).drop(columns=list(drop))
    return Table(frame, pd.factorize(frame.pop(target), sort=True)[0])


def _loans(seed: int, classes: bool) -> Table:
    """Numbers with missing values, categories, a boolean and a date decide, with noise, how much is lent, or whether it is paid back."""
    chance = np.random.default_rng(seed)
    rows = 1500
    income = chance.lognormal(10, 0.6, rows)
    age = chance.integers(18, 80, rows).astype(np.float64)
    work = chance.choice(["employed", "self-employed", "retired", "none"], rows, p=[0.6, 0.2, 0.1, 0.1])
    owner = chance.random(rows) < 0.4
    day = chance.integers(0, 1500, rows)
    risk = (
        1.5 * (np.log(income) - 10)
        + np.sin(age / 8)
        + np.select([work == "employed", work == "none"], [0.6, -1.2], 0.0)
        + 0.8 * owner * (age > 40)
        + 0.5 * np.cos(2 * np.pi * day / 365.25)
    )
    frame = pd.DataFrame(
        {
            "income": np.where(chance.random(rows) < 0.1, np.nan, income),
            "age": age,
            "work": pd.Series(work).mask(chance.random(rows) < 0.05),
            "owner": owner,
            "since": pd.Timestamp("2020-01-01") + pd.to_timedelta(day, unit="D"),
            "noise": chance.normal(size=rows),
        }
    )
    if classes:
        return Table(frame, (risk + chance.logistic(size=rows) > 0).astype(np.int64))
    return Table(frame, np.exp(0.5 * risk) + 0.3 * chance.standard_t(5, size=rows))


_CLUSTERS = {"n_informative": 6, "n_redundant": 4, "n_classes": 3, "flip_y": 0.05}
_NO_FEATURES = ("#CAS", "SMILES", "Set", "logBCF")
# Tables by name: each is read, or made, from a folder of data and a seed.
TABLES: Mapping[str, Callable[[Path, int], Table]] = {
    "breast cancer": lambda folder, seed: _bundled(datasets.load_breast_cancer),
    "wine cultivars": lambda folder, seed: _bundled(datasets.load_wine),
    "digits": lambda folder, seed: _bundled(datasets.load_digits),
    "bioconcentration": lambda folder, seed: _csv(folder, "Grisoni_et_al_2016_EnvInt88.csv", "Class", _NO_FEATURES),
    "abalone sex": lambda folder, seed: _csv(folder, "abalone.csv", "Sex"),
    "good wine": lambda folder, seed: _uci(folder, "wine-quality-red", least=6),
    "clusters (generated)": lambda folder, seed: named(
        datasets.make_classification(1500, 20, **_CLUSTERS, random_state=seed)
    ),
    "loans (generated)": lambda folder, seed: _loans(seed, classes=True),
    "diabetes": lambda folder, seed: _bundled(datasets.load_diabetes),
    "boston": lambda folder, seed: _uci(folder, "bostonHousing"),
    "concrete": lambda folder, seed: _uci(folder, "concrete"),
    "kin8nm": lambda folder, seed: _uci(folder, "kin8nm"),
    "power plant": lambda folder, seed: _uci(folder, "power-plant"),
    "friedman (generated)": lambda folder, seed: named(datasets.make_friedman1(1500, 10, noise=1.0, random_state=seed)),
    "amounts (generated)": lambda folder, seed: _loans(seed, classes=False),
}
_BUNDLED = ("breast cancer", "wine cultivars", "digits", "diabetes")
WITHOUT_DATA = tuple(name for name in TABLES if "generated" in name or name in _BUNDLED)


class Split(NamedTuple):
    """A repeat of a table: rows to train on, to test on, and three sets of rows that are unlike them."""

    train: Table
    test: Table
    unlike: Mapping[str, pd.DataFrame]


def split(table: Table, seed: int) -> Split:
    """Set aside the tenth of the rows that lies furthest out along the first principal component; divide the others."""
    chance = np.random.default_rng(seed)
    standard = Features.fit(columns_of(table.x), (), 0).standard(columns_of(table.x))
    direction = np.linalg.svd(standard - standard.mean(0), full_matrices=False)[2][0]
    side = standard @ direction * chance.choice([-1, 1])
    far = side >= np.quantile(side, 0.9)
    order = chance.permutation(np.flatnonzero(~far))
    count = min(TRAINING_ROWS, len(order) * 3 // 4)
    train, test = order[:count], order[count : count + TEST_ROWS]
    x = table.x.iloc[test].reset_index(drop=True)
    shuffled = pd.DataFrame({name: chance.permutation(x[name].array) for name in x}).astype(x.dtypes.to_dict())
    numbers = [name for name in x if x[name].dtype.kind in "if" and x[name].nunique() > 2]
    wrong = x.astype(dict.fromkeys(numbers, np.float64))
    for row, name in enumerate(chance.choice(numbers, len(x))):
        wrong.loc[row, name] += 10 * table.x[name].std()
    furthest = table.x[far].sample(min(int(far.sum()), TEST_ROWS), random_state=seed)
    unlike = {"far": furthest, "shuffled": shuffled, "wrong unit": wrong}
    return Split(Table(table.x.iloc[train], table.y[train]), Table(x, table.y[test]), unlike)


class Encoded:
    """One of scikit-learn's estimators behind our encoder; regressors with a scale from rows that are held out."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def fit(self, x: pd.DataFrame, y: np.ndarray) -> "Encoded":
        """Learn columns, train, and find the scale of the errors."""
        self.features = Features.fit(columns_of(x), (), 0)
        rows = self.features.standard(columns_of(x))
        if y.dtype.kind in "iu":
            self.model.fit(rows, y)
            return self
        held_out = np.random.default_rng(0).permutation(len(y))[: int(0.1 * len(y))]
        training = np.setdiff1d(np.arange(len(y)), held_out)
        self.centre, self.size = y[training].mean(), y[training].std()
        self.model.fit(rows[training], (y[training] - self.centre) / self.size)
        self.factor = 1.0
        mean, sd = self.predict(x.iloc[held_out])
        self.factor = float(np.sqrt(np.mean(((y[held_out] - mean) / sd) ** 2)))
        self.held_out = (mean, sd * self.factor), y[held_out]
        return self

    def predict_proba(self, x: pd.DataFrame) -> np.ndarray:
        """Return probabilities of the classes."""
        return self.model.predict_proba(self.features.standard(columns_of(x)))

    def predict(self, x: pd.DataFrame, return_std: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation: a Gaussian process's own, a forest's by its trees, otherwise one for all rows."""
        rows = self.features.standard(columns_of(x))
        if isinstance(self.model, GaussianProcessRegressor):
            mean, sd = self.model.predict(rows, return_std=True)
        elif isinstance(self.model, ensemble.RandomForestRegressor):
            answers = np.stack([tree.predict(rows) for tree in self.model.estimators_])
            mean, sd = answers.mean(0), np.maximum(answers.std(0), 1e-2)
        else:
            mean, sd = self.model.predict(rows), np.ones(len(rows))
        return mean * self.size + self.centre, sd * self.size * self.factor

    def predict_interval(self, x: pd.DataFrame, coverage: float) -> np.ndarray:
        """Return conformal intervals."""
        return intervals(*self.held_out, self.predict(x), coverage)


_KERNEL = ConstantKernel(1.0) * RBF(3.0, (0.1, 100))
_NOISY = _KERNEL + WhiteKernel(0.1, (1e-4, 10))
Methods = Mapping[str, Callable[[int], Any]]
CLASSIFIERS: Methods = {
    OURS: lambda seed: EnsembleClassifier(random_state=seed),
    "random forest": lambda seed: Encoded(ensemble.RandomForestClassifier(random_state=seed)),
    "boosting": lambda seed: Encoded(ensemble.HistGradientBoostingClassifier(random_state=seed)),
    "one MLP": lambda seed: Encoded(MLPClassifier(early_stopping=True, max_iter=500, random_state=seed)),
    "Gaussian process": lambda seed: Encoded(GaussianProcessClassifier(_KERNEL, random_state=0)),
}
REGRESSORS: Methods = {
    OURS: lambda seed: EnsembleRegressor(random_state=seed),
    "random forest": lambda seed: Encoded(ensemble.RandomForestRegressor(random_state=seed)),
    "boosting": lambda seed: Encoded(ensemble.HistGradientBoostingRegressor(random_state=seed)),
    "one MLP": lambda seed: Encoded(MLPRegressor(early_stopping=True, max_iter=500, random_state=seed)),
    "Gaussian process": lambda seed: Encoded(GaussianProcessRegressor(_NOISY, random_state=0)),
}


def measure(model: Any, parts: Split) -> Record:
    """Train and test one method; times are of the processor, which other programs do not change."""
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(parts.train.x, parts.train.y)
        trained = time.process_time()
        found = _classified(model, parts) if parts.train.classes else _predicted(model, parts)
    return rounded(found) | {"seconds": round(trained - began, 3)}


def rounded(value: Any) -> Any:
    """Return numbers with five decimals."""
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else round(float(value), 5)


def _classified(model: Any, parts: Split) -> Record:
    def score(x: pd.DataFrame) -> np.ndarray:
        probabilities = model.predict_proba(x)
        return -(probabilities * np.log(np.maximum(probabilities, 1e-12))).sum(1)

    raw = np.maximum(model.predict_proba(parts.test.x), LEAST_PROBABILITY)
    probs = torch.from_numpy(raw / raw.sum(1, keepdims=True))
    labels = torch.from_numpy(np.searchsorted(np.unique(parts.train.y), parts.test.y))
    error = 1 - float(metrics.accuracy(probs, labels))
    found = {"error": error, "nll": metrics.nll(probs, labels), "ece": metrics.ece(probs, labels)}
    return found | _detected(model, parts, score)


def _predicted(model: Any, parts: Split) -> Record:
    mean, sd = model.predict(parts.test.x, return_std=True)
    low, high = model.predict_interval(parts.test.x, COVERAGE).T
    spread, y = parts.train.y.std(), parts.test.y
    return {
        "error": np.sqrt(np.mean((mean - y) ** 2)) / spread,
        "nll": -norm.logpdf(y, mean, sd).mean() - np.log(spread),
        "covered": np.mean((low <= y) & (y <= high)),
        "width": np.mean(high - low) / spread,
        **_detected(model, parts, lambda x: model.predict(x, return_std=True)[1]),
    }


def _detected(model: Any, parts: Split, score: Callable[[pd.DataFrame], np.ndarray]) -> Record:
    """AUROC for each set of unlike rows: by a method's own uncertainty; ours by distance, and by what members say."""
    ways: dict[str, Callable[[pd.DataFrame], np.ndarray]] = {"auroc": score}
    if ours := hasattr(model, "distance"):
        ways = {"auroc": model.distance, "auroc_total": score}
        ways["auroc_knowledge"] = lambda x: model.uncertainty(x)["knowledge"]
    found: Record = {}
    for name, way in ways.items():
        known = torch.from_numpy(way(parts.test.x))
        found[name] = {kind: metrics.auroc(torch.from_numpy(way(x)), known) for kind, x in parts.unlike.items()}
    return found | ({"false_alarms": np.mean(model.p_values(parts.test.x) <= 0.05)} if ours else {})


def measure_all(
    path: Path, tables: Mapping[str, Callable[[int], Table]], methods: Callable[[bool], Methods], seeds: Sequence[int]
) -> list[Record]:
    """Measure what the file has not yet, line by line; return all that it then has, flat. Seeds, one for each repeat, make everything."""
    known = read_records(path)
    done = {(line["table"], line["repeat"], line["method"]) for line in known}
    common = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread",
        "versions": {name: version(name) for name in ("torch", "scikit-learn", "numpy")},
    }
    for (repeat, seed), (table, make) in product(enumerate(seeds), tables.items()):
        parts = split(make(seed), seed)
        for method, model in methods(parts.train.classes).items():
            if (table, repeat, method) in done:
                continue
            found = measure(model(seed), parts)
            task = "classes" if parts.train.classes else "numbers"
            of: Record = {"study": "tabular", "table": table, "arm": [method], "task": task}
            setting = f"{len(parts.train.y)} training rows, {parts.train.x.shape[1]} columns"
            repeated = {"repeat": repeat, "seed": seed, "seeds": 1, "setting": setting}
            line = of | repeated | common | {"seconds": found.pop("seconds"), "source": "run", "numbers": found}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            known.append(flat(line))
    return known


def methods_of(classes: bool) -> Methods:
    """Return what is compared."""
    return CLASSIFIERS if classes else REGRESSORS


def read_records(path: Path) -> list[Record]:
    """Return the lines of a record, flat; none where there is no file. What a run that was killed left of its last line is cut off."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if not text.endswith("\n") and text:
        text = text[: text.rfind("\n") + 1]
        path.write_text(text, encoding="utf-8")
    return [flat(json.loads(line)) for line in text.splitlines()]


def flat(line: Record) -> Record:
    """Return a line with its numbers beside what they are of."""
    return {**line, **line["numbers"], "method": line["arm"][0]}


_OF_BOTH = {"auroc": "OOD AUROC", "seconds": "CPU s"}
MEASURES: Mapping[str, Mapping[str, str]] = {
    "classes": {"error": "error rate", "nll": "NLL, nats", "ece": "ECE", **_OF_BOTH},
    "numbers": {
        **{"error": "RMSE / sd", "nll": "NLL, nats", "covered": "covered of 90 %", "width": "width / sd"},
        **_OF_BOTH,
    },
}


def write_report(records: Sequence[Record], trials: Sequence[Record] = ()) -> str:
    """Return the page, in Markdown, made from records alone: those of the study, and those that chose the defaults."""
    first = records[0]
    ours = [line for line in records if line["method"] == OURS]
    values = {
        "tables": len({line["table"] for line in records}),
        "repeats": len({line["repeat"] for line in records}),
        "days": span(line["date"] for line in records),
        "machine": first["machine"],
        "versions": ", ".join(f"{name} {number}" for name, number in first["versions"].items()),
        "first_seed": first["seed"],
        "last_seed": max(line["seed"] for line in records),
        "training_rows": TRAINING_ROWS,
        "test_rows": TEST_ROWS,
        "least": LEAST_PROBABILITY,
        "detection": _detection(records),
        "alarms": Summary(tuple(line["false_alarms"] for line in ours)),
        "trial_tables": len({trial["table"] for trial in trials}),
        "trial_seeds": len({trial["seed"] for trial in trials}),
        "changes": _changes(trials),
    }
    values |= {key: np.mean([list(line[key].values()) for line in ours]) for key in DETECTED}
    values |= dict.fromkeys(TASKS, "") | {title: _task(title, lines) for title, lines in _by_task(records).items()}
    page = template("tabular.md")
    if not trials:
        page = page.partition("## How the defaults")[0].rstrip() + "\n"
    return page.format(**values)


TASKS = {"classification": "classes", "regression": "numbers"}
DETECTED = {"auroc": "distance to training rows (the alarm)", "auroc_knowledge": "knowledge", "auroc_total": "total"}
RANKS_FIGURE = "![Mean rank of each method over the tables, for every measure; the tables of ranks below have the numbers](tabular.svg)"


def _by_task(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the lines of each task that has any, by its title."""
    groups = {title: [line for line in records if line["task"] == task] for title, task in TASKS.items()}
    return {title: lines for title, lines in groups.items() if lines}


def standing(records: Sequence[Record]) -> str:
    """Return where the ensemble stands by each measure, task by task."""
    rows = []
    for title, lines in _by_task(records).items():
        repeats = sorted({line["repeat"] for line in lines})
        alone = [_ranks([line for line in lines if line["repeat"] == repeat]) for repeat in repeats]
        for name, ranks in _ranks(lines).items():
            place, first = _place(ranks)
            led = sum(_place(own[name])[1] == OURS for own in alone)
            told = "**first**" if led == len(alone) else "first on average, within noise"
            verdict = told if first == OURS else f"{place}. behind {first}"
            rank = f"{ranks[OURS]:.2f} of {len(ranks)}"
            rows.append([f"{title}, {name}", verdict, rank, f"first in {led} of {len(alone)}"])
    return markdown(["the ensemble by", "place", "mean rank", "by each seed"], rows, wide=True)


def _summaries(lines: Sequence[Record], key: str) -> pd.DataFrame:
    """Return a measure over repeats: a row for each table, a column for each method, the ensemble first."""
    values: dict[str, dict[str, list[float]]] = {}
    for line in sorted(lines, key=lambda line: line["method"] != OURS):
        value = np.mean(list(line[key].values())) if isinstance(line[key], dict) else line[key]
        values.setdefault(line["method"], {}).setdefault(line["table"], []).append(float(value))
    tables = list(dict.fromkeys(line["table"] for line in lines))
    return pd.DataFrame(values).loc[tables].map(lambda own: Summary(tuple(own)))


def _ranks(lines: Sequence[Record]) -> dict[str, pd.Series]:
    """Return each method's mean rank over tables, by its mean over repeats, for each measure that has a better end."""
    return {
        name: _summaries(lines, key).map(lambda own: own.mean).rank(axis=1, ascending=key != "auroc").mean()
        for key, name in MEASURES[lines[0]["task"]].items()
        if key not in ("covered", "seconds")
    }


def _place(ranks: pd.Series) -> tuple[int, str]:
    """Return the place of the ensemble, and who is first."""
    order = sorted(ranks.index, key=ranks.__getitem__)
    return order.index(OURS) + 1, order[0]


def ranks_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Draw the mean ranks of all methods by each measure; the ensemble stands out."""
    figure, axes = plots.panels(columns=2, width=4.6, height=2.9)
    for ax, (title, lines) in zip(axes, _by_task(records).items(), strict=True):
        ranks = pd.DataFrame(_ranks(lines)).T
        for place, method in enumerate(ranks):
            own = method == OURS
            look: dict[str, Any] = {"color": plots.COLOURS[1] if own else "#555555", "alpha": 1 if own else 0.6}
            marker, size = ("o", 9) if own else ("osD^v"[place % 5], 5)
            ax.plot(ranks[method], range(len(ranks)), marker, markersize=size, label=method, **look)
        ax.set_yticks(range(len(ranks)), [name.split(",")[0] for name in ranks.index])
        ax.invert_yaxis()
        ax.set(title=title, xlabel="mean rank, 1 is best", xlim=(0.8, ranks.shape[1] + 0.2))
        ax.legend(frameon=False, fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    return figure


def _task(title: str, lines: Sequence[Record]) -> str:
    """Return ranks and measurements of the tables of one task."""
    found = {name: _summaries(lines, key) for key, name in MEASURES[lines[0]["task"]].items()}
    ranks = _ranks(lines)

    def cell(name: str, method: str) -> str:
        if name in ranks:
            return f"{ranks[name][method]:.2f}"
        return f"{np.mean([value for own in found[name][method] for value in own.values]):.2f} (mean)"

    methods = list(next(iter(found.values())))
    rows = [[method, *(cell(name, method) for name in found)] for method in methods]
    tables = [
        f"### {name}\n\n{markdown(['', *methods], [[table, *map(str, own)] for table, own in each.iterrows()], wide=True)}"
        for name, each in found.items()
    ]
    overview = markdown(["mean rank, 1 is best", *found], rows, wide=True)
    return "\n\n".join([f"## {title.capitalize()}", overview, _verdict(lines, ranks), *tables])


def _verdict(lines: Sequence[Record], ranks: Mapping[str, pd.Series]) -> str:
    """Say in words where the ensemble stands, and where boosting is the better choice."""
    places, better = [], {}
    for name, own in ranks.items():
        place, first = _place(own)
        places.append(f"{place}. in {name.split(',')[0]}" + ("" if first == OURS else f" (first: {first})"))
    for key in ("error", "nll"):
        means = _summaries(lines, key).map(lambda own: own.mean)
        some = means.index[means["boosting"] < means[OURS]]
        better[key] = f"{len(some)} of {len(means)} tables" + (f" ({', '.join(some)})" if len(some) else "")
    alike = ": where a table of yours is like those, take `HistGradientBoosting`"
    return (
        f"By mean rank of {len(own)} the ensemble is {', '.join(places)}. Boosting has the lower {MEASURES[lines[0]['task']]['error']} on "
        f"{better['error']}, and the lower NLL on {better['nll']}{alike if '(' in ''.join(better.values()) else ''}. It trains faster, and "
        f"is the usual first choice for tables of many more rows than the {TRAINING_ROWS} here, which were not measured. Ranks "
        "within the standard errors below mean little."
    )


def _detection(records: Sequence[Record]) -> str:
    """Say where the AUROC comes from: the distance to the training rows, or members that disagree."""

    def row(name: str, method: str, key: str) -> list[str]:
        lines = [line[key] for line in records if line["method"] == method]
        return [name, *(str(Summary(tuple(line[kind] for line in lines))) for kind in lines[0])]

    others = [method for method in dict.fromkeys(line["method"] for line in records) if method != OURS]
    rows = [row(name, OURS, key) for key, name in DETECTED.items()]
    rows += [row(f"{method}'s own", method, "auroc") for method in others]
    return markdown(["AUROC, mean over tables and repeats", *records[0]["auroc"]], rows, wide=True)


def compared(trials: Sequence[Record]) -> list[tuple[str, float, float, float]]:
    """Return for each change of the settings the mean change of the NLL over tables, its standard error, and the ratio of times."""
    frame = pd.DataFrame(trials, columns=["method", "table", "seed", "nll", "seconds"]).set_index(["table", "seed"])
    without, rows = frame[frame["method"] == "{}"], []
    for change, own in frame.groupby("method", sort=False):
        beside = without.loc[own.index]
        summary = Summary(tuple((own["nll"] - beside["nll"]).groupby("table", sort=False).mean()))
        rows.append((change, summary.mean, summary.error, float(own["seconds"].sum() / beside["seconds"].sum())))
    return rows


def _changes(trials: Sequence[Record]) -> str:
    rows = [
        [f"`{change}`", f"{mean:+.4f} ± {error:.4f}", f"{ratio:.2f}"]
        for change, mean, error, ratio in compared(trials)
        if change != "{}"
    ]
    return markdown(["change", "NLL, mean over tables ± standard error", "time, ratio"], rows, wide=True)


def run(
    output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None, arms: Sequence[str] | None = None
) -> Path:
    """Measure what `records.jsonl` in the folder has not yet, and write the page.

    The quick form has two tables, once; without `data` there are only tables that come along; `arms` are tables, by their beginnings.
    """
    tables = [name for name in TABLES if data is not None or name in WITHOUT_DATA]
    if quick:
        tables = [name for name in tables if name in ("wine cultivars", "diabetes")]
    if arms is not None:
        tables = [name for name in tables if name.startswith(tuple(arms))]
    output.mkdir(parents=True, exist_ok=True)
    made = {name: partial(TABLES[name], data or Path()) for name in tables}
    records = measure_all(output / "records.jsonl", made, methods_of, range(seed, seed + (1 if quick else REPEATS)))
    page = output / "tabular.md"
    page.write_text(write_report(records), encoding="utf-8")
    return page
