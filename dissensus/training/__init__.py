"""Training: `fit` is the only loop; engines, optimizers and checkpoints serve it."""

from dissensus.training import schedules
from dissensus.training.checkpoints import CheckpointError
from dissensus.training.fitting import fit
from dissensus.training.history import History
from dissensus.training.optimizers import diverse_hyperparameters
from dissensus.training.trainer import DivergedError, Run

__all__ = ["CheckpointError", "DivergedError", "History", "Run", "diverse_hyperparameters", "fit", "schedules"]
