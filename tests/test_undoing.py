"""Trying steps out: large states come back as they were, from wherever they were copied to, and training is the same."""

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.members import deep_ensemble
from dissensus.training import packing, undoing
from dissensus.training.undoing import clone, restore, undone

x, y = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 3


def a_net() -> nn.Module:
    # No bias before BatchNorm: its gradient is nothing but rounding.
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def a_state(device: str = "cpu") -> dict[str, torch.Tensor]:
    return {
        "flat.0": torch.randn(3, 64, device=device),
        "optimizer.first.0": torch.randn(3, 64, device=device, dtype=torch.float64),
        "buffer.half": torch.randn(5, 7, device=device).bfloat16(),
        "index": torch.zeros((), dtype=torch.int64, device=device),
        "data.x": torch.randn(4, 4, device=device),
    }


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(undoing, "SMALL_STATE", 0)
    monkeypatch.setattr(undoing, "SMALL_TENSOR", 8)


class TestUndone:
    def change(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in clone(state, 1.01).items():
            if name != "data.x":
                tensor.add_(1)

    @pytest.mark.parametrize("stay", [False, True])
    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_gives_a_large_state_back_bit_for_bit(self, everything_is_large, device, stay):
        state = a_state(device)
        before = {name: tensor.clone() for name, tensor in state.items()}
        with undone(state, stay=stay):
            self.change(state)
            assert not torch.equal(state["flat.0"], before["flat.0"])
            assert torch.equal(state["index"], before["index"])
        for name, tensor in state.items():
            assert torch.equal(tensor, before[name])

    def test_gives_it_back_after_an_error_too(self, everything_is_large):
        state = a_state()
        before = state["flat.0"].clone()

        def fail() -> None:
            with undone(state):
                self.change(state)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert torch.equal(state["flat.0"], before)

    def test_a_full_disk_costs_memory_instead(self, everything_is_large, monkeypatch, caplog):
        class Full:
            def write(self, data):
                raise OSError("No space left on device")

            def close(self):
                pass

        monkeypatch.setattr(undoing, "TemporaryFile", lambda prefix: Full())
        state = a_state()
        before = state["flat.0"].clone()
        with caplog.at_level("INFO", logger="dissensus"), undone(state):
            self.change(state)
        assert torch.equal(state["flat.0"], before)
        assert "no room in the temporary folder" in caplog.text

    def test_a_small_state_is_copied_whole(self):
        state = a_state()
        scratch = clone(state)
        assert scratch["data.x"] is state["data.x"]
        scratch["flat.0"].zero_()
        assert state["flat.0"].any()
        saved = clone(state)
        state["flat.0"].zero_()
        restore(state, saved)
        assert state["flat.0"].any()


@pytest.mark.parametrize("engine", ["eager", "captured", "auto"])
@pytest.mark.parametrize(
    "objective", [obj.Independent(), obj.Joint(0.5), obj.LossGuided(0.5)], ids=lambda o: type(o).__name__
)
def test_training_is_the_same_where_states_are_large(monkeypatch, engine, objective):
    def predictions() -> torch.Tensor:
        ens = ds.DeepEnsemble(a_net, 3)
        ds.fit(ens, (x, y), objective=objective, epochs=40, batch_size=20, optimizer="adam", engine=engine)
        return ds.predict(ens, x)

    small = predictions()
    monkeypatch.setattr(undoing, "SMALL_STATE", 0)
    monkeypatch.setattr(undoing, "SMALL_TENSOR", 8)
    assert torch.equal(predictions(), small)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "objective", [obj.Independent(), obj.LossGuided(0.5)], ids=lambda o: type(o).__name__
)
def test_parameters_in_several_rows_train_as_in_one(monkeypatch, optimizer, objective):
    def predictions(rows: int) -> torch.Tensor:
        blocks = []
        pack = packing.pack
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
    monkeypatch.setattr(packing, "ROW_BYTES", 4 * 24)
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


def test_a_state_at_the_limit_is_undone_too(monkeypatch):
    """What is logged is added to it on the way."""

    def first_loss(engine):
        ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3), 3)
        return ds.fit(ens, (x, y), epochs=1, batch_size=50, optimizer="sgd", lr=1.0, engine=engine).history[
            "loss"
        ]

    wanted = first_loss("eager")
    states = []
    large = undoing._large

    def watched(state):
        states.append(sum(t.nbytes for n, t in state.items() if not n.startswith(undoing._ONLY_READ)))
        return large(state)

    monkeypatch.setattr(undoing, "_large", watched)
    first_loss("captured")
    assert len(set(states)) > 1
    monkeypatch.setattr(undoing, "SMALL_TENSOR", 8)
    for limit in {size + more for size in states for more in (-1, 0, 1)}:
        monkeypatch.setattr(undoing, "SMALL_STATE", limit)
        assert first_loss("captured") == pytest.approx(wanted, rel=1e-6)


def test_no_temporary_folder_costs_memory_instead(everything_is_large, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    with caplog.at_level("INFO", logger="dissensus"):
        ds.fit(ds.DeepEnsemble(a_net, 2), (x, y), epochs=1, batch_size=20, engine="captured")
    assert "no room in the temporary folder" in caplog.text
