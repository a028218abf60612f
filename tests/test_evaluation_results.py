"""What an evaluation is: frozen numbers and curves, saved and loaded whole, as rows and as tables."""

import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from evaluation_cases import SIZES, WEIGHTS, evaluate_four_sets, four_sets, inputs_of, labelled, trained_classifier
from torch import nn

import dissensus as ds
from dissensus import metrics
from dissensus.evaluation import Evaluation, evaluate
from dissensus.evaluation.results import from_json, to_json
from dissensus.scores import SCORES


@pytest.fixture(scope="module")
def ensemble():
    return trained_classifier()


@pytest.fixture(scope="module")
def data():
    return four_sets()


def test_saving_and_loading_keeps_everything(ensemble, data, tmp_path):
    result = evaluate_four_sets(
        ensemble, data, bootstrap=25, weights=WEIGHTS, class_names=("a", "b", "c"), name="four nets"
    )
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
    result = evaluate_four_sets(ensemble, data, bootstrap=50)
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
    result = evaluate_four_sets(ensemble, data)
    with pytest.raises(ValueError, match=r"no 'auroc' of set 'id'.*that set has accuracy"):
        result.number("auroc")
    with pytest.raises(ValueError, match="sets are id, later"):
        result.number("auroc", "elsewhere", score="bma")


def test_numbers_of_numpy_are_whole_numbers(tmp_path):
    ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3), 2)
    found = ds.evaluate(ens, (torch.randn(60, 4), torch.arange(60) % 3), bootstrap=np.int64(50), seed=np.int64(0))
    found.save(tmp_path / "evaluation.json")
    assert (found.bootstrap, found.seed) == (50, 0)


def test_curves_and_histograms_are_those_of_the_scores(ensemble, data):
    result = evaluate_four_sets(ensemble, data)
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
