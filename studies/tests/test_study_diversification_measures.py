"""What `diversification` measures of an ensemble, against the metrics and scores of the package."""

import numpy as np
import pytest
import torch
from dissensus_studies.diversification.measures import (
    Judged,
    aurocs,
    detection_record,
    quality_record,
    score_names,
    scores_of,
)

from dissensus import metrics, scores


def scored(case):
    names = score_names(len(case.test))
    return names, case.map(lambda logits: scores_of(logits, names), inputs=1)


def detection(case):
    return detection_record(*scored(case))


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
    found = detection(case)
    known = scores.bma(case.test[:, :100])
    wanted = [metrics.auroc(scores.bma(x), known) for x in case.corrupted["C-5"].values()]
    assert found["C-5"]["bma"][0] == pytest.approx(np.mean(wanted), abs=1e-6)
    sets = [metrics.auroc(scores.bma(x), scores.bma(case.test)) for x in case.ood.values()]
    assert found["all"]["bma"][0] == pytest.approx(np.mean(sets), abs=1e-6)
    assert found["far"]["bma"][1] < found["far"]["bma"][0] < found["far"]["bma"][2]


def test_members_that_diverged_end_their_arm_and_not_the_study():
    case = judged()
    case.test[0, 0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="finite"):
        scored(case)


def test_an_auroc_is_that_of_the_metric():
    known, unknown = torch.randn(3, 200).round(decimals=1), (torch.randn(3, 120) + 0.5).round(decimals=1)
    wanted = [metrics.auroc(u, k) for u, k in zip(unknown, known, strict=True)]
    np.testing.assert_allclose([value for value, *_ in aurocs(known, [unknown])], wanted, atol=1e-6)
    sets = [torch.full((1, count), value) for count, value in ((3, 1.0), (9, 0.0))]
    assert aurocs(torch.zeros(1, 5), sets)[0][0] == pytest.approx(0.75)


def spread_and_width(draw):
    """Return the spread of AUROCs over samples, and the mean standard error that their intervals say."""
    found = [draw() for _ in range(400)]
    return np.std([value for value, _, _ in found]), np.mean([(high - low) / 3.92 for _, low, high in found])


def test_intervals_are_as_wide_as_the_spread_over_samples():
    generator = torch.Generator().manual_seed(1)

    def draw():
        return aurocs(torch.randn(1, 80, generator=generator), [1 + torch.randn(1, 60, generator=generator)])[0]

    spread, width = spread_and_width(draw)
    assert width == pytest.approx(spread, rel=0.12)


def test_intervals_of_corrupted_images_allow_for_their_being_the_same_images():
    generator = torch.Generator().manual_seed(2)

    def draw(paired):
        clean = torch.randn(1, 100, generator=generator)
        parts = [clean + 0.5 + 0.5 * torch.randn(1, 100, generator=generator) for _ in range(3)]
        return aurocs(clean, parts, paired=paired)[0]

    spread, width = spread_and_width(lambda: draw(True))
    assert width == pytest.approx(spread, rel=0.15)
    assert spread_and_width(lambda: draw(False))[1] > 1.5 * spread
