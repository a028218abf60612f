import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from dissensus.objectives.diversity import decompose, second_order_diversity
from dissensus.objectives.joint import (
    correlation_penalty,
    generalised_negative_correlation_loss,
    joint_loss,
    negative_correlation_loss,
    second_order_gap,
)
from dissensus.objectives.losses import LOSSES

MEMBERS, BATCH, CLASSES = 4, 5, 3
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
SMOOTH = [(loss, average) for loss in LOSSES if loss != "zero_one" for average in ("probs", "scores")]


def example(loss="mse", scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = scale * torch.randn(MEMBERS, BATCH, CLASSES, generator=generator, dtype=torch.float64)
    if loss in ("cross_entropy", "brier"):
        return outputs, torch.randint(CLASSES, (BATCH,), generator=generator)
    targets = torch.randint(2, (BATCH, CLASSES), generator=generator).double()
    return outputs, 2 * targets - 1 if loss in ("logistic", "exponential") else targets


def gradient(function, outputs):
    outputs = outputs.clone().requires_grad_()
    return torch.autograd.grad(function(outputs), outputs)[0]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.floats(0.1, 10.0))
def test_the_penalty_on_correlated_errors_is_minus_the_diversity(seed, scale):
    outputs, targets = example(scale=scale, seed=seed)
    diversity = decompose(outputs, targets, "mse").diversity
    torch.testing.assert_close(correlation_penalty(outputs), -diversity, rtol=1e-9, atol=1e-10)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.floats(0, 1))
def test_negative_correlation_learning_is_the_joint_objective_for_squared_error(seed, strength):
    outputs, targets = example(seed=seed)
    wanted = joint_loss(outputs, targets, strength, "mse")
    loss = negative_correlation_loss(outputs, targets, strength)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        gradient(lambda f: negative_correlation_loss(f, targets, strength), outputs),
        gradient(lambda f: joint_loss(f, targets, strength, "mse"), outputs),
        rtol=1e-10,
        atol=1e-10,
    )


def test_a_mean_without_gradients_gives_members_the_same_gradient():
    # Liu and Yao: (f_i - y) - strength (f_i - fbar), with the mean held constant.
    outputs, targets = example()
    wanted = 2 / (MEMBERS * BATCH) * ((outputs - targets) - 0.3 * (outputs - outputs.mean(0)))
    torch.testing.assert_close(
        gradient(lambda f: negative_correlation_loss(f, targets, 0.3), outputs), wanted, rtol=1e-10, atol=1e-12
    )


def test_the_other_parameter_of_the_literature_converts_as_stated():
    # Brown et al.: half the squared error minus gamma (f_i - fbar)^2, each member following its own loss.
    outputs, targets = example()
    strength = 0.6
    gamma = strength * MEMBERS / (2 * (MEMBERS - 1))
    own = []
    for i in range(MEMBERS):
        loss = lambda f, i=i: (  # noqa: E731
            (0.5 * (f[i] - targets).square() - gamma * (f[i] - f.mean(0)).square()).sum()
        )
        own.append(gradient(loss, outputs)[i])
    joint = gradient(lambda f: negative_correlation_loss(f, targets, strength), outputs)
    torch.testing.assert_close(torch.stack(own), joint * MEMBERS * BATCH / 2, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["uniform", "weighted"])
