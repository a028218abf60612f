import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from dissensus.objectives.diversity import debias, decompose
from dissensus.objectives.losses import LOSSES, check_arguments, errors

MEMBERS, BATCH, CLASSES = 4, 6, 3
CLASS_LOSSES = ("cross_entropy", "brier", "zero_one")
SETTINGS = [(loss, average) for loss in LOSSES for average in ("probs", "scores")]
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def example(loss, scale=1.0, seed=0, dtype=torch.float64):
    """Outputs and targets that the named loss accepts."""
    generator = torch.Generator().manual_seed(seed)
    shape = (MEMBERS, BATCH, CLASSES)
    outputs = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    if loss in CLASS_LOSSES:
        return outputs.to(dtype), torch.randint(CLASSES, (BATCH,), generator=generator)
    if loss == "mse":
        targets = torch.randn(shape[1:], generator=generator, dtype=torch.float64)
    else:
        targets = torch.randint(2, shape[1:], generator=generator).double()
    if loss in ("logistic", "exponential"):
        targets = 2 * targets - 1
    return outputs.to(dtype), targets.to(dtype)


def naive_loss(output, target, loss):
    """Loss of one prediction (scores, a vector), written out in plain Python."""
    total = 0.0
    if loss == "cross_entropy":
        return -math.log(np.exp(output[target]) / np.exp(output).sum())
    if loss == "brier":
        probs = np.exp(output) / np.exp(output).sum()
        return sum((p - (k == target)) ** 2 for k, p in enumerate(probs))
    if loss == "zero_one":
        return float(np.argmax(output) != target)
    for f, y in zip(output, target, strict=True):
        total += {
            "mse": lambda f, y: (f - y) ** 2,
            "sigmoid": lambda f, y: -math.log((1 / (1 + math.exp(-f))) if y else 1 / (1 + math.exp(f))),
            "poisson": lambda f, y: -math.log(math.exp(f * y) * math.exp(-math.exp(f)) / math.factorial(int(y))),
            "logistic": lambda f, y: math.log(1 + math.exp(-y * f)),
            "exponential": lambda f, y: math.exp(-y * f),
        }[loss](f, y)
    return total


def naive_ensemble_loss(outputs, target, loss, average, weights):
    """Loss of the average of some predictions (members, outputs)."""
    if loss == "zero_one":
        tally = [sum(w for w, o in zip(weights, outputs, strict=True) if np.argmax(o) == k) for k in range(CLASSES)]
        return float(np.argmax(tally) != target)
    if average == "probs" and loss in ("cross_entropy", "brier"):
        probs = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
        return naive_loss(np.log(weights @ probs), target, loss)
    if average == "probs" and loss in ("sigmoid", "poisson"):
        likelihood = lambda f, y: math.exp(-naive_loss([f], [y], loss))  # noqa: E731
        return -sum(
            math.log(sum(w * likelihood(f, y) for w, f in zip(weights, column, strict=True)))
            for column, y in zip(outputs.T, target, strict=True)
        )
    return naive_loss(weights @ outputs, target, loss)


def test_two_members_that_straddle_the_target_have_all_their_error_as_diversity():
    d = decompose(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0]), loss="mse")
    assert (d.member_error.item(), d.ensemble_error.item(), d.diversity.item()) == (4.0, 0.0, 4.0)


def test_probabilities_are_averaged_before_the_logarithm():
    # p1 = 0.5, p2 = 0.25 on the true class: ERR = -log 0.375.
    logits = torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]], dtype=torch.float64).log()
    d = decompose(logits, torch.tensor([0]))
    assert d.member_error.item() == pytest.approx(1.5 * math.log(2), abs=1e-12)
    assert d.ensemble_error.item() == pytest.approx(-math.log(0.375), abs=1e-12)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["uniform", "weighted"])
