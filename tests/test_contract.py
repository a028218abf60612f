"""The contract over the tables: every kind, every objective and every score is covered by being listed."""

import copy

import pytest
import torch
from kind_cases import KINDS
from objective_cases import CLASSIFICATION, FOR_ANCHORED, REGRESSION
from torch import nn
from training_helpers import x, y

import dissensus as ds
from dissensus.members import KINDS as NAMED
from dissensus.objectives import OBJECTIVES
from dissensus.scores import SCORES
from dissensus.testing import check_members, check_objective

values = x[:, :1] * x[:, 1:2] + 0.1 * x[:, 2:3]
CASES = [
    pytest.param(name, case, id=f"{name}, {what}") for name, cases in KINDS.items() for what, case in cases.items()
]


def net_with(outputs, *, dropout=0.0):
    drop = [nn.Dropout(dropout)] if dropout else []
    return lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), *drop, nn.Linear(8, outputs))


def pairs(objectives):
    """Every kind with every objective: each once among the quick tests, all pairs among the long ones."""
    for name, cases in KINDS.items():
        for objective_name, made in objectives.items():
            for i, (case_name, case) in enumerate(cases.items()):
                for j, (what, make) in enumerate(made.items()):
                    refused = why_not(name, case_name, objective_name, make(x))
                    quick = i + j == 0 and (name in ("deep", "anchored") or objective_name == "independent")
                    marks = [] if quick else [pytest.mark.slow]
                    label = f"{name} ({case_name}), {objective_name} ({what})"
                    yield pytest.param(case, make(x), refused, marks=marks, id=label)


def why_not(kind, case, objective_name, objective):
    """Say why a kind is not for an objective; None if it is."""
    if objective_name in FOR_ANCHORED and kind != "anchored":
        return "for anchored networks"
    if objective.couples and ((kind, case) == ("anchored", "one network") or kind in ("snapshots", "swag")):
        return "nothing to compare"
    return None


def outputs_for(objective):
    return {"classes": 3, "points": 1, "density": 2}[objective.likelihood.kind]


def test_every_kind_has_a_case():
    assert NAMED.keys() <= KINDS.keys()


@pytest.mark.parametrize(("name", "case"), CASES)
class TestKinds:
    def test_classification(self, name, case):
        check_members(lambda: case(net_with(3), x), x, y)

    def test_regression(self, name, case):
        check_members(lambda: case(net_with(1), x), x, values)

    @pytest.mark.slow
    def test_with_dropout(self, name, case):
        check_members(lambda: case(net_with(3, dropout=0.3), x), x, y)

    def test_every_score_reads_it(self, name, case):
        logits = ds.predict(case(net_with(3), x), x)
        for score in SCORES.values():
            found = score(logits)
            assert found.shape == (len(x),)
            assert torch.isfinite(found).all()


def test_every_objective_has_a_case():
    assert set(CLASSIFICATION) == set(OBJECTIVES)


@pytest.mark.parametrize(("case", "objective", "refused"), list(pairs(CLASSIFICATION)))
def test_objectives_on_labels(case, objective, refused):
    check_pair(case, objective, refused, y)


@pytest.mark.parametrize(("case", "objective", "refused"), list(pairs(REGRESSION)))
def test_objectives_on_real_targets(case, objective, refused):
    check_pair(case, objective, refused, values)


def check_pair(case, objective, refused, targets):
    def make():
        return case(net_with(outputs_for(objective)), x)

    if refused is not None:
        with pytest.raises(ValueError, match=refused):
            ds.fit(make(), (x, targets), objective=objective, epochs=1)
        return
    check_objective(objective, make, x, targets)
    ens = make()
    run = ds.fit(
        ens,
        (x, targets),
        objective=objective,
        # Anchored networks first widen their densities, and learn the means afterwards.
        epochs=20 if objective.likelihood.kind == "density" else 8,
        batch_size=25,
        lr=0.02,
        validation=(x, targets),
        engine="eager",
    )
    losses = run.history.by_epoch("ensemble_loss")
    assert losses[-1] < losses[0]
    trained = ds.predict(ens, x)
    for index in range(ens.num_members):
        torch.testing.assert_close(ens.member(index).eval()(x).detach(), trained[index], rtol=1e-4, atol=1e-5)


def test_a_member_alone_is_the_first_of_many():
    made = copy.deepcopy(ds.DeepEnsemble(net_with(3), 1, seed=3))
    check_members(lambda num_members=2: ds.DeepEnsemble(net_with(3), num_members, seed=3), x, y)
    torch.testing.assert_close(ds.predict(made, x)[0], ds.predict(ds.DeepEnsemble(net_with(3), 4, seed=3), x)[0])
