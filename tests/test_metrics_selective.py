"""Risk and coverage against the definition."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dissensus import metrics


def area_in_order(wrong):
    return np.mean(np.cumsum(wrong) / np.arange(1, len(wrong) + 1))


def test_without_ties_the_area_is_the_mean_of_the_running_risks():
    rng = np.random.default_rng(0)
    scores, correct = rng.permutation(200), rng.uniform(size=200) < 0.8
    expected = area_in_order(~correct[np.argsort(scores)])
    assert metrics.risk_coverage_area(scores, correct) == pytest.approx(expected)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_ties_count_as_the_average_over_their_orders(rows):
    scores, correct = (list(column) for column in zip(*rows, strict=True))
    ordered = [order for order in permutations(rows) if [r[0] for r in order] == sorted(scores)]
    expected = np.mean([area_in_order([not r[1] for r in order]) for order in ordered])
    assert metrics.risk_coverage_area(torch.tensor(scores), torch.tensor(correct)) == pytest.approx(expected)


def test_a_constant_score_has_the_error_rate_at_every_coverage():
    curve = metrics.risk_coverage_curve(torch.zeros(50), torch.arange(50) < 40)
    torch.testing.assert_close(curve.risk, torch.full((50,), 0.2, dtype=torch.float64))
    assert curve.area == pytest.approx(0.2)


def test_a_score_that_finds_the_errors_is_better_than_one_that_hides_them():
    correct = torch.arange(10) < 8
    best, worst = (metrics.risk_coverage_area(sign * torch.arange(10.0), correct) for sign in (1, -1))
    assert best == pytest.approx((1 / 9 + 2 / 10) / 10)
    assert worst > 0.2 > best


def test_the_thinned_curve_lies_on_the_whole_one_and_ends_at_full_coverage():
    rng = np.random.default_rng(1)
    scores, correct = rng.normal(size=1000), rng.integers(2, size=1000)
    whole = metrics.risk_coverage_curve(scores, correct, points=1000)
    thin = metrics.risk_coverage_curve(scores, correct, points=17)
    assert len(thin.risk) == 17
    assert (thin.coverage[-1], thin.risk[-1]) == (1.0, pytest.approx(1 - correct.mean()))
    torch.testing.assert_close(thin.risk, whole.risk[(thin.coverage * 1000).round().long() - 1])
    assert thin.area == whole.area == metrics.risk_coverage_area(scores, correct)


def test_outcomes_that_are_not_zero_or_one_are_refused():
    with pytest.raises(ValueError, match="only 0 and 1"):
        metrics.risk_coverage_area(torch.zeros(2), torch.tensor([0, 2]))
