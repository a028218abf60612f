"""A network's operations as graphs: what each one does to the channels that flow through it, and the places where masks can act."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

# Layers that mix channels.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

Effect = Literal[
    "activates", "moves zero", "passes", "normalises", "pools", "flattens", "averages", "combines", "other"
]
"""What an operation does to channels: of activations, those that give zero for zero, so that a dropped channel stays dropped, `activate`;
`averages` leaves of an image one value a channel; `combines` adds or multiplies two tensors."""
_ACTIVATIONS: tuple[Effect, ...] = ("activates", "moves zero")
_KEEPS_ZERO: tuple[Effect, ...] = ("activates", "passes", "pools")

# Layers and functions by name, in small letters and without underscores; what is known as a layer only as its class is written.
_NAMES: Mapping[Effect, str] = {
    "activates": "PReLU relu relu6 leakyrelu elu celu selu gelu silu mish hardswish tanh tanhshrink softsign softshrink hardshrink",
    "moves zero": "sigmoid softplus hardtanh hardsigmoid logsigmoid",
    "passes": "identity dropout dropout1d dropout2d dropout3d alphadropout featurealphadropout keyeddropout contiguous",
    "normalises": "_BatchNorm",
    "pools": "upsample interpolate "
    + " ".join(f"{kind}pool{n}d" for n in (1, 2, 3) for kind in ("max", "avg", "adaptiveavg", "adaptivemax")),
}


@dataclass(frozen=True)
class Traced:
    """The operations of a network, or of the part of it at `prefix` (with a dot) that could be traced."""

    root: nn.Module
    prefix: str
    graph: fx.Graph

    def module(self, node: fx.Node) -> nn.Module | None:
        """Return the module that a node calls."""
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def name(self, node: fx.Node) -> str:
        """Return the name in the network of the module that a node calls."""
        return self.prefix + str(node.target)

    def called_once(self, node: fx.Node) -> bool:
        """Whether a node is the only call of its module."""
        return len(self.graph.find_nodes(op="call_module", target=node.target)) == 1


class _Tracer(fx.Tracer):
    """Looks into every module but torch's own, dropout, and those without parts and parameters."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        bare = not any(True for _ in m.children()) and not any(True for _ in m.parameters())
        return bare or super().is_leaf_module(m, module_qualified_name)


def trace(net: nn.Module, prefix: str = "") -> list[Traced]:
    """Return the operations of a network: one graph, or graphs of the largest parts that can be traced."""
    if prefix and _Tracer().is_leaf_module(net, prefix):
        return []
    try:
        graph = _Tracer().trace(net)
    except Exception:  # whatever a user's forward does that cannot be traced
        return [found for name, child in net.named_children() for found in trace(child, f"{prefix}{name}.")]
    return [Traced(net, prefix, graph)]


