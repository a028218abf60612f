"""A finished run in, a finding about its members out."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus.diagnostics import Finding, diagnose
from dissensus.predictions import predict
from dissensus.recipes.recipe import LoadedRun, rows_of_run
from dissensus.training.history import History

# As many training examples as tell the two kinds of ensembles apart, and are predicted in no time.
_LARGEST_TRAINING_SAMPLE = 2000


def diagnose_run(
    run: LoadedRun, folder: Path, held_out: tuple[Tensor, Tensor], average: Any, batch_size: int, **options: Any
) -> Finding:
    """Diagnose a run on held-out raw inputs, on some of its training data, and over its history if that was watched.

    The loss is the run's, and so is what the ensemble averages where that is None; further options are those of `diagnose`.
    """
    path = folder / "history.csv"
    history = History.load(path) if path.is_file() else History()
    weights = _setting(run.recipe.objective, "weights")
    train = rows_of_run(run, folder, "train")
    assert train is not None
    count = min(len(train), _LARGEST_TRAINING_SAMPLE)
    some = train.rows(torch.linspace(0, len(train) - 1, count, dtype=torch.float64).round().long())
    return diagnose(
        _outputs(run, held_out[0], batch_size),
        held_out[1],
        "mse" if run.preprocessing.classes is None else run.recipe.likelihood.name,
        average or _setting(run.recipe.objective, "average") or "probs",
        None if weights is None else torch.tensor(weights, dtype=torch.float64),
        training=(_outputs(run, some.x, batch_size), run.preprocessing.targets_in_units(some)),
        history=history if "train_ensemble_error" in history.columns else None,
        **options,
    )


def _outputs(run: LoadedRun, x: Tensor, batch_size: int) -> Tensor:
    parts = [predict(run.ensemble, run.preprocessing(part), batch_size=batch_size) for part in x.split(batch_size)]
    return run.mean_and_scale(torch.cat(parts, dim=1))[0]


def _setting(objective: Any, name: str) -> Any:
    """Return a setting of an objective of a recipe, or of one that it wraps."""
    return objective.get(name) or (_setting(objective["inner"], name) if "inner" in objective else None)
