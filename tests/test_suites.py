"""A named suite runs on whatever of its sets a folder holds, and says what is missing."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from dissensus_studies.harness.image_sets import _unknown_suite
from PIL import Image

from dissensus.data.files import load
from dissensus.data.suites import FILES, OPENOOD_CIFAR10, SUITES, load_suite

SHARED = Path(__file__).parents[1].parent / "shared" / "data" / "images"


def save_images(path, count=2, shape=(32, 32, 3)):
    np.savez(path, x=np.full((count, *shape), 7, np.uint8))


def test_the_openood_protocol_for_cifar10():
    groups = {group: [s.name for s in OPENOOD_CIFAR10.sets if s.group == group] for group in ("near", "far")}
    assert groups == {"near": ["cifar100", "tiny_imagenet"], "far": ["mnist", "svhn", "textures", "places"]}


def test_what_is_there_is_loaded_like_the_known_data_and_the_rest_is_named(tmp_path):
    save_images(tmp_path / "CIFAR-100.npz")
    save_images(tmp_path / "mnist_test.npz", shape=(28, 28))
    (tmp_path / "dtd" / "lined").mkdir(parents=True)
    Image.fromarray(np.full((50, 80, 3), 9, np.uint8)).save(tmp_path / "dtd" / "lined" / "a.png")
    found = load_suite(OPENOOD_CIFAR10, tmp_path, (3, 32, 32))
    assert {name: tuple(x.shape) for name, x in found.sets.items()} == {
        "cifar100": (2, 3, 32, 32),
        "mnist": (2, 3, 32, 32),
        "textures": (1, 3, 32, 32),
    }
    assert bool((found.sets["textures"] == 9).all())
    assert found.groups == {"cifar100": "near", "mnist": "far", "textures": "far"}
    assert found.missing == ("tiny_imagenet", "svhn", "places")
    assert found.notes["cifar100"] == ()
    assert "grey repeated" in found.notes["mnist"][0]
    assert "missing: tiny_imagenet, svhn, places" in found.explain()


def test_the_test_split_of_an_archive_is_taken(tmp_path):
    arrays = {"x_train": np.zeros((3, 32, 32, 3), np.uint8), "x_test": np.ones((2, 32, 32, 3), np.uint8)}
    np.savez(tmp_path / "svhn.npz", **arrays)
    assert load_suite(OPENOOD_CIFAR10, tmp_path, (3, 32, 32)).sets["svhn"].sum() == 2 * 3 * 32 * 32


def test_archives_of_pictures_are_read_in_the_order_of_their_names(tmp_path):
    images = np.random.default_rng(2).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    with tarfile.open(tmp_path / "dtd.tar.gz", "w:gz") as archive:
        for number in (1, 0):
            content = io.BytesIO()
            Image.fromarray(images[number]).save(content, "png")
            entry = tarfile.TarInfo(f"dtd/{number}.png")
            entry.size = content.tell()
            archive.addfile(entry, io.BytesIO(content.getvalue()))
        note = tarfile.TarInfo("dtd/readme.txt")
        archive.addfile(note, io.BytesIO())
    found = load_suite(OPENOOD_CIFAR10, tmp_path, (3, 32, 32))
    assert list(found.sets) == ["textures"]
    assert torch.equal(found.sets["textures"], torch.from_numpy(images).permute(0, 3, 1, 2))


def test_an_archive_that_was_cut_off_is_refused(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b nothing of the kind")
    with pytest.raises(ValueError, match="cannot be read as an archive"):
        load(tmp_path / "a.tar.gz")


def test_published_lists_decide_which_images_belong_to_a_set(tmp_path):
    pictures = tmp_path / "images_classic" / "tin"
    pictures.mkdir(parents=True)
    for number in range(3):
        Image.fromarray(np.full((64, 64, 3), number, np.uint8)).save(pictures / f"{number}.png")
    assert len(load_suite(OPENOOD_CIFAR10, tmp_path, (3, 32, 32)).sets["tiny_imagenet"]) == 3
    lists = tmp_path / "benchmark_imglist" / "cifar10"
    lists.mkdir(parents=True)
    (lists / "test_tin.txt").write_text("tin/2.png -1\ntin/0.png -1\n")
    found = load_suite(OPENOOD_CIFAR10, tmp_path, (3, 32, 32))
    assert found.sets["tiny_imagenet"][:, 0, 0, 0].tolist() == [2, 0]


def test_grey_known_data_gets_grey_unknown_data(tmp_path):
    save_images(tmp_path / "cifar100.npz")
    found = load_suite(OPENOOD_CIFAR10, tmp_path, (1, 28, 28))
    assert found.sets["cifar100"].shape == (2, 1, 28, 28)


def test_nothing_there_and_nothing_readable_are_said(tmp_path):
    with pytest.raises(ValueError, match="holds none of the sets of openood-cifar10: cifar100"):
        load_suite(OPENOOD_CIFAR10, tmp_path, (3, 32, 32))
    with pytest.raises(ValueError, match="does not exist"):
        load_suite(OPENOOD_CIFAR10, tmp_path / "no", (3, 32, 32))
    np.savez(tmp_path / "svhn.npz", something=np.ones(3))
    with pytest.raises(ValueError, match=r"The set svhn of openood-cifar10: svhn\.npz holds something"):
        load_suite(OPENOOD_CIFAR10, tmp_path, (3, 32, 32))


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_set_of_every_suite_can_be_found_by_each_of_its_names(suite, tmp_path):
    for number, each in enumerate(suite.sets):
        for name in each.files:
            folder = tmp_path / f"{number}-{name}"
            folder.mkdir()
            save_images(folder / f"{name}.npz", count=1)
            assert list(suite.find(folder)) == [each.name]


def test_a_set_has_the_same_names_in_all_suites_and_in_the_studies():
    for suite in (*SUITES.values(), _unknown_suite("cifar10")):
        assert {each.name: each.files for each in suite.sets}.items() <= FILES.items()


@pytest.mark.shared
def test_the_suite_of_anchoring_finds_the_sets_that_its_study_reads():
    if not (SHARED / "dtd10_32.npz").exists():
        pytest.skip("textures are not in ../shared/data/images")
    found = SUITES["anchoring-cifar10"].find(SHARED)
    read = _unknown_suite("cifar10").find(SHARED)
    assert found == {name: read[name] for name in ("tiny_imagenet", "cifar100", "isun", "textures")}


@pytest.mark.shared
def test_real_mnist_becomes_like_cifar(tmp_path):
    if not (SHARED / "mnist_test.npz").exists():
        pytest.skip("the MNIST test set is not in ../shared/data/images")
    (tmp_path / "mnist.npz").symlink_to(SHARED / "mnist_test.npz")
    found = load_suite(OPENOOD_CIFAR10, tmp_path, (3, 32, 32)).sets["mnist"]
    assert found.shape == (10_000, 3, 32, 32)
    assert torch.equal(found[:, 0], found[:, 2])
    # Published mean of MNIST's test images, 0.1325 of full ink; enlarging keeps it.
    assert found.float().mean().item() / 255 == pytest.approx(0.1325, abs=1e-3)
