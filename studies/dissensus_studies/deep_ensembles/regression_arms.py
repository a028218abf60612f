"""The practical's regression in four arms, on its own data and on many samples of the same law, measured."""

from dataclasses import dataclass
from math import sqrt
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dissensus.data import toy
from dissensus.data.toy import CUBIC_SEED
from dissensus.members import DeepEnsemble
from dissensus.objectives import Adversarial, Independent, Likelihood, Objective, mean_and_scale
from dissensus.predictions import Family, mixture, predict
from dissensus.randomness import derive
from dissensus.training import Run, fit
from dissensus_studies.deep_ensembles.networks import fit_own_sets, scaled_mlp
from dissensus_studies.harness.statistics import Summary

SIZES = (1, 10, 6, 30, 2)
STEPS = 600
LEARNING_RATE = 0.08
EPSILON = 0.08
NUM_POINTS = 40
PRACTICAL_MEMBERS = 6
COUNTS = (1, 2, 4, 6, 10, 20)
# A multiple of every count: ensembles of each size are made of the same nets.
NETS = 60
COVERED = 0.9

# Inside lie the data; near is just beside them; outside is where only a guess is left.
REGIONS = {"inside": (0.0, 4.0), "near": (4.0, 4.5), "outside": (5.0, 6.0)}

Measures: TypeAlias = dict[str, Summary]
Engine: TypeAlias = Literal["auto", "eager"]


@dataclass(frozen=True)
class Arm:
    """A likelihood, with or without adversarial training."""

    family: Family
    adversarial: bool

    @property
    def name(self) -> str:
        """As tables and figures have it."""
        return self.family.capitalize() + (" + adversarial" if self.adversarial else "")

    @property
    def objective(self) -> Objective:
        """What `fit` minimises."""
        plain = Independent(f"{self.family}_nll")
        return Adversarial(plain, epsilon=EPSILON) if self.adversarial else plain

    @property
    def likelihood(self) -> Likelihood:
        """What the members' outputs mean."""
        return self.objective.likelihood


ARMS = tuple(Arm(family, adversarial) for family in ("gaussian", "laplace") for adversarial in (False, True))


class MemberScales(NamedTuple):
    """The seed drawn for each member, and the scale of its initial parameters drawn under that seed."""

    seeds: tuple[int, ...]
    scales: tuple[float, ...]


def practical_scales(num_members: int = 6) -> MemberScales:
    r"""Return the scales of the initial parameters of the practical's regression members.

    $$s_j = 100 + \lfloor 10^4\,|z_j|\rfloor,\qquad \text{scale}_j = |u_j|,\ u_j \sim \mathcal N(0, 0.1^2)$$

    The stream goes on where `cubic` left it and gives the standard normal $z_1$. Each seed $s_j$ starts a new
    stream, which gives $u_j$ and then the next member's $z$.

    Example:
        >>> practical_scales(2)
        MemberScales(seeds=(672, 7888), scales=(0.05341477341995916, 0.12899350046504218))
    """
    stream = np.random.RandomState(CUBIC_SEED)
    # The forty points of `cubic`.
    stream.uniform(size=40)
    stream.normal(size=40)
    seeds, scales = [], []
    for _ in range(num_members):
        seeds.append(100 + abs(int(stream.normal(0, 1) * 10_000)))
        stream = np.random.RandomState(seeds[-1])
        scales.append(abs(float(stream.normal(0, 0.1))))
    return MemberScales(tuple(seeds), tuple(scales))


def train_practical(
    arm: Arm,
    num_members: int = PRACTICAL_MEMBERS,
    seed: int = 0,
    steps: int = STEPS,
    *,
    num_seeds: int = 1,
    engine: Engine = "auto",
) -> Run:
    """Train the practical's ensemble: its data, its scales, one full batch a step; those of several seeds as one ensemble."""
    nets = [
        scaled_mlp(SIZES, scale, each, "practical", member)
        for each in range(seed, seed + num_seeds)
        for member, scale in enumerate(practical_scales(num_members).scales)
    ]
    return fit(
        DeepEnsemble.from_members(nets, seed),
        toy.cubic(NUM_POINTS),
        objective=arm.objective,
        epochs=steps,
        batch_size=NUM_POINTS,
        optimizer="adam",
        lr=LEARNING_RATE,
        seed=seed,
        device="cpu",
        engine=engine,
    )


