"""The first layer of any network, found by running it, made to take two inputs in place of one."""

from typing import Literal

import torch
from torch import Tensor, nn

from dissensus.randomness import derive, seeded

Initialise = Literal["sum", "fresh"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Layers with weights that may stand before those; a network that begins with one of them looks at single inputs.
_OTHERS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.Embedding,
    nn.Bilinear,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.conv._ConvTransposeNd,
)


def double_first_layer(
    net: nn.Module, like: Tensor, name: str | None, initialise: Initialise, seed: int
) -> nn.Module:
    """Have the first layer of `net` take `[a, b]`, joined along the first axis after the batch; change it in place.

    Args:
        net: A network from `(batch, ...)`.
        like: Inputs of the network; only their shape, dtype and device count.
        name: Which layer it is; found by running the network if None.
        initialise: `"sum"`: both halves get the layer's weights, so that the network on `[a, b]` is the network as it was on
            `a + b`. `"fresh"`: the second half gets them, the first half new normal ones of the same standard deviation.
        seed: Of new weights.

    Returns:
        The network.
    """
    with seeded(0):
        first, second = (torch.randn_like(like[:1].expand(2, *like.shape[1:])) for _ in range(2))
    before = _run_as_it_is(net, first + second)
    found = _find(net, first) if name is None else _named(net, name, first)
    layer = net.get_submodule(found)
    assert isinstance(layer, _LAYERS)
    old = layer.weight.detach()
    _widen(layer, torch.cat([old, old], dim=1))
    _check_equal(net, torch.cat([first, second], dim=1), before, found, layer)
    if initialise == "fresh":
        with seeded(derive(seed, "reference weights")), torch.no_grad():
            layer.weight[:, : old.shape[1]].normal_(0, float(old.double().std(correction=0)))
    return net


def _run_as_it_is(net: nn.Module, x: Tensor) -> Tensor:
    try:
        return _run(net, x)
    except RuntimeError as problem:
        raise ValueError(
            f"`references` must be inputs of the network, and it cannot run on ({', '.join(map(str, x.shape[1:]))}) of "
            f"{x.dtype}: {str(problem).strip().splitlines()[0]}"
        ) from problem


def _find(net: nn.Module, x: Tensor) -> str:
    """Return the name of the first layer with weights that runs."""
    order = _running_order(net, x)
    if order and (why := why_not(net.get_submodule(order[0]), x)) is None:
        return order[0]
    problem = "no layer with weights runs" if not order else f"{order[0] or 'the network itself'} {why}"
    raise ValueError(f"The first layer cannot be doubled: {problem}. {_candidates(net, order, x)}")


def _named(net: nn.Module, name: str, x: Tensor) -> str:
    """Check a name that was given."""
    order = _running_order(net, x)
    modules = dict(net.named_modules())
    if name not in modules:
        raise ValueError(f"The network has no layer {name!r}. {_candidates(net, order, x)}")
    if (why := why_not(modules[name], x)) is not None:
        raise ValueError(f"The layer {name!r} cannot be doubled: it {why}. {_candidates(net, order, x)}")
    return name


def _running_order(net: nn.Module, x: Tensor) -> list[str]:
    """Return the names of layers with weights in the order in which they first run."""
    ran: list[str] = []
    hooks = []
    for name, module in net.named_modules():
        is_leaf = next(module.children(), None) is None and next(module.parameters(), None) is not None
        if isinstance(module, _LAYERS + _OTHERS) or is_leaf:
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: ran.append(name)))
    try:
        _run(net, x)
    finally:
        for hook in hooks:
            hook.remove()
    return list(dict.fromkeys(ran))


def why_not(layer: nn.Module, x: Tensor) -> str | None:
    """Say why a layer cannot take twice the inputs; None if it can."""
    if not isinstance(layer, _LAYERS):
        return f"is a {type(layer).__name__}, not a linear or convolutional layer"
    if layer._parameters.get("weight") is None:
        return "has a weight that is computed from others"
    if isinstance(layer, nn.Linear):
        return None if layer.in_features == x[0].numel() else f"takes {layer.in_features} features"
    if layer.groups != 1:
        return f"convolves in {layer.groups} groups"
    return None if layer.in_channels == x.shape[1] else f"takes {layer.in_channels} channels"


def _candidates(net: nn.Module, order: list[str], x: Tensor) -> str:
    fit = [name for name in order if why_not(net.get_submodule(name), x) is None]
    wanted = f"inputs shaped ({', '.join(map(str, x.shape[1:]))})"
    if not fit:
        return f"No linear or convolutional layer takes {wanted}: give references shaped like one input of the network."
    return f"Layers that take {wanted}: {', '.join(repr(name) for name in fit)}; name one with `first_layer`."


def _widen(layer: nn.Module, weight: Tensor) -> None:
    assert isinstance(layer, _LAYERS)
    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    if isinstance(layer, nn.Linear):
        layer.in_features *= 2
    else:
        layer.in_channels *= 2


def _check_equal(net: nn.Module, pair: Tensor, before: Tensor, name: str, layer: nn.Module) -> None:
    """Refuse a network whose inputs go elsewhere too, so that doubling one layer is not enough."""
    where = f"{name or 'The network itself'} ({type(layer).__name__}) now takes twice its inputs"
    try:
        after = _run(net, pair)
    except (RuntimeError, ValueError, AssertionError, IndexError) as problem:
        first_line = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise ValueError(
            f"{where}, but the network does not run on them: {first_line}. Move what is done to inputs before that layer "
            "(normalisation, checks of shape) out of the network."
        ) from problem
    scale = float(before.abs().max().nan_to_num(1.0).clamp_min(1e-6))
    if after.shape != before.shape or not torch.allclose(after, before, rtol=1e-2, atol=1e-2 * scale):
        raise ValueError(
            f"{where}, but the network's inputs go elsewhere too, or are changed before it. Move that out of the network, or "
            "name the layer with `first_layer`."
        )


def _run(net: nn.Module, x: Tensor) -> Tensor:
    """Run in evaluation mode, leaving modes and generators as they were."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        with torch.no_grad(), seeded(0):
            output: object = net(x)
    finally:
        for module, mode in modes:
            module.training = mode
    if not isinstance(output, Tensor):
        raise ValueError(
            f"A member must return one tensor; got {type(output).__name__}. Wrap it in a module that returns the tensor."
        )
    return output
