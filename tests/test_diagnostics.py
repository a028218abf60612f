"""What `diagnose` finds: closed forms first, then ensembles that collude and ensembles that do not."""

import json
from itertools import combinations
from math import inf, isinf, log, nan

import pytest
import torch
from collusion_cases import RULE_CASES, trained
from hypothesis import given, settings
from hypothesis import strategies as st

import dissensus as ds
from dissensus import metrics
from dissensus import objectives as obj
from dissensus.diagnostics import Check, Finding
from dissensus.diagnostics.drops import drop_counts

CLASS_LOSSES = ("cross_entropy", "brier", "zero_one")


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count, classes=4, seed=0):
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def by_enumeration(outputs, targets, loss, average, dropped):
    """Mean error of every subset that keeps all but so many members."""
    kept = list(combinations(range(len(outputs)), len(outputs) - dropped))
    parts = [obj.decompose(outputs[list(rows)], targets, loss, average).ensemble_error.mean() for rows in kept]
    return float(torch.stack(parts).mean())


def test_the_joint_ensemble_of_the_document_explodes_and_errs_more():
    case = RULE_CASES["regression"]
    found = {}
    for beta in (0.0, 1.0):
        ensemble, _ = trained(case, beta)
        found[beta] = ds.diagnose(ds.predict(ensemble, case.test[0]), case.test[1], loss="mse")
    assert found[1.0].diversity > 50 * found[0.0].diversity
    assert found[1.0].ensemble_error > found[0.0].ensemble_error
    assert found[1.0].colluding
    assert not found[0.0].colluding
    assert found[1.0].codependence > 10 * found[0.0].codependence
    curve = found[1.0].drop_curve()
    assert curve.dropped == (2, 4, 6)
    assert curve.increase == pytest.approx(curve.exact_increase, rel=0.03)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), members=st.integers(2, 7), outputs=st.integers(1, 3))
def test_the_closed_form_of_dropping_is_the_mean_over_all_subsets(seed, members, outputs):
    values, targets = noise(seed, members, 12, outputs), noise(seed + 1, 12, outputs)
    fractions = [dropped / members for dropped in range(1, members)]
    curve = ds.diagnose(values, targets, "mse", drop_fractions=fractions, repeats=1).drop_curve()
    assert curve.dropped == tuple(range(1, members))
    exact = [by_enumeration(values, targets, "mse", "scores", dropped) for dropped in curve.dropped]
    assert curve.exact == pytest.approx(exact)


@pytest.mark.parametrize("per", ["example", "set"])
@pytest.mark.parametrize("average", ["probs", "scores"])
@pytest.mark.parametrize("loss", ["mse", *CLASS_LOSSES, "sigmoid", "poisson"])
def test_dropping_at_random_tends_to_the_mean_over_all_subsets(loss, average, per):
    classes = loss in CLASS_LOSSES
    outputs = noise(0, 4, 150, 4 if classes else 1)
    targets = labels(150) if classes else noise(1, 150, 1).abs().round().clamp(max=1)
    finding = ds.diagnose(outputs, targets, loss, average, drop_fractions=(0.5,), repeats=300, drop_per=per)
    curve = finding.drop_curve()
    assert curve.full == pytest.approx(finding.ensemble_error)
    exact = by_enumeration(outputs, targets, loss, average, 2)
    spread = curve.deviations[0] / 300**0.5
    assert curve.values[0] == pytest.approx(exact, abs=4 * spread + 1e-9)


def test_drop_curves_of_other_metrics_agree_with_the_metrics():
    outputs, targets = noise(2, 4, 80, 4), labels(80)
    curves = {curve.metric: curve for curve in ds.diagnose(outputs, targets).drops}
    probs = outputs.softmax(-1).mean(0)
    assert curves["accuracy"].full == pytest.approx(metrics.accuracy(probs, targets))
    assert curves["error"].full == pytest.approx(metrics.nll(probs, targets))
    assert curves["brier"].full == pytest.approx(metrics.brier(probs, targets))
    assert curves["ece"].full == pytest.approx(metrics.ece(probs, targets))
    by_brier = {curve.metric: curve for curve in ds.diagnose(outputs, targets, "brier").drops}
    assert by_brier.keys() == {"error", "accuracy", "nll", "ece"}
    assert by_brier["ece"] == curves["ece"]
    real = ds.diagnose(noise(3, 4, 80), noise(4, 80), "mse")
    assert real.drop_curve("mae").full == pytest.approx(float((noise(3, 4, 80).mean(0) - noise(4, 80)).abs().mean()))


