"""A finished run, or stored predictions, in; a finding about the members out."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus.diagnostics import Finding, diagnose
from dissensus.diagnostics.measuring import read_predictions
from dissensus.objectives import mean_and_scale
from dissensus.predictions import predict
from dissensus.recipes.runs import LoadedRun, rows_of_run
from dissensus.training.history import History

# As many training examples as tell the two kinds of ensembles apart, and are predicted in no time.
_LARGEST_TRAINING_SAMPLE = 2000


def diagnose_run(
    run: LoadedRun,
    folder: Path,
    held_out: tuple[Tensor, Tensor],
    *,
    average: Any = None,
    drop_per: Any = "example",
    seed: int = 0,
    batch_size: int = 1024,
) -> Finding:
    """Diagnose a run on held-out inputs, on (some of) its training data, and over its history if that was watched.

    Args:
        run: What `load_run` returned; it runs where the ensemble is.
        folder: The run's folder, for its history.
        held_out: Raw inputs and targets, in the units of the data.
        average: What the ensemble averages; as it was trained by default. This, `drop_per` and `seed` are as in `diagnose`.
        drop_per: Whether other members are dropped for each example or for the whole set.
        seed: Decides which members are dropped.
        batch_size: How many inputs go through the members at once.
    """
    classes = run.preprocessing.classes is not None
    weights = _setting(run.recipe.objective, "weights")
    path = folder / "history.csv"
    history = History.load(path) if path.is_file() else History()
    return diagnose(
        _outputs(run, held_out[0], batch_size),
        held_out[1],
        run.recipe.likelihood.name if classes else "mse",
        average or _setting(run.recipe.objective, "average") or "probs",
        None if weights is None else torch.tensor(weights, dtype=torch.float64),
        training=_training(run, folder, batch_size),
        history=history if "train_ensemble_error" in history.columns else None,
        drop_per=drop_per,
        seed=seed,
    )


def diagnose_predictions(
    path: Path, *, loss: str | None = None, average: Any = None, drop_per: Any = "example", seed: int = 0
) -> Finding:
    """Diagnose outputs and targets of a file; see `read_predictions`."""
    found = read_predictions(path)
    return diagnose(
        found.outputs,
        found.targets,
        loss or found.loss,
        average or "probs",
        training=found.training,
        drop_per=drop_per,
        seed=seed,
    )


def _outputs(run: LoadedRun, x: Tensor, batch_size: int) -> Tensor:
    parts = [predict(run.ensemble, run.preprocessing(part), batch_size=batch_size) for part in x.split(batch_size)]
    outputs = torch.cat(parts, dim=1)
    return mean_and_scale(outputs)[0] if run.recipe.likelihood.kind == "density" else outputs


def _training(run: LoadedRun, folder: Path, batch_size: int) -> tuple[Tensor, Tensor]:
    """Outputs and targets on rows spread evenly over the training data."""
    train = rows_of_run(run, folder, "train")
    assert train is not None
    count = min(len(train), _LARGEST_TRAINING_SAMPLE)
    chosen = train.rows(torch.linspace(0, len(train) - 1, count, dtype=torch.float64).round().long())
    outputs = _outputs(run, chosen.x, batch_size)
    return outputs, run.preprocessing.targets_in_units(chosen)


def _setting(objective: Any, name: str) -> Any:
    """Return a setting of an objective of a recipe, or of one that it wraps."""
    return objective.get(name) or (_setting(objective["inner"], name) if "inner" in objective else None)
