import copy
from itertools import product
from math import log
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus import objectives as obj
from dissensus.objectives.hard_delta import (
    Law,
    drawn_factor,
    farthest_partner,
    mahalanobis,
    residual_factor,
    residual_scale,
    tail_draws,
    tail_radius,
)
from dissensus.objectives.objective import BatchNorm, Step
from dissensus.randomness import Noise

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
VARIANTS = [
    {"law": law, "tails": tails, "draws": draws}
    for law, tails, draws in product(get_args(Law), ("drawn", "real"), (4,))
    if (law, tails) not in {("low_rank", "real"), ("full", "real")}
]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def anchored(num_nets: int = 2, **settings) -> ds.Anchored:
    return ds.Anchored(net, x[:30], 2, num_nets=num_nets, initialise="fresh", **settings)


def a_step(members: int = 2, own: bool = False, index: int = 0) -> Step:
    return Step(torch.tensor(index), 10, own, torch.arange(members), torch.tensor(9))


class TestUniformTarget:
    def test_it_is_the_cross_entropy_to_equal_probabilities(self):
        logits = torch.randn(5, 7, 4)
        wanted = F.cross_entropy(logits.reshape(35, 4), torch.full((35, 4), 0.25), reduction="none")
        torch.testing.assert_close(obj.uniform_cross_entropy(logits).reshape(35), wanted)

    @given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=8))
    def test_it_is_never_below_the_log_of_the_number_of_classes(self, values):
        assert obj.uniform_cross_entropy(torch.tensor(values)).item() >= log(len(values)) - 1e-5

    def test_it_is_least_where_all_logits_are_equal(self):
        logits = torch.full((6,), 3.0, requires_grad=True)
        value = obj.uniform_cross_entropy(logits)
        value.backward()
        assert value.item() == pytest.approx(log(6), rel=1e-6)
        torch.testing.assert_close(logits.grad, torch.zeros(6), rtol=0, atol=1e-6)


