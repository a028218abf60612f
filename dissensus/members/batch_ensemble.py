"""BatchEnsemble: one set of weights, and for each member a factor on every input and output channel of every layer."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dissensus._signatures import checked
from dissensus.data.trees import Output
from dissensus.members.shared import BatchUse, PerRow, SharedMembers, made
from dissensus.nets.dropout import plain_dropout
from dissensus.nets.graphs import LAYERS
from dissensus.randomness import derive, uniform

NAME = "factors"


class Factors(PerRow):
    """What members have of their own in one layer: factors on inputs `r`, on outputs `s`, and a bias, `(members, channels)` each."""

    bias: nn.Parameter | None

    def __init__(self, r: Tensor, s: Tensor, bias: Tensor | None, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.r, self.s = nn.Parameter(r), nn.Parameter(s)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    def before(self, layer: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Scale what goes into the layer."""
        x = inputs[0]
        return (x * self.take(self.r, x, self.axis).to(x.dtype), *inputs[1:])

    def after(self, layer: object, inputs: object, x: Tensor) -> Tensor:
        """Scale and shift what comes out of it."""
        x = x * self.take(self.s, x, self.axis).to(x.dtype)
        return x if self.bias is None else x + self.take(self.bias, x, self.axis).to(x.dtype)

    def extra_repr(self) -> str:
        """Show for how many members."""
        return f"{len(self.r)} members"


@checked
class BatchEnsemble(SharedMembers):
    r"""Members that share every weight matrix up to a matrix of rank one: $W_m = W \circ s_m r_m^\top$.

    In every linear layer and convolution, member m scales the inputs by $r_m$ and the outputs by $s_m$, and has a bias
    of its own; all else (BatchNorm, embeddings) is shared. The factors start as random signs, so members start as
    networks whose weights differ in sign, and they are trained with the weights.

    Args:
        make_net: Makes one network.
        num_members: Members.
        seed: Decides the initial weights; member j's factors depend on `(seed, j)` only.
        batches: In training, each member sees the whole batch (`"whole"`) or its share of it (`"split"`).

    Example:
        >>> ens = BatchEnsemble(lambda: nn.Linear(4, 3), num_members=4)
        >>> ens(torch.zeros(8, 4)).shape, {name: tuple(p.shape) for name, p in ens.named_parameters()}
        (torch.Size([4, 8, 3]), {'net.weight': (3, 4), 'net.factors.r': (4, 4), 'net.factors.s': (4, 3), 'net.factors.bias': (4, 3)})

    References:
        Wen et al., 2020, <https://arxiv.org/abs/2002.06715>.
    """

    def __init__(
        self,
        make_net: Callable[[], nn.Module],
        num_members: int = 4,
        seed: int = 0,
        *,
        batches: BatchUse = "whole",
        output: Output = None,
    ) -> None:
        net = made(make_net, num_members, seed)
        layers = {name: module for name, module in net.named_modules() if type(module) in LAYERS}
        if not layers:
            raise ValueError("The network has no linear layer or convolution: members would have nothing of their own.")
        for name, layer in layers.items():
            _split_off(layer, name, num_members, seed)
        super().__init__(net, num_members, seed, batches, output)

    def member(self, index: int) -> nn.Module:
        """Return one member as an independent plain module, with its factors multiplied into the weights."""
        index = self.check_index(index)
        net = copy.deepcopy(self.net)
        for layer in net.modules():
            if isinstance(getattr(layer, NAME, None), Factors):
                _fold_in(layer, index)
        return plain_dropout(net).train(self.training)


def _split_off(layer: Any, name: str, num_members: int, seed: int) -> None:
    """Give a layer factors, and members a bias each in place of the layer's."""
    weight = layer.weight
    outputs, inputs = len(weight), weight.shape[1] * getattr(layer, "groups", 1)
    bias = None if layer.bias is None else layer.bias.detach().repeat(num_members, 1)
    factors = Factors(
        _signs(seed, f"{name} r", num_members, inputs).to(weight),
        _signs(seed, f"{name} s", num_members, outputs).to(weight),
        bias,
        -1 if isinstance(layer, nn.Linear) else 1,
    )
    layer.register_parameter("bias", None)
    layer.add_module(NAME, factors)
    layer.register_forward_pre_hook(factors.before)
    layer.register_forward_hook(factors.after)


def _signs(seed: int, what: str, num_members: int, count: int) -> Tensor:
    keys = torch.tensor([derive(seed, "factors", what, member) for member in range(num_members)])
    return torch.where(uniform(keys, count) < 0.5, -1.0, 1.0)


def _fold_in(layer: Any, index: int) -> None:
    """Make a layer the plain one of one member."""
    factors, weight = layer.factors, layer.weight.detach()
    delattr(layer, NAME)
    for hooks, own in ((layer._forward_pre_hooks, factors.before), (layer._forward_hooks, factors.after)):
        for key in [key for key, hook in hooks.items() if hook == own]:
            del hooks[key]
    groups = getattr(layer, "groups", 1)
    # A group's outputs see that group's inputs only: row o of the weight has those of o's group.
    r = factors.r[index].detach().reshape(groups, -1).repeat_interleave(len(weight) // groups, 0)
    folded = weight * (factors.s[index].detach()[:, None] * r).reshape(*r.shape, *(1 for _ in weight.shape[2:]))
    layer.weight = nn.Parameter(folded, layer.weight.requires_grad)
    if factors.bias is not None:
        layer.bias = nn.Parameter(factors.bias[index].detach().clone(), factors.bias.requires_grad)
