"""Dropout whose mask is a function of a key, so that member j's noise depends on (seed, j, step) alone."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from dissensus.randomness import fold, uniform

# Mean and scale kept by alpha dropout: the negative saturation value of SELU.
_SELU_SATURATION = -1.7580993408473766


class KeyedDropout(nn.Module):
    """Stands in for one dropout layer of torch; `key`, which no state dict has, is set by the ensemble before each pass."""

    key: Tensor

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.plain = type(layer)
        self.p = float(layer.p)  # type: ignore[arg-type]
        self.by_feature = self.plain not in (nn.Dropout, nn.AlphaDropout)
        self.alpha = self.plain in (nn.AlphaDropout, nn.FeatureAlphaDropout)
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.calls = 0
        self.train(layer.training)
        self._forward_hooks, self._forward_pre_hooks = layer._forward_hooks, layer._forward_pre_hooks

    def forward(self, x: Tensor) -> Tensor:
        """Drop values of `x` in training; return it as it is in evaluation."""
        if not self.training or self.p == 0.0:
            return x
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if self.by_feature else x.shape
        # A layer used twice in one pass draws twice.
        keep = uniform(fold(self.key, self.calls), *shape) >= self.p
        self.calls += 1
        return self.drop(x, keep)

    def drop(self, x: Tensor, keep: Tensor) -> Tensor:
        """Drop what is not kept and rescale the rest."""
        keep = keep.to(x.dtype)
        if not self.alpha:
            return x * keep / (1.0 - self.p) if self.p < 1.0 else x * keep
        scale = ((1.0 - self.p) * (1.0 + self.p * _SELU_SATURATION**2)) ** -0.5 if self.p < 1.0 else 0.0
        return scale * (x * keep + _SELU_SATURATION * (1.0 - keep) - _SELU_SATURATION * self.p)

    def extra_repr(self) -> str:
        """Show the rate."""
        return f"p={self.p}"


_KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def can_be_keyed(layer: nn.Module) -> bool:
    """Whether this is a dropout layer of torch's own, for which a keyed one can stand in: what a class made from one does is not known."""
    return type(layer) in _KINDS


def key_dropout(net: nn.Module, keyed: type[KeyedDropout] = KeyedDropout) -> nn.Module:
    """Replace every dropout layer of `net` by its keyed form, in place; return the net."""
    return replace_layers(net, lambda layer: keyed(layer) if can_be_keyed(layer) else None)


def plain_dropout(net: nn.Module) -> nn.Module:
    """Undo `key_dropout`, in place; return the net."""
    net.__dict__.pop("_keyed_layers", None)
    return replace_layers(net, lambda layer: _plain(layer) if isinstance(layer, KeyedDropout) else None)


def _plain(keyed: KeyedDropout) -> nn.Module:
    layer = keyed.plain(keyed.p).train(keyed.training)
    layer._forward_hooks, layer._forward_pre_hooks = keyed._forward_hooks, keyed._forward_pre_hooks
    return layer


def replace_layers(net: nn.Module, substitute: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Put what `substitute` returns in place of layers for which it is not None, wherever they are used; return the net."""
    if (whole := substitute(net)) is not None:
        return whole
    once = cache(substitute)
    for parent in list(net.modules()):
        for name, child in parent._modules.items():
            if child is not None and (new := once(child)) is not None:
                parent._modules[name] = new
    return net


def put_layer(net: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Return the network with a layer in the place of this name, which is changed in place; of no name, the layer itself."""
    if not name:
        return layer
    net.set_submodule(name, layer)
    return net


def dropout_keys(net: nn.Module, keys: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return the buffers that give each keyed layer its own keys in the next pass: name to a tensor like `keys()`."""
    layers = _keyed_layers(net)
    if not layers:
        return {}
    base = keys()
    for _, layer in layers:
        layer.calls = 0
    return {f"{name}.key" if name else "key": fold(base, index) for index, (name, _) in enumerate(layers)}


def rewind_dropout(net: nn.Module) -> None:
    """Let layers that run again in the backward pass (activation checkpointing) draw as they did in the forward."""
    for _, layer in _keyed_layers(net):
        layer.calls = 0


def _keyed_layers(net: nn.Module) -> list[tuple[str, KeyedDropout]]:
    # Kept on the net: walking a deep network costs more than a small one's whole pass.
    layers = net.__dict__.get("_keyed_layers")
    if layers is None:
        layers = [(name, module) for name, module in net.named_modules() if isinstance(module, KeyedDropout)]
        net.__dict__["_keyed_layers"] = layers
    return layers
