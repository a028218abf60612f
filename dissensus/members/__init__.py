"""Member kinds: architectures become modules that return `(members, batch, ...)`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.heads import HeadEnsemble
from dissensus.members.members import Members, View
from dissensus.members.single import SingleMember

if TYPE_CHECKING:
    from dissensus.members.anchored import Anchored
    from dissensus.members.anchored_net import AnchoredNet, anchor_temperature
    from dissensus.members.batch_ensemble import BatchEnsemble
    from dissensus.members.cutting import cut
    from dissensus.members.masksembles import MaskedLayer, Masksembles
    from dissensus.members.mc_dropout import MCDropout

# Loaded when first used: each takes a network apart in its own way, and most runs use one kind.
_LATER = {
    "Anchored": "dissensus.members.anchored",
    "AnchoredNet": "dissensus.members.anchored_net",
    "BatchEnsemble": "dissensus.members.batch_ensemble",
    "MCDropout": "dissensus.members.mc_dropout",
    "MaskedLayer": "dissensus.members.masksembles",
    "Masksembles": "dissensus.members.masksembles",
    "anchor_temperature": "dissensus.members.anchored_net",
    "cut": "dissensus.members.cutting",
}

__all__ = [
    "Anchored",
    "AnchoredNet",
    "BatchEnsemble",
    "DeepEnsemble",
    "HeadEnsemble",
    "MCDropout",
    "MaskedLayer",
    "Masksembles",
    "Members",
    "SingleMember",
    "View",
    "anchor_temperature",
    "cut",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'dissensus.members' has no attribute {name!r}")
