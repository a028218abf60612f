from math import log

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dissensus as ds
from dissensus import objectives as obj
from dissensus.objectives import Step
from dissensus.objectives.likelihoods import LIKELIHOODS


def test_gaussian_nll_is_the_density_of_torch():
    mean, scale, y = torch.randn(3, 50, dtype=torch.float64)
    scale = scale.exp()
    expected = -torch.distributions.Normal(mean, scale).log_prob(y)
    torch.testing.assert_close(obj.gaussian_nll(mean, scale, y), expected)


def test_laplace_nll_is_the_density_of_torch():
    mean, scale, y = torch.randn(3, 50, dtype=torch.float64)
    scale = scale.exp()
    expected = -torch.distributions.Laplace(mean, scale).log_prob(y)
    torch.testing.assert_close(obj.laplace_nll(mean, scale, y), expected)


def test_scale_is_softplus_of_rho_plus_a_floor():
    mean, scale = obj.mean_and_scale(torch.tensor([[1.0, -100.0], [2.0, 0.0]]))
    torch.testing.assert_close(mean.squeeze(), torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(scale.squeeze(), torch.tensor([1e-6, log(2) + 1e-6]))


def practical_targets():
    state = np.random.RandomState(173)
    x = state.uniform(-4, 4, 40)
    return torch.tensor(x**3 + state.normal(0, 3.0, 40))


def test_nll_of_the_practical_before_training_is_the_recorded_figure():
    # facts: mean 0, rho 0 on the practical's 40 points gives 638.209 (Gaussian) and 22.155 (Laplace).
    outputs = torch.zeros(1, 40, 2, dtype=torch.float64)
    gaussian = LIKELIHOODS["gaussian_nll"].per_example(outputs, practical_targets()).mean()
    laplace = LIKELIHOODS["laplace_nll"].per_example(outputs, practical_targets()).mean()
    assert gaussian.item() == pytest.approx(638.209, abs=2e-3)
    assert laplace.item() == pytest.approx(22.155, abs=1e-3)


@pytest.mark.parametrize(("family", "factor"), [("gaussian", 1.0), ("laplace", 2.0)])
def test_mixture_moments_are_those_of_a_large_sample(family, factor):
    mean = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64)[:, None]
    scale = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[:, None]
    centre, std = ds.mixture(mean, scale, family)
    expected = (factor * scale**2 + mean**2).mean() - mean.mean() ** 2
    torch.testing.assert_close(std.square().squeeze(), expected)
    law = torch.distributions.Normal if family == "gaussian" else torch.distributions.Laplace
    sample = law(mean.squeeze(), scale.squeeze()).sample((400_000,)).flatten()
    assert sample.mean().item() == pytest.approx(centre.item(), abs=0.02)
    assert sample.var().item() == pytest.approx(std.item() ** 2, rel=0.02)


def test_mixture_weights_pick_members_out():
    mean, scale = torch.tensor([[1.0], [5.0]]), torch.tensor([[2.0], [3.0]])
    centre, std = ds.mixture(mean, scale, weights=torch.tensor([1.0, 0.0]))
    assert (centre.item(), std.item()) == (1.0, 2.0)


def test_mixture_keeps_double_precision():
    mean = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    assert ds.mixture(mean, torch.ones_like(mean))[0].item() == pytest.approx(7 / 3, abs=1e-15)


def test_a_mixture_of_half_precision_is_computed_in_single():
    mean, scale = torch.zeros(2, 1).half(), torch.full((2, 1), 300.0).half()
    centre, std = ds.mixture(mean, scale)
    assert (centre.item(), std.item(), std.dtype) == (0.0, 300.0, torch.float32)
    assert torch.equal(std, ds.scores.total_variance(mean, scale).sqrt())


def test_a_mixture_of_maps_passes_gradients_on():
    mean = torch.randn(3, 2, 4, 5, requires_grad=True)
    centre, std = ds.mixture(mean, torch.ones(3, 2, 4, 5))
    torch.testing.assert_close(std.square(), 1 + mean.var(0, unbiased=False))
    (gradient,) = torch.autograd.grad(centre.sum(), mean)
    torch.testing.assert_close(gradient, torch.full_like(mean, 1 / 3))


def test_mixture_variance_survives_large_means():
    mean, scale = torch.full((3, 1), 1e6), torch.full((3, 1), 0.1)
    assert ds.mixture(mean, scale)[1].item() == pytest.approx(0.1, rel=1e-4)


def test_cross_entropy_is_that_of_torch_for_labels_and_soft_labels():
    logits, labels = torch.randn(3, 8, 5), torch.randint(0, 5, (8,))
    soft = torch.rand(8, 5).softmax(-1)
    loss = LIKELIHOODS["cross_entropy"].per_example
    for row, got in zip(logits, loss(logits, labels), strict=True):
        torch.testing.assert_close(got, F.cross_entropy(row, labels, reduction="none"))
    for row, got in zip(logits, loss(logits, soft), strict=True):
        torch.testing.assert_close(got, F.cross_entropy(row, soft, reduction="none"))


def test_own_labels_are_read_member_by_member():
    logits, labels = torch.randn(3, 8, 5), torch.randint(0, 5, (3, 8))
    got = LIKELIHOODS["cross_entropy"].per_example(logits, labels)
    expected = torch.stack([F.cross_entropy(z, y, reduction="none") for z, y in zip(logits, labels, strict=True)])
    torch.testing.assert_close(got, expected)


