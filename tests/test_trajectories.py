"""Engines change speed only: the same seed gives the same curve, step by step."""

import pytest
import torch
from torch import nn
from training_helpers import net, norm_net, x, y

import dissensus as ds
from dissensus import objectives as obj

ENGINES = ["captured", pytest.param("compiled", marks=pytest.mark.slow)]
OBJECTIVES = {"independent": obj.Independent(), "joint": obj.Joint(0.5), "loss-guided": obj.LossGuided(0.5)}


def curve(engine: str, objective: obj.Objective, make=norm_net, **settings) -> list[float]:
    """Train for 50 steps; return the loss of every member at every one of them, weights' traces in the later ones."""
    settings = {"epochs": 10, "batch_size": 20, "check_every": 1, "optimizer": "sgd", "lr": 0.05} | settings
    run = ds.fit(ds.DeepEnsemble(make, 3), (x, y), objective=objective, engine=engine, **settings)
    assert (run.engine, run.step) == (engine, 50)
    return [value for value in run.history["loss"] if value == value]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_fifty_steps_in_float32_are_those_of_the_eager_engine(objective, engine):
    wanted = curve("eager", objective)
    assert curve(engine, objective) == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] != pytest.approx(wanted[0], rel=1e-2)


@pytest.mark.parametrize("engine", ENGINES)
def test_in_bf16_engines_differ_by_no_more_than_rounding(engine):
    """Rounding differs where operations are put together: bf16 keeps 8 bits, so single steps within a few of 1/256."""

    def make() -> nn.Module:
        return net(0.1)

    wanted, found = (
        torch.tensor(curve(name, OBJECTIVES["independent"], make, precision="bf16")) for name in ("eager", engine)
    )
    assert (found / wanted - 1).abs().max() < 0.03
    assert found.mean() == pytest.approx(wanted.mean().item(), rel=0.003)
