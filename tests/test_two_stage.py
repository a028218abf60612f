"""The two-stage split of arrays and cached features, and inputs to disagree on in another precision."""

import numpy as np
import pytest
import torch
from torch import nn
from training_helpers import net, x, y

import dissensus as ds
from dissensus import objectives as obj

LOGITS = torch.randn(100, 3, generator=torch.Generator().manual_seed(7))
UNSURE = LOGITS.softmax(-1).amax(-1) < 0.6


def test_arrays_are_split_as_tensors_are():
    data, objective = obj.two_stage(x.numpy(), y.numpy(), LOGITS.numpy(), threshold=0.6)
    assert torch.equal(data[0], x[~UNSURE])
    assert torch.equal(data[1], y[~UNSURE])
    assert torch.equal(objective.ood_data, x[UNSURE])
    assert torch.equal(obj.low_confidence(LOGITS.numpy(), 0.6), UNSURE)
    labelled = obj.low_confidence(LOGITS.numpy(), 0.6, y.numpy().astype(np.int32))
    assert torch.equal(labelled, obj.low_confidence(LOGITS, 0.6, y))


@pytest.mark.parametrize("in_a_file", [False, True])
def test_cached_features_are_split_into_features_of_the_same_backbone(in_a_file, tmp_path):
    backbone = nn.Linear(4, 6)
    cached = ds.cache_features(backbone, (x, y), tmp_path / "features" if in_a_file else None)
    whole = cached.resident()
    data, objective = obj.two_stage(cached, None, LOGITS, threshold=0.6, strength=0.1, active=2)
    assert torch.equal(data.features, whole[~UNSURE])
    assert torch.equal(data.targets, y[~UNSURE])
    assert torch.equal(objective.ood_data.features, whole[UNSURE])
    data.verify()
    ens = ds.HeadEnsemble(backbone, (6, 3), 3)
    run = ds.fit(ens, data, objective=objective, epochs=1, batch_size=20)
    assert "regulariser" in run.history.columns
    with pytest.raises(ValueError, match="another backbone"):
        ds.fit(ds.HeadEnsemble(nn.Linear(4, 6), (6, 3), 3), data, objective=objective, epochs=1)


@pytest.mark.parametrize(
    ("logits", "message"),
    [(LOGITS[None], r"\(1, 100, 3\)"), (LOGITS[:, 0], r"\(100,\)"), (LOGITS[:50], "got 50 rows for 100 inputs")],
)
def test_logits_of_another_shape_get_one_clear_sentence(logits, message):
    with pytest.raises(ValueError, match=message):
        obj.two_stage(x, y, logits, threshold=0.6)


def test_inputs_need_labels_and_features_one_pass():
    with pytest.raises(ValueError, match="class indices"):
        obj.two_stage(x, None, LOGITS, threshold=0.6)
    twice = ds.CachedFeatures(x, y, passes=2)
    with pytest.raises(ValueError, match="passes=1"):
        obj.two_stage(twice, None, LOGITS, threshold=0.6)


@pytest.mark.parametrize("given", [x.double(), x.double().numpy(), x.half()], ids=["tensor", "array", "half"])
@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("own", [True, False], ids=["with the objective", "with the run"])
def test_inputs_to_disagree_on_may_come_in_another_precision(given, engine, own):
    outputs = []
    for inputs in (given, x.half().float() if getattr(given, "dtype", None) == torch.float16 else x):
        ens = ds.DeepEnsemble(net, 3)
        objective = obj.Disagree(inputs if own else None, strength=0.1)
        further = {} if own else {"unlabelled": inputs}
        ds.fit(ens, (x, y), objective=objective, epochs=1, batch_size=50, engine=engine, **further)
        outputs.append(ds.predict(ens, x))
    torch.testing.assert_close(*outputs)


def test_virtual_adversarial_training_takes_unlabelled_inputs_in_another_precision():
    ens = ds.DeepEnsemble(net, 2)
    objective = obj.VirtualAdversarial(obj.Independent())
    run = ds.fit(ens, (x, y), objective=objective, unlabelled=x.double(), epochs=1)
    assert torch.tensor(run.history["virtual"]).isfinite().all()
