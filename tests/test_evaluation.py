"""Evaluations: every number equals the metric called on predictions, however the data comes in."""

import gc
import json
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from evaluation_cases import (
    CLASSES,
    classifier,
    labelled,
    make_member,
    regression_data,
    regressor,
    trained_classifier,
    unlabelled,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus import metrics
from dissensus.evaluation import Evaluation, evaluate
from dissensus.evaluation.storage import from_json, to_json
from dissensus.objectives import mean_and_scale
from dissensus.scores import KNOWLEDGE_SCORES, REGRESSION_SCORES, SCORES, all_scores

SIZES = {"id": 300, "later": 120, "far": 200, "near": 150}
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4])


@pytest.fixture(scope="module")
def ensemble():
    return trained_classifier()


@pytest.fixture(scope="module")
def data():
    return {
        "id": labelled(SIZES["id"]),
        "later": labelled(SIZES["later"], seed=1, shift=0.7),
        "far": unlabelled(SIZES["far"]),
        "near": labelled(SIZES["near"], seed=2, shift=2.0)[0],
    }


def run(ensemble, data, **options):
    options = {"bootstrap": 0, "groups": {"all": ["far", "near"]}, **options}
    return evaluate(
        ensemble,
        data["id"],
        ood={"far": data["far"], "near": data["near"]},
        shifted={"later": data["later"]},
        **options,
    )


def inputs_of(part):
    return part[0] if isinstance(part, tuple) else part


def expected_value(number, logits, labels, weights):
    """The number by calling metrics on whole-set predictions."""
    if number.kind == "group":
        parts = [replace(number, set=name, kind="ood") for name in ("far", "near")]
        return np.mean([expected_value(part, logits, labels, weights) for part in parts])
    own = logits[number.set]
    probs = own.softmax(-1)
    pooled = probs.mean(0) if weights is None else (weights[:, None, None] * probs).sum(0)
    if number.metric in metrics.OOD_METRICS:
        score, known = (
            all_scores(part, [number.score], weights=weights)[number.score] for part in (own, logits["id"])
        )
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
    result = run(ensemble, data, weights=weights, batch_size=70)
    logits = {name: ds.predict(ensemble, inputs_of(part)) for name, part in data.items()}
    labels = {name: data[name][1] for name in ("id", "later")}
    assert {number.metric for number in result.numbers} >= {
        *metrics.OOD_METRICS,
        "accuracy",
        "nll",
        "brier",
        "ece",
    }
    for number in result.numbers:
        expected = float(expected_value(number, logits, labels, weights))
        assert number.value == pytest.approx(expected, rel=1e-5, abs=1e-6), number


def test_every_set_has_every_number_that_it_can_have(ensemble, data):
    result = run(ensemble, data)
    of_sets = {
        name: {(n.metric, n.score) for n in result.numbers if n.set == name} for name in (*SIZES, "all")
    }
    detection = {(metric, score) for metric in metrics.OOD_METRICS for score in SCORES}
    predictions = {
        (metric, None)
        for metric in (
            "accuracy",
            "nll",
            "brier",
            "ece",
            "smooth_ece",
            "member_accuracy",
            "confidence",
            "disagreement",
        )
    }
    per_score = {(metric, score) for metric in ("mean", "risk_coverage_area") for score in SCORES}
    unlabelled_numbers = {
        ("confidence", None),
        ("disagreement", None),
        *(("mean", score) for score in SCORES),
    }
    assert of_sets["id"] == predictions | per_score
    assert of_sets["later"] == predictions | per_score | detection
    assert of_sets["far"] == of_sets["near"] == of_sets["all"] == unlabelled_numbers | detection
    keys = [number.key for number in result.numbers]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("batch_size", [1, 37, 10_000])
def test_the_size_of_batches_changes_nothing(ensemble, data, batch_size):
    one, other = (run(ensemble, data, batch_size=size, bootstrap=20) for size in (64, batch_size))
    assert [n.key for n in one.numbers] == [n.key for n in other.numbers]
    np.testing.assert_allclose(
        [n.value for n in one.numbers], [n.value for n in other.numbers], rtol=1e-5, atol=1e-6
    )
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
    results = [
        evaluate(ensemble, known, {"far": unknown}, bootstrap=0, batch_size=30) for known, unknown in forms
    ]
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
    run(counting, data, bootstrap=10)
    assert Counting.rows == sum(SIZES.values())


