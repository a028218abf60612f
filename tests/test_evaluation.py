"""Evaluations: every number equals the metric called on predictions, however the data comes in."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluation_cases import (
    SIZES,
    WEIGHTS,
    evaluate_four_sets,
    four_sets,
    inputs_of,
    labelled,
    regression_data,
    regressor,
    trained_classifier,
    unlabelled,
)
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus import metrics
from dissensus.evaluation import evaluate, one_pass
from dissensus.evaluation.inputs import NamedSet
from dissensus.scores import SCORES, all_scores


@pytest.fixture(scope="module")
def ensemble():
    return trained_classifier()


@pytest.fixture(scope="module")
def data():
    return four_sets()


def expected_value(number, logits, labels, weights):
    """The number by calling metrics on whole-set predictions."""
    if number.kind == "group":
        parts = [replace(number, set=name, kind="ood") for name in ("far", "near")]
        return np.mean([expected_value(part, logits, labels, weights) for part in parts])
    own = logits[number.set]
    probs = own.softmax(-1)
    pooled = probs.mean(0) if weights is None else (weights[:, None, None] * probs).sum(0)
    if number.metric in metrics.OOD_METRICS:
        score, known = (all_scores(part, [number.score], weights=weights)[number.score] for part in (own, logits["id"]))
        return metrics.OOD_METRICS[number.metric](score, known)
    if number.score is not None:
        score = all_scores(own, [number.score], weights=weights)[number.score]
        if number.metric == "mean":
            return score.double().mean()
        assert number.metric == "risk_coverage_area"
        return metrics.risk_coverage_area(score, pooled.argmax(-1) == labels[number.set])
    if number.metric == "confidence":
        return pooled.amax(-1).double().mean()
    if number.metric == "disagreement":
        return metrics.mean_disagreement(own.argmax(-1))
    if number.member is not None:
        assert number.metric == "accuracy"
        return metrics.accuracy(probs[number.member], labels[number.set])
    if number.metric == "member_accuracy":
        return np.mean([metrics.accuracy(member, labels[number.set]) for member in probs])
    return metrics.CLASSIFICATION_METRICS[number.metric](pooled, labels[number.set])


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
def test_every_number_is_the_metric_of_the_predictions(ensemble, data, weights):
    result = evaluate_four_sets(ensemble, data, weights=weights, batch_size=70)
    logits = {name: ds.predict(ensemble, inputs_of(part)) for name, part in data.items()}
    labels = {name: data[name][1] for name in ("id", "later")}
    assert {number.metric for number in result.numbers} >= {*metrics.OOD_METRICS, "accuracy", "nll", "brier", "ece"}
    for number in result.numbers:
        expected = float(expected_value(number, logits, labels, weights))
        assert number.value == pytest.approx(expected, rel=1e-5, abs=1e-6), number


def test_every_set_has_every_number_that_it_can_have(ensemble, data):
    result = evaluate_four_sets(ensemble, data)
    of_sets = {name: {(n.metric, n.score) for n in result.numbers if n.set == name} for name in (*SIZES, "all")}
    detection = {(metric, score) for metric in metrics.OOD_METRICS for score in SCORES}
    predictions = {
        (metric, None)
        for metric in ("accuracy", "nll", "brier", "ece", "smooth_ece", "member_accuracy", "confidence", "disagreement")
    }
    per_score = {(metric, score) for metric in ("mean", "risk_coverage_area") for score in SCORES}
    unlabelled_numbers = {("confidence", None), ("disagreement", None), *(("mean", score) for score in SCORES)}
    assert of_sets["id"] == predictions | per_score
    assert of_sets["later"] == predictions | per_score | detection
    assert of_sets["far"] == of_sets["near"] == of_sets["all"] == unlabelled_numbers | detection
    keys = [number.key for number in result.numbers]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("batch_size", [1, 37, 10_000])
def test_the_size_of_batches_changes_nothing(ensemble, data, batch_size):
    one, other = (evaluate_four_sets(ensemble, data, batch_size=size, bootstrap=20) for size in (64, batch_size))
    assert [n.key for n in one.numbers] == [n.key for n in other.numbers]
    # Outputs of single precision differ by some 1e-6 with the shape of a product, on some processors; logarithms of small
    # probabilities and sums over sets make a hundred times that of it. Batches counted wrongly would move numbers by 1e-2.
    np.testing.assert_allclose([n.value for n in one.numbers], [n.value for n in other.numbers], rtol=2e-4, atol=1e-5)
    # Scores of single precision may swap ranks, which moves single replicates by up to 1 / inputs.
    np.testing.assert_allclose(one.replicates, other.replicates, rtol=2e-3, atol=2e-3)
    assert one.sets == other.sets


def test_tensors_datasets_and_loaders_give_one_result(ensemble):
    x, y = labelled(100)
    far = unlabelled(80)
    pairs = TensorDataset(x, y)
    listed = [(row, int(label)) for row, label in zip(x, y, strict=True)]
    forms = [
        ((x, y), far),
        ((x.numpy(), y.numpy()), far.numpy()),
        (pairs, TensorDataset(far, torch.zeros(80))),
        (DataLoader(pairs, batch_size=30), DataLoader(TensorDataset(far), batch_size=33)),
        (DataLoader(listed, batch_size=30), (far, torch.zeros(80))),
    ]
    results = [evaluate(ensemble, known, {"far": unknown}, bootstrap=0, batch_size=30) for known, unknown in forms]
    for other in results[1:]:
        assert [part.fingerprint for part in other.sets] == [part.fingerprint for part in results[0].sets]
        np.testing.assert_allclose(
            [n.value for n in other.numbers], [n.value for n in results[0].numbers], rtol=1e-6, atol=1e-7
        )


def test_each_input_goes_through_the_members_once(ensemble, data):
    class Counting(ds.DeepEnsemble):
        rows = 0

        def forward(self, x):
            type(self).rows += len(x)
            return super().forward(x)

    counting = Counting.from_members([ensemble.member(0), ensemble.member(1)])
    evaluate_four_sets(counting, data, bootstrap=10)
    assert Counting.rows == sum(SIZES.values())


def test_memory_grows_with_the_inputs_and_not_with_their_outputs():
    members = ds.DeepEnsemble(lambda: nn.Linear(4, 300), num_members=5, seed=0)
    x, y = torch.randn(6000, 4), torch.arange(6000) % 300
    held = []

    def watched(batch):
        # Every input has 6 kB of outputs; what is still there of the batches before is counted now.
        # (Other tests may have left sparse tensors, and tensors of vmap, which have no memory of their own.)
        dense = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout == torch.strided]
        plain = [t for t in dense if not t.is_meta and not is_functorch_wrapped_tensor(t)]
        tensors = {t.data_ptr(): t for t in plain}
        held.append(sum(t.untyped_storage().nbytes() for t in tensors.values()))
        return batch

    evaluate(members, (x, y), transform=watched, batch_size=100, bootstrap=0)
    assert len(held) == 60
    assert held[-1] - held[19] < 4000 * 500


def test_the_ensemble_is_left_as_it_was(ensemble, data):
    ensemble.train()
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    evaluate_four_sets(ensemble, data, bootstrap=10)
    assert ensemble.training
    for name, tensor in ensemble.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()  # noqa: NPY002


def test_how_outputs_are_read_is_told_by_a_batch_on_the_ensembles_device(monkeypatch):
    seen = []

    def transform(batch):
        seen.append(batch.device.type)
        return torch.zeros(batch.shape)

    monkeypatch.setattr(one_pass, "device_of", lambda members: torch.device("meta"))
    told = one_pass._told_loss(regressor(1), NamedSet("id", "id", regression_data(20)), transform)
    assert (told, seen) == ("mse", ["meta"])


@pytest.mark.gpu
def test_the_transform_sees_batches_on_the_ensembles_device_only(data):
    ensemble, seen = trained_classifier(), set()

    def transform(batch):
        seen.add(batch.device.type)
        return batch

    evaluate(ensemble, data["id"], transform=transform, bootstrap=0, device="cuda")
    x, y = regression_data(20)
    evaluate(regressor(1), (x, y), transform=transform, bootstrap=0, device="cuda")
    assert seen == {"cuda"}


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers(data):
    ensemble = trained_classifier()
    on_cpu = evaluate_four_sets(ensemble, data, bootstrap=20)
    on_gpu = evaluate_four_sets(ensemble, data, bootstrap=20, device="cuda")
    np.testing.assert_allclose(
        [n.value for n in on_cpu.numbers], [n.value for n in on_gpu.numbers], rtol=1e-3, atol=1e-3
    )
    assert on_cpu.sets == on_gpu.sets
