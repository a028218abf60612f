"""Packed image sets: what an encoder written here packs, the package unpacks bit for bit; so are the real files."""

import io
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dissensus.data.files import load
from dissensus.data.images import is_packed, unpack
from dissensus.data.suites import OPENOOD_CIFAR10, load_suite

SHARED = Path(__file__).parents[1].parent / "shared" / "data" / "images"
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


@given(seed=st.integers(0, 2**32), count=st.integers(1, 3), height=st.integers(1, 6), width=st.integers(1, 6))
def test_what_was_packed_is_unpacked_bit_for_bit(seed, count, height, width):
    images = random_images(seed, count, height, width)
    np.testing.assert_array_equal(unpack(packed(images)), images.transpose(0, 3, 1, 2))


def test_saturated_colours_survive_the_differences():
    images = np.zeros((2, 2, 2, 3), np.uint8)
    images[0, 0, 0], images[0, 0, 1], images[0, 1, 0] = (255, 0, 255), (0, 255, 0), (255, 255, 255)
    np.testing.assert_array_equal(unpack(packed(images)), images.transpose(0, 3, 1, 2))


def test_many_images_are_decoded_in_parts(monkeypatch):
    import dissensus.data.images as module

    monkeypatch.setattr(module, "_AT_ONCE", 2)
    images = random_images(0, count=5)
    np.testing.assert_array_equal(unpack(packed(images)), images.transpose(0, 3, 1, 2))


def test_files_with_labels_are_read_like_any_other(tmp_path):
    images = random_images(1, count=4)
    np.savez(tmp_path / "a.npz", **packed(images), y=np.arange(4, dtype=np.uint8), names=np.array(["a", "b"]))
    loaded = load(tmp_path / "a.npz")
    assert torch.equal(loaded.x, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert loaded.y.tolist() == [0, 1, 2, 3]
    assert loaded.y.dtype == torch.int64


def test_a_suite_reads_packed_sets_and_archives_of_pictures(tmp_path):
    images = random_images(2, count=2, height=32, width=32)
    np.savez(tmp_path / "svhn.npz", **packed(images))
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
    wanted = torch.from_numpy(images).permute(0, 3, 1, 2)
    assert set(found.sets) == {"svhn", "textures"}
    assert torch.equal(found.sets["svhn"], wanted)
    assert torch.equal(found.sets["textures"], wanted)


def test_an_archive_that_was_cut_off_is_refused(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b nothing of the kind")
    with pytest.raises(ValueError, match="cannot be read as an archive"):
        load(tmp_path / "a.tar.gz")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"xz": np.frombuffer(b"no stream", np.uint8)}, "cannot be decompressed"),
        ({"shape": np.array([3, 5, 4, 1])}, "must be shaped"),
        ({"shape": np.array([9, 5, 4, 3])}, "should unpack to 540 bytes and has 180"),
    ],
)
def test_broken_files_are_refused_in_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        unpack(packed(random_images(3)) | change, "a.npz")


def test_plain_arrays_are_not_taken_for_packed_ones():
    assert not is_packed(["x", "shape"])


@pytest.mark.shared
@shared
def test_the_real_cifar_10_comes_out_as_it_is_known():
    if not (SHARED / "cifar10_test.npz").exists():
        pytest.skip("the CIFAR-10 test images are not in ../shared/data/images")
    loaded = load(SHARED / "cifar10_test.npz")
    assert loaded.x.shape == (10_000, 3, 32, 32)
    assert torch.bincount(loaded.y).tolist() == [1000] * 10
    # The first test image is the well-known cat; its first pixel is published in many a tutorial.
    assert loaded.y[0] == 3
    assert loaded.x[0, :, 0, 0].tolist() == [158, 112, 49]


@pytest.mark.shared
@shared
def test_every_real_packed_file_can_be_read():
    paths = [path for path in SHARED.glob("*.npz") if path.stat().st_size < 5_000_000 and path.stem != "mnist_test"]
    assert paths
    for path in paths:
        with np.load(path) as arrays:
            if is_packed(arrays.files):
                assert load(path).x.shape[1:] == (3, 32, 32)