class TestLaw:
    def test_the_variance_of_residuals_is_twice_that_of_inputs(self):
        differences = (x[:, None] - x[None]).reshape(-1, 4)
        pairs = len(x) * (len(x) - 1)
        torch.testing.assert_close(residual_scale(x)[0] ** 2, differences.square().sum(0) / pairs)

    @pytest.mark.parametrize("statistics", ["batch", "training"])
    def test_draws_of_the_full_law_have_the_whole_covariance_and_lie_far_out_under_it(self, statistics):
        inputs = x @ torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        objective = obj.HardDelta(obj.Independent(), law="full", statistics=statistics).prepare(inputs)
        plain = objective._drawn(inputs[None], 20_000, 1, Noise(torch.arange(1)))[0]
        wanted = 2 * torch.cov(inputs.T)
        torch.testing.assert_close(torch.cov(plain.T), wanted, rtol=0.05, atol=0.05 * wanted.max().item())
        far = objective._drawn(inputs[None], 500, 1000, Noise(torch.arange(1)))[0]
        lengths = (far @ wanted.inverse() * far).sum(-1).sqrt()
        # The farthest of 1000 of a batch's draws has 59 dimensions, of which four show.
        assert lengths.mean() > (4.0 if statistics == "training" else 2.0)

    def test_combinations_of_inputs_have_twice_their_covariance(self):
        few = x[:11]
        factor = drawn_factor(x, rank=10)
        torch.testing.assert_close(factor.T @ factor, 2 * torch.cov(few.T))

    def test_all_principal_directions_have_twice_the_covariance(self):
        factor = residual_factor(x, rank=4)
        torch.testing.assert_close(factor.T @ factor, 2 * torch.cov(x.T), rtol=1e-3, atol=1e-4)

    def test_few_directions_are_the_largest(self):
        factor = residual_factor(x * torch.tensor([10.0, 1.0, 0.1, 0.1]), rank=1)
        assert factor.shape == (1, 4)
        assert factor[0, 0].abs() > 5 * factor[0, 1:].abs().max()

    @pytest.mark.parametrize("measured", [True, False])
    def test_plain_draws_have_twice_the_covariance_of_the_inputs(self, measured):
        factor = residual_factor(x, 4) if measured else drawn_factor(x, 59)
        draws = tail_draws(Noise(torch.tensor(3)), 20_000, 1, len(factor), centred=not measured) @ factor
        torch.testing.assert_close(torch.cov(draws.T), 2 * torch.cov(x.T), rtol=0.1, atol=0.06)
        assert draws.mean(0).abs().max() < 0.05

    # Measured once with many normal draws: the farthest of 2000, over the mean length.
    @pytest.mark.parametrize(("size", "excess"), [(3072, 0.042), (512, 0.12), (32, 0.49), (2, 2.24)])
    def test_tails_hardly_exist_in_many_dimensions(self, size, excess):
        mean = tail_radius(Noise(torch.tensor(1)), 4000, 1, size).mean()
        far = tail_radius(Noise(torch.tensor(2)), 4000, 2000, size).mean()
        assert (far / mean - 1).item() == pytest.approx(excess, rel=0.1)

    @pytest.mark.parametrize("size", [1, 3, 20])
    def test_lengths_are_those_of_the_farthest_of_many_draws(self, size):
        generator = torch.Generator().manual_seed(0)
        real = torch.randn(3000, 50, size, generator=generator).norm(dim=-1).amax(1)
        ours = tail_radius(Noise(torch.tensor(5)), 3000, 50, size)
        for share in (0.1, 0.5, 0.9):
            assert ours.quantile(share).item() == pytest.approx(real.quantile(share).item(), rel=0.04)

    def test_directions_of_tails_are_uniform(self):
        draws = tail_draws(Noise(torch.tensor(7)), 20_000, 100, 3)
        units = draws / draws.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(torch.cov(units.T), torch.eye(3) / 3, rtol=0.05, atol=0.01)

    def test_the_farthest_partner_is_found(self):
        scale = residual_scale(x)
        distances = torch.cdist(x / scale, x / scale)
        torch.testing.assert_close(farthest_partner(x, scale), x - x[distances.argmax(1)])

    def test_mahalanobis_distances_are_numpys(self):
        known = torch.randn(200, 3) @ torch.randn(3, 3) + 2
        values = torch.randn(7, 3)
        gap = values.numpy() - known.numpy().mean(0)
        wanted = (gap @ np.linalg.inv(np.cov(known.numpy().T)) * gap).sum(-1)
        np.testing.assert_allclose(mahalanobis(values, known), wanted, rtol=0.02)


