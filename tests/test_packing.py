"""Parameters as rows: empty ones, several dtypes, and rows that get no gradient."""

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.training import optimizers

x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


class WithOddParameters(nn.Module):
    """An empty parameter first, as is used to tell the device; one of another dtype; and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.linear = nn.Linear(4, 3)
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(5, 5))

    def forward(self, x):
        return self.linear(x) * self.scale.float()


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_empty_parameters_are_no_obstacle(engine):
    ens = ds.DeepEnsemble(WithOddParameters, 2)
    blocks = optimizers.pack(ens)
    assert [{ens.get_parameter(name).dtype for name in block.names} for block in blocks] == [
        {torch.float32},
        {torch.float64},
    ]
    run = ds.fit(ds.DeepEnsemble(WithOddParameters, 2), (x, y), epochs=3, engine=engine)
    assert run.history.by_epoch("loss")[-1] < run.history.by_epoch("loss")[0]


@pytest.mark.parametrize("row_bytes", [1, 2**20])
def test_decay_of_what_gets_no_gradient_does_not_depend_on_how_rows_are_made(monkeypatch, row_bytes):
    monkeypatch.setattr(optimizers, "ROW_BYTES", row_bytes)
    ens = ds.DeepEnsemble(WithOddParameters, 2)
    ds.fit(ens, (x, y), epochs=1, batch_size=40, optimizer="sgd", lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(ens.net.unused, torch.full((2, 5, 5), 0.95))
