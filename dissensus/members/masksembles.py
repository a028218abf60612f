"""Masksembles: one network, and a fixed set of masks over its channels that makes an ensemble of it."""

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from dissensus import masks
from dissensus._signatures import checked
from dissensus.data.sources import device_of
from dissensus.data.trees import Output
from dissensus.members.members import Keys, evaluation_mode, under
from dissensus.members.shared import BatchUse, PerRow, SharedMembers, adopt, call, fastest_layout, has_values
from dissensus.members.stacking import Tensors, as_held, join, replace_tensors, tensors_of
from dissensus.nets.dropout import plain_dropout
from dissensus.nets.graphs import Layers, Map, Site, Slice, listed, width_name
from dissensus.randomness import derive, seeded

log = logging.getLogger("dissensus")

Execution = Literal["auto", "tiled", "apart"]
Form = Literal["trimmed", "expanded", "selected", "masked"]

# Name of the part of a layer that masks what it gives.
_MASK = "mask"
# Below this width a thinner layer saves less than another call costs; measured on one thread with 4 members.
WIDE = 128


@dataclass(frozen=True)
class MaskedLayer:
    """A layer with masks, and what it is in a member on its own.

    Attributes:
        name: Module after which the masks act.
        width: Channels.
        ones: Channels that each member keeps.
        form: In `member(j)`: `"trimmed"` (dropped channels are gone on both sides), `"expanded"` (gone before, put back as
            zeros), `"selected"` (gone after), or `"masked"`.
        reason: Why it is not trimmed; None if it is.
    """

    name: str
    width: int
    ones: int
    form: Form
    reason: str | None


