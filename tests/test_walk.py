"""How many files one has to know to follow a call."""

import torch
from torch import nn
from walk import files_passed

import dissensus as ds

x, y = torch.randn(100, 4), torch.arange(100) % 3


def test_a_fit_passes_few_files_and_a_step_fewer():
    ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), 3)

    def fit() -> None:
        ds.fit(ens, (x, y), epochs=2, batch_size=50, engine="eager", device="cpu")

    fit()
    passed = files_passed(fit)
    assert len(passed) <= 24, sorted(passed)
    # What takes a step: the loop, the engine, the step, its batch, parameters in rows, and the update.
    step = {name for name in passed if name.startswith("training/")}
    assert len(step) <= 12, sorted(step)
