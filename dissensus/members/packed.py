"""Packed-Ensembles: members that are thin networks, packed into the grouped layers of one."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap

from dissensus._signatures import checked
from dissensus.data.trees import Output
from dissensus.members.members import Keys, View
from dissensus.members.shared import OwnLayer, SharedMembers, made
from dissensus.members.stacking import RulesOfVmap, Tensors, tensors_of
from dissensus.nets.dropout import put_layer
from dissensus.nets.graphs import LAYERS, function_name, like, nearest_layers, whole_graph, width_of
from dissensus.randomness import derive, seeded

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORMS = (*_BATCH_NORMS, nn.LayerNorm, nn.GroupNorm)
_KNOWN = (*LAYERS, *_NORMS, nn.Embedding)


@checked
class PackedEnsemble(SharedMembers):
    r"""Members whose layers are groups of one network's layers.

    Each member is the network that `make_net` makes with every hidden width multiplied by $\alpha / M$, so that the ensemble
    is about as wide as $\alpha$ networks and, in its hidden layers, has $\alpha^2 / (M \gamma)$ times the parameters of one. Linear
    layers and convolutions of all members run as one grouped layer, with `gamma` further groups within each member's hidden
    layers. Layers that take the input or give the output keep that side of theirs; which these are, and which widths go
    together, is read off the network's graph.

    Members have no weight in common and train as they would alone. Layers start from PyTorch's own initialisation.

    Args:
        make_net: Makes one network, of linear layers, convolutions, batch, layer and group normalisation and embeddings; all else
            may be anything without parameters that treats the examples of a batch on their own.
        num_members: Members, M.
        alpha: How many networks wide the ensemble is.
        gamma: Groups within a member's hidden layers.
        seed: Decides the initial weights; member j's depend on `(seed, j)` only.

    Example:
        >>> ens = PackedEnsemble(lambda: nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)), num_members=4)
        >>> ens(torch.zeros(8, 4)).shape, ens.member(0)[0]
        (torch.Size([4, 8, 3]), Linear(in_features=4, out_features=32, bias=True))

    References:
        Laurent et al., 2023, <https://arxiv.org/abs/2210.09184>.
    """

    loss_over_members: ClassVar[Literal["sum", "mean"]] = "sum"
    own_batches: ClassVar[bool] = True
    decisive: ClassVar[tuple[str, ...]] = ("batches", "alpha", "gamma")

    def __init__(
        self,
        make_net: Callable[[], nn.Module],
        num_members: int = 4,
        alpha: float = 2.0,
        gamma: int = 1,
        seed: int = 0,
        *,
        output: Output = None,
    ) -> None:
        if not alpha > 0 or gamma < 1 or gamma != int(gamma):
            raise ValueError(f"`alpha` must be positive, `gamma` a whole number from 1 on; got {alpha} and {gamma}.")
        wide = made(make_net, num_members, seed)
        thin = _Thinned(wide, alpha / num_members, gamma).make
        nets = []
        for index in range(num_members):
            with seeded(derive(seed, "initial weights", index), alone=True):
                nets.append(thin())
        super().__init__(_pack(nets), num_members, seed, "whole", output)
        self.alpha, self.gamma = alpha, gamma
        self._layers = [module for module in self.net.modules() if isinstance(module, _Packed)]
        self.to(next(wide.parameters()).device)

    def run(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run members as rows of one batch through grouped layers; see `Members.run`."""
        for layer in self._layers:
            layer.chosen = rows
        return super().run(tensors, x, own=own, rows=rows, keys=keys)

    def sums_by_member(self, values: Tensors, view: View) -> Tensor:
        """Return the sum of each member's own share of the values."""
        sums = [value.unflatten(0, (self.num_members, -1)).flatten(1).sum(1) for value in values.values()]
        total = torch.stack(sums).sum(0)
        return total if view.rows is None else total[view.rows]


