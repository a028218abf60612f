"""Terms that are small where members disagree, against closed forms, derivatives by hand and sums written out."""

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dissensus import objectives as obj
from dissensus.objectives.disagreement import mean_over_pairs
from dissensus.objectives.loss_guided import weights_from_losses


def random_logits(seed, members=3, batch=5, classes=4, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(members, batch, classes, generator=generator, dtype=torch.float64)


def one_hot(classes, chosen, dtype=torch.float64):
    return torch.eye(classes, dtype=dtype)[torch.tensor(chosen)]


def test_a2d_of_certain_members_is_minus_log_eps_if_they_agree_and_zero_if_not():
    same, other = one_hot(4, [0, 1]), one_hot(4, [1, 3])
    torch.testing.assert_close(obj.a2d(same, same), torch.full((2,), -log(1e-9), dtype=torch.float64))
    assert obj.a2d(same, same)[0].item() == pytest.approx(20.7, abs=0.03)
    torch.testing.assert_close(obj.a2d(same, other), torch.zeros(2, dtype=torch.float64), atol=1e-8, rtol=0)
    assert obj.a2d(same, same, eps=1e-7)[0].item() == pytest.approx(-log(1e-7))


@given(st.floats(0.0, 1.0))
def test_a2d_is_log_two_where_the_first_gives_its_class_one_half_whatever_the_second_says(p):
    first, second = (torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[p, 1 - p]], dtype=torch.float64))
    assert obj.a2d(first, second).item() == pytest.approx(log(2), abs=1e-8)


def test_a2d_of_two_uniform_members_of_a_thousand_classes():
    uniform = torch.full((1, 1000), 1e-3, dtype=torch.float64)
    assert obj.a2d(uniform, uniform).item() == pytest.approx(6.2156, abs=1e-4)
    assert obj.a2d_from_logits(uniform.log(), uniform.log()).item() == pytest.approx(6.2156, abs=1e-4)


