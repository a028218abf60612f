"""From the shell: train, score, evaluate and report a run, and one sentence where that cannot be."""

import csv
import json

import numpy as np
import pandas as pd
import pytest
import torch
from recipe_cases import save_blobs, save_line
from typer.testing import CliRunner

import dissensus as ds
from dissensus import cli
from dissensus.commands.sets import corruption_names
from dissensus.recipes import Recipe, load_run
from dissensus.scores import SCORES

RECIPE = """
[data]
path = "images.npz"
test = 0.4

[model]
name = "mlp"
hidden = [16]

[ensemble]
members = 3

[training]
epochs = 4
lr = 5e-3
device = "cpu"
"""


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def run(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def bright_and_dark(count, size=16, seed=0):
    """Images of two classes: dark with noise, and bright with noise."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 2
    x = (60 + 120 * y)[:, None, None] + rng.integers(-40, 40, (count, size, size))
    return x.astype(np.uint8), np.array(["dark", "bright"])[y]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with data, a recipe, and a run of it."""
    folder = tmp_path_factory.mktemp("home")
    x, y = bright_and_dark(120)
    np.savez(folder / "images.npz", x=x, y=y)
    rng = np.random.default_rng(1)
    np.savez(folder / "svhn.npz", x=rng.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8))
    np.save(folder / "noise.npy", rng.integers(0, 256, (30, 16, 16), dtype=np.uint8))
    (folder / "recipe.toml").write_text(RECIPE)
    result = run("train", folder / "recipe.toml", "--output", folder / "run")
    assert "Trained 3 members for 4 epochs" in result.output
    assert f"Next: dissensus evaluate {folder / 'run'}" in result.output
    return folder