class _Packed(OwnLayer):
    """One layer of all members; rows of a batch are member after member, parameters too, along their first axis.

    `plain` is the layer of one member, without its tensors; `chosen` says which members the rows belong to, None for all.
    """

    chosen: Tensor | None = None

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.count = len(layers)
        self.plain = [copy.deepcopy(layers[0]).to("meta")]
        for name, tensor in tensors_of(layers[0]).items():
            rows = torch.cat([tensors_of(layer)[name].detach() for layer in layers]) if tensor.ndim else tensor
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, nn.Parameter(rows, tensor.requires_grad))
            else:
                self.register_buffer(name, rows)

    def forward(self, x: Tensor) -> Tensor:
        """Run every member's layer on its own rows."""
        plain, own, chosen = self.plain[0].train(self.training), self._own(), self.chosen
        common = {name: t for name, t in self.named_buffers() if not t.ndim}
        count = self.count if chosen is None else len(chosen)
        self.check_rows(x, count)
        by_member = x.unflatten(0, (count, -1))
        with RulesOfVmap() if torch.is_autocast_enabled(x.device.type) else nullcontext():
            found = vmap(lambda tensors, batch: functional_call(plain, tensors | common, (batch,)))(own, by_member)
        if chosen is not None and self.training:
            for name, buffer in self.named_buffers():
                if buffer.ndim:
                    buffer.unflatten(0, (self.count, -1)).index_copy_(0, chosen, own[name])
        return found.flatten(0, 1)

    def _own(self) -> dict[str, Tensor]:
        """Return tensors by member, `(members, ...)`, of those whose rows are there."""
        every = {name: t.unflatten(0, (self.count, -1)) for name, t in tensors_of(self).items() if t.ndim}
        return every if self.chosen is None else {name: t.index_select(0, self.chosen) for name, t in every.items()}

    def alone(self, index: int) -> nn.Module:
        """Return one member's layer as a plain one."""
        layer = copy.deepcopy(self.plain[0]).train(self.training)
        rows = {name: t.unflatten(0, (self.count, -1))[index] if t.ndim else t for name, t in self.state_dict().items()}
        layer.load_state_dict({name: row.clone() for name, row in rows.items()}, assign=True)
        for name, parameter in self.named_parameters():
            layer.get_parameter(name).requires_grad_(parameter.requires_grad)
        return layer

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in super().__getstate__().items() if name != "chosen"}


