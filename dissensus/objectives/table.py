"""The table of objectives: what recipes can name, and what the contract of `dissensus.testing` is held against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor

from dissensus.objectives.adversarial import Adversarial, VirtualAdversarial
from dissensus.objectives.disagree import Disagree
from dissensus.objectives.hard_delta import HardDelta, MaskedUniform
from dissensus.objectives.joint import Joint
from dissensus.objectives.loss_guided import LossGuided
from dissensus.objectives.objective import Independent, NormPenalty, Objective

Case = Callable[[Tensor], Objective]


@dataclass(frozen=True)
class Entry:
    """One objective.

    Attributes:
        make: Makes one from its settings, as recipes do.
        classification: Objectives to test on class labels, by what is special about them, made for some inputs.
        regression: The same for real targets, `(batch, 1)`; losses with a density want members that give mean and rho.
        kinds: Names of the kinds of ensembles it is for; all if empty.
    """

    make: Callable[..., Objective]
    classification: Mapping[str, Case]
    regression: Mapping[str, Case] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()


OBJECTIVES: Mapping[str, Entry] = MappingProxyType(
    {
        "independent": Entry(
            Independent,
            {
                "cross-entropy": lambda x: Independent(),
                "brier": lambda x: Independent("brier"),
                "smoothing": lambda x: Independent(label_smoothing=0.1),
            },
            {
                "mse": lambda x: Independent("mse"),
                "mae": lambda x: Independent("mae"),
                "gaussian": lambda x: Independent("gaussian_nll"),
                "laplace": lambda x: Independent("laplace_nll"),
            },
        ),
        "joint": Entry(
            Joint,
            {
                "half": lambda x: Joint(0.5),
                "scores and dropout": lambda x: Joint(0.3, average="scores", member_dropout=0.4),
            },
            {"mse": lambda x: Joint(0.5, loss="mse")},
        ),
        "loss_guided": Entry(
            LossGuided,
            {
                "two drawn": lambda x: LossGuided(0.3),
                "weights from all": lambda x: LossGuided(0.3, weights_from="all", regulariser="divdis"),
                "all pairs": lambda x: LossGuided(0.3, active=None, regulariser="jensen_shannon"),
            },
        ),
        "disagree": Entry(Disagree, {"elsewhere": lambda x: Disagree(3 * x, strength=0.05)}),
        "adversarial": Entry(
            Adversarial,
            {
                "of range": lambda x: Adversarial(Independent(), epsilon=0.01, of_range=True),
                "joint": lambda x: Adversarial(Joint(0.5), 0.01),
            },
            {"gaussian": lambda x: Adversarial(Independent("gaussian_nll"), epsilon=0.01)},
        ),
        "virtual_adversarial": Entry(
            VirtualAdversarial, {"labels": lambda x: VirtualAdversarial(Independent(), epsilon=0.1)}
        ),
        "norm_penalty": Entry(
            NormPenalty,
            {"adversarial": lambda x: NormPenalty(Adversarial(Independent()), 1e-3)},
            {"mse": lambda x: NormPenalty(Independent("mse"), 1e-3)},
        ),
        "hard_delta": Entry(
            HardDelta,
            {
                "inputs": lambda x: HardDelta(Independent(), 0.1),
                "features": lambda x: HardDelta(Independent(), 0.1, law="features", draws=8),
            },
            kinds=("anchored",),
        ),
        "masked_uniform": Entry(MaskedUniform, {"labels": lambda x: MaskedUniform(Independent())}, kinds=("anchored",)),
    }
)
"""Objectives by name; one that is listed is covered by the contract tests."""
