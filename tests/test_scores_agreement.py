"""Scores of members that agree, or nearly: exactly zero for copies, and digits left where entropies cancel."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from dissensus import scores
from dissensus.evaluation._tasks import Classification, Regression
from dissensus.objectives.likelihoods import LIKELIHOODS
from dissensus.scores import KNOWLEDGE_SCORES, SCORES, Beliefs

properties = settings(deadline=None, max_examples=25)
DIVERGENCES = ("mutual_information", "mean_pairwise_kl", "jensen_shannon")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shares(num_members: int, seed: int) -> Tensor:
    return (3 * normal(num_members, seed=seed)).softmax(0)


def second_order(log_ratio: Tensor) -> Tensor:
    """Return r log r - r + 1 of a ratio r near 1, from its logarithm, without cancellation."""
    return log_ratio.exp() * log_ratio - torch.expm1(log_ratio)


def exact_divergences(logits: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return the three divergences in float64, pair by pair and class by class, each term non-negative."""
    log_probs = logits.double().log_softmax(-1)
    probs = log_probs.exp()
    mixture = (weights[:, None, None] * probs).sum(0)
    to_mixture = (mixture * second_order(log_probs - mixture.log())).sum(-1)
    pairs = {(m, k): float(weights[m] * weights[k]) for m, k in permutations(range(len(logits)), 2)}
    kl, js = torch.zeros(logits.shape[1]).double(), torch.zeros(logits.shape[1]).double()
    for (m, k), weight in pairs.items():
        middle = (probs[m] + probs[k]) / 2
        kl += weight * ((probs[m] - probs[k]) * (log_probs[m] - log_probs[k])).sum(-1) / 2
        js += weight * (middle * second_order(log_probs[m] - middle.log())).sum(-1)
    total = sum(pairs.values())
    mutual_information = (weights[:, None] * to_mixture).sum(0)
    return dict(zip(DIVERGENCES, (mutual_information, kl / total, js / total), strict=True))


@pytest.mark.parametrize("name", sorted(KNOWLEDGE_SCORES))
@given(
    num_members=st.integers(1, 12),
    num_classes=st.sampled_from([2, 3, 10, 15, 16, 40]),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.0, 0.1, 3.0, 100.0, 1e4]),
    seed=st.integers(0, 999),
)
@properties
def test_copies_of_one_member_score_exactly_zero_at_any_weights(name, num_members, num_classes, dtype, spread, seed):
    one = (spread * normal(1, 20, num_classes, seed=seed)).to(dtype)
    copies = one.expand(num_members, -1, -1)
    assert (SCORES[name](copies) == 0).all()
    assert (SCORES[name](copies, weights=shares(num_members, seed)) == 0).all()


@given(num_members=st.integers(1, 12), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 999))
@properties
def test_copies_of_one_regression_have_no_knowledge_variance_at_any_weights(num_members, dtype, seed):
    mean = (1000 * normal(1, 20, 2, seed=seed)).to(dtype).expand(num_members, -1, -1)
    for weights in (None, shares(num_members, seed)):
        assert (scores.knowledge_variance(mean, mean.abs(), weights=weights) == 0).all()


@pytest.mark.parametrize("num_classes", [2, 10, 100])
@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
@pytest.mark.parametrize("apart", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_float32_divergences_of_near_copies_are_those_of_float64(num_classes, spread, apart):
    logits = spread * normal(1, 64, num_classes) + apart * normal(5, 64, num_classes, seed=1)
    logits = logits.float()
    for weights in (torch.full((5,), 0.2).double(), shares(5, seed=2)):
        exact = exact_divergences(logits, weights)
        for name, value in exact.items():
            found = SCORES[name](logits, weights=weights.float()).double()
            assert_close(found, value, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("apart", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_near_copies_keep_their_leading_digits_far_below_what_entropies_resolve(name, apart):
    logits = (2 * normal(1, 200, 10) + apart * normal(5, 200, 10, seed=1)).float()
    exact = exact_divergences(logits, torch.full((5,), 0.2).double())[name]
    assert exact.max() < 2e-4
    assert_close(SCORES[name](logits).double(), exact, rtol=0.05, atol=0.0)
    beliefs = Beliefs.of(logits)
    entropies = (beliefs.mixture_entropy - beliefs.expected_entropy).double()
    if name == "mutual_information" and apart < 1e-2:
        assert ((entropies - exact).abs() > 0.05 * exact).any()


@given(num_members=st.integers(2, 6), apart=st.sampled_from([1e-3, 1.0, 50.0]), seed=st.integers(0, 999))
@properties
def test_divergences_lie_between_their_bounds(num_members, apart, seed):
    logits = 3 * normal(1, 20, 5, seed=seed) + apart * normal(num_members, 20, 5, seed=seed + 1)
    exact = exact_divergences(logits, torch.full((num_members,), 1 / num_members).double())
    bounds = Beliefs.of(logits).disagreement
    slack = 1e-12 + 1e-9 * bounds.pairwise
    assert (bounds.lower <= exact["mutual_information"] + slack).all()
    assert (exact["mutual_information"] <= bounds.upper + slack).all()
    all_pairs = exact["jensen_shannon"] * (num_members - 1) / num_members
    assert (bounds.lower / 2 <= all_pairs + slack).all()
    assert (all_pairs <= bounds.pairwise / 4 + slack).all()


def test_blocks_of_inputs_give_what_the_whole_batch_gives(monkeypatch):
    logits = normal(4, 37, 6)
    whole = scores.all_scores(logits)
    monkeypatch.setattr("dissensus._beliefs._CACHED", 100)
    for name, value in scores.all_scores(logits).items():
        assert_close(value, whole[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("weights", [None, torch.tensor([0.3, 0.3, 0.4])], ids=["equal", "weighted"])
def test_an_evaluation_finds_no_knowledge_uncertainty_in_copies(weights):
    outputs = normal(1, 30, 4).float().expand(3, -1, -1)
    names = tuple(sorted(KNOWLEDGE_SCORES))
    columns = Classification(names, weights, LIKELIHOODS["cross_entropy"]).columns(outputs, None)
    assert not columns["scores"].any()
    assert not columns["dispute"].any()
    densities = Regression(("knowledge_variance",), weights, LIKELIHOODS["gaussian_nll"])
    assert not densities.columns(outputs, None)["scores"].any()