@checked
class Masksembles(SharedMembers):
    """One network as an ensemble: each member keeps its own share of the channels, chosen once and for all.

    Masks are part of the state dict, and kept values are not rescaled. In training each example meets one member, unless the objective
    compares members; in evaluation every member sees every input.

    Args:
        net: Any network. It is copied.
        num_members: Number of masks.
        scale: From 1 (alike) towards `math.inf` (disjoint); see `masks.generate`.
        layers: Where masks act: `"auto"` (after every activation, and BatchNorm behind it, except the stem's, those that
            reach the output, and those that are added to or multiplied with other tensors), names of modules (`*` and
            `?` match), module types, or a function of (name, module).
        seed: Decides masks and noise.
        grow: Widen the masked layers so that each member has as many channels as the network that was given; otherwise the
            network stays as wide as it is and members are thinner. Member 0 then has the given network's weights.
        batches: `"split"`: each member trains on its share of a batch; `"whole"`: on all of it.
        axis: Axis of the channels, where it is not what the layers say (1 for convolutions and BatchNorm, last for
            linear layers and LayerNorm).
        execution: How members run in evaluation: as rows of one batch (`"tiled"`), or each as the smaller network it is
            (`"apart"`), which saves arithmetic; `"auto"` does so on a CPU, for convolutions and wide layers.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
        >>> ens = Masksembles(net, num_members=4, scale=2.0)
        >>> ens.eval()(torch.zeros(8, 4)).shape, ens.member(1)
        (torch.Size([4, 8, 3]), Sequential(
          (0): Linear(in_features=4, out_features=34, bias=True)
          (1): ReLU()
          (2): Linear(in_features=34, out_features=3, bias=True)
        ))

    References:
        Durasov et al., 2021, <https://arxiv.org/abs/2012.08334>.
    """

    def __init__(
        self,
        net: nn.Module,
        num_members: int = 4,
        scale: float = 2.0,
        *,
        layers: Layers = "auto",
        seed: int = 0,
        grow: bool = False,
        batches: BatchUse = "split",
        axis: int | None = None,
        execution: Execution = "auto",
        output: Output = None,
    ) -> None:
        net = adopt(net, num_members)
        if not scale >= 1:
            raise ValueError(f"`scale` must be at least 1; got {scale}.")
        if grow and axis is not None:
            raise ValueError("`axis` says where channels are, and `grow` has to know it. Give one of them.")
        places = Map(net)
        sites = _apart_from_each_other(places.choose(layers))
        if grow:
            sites = _growing(sites, places, layers)
        if axis is not None:
            sites = [s if axis == s.axis else replace(s.fixed("its axis was given"), axis=axis) for s in sites]
        sites = [_put_mask(net, site, num_members, scale, seed, grow, places) for site in sites]
        super().__init__(net, num_members, seed, batches, output)
        self.scale, self.execution = scale, execution
        # In a list: the module without values is not a part of this one.
        self._trimmer = [Trimmer(self.net, sites)]
        # The first inputs that are evaluated, until trimming has been checked on them.
        self._few: Tensor | None = None
        self._trimming_checked = False
        self._apart_pays = execution == "apart" or self._saves_arithmetic()

    def _saves_arithmetic(self) -> bool:
        """Whether members on their own are so much smaller that running one after the other pays."""
        smaller = [layer for layer in self.masked_layers if layer.form != "masked" and layer.ones < layer.width]
        convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in self.net.modules())
        return any(layer.width >= WIDE or convolves for layer in smaller)

    @property
    def masked_layers(self) -> list[MaskedLayer]:
        """The layers with masks, and what each is in a member on its own."""
        self._check_trimming()
        return list(self._trimmer[0].layers)

    def masks(self, layer: str) -> Tensor:
        """Return a layer's masks: True where a member keeps the channel, `(members, channels)`."""
        if layer not in self._trimmer[0].sites:
            raise ValueError(f"{layer!r} has no masks; these layers do: {listed(list(self._trimmer[0].sites))}.")
        return self.get_buffer(f"net.{layer}.mask.values")

    def run(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run members on the given tensors; see `Members.run`."""
        if any(module.training for module in self.modules()):
            return super().run(tensors, x, own=own, rows=rows, keys=keys)
        if self._few is None and not self._trimming_checked and x.shape[int(own)] > 0 and has_values(x):
            self._few = (x[0] if own else x)[:2].detach().clone()
        # A GPU is faster with all channels of one large batch than with the uneven numbers that members keep.
        if {"tiled": True, "apart": False, "auto": x.device.type == "cuda"}[self.execution]:
            return super().run(tensors, x, own=own, rows=rows, keys=keys)
        self._check_trimming()
        run = self._run_apart if self._apart_pays else super().run
        return run(tensors, x, own=own, rows=rows, keys=keys)

    def _run_apart(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        trimmer, x, whole = self._trimmer[0], fastest_layout(x), under("net.", tensors)
        net, all_rows = trimmer.net.eval(), torch.arange(self.num_members, device=x.device)
        kept = trimmer.kept(whole, all_rows if rows is None else rows)
        members = [trimmer.tensors(whole, channels) for channels in kept]
        outputs = [call(net, one, x[place] if own else x, self.picks, lent=True) for place, one in enumerate(members)]
        return cast("Tensor", join(outputs))

    def _check_trimming(self) -> None:
        """Compare members that have fewer channels with the masked network, once, on the first inputs that were evaluated."""
        if self._few is None:
            return
        few, self._few, self._trimming_checked = self._few, None, True
        device, tensors = self.member_keys.device, {name: t.detach() for name, t in tensors_of(self).items()}
        # In full precision: two ways to the same answer differ by more in half of it.
        plain = torch.autocast(device.type, enabled=False)
        with torch.no_grad(), plain, evaluation_mode(self), self.returning_all(False):
            few = few.to(device)
            wanted = super().run(tensors, few, own=False, rows=None, keys=lambda: self.member_keys)
            found = None
            with suppress(RuntimeError):  # of shapes that no longer fit
                found = self._run_apart(tensors, few, own=False, rows=None, keys=lambda: self.member_keys)
        share = max(1e-2, 32 * torch.finfo(wanted.dtype).eps)
        room = share * float(wanted.abs().max()) + 1e-6
        if found is not None and torch.allclose(wanted, found, rtol=share, atol=room, equal_nan=True):
            return
        reason = "with fewer channels the network answers otherwise: it reads widths or weights itself"
        log.warning("members keep their masks: %s", reason)
        sites = [site.fixed(reason) for site in self._trimmer[0].sites.values()]
        self._trimmer, self._apart_pays = [Trimmer(self.net, sites)], self.execution == "apart"

    def member(self, index: int) -> nn.Module:
        """Return one member as an independent plain module that has only the channels it keeps.

        `masked_layers` says where dropped channels are gone and where, for a reason, they are masked instead.
        """
        index = self.check_index(index)
        for layer in self.masked_layers:
            if layer.form == "masked" and layer.ones < layer.width:
                log.info("member %d keeps the mask of %s: %s", index, layer.name, layer.reason)
        return self._trimmer[0].member(under("net.", tensors_of(self)), index).train(self.training)


def _apart_from_each_other(sites: list[Site]) -> list[Site]:
    """Keep masks where several act on the same channels: one member's share of them is not a smaller layer."""
    owners: dict[tuple[str, int], set[str]] = {}
    for site in sites:
        for side in (site.before, site.after):
            for piece in side.slices if side.why_fixed is None else ():
                owners.setdefault((piece.tensor, piece.axis), set()).add(site.name)
    crowded = set().union(*(names for names in owners.values() if len(names) > 1))
    return [site.fixed("another mask acts on the same channels") if site.name in crowded else site for site in sites]


def _growing(sites: list[Site], places: Map, layers: Layers) -> list[Site]:
    """Return the places that are widened: those that can be, or all that were asked for."""
    can = _that_can_grow(sites)
    if can and (layers == "auto" or len(can) == len(sites)):
        return can
    bad = next((site for site in sites if site.why_fixed is not None and layers != "auto"), None)
    why = "There is no layer that can be widened" if bad is None else f"{bad} cannot be widened: {bad.why_fixed}"
    candidates = listed([str(site) for site in _that_can_grow(places.candidates)])
    raise ValueError(f"{why}. Leave it out, or use grow=False. Candidates: {candidates}.")


def _that_can_grow(sites: list[Site]) -> list[Site]:
    return [site for site in sites if site.why_fixed is None]


def _put_mask(net: nn.Module, site: Site, num_members: int, scale: float, seed: int, grown: bool, places: Map) -> Site:
    """Draw a place's masks and attach them; widen the place first if wanted."""
    width = site.width
    try:
        if grown:
            width = round(masks.expected_width(site.width, scale, num_members))
        values = masks.generate(width, num_members, scale, derive(seed, "masks", site.name))
    except ValueError as problem:
        raise ValueError(
            f"{site} has too few channels for these masks: {problem} Or leave the layer out with `layers`. "
            f"Candidates: {places.listed()}."
        ) from None
    if grown and width != site.width:
        grow(net, site, values[0].nonzero()[:, 0], width, derive(seed, "grown", site.name))
        site = replace(site, width=width)
    attach(net.get_submodule(site.name), ChannelMask(values, site.axis).to(device_of(net)))
    return site


class ChannelMask(PerRow):
    """All members' masks of one layer, `(members, channels)`: each row of a batch keeps the channels of its member, `kept`."""

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


class _MemberMask(nn.Module):
    """What one member has in the place of a mask, as its `Form` says."""

    kept: Tensor

    def __init__(self, form: Form, kept: Tensor, width: int, axis: int) -> None:
        super().__init__()
        self.form, self.width, self.axis = form, width, axis
        self.register_buffer("kept", kept)

    def forward(self, x: Tensor) -> Tensor:
        axis = self.axis % x.ndim
        if self.form == "selected":
            return x.index_select(axis, self.kept)
        if self.form == "expanded":
            return x.new_zeros(*x.shape[:axis], self.width, *x.shape[axis + 1 :]).index_copy(axis, self.kept, x)
        mask = x.new_zeros(self.width).index_fill(0, self.kept, 1.0)
        return x * mask.reshape(-1, *(1 for _ in x.shape[axis + 1 :]))


def attach(layer: nn.Module, mask: nn.Module) -> None:
    """Have a mask act on what a layer gives: it becomes a part of the layer, whose own names stay as they are."""
    if hasattr(layer, _MASK):
        raise ValueError(f"A {type(layer).__name__} has an attribute {_MASK!r} already. Mask another layer.")
    layer.add_module(_MASK, mask)
    layer.register_forward_hook(_act)


def detach(layer: nn.Module) -> None:
    """Undo `attach`."""
    delattr(layer, _MASK)
    for key in [key for key, hook in layer._forward_hooks.items() if hook is _act]:
        del layer._forward_hooks[key]


def _act(layer: Any, inputs: object, output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(f"A mask acts on one tensor; {type(layer).__name__} gives a {type(output).__name__}.")
    masked: Tensor = layer.mask(output)
    return masked


def _form_of(site: Site) -> tuple[Form, list[Slice]]:
    """Say what becomes of a place in one member, and along which slices it is smaller."""
    before, after = site.before.why_fixed is None, site.after.why_fixed is None and site.keeps_zero
    form: Form = "trimmed" if before and after else "expanded" if before else "selected" if after else "masked"
    return form, site.before.slices * before + site.after.slices * after


def _entries(kept: Tensor, block: int) -> Tensor:
    """Return where channels of so many entries each lie."""
    return kept if block == 1 else (kept[:, None] * block + torch.arange(block, device=kept.device)).flatten()


class Trimmer:
    """Makes members that have only the channels they keep; all have the same shapes, so one module serves them all."""

    def __init__(self, net: nn.Module, sites: Sequence[Site]) -> None:
        self.sites = {site.name: site for site in sites}
        self.layers: list[MaskedLayer] = []
        # The parts of a tensor that belong to a member: along each slice, the channels of one place.
        self.cuts: dict[str, list[tuple[Slice, str]]] = {}
        # One member without values: tensors that are in the memo already are not copied but taken from there.
        one = copy.deepcopy(net, {id(t): as_held(t.detach().to("meta"), t) for t in tensors_of(net).values()})
        for site in sites:
            layer = one.get_submodule(site.name)
            mask = layer.get_submodule(_MASK)
            assert isinstance(mask, ChannelMask)
            ones = mask.kept.shape[1]
            detach(layer)
            form, pieces = _form_of(site)
            if form != "trimmed":
                attach(layer, _MemberMask(form, mask.kept[0], site.width, site.axis))
            for piece in pieces:
                resize(one, piece, methodcaller("narrow", piece.axis, 0, ones * piece.block))
                self.cuts.setdefault(piece.tensor, []).append((piece, site.name))
            why = None if site.keeps_zero else "what follows makes something else of a channel of zeros"
            self.layers.append(MaskedLayer(site.name, site.width, ones, form, site.why_fixed or why))
        self.net = plain_dropout(one)
        # Listed once: walking a network takes longer than gathering what a small one needs.
        self.names = list(tensors_of(self.net))
        self.kept_names = {f"{name}.{_MASK}.kept": name for name in self.sites}

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


def resize(net: nn.Module, piece: Slice, change: Callable[[Tensor], Tensor]) -> None:
    """Change the tensor of a slice, and have its layer say the new size."""
    layer, _, name = piece.tensor.rpartition(".")
    module = net.get_submodule(layer)
    tensor = getattr(module, name)
    new = change(tensor.detach())
    setattr(module, name, as_held(new, tensor))
    says = width_name(module)[0] or "num_parameters"
    setattr(module, says.replace("out_", "in_") if piece.axis else says, new.shape[piece.axis])


def grow(net: nn.Module, site: Site, kept: Tensor, width: int, seed: int) -> None:
    """Widen a place to `width` channels; the channels that were there become those in `kept`.

    New entries are drawn, with replacement, from the entries of the tensor that is widened: they follow the law that the
    network was initialised with, for the number of channels that one member has.
    """
    with seeded(seed):
        for piece in (*site.before.slices, *site.after.slices):
            resize(net, piece, partial(_widened, piece=piece, kept=kept, width=width))


def _widened(old: Tensor, piece: Slice, kept: Tensor, width: int) -> Tensor:
    kept = _entries(kept.to(old.device), piece.block)
    size = width * piece.block
    entries, spare = old.flatten(), size - old.shape[piece.axis]
    shape = (*old.shape[: piece.axis], spare, *old.shape[piece.axis + 1 :])
    drawn = entries[torch.randint(len(entries), shape, device=old.device)]
    fresh = torch.ones(size, dtype=torch.bool, device=old.device).index_fill(0, kept, False).nonzero()[:, 0]
    both = torch.cat([old, drawn], piece.axis)
    return both.index_select(piece.axis, torch.cat([kept, fresh]).argsort())
