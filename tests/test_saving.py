"""Ensembles written to a folder and read again: the same outputs, whatever the kind, and no code from a file."""

import json
from functools import partial

import pytest
import torch
from test_trees import Two
from torch import nn

import dissensus as ds
from dissensus.architectures import mlp

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def importable():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.relu(self.b(torch.relu(self.a(x)))))


KNOWN = {
    "deep": lambda: ds.DeepEnsemble(lambda: mlp(4, [8], 3, activation=nn.GELU, dropout=0.1, norm=True), 3, seed=5),
    "partial": lambda: ds.DeepEnsemble(partial(mlp, 4, [8], outputs=3), 2),
    "one layer": lambda: ds.DeepEnsemble(partial(nn.Linear, 4, 3), 2),
    "from members": lambda: ds.DeepEnsemble.from_members([mlp(4, [8], 3), mlp(4, [8], 3)]),
    "different members": lambda: ds.DeepEnsemble.from_members([mlp(4, [8], 3), mlp(4, [9, 5], 3)]),
    "masksembles": lambda: ds.Masksembles(mlp(4, [16, 16], 3), 3, scale=1.5, seed=2),
    "mc_dropout": lambda: ds.MCDropout(mlp(4, [8], 3, dropout=0.3), 4, seed=3),
    "batch_ensemble": lambda: ds.BatchEnsemble(lambda: mlp(4, [8], 3), 3, seed=1),
    "packed": lambda: ds.PackedEnsemble(lambda: mlp(4, [8], 3), 2, alpha=2.0),
    "heads": lambda: ds.HeadEnsemble(mlp(4, [8], 5), (5, 3), 3),
    "heads of functions": lambda: ds.HeadEnsemble(mlp(4, [8], 5), lambda: mlp(5, [4], 3), 3),
    "anchored": lambda: ds.Anchored(mlp(4, [8], 3), X.clone(), 3),
    "anchored networks": lambda: ds.Anchored(lambda: mlp(4, [8], 3), X.clone(), 2, num_nets=2),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_what_we_know_is_made_again(kind, tmp_path):
    ens = KNOWN[kind]()
    y = torch.arange(6) % 3
    ds.fit(ens, (X, y), epochs=1, batch_size=6, device="cpu", engine="eager")
    wanted = ds.predict(ens, X)
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    ds.save(ens, tmp_path)
    again = ds.load(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert type(again) is type(ens)
    assert again.training == ens.training
    assert torch.equal(ds.predict(again, X), wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    # It trains on as the first one does.
    for each in (ens, again):
        ds.fit(each, (X, y), epochs=1, batch_size=6, device="cpu", engine="eager")
    torch.testing.assert_close(ds.predict(again, X), ds.predict(ens, X))


def test_networks_of_your_own_are_made_by_a_factory(tmp_path):
    x = torch.randn(6, 3), torch.randn(6, 5)
    cases = {
        "deep": (ds.DeepEnsemble(lambda: Two(), 3, output="logits"), x, {}),
        "net": (ds.MCDropout(Two(), 3), x, {}),
        "heads": (
            ds.HeadEnsemble(Two(), lambda: nn.Linear(8, 3), 2, features="hidden"),
            x,
            {"make_head": lambda: nn.Linear(8, 3)},
        ),
    }
    for name, (ens, inputs, options) in cases.items():
        ds.save(ens, tmp_path / name)
        with pytest.raises(ValueError, match="which a file cannot hold"):
            ds.load(tmp_path / name)
        again = ds.load(tmp_path / name, make_member=Two, **options)
        assert torch.equal(ds.predict(again, inputs), ds.predict(ens, inputs))
    tied = ds.DeepEnsemble(lambda: Tied(), 2)
    ds.save(tied, tmp_path / "tied")
    assert torch.equal(ds.predict(ds.load(tmp_path / "tied", Tied), X), ds.predict(tied, X))


def test_code_of_other_packages_is_not_run_unless_allowed(tmp_path):
    ens = ds.DeepEnsemble(importable, 2)
    ds.save(ens, tmp_path)
    name = f"{importable.__module__}:importable"
    with pytest.raises(ValueError, match=f"made with {name}.*allow="):
        ds.load(tmp_path)
    assert torch.equal(ds.predict(ds.load(tmp_path, allow=[name]), X), ds.predict(ens, X))
    config = json.loads((tmp_path / "config.json").read_text())
    config["arguments"]["make_member"] = {"call": "os:system", "arguments": {"command": "true"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="made with os:system"):
        ds.load(tmp_path)


def test_other_networks_and_damaged_files_are_refused_in_a_sentence(tmp_path):
    ens = ds.DeepEnsemble(lambda: mlp(4, [8], 3), 2)
    ds.save(ens, tmp_path)
    with pytest.raises(ValueError, match="not those of"):
        ds.load(tmp_path, lambda: mlp(4, [9], 3))
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-4])
    with pytest.raises(ValueError, match="truncated or of another ensemble"):
        ds.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        ds.load(tmp_path)
    with pytest.raises(ValueError, match="holds no ensemble"):
        ds.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must be an ensemble"):
        ds.save(nn.Linear(2, 2), tmp_path)


def test_members_that_were_dropped_stay_dropped_and_precision_is_kept(tmp_path):
    ens = ds.DeepEnsemble(lambda: mlp(4, [8], 3, dropout=0.5), 4, seed=9)
    ens.keep_members([1, 3])
    ens.double()
    ds.save(ens, tmp_path)
    again = ds.load(tmp_path)
    assert again.member_ids == (1, 3)
    assert torch.equal(ds.predict(again, X.double()), ds.predict(ens, X.double()))
