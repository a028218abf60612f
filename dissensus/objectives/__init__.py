"""Objectives: pure terms on outputs, and what `fit` takes, `(members, x, y, step) -> (loss, parts)`."""

from dissensus.objectives.adversarial import Adversarial, VirtualAdversarial, fast_gradient_sign
from dissensus.objectives.independent import Independent, NormPenalty
from dissensus.objectives.likelihoods import (
    LIKELIHOODS,
    Likelihood,
    gaussian_nll,
    laplace_nll,
    likelihood_of,
    mean_and_scale,
)
from dissensus.objectives.objective import Objective, OutputObjective, Step

__all__ = [
    "LIKELIHOODS",
    "Adversarial",
    "Independent",
    "Likelihood",
    "NormPenalty",
    "Objective",
    "OutputObjective",
    "Step",
    "VirtualAdversarial",
    "fast_gradient_sign",
    "gaussian_nll",
    "laplace_nll",
    "likelihood_of",
    "mean_and_scale",
]
