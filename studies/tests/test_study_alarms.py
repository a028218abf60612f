"""Which score an alarm should go by: classes are held out in turn, what rings is counted right, and the default follows the record."""

import json
from statistics import fmean

import pytest
import torch
from dissensus_studies import STUDIES, results
from dissensus_studies.alarms import HELD_OUT, PARTS, mean_shares, rings, without
from dissensus_studies.guide import regimes
from dissensus_studies.harness.image_arms import on_pixels
from dissensus_studies.harness.image_sets import load_images
from dissensus_studies.masksembles import small_network

import dissensus as ds
from dissensus.scores import SCORES


@pytest.fixture(scope="module")
def sets():
    return load_images(None, limit=400)


def test_every_class_is_held_out_once(sets):
    parts = [without(sets, part) for part in range(PARTS)]
    assert sum(len(part.ood[HELD_OUT]) for part in parts) == len(sets.test.x)
    for part in parts:
        assert len(part.ood[HELD_OUT]) + len(part.test.x) == len(sets.test.x)
        for images in (part.train, part.test):
            assert images.y.unique().tolist() == list(range(part.num_classes))
        assert part.groups == {HELD_OUT: "near", **dict.fromkeys(sets.ood, "far")}


def test_labels_stay_with_their_images(sets):
    part = without(sets, 1)
    known = [label for label in range(sets.num_classes) if label not in (2, 3)]
    rows = torch.isin(sets.train.y, torch.tensor(known))
    assert torch.equal(part.train.x, sets.train.x[rows])
    assert [known[label] for label in part.train.y] == sets.train.y[rows].tolist()


def test_what_rings_is_what_lies_above_all_but_the_allowed_share_of_held_out_images(sets):
    part = without(sets, 0)
    members = ds.DeepEnsemble(lambda: on_pixels(small_network(part.num_classes), part), 3)
    found = rings(members, part)
    assert set(found) == {"0.01", "0.05"}
    for score in ("total_entropy", "num_unique"):
        calibration, unknown = (
            ds.predict_scores(members, x, [score])[score] for x in (part.validation.x, part.ood[HELD_OUT])
        )
        as_strange = (calibration >= unknown[:, None]).sum(1)
        expected = ((1 + as_strange) / (1 + len(calibration)) <= 0.05).double().mean()
        assert found["0.05"][HELD_OUT][score] == pytest.approx(float(expected))
    others = [found["0.05"][name]["bma"] for name in sets.ood]
    assert found["0.05"]["far"]["bma"] == pytest.approx(fmean(others))


@pytest.mark.slow
def test_the_study_runs_on_what_comes_along(tmp_path):
    page = STUDIES["alarms"].run(tmp_path, quick=True, epochs=1, limit=200)
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(found["arms"]) == [f"small part={part} seed=0" for part in range(PARTS)]
    assert "What rings" in page.read_text(encoding="utf-8")
    for arm in found["arms"].values():
        assert set(arm["rings"]["0.01"]["far"]) == set(SCORES)


def test_the_default_score_of_an_alarm_is_one_that_rings_most_in_the_record():
    alarm = ds.Alarm.calibrate(ds.DeepEnsemble(lambda: torch.nn.Linear(2, 3), 2), torch.randn(200, 2))
    means = {score: [] for score in SCORES}
    for arms in regimes(results.load("alarms")).values():
        for shares in mean_shares(arms).values():
            for score, share in shares.items():
                means[score].append(share)
    best = max(fmean(own) for own in means.values())
    assert fmean(means[alarm.scorer.name]) > best - 0.02
