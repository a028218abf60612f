"""Regression scores: the variance of a mixture and its two parts."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Laplace, MixtureSameFamily, Normal
from torch.testing import assert_close

from dissensus import scores
from dissensus.scores import REGRESSION_SCORES


def normal(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("family", "component"), [("gaussian", Normal), ("laplace", Laplace)])
@pytest.mark.parametrize("weights", [None, torch.tensor([0.1, 0.2, 0.7])], ids=["equal", "weighted"])
@pytest.mark.parametrize("shape", [(3, 10), (3, 10, 2)])
def test_total_variance_is_that_of_the_mixture_distribution(family, component, weights, shape):
    mean, scale = normal(*shape), normal(*shape, seed=1).exp()
    shares = torch.full((3,), 1 / 3) if weights is None else weights
    last = [*range(1, len(shape)), 0]
    mixture = MixtureSameFamily(
        Categorical(shares.double().expand(*shape[1:], 3)), component(mean.permute(last), scale.permute(last))
    )
    value = scores.total_variance(mean, scale, family=family, weights=weights)
    assert_close(value, mixture.variance, rtol=1e-6, atol=1e-7)


def test_variances_of_two_members_have_a_closed_form():
    mean, scale = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [4.0]])
    assert scores.knowledge_variance(mean, scale).item() == 1.0
    assert scores.data_variance(mean, scale).item() == 10.0
    assert scores.data_variance(mean, scale, family="laplace").item() == 20.0


def test_knowledge_variance_of_members_that_agree_on_a_large_value_is_zero():
    mean = torch.full((3, 5), 12345.678)
    assert scores.knowledge_variance(mean, torch.ones(3, 5)).abs().max() < 1e-4


@pytest.mark.parametrize("name", REGRESSION_SCORES)
class TestRegressionScoreContract:
    def test_member_order_does_not_matter(self, name):
        mean, scale = normal(4, 9), normal(4, 9, seed=1).exp()
        order = [2, 0, 3, 1]
        reordered = REGRESSION_SCORES[name](mean[order], scale[order])
        assert_close(reordered, REGRESSION_SCORES[name](mean, scale))

    def test_one_member_has_data_variance_only(self, name):
        mean, scale = normal(1, 9), normal(1, 9, seed=1).exp()
        expected = torch.zeros(9).double() if name == "knowledge_variance" else scale[0] ** 2
        assert_close(REGRESSION_SCORES[name](mean, scale), expected)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_computed_in_float32(self, name, dtype):
        mean, scale = normal(4, 9).to(dtype), normal(4, 9, seed=1).exp().to(dtype)
        expected = REGRESSION_SCORES[name](mean.float(), scale.float())
        assert_close(REGRESSION_SCORES[name](mean, scale), expected, rtol=0, atol=0)

    def test_no_gradient_flows(self, name):
        mean, scale = normal(4, 9).requires_grad_(), torch.ones(4, 9, requires_grad=True)
        assert not REGRESSION_SCORES[name](mean, scale).requires_grad

    def test_the_family_must_be_known(self, name):
        with pytest.raises(Exception, match="family"):
            REGRESSION_SCORES[name](torch.zeros(2, 3), torch.ones(2, 3), family="cauchy")
