"""Ensembles that agree where the data speaks and disagree where it does not."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dissensus import conformal, masks, metrics, objectives, scores
    from dissensus.aggregation import greedy_soup
    from dissensus.caching import cache_features
    from dissensus.conformal import Alarm
    from dissensus.data.features import CachedFeatures
    from dissensus.diagnostics import Finding, diagnose
    from dissensus.evaluation import Evaluation, compare, evaluate
    from dissensus.exporting import Exported, export
    from dissensus.members import (
        MIMO,
        SWAG,
        Anchored,
        BatchEnsemble,
        DeepEnsemble,
        HeadEnsemble,
        LoRAEnsemble,
        Masksembles,
        MCDropout,
        Members,
        PackedEnsemble,
        SnapshotEnsemble,
        cut,
    )
    from dissensus.predictions import mixture, predict, predict_scores
    from dissensus.probing import linear_probe
    from dissensus.reporting import report
    from dissensus.saving import load, save
    from dissensus.training import DivergedError, Run, diverse_hyperparameters, fit, schedules

try:
    __version__ = version("dissensus")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"

# Where each public name lives. Loaded when first used, so that `dissensus --help` and the server need no torch.
_NAMES = {
    "aggregation": ("greedy_soup",),
    "caching": ("cache_features",),
    "conformal": ("Alarm",),
    "data.features": ("CachedFeatures",),
    "diagnostics": ("Finding", "diagnose"),
    "evaluation": ("Evaluation", "compare", "evaluate"),
    "exporting": ("Exported", "export"),
    "members": (
        *("Anchored", "BatchEnsemble", "DeepEnsemble", "HeadEnsemble", "LoRAEnsemble", "MCDropout", "MIMO"),
        *("Masksembles", "Members", "PackedEnsemble", "SWAG", "SnapshotEnsemble", "cut"),
    ),
    "predictions": ("mixture", "predict", "predict_scores"),
    "probing": ("linear_probe",),
    "reporting": ("report",),
    "saving": ("load", "save"),
    "training": ("DivergedError", "Run", "diverse_hyperparameters", "fit", "schedules"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = ("architectures", "conformal", "data", "masks", "metrics", "objectives", "plots", "scores")

__all__ = [
    "MIMO",
    "SWAG",
    "Alarm",
    "Anchored",
    "BatchEnsemble",
    "CachedFeatures",
    "DeepEnsemble",
    "DivergedError",
    "Evaluation",
    "Exported",
    "Finding",
    "HeadEnsemble",
    "LoRAEnsemble",
    "MCDropout",
    "Masksembles",
    "Members",
    "PackedEnsemble",
    "Run",
    "SnapshotEnsemble",
    "cache_features",
    "compare",
    "conformal",
    "cut",
    "diagnose",
    "diverse_hyperparameters",
    "evaluate",
    "export",
    "fit",
    "greedy_soup",
    "linear_probe",
    "load",
    "masks",
    "metrics",
    "mixture",
    "objectives",
    "predict",
    "predict_scores",
    "report",
    "save",
    "schedules",
    "scores",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"dissensus.{name}")
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"dissensus.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'dissensus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
