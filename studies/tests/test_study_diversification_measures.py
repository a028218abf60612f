"""What `diversification` measures of an ensemble, against the metrics and scores of the package."""

import numpy as np
import pytest
import torch
from dissensus_studies.diversification.measures import (
    Judged,
    Scored,
    detection_record,
    disputed,
    gains_over,
    quality_record,
)

from dissensus import metrics, scores


def detection(case):
    scored = Scored.of(case)
    return detection_record(scored.names, scored.ranks(case.groups))


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
    return Judged(test, labels, {"near": logits(200), "far": 2 * logits(150)}, corrupted, {"all": ["near", "far"]})


def test_numbers_are_those_of_the_metrics():
    case = judged()
    record = quality_record(case)
    mixture = case.test.softmax(-1).mean(0)
    assert record["test"]["accuracy"][0] == pytest.approx(metrics.accuracy(mixture, case.labels), abs=1e-6)
    assert record["test"]["nll"][0] == pytest.approx(metrics.nll(mixture, case.labels), abs=1e-5)
    assert record["test"]["brier"][0] == pytest.approx(metrics.brier(mixture, case.labels), abs=1e-5)
    answers = case.test.argmax(-1)
    assert record["test"]["disagreement"][0] == pytest.approx(metrics.mean_disagreement(answers), abs=1e-6)
    assert record["unique"]["far"][0] == pytest.approx(scores.num_unique(case.ood["far"]).mean().item(), abs=1e-5)
    pds = scores.predictive_diversity(case.test).mean().item() * case.test.shape[-1]
    assert record["pds"]["test"][0] == pytest.approx(pds, abs=1e-5)
    two = [scores.num_unique(x).mean().item() for x in case.corrupted["C-5"].values()]
    assert record["unique"]["C-5"][0] == pytest.approx(np.mean(two), abs=1e-5)


def test_corruptions_are_judged_one_by_one_and_then_averaged():
    case = judged()
    found = detection(case)["auroc"]
    known = scores.bma(case.test[:, :100])
    wanted = [metrics.auroc(scores.bma(x), known) for x in case.corrupted["C-5"].values()]
    assert found["C-5"]["bma"][0] == pytest.approx(np.mean(wanted), abs=1e-6)
    sets = [metrics.auroc(scores.bma(x), scores.bma(case.test)) for x in case.ood.values()]
    assert found["all"]["bma"][0] == pytest.approx(np.mean(sets), abs=1e-6)
    assert found["far"]["bma"][1] < found["far"]["bma"][0] < found["far"]["bma"][2]


def test_pds_is_compared_with_every_score():
    case = judged()
    record = detection(case)
    for part, found in record["pds_minus"].items():
        assert found["predictive_diversity"] == [0, 0, 0]
        gap = record["auroc"][part]["predictive_diversity"][0] - record["auroc"][part]["bma"][0]
        assert found["bma"][0] == pytest.approx(gap, abs=2e-6)


def test_gains_are_over_the_same_score_and_over_the_best(tmp_path):
    case, other = judged(seed=0), judged(seed=0, skill=3.0)
    path = tmp_path / "kept" / "reference.pt"
    Scored.of(case).save(path)
    found = gains_over(
        Scored.of(case).names, *(each.ranks(case.groups) for each in (Scored.load(path), Scored.of(other)))
    )
    before, after = (detection(each)["auroc"] for each in (case, other))
    for part, gains in found["gain"].items():
        assert gains["bma"][0] == pytest.approx(after[part]["bma"][0] - before[part]["bma"][0], abs=2e-6)
        best = max(value[0] for value in before[part].values())
        over_best = found["gain_over_best"][part]["bma"][0]
        assert over_best == pytest.approx(after[part]["bma"][0] - best, abs=2e-6)


def test_members_that_diverged_end_their_arm_and_not_the_study():
    case = judged()
    case.test[0, 0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="finite"):
        Scored.of(case)


def test_the_gallery_shows_where_members_differ_most_and_least():
    case = judged()
    values = scores.predictive_diversity(case.test)
    shown = disputed(case.test, Scored.of(case))
    assert shown["most"][0]["image"] == int(values.argmax())
    assert shown["least"][-1]["image"] == int(values.argmin())
    for each in [*shown["most"], *shown["least"]]:
        assert each["answers"] == case.test[:, each["image"]].argmax(-1).tolist()
        assert each["ensemble"] == int(case.test.mean(0)[each["image"]].argmax())
