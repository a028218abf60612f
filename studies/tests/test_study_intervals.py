"""Intervals of shares: Wilson's in closed form, inside [0, 1] everywhere, and as wide as the spread elsewhere."""

import math

import pytest
import torch
from dissensus_studies.diversification.measures import Judged, detection_record, quality_record, score_names, scores_of
from dissensus_studies.diversification.spurious import group_record
from dissensus_studies.harness.statistics import NORMAL_95, mean_interval, share_ends, share_interval
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(("right", "count"), [(0, 10), (9, 10), (143, 144), (50, 100), (20, 20)])
def test_ends_solve_wilsons_equation(right, count):
    # Closed form: at each end q, the share is exactly 1.96 standard errors away, by the error that q itself has.
    share, low, high = share_interval((torch.arange(count) < right).double())
    assert share == pytest.approx(right / count, abs=1e-6)
    for end in (low, high):
        away = NORMAL_95 * math.sqrt(end * (1 - end) / count)
        assert abs(right / count - end) == pytest.approx(away, abs=1e-5)


def test_all_right_leaves_room_below():
    assert share_interval(torch.ones(144))[1:] == [
        pytest.approx(1 - NORMAL_95**2 / (144 + NORMAL_95**2), abs=1e-6),
        1.0,
    ]


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_intervals_stay_inside_and_hold_the_value(share, error, least):
    low, high = share_ends(share, error, least)
    assert 0 <= low <= share <= high <= 1


def test_far_from_the_ends_and_with_many_inputs_it_is_the_usual_interval():
    shares = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    assert share_interval(shares) == pytest.approx(mean_interval(shares), abs=1e-4)


def test_answers_that_go_together_are_worth_their_inputs_and_others_more():
    generator = torch.Generator().manual_seed(1)
    one = (torch.rand(2000, generator=generator) < 0.9).double()
    many = (torch.rand(10, 2000, generator=generator) < 0.9).double().mean(0)
    widths = [high - low for _, low, high in (share_interval(one), share_interval(many))]
    assert widths[0] / widths[1] == pytest.approx(math.sqrt(10), rel=0.1)


def nearly_right(count=144, members=3, classes=4):
    labels = torch.arange(count) % classes
    logits = 9.0 * torch.nn.functional.one_hot(labels, classes).float().expand(members, -1, -1).clone()
    logits[:, 0] = logits[:, 0].roll(1, -1)
    return logits, labels


def ends_of(value):
    return [end for end in value[1:] if end is not None]


def test_every_accuracy_and_auroc_of_a_record_has_its_interval_inside():
    logits, labels = nearly_right()
    far = torch.randn(3, 30, 4, generator=torch.Generator().manual_seed(2)) / 10
    judged = Judged(logits, labels, {"far": far}, {"C-1": {"a": logits, "b": logits}}, {"far": ["far"]})
    quality = quality_record(judged)
    values = [value for ways in quality["accuracy"].values() for value in ways.values()]
    values += [quality["test"][name] for name in ("accuracy", "member_accuracy")]
    values += [group_record(logits, labels, labels)["worst_group"][way] for way in ("ensemble", "oracle")]
    names = score_names(3)
    detected = detection_record(names, judged.map(lambda x: scores_of(x, names), inputs=1))
    values += [value for scores in detected.values() for value in scores.values()]
    assert min(end for value in values for end in ends_of(value)) >= 0
    assert max(end for value in values for end in ends_of(value)) <= 1
    assert quality["accuracy"]["test"]["mean_logits"] == pytest.approx([143 / 144, 0.961715, 0.998773], abs=2e-6)
