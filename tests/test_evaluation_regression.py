"""Evaluations of regression: densities and point predictions, number by number the metric of the predictions."""

import pytest
import torch
from evaluation_cases import regression_data, regressor, unlabelled

import dissensus as ds
from dissensus import metrics
from dissensus.evaluation import evaluate
from dissensus.objectives import mean_and_scale
from dissensus.scores import REGRESSION_SCORES


def density_values(ensemble, x, y, family):
    mean, scale = mean_and_scale(ds.predict(ensemble, x))
    centre, deviation = ds.mixture(mean, scale, family)
    pooled = deviation / (2**0.5 if family == "laplace" else 1)
    low, high = metrics.central_interval(centre, pooled, 0.9, family)
    likelihood = ds.objectives.LIKELIHOODS[f"{family}_nll"]
    return {
        "rmse": metrics.rmse(centre, y),
        "mae": metrics.mae(centre, y),
        f"{family}_nll": metrics.DENSITY_METRICS[f"{family}_nll"](centre, pooled, y),
        f"{family}_crps": metrics.DENSITY_METRICS[f"{family}_crps"](centre, pooled, y),
        "mixture_nll": likelihood.mixture(ds.predict(ensemble, x), y).mean(),
        "coverage_90": metrics.interval_coverage(low, high, y),
        "width_90": metrics.interval_width(low, high),
        **{("rmse", m): metrics.rmse(mean[m], y) for m in range(len(mean))},
        **{("mean", name): score(mean, scale, family=family).mean() for name, score in REGRESSION_SCORES.items()},
    }


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_every_number_of_a_density_ensemble_is_the_metric_of_the_predictions(family, outputs):
    ensemble = regressor(2 * outputs)
    x, y = regression_data(90, outputs=outputs)
    far = unlabelled(70)
    result = evaluate(ensemble, (x, y), {"far": far}, loss=f"{family}_nll", bootstrap=0, batch_size=32)
    expected = density_values(ensemble, x, y, family)
    seen = set()
    for number in result.numbers:
        if number.set == "id":
            key = number.score or number.member
            seen.add(number.metric if key is None else (number.metric, key))
            want = float(expected[number.metric if key is None else (number.metric, key)])
            assert number.value == pytest.approx(want, rel=2e-5), number
    assert seen == set(expected)
    mean, scale = mean_and_scale(ds.predict(ensemble, far))
    known = mean_and_scale(ds.predict(ensemble, x))
    for name, score in REGRESSION_SCORES.items():
        pair = [score(*part, family=family).mean(-1) for part in ((mean, scale), known)]
        assert result.number("auroc", "far", score=name).value == pytest.approx(metrics.auroc(*pair), abs=1e-3)


def test_weights_reach_every_part_of_a_density_ensemble():
    ensemble = regressor()
    x, y = regression_data(90)
    weights = torch.tensor([0.0, 0.0, 1.0])
    result = evaluate(ensemble, (x, y), loss="gaussian_nll", weights=weights, bootstrap=0)
    alone = ds.DeepEnsemble.from_members([ensemble.member(2)])
    single = evaluate(alone, (x, y), loss="gaussian_nll", bootstrap=0)
    for number in single.numbers:
        if number.member is None:
            assert result.number(number.metric, score=number.score).value == pytest.approx(number.value, rel=1e-5)


def test_point_predictions_have_errors_and_one_variance():
    ensemble = regressor(1)
    x, y = regression_data(90)
    result = evaluate(ensemble, (x, y[:, 0]), {"far": unlabelled(70)}, loss="mse", bootstrap=30)
    outputs = ds.predict(ensemble, x)
    assert result.score_names == ("knowledge_variance",)
    assert result.number("rmse").value == pytest.approx(metrics.rmse(outputs.mean(0), y), rel=1e-5)
    assert result.number("mae").value == pytest.approx(metrics.mae(outputs.mean(0), y), rel=1e-5)
    variance = outputs.var(0, correction=0).mean()
    assert result.number("mean", score="knowledge_variance").value == pytest.approx(float(variance), rel=1e-4)
    assert result.reliability == ()
    assert "RMSE" in result.table()


def test_coverage_of_the_curve_is_that_of_central_intervals():
    ensemble = regressor()
    x, y = regression_data(200)
    (curve,) = evaluate(ensemble, (x, y), loss="gaussian_nll", bootstrap=0).reliability
    centre, deviation = ds.mixture(*mean_and_scale(ds.predict(ensemble, x)))
    for level, inside in zip(curve.claimed, curve.observed, strict=True):
        ends = metrics.central_interval(centre, deviation, level)
        assert inside == pytest.approx(metrics.interval_coverage(*ends, y), abs=1e-6)