@pytest.mark.parametrize(("loss", "average"), SMOOTH)
class TestGeneralised:
    def test_the_upper_mode_is_the_joint_objective(self, loss, average, weights):
        outputs, targets = example(loss)
        upper = generalised_negative_correlation_loss(outputs, targets, 0.3, loss, average, weights=weights)
        assert upper == joint_loss(outputs, targets, 0.3, loss, average, weights)

    def test_the_second_order_mode_differs_from_it_by_the_gap(self, loss, average, weights):
        outputs, targets = example(loss)
        second_order = generalised_negative_correlation_loss(
            outputs, targets, 0.3, loss, average, "second_order", weights
        )
        joint = joint_loss(outputs, targets, 0.3, loss, average, weights)
        gap = second_order_gap(outputs, targets, loss, average, weights).mean()
        torch.testing.assert_close(second_order - joint, 0.3 * gap, rtol=1e-9, atol=1e-12)

    def test_the_gap_vanishes_faster_than_the_diversity(self, loss, average, weights):
        direction, targets = example(loss)
        centre = torch.randn(1, BATCH, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ratios = []
        for distance in (1e-1, 1e-2):
            outputs = 0.5 * centre + distance * direction
            gap = second_order_gap(outputs, targets, loss, average, weights).abs().mean()
            ratios.append(gap / decompose(outputs, targets, loss, average, weights).member_error.mean())
        # Third order or better: a tenth of the distance leaves a thousandth of the gap, or rounding.
        assert ratios[1] < 2e-3 * ratios[0] + 1e-13

    def test_gradients_of_the_second_order_mode_are_those_of_finite_differences(self, loss, average, weights):
        outputs, targets = example(loss)

        def second_order(f):
            return generalised_negative_correlation_loss(f, targets, 0.3, loss, average, "second_order", weights)

        assert gradcheck(second_order, (outputs.requires_grad_(),))


@pytest.mark.parametrize(("loss", "average"), [("mse", "probs"), ("brier", "probs")])
def test_there_is_no_gap_for_quadratic_losses(loss, average):
    outputs, targets = example(loss, scale=5.0)
    gap = second_order_gap(outputs, targets, loss, average)
    torch.testing.assert_close(gap, torch.zeros(BATCH, dtype=torch.float64), rtol=0, atol=1e-10)


def test_published_hessians_give_the_second_order_term():
    # 2I for squared error, diag(q) - qq' for logits, diag(y / pbar^2) for probabilities.
    outputs, targets = example()
    labels = torch.tensor([0, 1, 2, 0, 1])
    mean, pooled = outputs.mean(0), outputs.softmax(-1).mean(0)
    q = mean.softmax(-1)
    identity = 2 * torch.eye(CLASSES, dtype=torch.float64).expand(BATCH, -1, -1)
    cases = [
        ("mse", "probs", targets, outputs - mean, identity),
        ("cross_entropy", "scores", labels, outputs - mean, torch.diag_embed(q) - q[:, :, None] * q[:, None]),
        (
            "cross_entropy",
            "probs",
            labels,
            outputs.softmax(-1) - pooled,
            torch.diag_embed(F.one_hot(labels, CLASSES) / pooled.square()),
        ),
    ]
    for loss, average, y, deviation, hessian in cases:
        wanted = torch.einsum("mbi,bij,mbj->b", deviation, hessian, deviation) / (2 * MEMBERS)
        second_order = second_order_diversity(outputs, y, loss, average)
        torch.testing.assert_close(second_order, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", ["cross_entropy", "sigmoid", "logistic"])
def test_the_second_order_mode_has_no_minimum_on_scores_for_any_strength(loss):
    values, upper = [], []
    for t in (1.0, 1e2, 1e4):
        outputs = torch.tensor([[[t, 0.0]], [[-t, 0.0]]], dtype=torch.float64)
        targets = torch.tensor([0]) if loss == "cross_entropy" else torch.ones(1, 2, dtype=torch.float64)
        arguments = (outputs, targets, 0.05, loss, "scores")
        values.append(generalised_negative_correlation_loss(*arguments, mode="second_order").item())
        upper.append(generalised_negative_correlation_loss(*arguments).item())
    assert values[2] < -1e5
    assert upper[0] < upper[1] < upper[2]


def test_a_tensor_strength_is_not_read():
    outputs, targets = (part.to("meta") for part in example())
    strength = torch.empty((), device="meta")
    assert negative_correlation_loss(outputs, targets, strength).shape == ()
    assert generalised_negative_correlation_loss(outputs, targets, strength, "mse").shape == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: negative_correlation_loss(*example(), 1.1), "strength.*theorem 5.1"),
        (lambda: generalised_negative_correlation_loss(*example(), 1.1, "mse"), "theorem 5.1"),
        (lambda: generalised_negative_correlation_loss(*example(), 0.1, "mse", mode="exact"), "second_order"),
        (lambda: second_order_gap(*example("brier"), loss="zero_one"), "second derivative"),
    ],
)
def test_bad_input_is_refused_with_what_was_wanted(call, message):
    with pytest.raises(ValueError, match=message):
        call()
