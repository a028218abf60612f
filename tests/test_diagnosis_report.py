"""Findings on pages, in evaluations, and on the command line."""

import json

import matplotlib
import numpy as np
import pytest
import torch
from collusion_cases import RULE_CASES, trained
from evaluation_cases import classifier, labelled, trained_classifier, unlabelled
from recipe_cases import save_line
from typer.testing import CliRunner

import dissensus as ds
from dissensus import plots
from dissensus.cli import app
from dissensus.diagnostics import Check, Finding
from dissensus.diagnostics.measuring import read_predictions
from dissensus.evaluation.streaming import OutputSample
from dissensus.reporting.diagnosis import write_diagnosis


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finding():
    case = RULE_CASES["classes by scores"]
    ensemble, _ = trained(case, 1.0)
    rows = [{"epoch": e, "step": e, "train_member_error": 2.0, "train_ensemble_error": 1 / e} for e in range(1, 20)]
    outputs = ds.predict(ensemble, case.test[0])
    return ds.diagnose(outputs, case.test[1], average="scores", history=rows, repeats=5)


def test_pictures_show_the_findings_and_leave_the_settings_of_matplotlib_alone(finding):
    before = dict(matplotlib.rcParams)
    _, axes = plots.panels(2, 2)
    plots.drop_curve(finding.drop_curve("accuracy"), axes[0])
    plots.offset_bars(finding.offsets, axes[1], ensemble_error=0.0)
    plots.error_curves(finding.checks, axes[2])
    plots.diversity_accuracy(finding.pairs, finding.num_classes, axes[3])
    assert dict(matplotlib.rcParams) == before
    curve = finding.drop_curve("accuracy")
    assert axes[0].lines[0].get_ydata().tolist() == pytest.approx([curve.full, *curve.values])
    assert [bar.get_height() for bar in axes[1].patches] == pytest.approx(list(finding.offsets))
    assert axes[2].get_yscale() == "log"
    dots = axes[3].lines[-1]
    assert dots.get_ydata().tolist() == pytest.approx([pair.diversity for pair in finding.pairs])


def test_errors_that_span_no_decade_are_drawn_on_a_plain_scale():
    _, (ax,) = plots.panels()
    plots.error_curves([Check(1, 1, 2.0, 1.0, 2.5, 1.5), Check(2, 2, 2.0, 0.9, 2.5, 1.5)], ax)
    assert ax.get_yscale() == "linear"
    assert len(ax.lines) == 4


