"""Guards with held-out data: what they take, and what they refuse before or as training begins."""

import numpy as np
import pytest
import torch
from torch import nn
from training_helpers import net, x, y

import dissensus as ds
from dissensus import objectives as obj

BACKBONE = nn.Sequential(nn.Linear(4, 6), nn.ReLU())


def accuracy_guard(inputs, labels=None):
    return obj.HeldOutAccuracy(inputs, labels, reference=0.9)


GUARDS = pytest.mark.parametrize("guard", [obj.HeldOutLoss, accuracy_guard], ids=["HeldOutLoss", "HeldOutAccuracy"])


def trained(guard, members=None, data=(x, y), **options):
    ens = ds.DeepEnsemble(net, 3) if members is None else members
    ds.fit(ens, data, objective=obj.LossGuided(1.0, guard=guard), epochs=2, batch_size=50, **options)
    return ds.predict(ens, data if isinstance(data, ds.CachedFeatures) else data[0])


@GUARDS
@pytest.mark.parametrize(
    ("inputs", "labels"),
    [
        (x.numpy(), y.numpy()),
        (x.double().numpy(), y.numpy().astype(np.int32)),
        (x.double(), y.int()),
        (x.double(), y.to(torch.uint8)),
    ],
    ids=["arrays", "float64 arrays", "float64 tensor", "bytes"],
)
@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_arrays_and_other_precisions_are_the_same_held_out_data(guard, inputs, labels, engine):
    torch.testing.assert_close(
        trained(guard(inputs, labels), engine=engine), trained(guard(x, y), engine="eager"), rtol=1e-3, atol=1e-4
    )


@GUARDS
def test_cached_features_bring_their_labels_whether_they_lie_in_memory_or_in_a_file(guard, tmp_path):
    features = ds.cache_features(BACKBONE, (x, y), tmp_path / "features")
    assert isinstance(features.features, np.memmap)
    whole = torch.from_numpy(np.array(features.features))

    def heads():
        return ds.HeadEnsemble(BACKBONE, (6, 3), 3)

    expected = trained(guard(whole, y), heads(), features)
    for given in (guard(features), guard(features, y), guard(features.features, features.targets)):
        assert isinstance(given.x, torch.Tensor)
        torch.testing.assert_close(trained(given, heads(), features), expected)


@GUARDS
@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (x, y.float(), "whole number"),
        (x, y[:, None], r"shaped \(100, 1\)"),
        (x, y[:5], "one target for each of"),
        (x[:0], y[:0], "empty"),
        (x, y - 1, "from 0 on"),
        (x, None, "need their class indices"),
        (x / 0, y, "must be finite"),
    ],
    ids=["real labels", "a column", "lengths", "nothing", "negative", "no labels", "infinite"],
)
def test_held_out_data_that_cannot_be_used_is_refused_at_once(guard, inputs, labels, message):
    with pytest.raises(ValueError, match=message):
        guard(inputs, labels)


@GUARDS
@pytest.mark.parametrize("engine", ["auto", "eager", "captured"])
def test_labels_without_an_output_are_named_when_training_begins(guard, engine):
    with pytest.raises(ValueError, match="must lie in 0 to 2, the network's outputs; got 5"):
        trained(guard(x, y + 3), engine=engine)


def test_features_without_labels_are_refused():
    with pytest.raises(ValueError, match="need their class indices"):
        obj.HeldOutLoss(ds.cache_features(BACKBONE, x))
