"""The study of joint training on images: its protocol, its claims, and that it runs, stops and goes on."""

import json
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch
from dissensus_studies import STUDIES
from dissensus_studies.collusion import images as arms
from dissensus_studies.collusion import images as study
from dissensus_studies.collusion.images import (
    BETAS,
    JointSetting,
    estimate,
    estimates,
    final_gap,
    image_claims,
    joint_numbers,
    settings_of,
)
from dissensus_studies.harness import arm_log
from image_cases import write_images
from torch import nn

import dissensus as ds
from dissensus import objectives as obj


def test_every_experiment_of_the_document_is_listed_with_its_repeats():
    settings = settings_of(quick=False, seed=0)
    assert len({setting.name for setting in settings}) == len(settings)
    runs = Counter((s.family, s.beta, s.member_dropout) for s in settings)
    repeats = {"resnet18 M=5": 6, "resnet34 M=5": 6, "resnet18 M=10": 3, "resnet18 M=5 scores": 3}
    repeats |= {"cnn M=5": 3, "cnn M=10": 3, "vgg M=5": 3}
    for family, count in repeats.items():
        assert [runs[family, beta, 0.0] for beta in BETAS] == [count] * 6
    assert [runs["gap resnet18 M=5", beta, 0.0] for beta in (0.0, 1.0)] == [6, 6]
    assert [runs["resnet18 M=5", 1.0, share] for share in (0.2, 0.4, 0.6)] == [5, 5, 5]


def test_the_ends_of_the_range_come_first_and_repeats_last():
    settings = settings_of(quick=False, seed=3)
    assert [setting.beta for setting in settings[:2]] == [0.0, 1.0]
    assert settings[0].seed == 3
    seeds = [setting.seed for setting in settings]
    assert seeds == sorted(seeds)


