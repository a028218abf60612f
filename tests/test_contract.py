"""Every member kind with every objective and every score: a new entry is covered by being listed."""

import copy

import pytest
import torch
from backbone_cases import small_backbone
from torch import nn
from training_helpers import net, norm_net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.randomness import seeded
from dissensus.scores import SCORES


def made(make):
    """Make a network whose weights do not depend on what ran before."""
    with seeded(0):
        return make()


KINDS = {
    "deep, vectorised": lambda: ds.DeepEnsemble(norm_net, 3, execution="vectorised"),
    "deep, loop": lambda: ds.DeepEnsemble(norm_net, 3, execution="loop"),
    "deep, dropout": lambda: ds.DeepEnsemble(lambda: net(0.3), 3),
    "deep, different architectures": lambda: ds.DeepEnsemble.from_members(
        [net(), norm_net(), nn.Linear(4, 3)]
    ),
}
KINDS |= {
    "anchored": lambda: ds.Anchored(norm_net, x, 3, mask_probability=0.2, initialise="fresh"),
    "anchored ensemble": lambda: ds.Anchored(
        norm_net, x, 2, num_nets=3, mask_probability=0.2, mask_per="example"
    ),
}
KINDS |= {
    "masksembles": lambda: ds.Masksembles(made(norm_net), 3, 2.0),
    "masksembles, grown, whole batches": lambda: ds.Masksembles(
        made(lambda: net(0.3)), 3, 3.0, grow=True, batches="whole"
    ),
    "mc dropout": lambda: ds.MCDropout(made(lambda: net(0.2)), 3),
    "batch ensemble": lambda: ds.BatchEnsemble(norm_net, 3),
}
KINDS |= {
    "heads": lambda: ds.HeadEnsemble(
        small_backbone(), lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), 3
    )
}
OBJECTIVES = {
    "independent": obj.Independent(),
    "brier": obj.Independent("brier"),
    "smoothing": obj.Independent(label_smoothing=0.1),
    "adversarial": obj.Adversarial(obj.Independent(), epsilon=0.01, of_range=True),
    "virtual adversarial": obj.VirtualAdversarial(obj.Independent(), epsilon=0.1),
    "joint": obj.Joint(0.5),
    "joint, scores and dropout": obj.Joint(0.3, average="scores", member_dropout=0.4),
    "adversarial joint": obj.Adversarial(obj.Joint(0.5), 0.01),
    "norm penalty": obj.NormPenalty(obj.Adversarial(obj.Independent()), 1e-3),
}
OBJECTIVES |= {
    "hard delta": obj.HardDelta(obj.Independent(), 0.1),
    "hard delta, features": obj.HardDelta(obj.Independent(), 0.1, law="features", draws=8),
    "masked uniform": obj.MaskedUniform(obj.Independent()),
}
OBJECTIVES |= {
    "loss-guided": obj.LossGuided(0.3),
    "loss-guided, weights from all": obj.LossGuided(0.3, weights_from="all", regulariser="divdis"),
    "loss-guided, all pairs": obj.LossGuided(0.3, active=None, regulariser="jensen_shannon"),
    "disagree": obj.Disagree(3 * x, strength=0.05),
}
ANCHORED = (KINDS["anchored"], KINDS["anchored ensemble"])
FOR_ANCHORED = (obj.HardDelta, obj.MaskedUniform)


def why_not(kind, objective):
    """Say why a kind is not for an objective; tests of either say that the pair is refused."""
    if isinstance(objective, FOR_ANCHORED) and kind not in ANCHORED:
        return "the objective is for anchored networks"
    if objective.couples and kind is KINDS["anchored"]:
        return "one anchored network has nothing to be compared with"
    return None


@pytest.fixture
def pair_that_works(kind, objective):
    if (reason := why_not(kind, objective)) is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("pair_that_works")
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
class TestKindsAndObjectives:
    def test_training_lowers_the_validation_loss_and_is_repeatable(self, kind, objective):
        outputs = []
        for _ in range(2):
            ens = kind()
            torch.manual_seed(0)
            start = copy.deepcopy(ens)
            run = ds.fit(
                ens, (x, y), objective=objective, epochs=8, batch_size=25, lr=0.02, validation=(x, y)
            )
            losses = run.history.by_epoch("ensemble_loss")
            assert losses[-1] < losses[0]
            outputs.append((ds.predict(start, x), ds.predict(ens, x)))
        if (
            kind is not KINDS["deep, different architectures"]
        ):  # those nets are made outside the ensemble's seed
            torch.testing.assert_close(outputs[0][1], outputs[1][1])

    def test_a_member_is_what_the_ensemble_says(self, kind, objective):
        ens = kind()
        ds.fit(ens, (x, y), objective=objective, epochs=1, batch_size=25)
        outputs = ds.predict(ens, x)
        for index in range(ens.num_members):
            torch.testing.assert_close(
                ens.member(index).eval()(x).detach(), outputs[index], rtol=1e-4, atol=1e-5
            )

    def test_the_state_dict_carries_everything(self, kind, objective):
        ens = kind()
        ds.fit(ens, (x, y), objective=objective, epochs=1, batch_size=25)
        twin = copy.deepcopy(ens)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        twin.load_state_dict(ens.state_dict())
        torch.testing.assert_close(ds.predict(twin, x), ds.predict(ens, x))


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES.keys())
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_score_reads_every_kind(kind, score):
    values = score(ds.predict(kind(), x))
    assert values.shape == (len(x),)
    assert torch.isfinite(values).all()
