import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from dissensus.objectives.diversity import decompose
from dissensus.objectives.joint import joint_loss
from dissensus.objectives.losses import LOSSES

MEMBERS, BATCH, CLASSES = 3, 4, 5
WEIGHTS = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
SETTINGS = [(loss, average) for loss in LOSSES for average in ("probs", "scores")]


def example(loss="cross_entropy", seed=0, device="cpu", dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(MEMBERS, BATCH, CLASSES, generator=generator, dtype=torch.float64)
    if loss in ("cross_entropy", "brier", "zero_one"):
        targets = torch.randint(CLASSES, (BATCH,), generator=generator)
        return outputs.to(device, dtype), targets.to(device)
    signs = 2 * torch.randint(2, (BATCH, CLASSES), generator=generator) - 1
    targets = signs if loss in ("logistic", "exponential") else (signs + 1) / 2
    return outputs.to(device, dtype), targets.to(device, dtype)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["uniform", "weighted"])
@pytest.mark.parametrize(("loss", "average"), SETTINGS)
class TestEveryLoss:
    @settings(deadline=None, max_examples=10)
    @given(beta=st.floats(0, 1), seed=st.integers(0, 1000))
    def test_subtracts_a_share_of_the_diversity_from_the_member_error(self, loss, average, weights, beta, seed):
        outputs, targets = example(loss, seed)
        d = decompose(outputs, targets, loss, average, weights)
        wanted = (d.member_error - beta * d.diversity).mean()
        torch.testing.assert_close(
            joint_loss(outputs, targets, beta, loss, average, weights), wanted, rtol=1e-12, atol=1e-12
        )

    def test_a_tensor_beta_is_the_number(self, loss, average, weights):
        outputs, targets = example(loss)
        number = joint_loss(outputs, targets, 0.4, loss, average, weights)
        tensor = joint_loss(outputs, targets, torch.tensor(0.4, dtype=torch.float64), loss, average, weights)
        torch.testing.assert_close(tensor, number, rtol=1e-14, atol=0)

    def test_never_reads_a_value_from_the_device(self, loss, average, weights):
        # Tensors on the meta device have no values: reading one, which would wait for a GPU, raises.
        outputs, targets = example(loss, device="meta")
        weights = None if weights is None else weights.to("meta")
        beta = torch.empty((), device="meta")
        assert joint_loss(outputs, targets, beta, loss, average, weights).shape == ()

    def test_gradients_are_those_of_finite_differences(self, loss, average, weights):
        outputs, targets = example(loss)
        if loss == "zero_one":
            assert not joint_loss(outputs.requires_grad_(), targets, 0.5, loss).requires_grad
            return
        assert gradcheck(lambda f: joint_loss(f, targets, 0.4, loss, average, weights), (outputs.requires_grad_(),))


