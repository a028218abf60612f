"""Every member kind with every objective and every score: a new entry is covered by being listed."""

import copy

import pytest
import torch
from torch import nn
from training_helpers import net, norm_net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.scores import SCORES

KINDS = {
    "deep, vectorised": lambda: ds.DeepEnsemble(norm_net, 3, execution="vectorised"),
    "deep, loop": lambda: ds.DeepEnsemble(norm_net, 3, execution="loop"),
    "deep, dropout": lambda: ds.DeepEnsemble(lambda: net(0.3), 3),
    "deep, different architectures": lambda: ds.DeepEnsemble.from_members(
        [net(), norm_net(), nn.Linear(4, 3)]
    ),
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
