"""Masks on the channels of a layer; channels taken out of a network, or more of them put in."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus.members.shared import PerRow, fastest_layout
from dissensus.members.stacking import Tensors, replace_tensors, tensors_of
from dissensus.nets.dropout import plain_dropout
from dissensus.nets.sites import Side, Site, Slice
from dissensus.randomness import seeded

NAME = "mask"


class ChannelMask(PerRow):
    """All members' masks of one layer: each row of a batch keeps the channels of its member.

    `values` are True where a member keeps the channel, `(members, channels)`; `kept` are these channels, `(members, ones)`.
    """

    values: Tensor
    kept: Tensor

    def __init__(self, values: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("values", values)
        self.register_buffer("kept", values.nonzero()[:, 1].reshape(len(values), -1))

    def forward(self, x: Tensor) -> Tensor:
        """Set the channels that a row's member drops to zero."""
        return x * self.take(self.values, x, self.axis).to(x.dtype)

    def extra_repr(self) -> str:
        """Show how many channels members keep."""
        return f"{len(self.values)} members, {self.kept.shape[1]} of {self.values.shape[1]} channels"


class _Mask(nn.Module):
    """One member's mask: dropped channels are zero."""

    kept: Tensor

    def __init__(self, kept: Tensor, width: int, axis: int) -> None:
        super().__init__()
        self.width, self.axis = width, axis
        self.register_buffer("kept", kept)

    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * x.ndim
        shape[self.axis] = self.width
        return x * x.new_zeros(self.width).index_fill(0, self.kept, 1.0).reshape(shape)


class _Selection(_Mask):
    """One member's channels alone, where only what follows is smaller."""

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(self.axis, self.kept)


class _Expansion(_Mask):
    """One member's channels put back among zeros, where only what comes before is smaller."""

    def forward(self, x: Tensor) -> Tensor:
        axis = self.axis % x.ndim
        shape = (*x.shape[:axis], self.width, *x.shape[axis + 1 :])
        return x.new_zeros(shape).index_copy(axis, self.kept, x)


def attach(layer: nn.Module, mask: nn.Module) -> None:
    """Have a mask act on what a layer gives: it becomes a part of the layer, whose own names stay as they are."""
    if hasattr(layer, NAME):
        raise ValueError(
            f"A {type(layer).__name__} has an attribute {NAME!r} already, so no mask can be put on it. Mask another layer."
        )
    layer.add_module(NAME, mask)
    layer.register_forward_hook(_act)


def detach(layer: nn.Module) -> None:
    """Undo `attach`."""
    delattr(layer, NAME)
    for key in [key for key, hook in layer._forward_hooks.items() if hook is _act]:
        del layer._forward_hooks[key]


def _act(layer: Any, inputs: object, output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"A mask acts on one tensor; {type(layer).__name__} gives a {type(output).__name__}. Mask another layer."
        )
    masked: Tensor = layer.mask(output)
    return masked


Form = Literal["trimmed", "expanded", "selected", "masked"]
# What a member has in the place of a mask, beside fewer channels on a side or both.
_INSTEAD: Mapping[Form, type[_Mask]] = {"masked": _Mask, "selected": _Selection, "expanded": _Expansion}


def _form_of(site: Site) -> tuple[Form, list[Side]]:
    """Say what becomes of a place in one member, and on which sides it is smaller."""
    before = site.before.why_fixed is None
    after = site.after.why_fixed is None and site.keeps_zero
    form: Form = "trimmed" if before and after else "expanded" if before else "selected" if after else "masked"
    return form, [site.before] * before + [site.after] * after


def why_not_trimmed(site: Site) -> str | None:
    """Say why a place is not smaller on both sides; None if it is."""
    if site.why_fixed is None and not site.keeps_zero:
        return "what follows makes something else of a channel of zeros"
    return site.why_fixed


def _entries(kept: Tensor, block: int) -> Tensor:
    """Return where channels of so many entries each lie."""
    return kept if block == 1 else (kept[:, None] * block + torch.arange(block, device=kept.device)).flatten()


