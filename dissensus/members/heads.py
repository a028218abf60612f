"""Heads on a frozen backbone: one pass through the backbone, one trained head a member."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from dissensus._signatures import checked, whole_number
from dissensus.architectures import mlp
from dissensus.data.features import CachedFeatures
from dissensus.data.fingerprints import network_digest
from dissensus.data.sources import device_of
from dissensus.data.trees import Batch, Output, inputs_of, pick
from dissensus.members.deep_ensemble import DeepEnsemble, OnDeepEnsemble
from dissensus.members.members import Keys, Members, under
from dissensus.members.shared import call
from dissensus.members.stacking import Tensors, tensors_of

MakeHead = Callable[[], nn.Module] | tuple[int, int]
_BACKBONE = "backbone."


@checked
class HeadEnsemble(OnDeepEnsemble):
    """Many heads on one frozen backbone: `forward(x)` gives `(members, batch, ...)`.

    The backbone is held, not copied: it is set to evaluation mode for good and its parameters no longer ask for
    gradients. It is in the state dict, but not in the checkpoints of a run. `heads` is a `DeepEnsemble` that takes what the backbone
    gives, or what `cache_features` kept of that: the ensemble is then the same as if it had seen the inputs.

    Args:
        backbone: Any network from inputs to one tensor of features.
        make_head: Makes one new head each time it is called; or a pair (features, outputs) for heads of two layers.
            One layer is a convex problem: all members would end in the same place.
        num_members: How many heads.
        seed: Member j's initial weights depend on `(seed, j)` only.
        features: What heads take of a backbone that returns several tensors: a key, an index or a function.
        output: What is scored of heads that return several tensors, likewise.

    Example:
        >>> import torch
        >>> backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        >>> ens = HeadEnsemble(backbone, (16, 10), num_members=50, seed=0)
        >>> ens(torch.zeros(8, 1, 8, 8)).shape, sum(p.requires_grad for p in backbone.parameters())
        (torch.Size([50, 8, 10]), 0)
    """

    # Batches of their own would all go through the backbone.
    prefers_shared_batches: ClassVar[bool] = True
    rows_in = "heads"

    def __init__(
        self,
        backbone: nn.Module,
        make_head: MakeHead,
        num_members: int = 50,
        seed: int = 0,
        *,
        features: Output = None,
        output: Output = None,
    ) -> None:
        super().__init__(num_members, seed)
        self.output, self.takes = output, features
        if isinstance(backbone, Members):
            raise ValueError(f"`backbone` must be one network; got a {type(backbone).__name__}. Take one member of it.")
        self.backbone = backbone.requires_grad_(False)
        self.heads = DeepEnsemble(_factory(make_head), num_members, seed, output=output)
        self.shared_buffers = frozenset(f"{_BACKBONE}{name}" for name in tensors_of(backbone))
        self.training = self.heads.training
        backbone.eval()
        self.to(device_of(backbone))

    def train(self, mode: bool = True) -> "HeadEnsemble":
        """Set training or evaluation mode for the heads; the backbone always evaluates."""
        super().train(mode)
        self.backbone.eval()
        return self

    def features(self, *x: Any, **named: Any) -> Tensor:
        """Return what the backbone says of a batch, `(batch, ...)`; gradients flow to `x` alone."""
        return self._features(tensors_of(self), inputs_of(x, named))

    def _features(self, tensors: Tensors, x: Batch) -> Tensor:
        frozen = {name: t.detach() for name, t in under(_BACKBONE, tensors).items()}
        features: Tensor = call(self.backbone, frozen, x, self.takes, lent=True)
        own = next((t for t in self.heads.parameters() if t.is_floating_point()), features)
        return features.to(own.dtype) if features.is_floating_point() else features

    def run(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run the backbone once and the heads on what it gives; see `Members.run`."""
        features = self._features(tensors, x.flatten(0, 1) if own else x)
        if own:
            features = features.unflatten(0, x.shape[:2])
        return self.heads.run(under("heads.", tensors), features, own=own, rows=rows, keys=keys)

    def member(self, index: int) -> nn.Module:
        """Return one member as an independent plain module: a copy of the backbone, then the head."""
        return self.on_backbone(self.heads.member(index))

    def soup(self) -> nn.Module:
        """Return one plain module: a copy of the backbone, then a head with the average of the heads' weights."""
        return self.on_backbone(self.heads.soup())

    def on_backbone(self, head: nn.Module) -> nn.Module:
        """Return one plain module: a copy of the backbone, then this head."""
        net = HeadOnBackbone(copy.deepcopy(self.backbone), head)
        net.takes, net.training = self.takes, self.training
        return net

    def reader(self, data: object) -> Members:
        """Return the heads where the data holds features of the backbone, else all."""
        if not isinstance(data, CachedFeatures):
            return self
        data.check_backbone(self.backbone)
        return self.heads

    def check_beside(self, data: object, side: object, name: str) -> None:
        """Refuse features of another backbone, and features beside inputs."""
        if not isinstance(side, CachedFeatures):
            return
        if not isinstance(data, CachedFeatures):
            raise ValueError(
                f"The {name} data are cached features and the training data are inputs of the backbone. Cache the training data "
                "too, or hand over inputs."
            )
        side.check_backbone(self.backbone)

    def identity(self) -> dict[str, str]:
        """Return which backbone it is."""
        return {"backbone": self.backbone_digest(), **super().identity()}

    def backbone_digest(self) -> str:
        """Return a hash of the backbone as it now is, by which it is recognised."""
        # Not remembered: weights that are changed through `.data` leave nothing to notice it by.
        return network_digest(self.backbone)


class HeadOnBackbone(nn.Sequential):
    """A backbone and a head as one plain module, which takes what the backbone takes."""

    takes: Output = None

    def forward(self, *x: Any, **named: Any) -> Any:
        """Run the head on the backbone's features."""
        return self[1](pick(self[0](*x, **named), self.takes))


def _factory(make_head: MakeHead) -> Callable[[], nn.Module]:
    if isinstance(make_head, nn.Module):
        raise ValueError("`make_head` must be a function that makes a head; got a network. Write `lambda: Head(...)`.")
    if callable(make_head):
        return make_head
    both = " in each of its places, (features, outputs)"
    features, outputs = (whole_number("make_head", width, 1, tail=both) for width in make_head)
    return lambda: mlp(features, [features], outputs, activation=nn.GELU)
