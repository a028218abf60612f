"""The example of training code of one's own: the same curve as `ds.fit`, and ensembles inside other people's loops."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds

PATH = Path(__file__).parents[1] / "examples" / "own_training.py"
spec = importlib.util.spec_from_file_location("own_training", PATH)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def test_a_plain_loop_gives_the_curve_of_fit():
    loader = DataLoader(TensorDataset(*example.data()), batch_size=16)
    mine, theirs = ds.DeepEnsemble(example.make_net, 3).train(), ds.DeepEnsemble(example.make_net, 3)
    curves = example.plain_loop(mine, loader, 3, 0.1), example.fitted(theirs, loader, 3, 0.1)
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), atol=1e-5, rtol=1e-4)
    x, _ = example.data()
    torch.testing.assert_close(ds.predict(mine, x), ds.predict(theirs, x), atol=1e-5, rtol=1e-4)


def test_a_score_is_a_detector():
    ens = ds.DeepEnsemble(example.make_net, 3)
    x, _ = example.data()
    found = example.Detector(ens).fit(None)(x)
    torch.testing.assert_close(found, ds.scores.mutual_information(ds.predict(ens, x)))


@pytest.mark.slow
def test_inside_the_trainer_of_transformers_and_torchmetrics(tmp_path):
    pytest.importorskip("torchmetrics")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    ens = ds.DeepEnsemble(example.make_net, 3)
    x, y = example.data()
    before = torch.nn.functional.cross_entropy(ds.predict(ens, x)[0], y)
    example.with_trainer(ens, str(tmp_path))
    assert torch.nn.functional.cross_entropy(ds.predict(ens, x)[0], y) < before
    assert 0 <= example.with_torchmetrics(ens) <= 1
    wanted = float(ds.metrics.ece(ds.predict(ens, x).softmax(-1).mean(0), y, bins=15))
    assert example.with_torchmetrics(ens) == pytest.approx(wanted, abs=1e-5)


def test_gradients_are_clipped_number_by_number():
    x, y = torch.tensor([[1.0]]), torch.tensor([[100.0]])
    ens = ds.DeepEnsemble(lambda: torch.nn.Linear(1, 1), 2)
    before = [parameter.detach().clone() for parameter in ens.parameters()]
    objective = ds.objectives.Independent("mse")
    ds.fit(
        ens,
        (x, y),
        objective=objective,
        epochs=1,
        optimizer="sgd",
        lr=0.5,
        clip_value=0.1,
        device="cpu",
        engine="eager",
    )
    for old, new in zip(before, ens.parameters(), strict=True):
        torch.testing.assert_close((new - old).abs(), torch.full_like(old, 0.05))
    with pytest.raises(ValueError, match="`clip_value` must be a number above 0"):
        ds.fit(ens, (x, y), objective=objective, clip_value=0.0)
