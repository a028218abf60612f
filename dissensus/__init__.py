"""Ensembles that agree where the data speaks and disagree where it does not."""

from importlib.metadata import PackageNotFoundError, version

from dissensus import masks, metrics, objectives, scores
from dissensus.members import DeepEnsemble, Members
from dissensus.predictions import mixture, predict
from dissensus.training import DivergedError, Run, fit, schedules

try:
    __version__ = version("dissensus")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"

__all__ = [
    "DeepEnsemble",
    "DivergedError",
    "Members",
    "Run",
    "fit",
    "masks",
    "metrics",
    "mixture",
    "objectives",
    "predict",
    "schedules",
    "scores",
]
