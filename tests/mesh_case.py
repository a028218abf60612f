"""What each process of a torchrun does in the tests of meshes: trains, and the first one writes what came out."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dissensus as ds
from dissensus import objectives as obj

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()

OBJECTIVES = {
    "independent": obj.Independent,
    "joint": lambda: obj.Joint(0.5),
    "joint, dropped": lambda: obj.Joint(0.5, member_dropout=0.4),
    "loss-guided": lambda: obj.LossGuided(0.5, active=4),
    "loss-guided, two": lambda: obj.LossGuided(0.5, active=2),
}


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def train(objective, mesh, **settings):
    """Train four members for 24 steps of AdamW."""
    ens = ds.DeepEnsemble(net, settings.pop("members", 4), seed=0)
    given = {"epochs": 6, "batch_size": 12, "lr": 1e-2, "engine": "eager", "device": "cpu"} | settings
    run = ds.fit(
        ens, (x, y), objective=OBJECTIVES[objective](), mesh=mesh, validation=(x[:20], y[:20]), **given
    )
    return ens, run


def main():
    """Run the cases that were asked for."""
    torch.set_num_threads(1)
    cases, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    found = {}
    for name, objective, mesh, settings in cases:
        if dist.get_world_size() != mesh[0] * mesh[1]:
            continue
        try:
            ens, run = train(objective, tuple(mesh), **settings)
            found[name] = {
                "outputs": ds.predict(ens, x).tolist(),
                "loss": run.history["loss"],
                "ensemble_loss": run.history["ensemble_loss"],
            }
        except ValueError as refusal:
            found[name] = {"refused": str(refusal)}
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, found[name])
        found[name]["alike"] = all(one == everybody[0] for one in everybody)
    if os.environ["RANK"] == "0":
        output.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
