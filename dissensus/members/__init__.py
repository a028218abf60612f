"""Member kinds: architectures become modules that return `(members, batch, ...)`."""

from dissensus.members.anchored import Anchored, AnchoredNet, anchor_temperature
from dissensus.members.batch_ensemble import BatchEnsemble
from dissensus.members.cutting import cut
from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.heads import HeadEnsemble
from dissensus.members.masksembles import MaskedLayer, Masksembles
from dissensus.members.mc_dropout import MCDropout
from dissensus.members.members import Members, View
from dissensus.members.single import SingleMember

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
