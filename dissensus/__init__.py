"""Ensembles that agree where the data speaks and disagree where it does not."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dissensus import masks, metrics, objectives, scores
from dissensus.members import DeepEnsemble, Members
from dissensus.predictions import mixture, predict
from dissensus.training import DivergedError, Run, fit, schedules

if TYPE_CHECKING:
    from dissensus.evaluation import Evaluation, compare, evaluate
    from dissensus.reporting import report

try:
    __version__ = version("dissensus")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"

# Loaded when first used: what only looks at a trained ensemble need not cost those who train.
_LATER = {
    "Evaluation": "dissensus.evaluation",
    "compare": "dissensus.evaluation",
    "evaluate": "dissensus.evaluation",
    "report": "dissensus.reporting",
}

__all__ = [
    "DeepEnsemble",
    "DivergedError",
    "Evaluation",
    "Members",
    "Run",
    "compare",
    "evaluate",
    "fit",
    "masks",
    "metrics",
    "mixture",
    "objectives",
    "predict",
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
