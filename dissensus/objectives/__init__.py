"""Objectives: pure terms on outputs, and what `fit` takes, `(members, x, y, step) -> (loss, parts)`."""

from dissensus.objectives.adversarial import Adversarial, VirtualAdversarial, fast_gradient_sign
from dissensus.objectives.correlation import (
    correlation_penalty,
    generalised_negative_correlation_loss,
    negative_correlation_loss,
    second_order_gap,
)
from dissensus.objectives.decomposition import Debiased, Decomposition, debias, decompose
from dissensus.objectives.diversity import diversity_closed_form, hessian_diversity, second_order_diversity
from dissensus.objectives.gradient_adjusted import beta_from_step, gradient_adjusted_loss, step_from_beta
from dissensus.objectives.independent import Independent, NormPenalty
from dissensus.objectives.joint import joint_loss
from dissensus.objectives.joint_training import Joint
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
    "Debiased",
    "Decomposition",
    "Independent",
    "Joint",
    "Likelihood",
    "NormPenalty",
    "Objective",
    "OutputObjective",
    "Step",
    "VirtualAdversarial",
    "beta_from_step",
    "correlation_penalty",
    "debias",
    "decompose",
    "diversity_closed_form",
    "fast_gradient_sign",
    "gaussian_nll",
    "generalised_negative_correlation_loss",
    "gradient_adjusted_loss",
    "hessian_diversity",
    "joint_loss",
    "laplace_nll",
    "likelihood_of",
    "mean_and_scale",
    "negative_correlation_loss",
    "second_order_diversity",
    "second_order_gap",
    "step_from_beta",
]
