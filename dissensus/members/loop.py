"""An ensemble as plain modules that run one after the other, for tracers that cannot follow its own execution."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.data.trees import Output, call, pick
from dissensus.members.anchored import Anchored, TemperatureForm, anchor_temperature
from dissensus.members.heads import HeadEnsemble
from dissensus.members.mc_dropout import DropoutMember, MCDropout, SampledDropout
from dissensus.members.members import Members
from dissensus.members.shared import layers_as_written
from dissensus.nets.dropout import replace_layers


def as_loop(members: Members, example: Any) -> nn.Module:
    """Return a module that gives what the ensemble gives in evaluation, `(members, batch, ...)`, by running member after member.

    Args:
        members: The ensemble, in evaluation mode.
        example: A few inputs, to see the shapes at which dropout layers run.
    """
    if isinstance(members, HeadEnsemble):
        heads = as_loop(members.heads, members.features(example))
        return _OnBackbone(copy.deepcopy(members.backbone), members.takes, heads)
    nets = [members.member(index).eval() for index in range(members.num_members)]
    if isinstance(members, MCDropout):
        nets = [_with_fixed_masks(net, example) for net in nets]
    if isinstance(members, Anchored) and members.temperature is not None:
        return _Cooled(_Loop(nets, members.output), members.num_anchors, members.temperature)
    return _Loop(nets, members.output)


class _Loop(nn.Module):
    def __init__(self, nets: list[nn.Module], output: Output) -> None:
        super().__init__()
        self.nets, self.output = nn.ModuleList(nets), output

    def forward(self, x: Any) -> Tensor:
        with layers_as_written():
            return torch.stack([pick(call(net, x), self.output) for net in self.nets])


class _OnBackbone(nn.Module):
    """Heads over what they take of a backbone, which runs once for all of them."""

    def __init__(self, backbone: nn.Module, takes: Output, heads: nn.Module) -> None:
        super().__init__()
        self.backbone, self.takes, self.heads = backbone, takes, heads

    def forward(self, x: Any) -> Tensor:
        outputs: Tensor = self.heads(pick(call(self.backbone, x), self.takes))
        return outputs


class _Cooled(nn.Module):
    """Anchored networks whose logits are divided by a temperature, which compares one network's members."""

    def __init__(self, loop: nn.Module, anchors: int, form: TemperatureForm) -> None:
        super().__init__()
        self.loop, self.anchors, self.form = loop, anchors, form

    def forward(self, x: Any) -> Tensor:
        networks = self.loop(x).split(self.anchors)
        return torch.cat([logits / anchor_temperature(logits, self.form)[:, None] for logits in networks])


class _FixedDropout(nn.Module):
    """A dropout layer of one member, with what it drops as constants: one mask for each of its calls in a pass."""

    def __init__(self, layer: SampledDropout, masks: list[Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.masks = nn.ParameterList(nn.Parameter(mask.float(), requires_grad=False) for mask in masks)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        mask = self.masks[self.calls]
        self.calls = (self.calls + 1) % len(self.masks)
        return self.layer.drop(x, mask)


def _with_fixed_masks(member: nn.Module, example: Any) -> nn.Module:
    """Return one draw of a network's dropout with the masks that it draws written down."""
    assert isinstance(member, DropoutMember)
    if member.masks == "input":
        raise ValueError(
            "With masks='input' a member hashes the bits of every input, which no exported file can. Make the ensemble with "
            "MCDropout(..., masks='member')."
        )
    drawn: dict[SampledDropout, list[Tensor]] = {}
    for layer in member.modules():
        if isinstance(layer, SampledDropout):
            layer.drop = _recorder(layer, drawn.setdefault(layer, []))  # type: ignore[method-assign]
    call(member, example)
    for layer in drawn:
        del layer.drop
    return replace_layers(
        member.net,
        lambda part: _FixedDropout(part, drawn[part]) if isinstance(part, SampledDropout) and drawn[part] else None,
    )


def _recorder(layer: SampledDropout, masks: list[Tensor]) -> Any:
    def drop(x: Tensor, keep: Tensor) -> Tensor:
        masks.append(keep[:1])  # every row of a member drops the same
        return SampledDropout.drop(layer, x, keep)

    return drop
