"""A training job that every side of a comparison is given: networks, data, loss and optimizer."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from dissensus.data.augment import Augmentation

_OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class Problem:
    """What to train.

    Attributes:
        members: Networks in the ensemble.
        make: Makes one of them.
        x: Inputs, on the device that is measured: a tensor, or a dictionary of tensors, the arguments of the networks.
        y: Targets, beside them.
        batch: Examples a step and member.
        turn_steps: Steps that slower rivals take in one turn; `ds.fit` takes an epoch in its turn.
        loss: `"mse"` or `"cross_entropy"`.
        optimizer: `"sgd"`, `"adam"` or `"adamw"`.
        lr: Learning rate.
        options: Further options of the optimizer.
        bf16: Whether networks run under bf16 autocast.
        augment: Augmentation of inputs.
        picked: Train only so many members a step, drawn anew each time, on a batch that they share.
        widths: Sizes of the layers, where the networks are MLPs with ReLU between linear layers.
        output: Key of what is scored, where the networks return dictionaries.
    """

    members: int
    make: Callable[[], nn.Module]
    x: Any
    y: Tensor
    batch: int
    turn_steps: int
    loss: Literal["mse", "cross_entropy"] = "mse"
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: float = 1e-3
    options: Mapping[str, Any] = field(default_factory=dict)
    bf16: bool = False
    augment: Augmentation | None = None
    picked: int | None = None
    widths: tuple[int, ...] | None = None
    output: str | None = None

    @property
    def device(self) -> torch.device:
        """Where the data is, and so where everything runs."""
        return self.y.device

    @property
    def layout(self) -> torch.memory_format:
        """How images lie in memory where convolutions run fastest."""
        images = isinstance(self.x, Tensor) and self.x.ndim == 4
        return torch.channels_last if images and self.y.is_cuda else torch.preserve_format

    def new_nets(self) -> list[nn.Module]:
        """Make every member as a module of its own."""
        return [self.make().to(self.device, memory_format=self.layout) for _ in range(self.members)]  # type: ignore[call-overload]

    def rows(self, picked: Tensor) -> tuple[Any, Tensor]:
        """Return the inputs and targets of some rows."""
        return tree_map(lambda part: part[picked], self.x), self.y[picked]

    def outputs(self, net: nn.Module, x: Any) -> Tensor:
        """Call a network as its inputs ask for, and return what is scored."""
        if isinstance(x, Tensor):
            found = net(x.contiguous(memory_format=self.layout))
        else:
            found = net(**x)
        return found if self.output is None else found[self.output]

    def torch_optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """Make the usual torch optimizer; a fused one where that is what people use, on a GPU."""
        options = {"lr": self.lr, **self.options} | ({"fused": True} if self.y.is_cuda else {})
        return _OPTIMIZERS[self.optimizer](parameters, **options)

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, averaged over everything."""
        if self.loss == "mse":
            return F.mse_loss(outputs, targets)
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def mlp(widths: tuple[int, ...]) -> nn.Module:
    """Make an MLP with ReLU between its layers.

    Example:
        >>> mlp((10, 30, 1))(torch.zeros(64, 10)).shape
        torch.Size([64, 1])
    """
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mlp_problem(members: int, widths: tuple[int, ...], batch: int, steps: int, turn_steps: int, device: str) -> Problem:
    """Return MLPs that learn a smooth function by Adam on the squared error.

    Args:
        members: Networks.
        widths: Sizes of their layers, inputs first.
        batch: Examples a step.
        steps: Steps an epoch.
        turn_steps: Steps of a rival's turn.
        device: Where to run.

    Example:
        >>> problem = mlp_problem(5, (10, 30, 30, 1), batch=64, steps=10, turn_steps=4, device="cpu")
        >>> problem.x.shape, problem.y.shape
        (torch.Size([640, 10]), torch.Size([640, 1]))
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch * steps, widths[0], generator=generator).to(device)
    y = x[:, :1].sin().expand(-1, widths[-1]).contiguous()
    return Problem(members, lambda: mlp(widths), x, y, batch, turn_steps, widths=widths)
