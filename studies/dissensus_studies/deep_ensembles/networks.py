"""What the studies train: networks with parameters of one scale, members with data sets of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.members import DeepEnsemble
from dissensus.objectives import Objective
from dissensus.randomness import Noise, derive, seeded
from dissensus.training import Run, fit


def scaled_mlp(sizes: Sequence[int], scale: float, *key: int | str) -> nn.Sequential:
    """Make a ReLU network whose weights *and* biases start as `scale` times standard normal draws.

    Args:
        sizes: Widths of all layers, inputs first, outputs last.
        scale: Standard deviation of every parameter.
        key: Numbers and words that decide the draws; torch's global generator is left as found.

    Example:
        >>> scaled_mlp((1, 10, 2), 0.1, 0, "member", 3)[0].weight.shape
        torch.Size([10, 1])
    """
    with seeded(derive(*key)), torch.no_grad():
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        network = nn.Sequential(*layers[:-1])
        for parameter in network.parameters():
            parameter.normal_(0, scale)
    return network


@dataclass(frozen=True)
class OwnSets:
    """Gives each member a training set of its own, so that many experiments train as one ensemble.

    `fit` takes one data set. It gets the numbers of rows in place of targets, and this object, as its
    `augment`, puts those rows of the member's own set there. All sets have the same size.

    Attributes:
        x: Inputs of all sets, `(sets, rows, features)`.
        y: Targets of all sets, `(sets, rows, 1)`.
        sets: Which set each member trains on, `(members,)`.
    """

    x: Tensor
    y: Tensor
    sets: Tensor

    def __call__(self, x: Tensor, y: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Return each member's own rows: `y` holds their numbers, `(members, batch, 1)`."""
        rows = y[..., 0].long()
        return self.x[self.sets[:, None], rows], self.y[self.sets[:, None], rows]


def fit_own_sets(
    ensemble: DeepEnsemble, x: Tensor, y: Tensor, sets: Sequence[int], objective: Objective, **settings: Any
) -> Run:
    """Train every member on a set of its own in one run of `fit`.

    Args:
        ensemble: The members.
        x: Inputs of all sets, `(sets, rows, features)`.
        y: Targets of all sets, `(sets, rows, 1)`.
        sets: Which set each member trains on.
        objective: What to minimise. One that measures the inputs' ranges has to be told them.
        settings: Passed on to `fit`.
    """
    num_rows = x.shape[1]
    # float32 counts without gaps up to 2**24.
    assert num_rows <= 1 << 24
    numbers = torch.arange(num_rows, dtype=torch.float32)[:, None]
    own = OwnSets(x, y, torch.tensor(list(sets)))
    return fit(ensemble, (x[0], numbers), objective=objective, augment=own, device="cpu", **settings)
