"""The grand table: every combination is made, trained and measured, and what is left is begun where it stopped."""

import json

import pytest
import torch
from dissensus_studies import STUDIES
from dissensus_studies.choosing import COMBINATIONS, NORMALISED, Setting, make_members, reserved
from dissensus_studies.harness.image_sets import load_images
from dissensus_studies.masksembles import small_network


@pytest.fixture(scope="module")
def sets():
    return load_images(None, limit=60)


def test_images_to_disagree_on_are_not_judged_by(sets):
    rest, elsewhere = reserved(sets)
    assert len(rest.ood) == len(sets.ood) - 1
    assert not any(x is elsewhere for x in rest.ood.values())
    assert set(rest.groups) == set(rest.ood)


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in COMBINATIONS} - {"heads"}))
def test_every_kind_gives_an_output_a_member(kind, sets):
    members = make_members(Setting(kind, "independent"), sets, lambda: small_network(sets.num_classes)).eval()
    x = sets.normalise(sets.test.x[:3]) if kind in NORMALISED else sets.test.x[:3]
    assert members(x).shape == (1 if kind == "single" else 4, 3, sets.num_classes)


def test_a_network_that_does_not_exist_is_told_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="`network` must be one of small, resnet18; got 'vgg'"):
        STUDIES["choosing"].run(tmp_path, quick=True, network="vgg")
    assert not (tmp_path / "arms.jsonl").exists()


@pytest.mark.slow
def test_the_whole_table_on_a_few_images(tmp_path):
    page = STUDIES["choosing"].run(tmp_path, quick=True, epochs=1, limit=60)
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["arms"]) == len(COMBINATIONS)
    assert not found["not_run"]
    record = found["arms"]["deep, independent seed=0"]
    assert {"train_seconds", "predict_seconds", "bytes", "corrupted", "auroc"} <= set(record)
    assert "deep, a2d 0.1" in page.read_text(encoding="utf-8")
    assert torch.tensor([each["test"]["accuracy"][0] for each in found["arms"].values()]).isfinite().all()
    lines = (tmp_path / "arms.jsonl").read_text()
    STUDIES["choosing"].run(tmp_path, quick=True, epochs=1, limit=60)
    assert (tmp_path / "arms.jsonl").read_text() == lines
