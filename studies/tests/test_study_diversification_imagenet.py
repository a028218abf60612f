"""The document's own experiment, on a tiny folder of ImageNet's layout with an untrained backbone."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from backbone_cases import Block
from dissensus_studies import diversification as study
from dissensus_studies.diversification.configurations import CONFIGURATIONS, released_cosine
from dissensus_studies.diversification.imagenet import Backbone, look, read_folders, run_imagenet
from dissensus_studies.harness.image_study import Options
from PIL import Image
from torch import nn

import dissensus as ds


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


@pytest.fixture
def folder(tmp_path):
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


def test_the_document_s_experiment_runs_on_a_tiny_folder(folder, tmp_path):
    output = tmp_path / "out"
    asked = Options(output, data=folder, epochs=2)
    further = (32, Backbone(vit, "blocks.1.norm2"), ("contrast", "gaussian_noise"))
    run_imagenet(replace(asked, arms=["ldr semantic"]), *further)
    page = run_imagenet(asked, *further)
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    assert list(results["arms"]) == [each.name for each in CONFIGURATIONS]
    record = results["arms"]["ldr covariate"]
    assert set(record["accuracy"]) == {"Val", "A", "C-1", "C-5"}
    assert set(record["auroc"]) == {"iNat", "C-1", "C-5"}
    assert len(ds.CachedFeatures.open(output / "features" / "train")) == 4 * 24
    assert ds.CachedFeatures.open(output / "features" / "C-5_contrast").features.shape == (12, 8)
    text = page.read_text(encoding="utf-8")
    for number in ("(97.7)", "(4.68)", "(39.2)"):  # of tables 2, 1 and 3 (soup)
        assert number in text
    assert {"mean_logits", "majority_vote", "soup", "oracle"} <= set(record["accuracy"]["A"])
    assert set(record["unique"]) == {"Val", "C-1", "C-5", "iNat"}
    assert "colluding" in record["finding"]
    assert "Missing: imagenet-r" in text


def test_restricted_sets_are_answered_among_their_classes(folder):
    images = read_folders(folder, 32, corruptions=("contrast",))
    assert images.restricted == {"A": [0, 2]}
    assert (images.classes, images.missing) == (3, ["imagenet-r", "openimages-o"])
    x, y = images.labelled["Val"][0]
    assert (x.shape, y) == ((3, 32, 32), 0)


def test_members_too_are_judged_among_the_classes_of_a_restricted_set():
    # Both members say class 1, which the set does not have; among the others they say 0 and 2.
    heads = ds.DeepEnsemble.from_members([constant([1.0, 5.0, 0.0]), constant([0.0, 5.0, 2.0])])
    features = ds.CachedFeatures(torch.zeros(4, 1), None)
    found = look(heads, features, ["bma"], classes=[0, 2])
    assert found.members.tolist() == [[0] * 4, [2] * 4]
    assert found.answers["mean_logits"].tolist() == [2] * 4
    assert found.accuracy("oracle", torch.tensor([0, 0, 0, 2]))[0] == pytest.approx(0.75)
    assert look(heads, features, ["bma"]).members.tolist() == [[1] * 4, [1] * 4]


def constant(logits):
    net = nn.Linear(1, len(logits))
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor(logits))
    return net


def test_a_folder_of_another_layout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train/<class>"):
        study.run(tmp_path, setting="imagenet", data=tmp_path)


def test_the_released_schedule_stops_before_its_cosine_ends():
    assert released_cosine(0, 10) == 1
    assert released_cosine(10, 10) == pytest.approx((1 + np.cos(np.pi * 10 / 15)) / 2)
