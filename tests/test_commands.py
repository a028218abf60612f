"""From the shell: train, score, evaluate and report a run, and one sentence where that cannot be."""

import csv
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from recipe_cases import save_blobs, save_line
from typer.testing import CliRunner

import dissensus as ds
from dissensus import cli
from dissensus.cli.measuring import corruption_names
from dissensus.recipes import Recipe, load_run
from dissensus.recipes.scoring import predicted_columns
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
    assert f"Next: dissensus report {folder / 'run'}" in result.output
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
        assert list((tmp_path / "runs" / "recipe").glob("ensemble-*.safetensors"))

    def test_an_interrupted_run_says_how_to_go_on(self, home, monkeypatch, tmp_path):
        def interrupted(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr(Recipe, "train", interrupted)
        result = invoke("train", home / "recipe.toml", "-o", tmp_path / "run")
        assert result.exit_code == 130
        assert "Nothing was written yet." in result.stderr
        (tmp_path / "run").mkdir()
        shutil.copy(home / "run" / "recipe.toml", tmp_path / "run")
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
        assert "`batch_size` must be a whole number of at least 1" in result.stderr
        assert list(tmp_path.iterdir()) == []
        run(*arguments, "--set", "training.epochs=1")


class TestScore:
    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_every_input_gets_a_row_with_every_score(self, home, tmp_path, ending):
        out = tmp_path / "deep" / f"out.{ending}"
        run("score", home / "run", home / "images.npz", "-o", out, "--batch-size", 50)
        table = pd.read_csv(out) if ending == "csv" else pd.read_parquet(out)
        extras = ["p_value", "flag", "set"]
        assert list(table.columns) == ["row", "label", "prediction", "confidence", *SCORES, *extras]
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
        extras = ["distance", "p_value", "flag", "low", "high"]
        assert list(table.columns) == ["row", "label", "prediction", "std", *variances, *extras]
        assert (table["low"] < table["prediction"]).all()
        assert np.corrcoef(table["prediction"], table["label"])[0, 1] > 0.9
        np.testing.assert_allclose(
            table["total_variance"], table["data_variance"] + table["knowledge_variance"], rtol=1e-5
        )
        np.testing.assert_allclose(table["std"] ** 2, table["total_variance"], rtol=1e-5)
        assert table["prediction"].between(700, 1300).all()


class TestScoreImages:
    """Images are scored a part at a time; files that are none are told, and the rest is written."""

    @pytest.fixture
    def photos(self, tmp_path):
        """Twelve photos in folders by class, of another size than the run's."""
        x, y = bright_and_dark(12, size=20, seed=3)
        for number, (pixels, label) in enumerate(zip(x, y, strict=True)):
            (tmp_path / "photos" / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number:02}.png")
        return tmp_path / "photos"

    @pytest.fixture
    def sources(self, photos):
        """The same photos as every kind of source that holds image files."""
        paths = sorted(path for path in photos.rglob("*") if path.is_file())
        lines = [f"photos/{path.relative_to(photos)} {path.parent.name}\n" for path in paths]
        (photos.parent / "list.txt").write_text("".join(lines))
        with tarfile.open(photos.parent / "photos.tar", "w") as archive:
            archive.add(photos, "photos")
        cells = [{"bytes": path.read_bytes()} for path in paths]
        labels = [path.parent.name for path in paths]
        pd.DataFrame({"image": cells, "label": labels}).to_parquet(photos.parent / "photos.parquet")
        return [photos, photos.parent / "list.txt", photos.parent / "photos.tar", photos.parent / "photos.parquet"]

    def test_parts_change_nothing(self, home, sources, tmp_path, monkeypatch):
        scored = {}
        for rows in (1024, 5):
            monkeypatch.setattr("dissensus.recipes.scoring._PICTURES", rows)
            for source in sources:
                run("score", home / "run", source, "-o", tmp_path / "out.csv")
                scored[rows, source.name] = pd.read_csv(tmp_path / "out.csv")
        first = scored[1024, "photos"]
        assert first["row"].tolist() == list(range(12))
        assert first["file"].tolist() == sorted(first["file"])
        assert first["label"].tolist() == ["bright"] * 6 + ["dark"] * 6
        for found in scored.values():
            shared = [name for name in first if name in found and name != "file"]
            pd.testing.assert_frame_equal(found[shared], first[shared], rtol=1e-4, atol=1e-6)

    def test_files_that_are_no_images_are_listed_and_the_others_scored(self, home, photos, tmp_path, monkeypatch):
        monkeypatch.setattr("dissensus.recipes.scoring._PICTURES", 2)
        paths = sorted(path for path in photos.rglob("*") if path.is_file())
        paths[5].write_bytes(b"no image")
        for path in paths[2:4]:  # a part of its own
            path.write_bytes(path.read_bytes()[:60])
        result = invoke("score", home / "run", photos, "-o", tmp_path / "out.csv")
        assert result.exit_code == 3
        listed = pd.read_csv(tmp_path / "out.bad.csv")
        assert listed["row"].tolist() == [2, 3, 5]
        assert all(str(paths[row]) in why for row, why in listed.itertuples(index=False))
        assert pd.read_csv(tmp_path / "out.csv")["row"].tolist() == [0, 1, 4, *range(6, 12)]
        for path in paths:
            path.write_bytes(b"no image")
        refused = invoke("score", home / "run", photos, "-o", tmp_path / "none.csv")
        assert refused.exit_code == 2
        assert "None of the rows" in refused.stderr


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    save_customers(folder)
    text = RECIPE.replace("images.npz", "customers.csv")
    text = text.replace("test = 0.4", 'test = 0.2\ncalibration = 0.3\ntarget = "churn"\ndrop = ["code"]')
    (folder / "r.toml").write_text(text + '\n[alarm]\nscore = "total_entropy"\nfalse_alarms = 0.1\n')
    run("train", folder / "r.toml", "-o", folder / "run")
    return folder


class TestScoreTables:
    """Tables are scored a part at a time; what cannot be read is told, and the rest is written."""

    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_parts_change_nothing_and_identifiers_come_along(self, table, tmp_path, monkeypatch, ending):
        frame = pd.read_csv(table / "customers.csv")
        # Other rows than the alarm was calibrated on, also where an age is missing: no ties that rounding would break.
        frame["age"] = frame["age"].add(0.5, fill_value=40)
        source = tmp_path / f"in.{ending}"
        frame.to_csv(source, index=False) if ending == "csv" else frame.to_parquet(source)
        said = run("score", table / "run", source, "-o", tmp_path / "whole.csv", "--carry", "town").output
        monkeypatch.setattr("dissensus.recipes.scoring._ROWS", 7)
        run("score", table / "run", source, "-o", tmp_path / "parts.csv", "--carry", "town")
        whole, parts = pd.read_csv(tmp_path / "whole.csv"), pd.read_csv(tmp_path / "parts.csv")
        pd.testing.assert_frame_equal(whole, parts, rtol=1e-4, atol=1e-6)
        assert list(whole.columns[:5]) == ["row", "customer_id", "town", "label", "prediction"]
        assert whole["customer_id"].tolist() == frame["customer_id"].tolist()
        assert whole["label"].tolist() == frame["churn"].tolist()
        # The stored alarm is that of the library on the held-out rows.
        ensemble, recipe, prepare = load_run(table / "run")
        sets = recipe.load_sets()
        alarm = ds.Alarm.calibrate(ensemble, prepare(sets.calibration.x), score="total_entropy", false_alarms=0.1)
        x = prepare(prepare.read(source).x)
        np.testing.assert_allclose(whole["p_value"], alarm.p_values(x), atol=1e-6)
        assert whole["flag"].tolist() == alarm(x).tolist()
        monitor = ds.conformal.DriftMonitor.of_alarm(alarm)
        path = monitor.log_path(alarm.scorer(ensemble, x))
        assert f"Alarm: {int(alarm(x).sum())} of {len(x)} rows (0.1 of ordinary ones may)" in said
        assert f"the drift monitor reached {np.exp(max(path.max(), 0)):.3g}" in said
        probs = [ds.predict(ensemble, part).softmax(-1).mean(0) for part in (prepare(sets.calibration.x), x)]
        inside = ds.conformal.sets(probs[0], prepare.targets(sets.calibration), probs[1], coverage=0.9)
        named = ["|".join(n for n, own in zip(prepare.classes, row, strict=True) if own) for row in inside.tolist()]
        assert whole["set"].fillna("").tolist() == named

    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_copied_columns_are_the_text_of_the_file(self, table, tmp_path, monkeypatch, ending):
        frame = pd.read_csv(table / "customers.csv", dtype=str, keep_default_na=False)
        rows = len(frame)
        own = {
            "customer_id": [f"{row:05}" if row != 70 else "" for row in range(rows)],
            "stamp": ["1700000000.5"] * rows,
            "age": frame["age"].where(frame["age"] == "", frame["age"] + "0"),
            "note": ["NA"] * (rows // 2) + ["", "late"] * (rows // 4),
            "flag": [str(row) for row in range(rows)],
            "row": ["x"] * rows,
            "label": [str(2**60 + row) for row in range(rows)],
        }
        frame.assign(**own).to_csv(tmp_path / "in.csv", index=False)
        monkeypatch.setattr("dissensus.recipes.scoring._ROWS", 50)
        copied = [argument for name in own for argument in ("--carry", name)]
        result = run("score", table / "run", tmp_path / "in.csv", "-o", tmp_path / f"out.{ending}", *copied)
        if ending == "csv":
            scored = pd.read_csv(tmp_path / "out.csv", dtype=str, keep_default_na=False)
        else:
            scored = pd.read_parquet(tmp_path / "out.parquet")
        for name, values in own.items():
            written = f"{name}.1" if name in ("flag", "row", "label") else name
            assert scored[written].tolist() == list(values), name
        assert scored["label"].tolist() == frame["churn"].tolist()
        assert scored["row"].astype(int).tolist() == list(range(rows))
        assert scored["flag"].astype(str).isin(["True", "False"]).all()
        assert result.stderr.count("column 'flag' of the table is written as 'flag.1'") == 1
        # What is copied changes no answer.
        run("score", table / "run", tmp_path / "in.csv", "-o", tmp_path / f"plain.{ending}")
        plain = (
            pd.read_csv(tmp_path / "plain.csv", dtype=str)
            if ending == "csv"
            else pd.read_parquet(tmp_path / "plain.parquet")
        )
        assert scored["mutual_information"].tolist() == plain["mutual_information"].tolist()

    def test_copied_columns_of_parquet_keep_their_types(self, table, tmp_path, monkeypatch):
        frame = pd.read_csv(table / "customers.csv")
        number = pd.array([None, *range(2**60, 2**60 + len(frame) - 1)], dtype="Int64")
        frame.assign(number=number, when=pd.Timestamp("2024-06-01"), share=1 / 3).to_parquet(tmp_path / "in.parquet")
        monkeypatch.setattr("dissensus.recipes.scoring._ROWS", 50)
        copied = ["--carry", "number", "--carry", "when", "--carry", "share"]
        run("score", table / "run", tmp_path / "in.parquet", "-o", tmp_path / "out.parquet", *copied)
        kinds = {field.name: str(field.type) for field in parquet.read_schema(tmp_path / "out.parquet")}
        assert kinds["number"] == "int64"
        assert kinds["when"].startswith("timestamp")
        found = parquet.read_table(tmp_path / "out.parquet")["number"].to_pylist()
        assert found == [None, *range(2**60, 2**60 + len(frame) - 1)]
        run("score", table / "run", tmp_path / "in.parquet", "-o", tmp_path / "out.csv", *copied)
        written = pd.read_csv(tmp_path / "out.csv", dtype=str, keep_default_na=False)
        assert written["number"].tolist() == ["", *map(str, found[1:])]
        assert set(written["share"]) == {repr(1 / 3)}

    def test_two_files_are_not_written_to_one(self, table, tmp_path):
        (tmp_path / "in").mkdir()
        for name in ("a.csv", "a.tsv"):
            shutil.copy(table / "customers.csv", tmp_path / "in" / name)
        result = invoke("score", table / "run", tmp_path / "in" / "*", "-o", tmp_path / "out")
        assert result.exit_code == 2
        assert "would both be written to" in result.stderr

    def test_rows_far_outside_ring_and_ordinary_ones_do_as_often_as_they_may(self, tmp_path):
        save_customers(tmp_path, rows=600)
        text = RECIPE.replace("images.npz", "customers.csv")
        text = text.replace("test = 0.4", 'test = 0.4\ncalibration = 0.3\ntarget = "churn"\ndrop = ["code"]')
        (tmp_path / "r.toml").write_text(text + "\n[alarm]\nfalse_alarms = 0.05\n")
        run("train", tmp_path / "r.toml", "-o", tmp_path / "run")
        loaded = load_run(tmp_path / "run")
        ordinary = loaded.recipe.load_sets().test.table
        pd.DataFrame(ordinary).to_csv(tmp_path / "in.csv", index=False)
        pd.DataFrame(ordinary).assign(age=400).to_csv(tmp_path / "far.csv", index=False)
        shares = {}
        for name in ("in", "far"):
            run("score", tmp_path / "run", tmp_path / f"{name}.csv", "-o", tmp_path / f"{name}.parquet")
            scored = pd.read_parquet(tmp_path / f"{name}.parquet")
            assert scored["distance"].gt(0).all()
            shares[name] = scored["flag"].mean()
        assert shares["far"] == 1.0
        # The allowed rate and four times its scatter, over calibration and test rows.
        assert shares["in"] < 0.05 + 4 * (0.05 * 0.95 * (1 / 180 + 1 / 240)) ** 0.5

    def test_bad_rows_are_listed_and_the_others_written(self, table, tmp_path, monkeypatch):
        monkeypatch.setattr("dissensus.recipes.scoring._ROWS", 50)
        frame = pd.read_csv(table / "customers.csv", dtype=str)
        frame.loc[3, "age"] = "old"
        frame.loc[77, "joined"] = "yesterday"
        frame.loc[100, ["age", "town"]] = [None, "Rome"]
        frame.to_csv(tmp_path / "in.csv", index=False)
        result = invoke("score", table / "run", tmp_path / "in.csv", "-o", tmp_path / "out.parquet")
        assert result.exit_code == 3
        assert "row 77: column 'joined' must hold dates" in result.stderr
        assert "'Rome'" in result.stderr
        assert sorted(set(range(120)) - set(pd.read_parquet(tmp_path / "out.parquet")["row"])) == [3, 77]
        assert pd.read_csv(tmp_path / "out.bad.csv")["row"].tolist() == [3, 77]

    def test_rows_that_are_far_too_large_are_listed_by_their_numbers_in_the_file(self, table, tmp_path, monkeypatch):
        monkeypatch.setattr("dissensus.recipes.scoring._ROWS", 50)
        frame = pd.read_csv(table / "customers.csv", dtype=str)
        frame.to_csv(tmp_path / "plain.csv", index=False)
        frame.loc[20, "age"] = "old"
        frame.loc[[19, 77], "age"] = ["1e37", "-1e37"]
        frame.to_csv(tmp_path / "in.csv", index=False)
        out = tmp_path / "out.csv"
        result = invoke("score", table / "run", tmp_path / "in.csv", "-o", out, "--batch-size", 16)
        assert result.exit_code == 3
        assert "row 77: its values are so large" in result.stderr
        assert pd.read_csv(tmp_path / "out.bad.csv")["row"].tolist() == [19, 20, 77]
        assert sorted(set(range(120)) - set(pd.read_csv(out)["row"])) == [19, 20, 77]
        ensemble_run = load_run(table / "run")
        x = ensemble_run.preprocessing.read(tmp_path / "plain.csv").x
        x[5] = 1e38
        with pytest.raises(ValueError, match="Row 5 cannot be scored"):
            predicted_columns(ensemble_run, x, batch_size=2)
        # The list of an earlier call goes when there is nothing to list.
        run("score", table / "run", tmp_path / "plain.csv", "-o", out)
        assert not (tmp_path / "out.bad.csv").exists()

    def test_the_input_is_never_overwritten(self, table, tmp_path):
        for name, output in (("in.csv", "in.csv"), ("in.bad.csv", "in.csv")):
            source = shutil.copy(table / "customers.csv", tmp_path / name)
            before = Path(source).read_bytes()
            result = invoke("score", table / "run", source, "-o", tmp_path / output)
            assert result.exit_code == 2
            assert "is the input itself" in result.stderr
            assert Path(source).read_bytes() == before

    def test_answers_are_no_inputs(self, table, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        frame = pd.read_csv(table / "customers.csv", dtype=str)
        frame.loc[3, "age"] = "old"
        (tmp_path / "in").mkdir()
        frame.to_csv("in/a.csv", index=False)
        pattern = ("score", table / "run", "**/*.csv", "-o", "out")
        assert invoke(*pattern).exit_code == 3
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.bad.csv", "a.csv"]
        again = run(*pattern).stderr
        assert "2 files lie where the answers go, in out, and are not scored." in again
        assert f"{Path('out/a.csv')} is there already." in again
        monkeypatch.chdir(tmp_path / "in")
        refused = invoke("score", table / "run", "*.csv", "-o", ".")
        assert refused.exit_code == 2
        assert "would be written to a.csv, an input" in refused.stderr
        # Inputs may lie below the folder of the answers.
        monkeypatch.chdir(tmp_path)
        assert invoke("score", table / "run", "in/*.csv", "-o", ".").exit_code == 3
        assert (tmp_path / "a.csv").exists()

    def test_many_files_are_shared_out_and_what_is_done_stays(self, table, tmp_path):
        (tmp_path / "in").mkdir()
        frame = pd.read_csv(table / "customers.csv")
        for number in range(5):
            frame[number * 20 : number * 20 + 20].to_parquet(tmp_path / "in" / f"{number}.parquet")
        out = tmp_path / "out"
        out.mkdir()
        # What killed processes left behind: one on this machine, whose number nobody has, and one elsewhere two days ago.
        stale = [out / f".1.parquet.{platform.node()}.4194305.abc.tmp", out / ".3.parquet.elsewhere.7.abc.tmp"]
        for left in stale:
            left.write_text("torn")
        os.utime(stale[1], times=(time.time() - 2 * 86400,) * 2)
        pattern = tmp_path / "in" / "*.parquet"
        run("score", table / "run", pattern, "-o", out, "--shard", "1/2")
        assert sorted(path.name for path in out.iterdir()) == ["1.parquet", "3.parquet"]
        run("score", table / "run", pattern, "-o", out, "--shard", "0/2")
        assert sorted(path.name for path in out.iterdir()) == [f"{n}.parquet" for n in range(5)]
        (out / "2.parquet").unlink()
        times = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
        result = run("score", table / "run", pattern, "-o", out)
        assert result.stderr.count("is there already") == 4
        assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()}.items() > times.items()
        found = pd.concat([pd.read_parquet(out / f"{n}.parquet") for n in range(5)])
        assert found["customer_id"].tolist() == frame["customer_id"][:100].tolist()

    def test_of_many_files_one_that_cannot_be_read_is_named_and_the_others_are_scored(self, table, tmp_path):
        (tmp_path / "in").mkdir()
        shutil.copy(table / "customers.csv", tmp_path / "in" / "b.csv")
        (tmp_path / "in" / "a.csv").write_text("age\n31\n")
        result = invoke("score", table / "run", tmp_path / "in" / "*.csv", "-o", tmp_path / "out")
        assert result.exit_code == 3
        assert f"{tmp_path / 'in' / 'a.csv'} was left out:" in result.stderr
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["b.csv"]

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("nothing*.csv", "-o", "out"), "No file is called like"),
            (("{table}/*.csv", "-o", "out.csv"), "into a folder"),
            (("{table}/*.csv", "-o", "out", "--shard", "3/2"), "A shard is I/N"),
            (("{table}/customers.csv", "-o", "out.csv", "--shard", "1/2"), "one file has no parts"),
            (("{table}/customers.csv", "-o", "out.csv", "--carry", "shoe"), "no column 'shoe' to carry"),
        ],
    )
    def test_what_cannot_be_done_is_said(self, table, tmp_path, monkeypatch, arguments, words):
        monkeypatch.chdir(tmp_path)
        result = invoke("score", table / "run", *(argument.format(table=table) for argument in arguments))
        assert result.exit_code == 2
        assert words in result.stderr

    def test_two_targets_and_rows_that_are_not_finite(self, tmp_path):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(60, 2))
        np.savez(tmp_path / "two.npz", x=x, y=np.stack([x[:, 0], 3 * x[:, 1]], 1))
        (tmp_path / "two.toml").write_text(RECIPE.replace("images.npz", "two.npz"))
        run("train", tmp_path / "two.toml", "-o", tmp_path / "run")
        x[7, 1] = np.inf
        np.savez(tmp_path / "new.npz", x=x, y=np.stack([x[:, 0], x[:, 0]], 1))
        result = invoke("score", tmp_path / "run", tmp_path / "new.npz", "-o", tmp_path / "out.csv")
        assert result.exit_code == 3
        table = pd.read_csv(tmp_path / "out.csv")
        assert len(table) == 59
        assert {"label_0", "label_1", "prediction_1", "low_0", "high_1", "p_value", "flag"} <= set(table.columns)

    @pytest.mark.slow
    def test_memory_does_not_grow_with_the_file(self, table, tmp_path):
        code = (
            "import resource, sys; from pathlib import Path; from dissensus.recipes import load_run; "
            "from dissensus.recipes.scoring import score_file; run = load_run(sys.argv[1]); "
            "score_file(run, sys.argv[2], Path(sys.argv[3])); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        frame = pd.read_csv(table / "customers.csv")
        peaks = []
        for copies in (300, 3000):
            pd.concat([frame] * copies).to_parquet(tmp_path / "in.parquet")
            command = [sys.executable, "-c", code, table / "run", tmp_path / "in.parquet", tmp_path / "out.parquet"]
            peaks.append(int(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
        # 324 000 further rows of about 20 columns would be 50 MB as they are, and as much again for each copy.
        assert peaks[1] - peaks[0] < 60_000


class TestEvaluate:
    def test_known_unknown_and_corrupted_inputs_are_measured_in_one_pass(self, home, tmp_path):
        result = run(
            *("evaluate", home / "run", "--ood", f"noise={home / 'noise.npy'}"),
            *("--suite", f"openood-cifar10={home}", "--corruptions", "gaussian_noise,fog", "--severities", "1,5"),
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
        run("evaluate", home / "run", "--data", f"{tmp_path / 'new.npz'}#test", "-o", tmp_path, "--bootstrap", 0)
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

    def test_a_run_that_was_not_evaluated_is_evaluated_first(self, home, tmp_path):
        (tmp_path / "recipe.toml").write_text(RECIPE)
        result = invoke("report", tmp_path, "-o", home / "page.html")
        assert result.exit_code == 2
        assert "has not finished" in result.stderr
        copy = shutil.copytree(home / "run", tmp_path / "run", ignore=shutil.ignore_patterns("evaluation.json"))
        result = run("report", copy, "-o", tmp_path / "page.html")
        assert "this is done first" in result.stderr
        assert "48 known inputs" in (tmp_path / "page.html").read_text()
        assert "this is done first" not in run("report", copy, "-o", tmp_path / "page.html").stderr

    def test_an_evaluation_that_is_there_is_never_replaced(self, home, tmp_path):
        copy = shutil.copytree(home / "run", tmp_path / "run", ignore=shutil.ignore_patterns("evaluation.json"))
        run("evaluate", copy, "--ood", f"noise={home / 'noise.npy'}", "--bootstrap", 0)
        run("diagnose", copy)
        before = (copy / "evaluation.json").read_bytes()
        # A copy whose files have other times, and a run that is called finished again, have the same members.
        for path in copy.glob("*-*.*"):
            os.utime(path, times=(time.time() + 60,) * 2)
        run("train", copy, "--resume")
        assert run("report", copy, "-o", tmp_path / "page.html").stderr == ""
        assert "noise" in (tmp_path / "page.html").read_text()
        assert (copy / "evaluation.json").read_bytes() == before
        # Other members are told from these, whatever the times of files.
        for path in copy.glob("ensemble-*"):
            path.unlink()
        run("train", home / "recipe.toml", "-o", tmp_path / "other", "--set", "ensemble.seed=3")
        for path in (tmp_path / "other").glob("ensemble-*"):
            os.utime(shutil.copy(path, copy), times=(0, 0))
        refused = invoke("report", copy, "-o", tmp_path / "page.html")
        assert refused.exit_code == 2
        assert "is of other members than" in refused.stderr
        assert (copy / "evaluation.json").read_bytes() == before
        run("report", copy / "evaluation.json", "-o", tmp_path / "page.html")
        run("evaluate", copy, "--bootstrap", 0)
        said = run("report", copy, "-o", tmp_path / "page.html").stderr
        assert "diagnosis.json is of other members" in said


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
        (("evaluate", "{home}/run", "--ood", "a={home}/noise.npy", "--ood", "a={home}/svhn.npz"), "'a' is given twice"),
        (("evaluate", "{home}/run", "--group", "near"), "NAME=SET,SET"),
        (("evaluate", "{home}/run", "--group", "near=svhn"), "Group 'near' must list OOD sets"),
        (("evaluate", "{home}/run", "--frost-folder", "{home}"), "none is named"),
        (("report", "{home}/nowhere"), "is neither a run's folder nor an evaluation"),
        (("evaluate", "{home}/run", "--corruptions", "fogg"), "got fogg"),
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
    run("train", home / "recipe.toml", "-o", tmp_path / "run", "--set", "data.test=0.0", "--set", "training.epochs=1")
    result = invoke("evaluate", tmp_path / "run")
    assert result.exit_code == 2
    assert "Name some with --data" in result.stderr


@pytest.mark.parametrize(
    ("given", "count"), [("standard", 15), ("standard,extra", 19), ("cbar", 10), ("all", 29), ("fog,standard", 15)]
)
def test_corruptions_go_by_family_or_name(given, count):
    assert len(corruption_names(given)) == count


class TestInit:
    def test_a_table_with_everything_goes_to_a_page_in_three_commands(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        save_customers(tmp_path)
        found = run("init", "customers.csv").output
        lines = {line.split()[0]: line for line in found.splitlines() if line}
        assert "names rows" in lines["customer_id"]
        assert "date" in lines["joined"]
        assert lines["age"].split()[1:] == ["number", "8"]
        assert "determines the target" in lines["code"]
        assert "2 classes: stays" in found
        text = (tmp_path / "customers.toml").read_text()
        assert 'target = "churn"' in text
        assert '# drop = ["code"]' in text
        assert Recipe.read(tmp_path / "customers.toml").data.test == 0.2
        refused = invoke("init", "customers.csv")
        assert refused.exit_code == 2
        assert "already there" in refused.stderr
        result = run("train", "customers.toml", "--set", "training.epochs=2", "--set", "data.drop=['code']")
        assert "town         category of 3" in result.output
        run("report", "runs/customers", "-o", "page.html")
        assert (tmp_path / "page.html").exists()

    def test_other_kinds_of_data(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        np.savez("numbers.npz", x=np.ones((9, 3)), y=np.arange(9) / 2)
        assert "a regression" in run("init", "numbers.npz").output
        assert 'loss = "gaussian_nll"' in (tmp_path / "numbers.toml").read_text()
        for kind in ("cat", "dog"):
            (tmp_path / "pets" / kind).mkdir(parents=True)
            for number, size in enumerate([(20, 30), (40, 40)]):
                Image.new("RGB", size).save(tmp_path / "pets" / kind / f"{number}.png")
        assert "cat (50 %), dog (50 %)" in run("init", "pets").output
        assert Recipe.read("pets.toml").data.size == 30
        (tmp_path / "rings.csv").write_text("u,rings\n" + "".join(f"{n / 7},{n}\n" for n in range(60)))
        assert "numbers from 0 to 59" in run("init", "rings.csv").output
        assert invoke("init", "nothing.csv").exit_code == 2
        (tmp_path / "target.csv").write_text("u,y,v\n1.5,a,2\n2.5,b,1.5\n3,b,1\n")
        assert "Target 'y': 2 classes" in run("init", "target.csv", "--target", "y").output


def save_customers(folder, rows=120):
    rng = np.random.default_rng(0)
    age = rng.integers(18, 90, rows).astype(float)
    stays = rng.random(rows) < age / 90
    age[:8] = np.nan
    pd.DataFrame(
        {
            "customer_id": [f"c{row}" for row in range(rows)],
            "joined": pd.date_range("2020-01-01", periods=rows).strftime("%Y-%m-%d"),
            "age": age,
            "income": [f"{value:,}" if row % 9 else "?" for row, value in enumerate(rng.integers(1000, 90000, rows))],
            "town": rng.choice(["Ulm", "Bonn", "Oslo"], rows),
            "code": np.where(stays, "A", "B"),
            "churn": np.where(stays, "stays", "leaves"),
        }
    ).to_csv(folder / "customers.csv", index=False)


class TestChangedFiles:
    """A run is tested on the rows that it held out, wherever they are in its file now."""

    @pytest.fixture
    def coins(self, tmp_path):
        rng = np.random.default_rng(0)
        frame = pd.DataFrame(rng.normal(size=(200, 3)), columns=list("abc"))
        frame["y"] = rng.integers(0, 2, 200)
        frame.to_csv(tmp_path / "coins.csv", index=False)
        text = RECIPE.replace("images.npz", "coins.csv").replace("test = 0.4", 'test = 0.4\ntarget = "y"')
        (tmp_path / "coins.toml").write_text(text)
        run("train", tmp_path / "coins.toml", "-o", tmp_path / "run", "--set", "training.epochs=60")
        return tmp_path, frame

    def accuracy(self, folder):
        run("evaluate", folder / "run", "--bootstrap", 0)
        return ds.Evaluation.load(folder / "run" / "evaluation.json").number("accuracy").value

    def test_reordered_and_extended_files_give_the_same_numbers(self, coins):
        folder, frame = coins
        first = self.accuracy(folder)
        frame.sample(frac=1, random_state=1).to_csv(folder / "coins.csv", index=False)
        assert self.accuracy(folder) == pytest.approx(first)
        more = pd.concat([frame.sample(frac=0.5, random_state=2) + 0.25, frame])
        more["y"] = more["y"].astype(int)
        more.to_csv(folder / "coins.csv", index=False)
        assert self.accuracy(folder) == pytest.approx(first)
        run("diagnose", folder / "run")

    def test_a_file_that_lacks_held_out_rows_is_refused(self, coins):
        folder, frame = coins
        frame[:100].to_csv(folder / "coins.csv", index=False)
        result = invoke("evaluate", folder / "run")
        assert result.exit_code == 2
        assert "has changed since training" in result.stderr
        assert "--data" in result.stderr
        # Which export has not.
        told = invoke("export", folder / "run").stderr
        assert "Restore the file." in told
        assert "--data" not in told


def test_a_run_that_was_too_short_is_told_so(home, tmp_path):
    out = tmp_path / "run"
    changes = ("training.epochs=3", "training.lr=1e-5")
    result = run("train", home / "recipe.toml", "-o", out, *(a for c in changes for a in ("--set", c)))
    assert "Probably undertrained" in result.output
    run("evaluate", out, "--bootstrap", 0)
    run("report", out, "-o", tmp_path / "page.html")
    assert "Probably undertrained" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_recipe_left_alone_learns_wine(tmp_path, monkeypatch):
    from sklearn.datasets import load_wine

    monkeypatch.chdir(tmp_path)
    load_wine(as_frame=True).frame.to_csv("wine.csv", index=False)
    run("init", "wine.csv")
    run("train", "wine.toml")
    run("evaluate", "runs/wine", "--bootstrap", 0)
    assert ds.Evaluation.load("runs/wine/evaluation.json").number("accuracy").value >= 0.95


def test_a_sweep_trains_every_arm_once_and_is_compared_on_a_page(home, tmp_path):
    text = RECIPE.replace('path = "images.npz"', f'path = "{home / "images.npz"}"').replace("epochs = 4", "epochs = 1")
    (tmp_path / "s.toml").write_text(text + '\n[sweep]\n"training.lr" = [1e-3, 5e-3]\n')
    out = tmp_path / "arms"
    assert "lr=0.001-seed=0: done" in run("train", tmp_path / "s.toml", "-o", out).output
    assert load_run(out / "lr=0.005-seed=0").recipe.training["lr"] == 5e-3
    shutil.rmtree(out / "lr=0.005-seed=0")
    again = run("train", tmp_path / "s.toml", "-o", out, "--jobs", 2).output
    assert "lr=0.001-seed=0: is there already" in again
    assert "lr=0.005-seed=0: done" in again
    run("report", out, "-o", tmp_path / "page.html")
    assert "lr=0.005-seed=0" in (tmp_path / "page.html").read_text()
    # Those that are not finished are named.
    shutil.move(out / "lr=0.005-seed=0", tmp_path / "aside")
    said = "1 arms are not finished and left out: lr=0.005-seed=0."
    assert said in run("report", out, "-o", tmp_path / "page.html").stderr
    assert said in (tmp_path / "page.html").read_text()
    shutil.move(tmp_path / "aside", out / "lr=0.005-seed=0")
    # Arms of another recipe are not taken for those of this one.
    (tmp_path / "s.toml").write_text((tmp_path / "s.toml").read_text().replace("hidden = [16]", "hidden = [12]"))
    refused = invoke("train", tmp_path / "s.toml", "-o", out)
    assert refused.exit_code == 2
    assert "has another recipe: hidden in [model] is [16] there and [12] here" in " ".join(refused.stderr.split())
    run("train", tmp_path / "s.toml", "-o", out, "--set", "model.hidden=[16]")
    # One that was moved, with its data, is the same.
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(home / "images.npz", tmp_path / "elsewhere" / "images.npz")
    moved = (tmp_path / "s.toml").read_text().replace(str(home / "images.npz"), "images.npz")
    (tmp_path / "elsewhere" / "s.toml").write_text(moved.replace("hidden = [12]", "hidden = [16]"))
    assert "is there already" in run("train", tmp_path / "elsewhere" / "s.toml", "-o", out).output


def test_settings_given_beside_a_sweep_are_those_of_all_arms(tmp_path, monkeypatch):
    from dissensus.recipes import sweeps

    trained = {}

    def pretended(recipe, folder, options, changes, name, own):
        trained[name] = Recipe.read(recipe, [*changes, *own])
        return "done"

    monkeypatch.setattr(sweeps, "train_arm", pretended)
    monkeypatch.setattr(sweeps, "is_finished", lambda folder: False)
    text = RECIPE.replace('name = "mlp"\n', "") + '\n[sweep]\n"training.lr" = [1e-3, 1e-2]\nrepeats = 2\n'
    (tmp_path / "s.toml").write_text(text)
    arguments = ("train", tmp_path / "s.toml", "-o", tmp_path / "arms")
    # The recipe is checked with what is set: it lacks a name.
    invoke(*arguments, "--set", "model.name=mlp", "--set", "ensemble.seed=5", "--set", "training.epochs=2")
    found = {
        name: (each.training["lr"], each.ensemble["seed"], each.training["epochs"]) for name, each in trained.items()
    }
    assert found == {f"lr={lr}-seed={seed}": (lr, seed, 2) for lr in (0.001, 0.01) for seed in (5, 6)}


@pytest.mark.parametrize(
    ("sweep", "arguments", "words"),
    [
        ('"training.lr" = [1e-3, 1e-2]', ["--set", "training.lr=1"], "[sweep] varies training.lr"),
        ('"training.schedule" = ["constant"]', ["--set", "training.schedule.name=step"], "varies training.schedule"),
        ('"data.path" = ["a b.npz", "a_b.npz"]', [], "Two arms would be called 'path=_a_b.npz_'"),
        ('"training.lr" = [0.1, 0.1]', [], "Two arms would be called 'lr=0.1'"),
        ("repeats = 2", ["--mesh", "1x1"], "--mesh spreads one run"),
        (None, ["--jobs", "2"], "--jobs and --ray are for the arms of a [sweep]"),
        (None, ["--ray"], "--jobs and --ray are for the arms of a [sweep]"),
    ],
)
def test_what_does_not_go_with_a_sweep_is_refused(tmp_path, sweep, arguments, words):
    (tmp_path / "s.toml").write_text(RECIPE if sweep is None else f"{RECIPE}\n[sweep]\n{sweep}\n")
    result = invoke("train", tmp_path / "s.toml", "-o", tmp_path / "arms", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert not (tmp_path / "arms").exists()


def test_values_that_are_tables_reach_their_arms(tmp_path):
    from dissensus.recipes import sweeps

    (tmp_path / "s.toml").write_text(
        RECIPE + '\n[sweep]\n"objective.inner" = [{loss = "brier"}, {loss = "cross_entropy"}]\n'
    )
    sweep = sweeps.sweep_of(tmp_path / "s.toml")
    named = ["objective.name=adversarial"]
    found = [Recipe.read(tmp_path / "s.toml", [*named, *own]).objective for own in sweeps.arms_of(sweep).values()]
    assert [each["inner"]["loss"] for each in found] == ["brier", "cross_entropy"]


@pytest.mark.slow
def test_a_search_tries_as_many_arms_as_asked_and_finishes_those_left(home, tmp_path):
    pytest.importorskip("optuna", reason="searches need optuna")
    from dissensus.recipes import sweeps

    text = RECIPE.replace('path = "images.npz"', f'path = "{home / "images.npz"}"').replace("lr = 5e-3\n", "")
    table = '"training.lr" = {low = 1e-4, high = 1e-1, log = true}\n"model.hidden" = [[8], [16]]'
    (tmp_path / "s.toml").write_text(f"{text}\n[sweep]\n{table}\ntrials = 2\n")
    out = tmp_path / "arms"
    # What a killed process left: an arm that it was about to train.
    out.mkdir()
    left = sweeps._study(out).ask()
    settings = sweeps.settings_of(sweeps.sweep_of(tmp_path / "s.toml"))
    lr, hidden = (sweeps._suggested(left, key, values) for key, values in settings.items())
    said = run("train", tmp_path / "s.toml", "-o", out, "--jobs", 2).output
    assert said.count("done, validation loss") == 2
    assert f"lr={lr}-hidden=_{hidden[1:-1]}_" in said
    study = sweeps._study(out)
    arms, unfinished = sweeps.arms_in(out)
    assert (len(arms), unfinished) == (2, [])
    assert study.best_value == min(map(sweeps._validation_loss, arms))
    assert "done" not in run("train", tmp_path / "s.toml", "-o", out).output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray itself
def test_ray_scores_files_and_trains_arms_as_this_process_does(home, table, tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    frame = pd.read_csv(table / "customers.csv")
    (tmp_path / "in").mkdir()
    for number in range(3):
        frame[number * 20 : number * 20 + 20].to_parquet(tmp_path / "in" / f"{number}.parquet")
    pattern = tmp_path / "in" / "*.parquet"
    run("score", table / "run", pattern, "-o", tmp_path / "here")
    (tmp_path / "there").mkdir()
    shutil.copy(tmp_path / "here" / "1.parquet", tmp_path / "there")
    text = RECIPE.replace('path = "images.npz"', f'path = "{home / "images.npz"}"').replace("epochs = 4", "epochs = 1")
    (tmp_path / "s.toml").write_text(text + '\n[sweep]\n"training.lr" = [1e-3]\nrepeats = 2\n')
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        result = run("score", table / "run", pattern, "-o", tmp_path / "there", "--ray")
        assert result.stderr.count("is there already") == 1
        assert "2 of 2 files, 0:00 left" in result.stderr
        out = run("train", tmp_path / "s.toml", "-o", tmp_path / "arms", "--ray").output
        assert sorted(out.splitlines()[:2]) == [f"lr=0.001-seed={seed}: done" for seed in (0, 1)]
        bad = invoke("score", tmp_path / "nothing", pattern, "-o", tmp_path / "other", "--ray")
        assert bad.exit_code == 2
    finally:
        ray.shutdown()
    for number in range(3):
        one, other = (pd.read_parquet(tmp_path / where / f"{number}.parquet") for where in ("here", "there"))
        pd.testing.assert_frame_equal(one, other)


@pytest.mark.parametrize(
    "sweep",
    [
        *["repeats = 0", "trials = 0", "lr = [1, 2]", '"training.lr" = 3', '"training.lr" = {low = 1, high = 2}'],
        *[
            '"training.lr" = [1]\nrepeats = 2\ntrials = 3',
            '"ensemble.seed" = [3, 4]\nrepeats = 2',
            "[[sweep]]",
            "sweep = 3",
        ],
    ],
)
def test_what_is_no_sweep_is_said(home, tmp_path, sweep):
    whole = f"{sweep}\n{RECIPE}" if sweep.startswith("sweep") else f"{RECIPE}\n{sweep}\n"
    (tmp_path / "s.toml").write_text(whole if "sweep" in sweep else f"{RECIPE}\n[sweep]\n{sweep}\n")
    result = invoke("train", tmp_path / "s.toml", "-o", tmp_path / "arms")
    assert result.exit_code == 2
    assert "[sweep]" in result.stderr


@pytest.mark.parametrize("more", ["", "trials = 2\n"])
def test_a_slip_in_a_sweep_is_told_before_an_arm_is_trained(home, tmp_path, more):
    (tmp_path / "s.toml").write_text(RECIPE + f'\n[sweep]\n"training.epoch" = [1, 2]\n{more}')
    result = invoke("train", tmp_path / "s.toml", "-o", tmp_path / "arms")
    assert result.exit_code == 2
    assert "did you mean 'epochs'" in " ".join(result.stderr.split()).lower()
    assert not (tmp_path / "arms").exists()


def test_arms_are_no_parts_of_one_run(home, tmp_path, monkeypatch):
    (tmp_path / "s.toml").write_text(RECIPE + "\n[sweep]\nrepeats = 2\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke("train", tmp_path / "s.toml", "-o", tmp_path / "arms")
    assert result.exit_code == 2
    assert "start them without torchrun" in " ".join(result.stderr.split())
    assert not (tmp_path / "arms").exists()


@pytest.mark.slow
def test_the_wheel_goes_from_data_to_a_page_in_three_commands(tmp_path):
    pytest.importorskip("hatchling", reason="building the wheel takes hatchling")
    pip = [sys.executable, "-m", "pip"]
    source = ["--no-build-isolation", "-w", tmp_path, Path(__file__).parents[1]]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", *map(str, source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    # What the wheel depends on comes from this environment, so that nothing is fetched.
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    clean = tmp_path / "clean"
    clean.mkdir()
    save_customers(clean)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    where = "import dissensus; print(dissensus.__file__)"
    found = subprocess.run([sys.executable, "-c", where], cwd=clean, env=env, capture_output=True, text=True)
    assert found.stdout.startswith(str(tmp_path / "site"))
    for command in ("init customers.csv", "train customers.toml", "report runs/customers -o page.html"):
        subprocess.run(
            [sys.executable, "-m", "dissensus", *command.split()],
            cwd=clean,
            env=env,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    page = (clean / "page.html").read_text(encoding="utf-8")
    assert all(part in page for part in ("known inputs", "The alarm", "Do members collude?"))
