"""Predictions and truths of a whole data set -> numbers.

Every metric takes tensors on any device or numpy arrays and returns a `float`. Uncertainty scores are higher when an
input is less certain; probabilities are called `probs`, shaped `(batch, classes)`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from dissensus.metrics._inputs import Array
from dissensus.metrics.calibration import (
    ReliabilityCurve,
    Temperature,
    classwise_ece,
    confidence_reliability,
    ece,
    fit_temperature,
    reliability_curve,
    smooth_ece,
    top_confidences,
)
from dissensus.metrics.classification import (
    accuracy,
    brier,
    group_accuracies,
    nll,
    top_k_accuracy,
    worst_group_accuracy,
)
from dissensus.metrics.detection import (
    RiskCoverageCurve,
    RocCurve,
    aupr,
    auroc,
    fpr_at_tpr,
    risk_coverage_area,
    risk_coverage_curve,
    roc_curve,
)
from dissensus.metrics.diversity import (
    DiversityBounds,
    disagreement,
    diversity_bounds,
    existential_disagreement,
    mean_disagreement,
    ood_disagreement_bound,
    pair_diversity,
)
from dissensus.metrics.regression import (
    central_interval,
    ensemble_crps,
    gaussian_crps,
    gaussian_nll,
    interval_coverage,
    interval_width,
    laplace_crps,
    laplace_nll,
    mae,
    rmse,
)

PairMetric: TypeAlias = Callable[[Array, Array], float]
DensityMetric: TypeAlias = Callable[[Array, Array, Array], float]


CLASSIFICATION_METRICS: Mapping[str, PairMetric] = MappingProxyType(
    {
        "accuracy": accuracy,
        "nll": nll,
        "brier": brier,
        "ece": ece,
        "ece_mass": partial(ece, binning="mass"),
        "classwise_ece": classwise_ece,
        "smooth_ece": lambda probs, labels: smooth_ece(*top_confidences(probs, labels)),
    }
)
"""Name to function of `(probs, labels)`."""

OOD_METRICS: Mapping[str, PairMetric] = MappingProxyType(
    {
        "auroc": auroc,
        "aupr_out": partial(aupr, positive="ood"),
        "aupr_in": partial(aupr, positive="id"),
        "fpr95_ood_positive": partial(fpr_at_tpr, positive="ood"),
        "fpr95_id_positive": partial(fpr_at_tpr, positive="id"),
    }
)
"""Name to function of `(ood_scores, id_scores)`."""

REGRESSION_METRICS: Mapping[str, PairMetric] = MappingProxyType({"rmse": rmse, "mae": mae})
"""Name to function of `(prediction, target)`."""

DENSITY_METRICS: Mapping[str, DensityMetric] = MappingProxyType(
    {metric.__name__: metric for metric in (gaussian_nll, laplace_nll, gaussian_crps, laplace_crps)}
)
"""Name to function of `(mean, scale, target)`."""

HIGHER_IS_BETTER: frozenset[str] = frozenset({"accuracy", "auroc", "aupr_out", "aupr_in"})
"""Entries of the tables above that should be large; all others should be small."""

__all__ = ["CLASSIFICATION_METRICS", "DENSITY_METRICS", "HIGHER_IS_BETTER", "OOD_METRICS", "REGRESSION_METRICS"]
__all__ += ["accuracy", "brier", "group_accuracies", "nll", "top_k_accuracy", "worst_group_accuracy"]
__all__ += ["classwise_ece", "ece", "smooth_ece", "top_confidences"]
__all__ += ["ReliabilityCurve", "Temperature", "confidence_reliability", "fit_temperature", "reliability_curve"]
__all__ += ["RocCurve", "aupr", "auroc", "fpr_at_tpr", "roc_curve"]
__all__ += ["RiskCoverageCurve", "risk_coverage_area", "risk_coverage_curve"]
__all__ += ["disagreement", "existential_disagreement", "mean_disagreement", "ood_disagreement_bound"]
__all__ += ["DiversityBounds", "diversity_bounds", "pair_diversity"]
__all__ += ["ensemble_crps", "gaussian_crps", "gaussian_nll", "laplace_crps", "laplace_nll", "mae", "rmse"]
__all__ += ["central_interval", "interval_coverage", "interval_width"]
