"""Masksembles: masks in any network, members that are really smaller, both ways to train, and what is refused."""

import copy
import logging
import time

import pytest
import torch
import torch.nn.functional as F
from mask_cases import NETS, Peeking, made
from torch import nn
from training_helpers import norm_net, weights, x, y

import dissensus as ds
from dissensus import architectures
from dissensus import objectives as obj
from dissensus.members.masksembles import ChannelMask
from dissensus.recipes import Recipe, load_run


@pytest.mark.parametrize("name", NETS)
class TestEveryNetwork:
    def test_members_on_their_own_give_the_ensembles_outputs(self, name):
        _, ens, inputs = made(name)
        outputs = ens.eval()(inputs)
        assert outputs.shape == (3, 5, outputs.shape[-1])
        for index in range(3):
            torch.testing.assert_close(ens.member(index)(inputs), outputs[index], rtol=1e-4, atol=1e-5)

    def test_rows_of_one_batch_give_what_members_run_apart_give(self, name):
        _, tiled, inputs = made(name, execution="tiled")
        _, apart, _ = made(name, execution="apart")
        torch.testing.assert_close(tiled.eval()(inputs), apart.eval()(inputs), rtol=1e-4, atol=1e-5)

    def test_outputs_are_those_of_the_network_with_channels_set_to_zero(self, name):
        net, ens, inputs = made(name)
        outputs = ens.eval()(inputs)
        net.eval()
        for index in range(3):
            handles = [
                net.get_submodule(layer.name).register_forward_hook(zeroing(ens, layer.name, index))
                for layer in ens.masked_layers
            ]
            torch.testing.assert_close(net(inputs), outputs[index], rtol=1e-4, atol=1e-5)
            for handle in handles:
                handle.remove()

    def test_members_differ(self, name):
        outputs = made(name)[1].eval()(made(name)[2])
        assert (outputs[0] - outputs[1]).abs().max() > 1e-3

    def test_at_scale_one_all_members_are_the_network(self, name):
        net, ens, inputs = made(name, scale=1.0)
        expected = net.eval()(inputs)
        torch.testing.assert_close(ens.eval()(inputs), expected.expand(3, *expected.shape), rtol=1e-4, atol=1e-5)

    def test_a_grown_network_has_the_given_one_as_its_first_member(self, name):
        net, _, inputs = made(name)
        _, ens, _ = made(name, grow=True)
        torch.testing.assert_close(ens.eval()(inputs)[0], net.eval()(inputs), rtol=1e-4, atol=1e-5)
        for layer in ens.masked_layers:
            assert layer.width == round(ds.masks.expected_width(layer.ones, 2.0, 3))

    def test_a_member_of_a_grown_network_is_as_large_as_the_given_one(self, name):
        net, _, inputs = made(name)
        _, ens, _ = made(name, grow=True)
        assert {layer.form for layer in ens.masked_layers} == {"trimmed"}
        shapes = {n: p.shape for n, p in net.named_parameters()}
        assert {n: p.shape for n, p in ens.member(1).named_parameters()} == shapes
        torch.testing.assert_close(ens.eval().member(2)(inputs), ens(inputs)[2], rtol=1e-4, atol=1e-5)

    def test_picked_members_and_inputs_of_their_own_give_the_right_rows(self, name):
        _, ens, inputs = made(name)
        outputs = ens.eval()(inputs)
        torch.testing.assert_close(ens.pick([2, 0])(inputs), outputs[[2, 0]], rtol=1e-4, atol=1e-5)
        own = torch.stack([inputs, inputs.flip(0), inputs])
        torch.testing.assert_close(ens.each(own)[1], outputs[1].flip(0), rtol=1e-4, atol=1e-5)

    def test_the_given_network_is_left_as_it_was(self, name):
        net, ens, _ = made(name, scale=3.0)
        assert not any(isinstance(module, ChannelMask) for module in net.modules())
        with torch.no_grad():
            for parameter in ens.parameters():
                parameter.zero_()
        assert any(parameter.abs().max() > 0 for parameter in net.parameters())


def zeroing(ens, name, index):
    keep = ens.masks(name)[index]
    axis = ens.net.get_submodule(name).mask.axis

    def hook(module, inputs, output):
        shape = [1] * output.ndim
        shape[axis] = -1
        return torch.where(keep.reshape(shape), output, 0.0)

    return hook


