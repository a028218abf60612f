"""`fit(..., watch_collusion=True)`: what it records, when it warns, and that it changes nothing else."""

import logging

import pytest
import torch
from collusion_cases import RULE_CASES, classes, mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus import objectives as obj

COLUMNS = [
    f"{data}_{what}" for data in ("train", "validation") for what in ("member_error", "ensemble_error", "diversity")
]
x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
target = x[:, :1] - x[:, 1:2]


def fit(ensemble, data, objective, **options):
    defaults = {"epochs": 3, "batch_size": 40, "lr": 1e-2, "device": "cpu", "watch_collusion": True}
    return ds.fit(ensemble, data, objective=objective, **defaults | options)


@pytest.mark.parametrize("average", ["probs", "scores"])
def test_the_columns_are_the_decomposition_of_the_trained_ensemble(average):
    ensemble = ds.DeepEnsemble(mlp(4, 8, 3), 4)
    held_out = (x[80:], y[80:])
    run = fit(ensemble, (x[:80], y[:80]), obj.Joint(beta=0.7, average=average), validation=held_out)
    assert set(COLUMNS) <= set(run.history.columns)
    for name, (inputs, labels) in {"train": (x[:80], y[:80]), "validation": held_out}.items():
        parts = obj.decompose(ds.predict(ensemble, inputs), labels, average=average)
        for what in ("member_error", "ensemble_error", "diversity"):
            assert run.history[-1][f"{name}_{what}"] == pytest.approx(float(getattr(parts, what).mean()), rel=1e-4)


@pytest.mark.parametrize("loss", ["mse", "mae", "gaussian_nll"])
def test_regression_is_watched_by_the_squared_error_of_predictions(loss):
    width = 2 if loss == "gaussian_nll" else 1
    ensemble = ds.DeepEnsemble(mlp(4, 8, width), 3)
    run = fit(ensemble, (x, target[:, 0]), obj.Independent(loss))
    means = ds.predict(ensemble, x)[..., :1]
    parts = obj.decompose(means, target, "mse")
    assert run.history[-1]["train_ensemble_error"] == pytest.approx(float(parts.ensemble_error.mean()), rel=1e-4)
    assert "validation_diversity" not in run.history.columns


def with_positions():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1))


images = torch.randn(24, 1, 5, 5, generator=torch.Generator().manual_seed(1))
marks = (torch.stack([x[:, 0], x[:, 1] + x[:, 2]], 1) > 0).long()
OTHERS = {
    "labels": (mlp(4, 8, 2), x, marks, {"loss": "binary_cross_entropy"}, "sigmoid"),
    "counts": (mlp(4, 8, 1), x, (3 * x[:, 0].exp()).round(), {"loss": "poisson"}, "poisson"),
    "answers at positions": (with_positions, images, (images > 0).float(), {"loss": "binary_cross_entropy"}, "sigmoid"),
    "values at positions": (with_positions, images, images.square(), {"loss": "mse"}, "mse"),
}


@pytest.mark.parametrize(
    "make", [obj.Independent, obj.Joint, lambda **o: obj.Joint(average="scores", **o)], ids=["alone", "joint", "scores"]
)
@pytest.mark.parametrize("case", OTHERS)
def test_labels_counts_and_maps_are_watched_by_the_decomposition_of_their_loss(case, make):
    net, inputs, targets, options, loss = OTHERS[case]
    objective = make(**options)
    ensemble = ds.DeepEnsemble(net, 3)
    run = fit(ensemble, (inputs, targets), objective, validation=(inputs, targets))
    outputs = ds.predict(ensemble, inputs)
    if outputs.ndim > 3:  # a position is an example
        outputs, targets = outputs.flatten(1)[..., None], targets.flatten()[:, None]
    parts = obj.decompose(outputs, targets, loss, getattr(objective, "average", "probs"))
    for what in ("member_error", "ensemble_error", "diversity"):
        wanted = pytest.approx(float(getattr(parts, what).mean()), rel=1e-4, abs=1e-7)
        for name in ("train", "validation"):
            assert run.history[-1][f"{name}_{what}"] == wanted