def function_name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls."""
    return str(getattr(node.target, "__name__", node.target)) if node.op in ("call_method", "call_function") else ""


def effect_of(part: Traced, node: fx.Node) -> Effect:
    """Return what a node does to channels."""
    module = part.module(node)
    if getattr(module, "return_indices", False):
        return "other"
    kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith(("torch.nn.", "dissensus."))]
    names = {*kinds, *(name.lower().replace("_", "") for name in (*kinds, function_name(node)))}
    if found := next((effect for effect, known in _NAMES.items() if names & set(known.split())), None):
        return found
    tests: Mapping[Effect, bool] = {
        "flattens": flattens(part, node),
        "averages": _averages(node),
        "combines": _combines(node),
    }
    return next((effect for effect, holds in tests.items() if holds), "other")


def _combines(node: fx.Node) -> bool:
    # Functions of torch and of operator, and methods.
    named = function_name(node) in ("add", "add_", "iadd", "sub", "mul", "mul_", "imul")
    return named and sum(isinstance(value, fx.Node) for value in node.args) > 1


def channelwise(effect: Effect, spatial: bool) -> bool:
    """Whether an operation treats each channel on its own; pooling does where channels are `spatial`, with positions behind them."""
    return effect in ("activates", "moves zero", "passes", "normalises") or (spatial and effect == "pools")


def channel_parameters(module: nn.Module | None) -> list[str]:
    """Return names of tensors that hold one value a channel in a channelwise module."""
    names = "weight bias running_mean running_var" if isinstance(module, _BatchNorm) else ""
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        names = "weight"
    return [name for name in names.split() if getattr(module, name) is not None]


def flattens(part: Traced, node: fx.Node) -> bool:
    """Whether a node makes vectors of everything but the batch, channel after channel."""
    module = part.module(node)
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1 and module.end_dim == -1
    name, arguments = function_name(node), node.args[1:]
    if name == "flatten":
        return (node.kwargs.get("start_dim", arguments[0] if arguments else 0), arguments[1:]) == (1, ())
    return name in ("view", "reshape") and len(arguments) == 2 and bool(arguments[1] == -1)


def axes_of(node: fx.Node) -> list[int]:
    """Return the axes that a function or method takes, none where it names none."""
    axes = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    axes = axes if isinstance(axes, list | tuple) else [axes]
    return [axis for axis in axes if isinstance(axis, int)]


def _averages(node: fx.Node) -> bool:
    if function_name(node) != "mean" or node.kwargs.get("keepdim", False) or len(node.args) > 2:
        return False
    return set(axes_of(node)) in ({2, 3}, {-1, -2})


# Layers that say how many features they give: the attribute that does, and the axis of the features.
_WIDTHS: Mapping[type[nn.Module], tuple[str, int]] = {
    nn.Linear: ("out_features", -1),
    _ConvNd: ("out_channels", 1),
    nn.modules.batchnorm._NormBase: ("num_features", 1),
    nn.GroupNorm: ("num_channels", 1),
    nn.LayerNorm: ("normalized_shape", -1),
    nn.Embedding: ("embedding_dim", -1),
}


def width_name(module: nn.Module | None) -> tuple[str, int]:
    """Return the attribute in which a module says how many features it gives, and their axis; no name where it does not."""
    return next((says for kind, says in _WIDTHS.items() if isinstance(module, kind)), ("", 0))


def width_of(module: nn.Module | None) -> tuple[int, int] | None:
    """Return how many features a module gives and on which axis, where the module itself says so."""
    name, axis = width_name(module)
    width = getattr(module, name, None)
    if isinstance(width, tuple):
        width = width[0] if len(width) == 1 else None
    return None if width is None else (int(width), axis)


def only_input(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a node works on."""
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, fx.Node) else None


def mixing_layer(module: nn.Module | None) -> bool:
    """Whether a module is a linear layer or a convolution whose channels can be taken out one by one."""
    return type(module) in LAYERS and getattr(module, "groups", 1) == 1


def whole_graph(net: nn.Module) -> Traced:
    """Return a network's operations as one graph, or say that they cannot be read."""
    parts = trace(net)
    if len(parts) != 1 or parts[0].prefix:
        raise ValueError(
            "The network's graph cannot be read (torch.fx), so which widths go together, and which layers come first and last, cannot "
            "be told. Take a network without branches on values, or make a DeepEnsemble."
        )
    return parts[0]


