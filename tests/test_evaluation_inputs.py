"""What cannot be evaluated is refused in one sentence; the same data is recognised however it comes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_cases import CLASSES, classifier, images, labelled, regression_data, regressor, unlabelled
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus.data import fingerprints
from dissensus.data.fingerprints import Fingerprint, row_hashes
from dissensus.evaluation import evaluate


@pytest.fixture(scope="module")
def ensemble():
    return classifier(3)


def refused(match, *arguments, **options):
    with pytest.raises(ValueError, match=match):
        evaluate(*arguments, **{"bootstrap": 0, **options})


def test_sets_without_inputs(ensemble):
    x, y = labelled(20)
    refused("Set 'id' is empty", ensemble, (x[:0], y[:0]))
    refused("Set 'far' is empty", ensemble, (x, y), {"far": x[:0]})
    refused("Set 'far' is empty", ensemble, (x, y), {"far": DataLoader(TensorDataset(x[:0]))})
    refused("Set 'later' is empty", ensemble, (x, y), shifted={"later": (x[:0], y[:0])})


def test_inputs_that_members_cannot_read_are_named_with_their_set(ensemble):
    (x, y), wide = labelled(20), torch.ones(20, 3)
    refused(r"cannot read set 'id', whose inputs are \(batch, 3\) of torch.float32", ensemble, (wide, y))
    refused(r"cannot read set 'far', whose inputs are \(batch, 3\) of torch.float32", ensemble, (x, y), {"far": wide})
    raw, labels = images(10)
    net = ds.DeepEnsemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, CLASSES)), num_members=2)
    refused("'id', whose inputs are .*torch.uint8.*`transform`", net, (raw, labels))


@pytest.mark.parametrize("given", [nn.Linear(2, 3), [nn.Linear(2, 3)]])
def test_networks_outside_an_ensemble(given):
    with pytest.raises((ValueError, TypeError), match="members"):
        evaluate(given, labelled(20))


def test_boolean_labels(ensemble):
    x, y = labelled(20)
    refused("got torch.bool.*`labels.long", ensemble, (x, y > 0))


def test_inputs_and_targets_of_different_length(ensemble):
    x, y = labelled(20)
    refused("'id' must have one target for each input; got 20 inputs and 19 targets", ensemble, (x, y[:19]))
    refused("'later' must have one target", ensemble, (x, y), shifted={"later": (x + 1, y[:19])})


def test_labels_out_of_range_are_named_by_row_and_set(ensemble):
    x, y = labelled(20)
    wrong = y.clone()
    wrong[13] = CLASSES
    refused(r"'id' must lie in 0 to 2; got 3 in row 13.*Renumber", ensemble, (x, wrong), batch_size=8)
    wrong[13] = -1
    refused("'later' must lie in 0 to 2; got -1 in row 13", ensemble, (x, y), shifted={"later": (x + 1, wrong)})


def test_labels_that_are_no_class_indices(ensemble):
    x, y = labelled(20)
    refused("one class index for each input; got torch.float32", ensemble, (x, y.float()))
    refused("one class index for each input", ensemble, (x, y[:, None]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_are_named_by_row_member_and_set(bad):
    class Faulty(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, CLASSES)
            self.fault = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return self.net(x) + torch.where(x[:, :1] > 99, self.fault, 0.0)

    members = [Faulty() for _ in range(3)]
    members[1].fault.data.fill_(bad)
    ensemble = ds.DeepEnsemble.from_members(members)
    x, y = labelled(20)
    far = unlabelled(30)
    far[17, 0] = 100.0
    refused("set 'far' must be finite; row 17 of member 1", ensemble, (x, y), {"far": far}, batch_size=8)
    x[4, 0] = 100.0
    refused("set 'id' must be finite; row 4 of member 1", ensemble, (x, y))


def test_probabilities_in_place_of_logits_are_warned_about_at_the_users_line():
    ensemble = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(2, CLASSES), nn.Softmax(-1)), num_members=2)
    with pytest.warns(UserWarning, match="look like probabilities") as caught:
        evaluate(ensemble, labelled(20), bootstrap=0)
    assert [warning.filename for warning in caught] == [__file__]


def test_outputs_without_classes():
    data = labelled(20)
    refused(r"members, batch, classes", ds.DeepEnsemble(lambda: nn.Flatten(0), num_members=2), data)
    refused("at least two classes", ds.DeepEnsemble(lambda: nn.Linear(2, 1), num_members=2), data)


def test_outputs_that_change_shape(ensemble):
    class Short(nn.Module):
        def forward(self, x):
            return x[:, : CLASSES if len(x) == 20 else 2]

    data = (torch.randn(25, 4), torch.zeros(25, dtype=torch.long))
    members = ds.DeepEnsemble.from_members([Short(), Short()])
    refused(r"must be shaped \(2, 5, 3\).*got \(2, 5, 2\)", members, data, batch_size=20)


def test_a_set_given_twice(ensemble):
    x, y = labelled(20)
    far = unlabelled(20)
    refused("'near' and 'far' hold the same inputs", ensemble, (x, y), {"near": far, "far": far})
    refused("'near' and 'far' hold the same inputs", ensemble, (x, y), {"near": far, "far": far.clone()})
    refused("'id' and 'far' hold the same inputs", ensemble, (x, y), {"far": x})
    refused(
        "'later' and 'far' hold the same inputs", ensemble, (x, y), {"far": far}, shifted={"later": (far.clone(), y)}
    )


def test_sets_that_differ_in_one_value_are_two_sets(ensemble):
    far = unlabelled(20)
    other = far.clone()
    other[7, 1] += 1
    result = evaluate(ensemble, labelled(20), {"far": far, "other": other}, bootstrap=0)
    assert len({part.fingerprint for part in result.sets}) == 3


def test_names_that_clash_or_are_no_names(ensemble):
    data, far = labelled(20), unlabelled(20)
    refused("got id twice", ensemble, data, {"id": far})
    refused("got far twice", ensemble, data, {"far": far}, shifted={"far": labelled(20, seed=3)})
    refused("got far twice", ensemble, data, {"far": far}, groups={"far": ["far"]})
    refused("other than 'corruptions'", ensemble, data, {"corruptions": far})
    refused("needs a name", ensemble, data, {"": far})


def test_sets_without_names(ensemble):
    # Where argument types are checked in tests, that check speaks first, and also names the argument.
    with pytest.raises((ValueError, TypeError), match="ood"):
        evaluate(ensemble, labelled(20), unlabelled(20))


def test_groups_of_unknown_sets(ensemble):
    data, sets = labelled(20), {"far": unlabelled(20)}
    refused("Group 'near' must list OOD sets.*among far; got cifar", ensemble, data, sets, groups={"near": ["cifar"]})
    refused("got none", ensemble, data, sets, groups={"near": []})
    refused("got far, far", ensemble, data, sets, groups={"near": ["far", "far"]})
    refused("among none", ensemble, data, groups={"near": ["far"]})


def test_unknown_scores(ensemble):
    data = labelled(20)
    refused(r"among predictive_diversity, .*; got entropy", ensemble, data, scores=["entropy"])
    refused("got bma, bma", ensemble, data, scores=["bma", "bma"])
    refused("got none", ensemble, data, scores=[])
    refused("among knowledge_variance; got bma", regressor(1), regression_data(20), loss="mse", scores=["bma"])


def test_settings_out_of_range(ensemble):
    data = labelled(20)
    refused("`loss` must be one of", ensemble, data, loss="hinge")
    refused("`bootstrap` must be a whole number of at least 0; got -1", ensemble, data, bootstrap=-1)
    refused("`batch_size` must be a whole number of at least 1; got 0", ensemble, data, batch_size=0)
    refused("`weights` must sum to 1", ensemble, data, weights=torch.ones(3))
    refused(r"`weights` must be shaped \(3,\)", ensemble, data, weights=torch.ones(2) / 2)
    refused("each of the 3 outputs, in their order; got 2 names: a, b", ensemble, data, class_names=["a", "b"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bootstrap": 2.5}, "`bootstrap` must be a whole number; got 2.5"),
        ({"bootstrap": None}, "`bootstrap` must be a whole number"),
        ({"bootstrap": -1}, "`bootstrap` must be a whole number of at least 0"),
        ({"batch_size": 0}, "`batch_size` must be a whole number of at least 1"),
        ({"seed": 1.5}, "`seed` must be a whole number"),
        ({"class_names": ["a", "b", "b"]}, "name each class once; got 'b' twice"),
    ],
)
def test_numbers_that_are_no_whole_numbers_are_refused(settings, words):
    ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3), 2)
    with pytest.raises(ValueError, match=words):
        ds.evaluate(ens, (torch.randn(20, 4), torch.arange(20) % 3), **settings)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_weights_may_be_a_list_an_array_or_a_tensor(ensemble, form):
    known = labelled(40)
    wanted = evaluate(ensemble, known, weights=torch.tensor([0.5, 0.25, 0.25]), bootstrap=0)
    found = evaluate(ensemble, known, weights=form([0.5, 0.25, 0.25]), bootstrap=0)
    assert found.numbers == wanted.numbers
    assert found.weights == (0.5, 0.25, 0.25)


def test_weights_that_are_no_weights(ensemble):
    refused("`weights` must sum to 1; got sum 2", ensemble, labelled(20), weights=[1, 1, 0])
    refused(r"`weights` must be shaped \(3,\)", ensemble, labelled(20), weights=[0.5, 0.5])
    refused("`weights` must be numbers", ensemble, labelled(20), weights=["a", "b", "c"])


@pytest.mark.parametrize("bright", ["id", "far"])
def test_images_of_two_ranges_are_warned_about(bright):
    (x, y), (other, _) = images(20), images(10, seed=3)
    sets = {"id": x, "far": other}
    dim = "far" if bright == "id" else "id"
    sets[dim] = sets[dim].float() / 255
    ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, CLASSES)), 2)
    with pytest.warns(UserWarning, match=r"'id' .* those of 'far' .* one range") as caught:
        evaluate(ens, (sets["id"], y), {"far": sets["far"]}, bootstrap=0, transform=lambda batch: batch.float())
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name]


def test_dark_images_and_tables_of_small_numbers_are_not_warned_about(ensemble):
    (x, y), dark = images(20), images(10, seed=3)[0] // 100
    ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, CLASSES)), 2)
    far = {"dark": dark + 2, "black": torch.zeros_like(dark)}
    evaluate(ens, (x, y), far, bootstrap=0, transform=lambda batch: batch.float())
    evaluate(ensemble, labelled(20), {"far": 500 * unlabelled(20)}, bootstrap=0)


def test_corruptions_that_cannot_be_applied(ensemble):
    data = labelled(20)
    refused("`corruptions` must name each.*got mist", ensemble, data, corruptions=["mist"])
    refused("got none", ensemble, data, corruptions=[])
    refused(r"severity once.*got 0", ensemble, data, corruptions=["fog"], severities=[0])
    refused(r"severity once.*got none", ensemble, data, corruptions=["fog"], severities=[])
    refused("for classifiers of images", regressor(), regression_data(20), loss="gaussian_nll", corruptions=["fog"])
    x, y = images(10)
    flat = ds.DeepEnsemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 3)), num_members=2)
    refused("must be images.*uint8 or from 0 to 1.*`transform`", flat, (x.float(), y), corruptions=["fog"])
    refused("must be images.*`transform`", ensemble, data, corruptions=["fog"])


def test_regression_targets_that_do_not_fit():
    x, y = regression_data(20)
    refused(r"'id' must be shaped \(inputs, 1\)", regressor(2), (x, torch.zeros(20, 3)), loss="gaussian_nll")
    y[11] = float("nan")
    refused("'id' must be finite; row 11 is not", regressor(2), (x, y), loss="gaussian_nll", batch_size=4)
    refused("twice as many outputs", regressor(3), regression_data(20), loss="gaussian_nll")
    one_axis = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), num_members=2)
    refused(r"Add a last axis", one_axis, regression_data(20), loss="mse")


def digest(x, y, *sizes):
    fingerprint = Fingerprint()
    for part, targets in zip(x.split(list(sizes)), y.split(list(sizes)), strict=True):
        fingerprint.add(part, targets)
    return fingerprint.whole(), fingerprint.inputs()


@given(st.integers(1, 11), st.sampled_from([torch.float32, torch.float64, torch.uint8, torch.int64, torch.float16]))
def test_a_fingerprint_depends_on_values_and_their_order_and_not_on_batches(first, dtype):
    x = (100 * torch.rand(12, 3, 5, generator=torch.Generator().manual_seed(first))).to(dtype)
    y = torch.arange(12)
    whole = digest(x, y, 12)
    assert digest(x, y, first, 12 - first) == whole
    assert digest(x.clone(), y.clone(), 12) == whole
    changed = x.clone()
    changed[first, 2, 4] += 1
    assert digest(changed, y, 12)[1] != whole[1]
    assert digest(x.flip(0), y, 12)[1] != whole[1]
    assert digest(x.flip(2), y, 12)[1] != whole[1]
    assert digest(x, y.flip(0), 12) != whole
    assert digest(x, y.flip(0), 12)[1] == whole[1]


def test_wide_rows_are_hashed_in_parts_without_changing_the_hash(monkeypatch):
    x = torch.rand(5, 1000)
    whole = row_hashes(x)
    monkeypatch.setattr(fingerprints, "_HASHED_AT_ONCE", 64)
    assert torch.equal(row_hashes(x), whole)