class TestTrain:
    def test_the_run_is_that_of_the_recipe(self, home):
        again = Recipe.read(home / "recipe.toml").train(home / "again")
        x = torch.rand(4, 1, 16, 16)
        assert torch.equal(ds.predict(load_run(home / "run").ensemble, x), ds.predict(again.members, x))

    def test_settings_can_be_changed_and_a_run_finished_again(self, home):
        run(
            "train",
            home / "recipe.toml",
            "-o",
            home / "other",
            "--set",
            "training.epochs=1",
            "--set",
            "ensemble.members=2",
        )
        assert load_run(home / "other").ensemble.num_members == 2
        assert "for 1 epochs" in run("train", home / "other", "--resume").output

    def test_runs_go_into_a_folder_named_like_the_recipe(self, home, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        run("train", home / "recipe.toml", "--set", "training.epochs=1")
        assert (tmp_path / "runs" / "recipe" / "ensemble.json").exists()

    def test_an_interrupted_run_says_how_to_go_on(self, home, monkeypatch, tmp_path):
        def interrupted(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr(Recipe, "train", interrupted)
        result = invoke("train", home / "recipe.toml", "-o", tmp_path / "run")
        assert result.exit_code == 130
        assert f"dissensus train {tmp_path / 'run'} --resume" in result.stderr

    def test_divergence_is_a_sentence(self, home, tmp_path):
        changes = ["training.optimizer=sgd", "training.lr=1e38"]
        result = invoke(
            "train", home / "recipe.toml", "-o", tmp_path / "run", *(a for c in changes for a in ("--set", c))
        )
        assert result.exit_code == 2
        assert "no longer finite" in result.stderr

    def test_a_start_that_fails_leaves_no_folder_and_can_be_repeated(self, home, tmp_path):
        arguments = ("train", home / "recipe.toml", "-o", tmp_path / "runs" / "run")
        result = invoke(*arguments, "--set", "training.batch_size=0")
        assert "`batch_size` must be at least 1" in result.stderr
        assert list(tmp_path.iterdir()) == []
        run(*arguments, "--set", "training.epochs=1")


class TestScore:
    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_every_input_gets_a_row_with_every_score(self, home, tmp_path, ending):
        out = tmp_path / "deep" / f"out.{ending}"
        run("score", home / "run", home / "images.npz", "-o", out, "--batch-size", 50)
        table = pd.read_csv(out) if ending == "csv" else pd.read_parquet(out)
        assert list(table.columns) == ["row", "label", "prediction", "confidence", *SCORES]
        assert table["row"].tolist() == list(range(120))
        # The scores of the library on the same predictions are the reference; batches change nothing.
        ensemble, _, prepare = load_run(home / "run")
        loaded = prepare.read(home / "images.npz")
        logits = ds.predict(ensemble, prepare(loaded.x))
        for name, score in SCORES.items():
            np.testing.assert_allclose(table[name], score(logits), rtol=1e-4, atol=1e-6)
        probs = logits.softmax(-1).mean(0)
        np.testing.assert_allclose(table["confidence"], probs.amax(-1), rtol=1e-5)
        assert [("bright", "dark")[i] for i in probs.argmax(-1)] == table["prediction"].tolist()
        assert (table["prediction"] == table["label"]).mean() > 0.9

    def test_inputs_without_labels_of_another_size_are_scored_and_the_change_is_said(self, home, tmp_path):
        result = run("score", home / "run", home / "svhn.npz", "-o", tmp_path / "out.csv")
        assert "colour made grey" in result.stderr
        assert "resized from 32 x 32 to 16 x 16" in result.stderr
        with open(tmp_path / "out.csv") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 20
        assert "label" not in rows[0]

    def test_regression_gives_means_and_variances_in_the_units_of_the_data(self, tmp_path):
        save_line(tmp_path)
        text = RECIPE.replace("images.npz", "line.csv").replace("test = 0.4", 'target = "y"')
        (tmp_path / "line.toml").write_text(text + '[objective]\nloss = "gaussian_nll"\n')
        run("train", tmp_path / "line.toml", "-o", tmp_path / "run", "--set", "training.epochs=80")
        run("score", tmp_path / "run", tmp_path / "line.csv", "-o", tmp_path / "out.csv")
        table = pd.read_csv(tmp_path / "out.csv")
        variances = ["total_variance", "data_variance", "knowledge_variance"]
        assert list(table.columns) == ["row", "label", "prediction", "std", *variances]
        assert np.corrcoef(table["prediction"], table["label"])[0, 1] > 0.9
        np.testing.assert_allclose(
            table["total_variance"], table["data_variance"] + table["knowledge_variance"], rtol=1e-5
        )
        np.testing.assert_allclose(table["std"] ** 2, table["total_variance"], rtol=1e-5)
        assert table["prediction"].between(700, 1300).all()


class TestEvaluate:
    def test_known_unknown_and_corrupted_inputs_are_measured_in_one_pass(self, home, tmp_path):
        result = run(
            *("evaluate", home / "run", "--ood", f"noise={home / 'noise.npy'}"),
            *(
                "--suite",
                f"openood-cifar10={home}",
                "--corruptions",
                "gaussian_noise,fog",
                "--severities",
                "1,5",
            ),
            *("--bootstrap", 20, "--output", tmp_path),
        )
        assert "missing: cifar100, tiny_imagenet, mnist, textures, places" in result.stderr
        found = ds.evaluation.Evaluation.load(tmp_path / "evaluation.json")
        assert {part.name: part.size for part in found.sets} == {"id": 48, "noise": 30, "svhn": 20}
        assert found.groups == {"far": ("svhn",)}
        assert found.class_names == ("bright", "dark")
        assert {n.severity for n in found.numbers if n.set == "fog"} >= {1, 5}
        # The recipe's own test rows, predicted by hand.
        ensemble, recipe, prepare = load_run(home / "run")
        test = recipe.load_sets().test
        predicted = ds.predict(ensemble, prepare(test.x)).softmax(-1).mean(0).argmax(-1)
        accuracy = (predicted == prepare.targets(test)).float().mean().item()
        assert found.number("accuracy").value == pytest.approx(accuracy)

    def test_unknown_sets_are_averaged_in_groups(self, home, tmp_path):
        run(
            *("evaluate", home / "run", "--ood", f"noise={home / 'noise.npy'}", "--ood"),
            *(f"numbers={home / 'svhn.npz'}", "--group", "near=noise,numbers", "--group", "far=numbers"),
            *("--bootstrap", 0, "-o", tmp_path),
        )
        found = ds.evaluation.Evaluation.load(tmp_path / "evaluation.json")
        assert found.groups == {"near": ("noise", "numbers"), "far": ("numbers",)}
        single = [found.number("auroc", name, score="bma").value for name in ("noise", "numbers")]
        assert found.number("auroc", "near", score="bma").value == pytest.approx(sum(single) / 2)

    def test_corrupted_images_are_read_from_published_files(self, home, tmp_path):
        test = load_run(home / "run").recipe.load_sets().test.x
        black = torch.zeros(5 * len(test), 16, 16, 1, dtype=torch.uint8)
        np.save(tmp_path / "fog.npy", black.numpy())
        options = ("evaluate", home / "run", "--corruptions", "fog", "--severities", "2", "--bootstrap", 0)
        run(*options, "--corruption-folder", tmp_path, "-o", tmp_path)
        found = ds.evaluation.Evaluation.load(tmp_path / "evaluation.json")
        # All copies are black: the ensemble says the same of each.
        ensemble, _, prepare = load_run(home / "run")
        probs = ds.predict(ensemble, prepare(torch.zeros(1, 1, 16, 16, dtype=torch.uint8))).softmax(-1)
        confidence = probs.mean(0).max().item()
        assert found.number("confidence", "fog", severity=2).value == pytest.approx(confidence, rel=1e-5)

    def test_other_data_can_be_the_known_data(self, home, tmp_path):
        x, y = bright_and_dark(30, seed=5)
        np.savez(tmp_path / "new.npz", x_test=x, y_test=y)
        run(
            "evaluate",
            home / "run",
            "--data",
            f"{tmp_path / 'new.npz'}#test",
            "-o",
            tmp_path,
            "--bootstrap",
            0,
        )
        assert json.loads((tmp_path / "evaluation.json").read_text())["sets"][0]["size"] == 30

    def test_classes_that_were_left_out_are_unknown_inputs(self, tmp_path):
        save_blobs(tmp_path)
        text = RECIPE.replace("images.npz", "blobs.npz").replace("test = 0.4", "test = 0.4\nleave_out = [1]")
        (tmp_path / "blobs.toml").write_text(text)
        run("train", tmp_path / "blobs.toml", "-o", tmp_path / "run")
        run("evaluate", tmp_path / "run", "--bootstrap", 0)
        found = ds.evaluation.Evaluation.load(tmp_path / "run" / "evaluation.json")
        assert {part.name: part.size for part in found.sets} == {"id": 24, "left_out": 30}

    def test_regression_is_measured_in_the_units_of_the_data(self, tmp_path):
        save_line(tmp_path)
        text = RECIPE.replace("images.npz", "line.csv").replace("test = 0.4", 'test = 0.4\ntarget = "y"')
        (tmp_path / "line.toml").write_text(text + '[objective]\nloss = "mse"\n')
        run("train", tmp_path / "line.toml", "-o", tmp_path / "run")
        run("evaluate", tmp_path / "run", "--bootstrap", 0)
        ensemble, recipe, prepare = load_run(tmp_path / "run")
        test = recipe.load_sets().test
        errors = ds.predict(ensemble, prepare(test.x)).mean(0)[:, 0] - test.y
        found = ds.evaluation.Evaluation.load(tmp_path / "run" / "evaluation.json")
        assert found.number("rmse").value == pytest.approx(errors.square().mean().sqrt().item(), rel=1e-5)


class TestReport:
    def test_runs_are_put_on_one_page(self, home, tmp_path):
        for name in ("one", "two"):
            run("evaluate", home / "run", "-o", tmp_path / name, "--bootstrap", 10)
        page = tmp_path / "page.html"
        run("report", tmp_path / "one", tmp_path / "two", "-o", page)
        assert page.read_text().lstrip().lower().startswith("<!doctype html")

    def test_a_run_must_be_evaluated_first(self, home, tmp_path):
        (tmp_path / "recipe.toml").write_text(RECIPE)
        result = invoke("report", tmp_path, "-o", home / "page.html")
        assert result.exit_code == 2
        assert "First run: dissensus evaluate" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "nothing.toml"), "There is no recipe nothing.toml"),
        (("train", "{home}/recipe.toml", "-o", "{home}/run"), "already holds a run"),
        (("train", "{home}/recipe.toml", "--set", "training.epoch=1"), "did you mean 'epochs'?"),
        (("score", "{home}", "{home}/images.npz", "-o", "x.csv"), "has not finished"),
        (("score", "{home}/run", "{home}/nothing.npz", "-o", "x.csv"), "There is no file or folder"),
        (("score", "{home}/run", "{home}/images.npz", "-o", "x.json"), ".csv or .parquet; got 'x.json'"),
        (("score", "{home}/run", "{home}/images.npz", "-o", "x.csv", "--device", "cuda:99"), "cuda:99"),
        (("evaluate", "{home}/nowhere"), "There is no run in"),
        (("evaluate", "{home}/run", "--ood", "svhn"), "NAME=DATA"),
        (("evaluate", "{home}/run", "--suite", "openod=x"), "openood-cifar10"),
        (("evaluate", "{home}/run", "--suite", "openood-cifar10"), "SUITE=DIR"),
        (
            ("evaluate", "{home}/run", "--ood", "a={home}/noise.npy", "--ood", "a={home}/svhn.npz"),
            "'a' is given twice",
        ),
        (("evaluate", "{home}/run", "--group", "near"), "NAME=SET,SET"),
        (("evaluate", "{home}/run", "--group", "near=svhn"), "Group 'near' must list OOD sets"),
        (("evaluate", "{home}/run", "--frost-folder", "{home}"), "none is named"),
        (("report", "{home}/nowhere"), "is neither a run's folder nor an evaluation"),
        (("evaluate", "{home}/run", "--corruptions", "fogg"), "There is no corruption 'fogg'"),
        (("evaluate", "{home}/run", "--severities", "a"), "1,3,5; got 'a'"),
        (("evaluate", "{home}/run", "--severities", "7", "--corruptions", "fog"), "severities"),
    ],
)
def test_what_cannot_be_done_ends_in_one_sentence_and_code_2(home, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = invoke(*(argument.format(home=home) for argument in arguments))
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_nothing_held_out_is_said(home, tmp_path):
    run(
        "train",
        home / "recipe.toml",
        "-o",
        tmp_path / "run",
        "--set",
        "data.test=0.0",
        "--set",
        "training.epochs=1",
    )
    result = invoke("evaluate", tmp_path / "run")
    assert result.exit_code == 2
    assert "Name test data with --data" in result.stderr


@pytest.mark.parametrize(
    ("given", "count"),
    [("standard", 15), ("standard,extra", 19), ("cbar", 10), ("all", 29), ("fog,standard", 15)],
)
def test_corruptions_go_by_family_or_name(given, count):
    assert len(corruption_names(given)) == count
