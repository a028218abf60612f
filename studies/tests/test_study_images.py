"""What image studies have in common: sets from folders, training on pixels, records, arms that resume."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import dissensus_studies
import numpy as np
import pytest
import torch
from dissensus_studies import Study
from dissensus_studies.harness import arm_log
from dissensus_studies.harness.arm_log import Arm, chosen, run_arms
from dissensus_studies.harness.figures import Line, Panel, draw
from dissensus_studies.harness.image_arms import (
    PixelNorm,
    augmentation,
    fit_images,
    measure,
    on_pixels,
    released_steps,
    save_outputs,
    summary_line,
    training_record,
)
from dissensus_studies.harness.image_sets import load_images
from dissensus_studies.harness.image_study import sets_section, with_interval
from dissensus_studies.harness.statistics import over_seeds
from folder_cases import write_folder
from image_cases import bright_images, write_images
from torch import nn
from typer.testing import CliRunner

import dissensus as ds
from dissensus import cli
from dissensus.data.augment import HorizontalFlip, Rotation
from dissensus.randomness import Noise

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def small_net(num_classes):
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, num_classes))


def ensemble_on(sets, num_members=2):
    return ds.DeepEnsemble(lambda: on_pixels(small_net(sets.num_classes), sets), num_members, seed=0)


@pytest.fixture
def sets(tmp_path):
    write_images(tmp_path / "data")
    return load_images(tmp_path / "data")


class TestSets:
    def test_the_first_training_images_are_held_out(self, tmp_path):
        x, y = write_images(tmp_path)
        sets = load_images(tmp_path, validation=6)
        pixels = torch.from_numpy(x).permute(0, 3, 1, 2)
        assert torch.equal(sets.validation.x, pixels[:6])
        assert torch.equal(sets.train.x, pixels[6:])
        assert torch.equal(sets.all_train.x, pixels)
        assert sets.all_train.y.tolist() == y.tolist()
        assert sets.num_classes == 3

    def test_ten_or_more_parts_keep_their_order(self, tmp_path):
        x, _ = write_images(tmp_path, train=48, parts=12)
        assert torch.equal(load_images(tmp_path).all_train.x, torch.from_numpy(x).permute(0, 3, 1, 2))

    def test_unknown_sets_are_found_by_name_and_missing_ones_named(self, sets):
        assert sets.ood_groups == {"near": ["cifar100"], "far": ["svhn"]}
        assert {"tiny_imagenet", "textures", "isun", "places"} <= set(sets.missing)
        assert "cifar10" not in sets.missing
        assert ("svhn", "unknown, far", 15, "") in sets.describe()

    def test_an_unknown_set_that_cannot_be_read_is_named_and_no_error(self, tmp_path):
        write_images(tmp_path)
        np.savez(tmp_path / "mnist.npz", something=np.zeros(3))
        sets = load_images(tmp_path)
        assert "not readable" in sets.missing["mnist"]

    def test_a_limit_takes_few_of_everything_and_reads_no_more_files_than_it_needs(self, tmp_path):
        write_images(tmp_path, parts=2)
        # Without images: reading this part would fail.
        np.savez(tmp_path / "cifar10_train_2of2.npz", y=np.zeros(20, np.uint8))
        sets = load_images(tmp_path, limit=10)
        assert [len(part.x) for part in (sets.train, sets.validation, sets.test)] == [10, 10, 10]
        assert all(len(x) <= 10 for x in sets.ood.values())

    def test_one_file_of_grey_arrays_is_a_set_too(self, tmp_path):
        x, y = bright_images(30, size=28)
        grey = x[..., 0]
        np.savez(tmp_path / "letters.npz", x_train=grey[:20], y_train=y[:20], x_test=grey[20:], y_test=y[20:])
        sets = load_images(tmp_path)
        assert sets.name == "letters"
        assert sets.test.x.shape == (10, 3, 32, 32)
        assert "grey repeated in 3 channels" in sets.notes
        assert set(sets.groups.values()) <= {"far"}

    def test_the_folder_may_hold_its_images_in_a_folder_of_their_own(self, tmp_path):
        write_images(tmp_path / "images")
        assert load_images(tmp_path).name == "cifar10"

    def test_moments_are_those_of_the_training_images(self, sets):
        x = sets.train.x.double() / 255
        np.testing.assert_allclose(sets.mean, x.mean((0, 2, 3)), rtol=1e-12)
        np.testing.assert_allclose(sets.std, x.std((0, 2, 3), correction=0), rtol=1e-12)

    @pytest.mark.parametrize(
        ("names", "arguments", "words"),
        [
            (["cifar10_train_1of2", "cifar10_test"], {}, "lacks part 2"),
            (["cifar10_test"], {}, "there are none"),
            (["a_train", "a_test", "b_train", "b_test"], {}, "there are a, b"),
            (["a_train", "a_test"], {"known": "c"}, "images of c"),
            ([], {}, "holds no image sets"),
        ],
    )
    def test_folders_that_do_not_say_what_is_known_are_refused(self, tmp_path, names, arguments, words):
        x, y = bright_images(10)
        for name in names:
            np.savez(tmp_path / f"{name}.npz", x=x, y=y)
        with pytest.raises(ValueError, match=words):
            load_images(tmp_path, **arguments)

    def test_digits_come_along(self):
        sets = load_images(None)
        assert sets.num_classes == 8
        assert sets.ood_groups == {"near": ["digits 8, 9"], "far": ["photographs"]}
        assert not sets.mirrored
        parts = [len(part.x) for part in (sets.train, sets.validation, sets.test)]
        assert sum(parts) == 1797 - len(sets.ood["digits 8, 9"])
        # No image is in two parts: real digits do not repeat pixel for pixel.
        every = torch.cat([sets.train.x, sets.validation.x, sets.test.x]).flatten(1)
        assert len(every.unique(dim=0)) == len(every)

    def test_a_folder_of_imagenets_layout_is_a_set_like_others(self, tmp_path):
        write_folder(tmp_path / "data" / "imagenet", train=10, val=4)
        sets = load_images(tmp_path / "data", known="imagenet")
        assert (sets.name, sets.num_classes, sets.mirrored) == ("imagenet", 3, True)
        assert [len(part.x) for part in (sets.train, sets.validation, sets.test)] == [24, 6, 12]
        # Files lie class by class; what is held out has them all.
        assert set(sets.validation.y.tolist()) == {0, 1, 2}
        brightness = sets.test.x.float().mean((1, 2, 3))
        assert torch.equal((brightness / 80).long(), sets.test.y)

    @pytest.mark.shared
    @pytest.mark.skipif(not (SHARED / "images").is_dir(), reason="the image sets are not in ../shared/data/images")
    def test_the_real_folder_has_what_its_studies_need(self, tmp_path):
        # The small files, so that the test does not decode all of them.
        wanted = ("cifar10_*", "svhn*", "dtd*", "tin_val_crop*", "mnist*")
        for path in [path for pattern in wanted for path in (SHARED / "images").glob(pattern)]:
            (tmp_path / path.name).symlink_to(path)
        sets = load_images(tmp_path, limit=100)
        assert sets.name == "cifar10"
        assert sets.num_classes == 10
        assert sets.mirrored
        assert sets.ood_groups == {"near": ["tiny_imagenet_crop"], "far": ["svhn", "textures", "mnist"]}
        # The first training image is the well-known frog.
        assert sets.validation.y[0] == 6
        assert sets.validation.x[0, :, 0, 0].tolist() == [59, 62, 63]


class TestTraining:
    def test_pixels_are_normalised_as_the_sets_would(self, sets):
        layer = PixelNorm(sets.mean, sets.std)
        expected = sets.normalise(sets.train.x)
        torch.testing.assert_close(layer(sets.train.x), expected)
        torch.testing.assert_close(layer(sets.train.x.float() / 255), expected)
        assert expected.mean((0, 2, 3)).abs().max() < 1e-4

    def test_augmentation_flips_only_what_has_a_mirror_image(self, sets):
        cifar = augmentation(sets, "crop+rotation")
        digits = augmentation(load_images(None, limit=20), "crop")
        assert any(isinstance(step, HorizontalFlip) for step in cifar.steps)
        assert any(isinstance(step, Rotation) for step in cifar.steps)
        assert not any(isinstance(step, HorizontalFlip) for step in digits.steps)

    def test_rotated_bytes_become_numbers_from_0_to_1(self, sets):
        changed, _ = augmentation(sets, "crop+rotation")(sets.train.x[:8], sets.train.y[:8], Noise(torch.tensor(3)))
        assert changed.is_floating_point()
        assert changed.min() >= 0
        assert changed.max() <= 1

    def test_rates_drop_at_the_same_shares_of_a_shorter_run(self):
        full, short = released_steps(80), released_steps(8)
        assert full.milestones == (30, 50, 70)
        for epoch in (0, 29, 30, 49, 50, 69, 70, 79):
            assert short.factor(epoch / 10, 8) == full.factor(epoch, 80)

    @pytest.mark.parametrize("prepared", [False, True], ids=["on pixels", "normalised when loaded"])
    def test_training_runs_and_is_recorded(self, sets, prepared):
        members = ds.DeepEnsemble(lambda: small_net(3), 2) if prepared else ensemble_on(sets)
        run = fit_images(members, sets, epochs=3, lr=0.1, batch_size=8, transform=sets.normalise if prepared else None)
        record = training_record(run)
        assert record["epochs"] == 3
        assert record["history"]["epoch"] == [1, 2, 3]
        assert len(record["history"]["ensemble_loss"]) == 3
        assert record["history"]["loss"][-1] < record["history"]["loss"][0]
        json.dumps(record)

    def test_all_training_images_are_used_where_nothing_is_selected(self, sets):
        run = fit_images(ensemble_on(sets), sets, epochs=1, batch_size=8, all_train=True, watch="test")
        assert run.step == len(sets.all_train.x) // 8


class TestRecords:
    def test_a_record_holds_what_evaluation_finds(self, sets):
        members = ensemble_on(sets, num_members=3)
        record = measure(
            members, sets, corruptions=["gaussian_noise"], severities=(1, 5), corrupted_images=9, bootstrap=20
        )
        found = ds.evaluate(members, sets.test, dict(sets.ood), groups=sets.ood_groups, bootstrap=0)
        assert record["test"]["nll"][0] == pytest.approx(found.number("nll").value, rel=1e-5)
        assert record["test"]["nll"][1] <= record["test"]["nll"][0] <= record["test"]["nll"][2]
        assert record["members"] == pytest.approx(
            [found.number("accuracy", member=place).value for place in range(3)], abs=1e-5
        )
        for part in ("svhn", "near"):
            expected = found.number("auroc", part, score="bma").value
            assert record["auroc"][part]["bma"][0] == pytest.approx(expected, rel=1e-5)
        assert set(record["corrupted"]) == {"1", "5", "all"}
        first = sets.test.x[:9], sets.test.y[:9]
        noisy = ds.evaluate(members, first, corruptions=["gaussian_noise"], severities=(1, 5), bootstrap=0)
        assert record["corruption"]["gaussian_noise"]["5"]["accuracy"][0] == pytest.approx(
            noisy.number("accuracy", "gaussian_noise", severity=5).value, abs=1e-5
        )
        json.dumps(record)
        assert "accuracy" in summary_line(record)

    def test_outputs_are_kept_in_half_precision(self, sets, tmp_path):
        members = ensemble_on(sets)
        logits = save_outputs(members, sets, tmp_path / "outputs" / "a.npz")
        torch.testing.assert_close(logits, ds.predict(members, sets.test.x))
        with np.load(tmp_path / "outputs" / "a.npz") as stored:
            assert set(stored.files) == {"test", "labels"}
            assert stored["test"].dtype == np.float16
            np.testing.assert_allclose(stored["test"], logits, rtol=1e-3, atol=1e-3)
            np.testing.assert_array_equal(stored["labels"], sets.test.y)


class TestArms:
    def arm(self, name, made, like="", fails=None):
        def work():
            made.append(name)
            if fails is not None:
                raise fails
            return {"value": len(made), "line": f"value {len(made)}"}

        return Arm(name, work, like)

    def test_what_is_done_is_not_done_again(self, tmp_path, capsys):
        made = []
        arms = [self.arm(name, made) for name in ("a", "b")]
        first = run_arms(arms[:1], tmp_path, settings={"epochs": 2})
        assert "[1/1] a: value 1" in capsys.readouterr().out
        second = run_arms(arms, tmp_path, settings={"epochs": 2})
        assert made == ["a", "b"]
        assert second.done["a"] == first.done["a"]
        run_arms(arms, tmp_path, settings={"epochs": 3})
        assert made == ["a", "b", "a", "b"]

    def test_a_line_that_was_cut_off_is_passed_over_and_swallows_nothing(self, tmp_path):
        made = []
        arms = [self.arm(name, made) for name in ("a", "b")]
        run_arms(arms, tmp_path, settings={})
        path = tmp_path / "arms.jsonl"
        path.write_text(path.read_text()[:-5])
        run_arms(arms, tmp_path, settings={})
        assert made == ["a", "b", "b"]
        run_arms(arms, tmp_path, settings={})
        assert made == ["a", "b", "b"]

    def test_no_arm_is_begun_once_the_time_is_spent(self, tmp_path, capsys):
        made = []
        found = run_arms([self.arm(n, made) for n in ("a", "b")], tmp_path, settings={}, minutes=0)
        assert made == []
        assert found.not_run == {"a": "no time left", "b": "no time left"}
        assert "2 arms were not run: a; b\n" in capsys.readouterr().out
        run_arms([self.arm(str(n), made) for n in range(10)], tmp_path, settings={}, minutes=0)
        assert "10 arms were not run: 0; 1; 2; 3; 4; 5; 6; 7; and 2 more\n" in capsys.readouterr().out

    def test_an_arm_for_which_one_like_it_took_too_long_gives_way_to_a_shorter_one(self, tmp_path, monkeypatch):
        now, made = [0.0], []
        monkeypatch.setattr(arm_log.time, "monotonic", lambda: now[0])

        def arm(name, like, seconds):
            def work():
                made.append(name)
                now[0] += seconds
                return {}

            return Arm(name, work, like)

        arms = [arm("large 1", "large", 60.0), arm("large 2", "large", 60.0), arm("small", "small", 5.0)]
        found = run_arms(arms, tmp_path, settings={}, minutes=100 / 60)
        assert made == ["large 1", "small"]
        assert found.not_run == {"large 2": "no time left"}

    @pytest.mark.parametrize("error", [ds.DivergedError("member 1 diverged."), torch.OutOfMemoryError("no room")])
    def test_an_arm_that_fails_is_named_and_the_next_is_begun(self, tmp_path, error):
        made = []
        arms = [self.arm("bad", made, fails=error), self.arm("good", made)]
        found = run_arms(arms, tmp_path, settings={})
        assert found.not_run == {"bad": str(error)}
        assert list(found.done) == ["good"]

    def test_mistakes_are_not_hidden(self, tmp_path):
        with pytest.raises(TypeError):
            run_arms([self.arm("bad", [], fails=TypeError("a bug"))], tmp_path, settings={})

    def test_an_arm_that_is_ended_on_its_way_goes_on_and_ends_in_the_same_record(self, sets, tmp_path):
        seen = []

        def arm(ends_after=None):
            def work():
                ensemble = ensemble_on(sets)
                for part, epochs in (("short", 2), ("long", 5)):
                    options = {"batch_size": 16, "engine": "eager", "callback": partial(watch, part)}
                    run = fit_images(ensemble, sets, epochs=epochs, part=part, **options)
                record = measure(ensemble, sets, bootstrap=0) | {"training": training_record(run)}
                return record

            def watch(part, run):
                seen.append((part, run.epoch))
                if seen[-1] == ends_after:
                    raise KeyboardInterrupt

            return Arm("a, b M=2", work)

        whole = run_arms([arm()], tmp_path / "whole", settings={}).done
        seen.clear()
        with pytest.raises(KeyboardInterrupt):
            run_arms([arm(("long", 3))], tmp_path / "cut", settings={})
        # A run of other settings is another.
        with pytest.raises(KeyboardInterrupt):
            run_arms([arm(("short", 1))], tmp_path / "cut", settings={"epochs": 9})
        seen.clear()
        again = run_arms([arm()], tmp_path / "cut", settings={}).done
        assert seen == [("long", 3), ("long", 4), ("long", 5)]
        for record in (*whole.values(), *again.values()):
            del record["arm_seconds"], record["training"]["seconds"], record["training"]["history"]["seconds"]
        assert again == whole
        assert not (tmp_path / "whole" / "unfinished").exists()
        assert not list((tmp_path / "cut" / "unfinished").glob("*/long"))

    def test_arms_are_chosen_by_beginnings_and_stars(self):
        names = ["cnn beta=0", "cnn beta=1", "vgg beta=1"]
        assert chosen(names, None) == names
        assert chosen(names, ["vgg"]) == ["vgg beta=1"]
        assert chosen(names, ["*beta=1"]) == ["cnn beta=1", "vgg beta=1"]
        assert chosen(names, ["beta=1"]) == ["cnn beta=1", "vgg beta=1"]
        with pytest.raises(ValueError, match="'mlp'"):
            chosen(names, ["mlp"])


class TestPages:
    def test_values_are_shown_with_their_intervals(self):
        assert with_interval([0.5, 0.25, 0.75]) == "0.5000\u00a0[0.2500,\u00a00.7500]"
        assert with_interval([0.5, None, None]) == "0.5000"
        assert with_interval(None) is None

    def test_repeats_get_bands_of_two_standard_errors(self):
        found = over_seeds(
            [(0.0, {"a": 1.0}), (0.0, {"a": 3.0}), (1.0, {"a": 2.0}), (1.0, {"a": 2.0})], lambda r: r["a"]
        )
        # Standard deviation of 1 and 3 is sqrt(2), of their mean 1: the band is 2 +- 2.
        line = Line.over("a", found)
        assert (line.y, line.low, line.high) == ([2.0, 2.0], pytest.approx([0.0, 2.0]), pytest.approx([4.0, 2.0]))

    def test_lines_are_named_once_at_their_ends_and_apart(self):
        lines = [Line("a", [0, 1], [0, 1.0]), Line("b", [0, 1], [1, 1.001], colour=1), Line("", [0, 1], [0, 0])]
        figure = draw([Panel("first", "x", lines), Panel("second", "x", lines)])
        assert [[text.get_text() for text in ax.texts] for ax in figure.axes] == [["a", "b"], []]
        a, b = (text.get_position()[1] for text in figure.axes[0].texts)
        assert b - a > 0.05

    def test_what_was_not_run_is_on_the_page(self, sets):
        section = sets_section(sets, arm_log.Arms({"a": {"arm_seconds": 3.0}}, {"b": "no time left"}))
        captions = {block.caption: block for block in section.blocks if hasattr(block, "caption")}
        assert list(captions["Arms that were not run"].rows) == [("b", "no time left")]


def test_an_option_that_a_study_does_not_have_is_refused(tmp_path):
    study = Study("uci-deep-ensembles", "", "dissensus_studies.deep_ensembles.uci")
    with pytest.raises(ValueError, match="has no option minutes"):
        study.run(tmp_path, minutes=3)


def test_options_of_the_command_line_reach_the_study(tmp_path, monkeypatch):
    given = {}

    def run(output, *, quick, seed, data, epochs=None, minutes=None, arms=None, known=None):
        given.update(epochs=epochs, minutes=minutes, arms=arms, known=known)
        return tmp_path / "report.html"

    monkeypatch.setitem(sys.modules, "an_image_study", SimpleNamespace(run=run))
    monkeypatch.setattr(dissensus_studies, "STUDIES", {"toy": Study("toy", "A toy.", "an_image_study")})
    options = ["--epochs", "3", "--minutes", "1.5", "--arms", "cnn M=5, gap", "--known", "svhn"]
    result = CliRunner().invoke(cli.app, ["study", "toy", *options])
    assert result.exit_code == 0, result.output
    assert given == {"epochs": 3, "minutes": 1.5, "arms": ["cnn M=5", "gap"], "known": "svhn"}
    refused = CliRunner().invoke(cli.app, ["study", "toy", "--setting", "imagenet"])
    assert refused.exit_code == 2
    assert "has no option setting" in refused.output
