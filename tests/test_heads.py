"""Heads on a frozen backbone: only they learn, and they are what DeepEnsemble would make of the features."""

import copy

import numpy as np
import pytest
import torch
from backbone_cases import small_backbone
from torch import nn
from training_helpers import PickSome, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.architectures import mlp


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def ensemble(members: int = 3, make=head) -> ds.HeadEnsemble:
    return ds.HeadEnsemble(small_backbone(), make, members, seed=4)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(before: dict[str, torch.Tensor], module: nn.Module) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


class TestOutputs:
    def test_are_the_heads_on_the_backbones_features(self):
        ens = ensemble().eval()
        features = ens.backbone(x)
        assert ens(x).shape == (3, 100, 3)
        for j in range(3):
            torch.testing.assert_close(ens(x)[j], ens.heads.member(j).eval()(features))
        torch.testing.assert_close(ens.features(x), features)

    def test_each_member_on_inputs_of_its_own(self):
        ens = ensemble().eval()
        own = torch.stack([x[:10], x[10:20], x[20:30]])
        wanted = torch.stack([ens(own[j])[j] for j in range(3)])
        torch.testing.assert_close(ens.each(own), wanted)

    def test_picked_members_are_those_rows(self):
        ens = ensemble(5).eval()
        torch.testing.assert_close(ens.pick([4, 1])(x), ens(x)[[4, 1]])

    def test_members_differ_and_do_not_depend_on_their_number(self):
        few, many = ensemble(2).eval()(x), ensemble(6).eval()(x)
        torch.testing.assert_close(many[:2], few)
        assert (many[0] - many[1]).abs().max() > 0.01

    def test_the_heads_start_as_those_of_a_deep_ensemble(self):
        plain = ds.DeepEnsemble(head, 3, seed=4)
        assert same(state(plain), ensemble().heads)

    def test_a_pair_makes_heads_of_two_layers(self):
        ens = ensemble(make=(6, 3))
        layers = [module for module in ens.member(0)[1] if isinstance(module, nn.Linear)]
        assert [tuple(layer.weight.shape) for layer in layers] == [(6, 6), (3, 6)]

    def test_a_pair_may_be_of_numpys_numbers(self):
        given, plain = ensemble(make=(np.int64(6), np.int32(3))), ensemble(make=(6, 3))
        assert torch.equal(given.eval()(x), plain.eval()(x))

    def test_features_take_the_precision_of_the_heads(self):
        ens = ds.HeadEnsemble(small_backbone().double(), lambda: nn.Linear(6, 3), 2)
        assert ens(x.double()).dtype == torch.float32


class TestFrozen:
    def test_the_backbone_asks_for_no_gradients_and_never_trains(self):
        ens = ensemble()
        assert ens.train().training
        assert ens.heads.training
        assert not any(module.training for module in ens.backbone.modules())
        assert not any(p.requires_grad for p in ens.backbone.parameters())
        with ens.view().evaluating():
            ens(x)
        assert not any(module.training for module in ens.backbone.modules())

    @pytest.mark.parametrize("engine", ["eager", "captured"])
    @pytest.mark.parametrize("batches", ["own", "shared"])
    def test_training_changes_the_heads_alone(self, engine, batches):
        ens = ensemble()
        backbone, heads = state(ens.backbone), state(ens.heads)
        ds.fit(ens, (x, y), epochs=2, batch_size=25, engine=engine, batches=batches, device="cpu")
        assert same(backbone, ens.backbone)
        assert not same(heads, ens.heads)

    @pytest.mark.parametrize("engine", ["eager", "captured"])
    def test_training_on_inputs_is_training_a_deep_ensemble_on_features(self, engine):
        whole, plain = ensemble(), ds.DeepEnsemble(head, 3, seed=4)
        features = small_backbone().eval()(x).detach()
        run = ds.fit(whole, (x, y), epochs=3, batch_size=25, lr=0.01, engine=engine, device="cpu")
        ds.fit(plain, (features, y), epochs=3, batch_size=25, lr=0.01, batches="shared", engine=engine, device="cpu")
        assert run.members is whole
        torch.testing.assert_close(ds.predict(whole, x), ds.predict(plain, features), rtol=1e-4, atol=1e-5)

    def test_gradients_of_inputs_go_through_the_backbone(self):
        ens = ensemble().eval()
        own = torch.stack([x[:5]] * 3)
        _, gradient = ens.view().input_gradient(lambda inputs: ens.each(inputs)[..., 0], own)
        inputs = x[:5].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(ens.member(2).eval()(inputs)[:, 0].sum(), inputs)
        torch.testing.assert_close(gradient[2], wanted)

    @pytest.mark.parametrize("engine", ["eager", "captured"])
    def test_heads_that_a_step_did_not_pick_stay_bit_for_bit(self, engine):
        ens = ensemble(6)
        before = state(ens)
        objective = PickSome(count=2)
        ds.fit(ens, (x, y), objective=objective, epochs=1, batch_size=100, engine=engine, device="cpu", seed=1)
        now = ens.state_dict()
        moved = {
            name: (now[name] != before[name]).flatten(1).any(1)
            for name in before
            if name.startswith("heads.") and before[name].is_floating_point()
        }
        picked = next(iter(moved.values()))
        assert picked.sum() == 2
        for name, rows in moved.items():
            assert torch.equal(rows, picked), name

    def test_checkpoints_hold_no_backbone_and_resume_to_the_same_heads(self, tmp_path):
        from safetensors.torch import load_file

        ens, twin = ensemble(), ensemble()
        settings = dict(epochs=4, batch_size=25, device="cpu", engine="eager")
        ds.fit(ens, (x, y), **settings)

        def stop(run):
            if run.epoch == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ds.fit(twin, (x, y), checkpoint_dir=tmp_path, callback=stop, **settings)
        (file, *_) = tmp_path.glob("last-*.safetensors")
        sizes = {name: tensor.numel() for name, tensor in load_file(file).items()}
        assert not any("backbone.0" in name for name in sizes)
        other = ensemble()
        with torch.no_grad():
            other.backbone[0].weight.add_(1e-3)
        with pytest.raises(ValueError, match="another architecture: backbone is"):
            ds.fit(other, (x, y), checkpoint_dir=tmp_path, resume=True, **settings)
        again = ensemble()
        ds.fit(again, (x, y), checkpoint_dir=tmp_path, resume=True, **settings)
        assert same(state(ens.heads), again.heads)


