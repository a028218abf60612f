"""Ensembles that agree where the data speaks and disagree where it does not."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dissensus import conformal as conformal
    from dissensus import masks as masks
    from dissensus import metrics as metrics
    from dissensus import objectives as objectives
    from dissensus import scores as scores
    from dissensus.aggregation import greedy_soup as greedy_soup
    from dissensus.caching import cache_features as cache_features
    from dissensus.conformal import Alarm as Alarm
    from dissensus.data.features import CachedFeatures as CachedFeatures
    from dissensus.diagnostics import Finding as Finding
    from dissensus.diagnostics import diagnose as diagnose
    from dissensus.evaluation import Evaluation as Evaluation
    from dissensus.evaluation import compare as compare
    from dissensus.evaluation import evaluate as evaluate
    from dissensus.exporting import Exported as Exported
    from dissensus.exporting import export as export
    from dissensus.members import MIMO as MIMO
    from dissensus.members import SWAG as SWAG
    from dissensus.members import Anchored as Anchored
    from dissensus.members import BatchEnsemble as BatchEnsemble
    from dissensus.members import DeepEnsemble as DeepEnsemble
    from dissensus.members import HeadEnsemble as HeadEnsemble
    from dissensus.members import LoRAEnsemble as LoRAEnsemble
    from dissensus.members import Masksembles as Masksembles
    from dissensus.members import MCDropout as MCDropout
    from dissensus.members import Members as Members
    from dissensus.members import PackedEnsemble as PackedEnsemble
    from dissensus.members import SnapshotEnsemble as SnapshotEnsemble
    from dissensus.members import cut as cut
    from dissensus.predictions import mixture as mixture
    from dissensus.predictions import predict as predict
    from dissensus.predictions import predict_scores as predict_scores
    from dissensus.probing import linear_probe as linear_probe
    from dissensus.reporting import report as report
    from dissensus.saving import load as load
    from dissensus.saving import save as save
    from dissensus.training import DivergedError as DivergedError
    from dissensus.training import Run as Run
    from dissensus.training import diverse_hyperparameters as diverse_hyperparameters
    from dissensus.training import fit as fit
    from dissensus.training import schedules as schedules

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
_MODULES = (
    "architectures",
    "conformal",
    "data",
    "estimators",
    "masks",
    "metrics",
    "objectives",
    "plots",
    "scores",
    "testing",
)

__all__ = sorted([*_HOMES, "conformal", "masks", "metrics", "objectives", "scores"])


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"dissensus.{name}")
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"dissensus.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'dissensus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