@pytest.mark.parametrize(("loss", "average"), SETTINGS)
class TestEveryLoss:
    def test_equals_a_plain_loop_over_members_and_examples(self, loss, average, weights):
        outputs, targets = example(loss)
        d = decompose(outputs, targets, loss, average, weights)
        w = np.full(MEMBERS, 1 / MEMBERS) if weights is None else weights.numpy()
        f, y = outputs.numpy(), targets.numpy()
        member = [sum(w[j] * naive_loss(f[j, b], y[b], loss) for j in range(MEMBERS)) for b in range(BATCH)]
        ensemble = [naive_ensemble_loss(f[:, b], y[b], loss, average, w) for b in range(BATCH)]
        np.testing.assert_allclose(d.member_error, member, atol=1e-10)
        np.testing.assert_allclose(d.ensemble_error, ensemble, atol=1e-10)
        np.testing.assert_allclose(d.diversity, np.subtract(member, ensemble), atol=1e-10)

    def test_member_order_does_not_matter(self, loss, average, weights):
        outputs, targets = example(loss)
        order = torch.tensor([2, 0, 3, 1])
        moved = decompose(outputs[order], targets, loss, average, None if weights is None else weights[order])
        d = decompose(outputs, targets, loss, average, weights)
        torch.testing.assert_close(moved.diversity, d.diversity, rtol=1e-12, atol=1e-12)

    def test_identical_members_have_no_diversity(self, loss, average, weights):
        outputs, targets = example(loss)
        d = decompose(outputs[:1].expand_as(outputs), targets, loss, average, weights)
        torch.testing.assert_close(d.diversity, torch.zeros_like(d.diversity), rtol=0, atol=1e-12)

    def test_a_member_of_weight_zero_is_as_good_as_absent(self, loss, average, weights):
        outputs, targets = example(loss)
        present = torch.tensor([0.25, 0.75, 0.0, 0.0], dtype=torch.float64)
        with_zeros = decompose(outputs, targets, loss, average, present)
        without = decompose(outputs[:2], targets, loss, average, present[:2])
        torch.testing.assert_close(with_zeros.ensemble_error, without.ensemble_error, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(with_zeros.diversity, without.diversity, rtol=1e-12, atol=1e-12)

    def test_weights_per_example_are_each_examples_weights(self, loss, average, weights):
        outputs, targets = example(loss)
        per_example = torch.rand(MEMBERS, BATCH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        per_example = per_example / per_example.sum(0)
        _, ensemble = errors(outputs, targets, loss, average, per_example)
        for b in range(BATCH):
            _, alone = errors(outputs[:, b : b + 1], targets[b : b + 1], loss, average, per_example[:, b])
            torch.testing.assert_close(ensemble[b : b + 1], alone, rtol=1e-12, atol=1e-12)

    def test_gradients_are_those_of_finite_differences(self, loss, average, weights):
        outputs, targets = example(loss)
        outputs.requires_grad_()
        if loss == "zero_one":
            assert not decompose(outputs, targets, loss).diversity.requires_grad
            return

        def parts(outputs):
            d = decompose(outputs, targets, loss, average, weights)
            return d.member_error, d.ensemble_error, d.diversity

        assert gradcheck(parts, (outputs,))

    def test_bfloat16_is_computed_in_float32(self, loss, average, weights):
        outputs, targets = example(loss, dtype=torch.bfloat16)
        half = decompose(outputs, targets, loss, average, weights)
        full = decompose(outputs.float(), targets, loss, average, weights)
        assert half.diversity.dtype == torch.float32
        torch.testing.assert_close(half.diversity, full.diversity, rtol=0, atol=0)

    def test_runs_under_vmap(self, loss, average, weights):
        first, second = example(loss, seed=0), example(loss, seed=1)
        stacked = [torch.stack(pair) for pair in zip(first, second, strict=True)]
        _, both = torch.func.vmap(lambda f, y: errors(f, y, loss, average, weights))(*stacked)
        torch.testing.assert_close(both[1], errors(*second, loss, average, weights)[1])


@pytest.mark.parametrize("average", ["probs", "scores"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["cross_entropy", "brier", "sigmoid", "logistic"])
def test_saturated_outputs_give_finite_errors_and_gradients(loss, dtype, average):
    outputs, targets = example(loss, scale=1e4, dtype=dtype)
    outputs.requires_grad_()
    d = decompose(outputs, targets, loss, average)
    (d.member_error + d.ensemble_error).sum().backward()
    assert torch.isfinite(d.diversity).all()
    assert torch.isfinite(outputs.grad).all()
    exact = decompose(outputs.detach().double(), targets, loss, average)
    torch.testing.assert_close(d.ensemble_error.double(), exact.ensemble_error, rtol=1e-5, atol=1e-5)


def test_a_mixture_of_members_that_are_all_certain_and_wrong_is_not_infinite():
    # log p = -1000 for both: softmax underflows, the mixture in logarithms does not.
    logits = torch.tensor([[[0.0, 1000.0]], [[0.0, 1000.0]]])
    assert decompose(logits, torch.tensor([0])).ensemble_error.item() == pytest.approx(1000.0)


@pytest.mark.parametrize("average", ["probs", "scores"])
@pytest.mark.parametrize("loss", ["cross_entropy", "brier"])
def test_one_hot_soft_labels_are_the_labels(loss, average):
    logits, labels = example(loss)
    soft = decompose(logits, F.one_hot(labels, CLASSES).double(), loss, average)
    hard = decompose(logits, labels, loss, average)
    torch.testing.assert_close(soft.ensemble_error, hard.ensemble_error, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(soft.member_error, hard.member_error, rtol=1e-12, atol=1e-12)


def test_label_smoothing_is_that_of_torch():
    logits, labels = example("cross_entropy")
    d = decompose(logits, labels, label_smoothing=0.1)
    wanted = [F.cross_entropy(member, labels, label_smoothing=0.1, reduction="none") for member in logits]
    torch.testing.assert_close(d.member_error, torch.stack(wanted).mean(0), rtol=1e-12, atol=1e-12)
    pooled = F.cross_entropy(logits.softmax(-1).mean(0).log(), labels, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(d.ensemble_error, pooled, rtol=1e-12, atol=1e-12)


def test_a_callable_loss_is_averaged_on_outputs():
    outputs, targets = example("mse")
    named = decompose(outputs, targets, "mse", weights=WEIGHTS)
    given = decompose(outputs, targets, lambda f, y: (f - y).square().sum(-1), weights=WEIGHTS)
    torch.testing.assert_close(given.diversity, named.diversity, rtol=1e-12, atol=1e-12)


def test_one_column_of_outputs_takes_plain_targets():
    outputs, targets = example("mse")
    column = decompose(outputs[..., :1], targets[:, 0], "mse")
    torch.testing.assert_close(column.ensemble_error, decompose(outputs[..., 0], targets[:, 0], "mse").ensemble_error)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([s for s in SETTINGS if s[0] != "zero_one" and s != ("brier", "scores")]),
    st.integers(0, 10_000),
    st.floats(0.1, 5.0),
)
def test_averaging_never_hurts_where_the_loss_is_convex(setting, seed, scale):
    outputs, targets = example(setting[0], scale=scale, seed=seed)
    d = decompose(outputs, targets, *setting, weights=WEIGHTS)
    assert (d.diversity >= -1e-10 * (1 + d.member_error)).all()


def test_a_majority_that_is_wrong_makes_zero_one_diversity_negative():
    votes = torch.tensor([0, 1, 1])
    d = decompose(10.0 * F.one_hot(votes, 2)[:, None].double(), torch.tensor([0]), "zero_one")
    assert d.diversity.item() == pytest.approx(-1 / 3)


def test_a_tied_vote_goes_to_the_lowest_class_and_weights_break_it():
    logits = 10.0 * F.one_hot(torch.tensor([2, 1]), 3)[:, None].double()
    assert decompose(logits, torch.tensor([1]), "zero_one").ensemble_error.item() == 0
    weights = torch.tensor([0.6, 0.4])
    assert decompose(logits, torch.tensor([1]), "zero_one", weights=weights).ensemble_error.item() == 1


@pytest.mark.parametrize("num_kept", [1, 2, 3, 4])
def test_dropping_members_costs_what_the_diversity_says(num_kept):
    # Expected increase of the squared error over all subsets of m members: DIV (M - m) / (m (M - 1)).
    outputs, targets = example("mse")
    d = decompose(outputs, targets, "mse")
    kept = [
        decompose(outputs[list(chosen)], targets, "mse").ensemble_error
        for chosen in itertools.combinations(range(MEMBERS), num_kept)
    ]
    increase = torch.stack(kept).mean(0) - d.ensemble_error
    wanted = d.diversity * (MEMBERS - num_kept) / (num_kept * (MEMBERS - 1))
    torch.testing.assert_close(increase, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["uniform", "weighted"])
class TestDebias:
    def test_takes_the_squared_offsets_from_the_diversity_and_nothing_from_the_ensemble(self, weights):
        outputs, targets = example("mse")
        debiased = debias(outputs, weights)
        before = decompose(outputs, targets, "mse", weights=weights)
        after = decompose(debiased.outputs, targets, "mse", weights=weights)
        w = torch.full((MEMBERS,), 1 / MEMBERS, dtype=torch.float64) if weights is None else weights
        assert (w @ debiased.bias).abs().max() < 1e-12
        torch.testing.assert_close(after.ensemble_error, before.ensemble_error, rtol=1e-10, atol=1e-10)
        gain = (before.diversity - after.diversity).mean()
        torch.testing.assert_close(gain, w @ debiased.bias.square().sum(-1), rtol=1e-10, atol=1e-10)

    def test_no_other_constants_that_cancel_take_more(self, weights):
        outputs, targets = example("mse")
        best = decompose(debias(outputs, weights).outputs, targets, "mse", weights=weights).diversity.mean()
        w = torch.full((MEMBERS,), 1 / MEMBERS, dtype=torch.float64) if weights is None else weights
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            shift = 0.1 * torch.randn(MEMBERS, CLASSES, dtype=torch.float64, generator=generator)
            shift = shift - w @ shift
            moved = debias(outputs, weights).outputs - shift[:, None]
            assert decompose(moved, targets, "mse", weights=weights).diversity.mean() > best

    def test_constant_collusion_is_found_in_full(self, weights):
        honest = torch.randn(1, BATCH, dtype=torch.float64).expand(MEMBERS, BATCH)
        bias = torch.tensor([3.0, -1.0, 2.0, -1.5], dtype=torch.float64)
        bias = bias - (bias.mean() if weights is None else weights @ bias)
        debiased = debias(honest + bias[:, None], weights)
        torch.testing.assert_close(debiased.bias, bias)
        torch.testing.assert_close(debiased.outputs, honest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outputs": torch.zeros(2, 3), "targets": torch.zeros(3).long()}, "members, batch, classes"),
        ({"loss": "hinge"}, "one of mse"),
        ({"average": "logits"}, '"probs" or "scores"'),
        ({"targets": torch.zeros(4, 1).long()}, "integer labels"),
        ({"targets": torch.zeros(4)}, "batch, classes"),
        ({"targets": torch.full((4, 3), 0.5)}, "sum to 1"),
        ({"targets": torch.zeros(4), "loss": "mse"}, "Reshape"),
        ({"targets": torch.zeros(4, 3), "loss": "logistic"}, "-1 or \\+1"),
        ({"targets": -torch.ones(4, 3), "loss": "sigmoid"}, "\\[0, 1\\]"),
        ({"targets": -torch.ones(4, 3), "loss": "poisson"}, "counts"),
        ({"targets": torch.zeros(4).long(), "loss": lambda f, y: f.sum()}, "one value for each of"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"label_smoothing": 0.1, "loss": "zero_one"}, "label_smoothing"),
        ({"weights": torch.tensor([0.5, 0.6])}, "sum to 1"),
        ({"weights": torch.tensor([1.0])}, "one per member"),
        ({"weights": torch.tensor([1.5, -0.5])}, "negative"),
    ],
)
def test_bad_input_is_refused_with_what_was_wanted(arguments, message):
    valid = {"outputs": torch.zeros(2, 4, 3), "targets": torch.zeros(4).long()}
    with pytest.raises(ValueError, match=message):
        decompose(**{**valid, **arguments})


def test_outputs_without_a_batch_are_refused():
    with pytest.raises(ValueError, match="members, batch"):
        check_arguments(torch.zeros(3), "mse", "probs", 0.0)