def layers_of(ens):
    return {layer.name: layer.form for layer in ens.masked_layers}


def test_by_rule_masks_are_on_no_stem_no_output_and_no_summand():
    names = set(layers_of(ds.Masksembles(architectures.resnet18(width=8), 4, 2.0)))
    assert not any(name.startswith("stem") for name in names)
    assert {f"stage{stage}.{block}.residual.2" for stage in (1, 2, 3, 4) for block in (0, 1)} <= names
    # The first block's output goes into the next block's sum as well as into its convolution.
    assert "stage1.0.activation" not in names
    assert layers_of(
        ds.Masksembles(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU()), 4, 2.0)
    ) == {"1": "trimmed"}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("stage1.0.residual.2", {"stage1.0.residual.2"}),
        (["stage1.0.residual.2", "stage2.0.activation"], {"stage1.0.residual.2", "stage2.0.activation"}),
        ("stage4.*.residual.2", {"stage4.0.residual.2", "stage4.1.residual.2"}),
        (nn.AdaptiveAvgPool2d, {"pool"}),
        (lambda name, module: name.startswith("stage3") and isinstance(module, nn.Conv2d), None),
        ("flatten", {"flatten"}),
        ("stem.2", {"stem.2"}),
    ],
)
def test_layers_are_chosen_by_name_pattern_type_or_rule(layers, expected):
    ens = ds.Masksembles(architectures.resnet18(width=8), 4, 2.0, layers=layers).eval()
    inputs = torch.randn(3, 3, 8, 8)
    if expected is not None:
        assert set(layers_of(ens)) == expected
    torch.testing.assert_close(ens.member(3)(inputs), ens(inputs)[3], rtol=1e-4, atol=1e-5)


def test_a_type_does_not_put_masks_on_the_stem():
    names = set(layers_of(ds.Masksembles(architectures.resnet18(width=8), 4, 2.0, layers=nn.ReLU)))
    assert "stem.2" not in names
    assert "stage1.0.activation" in names


def test_a_member_says_where_it_keeps_a_mask_and_why(caplog):
    ens = ds.Masksembles(architectures.resnet18(width=8), 4, 2.0, layers=["stage1.0.activation", "stage1.0.residual.2"])
    kept, trimmed = ens.masked_layers
    assert (kept.form, trimmed.form) == ("masked", "trimmed")
    assert "sum" in kept.reason
    assert trimmed.reason is None
    with caplog.at_level(logging.INFO, "dissensus"):
        ens.member(0)
    assert "keeps the mask of stage1.0.activation" in caplog.text


def test_before_layer_norm_only_what_comes_before_is_smaller():
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))
    ens = ds.Masksembles(net, 3, 2.0)
    (layer,) = ens.masked_layers
    assert layer.form == "expanded"
    assert "LayerNorm" in layer.reason
    assert ens.member(0)[0].out_features == layer.ones < 16


def test_an_axis_that_is_given_is_where_channels_are_looked_for():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    same = ds.Masksembles(net, 2, 2.0, axis=-1)
    assert same.masked_layers[0].form == "trimmed"
    positions = ds.Masksembles(net, 2, 2.0, axis=1).eval()
    assert positions.masked_layers[0].form == "masked"
    assert positions(torch.randn(2, 8, 6)).shape == (2, 2, 8, 3)
    with pytest.raises(ValueError, match="8 features on axis 1"):
        positions(torch.randn(2, 5, 6))


def test_masks_are_in_the_state_dict_and_a_fresh_ensemble_takes_them_over():
    ens, other = (ds.Masksembles(norm_net(), 3, 2.0, seed=seed).eval() for seed in (0, 1))
    assert ens.state_dict()["net.2.mask.values"].shape == (3, 8)
    assert not torch.equal(ens.masks("2"), other.masks("2"))
    other.load_state_dict(ens.state_dict())
    assert torch.equal(other(x), ens(x))
    torch.testing.assert_close(other.member(1)(x), ens.member(1)(x))
    assert torch.equal(copy.deepcopy(ens)(x), ens(x))


def test_masks_depend_on_the_seed_and_differ_between_layers():
    net = architectures.mlp(4, [32, 32], 3)
    ens, same = (ds.Masksembles(net, 4, 2.0, seed=5) for _ in range(2))
    assert torch.equal(ens.masks("1"), same.masks("1"))
    assert not torch.equal(ens.masks("1"), ens.masks("3"))


