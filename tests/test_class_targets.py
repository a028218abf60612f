"""Targets of classifiers: class probabilities are checked once, before training, and rounded or mixed ones are taken."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from training_helpers import net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.data.augment import CutMix, Mixup

SOFT = torch.randn(100, 3, generator=torch.Generator().manual_seed(1)).softmax(-1)
OBJECTIVES = [obj.Independent(), obj.Independent("brier"), obj.LossGuided()]


def fit(targets, objective=None, **options):
    return ds.fit(ds.DeepEnsemble(net, 2), (x, targets), objective=objective, epochs=1, **options)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: f"{type(each).__name__} {each.likelihood.name}")
@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.randn(100, 3, generator=torch.Generator().manual_seed(2)), "for regression"),
        (2 * SOFT, "100 of 100 rows are not, the first sums to 2"),
        (torch.cat([SOFT[:99], SOFT[:1] + torch.tensor([0.5, -0.5, 0.0])]), "1 of 100 rows"),
        (SOFT[:, None].expand(100, 2, 3), r"class probabilities \(rows, 3\)"),
    ],
    ids=["values", "sums", "negative", "axes"],
)
def test_real_targets_that_are_no_probabilities_are_refused(objective, targets, message):
    with pytest.raises(ValueError, match=message):
        fit(targets, objective)


def test_a_column_of_values_for_one_output_is_refused():
    ens = ds.DeepEnsemble(lambda: torch.nn.Linear(4, 1), 2)
    with pytest.raises(ValueError, match="sum to 1"):
        ds.fit(ens, (x, x[:, :1]), objective=obj.LossGuided(), epochs=1)


def test_validation_targets_and_those_of_loaders_are_checked_too():
    with pytest.raises(ValueError, match="validation targets"):
        fit(SOFT, validation=(x, 2 * SOFT))
    loader = DataLoader(TensorDataset(x, 2 * SOFT), 50)
    with pytest.raises(ValueError, match="sum to 1"):
        ds.fit(ds.DeepEnsemble(net, 2), loader, epochs=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounded_probabilities_of_many_classes_are_taken(dtype):
    wide = torch.randn(100, 1000, generator=torch.Generator().manual_seed(3)).mul(3).softmax(-1).to(dtype)
    ens = ds.DeepEnsemble(lambda: torch.nn.Linear(4, 1000), 2)
    run = ds.fit(ens, (x, wide), epochs=1)
    assert torch.tensor(run.history["loss"]).isfinite().all()


@pytest.mark.parametrize("augment", [Mixup(3), CutMix(3)], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("targets", [y, SOFT], ids=["indices", "probabilities"])
def test_mixed_and_smoothed_labels_go_on_working(augment, targets):
    images = x.reshape(100, 1, 2, 2)
    ens = ds.DeepEnsemble(lambda: torch.nn.Sequential(torch.nn.Flatten(), net()), 2)
    objective = obj.Independent(label_smoothing=0.1)
    run = ds.fit(ens, (images, targets), objective=objective, augment=augment, epochs=1)
    assert torch.tensor(run.history["loss"]).isfinite().all()
