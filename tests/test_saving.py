"""Ensembles written to a folder and read again: the same outputs, whatever the kind, and no code from a file."""

import json
import sys
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from test_trees import Two
from torch import nn

import dissensus as ds
from dissensus.architectures import mlp

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.drop(self.first(x).relu()))


def importable():
    return Plain()


def of_layers():
    rest = nn.Sequential(nn.LeakyReLU(0.3), nn.Dropout(0.2), nn.Linear(8, 3, bias=False))
    return nn.Sequential(
        OrderedDict(first=nn.Linear(4, 8), norm=nn.BatchNorm1d(8, eps=1e-3), act=nn.GELU("tanh"), rest=rest)
    )


def of_convolutions():
    pool = nn.AdaptiveAvgPool1d(2), nn.Flatten()
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 6, 3, padding="same"), nn.PReLU(6), *pool, nn.Linear(12, 3)
    )


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
    "layers of torch": lambda: ds.DeepEnsemble(lambda: of_layers(), 3),
    "layers by a function": lambda: ds.DeepEnsemble(of_convolutions, 2),
    "layers handed over": lambda: ds.DeepEnsemble.from_members([of_layers(), of_convolutions()]),
    "layers with masks": lambda: ds.Masksembles(of_layers(), 3, scale=1.5),
    "layers with dropout": lambda: ds.MCDropout(of_layers(), 3),
    "layers below heads": lambda: ds.HeadEnsemble(of_layers(), lambda: nn.Sequential(nn.Linear(3, 3)), 2),
    "layers with anchors": lambda: ds.Anchored(of_layers(), X.clone(), 2),
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
    "anchored by an array": lambda: ds.Anchored(mlp(4, [8], 3), X.double().numpy(), 3),
    "anchored ensemble": lambda: ds.Anchored(ds.DeepEnsemble(lambda: mlp(4, [8], 3), 2), X.clone(), 2),
    "low rank": lambda: ds.LoRAEnsemble(mlp(4, [8], 3), 3, rank=2, own="2"),
    "mimo": lambda: ds.MIMO(lambda: mlp(4, [8], 3), 2),
    "swag": lambda: ds.SWAG(lambda: mlp(4, [8], 3), 2),
    "masks by type": lambda: ds.Masksembles(mlp(4, [16], 3), 3, layers=nn.ReLU),
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


def test_layers_that_are_more_than_their_settings_are_given_again(tmp_path):
    def twice():
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 3))

    def hooked():
        net = of_layers()
        net[0].register_forward_hook(lambda *given: None)
        return net

    def half_frozen():
        net = of_layers()
        net[0].requires_grad_(False)
        return net

    def patched():
        net = of_layers()
        net.forward = lambda x: net[0](x)[:, :3]
        return net

    for make in (twice, hooked, half_frozen, patched):
        ens = ds.DeepEnsemble(make, 2)
        ds.save(ens, tmp_path / make.__name__)
        with pytest.raises(ValueError, match="which a file cannot hold"):
            ds.load(tmp_path / make.__name__)
        assert torch.equal(ds.predict(ds.load(tmp_path / make.__name__, make), X), ds.predict(ens, X))


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


