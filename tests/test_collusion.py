"""The rule by which members are said to collude, on ensembles that do and ensembles that do not."""

from math import isinf, isnan, nan, sqrt

import pytest
import torch
from collusion_cases import RULE_CASES, classes, regression, trained
from hypothesis import given, settings
from hypothesis import strategies as st

import dissensus as ds
from dissensus import objectives as obj
from dissensus.objectives.collusion import measure, trivial_error

N = 400


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def truth(seed=0):
    return noise(seed, N)


@pytest.mark.parametrize("members", [2, 5, 10])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_members_that_err_independently_do_not_collude_however_much_they_err(members, scale):
    outputs = truth() + scale * noise(members, members, N)
    found = measure(outputs, truth(), "mse")
    # Closed form: the average of M independent errors keeps 1/M of the squared error, so DIV = (M - 1) ERR.
    assert found.diversity_ratio == pytest.approx(members - 1, rel=0.25)
    assert abs(found.cancellation) < 4 * found.cancellation_error
    assert found.signs() == ()


@pytest.mark.parametrize("members", [2, 6])
def test_errors_that_sum_to_zero_cancel_completely(members):
    errors = noise(1, members, N)
    found = measure(truth() + errors - errors.mean(0), truth(), "mse")
    assert found.cancellation == pytest.approx(1.0)
    assert isinf(found.diversity_ratio)
    assert found.signs() == ("cancelling",)


def test_members_that_err_alike_have_the_least_cancellation():
    found = measure((truth() + noise(1, N)).expand(4, N), truth(), "mse")
    assert found.cancellation == pytest.approx(1 - 4)
    assert found.diversity == pytest.approx(0, abs=1e-12)
    assert found.signs() == ()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), members=st.integers(2, 6), weighted=st.booleans())
def test_debiasing_takes_away_exactly_the_squared_offsets(seed, members, weighted):
    outputs = noise(seed, members, 30, 2) + 2 * noise(seed + 1, members, 1, 2)
    targets = noise(seed + 2, 30, 2)
    weights = noise(seed + 3, members).abs() if weighted else None
    weights = None if weights is None else weights / weights.sum()
    debiased = obj.debias(outputs, weights)
    shares = torch.full((members,), 1 / members, dtype=torch.float64) if weights is None else weights
    found = measure(outputs, targets, "mse", weights=weights)
    squared = float((shares * debiased.bias.square().sum(-1)).sum())
    assert found.bias_share * found.diversity == pytest.approx(squared)
    after = measure(debiased.outputs, targets, "mse", weights=weights)
    assert after.ensemble_error == pytest.approx(found.ensemble_error)
    assert found.diversity - after.diversity == pytest.approx(squared)
    assert (shares[:, None] * debiased.bias).sum(0).abs().max() < 1e-12


def test_offsets_that_cancel_are_a_sign_even_beside_independent_errors():
    offsets = torch.tensor([2.0, -2.0, 1.0, -1.0], dtype=torch.float64)[:, None]
    outputs = truth() + offsets + 1.5 * noise(3, 4, N) + noise(4, N)
    found = measure(outputs, truth(), "mse")
    assert found.cancellation < 0
    assert "shifted" in found.signs()


def test_one_member_that_is_off_is_a_fault_and_no_collusion():
    outputs = truth() + 0.3 * noise(5, 8, N)
    outputs[3] += 5
    found = measure(outputs, truth(), "mse")
    assert found.bias_share > 0.5
    assert found.diversity_is_large
    assert found.bias_alone > 0.9
    assert found.signs() == ()


def test_offsets_of_few_examples_are_chance():
    outputs = truth()[:20] + noise(6, 4, 20)
    assert measure(outputs, truth()[:20], "mse").bias_share > 0.01
    assert measure(outputs, truth()[:20], "mse").signs() == ()


def test_classifiers_that_err_independently_do_not_collude():
    labels = torch.randint(5, (N,), generator=torch.Generator().manual_seed(0))
    right = torch.nn.functional.one_hot(labels, 5).double()
    for strength in (1.0, 3.0, 6.0):
        logits = strength * right + noise(7, 10, N, 5) * strength / 2
        for average in ("probs", "scores"):
            assert measure(logits, labels, "cross_entropy", average).signs() == ()


