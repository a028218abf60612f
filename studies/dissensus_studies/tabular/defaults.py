"""How the estimators' defaults were chosen: settings changed one at a time on ten generated tables, none of which is in the study.

`python -m dissensus_studies.tabular.defaults RECORDS` measures what RECORDS has not yet, and prints the comparison. The four
settings that alone gained one and a half standard errors or more were tried together, without and with dropout.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn import datasets

from dissensus.estimators import EnsembleClassifier, EnsembleRegressor
from dissensus_studies.tabular import Methods, Table, compared, measure_all, named

REPEATS = 2
BASE: Mapping[str, Any] = {
    **{"hidden": (64, 64), "bins": 16, "lr": 1e-3, "weight_decay": 1e-2},
    **{"patience": 16, "dropout": 0.0, "validation_fraction": 0.2},
}
CHANGES: Sequence[Mapping[str, Any]] = (
    {},
    {"bins": 0},
    {"bins": 8},
    {"bins": 32},
    {"hidden": (128, 128)},
    {"hidden": (128,)},
    {"lr": 3e-3},
    {"weight_decay": 1e-1},
    {"dropout": 0.1},
    {"validation_fraction": 0.1},
    {"bins": 8, "lr": 3e-3, "weight_decay": 0.1},
    {"bins": 8, "lr": 3e-3, "weight_decay": 0.1, "dropout": 0.1},
)


def _taught(teacher: str, classes: int, seed: int) -> Table:
    """Rows whose target a random network, or random boxes along the axes, decides, with noise."""
    chance = np.random.default_rng(seed)
    x = chance.normal(size=(1500, 10)) @ (np.eye(10) + 0.3 * chance.normal(size=(10, 10)))
    outputs = max(classes, 1)
    if teacher == "network":
        score = np.tanh(x @ chance.normal(size=(10, 20)) / 3) @ chance.normal(size=(20, outputs))
    else:
        inside = (x[:, chance.integers(0, 10, size=(8, outputs, 2))] > chance.normal(size=(8, outputs, 2))).all(-1)
        score = (inside * chance.normal(size=(8, outputs))).sum(1)
    score = 3 * score / score.std()
    if classes:
        return named((x, (score + chance.gumbel(size=score.shape)).argmax(1)), classes=True)
    return named((x, score[:, 0] + np.exp(0.5 * x[:, 0]) * chance.normal(size=len(x))))


def _orders(classes: bool, seed: int) -> Table:
    """Skewed numbers, two columns of words that go together, a boolean, and missing values."""
    chance = np.random.default_rng(seed)
    rows = 1500
    price, count = chance.lognormal(3, 1, rows), chance.poisson(3, rows).astype(np.float64)
    shop, kind, gift = chance.integers(0, 8, rows), chance.integers(0, 3, rows), chance.random(rows) < 0.3
    score = (
        chance.normal(size=(8, 3))[shop, kind] + 0.7 * (np.log(price) - 3) * np.where(gift, -1, 1) + 0.5 * (count > 4)
    )
    frame = pd.DataFrame(
        {
            "price": np.where(chance.random(rows) < 0.1, np.nan, price),
            "count": count,
            "shop": pd.Series(np.array(list("abcdefgh"))[shop]).mask(chance.random(rows) < 0.05),
            "kind": np.array(["book", "food", "toy"])[kind],
            "gift": gift,
        }
    )
    if classes:
        return Table(frame, np.digitize(score + chance.logistic(size=rows), [-1, 1]))
    return Table(frame, score + 0.5 * chance.normal(size=rows))


TABLES: Mapping[str, Callable[[int], Table]] = {
    "quantiles": lambda seed: named(
        datasets.make_gaussian_quantiles(n_samples=1500, n_features=6, random_state=seed), classes=True
    ),
    "ten squares": lambda seed: named(datasets.make_hastie_10_2(1500, random_state=seed), classes=True),
    "network, classes": lambda seed: _taught("network", 4, seed),
    "boxes, classes": lambda seed: _taught("boxes", 3, seed),
    "orders, classes": lambda seed: _orders(True, seed),
    "friedman 2": lambda seed: named(datasets.make_friedman2(1500, noise=50.0, random_state=seed)),
    "friedman 3": lambda seed: named(datasets.make_friedman3(1500, noise=0.1, random_state=seed)),
    "network": lambda seed: _taught("network", 0, seed),
    "boxes": lambda seed: _taught("boxes", 0, seed),
    "orders": lambda seed: _orders(False, seed),
}


def changed(classes: bool) -> Methods:
    """Return our estimator with each change of its settings, by the change."""
    estimator = EnsembleClassifier if classes else EnsembleRegressor
    return {
        json.dumps(change): lambda seed, change=change: estimator(random_state=seed, **{**BASE, **change})  # type: ignore[misc]
        for change in CHANGES
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    trials = measure_all(Path(sys.argv[1]), TABLES, changed, range(100, 100 + REPEATS))
    for change, mean, error, seconds in compared(trials):
        print(f"{change:40s} NLL {mean:+.4f} ± {error:.4f}, time x {seconds:.2f}")
