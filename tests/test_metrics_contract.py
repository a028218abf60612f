"""What every metric of the tables promises; a new metric is covered by being listed."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from dissensus import metrics

TABLES = {
    "classification": metrics.CLASSIFICATION_METRICS,
    "ood": metrics.OOD_METRICS,
    "regression": metrics.REGRESSION_METRICS,
    "density": metrics.DENSITY_METRICS,
}
ENTRIES = [(kind, name) for kind, table in TABLES.items() for name in table]
PAIRED = [(kind, name) for kind, name in ENTRIES if kind != "ood"]
every_metric = pytest.mark.parametrize(("kind", "name"), ENTRIES, ids=[name for _, name in ENTRIES])
every_paired_metric = pytest.mark.parametrize(("kind", "name"), PAIRED, ids=[name for _, name in PAIRED])


def inputs(kind, batch=80):
    rng = np.random.default_rng(0)
    if kind == "classification":
        # Rounded to 1/256, so that half precision holds the same values.
        probs = rng.multinomial(252, rng.dirichlet(np.ones(4), size=batch)) + 1
        return probs / 256, rng.integers(4, size=batch)
    if kind == "ood":
        return rng.integers(-40, 60, size=batch) / 16, rng.integers(-60, 40, size=batch + 9) / 16
    mean, target = rng.integers(-64, 64, size=(2, batch)) / 16
    return (mean, target) if kind == "regression" else (mean, rng.integers(8, 32, size=batch) / 16, target)


def evaluate(kind, name, arguments):
    return TABLES[kind][name](*arguments)


def as_tensors(arguments, dtype=None):
    tensors = (torch.from_numpy(np.array(a)) for a in arguments)
    return [t.to(dtype) if dtype and t.is_floating_point() else t for t in tensors]


@every_metric
def test_the_result_is_a_float_that_json_can_hold(kind, name):
    value = evaluate(kind, name, inputs(kind))
    assert type(value) is float
    assert json.loads(json.dumps(value)) == value


@every_metric
def test_tensors_and_arrays_of_any_layout_agree(kind, name):
    arrays = inputs(kind)
    expected = evaluate(kind, name, arrays)
    assert evaluate(kind, name, as_tensors(arrays)) == expected
    frozen = [a.copy() for a in arrays]
    for array in frozen:
        array.flags.writeable = False
    assert evaluate(kind, name, frozen) == expected
    assert evaluate(kind, name, [a[::-1].copy()[::-1] for a in arrays]) == expected
    assert (
        evaluate(
            kind, name, [np.asfortranarray(a.astype(a.dtype.newbyteorder()), a.dtype.newbyteorder()) for a in arrays]
        )
        == expected
    )


@every_metric
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_precision_of_the_inputs_does_not_matter(kind, name, dtype):
    arrays = inputs(kind)
    value = evaluate(kind, name, as_tensors(arrays, dtype))
    assert value == pytest.approx(evaluate(kind, name, arrays), rel=1e-6, abs=1e-7)


@every_metric
def test_the_order_of_inputs_does_not_matter(kind, name):
    arrays = inputs(kind)
    rng = np.random.default_rng(1)
    orders = [rng.permutation(len(a)) for a in arrays] if kind == "ood" else [rng.permutation(80)] * 3
    shuffled = [a[order] for a, order in zip(arrays, orders, strict=False)]
    assert evaluate(kind, name, shuffled) == pytest.approx(evaluate(kind, name, arrays), rel=1e-12, abs=1e-12)


@every_metric
def test_inputs_are_left_as_they_were(kind, name):
    tensors = as_tensors(inputs(kind))
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
    before = [t.detach().clone() for t in tensors]
    evaluate(kind, name, tensors)
    for old, new in zip(before, tensors, strict=True):
        torch.testing.assert_close(new.detach(), old, rtol=0, atol=0)


@every_metric
def test_one_input_is_enough(kind, name):
    value = evaluate(kind, name, [a[:1] for a in inputs(kind)])
    assert np.isfinite(value)


@every_metric
def test_empty_sets_are_refused(kind, name):
    for position in range(len(inputs(kind))):
        arguments = list(inputs(kind))
        arguments[position] = arguments[position][:0]
        with pytest.raises(ValueError, match=r"empty"):
            evaluate(kind, name, arguments)


@every_metric
def test_nan_is_refused_and_located(kind, name):
    arguments = [a.copy() for a in inputs(kind)]
    arguments[0][17] = np.nan
    with pytest.raises(ValueError, match=r"NaN.* \[17"):
        evaluate(kind, name, arguments)


@every_paired_metric
def test_mismatched_sizes_are_refused(kind, name):
    arguments = list(inputs(kind))
    arguments[-1] = arguments[-1][:-1]
    with pytest.raises(ValueError, match="79"):
        evaluate(kind, name, arguments)


@pytest.mark.parametrize("name", metrics.CLASSIFICATION_METRICS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda probs, labels: (10 * probs, labels), "softmax"),
        (lambda probs, labels: (-probs, labels), "sum to 1"),
        (lambda probs, labels: (probs + np.array([-1, 1, 0, 0]), labels), "sum to 1"),
        (lambda probs, labels: (probs[:, :1], labels), "two classes"),
        (lambda probs, labels: (probs[None], labels), "batch, classes"),
        (lambda probs, labels: (probs, labels + 1), r"\[0, 4\)"),
        (lambda probs, labels: (probs, labels - 1), r"\[0, 4\)"),
        (lambda probs, labels: (probs, labels.astype(float)), "integers"),
        (lambda probs, labels: (probs, probs), "integers"),
        (lambda probs, labels: (probs + 0j, labels), "real numbers"),
    ],
)
def test_predictions_and_labels_that_make_no_sense_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        metrics.CLASSIFICATION_METRICS[name](*change(*inputs("classification")))


@pytest.mark.parametrize(
    ("call", "choice"),
    [
        (lambda ones: metrics.ece(inputs("classification")[0], ones[:80].long(), binning="size"), "mass"),
        (lambda ones: metrics.aupr(ones, ones, positive="in"), "ood"),
        (lambda ones: metrics.fpr_at_tpr(ones, ones, positive="in"), "ood"),
        (lambda ones: metrics.pair_diversity(ones.long(), ones.long(), ones.long(), accuracy_of="c"), "pair"),
        (lambda ones: metrics.central_interval(ones, ones, family="normal"), "gaussian"),
        (lambda ones: metrics.fit_temperature(ones.view(1, 50, 2), ones[:50].long(), of="all"), "pool"),
    ],
)
def test_unknown_words_are_refused_with_the_known_ones(call, choice):
    # A TypeError where annotations are checked, as in the shape-checking run, which then comes first.
    with pytest.raises((ValueError, TypeError), match=choice):
        call(torch.ones(100))


@every_metric
@pytest.mark.gpu
def test_devices_may_differ_and_agree(kind, name):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    tensors = as_tensors(inputs(kind))
    expected = pytest.approx(evaluate(kind, name, tensors), rel=1e-12, abs=1e-12)
    assert evaluate(kind, name, [t.cuda() for t in tensors]) == expected
    assert evaluate(kind, name, [tensors[0].cuda(), *tensors[1:]]) == expected
    assert evaluate(kind, name, [tensors[0], *(t.cuda() for t in tensors[1:])]) == expected


def test_the_direction_of_every_metric_is_known():
    names = {name for _, name in ENTRIES}
    assert names >= metrics.HIGHER_IS_BETTER
    good = {
        "classification": (np.eye(4)[[0, 1, 2, 3]] * 0.96 + 0.01, np.arange(4)),
        "ood": (np.arange(4) + 4.0, np.arange(4.0)),
        "regression": (np.zeros(4), np.zeros(4)),
        "density": (np.zeros(4), np.full(4, 0.1), np.zeros(4)),
    }
    bad = {
        "classification": (np.eye(4)[[1, 2, 3, 0]] * 0.96 + 0.01, np.arange(4)),
        "ood": (np.arange(4.0), np.arange(4) + 4.0),
        "regression": (np.zeros(4), np.ones(4)),
        "density": (np.zeros(4), np.full(4, 0.1), np.ones(4)),
    }
    for kind, name in ENTRIES:
        gain = evaluate(kind, name, good[kind]) - evaluate(kind, name, bad[kind])
        assert (gain > 0) == (name in metrics.HIGHER_IS_BETTER), name


def test_every_public_name_exists():
    assert all(hasattr(metrics, name) for name in metrics.__all__)
    assert len(set(metrics.__all__)) == len(metrics.__all__)


def test_metrics_import_neither_scikit_learn_nor_scipy():
    code = "import sys, dissensus.metrics; print(sorted({'sklearn', 'scipy', 'matplotlib'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.fixture
def one_thread():
    """Threads that wait for each other on a busy machine would be timed too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fastest(function, *arguments, repeats=5):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.usefixtures("one_thread")
def test_auroc_is_no_slower_than_scikit_learn():
    rng = np.random.default_rng(0)
    ood, known = rng.normal(1, 1, 500_000), rng.normal(size=500_000)
    labels, scores = np.repeat([1, 0], 500_000), np.concatenate([ood, known])
    assert fastest(metrics.auroc, ood, known) <= fastest(roc_auc_score, labels, scores, repeats=2)


@pytest.mark.usefixtures("one_thread")
def test_smooth_ece_is_five_times_faster_than_relplot():
    relplot = pytest.importorskip("relplot", reason="relplot, the reference implementation, is not installed")
    rng = np.random.default_rng(0)
    confidence = rng.uniform(size=1_000_000)
    correct = (rng.uniform(size=1_000_000) < confidence).astype(np.float64)
    ours = fastest(metrics.smooth_ece, confidence, correct)
    assert 5 * ours <= fastest(relplot.smECE, confidence, correct, repeats=2)
