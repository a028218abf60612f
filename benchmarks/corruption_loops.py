"""Every corruption for one image, as one writes it with numpy, scipy and Pillow: what batches are compared with.

Severity 3 at 32 px, `(height, width, 3)` bytes in, numbers of range 0 to 255 out. The bodies are vectorised over
the pixels of an image wherever numpy allows, so the comparison is about batches, not about Python's loops; only
`glass_blur` visits pixels one after another, as its definition asks.
"""

import io
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Loop = Callable[[Array, np.random.Generator], Array]


def _bytes(values: Array) -> Array:
    return np.clip(values, 0, 1) * 255


def gaussian_noise(image: Array, random: np.random.Generator) -> Array:
    return _bytes(image / 255 + random.normal(size=image.shape, scale=0.08))


def speckle_noise(image: Array, random: np.random.Generator) -> Array:
    values = image / 255
    return _bytes(values + values * random.normal(size=image.shape, scale=0.12))


def shot_noise(image: Array, random: np.random.Generator) -> Array:
    return _bytes(random.poisson(image / 255 * 100) / 100)


def impulse_noise(image: Array, random: np.random.Generator) -> Array:
    values = image / 255
    flipped, salted = random.random(image.shape) <= 0.03, random.random(image.shape) <= 0.5
    values[flipped & salted] = 1
    values[flipped & ~salted] = 0
    return _bytes(values)


def gaussian_blur(image: Array, random: np.random.Generator) -> Array:
    from scipy.ndimage import gaussian_filter

    return _bytes(gaussian_filter(image / 255, (0.7, 0.7, 0), mode="nearest"))


def defocus_blur(image: Array, random: np.random.Generator) -> Array:
    from scipy.ndimage import correlate

    values, kernel = image / 255, _disk()
    return _bytes(np.stack([correlate(values[..., c], kernel, mode="mirror") for c in range(3)], -1))


@lru_cache(maxsize=1)
def _disk() -> Array:
    from scipy.ndimage import gaussian_filter

    disk = np.zeros((3, 3))
    disk[1, 1] = 1.0
    return gaussian_filter(disk, 0.6, mode="constant", radius=1)


def glass_blur(image: Array, random: np.random.Generator) -> Array:
    from scipy.ndimage import gaussian_filter

    side = len(image)
    values = (gaussian_filter(image / 255, (0.4, 0.4, 0), mode="nearest") * 255).astype(np.uint8)
    for row in range(side - 1, 1, -1):
        for column in range(side - 1, 1, -1):
            down, right = random.integers(-1, 1, size=2)
            values[row, column] = values[row + down, column + right]
    return _bytes(gaussian_filter(values / 255, (0.4, 0.4, 0), mode="nearest"))


def motion_blur(image: Array, random: np.random.Generator) -> Array:
    return _bytes(_streak(image / 255, random.uniform(-45, 45), radius=6, sd=2))


def _streak(values: Array, degrees: float, radius: int, sd: float) -> Array:
    """Weighted mean of copies shifted along a direction, edge pixels repeated."""
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (steps / sd) ** 2)
    weights /= weights.sum()
    down = np.ceil(steps * math.sin(math.radians(degrees)) - 0.5).astype(int)
    right = np.ceil(steps * math.cos(math.radians(degrees)) - 0.5).astype(int)
    rows, columns = np.arange(values.shape[0]), np.arange(values.shape[1])
    total = np.zeros_like(values)
    for i, weight in enumerate(weights):
        if weight < 1e-5:
            break
        source_rows = np.clip(rows + down[i], 0, len(rows) - 1)[:, None]
        total += weight * values[source_rows, np.clip(columns + right[i], 0, len(columns) - 1)]
    return total


def zoom_blur(image: Array, random: np.random.Generator) -> Array:
    total, factors = image / 255, np.arange(1, 1.16, 0.01)
    for factor in factors:
        total = total + _zoomed(image / 255, factor)
    return _bytes(total / (len(factors) + 1))


def _zoomed(values: Array, factor: float) -> Array:
    """The centre enlarged to the size of the whole."""
    from scipy.ndimage import zoom

    side = len(values)
    kept = math.ceil(side / factor)
    top = (side - kept) // 2
    factors = (factor, factor, 1) if values.ndim == 3 else (factor, factor)
    large = zoom(values[top : top + kept, top : top + kept], factors, order=1)
    trim = (len(large) - side) // 2
    return large[trim : trim + side, trim : trim + side]