def test_the_page_says_the_verdict_and_shows_every_picture(finding, tmp_path):
    page = write_diagnosis(finding, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Members collude" in page
    assert page.count("<svg ") == len(finding.drops) + 3


def test_an_evaluation_holds_a_diagnosis_that_is_saved_and_reported(tmp_path):
    ensemble = trained_classifier()
    data = labelled(300)
    result = ds.evaluate(ensemble, data, ood={"far": unlabelled(50)}, bootstrap=0)
    assert isinstance(result.diagnosis, Finding)
    whole = ds.diagnose(ds.predict(ensemble, data[0]), data[1])
    assert result.diagnosis.ensemble_error == pytest.approx(whole.ensemble_error, rel=1e-5)
    assert result.diagnosis.ensemble_error == pytest.approx(result.number("nll").value, rel=1e-5)
    assert result.diagnosis.colluding == whole.colluding == False  # noqa: E712
    loaded = ds.Evaluation.load(result.save(tmp_path / "evaluation.json"))
    assert loaded.diagnosis == result.diagnosis
    page = ds.report(loaded, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Do members collude?" in page
    assert "Members do not collude" in page


def test_an_evaluation_saved_before_there_were_diagnoses_is_still_read(tmp_path):
    result = ds.evaluate(classifier(), labelled(60), bootstrap=0)
    path = result.save(tmp_path / "evaluation.json")
    text = path.read_text()
    path.write_text(text[: text.index(', "diagnosis"')] + "}")
    loaded = ds.Evaluation.load(path)
    assert loaded.diagnosis is None
    page = ds.report(loaded, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Do members collude?" not in page


@pytest.mark.parametrize("loss", ["mse", "gaussian_nll"])
def test_regression_ensembles_are_diagnosed_by_the_error_of_their_means(loss):
    width = 2 if loss == "gaussian_nll" else 1
    ensemble = ds.DeepEnsemble(lambda: torch.nn.Linear(3, width), 3)
    x, y = torch.randn(80, 3), torch.randn(80)
    result = ds.evaluate(ensemble, (x, y), loss=loss, bootstrap=0)
    assert result.diagnosis.loss == "mse"
    assert result.diagnosis.ensemble_error == pytest.approx(result.number("rmse").value ** 2, rel=1e-5)


def test_a_single_network_is_not_diagnosed():
    assert ds.evaluate(classifier(1), labelled(40), bootstrap=0).diagnosis is None


def test_a_sample_of_many_outputs_does_not_depend_on_the_batches():
    outputs, targets = noise(0, 2, 2000, 3), torch.arange(2000) % 3
    chosen = []
    for size in (7, 2000):
        sample = OutputSample(largest=2 * 3 * 600)
        for start in range(0, 2000, size):
            sample.add(outputs[:, start : start + size], targets[start : start + size], start)
        index, kept, labels = sample._chosen()
        assert torch.equal(kept, outputs[:, index])
        assert torch.equal(labels, targets[index])
        chosen.append(index)
    assert len(chosen[0]) == 600
    assert torch.equal(*chosen)


@pytest.mark.parametrize(
    ("members", "classes", "rows"), [(5, 10, 2500), (5, 100, 500), (20, 500, 200), (30, 1000, 100)]
)
def test_very_many_outputs_are_diagnosed_on_fewer_inputs(members, classes, rows):
    assert OutputSample()._limit(torch.empty(members, 0, classes)) == rows


def test_predictions_are_read_from_arrays_and_tables_alike(tmp_path):
    pd = pytest.importorskip("pandas")
    outputs, labels = noise(1, 3, 20, 4), torch.arange(20) % 4
    np.savez(tmp_path / "p.npz", logits=outputs.numpy(), labels=labels.numpy())
    columns = {f"output_{m}_{c}": outputs[m, :, c].numpy() for m in range(3) for c in range(4)}
    frame = pd.DataFrame({"row": range(20), "label": labels.numpy(), **columns})
    frame.to_csv(tmp_path / "p.csv")
    frame.to_parquet(tmp_path / "p.parquet")
    for name in ("p.npz", "p.csv", "p.parquet"):
        found = read_predictions(tmp_path / name)
        torch.testing.assert_close(found.outputs, outputs)
        assert torch.equal(found.targets, labels)
        assert found.loss == "cross_entropy"
    pd.DataFrame({"output_0": [1.0], "output_1": [2.0], "y": [1.5]}).to_csv(tmp_path / "r.csv")
    found = read_predictions(tmp_path / "r.csv")
    assert (tuple(found.outputs.shape), found.loss) == ((2, 1, 1), "mse")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"targets": np.zeros(3)}, "none of outputs"),
        ({"outputs": np.zeros((2, 3))}, "none of targets"),
        ({"outputs": np.zeros((2, 3)), "targets": np.zeros(4)}, "a target for each"),
        (
            {"outputs": np.zeros((2, 3)), "targets": np.zeros(3), "training_targets": np.zeros(3)},
            "training_targets alone",
        ),
        ({"outputs": np.zeros((2, 3)), "targets": np.array(["a", "b", "c"])}, "must be numbers"),
    ],
)
def test_files_without_what_is_needed_are_refused(arrays, words, tmp_path):
    np.savez(tmp_path / "p.npz", **arrays)
    with pytest.raises(ValueError, match=words):
        read_predictions(tmp_path / "p.npz")


def test_tables_with_gaps_and_files_of_no_kind_are_refused(tmp_path):
    for columns in (
        "output_0_0,output_1_1",
        "output_0,output_2",
        "output_1,output_2",
        "output_0_0,output_0_2",
        "output_0,output_1,member_0",
        "output_0,output_0_0",
    ):
        (tmp_path / "p.csv").write_text(f"{columns},y\n{'1,' * len(columns.split(','))}3\n")
        with pytest.raises(ValueError, match="without gaps"):
            read_predictions(tmp_path / "p.csv")
    (tmp_path / "p.txt").write_text("")
    with pytest.raises(ValueError, match="give its folder"):
        read_predictions(tmp_path / "p.txt")


@pytest.mark.parametrize("kept", [0, 100, 700])
def test_a_damaged_archive_is_named(tmp_path, kept):
    path = tmp_path / "p.npz"
    np.savez(path, outputs=np.zeros((3, 8, 2)), targets=np.arange(8) % 2)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"p\.npz cannot be read as arrays"):
        read_predictions(path)


