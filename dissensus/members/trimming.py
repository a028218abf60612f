"""Masks on the channels of a layer; channels taken out of a network, or more of them put in."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus.members.shared import PerRow, fastest_layout
from dissensus.members.stacking import tensors_of
from dissensus.nets.dropout import plain_dropout
from dissensus.nets.sites import Side, Site, Slice
from dissensus.randomness import seeded

NAME = "mask"


class ChannelMask(PerRow):
    """All members' masks of one layer: each row of a batch keeps the channels of its member.

    Attributes:
        values: True where a member keeps the channel, `(members, channels)`.
        kept: The channels that each member keeps, `(members, ones)`.
        axis: Axis of the channels.
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


class FixedMask(nn.Module):
    """One member's mask."""

    kept: Tensor

    def __init__(self, kept: Tensor, width: int, axis: int) -> None:
        super().__init__()
        self.width, self.axis = width, axis
        self.register_buffer("kept", kept)

    def forward(self, x: Tensor) -> Tensor:
        """Set dropped channels to zero."""
        return x * along(_indicator(self.kept, self.width, x.dtype), x, self.axis)

    def extra_repr(self) -> str:
        """Show how many channels are kept."""
        return f"{len(self.kept)} of {self.width} channels"


class Selection(FixedMask):
    """One member's channels alone, where only what follows is smaller."""

    def forward(self, x: Tensor) -> Tensor:
        """Return kept channels only."""
        return x.index_select(self.axis, self.kept)


class Expansion(FixedMask):
    """One member's channels put back among zeros, where only what comes before is smaller."""

    def forward(self, x: Tensor) -> Tensor:
        """Return all channels, dropped ones zero."""
        axis = self.axis % x.ndim
        shape = (*x.shape[:axis], self.width, *x.shape[axis + 1 :])
        return x.new_zeros(shape).index_copy(axis, self.kept, x)


def along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """Return one value a channel, shaped to multiply `x` along `axis`."""
    shape = [1] * x.ndim
    shape[axis] = len(values)
    return values.reshape(shape)


