"""Smooth calibration error against stated values, a direct sum over images, and relplot."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dissensus import metrics

GRID = np.linspace(0.0025, 0.9975, 400)
EVEN = np.arange(400) % 2
CROSSED = np.repeat([0.2, 0.8], 200), np.repeat([1, 0], 200)
CASES = {
    "constant, half right": (np.full(400, 0.8), EVEN),
    "calibrated": (np.full(400, 0.5), EVEN),
    "certain and wrong": (np.ones(400), np.zeros(400)),
    "overconfident": (np.full(400, 0.9), np.arange(400) < 300),
    "step": (GRID, GRID > 0.5),
    "alternating": (GRID, EVEN),
    "crossed": CROSSED,
}


def direct_error(confidence, correct, bandwidth, cells=8000):
    """The integral by its definition: midpoints, and mirror images until they no longer matter."""
    t = (np.arange(cells) + 0.5) / cells
    f, residual = confidence[:, None], (confidence - correct)[:, None]
    images = [2 * k + sign * f for k in range(-4, 5) for sign in (1, -1)]
    kernel = sum(np.exp(-0.5 * ((t - image) / bandwidth) ** 2) for image in images)
    density = (kernel * residual).sum(0) / (bandwidth * np.sqrt(2 * np.pi))
    return np.abs(density).mean() / len(confidence)


@pytest.mark.parametrize(
    ("case", "value", "tolerance"),
    [
        ("constant, half right", 0.3, 1e-9),
        ("calibrated", 0.0, 1e-12),
        ("certain and wrong", 1.0, 1e-9),
        ("overconfident", 0.15, 1e-9),
        ("step", 0.15207, 1e-4),
        ("alternating", 0.2060, 1e-4),
        ("crossed", 0.389, 1e-3),
    ],
)
def test_the_exact_kernel_gives_the_stated_values(case, value, tolerance):
    assert metrics.smooth_ece(*CASES[case]) == pytest.approx(value, abs=tolerance)


@pytest.mark.parametrize(
    ("case", "value"),
    [
        ("constant, half right", 0.3),
        ("calibrated", 0.0),
        ("certain and wrong", 1.0),
        ("overconfident", 0.15),
        ("step", 0.152042),
        ("alternating", 0.209539),
        ("crossed", 0.524948),
    ],
)
def test_truncation_at_one_half_gives_the_values_of_relplot(case, value):
    assert metrics.smooth_ece(*CASES[case], truncate=0.5) == pytest.approx(value, abs=2e-5)


def test_a_fixed_bandwidth_gives_the_stated_values():
    assert metrics.smooth_ece(*CROSSED, bandwidth=0.05) == pytest.approx(0.8, abs=1e-4)
    assert metrics.smooth_ece(*CASES["step"], bandwidth=0.05) == pytest.approx(0.2131, abs=1e-4)
    assert metrics.smooth_ece(*CASES["step"], bandwidth=0.05, truncate=0.5) == pytest.approx(0.212308, abs=1e-5)


@pytest.mark.parametrize("bandwidth", [0.003, 0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_the_spectral_form_equals_the_direct_sum(seed, bandwidth):
    rng = np.random.default_rng(seed)
    confidence = np.append(rng.beta(2, 0.5, size=60), [0.0, 1.0, 1.0, 1.0])
    correct = np.append(rng.integers(2, size=60), [1, 1, 0, 0])
    expected = direct_error(confidence, correct, bandwidth)
    assert metrics.smooth_ece(confidence, correct, bandwidth=bandwidth) == pytest.approx(expected, rel=5e-4)


def test_confidences_of_exactly_one_count_in_full():
    # Far apart, so the errors of the two groups do not mix: half the inputs are off by 0.1.
    confidence = np.repeat([1.0, 0.5], 500)
    correct = np.concatenate([np.arange(500) < 450, np.arange(500) < 250])
    assert metrics.smooth_ece(confidence, correct) == pytest.approx(0.05, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_value_is_its_own_bandwidth(seed, a, b):
    rng = np.random.default_rng(seed)
    confidence = rng.beta(a, b, size=300)
    correct = rng.uniform(size=300) < confidence**2
    value = metrics.smooth_ece(confidence, correct)
    assert 0 <= value <= 1
    if value > 0.001:
        assert metrics.smooth_ece(confidence, correct, bandwidth=value) == pytest.approx(value, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.005, 0.4))
def test_more_smoothing_never_raises_the_error(seed, bandwidth):
    rng = np.random.default_rng(seed)
    confidence, correct = rng.uniform(size=50), rng.integers(2, size=50)
    narrow, wide = (metrics.smooth_ece(confidence, correct, bandwidth=s) for s in (bandwidth, 2 * bandwidth))
    assert wide <= narrow * (1 + 1e-4)
    assert narrow <= np.abs(confidence - correct).mean() + 1e-9
    assert narrow >= abs((confidence - correct).mean()) - 1e-9


@pytest.mark.parametrize("shape", [(0.05, 0.02), (0.3, 0.3), (2, 0.1), (8, 2), (1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_truncation_reproduces_relplot_on_random_and_saturated_confidences(shape, dtype):
    relplot = pytest.importorskip("relplot", reason="relplot, the reference implementation, is not installed")
    rng = np.random.default_rng(0)
    confidence = rng.beta(*shape, size=3000).astype(dtype)
    for power in (0.3, 1.0, 3.0):
        correct = (rng.uniform(size=3000) < confidence**power).astype(np.float64)
        expected = relplot.smECE(confidence.astype(np.float64), correct)
        assert metrics.smooth_ece(confidence, correct, truncate=0.5) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("options", [{"truncate": 0.0}, {"truncate": 1.5}, {"bandwidth": 0.0}, {"bandwidth": 2.0}])
def test_impossible_kernels_are_refused(options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        metrics.smooth_ece(*CROSSED, **options)