def test_the_command_line_diagnoses_predictions(tmp_path):
    truth = noise(2, 100).numpy()
    np.savez(tmp_path / "p.npz", outputs=np.stack([truth + 1, truth - 1]), targets=truth)
    result = run_command("diagnose", tmp_path / "p.npz", "-o", tmp_path / "found")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Members collude (2 members on 100 examples).")
    assert Finding.load(tmp_path / "found" / "diagnosis.json").colluding
    assert "Do members collude?" in (tmp_path / "found" / "diagnosis.html").read_text(encoding="utf-8")
    assert run_command("diagnose", tmp_path / "none.npz").exit_code == 2


def test_stored_training_outputs_settle_what_held_out_ones_leave_open(tmp_path):
    case = RULE_CASES["deep classes by probabilities"]
    ensemble, _ = trained(case, 1.0)
    arrays = {"outputs": ds.predict(ensemble, case.test[0]).numpy(), "targets": case.test[1].numpy()}
    np.savez(tmp_path / "held_out.npz", **arrays)
    result = run_command("diagnose", tmp_path / "held_out.npz", "-o", tmp_path)
    assert result.output.startswith("Members may collude"), result.output
    own = {"training_outputs": ds.predict(ensemble, case.train[0]).numpy()}
    np.savez(tmp_path / "both.npz", **arrays, **own, training_targets=case.train[1].numpy())
    result = run_command("diagnose", tmp_path / "both.npz", "-o", tmp_path)
    assert result.output.startswith("Members collude"), result.output
    assert "specialised" in Finding.load(tmp_path / "diagnosis.json").training_signs


JOINT = """
[data]
path = "line.csv"
target = "y"
test = 0.3
[model]
name = "mlp"
hidden = [16]
[ensemble]
members = 6
[objective]
name = "joint"
beta = 1.0
loss = "mse"
[training]
epochs = 60
batch_size = 8
lr = 0.02
device = "cpu"
watch_collusion = true
"""


def test_the_command_line_diagnoses_a_run_with_its_training_data_and_history(tmp_path):
    (save_line(tmp_path) / "joint.toml").write_text(JOINT)
    assert run_command("train", tmp_path / "joint.toml", "-o", tmp_path / "run").exit_code == 0
    result = run_command("diagnose", tmp_path / "run", "--device", "cpu")
    assert result.exit_code == 0, result.output
    finding = Finding.load(tmp_path / "run" / "diagnosis.json")
    assert finding.loss == "mse"
    # In the units of the data, whose standard deviation is about 50.
    assert 1 < finding.ensemble_error < 2500
    assert finding.training is not None
    assert len(finding.checks) == 60
    assert finding.colluding
    assert run_command("diagnose", tmp_path / "run", "--loss", "mse").exit_code == 2


def test_the_report_of_a_run_shows_its_diagnosis_unless_it_is_of_other_members(tmp_path):
    recipe = JOINT.replace("epochs = 60", "epochs = 20")
    (save_line(tmp_path) / "joint.toml").write_text(recipe)
    run, page = tmp_path / "run", tmp_path / "report.html"
    for command in (
        ("train", tmp_path / "joint.toml", "-o", run),
        ("diagnose", run, "--device", "cpu"),
        ("evaluate", run, "--device", "cpu"),
    ):
        result = run_command(*command)
        assert result.exit_code == 0, result.output
    assert run_command("report", run, "-o", page).exit_code == 0
    # Only what `diagnose` found knows of the training data and of the epochs.
    told = ("ratio in training", "Errors over training")
    assert all(words in page.read_text(encoding="utf-8") for words in told)
    found = json.loads((run / "diagnosis.json").read_text())
    (run / "diagnosis.json").write_text(json.dumps({**found, "ensemble": "of others"}))
    assert run_command("report", run, "-o", page).exit_code == 0
    assert not any(words in page.read_text(encoding="utf-8") for words in told)


def test_a_run_is_diagnosed_with_the_weights_it_was_trained_with(tmp_path):
    weights = "beta = 0.5\nweights = [0.3, 0.3, 0.1, 0.1, 0.1, 0.1]"
    recipe = JOINT.replace("beta = 1.0", weights).replace("epochs = 60", "epochs = 2")
    (save_line(tmp_path) / "joint.toml").write_text(recipe)
    assert run_command("train", tmp_path / "joint.toml", "-o", tmp_path / "run").exit_code == 0
    assert run_command("diagnose", tmp_path / "run", "--device", "cpu").exit_code == 0
    found = Finding.load(tmp_path / "run" / "diagnosis.json")
    assert found.weights == (0.3, 0.3, 0.1, 0.1, 0.1, 0.1)
