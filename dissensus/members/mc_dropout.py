"""Monte Carlo dropout: one network with its dropout layers left on, each member a draw of what they drop."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from dissensus._signatures import checked, warn
from dissensus.data.trees import Batch, Output, Tree, inputs_of
from dissensus.engines.watching import Attributes, look_at
from dissensus.members.members import Keys, under
from dissensus.members.shared import SharedMembers, adopt, call, has_values, layers_as_written
from dissensus.members.stacking import Tensors, copies_of
from dissensus.nets.dropout import KeyedDropout, can_be_keyed, key_dropout, plain_dropout
from dissensus.randomness import fold, seeded, uniform

Masks = Literal["member", "input"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SampledDropout(KeyedDropout):
    """A dropout layer that also drops in evaluation, by keys that the ensemble sets before a pass, `(keys, rows of each)`."""

    sample_keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Drop values of `x`: anew for every row in training, by `sample_keys` in evaluation."""
        if self.training or self.sample_keys is None or self.sample_keys.numel() == 0 or self.p == 0.0:
            return super().forward(x)
        keys, rows = self.sample_keys[:, 0], self.sample_keys.numel()
        if len(x) % rows:
            raise ValueError(
                f"Dropout wants the batch, {rows} rows, on the first axis of its input; got a tensor shaped {tuple(x.shape)}. "
                "Put the batch first (batch_first=True in torch's layers), or make a DeepEnsemble."
            )
        shape = (x.shape[1], *(1 for _ in x.shape[2:])) if self.by_feature else x.shape[1:]
        keep = uniform(fold(keys, self.calls), *shape) >= self.p
        self.calls += 1
        return self.drop(x, keep.repeat_interleave(len(x) // len(keys), 0))

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "sample_keys"}


@checked
class MCDropout(SharedMembers):
    """One network whose dropout layers stay on: a member is one draw of what they drop.

    By default a member is one function: it drops the same values for every input. With `masks="input"` it draws anew
    for every input, as is the custom; what it draws depends on (seed, member, input). Either way predictions
    can be had again, whatever the batch size and order. Training is that of the network alone, with ordinary dropout.

    Only layers of torch, `nn.Dropout` and its like, can be left on. What a network drops elsewhere (attention its weights, `nn.LSTM`
    between layers, `functional.dropout`) is off in evaluation, with a warning.

    Args:
        net: A network with dropout layers, or any network with `p`. It is copied.
        num_members: Draws.
        seed: Member j's draw depends on `(seed, j)` only.
        p: Rate of all dropout layers. In a network without any, layers of this rate are put before every linear
            layer that no convolution follows, except the network's first layer.
        masks: `"member"` or `"input"`.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))
        >>> MCDropout(net, num_members=10).eval()(torch.zeros(8, 4)).shape
        torch.Size([10, 8, 3])

    References:
        Gal and Ghahramani, 2016, <https://arxiv.org/abs/1506.02142>.
    """

    decisive: ClassVar[tuple[str, ...]] = ("batches", "masks")

    def __init__(
        self,
        net: nn.Module,
        num_members: int = 10,
        seed: int = 0,
        p: float | None = None,
        *,
        masks: Masks = "member",
        output: Output = None,
    ) -> None:
        net = key_dropout(_with_rate(adopt(net, num_members), p), SampledDropout)
        super().__init__(net, num_members, seed, "split", output)
        # Which draws members are is what this kind has beside its weights: a state without them would be another ensemble.
        self.register_buffer("member_keys", self.member_keys, persistent=True)
        self.masks: Masks = masks

    def run(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run members on the given tensors; see `Members.run`."""
        if self.training:
            return super().run(tensors, x, own=own, rows=rows, keys=keys)
        chosen = self.member_keys if rows is None else self.member_keys.index_select(0, rows)
        set_keys(self.net, chosen, x, self.masks, own)
        if "evaluating" in self.decisions or x.shape[int(own)] == 0 or not has_values(x):
            return super().run(tensors, x, own=own, rows=rows, keys=keys)
        ran: list[nn.Module] = []
        with ExitStack() as hooks:
            for layer in _layers(self.net):
                hooks.enter_context(layer.register_forward_hook(lambda layer, *_: ran.append(layer)))
            outputs = super().run(tensors, x, own=own, rows=rows, keys=keys)
        if not ran:
            raise ValueError(
                "No dropout layer of the network runs, so all draws would be alike; what it drops elsewhere, as attention does, "
                "cannot be drawn by member. Use nn.Dropout layers in its forward."
            )
        self._warn_of_other_draws(tensors, (x[0] if own else x)[:2].detach().clone())
        return outputs

    def _warn_of_other_draws(self, tensors: Tensors, few: Batch) -> None:
        """Warn of what the network draws outside dropout layers; seen in a pass of training, once."""
        own = copies_of(under("net.", tensors))
        with seeded(0, alone=True), Attributes(self.parts()), torch.no_grad(), layers_as_written():
            for module in self.net.modules():
                module.training = not isinstance(module, _NormBase)
            try:
                drawn, _ = look_at(lambda: call(self.net, own, few, self.picks))
            except Exception:  # a network that does something else in training
                drawn = frozenset()
        self.decisions["evaluating"] = {"random": bool(drawn)}
        if drawn:
            warn(
                f"The network draws random numbers outside dropout layers ({', '.join(sorted(drawn))}), as attention does. "
                "They are off in evaluation: members do not differ by them. Put nn.Dropout layers in their place."
            )

    def member(self, index: int) -> nn.Module:
        """Return one draw as an independent plain module; it drops the same in training and evaluation."""
        return DropoutMember(copy.deepcopy(self.net), self.member_keys[self.check_index(index)], self.masks)

    def soup(self) -> nn.Module:
        """Return the network itself, whose dropout layers are off in evaluation: members share its weights."""
        return plain_dropout(copy.deepcopy(self.net))

    def identity(self) -> dict[str, str]:
        """Return what decides training beside the tensors, and which draws members are."""
        rates = [layer.p for layer in _layers(self.net)]
        return {**super().identity(), "dropout": repr(rates), "draws": repr(self.member_keys.tolist())}


class DropoutMember(nn.Module):
    """One draw of a network's dropout as a plain module."""

    key: Tensor

    def __init__(self, net: nn.Module, key: Tensor, masks: Masks) -> None:
        super().__init__()
        self.net, self.masks = net.eval(), masks
        self.register_buffer("key", key.clone())

    def train(self, mode: bool = True) -> "DropoutMember":
        """Set the mode; dropout layers drop what this member drops in either."""
        super().train(mode)
        for layer in _layers(self.net):
            layer.eval()
        return self

    def forward(self, *x: Any, **named: Any) -> Any:
        """Run the network with this member's values dropped."""
        set_keys(self.net, self.key[None], inputs_of(x, named), self.masks)
        with layers_as_written():
            return self.net(*x, **named)


def set_keys(net: nn.Module, members: Tensor, x: Any, masks: Masks, own: bool = False) -> None:
    """Give dropout layers keys of their own: one a member, or one a row (member after member) that depends on the row's input."""
    rows = x.shape[int(own)]
    if masks == "input":
        inputs = _input_keys(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if own else _input_keys(x)
        members, rows = fold(members[:, None], inputs).flatten(), 1
    for index, layer in enumerate(_layers(net)):
        layer.sample_keys, layer.calls = fold(members, index)[:, None].expand(-1, rows), 0


def _layers(net: nn.Module) -> Iterator[SampledDropout]:
    return (module for module in net.modules() if isinstance(module, SampledDropout))


def _input_keys(x: Batch) -> Tensor:
    """Return a hash of each row's values, `(rows,)`."""
    if isinstance(x, Tree):
        keys = torch.stack([_input_keys(leaf) for leaf in x.leaves], -1)
        return fold(keys, torch.arange(len(x.leaves), device=x.device)).sum(-1)
    values = x.detach().reshape(len(x), x.shape[1:].numel())
    if values.is_floating_point():
        values = values.view(_BITS[values.element_size()])
    return fold(values.long(), torch.arange(values.shape[1], device=x.device)).sum(1)


def _with_rate(net: nn.Module, p: float | None) -> nn.Module:
    """Return the network with dropout layers of this rate."""
    layers = [module for module in net.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    _check_torchs_own(layers)
    if p is None:
        _check_draws_differ(layers)
        return net
    if not 0.0 < p < 1.0:
        raise ValueError(f"`p` must be above 0 and below 1; got {p}.")
    for layer in layers:
        layer.p = p
    for linear in [] if layers else _last_linear_layers(net):
        linear.add_module("dropout", nn.Dropout(p).train(linear.training))
        linear.register_forward_pre_hook(_drop_inputs)
    return net


def _check_torchs_own(layers: list[nn.modules.dropout._DropoutNd]) -> None:
    other = [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers if not can_be_keyed(layer)]
    if other:
        raise ValueError(
            f"The network has a dropout layer of the class {other[0]}, whose forward may be another than torch's, so what it drops cannot "
            "be drawn by member. Put nn.Dropout or another one of torch's own in its place."
        )


def _check_draws_differ(layers: list[nn.modules.dropout._DropoutNd]) -> None:
    if not any(layer.p > 0 for layer in layers):
        had = "All dropout layers of the network have p = 0" if layers else "The network has no dropout layer"
        raise ValueError(
            f"{had}, so all draws would be alike. Put nn.Dropout layers into it, or give `p` here, a rate for all of them, "
            "put before its last linear layers if there are none. (What nn.LSTM and the like drop inside themselves cannot be "
            "drawn by member.)"
        )


def _last_linear_layers(net: nn.Module) -> list[nn.Module]:
    """Return the linear layers that no convolution follows, except the network's first layer."""
    weighted = [m for m in net.modules() if isinstance(m, (_ConvNd, nn.Embedding)) or type(m) is nn.Linear]
    convolutions = [place for place, module in enumerate(weighted) if isinstance(module, _ConvNd)]
    found: list[nn.Module] = [module for module in weighted[max(1, *convolutions, 0) :] if type(module) is nn.Linear]
    if not found:
        raise ValueError("There is no linear layer behind another one to put dropout before. Put nn.Dropout layers in.")
    return found


def _drop_inputs(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dropout = layer.get_submodule("dropout")
    return (dropout(inputs[0]), *inputs[1:])
