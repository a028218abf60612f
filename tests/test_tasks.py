"""Tasks beside one label an input: losses of your own, several labels, counts, quantiles, positions, weights of classes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.objectives.likelihoods import class_axis_of, likelihood_of
from dissensus.objectives.objective import Step


def step(weights=None, own=False, members=2):
    keys = torch.arange(members)
    return Step(torch.tensor(0), 10, own, keys, torch.tensor(0), weights=weights)


def linear(outputs):
    return lambda: nn.Linear(3, outputs)


def huber(output, target):
    return F.huber_loss(output[:, 0], target, reduction="none")


X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
SETTINGS = {"epochs": 30, "lr": 0.05, "batch_size": 32, "device": "cpu", "engine": "eager"}


class TestLossesOfYourOwn:
    def test_the_gradient_is_each_members_own(self):
        outputs, y = torch.randn(2, 5, 1, requires_grad=True), torch.randn(5)
        loss, parts = obj.Independent(huber).on_outputs(outputs, y, step())
        wanted = torch.stack([huber(member, y).mean() for member in outputs])
        torch.testing.assert_close(parts["loss"], wanted.detach())
        torch.testing.assert_close(loss, wanted.sum())

    def test_with_batches_of_their_own(self):
        outputs, y = torch.randn(3, 3, 1), torch.randn(3, 3)
        _, parts = obj.Independent(huber).on_outputs(outputs, y, step(own=True, members=3))
        wanted = torch.stack([huber(o, t).mean() for o, t in zip(outputs, y, strict=True)])
        torch.testing.assert_close(parts["loss"], wanted)

    def test_mean_squared_error_by_hand_trains_as_by_name(self):
        y = X @ torch.tensor([1.0, -2.0, 0.5])
        ends = []
        for loss in ("mse", lambda output, target: (output - target.reshape(-1, 1)).square().sum(-1)):
            for objective in (
                obj.Independent(loss),
                obj.Joint(0.5, loss=loss),
                obj.Adversarial(obj.Independent(loss), epsilon=0.01),
            ):
                ens = ds.DeepEnsemble(linear(1), 2)
                run = ds.fit(ens, (X, y[:, None]), objective=objective, validation=(X, y[:, None]), **SETTINGS)
                ends.append((ds.predict(ens, X), run.history.rows[-1]["ensemble_loss"]))
        for named, own in zip(ends[:3], ends[3:], strict=True):
            torch.testing.assert_close(named[0], own[0], atol=1e-4, rtol=1e-4)
            assert named[1] == pytest.approx(own[1], rel=1e-3, abs=1e-6)

    def test_a_loss_that_averages_is_refused(self):
        for loss in (lambda output, target: F.mse_loss(output[:, 0], target), lambda output, target: 3.0):
            with pytest.raises(ValueError, match="one value for each of"):
                ds.fit(ds.DeepEnsemble(linear(1), 2), (X, X[:, 0]), objective=obj.Independent(loss), epochs=1)

    def test_virtual_adversarial_training_says_why_not(self):
        objective = obj.VirtualAdversarial(obj.Independent(huber))
        with pytest.raises(ValueError, match="how far two outputs are"):
            ds.fit(ds.DeepEnsemble(linear(1), 2), (X, X[:, 0]), objective=objective, epochs=1)


class TestSeveralLabels:
    y = (X[:, :2] > 0).long()

    def test_loss_is_torchs_and_the_mixture_averages_probabilities(self):
        logits, y = torch.randn(3, 5, 2), torch.randint(0, 2, (5, 2)).float()
        likelihood = likelihood_of("binary_cross_entropy")
        wanted = F.binary_cross_entropy_with_logits(logits, y.expand(3, 5, 2), reduction="none").sum(-1)
        torch.testing.assert_close(likelihood.losses(logits, y), wanted)
        mixed = F.binary_cross_entropy(logits.sigmoid().mean(0), y, reduction="none").sum(-1)
        torch.testing.assert_close(likelihood.mixture(logits, y), mixed)
        assert torch.equal(likelihood.divergence(logits, logits), torch.zeros(3, 5))

    @pytest.mark.parametrize(
        "objective", [obj.Independent("binary_cross_entropy"), obj.Joint(0.3, loss="binary_cross_entropy")]
    )
    def test_members_learn_them(self, objective):
        ens = ds.DeepEnsemble(linear(2), 2)
        run = ds.fit(ens, (X, self.y), objective=objective, validation=(X, self.y), **SETTINGS)
        assert run.history.rows[-1]["ensemble_accuracy"] > 0.85
        assert ((ds.predict(ens, X).sigmoid().mean(0) > 0.5) == self.y).double().mean() > 0.85

    def test_labels_of_another_shape_or_range_are_refused(self):
        objective = obj.Independent("binary_cross_entropy")
        with pytest.raises(ValueError, match="shaped as the outputs"):
            ds.fit(ds.DeepEnsemble(linear(3), 2), (X, self.y), objective=objective, epochs=1)
        with pytest.raises(ValueError, match="must be 0 or 1"):
            ds.fit(ds.DeepEnsemble(linear(2), 2), (X, 2 * self.y), objective=objective, epochs=1)


def test_counts_are_poisson():
    rates, y = torch.randn(4, 6, 1), torch.randint(0, 5, (6, 1)).float()
    wanted = -torch.distributions.Poisson(rates.exp()).log_prob(y)[..., 0]
    likelihood = likelihood_of("poisson")
    torch.testing.assert_close(likelihood.losses(rates, y), wanted)
    mixture = torch.distributions.Poisson(rates.exp()).log_prob(y)[..., 0].exp().mean(0)
    torch.testing.assert_close(likelihood.mixture(rates, y), -mixture.log())
    ens = ds.DeepEnsemble(linear(1), 2)
    counts = (X[:, 0].exp() * 3).round()
    run = ds.fit(ens, (X, counts), objective=obj.Independent("poisson"), **SETTINGS)
    assert run.history.rows[-1]["loss"] < run.history.rows[0]["loss"]
    with pytest.raises(ValueError, match="targets of poisson are counts, 0 or more; got -1"):
        ds.fit(ens, (X, counts - 1), objective=obj.Independent("poisson"), epochs=1)
    with pytest.raises(ValueError, match="Targets of set 'id' are counts, 0 or more; got -1"):
        ds.evaluate(ens, (X, counts - 1), loss="poisson", bootstrap=0)


def test_quantiles_of_a_constant_network_are_those_of_the_data():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return self.value.expand(len(x), 3)

    y = torch.linspace(0, 1, 200)
    x = torch.zeros(200, 1)
    for loss, levels in ((obj.Pinball((0.1, 0.5, 0.9)), (0.1, 0.5, 0.9)), ("pinball", (1 / 6, 0.5, 5 / 6))):
        ens = ds.DeepEnsemble(Constant, 1)
        settings = SETTINGS | {"batch_size": 200, "epochs": 300, "lr": 0.02, "schedule": "cosine", "optimizer": "adam"}
        ds.fit(ens, (x, y), objective=obj.Independent(loss), **settings)
        torch.testing.assert_close(ds.predict(ens, x)[0, 0], torch.tensor(levels), atol=0.02, rtol=0)


class TestClassWeights:
    weights = (1.0, 3.0, 0.5)

    def test_they_are_torchs(self):
        outputs, y = torch.randn(2, 9, 3), torch.arange(9) % 3
        for objective in (
            obj.Independent(class_weights=self.weights),
            obj.Independent(class_weights=self.weights, label_smoothing=0.1),
            obj.Joint(0.0, class_weights=self.weights),
            obj.LossGuided(strength=0.0, active=None, class_weights=self.weights),
        ):
            _, parts = objective.on_outputs(outputs, y, step())
            if getattr(objective, "label_smoothing", 0.0):
                continue
            table = torch.tensor(self.weights)
            wanted = torch.stack([F.cross_entropy(member, y, table) for member in outputs])
            torch.testing.assert_close(parts["loss"], wanted)

    def test_with_weights_of_examples_they_multiply(self):
        outputs, y, shares = torch.randn(2, 9, 3), torch.arange(9) % 3, torch.rand(9)
        _, parts = obj.Independent(class_weights=self.weights).on_outputs(outputs, y, step(shares))
        both = shares * torch.tensor(self.weights)[y]
        losses = torch.stack([F.cross_entropy(member, y, reduction="none") for member in outputs])
        torch.testing.assert_close(parts["loss"], (both * losses).sum(1) / both.sum())

    @pytest.mark.parametrize("shares", [None, torch.arange(1.0, 10.0, dtype=torch.float64)], ids=["", "examples"])
    def test_those_of_several_labels_are_torchs_too(self, shares):
        g = torch.Generator().manual_seed(0)
        outputs = torch.randn(2, 9, 3, generator=g, dtype=torch.float64)
        y = (torch.rand(9, 3, generator=g) > 0.7).double()
        y[:4] = 0.0  # examples without any label count too
        table = torch.tensor(self.weights, dtype=torch.float64)
        settings = {"weight": table, "reduction": "none"}
        losses = torch.stack([F.binary_cross_entropy_with_logits(o, y, **settings).sum(1) for o in outputs])
        counts = torch.ones(9, dtype=torch.float64) if shares is None else shares
        wanted = (counts * losses).sum(1) / counts.sum()
        for make in (obj.Independent, partial(obj.Joint, 0.0)):
            objective = make(loss="binary_cross_entropy", class_weights=self.weights)
            loss, parts = objective.on_outputs(outputs, y, step(shares))
            torch.testing.assert_close(parts["loss"], wanted)
            torch.testing.assert_close(loss, wanted.sum())

    @pytest.mark.parametrize("average", ["probs", "scores"])
    def test_those_of_several_labels_weigh_the_ensembles_error_label_by_label(self, average):
        outputs, y = torch.randn(2, 9, 3, dtype=torch.float64), torch.randint(0, 2, (9, 3)).double()
        objective = obj.Joint(1.0, "binary_cross_entropy", average, class_weights=self.weights)
        _, parts = objective.on_outputs(outputs, y, step())
        probs = outputs.sigmoid().mean(0) if average == "probs" else outputs.mean(0).sigmoid()
        wanted = F.binary_cross_entropy(probs, y, reduction="none") @ torch.tensor(self.weights, dtype=torch.float64)
        torch.testing.assert_close(parts["ensemble_error"], wanted.mean())

    @pytest.mark.parametrize(
        "make",
        [obj.Independent, obj.Joint, partial(obj.Joint, member_dropout=0.4, dropout_per="example")],
        ids=["independent", "joint", "dropout"],
    )
    def test_those_of_several_labels_change_nothing_where_they_are_one(self, make):
        outputs, y = torch.randn(3, 9, 4), torch.randint(0, 2, (9, 4)).float()
        losses = []
        for weights in (None, (1.0, 1.0, 1.0, 1.0)):
            loss, _ = make(loss="binary_cross_entropy", class_weights=weights).on_outputs(outputs, y, step())
            losses.append(loss)
        torch.testing.assert_close(*losses)

    def test_wrong_ones_are_refused(self):
        with pytest.raises(ValueError, match="one number for each of 3 classes"):
            obj.Independent("binary_cross_entropy", class_weights=(1.0, 1.0)).on_outputs(
                torch.zeros(2, 4, 3), torch.zeros(4, 3), step()
            )
        with pytest.raises(ValueError, match="not negative and not all zero"):
            obj.Independent(class_weights=(-1.0, 1.0))
        with pytest.raises(ValueError, match="are for class labels"):
            obj.Joint(0.5, loss="mse", class_weights=(1.0,))
        with pytest.raises(ValueError, match="one number for each of 3 classes"):
            obj.Independent(class_weights=(1.0, 1.0)).on_outputs(
                torch.zeros(2, 4, 3), torch.zeros(4, dtype=torch.long), step()
            )


class TestPositions:
    """Dense outputs: every position that counts is an example of its own."""

    def test_the_class_axis_is_the_one_that_the_targets_lack(self):
        assert class_axis_of(torch.zeros(2, 4, 3, 5, 6), torch.zeros(4, 5, 6), None) == 2
        assert class_axis_of(torch.zeros(2, 4, 7, 3), torch.zeros(4, 7), None) == 3
        assert class_axis_of(torch.zeros(2, 4, 5, 5), torch.zeros(4, 5), -2) == 2
        with pytest.raises(ValueError, match=r"axes \[2, 3\] fit: name it, class_axis=2"):
            class_axis_of(torch.zeros(2, 4, 5, 5), torch.zeros(4, 5), None)
        with pytest.raises(ValueError, match="none fits"):
            class_axis_of(torch.zeros(2, 4, 5, 5), torch.zeros(4, 6), None)

    @pytest.mark.parametrize("weights", [None, (1.0, 2.0, 0.5)])
    @pytest.mark.parametrize("make", [obj.Independent, lambda **o: obj.Joint(0.0, **o)], ids=["independent", "joint"])
    def test_the_loss_is_torchs_with_what_is_ignored(self, make, weights):
        outputs, y = torch.randn(2, 4, 3, 5, 6), torch.randint(0, 3, (4, 5, 6))
        y[0, :3] = -100
        _, parts = make(class_weights=weights).on_outputs(outputs, y, step())
        table = None if weights is None else torch.tensor(weights)
        wanted = torch.stack([F.cross_entropy(member, y, table) for member in outputs])
        torch.testing.assert_close(parts["loss"], wanted)

    def test_with_batches_of_their_own_and_weights(self):
        outputs, y, shares = torch.randn(2, 4, 3, 5), torch.randint(0, 3, (2, 4, 5)), torch.rand(2, 4)
        _, parts = obj.Independent().on_outputs(outputs, y, step(shares, own=True))
        losses = torch.stack([F.cross_entropy(o, t, reduction="none") for o, t in zip(outputs, y, strict=True)])
        wanted = (shares[..., None] * losses).sum((1, 2)) / (5 * shares.sum(1))
        torch.testing.assert_close(parts["loss"], wanted)

    @pytest.mark.parametrize("engine", ["eager", pytest.param("captured", marks=pytest.mark.slow)])
    def test_segmentation_trains_validates_and_scores(self, engine):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(12, 1, 6, 6, generator=g)
        y = (x[:, 0] > 0).long()
        y[:, 0] = -100
        ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)), 3)
        settings = SETTINGS | {"engine": engine, "batch_size": 6, "epochs": 20}
        run = ds.fit(ens, (x, y), validation=(x, y), **settings)
        logits = ds.predict(ens, x)
        assert logits.shape == (3, 12, 2, 6, 6)
        right = (logits.softmax(2).mean(0).argmax(1) == y)[:, 1:].double().mean()
        assert run.history.rows[-1]["ensemble_accuracy"] == pytest.approx(float(right))
        assert right > 0.8
        scores = ds.predict_scores(ens, x, ["mutual_information"], class_axis=2)["mutual_information"]
        torch.testing.assert_close(scores, ds.scores.mutual_information(logits, class_axis=2))
        assert scores.shape == (12, 6, 6)

    def test_pixel_regression_averages_over_pixels(self):
        outputs, y = torch.randn(2, 4, 1, 5, 6), torch.randn(4, 1, 5, 6)
        _, parts = obj.Independent("mse").on_outputs(outputs, y, step())
        torch.testing.assert_close(parts["loss"], (outputs - y).square().flatten(1).mean(1))

    def test_labels_that_do_not_fit_are_refused(self):
        ens = ds.DeepEnsemble(lambda: nn.Conv2d(1, 2, 1), 2)
        x = torch.zeros(4, 1, 3, 3)
        with pytest.raises(ValueError, match="labels must lie in 0 to 1"):
            ds.fit(ens, (x, torch.full((4, 3, 3), 2)), epochs=1)
        with pytest.raises(ValueError, match="none fits"):
            ds.fit(ens, (x, torch.zeros(4, dtype=torch.long)), epochs=1)


def test_quantiles_are_of_one_target():
    with pytest.raises(ValueError, match=r"Quantiles are of one target for each example, \(batch,\); got \(\d+, 2\)"):
        ds.fit(ds.DeepEnsemble(linear(3), 2), (X, X[:, :2]), objective=obj.Independent("pinball"), epochs=1)
    objective = obj.VirtualAdversarial(obj.Independent("pinball"))
    with pytest.raises(ValueError, match="The loss Pinball does not say how far two outputs are apart"):
        ds.fit(ds.DeepEnsemble(linear(3), 2), (X, X[:, 0]), objective=objective, epochs=1)


@pytest.mark.parametrize("kind", [obj.Independent, obj.Joint])
class TestSettingsThatPositionsDecide:
    def test_weights_of_labels_want_an_axis_of_labels(self, kind):
        ens = ds.DeepEnsemble(lambda: nn.Conv2d(2, 3, 1), 2)
        data = torch.randn(6, 2, 4, 4), torch.ones(6, 3, 4, 4)
        with pytest.raises(ValueError, match=r"are for outputs \(batch, labels\); these have positions"):
            ds.fit(ens, data, objective=kind(loss="binary_cross_entropy", class_weights=(1.0, 2.0, 3.0)), epochs=1)

    def test_one_label_an_input_cannot_be_left_out(self, kind):
        with pytest.raises(ValueError, match="`ignore_index` leaves out positions, and these outputs have none"):
            ds.fit(ds.DeepEnsemble(linear(3), 2), (X, torch.arange(32) % 3), objective=kind(ignore_index=2), epochs=1)


def test_disagreement_elsewhere_is_about_one_answer_an_input():
    ens, maps = ds.DeepEnsemble(lambda: nn.Conv2d(2, 3, 1), 2), torch.randn(6, 2, 4, 4)
    with pytest.raises(ValueError, match="Disagree takes one answer an input"):
        ds.fit(ens, (maps, torch.zeros(6, 4, 4, dtype=torch.int64)), objective=obj.Disagree(maps), epochs=1)