def test_memory_grows_with_the_inputs_and_not_with_their_outputs():
    members = ds.DeepEnsemble(lambda: nn.Linear(4, 300), num_members=5, seed=0)
    x, y = torch.randn(6000, 4), torch.arange(6000) % 300
    held = []

    def watched(batch):
        # Every input has 6 kB of outputs; what is still there of the batches before is counted now.
        tensors = {t.data_ptr(): t for t in gc.get_objects() if type(t) is torch.Tensor}
        held.append(sum(t.untyped_storage().nbytes() for t in tensors.values()))
        return batch

    evaluate(members, (x, y), transform=watched, batch_size=100, bootstrap=0)
    assert len(held) == 60
    assert held[-1] - held[19] < 4000 * 500


def test_the_ensemble_is_left_as_it_was(ensemble, data):
    ensemble.train()
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    run(ensemble, data, bootstrap=10)
    assert ensemble.training
    for name, tensor in ensemble.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()  # noqa: NPY002


def test_one_member_has_no_scores_of_disagreement():
    result = evaluate(classifier(1), labelled(60), {"far": unlabelled(50)}, bootstrap=20)
    assert not set(result.score_names) & {*KNOWLEDGE_SCORES, "num_unique", "predictive_diversity"}
    assert result.number("accuracy", member=0).value == result.number("accuracy").value
    assert not {number.metric for number in result.numbers} & {"disagreement", "member_accuracy"}
    assert "BMA" in result.table()


def test_disagreement_of_one_member_is_zero_where_it_is_asked_for():
    result = evaluate(classifier(1), labelled(60), {"far": unlabelled(50)}, scores=["variation_ratio"])
    assert result.number("mean", score="variation_ratio").value == 0
    auroc = result.number("auroc", "far", score="variation_ratio")
    assert (auroc.value, auroc.low, auroc.high) == (0.5, 0.5, 0.5)


def test_many_members_leave_out_the_score_of_all_pairs_unless_it_is_asked_for():
    ensemble, known = classifier(50), labelled(30)
    assert set(SCORES) - set(evaluate(ensemble, known, bootstrap=0).score_names) == {"jensen_shannon"}
    asked = evaluate(ensemble, known, scores=["jensen_shannon", "bma"], bootstrap=0)
    assert asked.score_names == ("jensen_shannon", "bma")


class Rounded(torch.nn.Module):
    """A network whose outputs are in half precision, as under autocast."""

    def __init__(self, net, dtype):
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, x):
        return self.net(x).to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_handled(dtype):
    ensemble = ds.DeepEnsemble(lambda: Rounded(make_member(), dtype), num_members=3, seed=0)
    x, y = labelled(60)
    result = evaluate(ensemble, (x, y), {"far": unlabelled(50)}, bootstrap=20)
    logits = ds.predict(ensemble, x)
    assert logits.dtype == dtype
    probs = logits.float().softmax(-1).mean(0)
    assert result.number("nll").value == pytest.approx(metrics.nll(probs, y), rel=1e-5)


def test_saturated_logits_stay_finite_and_countable():
    ensemble = ds.DeepEnsemble(lambda: torch.nn.Linear(2, CLASSES), num_members=2, seed=0)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.mul_(1e4)
    result = evaluate(ensemble, labelled(60), {"far": unlabelled(50)}, bootstrap=50)
    assert np.isfinite([[n.value, n.low, n.high] for n in result.numbers]).all()


def density_values(ensemble, x, y, family):
    mean, scale = mean_and_scale(ds.predict(ensemble, x))
    centre, deviation = ds.mixture(mean, scale, family)
    pooled = deviation / (2**0.5 if family == "laplace" else 1)
    low, high = metrics.central_interval(centre, pooled, 0.9, family)
    likelihood = ds.objectives.LIKELIHOODS[f"{family}_nll"]
    return {
        "rmse": metrics.rmse(centre, y),
        "mae": metrics.mae(centre, y),
        f"{family}_nll": metrics.DENSITY_METRICS[f"{family}_nll"](centre, pooled, y),
        f"{family}_crps": metrics.DENSITY_METRICS[f"{family}_crps"](centre, pooled, y),
        "mixture_nll": likelihood.mixture(ds.predict(ensemble, x), y).mean(),
        "coverage_90": metrics.interval_coverage(low, high, y),
        "width_90": metrics.interval_width(low, high),
        **{("rmse", m): metrics.rmse(mean[m], y) for m in range(len(mean))},
        **{
            ("mean", name): score(mean, scale, family=family).mean()
            for name, score in REGRESSION_SCORES.items()
        },
    }


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_every_number_of_a_density_ensemble_is_the_metric_of_the_predictions(family, outputs):
    ensemble = regressor(2 * outputs)
    x, y = regression_data(90, outputs=outputs)
    far = unlabelled(70)
    result = evaluate(ensemble, (x, y), {"far": far}, loss=f"{family}_nll", bootstrap=0, batch_size=32)
    expected = density_values(ensemble, x, y, family)
    seen = set()
    for number in result.numbers:
        if number.set == "id":
            key = number.score or number.member
            seen.add(number.metric if key is None else (number.metric, key))
            want = float(expected[number.metric if key is None else (number.metric, key)])
            assert number.value == pytest.approx(want, rel=2e-5), number
    assert seen == set(expected)
    mean, scale = mean_and_scale(ds.predict(ensemble, far))
    known = mean_and_scale(ds.predict(ensemble, x))
    for name, score in REGRESSION_SCORES.items():
        pair = [score(*part, family=family).mean(-1) for part in ((mean, scale), known)]
        assert result.number("auroc", "far", score=name).value == pytest.approx(
            metrics.auroc(*pair), abs=1e-3
        )


