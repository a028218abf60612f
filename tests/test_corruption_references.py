"""Noise, blurs and weather against closed forms and independent implementations."""

import math

import numpy as np
import pytest
import torch
from corruption_cases import assert_one_level_apart, flat, photographs, setting
from PIL import Image
from scipy import ndimage, stats

from dissensus.data.corruptions import SEVERITIES, corrupt
from dissensus.data.corruptions._images import disk_kernel, image_keys, integers, streak, uniform
from dissensus.data.corruptions.blur import _glass_sources
from dissensus.data.corruptions.noise import _poisson_columns, alias_tables, poisson_probabilities
from dissensus.data.corruptions.weather import _distance, plasma

KEYS = image_keys(0, "test", 1, torch.arange(8))
each_severity = pytest.mark.parametrize("severity", SEVERITIES)


def test_published_parameters_hold_at_32_and_224_pixels():
    assert [setting("gaussian_noise", s)[0] for s in SEVERITIES] == [0.04, 0.06, 0.08, 0.09, 0.10]
    assert setting("snow", 4) == (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85)
    assert setting("elastic_transform", 2) == pytest.approx((0.05 * 32, 0.2 * 32, 0.07 * 32))
    assert setting("glass_blur", 5, side=224) == (1.5, 4, 2)
    assert setting("elastic_transform", 1, side=224) == pytest.approx((244 * 2, 244 * 0.7, 244 * 0.1))


def test_lengths_grow_with_the_side_and_nothing_else_does():
    assert setting("gaussian_blur", 5, side=64) == (2.0,)
    assert setting("gaussian_blur", 5, side=28) == (1.0,)
    assert setting("gaussian_blur", 5, side=448) == (12.0,)
    assert setting("gaussian_noise", 5, side=96) == (0.10,)
    assert setting("motion_blur", 1, side=112) == (21.0, 3.5)


@each_severity
def test_gaussian_noise_has_its_standard_deviation(severity):
    values = corrupt(flat(128), "gaussian_noise", severity).double()
    (sd,) = setting("gaussian_noise", severity)
    # Truncation adds a variance of 1/12 level and takes half a level off the mean.
    assert values.std().item() == pytest.approx(math.sqrt((255 * sd) ** 2 + 1 / 12), rel=0.01)
    assert values.mean().item() == pytest.approx(127.5, abs=4 * 255 * sd / values.numel() ** 0.5 + 0.02)


@each_severity
def test_speckle_noise_scales_with_the_image(severity):
    (sd,) = setting("speckle_noise", severity)
    for level in (40, 120):
        values = corrupt(flat(level), "speckle_noise", severity).double()
        assert values.std().item() == pytest.approx(math.sqrt((level * sd) ** 2 + 1 / 12), rel=0.01)


@each_severity
def test_impulse_noise_turns_its_share_black_or_white(severity):
    values = corrupt(flat(128), "impulse_noise", severity)
    (amount,) = setting("impulse_noise", severity)
    for extreme in (0, 255):
        share = (values == extreme).double().mean().item()
        assert share == pytest.approx(amount / 2, abs=4 * (amount / 2 / values.numel()) ** 0.5)
    assert ((values == 0) | (values == 255) | (values == 128)).all()


@pytest.mark.parametrize("photons", [500.0, 75.0, 3.0])
def test_alias_tables_hold_the_poisson_law_exactly(photons):
    columns = 1 << math.ceil(math.log2(photons + 10 * math.sqrt(photons) + 20))
    thresholds, aliases = alias_tables(poisson_probabilities(photons, columns))
    law = thresholds.clone().scatter_add_(1, aliases, 1 - thresholds) / columns
    expected = stats.poisson.pmf(np.arange(columns), np.arange(256)[:, None] * photons / 255)
    np.testing.assert_allclose(law.numpy(), expected, atol=1e-12)


def test_packed_alias_tables_keep_the_law_to_the_last_bit():
    packed, log_columns = _poisson_columns(100.0)
    cells = packed.long().view(256, -1) % 2**32
    thresholds = (cells >> log_columns).double() / 2 ** (32 - log_columns)
    law = thresholds.clone().scatter_add_(1, cells & (2**log_columns - 1), 1 - thresholds) / 2**log_columns
    expected = stats.poisson.pmf(np.arange(2**log_columns), np.arange(256)[:, None] * 100 / 255)
    np.testing.assert_allclose(law.numpy(), expected, atol=1e-6)


@each_severity
@pytest.mark.parametrize("level", [51, 102])
def test_shot_noise_has_the_mean_and_variance_of_truncated_poisson_counts(severity, level):
    (photons,) = setting("shot_noise", severity)
    values = corrupt(flat(level), "shot_noise", severity).double()
    counts = np.arange(1024)
    law = stats.poisson.pmf(counts, photons * level / 255)
    bytes_ = np.floor(np.minimum(counts / photons, 1) * 255 + 1 / 128)
    mean, spread = law @ bytes_, law @ bytes_**2 - (law @ bytes_) ** 2
    assert values.mean().item() == pytest.approx(mean, abs=4 * (spread / values.numel()) ** 0.5)
    assert values.var().item() == pytest.approx(spread, rel=0.02)


