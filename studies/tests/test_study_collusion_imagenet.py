"""The document's table of architectures, on a folder of ImageNet's layout that is made up here. It needs torchvision."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from dissensus_studies.collusion import imagenet
from dissensus_studies.collusion import images as study
from dissensus_studies.harness.image_study import Options
from folder_cases import write_folder
from torch import nn

CLASSES, SIZE = 3, 64


@pytest.fixture
def vision():
    return pytest.importorskip("torchvision", reason="torchvision, whose networks these are, is not installed")


@pytest.fixture
def folder(tmp_path):
    """Three classes of pictures, 24 to train on and 9 to validate."""
    return write_folder(tmp_path / "data")


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


def test_images_are_cropped_and_classes_counted(folder):
    train, validation, classes = imagenet.read_folder(folder, SIZE)
    assert (len(train), len(validation), len(classes)) == (24, 9, CLASSES)
    x, y = train[23]
    assert (tuple(x.shape), x.dtype, y) == ((3, SIZE, SIZE), torch.float32, 2)
    assert sorted(set(train.spread(6).labels)) == [0, 1, 2]
    (folder / "val" / "cat").rename(folder / "val" / "other")
    with pytest.raises(ValueError, match="classes that train/ lacks"):
        imagenet.read_folder(folder, SIZE)


@pytest.fixture
def tiny(monkeypatch):
    """Networks of the table stand for small ones, so that no torchvision is needed; timm's are missing."""

    def network(name, classes):
        if name.startswith("mobilevit"):
            raise RuntimeError("timm is not installed: pip install timm.")
        return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, classes))

    monkeypatch.setattr(imagenet, "network", network)


def test_the_table_runs_end_to_end_and_goes_on(tiny, folder, tmp_path, capsys):
    rows = [small("shufflenet_v2_x0_5"), small("squeezenet1_1")]
    asked = Options(tmp_path / "out", data=folder, epochs=1)
    imagenet.run_imagenet(replace(asked, arms=["shufflenet"]), rows)
    page = imagenet.run_imagenet(asked, rows)
    assert "2 of 4 arms were done before" in capsys.readouterr().out
    results = json.loads((asked.output / "results.json").read_text(encoding="utf-8"))
    assert set(results["arms"]) == {f"{row.name} M=2 beta={beta}" for row in rows for beta in (0, 1)}
    assert results["not_run"] == {}
    for record in results["arms"].values():
        assert 0 <= record["top1"] <= record["top5"] == 1.0
        assert record["training"]["epochs"] == 1
    text = page.read_text(encoding="utf-8")
    for document in ("61.00 / 81.94", "53.41 / 74.88", "56.25 / 78.65", "42.69 / 65.24"):
        assert document in text
    assert (asked.output / "imagenet_squeezenet1_1.svg").is_file()


def test_a_row_whose_library_is_missing_is_named_and_the_others_run(tiny, folder, tmp_path):
    rows = [small("mobilevit_xs"), small("shufflenet_v2_x0_5")]
    page = imagenet.run_imagenet(Options(tmp_path / "out", data=folder, epochs=1), rows)
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert len(results["arms"]) == len(results["not_run"]) == 2
    assert "pip install timm" in results["not_run"]["mobilevit_xs M=2 beta=0"]
    assert "Not run" in page.read_text(encoding="utf-8")


def test_a_network_whose_library_is_missing_is_no_reason_to_end_the_study(vision, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(RuntimeError, match="pip install timm"):
        imagenet.network("mobilevit_xs", CLASSES)


def test_the_command_reaches_the_setting(tiny, folder, tmp_path, monkeypatch):
    row = small("shufflenet_v2_x0_5")
    table = partial(imagenet.run_imagenet, rows=[row])
    again = replace(study.run.__self__, settings={"imagenet": table}).run
    page = again(tmp_path / "out", setting="imagenet", data=folder, epochs=1, limit=12, arms=["shufflenet"])
    assert "shufflenet_v2_x0_5" in page.read_text(encoding="utf-8")
