"""Member kinds: architectures become modules that return `(members, batch, ...)`."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dissensus.members.anchored import Anchored, AnchoredNet, MaskedTarget, MaskPer, TemperatureForm, anchor_temperature
from dissensus.members.batch_ensemble import BatchEnsemble
from dissensus.members.deep_ensemble import DeepEnsemble, SingleMember
from dissensus.members.heads import HeadEnsemble
from dissensus.members.lora import LoRAEnsemble
from dissensus.members.masksembles import MaskedLayer, Masksembles
from dissensus.members.mc_dropout import Masks, MCDropout
from dissensus.members.members import Members, View
from dissensus.members.mimo import MIMO
from dissensus.members.packed import PackedEnsemble
from dissensus.members.shared import BatchUse, made
from dissensus.members.trajectories import SWAG, SnapshotEnsemble
from dissensus.nets.cutting import cut
from dissensus.nets.first_layer import Initialise

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

MakeNet = Callable[[], nn.Module]


def _anchored(
    make_member: MakeNet,
    num_members: int,
    seed: int = 0,
    *,
    shape: Any,
    references: int = 256,
    anchors: int = 1,
    mask_probability: float = 0.0,
    mask_per: MaskPer = "batch",
    masked_target: MaskedTarget = "label",
    temperature: TemperatureForm | None = None,
    initialise: Initialise = "fresh",
) -> Anchored:
    """Make anchored networks with room for references, which training fills with training inputs."""
    return Anchored(
        make_member,
        torch.zeros(references, *shape),
        anchors,
        seed,
        num_nets=num_members,
        mask_probability=mask_probability,
        mask_per=mask_per,
        masked_target=masked_target,
        temperature=temperature,
        initialise=initialise,
    )


def _masksembles(
    make_member: MakeNet,
    num_members: int,
    seed: int = 0,
    *,
    scale: float = 2.0,
    layers: Sequence[str] = (),
    grow: bool = False,
    batches: BatchUse = "split",
) -> Masksembles:
    """Make one network with masks; `layers` names where they act, by rule if none is named."""
    net = made(make_member, 1, seed)
    return Masksembles(net, num_members, scale, layers=layers or "auto", seed=seed, grow=grow, batches=batches)


def _mc_dropout(
    make_member: MakeNet, num_members: int, seed: int = 0, *, p: float | None = None, masks: Masks = "member"
) -> MCDropout:
    """Make one network whose dropout stays on."""
    return MCDropout(made(make_member, 1, seed), num_members, seed, p, masks=masks)


KINDS: Mapping[str, Callable[..., Members]] = MappingProxyType(
    {
        "deep": DeepEnsemble,
        "anchored": _anchored,
        "masksembles": _masksembles,
        "mc_dropout": _mc_dropout,
        "batch_ensemble": BatchEnsemble,
        "packed": PackedEnsemble,
        "snapshots": SnapshotEnsemble,
        "swag": SWAG,
        "mimo": MIMO,
    }
)
"""Kinds of ensembles by name: called with a factory of networks, their number, `seed=` and settings."""
