"""The set of `diversification` whose backgrounds mislead, and the worst group on it."""

from dataclasses import replace

import pytest
import torch
from dissensus_studies.diversification.spurious import group_record, spurious_sets
from dissensus_studies.harness.image_sets import load_images
from torch import nn

from dissensus import metrics


def test_backgrounds_go_with_classes_in_training_only():
    sets, test_groups, _ = spurious_sets(load_images(None))
    kinds = test_groups % 2
    assert torch.equal(test_groups // 2, sets.test.y)
    assert (kinds == sets.test.y).double().mean() == pytest.approx(0.5, abs=0.01)
    # Cool backgrounds have more blue than red; class 1 has them in training.
    border = sets.train.x[:, :, :4].double().mean((2, 3))
    cool = border[:, 2] > border[:, 0]
    shares = [cool[sets.train.y == label].double().mean() for label in (0, 1)]
    assert shares[1] - shares[0] > 0.7


def test_the_object_is_in_the_middle_and_nothing_else_of_it():
    sets = load_images(None, limit=60)
    made, *_ = spurious_sets(sets)
    inside = made.test.x[:, :, 6:26, 6:26].double()
    small = nn.functional.interpolate(sets.test.x.double(), size=(20, 20), mode="area")
    assert (inside - small).abs().max() <= 0.5


def test_without_backgrounds_it_is_refused():
    sets = replace(load_images(None, limit=40), ood={})
    with pytest.raises(ValueError, match="backgrounds"):
        spurious_sets(sets)


def test_the_worst_group_is_that_of_the_metric():
    logits, labels = torch.randn(3, 400, 2), torch.randint(0, 2, (400,))
    groups = 2 * labels + torch.randint(0, 2, (400,))
    record = group_record(logits, labels, groups)
    probs = logits.mean(0).softmax(-1)
    assert record["worst_group"]["ensemble"][0] == pytest.approx(
        metrics.worst_group_accuracy(probs, labels, groups), abs=1e-6
    )
    each = [metrics.worst_group_accuracy(member.softmax(-1), labels, groups) for member in logits]
    assert record["worst_group"]["oracle"][0] == pytest.approx(max(each), abs=1e-6)