class TestHardDelta:
    @pytest.mark.parametrize("batch_norm", get_args(BatchNorm))
    def test_it_adds_the_weighted_term_of_masked_negative_tails(self, batch_norm, monkeypatch):
        """By plain networks that do what PyTorch's own passes in evaluation, together or one after the other would."""
        tails = torch.randn(2, 5, 4)
        monkeypatch.setattr(obj.HardDelta, "_tails", lambda *_: tails)
        monkeypatch.setattr(
            ds.Anchored, "training_pairs", lambda *_, **__: torch.cat([x, 2 * x], 1)[None].expand(2, 60, 8)
        )
        ens = anchored()
        nets = [ens.inner.member(j).train() for j in range(2)]
        objective = obj.HardDelta(obj.Independent(), weight=0.7, warm_up=0.0, batch_norm=batch_norm)
        loss, parts = objective(ens.view(), x, y, a_step())
        fit, said, in_use = 0.0, [], []
        for each, t in zip(nets, tails, strict=True):
            here, there = torch.cat([x, 2 * x], 1), torch.cat([0 * t, -t], 1)
            if batch_norm == "mix":
                outputs, tail = each(torch.cat([here, there])).split([60, 5])
            else:
                outputs = each(here)
                tail = each.train(batch_norm == "train")(there)
            fit = fit + F.cross_entropy(outputs, y)
            said.append(tail.logsumexp(-1).mean() - tail.mean())
            in_use.append(obj.uniform_cross_entropy(each.eval()(there)).mean())
        torch.testing.assert_close(parts["tail"], torch.stack(said).detach())
        torch.testing.assert_close(loss, fit + 0.7 * sum(said))
        torch.testing.assert_close(parts.get("tail_in_use", parts["tail"]), torch.stack(in_use).detach())
        for j, each in enumerate(nets):
            torch.testing.assert_close(ens.inner.member(j).state_dict(), each.state_dict())

    @pytest.mark.parametrize("batch_norm", get_args(BatchNorm))
    def test_what_training_reports_is_what_use_shows(self, batch_norm):
        objective = obj.HardDelta(obj.Independent(), 1.0, warm_up=0.0, batch_norm=batch_norm)
        ens = anchored()
        run = ds.fit(ens, (x, y), objective=objective, epochs=60, batch_size=30, lr=0.01, engine="eager")
        reported = run.history.by_epoch("tail" if batch_norm == "eval" else "tail_in_use")[-5:]
        tails = [
            objective._tails(ens.view(), ens, x[None], torch.Size((4,)), Noise(torch.arange(2) + i)) for i in range(20)
        ]
        ens.eval()
        shown = [
            obj.uniform_cross_entropy(ens.forward_pair(0 * t.flatten(0, 1), -t.flatten(0, 1))).mean() for t in tails
        ]
        # Statistics of x and of tails meet in "mix" and "train", so that each step's report is noisier there.
        tolerance = 0.03 if batch_norm == "eval" else 0.15
        assert sum(reported) / 5 == pytest.approx(torch.stack(shown).mean().item(), rel=tolerance)

    def test_tails_do_not_count_before_the_warm_up_ends(self):
        objective = obj.HardDelta(obj.Independent(), weight=0.7, warm_up=0.5)
        plain = [obj.Independent()(anchored().view(), x, y, a_step(index=i))[0] for i in (4, 5)]
        found = [objective(anchored().view(), x, y, a_step(index=i)) for i in (4, 5)]
        torch.testing.assert_close(found[0][0], plain[0])
        torch.testing.assert_close(found[1][0], plain[1] + 0.7 * found[1][1]["tail"].sum())

    @pytest.mark.parametrize("settings", VARIANTS, ids=str)
    def test_the_pass_leaves_statistics_of_batch_norm_alone(self, settings):
        plain, ens = anchored(), anchored()
        obj.Independent()(plain.view(), x, y, a_step())
        obj.HardDelta(obj.Independent(), **settings)(ens.view(), x, y, a_step())
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(ens.get_buffer(name), buffer)

    @pytest.mark.parametrize("settings", VARIANTS, ids=str)
    @pytest.mark.parametrize("statistics", ["batch", "training"])
    def test_networks_learn_to_say_less_of_tails(self, settings, statistics):
        if statistics == "training" and settings["law"] in ("outputs", "features") and settings["tails"] == "real":
            with pytest.raises(ValueError, match="is measured on each batch"):
                obj.HardDelta(obj.Independent(), **settings, statistics=statistics)
            return
        found = {}
        for weight in (0.0, 1.0):
            objective = obj.HardDelta(obj.Independent(), weight, **settings, statistics=statistics)
            run = ds.fit(anchored(), (x, y), objective=objective, epochs=12, batch_size=30, lr=0.03, engine="eager")
            found[weight] = run.history.by_epoch("tail")[-1]
        assert log(3) <= found[1.0] < found[0.0] - 0.05

    @pytest.mark.parametrize("settings", [*VARIANTS, {"batch_norm": "mix"}, {"batch_norm": "train"}], ids=str)
    @pytest.mark.parametrize("num_nets", [1, 2])
    def test_the_captured_engine_equals_the_eager_one(self, settings, num_nets):
        ens = anchored(num_nets, mask_probability=0.3)
        twin = copy.deepcopy(ens)
        for each, engine in ((ens, "eager"), (twin, "captured")):
            objective = obj.HardDelta(obj.Independent(), **settings)
            ds.fit(each, (x, y), objective=objective, epochs=2, batch_size=20, engine=engine, optimizer="sgd")
        torch.testing.assert_close(ds.predict(ens, x), ds.predict(twin, x), rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.*_prims_common.check:FutureWarning")  # of torch's own compiler
    def test_the_compiled_engine_equals_the_eager_one(self):
        ens = anchored(mask_probability=0.3)
        twin = copy.deepcopy(ens)
        for each, engine in ((ens, "eager"), (twin, "compiled")):
            objective = obj.HardDelta(obj.Independent(), 1.0, law="outputs", draws=4)
            ds.fit(each, (x, y), objective=objective, epochs=2, batch_size=20, engine=engine, optimizer="sgd")
        torch.testing.assert_close(ds.predict(ens, x), ds.predict(twin, x), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("settings", VARIANTS, ids=str)
    def test_tails_lie_farther_out_than_residuals_do(self, settings):
        """In units of their law, by the factor that is asked for."""
        ens, view = anchored(), anchored().view()
        objective = obj.HardDelta(obj.Independent(), **settings, radius=3.0)
        tails = objective._tails(view, ens, x[None], torch.Size((4,)), Noise(torch.arange(2)))
        lengths = (tails / residual_scale(x)).norm(dim=-1)
        assert tails.shape[::2] == (2, 4)
        assert lengths.mean() > 2 * (residual_scale(x) * 0 + 1).norm()

    @pytest.mark.parametrize("settings", VARIANTS, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    def test_weights_may_be_of_any_precision(self, settings, dtype):
        ens = ds.Anchored(net().to(dtype), x[:30].to(dtype), 1)
        objective = obj.HardDelta(obj.Independent(), 0.1, **settings)
        run = ds.fit(ens, (x.to(dtype), y), objective=objective, epochs=1, batch_size=20, engine="eager")
        assert log(3) - 0.01 <= run.history.by_epoch("tail")[-1] < 10

    @pytest.mark.parametrize("settings", VARIANTS, ids=str)
    def test_a_last_batch_of_one_input_does_no_harm(self, settings):
        ens = ds.Anchored(nn.Linear(4, 3), x[:30], 1)
        objective = obj.HardDelta(obj.Independent(), 0.1, **settings)
        run = ds.fit(ens, (x[:21], y[:21]), objective=objective, epochs=2, batch_size=20, engine="eager")
        assert torch.isfinite(torch.tensor(run.history.by_epoch("tail"))).all()
        assert torch.isfinite(ds.predict(ens, x)).all()

    def test_the_number_of_samples_can_be_chosen(self):
        objective = obj.HardDelta(obj.Independent(), samples=7)
        tails = objective._tails(anchored().view(), anchored(), x[None], torch.Size((4,)), Noise(torch.arange(2)))
        assert tails.shape == (2, 7, 4)

    @pytest.mark.parametrize(("law", "kept"), [("diagonal", 60), ("outputs", 7), ("features", 7)])
    def test_by_default_laws_of_the_network_keep_an_eighth_of_a_batch(self, law, kept):
        objective, ens = obj.HardDelta(obj.Independent(), law=law), anchored()
        tails = objective._tails(ens.view(), ens, x[None], torch.Size((4,)), Noise(torch.arange(2)))
        assert tails.shape == (2, kept, 4)

    def test_by_default_draws_are_the_least_likely_of_a_thousand(self):
        noise, sizes = Noise(torch.arange(2)), (None, 1000)
        default, thousand = (
            obj.HardDelta(obj.Independent(), draws=size)._tails(
                anchored().view(), anchored(), x[None], torch.Size((4,)), noise
            )
            for size in sizes
        )
        assert torch.equal(default, thousand)

    @pytest.mark.parametrize("settings", VARIANTS, ids=str)
    def test_memory_is_bounded_for_large_images(self, settings):
        images, labels = torch.randn(4, 3, 224, 224), torch.arange(4) % 2
        large = nn.Sequential(nn.Conv2d(3, 2, 16, stride=16), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 14 * 14, 2))
        ens = ds.Anchored(large, images, 1)
        with Largest() as largest:
            obj.HardDelta(obj.Independent(), **settings)(ens.view(), images, labels, a_step(1))
        assert largest.numel <= 2 * images.numel()

    def test_it_works_around_objectives_that_compare_or_pick(self):
        for inner in (obj.Joint(0.5), obj.LossGuided(active=2), obj.MaskedUniform(obj.Independent())):
            ens = anchored(3, mask_probability=0.2)
            run = ds.fit(ens, (x, y), objective=obj.HardDelta(inner, 0.1), epochs=4, batch_size=10, lr=0.01)
            assert torch.isfinite(torch.tensor(run.history.by_epoch("tail"))).all()

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"law": "cubic"}, "law"),
            ({"tails": "fat"}, "tails"),
            ({"statistics": "running"}, "statistics"),
            ({"inner": obj.Independent("mse")}, "classification"),
            ({"law": "low_rank", "tails": "real"}, "none is a tail"),
            ({"law": "outputs", "samples": 4}, "leave `samples` out"),
            ({"law": "features", "samples": 4}, "law='features' keeps one candidate"),
            ({"draws": 0}, "at least 1"),
            ({"weight": -1.0}, "of at least 0"),
            ({"radius": 0.0}, "above 0"),
            ({"warm_up": 1.0}, "below 1"),
            ({"warm_up": "a"}, "`warm_up` must be a number"),
            ({"inner": 3}, r"`inner` must be an objective.*got 3"),
            ({"samples": 0}, "`samples` must be a whole number of at least 1; got 0"),
            ({"samples": 2.5}, "`samples` must be a whole number"),
            ({"draws": 2.5}, "`draws` must be a whole number"),
            ({"rank": 1.5}, "`rank` must be a whole number"),
            ({"rank": None}, "`rank` must be a whole number"),
            ({"weight": "a"}, "`weight` must be a number"),
            ({"weight": float("nan")}, "`weight` must be a number"),
            ({"radius": float("inf")}, "`radius` must be a number above 0"),
        ],
    )
    def test_bad_settings_are_refused(self, settings, message):
        with pytest.raises(ValueError, match=message):
            obj.HardDelta(**{"inner": obj.Independent(), **settings})

    def test_statistics_of_all_inputs_need_arrays(self):
        objective = obj.HardDelta(obj.Independent(), statistics="training")
        loader = DataLoader(TensorDataset(x, y), batch_size=20)
        with pytest.raises(ValueError, match=r"HardDelta measures all training inputs.*statistics='training'"):
            ds.fit(anchored(), loader, objective=objective, epochs=1)

    @pytest.mark.parametrize("wrapper", [obj.HardDelta, obj.MaskedUniform])
    def test_other_kinds_are_refused(self, wrapper):
        with pytest.raises(ValueError, match=r"anchored networks.*DeepEnsemble"):
            ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective=wrapper(obj.Independent()), epochs=1)


