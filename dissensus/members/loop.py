"""An ensemble as plain modules that run one after the other, for tracers that cannot follow its own execution."""

import copy
from functools import partial
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


def as_loop(members: Members, example: Any) -> "_Loop":
    """Return a module that gives what the ensemble gives in evaluation, by running member after member.

    The ensemble evaluates; with a few inputs as an `example` the shapes at which dropout layers run are seen.
    """
    heads = members.heads if isinstance(members, HeadEnsemble) else members
    nets = [net.eval() for net in heads]
    if isinstance(members, MCDropout):
        nets = [_with_fixed_masks(net, example) for net in nets]
    loop = _Loop(nets, members.output)
    if isinstance(members, HeadEnsemble):
        loop.backbone, loop.takes = copy.deepcopy(members.backbone), members.takes
    if isinstance(members, Anchored) and members.temperature is not None:
        loop.anchors, loop.form = members.num_anchors, members.temperature
    return loop


class _Loop(nn.Module):
    """Networks in turn: heads on what a backbone gives; logits of anchored ones divided by a temperature of each network's."""

    takes: Output = None
    anchors: int | None = None
    form: TemperatureForm = "exponential"

    def __init__(self, nets: list[nn.Module], output: Output) -> None:
        super().__init__()
        self.nets, self.output = nn.ModuleList(nets), output
        self.backbone: nn.Module | None = None

    def forward(self, x: Any) -> Tensor:
        if self.backbone is not None:
            x = pick(call(self.backbone, x), self.takes)
        with layers_as_written():
            outputs = torch.stack([pick(call(net, x), self.output) for net in self.nets])
        if self.anchors is None:
            return outputs
        networks = outputs.split(self.anchors)
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
        raise ValueError("With masks='input' members hash inputs, as no file can. Use MCDropout(..., masks='member').")
    layers = (part for part in member.modules() if isinstance(part, SampledDropout))
    drawn: dict[SampledDropout, list[Tensor]] = {layer: [] for layer in layers}
    for layer, masks in drawn.items():
        layer.drop = partial(_noted, layer, masks)  # type: ignore[method-assign]
    call(member, example)
    for layer in drawn:
        del layer.drop

    def fixed(part: nn.Module) -> nn.Module | None:
        return _FixedDropout(part, drawn[part]) if isinstance(part, SampledDropout) and drawn[part] else None

    return replace_layers(member.net, fixed)


def _noted(layer: SampledDropout, masks: list[Tensor], x: Tensor, keep: Tensor) -> Tensor:
    masks.append(keep[:1])  # every row of a member drops the same
    return SampledDropout.drop(layer, x, keep)
