"""A network's operations as graphs, and what each one does to the channels that flow through it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx, nn

from dissensus.architectures import _FlattenTo
from dissensus.nets.dropout import KeyedDropout

# Layers that mix channels.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Effect = Literal[
    "activates", "moves zero", "passes", "normalises", "pools", "flattens", "averages", "combines", "other"
]
"""What an operation does to channels: of activations, those that give zero for zero, so that a dropped channel stays dropped, `activate`;
`averages` leaves of an image one value a channel; `combines` adds or multiplies two tensors."""
ACTIVATIONS: tuple[Effect, ...] = ("activates", "moves zero")
KEEPS_ZERO: tuple[Effect, ...] = ("activates", "passes", "pools")


def _layers(names: str) -> tuple[type[nn.Module], ...]:
    return tuple(getattr(nn, name) for name in names.split())


_POOLS = "MaxPool{0}d AvgPool{0}d AdaptiveAvgPool{0}d AdaptiveMaxPool{0}d"
_BY_LAYER: Mapping[Effect, tuple[type[nn.Module], ...]] = {
    "activates": _layers(
        "ReLU ReLU6 LeakyReLU PReLU ELU CELU SELU GELU SiLU Mish Hardswish Tanh Tanhshrink Softsign Softshrink Hardshrink"
    ),
    "moves zero": _layers("Sigmoid Softplus Hardtanh Hardsigmoid LogSigmoid"),
    "passes": (
        *_layers("Identity Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout"),
        KeyedDropout,
    ),
    "normalises": BATCH_NORMS,
    "pools": (*(layer for n in (1, 2, 3) for layer in _layers(_POOLS.format(n))), nn.Upsample),
}
_POOL_NAMES = "max_pool{0}d avg_pool{0}d adaptive_avg_pool{0}d adaptive_max_pool{0}d"
BY_FUNCTION: Mapping[Effect, str] = {
    "activates": "relu relu_ relu6 leaky_relu elu celu selu gelu silu mish hardswish tanh tanh_ tanhshrink softsign",
    "moves zero": "sigmoid softplus hardtanh hardsigmoid logsigmoid",
    "passes": "dropout contiguous",
    "pools": " ".join(_POOL_NAMES.format(n) for n in (1, 2, 3)),
}


@dataclass(frozen=True)
class Traced:
    """The operations of a network, or of the part of it at `prefix` (with a dot) that could be traced, and how often modules are called."""

    root: nn.Module
    prefix: str
    graph: fx.Graph
    calls: Counter[str]

    @property
    def whole(self) -> bool:
        """Whether this is the whole network."""
        return not self.prefix

    def module(self, node: fx.Node) -> nn.Module | None:
        """Return the module that a node calls."""
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def name(self, node: fx.Node) -> str:
        """Return the name in the network of the module that a node calls."""
        return self.prefix + str(node.target)

    def called_once(self, node: fx.Node) -> bool:
        """Whether a node is the only call of its module."""
        return self.calls[str(node.target)] == 1


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
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    return [Traced(net, prefix, graph, calls)]


def function_name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def effect_of(part: Traced, node: fx.Node) -> Effect:
    """Return what a node does to channels."""
    module, name = part.module(node), function_name(node)
    if getattr(module, "return_indices", False):
        return "other"
    found: list[Effect] = [effect for effect, layers in _BY_LAYER.items() if isinstance(module, layers)]
    found += [effect for effect, names in BY_FUNCTION.items() if name in names.split()]
    if found:
        return found[0]
    if flattens(part, node):
        return "flattens"
    if _averages(node):
        return "averages"
    # Functions of torch and of operator, and methods.
    adds = name in ("add", "add_", "iadd", "sub", "mul", "mul_", "imul")
    return "combines" if adds and sum(isinstance(value, fx.Node) for value in node.args) > 1 else "other"


def channelwise(effect: Effect, spatial: bool) -> bool:
    """Whether an operation treats each channel on its own; pooling does where channels are `spatial`, with positions behind them."""
    return effect in ("activates", "moves zero", "passes", "normalises") or (spatial and effect == "pools")


def reads_shape(node: fx.Node) -> bool:
    """Whether a node looks at a tensor's shape only."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.target is getattr and node.args[1] in ("shape", "ndim", "device", "dtype")


def channel_parameters(module: nn.Module | None) -> list[str]:
    """Return names of tensors that hold one value a channel in a channelwise module."""
    if isinstance(module, BATCH_NORMS):
        names = ("weight", "bias", "running_mean", "running_var")
        return [name for name in names if getattr(module, name) is not None]
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        return ["weight"]
    return []


def flattens(part: Traced, node: fx.Node) -> bool:
    """Whether a node makes vectors of everything but the batch, channel after channel."""
    module = part.module(node)
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1 and module.end_dim == -1
    if isinstance(module, _FlattenTo):
        return True
    name, arguments = function_name(node), node.args[1:]
    if name == "flatten":
        return (node.kwargs.get("start_dim", arguments[0] if arguments else 0), arguments[1:]) == (1, ())
    return name in ("view", "reshape") and len(arguments) == 2 and bool(arguments[1] == -1)


def _averages(node: fx.Node) -> bool:
    if function_name(node) != "mean" or node.kwargs.get("keepdim", False) or len(node.args) > 2:
        return False
    axes = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    wanted: tuple[set[Any], ...] = ({2, 3}, {-1, -2})
    return isinstance(axes, list | tuple) and set(axes) in wanted


# Layers that say how many features they give: the attribute that does, and the axis of the features.
_WIDTHS: Mapping[type[nn.Module] | tuple[type[nn.Module], ...], tuple[str, int]] = {
    nn.Linear: ("out_features", -1),
    nn.modules.conv._ConvNd: ("out_channels", 1),
    (*BATCH_NORMS, nn.modules.instancenorm._InstanceNorm): ("num_features", 1),
    nn.GroupNorm: ("num_channels", 1),
    nn.Embedding: ("embedding_dim", -1),
}


def width_of(module: nn.Module | None) -> tuple[int, int] | None:
    """Return how many features a module gives and on which axis, where the module itself says so."""
    for kinds, (name, axis) in _WIDTHS.items():
        if isinstance(module, kinds):
            return int(getattr(module, name)), axis
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        return module.normalized_shape[0], -1
    return None


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
    if len(parts) != 1 or not parts[0].whole:
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


def like(layer: Any, inputs: int, outputs: int, groups: int = 1) -> nn.Module:
    """Return a new linear layer or convolution that is as this one but for its widths."""
    options = {"bias": layer.bias is not None, "device": layer.weight.device, "dtype": layer.weight.dtype}
    if isinstance(layer, nn.Linear):
        return nn.Linear(inputs, outputs, **options)
    names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    options |= {name: getattr(layer, name) for name in names}
    convolution: nn.Module = type(layer)(inputs, outputs, groups=groups, **options)
    return convolution
