"""Places for masks in a network: how many channels there are, what makes and takes them, which tensors hold them, and the choice."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch import fx, nn

from dissensus.architectures import _FlattenTo
from dissensus.nets.graphs import (
    ZERO_KEEPING_NAMES,
    Traced,
    averages_positions,
    channel_parameters,
    channelwise,
    combines,
    flattens,
    function_name,
    is_activation,
    keeps_zero,
    mixing_layer,
    only_input,
    reads_shape,
    trace,
    width_of,
)


@dataclass(frozen=True)
class Slice:
    """An axis of a tensor along which the channels lie, each `block` entries long."""

    tensor: str
    axis: int
    block: int = 1


@dataclass
class Side:
    """What lies before or after a mask, up to the layers that mix channels.

    Attributes:
        slices: Tensors that hold the channels.
        flattens: Layers that check the size of flattened channels.
        why_fixed: Why channels cannot be taken out on this side; None if they can.
    """

    slices: list[Slice] = field(default_factory=list)
    flattens: list[str] = field(default_factory=list)
    why_fixed: str | None = None

    def fix(self, why: str) -> None:
        """Note the first reason."""
        self.why_fixed = self.why_fixed or why


@dataclass(frozen=True)
class Site:
    """A place for a mask.

    Attributes:
        name: Module after which the mask acts.
        width: Channels there.
        axis: Their axis.
        before: What makes them.
        after: What takes them.
        source: Linear layer or convolution that makes them, if it was found.
        keeps_zero: Whether a dropped channel is still zero where it is taken.
        combined: Whether it is added to or multiplied with another tensor.
        leaves: Whether it reaches the network's output.
    """

    name: str
    width: int
    axis: int
    before: Side
    after: Side
    source: str | None
    keeps_zero: bool
    combined: bool
    leaves: bool

    @property
    def can_grow(self) -> bool:
        """Whether the channels can be made more."""
        return self.before.why_fixed is None and self.after.why_fixed is None

    @property
    def why_fixed(self) -> str | None:
        """Why they cannot."""
        return self.before.why_fixed or self.after.why_fixed

    def __str__(self) -> str:
        return f"{self.name!r} ({self.width} channels)"


def find_site(part: Traced, node: fx.Node, tied: Set[str]) -> Site | None:
    """Return the place after a module's only call; None where its width cannot be told.

    Args:
        part: The operations.
        node: The call.
        tied: Names of parameters that several layers share.
    """
    before, source, (width, axis), pooled = _walk_back(part, node, tied)
    linear = source is not None and isinstance(part.module(source), nn.Linear)
    if pooled and linear:
        before.fix("it is pooled along its features")
    spatial = width is not None and axis == 1 and not linear and not _is_flat(part, node)
    walk = _Forward(part, tied, width, spatial)
    walk.go(node)
    if walk.width is None:
        return None
    return Site(
        part.name(node),
        walk.width,
        axis,
        before,
        walk.side,
        None if source is None else part.name(source),
        walk.keeps_zero,
        walk.combined,
        walk.leaves and part.whole,
    )


def _walk_back(
    part: Traced, node: fx.Node, tied: Set[str]
) -> tuple[Side, fx.Node | None, tuple[int | None, int], bool]:
    """Follow the channels to the layer that makes them: tensors, the layer, width (None if nobody says it) and axis, and whether pooled."""
    side, pooled = Side(), False
    known: tuple[int | None, int] = (None, 1)
    while True:
        module = part.module(node)
        here = width_of(module)
        if here is not None and here[0] != (known[0] or here[0]):
            side.fix("its features are on another axis than the layer before says")
        if known[0] is None and here is not None:
            known = here
        if mixing_layer(module):
            _add_slices(side, part, node, tied, ["weight", "bias"], 0)
            return side, node, known, pooled
        if (previous := _back_through(side, part, node)) is None:
            return side, None, known, pooled
        _add_slices(side, part, node, tied, channel_parameters(module), 0)
        pooled |= not channelwise(part, node, spatial=False)
        node = previous


def _back_through(side: Side, part: Traced, node: fx.Node) -> fx.Node | None:
    """Return where the channels that a node passes on come from, None where that cannot be told; note what keeps them from being cut."""
    if combines(node):
        side.fix("it is fed by a sum or product of tensors")
    elif not channelwise(part, node, spatial=True) and not averages_positions(node):
        flat = flattens(part, node)
        side.fix("it is masked after flattening" if flat else f"it is fed by {describe(part, node)}")
        return None
    previous = only_input(node)
    if previous is None:
        side.fix("its input could not be followed")
    elif len(_takers(previous)) > 1:
        side.fix("its input is used elsewhere too")
    return previous


def _add_slices(
    side: Side, part: Traced, node: fx.Node, tied: Set[str], names: Sequence[str], axis: int, block: int = 1
) -> None:
    """Note the tensors of a module that hold the channels."""
    module = part.module(node)
    if module is None or not names:
        return
    if not part.called_once(node):
        side.fix(f"{part.name(node)!r} is used more than once")
    for name in names:
        full = f"{part.name(node)}.{name}"
        if full in tied:
            side.fix(f"{full!r} is shared with another layer")
        if getattr(module, name) is not None:
            side.slices.append(Slice(full, axis, block))


class _Forward:
    """Follows channels to all layers that take them."""

    def __init__(self, part: Traced, tied: Set[str], width: int | None, spatial: bool) -> None:
        self.part, self.tied, self.width, self.spatial = part, tied, width, spatial
        self.side = Side()
        self.keeps_zero, self.combined, self.leaves = True, False, False

    def go(self, node: fx.Node, spatial: bool | None = None) -> None:
        """Look at everything that uses a node's channels."""
        spatial = self.spatial if spatial is None else spatial
        for user in _takers(node):
            self._see(user, spatial)

    def _see(self, user: fx.Node, spatial: bool) -> None:
        part, module = self.part, self.part.module(user)
        if mixing_layer(module) and isinstance(module, nn.Linear) != spatial:
            self._take(user, ["weight"], 1)
        elif channelwise(part, user, spatial):
            self._take(user, channel_parameters(module), 0)
            self.keeps_zero = self.keeps_zero and keeps_zero(part, user)
            self.go(user, spatial)
        elif spatial and (flattens(part, user) or averages_positions(user)):
            if isinstance(module, _FlattenTo):
                self.side.flattens.append(part.name(user))
            self.go(user, spatial=False)
        else:
            self._end_at(user)

    def _end_at(self, user: fx.Node) -> None:
        """Note what takes the channels and cannot do with fewer."""
        if user.op == "output":
            self.leaves = True
            self.side.fix("it reaches the output")
        elif combines(user):
            self.combined = True
            self.side.fix("it meets a sum or product of tensors")
        else:
            self.side.fix(f"it feeds {describe(self.part, user)}")

    def _take(self, user: fx.Node, names: Sequence[str], axis: int) -> None:
        """Note the tensors of a layer that hold the channels along an axis."""
        if not names:
            return
        size = int(getattr(self.part.module(user), names[0]).shape[axis])
        self.width = self.width or size
        if size % self.width:
            self.side.fix(f"{self.part.name(user)!r} takes {size} features, not a multiple of {self.width}")
            return
        _add_slices(self.side, self.part, user, self.tied, names, axis, size // self.width)


def masked_node(part: Traced, node: fx.Node) -> fx.Node | None:
    """Return the module call after which a mask has the effect of one after `node`."""
    if node.op == "call_module" and part.called_once(node):
        return node
    # A module that is called several times, or a function: masked before it, if it leaves zeros as they are.
    previous = only_input(node)
    if previous is None or previous.op != "call_module" or not part.called_once(previous):
        return None
    alone = _takers(previous) == [node]
    return previous if alone and keeps_zero(part, node) and channelwise(part, node, spatial=True) else None


def _takers(node: fx.Node) -> list[fx.Node]:
    """Return the operations that use a node's values, not its shape alone."""
    return [user for user in node.users if not reads_shape(user)]


def past_norms(part: Traced, node: fx.Node) -> fx.Node:
    """Return the last of the BatchNorm layers that take a node's channels, or the node itself.

    Masked before them, a dropped channel would take part in their statistics, and would not be zero after them.
    """
    users = _takers(node)
    module = part.module(users[0]) if len(users) == 1 else None
    return past_norms(part, users[0]) if isinstance(module, nn.modules.batchnorm._BatchNorm) else node


def _is_flat(part: Traced, node: fx.Node) -> bool:
    """Whether a node's channels were flattened or averaged to vectors since the last convolution."""
    current: fx.Node | None = node
    while current is not None and not mixing_layer(part.module(current)):
        if flattens(part, current) or averages_positions(current):
            return True
        current = only_input(current) if channelwise(part, current, spatial=True) else None
    return False


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
        self.parts = trace(net)
        counts = Counter(id(p) for _, p in net.named_parameters(remove_duplicate=False))
        self.tied = {n for n, p in net.named_parameters(remove_duplicate=False) if counts[id(p)] > 1}
        self.stem = self._stem()
        found = (
            self.site_at(part, past_norms(part, node))
            for part in self.parts
            for node in part.graph.nodes
            if is_activation(part, node)
        )
        self.candidates = self._unique([*found, *self._in_transformers()])

    def _stem(self) -> str | None:
        """Name of the first layer if it is a convolution."""
        for part in self.parts:
            for node in part.graph.nodes:
                module = part.module(node)
                if isinstance(module, nn.modules.conv._ConvNd):
                    return part.name(node)
                if isinstance(module, nn.Linear | nn.Embedding):
                    return None
        return None

    def _in_transformers(self) -> list[Site]:
        """Places inside torch's own transformer layers, which tracing does not look into."""
        return [
            Site(
                f"{name}.linear1",
                module.linear1.out_features,
                -1,
                Side([Slice(f"{name}.linear1.{n}", 0) for n in ("weight", "bias") if _has(module.linear1, n)]),
                Side([Slice(f"{name}.linear2.weight", 1)]),
                f"{name}.linear1",
                keeps_zero=getattr(module.activation, "__name__", "") in ZERO_KEEPING_NAMES,
                combined=False,
                leaves=False,
            )
            for name, module in self.net.named_modules()
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        ]

    @staticmethod
    def _unique(sites: Iterable[Site | None]) -> list[Site]:
        found: dict[str, Site] = {}
        for site in sites:
            if site is not None:
                found.setdefault(site.name, site)
        return list(found.values())

    def site_at(self, part: Traced, node: fx.Node) -> Site | None:
        """Return the place after an operation, or None if no module there can be masked."""
        place = masked_node(part, node)
        return None if place is None else find_site(part, place, self.tied)

    def choose(self, layers: Layers) -> list[Site]:
        """Return the places that were asked for."""
        if isinstance(layers, str):
            return self._by_rule() if layers == "auto" else self._by_name(layers)
        asked = f"layers={layers!r}"
        if isinstance(layers, type):
            layers = (layers,)
        if callable(layers):
            return self._by_test(layers, "the rule `layers`")
        kinds = tuple(kind for kind in layers if isinstance(kind, type))
        if kinds and len(kinds) == len(layers):
            return self._by_test(lambda name, module: isinstance(module, kinds), asked)
        return [site for pattern in layers for site in self._by_name(str(pattern))]

    def _by_rule(self) -> list[Site]:
        sites = [s for s in self.candidates if not (s.leaves or s.combined or self.is_stem(s))]
        if not sites:
            raise ValueError(
                "There is no activation to mask: masks are not put on the stem, on outputs, or where channels are added to "
                f"others, unless `layers` names them. Candidates: {self.listed()}."
            )
        return sites

    def _by_test(self, test: Rule, what: str) -> list[Site]:
        sites = [
            site
            for name, module in self.net.named_modules()
            if name and test(name, module)
            for site in self._sites_of(name)
            if not self.is_stem(site)
        ]
        if not sites:
            raise ValueError(f"{what} finds no layer to mask. Candidates: {self.listed()}.")
        return self._unique(sites)

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
        return self._unique(sites)

    def _sites_of(self, name: str) -> list[Site]:
        """Return the places after a module: after its calls, or after the module itself where nothing was traced."""
        calls = [(part, node) for part in self.parts for node in part.graph.nodes if part.name(node) == name]
        if calls:
            found = [self.site_at(part, node) for part, node in calls if node.op == "call_module"]
            return self._unique(found)
        inside = [site for site in self.candidates if site.name == name]
        known = width_of(self.net.get_submodule(name))
        if inside or known is None:
            return inside
        unknown = Side(why_fixed="the network around it could not be traced")
        return [Site(name, *known, unknown, unknown, None, keeps_zero=False, combined=False, leaves=False)]

    def is_stem(self, site: Site) -> bool:
        """Whether a place is fed by the network's first convolution."""
        return self.stem is not None and self.stem in (site.source, site.name)

    def listed(self) -> str:
        """Return the candidates for a message."""
        if self.candidates:
            return listed([str(site) for site in self.candidates])
        widths = {name: width_of(module) for name, module in self.net.named_modules() if name}
        return listed([f"{name!r} ({known[0]} channels)" for name, known in widths.items() if known is not None])


def _has(module: nn.Module, name: str) -> bool:
    return getattr(module, name) is not None


def listed(names: Sequence[str], most: int = 12) -> str:
    """Return names for a message, the first of many."""
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "") if names else "none"
