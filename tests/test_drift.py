"""The drift monitor: the martingale's formula, ranks, exact continuation, and no more false alarms than promised."""

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.conformal import DriftMonitor, Martingale, two_sample
from dissensus.conformal.drift import _BETS, _uniforms


def beta_density(p, a, b):
    from scipy.stats import beta

    return beta.pdf(p, a, b)


def test_the_value_is_the_mixture_over_starts_and_bets():
    p = np.random.default_rng(0).uniform(size=30)
    martingale = Martingale()
    gains = np.stack([beta_density(p, a, b) for a, b in _BETS], 1)
    for t in range(1, 31):
        entered = [(s**-0.25 - (s + 1) ** -0.25) * np.prod(gains[s - 1 : t], axis=0).mean() for s in range(1, t + 1)]
        assert martingale.update(p[t - 1]) == pytest.approx((t + 1) ** -0.25 + sum(entered), rel=1e-10)
        assert martingale.log_value == pytest.approx(np.log(martingale.value), rel=1e-9, abs=1e-12)


def test_values_do_not_depend_on_how_a_stream_is_cut():
    scores = np.random.default_rng(1).normal(size=3000)
    held_out = np.random.default_rng(2).normal(size=500)
    whole, single, parts = (DriftMonitor.of_scores(held_out, seed=3) for _ in range(3))
    path = whole.log_path(scores)
    one_by_one = [np.log(single.update_scores([score])) for score in scores[:300]]
    np.testing.assert_allclose(path[:300], one_by_one, rtol=1e-8, atol=1e-9)
    for part in np.split(scores, [7, 1031, 1032, 2500]):
        parts.update_scores(part)
    assert parts.log_value == pytest.approx(whole.log_value, rel=1e-8)
    np.testing.assert_array_equal(parts.counts, whole.counts)
    assert whole.martingale.log_peak == pytest.approx(path.max(), abs=1e-9)


def test_a_saved_monitor_goes_on_exactly(tmp_path):
    rng = np.random.default_rng(4)
    monitor = DriftMonitor.of_scores(rng.normal(size=200), seed=9)
    monitor.update_scores(rng.normal(size=101))
    monitor.save(tmp_path / "monitor.json")
    again = DriftMonitor.load(tmp_path / "monitor.json")
    more = rng.normal(size=50)
    assert again.update_scores(more) == monitor.update_scores(more)
    assert again.state() == monitor.state()


def test_ranks_count_all_earlier_scores_and_break_ties_by_seed():
    monitor = DriftMonitor(np.array([0.5, 1.5]), np.array([2, 3, 4]), seed=1)
    draws = _uniforms(1, 0, 3)
    ranks = monitor._ranks(np.searchsorted(monitor.edges, [1.0, 9.0, 0.0]), draws)
    wanted = [(4 + draws[0] * 4) / 10, (0 + draws[1] * 5) / 11, (9 + draws[2] * 3) / 12]
    np.testing.assert_allclose(ranks, wanted, rtol=1e-12)
    assert monitor.counts.tolist() == [3, 4, 5]
    assert not np.array_equal(_uniforms(2, 0, 3), draws)
    np.testing.assert_array_equal(np.concatenate([_uniforms(1, 0, 6), _uniforms(1, 6, 5)]), _uniforms(1, 0, 11))


@pytest.mark.parametrize("draw", ["normal", "ties", "constant"])
def test_ranks_are_uniform_and_independent_while_nothing_changes(draw):
    from scipy.stats import kstest

    rng = np.random.default_rng(5)
    values = {
        "normal": lambda n: rng.normal(size=n),
        "ties": lambda n: rng.integers(0, 3, n).astype(float),
        "constant": np.ones,
    }[draw]
    ranks = []
    for seed in range(300):
        monitor = DriftMonitor.of_scores(values(30), seed=seed)
        bins = np.searchsorted(monitor.edges, values(10))
        ranks.append(monitor._ranks(bins, _uniforms(seed, 0, 10)))
    ranks = np.array(ranks)
    assert kstest(ranks.ravel(), "uniform").pvalue > 1e-3
    correlation = np.corrcoef(ranks.T)[np.triu_indices(10, 1)]
    assert np.abs(correlation).max() < 4 / np.sqrt(300)


