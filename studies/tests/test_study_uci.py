"""The benchmark of tabular regression: its splits, its units, and that it runs on the real sets."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dissensus_studies import STUDIES
from dissensus_studies.deep_ensembles import uci

from dissensus import metrics

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
shared = pytest.mark.skipif(
    not (SHARED / "uci" / "dropout_splits").is_dir(), reason="the UCI sets are not in ../shared/data"
)


def write_set(folder, name="bostonHousing", rows=60, num_splits=3, seed=0):
    """A linear set with little noise, in the benchmark's format."""
    rng = np.random.default_rng(seed)
    x = np.column_stack([rng.normal(50, 7, rows), rng.normal(0, 0.1, rows), np.full(rows, 3.0)])
    y = 1000 + 20 * x[:, 0] + 300 * x[:, 1] + rng.normal(0, 5, rows)
    orders = np.stack([rng.permutation(rows) for _ in range(num_splits)])
    np.savez(folder / f"{name}.npz", X=x, y=y, train_idx=orders[:, : rows - 10], test_idx=orders[:, rows - 10 :])
    return x, y, orders


def test_splits_are_standardised_on_their_training_part(tmp_path):
    x, y, orders = write_set(tmp_path)
    splits = uci.Splits.load(tmp_path / "bostonHousing.npz")
    for split, order in enumerate(orders):
        train, test = order[:50], order[50:]
        mean, std = x[train].mean(0), x[train].std(0)
        std[2] = 1.0
        np.testing.assert_allclose(splits.x[split], (x[train] - mean) / std, atol=1e-5)
        np.testing.assert_allclose(splits.test_x[split], (x[test] - mean) / std, atol=1e-5)
        np.testing.assert_allclose(splits.y[split, :, 0], (y[train] - y[train].mean()) / y[train].std(), atol=1e-5)
        np.testing.assert_allclose(splits.test_y[split], y[test])
    assert torch.isfinite(splits.x).all()


def test_results_are_in_the_targets_own_units(tmp_path):
    write_set(tmp_path, rows=210)
    found = uci.measure_set(uci.Splits.load(tmp_path / "bostonHousing.npz"), hidden=20)
    # Noise has standard deviation 5: no error is much below it, and log(5 sqrt(2 pi e)) = 3.03 nats is the floor.
    for arm in uci.ARMS:
        assert 3 < found[arm]["rmse"].mean < 25
        assert 2.5 < found[arm]["nll"].mean < 5


def test_the_mixtures_error_is_never_above_the_mean_of_single_nets(tmp_path):
    # Jensen: the root mean square is convex, so the error of the mean is at most the mean of the errors.
    write_set(tmp_path)
    found = uci.measure_set(uci.Splits.load(tmp_path / "bostonHousing.npz"), hidden=5, epochs=2)
    for suffix in ("", " + adversarial"):
        pairs = zip(found[f"mixture{suffix}"]["rmse"].values, found[f"single{suffix}"]["rmse"].values, strict=True)
        assert all(mixed <= single + 1e-9 for mixed, single in pairs)


def test_one_member_is_judged_as_the_metrics_judge_it():
    torch.manual_seed(0)
    mean, scale, target = (
        torch.randn(1, 2, 9).double(),
        torch.rand(1, 2, 9).double() + 0.1,
        torch.randn(2, 9).double(),
    )
    judged = uci._judge(mean, scale, target)
    for split in range(2):
        assert judged["rmse"][split].item() == pytest.approx(metrics.rmse(mean[0, split], target[split]))
        expected = metrics.gaussian_nll(mean[0, split], scale[0, split], target[split])
        assert judged["nll"][split].item() == pytest.approx(expected)


@pytest.mark.parametrize("inside", ["", "dropout_splits", "uci/dropout_splits"])
def test_sets_are_found_in_the_folder_or_below_it(tmp_path, inside):
    (tmp_path / inside).mkdir(parents=True, exist_ok=True)
    write_set(tmp_path / inside, "wine-quality-red")
    assert uci.find_sets(tmp_path) == {"wine": tmp_path / inside / "wine-quality-red.npz"}


def test_a_folder_without_sets_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="there are none in"):
        STUDIES["uci-deep-ensembles"].run(tmp_path / "out", data=tmp_path)


def test_the_study_writes_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(uci, "measure_set", functools.partial(uci.measure_set, epochs=2))
    write_set(tmp_path)
    write_set(tmp_path, "power-plant")
    page = STUDIES["uci-deep-ensembles"].run(tmp_path / "out", data=tmp_path)
    assert "boston" in page.read_text(encoding="utf-8")
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert set(results["sets"]) == {"boston", "power"}
    assert len(results["sets"]["power"]["mixture"]["nll"]["values"]) == 3
    assert "RMSE" in capsys.readouterr().out


@pytest.mark.shared
@shared
@pytest.mark.parametrize(("name", "rmse", "nll"), [("boston", 4.5, 3.0), ("concrete", 7.0, 3.4), ("wine", 0.75, 1.3)])
def test_mixtures_on_real_sets_are_as_good_as_they_should_be(name, rmse, nll):
    splits = uci.Splits.load(uci.find_sets(SHARED)[name], num_splits=3)
    found = uci.measure_set(splits, hidden=50)
    # Bounds leave room for three splits of twenty; without learning they would be 9, 17 and 0.8.
    for arm in ("mixture", "mixture + adversarial"):
        assert found[arm]["rmse"].mean < rmse
        assert found[arm]["nll"].mean < nll
    assert found["mixture"]["nll"].mean < found["single"]["nll"].mean


@pytest.mark.shared
@shared
def test_every_set_that_is_there_has_disjoint_splits_of_nine_to_one():
    for path in uci.find_sets(SHARED).values():
        with np.load(path) as stored:
            total = len(stored["X"])
            for train, test in zip(stored["train_idx"], stored["test_idx"], strict=True):
                assert sorted([*train, *test]) == list(range(total))
                assert len(train) / total == pytest.approx(0.9, abs=0.002)
