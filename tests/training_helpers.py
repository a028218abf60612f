"""Small data and networks that the training tests share."""

from dataclasses import dataclass

import torch
from torch import nn

from dissensus import objectives as obj

x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def net(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def weights(ens) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in ens.state_dict().items()}


@dataclass(frozen=True)
class PickSome(obj.Independent):
    """Trains a few members a step, drawn without replacement; nothing else is evaluated."""

    count: int = 2
    batches = "shared"

    def pick(self, step, num_members):
        return step.noise(shared=True).uniform(num_members).topk(self.count).indices
