"""Evaluations of ensembles of any size and precision: one member, many, copies, half precision, saturated."""

import numpy as np
import pytest
import torch
from evaluation_cases import CLASSES, classifier, labelled, make_member, unlabelled
from torch import nn

import dissensus as ds
from dissensus import metrics
from dissensus.evaluation import evaluate
from dissensus.scores import KNOWLEDGE_SCORES, SCORES


def test_one_member_has_no_scores_of_disagreement():
    result = evaluate(classifier(1), labelled(60), {"far": unlabelled(50)}, bootstrap=20)
    assert not set(result.score_names) & {*KNOWLEDGE_SCORES, "num_unique", "predictive_diversity"}
    assert result.number("accuracy", member=0).value == result.number("accuracy").value
    assert not {number.metric for number in result.numbers} & {"disagreement", "member_accuracy"}
    assert "BMA" in result.table()


def test_disagreement_of_one_member_is_zero_where_it_is_asked_for():
    result = evaluate(classifier(1), labelled(60), {"far": unlabelled(50)}, scores=["variation_ratio"])
    assert result.number("mean", score="variation_ratio").value == 0
    auroc = result.number("auroc", "far", score="variation_ratio")
    assert (auroc.value, auroc.low, auroc.high) == (0.5, 0.5, 0.5)


def test_many_members_leave_out_the_score_of_all_pairs_unless_it_is_asked_for():
    ensemble, known = classifier(50), labelled(30)
    assert set(SCORES) - set(evaluate(ensemble, known, bootstrap=0).score_names) == {"jensen_shannon"}
    asked = evaluate(ensemble, known, scores=["jensen_shannon", "bma"], bootstrap=0)
    assert asked.score_names == ("jensen_shannon", "bma")


class Rounded(torch.nn.Module):
    """A network whose outputs are in half precision, as under autocast."""

    def __init__(self, net, dtype):
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, x):
        return self.net(x).to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_handled(dtype):
    ensemble = ds.DeepEnsemble(lambda: Rounded(make_member(), dtype), num_members=3, seed=0)
    x, y = labelled(60)
    result = evaluate(ensemble, (x, y), {"far": unlabelled(50)}, bootstrap=20)
    logits = ds.predict(ensemble, x)
    assert logits.dtype == dtype
    probs = logits.float().softmax(-1).mean(0)
    assert result.number("nll").value == pytest.approx(metrics.nll(probs, y), rel=1e-5)


def test_saturated_logits_stay_finite_and_countable():
    ensemble = ds.DeepEnsemble(lambda: torch.nn.Linear(2, CLASSES), num_members=2, seed=0)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.mul_(1e4)
    result = evaluate(ensemble, labelled(60), {"far": unlabelled(50)}, bootstrap=50)
    assert np.isfinite([[n.value, n.low, n.high] for n in result.numbers]).all()


def test_copies_of_one_member_are_not_clearly_better_than_fewer_copies():
    known, far = torch.randn(300, 4) * 2, torch.randn(200, 4) * 0.05
    targets = torch.randint(4, (300,))

    def copies(count):
        ens = ds.DeepEnsemble(lambda: nn.Linear(4, 4, bias=False), count)
        with torch.no_grad():
            for weight in ens.parameters():
                weight.copy_(torch.eye(4).expand_as(weight))
        return ds.evaluate(ens, (known, targets), ood={"far": far}, bootstrap=100)

    one = ds.compare(copies(2), copies(3)).difference("brier")
    assert one.low <= 0 <= one.high


def test_intervals_hold_their_value_and_stay_in_range():
    known, targets = torch.randn(60, 4) * 3, torch.arange(60) % 4
    ens = ds.DeepEnsemble(lambda: nn.Linear(4, 4), 3)
    found = ds.evaluate(ens, (known, targets), ood={"far": 20 + torch.randn(40, 4)}, bootstrap=200)
    bounded = [number for number in found.numbers if number.low is not None and 0 <= number.value <= 1]
    assert len(bounded) > 20
    assert all(number.low >= 0 for number in bounded)
    assert not any(1 < number.high < 1 + 1e-5 for number in bounded)