def test_weights_reach_every_part_of_a_density_ensemble():
    ensemble = regressor()
    x, y = regression_data(90)
    weights = torch.tensor([0.0, 0.0, 1.0])
    result = evaluate(ensemble, (x, y), loss="gaussian_nll", weights=weights, bootstrap=0)
    alone = ds.DeepEnsemble.from_members([ensemble.member(2)])
    single = evaluate(alone, (x, y), loss="gaussian_nll", bootstrap=0)
    for number in single.numbers:
        if number.member is None:
            assert result.number(number.metric, score=number.score).value == pytest.approx(
                number.value, rel=1e-5
            )


def test_point_predictions_have_errors_and_one_variance():
    ensemble = regressor(1)
    x, y = regression_data(90)
    result = evaluate(ensemble, (x, y[:, 0]), {"far": unlabelled(70)}, loss="mse", bootstrap=30)
    outputs = ds.predict(ensemble, x)
    assert result.score_names == ("knowledge_variance",)
    assert result.number("rmse").value == pytest.approx(metrics.rmse(outputs.mean(0), y), rel=1e-5)
    assert result.number("mae").value == pytest.approx(metrics.mae(outputs.mean(0), y), rel=1e-5)
    variance = outputs.var(0, correction=0).mean()
    assert result.number("mean", score="knowledge_variance").value == pytest.approx(float(variance), rel=1e-4)
    assert result.reliability == ()
    assert "RMSE" in result.table()


def test_coverage_of_the_curve_is_that_of_central_intervals():
    ensemble = regressor()
    x, y = regression_data(200)
    (curve,) = evaluate(ensemble, (x, y), loss="gaussian_nll", bootstrap=0).reliability
    centre, deviation = ds.mixture(*mean_and_scale(ds.predict(ensemble, x)))
    for level, inside in zip(curve.claimed, curve.observed, strict=True):
        ends = metrics.central_interval(centre, deviation, level)
        assert inside == pytest.approx(metrics.interval_coverage(*ends, y), abs=1e-6)


def test_curves_and_histograms_are_those_of_the_scores(ensemble, data):
    result = run(ensemble, data)
    logits = {name: ds.predict(ensemble, inputs_of(part)) for name, part in data.items()}
    (curve,) = [part for part in result.reliability if part.set == "later"]
    want = metrics.reliability_curve(logits["later"].softmax(-1).mean(0), data["later"][1])
    np.testing.assert_allclose(curve.claimed, want.confidence, rtol=1e-5)
    np.testing.assert_allclose(curve.observed, want.accuracy, rtol=1e-5)
    assert {(part.set, part.score) for part in result.rocs} == {
        (s, k) for s in ("later", "far", "near") for k in SCORES
    }
    (roc,) = [part for part in result.rocs if (part.set, part.score) == ("far", "bma")]
    area = torch.trapezoid(torch.tensor(roc.tpr), torch.tensor(roc.fpr)).item()
    assert area == pytest.approx(result.number("auroc", "far", score="bma").value, abs=0.01)
    assert {(part.set, part.score) for part in result.histograms} == {(s, k) for s in SIZES for k in SCORES}
    for part in result.histograms:
        assert sum(part.shares) == pytest.approx(1)
        assert len(part.edges) == len(part.shares) + 1


def test_saving_and_loading_keeps_everything(ensemble, data, tmp_path):
    result = run(ensemble, data, bootstrap=25, weights=WEIGHTS, class_names=("a", "b", "c"), name="four nets")
    path = result.save(tmp_path / "deep" / "evaluation.json")
    again = Evaluation.load(path)
    assert again == result
    np.testing.assert_array_equal(again.replicates, result.replicates)
    assert again.replicates.dtype == np.float32
    assert to_json(again) == to_json(result) == path.read_text()
    assert json.loads(path.read_text())["format"] == "dissensus evaluation 1"
    assert again.table() == result.table()
    assert list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "dissensus evaluation 1"}', "\x00"])