class _GroupedLinear(nn.Linear):
    """A linear layer whose outputs see one of `groups` parts of the inputs each."""

    def __init__(self, like: nn.Linear, inputs: int, outputs: int, groups: int) -> None:
        weight = like.weight
        super().__init__(inputs // groups, outputs, like.bias is not None, weight.device, weight.dtype)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """Multiply each part of the inputs with its own rows of the weight."""
        parts = x.unflatten(-1, (self.groups, -1))
        y = torch.einsum("...gi,goi->...go", parts, self.weight.unflatten(0, (self.groups, -1))).flatten(-2)
        return y if self.bias is None else y + self.bias


def _pack(nets: list[nn.Module]) -> nn.Module:
    """Return the first network with every layer that has tensors replaced by that layer of all networks."""
    net = copy.deepcopy(nets[0])
    for name, module in list(net.named_modules()):
        if isinstance(module, _KNOWN):
            layers = [each.get_submodule(name) for each in nets]
            net = put_layer(net, name, _Packed(layers).train(module.training))
    return net


class _Thinned:
    """A network whose hidden widths, followed through its graph, are multiplied by a factor."""

    def __init__(self, net: nn.Module, factor: float, gamma: int) -> None:
        self.net, self.part, self.factor, self.gamma = net, whole_graph(net), factor, gamma
        self.last, _ = nearest_layers(self.part, "output")
        self.layers: dict[str, Callable[[], nn.Module]] = {}
        # Of the channels that an operation gives, the old and new width; None where they are the input's or the output's, which stay.
        self.widths: dict[fx.Node, tuple[int, int] | None] = {}
        for node in self.part.graph.nodes:
            self.widths[node] = self._follow(node)

    def make(self) -> nn.Module:
        """Return a new thin network."""
        net = copy.deepcopy(self.net)
        for name, build in self.layers.items():
            try:
                layer = build()
            except ValueError as problem:  # groups that do not divide the widths
                raise ValueError(f"{name!r} cannot be thinned so: {problem}. Choose another alpha or gamma.") from None
            net = put_layer(net, name, layer.train(net.get_submodule(name).training))
        return net

    def _follow(self, node: fx.Node) -> tuple[int, int] | None:
        """Return what a node does to widths; note how to make its layer."""
        module, given = self.part.module(node), self._given(node)
        if type(module) in _KNOWN:
            return self._layer(node, module, given)
        if node.op == "get_attr" or (module is not None and any(True for _ in module.parameters())):
            what = "a parameter" if module is None else f"a {type(module).__name__}"
            raise ValueError(
                f"{node.target} is {what}, whose widths PackedEnsemble does not know: it packs linear layers, "
                "convolutions, batch, layer and group normalisation and embeddings. Make a DeepEnsemble of thinner networks."
            )
        return given

    def _given(self, node: fx.Node) -> tuple[int, int] | None:
        """Return the widths of what a node takes."""
        found = [self.widths[each] for each in node.all_input_nodes]
        pairs = [each for each in found if each is not None]
        if function_name(node) in ("cat", "concat", "concatenate") and len(pairs) == len(found) > 0:
            return sum(old for old, _ in pairs), sum(new for _, new in pairs)
        if len(set(found)) > 1:
            raise ValueError(f"{node.name!r} joins widths that are thinned differently, as of inputs and hidden ones.")
        return found[0] if found else None

    def _layer(self, node: fx.Node, module: Any, given: tuple[int, int] | None) -> tuple[int, int] | None:
        name, last = self.part.name(node), node in self.last
        hooks = [*module._forward_hooks, *module._forward_pre_hooks]
        if hooks or not self.part.called_once(node):
            raise ValueError(f"{name!r} is used twice or has hooks, so its widths cannot be changed.")
        outputs = _width(module, name)
        if isinstance(module, _NORMS):
            self.layers[name] = partial(like, module, self._takes(name, outputs, given))
            return given
        made = outputs if last else self.gamma * max(1, ceil(outputs * self.factor / self.gamma - 1e-9))
        if isinstance(module, nn.Embedding):
            self.layers[name] = partial(like, module, made, scale_grad_by_freq=False, sparse=False)
        else:
            groups = getattr(module, "groups", 1)
            inputs = self._takes(name, module.weight.shape[1] * groups, given)
            gamma = 1 if last or given is None else self.gamma
            if not isinstance(module, nn.Linear):
                # Depthwise convolutions stay so; others get further groups.
                groups = inputs if groups == module.in_channels > 1 else groups * gamma
                self.layers[name] = partial(like, module, made, inputs, groups=groups)
            elif gamma > 1 and inputs % gamma == 0:
                self.layers[name] = partial(_GroupedLinear, module, inputs, made, gamma)
            else:
                self.layers[name] = partial(like, module, made, inputs)
        return None if last else (outputs, made)

    def _takes(self, name: str, inputs: int, given: tuple[int, int] | None) -> int:
        """Return how many inputs a thinned layer has."""
        old, new = given or (1, 1)
        if inputs % old:
            raise ValueError(f"{name!r} takes {inputs} features, no multiple of the {old} before. Pack another one.")
        return inputs // old * new


def _width(module: Any, name: str) -> int:
    """Return how many features a layer gives, or say why it is not packed."""
    unknown = [each for each in ("padding_idx", "max_norm") if getattr(module, each, None) is not None]
    if isinstance(module, _BATCH_NORMS) and module.momentum is None:
        unknown.append("momentum=None")
    if (known := width_of(module)) is None or unknown:
        had = " and ".join(unknown or ["several axes"])
        raise ValueError(
            f"The layer {name!r} has {had}, which is not packed. Pack a network whose layers have a momentum, such as 0.1, normalise "
            "over the last axis and embed without padding_idx and max_norm."
        )
    return known[0]
