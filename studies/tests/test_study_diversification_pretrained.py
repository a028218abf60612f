"""Heads on a network that was trained elsewhere: what they are trained on, what is recorded, and that it goes on where it stopped."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dissensus_studies import STUDIES
from dissensus_studies.diversification.data import Pretrained
from dissensus_studies.diversification.settings import pretrained_settings
from dissensus_studies.harness.image_sets import load_images
from dissensus_studies.harness.image_study import Work
from torch import nn

CLASSES, OUTPUTS = 40, 16


def write_images(folder, *, coarse=True):
    """Write a set in CIFAR-100's form whose classes differ in colour, and an unknown one."""
    draws = np.random.default_rng(0)
    for name, count in (("cifar100_train", 200), ("cifar100_test", 80)):
        y = np.arange(count) % CLASSES
        x = (6 * y[:, None, None, None] + draws.integers(0, 6, (count, 32, 32, 3))).astype(np.uint8)
        np.savez(folder / f"{name}.npz", x=x, y=y, **({"y_coarse": y // 2} if coarse else {}))
    for name in ("svhn", "dtd"):
        np.savez(folder / f"{name}.npz", x=draws.integers(0, 255, (60, 32, 32, 3)).astype(np.uint8))


@pytest.fixture
def backbone(monkeypatch):
    def make():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            head = nn.Linear(12, OUTPUTS)
        return nn.Sequential(Scaled(), nn.AdaptiveAvgPool2d(2), nn.Flatten()), head

    monkeypatch.setitem(sys.modules, "a_backbone", SimpleNamespace(make=make))
    return "a_backbone:make"


class Scaled(nn.Module):
    def forward(self, x):
        return x.float() / 255


def test_the_guard_is_looked_at_with_few_classes_and_with_the_backbones_own(tmp_path, backbone):
    write_images(tmp_path)
    work = Work(tmp_path / "out", data=tmp_path, backbone=backbone, sets=load_images(tmp_path, known="cifar100"))
    material = Pretrained(work)
    few, own, main = (material.features(f"pretrained C={number}") for number in (10, OUTPUTS, CLASSES))
    assert (len(main.sources[0]), material.outputs, len(material.coarse)) == (60, OUTPUTS, CLASSES)
    # Ten superclasses of two classes each are half of the images.
    assert len(few.train) == 100
    assert few.train.targets.unique().tolist() == list(range(10))
    with torch.no_grad():
        answers = material.head(material.body(material.sets.test.x)).argmax(-1)
    assert (answers == own.judged.labels).all()
    assert not own.judged.ood
    assert list(main.judged.ood) == ["svhn"]
    assert len(main.train) == 200


def test_arms_are_recorded_with_every_number_and_compared_with_independent_heads_of_their_seed(tmp_path, backbone):
    write_images(tmp_path)
    arms = ["heads pretrained C=40 * M=5 seed=0", "heads pretrained C=10 deep*"]
    options = {"setting": "pretrained", "backbone": backbone, "data": tmp_path, "epochs": 2, "arms": arms}
    page = STUDIES["diversification"].run(tmp_path / "out", **options)
    lines = (tmp_path / "out" / "arms.jsonl").read_text(encoding="utf-8").splitlines()
    records = {entry["arm"]: entry["record"] for entry in map(json.loads, lines)}
    assert len(records) == 37 + 3
    rows = {record["setting"]["method"] for record in records.values()}
    assert rows == {"deep", "diverse", "ldr", "a2d", "divdis", "two-stage", "joint"}
    others = records["heads pretrained C=40 a2d=0.1 source=2 M=5 seed=0"]
    assert (others["elsewhere"], records["heads pretrained C=40 a2d=0.1 M=5 seed=0"]["elsewhere"]) == (
        "svhn",
        "textures",
    )
    guided = records["heads pretrained C=40 ldr=0.5 share A=2 M=5 seed=0"]
    text = page.read_text(encoding="utf-8")
    assert all(name in text for name in ("far BMA", "far PDS", "worst member", "What the document says"))
    # Values alone, as the pages' tables over seeds read them.
    assert isinstance(guided["auroc"]["far"]["predictive_diversity"], float)
    assert isinstance(guided["unique"]["test"], float)
    assert set(guided["accuracy"]["C-5"]) == {"mean_logits", "mean_probs", "majority_vote", "oracle", "soup"}
    assert 0.4 < guided["auroc"]["C-5"]["predictive_diversity"] <= 1
    assert guided["test"]["ece_floor"] > 0
    # Each of five takes as many steps as alone: two are drawn.
    assert guided["training"]["epochs"] == 5
    assert records["heads pretrained C=40 ldr=0.5 share A=2 fixed M=5 seed=0"]["training"]["epochs"] == 2
    before = (tmp_path / "out" / "arms.jsonl").read_text(encoding="utf-8")
    STUDIES["diversification"].run(tmp_path / "out", **options)
    assert (tmp_path / "out" / "arms.jsonl").read_text(encoding="utf-8") == before


def test_all_methods_of_all_seeds_come_before_other_sizes():
    found = list(pretrained_settings(100, 1000, 0))
    assert len({each.name for each in found}) == len(found)
    sizes = [each.num_members for each in found]
    assert sizes == sorted(sizes[: sizes.index(2)]) + sizes[sizes.index(2) :]
    first = found[: sizes.index(2)]
    assert {each.backbone for each in first} == {f"pretrained C={number}" for number in (10, 100, 1000)}
    assert {each.seed for each in first} == {0, 1, 2}


def test_what_is_missing_is_said(tmp_path, backbone):
    run = STUDIES["diversification"].run
    with pytest.raises(ValueError, match="`data` and `backbone`"):
        run(tmp_path / "out", setting="pretrained")
    with pytest.raises(ValueError, match="is for setting='pretrained'"):
        run(tmp_path / "out", backbone=backbone)
    write_images(tmp_path, coarse=False)
    with pytest.raises(ValueError, match="y_coarse"):
        run(tmp_path / "out", setting="pretrained", backbone=backbone, data=tmp_path)
    write_images(tmp_path)
    with pytest.raises(ValueError, match="module:function"):
        run(tmp_path / "out", setting="pretrained", backbone="no_such_module:make", data=tmp_path)
