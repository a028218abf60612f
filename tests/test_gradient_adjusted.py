import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from dissensus.objectives.diversity import decompose
from dissensus.objectives.joint import beta_from_step, gradient_adjusted_loss, joint_loss, step_from_beta

FORMS = [(others_only, detach) for others_only in (False, True) for detach in (False, True)]
MEMBERS = (2, 3, 5, 10, 50)
GAMMA = {  # facts of theorem D.3: rows are steps, columns ensembles of MEMBERS
    0.25: (0.64, 0.51, 0.4375, 0.3951, 0.3665),
    0.5: (0.8889, 0.75, 0.6597, 0.6036, 0.5646),
    1.0: (1.0, 0.9375, 0.8594, 0.8025, 0.7601),
    2.0: (0.8889, 1.0, 0.9722, 0.9328, 0.8978),
    4.0: (0.64, 0.96, 1.0, 0.9877, 0.9663),
    9.0: (0.36, 0.8775, 0.9844, 1.0, 0.9933),
}


def example(num_members=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(num_members, 6, 2, generator=generator, dtype=torch.float64)
    return outputs, torch.randn(6, 2, generator=generator, dtype=torch.float64)


def gradient(function, outputs):
    outputs = outputs.clone().requires_grad_()
    return torch.autograd.grad(function(outputs), outputs)[0]


@pytest.mark.parametrize(
    ("step", "beta"), [(0.0, 0.0), (0.25, 0.36), (1.0, 0.75), (3.0, 0.9375), (4.0, 0.96), (10.0, 0.99174)]
)
def test_a_step_against_all_members_has_the_beta_of_theorem_d1(step, beta):
    assert beta_from_step(step) == pytest.approx(beta, abs=5e-6)


@pytest.mark.parametrize("step", GAMMA)
@pytest.mark.parametrize("column", range(len(MEMBERS)))
def test_a_step_against_the_other_members_has_the_gamma_of_theorem_d3(step, column):
    num_members = MEMBERS[column]
    gamma = beta_from_step(step, num_members, others_only=True)
    assert gamma == pytest.approx(GAMMA[step][column], abs=5e-5)
    # As the document prints it.
    numerator = step * num_members * ((step + 2) * num_members - 2 * (step + 1))
    assert gamma == pytest.approx(numerator / ((step + 1) ** 2 * (num_members - 1) ** 2), abs=1e-12)


@pytest.mark.parametrize("num_members", MEMBERS)
def test_gamma_is_one_at_members_minus_one_and_falls_beyond(num_members):
    top = num_members - 1.0
    assert beta_from_step(top, num_members, others_only=True) == 1.0
    assert beta_from_step(top - 0.5, num_members, others_only=True) < 1.0
    assert beta_from_step(top + 0.5, num_members, others_only=True) < 1.0


def test_the_products_of_deviation_and_error_add_up_to_the_diversity():
    # Lemma D.2, with its sign.
    outputs, targets = example()
    products = ((outputs.mean(0) - outputs) * (targets - outputs)).sum((0, 2))
    torch.testing.assert_close(products, 5 * decompose(outputs, targets, "mse").diversity, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=25)
@given(step=st.floats(0, 20), num_members=st.integers(2, 8), others_only=st.booleans(), seed=st.integers(0, 1000))
def test_an_attached_target_is_the_joint_objective_times_one_plus_step_squared(step, num_members, others_only, seed):
    outputs, targets = example(num_members, seed)
    beta = beta_from_step(step, num_members, others_only)
    loss = gradient_adjusted_loss(outputs, targets, step, others_only)
    wanted = (1 + step) ** 2 * joint_loss(outputs, targets, beta, "mse")
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=25)
@given(step=st.floats(0, 20), num_members=st.integers(2, 8), others_only=st.booleans(), seed=st.integers(0, 1000))
def test_a_detached_target_has_the_gradient_of_the_joint_objective_times_one_plus_step(
    step, num_members, others_only, seed
):
    outputs, targets = example(num_members, seed)
    beta = beta_from_step(step, num_members, others_only, detach=True)
    moved = gradient(
        lambda f: gradient_adjusted_loss(f, targets, step, others_only, detach=True, allow_unbounded=True), outputs
    )
    joint = gradient(lambda f: joint_loss(f, targets, beta, "mse", allow_unbounded=True), outputs)
    torch.testing.assert_close(moved, (1 + step) * joint, rtol=1e-10, atol=1e-10)