@each_severity
def test_gaussian_blur_equals_scipys(severity):
    images = photographs(count=4)
    (sd,) = setting("gaussian_blur", severity)
    expected = ndimage.gaussian_filter(images.numpy().astype(float), (0, 0, sd, sd), mode="nearest", truncate=4)
    assert_one_level_apart(corrupt(images, "gaussian_blur", severity), expected)


@each_severity
def test_defocus_blur_equals_scipys_correlation(severity):
    images = photographs(count=4)
    radius, alias_sd = setting("defocus_blur", severity)
    offsets = np.arange(-8, 9)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).astype(float)
    taps = np.exp(-0.5 * (np.arange(-1, 2) / alias_sd) ** 2)
    kernel = ndimage.correlate(disk / disk.sum(), np.outer(taps, taps) / taps.sum() ** 2, mode="constant")
    expected = ndimage.correlate(images.numpy().astype(float), kernel[None, None], mode="mirror")
    assert_one_level_apart(corrupt(images, "defocus_blur", severity), expected, share=0.12)


@each_severity
def test_defocus_blur_equals_opencvs(severity):
    cv2 = pytest.importorskip("cv2", reason="opencv is not installed")
    images = photographs(count=4)
    radius, alias_sd = setting("defocus_blur", severity)
    offsets = np.arange(-8, 9)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).astype(np.float32)
    kernel = cv2.GaussianBlur(disk / disk.sum(), ksize=(3, 3), sigmaX=alias_sd)
    blurred = [cv2.filter2D(image / 255.0, -1, kernel) for image in images.permute(0, 2, 3, 1).numpy()]
    expected = 255 * np.stack(blurred).transpose(0, 3, 1, 2)
    assert_one_level_apart(corrupt(images, "defocus_blur", severity), expected, share=0.12)


def test_disk_kernels_sum_to_one_and_are_round():
    for radius, alias_sd in ((0.3, 0.4), (1.5, 0.1), (10.0, 0.5), (5.7, 0.29)):
        kernel = disk_kernel(radius, alias_sd)
        assert kernel.sum().item() == pytest.approx(1.0)
        assert torch.allclose(kernel, kernel.T)
        assert torch.allclose(kernel, kernel.flip(0))


@each_severity
def test_zoom_blur_equals_scipys_zoom(severity):
    images = photographs(count=2)
    stop, step = setting("zoom_blur", severity)
    factors = np.arange(1, stop, step)
    total = images.numpy().astype(float)
    for factor in factors:
        kept = math.ceil(32 / factor)
        top = (32 - kept) // 2
        centre = images[..., top : top + kept, top : top + kept].numpy().astype(float)
        large = ndimage.zoom(centre, (1, 1, factor, factor), order=1)
        trim = (large.shape[-1] - 32) // 2
        total = total + large[..., trim : trim + 32, trim : trim + 32]
    assert_one_level_apart(corrupt(images, "zoom_blur", severity), total / (len(factors) + 1))


def test_a_streak_equals_the_walk_pixel_by_pixel():
    image = photographs(count=1)
    radius, sd, degrees = 4.0, 2.0, 33.0
    weights = np.exp(-0.5 * (np.arange(9) / sd) ** 2)
    weights /= weights.sum()
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    source = image[0].numpy().astype(float)
    expected = np.zeros_like(source)
    for i, weight in enumerate(weights):
        rows = np.clip(np.arange(32) + math.ceil(i * sine - 0.5), 0, 31)
        columns = np.clip(np.arange(32) + math.ceil(i * cosine - 0.5), 0, 31)
        expected += weight * source[:, rows][:, :, columns]
    result = streak(image, torch.tensor([degrees]), radius, sd)[0].numpy()
    np.testing.assert_allclose(result, expected, atol=0.02)


def test_motion_blur_directions_fill_the_quarter_between_minus_and_plus_45_degrees():
    # A single white pixel leaves a streak; its end points where the direction points (the blur looks ahead).
    images = torch.zeros(200, 1, 33, 33, dtype=torch.uint8)
    images[:, :, 16, 16] = 255
    blurred = corrupt(images, "motion_blur", 5).float()[:, 0]
    offset = torch.arange(33) - 16.0
    mass = blurred.sum((1, 2))
    down, right = (blurred.sum(2) @ offset) / mass, (blurred.sum(1) @ offset) / mass
    degrees = torch.rad2deg(torch.atan2(-down, -right))
    assert 38 < degrees.max() < 50
    assert -50 < degrees.min() < -38
    assert abs(degrees.mean().item()) < 5


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_glass_moves_equal_the_visits_one_after_another(reach):
    height, width = 24, 30
    sources = _glass_sources(KEYS[:2], height, width, reach, stream=0)
    offsets = integers(KEYS[:2], 2 * reach, (2, height, width)) - reach
    for image in range(2):
        values = np.arange(height * width).reshape(height, width)
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                down, right = offsets[image, :, row, column].tolist()
                values[row, column] = values[row + down, column + right]
        np.testing.assert_array_equal(sources[image].view(height, width).numpy(), values)


