"""Objectives: pure terms on outputs, and what `fit` takes, `(members, x, y, step) -> (loss, parts)`."""

from dissensus.objectives.adversarial import Adversarial, VirtualAdversarial, fast_gradient_sign
from dissensus.objectives.correlation import (
    correlation_penalty,
    generalised_negative_correlation_loss,
    negative_correlation_loss,
    second_order_gap,
)
from dissensus.objectives.decomposition import Debiased, Decomposition, debias, decompose
from dissensus.objectives.disagree import Disagree, low_confidence, two_stage
from dissensus.objectives.disagreement import PAIR_TERMS, a2d, a2d_from_logits
from dissensus.objectives.diversity import diversity_closed_form, hessian_diversity, second_order_diversity
from dissensus.objectives.gradient_adjusted import beta_from_step, gradient_adjusted_loss, step_from_beta
from dissensus.objectives.guards import (
    GUARDS,
    Guard,
    HeldOutAccuracy,
    HeldOutLoss,
    LossShare,
    Seen,
    WeightCap,
)
from dissensus.objectives.hard_delta import HardDelta, MaskedUniform
from dissensus.objectives.independent import Independent, NormPenalty
from dissensus.objectives.joint import joint_loss
from dissensus.objectives.joint_training import Joint
from dissensus.objectives.likelihoods import (
    LIKELIHOODS,
    Likelihood,
    Pinball,
    gaussian_nll,
    laplace_nll,
    likelihood_of,
    mean_and_scale,
)
from dissensus.objectives.loss_guided import LossGuided
from dissensus.objectives.loss_weights import loss_guided_weights
from dissensus.objectives.objective import Objective, OutputObjective, Step
from dissensus.objectives.redundancy import divdis
from dissensus.objectives.residuals import uniform_cross_entropy

__all__ = [
    "GUARDS",
    "LIKELIHOODS",
    "PAIR_TERMS",
    "Adversarial",
    "Debiased",
    "Decomposition",
    "Disagree",
    "Guard",
    "HardDelta",
    "HeldOutAccuracy",
    "HeldOutLoss",
    "Independent",
    "Joint",
    "Likelihood",
    "LossGuided",
    "LossShare",
    "MaskedUniform",
    "NormPenalty",
    "Objective",
    "OutputObjective",
    "Pinball",
    "Seen",
    "Step",
    "VirtualAdversarial",
    "WeightCap",
    "a2d",
    "a2d_from_logits",
    "beta_from_step",
    "correlation_penalty",
    "debias",
    "decompose",
    "divdis",
    "diversity_closed_form",
    "fast_gradient_sign",
    "gaussian_nll",
    "generalised_negative_correlation_loss",
    "gradient_adjusted_loss",
    "hessian_diversity",
    "joint_loss",
    "laplace_nll",
    "likelihood_of",
    "loss_guided_weights",
    "low_confidence",
    "mean_and_scale",
    "negative_correlation_loss",
    "second_order_diversity",
    "second_order_gap",
    "step_from_beta",
    "two_stage",
    "uniform_cross_entropy",
]
