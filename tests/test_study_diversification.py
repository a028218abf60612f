"""The study of members that are made to disagree: what it measures, which ensembles it trains, and that it runs, stops and goes on."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from backbone_cases import Block
from diversification_records import fake
from PIL import Image
from torch import nn

import dissensus as ds
from dissensus import metrics, scores
from dissensus import objectives as obj
from dissensus.studies import STUDIES
from dissensus.studies import diversification as study
from dissensus.studies.diversification_arms import head_epochs, make_head, objective_of
from dissensus.studies.diversification_claims import diversification_claims
from dissensus.studies.diversification_configurations import CONFIGURATIONS, released_cosine
from dissensus.studies.diversification_data import Material, of_first_classes
from dissensus.studies.diversification_figures import example_scores
from dissensus.studies.diversification_measures import (
    Judged,
    Scored,
    detection_record,
    gains_over,
    quality_record,
)
from dissensus.studies.diversification_ranks import Ranks
from dissensus.studies.diversification_reading import Estimate, Found, label
from dissensus.studies.diversification_settings import Setting, settings_of
from dissensus.studies.diversification_spurious import group_record, spurious_sets
from dissensus.studies.image_sets import load_images


def judged(members=4, classes=5, seed=0, skill=2.0):
    generator = torch.Generator().manual_seed(seed)

    def logits(count):
        return torch.randn(members, count, classes, generator=generator)

    labels = torch.randint(0, classes, (300,), generator=generator)
    test = logits(300)
    test[:, torch.arange(300), labels] += skill
    corrupted = {
        level: {name: test[:, :100] + scale * logits(100) for name in ("fog", "snow")}
        for level, scale in (("C-1", 0.3), ("C-5", 2.0))
    }
    return Judged(
        test, labels, {"near": logits(200), "far": 2 * logits(150)}, corrupted, {"all": ["near", "far"]}
    )


class TestRanks:
    def test_an_auroc_is_that_of_the_metric(self):
        known, unknown = torch.randn(3, 200).round(decimals=1), (torch.randn(3, 120) + 0.5).round(decimals=1)
        wanted = [metrics.auroc(u, k) for u, k in zip(unknown, known, strict=True)]
        np.testing.assert_allclose(Ranks.of(known, unknown).auroc, wanted, atol=1e-12)

    def test_standard_errors_are_the_spread_over_samples(self):
        generator = torch.Generator().manual_seed(1)
        draws = [
            Ranks.of(torch.randn(1, 80, generator=generator), 1 + torch.randn(1, 60, generator=generator))
            for _ in range(400)
        ]
        spread = torch.cat([draw.auroc for draw in draws]).std()
        typical = torch.cat([draw.error for draw in draws]).mean()
        assert typical == pytest.approx(float(spread), rel=0.12)

    def test_standard_errors_of_corrupted_images_allow_for_their_being_the_same_images(self):
        generator = torch.Generator().manual_seed(2)
        values, errors, loose = [], [], []
        for _ in range(400):
            clean = torch.randn(1, 100, generator=generator)
            parts = [clean + 0.5 + 0.5 * torch.randn(1, 100, generator=generator) for _ in range(3)]
            paired = Ranks.mean([Ranks.of(clean, part, paired=True) for part in parts])
            values.append(paired.auroc)
            errors.append(paired.error)
            loose.append(Ranks.mean([Ranks.of(clean, part) for part in parts]).error)
        spread = float(torch.cat(values).std())
        assert float(torch.cat(errors).mean()) == pytest.approx(spread, rel=0.15)
        assert float(torch.cat(loose).mean()) > 1.5 * spread

    def test_the_error_of_a_difference_is_that_of_paired_inputs(self):
        generator = torch.Generator().manual_seed(3)
        differences, errors, separate = [], [], []
        for _ in range(400):
            known, unknown = (
                torch.randn(1, 80, generator=generator),
                1 + torch.randn(1, 60, generator=generator),
            )
            first = Ranks.of(known, unknown)
            noise = [0.3 * torch.randn(1, n, generator=generator) for n in (80, 60)]
            second = Ranks.of(known + noise[0], unknown + noise[1])
            differences.append(second.minus(first).auroc)
            errors.append(second.minus(first).error)
            separate.append((first.error**2 + second.error**2).sqrt())
        assert float(torch.cat(errors).mean()) == pytest.approx(float(torch.cat(differences).std()), rel=0.15)
        assert float(torch.cat(separate).mean()) > 1.5 * float(torch.cat(errors).mean())

    def test_the_mean_over_sets_is_the_mean_of_their_aurocs(self):
        parts = [
            Ranks.of(torch.zeros(1, 5), torch.full((1, count), value))
            for count, value in ((3, 1.0), (9, 0.0))
        ]
        assert Ranks.mean(parts).auroc.item() == pytest.approx(0.75)


class TestMeasures:
    def test_numbers_are_those_of_the_metrics(self):
        case = judged()
        record = quality_record(case)
        mixture = case.test.softmax(-1).mean(0)
        assert record["test"]["accuracy"][0] == pytest.approx(
            metrics.accuracy(mixture, case.labels), abs=1e-6
        )
        assert record["test"]["nll"][0] == pytest.approx(metrics.nll(mixture, case.labels), abs=1e-5)
        assert record["test"]["brier"][0] == pytest.approx(metrics.brier(mixture, case.labels), abs=1e-5)
        answers = case.test.argmax(-1)
        assert record["test"]["disagreement"][0] == pytest.approx(
            metrics.mean_disagreement(answers), abs=1e-6
        )
        assert record["unique"]["far"][0] == pytest.approx(
            scores.num_unique(case.ood["far"]).mean().item(), abs=1e-5
        )
        pds = scores.predictive_diversity(case.test).mean().item() * case.test.shape[-1]
        assert record["pds"]["test"][0] == pytest.approx(pds, abs=1e-5)
        two = [scores.num_unique(x).mean().item() for x in case.corrupted["C-5"].values()]
        assert record["unique"]["C-5"][0] == pytest.approx(np.mean(two), abs=1e-5)

    def test_corruptions_are_judged_one_by_one_and_then_averaged(self):
        case = judged()
        found = detection_record(Scored.of(case).detected(case.groups))["auroc"]
        known = scores.bma(case.test[:, :100])
        wanted = [metrics.auroc(scores.bma(x), known) for x in case.corrupted["C-5"].values()]
        assert found["C-5"]["bma"][0] == pytest.approx(np.mean(wanted), abs=1e-6)
        sets = [metrics.auroc(scores.bma(x), scores.bma(case.test)) for x in case.ood.values()]
        assert found["all"]["bma"][0] == pytest.approx(np.mean(sets), abs=1e-6)
        assert found["far"]["bma"][1] < found["far"]["bma"][0] < found["far"]["bma"][2]

    def test_pds_is_compared_with_every_score(self):
        case = judged()
        record = detection_record(Scored.of(case).detected(case.groups))
        for part, found in record["pds_minus"].items():
            assert found["predictive_diversity"] == [0, 0, 0]
            gap = record["auroc"][part]["predictive_diversity"][0] - record["auroc"][part]["bma"][0]
            assert found["bma"][0] == pytest.approx(gap, abs=2e-6)

    def test_gains_are_over_the_same_score_and_over_the_best(self, tmp_path):
        case, other = judged(seed=0), judged(seed=0, skill=3.0)
        path = tmp_path / "kept" / "reference.npz"
        Scored.of(case).save(path)
        reference, detected = (each.detected(case.groups) for each in (Scored.load(path), Scored.of(other)))
        found = gains_over(reference, detected)
        before, after = (detection_record(each)["auroc"] for each in (reference, detected))
        for part, gains in found["gain"].items():
            assert gains["bma"][0] == pytest.approx(after[part]["bma"][0] - before[part]["bma"][0], abs=2e-6)
            best = max(value[0] for value in before[part].values())
            over_best = found["gain_over_best"][part]["bma"][0]
            assert over_best == pytest.approx(after[part]["bma"][0] - best, abs=2e-6)

    def test_members_that_diverged_end_their_arm_and_not_the_study(self):
        case = judged()
        case.test[0, 0, 0] = float("nan")
        with pytest.raises(RuntimeError, match="finite"):
            Scored.of(case)


class TestSettings:
    def test_names_tell_all_arms_apart(self):
        for quick in (True, False):
            names = [setting.name for setting in settings_of(quick, 0)]
            assert len(set(names)) == len(names)

    def test_what_the_document_varies_is_there(self):
        settings = [setting for setting in settings_of(False, 0) if setting.seed == 0]
        half = [s for s in settings if s.family == "heads half" and s.method == "ldr" and s.layers == 2]
        for size in (2, 5, 10, 50):
            published = {
                s.strength for s in half if s.num_members == size and s.guard == "none" and s.active == 2
            }
            assert {0, 0.1, 0.5, 1, 5, 10} <= published
        drawn = {(s.num_members, s.active) for s in half if s.strength == 0.5 and s.guard == "none"}
        assert {(5, 2), (5, 3), (5, 4), (5, 5), (50, 2), (50, 5), (50, 10)} <= drawn
        methods = {s.method for s in settings if s.kind == "nets"}
        assert {
            "single",
            "deep",
            "diverse",
            "ldr",
            "a2d",
            "divdis",
            "masksembles",
            "dropout",
            "batch",
        } == methods
        assert {"share", "none", "cap", "falling", "held-out loss", "held-out accuracy"} == {
            s.guard for s in settings if s.kind == "nets" and s.method == "ldr" and s.strength == 0.5
        }
        assert {0.1, 0.5, 1, 5} <= {s.strength for s in settings if s.kind == "nets" and s.guard == "share"}

    def test_a_reference_comes_before_what_is_compared_with_it(self):
        for quick in (True, False):
            settings = settings_of(quick, 3)
            place = {setting.name: index for index, setting in enumerate(settings)}
            for setting in settings:
                if setting.kind in ("nets", "heads") and setting.num_members > 1:
                    assert place[setting.reference] <= place[setting.name], setting.name

    def test_guards_become_objectives(self):
        sources = (torch.zeros(4, 2), torch.ones(4, 2))
        base = Setting("heads", "ldr", strength=0.5, active=2, backbone="half")
        assert objective_of(base, sources) == obj.LossGuided(0.5, active=2)
        assert objective_of(replace(base, guard="none"), sources).guard in (None, "none")
        assert objective_of(replace(base, guard="share=0.5"), sources).guard == obj.LossShare(0.5)
        falling = objective_of(replace(base, guard="falling"), sources)
        assert falling.guard == "none"
        assert falling.strength(torch.tensor(0.5)).item() == pytest.approx(0.125)
        outside = objective_of(Setting("nets", "divdis", strength=3.0, source=1), sources)
        assert (outside.regulariser, outside.strength, outside.ood_data is sources[1]) == (
            "divdis",
            3.0,
            True,
        )
        assert isinstance(objective_of(Setting("nets"), sources), obj.Independent)

    def test_heads_take_as_many_steps_each_however_many_are_drawn(self, tmp_path):
        material = Material(load_images(None, limit=40), tmp_path)
        drawn = Setting("heads", "ldr", 50, 0.5, active=2)
        assert head_epochs(Setting("heads", num_members=50), material) == 10
        assert head_epochs(drawn, material) == 250
        assert head_epochs(replace(drawn, fixed=True), material) == 10

    def test_layers_of_a_head_are_counted(self):
        for layers in (1, 2, 3):
            linear = [m for m in make_head(6, layers, 4).modules() if isinstance(m, nn.Linear)]
            assert len(linear) == layers


class TestSpuriousSet:
    def test_backgrounds_go_with_classes_in_training_only(self):
        made = spurious_sets(load_images(None))
        sets = made.sets
        kinds = made.test_groups % 2
        assert torch.equal(made.test_groups // 2, sets.test.y)
        assert (kinds == sets.test.y).double().mean() == pytest.approx(0.5, abs=0.01)
        # Cool backgrounds have more blue than red; class 1 has them in training.
        border = sets.train.x[:, :, :4].double().mean((2, 3))
        cool = border[:, 2] > border[:, 0]
        shares = [cool[sets.train.y == label].double().mean() for label in (0, 1)]
        assert shares[1] - shares[0] > 0.7

    def test_the_object_is_in_the_middle_and_nothing_else_of_it(self):
        sets = load_images(None, limit=60)
        made = spurious_sets(sets)
        inside = made.sets.test.x[:, :, 6:26, 6:26].double()
        small = nn.functional.interpolate(sets.test.x.double(), size=(20, 20), mode="area")
        assert (inside - small).abs().max() <= 0.5

    def test_without_backgrounds_it_is_refused(self):
        sets = replace(load_images(None, limit=40), ood={})
        with pytest.raises(ValueError, match="backgrounds"):
            spurious_sets(sets)

    def test_the_worst_group_is_that_of_the_metric(self):
        logits, labels = torch.randn(3, 400, 2), torch.randint(0, 2, (400,))
        groups = 2 * labels + torch.randint(0, 2, (400,))
        record = group_record(logits, labels, groups)
        probs = logits.mean(0).softmax(-1)
        assert record["worst_group"]["ensemble"][0] == pytest.approx(
            metrics.worst_group_accuracy(probs, labels, groups), abs=1e-6
        )
        each = [metrics.worst_group_accuracy(member.softmax(-1), labels, groups) for member in logits]
        assert record["worst_group"]["oracle"][0] == pytest.approx(max(each), abs=1e-6)


class TestClaims:
    @staticmethod
    def verdicts(records):
        claims = diversification_claims(Found.of(records))
        return {claim.statement.split(" (")[0]: claim.verdict for claim in claims}

    def test_they_are_judged_by_what_was_measured(self):
        deep = Setting("heads", backbone="half")
        guided = [
            replace(deep, method="ldr", strength=s, guard="none", active=2) for s in (0.0, 0.1, 0.5, 5.0)
        ]
        good = [fake(deep, pds=0.6, bma=0.7)] + [
            fake(s, pds=0.8 + s.strength / 50, unique=2.0) for s in guided
        ]
        found = self.verdicts(good)
        assert found["PDS of loss-guided ensembles detects better than BMA; published form."] == "reproduced"
        better = "Loss-guided training with PDS detects better than any other method with BMA or PDS; published form."
        assert found[better] == "reproduced"
        assert found["PDS is poor without diversity: below BMA for a deep ensemble."] == "reproduced"
        assert found["Diversity"] == "reproduced"
        bad = [fake(deep, pds=0.7, bma=0.9)] + [fake(s, pds=0.6, bma=0.8, worst=0.4) for s in guided]
        found = self.verdicts(bad)
        assert (
            found["PDS of loss-guided ensembles detects better than BMA; published form."] == "not reproduced"
        )
        assert found[better] == "not reproduced"
        harmless = next(
            verdict for name, verdict in found.items() if name.startswith("Members are made to differ")
        )
        assert harmless == "not reproduced"

    def test_small_differences_are_unresolved(self):
        deep = Setting("nets")
        guided = replace(deep, method="ldr", strength=0.5, guard="none")
        found = self.verdicts([fake(deep), fake(guided, pds=0.701, bma=0.7)])
        assert found["PDS of loss-guided ensembles detects better than BMA; published form."] == "unresolved"

    def test_repeats_are_pooled(self):
        values = [[0.5, 0.4, 0.6], [0.7, 0.6, 0.8]]
        pooled = Estimate.of(values)
        assert (pooled.value, pooled.error) == (pytest.approx(0.6), pytest.approx(0.1))

    def test_the_cost_claim_compares_sizes(self):
        five = Setting("heads", "ldr", 5, 0.5, "none", 2, backbone="half")
        records = [fake(five, seconds=0.1), fake(replace(five, num_members=50), seconds=0.3)]
        found = self.verdicts(records)
        assert (
            found["With pairs, the cost of a step does not depend on the number of members."]
            == "not reproduced"
        )


def test_labels_tell_rows_of_a_table_apart():
    rows = {
        (s.num_members, s.active, s.layers, s.fixed, label(s))
        for s in settings_of(False, 0)
        if s.kind == "heads"
    }
    names = {s.row for s in settings_of(False, 0) if s.kind == "heads"}
    assert len(rows) == len(names)


def test_the_worked_example_has_one_average_and_two_answers_of_pds():
    found = example_scores()
    (unsure_bma, unsure_pds), (conflict_bma, conflict_pds) = found["all unsure"], found["in conflict"]
    assert unsure_bma == pytest.approx(conflict_bma, abs=0.01)
    assert conflict_pds > 2.5 * unsure_pds


def test_half_of_the_classes_are_the_first(tmp_path):
    sets = of_first_classes(load_images(None, limit=80), 4)
    assert sets.num_classes == 4
    assert sets.train.y.max() == 3


FEW = [
    Setting("nets"),
    Setting("nets", "ldr", strength=0.5, guard="none"),
    Setting("nets", "single", 1),
    Setting("nets", "a2d", strength=0.1),
    Setting("nets", "ldr", strength=0.5, guard="held-out accuracy"),
    Setting("backbone", "single", 1, backbone="half"),
    Setting("heads", backbone="half"),
    Setting("heads", "ldr", strength=0.5, active=2, backbone="half"),
    Setting("heads", "ldr", strength=0.5, guard="none", active=2, backbone="half"),
    Setting("heads", "ldr", strength=5.0, guard="none", active=2, backbone="half"),
    Setting("heads", "ldr", strength=0.5, guard="held-out accuracy", active=2, backbone="half"),
    Setting("heads", "divdis", strength=1.0, source=1, backbone="half"),
    Setting("heads", "two-stage", strength=0.5, active=2, backbone="half"),
    Setting("heads", "ldr", strength=0.5, guard="none", active=2, layers=1, backbone="half"),
    Setting("heads", "ldr", 50, 0.5, "none", 2, fixed=True, backbone="half"),
    Setting("spurious", num_members=4),
    Setting("spurious", "a2d", 4, 0.1),
]


@pytest.fixture
def few_arms(monkeypatch):
    monkeypatch.setattr(study, "settings_of", lambda quick, seed: FEW)


def test_the_study_runs_stops_and_goes_on(tmp_path, capsys, few_arms):
    options = {"quick": True, "epochs": 1, "limit": 64}
    with pytest.raises(ValueError, match="nothing to show"):
        STUDIES["diversification"].run(tmp_path, minutes=0, **options)
    STUDIES["diversification"].run(tmp_path, arms=["nets deep", "heads half deep"], **options)
    assert sum(line.startswith("[") for line in capsys.readouterr().out.splitlines()) == 2
    STUDIES["diversification"].run(tmp_path, arms=["nets single"], **options)
    # The page is of everything that the folder has, whatever the last run was asked for.
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert len(results["arms"]) == 3
    assert results["not_run"] == {}
    page = STUDIES["diversification"].run(tmp_path, **options)
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(results["arms"]) == [setting.name for setting in FEW]
    assert results["not_run"] == {}
    lines = (tmp_path / "arms.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(FEW)
    guided = results["arms"]["heads half ldr=0.5 none A=2 M=5 seed=0"]
    assert set(guided["auroc"]) == {
        "digits 8, 9",
        "photographs",
        "near",
        "far",
        "not trained with",
        "C-1",
        "C-5",
    }
    assert guided["gain"]["near"].keys() == guided["auroc"]["near"].keys()
    assert guided["training"]["epochs"] == 3
    assert {"mean_logits", "mean_probs", "majority_vote", "soup", "oracle"} == set(guided["accuracy"]["C-5"])
    assert "mahalanobis" in results["arms"]["backbone half seed=0"]["detectors"]["C-5"]
    assert results["arms"]["heads half two-stage=0.5 A=2 M=5 seed=0"]["unsure"] > 0
    text = page.read_text(encoding="utf-8")
    for title in (
        "What the document says",
        "worked example",
        "Networks from scratch",
        "Backgrounds that mislead",
    ):
        assert title in text
    for number in (1, 2, 3, 6, 7, 8, 9):
        assert f"Table {number}" in text
    assert "Guards:" in text
    assert "Which guard" in text
    assert results["guard"]["outcome"] in ("default", "other", "harmless", "harmful")
    stored = np.load(tmp_path / "outputs" / "nets_deep_M5_seed0.npz")
    assert stored["test"].shape == (5, len(stored["labels"]), 8)
    right = (
        (torch.from_numpy(stored["test"]).argmax(-1) == torch.from_numpy(stored["labels"])).float().mean(1)
    )
    assert right.tolist() == pytest.approx(results["arms"]["nets deep M=5 seed=0"]["members"], abs=1e-5)
    assert (tmp_path / "diversification_heads_half_bars.svg").is_file()
    assert "| the document says |" in (tmp_path / "tables.md").read_text(encoding="utf-8")


def test_a_trained_backbone_is_not_trained_again(tmp_path):
    sets = load_images(None, limit=64)
    first = Material(sets, tmp_path, epochs=1, quick=True).features("half")
    second = Material(sets, tmp_path, epochs=1, quick=True).features("half")
    torch.testing.assert_close(first.judged.test, second.judged.test)
    assert first.train.backbone == second.train.backbone
    assert first.train.passes == 4


def test_strength_makes_answers_differ_and_members_useless_while_the_ensemble_holds(tmp_path):
    # Ten Gaussian classes: what the document's objective does at large strength, in the small.
    generator = torch.Generator().manual_seed(0)
    centres = 1.6 * torch.randn(10, 20, generator=generator)
    y = torch.randint(0, 10, (3000,), generator=generator)
    x = centres[y] + torch.randn(3000, 20, generator=generator)
    unique, best, whole = [], [], []
    for strength in (0.0, 0.5, 5.0):
        ens = ds.DeepEnsemble(
            lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)), 5, seed=0
        )
        objective = obj.LossGuided(strength, active=2, guard=None)
        ds.fit(
            ens,
            (x[:2000], y[:2000]),
            objective=objective,
            epochs=25,
            batch_size=100,
            device="cpu",
            progress=False,
        )
        logits = ds.predict(ens, x[2000:])
        record = quality_record(Judged(logits, y[2000:], {}, {}))
        unique.append(record["unique"]["test"][0])
        best.append(max(record["members"]))
        whole.append(record["accuracy"]["test"]["mean_logits"][0])
    assert unique == sorted(unique)
    assert unique[-1] > 3
    assert best[0] - best[-1] > 0.2
    assert whole[0] - whole[1] < 0.01


def test_a_setting_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'imagenet' or left out"):
        study.run(tmp_path, setting="mnist")


class Vit(nn.Module):
    """A small vision transformer with the names that timm's have."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 16, 16)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1000)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Vit()


