"""Regression metrics against numerical integration, torch and scikit-learn."""

from math import log, pi, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch.distributions import Laplace, Normal

from dissensus import metrics

FAMILIES = {
    "gaussian": (metrics.gaussian_nll, metrics.gaussian_crps, Normal),
    "laplace": (metrics.laplace_nll, metrics.laplace_crps, Laplace),
}


def random_densities(seed, shape=(50,)):
    generator = torch.Generator().manual_seed(seed)
    mean, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return mean, torch.rand(shape, generator=generator, dtype=torch.float64) + 0.2, target


def integrated_crps(distribution, target):
    """The definition, integral of (F(x) - 1[x >= y])^2, one half of the line at a time."""
    below, above = np.linspace(-60, target, 200_001), np.linspace(target, 60, 200_001)
    left = distribution.cdf(torch.from_numpy(below)).square().numpy()
    right = (1 - distribution.cdf(torch.from_numpy(above))).square().numpy()
    return sum(torch.trapezoid(*map(torch.from_numpy, half)).item() for half in ((left, below), (right, above)))


@pytest.mark.parametrize("family", FAMILIES)
def test_nll_agrees_with_torch_distributions(family):
    nll, _, distribution = FAMILIES[family]
    mean, scale, target = random_densities(0)
    expected = -distribution(mean, scale).log_prob(target).mean()
    assert nll(mean, scale, target) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mean", "scale", "target"), [(0.0, 1.0, 0.0), (1.0, 2.5, -3.0), (-2.0, 0.3, 4.0)])
def test_crps_agrees_with_numerical_integration(family, mean, scale, target):
    _, crps, distribution = FAMILIES[family]
    arguments = (torch.tensor([v], dtype=torch.float64) for v in (mean, scale, target))
    expected = integrated_crps(distribution(torch.tensor(mean).double(), scale), target)
    assert crps(*arguments) == pytest.approx(expected, rel=1e-5)


def test_crps_at_the_mean_has_its_closed_form():
    zero, two = np.zeros(3), np.full(3, 2.0)
    assert metrics.gaussian_crps(zero, two, zero) == pytest.approx(2 * (sqrt(2) - 1) / sqrt(pi))
    assert metrics.laplace_crps(zero, two, zero) == pytest.approx(0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_crps_of_many_draws_approaches_that_of_their_distribution(family):
    _, crps, distribution = FAMILIES[family]
    mean, scale, target = random_densities(1, (20,))
    torch.manual_seed(0)
    draws = distribution(mean, scale).sample((20_000,))
    expected = pytest.approx(crps(mean, scale, target), rel=0.01)
    assert metrics.ensemble_crps(draws, target) == expected
    assert metrics.ensemble_crps(draws, target, fair=True) == expected


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_ensemble_crps_is_the_double_sum_of_its_definition(seed, members):
    rng = np.random.default_rng(seed)
    samples, target = rng.normal(size=(members, 7)), rng.normal(size=7)
    near = np.abs(samples - target).mean()
    spread = np.abs(samples[:, None] - samples[None]).sum((0, 1)).mean() / 2
    assert metrics.ensemble_crps(samples, target) == pytest.approx(near - spread / members**2)
    if members > 1:
        fair = metrics.ensemble_crps(samples, target, fair=True)
        assert fair == pytest.approx(near - spread / (members * (members - 1)))


def test_one_member_has_its_absolute_error():
    mean, _, target = random_densities(2)
    assert metrics.ensemble_crps(mean[None], target) == pytest.approx(metrics.mae(mean, target))


def test_point_errors_agree_with_scikit_learn():
    mean, _, target = random_densities(3)
    assert metrics.rmse(mean, target) == pytest.approx(sk.root_mean_squared_error(target, mean))
    assert metrics.mae(mean, target) == pytest.approx(sk.mean_absolute_error(target, mean))


def test_the_nll_of_the_true_gaussian_is_its_entropy():
    noise = np.random.default_rng(0).normal(0, 3, size=400_000)
    value = metrics.gaussian_nll(np.zeros_like(noise), np.full_like(noise, 3), noise)
    assert value == pytest.approx(2.51755, abs=0.005)
    assert value == pytest.approx(log(2 * pi * 9) / 2 + 0.5, abs=0.005)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_central_intervals_cover_what_they_claim(family, level):
    scale = torch.full((400_000,), 1.7)
    torch.manual_seed(0)
    target = FAMILIES[family][2](torch.zeros(()), 1.7).sample(scale.shape)
    lower, upper = metrics.central_interval(torch.zeros_like(scale), scale, level, family)
    assert metrics.interval_coverage(lower, upper, target) == pytest.approx(level, abs=0.003)
    quantile = FAMILIES[family][2](0.0, 1.7).icdf(torch.tensor(0.5 + level / 2)).item()
    assert metrics.interval_width(lower, upper) == pytest.approx(2 * quantile, rel=1e-5)


def test_the_ends_of_an_interval_belong_to_it():
    assert metrics.interval_coverage(np.zeros(3), np.ones(3), np.array([0.0, 1.0, 1.1])) == pytest.approx(2 / 3)


def test_impossible_scales_and_intervals_are_refused():
    ones = torch.ones(2)
    with pytest.raises(ValueError, match="`scale` must be positive"):
        metrics.gaussian_nll(ones, torch.tensor([1.0, 0.0]), ones)
    with pytest.raises(ValueError, match="must not lie below"):
        metrics.interval_width(ones, -ones)
    with pytest.raises(ValueError, match="`level`"):
        metrics.central_interval(ones, ones, level=1.0)
    with pytest.raises(ValueError, match="two members"):
        metrics.ensemble_crps(torch.ones(1, 2), ones, fair=True)