class TestLogitGradients:
    """Appendix E, with uniform weights; one example, so that the mean over the batch changes nothing."""

    logits = torch.randn(MEMBERS, 1, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([2])

    def gradient(self, beta, average):
        logits = self.logits.clone().requires_grad_()
        joint_loss(logits, self.label, beta, "cross_entropy", average).backward()
        return logits.grad

    def test_independent_training_sees_each_members_own_error(self):
        wanted = (self.logits.softmax(-1) - F.one_hot(self.label, CLASSES)) / MEMBERS
        for average in ("probs", "scores"):
            torch.testing.assert_close(self.gradient(0.0, average), wanted, rtol=0, atol=1e-8)

    def test_joint_training_on_probabilities_weighs_members_by_their_true_class_probability(self):
        probs = self.logits.softmax(-1)
        share = probs[..., 2:3] / probs[..., 2:3].sum(0)
        wanted = (probs - F.one_hot(self.label, CLASSES)) * share
        torch.testing.assert_close(self.gradient(1.0, "probs"), wanted, rtol=0, atol=1e-8)

    def test_joint_training_on_scores_gives_every_member_the_same_gradient(self):
        wanted = (self.logits.mean(0).softmax(-1) - F.one_hot(self.label, CLASSES)) / MEMBERS
        torch.testing.assert_close(self.gradient(1.0, "scores"), wanted.expand(MEMBERS, 1, CLASSES), rtol=0, atol=1e-8)


class TestBeyondBetaOne:
    """Theorem 5.1."""

    @pytest.mark.parametrize(("t", "wanted"), [(1, 0.9), (10, -9.0), (100, -999.0), (1000, -99999.0)])
    def test_squared_error_falls_without_end_as_two_members_part(self, t, wanted):
        outputs = torch.tensor([[float(t)], [-float(t)]], dtype=torch.float64)
        target = torch.tensor([1.0], dtype=torch.float64)
        loss = joint_loss(outputs, target, 1.1, "mse", allow_unbounded=True)
        assert loss.item() == pytest.approx(wanted, rel=1e-9)
        assert joint_loss(outputs, target, 1.0, "mse").item() == pytest.approx(1.0)
        assert joint_loss(outputs, target, 0.9, "mse").item() == pytest.approx(1 + 0.1 * t**2)

    @pytest.mark.parametrize(("p", "wanted"), [(1e-2, 0.631), (1e-6, 0.182), (1e-12, -0.508), (1e-50, -4.88)])
    def test_cross_entropy_falls_without_end_as_one_member_becomes_certain_and_wrong(self, p, wanted):
        probs = torch.tensor([[[p, 1 - p]], [[0.9, 0.1]]], dtype=torch.float64)
        loss = joint_loss(probs.log(), torch.tensor([0]), 1.1, allow_unbounded=True)
        assert loss.item() == pytest.approx(wanted, abs=5e-3 if p == 1e-50 else 5e-4)

    def test_a_bounded_loss_stays_bounded(self):
        # The theorem needs a loss without an upper bound: Brier lies in [0, 2].
        outputs = torch.tensor([[[1e3, -1e3]], [[-1e3, 1e3]]], dtype=torch.float64)
        loss = joint_loss(outputs, torch.tensor([0]), 1.1, "brier", allow_unbounded=True)
        assert loss.item() == pytest.approx(1.1 * 0.5 - 0.1 * 1.0)

    def test_is_refused_with_the_reason(self):
        with pytest.raises(ValueError, match=r"got 1\.1.*theorem 5\.1.*average stays put.*allow_unbounded"):
            joint_loss(*example(), 1.1)

    @pytest.mark.parametrize("beta", [-0.1, math.nan])
    def test_what_is_no_share_is_refused_even_so(self, beta):
        with pytest.raises(ValueError, match="beta"):
            joint_loss(*example(), beta, allow_unbounded=True)


@pytest.mark.parametrize("average", ["probs", "scores"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_saturated_bfloat16_logits_train(beta, average):
    logits = (1e4 * example()[0]).to(torch.bfloat16).requires_grad_()
    loss = joint_loss(logits, example()[1], beta, average=average)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()


def test_descent_on_the_joint_objective_makes_members_collude():
    # Two members start apart: joint training leaves their spread, independent training removes it.
    targets = torch.tensor([1.0], dtype=torch.float64)
    spread = {}
    for beta in (0.0, 1.0):
        outputs = torch.tensor([[5.0], [-4.0]], dtype=torch.float64, requires_grad=True)
        for _ in range(200):
            (gradient,) = torch.autograd.grad(joint_loss(outputs, targets, beta, "mse"), outputs)
            outputs = (outputs - 0.1 * gradient).detach().requires_grad_()
        spread[beta] = decompose(outputs, targets, "mse").diversity.item()
    assert spread[0.0] < 1e-12
    assert spread[1.0] == pytest.approx(4.5**2)


def test_label_smoothing_reaches_both_errors():
    logits, labels = example()
    soft = 0.8 * F.one_hot(labels, CLASSES).double() + 0.2 / CLASSES
    smoothed = joint_loss(logits, labels, 0.3, label_smoothing=0.2)
    torch.testing.assert_close(smoothed, joint_loss(logits, soft, 0.3), rtol=1e-12, atol=1e-12)


def test_one_weight_for_several_members_is_refused_rather_than_broadcast():
    outputs, targets = example(device="meta")
    with pytest.raises(ValueError, match="one per member"):
        joint_loss(outputs, targets, 0.5, weights=torch.ones(1, device="meta"))