class TestImageNet:
    @pytest.fixture
    def folder(self, tmp_path):
        generator = np.random.default_rng(0)

        def write(place, count, bright=0):
            place.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 120, (48, 56, 3)) + bright
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")

        for part, count in (("train", 8), ("val", 4)):
            for number, name in enumerate(("cat", "dog", "eel")):
                write(tmp_path / "data" / part / name, count, 45 * number)
        for name in ("cat", "eel"):
            write(tmp_path / "data" / "imagenet-a" / name, 3)
        write(tmp_path / "data" / "inaturalist", 5)
        return tmp_path / "data"

    def test_the_document_s_experiment_runs_on_a_tiny_folder(self, folder, tmp_path):
        from dissensus.studies.diversification_folders import Backbone
        from dissensus.studies.diversification_imagenet import run_imagenet

        options = {
            "data": folder,
            "epochs": 2,
            "size": 32,
            "backbone": Backbone(vit, "blocks.1.norm2"),
            "corruptions": ("contrast", "gaussian_noise"),
        }
        output = tmp_path / "out"
        run_imagenet(output, arms=["ldr semantic"], **options)
        page = run_imagenet(output, **options)
        results = json.loads((output / "results.json").read_text(encoding="utf-8"))
        assert list(results["arms"]) == [each.name for each in CONFIGURATIONS]
        record = results["arms"]["ldr covariate"]
        assert set(record["accuracy"]) == {"Val", "A", "C-1", "C-5"}
        assert set(record["auroc"]) == {"iNat", "C-1", "C-5"}
        assert len(ds.CachedFeatures.open(output / "features" / "train")) == 4 * 24
        assert ds.CachedFeatures.open(output / "features" / "C-5_contrast").features.shape == (12, 8)
        text = page.read_text(encoding="utf-8")
        assert "(97.7)" in text
        assert "Missing: imagenet-r" in text

    def test_restricted_sets_are_answered_among_their_classes(self, folder):
        from dissensus.studies.diversification_folders import read_folders

        images = read_folders(folder, 32, corruptions=("contrast",))
        assert images.restricted == {"A": [0, 2]}
        assert (images.classes, images.missing) == (3, ["imagenet-r", "openimages-o"])
        x, y = images.labelled["Val"][0]
        assert (x.shape, y) == ((3, 32, 32), 0)

    def test_a_folder_of_another_layout_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="train/<class>"):
            study.run(tmp_path, setting="imagenet", data=tmp_path)

    def test_the_released_schedule_stops_before_its_cosine_ends(self):
        assert released_cosine(0, 10) == 1
        assert released_cosine(10, 10) == pytest.approx((1 + np.cos(np.pi * 10 / 15)) / 2)