def snow(image: Array, random: np.random.Generator) -> Array:
    flakes = _zoomed(random.normal(size=image.shape[:2], loc=0.15, scale=0.3), 1.75)
    flakes[flakes < 0.55] = 0
    fall = _streak(np.clip(flakes, 0, 1), random.uniform(-135, -45), radius=10, sd=4)[..., None]
    values = image / 255
    grey = (values @ (0.299, 0.587, 0.114))[..., None]
    scene = 0.9 * values + 0.1 * np.maximum(values, grey * 1.5 + 0.5)
    return _bytes(scene + fall + np.rot90(fall, 2))


def frost(image: Array, random: np.random.Generator) -> Array:
    textures = _textures()
    texture = textures[random.integers(len(textures))]
    top, left = random.integers(texture.shape[0] - len(image), size=2)
    crop = texture[top : top + image.shape[0], left : left + image.shape[1]]
    return np.clip(0.9 * image + 0.4 * crop, 0, 255)


@lru_cache(maxsize=1)
def _textures() -> list[Array]:
    return list(np.random.default_rng(0).integers(0, 256, (5, 128, 128, 3)))


def fog(image: Array, random: np.random.Generator) -> Array:
    side = len(image)
    field, step, amplitude = np.zeros((side, side)), side, 100.0
    while step >= 2:
        half, corners = step // 2, field[::step, ::step]
        noise = random.uniform(-(amplitude**2), amplitude**2, (3, *corners.shape))
        right, below = np.roll(corners, -1, 1), np.roll(corners, -1, 0)
        centres = (corners + right + below + np.roll(right, -1, 0)) / 4 + noise[0]
        field[half::step, half::step] = centres
        field[::step, half::step] = (corners + right + centres + np.roll(centres, 1, 0)) / 4 + noise[1]
        field[half::step, ::step] = (corners + below + centres + np.roll(centres, 1, 1)) / 4 + noise[2]
        step, amplitude = half, amplitude / 2.5
    field = (field - field.min()) / (field.max() - field.min())
    values, brightest = image / 255, image.max() / 255
    return _bytes((values + 0.75 * field[..., None]) * brightest / (brightest + 0.75))


