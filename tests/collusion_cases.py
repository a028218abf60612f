"""Ensembles that are known to collude (trained jointly) and known not to (trained alone), small enough for a test."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

import dissensus as ds
from dissensus import objectives as obj


@dataclass(frozen=True)
class Case:
    """Data, network and training of one comparison."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    make: Callable[[], nn.Module]
    loss: str
    average: str
    members: int
    epochs: int
    lr: float
    shows_in_training_only: bool = False
    colludes_from: float = 1.0


def mlp(inputs, hidden, outputs, layers=1):
    def make():
        widths = [inputs] + [hidden] * layers
        steps = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
        return nn.Sequential(*(part for step in steps for part in step), nn.Linear(hidden, outputs))

    return make


def split(x, y, count):
    return (x[:count], y[:count]), (x[count:], y[count:])


def regression(seed, noise=0.3, members=10):
    """Ten learners with one hidden layer of 20, on a smooth function of eight inputs with noise."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, 8, generator=generator) / 8**0.5
    x = torch.randn(1400, 8, generator=generator)
    y = torch.sin(2 * x @ first) + 0.5 * (x @ second) ** 2 + noise * torch.randn(1400, generator=generator)
    y = ((y - y.mean()) / y.std())[:, None]
    # Of two members, each is half of the ensemble: at 0.9 their errors cancel already.
    colludes_from = 0.9 if members == 2 else 1.0
    make = mlp(8, 20, 1)
    return Case(*split(x, y, 400), make, "mse", "scores", members, 60, 0.01, colludes_from=colludes_from)


def classes(average, count=10, flip=0.05):
    """Gaussian classes in twenty dimensions, some labels wrong."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(count, 20, generator=generator)
    y = torch.randint(count, (1500,), generator=generator)
    x = centres[y] + torch.randn(1500, 20, generator=generator)
    wrong = torch.rand(1500, generator=generator) < flip
    y = torch.where(wrong, torch.randint(count, (1500,), generator=generator), y)
    # Members whose probabilities are averaged give up training examples; held out, they look as if trained alone.
    return Case(*split(x, y, 1000), mlp(20, 64, count), "cross_entropy", average, 5, 30, 3e-3, average == "probs")


def deep_classes():
    """Members of several layers, which give up whole classes to each other."""
    generator = torch.Generator().manual_seed(0)
    centres = 0.5 * torch.randn(10, 20, generator=generator)
    y = torch.randint(10, (2000,), generator=generator)
    x = centres[y] + torch.randn(2000, 20, generator=generator)
    make = mlp(20, 32, 10, layers=4)
    return Case(*split(x, y, 1000), make, "cross_entropy", "probs", 5, 30, 3e-3, True)


RULE_CASES = {
    "regression": regression(0),
    "regression, two members": regression(1, members=2),
    "classes by scores": classes("scores"),
    "classes by probabilities": classes("probs"),
    "deep classes by probabilities": deep_classes(),
}


def trained(case, beta, **options):
    """The trained ensemble and its run."""
    if options:
        return _train(case, beta, **options)
    return _trained(id(case), beta)


@cache
def _trained(identity, beta):
    case = next(case for case in RULE_CASES.values() if id(case) == identity)
    return _train(case, beta)


def _train(case, beta, **options):
    ensemble = ds.DeepEnsemble(case.make, case.members, seed=0)
    run = ds.fit(
        ensemble,
        case.train,
        objective=obj.Joint(beta=beta, loss=case.loss, average=case.average),
        **{"epochs": case.epochs, "batch_size": 32, "optimizer": "adam", "lr": case.lr, "device": "cpu"} | options,
    )
    return ensemble, run