def test_a_file_that_holds_no_evaluation_is_refused(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"file\.json holds no evaluation"):
        Evaluation.load(path)


def test_json_of_another_format_is_refused():
    with pytest.raises(KeyError, match="format"):
        from_json('{"format": "dissensus evaluation 999"}')


def test_an_evaluation_cannot_be_changed(ensemble):
    result = evaluate(ensemble, labelled(30), bootstrap=0)
    with pytest.raises(FrozenInstanceError):
        result.name = "other"
    with pytest.raises(FrozenInstanceError):
        result.numbers[0].value = 1.0


def test_rows_frames_and_tables_hold_the_numbers(ensemble, data):
    result = run(ensemble, data, bootstrap=50)
    frame = result.to_pandas()
    assert len(frame) == len(result.rows()) == len(result.numbers)
    row = frame[(frame.metric == "auroc") & (frame.set == "far") & (frame.score == "bma")].iloc[0]
    number = result.number("auroc", "far", score="bma")
    assert (row.value, row.low, row.high) == (number.value, number.low, number.high)
    text = result.table()
    assert f"{number.value:.3f} [{number.low:.3f}, {number.high:.3f}]" in text
    for word in ("later", "far", "near", "all", "mutual information", "smooth ECE", "4 members"):
        assert word in text


def test_a_number_that_is_not_there_is_said_to_be_missing(ensemble, data):
    result = run(ensemble, data)
    with pytest.raises(ValueError, match=r"no 'auroc' of set 'id'.*that set has accuracy"):
        result.number("auroc")
    with pytest.raises(ValueError, match="sets are id, later"):
        result.number("auroc", "elsewhere", score="bma")


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers(data):
    ensemble = trained_classifier()
    on_cpu = run(ensemble, data, bootstrap=20)
    on_gpu = run(ensemble, data, bootstrap=20, device="cuda")
    np.testing.assert_allclose(
        [n.value for n in on_cpu.numbers], [n.value for n in on_gpu.numbers], rtol=1e-3, atol=1e-3
    )
    assert on_cpu.sets == on_gpu.sets


def test_copies_of_one_member_are_not_clearly_better_than_fewer_copies():
    known, far = torch.randn(300, 4) * 2, torch.randn(200, 4) * 0.05
    targets = torch.randint(4, (300,))

    def copies(count):
        ens = ds.DeepEnsemble(lambda: nn.Linear(4, 4, bias=False), count)
        with torch.no_grad():
            for weight in ens.parameters():
                weight.copy_(torch.eye(4).expand_as(weight))
        return ds.evaluate(ens, (known, targets), ood={"far": far}, bootstrap=100)

    one = ds.compare(copies(2), copies(3)).difference("brier")
    assert one.low <= 0 <= one.high


def test_intervals_hold_their_value_and_stay_in_range():
    known, targets = torch.randn(60, 4) * 3, torch.arange(60) % 4
    ens = ds.DeepEnsemble(lambda: nn.Linear(4, 4), 3)
    found = ds.evaluate(ens, (known, targets), ood={"far": 20 + torch.randn(40, 4)}, bootstrap=200)
    bounded = [number for number in found.numbers if number.low is not None and 0 <= number.value <= 1]
    assert len(bounded) > 20
    assert all(number.low >= 0 for number in bounded)
    assert not any(1 < number.high < 1 + 1e-5 for number in bounded)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bootstrap": 2.5}, "`bootstrap` must be a whole number; got 2.5"),
        ({"bootstrap": None}, "`bootstrap` must be a whole number"),
        ({"bootstrap": -1}, "`bootstrap` must be at least 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"seed": 1.5}, "`seed` must be a whole number"),
        ({"class_names": ["a", "b", "b"]}, "name each class once; got 'b' twice"),
    ],
)
def test_numbers_that_are_no_whole_numbers_are_refused(settings, words):
    ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3), 2)
    with pytest.raises(ValueError, match=words):
        ds.evaluate(ens, (torch.randn(20, 4), torch.arange(20) % 3), **settings)


def test_numbers_of_numpy_are_whole_numbers(tmp_path):
    ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3), 2)
    found = ds.evaluate(
        ens, (torch.randn(60, 4), torch.arange(60) % 3), bootstrap=np.int64(50), seed=np.int64(0)
    )
    found.save(tmp_path / "evaluation.json")
    assert (found.bootstrap, found.seed) == (50, 0)