def spatter(image: Array, random: np.random.Generator) -> Array:
    from scipy.ndimage import correlate, distance_transform_edt, gaussian_filter, uniform_filter

    liquid = gaussian_filter(random.normal(size=image.shape[:2], loc=0.65, scale=0.3), 1)
    wet = liquid > 0.69
    padded = np.pad(wet, 1, constant_values=True)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    distance = np.minimum(distance_transform_edt(~(wet & ~inner)), 20)
    levels = np.floor(uniform_filter(distance, 3, mode="mirror")).astype(int)
    share = np.cumsum(np.bincount(levels.ravel(), minlength=22))
    lowest = share[levels.min()]
    relief = np.round(255 * (share - lowest) / max(levels.size - lowest, 1))[levels]
    emboss = np.array([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    relief = np.clip(correlate(relief, emboss, mode="mirror"), 0, 255)
    light = np.floor(np.where(wet, liquid, 0) * 255) * np.round(uniform_filter(relief, 3, mode="mirror"))
    drops = (light / max(light.max(), 1e-9) * 0.5)[..., None] * np.array([175, 238, 238]) / 255
    return _bytes(image / 255 + drops)


def _hsv(values: Array) -> tuple[Array, Array, Array]:
    """Hue in sixths of the circle, saturation and value."""
    red, green, blue = np.moveaxis(values, -1, 0)
    value = values.max(-1)
    spread = value - values.min(-1)
    safe = np.where(spread > 0, spread, 1)
    hue = np.where(
        value == red, (green - blue) / safe, np.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    )
    return hue % 6, spread / np.where(value > 0, value, 1), value


def _rgb(hue: Array, saturation: Array, value: Array) -> Array:
    sector = (hue[..., None] + np.array([5, 3, 1])) % 6
    share = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    return value[..., None] * (1 - saturation[..., None] * share)


def brightness(image: Array, random: np.random.Generator) -> Array:
    hue, saturation, value = _hsv(image / 255)
    return _bytes(_rgb(hue, saturation, np.clip(value + 0.15, 0, 1)))


def saturate(image: Array, random: np.random.Generator) -> Array:
    hue, saturation, value = _hsv(image / 255)
    return _bytes(_rgb(hue, np.clip(saturation * 1.5, 0, 1), value))


def contrast(image: Array, random: np.random.Generator) -> Array:
    values = image / 255
    mean = values.mean((0, 1), keepdims=True)
    return _bytes((values - mean) * 0.4 + mean)


def _sampled(values: Array, rows: Array, columns: Array, mode: str = "mirror") -> Array:
    """Bilinear values at the given places."""
    from scipy.ndimage import map_coordinates

    places = np.stack(np.broadcast_arrays(rows, columns))
    return np.stack([map_coordinates(values[..., c], places, order=1, mode=mode) for c in range(3)], -1)


def elastic_transform(image: Array, random: np.random.Generator) -> Array:
    from scipy.ndimage import gaussian_filter

    side, (rows, columns) = len(image), np.mgrid[: len(image), : len(image)]
    matrix = np.eye(2) + random.uniform(-0.1, 0.1, (2, 2))
    moved = _sampled(image / 255, *np.tensordot(matrix, np.stack([rows, columns]), 1))
    noise = random.uniform(-1, 1, (2, side, side))
    down, right = (gaussian_filter(part, 1.92, mode="reflect", truncate=3) * 2.56 for part in noise)
    return _bytes(_sampled(moved, rows + down, columns + right, mode="reflect"))


def pixelate(image: Array, random: np.random.Generator) -> Array:
    from PIL import Image

    side, box = len(image), Image.Resampling.BOX
    small = Image.fromarray(image).resize((int(0.85 * side),) * 2, box)
    return np.array(small.resize((side, side), box))


def jpeg_compression(image: Array, random: np.random.Generator) -> Array:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=58)
    return np.array(Image.open(file))


def blue_noise_sample(image: Array, random: np.random.Generator) -> Array:
    from scipy.ndimage import gaussian_filter

    noise = random.normal(size=image.shape[:2])
    high = noise - gaussian_filter(noise, 1)
    return np.where((high < -1.4)[..., None], 0, image)


def brownish_noise(image: Array, random: np.random.Generator) -> Array:
    noise = random.normal(size=image.shape)
    brown = np.fft.irfft2(np.fft.rfft2(noise, axes=(0, 1)) * _brown_gain(len(image)), axes=(0, 1))
    return _bytes(image / 255 + 0.09 * brown)


@lru_cache(maxsize=1)
def _brown_gain(side: int) -> Array:
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)) * side
    gain = np.where(frequency > 0, np.maximum(frequency, 1) ** -1.5, 0)
    return (gain / np.sqrt((gain**2).mean()))[..., None]


def checkerboard_cutout(image: Array, random: np.random.Generator) -> Array:
    side, (rows, columns) = len(image), np.mgrid[: len(image), : len(image)]
    size, angle = random.uniform(0.1, 0.25) * side, random.uniform(0, 2 * math.pi)
    down, right = rows - (side - 1) / 2, columns - (side - 1) / 2
    first = np.floor((down * math.cos(angle) + right * math.sin(angle)) / size).astype(int)
    second = np.floor((right * math.cos(angle) - down * math.sin(angle)) / size).astype(int)
    cut = random.random((18, 18)) < 0.22
    return np.where((cut[first + 9, second + 9] & ((first + second) % 2 == 0))[..., None], 128, image)


def circular_motion_blur(image: Array, random: np.random.Generator) -> Array:
    rows, columns = np.mgrid[: len(image), : len(image)] - (len(image) - 1) / 2
    values, total, fractions = image / 255, np.zeros(image.shape), np.linspace(-1, 1, 15)
    weights = np.exp(-2 * fractions**2)
    for fraction, weight in zip(fractions, weights / weights.sum(), strict=True):
        sine, cosine = math.sin(math.radians(12 * fraction)), math.cos(math.radians(12 * fraction))
        middle = (len(image) - 1) / 2
        total += weight * _sampled(
            values, middle + rows * cosine + columns * sine, middle + columns * cosine - rows * sine
        )
    return _bytes(total)


def _star(side: int, random: np.random.Generator, centre: Array, radius: float) -> Array:
    """Light of a star with rays of random length, from 0 to 1."""
    rows, columns = np.mgrid[:side, :side]
    down, right = rows - centre[0] * (side - 1), columns - centre[1] * (side - 1)
    around = (np.arctan2(down, right) / (2 * math.pi) + 0.5) * 96
    ray = around.astype(int)
    share = around - ray
    length = np.maximum(random.normal(size=96) * 0.25 + 1, 0.1) * (radius * side)
    reach = length[ray % 96] * (1 - share) + length[(ray + 1) % 96] * share
    return reach**2 * (1 - (share - 0.5) ** 2) / (down**2 + right**2 + 1e-4)


