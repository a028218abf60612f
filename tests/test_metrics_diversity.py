"""Disagreement and pair diversity against hand counts and simulation."""

from math import inf, isnan

import numpy as np
import pytest
import torch

from dissensus import metrics


def test_copies_have_no_diversity_and_opposites_all_of_it():
    predictions, labels = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 1])
    assert metrics.pair_diversity(predictions, predictions, labels) == 0.0
    assert metrics.disagreement(predictions, 1 - predictions) == 1.0


@pytest.mark.parametrize(("accuracy_of", "expected"), [("pair", 0.5 / 0.375), ("a", 1.0), ("b", 2.0)])
def test_the_error_rate_is_that_of_the_named_member(accuracy_of, expected):
    labels = torch.zeros(4, dtype=torch.long)
    a, b = torch.tensor([1, 1, 0, 0]), torch.tensor([2, 0, 0, 0])
    assert metrics.pair_diversity(a, b, labels, accuracy_of=accuracy_of) == pytest.approx(expected)


def test_without_errors_the_diversity_is_undefined():
    labels = torch.arange(3)
    assert isnan(metrics.pair_diversity(labels, labels, labels))
    assert metrics.pair_diversity(labels, labels.flip(0), labels, accuracy_of="a") == inf


def test_bounds_have_the_stated_values():
    even = metrics.diversity_bounds(0.9, 0.9, num_classes=10)
    assert even.upper == pytest.approx(1.889, abs=5e-4)
    assert even.lower == 0.0
    assert metrics.diversity_bounds(0.8, 0.9, num_classes=10).lower == pytest.approx(0.5625)


def test_independent_members_reach_the_upper_bound():
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=300_000)
    a, b = (with_errors(rng, labels, accuracy) for accuracy in (0.7, 0.9))
    bound = metrics.diversity_bounds(0.7, 0.9, num_classes=10).upper
    assert metrics.pair_diversity(a, b, labels, accuracy_of="a") == pytest.approx(bound, rel=0.01)


def test_a_perturbed_copy_reaches_the_lower_bound():
    rng = np.random.default_rng(1)
    labels = rng.integers(10, size=300_000)
    base = with_errors(rng, labels, 0.9)
    redrawn = rng.uniform(size=len(labels)) < 0.125
    copy = np.where(redrawn, rng.integers(10, size=len(labels)), base)
    assert np.mean(copy == labels) == pytest.approx(0.8, abs=0.003)
    bound = metrics.diversity_bounds(0.8, 0.9, num_classes=10).lower
    assert metrics.pair_diversity(copy, base, labels, accuracy_of="a") == pytest.approx(bound, rel=0.01)


def test_mean_disagreement_is_the_mean_over_pairs():
    votes = torch.from_numpy(np.random.default_rng(2).integers(-1, 4, size=(6, 50)))
    pairs = [metrics.disagreement(votes[i], votes[j]) for i in range(6) for j in range(i)]
    assert metrics.mean_disagreement(votes) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize(("accuracy", "base"), [(1.0, 0.9), (0.05, 0.9), (0.9, 1.1)])
def test_accuracies_outside_the_formulas_are_refused(accuracy, base):
    with pytest.raises(ValueError, match="between chance"):
        metrics.diversity_bounds(accuracy, base, num_classes=10)


def test_probabilities_in_place_of_predictions_are_refused():
    probs = torch.full((4, 2), 0.5)
    with pytest.raises(ValueError, match="argmax"):
        metrics.disagreement(probs, probs)
    with pytest.raises(ValueError, match="two members or more"):
        metrics.mean_disagreement(torch.zeros(1, 4, dtype=torch.long))


def with_errors(rng, labels, accuracy):
    wrong = rng.uniform(size=len(labels)) >= accuracy
    return np.where(wrong, (labels + rng.integers(1, 10, size=len(labels))) % 10, labels)