def test_members_that_each_shun_other_classes_are_useless_while_the_ensemble_is_fine():
    labels = torch.randint(5, (N,), generator=torch.Generator().manual_seed(0))
    logits = 4 * torch.nn.functional.one_hot(labels, 5).double() + 0.1 * noise(8, 5, N, 5)
    # Member j adds 12 to class j, and takes 3 from the others: the average is as it was.
    logits = logits + (15 * torch.eye(5, dtype=torch.float64) - 3)[:, None]
    found = measure(logits, labels, "cross_entropy", "scores")
    assert found.ensemble_accuracy == 1.0
    assert max(found.member_accuracies) < 0.4
    assert found.members_useless
    assert found.signs() == ("shifted", "dependent")
    assert "specialised" in found.signs(trained_on=True)
    assert not found.suspicious


def test_the_agreement_beyond_guessing_is_cohens_kappa():
    from sklearn.metrics import cohen_kappa_score

    labels = torch.randint(4, (N,), generator=torch.Generator().manual_seed(1))
    logits = noise(11, 3, N, 4) + 1.5 * torch.nn.functional.one_hot(labels, 4)
    found = measure(logits, labels)
    kappas = [cohen_kappa_score(labels, member.argmax(-1)) for member in logits]
    ensemble = cohen_kappa_score(labels, logits.softmax(-1).mean(0).argmax(-1))
    assert found.kept_agreement == pytest.approx(max(kappas) / ensemble)


def test_weak_members_that_err_independently_do_not_depend_on_each_other_where_one_class_is_common():
    # Each answer is right with probability 0.3, else a guess by frequencies: worse than always naming the common class.
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.6, 0.2, 0.1, 0.1])
    labels = torch.multinomial(shares, 2000, replacement=True, generator=generator)
    answers = torch.stack([torch.multinomial(shares, 2000, replacement=True, generator=generator) for _ in range(20)])
    answers = torch.where(torch.rand(20, 2000, generator=generator) < 0.3, labels, answers)
    found = measure(5.0 * torch.nn.functional.one_hot(answers, 4).double(), labels)
    assert found.skill > 0.2
    assert found.kept_best < 1 / sqrt(20)
    assert found.kept_agreement > 1 / sqrt(20)
    assert found.signs() == ()


def test_differences_that_are_constant_in_each_class_are_the_class_share():
    labels = torch.arange(N) % 4
    by_class = 0.1 * (torch.eye(4, dtype=torch.float64) - 0.25)
    by_class = by_class - by_class.mean(0)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None, None]
    constant = (0.25 + sign * by_class[labels]).log()
    assert measure(constant, labels).class_share == pytest.approx(1.0)
    wave = 0.1 * (torch.rand(N, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5)
    either = (0.25 + sign * wave * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)).log()
    assert measure(either, labels).class_share < 0.02
    # Half and half, of equal size.
    size = by_class[labels].square().sum(-1).mean() / (4 * wave.square().mean())
    both = by_class[labels] + size.sqrt() * wave * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    assert measure((0.25 + sign * both).log(), labels).class_share == pytest.approx(0.5, abs=0.05)


def test_the_class_share_of_unrelated_differences_is_zero_on_average():
    labels = torch.arange(60) % 10
    shares = [measure(noise(seed, 4, 60, 10), labels).class_share for seed in range(40)]
    # Without the correction it would be 10 classes / 60 examples.
    assert sum(shares) / 40 < 0.03


def test_a_share_of_classes_needs_classes():
    assert isnan(measure(noise(1, 3, 30), noise(2, 30), "mse").class_share)
    assert measure(noise(1, 3, 4, 4), torch.arange(4)).class_share == 0.0


def test_one_good_member_among_dead_ones_dominates_and_does_not_collude():
    labels = torch.randint(5, (N,), generator=torch.Generator().manual_seed(0))
    logits = torch.zeros(5, N, 5, dtype=torch.float64)
    logits[2] = 8 * torch.nn.functional.one_hot(labels, 5)
    found = measure(logits, labels, "cross_entropy", "scores")
    assert found.kept_best == pytest.approx(1.0)
    assert found.signs() == ()