def rewritten(folder, change):
    """Let `change` loose on the configuration in a folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


COMMAND = "dissensus._files:os.system"


@pytest.mark.parametrize(
    "change",
    {
        "call": lambda c, run: c["arguments"].update(make_member={"call": COMMAND, "arguments": run}),
        "name": lambda c, run: c["arguments"].update(make_member={"name": COMMAND}),
        "partial": lambda c, run: c["arguments"].update(make_member={"partial": {"name": COMMAND}, "arguments": run}),
        "inside an argument": lambda c, run: c["arguments"]["make_member"]["function"]["arguments"].update(
            hidden=[{"call": COMMAND, "arguments": run}]
        ),
        "kind": lambda c, run: c.update(kind=COMMAND, arguments=run),
        "kind that is allowed as a layer": lambda c, run: c.update(kind="torch.nn.modules.linear:Linear"),
        "kind that is a function": lambda c, run: c.update(kind="dissensus.architectures:mlp"),
        "constructor": lambda c, run: c.update(classmethod="register_forward_hook"),
        "function of this package": lambda c, run: c["arguments"].update(
            make_member={"call": "dissensus._files:replace_file", "arguments": {"path": run["command"][6:], "data": ""}}
        ),
        "another package inside a known module": lambda c, run: c["arguments"].update(
            make_member={"name": "torch.nn.modules.module:torch.hub.load"}
        ),
        "imported into a known module": lambda c, run: c["arguments"].update(
            make_member={"partial": {"name": "dissensus.architectures:partial"}, "arguments": {}}
        ),
        "method of a layer": lambda c, run: c["arguments"].update(
            make_member={"name": "torch.nn.modules.linear:Linear.forward"}
        ),
        "private function": lambda c, run: c["arguments"].update(
            make_member={"name": "dissensus.architectures:_conv3x3"}
        ),
        "nothing there": lambda c, run: c["arguments"].update(make_member={"name": "dissensus.architectures:no_such"}),
    }.values(),
)
def test_no_name_in_a_folder_runs_what_is_no_network(change, tmp_path):
    folder, trace = tmp_path / "folder", tmp_path / "trace"
    ds.save(ds.DeepEnsemble(lambda: mlp(4, [8], 3), 2), folder)
    rewritten(folder, lambda config: change(config, {"command": f"touch {trace}"}))
    with pytest.raises(ValueError, match=r"allow=|no kind of ensemble|is not there"):
        ds.load(folder)
    assert not trace.exists()


def test_what_is_allowed_by_name_must_have_that_name_itself(tmp_path):
    ds.save(ds.DeepEnsemble(importable, 2), tmp_path)
    alias = f"{importable.__module__}:json.loads"
    rewritten(tmp_path, lambda config: config["arguments"].update(make_member={"name": alias}))
    with pytest.raises(ValueError, match="made with"):
        ds.load(tmp_path, allow=[alias])


class OwnKind(ds.DeepEnsemble):
    """A kind of a user's own."""


def test_a_kind_of_ones_own_is_made_where_it_is_allowed(tmp_path):
    ens = OwnKind(lambda: mlp(4, [8], 3), 2)
    ds.save(ens, tmp_path)
    with pytest.raises(ValueError, match="allow="):
        ds.load(tmp_path)
    again = ds.load(tmp_path, allow=[f"{OwnKind.__module__}:OwnKind"])
    assert type(again) is OwnKind
    assert torch.equal(ds.predict(again, X), ds.predict(ens, X))


