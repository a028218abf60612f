"""A trained network cut in two at a named layer: what is frozen, and what every head is made of."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx, nn

from dissensus._signatures import checked, whole_number
from dissensus.nets.dropout import put_layer
from dissensus.nets.first_layer import first_line
from dissensus.nets.graphs import like
from dissensus.randomness import evaluating

Reset = Callable[[nn.Module], None]


@checked
def cut(
    model: nn.Module,
    at: str | int,
    *,
    fresh: bool = True,
    token: int | None = None,
    outputs: int | None = None,
    reset: Reset | None = None,
    example: Tensor | None = None,
) -> tuple[nn.Module, Callable[[], nn.Module]]:
    """Cut a network before a layer: return the part before it, and a factory of heads made of the rest.

    The network's `forward` is traced around the layers that it calls, such as `"fc"` of a ResNet or `"blocks.11.norm2"` of a vision
    transformer; no layer inside is changed. Exactly one tensor must cross the cut.

    Args:
        model: The network; its layers are shared with the backbone, and copied for every head.
        at: Name of the first layer of the heads, as `model.named_modules()` has it; or how many of the last layers that
            `forward` calls the heads get (of a module around one network, such as a member of `Anchored`, the network's layers).
        fresh: Give each head new initial weights (`reset_parameters` of its layers; what has none keeps the network's
            values, such as a layer scale). False: every head starts from the network's weights, which is for
            fine-tuning: members then differ by the order of their data only.
        token: Let only this token of `(batch, tokens, width)` cross the cut. Right where the rest treats tokens one by one and
            reads this one, as MLP, norm and head of a class token do: 0.
        outputs: Replace the last linear layer by one with so many outputs.
        reset: Gives one layer new weights, instead of `reset_parameters`.
        example: A batch of inputs: check that backbone and head together give what the network gives.

    Returns:
        Backbone and factory, for `HeadEnsemble(*cut(...), num_members=50)`.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> backbone, make_head = cut(model, at=1, outputs=3)
        >>> backbone(torch.zeros(2, 8, 8)).shape, make_head()(torch.zeros(2, 16)).shape
        (torch.Size([2, 16]), torch.Size([2, 3]))
    """
    name = _layer_from_the_end(model, at) if isinstance(at, int) else at
    graph, root = _trace(model, name)
    node = next((n for n in graph.nodes if n.op == "call_module" and n.target == name), None)
    if node is None:
        raise ValueError(
            f"`forward` of {type(model).__name__} does not call {name!r} itself. Cut at a layer that it calls, or write "
            "backbone and head as modules of your own."
        )
    front, back = _split(graph, node)
    backbone = _Part(root, front, select=token)
    rest = _Part(root, back, add_token=token is not None)
    if example is not None:
        _check(model, backbone, rest, example, name)
    template = copy.deepcopy(rest).requires_grad_(True)
    if outputs is not None:
        _replace_last_linear(template, whole_number("outputs", outputs, 1))

    def make_head() -> nn.Module:
        head = copy.deepcopy(template)
        if fresh:
            _renew(head, reset)
        return head

    if fresh and not _renew(copy.deepcopy(template), reset):
        raise ValueError(f"No layer from {name!r} on can be given new weights. Pass `reset`, or fresh=False.")
    return backbone, make_head


class _Part(nn.Module):
    """One side of a cut: the layers that it calls, under their own names, and the traced code that calls them."""

    def __init__(self, root: nn.Module, graph: fx.Graph, select: int | None = None, add_token: bool = False) -> None:
        super().__init__()
        traced = fx.GraphModule(root, graph)
        for store in ("_modules", "_parameters", "_buffers"):
            getattr(self, store).update(getattr(traced, store))
        # The function and not the traced module: copies of a head share it, by which they are known to be alike.
        self._code: Callable[..., Tensor] = type(traced).forward
        # Its text is what a cut is recognised by: the function has the same name in all.
        self._text = traced.code
        self.select, self.add_token = select, add_token

    def forward(self, x: Tensor) -> Tensor:
        """Run this side."""
        output = self._code(self, x[:, None] if self.add_token else x)
        if self.select is None:
            return output
        if output.ndim != 3:
            raise ValueError(f"`token` picks one of (batch, tokens, width); {tuple(output.shape)} crosses the cut.")
        return output[:, self.select]


class _OneInput(nn.Module):
    """Calls a network with nothing but its inputs, so that further arguments have their defaults when it is traced."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class _Tracer(fx.Tracer):
    """Traces into the modules that hold the layer of the cut; all others stay whole."""

    def __init__(self, inside: str) -> None:
        super().__init__()
        self.inside = f"net.{inside}"

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module's own forward is left alone."""
        return not self.inside.startswith(f"{module_qualified_name}.")


def _trace(model: nn.Module, inside: str) -> tuple[fx.Graph, nn.Module]:
    """Return what a network does, and the module whose attributes that names: the network, with tensors that `forward` makes if any."""
    if inside.removesuffix(".") not in dict(model.named_modules()):
        similar = [name for name, _ in model.named_modules() if name][-8:]
        raise ValueError(f"There is no layer {inside!r} in {type(model).__name__}; the last are {', '.join(similar)}.")
    try:
        with evaluating(model):
            graph = _Tracer(inside).trace(wrapped := _OneInput(model))
    except Exception as problem:  # whatever a user's forward does with a value that is not there yet
        raise ValueError(
            f"`forward` of {type(model).__name__} cannot be traced: {first_line(problem)}. Write backbone and head as modules of your own."
        ) from problem
    made = dict[str, Tensor]()
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            if (own := str(node.target).removeprefix("net.")) == node.target:
                while hasattr(model, own):
                    own += "_"
                made[own] = getattr(wrapped, str(node.target))
            node.target = own
    if not made:
        return graph, model
    root = copy.copy(model)
    root.__dict__.update(made)
    return graph, root


def _layer_from_the_end(model: nn.Module, count: int) -> str:
    called = _called(model, "")
    # A module around one network, such as a member of anchored ones: its layers are meant.
    while len(called) == 1 and next(model.get_submodule(called[0]).children(), None) is not None:
        called = _called(model, f"{called[0]}.")
    if not 0 < count < len(called):
        raise ValueError(
            f"`at` must leave a layer on both sides of the cut, and `forward` of {type(model).__name__} calls {len(called)} layers; got "
            f"at={count}. Take fewer, or name a layer."
        )
    return called[-count]


def _called(model: nn.Module, inside: str) -> list[str]:
    """Return the layers that a network's forward calls, or that of a module in it, whose name ends with a dot here."""
    return [str(node.target) for node in _trace(model, inside)[0].nodes if node.op == "call_module"]


def _split(graph: fx.Graph, first: fx.Node) -> tuple[fx.Graph, fx.Graph]:
    """Return the graph up to what the layer takes, and the one from there to the end."""
    behind: dict[fx.Node, None] = {first: None}
    for node in graph.nodes:
        if any(source in behind for source in node.all_input_nodes):
            behind[node] = None
    # Constants (parameters that forward itself uses) belong to whoever needs them.
    crossing = dict.fromkeys(
        source for node in behind for source in node.all_input_nodes if source not in behind and source.op != "get_attr"
    )
    if len(crossing) != 1:
        raise ValueError(
            f"One tensor must cross the cut; at {first.target!r} it is {len(crossing)} ({', '.join(map(str, crossing))}). "
            "Cut before the layer that all of them come from."
        )
    (border,) = crossing
    front, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    front.graph_copy(graph, copies)
    front.output(copies[border])
    for node in reversed(front.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            front.erase_node(node)
    back = fx.Graph()
    moved = {border: back.placeholder("x")}

    def copied(node: fx.Node) -> fx.Node:
        if node not in moved:
            moved[node] = back.node_copy(node, copied)
        return moved[node]

    for node in behind:
        copied(node)
    return front, back


def _renew(head: nn.Module, reset: Reset | None) -> int:
    """Give every layer new weights; return how many got them."""
    count = 0
    for layer in head.modules():
        renew = getattr(layer, "reset_parameters", None) if reset is None else partial(reset, layer)
        if renew is not None and (layer._parameters or layer._buffers):
            renew()
            count += 1
    return count


def _replace_last_linear(head: nn.Module, outputs: int) -> None:
    linear = [layer for layer in head.named_modules() if isinstance(layer[1], nn.Linear)]
    if not linear:
        raise ValueError("`outputs` replaces the last linear layer, and the heads have none.")
    name, old = linear[-1]
    put_layer(head, name, like(old, outputs))


@torch.no_grad()
def _check(model: nn.Module, backbone: nn.Module, rest: nn.Module, example: Tensor, name: str) -> None:
    with evaluating(model):
        wanted, got = model(example), rest(backbone(example))
    if wanted.shape != got.shape or not torch.allclose(wanted, got, rtol=1e-3, atol=1e-4):
        raise ValueError(f"The parts cut at {name!r} do not give what the network gives. If `token` is set, omit it.")