def _indicator(kept: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(width, dtype=dtype, device=kept.device).index_fill(0, kept, 1.0)


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


def form_of(site: Site) -> Form:
    """Say what becomes of a place in one member: smaller on both sides, on one, or masked."""
    before = site.before.why_fixed is None
    after = site.after.why_fixed is None and site.keeps_zero
    return "trimmed" if before and after else "expanded" if before else "selected" if after else "masked"


def why_not_trimmed(site: Site) -> str | None:
    """Say why a place is not smaller on both sides; None if it is."""
    if site.why_fixed is None and not site.keeps_zero:
        return "what follows makes something else of a channel of zeros"
    return site.why_fixed


@dataclass(frozen=True)
class Cut:
    """The parts of a tensor that belong to a member: along each slice, the channels of one place."""

    cuts: tuple[tuple[Slice, str], ...]

    def take(self, tensor: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the member's part; `kept` has its channels for every place."""
        for piece, site in self.cuts:
            tensor = tensor.index_select(piece.axis, _entries(kept[site], piece.block))
        return fastest_layout(tensor)


def _entries(kept: Tensor, block: int) -> Tensor:
    if block == 1:
        return kept
    return (kept[:, None] * block + torch.arange(block, device=kept.device)).flatten()


class Trimmer:
    """Makes members that have only the channels they keep; all have the same shapes, so one module serves them all.

    Args:
        net: The masked network.
        sites: Its masks' places.
    """

    def __init__(self, net: nn.Module, sites: Sequence[Site]) -> None:
        self.sites = {site.name: site for site in sites}
        self.forms: dict[str, Form] = {site.name: form_of(site) for site in sites}
        pieces: dict[str, list[tuple[Slice, str]]] = {}
        for site in sites:
            for side in sides_cut(site, self.forms[site.name]):
                for piece in side.slices:
                    pieces.setdefault(piece.tensor, []).append((piece, site.name))
        self.cuts = {name: Cut(tuple(cuts)) for name, cuts in pieces.items()}
        self.net = self._skeleton(net)
        # Listed once: walking a network takes longer than gathering what a small one needs.
        self.names = list(tensors_of(self.net))
        self.kept_names = {_mask_tensor(name): name for name in self.sites}

    def _skeleton(self, net: nn.Module) -> nn.Module:
        """Return the network of one member without values: its tensors are on the meta device."""
        # Tensors that are in the memo already are not copied but taken from there.
        skeleton = copy.deepcopy(net, {id(t): _without_values(t) for t in tensors_of(net).values()})
        for name, site in self.sites.items():
            layer = skeleton.get_submodule(name)
            mask = layer.get_submodule(NAME)
            assert isinstance(mask, ChannelMask)
            detach(layer)
            form = self.forms[name]
            if form != "trimmed":
                kinds = {"masked": FixedMask, "selected": Selection, "expanded": Expansion}
                attach(layer, kinds[form](mask.kept[0], site.width, site.axis))
            for side in sides_cut(site, form):
                resize(skeleton, side, site.width, mask.kept.shape[1])
        return plain_dropout(skeleton)

    def kept(self, tensors: Mapping[str, Tensor], rows: Tensor) -> list[dict[str, Tensor]]:
        """Return the channels that each of these members keeps, by place."""
        by_site = {site: tensors[name].index_select(0, rows).unbind() for name, site in self.kept_names.items()}
        return [{site: kept[place] for site, kept in by_site.items()} for place in range(len(rows))]

    def tensors(self, tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return one member's parameters and buffers from those of the masked network and the channels it keeps."""
        own = {}
        for name in self.names:
            if name in self.kept_names:
                own[name] = kept[self.kept_names[name]]
            elif name in self.cuts:
                own[name] = self.cuts[name].take(tensors[name], kept)
            else:
                own[name] = tensors[name]
        return own

    def member(self, tensors: Mapping[str, Tensor], index: int) -> nn.Module:
        """Return one member as an independent module."""
        net = copy.deepcopy(self.net)
        (kept,) = self.kept(tensors, torch.tensor([index], device=next(iter(tensors.values())).device))
        own = self.tensors(tensors, kept)
        replace_tensors(net, lambda name, tensor: own[name].detach().clone())
        return net


def _without_values(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def replace_tensors(net: nn.Module, make: Callable[[str, Tensor], Tensor]) -> None:
    """Give a network other tensors, in place; what is tied stays tied."""
    old = tensors_of(net)
    made = {id(tensor): make(name, tensor) for name, tensor in old.items()}
    for tensor in old.values():
        if isinstance(tensor, nn.Parameter):
            made[id(tensor)] = nn.Parameter(made[id(tensor)], tensor.requires_grad)
    for module in net.modules():
        for name, held in [*module._parameters.items(), *module._buffers.items()]:
            if held is not None:
                setattr(module, name, made[id(held)])


def sides_cut(site: Site, form: Form) -> list[Side]:
    """Return the sides on which a member has fewer channels."""
    return {"trimmed": [site.before, site.after], "expanded": [site.before], "selected": [site.after], "masked": []}[
        form
    ]


def _mask_tensor(site: str) -> str:
    return f"{site}.{NAME}.kept"


def resize(net: nn.Module, side: Side, old: int, new: int) -> None:
    """Have layers say their new sizes; those of their tensors are changed by the caller where they hold values."""
    for piece in side.slices:
        layer, _, name = piece.tensor.rpartition(".")
        module = net.get_submodule(layer)
        size = new * piece.block
        _shorten(module, name, piece.axis, size)
        if isinstance(module, nn.Linear):
            setattr(module, "in_features" if piece.axis else "out_features", size)
        elif isinstance(module, nn.modules.conv._ConvNd):
            setattr(module, "in_channels" if piece.axis else "out_channels", size)
        elif isinstance(module, nn.PReLU):
            module.num_parameters = size
        else:
            module.num_features = size  # type: ignore[assignment]
    for name in side.flattens:
        module = net.get_submodule(name)
        module.features = module.features * new // old  # type: ignore[operator, assignment]


def _shorten(module: nn.Module, name: str, axis: int, size: int) -> None:
    """Give a tensor of a module another size along an axis, with no particular values."""
    old = getattr(module, name)
    shape = (*old.shape[:axis], size, *old.shape[axis + 1 :])
    new = old.detach().new_empty(shape)
    if isinstance(old, nn.Parameter):
        module._parameters[name] = nn.Parameter(new, old.requires_grad)
    else:
        module._buffers[name] = new


def grow(net: nn.Module, site: Site, kept: Tensor, width: int, seed: int) -> None:
    """Widen a place to `width` channels; the channels that were there become those in `kept`.

    New entries are drawn, with replacement, from the entries of the tensor that is widened: they follow the law that the
    network was initialised with, for the number of channels that one member has.
    """
    tensors = tensors_of(net)
    with seeded(seed), torch.no_grad():
        values = {
            piece: _widened(tensors[piece.tensor], piece, kept, width)
            for piece in (*site.before.slices, *site.after.slices)
        }
    for side in (site.before, site.after):
        resize(net, side, site.width, width)
    for piece, value in values.items():
        layer, _, name = piece.tensor.rpartition(".")
        getattr(net.get_submodule(layer), name).data.copy_(value)


def _widened(old: Tensor, piece: Slice, kept: Tensor, width: int) -> Tensor:
    kept = _entries(kept.to(old.device), piece.block)
    size = width * piece.block
    entries, spare = old.detach().flatten(), size - old.shape[piece.axis]
    shape = (*old.shape[: piece.axis], spare, *old.shape[piece.axis + 1 :])
    drawn = entries[torch.randint(len(entries), shape, device=old.device)]
    fresh = torch.ones(size, dtype=torch.bool, device=old.device).index_fill(0, kept, False).nonzero()[:, 0]
    both = torch.cat([old.detach(), drawn], piece.axis)
    return both.index_select(piece.axis, torch.cat([kept, fresh]).argsort())
