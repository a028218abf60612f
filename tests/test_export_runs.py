"""Runs as files: what happens to inputs before members see them is inside, and the file says what the run says."""

import csv
import json
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dissensus as ds
from dissensus.cli import app
from dissensus.data.tables import TableEncoder
from dissensus.recipes import load_run


def table(rows, seed=0):
    """Numbers, words and dates, some of them missing, and a target."""
    rng = np.random.default_rng(seed)
    age = rng.integers(18, 90, rows)
    town = rng.choice(["Ulm", "Bonn", "Oslo"], rows)
    moment = np.datetime64("2020-01-01T00:00") + rng.integers(0, 1000 * 24 * 60, rows).astype("timedelta64[m]")
    return {
        "age": [None if rng.random() < 0.1 else int(value) for value in age],
        "town": [None if rng.random() < 0.1 else str(value) for value in town],
        "joined": [None if rng.random() < 0.1 else str(value) for value in moment],
        "vip": [bool(value) for value in rng.integers(0, 2, rows)],
        "outcome": ["yes" if a + 20 * (t == "Ulm") > 60 else "no" for a, t in zip(age, town, strict=True)],
    }


class TestFeaturesOfTensors:
    def test_are_those_of_arrays(self):
        known, new = table(200), table(50, seed=1)
        for each in (known, new):
            del each["outcome"]
        new["town"][:3] = ["Paris", "", "NA"]
        encoder = TableEncoder.fit(known)
        codes, problems = encoder.codes(new)
        assert not problems
        found = encoder.of_codes(torch.from_numpy(codes), torch).float()
        torch.testing.assert_close(found, torch.from_numpy(encoder.transform(new)), rtol=0, atol=1e-6)


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def trained(folder, name, more="", held_out="validation = 0.2\ntest = 0.3\n"):
    (folder / "recipe.toml").write_text(
        f'[data]\npath = "{name}"\n{more}{held_out}[model]\nname = "mlp"\nhidden = [16]\n[alarm]\nfalse_alarms = 0.2\n'
        "[ensemble]\nmembers = 3\n[training]\nepochs = 3\nbatch_size = 32\n"
    )
    run("train", folder / "recipe.toml", "-o", folder / "run")
    return folder / "run"