def test_moving_to_another_dtype_moves_everything():
    ens = ds.Masksembles(norm_net(), 3, 2.0).eval()
    single = ens(x)
    torch.testing.assert_close(ens.double()(x.double()).float(), single, rtol=1e-4, atol=1e-5)
    assert ens.member(0)[0].weight.dtype == torch.float64


@pytest.mark.parametrize("batch", [2, 3, 7, 12, 100])
def test_in_training_each_example_meets_one_member_and_shares_differ_by_at_most_one(batch):
    ens = ds.Masksembles(norm_net(), 3, 2.0)
    counts = torch.zeros(3, dtype=torch.long)
    for _ in range(30):
        assert ens(x[:batch]).shape == (1, batch, 3)
        here = torch.bincount(ens.net[2].mask.rows, minlength=3)
        assert here.max() - here.min() <= 1
        counts += here
    assert counts.min() > 0  # the turn changes, so that small batches reach all members


def test_a_split_training_pass_gives_each_row_its_members_output():
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    ens = ds.Masksembles(net, 3, 2.0)
    rows = ens(x)[0]
    owners = ens.net[1].mask.rows
    expected = ens.eval()(x)
    torch.testing.assert_close(rows, expected[owners, torch.arange(len(x))])


def test_whole_batches_show_every_member_everything():
    ens = ds.Masksembles(norm_net(), 3, 2.0, batches="whole")
    assert ens(x).shape == (3, 100, 3)
    twin = ds.Masksembles(norm_net(), 3, 2.0)
    assert twin(x).shape == (1, 100, 3)


@pytest.mark.parametrize("batches", ["split", "whole"])
def test_a_step_is_that_of_the_plain_network_at_scale_one(batches):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    ens = ds.Masksembles(net, 3, 1.0, batches=batches)
    plain = copy.deepcopy(net)
    ds.fit(ens, (x, y), epochs=1, batch_size=100, optimizer="sgd", lr=0.1)
    loss = F.cross_entropy(plain(x), y)
    loss.backward()
    for name, parameter in plain.named_parameters():
        expected = parameter - 0.1 * parameter.grad
        torch.testing.assert_close(ens.get_parameter(f"net.{name}"), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", [obj.Independent(), obj.Joint(0.5)], ids=["independent", "joint"])
def test_engines_give_the_same_curve(objective):
    curves = []
    for engine in ("eager", "captured"):
        torch.manual_seed(0)
        ens = ds.Masksembles(
            nn.Sequential(*norm_net(), nn.ReLU(), nn.Dropout(0.1), nn.Linear(3, 3)), 3, 2.0, layers="2"
        )
        run = ds.fit(ens, (x, y), objective=objective, epochs=4, batch_size=32, lr=0.01, engine=engine)
        assert run.engine == engine
        curves.append(torch.tensor(run.history.by_epoch("loss")))
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-4, atol=1e-5)


def test_an_interrupted_run_ends_in_the_same_weights(tmp_path):
    class Stop(Exception):
        pass

    def stop(run):
        if run.epoch == 2:
            raise Stop

    def fresh():
        torch.manual_seed(0)
        return ds.Masksembles(norm_net(), 3, 2.0)

    settings = {"epochs": 4, "batch_size": 32, "engine": "eager"}
    whole = fresh()
    ds.fit(whole, (x, y), **settings)
    with pytest.raises(Stop):
        ds.fit(fresh(), (x, y), checkpoint_dir=tmp_path, callback=stop, **settings)
    resumed = fresh()
    ds.fit(resumed, (x, y), checkpoint_dir=tmp_path, resume=True, **settings)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_a_trimmed_member_is_faster_than_the_masked_network():
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    ens = ds.Masksembles(net, 4, 4.0).eval()
    member, inputs = ens.member(0), torch.randn(256, 64)
    assert sum(p.numel() for p in member.parameters()) < 0.25 * sum(p.numel() for p in net.parameters())

    def seconds(module):
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            module(inputs)
            best = min(best, time.process_time() - start)
        return best

    with torch.no_grad():
        assert seconds(member) < seconds(net)


