"""Loss-guided disagreement of members that share weights, wrapped and alone, and with strengths that follow the run."""

import pytest
import torch
from torch import nn
from training_helpers import net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.randomness import seeded


def plain():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def one_net():
    with seeded(0):
        return plain()


KINDS = {
    "BatchEnsemble": lambda: ds.BatchEnsemble(plain, 4, seed=0),
    "Masksembles": lambda: ds.Masksembles(one_net(), 4, scale=2.0, seed=0),
    "DeepEnsemble": lambda: ds.DeepEnsemble(plain, 4),
}


def step_of(make, objective):
    """How far one plain gradient step of size 1 moves every parameter."""
    ens = make()
    before = {name: tensor.detach().clone() for name, tensor in ens.named_parameters()}
    ds.fit(ens, (x, y), objective=objective, epochs=1, batch_size=100, optimizer="sgd", lr=1.0, weight_decay=0.0)
    return {name: before[name] - tensor.detach() for name, tensor in ens.named_parameters()}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("active", [2, None])
def test_an_attack_of_size_zero_changes_no_step_whoever_owns_the_parameters(make, active):
    inner = obj.LossGuided(0.5, active=active)
    alone, wrapped = step_of(make, inner), step_of(make, obj.Adversarial(inner, epsilon=0.0))
    assert any(moved.abs().max() > 0 for moved in alone.values())
    for name, moved in alone.items():
        torch.testing.assert_close(wrapped[name], moved)


SCHEDULES = {
    "a number": (lambda t: 0.5, "captured"),
    "a tensor": (lambda t: torch.where(t > 0.5, 0.5, 0.0), "captured"),
    "a tensor of one": (lambda t: 0.5 * t.reshape(1), "captured"),
    "a branch": (lambda t: 0.5 if t > 0.5 else 0.0, None),
    "a value": (lambda t: 0.5 * (1 - float(t)), None),
}


def trained(strength, engine):
    ens = ds.DeepEnsemble(net, 3)
    objective = obj.LossGuided(strength, guard=None)
    ds.fit(ens, (x, y), objective=objective, epochs=4, batch_size=50, lr=0.02, engine=engine)
    return ds.predict(ens, x)


@pytest.mark.parametrize(("strength", "engine"), SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_strength_may_be_given_as_a_number_and_is_recorded_only_where_nothing_is_read(strength, engine):
    eager = trained(strength, "eager")
    assert not torch.equal(eager, trained(0.0, "eager"))
    if engine is not None:
        torch.testing.assert_close(trained(strength, engine), eager, rtol=1e-3, atol=1e-4)
        return
    with pytest.raises(ValueError, match="reads the value of a tensor"):
        trained(strength, "captured")


def test_a_branch_in_python_is_the_same_schedule_as_one_in_tensors():
    branch, tensor = SCHEDULES["a branch"][0], SCHEDULES["a tensor"][0]
    torch.testing.assert_close(trained(branch, "eager"), trained(tensor, "eager"))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, "strong", None, torch.ones(3)])
def test_what_is_no_strength_is_refused_also_from_a_schedule(value):
    if not isinstance(value, torch.Tensor):
        with pytest.raises(ValueError, match="`strength` must be a number"):
            obj.LossGuided(value)
        with pytest.raises(ValueError, match="`strength` must be a number"):
            obj.Disagree(x, strength=value)
    with pytest.raises(ValueError, match="`strength` must be a number of at least 0"):
        trained(lambda t: value, "eager")
