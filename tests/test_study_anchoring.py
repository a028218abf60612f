"""The study of masked anchoring: what it reads, what it says of records, and that both settings run to the end."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dissensus as ds
from dissensus.architectures import resnet18
from dissensus.data.adaptation import load_tasks
from dissensus.data.suites import SUITES
from dissensus.studies import STUDIES, anchoring_arms, anchoring_imagenet
from dissensus.studies.anchoring import published_tables
from dissensus.studies.anchoring_arms import AnchorSetting, build, settings_of, without_head
from dissensus.studies.anchoring_claims import anchoring_claims
from dissensus.studies.anchoring_figures import alpha_figure, improvements, radar_figure
from dissensus.studies.anchoring_tables import OOD_CIFAR10, as_markdown, auroc_of, beside
from dissensus.studies.image_sets import load_images


def record(accuracy=0.9, corrupted=0.7, ece=0.1, auroc=0.9, adapted=0.5):
    level = {"accuracy": [corrupted, None, None], "smooth_ece": [ece, None, None]}
    return {
        "test": {"accuracy": [accuracy, None, None]},
        "corrupted": {key: level for key in ("1", "2", "3", "4", "5", "all")},
        "auroc": {name: {"mean_energy": [auroc, None, None]} for name in ("cifar100", "isun", "near", "far")},
        "adaptation": {"dtd": {"accuracy": adapted, "ece": 0.3}},
    }


class TestArms:
    def test_names_tell_all_arms_apart(self):
        names = [setting.name for setting in settings_of(quick=False, seed=0)]
        assert len(set(names)) == len(names)

    def test_the_document_s_rows_come_first(self):
        rows = [setting.row for setting in settings_of(quick=False, seed=0)[:5]]
        assert sorted(rows) == sorted(row for _, row in OOD_CIFAR10.rows)

    def test_settings_decide_the_kind_of_network(self):
        sets = load_images(None, limit=20)
        assert build(AnchorSetting(anchored=False), sets, quick=True).num_members == 1
        masked = build(AnchorSetting(alpha=0.25, variant="example"), sets, quick=True)
        assert (masked.mask_probability, masked.mask_per) == (0.25, "example")
        assert len(masked.references) == len(sets.all_train.x)

    @pytest.mark.parametrize("tails", anchoring_arms.TAILS)
    def test_the_study_s_network_trains_with_every_way_to_find_tails(self, tails):
        sets = load_images(None, limit=20)
        setting = AnchorSetting(alpha=0.25, tail_weight=0.1, tails=tails)
        x, y = sets.normalise(sets.all_train.x[:16]), sets.all_train.y[:16]
        run = ds.fit(
            build(setting, sets, quick=True),
            (x, y),
            objective=anchoring_arms.objective_of(setting),
            epochs=1,
            batch_size=16,
        )
        assert run.history["tail"][-1] >= math.log(sets.num_classes)

    def test_a_network_without_its_head_gives_features(self):
        net = resnet18(10, width=4)
        assert without_head(net)(torch.zeros(2, 3, 32, 32)).shape == (2, 32)
        with pytest.raises(ValueError, match="no linear layer"):
            without_head(nn.ReLU())


class TestTables:
    def test_ours_stands_beside_the_document_s(self):
        table = beside(
            OOD_CIFAR10,
            {("resnet18", "plain"): [record(auroc=0.8), record(auroc=0.9)]},
            auroc_of("mean_energy"),
        )
        cells = dict(zip(table.columns[2::2], table.rows[0][3::2], strict=True))
        assert table.rows[0][:2] == ["resnet18", "plain"]
        assert cells["CIFAR-100"] == "85.00"
        assert cells["Textures"] is None
        assert table.rows[1][3] is None

    def test_other_data_is_not_put_beside_the_document_s_numbers(self):
        shown = published_tables("digits", {("resnet18", "plain"): [record()]})
        assert "97.40" not in as_markdown(shown[0])
        assert "97.40" in as_markdown(published_tables("cifar10", {("resnet18", "plain"): [record()]})[0])

    @pytest.mark.parametrize("known", ["digits", "cifar10", "cifar100"])
    def test_probes_are_shown_task_by_task_for_any_data(self, known):
        *_, accuracy, error = published_tables(known, {("resnet18", "plain"): [record(adapted=0.5)]})
        assert "50.00" in accuracy.rows[0]
        assert "0.300" in error.rows[0]
        assert ("24.65" in accuracy.rows[0]) == (known == "cifar100")

    def test_markdown_has_a_line_for_each_row(self):
        text = as_markdown(beside(OOD_CIFAR10, {}, auroc_of("mean_energy")))
        assert text.count("| resnet18 |") == 5


class TestClaims:
    def test_every_claim_is_judged_by_its_own_numbers(self):
        better = record(corrupted=0.8, ece=0.05, auroc=0.95, adapted=0.6)
        rows = {
            ("resnet18", "plain"): [record()],
            ("resnet18", "anchored"): [record()],
            ("resnet18", "alpha=0.25"): [better],
        }
        verdicts = {claim.statement: claim.verdict for claim in anchoring_claims(rows)}
        assert set(verdicts.values()) == {"reproduced"}
        rows[("resnet18", "alpha=0.25")] = [
            record(accuracy=0.8, corrupted=0.6, ece=0.2, auroc=0.8, adapted=0.4)
        ]
        assert {claim.verdict for claim in anchoring_claims(rows)} == {"not reproduced"}

    def test_a_difference_within_the_noise_of_several_runs_does_not_count(self):
        plain = [record(corrupted=value) for value in (0.6, 0.8)]
        masked = [record(corrupted=value) for value in (0.65, 0.85)]
        rows = {("resnet18", "plain"): plain, ("resnet18", "alpha=0.25"): masked}
        verdicts = {claim.statement: claim.verdict for claim in anchoring_claims(rows)}
        assert verdicts["Masked anchoring raises accuracy under corruption."] == "not told apart from noise"
        rows = {("resnet18", "plain"): [record()], ("resnet18", "alpha=0.25"): [record(adapted=0.503)]}
        verdicts = {claim.statement: claim.verdict for claim in anchoring_claims(rows)}
        assert verdicts["Masked networks adapt better (linear probes)."] == "not told apart from noise"

    def test_mining_must_gain_detection_and_lose_robustness(self):
        rows = {
            ("resnet18", "alpha=0.25"): [record()],
            ("resnet18", "alpha=0.25 tail=1 real"): [record(auroc=0.95, corrupted=0.6)],
        }
        (claim,) = (claim for claim in anchoring_claims(rows) if "mining" in claim.statement)
        assert claim.verdict == "reproduced"
        for found, verdict in (
            (record(auroc=0.95), "not told apart from noise"),
            (record(auroc=0.95, corrupted=0.8), "not reproduced"),
            (record(auroc=0.85, corrupted=0.6), "not reproduced"),
        ):
            rows[("resnet18", "alpha=0.25 tail=1 real")] = [found]
            (claim,) = (claim for claim in anchoring_claims(rows) if "mining" in claim.statement)
            assert claim.verdict == verdict

    def test_a_single_run_is_drawn_with_the_band_of_its_repeats(self):
        masked = {0.0: [record()], 0.25: [record(auroc=0.95)]}
        single, several = (alpha_figure([record()] * count, masked) for count in (1, 2))
        names = [figure.axes[0].get_legend_handles_labels()[1] for figure in (single, several)]
        assert names == [["anchored", "plain", "plain ± 0.012"], ["anchored", "plain"]]

    def test_improvements_are_in_per_cent_of_the_plain_network(self):
        found = improvements([record()], [record(corrupted=0.77, auroc=0.99)])
        assert found["corruption accuracy"] == pytest.approx(10.0)
        assert found["mean AUROC"] == pytest.approx(10.0)
        assert found["adaptation accuracy"] == pytest.approx(0.0)
        assert radar_figure([record()], {"masked": [record()]}).axes


class TestTasks:
    def save(self, path, count, classes=2):
        images = np.zeros((count, 32, 32, 3), np.uint8)
        np.savez(path, x=images, y=np.arange(count) % classes)

    def test_parts_and_halves_are_found(self, tmp_path):
        self.save(tmp_path / "cifar100_train_1of2.npz", 6)
        self.save(tmp_path / "cifar100_train_2of2.npz", 4)
        self.save(tmp_path / "cifar100_test.npz", 3)
        self.save(tmp_path / "mnist_test.npz", 8)
        found = load_tasks(tmp_path, (3, 32, 32)).found
        assert [len(found["cifar100"].train.x), len(found["cifar100"].test.x)] == [10, 3]
        assert found["mnist"].train.y.tolist() == found["mnist"].test.y.tolist() == [0, 0, 1, 1]
        assert "half" in found["mnist"].notes[-1]

    def test_folders_of_classes_are_found(self, tmp_path):
        for part in ("train", "test"):
            for name in ("a", "b"):
                (tmp_path / "pets" / part / name).mkdir(parents=True)
                Image.fromarray(np.zeros((40, 50, 3), np.uint8)).save(
                    tmp_path / "pets" / part / name / "1.png"
                )
        assert load_tasks(tmp_path, (3, 32, 32)).found["pets"].train.x.shape == (2, 3, 32, 32)

    def test_classes_of_both_parts_go_by_their_names(self, tmp_path):
        brightness = {"a": 0, "b": 100, "c": 200}

        def save(part, names):
            for name in names:
                folder = tmp_path / "pets" / part / name
                folder.mkdir(parents=True)
                picture = np.full((32, 32, 3), brightness.get(name, 50), np.uint8)
                Image.fromarray(picture).save(folder / "1.png")

        save("train", "abc")
        save("test", "ac")
        task = load_tasks(tmp_path, (3, 32, 32)).found["pets"]
        for part in (task.train, task.test):
            assert part.x.float().mean((1, 2, 3)).tolist() == [100.0 * label for label in part.y]
        save("test", "d")
        assert (
            "class 'd', which the training images lack" in load_tasks(tmp_path, (3, 32, 32)).missing["pets"]
        )

    def test_what_is_missing_or_left_out_is_told_apart(self, tmp_path):
        self.save(tmp_path / "cifar10_test.npz", 4)
        found = load_tasks(tmp_path, (3, 32, 32), without=("cifar10",))
        assert not found.found
        assert "cifar10" not in found.missing
        assert "not found" in found.missing["food101"]

    def test_a_folder_that_is_not_there_is_named(self, tmp_path):
        with pytest.raises(ValueError, match="does not exist"):
            load_tasks(tmp_path / "no", (3, 32, 32))


def test_the_document_s_suites_have_names():
    assert {each.name for each in SUITES["anchoring-imagenet"].sets} == {
        "ninco", "lsun_crop", "lsun_resize", "isun", "textures", "places"
    }  # fmt: skip
    for known, other in (("cifar10", "cifar100"), ("cifar100", "cifar10")):
        names = {each.name for each in SUITES[f"anchoring-{known}"].sets}
        assert {other, "tiny_imagenet", "places"} <= names
        assert known not in names


def test_the_quick_study_runs_to_the_end_and_goes_on_from_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(anchoring_arms, "QUICK_CORRUPTIONS", ("contrast",))
    for _ in range(2):
        page = STUDIES["anchoring"].run(tmp_path, quick=True, limit=60, epochs=1)
    results = json.loads((tmp_path / "results.json").read_text())
    assert len((tmp_path / "arms.jsonl").read_text().splitlines()) == len(results["arms"]) == 4
    assert results["arms"]["resnet18 anchored seed=0"]["anchors"]["count"] == anchoring_arms.ANCHORS
    assert results["arms"]["resnet18 plain seed=0"]["adaptation"]["digits"]["accuracy"] > 0
    assert "Masked anchoring" in page.read_text()
    assert "| the document says |" in (tmp_path / "tables.md").read_text()


def test_another_setting_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'imagenet' or left out"):
        STUDIES["anchoring"].run(tmp_path, quick=True, setting="cifar")


class TestImageNet:
    @pytest.fixture
    def folder(self, tmp_path):
        generator = np.random.default_rng(0)
        for part, count in (("train", 6), ("val", 4)):
            for number, name in enumerate(("cat", "dog", "eel")):
                (tmp_path / part / name).mkdir(parents=True)
                for place in range(count):
                    pixels = generator.integers(0, 120, (48, 56, 3)) + 45 * number
                    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / part / name / f"{place}.png")
        (tmp_path / "ood" / "ninco").mkdir(parents=True)
        for place in range(5):
            pixels = generator.integers(0, 255, (40, 40, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "ood" / "ninco" / f"{place}.png")
        return tmp_path

    def test_it_runs_to_the_end_on_a_folder(self, folder, tmp_path, monkeypatch):
        monkeypatch.setattr(anchoring_imagenet, "STANDARD", ("contrast",))
        monkeypatch.setattr(anchoring_imagenet, "CBAR", ("checkerboard_cutout",))
        small = anchoring_imagenet.Architecture(
            "resnet18",
            lambda classes: resnet18(classes, width=4),
            (0.1,),
            1,
            {"optimizer": "sgd", "lr": 0.01, "batch_size": 6},
        )
        output = tmp_path / "output"
        anchoring_imagenet.run_imagenet(output, data=folder, size=32, architectures=[small])
        arms = json.loads((output / "results.json").read_text())["arms"]
        assert list(arms) == ["resnet18 plain", "resnet18 anchored", "resnet18 alpha=0.1"]
        for found in arms.values():
            assert set(found["corrupted"]) == set(found["cbar"]) == {"1", "2", "3", "4", "5", "all"}
            assert 0 <= found["auroc"]["ninco"]["mean_energy"][0] <= 1
        assert "Table 11" in (output / "tables.md").read_text()

    def test_the_document_s_architectures_and_probabilities_are_ready(self):
        ready = {each.name: each.alphas for each in anchoring_imagenet.ARCHITECTURES}
        assert ready == {"resnet18": (0.025, 0.05, 0.1), "regnet": (0.1,), "vit-b-16": (0.1,)}

    @pytest.mark.parametrize("each", anchoring_imagenet.ARCHITECTURES, ids=lambda each: each.name)
    def test_networks_are_torchvision_s_and_can_be_anchored(self, each):
        pytest.importorskip("torchvision", reason="torchvision is not installed")
        net = each.make(5).eval()
        x = torch.randn(2, 3, anchoring_imagenet.SIZE, anchoring_imagenet.SIZE)
        ens = ds.Anchored(net, x, 2).eval()
        with torch.no_grad():
            expected = net(x)
            torch.testing.assert_close(ens(x), expected.expand(2, 2, 5), rtol=1e-3, atol=1e-3)

    def test_crops_in_training_are_random_and_in_judging_are_not(self, folder):
        images, sets = anchoring_imagenet.read_folder(folder, 32)
        assert not torch.equal(images[0][0], images[0][0])
        assert images[0][0].shape == (3, 32, 32)
        assert sets.test.x.shape == (12, 3, 32, 32)
        assert sets.test.y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert set(sets.missing) == {"lsun_crop", "lsun_resize", "isun", "textures", "places"}

    def test_references_are_of_all_classes_and_in_no_order(self, folder):
        images, _ = anchoring_imagenet.read_folder(folder, 32)
        references = anchoring_imagenet.references_of(images, seed=0, count=9)
        assert references.shape == (9, 3, 32, 32)
        brightness = references.mean((1, 2, 3))
        assert not torch.equal(brightness, brightness.sort().values)
        assert brightness.max() - brightness.min() > 1

    def test_a_folder_of_another_layout_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="train/<class>/"):
            STUDIES["anchoring"].run(tmp_path / "out", setting="imagenet", data=tmp_path)