@pytest.mark.parametrize("logit", [20.0, 2000.0])
def test_errors_of_what_is_left_have_no_ceiling(logit):
    """Two of three members are wrong and sure; without the third the pool's probability of the truth underflows."""
    targets = labels(60)
    truth, other = (logit * torch.eye(4, dtype=torch.float64)[own] for own in (targets, (targets + 1) % 4))
    outputs = torch.stack([other, other, truth])
    curve = ds.diagnose(outputs, targets, drop_fractions=(0.34,), repeats=200).drop_curve()
    exact = by_enumeration(outputs, targets, "cross_entropy", "probs", 1)
    assert exact == pytest.approx((logit + 2 * log(2)) / 3, rel=1e-6)
    assert curve.values[0] == pytest.approx(exact, abs=4 * curve.deviations[0] / 200**0.5)


def test_weighted_members_keep_their_weights_when_others_are_dropped():
    outputs, targets = noise(5, 3, 40), noise(6, 40)
    weights = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)
    curve = ds.diagnose(outputs, targets, "mse", weights=weights, drop_fractions=(0.34,), repeats=400).drop_curve()
    kept = [(0.6, 0.4, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)]
    exact = [float(((torch.tensor(w).double() @ outputs) - targets).square().mean()) for w in kept]
    assert curve.values[0] == pytest.approx(sum(exact) / 3, abs=4 * curve.deviations[0] / 20)
    assert curve.exact == ()


def test_the_seed_decides_which_members_are_dropped():
    outputs, targets = noise(7, 5, 30), noise(8, 30)
    first, again, other = (ds.diagnose(outputs, targets, "mse", seed=seed).drops for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_fractions_that_drop_nobody_or_everybody_are_left_out():
    assert drop_counts(10, (0.2, 0.4, 0.6)) == {2: 0.2, 4: 0.4, 6: 0.6}
    assert drop_counts(10, (0.3, 0.7)) == {3: 0.3, 7: 0.7}
    assert drop_counts(3, (0.2,)) == {1: 1 / 3}
    assert drop_counts(1, (0.5,)) == {}
    with pytest.raises(ValueError, match="between 0 and 1"):
        drop_counts(5, (0.0,))


def test_deviations_that_are_multiples_of_the_prediction_are_the_scale_share():
    centre = noise(9, 100)
    factors = torch.tensor([1.5, 0.5], dtype=torch.float64)[:, None]
    finding = ds.diagnose(factors * (centre - centre.mean()), centre + noise(10, 100), "mse")
    assert finding.scale_share == pytest.approx(1.0)
    assert finding.bias_share == pytest.approx(0.0, abs=1e-12)


def test_the_example_share_is_what_exceeds_independent_errors_after_the_offsets():
    truth, wave = noise(11, 500), noise(12, 500)
    wave = wave - wave.mean()
    common = 0.1 * noise(13, 500)
    offset = torch.tensor([2.0, -2.0], dtype=torch.float64)[:, None]
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None]
    finding = ds.diagnose(truth + common + sign * wave + offset, truth, "mse")
    spread, constant = float(wave.square().mean()), 4.0
    left = spread - float(common.square().mean())
    assert finding.bias_share == pytest.approx(constant / (constant + spread))
    assert finding.example_share == pytest.approx(left / (constant + spread))
    independent = ds.diagnose(truth + noise(14, 2, 500), truth, "mse")
    assert independent.example_share < 0.1


def test_dominance_is_the_share_of_the_member_that_is_best_most_often():
    targets = torch.zeros(10)
    outputs = torch.ones(2, 10)
    outputs[0, :7] = 0.5
    assert ds.diagnose(outputs, targets, "mse").dominance == pytest.approx(0.7 + 0.15)
    assert ds.diagnose(torch.ones(4, 10), targets, "mse").dominance == pytest.approx(0.25)