def test_positions_with_classes_are_watched_without_those_that_are_ignored():
    def make():
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 1))

    labels = (images[:, 0] > 0).long()
    labels[:, :2] = -100
    ensemble = ds.DeepEnsemble(make, 3)
    run = fit(ensemble, (images, labels), obj.Joint(0.7), validation=(images, labels))
    counted = ds.predict(ensemble, images)[..., 2:, :].movedim(2, -1).flatten(1, 3)
    parts = obj.decompose(counted, labels[:, 2:].flatten())
    for what in ("member_error", "ensemble_error", "diversity"):
        wanted = pytest.approx(float(getattr(parts, what).mean()), rel=1e-4, abs=1e-7)
        for name in ("train", "validation"):
            assert run.history[-1][f"{name}_{what}"] == wanted
    with pytest.raises(ValueError, match="in which no label counts"):
        fit(ensemble, (images, torch.full_like(labels, -100)), obj.Joint(0.7))


@pytest.mark.parametrize(
    "loss", ["pinball", lambda output, goal: (output[:, 0] - goal).abs()], ids=["quantiles", "own"]
)
def test_what_cannot_be_judged_is_refused_before_training(loss):
    ensemble = ds.DeepEnsemble(mlp(4, 8, 3), 2)
    before = ds.predict(ensemble, x)
    with pytest.raises(ValueError, match="watch_collusion=True judges members by a loss of classes, labels, counts"):
        fit(ensemble, (x, target[:, 0]), obj.Independent(loss))
    assert torch.equal(ds.predict(ensemble, x), before)


def test_watching_changes_nothing_else():
    results = []
    for watch in (True, False):
        ensemble = ds.DeepEnsemble(lambda: nn.Sequential(mlp(4, 8, 3)(), nn.Dropout(0.2)), 3)
        torch.manual_seed(7)
        fit(ensemble, (x, y), obj.Independent(), watch_collusion=watch, validation=(x, y))
        results.append((ds.predict(ensemble, x), torch.rand(3)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        return x[index], y[index]


@pytest.mark.parametrize("make", [Items, lambda: DataLoader(TensorDataset(x, y), batch_size=40)])
def test_datasets_and_loaders_are_watched_too(make):
    ensemble = ds.DeepEnsemble(mlp(4, 8, 3), 2)
    options = {"batch_size": None} if make is not Items else {}
    run = fit(ensemble, make(), obj.Joint(beta=0.5), **options)
    parts = obj.decompose(ds.predict(ensemble, x), y)
    assert run.history[-1]["train_diversity"] == pytest.approx(float(parts.diversity.mean()), rel=1e-3, abs=1e-7)


def test_joint_training_warns_once_and_independent_training_never(caplog):
    case = RULE_CASES["regression"]
    for beta in (0.0, 1.0):
        caplog.clear()
        ensemble = ds.DeepEnsemble(case.make, case.members)
        with caplog.at_level(logging.WARNING, logger="dissensus"):
            run = fit(ensemble, case.train, obj.Joint(beta, loss="mse"), epochs=30, batch_size=32)
        warned = [record for record in caplog.records if "members collude" in record.getMessage()]
        assert len(warned) == (beta == 1.0)
        assert run.history[-1]["colluding"] == (beta == 1.0)
        finding = ds.diagnose(ds.predict(ensemble, case.test[0]), case.test[1], "mse", history=run.history, repeats=2)
        assert len(finding.checks) == 30
        assert finding.colluding == (beta == 1.0)


def test_loss_guided_members_that_became_useless_are_noticed(caplog):
    # Without its guard and at ten times the usual strength, disagreement takes over (document 002).
    case = classes("scores")
    ensemble = ds.DeepEnsemble(case.make, 5)
    objective = obj.LossGuided(strength=5.0, active=2, guard=None)
    with caplog.at_level(logging.WARNING, logger="dissensus"):
        fit(ensemble, case.train, objective, epochs=20, batch_size=32, lr=2e-3)
    assert "members collude" in caplog.text
    finding = ds.diagnose(ds.predict(ensemble, case.test[0]), case.test[1], average="scores", repeats=5)
    assert finding.measures.ensemble_accuracy > 0.8
    assert finding.members_useless
    assert finding.colluding
    assert "of little use alone while the ensemble looks fine" in finding.explain()


def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(tmp_path):
    def run(folder, epochs, stop_after=None, **options):
        ensemble = ds.DeepEnsemble(mlp(4, 8, 3), 3)

        def stop(seen):
            if seen.epoch == stop_after:
                raise KeyboardInterrupt

        return fit(
            ensemble,
            (x, y),
            obj.Joint(beta=0.9),
            epochs=epochs,
            validation=(x, y),
            checkpoint_dir=folder,
            callback=stop,
            **options,
        )

    whole = run(tmp_path / "whole", 4)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", 4, stop_after=3)
    resumed = run(tmp_path / "parts", 4, resume=True)
    for name in (*COLUMNS, "colluding"):
        assert resumed.history[name] == pytest.approx(whole.history[name])
