"""MIMO: one network that takes as many inputs at once as it has members, and answers each."""

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from dissensus._signatures import checked
from dissensus.data.trees import Output
from dissensus.members.members import Keys
from dissensus.members.shared import SharedMembers, new
from dissensus.members.stacking import Tensors
from dissensus.nets.dropout import plain_dropout, put_layer
from dissensus.nets.graphs import (
    LAYERS,
    Traced,
    axes_of,
    channel_parameters,
    channelwise,
    describe,
    effect_of,
    flattens,
    function_name,
    like,
    looks,
    nearest_layers,
    only_input,
    whole_graph,
)
from dissensus.randomness import derive, fold, permutation, seeded, uniform


@checked
class MIMO(SharedMembers):
    r"""Subnetworks that one network finds in itself: M inputs go in together, M answers come out.

    $$[f_1(x_1), \dots, f_M(x_M)] = F([x_1, \dots, x_M])$$

    The first layer takes the inputs side by side, on its channels where it convolves and on its features where it is linear; the
    last layer gives an answer for each. In training the M inputs are different examples of the batch, so members learn to ignore
    each other's; in evaluation all are the same input. Parameters and time are those of one network, but for the first and the
    last layer.

    Args:
        make_net: Makes the network for one input; its first and last layer must be linear layers or convolutions, and what comes after
            the last one must treat each channel on its own (no softmax).
        num_members: Inputs and answers, M.
        seed: Decides the initial weights and which examples meet.
        repetition: Share of a training batch in which all M inputs are the same example: it lets members share features where the
            network is too small for M of them.

    Example:
        >>> ens = MIMO(lambda: nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)), num_members=3)
        >>> ens(torch.zeros(8, 4)).shape, ens.net[0], ens.net[2]
        (torch.Size([3, 8, 3]), Linear(in_features=12, out_features=32, bias=True), Linear(in_features=32, out_features=9, bias=True))

    References:
        Havasi et al., 2021, <https://arxiv.org/abs/2010.06610>.
    """

    decisive: ClassVar[tuple[str, ...]] = ("batches", "repetition")

    def __init__(
        self,
        make_net: Callable[[], nn.Module],
        num_members: int = 3,
        seed: int = 0,
        *,
        repetition: float = 0.0,
        output: Output = None,
    ) -> None:
        if not 0.0 <= repetition <= 1.0:
            raise ValueError(f"`repetition` must be a share of the batch, 0 to 1; got {repetition}.")
        with seeded(derive(seed, "initial weights", 0), alone=True):
            net, axes = _widened(new(make_net, num_members), num_members)
        super().__init__(net, num_members, seed, "whole", output)
        self.repetition, self.axes = repetition, axes

    def run(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run the network on M inputs at once; see `Members.run`."""
        if not isinstance(x, Tensor):
            raise ValueError("MIMO takes one tensor a network, on whose channels inputs are put side by side.")
        if self.training:
            outputs = self._run_mixed(tensors, x, own, rows, keys)
        else:
            every = x.flatten(0, 1) if own else x
            outputs = self._run_joined(tensors, [every] * self.num_members, keys)
        if self.training or not own:
            return outputs if rows is None else outputs[rows]
        # A member on inputs of its own sees them in all its places.
        members = torch.arange(self.num_members, device=x.device) if rows is None else rows
        return outputs.unflatten(1, x.shape[:2])[members, torch.arange(len(members), device=x.device)]

    def _run_mixed(self, tensors: Tensors, x: Tensor, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run every member on the batch in an order of its own; return outputs in the batch's order."""
        if own and rows is not None:
            # Members that were not asked for see what the first one does.
            place = torch.zeros(self.num_members, dtype=torch.int64, device=x.device)
            x = x[place.index_copy(0, rows, torch.arange(len(rows), device=x.device))]
        orders = self._orders(keys, x.shape[1 if own else 0])
        inputs = [(x[m] if own else x).index_select(0, order) for m, order in enumerate(orders)]
        outputs = self._run_joined(tensors, inputs, keys)
        back = orders.argsort(1)
        return torch.stack([outputs[m].index_select(0, order) for m, order in enumerate(back)])

    def _orders(self, keys: Keys, batch: int) -> Tensor:
        """Return an order of the batch for every member, `(members, batch)`; repeated examples stand in the same place in all."""
        key = keys()[0]
        common = uniform(fold(key, self.num_members), batch).argsort()
        same = round(self.repetition * batch)
        rest = common[same:]
        orders = torch.arange(batch, device=key.device).repeat(self.num_members, 1)
        for member in range(self.num_members):
            if len(rest):
                orders[member, rest] = rest[permutation(fold(key, member), len(rest))]
        return orders

    def _run_joined(self, tensors: Tensors, inputs: list[Tensor], keys: Keys) -> Tensor:
        """Run the network on inputs side by side; return what it answers to each, `(members, batch, ...)`."""
        joined = torch.cat(inputs, dim=self.axes[0])
        owners = torch.zeros(len(joined), dtype=torch.int64, device=joined.device)
        outputs = self.run_rows(tensors, joined, owners, keys)
        return _answers(outputs, self.num_members, self.axes[1])

    def member(self, index: int) -> nn.Module:
        """Return one member as an independent plain module: the network on copies of its input, and one of its answers."""
        net = plain_dropout(copy.deepcopy(self.net))
        return MIMOMember(net, self.check_index(index), self.num_members, self.axes).train(self.training)


class MIMOMember(nn.Module):
    """One member of a `MIMO` as a plain module."""

    def __init__(self, net: nn.Module, index: int, num_members: int, axes: tuple[int, int]) -> None:
        super().__init__()
        self.net, self.index, self.num_members, self.axes = net, index, num_members, axes

    def forward(self, x: Tensor) -> Tensor:
        """Return the member's answer."""
        outputs = self.net(torch.cat([x] * self.num_members, dim=self.axes[0]))
        return _answers(outputs, self.num_members, self.axes[1])[self.index]


def _answers(outputs: Tensor, num_members: int, axis: int) -> Tensor:
    return outputs.unflatten(axis, (num_members, -1)).movedim(axis if axis > 0 else axis - 1, 0)


def _widened(net: nn.Module, count: int) -> tuple[nn.Module, tuple[int, int]]:
    """Return the network for `count` inputs and answers, and the axes on which they are side by side."""
    part = whole_graph(net)
    firsts, before = nearest_layers(part, "placeholder")
    first = _only(part, firsts, "takes the input")
    lasts, after = nearest_layers(part, "output")
    last = _only(part, lasts, "gives the output")
    _check_answers_stay_apart(part, last, after)
    for node in dict.fromkeys((first, last)):
        layer: Any = part.module(node)
        outputs, inputs = layer.weight.shape[:2]
        wider = like(layer, outputs * (count if node is last else 1), inputs * (count if node is first else 1))
        net = put_layer(net, part.name(node), wider.train(layer.training))
    first_is_linear, last_is_linear = (isinstance(part.module(n), nn.Linear) for n in (first, last))
    flat = any(flattens(part, node) for node in before)
    return net, (-1 if first_is_linear and not flat else 1, -1 if last_is_linear else 1)


# Functions and methods of one tensor that change no place of a value along the axis of answers, and those that leave out axes.
_ONE_BY_ONE = (
    "add sub mul truediv div neg pow sqrt square exp expm1 log log1p abs clamp clip clampmin clampmax "
    "float double half bfloat16 to detach clone squeeze"
)
_REDUCTIONS = "mean sum amax amin logsumexp"


def _check_answers_stay_apart(part: Traced, last: fx.Node, after: set[fx.Node]) -> None:
    """Refuse operations behind the last layer that would look across the members' answers, or move them to another axis."""
    spatial = not isinstance(part.module(last), nn.Linear)
    for node in part.graph.nodes:
        if node in after and node.op not in ("placeholder", "output") and not _keeps_apart(part, node, spatial):
            raise ValueError(
                f"Behind its last layer, {part.name(last)!r}, the network has {describe(part, node)}, which would see the answers of all "
                "members as one. Leave it to what reads the predictions, or make a DeepEnsemble."
            )


def _keeps_apart(part: Traced, node: fx.Node, spatial: bool) -> bool:
    """Whether an operation treats each channel on its own and leaves their order; of maps, also one that makes vectors of them."""
    effect, module = effect_of(part, node), part.module(node)
    if channelwise(effect, spatial) or (spatial and effect in ("flattens", "averages")):
        # A parameter a channel has the width of one answer.
        return not channel_parameters(module)
    return _is_one_by_one(part, node) or (spatial and _reduces_positions(part, node))


def _is_one_by_one(part: Traced, node: fx.Node) -> bool:
    if _is_one_number(part, node) or _tells(node):
        return True
    values = [each for each in node.all_input_nodes if not (_is_one_number(part, each) or _tells(each))]
    return len(values) == 1 and function_name(node).replace("_", "") in _ONE_BY_ONE.split()


def _reduces_positions(part: Traced, node: fx.Node) -> bool:
    if function_name(node) not in _REDUCTIONS.split():
        return False
    axes, left = axes_of(node), _positions(part, node.all_input_nodes[0])
    return bool(axes) and all(axis >= 2 or -left <= axis < 0 for axis in axes)


def _positions(part: Traced, node: fx.Node) -> int:
    """Return how many axes of positions a value has that comes from a convolution, behind that of its channels."""
    layer: Any = part.module(node)
    if type(layer) in LAYERS:
        return len(layer.kernel_size)
    before = only_input(node)
    if before is None or effect_of(part, node) in ("flattens", "averages") or function_name(node) == "squeeze":
        return 0
    reduces = function_name(node) in _REDUCTIONS.split() and True not in (node.kwargs.get("keepdim"), *node.args[2:])
    return _positions(part, before) - (len(axes_of(node)) if reduces else 0)


def _tells(node: fx.Node) -> bool:
    """Whether a node is a type, a device, or of a shape."""
    return looks(node) or (function_name(node) == "getitem" and looks(node.all_input_nodes[0]))


def _is_one_number(part: Traced, node: fx.Node) -> bool:
    """Whether a node is a parameter or buffer of one number, or computed of such alone."""
    if node.op == "get_attr":
        return bool(attrgetter(str(node.target))(part.root).numel() == 1)
    inputs = [] if type(part.module(node)) in LAYERS else node.all_input_nodes
    return bool(inputs) and all(_is_one_number(part, each) for each in inputs)


def _only(part: Traced, layers: set[fx.Node], what: str) -> fx.Node:
    found = [node for node in part.graph.nodes if node in layers]
    if len(found) != 1 or type(part.module(found[0])) not in LAYERS:
        names = ", ".join(part.name(node) for node in found) or "none"
        raise ValueError(f"MIMO widens the layer (linear, convolution) that {what}: there must be one; found {names}.")
    module = part.module(found[0])
    if getattr(module, "groups", 1) != 1 or not part.called_once(found[0]):
        raise ValueError(f"The layer {part.name(found[0])!r} has groups or runs twice, so it cannot be widened.")
    return found[0]