def test_gaps_to_the_best_and_the_mean_member():
    targets = torch.zeros(6, dtype=torch.float64)
    outputs = torch.tensor([[1.0], [-1.0], [3.0]], dtype=torch.float64).expand(3, 6)
    finding = ds.diagnose(outputs, targets, "mse")
    assert (finding.best_member_error, finding.member_error) == pytest.approx((1.0, 11 / 3))
    assert finding.ensemble_error == pytest.approx(1.0)
    assert finding.gain_over_best == pytest.approx(0.0)
    assert finding.gain_over_mean == pytest.approx(1 - 3 / 11)
    assert finding.error_spread == pytest.approx(8 / (11 / 3))


def test_pairs_agree_with_the_metrics_and_their_bounds():
    outputs, targets = noise(15, 3, 400, 4) + 1.5 * torch.nn.functional.one_hot(labels(400), 4), labels(400)
    finding = ds.diagnose(outputs, targets)
    assert len(finding.pairs) == 3
    votes = outputs.argmax(-1)
    for pair in finding.pairs:
        worse, better = pair.members
        assert pair.accuracy <= pair.base_accuracy
        assert pair.diversity == metrics.pair_diversity(votes[worse], votes[better], targets, accuracy_of="a")
        assert pair.upper == metrics.diversity_bounds(pair.accuracy, pair.base_accuracy, 4).upper
        # Independent noise: near the upper bound.
        assert pair.diversity == pytest.approx(pair.upper, rel=0.15)


def test_classifiers_whose_probabilities_are_averaged_show_on_training_data():
    case = RULE_CASES["classes by probabilities"]
    for beta in (0.0, 1.0):
        ensemble, _ = trained(case, beta)
        outputs, own = (ds.predict(ensemble, x) for x in (case.test[0], case.train[0]))
        alone = ds.diagnose(outputs, case.test[1], repeats=2)
        both = ds.diagnose(outputs, case.test[1], training=(own, case.train[1]), repeats=2)
        assert not alone.colluding
        assert "training=" in alone.explain()
        assert both.colluding == (beta == 1.0)
        assert both.training_signs == (("unfitted",) if beta == 1.0 else ())


def test_members_that_give_up_classes_are_suspected_until_training_data_decide():
    case = RULE_CASES["deep classes by probabilities"]
    for beta in (0.0, 1.0):
        ensemble, _ = trained(case, beta)
        outputs, own = (ds.predict(ensemble, x) for x in (case.test[0], case.train[0]))
        alone = ds.diagnose(outputs, case.test[1], repeats=2)
        assert (alone.suspected, alone.colluding) == (beta == 1.0, False)
        assert alone.explain().startswith("Members may collude") == (beta == 1.0)
        assert alone.to_dict()["suspected"] == (beta == 1.0)
        both = ds.diagnose(outputs, case.test[1], training=(own, case.train[1]), repeats=2)
        assert (both.suspected, both.colluding) == (False, beta == 1.0)
        assert ("specialised" in both.training_signs) == (beta == 1.0)
        assert ("whole classes" in both.explain()) == (beta == 1.0)
        # What is averaged decides who is suspected: scores that collude show held out.
        assert not ds.diagnose(outputs, case.test[1], average="scores", repeats=2).suspected


def test_an_explanation_says_verdict_numbers_and_readings():
    truth = noise(16, 200)
    offsets = torch.tensor([3.0, -3.0], dtype=torch.float64)[:, None]
    text = ds.diagnose(truth + offsets + 0.1 * noise(17, 200), truth, "mse").explain()
    assert text.startswith("Members collude (2 members on 200 examples).")
    for word in ("constants that cancel", "diversity ratio", "bias share", "codependence", "of little use alone"):
        assert word in text
    calm = ds.diagnose(truth + 0.3 * noise(18, 2, 200) + 0.3 * noise(19, 200), truth, "mse").explain()
    assert calm.startswith("Members do not collude")


def test_a_finding_is_frozen_and_survives_json(tmp_path):
    truth = noise(20, 50)
    finding = ds.diagnose(torch.stack([truth + 1, truth - 1]), truth, "mse")
    assert isinf(finding.diversity_ratio)
    assert finding.codependence == inf
    path = finding.save(tmp_path / "deep" / "finding.json")
    assert json.loads(path.read_text())["colluding"] is True
    assert Finding.load(path) == finding
    with pytest.raises(AttributeError):
        finding.loss = "other"
    path.write_text("{}")
    with pytest.raises(ValueError, match="Diagnose again"):
        Finding.load(path)