def test_a_kind_of_a_script_is_made_where_it_is_allowed(tmp_path, monkeypatch):
    kind = type("Kind", (ds.DeepEnsemble,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Kind", kind, raising=False)
    ens = kind(lambda: mlp(4, [8], 3), 2)
    ds.save(ens, tmp_path)
    with pytest.raises(ValueError, match=r"allow=\['__main__:Kind'\]"):
        ds.load(tmp_path)
    assert torch.equal(ds.load(tmp_path, allow=["__main__:Kind"])(X), ens(X))


def with_own(name):
    net = mlp(4, [8], 3)
    net[1] = type(name, (nn.Module,), {"forward": lambda self, x: x.relu()})()
    return net


def test_layers_of_other_packages_may_be_renamed_but_not_become_torchs(tmp_path):
    ens = ds.DeepEnsemble(lambda: with_own("Old"), 2)
    ds.save(ens, tmp_path)
    assert torch.equal(ds.load(tmp_path, lambda: with_own("New"))(X), ens(X))
    with pytest.raises(ValueError, match=r"'net\.1' was a layer of your own and is ReLU"):
        ds.load(tmp_path, lambda: mlp(4, [8], 3))


def changed():
    net = mlp(4, [8], 3, norm=True)
    net[2] = nn.Tanh()
    return net


def with_other_eps():
    net = mlp(4, [8], 3, norm=True)
    net[1].eps = 0.5
    return net


@pytest.mark.parametrize(
    ("make", "factory", "words"),
    [
        (lambda: ds.DeepEnsemble(lambda: changed(), 2), changed, "'net.2' was Tanh and is ReLU"),
        (lambda: ds.DeepEnsemble(lambda: with_other_eps(), 2), with_other_eps, "eps of 'net.1' was 0.5 and is 1e-05"),
        (
            lambda: ds.DeepEnsemble.from_members([mlp(4, [8], 3, norm=True), changed()]),
            [lambda: mlp(4, [8], 3, norm=True), changed],
            r"'\[1\].2' was Tanh and is ReLU",
        ),
        (lambda: ds.BatchEnsemble(lambda: changed(), 2), changed, "was Tanh and is ReLU"),
        (lambda: ds.HeadEnsemble(changed(), (3, 3), 2), changed, "'backbone.2' was Tanh"),
        (lambda: ds.Anchored(lambda: changed(), X.clone(), 2), changed, "'inner.net.2' was Tanh"),
    ],
)
def test_a_network_that_was_changed_after_it_was_made_is_not_made_as_it_was(make, factory, words, tmp_path):
    ens = make().eval()
    ds.save(ens, tmp_path)
    with pytest.raises(ValueError, match=f"{words}.*make_member="):
        ds.load(tmp_path)
    assert torch.equal(ds.load(tmp_path, factory)(X), ens(X))


def test_a_member_that_differs_from_those_that_were_saved_is_refused(tmp_path):
    ens = ds.DeepEnsemble.from_members([mlp(4, [8], 3, norm=True), mlp(4, [8], 3, norm=True)])
    ds.save(ens, tmp_path)
    with pytest.raises(ValueError, match=r"'\[1\]\.2' was ReLU and is Tanh"):
        ds.load(tmp_path, [lambda: mlp(4, [8], 3, norm=True), changed])


def test_a_folder_of_before_has_no_structure_and_is_read(tmp_path):
    ens = ds.DeepEnsemble(lambda: mlp(4, [8], 3), 2)
    ds.save(ens, tmp_path)
    rewritten(tmp_path, lambda config: config.pop("structure"))
    assert torch.equal(ds.load(tmp_path)(X), ens(X))


class Own(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: ds.Anchored([Own(), Own()], X.clone(), 2), {"make_member": Own}),
        (lambda: ds.Anchored([Own(), Own(9)], X.clone(), 2), {"make_member": [Own, lambda: Own(9)]}),
        (lambda: ds.Anchored(ds.DeepEnsemble(lambda: Own(), 2), X.clone(), 2), {"make_member": Own}),
        (lambda: ds.Anchored(lambda: Own(), X.clone(), 2, num_nets=2), {"make_member": Own}),
        (lambda: ds.DeepEnsemble.from_members([Own(), Own(9)]), {"make_member": [Own, lambda: Own(9)]}),
        (
            lambda: ds.HeadEnsemble(mlp(4, [8], 5), (5, 3), 2, features=lambda z: z.relu()),
            {"features": lambda z: z.relu()},
        ),
        (
            lambda: ds.Masksembles(mlp(4, [16], 3), 3, layers=lambda name, module: isinstance(module, nn.ReLU)),
            {"layers": lambda name, module: isinstance(module, nn.ReLU)},
        ),
    ],
)
def test_what_has_no_name_is_given_again_by_the_argument_that_the_sentence_names(make, given, tmp_path):
    ens = make().eval()
    ds.save(ens, tmp_path)
    (name,) = given
    with pytest.raises(ValueError, match=rf"which a file cannot hold. Give it again: ds.load\(folder, {name}="):
        ds.load(tmp_path)
    assert torch.equal(ds.load(tmp_path, **given)(X), ens(X))


def test_a_factory_that_a_file_can_name_is_replaced_by_one_that_is_given(tmp_path):
    ens = ds.Anchored(importable, X.clone(), 2, num_nets=2).eval()
    ds.save(ens, tmp_path)
    assert torch.equal(ds.load(tmp_path, importable)(X), ens(X))


def test_arguments_that_were_never_given_are_not_given_again(tmp_path):
    ds.save(ds.DeepEnsemble(lambda: mlp(4, [8], 3), 2), tmp_path)
    with pytest.raises(ValueError, match=r"`features` was not given .* there are num_members"):
        ds.load(tmp_path, features=0)


def test_references_of_an_array_are_kept_as_they_are_read(tmp_path):
    references = np.random.default_rng(0).normal(size=(6, 4))
    ens = ds.Anchored(mlp(4, [8], 3), references, 3).eval()
    ds.save(ens, tmp_path)
    torch.testing.assert_close(ds.load(tmp_path).references, torch.as_tensor(references).float())


def test_an_ensemble_in_place_of_one_network_is_told():
    ens = ds.DeepEnsemble(lambda: mlp(4, [8], 3, dropout=0.1), 2)
    for make in (
        lambda: ds.Masksembles(ens, 2),
        lambda: ds.MCDropout(ens, 2),
        lambda: ds.BatchEnsemble(lambda: ens, 2),
    ):
        with pytest.raises(ValueError, match="must be one network; got a DeepEnsemble"):
            make()


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