def test_label_smoothing_is_that_of_torch():
    logits, labels = torch.randn(2, 8, 5), torch.randint(0, 5, (8,))
    loss, _ = obj.Independent(label_smoothing=0.3).on_outputs(
        logits, labels, Step(torch.tensor(0), 1, False, torch.arange(2), torch.tensor(0))
    )
    expected = sum(F.cross_entropy(row, labels, label_smoothing=0.3) for row in logits)
    torch.testing.assert_close(loss, expected)


def test_brier_of_a_confident_wrong_answer_is_two():
    logits = torch.tensor([[[100.0, 0.0]]])
    assert LIKELIHOODS["brier"].per_example(logits, torch.tensor([1])).item() == pytest.approx(2.0)


@pytest.mark.parametrize("name", LIKELIHOODS)
class TestLikelihoodContract:
    def outputs(self, name):
        width = {"classes": 4, "points": 2, "density": 4, "labels": 2, "own": 2}[LIKELIHOODS[name].kind]
        return torch.randn(3, 6, width, dtype=torch.float64)

    def targets(self, name):
        if LIKELIHOODS[name].kind == "classes":
            return torch.randint(0, 4, (6,))
        if name == "pinball":
            return torch.randn(6, dtype=torch.float64)
        if name in ("poisson", "binary_cross_entropy"):
            return torch.randint(0, 2, (6, 2)).double()
        return torch.randn(6, 2, dtype=torch.float64)

    def test_the_mixture_of_copies_of_one_member_is_that_member(self, name):
        outputs, y = self.outputs(name)[:1].expand(3, -1, -1), self.targets(name)
        likelihood = LIKELIHOODS[name]
        torch.testing.assert_close(likelihood.mixture(outputs, y), likelihood.per_example(outputs[0], y))

    def test_the_mixture_is_never_worse_than_the_mean_member(self, name):
        outputs, y = self.outputs(name), self.targets(name)
        likelihood = LIKELIHOODS[name]
        assert (likelihood.mixture(outputs, y) <= likelihood.losses(outputs, y).mean(0) + 1e-12).all()

    def test_the_divergence_is_zero_at_itself_and_positive_elsewhere(self, name):
        p, q = self.outputs(name), self.outputs(name)
        divergence = LIKELIHOODS[name].divergence
        if LIKELIHOODS[name].kind == "own":
            with pytest.raises(ValueError, match="how far two outputs are"):
                divergence(p, q)
            return
        torch.testing.assert_close(divergence(p, p), torch.zeros(3, 6, dtype=torch.float64), atol=1e-12, rtol=0)
        assert (divergence(p, q) > 0).all()

    def test_gradients_are_right(self, name):
        outputs, y = self.outputs(name).requires_grad_(), self.targets(name)
        assert torch.autograd.gradcheck(lambda z: LIKELIHOODS[name].losses(z, y).sum(), outputs)

    def test_float32_extremes_stay_finite(self, name):
        if LIKELIHOODS[name].kind != "classes":
            pytest.skip("only logits saturate; a point prediction of 1e4 really has that error")
        outputs = torch.tensor([1e4, -1e4, 0.0, 50.0]).expand(3, 6, 4)
        assert torch.isfinite(LIKELIHOODS[name].per_example(outputs, self.targets(name))).all()
        assert torch.isfinite(LIKELIHOODS[name].mixture(outputs, self.targets(name))).all()


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_density_divergence_is_the_kl_of_torch(law):
    kind = {"gaussian": torch.distributions.Normal, "laplace": torch.distributions.Laplace}[law]
    p, q = torch.randn(2, 5, 2, dtype=torch.float64)
    got = LIKELIHOODS[f"{law}_nll"].divergence(p, q)
    expected = torch.distributions.kl_divergence(kind(*obj.mean_and_scale(p)), kind(*obj.mean_and_scale(q))).squeeze(-1)
    torch.testing.assert_close(got, expected)


def test_class_divergence_is_the_kl_from_the_first_to_the_second():
    p, q = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(LIKELIHOODS["cross_entropy"].divergence(p, q), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: obj.Independent("hinge"), "cross_entropy"),
        (lambda: obj.Independent(label_smoothing=1.0), "label_smoothing"),
        (lambda: obj.Independent("mse", label_smoothing=0.1), "class labels"),
        (lambda: obj.mean_and_scale(torch.zeros(4, 3)), "even"),
        (lambda: ds.mixture(torch.zeros(2, 1), torch.zeros(2, 2)), "shaped as `mean`"),
        (lambda: ds.mixture(torch.zeros(2, 1), torch.full((2, 1), -3.0)), "`scale` must not be negative; got -3"),
        (lambda: ds.mixture(torch.zeros(2, 1), torch.full((2, 1), torch.nan)), "row 0 of member 0 holds nan"),
        (lambda: ds.mixture(torch.zeros(2, 1).long(), torch.ones(2, 1).long()), "`mean` must be floating point"),
        (lambda: ds.mixture(torch.zeros(0, 1), torch.ones(0, 1)), "`mean` must not be empty"),
        (lambda: ds.mixture(torch.tensor(0.0), torch.tensor(1.0)), "`mean` must be shaped"),
        (lambda: ds.mixture(torch.zeros(2, 1), torch.ones(2, 1), "cauchy"), "'laplace'"),
        (lambda: ds.mixture(torch.zeros(2, 1), torch.ones(2, 1), weights=torch.tensor([0.5, 0.6])), "sum"),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()
