"""Colour, geometry and storage against closed forms and independent implementations."""

import colorsys
import io
import math

import numpy as np
import pytest
import torch
from corruption_cases import assert_one_level_apart, flat, photographs, setting
from PIL import Image
from scipy import ndimage

from dissensus.data.corruptions import SEVERITIES, corrupt
from dissensus.data.corruptions._images import image_keys, uniform
from dissensus.data.corruptions.digital import _affine_sources, elastic_transform

KEYS = image_keys(0, "test", 1, torch.arange(8))
each_severity = pytest.mark.parametrize("severity", SEVERITIES)


@each_severity
def test_brightness_shifts_grey_by_its_amount(severity):
    (shift,) = setting("brightness", severity)
    assert corrupt(flat(100), "brightness", severity).unique().tolist() == [int(100 + 255 * shift + 1 / 128)]
    assert corrupt(flat(0), "brightness", severity).unique().tolist() == [int(255 * shift + 1 / 128)]
    assert corrupt(flat(250), "brightness", 5).unique().tolist() == [255]


@each_severity
@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_colours_equal_those_of_the_standard_librarys_hsv(name, severity):
    images = photographs(count=2)[..., :16, :16].clone()
    for column, level in enumerate((0, 77, 255)):
        images[..., column] = level
    factor, shift = (1.0, setting(name, severity)[0]) if name == "brightness" else setting(name, severity)
    expected = np.empty(images.shape)
    for image, row, column in np.ndindex(2, images.shape[2], images.shape[3]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(images[image, :, row, column].numpy() / 255))
        if name == "brightness":
            value = min(value + shift, 1.0)
        else:
            saturation = min(saturation * factor + shift, 1.0)
        expected[image, :, row, column] = 255 * np.array(colorsys.hsv_to_rgb(hue, saturation, value))
    assert_one_level_apart(corrupt(images, name, severity), expected)


@each_severity
def test_contrast_pulls_every_channel_towards_its_mean(severity):
    images = photographs()
    (factor,) = setting("contrast", severity)
    mean = images.numpy().mean((2, 3), keepdims=True)
    assert_one_level_apart(corrupt(images, "contrast", severity), (images.numpy() - mean) * factor + mean)


def test_the_affine_map_takes_the_moved_corners_back():
    images = photographs(count=8)
    rows, columns = _affine_sources(images, KEYS, 2.5)
    corners = torch.tensor([[26, 26], [26, 6], [6, 6]], dtype=torch.float64)
    moved = corners + uniform(KEYS, (3, 2), low=-2.5, high=2.5).double()
    # The map is affine: its value anywhere follows from three pixels.
    for field, axis in ((rows, 0), (columns, 1)):
        origin = field[:, 0, 0, None]
        down, right = field[:, 1, 0, None] - origin, field[:, 0, 1, None] - origin
        back = origin + moved[..., 0] * down + moved[..., 1] * right
        torch.testing.assert_close(back, corners[:, axis].expand_as(back))


def test_elastic_transform_equals_scipys_interpolation():
    images = photographs(count=8)
    strength, sd, affine = setting("elastic_transform", 4)
    rows, columns = (field.numpy() for field in _affine_sources(images, KEYS, affine))
    noise = uniform(KEYS, (2, 32, 32), low=-1.0, high=1.0, stream=1).double().numpy()
    down, right = strength * ndimage.gaussian_filter(noise, (0, 0, sd, sd), mode="reflect", truncate=3).swapaxes(0, 1)
    grid = np.mgrid[:32, :32]
    expected = np.empty((8, 3, 32, 32))
    for i, channel in np.ndindex(8, 3):
        source = images[i, channel].numpy().astype(float)
        moved = ndimage.map_coordinates(source, [rows[i], columns[i]], order=1, mode="mirror")
        places = [grid[0] + down[i], grid[1] + right[i]]
        expected[i, channel] = ndimage.map_coordinates(moved, places, order=1, mode="reflect")
    assert_one_level_apart(elastic_transform(images, KEYS, strength, sd, affine), expected)


def as_pictures(images: torch.Tensor) -> list[Image.Image]:
    channels_last = images.permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(array[..., 0] if images.shape[1] == 1 else array) for array in channels_last]


def as_images(pictures: list[Image.Image]) -> torch.Tensor:
    arrays = np.stack([np.atleast_3d(np.array(picture)) for picture in pictures])
    return torch.from_numpy(arrays).permute(0, 3, 1, 2)


@each_severity
@pytest.mark.parametrize("shape", [(32, 32), (28, 28), (37, 50), (130, 160)])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixelate_is_pillows_box_resize_bit_for_bit(severity, shape, channels):
    images = photographs(count=2, side=shape[0], width=shape[1])[:, :channels]
    (factor,) = setting("pixelate", severity, side=min(shape))
    small = (int(shape[1] * factor), int(shape[0] * factor))
    box = Image.Resampling.BOX
    expected = [picture.resize(small, box).resize(shape[::-1], box) for picture in as_pictures(images)]
    assert torch.equal(corrupt(images, "pixelate", severity), as_images(expected))


@each_severity
@pytest.mark.parametrize("shape", [(32, 32), (28, 28), (37, 50), (130, 160)])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_compression_is_pillows(severity, shape, channels):
    images = photographs(count=2, side=shape[0], width=shape[1])[:, :channels]
    (quality,) = setting("jpeg_compression", severity, side=min(shape))
    expected = []
    for picture in as_pictures(images):
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(quality))
        expected.append(Image.open(file))
    difference = (corrupt(images, "jpeg_compression", severity).int() - as_images(expected).int()).double()
    # Bit for bit with libjpeg-turbo; another library behind Pillow may round a few values differently.
    psnr = 10 * math.log10(255**2 / max(difference.square().mean().item(), 1e-9))
    assert psnr > 55
    from PIL import features

    if features.check_feature("libjpeg_turbo"):
        assert not difference.any()


@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_colours_equal_scikit_images(name):
    color = pytest.importorskip("skimage.color", reason="scikit-image is not installed")
    images = photographs()
    hsv = color.rgb2hsv(images.permute(0, 2, 3, 1).numpy() / 255)
    if name == "brightness":
        hsv[..., 2] = np.clip(hsv[..., 2] + setting(name, 4)[0], 0, 1)
    else:
        factor, shift = setting(name, 4)
        hsv[..., 1] = np.clip(hsv[..., 1] * factor + shift, 0, 1)
    assert_one_level_apart(corrupt(images, name, 4), 255 * color.hsv2rgb(hsv).transpose(0, 3, 1, 2))
