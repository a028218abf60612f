"""The study of masked anchoring: what it reads, what it says of records, and that both settings run to the end."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from anchoring_records import judged, record
from dissensus_studies import STUDIES
from dissensus_studies.anchoring import anchoring_claims, drawing, same_sets
from dissensus_studies.anchoring import arms as anchoring_arms
from dissensus_studies.anchoring.adaptation import Task, Tasks
from dissensus_studies.anchoring.arms import NETS, QUICK_NETS, AnchorSetting, arms_of, build, settings_of, without_head
from dissensus_studies.harness.arm_log import run_arms
from dissensus_studies.harness.figures import Drawing
from dissensus_studies.harness.image_sets import load_images
from dissensus_studies.harness.image_study import Work
from dissensus_studies.harness.labelled import Images
from PIL import Image
from torch import nn

import dissensus as ds
from dissensus.architectures import resnet18
from dissensus.data.suites import SUITES


class TestArms:
    def test_names_tell_all_arms_apart(self, tmp_path):
        for quick, rows in ((False, 23), (True, 4)):
            names = [arm.name for arm in arms_of(Work(tmp_path, quick, sets=load_images(None, limit=20)))]
            nets = QUICK_NETS if quick else NETS
            assert len(set(names)) == len(names) == rows * (nets + 1)

    def test_the_rows_that_the_claims_need_come_first(self, tmp_path):
        rows = [setting.row for setting in settings_of(quick=False)]
        assert rows[:4] == ["plain", "anchored", "alpha=0.25", "alpha=0.25 tail=1 diagonal"]
        arms = arms_of(Work(tmp_path, seed=3, sets=load_images(None, limit=20)))
        ends = ("seed=3", "together seed=3", "seed=4", "seed=5", "seed=6", "seed=7")
        assert [arm.name for arm in arms[:6]] == [f"resnet18 plain {end}" for end in ends]

    def test_settings_decide_the_kind_of_network(self):
        sets = load_images(None, limit=20)
        assert build(AnchorSetting(anchored=False), sets, quick=True).num_members == QUICK_NETS
        masked = build(AnchorSetting(alpha=0.25, variant="example"), sets, quick=True)
        assert (masked.num_trained, masked.num_members) == (QUICK_NETS, QUICK_NETS * anchoring_arms.ANCHORS)
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

    def test_a_set_that_does_not_fit_is_skipped_with_its_reason(self):
        sets = load_images(None, limit=20)
        x, y = sets.test.x[:20], torch.arange(20) % 2
        good, bad = Images(x, y), Images(x, torch.zeros(20, dtype=torch.long))
        tasks = {"one class": Task(bad, bad), "two": Task(good, good)}
        found, skipped = anchoring_arms.adapt(resnet18(8, width=4), sets, tasks, quick=True)
        assert list(found) == ["two"]
        assert found["two"]["images"] == 20
        assert "two classes or more" in skipped["one class"]


class TestRows:
    """Networks of a row are trained as one ensemble, once, and measured one by one."""

    @pytest.fixture
    def work(self, tmp_path, monkeypatch):
        monkeypatch.setattr(anchoring_arms, "QUICK_CORRUPTIONS", ("contrast",))
        return Work(tmp_path, quick=True, epochs=3, sets=load_images(None, limit=60), material=Tasks({}, {}), limit=60)

    @pytest.mark.parametrize("row", [AnchorSetting(anchored=False), AnchorSetting(alpha=0.25)], ids=lambda row: row.row)
    def test_an_arm_measures_its_network_and_together_all_of_them(self, row, work):
        run = anchoring_arms.train(work, row)
        x, y = work.sets.normalise(work.sets.test.x), work.sets.test.y
        logits = run.members.eval()(x).unflatten(0, (QUICK_NETS, -1))
        right = [(each[0].argmax(-1) == y).double().mean().item() for each in logits]
        probs = logits.softmax(-1)
        found = []
        for place in range(QUICK_NETS):
            setting = dataclasses.replace(row, seed=place)
            own = anchoring_arms.measure_one(setting, place, row, work, lambda _: run)
            assert own["setting"]["seed"] == place
            assert own["test"]["accuracy"][0] == pytest.approx(right[place], abs=1e-5)
            if row.anchored:
                several = (probs[place].mean(0).argmax(-1) == y).double().mean().item()
                assert own["anchors"]["test"]["accuracy"][0] == pytest.approx(several, abs=1e-5)
            found.append(own["test"]["nll"][0])
        assert found[0] != found[1]
        together = anchoring_arms.measure_together(row, work, lambda _: run)
        mixture = (probs.flatten(0, 1).mean(0).argmax(-1) == y).double().mean().item()
        assert together["test"]["accuracy"][0] == pytest.approx(mixture, abs=1e-5)
        assert "mutual_information" in together["auroc"]["near"]
        assert together["together"] == {"nets": QUICK_NETS, "references": 5 if row.anchored else 0}

    def test_networks_differ_in_weights_and_in_the_order_of_their_batches(self, work):
        nets = anchoring_arms.build(AnchorSetting(), work.sets, quick=True)
        first, second = (anchoring_arms.one_network(nets, place)[0].net for place in range(QUICK_NETS))
        assert not torch.equal(first.head.weight, second.head.weight)
        assert anchoring_arms.objective_of(AnchorSetting()).batches == "own"

    def test_a_row_is_trained_once_for_all_its_arms_and_goes_on_where_it_was_ended(self, work, monkeypatch):
        fit, seen, last = anchoring_arms.fit_images, [], [1]

        def watched(*given, **options):
            def end(run):
                seen.append(run.epoch)
                if run.epoch > last[0]:
                    raise KeyboardInterrupt

            return fit(*given, **options, callback=end)

        monkeypatch.setattr(anchoring_arms, "fit_images", watched)
        arms = arms_of(work)[: QUICK_NETS + 1]
        settings = work.identity
        with pytest.raises(KeyboardInterrupt):
            run_arms(arms, work.output, settings=settings)
        last[0] = 3
        run_arms(arms_of(work)[:2], work.output, settings=settings)
        assert seen == [1, 2, 2, 3]
        # What is trained to its end is read, not trained again.
        done = run_arms(arms_of(work)[: QUICK_NETS + 1], work.output, settings=settings).done
        assert seen == [1, 2, 2, 3]
        assert len(done) == QUICK_NETS + 1
        assert len({record["training"]["seconds"] for record in done.values()}) == 1


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
        rows[("resnet18", "alpha=0.25")] = [record(accuracy=0.8, corrupted=0.6, ece=0.2, auroc=0.8, adapted=0.4)]
        assert {claim.verdict for claim in anchoring_claims(rows)} == {"not reproduced"}

    def test_a_difference_within_the_noise_of_several_runs_does_not_count(self):
        plain = [record(corrupted=value) for value in (0.6, 0.8)]
        masked = [record(corrupted=value) for value in (0.65, 0.85)]
        rows = {("resnet18", "plain"): plain, ("resnet18", "alpha=0.25"): masked}
        verdicts = {claim.statement: claim.verdict for claim in anchoring_claims(rows)}
        assert verdicts["Masked anchoring raises accuracy under corruption."] == "unresolved"
        rows = {("resnet18", "plain"): [record()], ("resnet18", "alpha=0.25"): [record(adapted=0.503)]}
        verdicts = {claim.statement: claim.verdict for claim in anchoring_claims(rows)}
        assert verdicts["Masked networks adapt better (linear probes)."] == "unresolved"

    def test_mining_is_judged_by_what_it_gains_and_by_what_it_costs(self):
        rows = {("resnet18", "alpha=0.25"): [record()]}
        for found, verdicts in (
            (record(auroc=0.95, corrupted=0.6), ("reproduced", "reproduced")),
            (record(auroc=0.95), ("reproduced", "unresolved")),
            (record(auroc=0.95, corrupted=0.8), ("reproduced", "not reproduced")),
            (record(auroc=0.85, corrupted=0.6), ("not reproduced", "reproduced")),
        ):
            rows[("resnet18", "alpha=0.25 tail=1 real")] = [found]
            claims = [claim for claim in anchoring_claims(rows) if "mining" in claim.statement]
            assert tuple(claim.verdict for claim in claims) == verdicts

    @pytest.mark.parametrize("unmeasured", ["auroc", "adaptation"])
    def test_what_was_not_measured_is_not_tested(self, unmeasured):
        rows = {
            ("resnet18", row): [record() | {unmeasured: {}}]
            for row in ("plain", "anchored", "alpha=0.25", "alpha=0.25 tail=1 real")
        }
        about = {"auroc": ("detects", "AUROC"), "adaptation": ("adapt",)}[unmeasured]
        reason = {"auroc": "no mean AUROC", "adaptation": "no adaptation accuracy"}[unmeasured]
        for claim in anchoring_claims(rows):
            untested = any(word in claim.statement for word in about)
            assert claim.verdict.startswith("not tested: ") == (reason in claim.verdict) == untested

    def test_few_images_tell_no_difference(self):
        # Two standard errors of a difference of accuracies near 0.7 on 100 images are 0.13; on 10 000 they are 0.013.
        for images, verdict in ((100, "unresolved"), (10_000, "reproduced")):
            plain, masked = (judged(0.7, images), judged(0.76, images))
            rows = {("resnet18", "plain"): [plain], ("resnet18", "alpha=0.25"): [masked]}
            verdicts = {claim.statement: claim.verdict for claim in anchoring_claims(rows)}
            assert verdicts["Masked anchoring raises accuracy under corruption."] == verdict
            assert verdicts["Masked networks adapt better (linear probes)."] == verdict
            assert verdicts["Masking detects unknown images better than a plain network."] == verdict

    def test_repeats_on_few_images_tell_no_difference_either(self):
        rows = {("resnet18", "plain"): [judged(0.7, 100)] * 3, ("resnet18", "alpha=0.25"): [judged(0.72, 100)] * 3}
        (claim,) = (claim for claim in anchoring_claims(rows) if "raises accuracy" in claim.statement)
        assert claim.verdict == "unresolved"

    def test_accuracy_grows_only_beyond_the_noise(self):
        grows, falls = "anchored to alpha=0.125", "alpha=0.125 to alpha=0.25"
        mixed = f"reproduced for {grows}; unresolved for anchored to alpha=0.25; not reproduced for {falls}"
        for values, verdict in (
            ((0.6, 0.7, 0.8), "reproduced"),
            ((0.6, 0.601, 0.602), "unresolved"),
            ((0.8, 0.7, 0.6), "not reproduced"),
            ((0.6, 0.7, 0.6), mixed),
        ):
            rows = {
                ("resnet18", row): [record(corrupted=value)]
                for row, value in zip(("anchored", "alpha=0.125", "alpha=0.25"), values, strict=True)
            }
            (claim,) = (claim for claim in anchoring_claims(rows) if "grows" in claim.statement)
            assert claim.verdict == verdict

    def test_means_are_over_the_sets_that_all_arms_have(self):
        other = record()
        other["adaptation"]["mnist"] = {"accuracy": 0.99, "ece": 0.0}
        compared, notes = same_sets({"first": record(), "second": other})
        assert list(compared["second"]["adaptation"]) == ["dtd"]
        assert list(other["adaptation"]) == ["dtd", "mnist"]
        assert "mnist" in notes[0]


class TestFigures:
    def drawn(self, *settings, **changes):
        rows = {
            (each.architecture, each.row): [record() | changes | {"setting": vars(each)} for _ in range(2)]
            for each in settings
        }
        return drawing(rows)

    def test_there_is_a_figure_where_there_are_arms_for_it(self):
        plain, anchored = AnchorSetting(anchored=False), AnchorSetting()
        masked, mined = AnchorSetting(alpha=0.25), AnchorSetting(alpha=0.25, tail_weight=0.1)
        for settings in ((plain, anchored, masked, mined), (plain, masked)):
            assert self.drawn(*settings).name == "anchoring_alpha"
        for settings in ((anchored, masked), (plain, mined)):
            assert self.drawn(*settings) is None

    def test_what_was_not_measured_is_left_out(self):
        settings = AnchorSetting(anchored=False), AnchorSetting(alpha=0.25)
        whole, bare = self.drawn(*settings), self.drawn(*settings, auroc={})
        assert {panel.title for panel in whole.panels} - {panel.title for panel in bare.panels} == {"mean AUROC"}
        assert [line.name for line in bare.panels[0].lines] == ["resnet18", "resnet18, plain"]


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
    assert len((tmp_path / "arms.jsonl").read_text().splitlines()) == len(results["arms"]) == 4 * (QUICK_NETS + 1)
    assert results["arms"]["resnet18 anchored seed=0"]["anchors"]["count"] == anchoring_arms.ANCHORS
    assert results["arms"]["resnet18 plain seed=0"]["adaptation"]["digits"]["accuracy"] > 0
    text = page.read_text()
    assert "Masked anchoring" in text
    assert [name for name in results["arms"] if f">{name}<" not in text] == []
    assert "Sets to adapt to: digits." in text


def test_a_folder_without_unknown_sets_is_enough(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(anchoring_arms, "QUICK_CORRUPTIONS", ("contrast",))
    generator = np.random.default_rng(0)
    folder = tmp_path / "data"
    (folder / "Oxford-IIIT-Pet" / "images").mkdir(parents=True)
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(folder / "Oxford-IIIT-Pet" / "images" / "cat_1.jpg")
    for part, count in (("train", 80), ("test", 30)):
        pixels = generator.integers(0, 255, (count, 32, 32, 3)).astype(np.uint8)
        np.savez(folder / f"cifar100_{part}.npz", x=pixels, y=np.arange(count) % 10)
    page = STUDIES["anchoring"].run(tmp_path / "out", quick=True, data=folder, known="cifar100", limit=40, epochs=1)
    printed = capsys.readouterr().out
    assert printed.index("pets cannot be used: ") < printed.index("[1/12]")
    text = page.read_text()
    assert "not tested: there is no mean AUROC" in text
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert not results["not_run"]
    assert results["tasks_missing"]["pets"].startswith("cannot be used: ")


def test_numbers_are_kept_where_a_figure_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(anchoring_arms, "QUICK_CORRUPTIONS", ("contrast",))

    def fail(*arguments):
        raise ValueError("cannot be drawn")

    monkeypatch.setattr(Drawing, "section", fail)
    with pytest.raises(ValueError, match="cannot be drawn"):
        STUDIES["anchoring"].run(tmp_path, quick=True, limit=60, epochs=1)
    assert len(json.loads((tmp_path / "results.json").read_text())["arms"]) == 4 * (QUICK_NETS + 1)


def test_another_setting_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no option setting"):
        STUDIES["anchoring"].run(tmp_path, quick=True, setting="cifar")
