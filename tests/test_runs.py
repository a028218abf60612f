"""Runs: trained from recipes, interrupted, and read back as they were."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from recipe_cases import recipe, save_blobs, save_line

import dissensus as ds
from dissensus.objectives import mean_and_scale
from dissensus.recipes import Recipe, load_run
from dissensus.recipes.alarms import load_calibration
from dissensus.recipes.choices import member_factory, resolve_model
from dissensus.recipes.recipe import InUnits, is_finished
from dissensus.training.checkpoints import CheckpointError
from dissensus.training.history import History
from dissensus.training.trainer import Trainer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def blobs(tmp_path):
    return save_blobs(tmp_path)


@pytest.fixture
def line(tmp_path):
    return save_line(tmp_path)


class TestRuns:
    def test_a_run_comes_back_bit_for_bit(self, blobs):
        described = recipe(blobs, data={"test": 0.2}, training={"epochs": 5, "select": "ensemble_loss"})
        run = described.train(blobs / "run")
        back = load_run(blobs / "run")
        x = back.preprocessing(described.load_sets().test.x)
        assert torch.equal(ds.predict(back.ensemble, x), ds.predict(run.members, x))
        assert back.recipe == described.settled(described.load_sets())
        assert back.preprocessing.classes == ("0", "1", "2")
        assert {"recipe.toml", "history.csv"} <= {p.name for p in (blobs / "run").iterdir()}

    def test_training_learns(self, blobs):
        described = recipe(blobs, data={"test": 0.3}, training={"epochs": 30, "lr": 0.02})
        described.train(blobs / "run")
        ensemble, _, prepare = load_run(blobs / "run")
        test = described.load_sets().test
        predicted = ds.predict(ensemble, prepare(test.x)).softmax(-1).mean(0).argmax(-1)
        assert (predicted == prepare.targets(test)).float().mean() > 0.9

    def test_a_run_that_was_killed_goes_on_and_ends_the_same(self, blobs, monkeypatch):
        described = recipe(blobs, training={"epochs": 6})
        whole = described.train(blobs / "whole")

        def killed(self, path, calls=[]):  # noqa: B006
            calls.append(path)
            if len(calls) == 4:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(History, "save", killed)
            with pytest.raises(KeyboardInterrupt):
                described.train(blobs / "run")
        with pytest.raises(ValueError, match=r"has not finished\. Go on with: dissensus train .*run --resume"):
            load_run(blobs / "run")
        described.train(blobs / "run", resume=True)
        x = torch.randn(5, 2)
        assert torch.equal(ds.predict(load_run(blobs / "run").ensemble, x), ds.predict(whole.members, x))

    def test_a_folder_with_a_run_is_not_overwritten(self, blobs):
        recipe(blobs).train(blobs / "run")
        with pytest.raises(ValueError, match="already holds a run"):
            recipe(blobs).train(blobs / "run")
        with pytest.raises(ValueError, match=r"another recipe: epochs in \[training\] is 2 there and 3 here"):
            recipe(blobs, training={"epochs": 3}).train(blobs / "run", resume=True)
        with pytest.raises(ValueError, match=r"another recipe: test in \[data\] is 0\.0 there and 0\.2 here"):
            recipe(blobs, data={"test": 0.2}).train(blobs / "run", resume=True)

    @pytest.mark.parametrize(
        "training",
        [
            {"patience": 2},
            {"batch_size": 0},
            {"device": "nowhere"},
            {"select": "beauty"},
            {"optimizer": "sgd", "lr": 1e38},
        ],
        ids=lambda training: "-".join(training),
    )
    def test_a_recipe_that_failed_at_once_leaves_nothing_behind(self, blobs, training):
        folder = blobs / "runs" / "first"
        with pytest.raises((ValueError, ds.DivergedError)):
            recipe(blobs, data={"validation": 0.0}, training=training).train(folder)
        assert not folder.parent.exists()
        recipe(blobs).train(folder, resume=True)

    def test_a_failed_start_gives_back_what_was_there(self, blobs):
        folder = blobs / "run"
        folder.mkdir()
        (folder / "recipe.toml").write_text("# an earlier one\n")
        (folder / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match="batch_size"):
            recipe(blobs, training={"batch_size": 0}).train(folder)
        assert {path.name: path.read_text() for path in folder.iterdir()} == {
            "recipe.toml": "# an earlier one\n",
            "notes.txt": "mine",
        }

    def test_an_interrupted_start_keeps_its_recipe_and_can_go_on(self, blobs, monkeypatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                recipe(blobs).train(blobs / "run")
        assert Recipe.read(blobs / "run" / "recipe.toml").train(blobs / "run", resume=True).epoch == 2

    def test_a_run_that_is_killed_before_its_alarm_is_calibrated_is_not_finished(self, blobs, monkeypatch):
        def killed(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("dissensus.recipes.recipe.calibrate_run", killed)
            with pytest.raises(KeyboardInterrupt):
                recipe(blobs).train(blobs / "run")
        assert not is_finished(blobs / "run")
        recipe(blobs).train(blobs / "run", resume=True)
        back = load_run(blobs / "run")
        assert load_calibration(blobs / "run", back).alarm.calibration[None].shape == (9,)
        (blobs / "run" / "alarm.json").unlink()
        with pytest.raises(ValueError, match=r"alarm\.json is missing, although rows were held out for it"):
            load_calibration(blobs / "run", back)
        described = recipe(blobs, data={"validation": 0.0})
        described.train(blobs / "other")
        assert load_calibration(blobs / "other", load_run(blobs / "other")) is None

    def test_a_bank_of_training_rows_is_replaced_in_one_step(self, line, monkeypatch):
        described = recipe(line, "line.csv", data={"target": "y"}, objective={"loss": "mse"})
        described.train(line / "run")
        bank = line / "run" / "bank.safetensors"
        assert bank.stat().st_mode == (line / "run" / "alarm.json").stat().st_mode
        before = bank.read_bytes()

        def killed(*_, **__):
            assert bank.read_bytes() == before
            raise KeyboardInterrupt

        monkeypatch.setattr("dissensus.recipes.alarms.RowDistance", killed)
        with pytest.raises(KeyboardInterrupt):
            described.train(line / "run", resume=True)
        assert bank.read_bytes() == before

    def test_a_changed_file_is_noticed(self, blobs):
        recipe(blobs).train(blobs / "run")
        (path,) = (blobs / "run").glob("ensemble-*.safetensors")
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
        with pytest.raises(CheckpointError, match="truncated or was changed"):
            load_run(blobs / "run")

    def test_members_that_were_dropped_stay_away(self, blobs):
        described = recipe(
            blobs,
            ensemble={"members": 3},
            training={"optimizer": "sgd", "lr": [0.1, 1e38, 0.1], "on_divergence": "drop"},
        )
        run = described.train(blobs / "run")
        assert run.dropped == [1]
        back = load_run(blobs / "run").ensemble
        x = torch.randn(4, 2)
        assert torch.equal(ds.predict(back, x), ds.predict(run.members, x))
        assert back.num_members == 2

    def test_unlabelled_data_reaches_the_objective(self, blobs):
        np.savez(blobs / "more.npz", x=np.random.default_rng(1).normal(size=(30, 2)))
        objective = {"name": "virtual_adversarial"}
        run = recipe(blobs, data={"unlabelled": "more.npz"}, objective=objective).train(blobs / "run")
        without = recipe(blobs, objective=objective).train(blobs / "other")
        assert run.history["virtual"] != without.history["virtual"]

    def test_a_network_of_the_users_is_imported_only_where_that_is_allowed(self, blobs, monkeypatch):
        source = "from torch import nn\ndef make(inputs, outputs, width=3):\n    return nn.Linear(inputs, outputs)\n"
        (blobs / "my_networks.py").write_text(source)
        monkeypatch.chdir(blobs)
        described = Recipe.from_tables(
            {
                "data": {"path": "blobs.npz"},
                "model": {"name": "my_networks:make", "width": 4},
                "training": {"epochs": 1, "device": "cpu"},
            }
        )
        with pytest.raises(ValueError, match="--allow-import"):
            described.train("run")
        assert "my_networks" not in sys.modules
        described.train("run", allow_import=True)
        with pytest.raises(ValueError, match="--allow-import"):
            load_run("run")
        assert load_run("run", allow_import=True).ensemble.num_members == 5
        assert str(blobs) not in sys.path
        for name, words in {"my_networks:no": "no function 'no'", "no_such_module:f": "cannot be imported"}.items():
            with pytest.raises(ValueError, match=words):
                member_factory({"name": name}, (2,), 3, allow_import=True)
        monkeypatch.delitem(sys.modules, "my_networks")

    @pytest.mark.parametrize(
        ("model", "shape", "words"),
        [
            ({"name": "cnn"}, (4,), "is for images; this data has 4 features"),
            ({"name": "mlp", "hidden": [3], "outputs": 5}, (4,), "outputs in .* is 5, but the data asks for 3"),
        ],
    )
    def test_networks_that_do_not_fit_the_data_are_refused(self, model, shape, words):
        with pytest.raises(ValueError, match=words):
            member_factory(resolve_model(model), shape, 3)


class TestRegression:
    @pytest.mark.parametrize("loss", ["gaussian_nll", "laplace_nll", "mse"])
    def test_predictions_come_in_the_units_of_the_data(self, line, loss):
        described = recipe(
            line,
            "line.csv",
            data={"target": "y", "test": 0.25},
            objective={"loss": loss},
            training={"epochs": 60, "lr": 0.02},
        )
        run = described.train(line / "run")
        ensemble, _, prepare = load_run(line / "run")
        test = described.load_sets().test
        x = prepare(test.x)
        outputs, raw = ds.predict(ensemble, x), ds.predict(run.members, x)
        mean, std = prepare.target_mean[0], prepare.target_std[0]
        assert mean == pytest.approx(1000, rel=0.02)
        torch.testing.assert_close(outputs[..., :1], raw[..., :1] * std + mean)
        if loss != "mse":
            torch.testing.assert_close(mean_and_scale(outputs)[1], mean_and_scale(raw)[1] * std)
        error = (outputs[..., 0].mean(0) - test.y).square().mean().sqrt()
        assert error < 15  # The noise has standard deviation 5, the data 50.

    @given(st.floats(-20, 20), st.floats(1e-3, 1e4))
    def test_scales_are_multiplied(self, rho, std):
        outputs = torch.tensor([[0.5, rho]], dtype=torch.float64)
        scaled = InUnits(torch.tensor([3.0]).double(), torch.tensor([std]).double(), density=True)(outputs)
        mean, scale = mean_and_scale(scaled)
        torch.testing.assert_close(mean, torch.tensor([[0.5 * std + 3]]).double())
        wanted = (mean_and_scale(outputs)[1] * std).clamp_min(1e-6)
        torch.testing.assert_close(scale, wanted, rtol=1e-6, atol=1e-11)

    def test_mixing_labels_makes_no_sense_there(self, line):
        with pytest.raises(ValueError, match=r"mixup in \[augment\] mixes class labels"):
            recipe(line, "line.csv", data={"target": "y"}, objective={"loss": "mse"}, augment={"mixup": True}).train(
                line / "run"
            )


class TestFurtherData:
    """A run reads files of other kinds than its own, and in the same way."""

    def test_a_table_run_reads_arrays_and_an_array_run_reads_tables(self, line, blobs):
        recipe(line, "line.csv", data={"target": "y"}, objective={"loss": "mse"}).train(line / "run")
        np.savez(line / "more.npz", x=np.ones((3, 1)))
        assert load_run(line / "run").preprocessing.read(line / "more.npz").x.tolist() == [[1], [1], [1]]
        recipe(blobs).train(blobs / "other")
        (blobs / "more.csv").write_text("a,b\n1,2\n3,4\n")
        assert load_run(blobs / "other").preprocessing.read(blobs / "more.csv").x.tolist() == [[1, 2], [3, 4]]

    def test_names_and_layout_of_the_recipe_are_kept_and_usual_names_work_too(self, tmp_path):
        pixels = np.random.default_rng(0).integers(0, 256, (12, 3, 5, 3), dtype=np.uint8)
        np.savez(tmp_path / "a.npz", pics=pixels, kind=np.arange(12) % 2)
        np.savez(tmp_path / "b.npz", x=pixels)
        data = {"inputs": "pics", "target": "kind", "layout": "channels_last"}
        recipe(tmp_path, "a.npz", data=data).train(tmp_path / "run")
        prepare = load_run(tmp_path / "run").preprocessing
        assert prepare.shape == (3, 3, 5)
        for name in ("a.npz", "b.npz"):
            np.testing.assert_array_equal(prepare.read(tmp_path / name).x.numpy(), pixels.transpose(0, 3, 1, 2))

    def test_pictures_of_any_size_fit_a_run_on_square_images(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.zeros((12, 8, 8), np.uint8), y=np.arange(12) % 2)
        recipe(tmp_path, "a.npz", data={"target": "y"}).train(tmp_path / "run")
        (tmp_path / "pictures").mkdir()
        for number, size in enumerate([(10, 20), (30, 30)]):
            Image.new("RGB", size, (100, 100, 100)).save(tmp_path / "pictures" / f"{number}.png")
        read = load_run(tmp_path / "run").preprocessing.read(tmp_path / "pictures")
        assert read.x.shape == (2, 1, 8, 8)
        assert bool((read.x == 100).all())
        assert read.names == ("0.png", "1.png")
