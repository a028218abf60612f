"""The document's table of architectures, on a folder of ImageNet's layout that is made up here. It needs torchvision."""

import json
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from dissensus_studies import collusion_imagenet as imagenet
from dissensus_studies import collusion_images as study

CLASSES, SIZE = 3, 64


@pytest.fixture
def vision():
    return pytest.importorskip(
        "torchvision", reason="torchvision, whose networks these are, is not installed"
    )


@pytest.fixture
def folder(tmp_path):
    """Three classes of small noisy pictures that their brightness tells apart, 24 to train on and 9 to validate."""
    image = pytest.importorskip("PIL.Image", reason="pillow, which writes the pictures, is not installed")
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for label in range(CLASSES):
            place = tmp_path / "data" / part / f"class{label}"
            place.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 80, (40, 48, 3)) + 80 * label
                image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    return tmp_path / "data"


def small(name, num_members=2):
    row = next(row for row in imagenet.TABLE_1 if row.name == name)
    return replace(row, num_members=num_members, batch_size=12, size=SIZE)


def test_the_table_has_the_rows_of_the_document():
    rows = {row.name: (row.num_members, row.independent[0], row.joint[0]) for row in imagenet.TABLE_1}
    assert len(rows) == 8
    assert rows["resnet18"] == (5, 68.10, 62.74)
    assert rows["mobilevit_xs"] == (3, 61.29, 54.69)
    assert all(independent > joint for _, independent, joint in rows.values())


def test_another_layout_is_refused_before_anything_is_imported(tmp_path):
    with pytest.raises(ValueError, match="train/<class>"):
        study.run(tmp_path, setting="imagenet", data=tmp_path)


@pytest.mark.parametrize("name", [row.name for row in imagenet.TABLE_1])
def test_every_network_of_the_table_can_be_made_and_run(vision, name):
    if name.startswith("mobilevit"):
        pytest.importorskip("timm", reason="timm, whose network this is, is not installed")
    network = imagenet.network(name, CLASSES).eval()
    with torch.no_grad():
        assert network(torch.zeros(2, 3, SIZE, SIZE)).shape == (2, CLASSES)


def test_a_network_that_nobody_has_is_refused(vision):
    pytest.importorskip("timm", reason="timm, which is asked second, is not installed")
    with pytest.raises(RuntimeError, match="no_such_network"):
        imagenet.network("no_such_network", CLASSES)


def test_images_are_cropped_and_classes_counted(vision, folder):
    images = imagenet.read_folder(folder, SIZE)
    assert (len(images.train), len(images.validation), images.num_classes) == (24, 9, CLASSES)
    x, y = images.train[23]
    assert (tuple(x.shape), x.dtype, y) == ((3, SIZE, SIZE), torch.float32, 2)
    few = imagenet.read_folder(folder, SIZE, limit=6)
    assert sorted({few.train[place][1] for place in range(6)}) == [0, 1, 2]
    (folder / "val" / "class0").rename(folder / "val" / "other")
    with pytest.raises(ValueError, match="same classes"):
        imagenet.read_folder(folder, SIZE)


def test_the_table_runs_end_to_end_and_goes_on(vision, folder, tmp_path, capsys):
    rows = [small("shufflenet_v2_x0_5"), small("squeezenet1_1")]
    output = tmp_path / "out"
    imagenet.run_imagenet(output, data=folder, epochs=1, rows=rows, arms=["shufflenet"])
    page = imagenet.run_imagenet(output, data=folder, epochs=1, rows=rows)
    assert "2 of 4 arms were done before" in capsys.readouterr().out
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    assert set(results["arms"]) == {f"{row.name} M=2 beta={beta}" for row in rows for beta in (0, 1)}
    assert results["not_run"] == {}
    for record in results["arms"].values():
        assert 0 <= record["top1"] <= record["top5"] == 1.0
        assert record["training"]["epochs"] == 1
    text = page.read_text(encoding="utf-8")
    for document in ("61.00 / 81.94", "53.41 / 74.88", "56.25 / 78.65", "42.69 / 65.24"):
        assert document in text
    assert (output / "imagenet_squeezenet1_1.svg").is_file()


def test_a_row_whose_library_is_missing_is_named_and_the_others_run(vision, folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    rows = [small("mobilevit_xs"), small("shufflenet_v2_x0_5")]
    page = imagenet.run_imagenet(tmp_path / "out", data=folder, epochs=1, rows=rows)
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert len(results["arms"]) == len(results["not_run"]) == 2
    assert "pip install timm" in results["not_run"]["mobilevit_xs M=2 beta=0"]
    assert "Not run" in page.read_text(encoding="utf-8")


def test_the_command_reaches_the_setting(vision, folder, tmp_path, monkeypatch):
    small_table = partial(imagenet.run_imagenet, rows=[small("shufflenet_v2_x0_5")])
    monkeypatch.setattr(imagenet, "run_imagenet", small_table)
    page = study.run(
        tmp_path / "out", setting="imagenet", data=folder, epochs=1, limit=12, arms=["shufflenet"]
    )
    assert "shufflenet_v2_x0_5" in page.read_text(encoding="utf-8")