def test_a_single_member_has_nobody_to_collude_with():
    found = measure(truth()[None] + 3, truth(), "mse")
    assert found.signs() == found.signs(trained_on=True) == ()


def test_the_trivial_error_is_that_of_the_best_constant():
    y = noise(0, 50).abs() + 0.1
    labels = torch.arange(50) % 3
    signs = torch.where(torch.arange(50) % 4 == 0, 1.0, -1.0).double()
    constants = torch.linspace(-3, 3, 3001, dtype=torch.float64)
    for loss, targets in (
        ("mse", y),
        ("poisson", (3 * y).round()),
        ("sigmoid", (y > 1).double()),
        ("logistic", signs),
        ("exponential", signs),
    ):
        best = min(
            float(obj.decompose(c.expand(1, 50), targets, loss, "scores").ensemble_error.mean()) for c in constants
        )
        assert trivial_error(torch.zeros(1, 50), targets, loss) == pytest.approx(best, abs=1e-5)
    shares = torch.full((1, 50, 3), 1 / 3, dtype=torch.float64)
    frequencies = torch.bincount(labels) / 50
    for loss in ("cross_entropy", "brier"):
        constant = frequencies.double().log().expand(1, 50, 3)
        exact = float(obj.decompose(constant, labels, loss).ensemble_error.mean())
        assert trivial_error(shares, labels, loss) == pytest.approx(exact)
    assert trivial_error(shares, labels, "zero_one") == pytest.approx(1 - 17 / 50)


@pytest.mark.parametrize("loss", ["mse", "sigmoid", "poisson", "logistic", "exponential", lambda f, y: (f - y).abs()])
def test_every_loss_is_measured(loss):
    outputs = noise(9, 3, 60)
    targets = torch.where(noise(10, 60) > 0, 1.0, -1.0 if loss in ("logistic", "exponential") else 0.0).double()
    found = measure(outputs, targets, loss)
    assert found.member_error == pytest.approx(found.ensemble_error + found.diversity)
    assert 0 <= found.bias_share <= 1
    assert isnan(found.cancellation) == (callable(loss) or loss == "exponential")
    assert (found.trivial_error is None) == callable(loss)


def test_outputs_that_are_right_to_the_last_digit_have_nothing_to_compare():
    found = measure(truth().expand(3, N), truth(), "mse")
    assert found.diversity_ratio == 0
    assert found.cancellation is nan or isnan(found.cancellation)
    assert found.signs() == ()


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", RULE_CASES)
def test_only_joint_training_colludes(name, beta):
    case = RULE_CASES[name]
    ensemble, _ = trained(case, beta)
    held_out = measure(ds.predict(ensemble, case.test[0]), case.test[1], case.loss, case.average)
    training = measure(ds.predict(ensemble, case.train[0]), case.train[1], case.loss, case.average)
    assert bool(training.signs(trained_on=True)) == (beta >= case.colludes_from), training
    if not case.shows_in_training_only:
        assert bool(held_out.signs()) == (beta >= case.colludes_from), held_out
    elif beta < 1:
        assert not held_out.signs()
        assert not held_out.suspicious
    if name == "deep classes by probabilities":
        assert held_out.suspicious == (beta == 1.0)


def test_the_share_that_independent_members_keep_is_one_over_the_root_of_their_number():
    # In the weak limit: accuracy above chance of M averaged answers against that of one.
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (200_000,), generator=generator)
    side = 2.0 * labels - 1
    scores = 0.05 * side + torch.randn(9, 200_000, generator=generator)
    alone = ((scores > 0) == labels.bool()).double().mean() - 0.5
    together = ((scores.mean(0) > 0) == labels.bool()).double().mean() - 0.5
    assert float(alone / together) == pytest.approx(1 / sqrt(9), rel=0.08)


def test_cases_are_what_they_say():
    assert regression(0).train[1].shape == (400, 1)
    assert classes("probs").train[1].dtype == torch.int64


def test_the_trivial_brier_score_of_soft_labels_is_the_spread_of_the_labels():
    soft = torch.rand(50, 4, dtype=torch.float64).softmax(-1)
    wanted = (soft - soft.mean(0)).square().sum(-1).mean().item()
    assert measure(torch.randn(3, 50, 4), soft, "brier").trivial_error == pytest.approx(wanted)
