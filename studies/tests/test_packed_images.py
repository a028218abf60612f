"""Packed image sets: what an encoder written here packs, the studies unpack bit for bit; so are the real files."""

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from dissensus_studies.harness import labelled
from dissensus_studies.harness.image_sets import _read_unknown, _unknown_suite
from dissensus_studies.harness.labelled import Files, read_set, unpacked
from hypothesis import given
from hypothesis import strategies as st

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "images"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the image sets are not in ../shared/data/images")


def residues_of(image):
    """Residues of one image, pixel by pixel in plain Python: (3, height, width)."""
    height, width, _ = image.shape
    red, green, blue = (image[..., channel].astype(int) for channel in range(3))
    planes = (red - green, green, blue - green)
    found = np.zeros((3, height, width), np.uint8)
    for number, plane in enumerate(planes):
        for row in range(height):
            for column in range(width):
                left = plane[row, column - 1] if column else None
                above = plane[row - 1, column] if row else None
                if left is None and above is None:
                    guess = 0
                elif left is None or above is None:
                    guess = above if left is None else left
                else:
                    guess = sorted([left, above, left + above - plane[row - 1, column - 1]])[1]
                found[number, row, column] = (plane[row, column] - guess) % 256
    return found


def packed(images):
    residues = np.stack([residues_of(image) for image in images], axis=1)
    stream = lzma.compress(residues.tobytes(), format=lzma.FORMAT_XZ)
    return {"xz": np.frombuffer(stream, np.uint8), "shape": np.array(images.shape)}


def random_images(seed, count=3, height=5, width=4):
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3)).astype(np.uint8)


def round_trip(folder, images, **others):
    np.savez(folder / "a.npz", **packed(images), **others)
    found = unpacked(folder / "a.npz")
    assert torch.equal(found.x, torch.from_numpy(images).permute(0, 3, 1, 2))
    return found


@given(seed=st.integers(0, 2**32), count=st.integers(1, 3), height=st.integers(1, 6), width=st.integers(1, 6))
def test_what_was_packed_is_unpacked_bit_for_bit(tmp_path_factory, seed, count, height, width):
    round_trip(tmp_path_factory.mktemp("packed"), random_images(seed, count, height, width))


def test_saturated_colours_survive_the_differences(tmp_path):
    images = np.zeros((2, 2, 2, 3), np.uint8)
    images[0, 0, 0], images[0, 0, 1], images[0, 1, 0] = (255, 0, 255), (0, 255, 0), (255, 255, 255)
    round_trip(tmp_path, images)


def test_many_images_are_decoded_in_parts_and_labels_come_along(tmp_path, monkeypatch):
    monkeypatch.setattr(labelled, "_AT_ONCE", 2)
    labels = np.arange(5, dtype=np.uint8)
    found = round_trip(tmp_path, random_images(0, count=5), y=labels, names=np.array(["a", "b"]))
    assert found.y.tolist() == labels.tolist()
    assert found.y.dtype == torch.int64


def test_sets_are_read_packed_or_not(tmp_path):
    images = random_images(2, count=2, height=32, width=32)
    np.savez(tmp_path / "svhn.npz", **packed(images))
    np.savez(tmp_path / "mnist.npz", x=images)
    found = _read_unknown(_unknown_suite("cifar10"), tmp_path)
    for name in ("svhn", "mnist"):
        assert torch.equal(found[name], torch.from_numpy(images).permute(0, 3, 1, 2))
    assert "not found" in found["textures"]
    assert unpacked(tmp_path / "mnist.npz") is None


@pytest.mark.shared
@shared
def test_the_real_cifar_10_comes_out_as_it_is_known():
    if not (SHARED / "cifar10_test.npz").exists():
        pytest.skip("the CIFAR-10 test images are not in ../shared/data/images")
    (x, y), _, _ = read_set(Files([SHARED / "cifar10_test.npz"], []))
    assert x.shape == (10_000, 3, 32, 32)
    assert torch.bincount(y).tolist() == [1000] * 10
    # The first test image is the well-known cat; its first pixel is published in many a tutorial.
    assert y[0] == 3
    assert x[0, :, 0, 0].tolist() == [158, 112, 49]