def test_a_stream_that_changes_rings_and_one_that_does_not_stays_quiet():
    rng = np.random.default_rng(6)
    for size, shift in ((500, 0.0), (500, 1.0), (500, -1.0)):
        monitor = DriftMonitor.of_scores(rng.normal(size=size))
        monitor.update_scores(rng.normal(size=1000))
        assert not monitor.alarm(100)
        monitor.update_scores(rng.normal(shift, size=200))
        assert monitor.alarm(100) == (shift != 0)


def test_a_monitor_of_an_ensemble_scores_inputs_itself(tmp_path):
    ens = ds.DeepEnsemble(lambda: nn.Linear(2, 3), num_members=5)
    x = torch.randn(150, 2, generator=torch.Generator().manual_seed(0))
    monitor = ds.conformal.DriftMonitor.calibrate(ens, (x, torch.zeros(150, dtype=torch.long)))
    other = DriftMonitor.of_scores(ds.predict_scores(ens, x, ["mutual_information"])["mutual_information"])
    new = 3 * x[:40]
    value = monitor.update(new)
    assert value == pytest.approx(
        other.update_scores(ds.predict_scores(ens, new, ["mutual_information"])["mutual_information"])
    )
    assert isinstance(value, float)
    monitor.save(tmp_path / "m.json")
    assert DriftMonitor.load(tmp_path / "m.json", ens).update(x) == monitor.update(x)
    with pytest.raises(ValueError, match="no ensemble"):
        DriftMonitor.load(tmp_path / "m.json").update(x)


def test_the_distance_of_two_samples_is_scipys_and_its_p_value_that_of_permutations():
    from scipy.stats import ks_2samp

    from dissensus.conformal.drift import _distance

    rng = np.random.default_rng(7)
    for first, second in (
        (rng.normal(size=40), rng.normal(0.5, size=25)),
        (rng.integers(0, 4, 30), rng.integers(1, 5, 9)),
    ):
        values, groups = np.unique(np.concatenate([first, second]), return_inverse=True)
        member = np.arange(len(groups)) >= len(first)
        assert _distance(groups, member, len(values)) == pytest.approx(ks_2samp(first, second).statistic, abs=1e-12)
    exact = ks_2samp(first := rng.normal(size=8), second := rng.normal(1, size=7), method="exact").pvalue
    assert two_sample(first, second, permutations=4999) == pytest.approx(exact, abs=0.03)


def test_two_samples_of_one_source_are_told_apart_as_rarely_as_promised():
    rng = np.random.default_rng(8)
    p = np.array(
        [two_sample(rng.integers(0, 5, 30), rng.integers(0, 5, 12), permutations=39, seed=s) for s in range(300)]
    )
    assert np.mean(p <= 0.1) < 0.1 + 3 * np.sqrt(0.09 / 300)


def test_the_monitor_of_an_alarm_shuffles_its_sorted_scores_by_a_seed_of_their_own():
    """One seed for all would set the bins by the same ranks each time, and the guarantee would be of that choice."""
    draws = [np.random.default_rng(seed).normal(size=60) for seed in range(20)]
    first = []
    for scores in draws:
        monitor = DriftMonitor.of_alarm(ds.Alarm.of_scores(scores, false_alarms=0.05))
        again = DriftMonitor.of_alarm(ds.Alarm.of_scores(scores[::-1], false_alarms=0.05))
        assert monitor.state() == again.state()
        first.append(int(np.searchsorted(np.sort(scores), monitor.edges[0])))
    assert len(set(first)) > 1
    with pytest.warns(UserWarning, match="too few"):
        few = ds.Alarm.of_scores([1.0, 2.0], false_alarms=0.1)
    assert DriftMonitor.of_alarm(few) is None
