"""Objectives that the contract is held against: for each name of the table, by what is special about them, made for some inputs."""

from dissensus.objectives import (
    Adversarial,
    Disagree,
    HardDelta,
    Independent,
    Joint,
    LossGuided,
    MaskedUniform,
    NormPenalty,
    VirtualAdversarial,
)

# On class labels.
CLASSIFICATION = {
    "independent": {
        "cross-entropy": lambda x: Independent(),
        "brier": lambda x: Independent("brier"),
        "smoothing": lambda x: Independent(label_smoothing=0.1),
    },
    "joint": {
        "half": lambda x: Joint(0.5),
        "scores and dropout": lambda x: Joint(0.3, average="scores", member_dropout=0.4),
    },
    "loss_guided": {
        "two drawn": lambda x: LossGuided(0.3),
        "weights from all": lambda x: LossGuided(0.3, weights_from="all", regulariser="divdis"),
        "all pairs": lambda x: LossGuided(0.3, active=None, regulariser="jensen_shannon"),
    },
    "disagree": {"elsewhere": lambda x: Disagree(3 * x, strength=0.05)},
    "adversarial": {
        "of range": lambda x: Adversarial(Independent(), epsilon=0.01, of_range=True),
        "joint": lambda x: Adversarial(Joint(0.5), 0.01),
    },
    "virtual_adversarial": {"labels": lambda x: VirtualAdversarial(Independent(), epsilon=0.1)},
    "norm_penalty": {"adversarial": lambda x: NormPenalty(Adversarial(Independent()), 1e-3)},
    "hard_delta": {
        "inputs": lambda x: HardDelta(Independent(), 0.1),
        "features": lambda x: HardDelta(Independent(), 0.1, law="features", draws=8),
    },
    "masked_uniform": {"labels": lambda x: MaskedUniform(Independent())},
}
# On real targets, `(batch, 1)`; losses with a density want members that give mean and rho.
REGRESSION = {
    "independent": {
        "mse": lambda x: Independent("mse"),
        "mae": lambda x: Independent("mae"),
        "gaussian": lambda x: Independent("gaussian_nll"),
        "laplace": lambda x: Independent("laplace_nll"),
    },
    "joint": {"mse": lambda x: Joint(0.5, loss="mse")},
    "adversarial": {"gaussian": lambda x: Adversarial(Independent("gaussian_nll"), epsilon=0.01)},
    "norm_penalty": {"mse": lambda x: NormPenalty(Independent("mse"), 1e-3)},
}
FOR_ANCHORED = ("hard_delta", "masked_uniform")
