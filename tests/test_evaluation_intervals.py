"""Resamples give what metrics give on them; intervals cover the truth; paired differences are paired."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluation_cases import (
    as_floats,
    classifier,
    image_classifier,
    images,
    labelled,
    regression_data,
    regressor,
    trained_classifier,
    unlabelled,
)
from hypothesis import given
from hypothesis import strategies as st

import dissensus as ds
from dissensus import metrics
from dissensus.evaluation import compare, evaluate
from dissensus.evaluation.estimates import (
    SetNumbers,
    draw_counts,
    grouped_ranks,
    interval,
    placements,
    replicates_of,
    with_intervals,
)

ON_ID = SetNumbers("id", "id")


def detection(ood, known):
    return SetNumbers("ood", "far").detection("bma", ood, known, "id")


def repeated(values, counts):
    """A resample written out: each value as often as it was drawn."""
    return values[torch.repeat_interleave(torch.arange(len(values)), counts.long())]


def first_draws(sizes, count=7):
    return next(draw_counts(sizes, count, seed=3))


def tied_scores(size, seed, distinct):
    return torch.randint(distinct, (size,), generator=torch.Generator().manual_seed(seed)).float() / 7


@pytest.mark.parametrize("distinct", [1, 3, 40, 10_000])
def test_detection_on_resamples_is_the_metric_of_the_resampled_scores(distinct):
    known, ood = tied_scores(60, 0, distinct), tied_scores(45, 1, distinct) + 0.3
    draws = first_draws({"id": 60, "far": 45})
    part = detection(ood, known)
    got = part.resampled(draws)
    for row, (name, metric) in enumerate(metrics.OOD_METRICS.items()):
        assert part.numbers[row].metric == name
        for column in range(got.shape[1]):
            pair = [repeated(v, draws[s][:, column]) for v, s in ((ood, "far"), (known, "id"))]
            assert got[row, column].item() == pytest.approx(metric(*pair), abs=1e-6), name


@given(st.integers(1, 45), st.integers(1, 45), st.sampled_from([1, 2, 5, 1000]))
def test_detection_from_one_sort_is_every_metric_exactly(num_known, num_ood, distinct):
    known, ood = tied_scores(num_known, num_ood, distinct), tied_scores(num_ood, num_known, distinct)
    part = detection(ood, known)
    for number, (name, metric) in zip(part.numbers, metrics.OOD_METRICS.items(), strict=True):
        assert number.metric == name
        assert number.value == pytest.approx(metric(ood, known), abs=1e-12), name


@pytest.mark.parametrize("distinct", [1, 4, 10_000])
def test_risk_coverage_on_resamples_is_the_metric_of_the_resampled_scores(distinct):
    scores = tied_scores(50, 0, distinct)
    correct = torch.rand(50, generator=torch.Generator().manual_seed(2)) < 0.7
    draws = first_draws({"id": 50})
    got = ON_ID.risk_coverage("bma", scores, correct).resampled(draws)
    for column in range(got.shape[1]):
        counts = draws["id"][:, column]
        want = metrics.risk_coverage_area(repeated(scores, counts), repeated(correct, counts))
        assert got[0, column].item() == pytest.approx(want, abs=1e-6)


def confidences(size, seed=0, power=1.4):
    generator = torch.Generator().manual_seed(seed)
    confidence = 0.4 + 0.6 * torch.rand(size, generator=generator)
    confidence[: size // 10] = 1.0
    return confidence, torch.rand(size, generator=generator) < confidence**power


def test_calibration_error_on_resamples_is_the_metric_of_the_resampled_inputs():
    confidence, correct = confidences(80)
    draws = first_draws({"id": 80})
    got = ON_ID.calibration_error(confidence, correct).resampled(draws)
    for column in range(got.shape[1]):
        pair = [repeated(values, draws["id"][:, column]) for values in (confidence, correct)]
        assert got[0, column].item() == pytest.approx(metrics.confidence_reliability(*pair).ece, abs=1e-6)


@pytest.mark.parametrize("power", [0.3, 1.0, 1.4, 6.0])
@pytest.mark.parametrize("size", [60, 3000])
def test_smooth_calibration_error_on_resamples_is_the_metric_of_the_resampled_inputs(size, power):
    confidence, correct = confidences(size, power=power)
    draws = first_draws({"id": size})
    got = ON_ID.smooth_calibration_error(confidence, correct).resampled(draws)
    for column in range(got.shape[1]):
        pair = [repeated(values, draws["id"][:, column]) for values in (confidence, correct)]
        assert got[0, column].item() == pytest.approx(metrics.smooth_ece(*pair), rel=0.01, abs=1e-4)


def test_scores_of_many_values_are_resampled_in_groups_that_barely_matter():
    generator = torch.Generator().manual_seed(0)
    known, ood = torch.randn(9000, generator=generator), torch.randn(8000, generator=generator) + 1
    draws = first_draws({"id": 9000, "far": 8000}, count=2)
    part = detection(ood, known)
    assert grouped_ranks(torch.cat([known, ood])).max() < 4096 < len(known)
    got = part.resampled(draws)
    for row, metric in enumerate(metrics.OOD_METRICS.values()):
        pair = [repeated(v, draws[s][:, 0]) for v, s in ((ood, "far"), (known, "id"))]
        assert got[row, 0].item() == pytest.approx(metric(*pair), abs=1e-3)


@given(st.integers(2, 30), st.integers(1, 30), st.integers(1, 5))
def test_placements_have_the_auroc_as_mean(num_known, num_ood, distinct):
    known, ood = tied_scores(num_known, 0, distinct), tied_scores(num_ood, 1, distinct)
    for values in placements(ood, known):
        assert values.mean() == pytest.approx(metrics.auroc(ood, known))


def test_intervals_by_placements_are_those_of_full_resamples():
    # Paired sets, as a corrupted copy of each image: first-order against exact, on the same draws.
    generator = torch.Generator().manual_seed(0)
    known = torch.randn(800, generator=generator)
    corrupted = known + 0.7 * torch.randn(800, generator=generator) + 0.5
    auroc = metrics.auroc(corrupted, known)
    values = (sum(placements(corrupted, known)) - auroc).float()[None]
    fog = SetNumbers("corruption", "fog", 1)
    part = fog.means([fog.number("auroc", score="bma")], values)
    linear = replicates_of([part], {"id": 800}, 400, seed=0)[1][0]
    exact = []
    for draws in draw_counts({"id": 800}, 400, seed=0):
        for column in draws["id"].T:
            exact.append(metrics.auroc(repeated(corrupted, column), repeated(known, column)))
    # An eighth of the standard error, which is 0.0067 here.
    np.testing.assert_allclose(
        np.quantile(linear, [0.025, 0.5, 0.975]), np.quantile(exact, [0.025, 0.5, 0.975]), atol=8e-4
    )
    assert np.corrcoef(linear, exact)[0, 1] > 0.998


def test_draws_are_of_the_size_of_the_set_and_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    from dissensus.evaluation import estimates

    def all_draws():
        parts = list(draw_counts({"id": 40, "far": 25}, 150, seed=1))
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in ("id", "far")}

    whole = all_draws()
    assert whole["id"].shape == (40, 150)
    assert torch.equal(whole["far"].sum(0), torch.full((150,), 25.0))
    assert whole["id"].var() == pytest.approx(1, abs=0.1)
    monkeypatch.setattr(estimates, "_NUMBERS_AT_ONCE", 40 * 11)
    for name, values in all_draws().items():
        assert torch.equal(values, whole[name])


def coverage(sample, metric, truth, repeats=200, size=120):
    """Share of intervals that hold the truth."""
    inside = 0
    for repeat in range(repeats):
        statistic, sizes = sample(repeat, size)
        found = replicates_of([statistic], sizes, 300, seed=repeat)
        (number,) = [n for n in with_intervals(found) if n.metric == metric]
        inside += number.low <= truth <= number.high
    return inside / repeats


def test_intervals_of_a_mean_cover_it_as_often_as_they_say():
    def sample(repeat, size):
        values = torch.rand(size, generator=torch.Generator().manual_seed(repeat)) < 0.8
        return ON_ID.metrics({"accuracy": values}), {"id": size}

    # Two standard errors of a share of 0.95 in 200 repeats are 0.03; percentile intervals run a little short.
    assert 0.90 <= coverage(sample, "accuracy", 0.8) <= 0.98


def test_intervals_of_an_auroc_cover_it_as_often_as_they_say():
    def sample(repeat, size):
        generator = torch.Generator().manual_seed(repeat)
        known, ood = torch.randn(size, generator=generator), torch.randn(size, generator=generator) + 1
        return detection(ood, known), {"id": size, "far": size}

    # Closed form: P(N(1,1) > N(0,1)) = Phi(1 / sqrt 2).
    truth = torch.special.ndtr(torch.tensor(0.5**0.5)).item()
    assert 0.90 <= coverage(sample, "auroc", truth) <= 0.98


def test_intervals_of_a_calibration_error_are_not_fooled_by_noise():
    """A calibrated model has error 0, of which every sample and, more so, every resample sees too much."""

    def sample(repeat, size):
        confidence, correct = confidences(size, seed=repeat, power=1.0)
        return ON_ID.calibration_error(confidence, correct), {"id": size}

    low, high, value = [], [], []
    for repeat in range(60):
        statistic, sizes = sample(repeat, 500)
        (number,) = with_intervals(replicates_of([statistic], sizes, 300, seed=repeat))
        low.append(number.low), high.append(number.high), value.append(number.value)
    plain = np.mean(value)
    assert np.mean(low) < 0.4 * plain
    assert np.mean(high) < 1.6 * plain


def test_an_interval_of_a_biased_metric_holds_its_value_and_stays_above_zero():
    assert interval("ece", 0.02, 0.025, 0.05) == (0.0, 0.02)
    assert interval("ece", 0.10, 0.08, 0.13) == pytest.approx((0.07, 0.12))
    assert interval("accuracy", 0.9, 0.8, 0.95) == (0.8, 0.95)


def test_intervals_of_small_numbers_are_those_of_large_ones_in_other_units():
    """Targets in nanometres or metres: the interval of an error scales with them, as that of a score of any size does."""
    errors = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def ends(metric, factor):
        statistic = ON_ID.metrics({metric: errors * factor})
        (number,) = with_intervals(replicates_of([statistic], {"id": 50}, 100, seed=0))
        return number.low, number.high

    for metric in ("mae", "mean", "loss", "gaussian_crps", "width_90", "risk_coverage_area"):
        low, high = ends(metric, 1.0)
        assert low < high
        assert ends(metric, 1e-9) == pytest.approx((1e-9 * low, 1e-9 * high), rel=1e-5)


def test_differences_of_small_numbers_are_no_rounding():
    """The same regression in metres and in nanometres has the same verdicts."""

    class Scaled(torch.nn.Module):
        def __init__(self, factor, slope):
            super().__init__()
            self.factor, self.slope = factor, torch.nn.Parameter(torch.tensor(slope))

        def forward(self, x):
            return self.factor * self.slope * x.sum(1, keepdim=True)

    x, y = regression_data(80)
    verdicts = []
    for factor in (1.0, 1e-9):
        runs = [
            evaluate(
                ds.DeepEnsemble.from_members([Scaled(factor, slope), Scaled(factor, slope + 0.1)]),
                (x, factor * y),
                loss="mse",
                bootstrap=100,
            )
            for slope in (0.2, 3.0)
        ]
        comparison = compare(*runs)
        verdicts.append([comparison.difference(metric).better for metric in ("rmse", "mae")])
    assert verdicts == [["first", "first"]] * 2


@pytest.fixture(scope="module")
def ensembles():
    return trained_classifier(4, seed=0), classifier(4, seed=1)


@pytest.fixture(scope="module")
def pair(ensembles):
    known, far = labelled(400), unlabelled(300)
    return [
        evaluate(ensemble, known, {"far": far}, bootstrap=400, name=name)
        for ensemble, name in zip(ensembles, ("trained", "raw"), strict=True)
    ]


def test_intervals_hold_their_values_and_have_the_width_of_the_normal_approximation(pair):
    result = pair[0]
    for number in result.numbers:
        assert number.low <= number.value + 1e-6, number
        assert number.high >= number.value - 1e-6, number
    accuracy = result.number("accuracy")
    wald = 2 * 1.96 * (accuracy.value * (1 - accuracy.value) / 400) ** 0.5
    assert accuracy.high - accuracy.low == pytest.approx(wald, rel=0.15)


def test_the_seed_decides_the_intervals(ensembles):
    known = labelled(100)
    one, same, other = (evaluate(ensembles[0], known, bootstrap=50, seed=seed) for seed in (0, 0, 1))
    assert one == same
    np.testing.assert_array_equal(one.replicates, same.replicates)
    assert (one.replicates != other.replicates).any()
    assert [n.value for n in one.numbers] == [n.value for n in other.numbers]


def test_without_resamples_there_are_no_intervals(ensembles):
    result = evaluate(ensembles[0], labelled(50), {"far": unlabelled(40)}, bootstrap=0)
    assert result.replicates.shape == (len(result.numbers), 0)
    assert all(number.low is None and number.high is None for number in result.numbers)
    assert "[" not in result.table()


def test_a_run_does_not_differ_from_itself(pair):
    for one in compare(pair[0], pair[0]).differences:
        assert (one.value, one.low, one.high, one.clear, one.better) == (0, 0, 0, False, "")


def test_differences_have_paired_intervals(pair):
    comparison = compare(*pair)
    accuracy = comparison.difference("accuracy")
    assert accuracy.value == pytest.approx(pair[1].number("accuracy").value - pair[0].number("accuracy").value)
    assert accuracy.low < accuracy.value < accuracy.high
    assert accuracy.clear
    assert accuracy.better == "first"
    assert comparison.difference("mean", score="bma").better == ""
    assert {one.set for one in comparison.differences} == {"id", "far"}
    text = comparison.table()
    assert "trained" in text
    assert "raw" in text
    assert len(comparison.to_pandas()) == len(comparison.rows()) == len(comparison.differences)


def test_a_paired_interval_is_that_of_the_mean_difference_by_input():
    """NLLs differ by the mean of a value per input, whose standard error has a closed form."""
    ensembles = [trained_classifier(seed=seed) for seed in (0, 1)]
    x, y = labelled(400)
    runs = [evaluate(ensemble, (x, y), bootstrap=1000) for ensemble in ensembles]
    losses = [-ds.predict(ensemble, x).softmax(-1).mean(0)[torch.arange(400), y].log() for ensemble in ensembles]
    error = (losses[1] - losses[0]).double().std(correction=0).item() / 400**0.5
    one = compare(*runs).difference("nll")
    assert one.high - one.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    alone = [run.number("nll") for run in runs]
    unpaired = sum((number.high - number.low) ** 2 for number in alone) ** 0.5
    assert one.high - one.low < 0.7 * unpaired


def test_only_what_both_runs_have_is_compared(ensembles):
    known = labelled(80)
    one = evaluate(ensembles[0], known, {"far": unlabelled(60)}, scores=["bma", "max_logit"], bootstrap=30)
    other = evaluate(ensembles[1], known, scores=["bma"], bootstrap=30)
    comparison = compare(one, other)
    assert {(d.set, d.score) for d in comparison.differences} == {("id", None), ("id", "bma")}
    with pytest.raises(ValueError, match="no 'auroc' of set 'far'"):
        comparison.difference("auroc", "far", score="bma")


def test_averages_over_other_sets_are_not_compared(ensembles):
    known, sets = labelled(80), {"far": unlabelled(60), "near": unlabelled(50, seed=6)}

    def run(**groups):
        return evaluate(ensembles[0], known, sets, groups=groups, scores=["bma"], bootstrap=30)

    one = run(both=["far", "near"], single=["far"])
    comparison = compare(one, run(both=["near", "far"], single=["near"]))
    assert comparison.difference("auroc", "both", score="bma").value == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="average over other sets"):
        comparison.difference("auroc", "single", score="bma")


def test_averages_over_other_corruptions_or_severities_are_not_compared():
    ensemble = image_classifier()

    def run(corruptions, severities):
        return evaluate(
            ensemble,
            images(30),
            corruptions=corruptions,
            severities=severities,
            transform=as_floats,
            scores=["bma"],
            bootstrap=30,
        )

    one, other = run(("contrast", "brightness"), (1, 5)), run(("contrast", "brightness"), (1, 3))
    comparison = compare(one, other)
    assert comparison.difference("accuracy", "corruptions", severity=1).value == 0
    for severity in (None, 3, 5):
        with pytest.raises(ValueError, match="in common"):
            comparison.difference("accuracy", "corruptions", severity=severity)
    third = compare(one, run("contrast", (1, 5)))
    assert {part.set for part in third.differences} == {"id"}
    same = compare(one, run(("brightness", "contrast"), (5, 1)))
    assert same.difference("accuracy", "corruptions").value == pytest.approx(0, abs=1e-9)


def test_what_cannot_be_paired_is_refused(ensembles):
    ensemble = ensembles[0]
    base = evaluate(ensemble, labelled(50), bootstrap=30)
    with pytest.raises(ValueError, match="got bootstrap 30 and 20"):
        compare(base, evaluate(ensemble, labelled(50), bootstrap=20))
    with pytest.raises(ValueError, match="seed 0 and 4"):
        compare(base, evaluate(ensemble, labelled(50), bootstrap=30, seed=4))
    with pytest.raises(ValueError, match="not 0"):
        compare(*[evaluate(ensemble, labelled(50), bootstrap=0)] * 2)
    with pytest.raises(ValueError, match="50 and 60 inputs, so they cannot be paired"):
        compare(base, evaluate(ensemble, labelled(60), bootstrap=30))
    regression = evaluate(regressor(), regression_data(50), loss="gaussian_nll", bootstrap=30)
    with pytest.raises(ValueError, match="classification and density"):
        compare(base, regression)


def test_the_same_inputs_prepared_otherwise_need_a_word(ensembles):
    x, y = labelled(50)
    runs = [
        evaluate(ensembles[0], (factor * x, y), bootstrap=30, transform=lambda batch, f=factor: batch / f)
        for factor in (1.0, 2.0)
    ]
    with pytest.raises(ValueError, match="same_inputs=True"):
        compare(*runs)
    assert compare(*runs, same_inputs=True).difference("accuracy").value == 0


@pytest.mark.parametrize("same_inputs", [False, True])
def test_other_targets_are_refused_whoever_vouches_for_the_inputs(ensembles, same_inputs):
    x, y = labelled(50)
    first = evaluate(ensembles[0], (x, y), bootstrap=30)
    second = evaluate(ensembles[0], (x, y.roll(1)), bootstrap=30)
    with pytest.raises(ValueError, match=r"Set 'id' must .* targets"):
        compare(first, second, same_inputs=same_inputs)


def test_targets_are_recognised_whichever_integers_hold_them(ensembles):
    x, y = labelled(50)
    runs = [evaluate(ensembles[0], (x, y.to(kind)), bootstrap=30) for kind in (torch.int64, torch.int32)]
    assert compare(*runs).difference("accuracy").value == 0


def test_evaluations_without_a_hash_of_targets_can_still_be_compared(ensembles):
    result = evaluate(ensembles[0], labelled(50), bootstrap=30)
    older = replace(result, sets=tuple(replace(part, targets="") for part in result.sets))
    assert compare(older, result).difference("accuracy").value == 0