def test_converted_rates_take_the_steps_of_the_document():
    # The document: one SGD over all members of the averaged loss, rate 0.1, decay 5e-4; here `fit` sums over members.
    torch.manual_seed(0)
    num_members, x, y = 3, torch.randn(20, 4), torch.randint(0, 3, (20,))
    ensemble = ds.DeepEnsemble(lambda: nn.Linear(4, 3), num_members, seed=0)
    plain = nn.ModuleList(ensemble.member(j) for j in range(num_members))
    setting = JointSetting("resnet18", num_members, beta=0.4)
    chosen = arms.training_of(setting, epochs=5, quick=False)
    ds.fit(
        ensemble,
        (x, y),
        objective=obj.Joint(beta=0.4),
        epochs=5,
        batch_size=20,
        optimizer="sgd",
        optimizer_options={"momentum": 0.9},
        lr=chosen["lr"],
        weight_decay=chosen["weight_decay"],
        device="cpu",
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for _ in range(5):
        optimizer.zero_grad()
        obj.joint_loss(torch.stack([net(x) for net in plain]), y, beta=0.4).backward()
        optimizer.step()
    torch.testing.assert_close(ensemble(x), torch.stack([net(x) for net in plain]), rtol=1e-4, atol=1e-6)


def test_sweeps_select_on_validation_and_gap_arms_watch_the_test_images():
    sweep = arms.training_of(JointSetting(), None, False)
    assert (sweep["epochs"], sweep["select"], sweep["lr"]) == (80, "ensemble_loss", pytest.approx(0.02))
    assert sweep["schedule"].milestones == (30, 50, 70)
    gap = arms.training_of(JointSetting(experiment="gap"), None, False)
    assert (gap["epochs"], gap["watch"], gap["all_train"], gap["optimizer"]) == (100, "test", True, "adam")
    assert "select" not in gap
    assert arms.training_of(JointSetting(experiment="gap"), 8, False)["epochs"] == 10
    assert arms.training_of(JointSetting("cnn"), None, False)["patience"] == 5


@pytest.mark.parametrize("average", ["probs", "scores"])
def test_errors_and_diversity_add_up(average):
    logits, labels = torch.randn(4, 200, 5), torch.randint(0, 5, (200,))
    found = joint_numbers(logits, labels, average)
    own = torch.stack([nn.functional.cross_entropy(member, labels) for member in logits]).mean()
    assert found["member_error"] == pytest.approx(own.item(), rel=1e-5)
    assert found["member_error"] - found["ensemble_error"] == pytest.approx(found["diversity"], abs=1e-9)
    assert found["member_accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())


def fake(beta, accuracy, error, diversity, member=0.9, dropped=0.0, gap=0.1, family="cnn M=5"):
    interval = {"accuracy": [accuracy, accuracy - 0.005, accuracy + 0.005], "nll": [error, error - 0.01, error + 0.01]}
    interval["member_accuracy"] = [member, member - 0.005, member + 0.005]
    return {
        "setting": {"beta": beta, "member_dropout": dropped},
        "family": family,
        "test": interval,
        "accuracy": accuracy,
        "member_accuracy": member,
        "ensemble_error": error,
        "diversity": diversity,
        "training": {"clean": {"ensemble_error": [1.0, 0.5]}, "history": {"ensemble_loss": [1.0, 0.5 + gap]}},
    }


def test_claims_are_judged_by_what_was_measured():
    family = {
        0.0: [fake(0.0, 0.95, 0.2, 0.1)],
        0.4: [fake(0.4, 0.95, 0.19, 0.2)],
        1.0: [fake(1.0, 0.90, 0.4, 1.5, member=0.6, gap=0.3)],
    }
    better = {0.0: [fake(0.0, 0.8, 0.6, 0.3)], 1.0: [fake(1.0, 0.9, 0.3, 0.2, member=0.95, gap=0.01)]}
    dropped = {0.0: family[1.0], 0.4: [fake(1.0, 0.89, 0.4, 0.9, dropped=0.4)]}
    verdicts = [claim.verdict for claim in image_claims({"cnn M=5": family}, {"gap": family}, dropped)]
    assert verdicts == ["reproduced"] * 8
    verdicts = [claim.verdict for claim in image_claims({"vgg M=5": better}, {"gap": better}, {})]
    assert verdicts == ["not reproduced"] * 5
    both = image_claims({"cnn M=5": family, "vgg M=5": better}, {}, {})
    assert both[0].verdict == "reproduced for cnn M=5; not reproduced for vgg M=5"


def test_a_difference_within_two_standard_errors_is_unresolved():
    near = {0.0: [fake(0.0, 0.950, 0.2, 0.1)], 1.0: [fake(1.0, 0.949, 0.2, 0.2, member=0.9)]}
    assert image_claims({"vgg M=5": near}, {}, {})[0].verdict == "unresolved"
    clear = {0.0: [fake(0.0, 0.95, 0.2, 0.1)], 1.0: [fake(1.0, 0.90, 0.4, 1.5, member=0.6)]}
    beside = image_claims({"vgg M=5": near, "cnn M=5": clear}, {}, {})[0].verdict
    assert beside == "reproduced for cnn M=5; unresolved for vgg M=5"
    several = [fake(0.0, value, 0.2, 0.1) for value in (0.94, 0.95, 0.96)]
    assert estimate(several, "accuracy").error == pytest.approx(0.01 / np.sqrt(3))


def test_a_single_run_is_known_no_better_than_others_of_its_family_repeat():
    repeated = [fake(0.0, 0.9, error, 0.1) for error in (0.30, 0.34, 0.38)]
    found = estimates({0.0: repeated, 0.5: [fake(0.5, 0.9, 0.29, 0.1)]}, "ensemble_error")
    assert found[0.0].error == pytest.approx(0.04 / 3**0.5)
    # The deviation of one run, which is far above the error over images.
    assert found[0.5].error == pytest.approx(0.04)
    alone = estimates({0.5: [fake(0.5, 0.9, 0.29, 0.1)]}, "ensemble_error")
    assert alone[0.5] == estimate([fake(0.5, 0.9, 0.29, 0.1)], "ensemble_error")


def test_the_gap_is_that_of_the_last_epochs():
    record = {
        "training": {"clean": {"ensemble_error": [0.1] * 20}, "history": {"ensemble_loss": [9.0] * 18 + [0.3, 0.5]}}
    }
    assert final_gap(record) == pytest.approx(0.3)


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "data")
    return tmp_path / "data"


QUICK = {"quick": True, "epochs": 1, "limit": 20}


def test_the_study_runs_stops_and_goes_on(folder, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out"
    with pytest.raises(ValueError, match="nothing to show"):
        STUDIES["collusion-images"].run(output, data=folder, minutes=0, **QUICK)
    first = ["cnn M=5 beta=0", "gap"]
    page = STUDIES["collusion-images"].run(output, data=folder, arms=first, **QUICK)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(lines) == 4
    assert all("accuracy" in line and line.endswith(" s") for line in lines)
    trained = []
    original = arms.train_and_measure
    monkeypatch.setattr(
        arms, "train_and_measure", lambda setting, *a: trained.append(setting.name) or original(setting, *a)
    )
    page = STUDIES["collusion-images"].run(output, data=folder, **QUICK)
    assert trained == ["cnn M=5 beta=1 seed=0", "cnn M=5 scores beta=1 seed=0", "cnn M=5 beta=1 drop=0.4 seed=0"]
    text = page.read_text(encoding="utf-8")
    for title in ("What the document says", "Between independent and joint training", "All arms", "What it ran on"):
        assert title in text
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    assert len(results["arms"]) == 7
    record = results["arms"]["gap cnn M=5 beta=1 seed=0"]
    assert len(record["training"]["clean"]["ensemble_error"]) == record["training"]["epochs"] == 1
    assert set(record["auroc"]) == {"cifar100", "svhn", "near", "far"}
    assert record["diagnosis"]["diversity_ratio"] == pytest.approx(
        record["diversity"] / record["ensemble_error"], rel=1e-6
    )
    with np.load(output / "outputs" / "cnn_M5_beta1_drop0.4_seed0.npz") as stored:
        assert stored["test"].shape == (5, 20, 3)
    assert (output / "collusion_beta.svg").is_file()


def made_up(setting, work):
    """A record as `train_and_measure` gives it, without training: joint training is worse in every way."""
    worse = setting.beta**4 * (1 - 0.5 * setting.member_dropout) + 0.01 * setting.seed
    accuracy, member, error = 0.95 - 0.1 * worse, 0.94 - 0.3 * worse, 0.2 + 0.3 * worse
    interval = {name: [value, value - 0.005, value + 0.005] for name, value in (("accuracy", accuracy), ("nll", error))}
    test_error = [0.9, 0.5, error]
    return {
        "setting": asdict(setting),
        "family": setting.family,
        "test": {**interval, "member_accuracy": [member, member - 0.005, member + 0.005], "ece": [0.02, 0.01, 0.03]},
        "auroc": {"svhn": {"bma": [0.9, 0.89, 0.91], "mutual_information": [0.8, 0.79, 0.81]}},
        "accuracy": accuracy,
        "member_accuracy": member,
        "ensemble_error": error,
        "member_error": error + 0.05 + worse,
        "diversity": 0.05 + worse,
        "diagnosis": {"verdict": "no sign", "diversity_ratio": worse, "class_share": 0.1, "kept_mean": None},
        "training": {
            "epochs": 3,
            "seconds": 2.0,
            "clean": {"ensemble_error": [0.8, 0.3, 0.1], "member_error": [0.9, 0.5, 0.2 + worse]},
            "history": {
                "ensemble_error": [1.0, 0.4, 0.2],
                "ensemble_loss": test_error,
                "validation_loss": [value + 0.1 + worse for value in test_error],
            },
        },
        "line": "made up",
    }


def test_a_complete_study_shows_every_arm_and_draws_every_family(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arms, "train_and_measure", made_up)
    monkeypatch.setattr(arm_log.gc, "collect", lambda: 0)
    output = tmp_path / "out"
    text = study.run(output, data=folder).read_text(encoding="utf-8")
    assert (output / "collusion_beta.svg").stat().st_size > 10_000
    assert [setting.name for setting in settings_of(quick=False, seed=0) if f">{setting.name}<" not in text] == []
    drawn = (output / "collusion_beta.svg").read_text(encoding="utf-8")
    for family in ("resnet18 M=5", "resnet34 M=5", "resnet18 M=10", "resnet18 M=5 scores", "cnn M=10", "vgg M=5"):
        assert family in drawn
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    assert len(results["arms"]) == len(settings_of(quick=False, seed=0))
    assert [claim["verdict"] for claim in results["claims"]][:5] == ["reproduced"] * 5
    capsys.readouterr()
    again = study.run(output, data=folder, arms=["drop", "M=10", "scores", "gap", "vgg"], minutes=0)
    assert "were done before" in capsys.readouterr().out
    assert "resnet34" not in again.read_text(encoding="utf-8")


def test_records_without_a_diagnosis_are_shown_all_the_same(folder, tmp_path, monkeypatch):
    def older(*arguments):
        record = made_up(*arguments)
        del record["diagnosis"]
        return record

    monkeypatch.setattr(arms, "train_and_measure", older)
    page = study.run(tmp_path / "out", data=folder, arms=["cnn M=5 beta=1 seed=0", "cnn M=5 beta=0 seed=0"])
    assert "no sign" not in page.read_text(encoding="utf-8")


def test_a_setting_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no option setting"):
        study.run(tmp_path, setting="mnist")
