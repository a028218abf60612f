"""Small ensembles of every kind: three members from a factory of networks and some inputs, by what is special about them."""

from torch import nn

import dissensus as ds
from dissensus.members import KINDS as NAMED
from dissensus.members.shared import made


def net_of(make_net, seed=0):
    return made(make_net, 1, seed)


def heads(make_net):
    """Heads of two layers in place of the last, linear layer of a sequence."""
    net = net_of(make_net)
    return ds.HeadEnsemble(net[:-1], (net[-1].in_features, net[-1].out_features), 3)


KINDS = {
    "deep": {
        "vectorised": lambda make_net, x: ds.DeepEnsemble(make_net, 3, execution="vectorised"),
        "loop": lambda make_net, x: ds.DeepEnsemble(make_net, 3, execution="loop"),
        "different architectures": lambda make_net, x: ds.DeepEnsemble.from_members(
            [net_of(make_net), nn.Sequential(net_of(make_net, 1)), net_of(make_net, 2)]
        ),
    },
    "anchored": {
        "one network": lambda make_net, x: ds.Anchored(make_net, x, 3, mask_probability=0.2),
        "networks": lambda make_net, x: ds.Anchored(
            make_net, x, 2, num_nets=3, mask_probability=0.2, mask_per="example"
        ),
    },
    "masksembles": {
        "split batches": lambda make_net, x: NAMED["masksembles"](make_net, 3),
        "grown, whole batches": lambda make_net, x: NAMED["masksembles"](
            make_net, 3, scale=3.0, grow=True, batches="whole"
        ),
    },
    "mc_dropout": {"p": lambda make_net, x: NAMED["mc_dropout"](make_net, 3, p=0.2)},
    "batch_ensemble": {"whole batches": lambda make_net, x: ds.BatchEnsemble(make_net, 3)},
    "packed": {
        "plain": lambda make_net, x: ds.PackedEnsemble(make_net, 3),
        "subgroups": lambda make_net, x: ds.PackedEnsemble(make_net, 3, 3.0, 2),
    },
    "snapshots": {"two cycles": lambda make_net, x: ds.SnapshotEnsemble(make_net, 2)},
    "swag": {
        "all epochs": lambda make_net, x: ds.SWAG(make_net, 3, start=0.0),
        "diagonal": lambda make_net, x: ds.SWAG(make_net, 3, start=0.0, rank=0),
    },
    "mimo": {
        "plain": lambda make_net, x: ds.MIMO(make_net, 3),
        "repetition": lambda make_net, x: ds.MIMO(make_net, 3, repetition=0.5),
    },
    "lora": {
        "all layers": lambda make_net, x: ds.LoRAEnsemble(net_of(make_net), 3, 2, 2.0),
        "an own head": lambda make_net, x: ds.LoRAEnsemble(net_of(make_net), 3, 2, own="*"),
    },
    "heads": {"two layers": lambda make_net, x: heads(make_net)},
}
