"""All places for masks in a network, and the choice among them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import fx, nn

from dissensus.members.shared import listed
from dissensus.members.sites import Side, Site, Slice, find_site, masked_node, past_norms
from dissensus.members.tracing import ZERO_KEEPING_NAMES, Traced, is_activation, trace, width_of

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
                Side(
                    [Slice(f"{name}.linear1.{n}", 0) for n in ("weight", "bias") if _has(module.linear1, n)]
                ),
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
        if isinstance(layers, str) and layers == "auto":
            return self._by_rule()
        if isinstance(layers, str):
            layers = [layers]
        if isinstance(layers, type) or (
            isinstance(layers, tuple) and all(isinstance(t, type) for t in layers)
        ):
            kinds = layers
            return self._by_test(lambda name, module: isinstance(module, kinds), f"layers={layers!r}")
        if callable(layers):
            return self._by_test(layers, "the rule `layers`")
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
        found = [
            site
            for part in self.parts
            for node in part.graph.nodes
            if node.op == "call_module" and part.name(node) == name
            if (site := self.site_at(part, node)) is not None
        ]
        if found or any(name in map(part.name, part.graph.nodes) for part in self.parts):
            return found
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
        return listed(
            [f"{name!r} ({known[0]} channels)" for name, known in widths.items() if known is not None]
        )


def _has(module: nn.Module, name: str) -> bool:
    return getattr(module, name) is not None