def nearest_layers(part: Traced, end: Literal["placeholder", "output"]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the layers that mix channels next to the network's input, or to its output, and the operations in between."""
    found, between = set[fx.Node](), set[fx.Node]()
    waiting = [node for node in part.graph.nodes if node.op == end]
    while waiting:
        node = waiting.pop()
        if isinstance(part.module(node), (*LAYERS, nn.Embedding)):
            found.add(node)
        elif node not in between:
            between.add(node)
            waiting += node.users if end == "placeholder" else node.all_input_nodes
    return found, between


def like(layer: Any, outputs: int, inputs: int | None = None, **changed: Any) -> nn.Module:
    """Return a new layer of torch's that is made as this one was, but for its widths and what else is changed."""
    kind, (width, _) = nn.Linear if isinstance(layer, nn.Linear) else type(layer), width_name(layer)
    tensor = next(layer.parameters(), torch.empty(0))
    made = {name: getattr(layer, name, None) for name in inspect.signature(kind).parameters if name[0] != "_"}
    if "bias" in made:
        made["bias"] = layer.bias is not None
    if inputs is not None:
        changed[width.replace("out_", "in_")] = inputs
    new: nn.Module = kind(**made | {"device": tensor.device, "dtype": tensor.dtype, width: outputs} | changed)
    return new


@dataclass(frozen=True)
class Slice:
    """An axis of a tensor along which the channels lie, each `block` entries long."""

    tensor: str
    axis: int
    block: int = 1


@dataclass
class Side:
    """What lies before or after a mask: tensors that hold the channels, and why it is fixed."""

    slices: list[Slice] = field(default_factory=list)
    why_fixed: str | None = None

    def fix(self, why: str) -> None:
        """Note the first reason."""
        self.why_fixed = self.why_fixed or why


@dataclass
class Site:
    """A place for a mask, after the module of this name: its channels and their axis, what makes and what takes them.

    `source` is the linear layer or convolution that makes them, if it was found. A dropped channel is still zero where it is taken
    (`keeps_zero`); channels are added to or multiplied with another tensor (`combined`), or reach the network's output (`leaves`).
    """

    name: str
    width: int = 0
    axis: int = 1
    before: Side = field(default_factory=Side)
    after: Side = field(default_factory=Side)
    source: str | None = None
    keeps_zero: bool = False
    combined: bool = False
    leaves: bool = False

    @property
    def why_fixed(self) -> str | None:
        """Why the channels cannot be made more or fewer; None if they can."""
        return self.before.why_fixed or self.after.why_fixed

    def fixed(self, why: str) -> "Site":
        """Return the place with channels that cannot be changed on either side."""
        before, after = (replace(side, why_fixed=side.why_fixed or why) for side in (self.before, self.after))
        return replace(self, before=before, after=after)

    def __str__(self) -> str:
        return f"{self.name!r} ({self.width} channels)"


class _Walk:
    """Follows channels back to the layer that makes them and on to all that take them, and notes in a `site` what it meets."""

    def __init__(self, part: Traced, node: fx.Node, tied: Set[str]) -> None:
        self.part, self.tied, self.site = part, tied, Site(part.name(node), keeps_zero=True)
        self.linear = self.pooled = self.flat = False
        previous: fx.Node | None = node
        while previous is not None:
            previous = self.back(previous)
        if self.pooled and self.linear:
            self.site.before.fix("it is pooled along its features")
        known = self.site.width > 0 and not (self.linear or self.flat)
        self.on(node, spatial=known and self.site.axis == 1)
        self.site.leaves &= not part.prefix

    def back(self, node: fx.Node) -> fx.Node | None:
        """Take note of one operation; return the one that it takes the channels from, None where the way ends."""
        module, effect, site = self.part.module(node), effect_of(self.part, node), self.site
        here = width_of(module)
        if here is not None and not site.width:
            site.width, site.axis = here
        elif here is not None and here[0] != site.width:
            site.before.fix("its features are on another axis than the layer before says")
        if mixing_layer(module):
            self._hold(site.before, node, ["weight", "bias"], 0)
            site.source, self.linear = self.part.name(node), isinstance(module, nn.Linear)
            return None
        self.flat |= effect in ("flattens", "averages")
        if effect == "combines":
            site.before.fix("it is fed by a sum or product of tensors")
        elif not channelwise(effect, spatial=True) and effect != "averages":
            flat = effect == "flattens"
            site.before.fix("it is masked after flattening" if flat else f"it is fed by {describe(self.part, node)}")
            return None
        return self._before(node, module, effect)

    def _before(self, node: fx.Node, module: nn.Module | None, effect: Effect) -> fx.Node | None:
        """Return what an operation takes, whose channels it passes on."""
        previous, before = only_input(node), self.site.before
        if previous is None:
            before.fix("its input could not be followed")
            return None
        if len(_takers(previous)) > 1:
            before.fix("its input is used elsewhere too")
        self._hold(before, node, channel_parameters(module), 0)
        self.pooled |= not channelwise(effect, spatial=False)
        return previous

    def _hold(self, side: Side, node: fx.Node, names: Sequence[str], axis: int, block: int = 1) -> None:
        """Note the tensors of a module that hold the channels."""
        module, layer = self.part.module(node), self.part.name(node)
        if names and not self.part.called_once(node):
            side.fix(f"{layer!r} is used more than once")
        for name in names:
            full = f"{layer}.{name}"
            if full in self.tied:
                side.fix(f"{full!r} is shared with another layer")
            if getattr(module, name) is not None:
                side.slices.append(Slice(full, axis, block))

    def on(self, node: fx.Node, spatial: bool) -> None:
        """Look at everything that uses a node's channels; `spatial` ones have positions behind them."""
        for user in _takers(node):
            module, effect = self.part.module(user), effect_of(self.part, user)
            if mixing_layer(module) and isinstance(module, nn.Linear) != spatial:
                self._take(user, ["weight"], 1)
            elif channelwise(effect, spatial):
                self._take(user, channel_parameters(module), 0)
                self.site.keeps_zero &= effect in _KEEPS_ZERO
                self.on(user, spatial)
            elif spatial and effect in ("flattens", "averages"):
                self.on(user, spatial=False)
            elif user.op == "output":
                self.site.leaves = True
                self.site.after.fix("it reaches the output")
            elif effect == "combines":
                self.site.combined = True
                self.site.after.fix("it meets a sum or product of tensors")
            else:
                self.site.after.fix(f"it feeds {describe(self.part, user)}")

    def _take(self, user: fx.Node, names: Sequence[str], axis: int) -> None:
        """Note the tensors of a layer that hold the channels along an axis."""
        if not names:
            return
        size, after = int(getattr(self.part.module(user), names[0]).shape[axis]), self.site.after
        self.site.width = self.site.width or size
        if size % self.site.width:
            after.fix(f"{self.part.name(user)!r} takes {size} features, not a multiple of {self.site.width}")
        else:
            self._hold(after, user, names, axis, size // self.site.width)


def masked_node(part: Traced, node: fx.Node) -> fx.Node | None:
    """Return the module call after which a mask has the effect of one after `node`."""
    if node.op == "call_module" and part.called_once(node):
        return node
    # A module that is called several times, or a function: masked before it, if it leaves zeros as they are.
    previous = only_input(node)
    if previous is None or previous.op != "call_module" or not part.called_once(previous):
        return None
    alone = _takers(previous) == [node]
    return previous if alone and effect_of(part, node) in _KEEPS_ZERO else None


def _takers(node: fx.Node) -> list[fx.Node]:
    """Return the operations that use a node's values, not its shape alone."""
    return [user for user in node.users if not looks(user)]


def looks(node: fx.Node) -> bool:
    """Whether a node tells of a tensor what it is like, not its values."""
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "device", "dtype")
    return node.op == "call_method" and node.target in ("size", "dim")


def past_norms(part: Traced, node: fx.Node) -> fx.Node:
    """Return the last BatchNorm that takes a node's channels, or the node itself: only behind it a dropped channel stays zero."""
    users = _takers(node)
    module = part.module(users[0]) if len(users) == 1 else None
    return past_norms(part, users[0]) if isinstance(module, nn.modules.batchnorm._BatchNorm) else node


def describe(part: Traced, node: fx.Node) -> str:
    """Say what a node is."""
    module = part.module(node)
    if module is not None:
        return f"{part.name(node)!r} ({type(module).__name__})"
    return "an input" if node.op == "placeholder" else f"`{function_name(node) or node.name}`"


Rule = Callable[[str, nn.Module], bool]
Layers = Literal["auto"] | str | Sequence[str] | type[nn.Module] | tuple[type[nn.Module], ...] | Rule


class Map:
    """All places for masks in a network."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        named = list(net.named_parameters(remove_duplicate=False))
        counts = Counter(id(p) for _, p in named)
        self.tied = {name for name, p in named if counts[id(p)] > 1}
        self.nodes = [(part, node) for part in trace(net) for node in part.graph.nodes]
        self.stem = self._stem()
        calls = [(part, past_norms(part, node)) for part, node in self.nodes if effect_of(part, node) in _ACTIVATIONS]
        self.candidates = _unique([*(self.site_at(*call) for call in calls), *self._in_transformers()])

    def _stem(self) -> str | None:
        """Return the name of the first layer if it is a convolution."""
        for part, node in self.nodes:
            if isinstance(module := part.module(node), (_ConvNd, nn.Linear, nn.Embedding)):
                return part.name(node) if isinstance(module, _ConvNd) else None
        return None

    def _in_transformers(self) -> list[Site]:
        """Places inside torch's own transformer layers, which tracing does not look into."""
        found = []
        for name, module in self.net.named_modules():
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                first = f"{name}.linear1"
                before = Side([Slice(f"{first}.{own}", 0) for own, _ in module.linear1.named_parameters()])
                after = Side([Slice(f"{name}.linear2.weight", 1)])
                zero = getattr(module.activation, "__name__", "") in _NAMES["activates"].split()
                found.append(Site(first, module.linear1.out_features, -1, before, after, first, zero))
        return found

    def site_at(self, part: Traced, node: fx.Node) -> Site | None:
        """Return the place after an operation, or None if no module there can be masked."""
        place = masked_node(part, node)
        site = None if place is None else _Walk(part, place, self.tied).site
        return site if site is not None and site.width else None

    def choose(self, layers: Layers) -> list[Site]:
        """Return the places that were asked for, each once."""
        sites = _unique(self._asked(layers))
        dropout = [s.name for s in sites if isinstance(self.net.get_submodule(s.name), nn.modules.dropout._DropoutNd)]
        if sites and not dropout:
            return sites
        why = "`layers` names no layer to mask"
        if layers == "auto":
            why = "There is no activation to mask: not the stem's, those of outputs, or those added to others, unless named"
        if dropout:
            why = f"{dropout[0]!r} is a dropout layer, which has no channels of its own: put the mask on the layer before it"
        raise ValueError(f"{why}. Candidates: {self.listed()}.")

    def _asked(self, layers: Layers) -> list[Site]:
        if layers == "auto":
            return [s for s in self.candidates if not (s.leaves or s.combined or self.is_stem(s))]
        asked: Any = (layers,) if isinstance(layers, str) or callable(layers) else layers
        return (
            self._by_test(asked)
            if all(map(callable, asked))
            else [site for one in asked for site in self._by_name(str(one))]
        )

    def _by_test(self, tests: Sequence[type | Rule]) -> list[Site]:
        modules = self.net.named_modules()
        named = [name for name, module in modules if name and any(_meets(one, name, module) for one in tests)]
        return [site for name in named for site in self._sites_of(name) if not self.is_stem(site)]

    def _by_name(self, pattern: str) -> list[Site]:
        names = [name for name, _ in self.net.named_modules() if name and fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"The network has no layer {pattern!r}. Candidates: {self.listed()}.")
        sites = [site for name in names for site in self._sites_of(name)]
        if not sites:
            raise ValueError(
                f"How many channels {names[0]!r} gives cannot be told, or it is called several times and cannot be masked in "
                f"each. Candidates: {self.listed()}."
            )
        return sites

    def _sites_of(self, name: str) -> list[Site]:
        """Return the places after a module: after its calls, or after the module itself where nothing was traced."""
        if calls := [(part, node) for part, node in self.nodes if part.name(node) == name]:
            return _unique(self.site_at(part, node) for part, node in calls if node.op == "call_module")
        inside = [site for site in self.candidates if site.name == name]
        known = width_of(self.net.get_submodule(name))
        if inside or known is None:
            return inside
        unknown = Side(why_fixed="the network around it could not be traced")
        return [Site(name, *known, unknown, unknown)]

    def is_stem(self, site: Site) -> bool:
        """Whether a place is fed by the network's first convolution."""
        return self.stem is not None and self.stem in (site.source, site.name)

    def listed(self) -> str:
        """Return the candidates for a message."""
        if self.candidates:
            return listed([str(site) for site in self.candidates])
        widths = {name: width_of(module) for name, module in self.net.named_modules() if name}
        return listed([f"{name!r} ({known[0]} channels)" for name, known in widths.items() if known is not None])


def _meets(one: Any, name: str, module: nn.Module) -> bool:
    """Whether a module is of this type, or this rule says yes to it."""
    return isinstance(module, one) if isinstance(one, type) else bool(one(name, module))


def _unique(sites: Iterable[Site | None]) -> list[Site]:
    found: dict[str, Site] = {}
    for site in filter(None, sites):
        found.setdefault(site.name, site)
    return list(found.values())


def listed(names: Sequence[str], most: int = 12) -> str:
    """Return names for a message, the first of many."""
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "") if names else "none"
