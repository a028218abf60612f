"""A finished run in, one file out that takes inputs as they are in data files: what training learned about them is inside."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dissensus._files import checkpoint_digest
from dissensus.data.tables import Date
from dissensus.exporting import Exported, export
from dissensus.recipes.alarms import load_calibration
from dissensus.recipes.data import ENSEMBLE, Preprocessing
from dissensus.recipes.recipe import LoadedRun, rows_of_run

# Rows on which a file is compared with the ensemble, beside their repetitions.
_EXAMPLES = 512


def export_run(
    run: LoadedRun, folder: Path, path: str | Path, *, false_alarms: float | None = None, **options: Any
) -> Exported:
    """Write a run as one file, with the alarm that was calibrated when it was trained; without, where it held no rows out.

    The file takes images as uint8, features as they are, and rows of a table as one number a column, see `TableEncoder.codes`. The
    alarm's rate, where callers give no limit, is the run's by default; further options are those of `ds.export`.
    """
    calibration = load_calibration(folder, run, false_alarms)
    facts = run.preprocessing.to_json()
    # Rows that the file is compared on: held-out ones, where there are some.
    parts = map(partial(rows_of_run, run, folder), ("calibration", "validation", "test", "train"))
    rows = next(filter(None, parts))
    example = rows.rows(torch.arange(min(len(rows), _EXAMPLES)))
    taken, columns = example.x, run.preprocessing.columns
    if columns is not None and example.table is not None:  # the columns of built-in tables are numbers already
        taken = torch.from_numpy(columns.codes(example.table)[0])
        # The hour of a date has no digits left in float32 days since 1970.
        taken = taken if any(isinstance(column, Date) for column in columns.columns) else taken.float()
    return export(
        run.ensemble,
        path,
        example=taken,
        alarm=None if calibration is None else calibration.alarm,
        loss=run.recipe.likelihood.name,
        preprocess=RunInputs(run.preprocessing),
        facts={
            **{name: facts[name] for name in ("classes", "target", "shape", "columns")},
            "pixels_divided_by": 255 if facts["pixels"] else None,
            "standardised": {"mean": facts["mean"], "std": facts["std"]},
            "ensemble": checkpoint_digest(folder, ENSEMBLE),
        },
        **options,
    )


class RunInputs(nn.Module):
    """From inputs as they are in files to what members see: `Preprocessing`, and the encoding of tables, as a part of a file."""

    mean: Tensor
    std: Tensor

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.preprocessing, self.columns = preprocessing, preprocessing.columns
        for name, values in zip(("mean", "std"), preprocessing.scaling(torch.device("cpu")), strict=True):
            self.register_buffer(name, values)

    def forward(self, x: Tensor) -> Tensor:
        """Return what members see, float32."""
        x = x if self.columns is None else self.columns.of_codes(x, torch)
        return self.preprocessing.scaled(x, self.mean, self.std)