class Trimmer:
    """Makes members that have only the channels they keep; all have the same shapes, so one module serves them all."""

    def __init__(self, net: nn.Module, sites: Sequence[Site]) -> None:
        self.sites = {site.name: site for site in sites}
        self.forms: dict[str, Form] = {}
        # The parts of a tensor that belong to a member: along each slice, the channels of one place.
        self.cuts: dict[str, list[tuple[Slice, str]]] = {}
        for site in sites:
            self.forms[site.name], sides = _form_of(site)
            for piece in (piece for side in sides for piece in side.slices):
                self.cuts.setdefault(piece.tensor, []).append((piece, site.name))
        self.net = self._skeleton(net)
        # Listed once: walking a network takes longer than gathering what a small one needs.
        self.names = list(tensors_of(self.net))
        self.kept_names = {f"{name}.{NAME}.kept": name for name in self.sites}

    def _skeleton(self, net: nn.Module) -> nn.Module:
        """Return the network of one member without values: its tensors are on the meta device."""
        # Tensors that are in the memo already are not copied but taken from there.
        skeleton = copy.deepcopy(net, {id(t): _as_held(t.detach().to("meta"), t) for t in tensors_of(net).values()})
        for name, site in self.sites.items():
            layer = skeleton.get_submodule(name)
            mask = layer.get_submodule(NAME)
            assert isinstance(mask, ChannelMask)
            detach(layer)
            form, sides = _form_of(site)
            if form in _INSTEAD:
                attach(layer, _INSTEAD[form](mask.kept[0], site.width, site.axis))
            for side in sides:
                resize(skeleton, side, site.width, mask.kept.shape[1])
        return plain_dropout(skeleton)

    def kept(self, tensors: Tensors, rows: Tensor) -> list[dict[str, Tensor]]:
        """Return the channels that each of these members keeps, by place."""
        by_site = {site: tensors[name].index_select(0, rows).unbind() for name, site in self.kept_names.items()}
        return [{site: kept[place] for site, kept in by_site.items()} for place in range(len(rows))]

    def tensors(self, tensors: Tensors, kept: Tensors) -> dict[str, Tensor]:
        """Return one member's parameters and buffers from those of the masked network and the channels it keeps."""
        own = {name: kept[self.kept_names[name]] if name in self.kept_names else tensors[name] for name in self.names}
        for name, cuts in self.cuts.items():
            for piece, site in cuts:
                own[name] = own[name].index_select(piece.axis, _entries(kept[site], piece.block))
            own[name] = fastest_layout(own[name])
        return own

    def member(self, tensors: Tensors, index: int) -> nn.Module:
        """Return one member as an independent module."""
        net = copy.deepcopy(self.net)
        (kept,) = self.kept(tensors, torch.tensor([index], device=next(iter(tensors.values())).device))
        own = self.tensors(tensors, kept)
        replace_tensors(net, lambda name, tensor: own[name].detach().clone())
        return net


def _as_held(values: Tensor, tensor: Tensor) -> Tensor:
    """Return values as a parameter where the tensor in whose place they come is one."""
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def resize(net: nn.Module, side: Side, old: int, new: int) -> None:
    """Have layers say their new sizes; those of their tensors are changed by the caller where they hold values."""
    for piece in side.slices:
        layer, _, name = piece.tensor.rpartition(".")
        module, size = net.get_submodule(layer), new * piece.block
        tensor = getattr(module, name)
        empty = tensor.detach().new_empty((*tensor.shape[: piece.axis], size, *tensor.shape[piece.axis + 1 :]))
        setattr(module, name, _as_held(empty, tensor))
        says = {
            nn.Linear: "in_features" if piece.axis else "out_features",
            nn.modules.conv._ConvNd: "in_channels" if piece.axis else "out_channels",
            nn.PReLU: "num_parameters",
        }
        setattr(module, next((says[kind] for kind in says if isinstance(module, kind)), "num_features"), size)
    for name in side.flattens:
        module = net.get_submodule(name)
        module.features = module.features * new // old  # type: ignore[operator, assignment]


def grow(net: nn.Module, site: Site, kept: Tensor, width: int, seed: int) -> None:
    """Widen a place to `width` channels; the channels that were there become those in `kept`.

    New entries are drawn, with replacement, from the entries of the tensor that is widened: they follow the law that the
    network was initialised with, for the number of channels that one member has.
    """
    tensors = tensors_of(net)
    pieces = (*site.before.slices, *site.after.slices)
    with seeded(seed), torch.no_grad():
        values = [_widened(tensors[piece.tensor], piece, kept, width) for piece in pieces]
    for side in (site.before, site.after):
        resize(net, side, site.width, width)
    grown = tensors_of(net)
    for piece, value in zip(pieces, values, strict=True):
        grown[piece.tensor].data.copy_(value)


def _widened(old: Tensor, piece: Slice, kept: Tensor, width: int) -> Tensor:
    kept = _entries(kept.to(old.device), piece.block)
    size = width * piece.block
    entries, spare = old.detach().flatten(), size - old.shape[piece.axis]
    shape = (*old.shape[: piece.axis], spare, *old.shape[piece.axis + 1 :])
    drawn = entries[torch.randint(len(entries), shape, device=old.device)]
    fresh = torch.ones(size, dtype=torch.bool, device=old.device).index_fill(0, kept, False).nonzero()[:, 0]
    both = torch.cat([old.detach(), drawn], piece.axis)
    return both.index_select(piece.axis, torch.cat([kept, fresh]).argsort())
