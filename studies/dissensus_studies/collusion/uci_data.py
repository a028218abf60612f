"""The four regression sets of the collusion study: tables in; splits, prepared on their training part, out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dissensus.data.frames import read_table
from dissensus.data.toy import diabetes
from dissensus.randomness import derive, permutation

Preparation = Literal["document", "tangos"]

TEST_SHARE = 0.2
VALIDATION_SHARE = 0.2
# A feature counts as skewed above this; the document names no number.
SKEWED = 1.0
# The other preparation keeps this many rows of the two larger sets, in their order.
TANGOS_ROWS = 1000


@dataclass(frozen=True)
class Source:
    """How a file becomes a regression problem."""

    file: str  # Name of the file.
    target: str  # Column to predict.
    drop: tuple[str, ...] = ()  # Columns that are no features.
    categories: tuple[str, ...] = ()  # Columns that become one 0/1 feature for each of their values.
    drop_first: bool = False  # Leave out the first of those.
    shortened: bool = False  # Whether the other preparation keeps its first rows only.


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "bioconcentration": Source(
            "Grisoni_et_al_2016_EnvInt88.csv",
            "logBCF",
            ("#CAS", "SMILES", "Set", "Class"),
            ("nHM", "N-072", "B02[C-N]", "F04[C-O]"),
        ),
        "weather": Source(
            "Bias_correction_ucl.csv", "Next_Tmax", ("Date", "Next_Tmin"), ("station",), drop_first=True, shortened=True
        ),
        "facebook": Source("dataset_Facebook.csv", "Lifetime Post Total Impressions", (), ("Type",)),
        "abalone": Source("abalone.csv", "Rings", (), ("Sex",), drop_first=True, shortened=True),
    }
)
SMALL_SETS = ("bioconcentration", "facebook")


@dataclass(frozen=True)
class Problem:
    """A regression problem before it is split: features, targets, and which features are numbers with more than two values."""

    x: Tensor
    y: Tensor
    measured: Tensor


@dataclass(frozen=True)
class Split:
    """One run's rows, standardised on the training part: features `(rows, features)`, targets `(rows, 1)`."""

    x: Tensor
    y: Tensor
    validation_x: Tensor
    validation_y: Tensor
    test_x: Tensor
    test_y: Tensor


def find_sources(data: Path | None) -> dict[str, Path]:
    """Return the files of the sets that a folder, `../shared/data` by default, holds by itself or in `uci`, by name."""
    folder = Path("../shared/data") if data is None else Path(data)
    for place in (folder / "uci", folder):
        found = {name: place / source.file for name, source in SOURCES.items() if (place / source.file).is_file()}
        if found:
            return found
    raise ValueError(
        f"This study needs tables such as {SOURCES['abalone'].file}; there are none in {folder}. Name their folder with `data`, "
        "or run the quick version, which needs none."
    )


def load_problem(name: str, path: Path, preparation: Preparation = "document") -> Problem:
    """Read one of the four sets; rows with missing values are left out."""
    import pandas

    source = SOURCES[name]
    frame = read_table(path)[0].dropna()
    if preparation == "tangos" and source.shortened:
        frame = frame[:TANGOS_ROWS]
    inputs = frame.drop(columns=[source.target, *source.drop])
    words = [n for n in inputs if n in source.categories or inputs[n].dtype.kind not in "iuf"]
    # A 0/1 column for each value of a category, in the order of the values as texts.
    parts = [
        pandas.get_dummies(inputs[n].astype(str), drop_first=source.drop_first) if n in words else inputs[[n]]
        for n in inputs
    ]
    x = np.concatenate([part.to_numpy(np.float32) for part in parts], axis=1)
    y = frame[source.target].to_numpy(np.float32)
    return _problem(torch.from_numpy(x), torch.from_numpy(y))


def built_in_problem() -> Problem:
    """The disease progression of 442 patients, which comes with scikit-learn, for the quick version."""
    loaded = diabetes()
    assert loaded.y is not None
    return _problem(loaded.x, loaded.y)


def _problem(x: Tensor, y: Tensor) -> Problem:
    measured = torch.tensor([len(column.unique()) > 2 for column in x.T])
    return Problem(x.double(), y.double(), measured)


def split_problem(problem: Problem, preparation: Preparation, *key: int | str) -> Split:
    """Draw test, validation and training rows by a key, and prepare all on the training rows."""
    rows = permutation(torch.tensor(derive(*key)), len(problem.x))
    num_test = round(TEST_SHARE * len(rows))
    num_validation = round(VALIDATION_SHARE * (len(rows) - num_test))
    test, validation, train = rows.split([num_test, num_validation, len(rows) - num_test - num_validation])
    x = problem.x
    if preparation == "document":
        x = log_skewed(x, train, problem.measured)
    x, y = (standardised(values, train) for values in (x, problem.y[:, None]))
    return Split(x[train], y[train], x[validation], y[validation], x[test], y[test])


def log_skewed(x: Tensor, train: Tensor, measured: Tensor) -> Tensor:
    """Return features `(rows, features)`; measured ones whose skewness on the training rows exceeds 1 become log(1 + x - min).

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0], [99.0, 5.0]])
        >>> log_skewed(x, torch.arange(5), torch.tensor([True, True]))[-1].tolist()
        [4.605170249938965, 5.0]
    """
    moved = x[train] - x[train].mean(0)
    variance = moved.square().mean(0)
    skewness = moved.pow(3).mean(0) / variance.clamp_min(1e-12).pow(1.5)
    logs = (x - x[train].amin(0)).clamp_min(0).log1p()
    return torch.where(measured & (skewness > SKEWED), logs, x)


def standardised(values: Tensor, train: Tensor) -> Tensor:
    """Return `(rows, columns)` with mean 0 and standard deviation 1 on the training rows, in float32."""
    centre, spread = values[train].mean(0), values[train].std(0, correction=0)
    # A category that no training row has is constant there; divided by its deviation it would be NaN.
    return ((values - centre) / torch.where(spread > 0, spread, 1.0)).float()
