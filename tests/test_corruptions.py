"""The contract of every corruption: bytes in, bytes out, decided by (seed, name, severity, index) alone."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from corruption_cases import photographs
from torch import Tensor

from dissensus.data import corruptions
from dissensus.data.corruptions import CBAR, CORRUPTIONS, EXTRA, SEVERITIES, STANDARD, corrupt, load_corrupted
from dissensus.data.corruptions._parameters import PARAMETERS

NAMES = list(CORRUPTIONS)
DETERMINISTIC = {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
    "circular_motion_blur",
}
# Steps (from, to) at which the published parameters themselves do not lower the signal-to-noise ratio.
KNOWN_RISES = {
    "glass_blur": {(1, 2), (2, 3), (4, 5)},  # the same moves, only smoothed more
    "motion_blur": {(3, 4)},  # the same standard deviation, a longer tail that has no weight
    "frost": {(3, 4), (4, 5)},  # less of the image, which leaves less to clip
    "elastic_transform": {(1, 2), (2, 3), (3, 4), (4, 5)},  # the affine part shrinks as the elastic one grows
    "spatter": {(3, 4)},  # from water to mud
    "saturate": {(2, 3)},  # from less colour to more
}

everywhere = pytest.mark.parametrize(
    ("name", "severity"), [(name, severity) for name in NAMES for severity in SEVERITIES]
)
each = pytest.mark.parametrize("name", NAMES)


def psnr(images: Tensor, reference: Tensor) -> Tensor:
    squared = (images.double() - reference.double()).square().mean(dim=(1, 2, 3))
    return 10 * torch.log10(255**2 / squared.clamp(min=1e-2))


def test_the_tables_hold_fifteen_four_and_ten_names():
    assert (len(STANDARD), len(EXTRA), len(CBAR)) == (15, 4, 10)
    assert EXTRA == ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    assert list(CORRUPTIONS) == [*STANDARD, *EXTRA, *CBAR] == list(dict.fromkeys(NAMES))
    assert {CORRUPTIONS[name].family for name in CBAR} == {"cbar"}
    assert set(PARAMETERS) == set(CORRUPTIONS)


@everywhere
def test_bytes_of_the_same_shape_come_back_changed(name, severity):
    images = photographs()
    before = images.clone()
    result = corrupt(images, name, severity)
    assert result.shape == images.shape
    assert result.dtype == torch.uint8
    assert not torch.equal(result, images)
    assert torch.equal(images, before)


@everywhere
def test_order_and_batch_size_change_nothing(name, severity, monkeypatch):
    images = photographs()
    whole = corrupt(images, name, severity, seed=3)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(severity))
    pieces = [corrupt(images[part], name, severity, seed=3, index=part) for part in order.split(7)]
    assert torch.equal(torch.cat(pieces), whole[order])
    assert torch.equal(corrupt(images[5:6], name, severity, seed=3, index=[5]), whole[5:6])
    monkeypatch.setitem(corruptions._CHUNK_VALUES, "cpu", 5 * images[0].numel())
    assert torch.equal(corrupt(images, name, severity, seed=3), whole)


@each
def test_the_number_of_threads_changes_nothing(name):
    images, threads = photographs(), torch.get_num_threads()
    torch.set_num_threads(1)
    alone = corrupt(images, name, 3)
    try:
        torch.set_num_threads(3)
        assert torch.equal(corrupt(images, name, 3), alone)
    finally:
        torch.set_num_threads(threads)


@each
def test_the_seed_and_the_index_decide_what_is_random(name):
    images = photographs(count=4)
    result = corrupt(images, name, 5, seed=0)
    assert torch.equal(corrupt(images, name, 5, seed=0), result)
    same_by_seed = torch.equal(corrupt(images, name, 5, seed=1), result)
    same_by_index = torch.equal(corrupt(images, name, 5, seed=0, index=[4, 5, 6, 7]), result)
    assert same_by_seed is same_by_index is (name in DETERMINISTIC)


def test_the_global_generator_is_left_as_found():
    state = torch.get_rng_state()
    for name in NAMES:
        corrupt(photographs(count=2), name, 1)
    assert torch.equal(torch.get_rng_state(), state)


@each
def test_the_signal_to_noise_ratio_falls_with_severity(name):
    images = photographs(count=96)
    ratios = [psnr(corrupt(images, name, severity), images).mean().item() for severity in SEVERITIES]
    for severity in SEVERITIES[:-1]:
        if (severity, severity + 1) not in KNOWN_RISES.get(name, ()):
            assert ratios[severity] < ratios[severity - 1], (severity, ratios)


@pytest.mark.parametrize("name", CBAR)
def test_c_bar_severities_start_mild_and_end_strong(name):
    images = photographs(count=96)
    assert psnr(corrupt(images, name, 1), images).median() > 20
    assert psnr(corrupt(images, name, 5), images).median() < 28


@everywhere
def test_grey_images_work(name, severity):
    grey = photographs(count=4)[:, 1:2]
    result = corrupt(grey, name, severity)
    assert result.shape == grey.shape
    assert result.dtype == torch.uint8
    assert torch.equal(result, grey) is (name == "saturate")


@each
@pytest.mark.parametrize("shape", [(28, 28), (40, 57), (130, 150)])
def test_other_sizes_work(name, shape):
    images = photographs(count=2, side=shape[0], width=shape[1])
    result = corrupt(images, name, 5)
    assert result.shape == images.shape
    assert not torch.equal(result, images)


@each
def test_black_and_white_images_stay_in_range(name):
    flat = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 3, 32, 32)
    result = corrupt(flat, name, 5).float()
    # Nothing wraps around: black never turns to noise around white, nor white to noise around black.
    assert result[0].mean() < 200
    assert result[1].mean() > 90


def test_an_empty_batch_stays_empty():
    assert corrupt(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), "fog", 1).shape == (0, 3, 32, 32)


def test_a_corruption_can_be_called_and_says_what_it_does():
    images = photographs(count=3)
    fog = CORRUPTIONS["fog"]
    assert torch.equal(fog(images, 4, seed=2, index=[7, 8, 9]), corrupt(images, "fog", 4, seed=2, index=[7, 8, 9]))
    assert all(corruption.about.endswith(".") for corruption in CORRUPTIONS.values())


@pytest.mark.parametrize("severity", [0, 6, -1])
def test_a_severity_outside_one_to_five_is_refused(severity):
    with pytest.raises(ValueError, match="`severity` must be 1, 2, 3, 4 or 5; got"):
        corrupt(photographs(count=1), "fog", severity)


# Where shapes and types are checked as the suite runs, that check answers first, with a TypeError.
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("severity", 2.5),
        ("severity", "3"),
        ("severity", True),
        ("images", np.zeros((2, 3, 32, 32), dtype=np.uint8)),
        ("index", [0.5, 1.5]),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(argument, value):
    arguments = {"images": photographs(count=2), "name": "fog", "severity": 1, argument: value}
    with pytest.raises((ValueError, TypeError), match=argument):
        corrupt(**arguments)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 32, 32), "uint8"),
        (torch.zeros(3, 32, 32, dtype=torch.uint8), "batch, channels, height, width"),
        (torch.zeros(2, 32, 32, 3, dtype=torch.uint8), "batch, channels, height, width"),
        (torch.zeros(2, 2, 32, 32, dtype=torch.uint8), "1 or 3 channels"),
        (torch.zeros(2, 3, 8, 32, dtype=torch.uint8), "at least 16 pixels"),
    ],
)
def test_images_of_another_kind_are_refused(images, message):
    with pytest.raises(ValueError, match=message):
        corrupt(images, "fog", 1)


@pytest.mark.parametrize("index", [[0], [0, 1, 2], [True, False]])
def test_an_index_that_does_not_number_the_images_is_refused(index):
    with pytest.raises(ValueError, match="`index` must be"):
        corrupt(photographs(count=2), "fog", 1, index=index)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"gaussian_noise, .*got 'gausian_noise'"):
        corrupt(photographs(count=1), "gausian_noise", 1)


def test_the_frost_folder_is_for_frost_only(tmp_path):
    with pytest.raises(ValueError, match="frost_folder"):
        corrupt(photographs(count=1), "fog", 1, frost_folder=str(tmp_path))
    with pytest.raises(ValueError, match="must hold pictures"):
        corrupt(photographs(count=1), "frost", 1, frost_folder=str(tmp_path))


def test_official_files_are_read_severity_by_severity(tmp_path):
    arrays = np.arange(10, dtype=np.uint8)[:, None, None, None] * np.ones((10, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "fog.npy", arrays)
    assert load_corrupted(tmp_path, "fog", 2)[:, 0, 0, 0].tolist() == [2, 3]
    assert load_corrupted(tmp_path, "fog", 5).shape == (2, 3, 32, 32)
    with pytest.raises(ValueError, match=r"must hold snow\.npy.*holds fog"):
        load_corrupted(tmp_path, "snow", 2)
    with pytest.raises(ValueError, match="severity"):
        load_corrupted(tmp_path, "fog", 0)
    np.save(tmp_path / "snow.npy", arrays[:7])
    with pytest.raises(ValueError, match="5 n"):
        load_corrupted(tmp_path, "snow", 1)


def test_the_user_page_lists_every_corruption_with_the_parameters_in_force():
    lines = (Path(__file__).parents[1] / "docs" / "corruption-table.md").read_text().splitlines()
    for name, corruption in CORRUPTIONS.items():
        (line,) = (line for line in lines if line.startswith(f"| `{name}` | {corruption.about} |"))
        arguments = [values.cifar for values in corruption.parameters.values()]
        values = [f"{value:g}" for severity in zip(*arguments, strict=True) for value in severity]
        cells = line.split("|")[4]
        assert re.findall(r"[\d.]+(?:e-\d+)?", cells) == values


@pytest.mark.gpu
@everywhere
def test_the_gpu_agrees_with_the_cpu_and_with_itself_in_any_order(name, severity):
    images = photographs()
    there = corrupt(images.cuda(), name, severity)
    difference = (there.cpu().int() - corrupt(images, name, severity).int()).abs()
    assert (difference > 1).double().mean() < 1e-3
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(severity))
    pieces = [corrupt(images[part].cuda(), name, severity, index=part) for part in order.split(7)]
    assert torch.equal(torch.cat(pieces), there[order.cuda()])