def test_detaching_changes_the_gradient_and_not_the_value():
    outputs, targets = example()
    values = [gradient_adjusted_loss(outputs, targets, detach=detach) for detach in (False, True)]
    assert values[0] == values[1]
    gradients = [
        gradient(lambda f, d=detach: gradient_adjusted_loss(f, targets, detach=d), outputs) for detach in (False, True)
    ]
    assert not torch.allclose(gradients[0], gradients[1])


@pytest.mark.parametrize("others_only", [False, True])
def test_attached_gradients_are_those_of_finite_differences(others_only):
    outputs, targets = example()
    assert gradcheck(lambda f: gradient_adjusted_loss(f, targets, 1.5, others_only), (outputs.requires_grad_(),))


def test_no_step_is_independent_training():
    outputs, targets = example()
    for others_only, detach in FORMS:
        loss = gradient_adjusted_loss(outputs, targets, 0.0, others_only, detach)
        torch.testing.assert_close(loss, joint_loss(outputs, targets, 0.0, "mse"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("others_only", "detach"), FORMS)
@settings(deadline=None, max_examples=25)
@given(beta=st.floats(0, 0.999), num_members=st.integers(2, 50))
def test_step_and_beta_convert_both_ways(others_only, detach, beta, num_members):
    step = step_from_beta(beta, num_members, others_only, detach)
    assert beta_from_step(step, num_members, others_only, detach) == pytest.approx(beta, abs=1e-9)


def test_of_two_steps_with_the_same_gamma_the_one_below_members_is_returned():
    for step in (6.0, 20.0):
        gamma = beta_from_step(step, 5, others_only=True)
        smaller = step_from_beta(gamma, 5, others_only=True)
        assert smaller < 4 < step
        assert beta_from_step(smaller, 5, others_only=True) == pytest.approx(gamma, abs=1e-12)


@pytest.mark.parametrize("detach", [False, True])
def test_joint_training_is_a_step_of_members_minus_one_against_the_others(detach):
    assert step_from_beta(1.0, 7, others_only=True, detach=detach) == pytest.approx(6.0)


@pytest.mark.parametrize("detach", [False, True])
def test_no_finite_step_against_all_members_is_joint_training(detach):
    with pytest.raises(ValueError, match="no finite step"):
        step_from_beta(1.0, detach=detach)


def test_the_step_grows_as_a_power_of_the_distance_from_joint_training():
    # Not exponentially: each factor of 100 in 1 - beta is a factor of 10 in 1 + step.
    for exponent in (2, 4, 6):
        assert 1 + step_from_beta(1 - 10.0**-exponent) == pytest.approx(10 ** (exponent / 2), rel=1e-6)


def test_a_detached_step_past_the_others_is_refused_as_beta_above_one():
    outputs, targets = example(num_members=3)
    with pytest.raises(ValueError, match=r"members - 1 = 2.*got 2\.5.*beta = 1\.07.*theorem 5\.1"):
        gradient_adjusted_loss(outputs, targets, 2.5, others_only=True, detach=True)
    gradient_adjusted_loss(outputs, targets, 2.5, others_only=True, detach=True, allow_unbounded=True)
    gradient_adjusted_loss(outputs, targets, 2.0, others_only=True, detach=True)
    gradient_adjusted_loss(outputs, targets, 2.5, others_only=True)


def test_a_tensor_step_is_the_number_and_is_not_read():
    outputs, targets = example()
    number = gradient_adjusted_loss(outputs, targets, 0.7)
    assert gradient_adjusted_loss(outputs, targets, torch.tensor(0.7, dtype=torch.float64)) == number
    meta = gradient_adjusted_loss(
        outputs.to("meta"), targets.to("meta"), torch.empty((), device="meta"), others_only=True, detach=True
    )
    assert meta.shape == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradient_adjusted_loss(*example(), step=-1.0), "at least 0"),
        (lambda: gradient_adjusted_loss(*example(), step=math.nan), "`step` must be a number"),
        (lambda: gradient_adjusted_loss(*example(num_members=1), others_only=True), "at least 2 members"),
        (lambda: gradient_adjusted_loss(example()[0], torch.zeros(6)), "Reshape"),
        (lambda: beta_from_step(1.0, others_only=True), "num_members"),
        (lambda: step_from_beta(0.5, others_only=True), "num_members"),
        (lambda: step_from_beta(1.2), r"got 1.2. Above 1 .*theorem 5.1[^`]*$"),
        (lambda: step_from_beta(math.nan), "got nan"),
    ],
)
def test_bad_input_is_refused_with_what_was_wanted(call, message):
    with pytest.raises(ValueError, match=message):
        call()
