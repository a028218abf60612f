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

__all__ = ["Independent", "NormPenalty", "Objective", "OutputObjective", "Step"]
__all__ += ["LIKELIHOODS", "Likelihood", "Pinball", "gaussian_nll", "laplace_nll", "likelihood_of", "mean_and_scale"]
__all__ += ["Adversarial", "VirtualAdversarial", "fast_gradient_sign"]
__all__ += ["Joint", "correlation_penalty", "joint_loss", "negative_correlation_loss"]
__all__ += ["generalised_negative_correlation_loss", "second_order_gap"]
__all__ += ["beta_from_step", "gradient_adjusted_loss", "step_from_beta"]
__all__ += ["Debiased", "Decomposition", "debias", "decompose"]
__all__ += ["diversity_closed_form", "hessian_diversity", "second_order_diversity"]
__all__ += ["PAIR_TERMS", "Disagree", "a2d", "a2d_from_logits", "divdis", "low_confidence", "two_stage"]
__all__ += ["LossGuided", "loss_guided_weights"]
__all__ += ["GUARDS", "Guard", "HeldOutAccuracy", "HeldOutLoss", "LossShare", "Seen", "WeightCap"]
__all__ += ["HardDelta", "MaskedUniform", "uniform_cross_entropy"]
