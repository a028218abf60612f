import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dissensus as ds
from dissensus import objectives as obj
from dissensus.members import anchor_temperature
from dissensus.randomness import fold

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
images = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


class Pairs(nn.Module):
    """Gives back what it is shown: its only layer is the identity on every input value."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(size, 2 * size, bias=False)

    def forward(self, pair):
        return self.first(pair)


def seeing(references, **settings) -> ds.Anchored:
    """An anchored net whose outputs are the pairs it is shown."""
    ens = ds.Anchored(Pairs(), references, **settings)
    with torch.no_grad():
        ens.get_parameter("inner.net.first.weight").copy_(torch.eye(8)[None])
    return ens


def ensemble(**settings) -> ds.Anchored:
    return ds.Anchored(net, x, 3, num_nets=2, initialise="fresh", **settings)


class TestPairs:
    def test_reference_and_residual_add_up_to_the_input(self):
        reference, residual = seeing(x[:10])(x).chunk(2, dim=-1)
        torch.testing.assert_close(reference + residual, x[None])

    def test_training_draws_references_with_replacement_anew_each_pass(self):
        ens = seeing(x[:10])
        first, second = (ens(x)[0, :, :4] for _ in range(2))
        exact = "donot_use_mm_for_euclid_dist"  # by products, the distance of equal rows is the root of their rounding
        drawn = [torch.cdist(shown, x[:10], compute_mode=exact).min(1) for shown in (first, second)]
        assert max(d.values.max() for d in drawn) < 1e-6
        assert len(set(drawn[0].indices.tolist())) > 5
        assert (drawn[0].indices != drawn[1].indices).float().mean() > 0.5

    def test_every_reference_is_drawn_equally_often(self):
        ens = seeing(x[:5])
        shown = torch.cat([ens(x)[0, :, :4] for _ in range(100)])
        counts = torch.bincount(torch.cdist(shown, x[:5]).argmin(1), minlength=5)
        # Four standard deviations of a binomial count.
        assert ((counts - 800).abs() < 4 * (4000 * 0.2 * 0.8) ** 0.5).all()

    def test_a_masked_batch_has_a_zero_first_half_and_an_unchanged_second_half(self):
        plain, masked = seeing(x[:10]), seeing(x[:10], mask_probability=1.0)
        (_, residual), (hidden, same) = plain(x).chunk(2, -1), masked(x).chunk(2, -1)
        assert (hidden == 0).all()
        torch.testing.assert_close(same, residual, rtol=0, atol=0)

    def test_without_masking_no_reference_is_hidden(self):
        assert (seeing(x[:10])(x)[..., :4].abs().sum(-1) > 0).all()

    @pytest.mark.parametrize(("per", "mixed"), [("batch", False), ("example", True)])
    def test_masks_are_drawn_by_batch_or_by_example_at_the_given_rate(self, per, mixed):
        ens = seeing(x[:10], mask_probability=0.25, mask_per=per)
        hidden = torch.stack([(ens(x)[0, :, :4] == 0).all(-1) for _ in range(400)])
        assert (hidden.float().mean(1) % 1 > 0).any() == mixed
        assert hidden.float().mean().item() == pytest.approx(0.25, abs=0.09)

    def test_nothing_is_masked_in_evaluation(self):
        ens = seeing(x[:10], mask_probability=1.0).eval()
        torch.testing.assert_close(ens(x)[0, :, :4], x[:1].expand(40, 4))

    def test_a_pair_can_be_given(self):
        ens = seeing(x[:10])
        torch.testing.assert_close(ens.forward_pair(x, 2 * x), torch.cat([x, 2 * x], 1)[None])
        torch.testing.assert_close(ens.forward_pair(x[0], x)[0, :, :4], x[:1].expand(40, 4))


class TestMembers:
    def test_members_are_networks_by_references_network_by_network(self):
        ens = ensemble().eval()
        assert (ens.num_members, ens.num_trained, ens.num_anchors) == (6, 2, 3)
        outputs = ens(x)
        for network in range(2):
            plain = ens.inner.member(network).eval()
            for anchor in range(3):
                pair = torch.cat([x[anchor].expand_as(x), x - x[anchor]], 1)
                torch.testing.assert_close(outputs[3 * network + anchor], plain(pair))

    def test_picked_and_each_agree_with_all(self):
        ens = ensemble().eval()
        outputs = ens(x)
        torch.testing.assert_close(ens.pick([4, 1])(x), outputs[[4, 1]])
        torch.testing.assert_close(ens.pick([4, 1, 5]).pick([2])(x), outputs[[5]])
        torch.testing.assert_close(ens.each(x.expand(6, *x.shape)), outputs)

    def test_references_in_several_passes_give_the_same(self, monkeypatch):
        ens = ensemble().eval()
        whole = ens(x)
        monkeypatch.setattr("dissensus.members.anchored._VALUES_A_PASS", 1)
        torch.testing.assert_close(ens(x), whole)

    def test_training_gives_one_output_a_network(self):
        ens = ensemble()
        assert ens(x).shape == (2, 40, 3)
        assert ens.each(x.expand(2, *x.shape)).shape == (2, 40, 3)

    def test_adding_networks_leaves_earlier_ones_as_they_were(self):
        small, large = (ds.Anchored(net, x, 2, num_nets=count, initialise="fresh") for count in (2, 4))
        torch.testing.assert_close(large(x)[:2], small(x))
        torch.testing.assert_close(large.eval()(x)[:4], small.eval()(x))

    def test_the_soup_averages_networks_and_keeps_the_first_reference(self):
        ens = ensemble().eval()
        weights = [ens.inner.member(j)[0].weight for j in range(2)]
        soup = ens.soup()
        torch.testing.assert_close(soup.net[0].weight, (weights[0] + weights[1]) / 2)
        torch.testing.assert_close(soup.reference, x[0])

    def test_networks_of_different_architectures_are_anchored_each_for_itself(self):
        ens = ds.Anchored([net(), nn.Linear(4, 3)], x, 2).eval()
        assert ens(x).shape == (4, 40, 3)
        torch.testing.assert_close(ens.pick([3])(x), ens(x)[3:])
        run = ds.fit(ens, (x, y), epochs=2, batch_size=20)
        assert len(run.history) == 4

    def test_the_global_generator_is_left_alone(self):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        made = [net()]
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        made = [net()]
        ds.Anchored(made, x, 2, initialise="fresh", mask_probability=0.5)(x)
        assert torch.equal(torch.get_rng_state(), after)


class TestTemperature:
    def test_agreeing_references_still_halve_the_logits(self):
        torch.testing.assert_close(anchor_temperature(torch.ones(3, 5, 4)), torch.full((5,), 2.0))

    def test_it_is_the_mean_deviation_of_sigmoids(self):
        logits = torch.randn(5, 7, 4)
        c = np.std(1 / (1 + np.exp(-logits.numpy().astype(float))), axis=0, ddof=1).mean(-1)
        np.testing.assert_allclose(anchor_temperature(logits, "deviation"), c, rtol=1e-5)
        np.testing.assert_allclose(anchor_temperature(logits), 1 + np.exp(c), rtol=1e-5)

    def test_members_of_each_network_are_divided_by_their_own(self):
        plain, cooled = ensemble().eval(), ensemble(temperature="exponential").eval()
        outputs = plain(x)
        wanted = [outputs[m : m + 3] / anchor_temperature(outputs[m : m + 3])[:, None] for m in (0, 3)]
        torch.testing.assert_close(cooled(x), torch.cat(wanted))

    def test_it_stays_finite_where_references_agree(self):
        logits = torch.randn(1, 5, 4).expand(3, -1, -1)
        torch.testing.assert_close(anchor_temperature(logits, "deviation"), torch.full((5,), 1e-3))
        ens = ds.Anchored(net(), x, 3, temperature="deviation", initialise="sum")
        assert torch.isfinite(ds.predict(ens, x)).all()

    @pytest.mark.parametrize("outputs", [1, 2])
    def test_regression_has_none(self, outputs):
        ens = ds.Anchored(nn.Linear(4, outputs), x, 3, temperature="exponential")
        targets = x[:, :outputs]
        with pytest.raises(ValueError, match=r"class logits.*Leave `temperature` out for regression"):
            ds.fit(ens, (x, targets), objective=obj.Independent("mse"), epochs=1)

    def test_one_output_is_no_class_logits(self):
        ens = ds.Anchored(nn.Linear(4, 1), x, 3, temperature="exponential")
        with pytest.raises(ValueError, match=r"class logits.*give \(3, 40, 1\)"):
            ds.predict(ens, x)

    def test_some_members_alone_have_no_temperature(self):
        with pytest.raises(ValueError, match="all members of a network"):
            ensemble(temperature="exponential").eval().pick([0])(x)


class TestTraining:
    @pytest.mark.parametrize("per", ["batch", "example"])
    @pytest.mark.parametrize("make", [lambda **s: ds.Anchored(net(), x, 3, **s), ensemble])
    def test_the_captured_engine_equals_the_eager_one(self, make, per):
        ens = make(mask_probability=0.5, mask_per=per)
        twin = copy.deepcopy(ens)
        for each, engine in ((ens, "eager"), (twin, "captured")):
            ds.fit(each, (x, y), epochs=3, batch_size=10, lr=0.01, engine=engine)
        torch.testing.assert_close(ds.predict(ens, x), ds.predict(twin, x), rtol=1e-4, atol=1e-5)

    def test_a_network_of_an_ensemble_trains_as_it_would_alone(self):
        both = ds.Anchored(net, x, 1, num_nets=2, initialise="fresh")
        alone = ds.Anchored(net, x, 1, num_nets=1, initialise="fresh")
        for each in (both, alone):
            ds.fit(each, (x, y), epochs=2, batch_size=10, lr=0.1, optimizer="sgd")
        torch.testing.assert_close(ds.predict(both, x)[:1], ds.predict(alone, x), rtol=1e-4, atol=1e-5)

    def test_a_step_descends_the_loss_of_the_pairs_that_were_drawn(self):
        ens = ds.Anchored(nn.Linear(4, 3), x, 1)
        before = ens.inner.member(0)
        view = ens.view()
        outputs = view(x)
        drawn = seeing(x)
        drawn.member_keys.copy_(ens.member_keys)
        (pair,) = drawn(x)
        torch.testing.assert_close(outputs[0], before(pair))

    @pytest.mark.parametrize("objective", [obj.Joint(0.5), obj.LossGuided(active=2)])
    def test_anchored_heads_on_features_are_compared_network_by_network(self, objective):
        features = torch.randn(60, 4)
        heads = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), 4)
        ens = ds.Anchored(heads, references=features[:20], num_members=3)
        labels = (features[:, 0] > 0).long()
        run = ds.fit(ens, (features, labels), objective=objective, epochs=6, batch_size=5, lr=0.02)
        losses = run.history.by_epoch("loss")
        assert losses[-1] < losses[0]
        assert ds.predict(ens, features).shape == (12, 60, 3)

    def test_one_network_has_nothing_to_be_compared_with(self):
        with pytest.raises(ValueError, match="one anchored network"):
            ds.fit(ds.Anchored(net(), x, 3), (x, y), objective=obj.Joint(0.5), epochs=1)

    def test_networks_that_diverge_can_be_dropped(self):
        ens = ds.Anchored(lambda: nn.Linear(4, 3), x, 3, num_nets=3)
        run = ds.fit(ens, (x, y), epochs=3, lr=[0.01, 1e38, 0.01], optimizer="sgd", on_divergence="drop")
        assert run.dropped == [1]
        assert ens.num_members == 6
        assert torch.isfinite(ds.predict(ens, x)).all()

    def test_uncertainty_in_regression_grows_outside_the_data(self):
        inputs = torch.linspace(-1, 1, 32)[:, None]
        targets = torch.sin(3 * inputs)
        mlp = ds.DeepEnsemble(
            lambda: nn.Sequential(
                nn.Linear(1, 128),
                nn.ReLU(),
                nn.Linear(128, 128),
                nn.ReLU(),
                nn.Linear(128, 128),
                nn.ReLU(),
                nn.Linear(128, 1),
            ),
            1,
        ).member(0)
        shuffled = inputs[torch.randperm(32)]
        ens = ds.Anchored(mlp, shuffled, num_members=30)
        ds.fit(ens, (inputs, targets), objective=obj.Independent("mse"), epochs=150, batch_size=32, lr=2e-3)
        spread = {place: ds.predict(ens, torch.tensor([[place]])).std().item() for place in (0.0, 2.0, 4.0)}
        assert 3 * spread[0.0] < spread[2.0] < spread[4.0]

    def test_it_is_evaluated_like_any_ensemble(self):
        ens = ensemble()
        result = ds.evaluate(ens, (x, y), ood={"far": x + 5})
        assert "far" in str(result.table())


class TestCheckpoints:
    def test_references_travel_with_the_weights(self):
        ens = ensemble()
        twin = ds.Anchored(net, torch.zeros_like(x), 3, num_nets=2)
        twin.load_state_dict(ens.state_dict())
        torch.testing.assert_close(ds.predict(twin, x), ds.predict(ens, x))

    def test_a_resumed_run_ends_where_an_uninterrupted_one_does(self, tmp_path):
        def run(references, folder, stop=False):
            ens = ds.Anchored(net(), references, 3, mask_probability=0.3)
            with torch.no_grad():
                for parameter in ens.parameters():
                    parameter.fill_(0.1)

            def interrupt(run):
                if stop and run.epoch == 2:
                    raise KeyboardInterrupt

            ds.fit(ens, (x, y), epochs=4, batch_size=10, checkpoint_dir=folder, resume=True, callback=interrupt)
            return ens

        whole = run(x, tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            run(x, tmp_path / "parts", stop=True)
        # The references of the checkpoint count, not those of the new ensemble.
        resumed = run(x.flip(0), tmp_path / "parts")
        torch.testing.assert_close(resumed.references, x)
        torch.testing.assert_close(ds.predict(resumed, x), ds.predict(whole, x))

    def test_another_number_of_references_is_named(self, tmp_path):
        ds.fit(ensemble(), (x, y), epochs=1, checkpoint_dir=tmp_path)
        other = ds.Anchored(net, x[:7], 3, num_nets=2)
        with pytest.raises(Exception, match="references is"):
            ds.fit(other, (x, y), epochs=1, checkpoint_dir=tmp_path, resume=True)

    @pytest.mark.parametrize("change", [{"mask_probability": 0.5}, {"mask_per": "example"}, {"num_members": 3}])
    def test_a_run_is_not_resumed_with_other_masks_or_anchors(self, change, tmp_path):
        settings = {"references": x[:10], "num_members": 2, "mask_probability": 0.3}
        ds.fit(ds.Anchored(net(), **settings), (x, y), epochs=1, checkpoint_dir=tmp_path)
        name = "anchors" if "num_members" in change else next(iter(change))
        other = ds.Anchored(net(), **settings | change)
        with pytest.raises(Exception, match=name):
            ds.fit(other, (x, y), epochs=1, checkpoint_dir=tmp_path, resume=True)


class TestBadInput:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"references": x[0]}, "batch of inputs"),
            ({"references": x[:0]}, "batch of inputs"),
            ({"references": (x * 10).long()}, "real numbers"),
            ({"references": x.double()}, "dtype"),
            ({"references": x[:, :3]}, "inputs of the network"),
            ({"references": None}, "`references` must be a torch tensor .* or an array of numbers; got None"),
            ({"references": (x, y)}, "one tensor or array.*got a tuple.*hand over the inputs alone"),
            ({"references": TensorDataset(x, y)}, "`references` must be .*got TensorDataset"),
            ({"references": x.where(x < 1, torch.nan)}, "finite real numbers"),
            ({"num_members": 41}, "from 1 to that of references, 40"),
            ({"num_members": 0}, "from 1 to"),
            ({"num_members": 2.0}, "whole number"),
            ({"num_members": True}, "whole number"),
            ({"num_members": "3"}, "whole number.*got '3'"),
            ({"mask_probability": 1.5}, "mask_probability"),
            ({"mask_probability": "a"}, "`mask_probability` must be a number; got 'a'"),
            ({"mask_probability": float("nan")}, "mask_probability"),
            ({"net": net, "num_nets": 2.5}, "`num_nets` must be a whole number"),
            ({"net": net, "num_nets": 0}, "`num_nets` must be a whole number of at least 1"),
            ({"net": "resnet18"}, "must be an nn.Module .a network.*got 'resnet18'"),
            ({"mask_per": "pixel"}, "mask_per"),
            ({"masked_target": "none"}, "`masked_target` must be 'label' or 'uniform'"),
            ({"temperature": "hot"}, "temperature"),
            ({"temperature": "deviation"}, "at least two"),
            ({"initialise": "zeros"}, "initialise"),
            ({"num_nets": 3}, "only a function"),
            ({"net": 3}, "must be an nn.Module .a network.*or a function"),
            ({"net": []}, "list of networks.*got an empty one"),
            ({"net": ds.HeadEnsemble(nn.Linear(4, 4), (4, 3), 2)}, r"Anchored\(ens.heads, features"),
            ({"first_layer": "9"}, "no layer '9'.*'0'"),
            ({"first_layer": "2"}, "is a ReLU"),
        ],
    )
    def test_it_is_refused(self, settings, message):
        with pytest.raises(ValueError, match=message):
            ds.Anchored(**{"net": net(), "references": x, **settings})

    def test_whole_numbers_of_numpy_are_whole_numbers(self):
        ens = ds.Anchored(net, x, np.int64(3), num_nets=np.int64(2))
        assert ens.num_members == 6
        assert type(ens.num_anchors) is int

    def test_an_ensemble_of_ensembles_is_refused_with_what_to_do(self):
        with pytest.raises(ValueError, match=r"a Anchored, an ensemble.*num_nets=3"):
            ds.DeepEnsemble(lambda: ds.Anchored(net(), x, 2), 3)

    @pytest.mark.parametrize("wrong", [torch.zeros(5, 3), torch.zeros(5, 4, dtype=torch.float64)])
    @pytest.mark.parametrize("training", [True, False])
    def test_inputs_unlike_the_references_are_refused(self, wrong, training):
        with pytest.raises(ValueError, match="like the references"):
            ds.Anchored(net(), x, 2).train(training)(wrong)

    @pytest.mark.parametrize("wrong", [x[:3], x[0, :3], x[None]])
    def test_pairs_of_two_shapes_are_refused(self, wrong):
        with pytest.raises(ValueError, match=r"`reference` must be shaped like the residual, \(40, 4\)"):
            ds.Anchored(net(), x, 2).forward_pair(wrong, x)

    def test_masks_of_a_pass_can_be_drawn_again(self):
        ens = seeing(x, mask_probability=0.5, mask_per="example")
        view = ens.view()
        hidden = (view(x)[..., :4] == 0).all(-1)
        assert torch.equal(ens.masked(view.pass_keys(), 40), hidden)
        assert not torch.equal(ens.masked(fold(view.pass_keys(), 1), 40), hidden)


def test_a_guard_sees_the_members_that_train_as_they_are_in_evaluation():
    ens = ds.Anchored(net, x, 3, num_nets=4, initialise="fresh")
    guard = obj.HeldOutLoss(x[:10], y[:10])
    run = ds.fit(ens, (x, y), objective=obj.LossGuided(guard=guard), epochs=2, batch_size=4, lr=0.01)
    assert all(value == value for value in run.history.by_epoch("loss"))
    view = ens.eval().view()
    picked = type(view)(
        ens,
        ens.rows_of(view.parameters, torch.tensor([1, 3])),
        ens.rows_of(view.buffers, torch.tensor([1, 3])),
        keys=view.keys,
        rows=torch.tensor([1, 3]),
    )
    assert picked.num_members == 6
    torch.testing.assert_close(picked(x), ens(x)[[3, 4, 5, 9, 10, 11]])


class Named(nn.Module):
    """Returns a dictionary, as networks of transformers do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return {"hidden": hidden, "scores": self.last(hidden)}


