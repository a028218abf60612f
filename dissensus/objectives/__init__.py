"""Objectives: pure terms on outputs, and what `fit` takes, `(members, x, y, step) -> (loss, parts)`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from dissensus.objectives.adversarial import Adversarial, VirtualAdversarial, fast_gradient_sign
from dissensus.objectives.disagreement import (
    PAIR_TERMS,
    Disagree,
    a2d,
    a2d_from_logits,
    divdis,
    low_confidence,
    two_stage,
)
from dissensus.objectives.diversity import (
    Debiased,
    Decomposition,
    debias,
    decompose,
    diversity_closed_form,
    hessian_diversity,
    second_order_diversity,
)
from dissensus.objectives.hard_delta import HardDelta, MaskedUniform, uniform_cross_entropy
from dissensus.objectives.joint import (
    Joint,
    beta_from_step,
    correlation_penalty,
    generalised_negative_correlation_loss,
    gradient_adjusted_loss,
    joint_loss,
    negative_correlation_loss,
    second_order_gap,
    step_from_beta,
)
from dissensus.objectives.likelihoods import (
    LIKELIHOODS,
    Likelihood,
    Pinball,
    gaussian_nll,
    laplace_nll,
    likelihood_of,
    mean_and_scale,
)
from dissensus.objectives.loss_guided import (
    GUARDS,
    Guard,
    HeldOutAccuracy,
    HeldOutLoss,
    LossGuided,
    LossShare,
    Seen,
    WeightCap,
    loss_guided_weights,
)
from dissensus.objectives.objective import Independent, NormPenalty, Objective, OutputObjective, Step

OBJECTIVES: Mapping[str, Callable[..., Objective]] = MappingProxyType(
    {
        "independent": Independent,
        "joint": Joint,
        "loss_guided": LossGuided,
        "disagree": Disagree,
        "adversarial": Adversarial,
        "virtual_adversarial": VirtualAdversarial,
        "norm_penalty": NormPenalty,
        "hard_delta": HardDelta,
        "masked_uniform": MaskedUniform,
    }
)
"""Objectives by the names that recipes have for them; the contract tests hold for each."""

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