def test_predictions_follow_weights_that_change_between_and_during_evaluations():
    _, ens, inputs = made("resnet18")
    ens.eval()
    before, stored = ds.predict(ens, inputs), ens(inputs)
    torch.testing.assert_close(before, stored)
    with torch.no_grad():
        for parameter in ens.parameters():
            parameter.data.mul_(1.5)
    after = ens(inputs)
    assert (after - stored).abs().max() > 1e-3
    torch.testing.assert_close(ds.predict(ens, inputs), after)
    for index in range(3):
        torch.testing.assert_close(ens.member(index)(inputs), after[index], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "ensemble",
    [
        {"kind": "masksembles", "scale": 3.0, "grow": True},
        {"kind": "masksembles", "layers": ["0"]},
        {"kind": "mc_dropout", "p": 0.2, "masks": "input"},
        {"kind": "batch_ensemble", "batches": "split"},
    ],
    ids=lambda table: table["kind"],
)
def test_recipes_name_the_kinds_and_runs_can_be_loaded(tmp_path, ensemble):
    tables = {
        "data": {"path": "digits", "test": 0.3},
        "model": {"name": "mlp", "hidden": [12]},
        "ensemble": {"members": 3, **ensemble},
        "training": {"epochs": 1},
    }
    if ensemble.get("layers"):
        tables["ensemble"]["layers"] = ["1.1"]  # behind Flatten, the activation of the MLP
    recipe = Recipe.from_tables(tables)
    trained = recipe.train(tmp_path).members
    loaded = load_run(tmp_path).ensemble
    inputs = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(ds.predict(loaded, inputs), ds.predict(trained, inputs))


def test_random_operations_of_a_network_follow_the_seed():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = norm_net()

        def forward(self, x):
            return self.body(x + torch.randn_like(x)) if self.training else self.body(x)

    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        ens = ds.Masksembles(Noisy(), 3, 2.0)
        state = torch.get_rng_state()
        ds.fit(ens, (x, y), epochs=1, batch_size=50)
        assert torch.equal(torch.get_rng_state(), state)
        ends.append(ds.predict(ens, x))
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ds.Masksembles(nn.Linear(4, 3), 4), "no activation to mask.*Candidates: none"),
        (
            lambda: ds.Masksembles(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)), 4),
            "stem.*'1' \\(8 channels\\)",
        ),
        (lambda: ds.Masksembles(norm_net(), 4, layers="7"), "no layer '7'.*Candidates: '2' \\(8 channels\\)"),
        (lambda: ds.Masksembles(norm_net(), 4, layers=nn.Tanh), "names no layer to mask.*Candidates: '2'"),
        (lambda: ds.Masksembles(norm_net(), 4, layers=lambda name, module: False), "names no layer to mask"),
        (lambda: ds.Masksembles(norm_net(), 3, 50.0), "'2' \\(8 channels\\) has too few channels.*scale"),
        (lambda: ds.Masksembles(norm_net(), 4, 0.5), "`scale` must be at least 1"),
        (lambda: ds.Masksembles(norm_net(), 4, batches="half"), "'split' or 'whole'"),
        (lambda: ds.Masksembles(norm_net(), 4, execution="fast"), "'tiled'"),
        (lambda: ds.Masksembles(norm_net, 4), "must be an nn.Module"),
        (lambda: ds.Masksembles(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2)), 4), "no shape yet"),
        (lambda: ds.Masksembles(norm_net(), 0), "`num_members` must be a whole number of at least 1"),
        (lambda: ds.Masksembles(Peeking(), 4, layers="body.3", grow=True), "cannot be widened.*Candidates: 'body.1'"),
        (
            lambda: ds.Masksembles(architectures.resnet18(width=8), 4, layers="stage1.0.activation", grow=True),
            "cannot be widened.*sum",
        ),
        (lambda: ds.Masksembles(norm_net(), 4, grow=True, axis=1), "`axis`"),
        (lambda: ds.Masksembles(norm_net(), 4).soup(), "share their weights"),
        (lambda: ds.Masksembles(norm_net(), 4).member(4), "members 0 to 3"),
        (lambda: ds.Masksembles(norm_net(), 4).masks("1"), "these layers do: 2"),
        (lambda: ds.Masksembles(norm_net(), 4).keep_members([0]), "share their parameters"),
        (lambda: ds.fit(ds.Masksembles(norm_net(), 4), (x, y), clip_norm=1.0), "share their parameters"),
        (lambda: ds.Masksembles(norm_net(), 4).net(x), "belongs to an ensemble"),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()
