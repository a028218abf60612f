"""A finished run and new inputs in; for every input a prediction and how uncertain it is out, as columns of a table."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus.data.files import Loaded
from dissensus.objectives import mean_and_scale
from dissensus.predictions import predict
from dissensus.recipes.reading import label_names
from dissensus.recipes.runs import LoadedRun
from dissensus.scores import REGRESSION_SCORES, all_scores

Table = dict[str, list[Any]]


def score_inputs(run: LoadedRun, loaded: Loaded, *, batch_size: int = 1024) -> Table:
    """Return one row an input: its prediction, and every score (higher = less certain).

    Args:
        run: What `load_run` returned; it runs where the ensemble is.
        loaded: Inputs as `run.preprocessing.read` returns them.
        batch_size: How many inputs go through the members at once.

    Returns:
        Columns by name: `row`; `file` and `label` where the data has them; `prediction`; `confidence` for classes or
        `std` for regression; then every score. With several targets, columns of each end in its number.
    """
    parts = [
        _of_outputs(run, predict(run.ensemble, run.preprocessing(x), batch_size=batch_size))
        for x in loaded.x.split(batch_size)
    ]
    table: Table = {"row": list(range(len(loaded)))}
    if loaded.names is not None:
        table["file"] = list(loaded.names)
    if loaded.y is not None and loaded.y.ndim == 1:
        table["label"] = _labels(run, loaded)
    return table | {name: [value for part in parts for value in part[name]] for name in parts[0]}


def _labels(run: LoadedRun, loaded: Loaded) -> list[Any]:
    assert loaded.y is not None
    return loaded.y.tolist() if run.preprocessing.classes is None else label_names(loaded)


def _of_outputs(run: LoadedRun, outputs: Tensor) -> Mapping[str, list[Any]]:
    kind = run.recipe.likelihood.kind
    if run.preprocessing.classes is not None:
        return _of_logits(outputs, run.preprocessing.classes)
    mean, scale = mean_and_scale(outputs) if kind == "density" else (outputs, torch.zeros_like(outputs))
    return _of_densities(
        mean, scale, "laplace" if run.recipe.likelihood.name == "laplace_nll" else "gaussian"
    )


def _of_logits(logits: Tensor, classes: Sequence[str]) -> dict[str, list[Any]]:
    confidence, best = logits.softmax(-1).mean(0).max(-1)
    found = {name: values.tolist() for name, values in all_scores(logits).items()}
    return {"prediction": [classes[i] for i in best.tolist()], "confidence": confidence.tolist(), **found}


def _of_densities(mean: Tensor, scale: Tensor, family: str) -> dict[str, list[Any]]:
    scores = {name: score(mean, scale, family=family) for name, score in REGRESSION_SCORES.items()}
    columns = {"prediction": mean.mean(0), "std": scores["total_variance"].sqrt(), **scores}
    targets = mean.shape[-1]
    return {
        name if targets == 1 else f"{name}_{target}": values[:, target].tolist()
        for target in range(targets)
        for name, values in columns.items()
    }


def check_table_path(path: Path) -> None:
    """Refuse a file name that says no format."""
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"Scores are written as .csv or .parquet; got {path.name!r}.")


def write_table(table: Table, path: Path) -> None:
    """Write a table as .csv or .parquet, replacing the file in one step."""
    check_table_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if path.suffix == ".csv":
            _write_csv(table, temporary)
        else:
            _write_parquet(table, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_csv(table: Table, path: Path) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(map(_cell, row) for row in zip(*table.values(), strict=True))


def _cell(value: Any) -> Any:
    """Nine digits tell any two float32 numbers apart; more are noise."""
    return f"{value:.9g}" if isinstance(value, float) else value


def _write_parquet(table: Table, path: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Writing .parquet needs pyarrow, which this environment lacks. Write .csv, or install with: "
            "pip install 'dissensus[data]'"
        ) from None
    parquet.write_table(pyarrow.table(table), path)
