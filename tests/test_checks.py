"""Bad input gets one clear message: what was wanted, what came, what to do."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from dissensus._checks import (
    check_features,
    check_labels,
    check_mean_and_scale,
    check_member_logits,
    check_weights,
    explained,
)
from dissensus.scores import SCORES, all_scores

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def good_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_good_input_passes_in_silence(dtype):
    check_member_logits(good_logits(dtype), torch.tensor([0.25, 0.25, 0.5], dtype=dtype))
    check_mean_and_scale(good_logits(dtype), good_logits(dtype).exp(), torch.tensor([0.25, 0.25, 0.5]))
    check_features(good_logits(dtype)[0])
    check_labels(torch.tensor([0, 3, 1]), 3, 4)


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_member_logits(np.zeros((2, 3, 4))),
        lambda: check_weights([0.5, 0.5], 2),
        lambda: check_labels([0, 1], 2, 4),
        lambda: check_mean_and_scale(torch.zeros(2, 3), 1.0),
        lambda: check_features(np.zeros((3, 4))),
    ],
    ids=["logits", "weights", "labels", "scale", "features"],
)
def test_what_is_not_a_tensor_is_refused(check):
    # The shape checkers, where they are switched on, speak first and of a `Tensor`.
    with pytest.raises(Exception, match=r"must be a torch tensor; got|Tensor"):
        check()


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(3, 4), r"\(members, batch, classes\); got \(3, 4\).*logits\[None\]"),
        (torch.zeros(1, 2, 3, 4), r"got \(1, 2, 3, 4\)"),
        (torch.zeros(2, 3, 4, dtype=torch.long), "floating point; got torch.int64"),
        (torch.zeros(0, 3, 4), "must not be empty"),
        (torch.zeros(2, 0, 4), "must not be empty"),
        (torch.zeros(2, 3, 0), "must not be empty"),
        (torch.zeros(2, 3, 1), "at least two classes.*zeros_like"),
    ],
)
def test_logits_of_the_wrong_kind_are_refused(logits, message):
    with pytest.raises(ValueError, match=message):
        check_member_logits(logits)


def test_the_advice_for_one_output_gives_the_binary_model():
    z = torch.tensor([[[2.0], [-1.0]]])
    two = torch.cat([torch.zeros_like(z), z], -1)
    check_member_logits(two)
    torch.testing.assert_close(two.softmax(-1)[..., 1:], z.sigmoid())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_named_by_row_and_member(dtype, value):
    logits = good_logits(dtype)
    logits[2, 17, 1] = value
    with pytest.raises(ValueError, match=f"row 17 of member 2 holds {value:g}"):
        check_member_logits(logits)
    with pytest.raises(ValueError, match=f"`mean` must be finite.* row 17 of member 2 holds {value:g}"):
        check_mean_and_scale(logits, torch.ones_like(logits))
    with pytest.raises(ValueError, match=f"`scale` must be finite.* row 17 of member 2 holds {value:g}"):
        check_mean_and_scale(torch.ones_like(logits[..., 1]), logits[..., 1])
    with pytest.raises(ValueError, match=f"row 17 holds {value:g}"):
        check_features(logits[2])


def test_numbers_too_large_to_square_are_refused():
    logits = good_logits()
    logits[1, 4, 2] = -1e25
    with pytest.raises(ValueError, match=r"row 4 of member 1 holds -1e\+25"):
        check_member_logits(logits)
    check_member_logits(logits.double())


@pytest.mark.parametrize("dtype", FLOATS)
def test_probabilities_passed_as_logits_draw_a_warning(dtype):
    probs = good_logits().softmax(-1).to(dtype)
    with pytest.warns(UserWarning, match="look like probabilities"):
        check_member_logits(probs)


@pytest.mark.skipif(hasattr(all_scores, "__wrapped__"), reason="the shape checkers add frames of their own")
def test_the_warning_points_at_the_line_of_the_caller():
    with pytest.warns(UserWarning, match="look like probabilities") as caught:
        all_scores(good_logits().softmax(-1))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", SCORES)
def test_every_score_checks_what_it_gets(name):
    with pytest.warns(UserWarning, match="look like probabilities"):
        SCORES[name](good_logits().softmax(-1))
    with pytest.raises(ValueError, match="row 0 of member 0 holds nan"):
        SCORES[name](good_logits() * float("nan"))


@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(2, 3, 4),
        torch.full((2, 3, 4), 0.3),
        torch.tensor([[[1.0, 0.5, -0.5]]]),
        good_logits().log_softmax(-1),
    ],
    ids=["zeros", "sum above one", "outside the unit interval", "log-probabilities"],
)
def test_logits_that_are_not_probabilities_draw_no_warning(logits):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_member_logits(logits)


def test_one_row_that_does_not_sum_to_one_means_logits():
    probs = good_logits().softmax(-1)
    probs[1, 5] *= 0.9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_member_logits(probs)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.tensor([1, 0, 0]), "floating point; got torch.int64"),
        (torch.tensor([0.5, 0.5]), r"shaped \(3,\), one per member; got \(2,\)"),
        (torch.tensor([[0.5, 0.25, 0.25]]), r"got \(1, 3\)"),
        (torch.tensor([0.5, 0.75, -0.25]), "must not be negative; got -0.25"),
        (torch.tensor([0.5, 0.5, 0.5]), "must sum to 1; got sum 1.5"),
        (torch.tensor([0.5, 0.5, float("nan")]), "got sum nan"),
        (torch.tensor([0.5, 0.5, float("inf")]), "got sum inf"),
    ],
)
def test_bad_weights_are_refused_alone_and_beside_their_values(weights, message):
    with pytest.raises(ValueError, match=message):
        check_weights(weights, 3)
    with pytest.raises(ValueError, match=message):
        check_member_logits(good_logits(), weights)
    with pytest.raises(ValueError, match=message):
        check_mean_and_scale(good_logits(), good_logits().exp(), weights)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0.0, 1.0, 2.0]), "must be integers; got torch.float32"),
        (torch.tensor([True, False, True]), "must be integers; got torch.bool"),
        (torch.tensor([0, 1]), r"shaped \(3,\); got \(2,\)"),
        (torch.tensor([[0], [1], [2]]), r"got \(3, 1\)"),
        (torch.tensor([0, 1, 4]), r"must lie in 0\.\.3; got 4 in row 2"),
        (torch.tensor([0, -1, 4]), "got -1 in row 1"),
    ],
)
def test_bad_labels_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        check_labels(labels, 3, 4)


def test_an_empty_set_of_labels_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        check_labels(torch.zeros(0, dtype=torch.long), 0, 4)


@pytest.mark.parametrize(
    ("mean", "scale", "message"),
    [
        (torch.zeros(3), torch.ones(3), r"\(members, batch, \.\.\.\); got \(3,\)"),
        (torch.zeros(2, 3), torch.ones(2, 1), r"as `mean`, \(2, 3\); got \(2, 1\)"),
        (torch.zeros(2, 0), torch.ones(2, 0), "must not be empty"),
        (torch.zeros(2, 3), torch.full((2, 3), -0.5), "must not be negative; got -0.5"),
        (torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.int32), "`scale` must be floating point"),
    ],
)
def test_bad_means_and_scales_are_refused(mean, scale, message):
    with pytest.raises(ValueError, match=message):
        check_mean_and_scale(mean, scale)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.zeros(3), r"\(batch, features\); got \(3,\)"),
        (torch.zeros(3, 4, 5), r"flatten\(1\)"),
        (torch.zeros(0, 4), "must not be empty"),
        (torch.zeros(3, 4, dtype=torch.uint8), "floating point; got torch.uint8"),
    ],
)
def test_bad_features_are_refused(features, message):
    with pytest.raises(ValueError, match=message):
        check_features(features)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64, torch.bfloat16])
def test_inputs_of_another_dtype_than_the_networks_are_said_to_be_so(dtype):
    net = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=rf"torch.float32 and cannot read inputs of {dtype}") as caught:
        explained(net, net)(torch.zeros(3, 2).to(dtype))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_inputs_that_a_network_cannot_read_are_named():
    net = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"cannot read inputs shaped \(3, 5\): mat1 and mat2 shapes"):
        explained(net, net)(torch.zeros(3, 5))
    assert torch.equal(explained(net, net)(torch.ones(3, 2)), net(torch.ones(3, 2)))


def test_networks_that_take_integers_are_left_alone():
    net = nn.Embedding(4, 2)
    assert explained(net, net)(torch.tensor([1, 3])).shape == (2, 2)