class TestMembers:
    def test_a_member_is_a_backbone_and_a_head_of_its_own(self):
        ens = ensemble().eval()
        net = ens.member(1)
        wanted = ens(x)[1]
        assert isinstance(net, nn.Sequential)
        torch.testing.assert_close(net(x), wanted)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        torch.testing.assert_close(ens(x)[1], wanted)

    def test_a_soup_averages_heads(self):
        ens = ensemble(4, lambda: nn.Linear(6, 3)).eval()
        torch.testing.assert_close(ens.soup().eval()(x), ens(x).mean(0))

    def test_fewer_members_go_on(self):
        ens = ensemble(4).eval()
        wanted = ens(x)[[3, 1]]
        ens.keep_members([3, 1])
        assert ens.num_members == ens.num_trained == 2
        assert ens.member_ids == (3, 1)
        torch.testing.assert_close(ens(x), wanted)

    def test_heads_of_different_architectures(self):
        kinds = iter([lambda: nn.Linear(6, 3), lambda: mlp(6, [4], 3)])
        ens = ensemble(2, lambda: next(kinds)())
        before = state(ens.backbone)
        ds.fit(ens, (x, y), epochs=1, batch_size=50, device="cpu")
        assert same(before, ens.backbone)
        assert ens.execution_reason == "members have different architectures"

    def test_copies_are_independent(self):
        ens = ensemble().eval()
        twin = copy.deepcopy(ens)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1.0)
        assert (twin(x) - ens(x)).abs().max() > 0.1
        assert twin.backbone_digest() != ens.backbone_digest()


class TestRefused:
    @pytest.mark.parametrize(
        ("backbone", "make", "match"),
        [
            (torch.relu, (6, 3), "must be an nn.Module"),
            (ds.DeepEnsemble(lambda: nn.Linear(4, 6), 2), (6, 3), "one network; got a DeepEnsemble"),
            (nn.Linear(4, 6), nn.Linear(6, 3), "function that makes a head"),
            (nn.Linear(4, 6), (6, 0), "whole number of at least 1 in each of its places, .features, outputs.; got 0"),
            (nn.Linear(4, 6), 3, "a function or a list or tuple of 2, each a whole number; got 3"),
        ],
    )
    def test_what_is_no_backbone_or_head(self, backbone, make, match):
        with pytest.raises(ValueError, match=match):
            ds.HeadEnsemble(backbone, make, 2)

    def test_a_backbone_of_several_outputs(self):
        class Two(nn.Module):
            def forward(self, x):
                return x, x

        with pytest.raises(ValueError, match="one tensor to score; got tuple"):
            ds.HeadEnsemble(Two(), (4, 3), 2)(x)


def test_an_objective_that_compares_members_trains_heads():
    ens = ensemble(4)
    run = ds.fit(
        ens, (x, y), objective=obj.Joint(0.5), epochs=8, batch_size=25, lr=0.02, validation=(x, y), device="cpu"
    )
    losses = run.history.by_epoch("ensemble_loss")
    assert losses[-1] < losses[0]
