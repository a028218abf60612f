import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dissensus.objectives.diversity import decompose, diversity_closed_form, hessian_diversity, second_order_diversity
from dissensus.objectives.losses import LOSSES, errors

MEMBERS, BATCH, CLASSES = 4, 5, 3
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
EVERY_SETTING = [(loss, average) for loss in LOSSES for average in ("probs", "scores")]
NO_CLOSED_FORM = [("brier", "scores"), ("exponential", "probs"), ("exponential", "scores")]
CLOSED_FORMS = [setting for setting in EVERY_SETTING if setting not in NO_CLOSED_FORM]
LABEL_FREE = [("mse", "probs"), ("brier", "probs"), ("logistic", "probs")] + [
    (loss, "scores") for loss in ("cross_entropy", "sigmoid", "poisson")
]
SMOOTH = [setting for setting in EVERY_SETTING if setting[0] != "zero_one"]


def example(loss, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (MEMBERS, BATCH, CLASSES)
    outputs = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    if loss in ("cross_entropy", "brier", "zero_one"):
        return outputs, torch.randint(CLASSES, (BATCH,), generator=generator)
    targets = torch.randint(2, shape[1:], generator=generator).double()
    return outputs, 2 * targets - 1 if loss in ("logistic", "exponential") else targets


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["uniform", "weighted"])
@pytest.mark.parametrize(("loss", "average"), CLOSED_FORMS)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 3.0))
def test_the_closed_form_equals_the_definition(loss, average, weights, seed, scale):
    outputs, targets = example(loss, scale, seed)
    definition = decompose(outputs, targets, loss, average, weights).diversity
    closed = diversity_closed_form(outputs, targets, loss, average, weights)
    torch.testing.assert_close(closed, definition, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("loss", "average"), LABEL_FREE)