def test_plasma_equals_the_diamond_square_algorithm_point_by_point():
    size, decay = 8, 1.7
    draws = uniform(KEYS[:1], (size * size,), low=-1.0, high=1.0)[0].double().numpy()
    field, step, amplitude, used = np.zeros((size, size)), size, 100.0, 0
    while step >= 2:
        half, cells = step // 2, size // step
        noise = draws[used : used + 3 * cells * cells].reshape(3, cells, cells) * amplitude**2
        used += 3 * cells * cells

        def mean(row, column, arms, reach=half, field=field):
            return sum(field[(row + reach * a) % size, (column + reach * b) % size] for a, b in arms) / 4

        for i, j in np.ndindex(cells, cells):
            field[i * step + half, j * step + half] = (
                mean(i * step + half, j * step + half, ((1, 1), (1, -1), (-1, 1), (-1, -1))) + noise[0, i, j]
            )
        cross = ((0, 1), (0, -1), (1, 0), (-1, 0))
        for i, j in np.ndindex(cells, cells):
            upper = mean(i * step, j * step + half, cross) + noise[1, i, j]
            left = mean(i * step + half, j * step, cross) + noise[2, i, j]
            field[i * step, j * step + half], field[i * step + half, j * step] = upper, left
        step, amplitude = half, amplitude / decay
    field = (field - field.min()) / (field.max() - field.min())
    np.testing.assert_allclose(plasma(KEYS[:1], size, decay)[0].numpy(), field, atol=1e-5)


@each_severity
def test_fog_adds_a_cloud_and_keeps_the_brightest_value(severity):
    images = photographs(count=8)
    amount, decay = setting("fog", severity)
    cloud = plasma(image_keys(0, "fog", severity, torch.arange(8)), 32, decay)[:, None].double().numpy()
    brightest = images.amax((1, 2, 3), keepdim=True).double().numpy() / 255
    expected = 255 * (images.numpy() / 255 + amount * cloud) * brightest / (brightest + amount)
    foggy = corrupt(images, "fog", severity)
    assert_one_level_apart(foggy, expected)
    assert (foggy.amax((1, 2, 3)) <= images.amax((1, 2, 3))).all()


@each_severity
def test_snow_only_brightens(severity):
    images = photographs()
    assert (corrupt(images, "snow", severity).int() >= images.int() - 1).all()


def test_frost_is_the_weighted_sum_with_a_texture_of_the_folder(tmp_path):
    Image.new("RGB", (400, 300), (100, 150, 200)).save(tmp_path / "one.png")
    images = photographs()
    weight, frost = setting("frost", 3)[:2]
    layer = torch.tensor([100.0, 150.0, 200.0])[:, None, None]
    expected = (images * weight + layer * frost).clamp(max=255)
    assert_one_level_apart(corrupt(images, "frost", 3, frost_folder=str(tmp_path)), expected.numpy())


def test_frost_crops_lie_inside_their_textures_and_differ(tmp_path):
    for level, size in ((20, (160, 160)), (200, (600, 160))):
        Image.new("RGB", size, (level, level, level)).save(tmp_path / f"{level}.png")
    black = torch.zeros(100, 3, 32, 32, dtype=torch.uint8)
    means = corrupt(black, "frost", 5, frost_folder=str(tmp_path)).float().mean((1, 2, 3))
    assert set(means.tolist()) == {9.0, 90.0}
    assert 30 < (means == 9.0).sum() < 70


@pytest.mark.parametrize("shape", [(32, 32), (20, 33)])
def test_distances_to_drop_edges_equal_scipys(shape):
    edges = uniform(KEYS[:1], (1, *shape)) < 0.02
    expected = ndimage.distance_transform_edt(~edges[0, 0].numpy()).clip(max=20)
    np.testing.assert_allclose(_distance(edges)[0, 0].clamp(max=20).numpy(), expected)


def test_mud_hides_and_water_adds_light():
    images = flat(90)
    mud, water = corrupt(images, "spatter", 5), corrupt(images, "spatter", 2)
    assert (water >= images).all()
    assert (water > images).any()
    assert (mud <= images).all()
    assert torch.tensor([63, 42, 20]).eq(mud.amin((0, 2, 3))).all()
