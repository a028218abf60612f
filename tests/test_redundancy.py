"""DivDis: mutual information of members' answers, against tables written out and against closed forms."""

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dissensus import objectives as obj


def by_table(probs, weights=None, prior=None):
    """The definition, with every joint table and every product of marginals."""
    weights = torch.full((probs.shape[1],), 1 / probs.shape[1], dtype=probs.dtype) if weights is None else weights
    weights = weights / weights.sum()
    joint = torch.einsum("b,hbc,gbd->hgcd", weights, probs, probs)
    marginal = torch.einsum("b,hbc->hc", weights, probs)
    product = marginal[:, None, :, None] * marginal[None, :, None, :]
    information = (joint * (joint / product).log()).sum((-1, -2))
    upper = torch.triu(torch.ones_like(information), diagonal=1).bool()
    value = information[upper].mean()
    if prior is not None:
        value = value + (marginal * (marginal / prior).log()).sum(-1).mean()
    return value


def random_probs(seed, members=3, batch=7, classes=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(members, batch, classes, generator=generator, dtype=torch.float64).mul(2).softmax(-1)


@given(st.integers(0, 10_000), st.integers(2, 5))
def test_it_is_the_mean_mutual_information_plus_the_divergence_from_the_prior(seed, members):
    probs = random_probs(seed, members)
    weights = random_probs(seed + 1)[0, :, 0]
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    torch.testing.assert_close(obj.divdis(probs), by_table(probs))
    torch.testing.assert_close(obj.divdis(probs, prior), by_table(probs, prior=prior))
    torch.testing.assert_close(obj.divdis(probs, weights=weights), by_table(probs, weights))


@pytest.mark.parametrize("classes", [2, 10])
def test_certain_copies_share_all_they_say_and_independent_members_nothing(classes):
    certain = torch.eye(classes, dtype=torch.float64)
    assert obj.divdis(certain.expand(3, -1, -1)).item() == pytest.approx(log(classes))
    # All combinations of two answers, each once.
    first, second = torch.meshgrid(torch.arange(classes), torch.arange(classes), indexing="ij")
    independent = certain[torch.stack([first.flatten(), second.flatten()])]
    assert obj.divdis(independent).item() == pytest.approx(0.0, abs=1e-12)


def test_all_members_saying_one_class_is_independent_but_far_from_the_prior():
    one_sided = torch.zeros(2, 6, 4, dtype=torch.float64)
    one_sided[..., 0] = 1.0
    assert obj.divdis(one_sided).item() == pytest.approx(0.0, abs=1e-12)
    assert obj.divdis(one_sided, prior=torch.full((4,), 0.25)).item() == pytest.approx(log(4))


def test_gradients_are_those_of_the_table():
    probs = random_probs(1).requires_grad_()
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    weights = random_probs(2)[0, :, 0]
    for chosen in ({}, {"prior": prior}, {"weights": weights}):
        (ours,) = torch.autograd.grad(obj.divdis(probs, **chosen), probs)
        (theirs,) = torch.autograd.grad(by_table(probs, **chosen), probs)
        # Along directions that keep rows at sum 1: the two forms differ by a constant across classes.
        torch.testing.assert_close(ours - ours.mean(-1, keepdim=True), theirs - theirs.mean(-1, keepdim=True))
    assert torch.autograd.gradcheck(lambda z: obj.divdis(z.softmax(-1), prior), (probs.detach().requires_grad_(),))


def test_saturated_members_have_finite_slopes():
    logits = (300 * torch.eye(4)[torch.arange(8) % 4]).expand(3, -1, -1).clone().requires_grad_()
    obj.divdis(logits.softmax(-1), prior=torch.tensor([1.0, 0.0, 0.0, 0.0])).backward()
    assert torch.isfinite(logits.grad).all()


def test_one_table_is_in_memory_at_a_time():
    # Ten pairs of 300 classes: all tables and what a gradient would keep of them are ten times 0.7 MB and more.
    probs = torch.rand(5, 4, 300, dtype=torch.float64, requires_grad=True)
    largest = 0

    def remember(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        obj.divdis(probs / probs.sum(-1, keepdim=True)).backward()
    assert largest < 300 * 300
