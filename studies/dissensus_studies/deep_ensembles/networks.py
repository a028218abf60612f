"""What the studies train and how they attack it: networks with parameters of one scale, members with data sets of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.architectures import mlp
from dissensus.members import DeepEnsemble
from dissensus.objectives import Objective, fast_gradient_sign
from dissensus.randomness import Noise, derive, seeded
from dissensus.training import Run, fit


def scaled_mlp(sizes: Sequence[int], scale: float, *key: int | str) -> nn.Module:
    """Make a ReLU network whose weights *and* biases start as `scale` times standard normal draws, which the key decides."""
    with seeded(derive(*key)), torch.no_grad():
        network = mlp(sizes[0], sizes[1:-1], sizes[-1])
        for parameter in network.parameters():
            parameter.normal_(0, scale)
    return network


def attacked(x: Tensor, loss: Callable[[Tensor], Tensor], epsilon: float) -> Tensor:
    """Move inputs by `epsilon` up a loss."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(loss(x).sum(), x)
    return fast_gradient_sign(x, gradient, epsilon)


def fit_own_sets(
    ensemble: DeepEnsemble, x: Tensor, y: Tensor, sets: Sequence[int], objective: Objective, **settings: Any
) -> Run:
    """Train every member on a set of its own, `sets[member]` of `(sets, rows, ...)`, in one run of `fit`, whose `settings` these are.

    `fit` gets the numbers of rows in place of targets, and an `augment` that puts those rows of the member's own set there.
    """
    own = torch.tensor(list(sets))[:, None]

    def rows_of(_: Tensor, numbers: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        rows = numbers[..., 0].long()
        return x[own, rows], y[own, rows]

    numbers = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
    return fit(ensemble, (x[0], numbers), objective=objective, augment=rows_of, device="cpu", **settings)
