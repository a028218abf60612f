"""Member kinds: architectures become modules that return `(members, batch, ...)`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dissensus.members.deep_ensemble import DeepEnsemble, SingleMember
from dissensus.members.heads import HeadEnsemble
from dissensus.members.members import Members, View

if TYPE_CHECKING:
    from dissensus.members.anchored import Anchored, AnchoredNet, anchor_temperature
    from dissensus.members.batch_ensemble import BatchEnsemble
    from dissensus.members.lora import LoRAEnsemble
    from dissensus.members.masksembles import MaskedLayer, Masksembles
    from dissensus.members.mc_dropout import MCDropout
    from dissensus.members.mimo import MIMO
    from dissensus.members.packed import PackedEnsemble
    from dissensus.members.trajectories import SWAG, SnapshotEnsemble
    from dissensus.nets.cutting import cut

# Loaded when first used: each takes a network apart in its own way, and most runs use one kind.
_LATER = {
    "members.anchored": ("Anchored", "AnchoredNet", "anchor_temperature"),
    "members.batch_ensemble": ("BatchEnsemble",),
    "members.lora": ("LoRAEnsemble",),
    "members.masksembles": ("MaskedLayer", "Masksembles"),
    "members.mc_dropout": ("MCDropout",),
    "members.mimo": ("MIMO",),
    "members.packed": ("PackedEnsemble",),
    "members.trajectories": ("SWAG", "SnapshotEnsemble"),
    "nets.cutting": ("cut",),
}

__all__ = [
    "MIMO",
    "SWAG",
    "Anchored",
    "AnchoredNet",
    "BatchEnsemble",
    "DeepEnsemble",
    "HeadEnsemble",
    "LoRAEnsemble",
    "MCDropout",
    "MaskedLayer",
    "Masksembles",
    "Members",
    "PackedEnsemble",
    "SingleMember",
    "SnapshotEnsemble",
    "View",
    "anchor_temperature",
    "cut",
]


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"dissensus.{module}"), name)
    raise AttributeError(f"module 'dissensus.members' has no attribute {name!r}")
