"""Ensembles that agree where the data speaks and disagree where it does not."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dissensus import masks, metrics, objectives, scores
from dissensus.caching import cache_features
from dissensus.data.features import CachedFeatures
from dissensus.members import DeepEnsemble, HeadEnsemble, Members
from dissensus.predictions import mixture, predict, predict_scores
from dissensus.training import DivergedError, Run, diverse_hyperparameters, fit, schedules

if TYPE_CHECKING:
    from dissensus.aggregation import greedy_soup
    from dissensus.diagnostics import Finding, diagnose
    from dissensus.evaluation import Evaluation, compare, evaluate
    from dissensus.members import Anchored, BatchEnsemble, Masksembles, MCDropout, cut
    from dissensus.probing import linear_probe
    from dissensus.reporting import report

try:
    __version__ = version("dissensus")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"

# Loaded when first used: what only looks at a trained ensemble need not cost those who train, nor a kind those of another.
_LATER = {
    "Anchored": "dissensus.members",
    "BatchEnsemble": "dissensus.members",
    "Evaluation": "dissensus.evaluation",
    "Finding": "dissensus.diagnostics",
    "MCDropout": "dissensus.members",
    "Masksembles": "dissensus.members",
    "compare": "dissensus.evaluation",
    "cut": "dissensus.members",
    "diagnose": "dissensus.diagnostics",
    "evaluate": "dissensus.evaluation",
    "greedy_soup": "dissensus.aggregation",
    "linear_probe": "dissensus.probing",
    "report": "dissensus.reporting",
}

__all__ = [
    "Anchored",
    "BatchEnsemble",
    "CachedFeatures",
    "DeepEnsemble",
    "DivergedError",
    "Evaluation",
    "Finding",
    "HeadEnsemble",
    "MCDropout",
    "Masksembles",
    "Members",
    "Run",
    "cache_features",
    "compare",
    "cut",
    "diagnose",
    "diverse_hyperparameters",
    "evaluate",
    "fit",
    "greedy_soup",
    "linear_probe",
    "masks",
    "metrics",
    "mixture",
    "objectives",
    "predict",
    "predict_scores",
    "report",
    "schedules",
    "scores",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'dissensus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])
