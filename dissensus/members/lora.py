"""LoRA ensembles: one frozen network, and for each member corrections of low rank to its linear layers."""

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import sqrt
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from dissensus._signatures import checked, real_number, whole_number
from dissensus.data.trees import Output
from dissensus.members.members import check_networks
from dissensus.members.shared import OwnLayer, SharedMembers
from dissensus.members.stacking import average, tensors_of, twin
from dissensus.nets.dropout import put_layer
from dissensus.nets.graphs import listed
from dissensus.randomness import derive, uniform


@checked
class LoRAEnsemble(SharedMembers):
    r"""Members that are adapters on one frozen network: $W_m = W + \frac{\alpha}{r} B_m A_m$.

    Every chosen linear layer of the network gets, for each member, two matrices of rank r that are trained in its place; the network's own
    weights are held once, whatever the number of members. $A_m$ starts random and $B_m$ at zero, so members start as the network
    itself and part when they are trained. The network is not copied: its tensors are shared with yours, no longer ask for gradients, and
    it always evaluates (no dropout, BatchNorm as it was trained). The average of members' weights, `soup()`, is one network, whose
    corrections have as many times the rank as members went into it.

    Args:
        net: A trained network, such as one of `transformers`.
        num_members: Adapters.
        rank: Rank r of the corrections.
        alpha: Their scale.
        layers: Names of linear layers to correct, or patterns of names such as `"*.query"`; all by default.
        own: Names or patterns of linear layers of which every member has a copy of its own, trained in full: a new head.
        seed: Decides $A_m$; member j's depends on `(seed, j)` only.

    Example:
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        >>> ens = LoRAEnsemble(net, num_members=5, rank=2, layers="0", own="2")
        >>> ens(torch.zeros(8, 64)).shape, sum(p.numel() for p in ens.parameters() if p.requires_grad)
        (torch.Size([5, 8, 3]), 2255)

    References:
        Hu et al., 2021, <https://arxiv.org/abs/2106.09685>; Wang et al., 2023, <https://arxiv.org/abs/2310.00035>.
    """

    loss_over_members: ClassVar[Literal["sum", "mean"]] = "sum"
    own_batches: ClassVar[bool] = True
    separate: ClassVar[bool] = True
    decisive: ClassVar[tuple[str, ...]] = ("batches", "alpha")

    def __init__(
        self,
        net: nn.Module,
        num_members: int = 5,
        rank: int = 8,
        alpha: float = 16.0,
        *,
        layers: str | Sequence[str] = "*",
        own: str | Sequence[str] = (),
        seed: int = 0,
        output: Output = None,
    ) -> None:
        whole_number("num_members", num_members, 1)
        whole_number("rank", rank, 1)
        real_number("alpha", alpha, above=True)
        check_networks([net])
        net.requires_grad_(False)
        grown = twin(net)
        linear = {name: module for name, module in grown.named_modules() if type(module) is nn.Linear}
        full = _matching(linear, own, "own")
        low = [name for name in _matching(linear, layers, "layers") if name not in full]
        for name in full:
            grown = put_layer(grown, name, _Full(linear[name], num_members))
        for name in low:
            key = derive(seed, "adapter", name)
            grown = put_layer(grown, name, _LowRank(linear[name], num_members, rank, alpha, key))
        super().__init__(grown, num_members, seed, "whole", output)
        self.rank, self.alpha = rank, alpha
        frozen = (name for name, tensor in tensors_of(self).items() if not tensor.requires_grad)
        self.shared_buffers = frozenset(frozen) - {"member_keys"}
        self.to(next(self.net.parameters()).device)
        self.train(net.training)

    def train(self, mode: bool = True) -> "LoRAEnsemble":
        """Set training or evaluation mode of the ensemble; the network always evaluates."""
        super().train(mode)
        self.net.eval()
        return self

    def adapters(self) -> Iterator[tuple[str, OwnLayer]]:
        """Yield the layers that members have something of their own in, by name."""
        return ((name, module) for name, module in self.named_modules() if isinstance(module, OwnLayer))

    def averaged(self, nets: Sequence[nn.Module]) -> nn.Module:
        """Return one plain module whose weights are the average of these members': corrections of as many times the rank as members."""
        one = copy.deepcopy(nets[0])
        for name, module in self.net.named_modules():
            if isinstance(module, _LowRank | _Full):
                one = put_layer(one, name, module.average([net.get_submodule(name) for net in nets]))
        return one

    def identity(self) -> dict[str, str]:
        """Return which network it is: its tensors are not in the checkpoints of a run."""
        digest = hashlib.sha256()
        for name, tensor in self.state_dict().items():
            if name in self.shared_buffers:
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return {"network": digest.hexdigest()[:16], **super().identity()}


