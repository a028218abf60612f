"""The toy sets, number by number: a changed bit in them would change every study's results."""

import numpy as np
import pytest

from dissensus.data import toy


def test_the_cubic_of_seed_173_is_the_practicals():
    x, y = toy.cubic()
    np.testing.assert_allclose(x[:3, 0], [-3.25394016, 1.67372027, 0.17798731], atol=5e-9)
    np.testing.assert_allclose(y[:3], [-35.76914271, 9.12877443, 2.4319994], atol=5e-9)
    assert np.mean(y**2) == pytest.approx(612.72994, abs=5e-6)
    assert np.mean((y - x[:, 0] ** 3) ** 2) == pytest.approx(6.76254, abs=5e-6)


def test_the_likelihood_of_the_true_cubic_is_the_floor_that_facts_give():
    # Closed form: the mean Gaussian NLL at the true function is log(sd sqrt(2 pi)) + mean noise^2 / (2 sd^2).
    x, y = toy.cubic()
    noise = y - x[:, 0] ** 3
    nll = np.log(3 * np.sqrt(2 * np.pi)) + np.mean(noise**2) / 18
    assert nll == pytest.approx(2.39325, abs=5e-6)


def test_spiral_angles_of_seed_0_are_the_practicals_print_out_exactly():
    angles = toy.spiral_angles()
    assert list(zip(angles.min(1).tolist(), angles.max(1).tolist(), strict=True)) == [
        (-0.6210700567572351, 9.160761050479454),
        (7.506810982132371, 16.88345105834359),
        (15.192239293196302, 25.21297645733773),
    ]


def test_spiral_points_lie_at_their_angles_and_radii():
    x, y = toy.spirals()
    radius = np.tile(np.linspace(0, 1, 1000), 3)
    np.testing.assert_allclose(np.hypot(*x.T), radius, atol=1e-12)
    turned = radius * np.exp(1j * (np.pi / 2 - toy.spiral_angles().reshape(-1)))
    np.testing.assert_allclose(x[:, 0] + 1j * x[:, 1], turned, atol=1e-12)
    assert np.bincount(y).tolist() == [1000, 1000, 1000]
    assert y.dtype == np.int64


@pytest.mark.parametrize("draw", [toy.cubic, toy.spirals, toy.spiral_angles])
def test_the_global_generator_is_left_as_found(draw):
    before = np.random.get_state()  # noqa: NPY002
    draw()
    after = np.random.get_state()  # noqa: NPY002
    assert before[2:] == after[2:]
    np.testing.assert_array_equal(before[1], after[1])


@pytest.mark.parametrize("draw", [toy.cubic, toy.spirals])
def test_seeds_decide_the_draw(draw):
    first, again, other = draw(seed=5), draw(seed=5), draw(seed=6)
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: toy.cubic(num_points=0), "num_points"),
        (lambda: toy.spirals(points_per_class=0), "points_per_class"),
        (lambda: toy.spirals(num_classes=0), "num_classes"),
    ],
)
def test_an_empty_set_is_refused(draw, name):
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number of at least 1; got 0"):
        draw()