def sparkles(image: Array, random: np.random.Generator) -> Array:
    dark = np.ones(image.shape[:2])
    for _ in range(5):
        dark *= 1 - np.clip(_star(len(image), random, random.random(2), 0.035), 0, 1)
    return _bytes((image / 255 - 1) * dark[..., None] + 1)


def inverse_sparkles(image: Array, random: np.random.Generator) -> Array:
    light = np.clip(_star(len(image), random, random.uniform(0.25, 0.75, 2), 0.25) ** 0.35, 0, 1)
    return _bytes((image / 255 - 1) * light[..., None] + 1)


def lines(image: Array, random: np.random.Generator) -> Array:
    side, (rows, columns) = len(image), np.mgrid[: len(image), : len(image)]
    clear, direction, spread = np.ones((side, side)), random.uniform(0, math.pi), random.uniform(0.1, 1)
    for _ in range(4):
        if random.random() < 0.88:
            angle = direction + spread * random.uniform(-math.pi / 2, math.pi / 2)
            down, right = rows - random.random() * side, columns - random.random() * side
            distance = np.abs(down * math.cos(angle) - right * math.sin(angle))
            clear *= 1 - np.clip(1 - distance, 0, 1)
    return (image - 128.0) * clear[..., None] + 128


def pinch_and_twirl(image: Array, random: np.random.Generator) -> Array:
    side, (rows, columns) = len(image), np.mgrid[: len(image), : len(image)]
    cell = side / 3
    down, right = (p - (np.floor(p / cell) + 0.5) * cell + 0.5 for p in (rows, columns))
    distance = np.hypot(down, right) / (cell / 2)
    inside = (distance < 1) & (distance > 1e-3)
    pinch = np.where(inside, np.sin(math.pi / 2 * np.clip(distance, 1e-3, 1)) ** -0.27, 1)
    turns = random.uniform(0.5, 1, (3, 3)) * 1.2 * random.choice([-1, 1], (3, 3))
    turn = turns[(rows // cell).astype(int), (columns // cell).astype(int)]
    turn = turn * np.where(inside, (1 - distance) ** 2, 0)
    sine, cosine = np.sin(turn), np.cos(turn)
    source_rows = rows - down + pinch * (down * cosine + right * sine)
    return _bytes(_sampled(image / 255, source_rows, columns - right + pinch * (right * cosine - down * sine)))


def ripple(image: Array, random: np.random.Generator) -> Array:
    side, (rows, columns) = len(image), np.ogrid[: len(image), : len(image)]
    length, phase = random.uniform(0.1, 0.3, 2) * side, random.uniform(0, 2 * math.pi, 2)
    down = np.sin(2 * math.pi * columns / length[0] + phase[0]) * (0.016 * side)
    right = np.sin(2 * math.pi * rows / length[1] + phase[1]) * (0.016 * side)
    return _bytes(_sampled(image / 255, rows + down, columns + right))


def transverse_chromatic_abberation(image: Array, random: np.random.Generator) -> Array:
    from scipy.ndimage import map_coordinates

    middle, moved = (len(image) - 1) / 2, np.empty(image.shape)
    for channel, factor in enumerate(1 + random.permutation(3) * 0.07):
        places = middle + (np.mgrid[: len(image), : len(image)] - middle) / factor
        moved[..., channel] = map_coordinates(image[..., channel] / 255, places, order=1, mode="mirror")
    return _bytes(moved)


LOOPS: dict[str, Loop] = {
    function.__name__: function
    for function in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        defocus_blur,
        glass_blur,
        motion_blur,
        zoom_blur,
        snow,
        frost,
        fog,
        brightness,
        contrast,
        elastic_transform,
        pixelate,
        jpeg_compression,
        speckle_noise,
        gaussian_blur,
        spatter,
        saturate,
        blue_noise_sample,
        brownish_noise,
        checkerboard_cutout,
        circular_motion_blur,
        inverse_sparkles,
        lines,
        pinch_and_twirl,
        ripple,
        sparkles,
        transverse_chromatic_abberation,
    )
}
