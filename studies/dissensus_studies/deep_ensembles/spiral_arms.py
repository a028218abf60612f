"""The practical's classification: spirals, in its own form and with the usual loss, trained and measured."""

from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor

from dissensus import metrics, scores
from dissensus.data import toy
from dissensus.members import DeepEnsemble, Members
from dissensus.objectives import Adversarial, Independent, NormPenalty, Objective, fast_gradient_sign
from dissensus.predictions import predict
from dissensus.randomness import derive
from dissensus.training import Run, fit
from dissensus_studies.deep_ensembles.networks import scaled_mlp

SIZES = (2, 150, 150, 3)
SCALE = 0.1
STEPS = 300
LEARNING_RATE = 0.1
NUM_MEMBERS = 4
EPSILON = 0.02
NORM_WEIGHT = 1e-3
# What the practical's penalty on the norm amounts to near its end, as a penalty on half the squared norm.
WEIGHT_DECAY = 1e-4

# Members agree to float32 precision below this many nats of knowledge uncertainty.
AGREED = 1e-6


@dataclass(frozen=True)
class Arm:
    """How the spirals are learnt: with or without attacked inputs, by the practical's own loss (`parity`) or by the usual one.

    The first is cross-entropy divided by the number of classes plus the norm of all parameters, not squared; the other has weight decay.
    """

    parity: bool
    adversarial: bool

    @property
    def name(self) -> str:
        """As tables and figures have it."""
        return ("practical" if self.parity else "usual loss") + (" + adversarial" if self.adversarial else "")

    @property
    def objective(self) -> Objective:
        """What `fit` minimises."""
        plain = Independent(over_classes=self.parity)
        trained = Adversarial(plain, epsilon=EPSILON) if self.adversarial else plain
        return NormPenalty(trained, NORM_WEIGHT) if self.parity else trained


ARMS = tuple(Arm(parity, adversarial) for parity in (True, False) for adversarial in (False, True))


