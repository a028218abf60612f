"""The table of kinds: what recipes can name, and what the contract of `dissensus.testing` is held against."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.members.anchored import Anchored, MaskedTarget, MaskPer, TemperatureForm
from dissensus.members.batch_ensemble import BatchEnsemble
from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.heads import HeadEnsemble
from dissensus.members.lora import LoRAEnsemble
from dissensus.members.masksembles import Masksembles
from dissensus.members.mc_dropout import Masks, MCDropout
from dissensus.members.members import Members
from dissensus.members.mimo import MIMO
from dissensus.members.packed import PackedEnsemble
from dissensus.members.shared import BatchUse, made
from dissensus.members.trajectories import SWAG, SnapshotEnsemble
from dissensus.nets.first_layer import Initialise

MakeNet = Callable[[], nn.Module]
Case = Callable[[MakeNet, Tensor], Members]


@dataclass(frozen=True)
class Kind:
    """One kind of ensemble.

    Attributes:
        build: Makes one from a factory of networks, their number, a seed and settings, as recipes do; None where they cannot.
        cases: Small ones to test, by what is special about them: three members from a factory of networks and some inputs.
    """

    build: Callable[..., Members] | None
    cases: Mapping[str, Case]


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


def packed(
    make_member: MakeNet, num_members: int, seed: int = 0, *, alpha: float = 2.0, gamma: int = 1
) -> PackedEnsemble:
    """Make thin members that are packed into grouped layers."""
    return PackedEnsemble(make_member, num_members, alpha, gamma, seed)


def heads(make_member: MakeNet, num_members: int, seed: int = 0) -> HeadEnsemble:
    """Make heads of two layers in place of the last layer of a network, which must be a sequence that ends in a linear layer."""
    net = made(make_member, 1, seed)
    assert isinstance(net, nn.Sequential)
    last = net[-1]
    assert isinstance(last, nn.Linear)
    return HeadEnsemble(net[:-1], (last.in_features, last.out_features), num_members, seed)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "deep": Kind(
            DeepEnsemble,
            {
                "vectorised": lambda make_net, x: DeepEnsemble(make_net, 3, execution="vectorised"),
                "loop": lambda make_net, x: DeepEnsemble(make_net, 3, execution="loop"),
                "different architectures": lambda make_net, x: DeepEnsemble.from_members(
                    [made(make_net, 1, 0), nn.Sequential(made(make_net, 1, 1)), made(make_net, 1, 2)]
                ),
            },
        ),
        "anchored": Kind(
            anchored,
            {
                "one network": lambda make_net, x: Anchored(make_net, x, 3, mask_probability=0.2),
                "networks": lambda make_net, x: Anchored(
                    make_net, x, 2, num_nets=3, mask_probability=0.2, mask_per="example"
                ),
            },
        ),
        "masksembles": Kind(
            masksembles,
            {
                "split batches": lambda make_net, x: masksembles(make_net, 3),
                "grown, whole batches": lambda make_net, x: masksembles(
                    make_net, 3, scale=3.0, grow=True, batches="whole"
                ),
            },
        ),
        "mc_dropout": Kind(mc_dropout, {"p": lambda make_net, x: mc_dropout(make_net, 3, p=0.2)}),
        "batch_ensemble": Kind(BatchEnsemble, {"whole batches": lambda make_net, x: BatchEnsemble(make_net, 3)}),
        "packed": Kind(
            packed,
            {
                "plain": lambda make_net, x: PackedEnsemble(make_net, 3),
                "subgroups": lambda make_net, x: PackedEnsemble(make_net, 3, 3.0, 2),
            },
        ),
        "snapshots": Kind(SnapshotEnsemble, {"two cycles": lambda make_net, x: SnapshotEnsemble(make_net, 2)}),
        "swag": Kind(
            SWAG,
            {
                "all epochs": lambda make_net, x: SWAG(make_net, 3, start=0.0),
                "diagonal": lambda make_net, x: SWAG(make_net, 3, start=0.0, rank=0),
            },
        ),
        "mimo": Kind(
            MIMO,
            {
                "plain": lambda make_net, x: MIMO(make_net, 3),
                "repetition": lambda make_net, x: MIMO(make_net, 3, repetition=0.5),
            },
        ),
        "lora": Kind(
            None,
            {
                "all layers": lambda make_net, x: LoRAEnsemble(made(make_net, 1, 0), 3, 2, 2.0),
                "an own head": lambda make_net, x: LoRAEnsemble(made(make_net, 1, 0), 3, 2, own="*"),
            },
        ),
        "heads": Kind(None, {"two layers": lambda make_net, x: heads(make_net, 3)}),
    }
)
"""Kinds of ensembles by name; a kind that is listed is covered by the contract tests."""