def test_diversity_without_labels_needs_none(loss, average):
    outputs, targets = example(loss)
    definition = decompose(outputs, targets, loss, average).diversity
    closed = diversity_closed_form(outputs, loss=loss, average=average)
    torch.testing.assert_close(closed, definition, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("average", ["probs", "scores"])
def test_the_closed_form_holds_for_soft_and_smoothed_labels(average):
    logits, labels = example("cross_entropy")
    soft = torch.rand(BATCH, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    soft = soft / soft.sum(-1, keepdim=True)
    for targets, smoothing in ((soft, 0.0), (labels, 0.2), (soft, 0.2)):
        definition = decompose(logits, targets, "cross_entropy", average, WEIGHTS, smoothing).diversity
        closed = diversity_closed_form(logits, targets, "cross_entropy", average, WEIGHTS, smoothing)
        torch.testing.assert_close(closed, definition, rtol=1e-10, atol=1e-10)


def test_score_averaged_diversity_is_the_divergence_that_torch_computes():
    logits, _ = example("cross_entropy")
    pooled = logits.mean(0).log_softmax(-1)
    wanted = [F.kl_div(member.log_softmax(-1), pooled, log_target=True, reduction="none").sum(-1) for member in logits]
    closed = diversity_closed_form(logits, average="scores")
    torch.testing.assert_close(closed, torch.stack(wanted).mean(0), rtol=1e-12, atol=1e-12)


def test_the_closed_form_keeps_digits_that_the_difference_loses():
    # Errors of 1e6 in float32 leave no digit of a diversity of 1e-4.
    outputs = torch.tensor([[1000.01], [999.99]])
    exact = (outputs.double() - outputs.double().mean(0)).square().mean(0)
    closed = diversity_closed_form(outputs, loss="mse")
    torch.testing.assert_close(closed.double(), exact, rtol=1e-2, atol=0)
    difference = decompose(outputs, torch.tensor([0.0]), "mse").diversity
    assert abs(difference.double() - exact) > 10 * abs(closed.double() - exact)


@pytest.mark.parametrize(("loss", "average"), NO_CLOSED_FORM)
def test_a_loss_without_a_closed_form_says_so(loss, average):
    outputs, targets = example(loss)
    with pytest.raises(ValueError, match="no closed form"):
        diversity_closed_form(outputs, targets, loss, average)


def test_labels_are_asked_for_where_the_closed_form_needs_them():
    with pytest.raises(ValueError, match="targets"):
        diversity_closed_form(torch.zeros(2, 4, 3))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["uniform", "weighted"])
@pytest.mark.parametrize(("loss", "average"), SMOOTH)
def test_the_curvature_form_equals_the_definition(loss, average, weights):
    # Half the usual spread: a Poisson probability near 0 has nearly singular curvature.
    outputs, targets = example(loss, scale=0.5)
    definition = decompose(outputs, targets, loss, average, weights).diversity
    curvature = hessian_diversity(outputs, targets, loss, average, weights)
    torch.testing.assert_close(curvature, definition, rtol=1e-8, atol=1e-10)


def test_the_curvature_form_equals_the_definition_for_any_smooth_loss():
    def log_cosh(outputs, targets):
        return (outputs - targets).cosh().log().sum(-1)

    outputs, targets = example("mse", seed=3)
    definition = decompose(outputs, targets, log_cosh, weights=WEIGHTS).diversity
    curvature = hessian_diversity(outputs, targets, log_cosh, weights=WEIGHTS)
    torch.testing.assert_close(curvature, definition, rtol=1e-8, atol=1e-10)


def test_one_point_between_ensemble_and_member_carries_the_whole_remainder():
    # Theorem 4.5 as stated, on the logistic loss: find c in [0, 1] with R = d^2 L''(fbar + c d) / 2.
    outputs = torch.tensor([[0.8], [-0.3], [0.1]], dtype=torch.float64)
    target, mean = 1.0, outputs.mean().item()
    total = 0.0
    for f in outputs.flatten().tolist():
        d = f - mean
        slope = -target / (1 + math.exp(target * mean))
        remainder = math.log1p(math.exp(-target * f)) - math.log1p(math.exp(-target * mean)) - slope * d
        times = np.linspace(0, 1, 100_001)
        sigmoid = 1 / (1 + np.exp(-(mean + times * d)))
        forms = 0.5 * d**2 * sigmoid * (1 - sigmoid)
        assert forms.min() - 1e-15 <= remainder <= forms.max() + 1e-15
        total += forms[np.abs(forms - remainder).argmin()] / 3
    diversity = decompose(outputs, torch.tensor([target], dtype=torch.float64), "logistic").diversity.item()
    assert total == pytest.approx(diversity, abs=1e-8)


def test_the_curvature_of_the_zero_one_loss_is_refused():
    with pytest.raises(ValueError, match="second derivative"):
        hessian_diversity(*example("zero_one"), loss="zero_one")


@pytest.mark.parametrize(("loss", "average"), SMOOTH)
def test_second_order_diversity_is_the_hessian_at_the_ensemble(loss, average):
    # The Hessian in full from torch.func, against the closed forms and the directional derivative.
    outputs, targets = example(loss)

    def of_scores(mean, b):
        return errors(mean[None, None], targets[b : b + 1], loss, average)[1].sum()

    def of_probs(probs, b):
        if loss == "brier":
            return (probs - F.one_hot(targets[b], CLASSES)).square().sum()
        if loss == "cross_entropy":
            return -probs[targets[b]].log()
        if loss == "sigmoid":
            return -(targets[b] * probs.log() + (1 - targets[b]) * (1 - probs).log()).sum()
        return -probs.log().sum()

    in_probs = average == "probs" and loss in ("cross_entropy", "brier", "sigmoid", "poisson")
    values = outputs
    if in_probs and loss in ("cross_entropy", "brier"):
        values = outputs.softmax(-1)
    elif in_probs and loss == "sigmoid":
        values = outputs.sigmoid()
    elif in_probs:
        values = torch.distributions.Poisson(outputs.exp()).log_prob(targets).exp()
    wanted = []
    for b in range(BATCH):
        mean = (WEIGHTS[:, None] * values[:, b]).sum(0)
        hessian = torch.func.jacrev(torch.func.jacrev(of_probs if in_probs else of_scores))(mean, b)
        deviation = values[:, b] - mean
        wanted.append(sum(w * d @ hessian @ d / 2 for w, d in zip(WEIGHTS, deviation, strict=True)))
    second_order = second_order_diversity(outputs, targets, loss, average, WEIGHTS)
    torch.testing.assert_close(second_order, torch.stack(wanted), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mean", [0.2, 0.5, 0.9])
def test_a_beta_law_of_true_class_probabilities_gives_the_documents_approximation(mean):
    # Appendix C.3: E[log(mu / p)] is about (1 - mu) / (2 mu (1 + phi)).
    ratios = []
    for precision in (10.0, 100.0, 1000.0):
        phi = torch.tensor(precision, dtype=torch.float64)
        exact = math.log(mean) - torch.digamma(phi * mean) + torch.digamma(phi)
        ratios.append((exact / ((1 - mean) / (2 * mean * (1 + precision)))).item())
    assert abs(ratios[2] - 1) < 0.01
    assert abs(ratios[0] - 1) > abs(ratios[1] - 1) > abs(ratios[2] - 1)


def test_a_sampled_ensemble_has_the_diversity_of_its_beta_law():
    mean, precision = 0.7, 200.0
    law = torch.distributions.Beta(torch.tensor(mean * precision), torch.tensor((1 - mean) * precision))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        p = law.sample((200_000,)).double()
    logits = torch.stack([p, 1 - p], dim=-1).log()[:, None]
    diversity = decompose(logits, torch.tensor([0])).diversity.item()
    assert diversity == pytest.approx((1 - mean) / (2 * mean * (1 + precision)), rel=0.02)


def test_probability_averaged_diversity_tends_to_the_divergence_from_the_pool():
    # Appendix C.3: with labels distributed as the ensemble predicts, DIV = sum_j w_j KL(pbar || p_j).
    logits, labels = example("cross_entropy")
    probs = logits.softmax(-1)
    pooled = (WEIGHTS[:, None, None] * probs).sum(0)
    divergence = (WEIGHTS[:, None] * (pooled * (pooled / probs).log()).sum(-1)).sum(0)
    gaps = []
    for share in (0.5, 0.1, 0.0):
        targets = share * F.one_hot(labels, CLASSES) + (1 - share) * pooled
        gaps.append((decompose(logits, targets, weights=WEIGHTS).diversity - divergence).abs().max())
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-10


class TestOnePredictionDisguisedAsMany:
    """Appendix F and figure 1: f_j = f + c_j."""

    f, y = 0.4, 1.0
    c = torch.tensor([0.7, -0.2, 0.1], dtype=torch.float64)

    def decomposition(self, c):
        return decompose((self.f + c)[:, None], torch.tensor([self.y], dtype=torch.float64), "mse")

    def test_the_cross_term_of_the_member_error_carries_a_factor_two(self):
        wanted = (self.f - self.y) ** 2 + self.c.square().mean() + 2 * self.c.mean() * (self.f - self.y)
        assert self.decomposition(self.c).member_error.item() == pytest.approx(wanted.item(), abs=1e-12)

    def test_the_member_error_alone_is_least_where_every_member_is_right(self):
        # Not at c = 0, unless f = y.
        right = torch.full((3,), self.y - self.f, dtype=torch.float64)
        assert self.decomposition(right).member_error.item() == pytest.approx(0.0, abs=1e-12)
        assert self.decomposition(torch.zeros(3, dtype=torch.float64)).member_error.item() > 0.1

    def test_every_shift_of_the_right_mean_minimises_the_ensemble_error(self):
        colluding = torch.tensor([100.0, -50.0, -50.0], dtype=torch.float64) + (self.y - self.f)
        d = self.decomposition(colluding)
        assert d.ensemble_error.item() == pytest.approx(0.0, abs=1e-10)
        assert d.diversity.item() == pytest.approx(5000.0, abs=1e-9)

    def test_two_members_that_shift_apart_inflate_diversity_and_leave_the_ensemble(self):
        t = 2.5
        before = self.decomposition(self.c)
        after = self.decomposition(self.c + torch.tensor([t, -t, 0.0], dtype=torch.float64))
        assert after.ensemble_error.item() == pytest.approx(before.ensemble_error.item(), abs=1e-12)
        gain = (2 * t**2 + 2 * t * (self.c[0] - self.c[1])) / 3
        assert (after.diversity - before.diversity).item() == pytest.approx(gain.item(), abs=1e-12)