def trained_on_table(folder):
    pytest.importorskip("pandas")
    data = table(400)
    with open(folder / "people.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(data)
        writer.writerows(zip(*data.values(), strict=True))
    return trained(folder, "people.csv", 'target = "outcome"\n'), data


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestRuns:
    def test_of_a_table_take_codes(self, tmp_path):
        folder, data = trained_on_table(tmp_path)
        run("export", folder, "--to", "pt2")
        loaded = load_run(folder)
        some = {name: values[:50] for name, values in data.items()}
        codes, _ = loaded.preprocessing.columns.codes(some)
        file = torch.export.load(folder / "model.pt2").module()
        found = file(x=torch.from_numpy(codes), limit=torch.tensor(0.2))["prediction"]
        x = loaded.preprocessing(torch.from_numpy(loaded.preprocessing.columns.transform(some)))
        torch.testing.assert_close(found, ds.predict(loaded.ensemble, x).softmax(-1).mean(0))

    def test_of_a_built_in_table_take_its_numbers(self, tmp_path):
        folder = trained(tmp_path, "breast_cancer")
        assert "largest difference" in run("export", folder, "--to", "pt2").output

    def test_of_a_table_take_rows_as_they_are(self, tmp_path):
        onnxruntime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        folder, data = trained_on_table(tmp_path)
        said = run("export", folder, "--to", "onnx", "--members").output
        assert "largest difference" in said
        assert "Next: dissensus serve" in said

        from dissensus.recipes.alarms import load_calibration
        from dissensus.serving.model import Model

        loaded = load_run(folder)
        model = Model(folder / "model.onnx")
        rows = [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)][:50]
        answers = model.answers(model.run(model.read_rows(rows)), False)
        encoded = loaded.preprocessing.columns.transform({name: data[name][:50] for name in data})
        logits = ds.predict(loaded.ensemble, loaded.preprocessing(torch.from_numpy(encoded)))
        wanted = logits.softmax(-1).mean(0)
        np.testing.assert_allclose([a["probabilities"] for a in answers], wanted, atol=1e-5)
        names = loaded.preprocessing.classes
        assert [a["prediction"] for a in answers] == [names[i] for i in wanted.argmax(-1)]
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
        facts = {name: json.loads(v) for name, v in session.get_modelmeta().custom_metadata_map.items()}
        assert (facts["target"], facts["units"]) == ("outcome", "nats")
        assert facts["standardised"]["mean"] == list(loaded.preprocessing.mean)
        # The alarm is the run's own, at its own rate unless another is asked for.
        alarm = load_calibration(folder, loaded).alarm
        assert facts["false_alarms"] == alarm.false_alarms == 0.2
        np.testing.assert_allclose(
            [a["p_value"] for a in answers], alarm.p_values(loaded.preprocessing(torch.from_numpy(encoded))), atol=0.03
        )
        # Of a table it ranks by the distance to training rows: a row far outside rings, whatever members say of it.
        assert facts["score"] == "distance"
        far = [{**row, "age": 400} for row in rows]
        assert all(answer["flag"] for answer in model.answers(model.run(model.read_rows(far)), False))
        run("export", folder, "--false-alarms", "0.5", "-o", tmp_path / "half.onnx")
        assert Model(tmp_path / "half.onnx").limit == 0.5

    def test_without_held_out_rows_have_no_alarm(self, tmp_path):
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        from dissensus.serving.model import Model

        x = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        np.savez(tmp_path / "data.npz", x=x, y=(x[:, 0] > 0).astype(int))
        folder = trained(tmp_path, "data.npz", held_out="validation = 0.0\ncalibration = 0.0\n")
        assert "no alarm" in run("export", folder).output
        assert Model(folder / "model.onnx").limit is None

    def test_are_exported_for_the_server_once_for_each_ensemble(self, tmp_path, monkeypatch):
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        from dissensus.cli import deploying

        x = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        np.savez(tmp_path / "data.npz", x=x, y=(x[:, 0] > 0).astype(int))
        folder = trained(tmp_path, "data.npz")
        asked = []

        def exported(command, **_):
            asked.append(command)
            run(*command[3:])
            return subprocess.CompletedProcess(command, 0)

        monkeypatch.setattr(deploying.subprocess, "run", exported)
        path = deploying._exported(folder, False)
        # Times of files, as copies have them, say nothing.
        os.utime(path, times=(0, 0))
        deploying._exported(folder, False)
        assert len(asked) == 1
        (tmp_path / "other").mkdir()
        trained(tmp_path / "other", "../data.npz", "seed = 1\n")
        for old in folder.glob("ensemble-*"):
            old.unlink()
        for new in (tmp_path / "other" / "run").glob("ensemble-*"):
            os.utime(shutil.copy(new, folder), times=(0, 0))
        deploying._exported(folder, False)
        assert len(asked) == 2

    def test_of_images_take_bytes(self, tmp_path):
        onnxruntime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        rng = np.random.default_rng(0)
        y = np.arange(200) % 2
        x = (rng.integers(0, 100, (200, 8, 8, 3)) + 100 * y[:, None, None, None]).astype(np.uint8)
        np.savez(tmp_path / "images.npz", x=x, y=y)
        folder = trained(tmp_path, "images.npz")
        run("export", folder)

        from dissensus.recipes import load_run

        loaded = load_run(folder)
        images = loaded.preprocessing.read(tmp_path / "images.npz").x
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
        (found,) = session.run(["prediction"], {"x": images.numpy()})
        wanted = ds.predict(loaded.ensemble, loaded.preprocessing(images)).softmax(-1).mean(0)
        np.testing.assert_allclose(found, wanted, atol=1e-5)

    def test_of_a_regression_are_in_units(self, tmp_path):
        onnxruntime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        rng = np.random.default_rng(0)
        x = rng.normal(size=(200, 2)).astype(np.float32)
        np.savez(tmp_path / "line.npz", x=x, y=1000 + 50 * x[:, 0] + rng.normal(size=200))
        (tmp_path / "recipe.toml").write_text("")
        folder = trained(tmp_path, "line.npz")
        run("export", folder, "-o", tmp_path / "line.onnx")
        session = onnxruntime.InferenceSession(str(tmp_path / "line.onnx"))
        prediction, total = session.run(["prediction", "total"], {"x": x})
        assert 800 < prediction.mean() < 1200
        assert (total > 0).all()

    def test_wrong_options_are_refused_in_a_sentence(self, tmp_path):
        for arguments, said in (
            (["export", tmp_path, "--to", "tflite"], "onnx or pt2"),
            (["export", tmp_path, "--to", "pt2", "-o", tmp_path / "m.onnx"], "ends in .pt2"),
            (["export", tmp_path], "There is no run"),
            (["serve", tmp_path / "no.onnx"], "There is no file"),
            (["serve", tmp_path / "no.onnx", "--tls-cert", tmp_path / "c"], "give both"),
        ):
            result = CliRunner().invoke(app, [str(argument) for argument in arguments])
            assert result.exit_code == 2
            assert said in result.output