class TestMaskedUniform:
    def test_without_masks_nothing_changes(self):
        objective = obj.MaskedUniform(obj.Independent())
        loss, _ = objective(anchored().view(), x, y, a_step())
        torch.testing.assert_close(loss, obj.Independent()(anchored().view(), x, y, a_step())[0])

    def test_all_masked_is_the_uniform_target(self):
        settings = {"mask_probability": 1.0}
        loss, _ = obj.MaskedUniform(obj.Independent())(anchored(**settings).view(), x, y, a_step())
        outputs = anchored(**settings).view()(x)
        torch.testing.assert_close(loss, obj.uniform_cross_entropy(outputs).mean(-1).sum())

    @pytest.mark.parametrize("mined", [False, True])
    def test_anchored_networks_can_ask_for_it_themselves(self, mined):
        def trained(inner, **settings):
            ens = anchored(mask_probability=0.5, **settings)
            objective = obj.HardDelta(inner, 0.1) if mined else inner
            ds.fit(ens, (x, y), objective=objective, epochs=3, batch_size=20, lr=0.01, engine="eager")
            return ds.predict(ens, x)

        asked = trained(obj.Independent(), masked_target="uniform")
        torch.testing.assert_close(asked, trained(obj.MaskedUniform(obj.Independent())))
        assert not torch.allclose(asked, trained(obj.Independent()))
        with pytest.raises(ValueError, match="Joint compares networks"):
            trained(obj.Joint(0.5), masked_target="uniform")

    @pytest.mark.parametrize(
        "around",
        [
            lambda inner: obj.NormPenalty(inner, 0.1),
            lambda inner: obj.VirtualAdversarial(inner, epsilon=0.5),
            lambda inner: obj.HardDelta(obj.NormPenalty(inner, 0.1), 0.1),
        ],
        ids=["NormPenalty", "VirtualAdversarial", "both"],
    )
    def test_it_goes_inside_of_what_adds_to_a_loss(self, around):
        def trained(inner, **settings):
            ens = anchored(mask_probability=0.5, **settings)
            ds.fit(ens, (x, y), objective=around(inner), epochs=2, batch_size=20, lr=0.01, engine="eager")
            return ds.predict(ens, x)

        asked = trained(obj.Independent(), masked_target="uniform")
        torch.testing.assert_close(asked, trained(obj.MaskedUniform(obj.Independent())))
        assert not torch.allclose(asked, trained(obj.Independent()))
        with pytest.raises(ValueError, match="MaskedUniform goes inside of"):
            obj.MaskedUniform(around(obj.Independent()))

    def test_masked_examples_alone_get_the_uniform_target(self):
        settings = {"mask_probability": 0.5, "mask_per": "example"}
        ens = anchored(**settings)
        view = ens.view()
        outputs = view(x)
        masked = ens.masked(view.pass_keys(), len(x))
        assert 0 < masked.float().mean() < 1
        true = -outputs.log_softmax(-1).gather(-1, y.expand(2, -1)[..., None])[..., 0]
        wanted = torch.where(masked, obj.uniform_cross_entropy(outputs), true).mean(-1).sum()
        loss, _ = obj.MaskedUniform(obj.Independent())(anchored(**settings).view(), x, y, a_step())
        torch.testing.assert_close(loss, wanted)

    def test_perturbed_examples_have_the_targets_of_clean_ones(self):
        ens = anchored(masked_target="uniform", mask_probability=0.4, mask_per="example")
        asked = ens.adapt(obj.Adversarial(obj.Independent(), epsilon=0.0))
        loss, parts = asked(ens.view(), x, y, a_step())
        # Members are moved nowhere, so that nothing but targets could differ.
        torch.testing.assert_close(parts["adversarial_loss"], parts["loss"])
        plain, _ = obj.MaskedUniform(obj.Independent())(
            anchored(mask_probability=0.4, mask_per="example").view(), x, y, a_step()
        )
        torch.testing.assert_close(loss, plain)
        run = ds.fit(ens, (x, y), objective=obj.Adversarial(obj.Independent()), epochs=1, device="cpu")
        assert "adversarial_loss" in run.history.columns

    def test_outputs_alone_do_not_say_whose_references_were_masked(self):
        with pytest.raises(ValueError, match="call it with the members"):
            obj.MaskedUniform(obj.Independent()).on_outputs(torch.zeros(2, 4, 3), y[:4], a_step())

    def test_the_captured_engine_equals_the_eager_one(self):
        ens = anchored(mask_probability=0.4)
        twin = copy.deepcopy(ens)
        for each, engine in ((ens, "eager"), (twin, "captured")):
            objective = obj.MaskedUniform(obj.Independent())
            ds.fit(each, (x, y), objective=objective, epochs=2, batch_size=20, engine=engine, optimizer="sgd")
        torch.testing.assert_close(ds.predict(ens, x), ds.predict(twin, x), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("inner", "words"),
        [
            (obj.Joint(0.5), "Joint compares networks"),
            (obj.LossGuided(active=2), "LossGuided compares networks"),
            (obj.Adversarial(obj.Independent(), 0.1), "goes inside of Adversarial"),
            (obj.Independent("mse"), "the loss is 'mse'"),
            (nn.CrossEntropyLoss(), "must be an objective"),
        ],
    )
    def test_objectives_that_compare_or_have_no_classes_are_refused(self, inner, words):
        with pytest.raises(ValueError, match=words):
            obj.MaskedUniform(inner)


class Largest(TorchDispatchMode):
    """The number of values of the largest tensor that any operation gave."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result