@given(st.integers(0, 10_000))
def test_the_form_from_logits_is_a2d_without_eps(seed):
    m, other = random_logits(seed, members=2)
    expected = {
        "first": obj.a2d(m.softmax(-1), other.softmax(-1), eps=0.0),
        "second": obj.a2d(other.softmax(-1), m.softmax(-1), eps=0.0),
    }
    expected["both"] = expected["first"] + expected["second"]
    for orientation, values in expected.items():
        torch.testing.assert_close(obj.a2d_from_logits(m, other, orientation), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saturated_members_that_agree_are_still_pushed_apart(dtype):
    logits = torch.zeros(2, 1, 3, dtype=dtype)
    logits[..., 0] = 200.0
    logits.requires_grad_()
    value = obj.a2d_from_logits(*logits)
    # Both say class 0 up to 2 exp(-200): -log(2 * 2 exp(-200)).
    assert value.item() == pytest.approx(200 - 2 * log(2), rel=1e-2)
    value.backward()
    assert torch.isfinite(logits.grad).all()
    torch.testing.assert_close(logits.grad[:, 0, 0].float(), torch.full((2,), 0.5), atol=1e-2, rtol=0)
    # In probabilities the same members have no slope to go by.
    probs = logits.detach().float().softmax(-1).requires_grad_()
    obj.a2d(*probs).backward()
    assert probs.grad[:, 0, 0].abs().min() > 1e6


def numbers(first, second):
    """Probabilities of two members for one input with the derivatives of eq. 17 taken by autograd."""
    return (torch.tensor([values], dtype=torch.float64, requires_grad=True) for values in (first, second))


def test_gradients_of_both_forms_are_those_of_equations_19_and_20():
    alpha = 0.7
    f, g = numbers([0.1, 0.6, 0.3], [0.2, 0.3, 0.5])  # f says class 1, g says class 2, the label is class 0
    loss = -f[0, 0].log() - g[0, 0].log() + alpha * (obj.a2d(f, g, eps=0.0) + obj.a2d(g, f, eps=0.0)).sum()
    (slope,) = torch.autograd.grad(loss, f)

    def by_hand(f_c, g_c):
        return alpha * (2 * g_c - 1) / (f_c + g_c - 2 * f_c * g_c)

    torch.testing.assert_close(
        slope[0], torch.tensor([-1 / 0.1, by_hand(0.6, 0.3), by_hand(0.3, 0.5)], dtype=torch.float64)
    )


@given(st.floats(0.35, 0.95), st.floats(0.02, 0.98), st.floats(0.0, 5.0))
def test_the_gradient_for_a_right_prediction_is_that_of_equations_7_and_21(f_y, g_y, alpha):
    f, g = numbers([f_y, (1 - f_y) / 2, (1 - f_y) / 2], [g_y, (1 - g_y) / 2, (1 - g_y) / 2])
    loss = -f[0, 0].log() + alpha * obj.a2d(f, g, eps=0.0).sum()
    (slope,) = torch.autograd.grad(loss, f)
    both = f_y + g_y - 2 * f_y * g_y
    assert 0 <= both <= 1
    assert slope[0, 0].item() == pytest.approx(-1 / f_y + alpha * (2 * g_y - 1) / both, rel=1e-9, abs=1e-9)


def test_the_denominator_of_the_gradient_covers_zero_to_one():
    f, g = torch.meshgrid(*[torch.linspace(0, 1, 101, dtype=torch.float64)] * 2, indexing="ij")
    values = f + g - 2 * f * g
    assert values.min() == 0
    assert values.max() == 1


@pytest.mark.parametrize("term", obj.PAIR_TERMS.values(), ids=obj.PAIR_TERMS.keys())
class TestPairTerms:
    def test_predictions_that_differ_more_get_less(self, term):
        same, near, far = (torch.tensor([[value, 0.0, -1.0]]).log_softmax(-1) for value in (4.0, 2.0, -4.0))
        assert term(same, same) > term(same, near) > term(same, far)

    def test_values_are_one_an_input_and_leading_axes_broadcast(self, term):
        log_probs = random_logits(0, members=4).log_softmax(-1)
        together = term(log_probs[0], log_probs[1:])
        assert together.shape == (3, 5)
        torch.testing.assert_close(together[1], term(log_probs[0], log_probs[2]))

    def test_gradients_are_those_of_finite_differences(self, term):
        logits = random_logits(3, members=2).requires_grad_()
        assert torch.autograd.gradcheck(lambda z: term(*z.log_softmax(-1)).sum(), (logits,))

    def test_saturated_float32_members_have_finite_values_and_slopes(self, term):
        logits = 300 * torch.eye(4)[torch.tensor([[0, 1], [0, 2]])]
        logits.requires_grad_()
        values = term(*logits.log_softmax(-1))
        values.sum().backward()
        assert torch.isfinite(values).all()
        assert torch.isfinite(logits.grad).all()

    def test_every_pair_counts_once_with_the_earlier_member_first(self, term):
        log_probs = random_logits(1, members=4).log_softmax(-1)
        pairs = [term(log_probs[m], log_probs[k]) for m in range(4) for k in range(m + 1, 4)]
        torch.testing.assert_close(mean_over_pairs(log_probs, term), torch.stack(pairs).mean(0))


@pytest.mark.parametrize(
    ("name", "same", "disjoint"), [("jensen_shannon", 0.0, -log(2)), ("cosine", 1.0, 0.0), ("kl", 0.0, -600.0)]
)
def test_pair_terms_have_their_stated_values_for_certain_members(name, same, disjoint):
    certain = (600 * one_hot(3, [0, 1])).log_softmax(-1)
    term = obj.PAIR_TERMS[name]
    torch.testing.assert_close(term(certain[:1], certain[:1]).item(), same, atol=1e-9, rtol=0)
    torch.testing.assert_close(term(certain[:1], certain[1:]).item(), disjoint, atol=1e-9, rtol=0)


def test_divergences_are_those_of_torch_distributions():
    m, other = random_logits(5, members=2).log_softmax(-1)
    p, q = (torch.distributions.Categorical(logits=each) for each in (m, other))
    torch.testing.assert_close(obj.PAIR_TERMS["kl"](m, other), -torch.distributions.kl_divergence(p, q))


@given(st.integers(0, 10_000))
def test_weights_are_the_loss_over_the_squared_mean_and_average_to_one_over_it(seed):
    logits, labels = random_logits(seed), torch.arange(5) % 4
    losses = torch.nn.functional.cross_entropy(logits.mean(0), labels, reduction="none")
    weights = obj.loss_guided_weights(logits.requires_grad_(), labels)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, losses.detach() / losses.detach().mean() ** 2)
    torch.testing.assert_close(weights.mean(), 1 / losses.detach().mean())


@pytest.mark.parametrize("weighting", ["loss", "inverse_probability"])
def test_weights_of_a_batch_without_any_loss_are_zero(weighting):
    assert (weights_from_losses(torch.zeros(4), weighting) == 0).all()
    tiny = weights_from_losses(torch.tensor([1e-7, 0.0, 0.0, 0.0]), weighting)
    assert torch.isfinite(tiny).all()


def test_inverse_probability_weights_are_in_proportion_to_it_with_the_same_mean():
    losses = torch.tensor([0.1, 0.5, 2.0, 30.0], dtype=torch.float64)
    weights = weights_from_losses(losses, "inverse_probability")
    torch.testing.assert_close(weights / weights[0], losses.exp() / losses[0].exp())
    torch.testing.assert_close(weights.mean(), 1 / losses.mean())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: obj.a2d_from_logits(torch.zeros(2, 3), torch.zeros(2, 3), "third"), "orientation"),
        (lambda: obj.LossGuided(regulariser="kll"), "jensen_shannon"),
        (lambda: obj.divdis(torch.zeros(1, 2, 3)), "two members"),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()
