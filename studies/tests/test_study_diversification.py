"""The study of members that are made to disagree: that it runs, stops and goes on, and what its page has."""

import json

import numpy as np
import pytest
import torch
from dissensus_studies import STUDIES
from dissensus_studies import diversification as study
from dissensus_studies.diversification.data import Material
from dissensus_studies.diversification.measures import Judged, collusion_record, quality_record
from dissensus_studies.diversification.settings import Setting, settings_of
from dissensus_studies.harness.image_sets import load_images
from dissensus_studies.harness.image_study import Work
from diversification_records import fake, fake_backbone, fake_spurious
from torch import nn

import dissensus as ds
from dissensus import objectives as obj

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
    assert set(guided["auroc"]) == {"digits 8, 9", "photographs", "near", "far", "not trained with", "C-1", "C-5"}
    assert guided["training"]["epochs"] == 3
    assert {"mean_logits", "mean_probs", "majority_vote", "soup", "oracle"} == set(guided["accuracy"]["C-5"])
    assert "mahalanobis" in results["arms"]["backbone half seed=0"]["detectors"]["C-5"]
    assert results["arms"]["heads half two-stage=0.5 A=2 M=5 seed=0"]["unsure"] > 0
    text = page.read_text(encoding="utf-8")
    for title in ("What the document says", "All arms", "Detection against the strength"):
        assert title in text
    stored = np.load(tmp_path / "outputs" / "nets_deep_M5_seed0.npz")
    assert stored["test"].shape == (5, len(stored["labels"]), 8)
    right = (torch.from_numpy(stored["test"]).argmax(-1) == torch.from_numpy(stored["labels"])).float().mean(1)
    assert right.tolist() == pytest.approx(results["arms"]["nets deep M=5 seed=0"]["members"], abs=1e-5)
    assert (tmp_path / "diversification_strength.svg").is_file()


# What the page must show once its arms are there, and what those arms are.
SHOWN = {
    "heads half": [
        *("deep M=5", "single", "diverse M=5", "a2d=0.1 M=5", "divdis=1 M=5", "ldr=0 none A=2 M=50", "diverse M=50"),
        *("deep M=50", "deep layers=1 M=5", "ldr=0.5 none A=2 layers=1 M=5", "two-stage=0.5 A=2 M=5"),
        *("a2d=0.1 source=2 M=5", "divdis=1 source=2 M=5", "ldr=0.5 share A=2 M=5"),
        *(f"ldr=0.5 none A={active} M=5" for active in (3, 4, 5)),
        *(f"ldr=0.5 none A={active} M=50" for active in (5, 10)),
        *(f"ldr={strength:g} none A=2 M=5" for strength in (0, 0.1, 0.5, 1, 5, 10)),
        *(f"ldr=0.5 none A=2 M={size}" for size in (2, 10, 50)),
    ],
    "nets": ["single", "dropout M=5", "masksembles M=5", "batch M=5"],
    "spurious": ["deep M=4", "ldr=0.5 none M=4", "a2d=0.1 M=4", "divdis=1 M=4"],
    "backbone": ["half"],
}


def record_of(setting):
    made = {"backbone": fake_backbone, "spurious": fake_spurious}.get(setting.kind, fake)(setting)
    return {**made, "arm_seconds": 1.0}


def test_the_page_has_claims_a_figure_and_every_arm(tmp_path, monkeypatch):
    wanted = {f"{family} {row} seed=0" for family, rows in SHOWN.items() for row in rows}
    arms = [setting for setting in settings_of(False, 0) if setting.name in wanted]
    assert {setting.name for setting in arms} == wanted
    monkeypatch.setattr(study, "settings_of", lambda quick, seed: arms)
    sets = load_images(None, quick=True, limit=64)
    identity = Work(tmp_path, quick=True, epochs=1, limit=64, sets=sets).identity
    lines = [{"arm": each.name, "settings": identity, "record": record_of(each)} for each in arms]
    (tmp_path / "arms.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    page = study.run(tmp_path, quick=True, epochs=1, limit=64, minutes=0).read_text(encoding="utf-8")
    assert [setting.name for setting in arms if f">{setting.name}<" not in page] == []
    for text in ("Detection against the strength", "detect better than two stages (PDS). (heads half)", "worst group"):
        assert text in page


def test_a_trained_backbone_is_not_trained_again(tmp_path):
    sets = load_images(None, limit=64)
    work = Work(tmp_path, epochs=1, quick=True, sets=sets)
    first, second = (Material(work).features("half") for _ in range(2))
    torch.testing.assert_close(first.judged.test, second.judged.test)
    assert first.train.backbone == second.train.backbone
    assert first.train.passes == 4


def test_strength_makes_answers_differ_and_members_useless_while_the_ensemble_holds(tmp_path):
    # Ten Gaussian classes: what the document's objective does at large strength, in the small.
    generator = torch.Generator().manual_seed(0)
    centres = 1.6 * torch.randn(10, 20, generator=generator)
    y = torch.randint(0, 10, (3000,), generator=generator)
    x = centres[y] + torch.randn(3000, 20, generator=generator)
    unique, best, whole, useless = [], [], [], []
    for strength in (0.0, 0.5, 5.0):
        ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)), 5, seed=0)
        objective = obj.LossGuided(strength, active=2, guard=None)
        ds.fit(ens, (x[:2000], y[:2000]), objective=objective, epochs=25, batch_size=100, device="cpu", progress=False)
        logits = ds.predict(ens, x[2000:])
        judged = Judged(logits, y[2000:], {}, {})
        record = quality_record(judged)
        unique.append(record["unique"]["test"][0])
        best.append(max(record["members"]))
        whole.append(record["accuracy"]["test"]["mean_logits"][0])
        useless.append(collusion_record(judged)["members_useless"])
    assert unique == sorted(unique)
    assert unique[-1] > 3
    assert best[0] - best[-1] > 0.2
    assert max(whole) - min(whole) < 0.01
    assert useless == [False, False, True]


def test_a_setting_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be 'pretrained'"):
        study.run(tmp_path, setting="mnist")