def spirals(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the practical's data set (seed 0), or another of the same law, as tensors."""
    x, y = toy.spirals(seed=seed)
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def train_spirals(arm: Arm, seed: int = 0, steps: int = STEPS, num_members: int = NUM_MEMBERS, **settings: Any) -> Run:
    """Train the practical's ensemble on its data, one full batch a step; settings are passed on to `fit`."""
    x, y = spirals()
    nets = [scaled_mlp(SIZES, SCALE, seed, "spirals", member) for member in range(num_members)]
    return fit(
        DeepEnsemble.from_members(nets, seed),
        (x, y),
        objective=arm.objective,
        epochs=steps,
        batch_size=len(x),
        optimizer="adam",
        lr=LEARNING_RATE,
        weight_decay=0.0 if arm.parity else WEIGHT_DECAY,
        # Full batches: the order within them changes nothing.
        batches="shared",
        seed=seed,
        device="cpu",
        **settings,
    )


@dataclass(frozen=True)
class Plane:
    """What an ensemble says on a square grid: points are `(side * side, 2)`, row by row from below; logits are of all members."""

    axis: Tensor
    points: Tensor
    logits: Tensor

    @classmethod
    def of(cls, ensemble: Members, low: float = -2.0, high: float = 2.0, side: int = 201) -> "Plane":
        """Ask an ensemble everywhere on a square."""
        axis = torch.linspace(low, high, side)
        rows, columns = torch.meshgrid(axis, axis, indexing="ij")
        points = torch.stack([columns, rows], -1).reshape(-1, 2)
        return cls(axis, points, predict(ensemble, points, batch_size=8192))

    @property
    def radius(self) -> Tensor:
        """Distance of the grid points from the centre; the data end at 1."""
        return self.points.norm(dim=-1)

    @property
    def mean_probs(self) -> Tensor:
        """The ensemble's probabilities, `(points, classes)`."""
        return self.logits.softmax(-1).mean(0)

    def boundary(self) -> Tensor:
        """Whether the ensemble's class differs from that of a neighbour on the grid, `(points,)`."""
        side = len(self.axis)
        kind = self.mean_probs.argmax(-1).reshape(side, side)
        edge = torch.zeros(side, side, dtype=torch.bool)
        across, along = kind[1:] != kind[:-1], kind[:, 1:] != kind[:, :-1]
        edge[1:] |= across
        edge[:-1] |= across
        edge[:, 1:] |= along
        edge[:, :-1] |= along
        return edge.reshape(-1)

    def grid(self, values: Tensor) -> Tensor:
        """Return values on the points as rows of the grid, `(side, side, ...)`."""
        return values.unflatten(0, (len(self.axis), len(self.axis)))


def measure(run: Run, plane: Plane, seed: int = 0) -> dict[str, float]:
    """Answer the practical's questions about a trained ensemble with numbers; `seed` decides the fresh test sample.

    Returns:
        Fit on the training data (`train_…`) and a fresh sample (`test_…`, `attacked_accuracy`); confidences, entropies and
        knowledge uncertainty on the data, beyond them (radius > 1), at boundaries and in the corners.
    """
    found = _fit_of(run.members, seed) | _confidence(run.members, plane)
    return found | _entropies(plane) | _knowledge(run.members, plane)


def attacked(ensemble: Members, x: Tensor, y: Tensor) -> Tensor:
    """Move inputs by `EPSILON` up the ensemble's loss."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        loss = Independent().likelihood.mixture(ensemble(x), y).sum()
        (gradient,) = torch.autograd.grad(loss, x)
    return fast_gradient_sign(x, gradient, EPSILON)


def _fit_of(ensemble: Members, seed: int) -> dict[str, float]:
    ensemble.eval()
    found = {}
    fresh = spirals(derive(seed, "spirals, test") & 0xFFFFFFFF)
    for name, (x, y) in (("train", spirals()), ("test", fresh)):
        probs = predict(ensemble, x).softmax(-1).mean(0)
        found[f"{name}_accuracy"] = metrics.accuracy(probs, y)
        found[f"{name}_nll"] = metrics.nll(probs, y)
    found["test_ece"] = metrics.ece(probs, y)
    moved = predict(ensemble, attacked(ensemble, *fresh)).softmax(-1).mean(0)
    found["attacked_accuracy"] = metrics.accuracy(moved, fresh[1])
    found["attacked_nll"] = metrics.nll(moved, fresh[1])
    return found


def _confidence(ensemble: Members, plane: Plane) -> dict[str, float]:
    confidence = plane.mean_probs.amax(-1)
    members = plane.logits.softmax(-1).amax(-1)
    far = plane.radius > 1.5
    angle = torch.linspace(0, 2 * pi, 721)[:-1]
    ring = predict(ensemble, 10 * torch.stack([angle.sin(), angle.cos()], -1)).softmax(-1)
    return {
        "confidence_data": float(predict(ensemble, spirals()[0]).softmax(-1).mean(0).amax(-1).mean()),
        "confidence_far": float(confidence[far].mean()),
        "confidence_far_member": float(members[:, far].mean()),
        "confidence_far_above_99": float((confidence[far] > 0.99).float().mean()),
        "confidence_far_member_above_99": float((members[:, far] > 0.99).float().mean()),
        "confidence_radius_10": float(ring.mean(0).amax(-1).mean()),
        "confidence_radius_10_member": float(ring.amax(-1).mean()),
    }


def _entropies(plane: Plane) -> dict[str, float]:
    total, data = scores.total_entropy(plane.logits), scores.expected_entropy(plane.logits)
    edge, inside = plane.boundary(), plane.radius <= 1
    return {
        "entropy_boundary": float(total[edge & inside].mean()),
        "entropy_elsewhere": float(total[~edge & inside].mean()),
        "entropy_boundary_far": float(total[edge & ~inside].mean()),
        "entropy_far_elsewhere": float(total[~edge & ~inside].mean()),
        "data_share_boundary": float(data[edge & inside].sum() / total[edge & inside].sum()),
        "data_uncertainty_inside": float(data[inside].mean()),
        "data_uncertainty_far": float(data[~inside].mean()),
        # Half of the largest entropy possible, log 3, is 0.549 nats.
        "uncertain_area_inside": float((total[inside] > 0.549).float().mean()),
    }


def _knowledge(ensemble: Members, plane: Plane) -> dict[str, float]:
    knowledge = scores.mutual_information(plane.logits)
    edge, far = plane.boundary(), plane.radius > 1
    side = len(plane.axis)
    corners = torch.tensor([0, side - 1, side * (side - 1), side * side - 1])
    return {
        "knowledge_data": float(scores.mutual_information(predict(ensemble, spirals()[0])).mean()),
        "knowledge_inside": float(knowledge[~far].mean()),
        "knowledge_far": float(knowledge[far].mean()),
        "knowledge_far_boundary": float(knowledge[far & edge].mean()),
        "knowledge_far_elsewhere": float(knowledge[far & ~edge].mean()),
        "knowledge_largest_corner": float(knowledge[corners].max()),
        "agreed_corners": float((knowledge[corners] < AGREED).sum()),
        "agreed_far": float((knowledge[far] < AGREED).float().mean()),
        "confidence_smallest_corner": float(plane.mean_probs[corners].amax(-1).min()),
    }
