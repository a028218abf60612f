"""The table of kinds that recipes can name: each makes an ensemble from a factory of networks."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dissensus.members.anchored import Anchored, MaskedTarget, MaskPer, TemperatureForm
from dissensus.members.batch_ensemble import BatchEnsemble
from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.masksembles import Masksembles
from dissensus.members.mc_dropout import Masks, MCDropout
from dissensus.members.members import Members
from dissensus.members.mimo import MIMO
from dissensus.members.packed import PackedEnsemble
from dissensus.members.shared import BatchUse, made
from dissensus.members.trajectories import SWAG, SnapshotEnsemble
from dissensus.nets.first_layer import Initialise

MakeNet = Callable[[], nn.Module]


def anchored(
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


def masksembles(
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


def mc_dropout(
    make_member: MakeNet, num_members: int, seed: int = 0, *, p: float | None = None, masks: Masks = "member"
) -> MCDropout:
    """Make one network whose dropout stays on."""
    return MCDropout(made(make_member, 1, seed), num_members, seed, p, masks=masks)


KINDS: Mapping[str, Callable[..., Members]] = MappingProxyType(
    {
        "deep": DeepEnsemble,
        "anchored": anchored,
        "masksembles": masksembles,
        "mc_dropout": mc_dropout,
        "batch_ensemble": BatchEnsemble,
        "packed": PackedEnsemble,
        "snapshots": SnapshotEnsemble,
        "swag": SWAG,
        "mimo": MIMO,
    }
)
"""Kinds of ensembles by name: called with a factory of networks, their number, `seed=` and settings."""
