"""Features of another backbone are refused wherever they stand: beside the training data, and in any set of an evaluation."""

import pytest
import torch
from backbone_cases import small_backbone
from torch import nn
from training_helpers import x, y

import dissensus as ds
from dissensus import objectives as obj


@pytest.fixture
def ens():
    return ds.HeadEnsemble(small_backbone(), (6, 3), 2)


def other() -> nn.Module:
    net = small_backbone()
    with torch.no_grad():
        net[0].weight.neg_()
    return net


def test_sets_of_an_evaluation(ens):
    own, far = ds.cache_features(ens, (x, y)), ds.cache_features(other(), 9 * x)
    for known in (own, (x, y)):
        with pytest.raises(ValueError, match="Set 'far' cannot be read: These features were computed by another"):
            ds.evaluate(ens, known, ood={"far": far}, bootstrap=0)
    with pytest.raises(ValueError, match="Set 'later' cannot be read"):
        ds.evaluate(ens, own, shifted={"later": ds.cache_features(other(), (x + 1, y))}, bootstrap=0)
    result = ds.evaluate(ens, own, ood={"far": ds.cache_features(ens, 9 * x), "raw": 5 * x}, bootstrap=0)
    assert {part.name for part in result.sets} == {"id", "far", "raw"}


def test_an_evaluation_refuses_them_before_anything_runs(ens):
    ens.heads.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    with pytest.raises(ValueError, match="Set 'far'"):
        ds.evaluate(ens, ds.cache_features(ens, (x, y)), ood={"far": ds.cache_features(other(), x)}, bootstrap=0)


class TestBesideTheTrainingData:
    def test_of_a_head_ensemble(self, ens):
        own, wrong = ds.cache_features(ens, (x, y)), ds.cache_features(other(), x)
        ens.check_beside(own, ds.cache_features(ens, 2 * x), "unlabelled")
        ens.check_beside(own, x, "unlabelled")
        with pytest.raises(ValueError, match="another backbone"):
            ens.check_beside(own, wrong, "unlabelled")

    def test_inputs_and_features_do_not_go_together(self, ens):
        with pytest.raises(ValueError, match="unlabelled data are cached features and the training data are inputs"):
            ens.check_beside((x, y), ds.cache_features(ens, x), "unlabelled")

    def test_of_members_that_have_no_backbone(self, ens):
        own, wrong = ds.cache_features(ens, (x, y)), ds.cache_features(other(), x)
        ens.heads.check_beside(own, ds.cache_features(ens, 2 * x), "unlabelled")
        ens.heads.check_beside(own, ds.CachedFeatures(torch.ones(5, 6), None), "unlabelled")
        with pytest.raises(ValueError, match="features of another backbone than the training data's"):
            ens.heads.check_beside(own, wrong, "unlabelled")

    def test_in_training(self, ens):
        own, wrong = ds.cache_features(ens, (x, y)), ds.cache_features(other(), (x, y))
        objectives = (
            obj.Disagree(wrong),
            obj.LossGuided(guard=obj.HeldOutLoss(wrong)),
            obj.NormPenalty(obj.Disagree(wrong), 0.1),
        )
        for objective in objectives:
            with pytest.raises(ValueError, match="another"):
                ds.fit(ens, own, objective=objective, epochs=1)
        with pytest.raises(ValueError, match="another"):
            ds.fit(ens, own, objective=obj.Disagree(), unlabelled=wrong, epochs=1)
        ds.fit(ens, own, objective=obj.Disagree(ds.cache_features(ens, 2 * x)), epochs=1)
