"""How many files one has to know to follow a call."""

import torch
from torch import nn
from walk import files_passed

import dissensus as ds
from dissensus.training.step import TrainStep

x, y = torch.randn(100, 4), torch.arange(100) % 3


def fit(ens: ds.DeepEnsemble) -> None:
    ds.fit(ens, (x, y), epochs=2, batch_size=50, engine="eager", device="cpu")


def networks() -> ds.DeepEnsemble:
    return ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), 3)


def test_a_fit_passes_few_files():
    ens = networks()
    fit(ens)
    passed = files_passed(lambda: fit(ens))
    assert len(passed) <= 15, sorted(passed)


def test_a_step_passes_fewer(monkeypatch):
    take, passed = TrainStep.__call__, {}

    def watched(*args, **options):
        passed.clear()
        passed.update(files_passed(lambda: take(*args, **options)))

    monkeypatch.setattr(TrainStep, "__call__", watched)
    fit(networks())
    # The step with its batch and its update; what every kind and every objective does, and what these do.
    assert {name for name in passed if name.startswith("training/")} == {"training/step.py"}
    assert len(passed) <= 5, sorted(passed)