HEADLINE_ENGINE: Engine = "eager"


def headline(num_seeds: int) -> list[dict[str, float]]:
    """Train the practical's six Gaussian nets with several seeds, all in one call of `fit`; return what each seed ends with.

    At this learning rate a run is chaotic: rounding decides it after some hundred steps, so that one seed gives other numbers on
    another machine or engine, and only the distribution over seeds can be compared.
    """
    ensemble = train_practical(ARMS[0], num_seeds=num_seeds, engine=HEADLINE_ENGINE).members
    x, y = (torch.from_numpy(part).float() for part in toy.cubic(NUM_POINTS))
    losses = ARMS[0].objective.likelihood.per_example(predict(ensemble, x), y).mean(-1).reshape(num_seeds, -1)
    rows = [
        {"seed": seed, "best_net": float(each.min()), "worst_net": float(each.max())}
        for seed, each in enumerate(losses)
    ]
    for place in ("inside", "outside"):
        mean, scale = mean_and_scale(predict(ensemble, region(place)[0]).unflatten(0, (num_seeds, -1)))
        for row, each_mean, each_scale in zip(rows, mean, scale, strict=True):
            row[f"sd_{place}"] = float(mixture(each_mean, each_scale, ARMS[0].family)[1].mean())
    return rows


@dataclass(frozen=True)
class Repeats:
    """One arm trained on several samples, `(repeats, points, 1)`, as one ensemble: nets of the first sample, of the second, and so on."""

    arm: Arm
    ensemble: DeepEnsemble
    x: Tensor
    y: Tensor

    @property
    def num_members(self) -> int:
        """Nets on each sample."""
        return self.ensemble.num_members // len(self.x)

    def outputs(self, x: Tensor, num_members: int) -> Tensor:
        """Return outputs in separate ensembles of a size: `(members, repeats, ensembles, points, 2)`.

        Inputs are `(points, 1)` for all, or `(repeats, ensembles, points, 1)` for each ensemble its own.
        """
        if x.ndim == 2:
            every = self.ensemble(x)
        else:
            every = self.ensemble.each(x.repeat_interleave(num_members, 1).flatten(0, 1))
        return every.unflatten(0, (len(self.x), -1, num_members)).movedim(2, 0).double()


def train_repeats(arm: Arm, num_repeats: int, num_members: int = NETS, seed: int = 0, steps: int = STEPS) -> Repeats:
    """Train nets on fresh samples; samples, scales and initial draws are those of the other arms."""
    samples = [toy.cubic(NUM_POINTS, seed=_numpy_seed(seed, "sample", r)) for r in range(num_repeats)]
    x = torch.from_numpy(np.stack([x for x, _ in samples])).float()
    y = torch.from_numpy(np.stack([y for _, y in samples])).float().unsqueeze(-1)
    nets = []
    for repeat in range(num_repeats):
        draws = np.random.RandomState(_numpy_seed(seed, "scales", repeat)).normal(0, 0.1, num_members)
        for member, scale in enumerate(np.abs(draws)):
            nets.append(scaled_mlp(SIZES, float(scale), seed, "repeat", repeat, member))
    ensemble = DeepEnsemble.from_members(nets, seed)
    fit_own_sets(
        ensemble,
        x,
        y,
        [repeat for repeat in range(num_repeats) for _ in range(num_members)],
        arm.objective,
        epochs=steps,
        batch_size=NUM_POINTS,
        optimizer="adam",
        lr=LEARNING_RATE,
        seed=seed,
        check_every=100,
    )
    return Repeats(arm, ensemble.eval(), x, y)