class _LowRank(OwnLayer):
    """A frozen linear layer and corrections of low rank, `(members, rank, inputs)` and `(members, outputs, rank)`."""

    def __init__(self, base: nn.Linear, num_members: int, rank: int, alpha: float, key: int) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        dtype = base.weight.dtype if base.weight.dtype.itemsize > 2 else torch.float32
        keys = torch.tensor([derive(key, member) for member in range(num_members)])
        start = (2 * uniform(keys, rank, base.in_features) - 1) / sqrt(base.in_features)
        self.a = nn.Parameter(start.to(dtype))
        self.b = nn.Parameter(torch.zeros(num_members, base.out_features, rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Add each member's correction to what the layer gives for its rows."""
        self.check_rows(x, len(self.a))
        rows = x.reshape(len(self.a), -1, x.shape[-1]).to(self.a.dtype)
        correction = rows @ self.a.transpose(1, 2) @ self.b.transpose(1, 2)
        base: Tensor = self.base(x)
        return base + self.scale * correction.reshape(base.shape).to(base.dtype)

    @property
    def weight(self) -> Tensor:
        """The weight with a single member's correction; of several members only shape and dtype, which networks may look at."""
        if len(self.a) > 1:
            return self.base.weight.detach().to("meta")
        return self.base.weight + self.scale * (self.b[0] @ self.a[0]).to(self.base.weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The frozen layer's."""
        return self.base.bias

    def alone(self, index: int) -> nn.Module:
        """Return the layer with one member's corrections."""
        return self._with(self.a[index : index + 1].detach().clone(), self.b[index : index + 1].detach().clone())

    @classmethod
    def average(cls, layers: Sequence[nn.Module]) -> nn.Module:
        """Return the layer whose correction is the mean of these single members': the sum of products is one of factors side by side."""
        each = cast("Sequence[_LowRank]", layers)
        a, b = torch.cat([one.a for one in each], 1), torch.cat([one.b for one in each], 2)
        return each[0]._with(a.detach(), b.detach() / len(each))

    def _with(self, a: Tensor, b: Tensor) -> "_LowRank":
        other = copy.deepcopy(self)
        other.a, other.b = nn.Parameter(a), nn.Parameter(b)
        return other


class _Full(OwnLayer):
    """A layer that every member has for itself, `(members, outputs, inputs)`; it starts as the network's."""

    bias: nn.Parameter | None

    def __init__(self, base: nn.Linear, num_members: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach().repeat(num_members, 1, 1))
        bias = None if base.bias is None else nn.Parameter(base.bias.detach().repeat(num_members, 1))
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        self.check_rows(x, len(self.weight))
        rows = x.reshape(len(self.weight), -1, x.shape[-1])
        found = rows @ self.weight.transpose(1, 2)
        found = found if self.bias is None else found + self.bias[:, None]
        return found.reshape(*x.shape[:-1], found.shape[-1])

    @classmethod
    def average(cls, layers: Sequence[nn.Module]) -> nn.Module:
        """Return the linear layer whose weights are the mean of these single members'."""
        one = copy.deepcopy(layers[0])
        one.load_state_dict(average([layer.state_dict() for layer in layers]))
        return one

    def alone(self, index: int) -> nn.Module:
        """Return one member's layer as a plain linear one."""
        outputs, inputs = self.weight.shape[1:]
        layer = nn.Linear(inputs, outputs, self.bias is not None, device="meta")
        values = {name: parameter[index].detach().clone() for name, parameter in self.named_parameters()}
        layer.load_state_dict(values, assign=True)
        return layer


def _matching(linear: Mapping[str, nn.Module], patterns: str | Sequence[str], argument: str) -> list[str]:
    """Return the names of linear layers that one of the patterns matches; each must match one."""
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise ValueError(
                f"`{argument}` must name linear layers of the network; {pattern!r} matches none of {listed(list(linear))}."
            )
    return [name for name in linear if any(fnmatchcase(name, pattern) for pattern in wanted)]
