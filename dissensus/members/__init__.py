"""Member kinds: architectures become modules that return `(members, batch, ...)`."""

from dissensus.members.anchored import Anchored, AnchoredNet, anchor_temperature
from dissensus.members.batch_ensemble import BatchEnsemble
from dissensus.members.deep_ensemble import DeepEnsemble, SingleMember
from dissensus.members.heads import HeadEnsemble
from dissensus.members.lora import LoRAEnsemble
from dissensus.members.masksembles import MaskedLayer, Masksembles
from dissensus.members.mc_dropout import MCDropout
from dissensus.members.members import Members, View
from dissensus.members.mimo import MIMO
from dissensus.members.packed import PackedEnsemble
from dissensus.members.trajectories import SWAG, SnapshotEnsemble
from dissensus.nets.cutting import cut

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
