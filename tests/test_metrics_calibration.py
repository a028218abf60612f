"""Binned calibration errors and the reliability curve."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dissensus import metrics


def binary(confidence):
    confidence = torch.as_tensor(confidence)
    return torch.stack([confidence, 1 - confidence], 1)


def naive_ece(confidence, correct, bins):
    """The definition, one bin at a time: (lower, upper]."""
    total = 0.0
    for k in range(bins):
        inside = (confidence > k / bins) & (confidence <= (k + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - correct[inside].mean())
    return total


def random_set(seed, size=500, classes=4):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(classes, 0.4), size=size), rng.integers(classes, size=size)


@pytest.mark.parametrize("binning", ["width", "mass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hundred_certain_wrong_answers_have_error_one(binning, dtype):
    probs = torch.tensor([[1.0, 0.0]], dtype=dtype).repeat(100, 1)
    labels = torch.ones(100, dtype=torch.long)
    assert metrics.ece(probs, labels, binning=binning) == 1.0
    assert metrics.classwise_ece(probs, labels, binning=binning) == 1.0
    curve = metrics.reliability_curve(probs, labels, binning=binning)
    assert (curve.confidence.item(), curve.accuracy.item(), curve.upper.item()) == (1.0, 0.0, 1.0)


def test_a_confidence_of_one_shares_the_last_bin_with_its_neighbours():
    # Opposite errors of one bin cancel; in a bin of its own, 1.0 would add |1 - 0|.
    curve = metrics.confidence_reliability(torch.tensor([0.96, 1.0]), torch.tensor([True, False]), bins=15)
    assert curve.weight.tolist() == [1.0]
    assert curve.ece == pytest.approx(0.48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [5, 10, 15, 20])
def test_bins_are_closed_on_the_right(bins, dtype):
    edges = (torch.arange(1, bins + 1, dtype=torch.float64) / bins).to(dtype)
    curve = metrics.confidence_reliability(edges, torch.ones(bins), bins=bins)
    assert len(curve.weight) == bins
    torch.testing.assert_close(curve.confidence, curve.upper)


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("seed", range(3))
def test_equal_width_agrees_with_the_definition(seed, bins):
    probs, labels = random_set(seed)
    correct = probs.argmax(1) == labels
    assert metrics.ece(probs, labels, bins) == pytest.approx(naive_ece(probs.max(1), correct, bins))
    by_class = [naive_ece(probs[:, c], labels == c, bins) for c in range(4)]
    assert metrics.classwise_ece(probs, labels, bins) == pytest.approx(np.mean(by_class))


def test_equal_mass_bins_hold_equally_many_distinct_confidences():
    rng = np.random.default_rng(0)
    confidence, correct = rng.uniform(size=103), rng.uniform(size=103) < 0.5
    curve = metrics.confidence_reliability(confidence, correct, bins=10, binning="mass")
    counts = (curve.weight * 103).round()
    assert len(counts) == 10
    assert set(counts.tolist()) == {10.0, 11.0}
    pieces = np.array_split(np.argsort(confidence), np.cumsum(counts.long().tolist())[:-1])
    gaps = [len(p) / 103 * abs(confidence[p].mean() - correct[p].mean()) for p in pieces]
    assert curve.ece == pytest.approx(sum(gaps))


def test_equal_mass_bins_keep_equal_confidences_together():
    confidence = torch.tensor([0.5] * 60 + [0.9] * 40)
    correct = torch.tensor([True, False] * 50)
    curve = metrics.confidence_reliability(confidence, correct, bins=10, binning="mass")
    assert curve.weight.tolist() == pytest.approx([0.6, 0.4])
    assert curve.ece == pytest.approx(0.4 * 0.4)


def test_more_equal_mass_bins_than_inputs_give_each_input_its_own():
    curve = metrics.confidence_reliability(np.array([0.3, 0.9, 0.6]), np.array([1, 0, 1]), bins=10, binning="mass")
    assert curve.confidence.tolist() == pytest.approx([0.3, 0.6, 0.9])
    assert curve.accuracy.tolist() == [1.0, 1.0, 0.0]


def test_probabilities_that_round_above_one_are_confidences_of_one():
    probs = torch.tensor([[1 + 2e-7, 0.0]])
    assert probs[0, 0] > 1
    confidence, correct = metrics.top_confidences(probs, torch.tensor([1]))
    assert confidence.item() == 1.0
    assert metrics.smooth_ece(probs[:, 0], correct) == pytest.approx(1.0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 200), st.sampled_from(["width", "mass"]))
def test_with_one_bin_the_error_is_the_gap_of_the_means(seed, size, binning):
    rng = np.random.default_rng(seed)
    confidence, correct = rng.uniform(0.5, 1, size=size), rng.integers(2, size=size)
    value = metrics.ece(binary(confidence), 1 - correct, bins=1, binning=binning)
    assert value == pytest.approx(abs(confidence.mean() - correct.mean()), abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from(["width", "mass"]))
def test_the_curve_adds_up_and_its_means_lie_in_their_bins(seed, bins, binning):
    probs, labels = random_set(seed, size=60)
    curve = metrics.reliability_curve(probs, labels, bins, binning)
    assert float(curve.weight.sum()) == pytest.approx(1.0)
    assert float((curve.weight * curve.accuracy).sum()) == pytest.approx(metrics.accuracy(probs, labels))
    assert ((curve.lower < curve.confidence) & (curve.confidence <= curve.upper + 1e-12)).all()
    assert curve.ece == metrics.ece(probs, labels, bins, binning)


def test_finer_bins_see_errors_that_cancel_in_coarse_ones():
    confidence, correct = torch.tensor([0.6, 0.9]), torch.tensor([1, 0])
    errors = [metrics.confidence_reliability(confidence, correct, bins).ece for bins in (1, 15)]
    assert errors == pytest.approx([0.25, 0.65])


def test_confidences_and_probabilities_give_one_curve():
    probs, labels = random_set(5)
    direct = metrics.reliability_curve(probs, labels)
    kept = metrics.confidence_reliability(*metrics.top_confidences(probs, labels))
    torch.testing.assert_close(direct.confidence, kept.confidence)
    assert direct.ece == kept.ece


def test_a_reliability_curve_cannot_be_changed():
    curve = metrics.reliability_curve(*random_set(0))
    with pytest.raises(AttributeError):
        curve.weight = torch.zeros(1)


def test_a_curve_without_bins_is_refused():
    with pytest.raises(ValueError, match="`bins`"):
        metrics.confidence_reliability(torch.tensor([0.5]), torch.tensor([True]), bins=0)


@pytest.mark.parametrize("binning", ["width", "mass"])
def test_confidences_may_be_a_column_of_a_table(binning):
    """torch warns of columns in `bucketize`, and warnings are errors here."""
    table = torch.rand(20, 2)
    found = metrics.confidence_reliability(table[:, 0], table[:, 1] > 0.5, binning=binning)
    assert found.ece == metrics.confidence_reliability(table[:, 0].clone(), table[:, 1] > 0.5, binning=binning).ece