def measure(trained: Repeats, num_members: int, test: tuple[Tensor, Tensor]) -> Measures:
    """Measure ensembles of a size on fresh inputs and targets, `(points, 1)` each; quantities are means over the ensembles of a repeat.

    Returns:
        `nll`, `nll_train` and `nll_attacked` of the exact mixture in nats; `rmse` of its mean; `wild`, the share of ensembles with
        a larger error than the constant 0; by region, the coverage of its central 90 % interval (`coverage_…`), mean standard
        deviations of the mixture (`sd_…`) and of the members' means (`knowledge_…`); `overfit`, NLL minus that on the training
        data; `ratio`, sd outside over sd inside.
    """
    x, y = test
    arm = trained.arm
    with torch.no_grad():
        outputs = trained.outputs(x, num_members)
        ensembles = outputs.shape[2]
        own_x = trained.x[:, None].expand(-1, ensembles, -1, -1)
        on_train = trained.outputs(own_x, num_members)
        attacked = trained.outputs(attack(trained, num_members, test), num_members)
        errors = (_moments(outputs, arm.family)[0] - y[:, 0]).square().mean(-1, keepdim=True).sqrt()
        found = {
            "nll": arm.likelihood.mixture(outputs, y),
            "nll_train": arm.likelihood.mixture(on_train, trained.y[:, None]),
            "nll_attacked": arm.likelihood.mixture(attacked, y),
            "rmse": errors,
            "wild": (errors > y.square().mean().sqrt()).double(),
        }
        for name in REGIONS:
            x, y = region(name)
            there = trained.outputs(x, num_members)
            found[f"coverage_{name}"] = _covered(there, y, arm.family).double()
            found[f"sd_{name}"] = _moments(there, arm.family)[1]
            found[f"knowledge_{name}"] = mean_and_scale(there)[0][..., 0].std(0, correction=0)
        found["overfit"] = found["nll"].mean(-1, keepdim=True) - found["nll_train"].mean(-1, keepdim=True)
        found["ratio"] = found["sd_outside"].mean(-1, keepdim=True) / found["sd_inside"].mean(-1, keepdim=True)
    return {name: Summary(tuple(values.mean((1, 2)).tolist())) for name, values in found.items()}


def attack(trained: Repeats, num_members: int, test: tuple[Tensor, Tensor]) -> Tensor:
    """Move test inputs by `EPSILON` up the loss of each ensemble: `(repeats, ensembles, points, 1)`."""
    x, y = test
    shape = (len(trained.x), trained.num_members // num_members, *x.shape)
    own = x.expand(shape).clone().requires_grad_()
    with torch.enable_grad():
        loss = trained.arm.likelihood.mixture(trained.outputs(own, num_members), y).sum()
        (gradient,) = torch.autograd.grad(loss, own)
    return (own + EPSILON * gradient.sign()).detach()


def test_sample(num_points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw fresh points of the practical's law, `(points, 1)` each."""
    x, y = toy.cubic(num_points, seed=_numpy_seed(seed, "test sample"))
    return torch.from_numpy(x).float(), torch.from_numpy(y).float()[:, None]


def region(name: str, points: int = 200) -> tuple[Tensor, Tensor]:
    """Return evenly spaced inputs of a region, on both sides, and targets of the practical's law there."""
    right = torch.linspace(*REGIONS[name], points)
    x = torch.cat([-right, right])[:, None]
    noise = np.random.RandomState(_numpy_seed(name)).normal(0, 3, (2 * points, 1))
    return x, x**3 + torch.from_numpy(noise).float()


def band(run: Run, family: Family, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return members' means and scales, `(members, points)`, and their mixture's mean and sd, `(points,)`."""
    mean, scale = (part[..., 0] for part in mean_and_scale(predict(run.members, x)))
    return mean, scale, *mixture(mean, scale, family)


def final_losses(run: Run, arm: Arm, data: tuple[Tensor, Tensor]) -> list[float]:
    """Return each member's mean loss on the data at the end of training."""
    x, y = data
    losses: list[float] = arm.likelihood.per_example(predict(run.members, x), y).mean(-1).tolist()
    return losses


def _moments(outputs: Tensor, family: Family) -> tuple[Tensor, Tensor]:
    """Return mean and sd of the mixture, `(repeats, ensembles, points)`."""
    mean, scale = mean_and_scale(outputs)
    return mixture(mean[..., 0], scale[..., 0], family)


def _covered(outputs: Tensor, y: Tensor, family: Family) -> Tensor:
    """Return whether each target lies in the mixture's central interval, by its distribution function."""
    mean, scale = mean_and_scale(outputs)
    z = ((y - mean) / scale)[..., 0]
    if family == "gaussian":
        below = 0.5 * (1 + torch.erf(z / sqrt(2)))
    else:
        below = 0.5 * (1 + z.sign() * (1 - torch.exp(-z.abs())))
    return (below.mean(0) - 0.5).abs() <= COVERED / 2


def _numpy_seed(*key: int | str) -> int:
    return derive(*key) & 0xFFFFFFFF
