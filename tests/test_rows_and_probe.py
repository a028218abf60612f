"""Parameters in rows, and a probe that leaves weights alone."""

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.members import deep_ensemble
from dissensus.training import optimizers

x, y = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 3


def a_net() -> nn.Module:
    # No bias before BatchNorm: its gradient is nothing but rounding.
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("objective", [obj.Independent(), obj.LossGuided(0.5)], ids=lambda o: type(o).__name__)
def test_parameters_in_several_rows_train_as_in_one(monkeypatch, optimizer, objective):
    def predictions(rows: int) -> torch.Tensor:
        blocks = []
        pack = optimizers.pack
        monkeypatch.setattr("dissensus.training.trainer.pack", lambda m: blocks.append(pack(m)) or blocks[-1])
        ens = ds.DeepEnsemble(a_net, 3)
        ds.fit(
            ens,
            (x, y),
            objective=objective,
            epochs=5,
            batch_size=20,
            optimizer=optimizer,
            optimizer_options={"momentum": 0.9} if optimizer == "sgd" else {},
            weight_decay=0.01,
            clip_norm=1.0,
            engine="captured",
        )
        assert len(blocks[0]) == rows
        return ds.predict(ens, x)

    one = predictions(1)
    monkeypatch.setattr(optimizers, "ROW_BYTES", 4 * 24)
    torch.testing.assert_close(predictions(4), one, rtol=1e-5, atol=1e-6)


def test_the_probe_sees_weights_in_the_order_in_which_they_lie(monkeypatch):
    """Kernels are chosen by it."""
    seen = []
    probe = deep_ensemble.why_not_vectorised

    def watched(loop, vectorised, weights, *others):
        seen.append({name: tensor.stride() for name, tensor in weights().items()})
        return probe(loop, vectorised, weights, *others)

    monkeypatch.setattr(deep_ensemble, "why_not_vectorised", watched)
    ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)), 2)
    ds.fit(ens, (torch.randn(50, 3, 4, 4), y), epochs=1, engine="eager")
    assert seen[-1]["net.0.weight"] == (108, 27, 1, 9, 3)  # channels last


class WritesToItsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        self.linear.weight.data.mul_(0.9)
        return self.linear(x)


@pytest.mark.parametrize("training", [True, False])
def test_the_probe_leaves_no_trace_in_weights_that_a_pass_writes_to(training):
    ens = ds.DeepEnsemble(WritesToItsWeights, 5, execution="loop").train(training)
    probed = ds.DeepEnsemble(WritesToItsWeights, 5).train(training)
    before = [net.linear.weight.clone() for net in map(probed.member, range(5))]
    with torch.no_grad():
        torch.testing.assert_close(probed(x), ens(x))
    for index, weight in enumerate(before):
        torch.testing.assert_close(probed.member(index).linear.weight, 0.9 * weight)