def test_one_member_is_nothing_to_diagnose():
    finding = ds.diagnose(noise(21, 1, 30), noise(22, 30), "mse")
    assert (finding.colluding, finding.codependence, finding.drops) == (False, 0.0, ())
    assert "one member" in finding.explain()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_and_gradients_are_welcome(dtype):
    outputs = noise(23, 3, 40, 4).to(dtype).requires_grad_()
    finding = ds.diagnose(outputs, labels(40), repeats=2)
    exact = ds.diagnose(outputs.detach().double(), labels(40), repeats=2)
    assert finding.ensemble_error == pytest.approx(exact.ensemble_error)


def test_history_gives_errors_over_training():
    rows = [
        {"epoch": e, "step": 10 * e, "member": m, "train_member_error": 2.0 / e, "train_ensemble_error": 1.0 / e}
        | {"validation_member_error": 2.5, "validation_ensemble_error": 1.5, "colluding": float(e == 2)}
        for e in (1, 2)
        for m in (0, 1)
    ]
    outputs, targets = noise(24, 2, 30) + 5, noise(25, 30)
    finding = ds.diagnose(outputs, targets, "mse", history=rows, repeats=2)
    assert finding.checks == (Check(1, 10, 2.0, 1.0, 2.5, 1.5), Check(2, 20, 1.0, 0.5, 2.5, 1.5))
    assert [check.gap for check in finding.checks] == [0.5, 1.0]
    assert [check.train_diversity for check in finding.checks] == [1.0, 0.5]
    assert finding.training_signs == ("watched",)
    assert finding.colluding
    with pytest.raises(ValueError, match="watch_collusion"):
        ds.diagnose(outputs, targets, "mse", history=[{"epoch": 1, "step": 1, "loss": 0.5}])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "mean"}, "`loss` must be"),
        ({"average": "votes"}, "`average` must be"),
        ({"drop_per": "batch"}, "`drop_per` must be"),
        ({"repeats": 0}, "`repeats` must be a whole number of at least 1"),
        ({"weights": torch.tensor([0.5, 0.6])}, "sum to 1"),
        ({"drop_fractions": (1.5,)}, "between 0 and 1"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        ds.diagnose(noise(26, 2, 10), noise(27, 10), **{"loss": "mse"} | options)


def test_outputs_that_are_not_finite_are_named():
    outputs = noise(28, 2, 10)
    outputs[1, 3] = inf
    with pytest.raises(ValueError, match="example 3 of member 1"):
        ds.diagnose(outputs, noise(29, 10), "mse")
    with pytest.raises(ValueError, match="torch tensor"):
        ds.diagnose(outputs.numpy(), noise(29, 10), "mse")


@pytest.mark.parametrize("bad", [nan, inf])
def test_targets_that_are_not_finite_are_named(bad):
    targets = noise(29, 10)
    targets[7] = bad
    with pytest.raises(ValueError, match="`targets` must be finite; that of example 7"):
        ds.diagnose(noise(28, 2, 10), targets, "mse")


def test_training_data_are_checked_as_held_out_ones_are():
    outputs, targets = noise(28, 2, 10), noise(29, 10)
    spoilt, missing = outputs.clone(), targets.clone()
    spoilt[1, 3], missing[7] = nan, nan
    for training, words in [
        ((spoilt, targets), "`outputs` of `training` must be finite; example 3 of member 1"),
        ((outputs, missing), "`targets` of `training` must be finite; that of example 7"),
        ((outputs[:1], targets), "`outputs` of `training` must be those of the 2 members; got 1"),
        ((outputs[:, :0], targets[:0]), "`outputs` of `training` must be shaped"),
    ]:
        with pytest.raises(ValueError, match=words):
            ds.diagnose(outputs, targets, "mse", training=training)


def test_an_ensemble_in_place_of_its_outputs_is_told_from_them():
    with pytest.raises(ValueError, match=r"got Linear\. Pass ds\.predict\(ens, x\)"):
        ds.diagnose(torch.nn.Linear(2, 2), torch.zeros(3, dtype=torch.int64))
