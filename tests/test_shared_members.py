"""Networks that kinds with shared weights must not get wrong in silence."""

import copy
import logging

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.training import CheckpointError

x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
labels = torch.arange(12) % 3


class ReadsItsWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3)

    def forward(self, x):
        return self.last(self.act(self.first(x))) / self.last.in_features**0.5


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.layer(x[:, None])[:, 0])


class TiedDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(8, 64), nn.ReLU()

    def forward(self, x):
        return nn.functional.linear(self.act(self.first(x)), self.first.weight.t())


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))


@pytest.mark.parametrize("execution", ["auto", "apart", "tiled"])
def test_members_of_a_network_that_reads_its_width_keep_their_masks(execution, caplog):
    ens = ds.Masksembles(ReadsItsWidth(), 4, 2.0, execution=execution)
    assert ens.masked_layers[0].form == "trimmed"
    with caplog.at_level(logging.WARNING, logger="dissensus"):
        outputs = ds.predict(ens, x)
        assert ens.masked_layers[0].form == "masked"
    assert "reads widths or weights" in caplog.text
    for index in range(4):
        torch.testing.assert_close(ens.member(index).eval()(x), outputs[index])


@pytest.mark.parametrize("execution", ["auto", "apart", "tiled"])
def test_weights_that_are_read_twice_are_not_trimmed(execution):
    ens = ds.Masksembles(TiedDecoder(), 4, 2.0, layers="act", execution=execution)
    outputs = ds.predict(ens, x)
    torch.testing.assert_close(ens.member(1).eval()(x), outputs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_members_of_an_ordinary_network_stay_trimmed(dtype):
    ens = ds.Masksembles(plain_net(), 4, 2.0).to(dtype)
    ds.predict(ens, x.to(dtype))
    assert ens.masked_layers[0].form == "trimmed"
    ens.train()
    assert ens.member(0)[0].out_features == ens.masked_layers[0].ones
    assert ens.training


def test_dropout_inside_transformer_layers_is_on_without_gradients():
    ens = ds.MCDropout(Transformer(), 4)
    with pytest.warns(UserWarning, match="outside dropout layers"):  # those of attention
        outputs = ds.predict(ens, x)
    assert outputs.std(0).min() > 0
    with torch.no_grad():
        torch.testing.assert_close(ens.member(2)(x), outputs[2])
    assert torch.backends.mha.get_fastpath_enabled()


def test_factors_inside_transformer_layers_act_without_gradients():
    ens = ds.BatchEnsemble(Transformer, 4)
    outputs = ds.predict(ens, x)
    assert outputs.std(0).min() > 0
    with torch.no_grad():
        torch.testing.assert_close(ens.member(2).eval()(x), outputs[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: ds.Masksembles(plain_net(), 2), lambda: ds.Masksembles(plain_net(), 2, batches="whole")),
        (lambda: ds.MCDropout(plain_net(), 2), lambda: ds.MCDropout(plain_net(), 2, seed=1)),
    ],
    ids=["batches", "draws"],
)
def test_a_checkpoint_of_other_settings_is_refused(first, second, tmp_path):
    settings = {"epochs": 1, "checkpoint_dir": tmp_path}
    ds.fit(first(), (x, labels), **settings)
    with pytest.raises(CheckpointError, match="architecture"):
        ds.fit(second(), (x, labels), resume=True, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scale": 0.5}, "`scale` must be at least 1; got 0.5"),
        ({"scale": float("nan")}, "`scale`"),
        ({"num_members": 2.5}, "`num_members` must be a whole number"),
        ({"layers": []}, "names no layer to mask. Candidates: '1'"),
        ({"layers": "2"}, "'2' is a dropout layer"),
    ],
)
def test_what_is_wrong_is_said(settings, words):
    with pytest.raises(ValueError, match=words):
        ds.Masksembles(plain_net(), **{"num_members": 4, **settings})


KINDS = {
    "batch_ensemble": lambda: ds.BatchEnsemble(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), 3),
    "masksembles": lambda: ds.Masksembles(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), 3),
    "mc_dropout": lambda: ds.MCDropout(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)), 3),
    "by input": lambda: ds.MCDropout(
        nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)), 3, masks="input"
    ),
    "low rank": lambda: ds.LoRAEnsemble(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), 3, own="2"),
    "packed": lambda: ds.PackedEnsemble(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), 3),
    "mimo": lambda: ds.MIMO(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_inputs_has_outputs_without_rows(kind):
    ens = KINDS[kind]()
    untouched, view = copy.deepcopy(ens).eval(), ens.view()
    assert view(x[:0]).shape == (view.num_members, 0, 3)
    ens.eval()
    assert ens(x[:0]).shape == (3, 0, 3)
    # Nothing was settled by it.
    assert torch.equal(ens(x), untouched(x))