def test_what_is_scored_of_several_outputs_is_picked_as_in_other_kinds():
    ens = ds.Anchored(lambda: Named(), x[:6], 2, num_nets=2, output="scores").eval()
    assert ens(x).shape == (4, 40, 3)
    for index, member in enumerate(ens):
        torch.testing.assert_close(ens(x)[index], member.eval()(x)["scores"])
    everything = ds.predict(ens, x, outputs="all")
    assert {name: tuple(part.shape) for name, part in everything.items()} == {
        "hidden": (4, 40, 8),
        "scores": (4, 40, 3),
    }
    ds.fit(ens, (x, y), epochs=1, batch_size=20)
    assert ds.greedy_soup(ds.DeepEnsemble.from_members(list(ens), output="scores"), (x, y)).accuracy <= 1
    with pytest.raises(ValueError, match="Choose with `output=` one of 'hidden', 'scores'"):
        ds.Anchored(lambda: Named(), x[:6], 2)


def test_references_are_drawn_from_inputs_each_once_before_any_comes_again():
    ens = ds.Anchored(net, torch.zeros(50, 4), 2)
    ens.draw_references(x)
    same = (ens.references[:, None] == x).all(-1)
    assert (same.sum(1) == 1).all()
    drawn = same.int().argmax(1).tolist()
    assert sorted(drawn[:40]) == list(range(40))
    assert drawn[:40] != list(range(40))


def test_a_recipe_trains_anchored_networks_and_has_their_references_back(tmp_path):
    from recipe_cases import recipe, save_blobs

    from dissensus.recipes import load_run

    made = recipe(
        save_blobs(tmp_path),
        ensemble={"kind": "anchored", "members": 2, "anchors": 3, "references": 20, "mask_probability": 0.25},
        objective={"name": "hard_delta", "weight": 0.1},
    )
    run = made.train(tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    torch.testing.assert_close(loaded.ensemble.references, run.members.references.cpu())
    assert loaded.ensemble.references.std() > 0.1
    assert loaded.ensemble.num_members == 6
