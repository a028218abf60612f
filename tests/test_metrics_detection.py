"""Detection metrics against pair counting, closed forms and scikit-learn."""

from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from dissensus import metrics

# Few levels, so that ties are frequent; halves are exact in every precision.
levels = st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=1, max_size=30)


def scikit_learn_inputs(ood, known, positive="ood"):
    scores = np.concatenate([ood, known])
    labels = np.concatenate([np.ones(len(ood), int), np.zeros(len(known), int)])
    return (labels, scores) if positive == "ood" else (1 - labels, -scores)


def random_scores(seed, tied=False):
    rng = np.random.default_rng(seed)
    ood, known = rng.normal(0.7, 1.5, size=301), rng.normal(size=500)
    return (ood.round(1), known.round(1)) if tied else (ood, known)


@settings(max_examples=50, deadline=None)
@given(levels, levels)
def test_auroc_counts_pairs(ood, known):
    wins = sum((a > b) + (a == b) / 2 for a in ood for b in known)
    assert metrics.auroc(torch.tensor(ood), torch.tensor(known)) == wins / (len(ood) * len(known))


def test_a_constant_score_gives_exactly_one_half():
    assert metrics.auroc(torch.zeros(7), torch.zeros(3)) == 0.5


def test_auroc_of_two_gaussians_is_that_of_their_difference():
    rng = np.random.default_rng(0)
    value = metrics.auroc(rng.normal(1, 2, 200_000), rng.normal(0, 1, 200_000))
    assert value == pytest.approx(NormalDist().cdf(1 / 5**0.5), abs=0.003)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_agreement_with_scikit_learn(seed, tied):
    ood, known = random_scores(seed, tied)
    labels, scores = scikit_learn_inputs(ood, known)
    assert metrics.auroc(ood, known) == pytest.approx(sk.roc_auc_score(labels, scores), abs=1e-12)
    for positive in ("ood", "id"):
        labels, scores = scikit_learn_inputs(ood, known, positive)
        assert metrics.aupr(ood, known, positive) == pytest.approx(sk.average_precision_score(labels, scores))
        fpr, tpr, _ = sk.roc_curve(labels, scores, drop_intermediate=False)
        for wanted in (0.07, 0.5, 0.95, 1.0):
            value = metrics.fpr_at_tpr(ood, known, tpr=wanted, positive=positive)
            assert value == pytest.approx(fpr[np.argmax(tpr >= wanted)])


@settings(max_examples=25, deadline=None)
@given(levels, levels)
def test_rising_maps_change_nothing_and_falling_ones_swap_the_sets(ood, known):
    ood, known = torch.tensor(ood, dtype=torch.float64), torch.tensor(known, dtype=torch.float64)
    value = metrics.auroc(ood, known)
    assert metrics.auroc(ood.exp(), known.exp()) == value
    assert metrics.auroc(3 * ood - 1, 3 * known - 1) == value
    assert metrics.auroc(-ood, -known) == pytest.approx(1 - value, abs=1e-15)
    assert metrics.auroc(known, ood) == pytest.approx(1 - value, abs=1e-15)


def test_the_positive_class_matters_for_the_false_positive_rate():
    rng = np.random.default_rng(0)
    known, ood = rng.normal(-1.5, 1, 400_000), rng.normal(0, 2, 400_000)
    standard = NormalDist()
    expected = {
        "id": standard.cdf((standard.inv_cdf(0.95) - 1.5) / 2),
        "ood": 1 - standard.cdf(2 * standard.inv_cdf(0.05) + 1.5),
    }
    for positive, published in {"id": 0.533, "ood": 0.964}.items():
        value = metrics.fpr_at_tpr(ood, known, positive=positive)
        assert value == pytest.approx(expected[positive], abs=0.003)
        assert value == pytest.approx(published, abs=0.006)


def test_the_positive_class_does_not_matter_for_a_pure_shift():
    rng = np.random.default_rng(1)
    known, ood = rng.normal(0, 1, 400_000), rng.normal(1.5, 1, 400_000)
    for positive in ("ood", "id"):
        assert metrics.fpr_at_tpr(ood, known, positive=positive) == pytest.approx(0.558, abs=0.004)


def test_the_threshold_is_the_first_that_reaches_the_rate():
    # Twenty OOD scores 1 … 20: nineteen of them are at or above 2.
    ood, known = torch.arange(1.0, 21.0), torch.tensor([1.5, 2.0, 2.5])
    assert metrics.fpr_at_tpr(ood, known) == pytest.approx(2 / 3)
    assert metrics.fpr_at_tpr(ood, known, tpr=1.0) == 1.0
    # 0.07 * 100 rounds to just above 7; the seventh largest score is 93.
    hundred = torch.arange(100.0)
    assert metrics.fpr_at_tpr(hundred, torch.tensor([92.5, 93.5]), tpr=0.07) == 0.5


def test_retrieval_at_random_has_the_share_of_positive_inputs():
    assert metrics.aupr(torch.zeros(30), torch.zeros(70)) == pytest.approx(0.3)
    assert metrics.aupr(torch.zeros(30), torch.zeros(70), positive="id") == pytest.approx(0.7)


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_roc_curve_has_the_auroc_as_its_area(tied):
    ood, known = random_scores(3, tied)
    curve = metrics.roc_curve(ood, known, points=5000)
    assert float(torch.trapezoid(curve.tpr, curve.fpr)) == pytest.approx(metrics.auroc(ood, known))


@pytest.mark.parametrize("points", [3, 10, 99, 100])
def test_a_thinned_roc_curve_keeps_its_ends_and_lies_on_the_whole_one(points):
    ood, known = random_scores(4)
    curve = metrics.roc_curve(ood, known, points)
    assert 2 <= len(curve.fpr) <= points
    assert (curve.fpr[0], curve.tpr[0]) == (0, 0)
    assert (curve.fpr[-1], curve.tpr[-1]) == (1, 1)
    for fpr, tpr, threshold in zip(curve.fpr, curve.tpr, curve.threshold, strict=True):
        assert float(tpr) == pytest.approx(np.mean(ood >= threshold.item()))
        assert float(fpr) == pytest.approx(np.mean(known >= threshold.item()))


def test_infinite_scores_are_ranked():
    ood, known = torch.tensor([torch.inf, 0.0]), torch.tensor([-torch.inf, 0.0])
    assert metrics.auroc(ood, known) == 0.875
    assert metrics.fpr_at_tpr(ood, known, tpr=0.5) == 0.0


def test_mixed_precision_compares_values_not_roundings():
    ood, known = torch.tensor([0.1], dtype=torch.float64), torch.tensor([0.1], dtype=torch.float32)
    assert metrics.auroc(ood, known) == 0.0  # float32(0.1) is larger than float64(0.1)


@pytest.mark.parametrize("tpr", [0.0, 1.01])
def test_impossible_rates_are_refused(tpr):
    with pytest.raises(ValueError, match="`tpr`"):
        metrics.fpr_at_tpr(torch.ones(2), torch.zeros(2), tpr=tpr)


def test_a_curve_of_two_points_is_refused():
    with pytest.raises(ValueError, match="at least 3"):
        metrics.roc_curve(torch.ones(2), torch.zeros(2), points=2)
