"""Accuracy, NLL, Brier and group accuracy against closed forms and scikit-learn."""

from math import log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from dissensus import metrics


def random_predictions(seed, batch=200, classes=5):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(classes, 0.5), size=batch)
    return probs, rng.integers(classes, size=batch)


@pytest.mark.parametrize("classes", [2, 10])
def test_uniform_predictions_have_the_values_of_the_closed_forms(classes):
    probs, labels = torch.full((6, classes), 1 / classes), torch.full((6,), classes - 1)
    assert metrics.nll(probs, labels) == pytest.approx(log(classes), rel=1e-6)
    assert metrics.brier(probs, labels) == pytest.approx(1 - 1 / classes, rel=1e-6)
    assert metrics.accuracy(probs, labels) == 0.0  # the first of equal probabilities wins


def test_perfect_and_certainly_wrong_predictions_are_the_ends_of_each_range():
    probs, right = torch.eye(3), torch.arange(3)
    wrong = (right + 1) % 3
    assert metrics.accuracy(probs, right) == 1.0
    assert metrics.brier(probs, right) == 0.0
    assert str(metrics.nll(probs, right)) == "0.0"
    assert metrics.accuracy(probs, wrong) == 0.0
    assert metrics.brier(probs, wrong) == 2.0
    assert metrics.nll(probs, wrong) == pytest.approx(-log(torch.finfo(torch.float32).tiny))


def test_brier_of_a_confident_right_prediction_keeps_its_digits():
    # The expanded square 1 - 2p + p^2 would lose all of them in float32.
    probs = torch.tensor([[1 - 1e-6, 1e-6]], dtype=torch.float64)
    assert metrics.brier(probs.float(), torch.tensor([0])) == pytest.approx(2e-12, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_agreement_with_scikit_learn(seed):
    probs, labels = random_predictions(seed)
    assert metrics.accuracy(probs, labels) == sk.accuracy_score(labels, probs.argmax(1))
    assert metrics.nll(probs, labels) == pytest.approx(sk.log_loss(labels, probs, labels=range(5)))
    assert metrics.top_k_accuracy(probs, labels, k=3) == pytest.approx(
        sk.top_k_accuracy_score(labels, probs, k=3, labels=range(5))
    )
    binary = probs[:, :2] / probs[:, :2].sum(1, keepdims=True)
    # scikit-learn counts one class of two, we count both.
    assert metrics.brier(binary, labels % 2) == pytest.approx(2 * sk.brier_score_loss(labels % 2, binary[:, 1]))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_top_k_accuracy_grows_from_accuracy_to_one(seed, classes):
    rng = np.random.default_rng(seed)
    # Few levels, so that ties are frequent.
    probs = rng.integers(1, 4, size=(40, classes)).astype(np.float64)
    probs /= probs.sum(1, keepdims=True)
    labels = rng.integers(classes, size=40)
    values = [metrics.top_k_accuracy(probs, labels, k) for k in range(1, classes + 1)]
    assert values[0] == metrics.accuracy(probs, labels)
    assert values == sorted(values)
    assert values[-1] == 1.0


def test_group_accuracies_are_the_accuracies_of_the_subsets():
    probs, labels = random_predictions(7)
    groups = np.random.default_rng(1).choice([-4, 0, 9], size=len(labels))
    found = metrics.group_accuracies(probs, labels, groups)
    assert list(found) == [-4, 0, 9]
    for group, value in found.items():
        assert value == metrics.accuracy(probs[groups == group], labels[groups == group])
    assert metrics.worst_group_accuracy(probs, labels, groups) == min(found.values())


def test_one_group_gives_the_accuracy():
    probs, labels = random_predictions(8)
    worst = metrics.worst_group_accuracy(probs, labels, np.full(len(labels), 3))
    assert worst == metrics.accuracy(probs, labels)


@pytest.mark.parametrize("k", [0, 6])
def test_impossible_k_is_refused(k):
    with pytest.raises(ValueError, match="between 1 and the number of classes"):
        metrics.top_k_accuracy(*random_predictions(0), k=k)
