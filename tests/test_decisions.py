"""Loop or vmap: decided once, by outputs, buffers and gradients in full precision, and kept with the run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_helpers import net, norm_net, weights, x, y

import dissensus as ds

words = torch.randint(1, 6, (40, 5), generator=torch.Generator().manual_seed(0))
labels = torch.arange(40) % 3


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))


class Padded(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.table = own, Table() if own else nn.Embedding(6, 4, padding_idx=0)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        rows = F.embedding(x, self.table.weight, padding_idx=0) if self.own else self.table(x)
        return self.last(rows.mean(1))


@pytest.mark.parametrize("own", [False, True], ids=["torch's layer", "a layer of one's own"])
def test_a_padding_row_is_not_trained_in_any_member(own):
    inputs = words.clone()
    # What no rule knows, the probe sees where it is among its rows.
    inputs[0 if own else 39 :, 2:] = 0
    ens = ds.DeepEnsemble(lambda: Padded(own), 3)
    before = ens.net.table.weight[:, 0].clone()
    ds.fit(ens, (inputs, labels), epochs=2, batch_size=10, optimizer="sgd", lr=0.5, engine="eager")
    assert torch.equal(ens.net.table.weight[:, 0], before)
    assert "vmap" in ens.execution_reason if own else ens.execution_reason is None


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_embeddings_with_padding_train_under_vmap_as_in_a_loop(engine):
    inputs = words.clone()
    inputs[:, 3:] = 0
    ends = []
    for execution in ("auto", "loop"):
        ens = ds.DeepEnsemble(lambda: Padded(False), 3, execution=execution)
        ds.fit(ens, (inputs, labels), epochs=3, batch_size=10, optimizer="sgd", lr=0.5, engine=engine)
        ends.append(ds.predict(ens, inputs))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def test_embeddings_without_padding_run_under_vmap():
    ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(20, 3)), 3)
    ds.fit(ens, (words, labels), epochs=1, engine="eager")
    assert ens.execution_reason is None


@pytest.mark.parametrize("make", [net, norm_net])
def test_bf16_changes_no_decision(make):
    for seed in range(5):
        ens = ds.DeepEnsemble(make, 3, seed=seed)
        ds.fit(ens, (x, y), epochs=1, batch_size=10, precision="bf16", lr=0.1, engine="eager")
        assert {d["why_loop"] for d in ens.decisions.values()} == {None}


class _NormTypes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "batch_norm" in str(func) and args[0].shape[1] > 8:  # the channels of all members; of one there are 8
            kinds = {a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()}
            self.mixed.append(len(kinds) > 1)
        return func(*args, **(kwargs or {}))


def test_batch_norm_under_vmap_computes_in_the_precision_of_its_statistics():
    """Kernels of GPUs refuse statistics of another precision than the inputs' there."""
    ens = ds.DeepEnsemble(norm_net, 3, execution="vectorised")
    with _NormTypes() as seen:
        ds.fit(ens, (x, y), epochs=1, batch_size=50, precision="bf16", engine="eager")
    assert seen.mixed
    assert not any(seen.mixed)


@pytest.mark.gpu
def test_batch_norm_in_bf16_trains_eagerly_on_a_gpu():
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))

    images = torch.randn(40, 3, 8, 8)
    run = ds.fit(
        ds.DeepEnsemble(make, 3),
        (images, labels),
        epochs=3,
        batch_size=16,
        precision="bf16",
        engine="eager",
        device="cuda",
    )
    assert run.step == 9


@pytest.mark.gpu
def test_a_resnet50_of_timm_trains_eagerly_in_bf16_on_a_gpu():
    timm = pytest.importorskip("timm")
    ens = ds.DeepEnsemble(lambda: timm.create_model("resnet50", num_classes=10), 3)
    data = (torch.randn(16, 3, 64, 64), torch.arange(16) % 10)
    run = ds.fit(ens, data, epochs=1, batch_size=8, precision="bf16", engine="eager", device="cuda")
    assert run.step == 2
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in run.history.rows)
    assert ds.predict(ens, data[0]).isfinite().all()


@pytest.mark.parametrize("why", ["it was decided so in another sitting", None])
def test_a_resumed_run_goes_by_what_was_decided(tmp_path, why):
    settings = {"batch_size": 20, "engine": "eager", "checkpoint_dir": tmp_path, "epochs": 2}

    def stop(run):
        raise KeyboardInterrupt

    first, another = ds.DeepEnsemble(norm_net, 3), ds.DeepEnsemble(norm_net, 3)
    another(x)
    (kind,) = another.decisions
    first.decisions[kind.replace("shared", "own")] = {"training": True, "why_loop": why, "random": False}
    with pytest.raises(KeyboardInterrupt):
        ds.fit(first, (x, y), callback=lambda run: stop(run) if run.epoch == 2 else None, **settings)
    resumed = ds.DeepEnsemble(norm_net, 3)
    ds.fit(resumed, (x, y), resume=True, **settings)
    assert why in {d["why_loop"] for d in resumed.decisions.values() if d["training"]}
    whole = ds.DeepEnsemble(norm_net, 3)
    whole.decide_as(first.all_decisions())
    ds.fit(whole, (x, y), **settings | {"checkpoint_dir": None})
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name])
