"""Speed of the corruptions.

On a CPU: images a second at 32 px for every corruption, beside a plain loop over images in numpy, scipy or
Pillow for some of them, in the same run and on the same number of threads. On CUDA: the whole grid of 10 000
images, 19 corruptions and 5 severities.

    python benchmarks/corruptions.py --threads 1
    python benchmarks/corruptions.py --device cuda
"""

import argparse
import io
import math
import platform
import time
from collections.abc import Callable

import numpy as np
import torch

from dissensus.data.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, STANDARD, corrupt

SEVERITY = 3


def gaussian_noise(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return np.clip(image / 255 + random.normal(size=image.shape, scale=0.08), 0, 1) * 255


def shot_noise(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return np.clip(random.poisson(image / 255 * 100) / 100, 0, 1) * 255


def contrast(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    values = image / 255
    mean = values.mean((0, 1), keepdims=True)
    return np.clip((values - mean) * 0.4 + mean, 0, 1) * 255


def gaussian_blur(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    from scipy.ndimage import gaussian_filter

    return gaussian_filter(image / 255, (0.7, 0.7, 0), mode="nearest") * 255


def zoom_blur(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    from scipy.ndimage import zoom

    side, total, factors = len(image), image / 255, np.arange(1, 1.16, 0.01)
    for factor in factors:
        kept = math.ceil(side / factor)
        top = (side - kept) // 2
        large = zoom(image[top : top + kept, top : top + kept] / 255, (factor, factor, 1), order=1)
        trim = (len(large) - side) // 2
        total = total + large[trim : trim + side, trim : trim + side]
    return total / (len(factors) + 1) * 255


def glass_blur(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    from scipy.ndimage import gaussian_filter

    side = len(image)
    values = (gaussian_filter(image / 255, (0.4, 0.4, 0), mode="nearest") * 255).astype(np.uint8)
    for row in range(side - 1, 1, -1):
        for column in range(side - 1, 1, -1):
            down, right = random.integers(-1, 1, size=2)
            values[row, column] = values[row + down, column + right]
    return gaussian_filter(values / 255, (0.4, 0.4, 0), mode="nearest") * 255


def fog(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
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
    return np.clip((values + 0.75 * field[..., None]) * brightest / (brightest + 0.75), 0, 1) * 255


def elastic_transform(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    from scipy.ndimage import gaussian_filter, map_coordinates

    side, (rows, columns) = len(image), np.mgrid[: len(image), : len(image)]
    matrix = np.eye(2) + random.uniform(-0.1, 0.1, (2, 2))
    places = np.tensordot(matrix, np.stack([rows, columns]), 1)
    moved = np.stack(
        [map_coordinates(image[..., c] / 255, places, order=1, mode="mirror") for c in range(3)], -1
    )
    noise = random.uniform(-1, 1, (2, side, side))
    down, right = (gaussian_filter(part, 1.92, mode="reflect", truncate=3) * 2.56 for part in noise)
    places = np.stack([rows + down, columns + right])
    return 255 * np.stack(
        [map_coordinates(moved[..., c], places, order=1, mode="reflect") for c in range(3)], -1
    )


def pixelate(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    from PIL import Image

    side, box = len(image), Image.Resampling.BOX
    small = Image.fromarray(image).resize((int(0.85 * side),) * 2, box)
    return np.array(small.resize((side, side), box))


def jpeg_compression(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=58)
    return np.array(Image.open(file))


LOOPS: tuple[Callable[[np.ndarray, np.random.Generator], np.ndarray], ...] = (
    gaussian_noise,
    shot_noise,
    contrast,
    gaussian_blur,
    zoom_blur,
    glass_blur,
    fog,
    elastic_transform,
    pixelate,
    jpeg_compression,
)


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of several runs, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def on_cpu(images: torch.Tensor) -> None:
    loops = {function.__name__: function for function in LOOPS}
    arrays = images.permute(0, 2, 3, 1).contiguous().numpy()
    threads = torch.get_num_threads()
    print(f"{len(images)} images of {images.shape[-1]} px, {threads} thread(s), severity {SEVERITY}")
    print(f"{'corruption':32s}{'ours, images/s':>16s}{'loop, images/s':>16s}{'ratio':>8s}")
    for name in CORRUPTIONS:
        ours = len(images) / seconds(lambda name=name: corrupt(images, name, SEVERITY))
        line = f"{name:32s}{ours:16,.0f}"
        if name in loops:
            few, random = arrays[: 20 if name == "glass_blur" else 100], np.random.default_rng(0)
            work = lambda: [loops[name](image, random).astype(np.uint8) for image in few]  # noqa: B023, E731
            loop = len(few) / seconds(work, repeats=3)
            line += f"{loop:16,.0f}{ours / loop:8.1f}"
        print(line, flush=True)


def on_cuda(images: torch.Tensor) -> None:
    images = images.cuda()
    print(f"{torch.cuda.get_device_name()}, {len(images)} images of {images.shape[-1]} px, five severities")
    corrupt(images[:10], "gaussian_blur", 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    whole = time.perf_counter()
    for name in STANDARD + EXTRA:
        start = time.perf_counter()
        for severity in SEVERITIES:
            corrupt(images, name, severity)
        torch.cuda.synchronize()
        print(f"{name:32s}{time.perf_counter() - start:8.2f} s", flush=True)
    cells = len(images) * len(STANDARD + EXTRA) * len(SEVERITIES)
    total = time.perf_counter() - whole
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"whole grid: {total:.1f} s, {cells / total:,.0f} images/s, peak memory {peak:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--images", type=int, default=None, help="512 on a CPU, 10 000 on CUDA where not given"
    )
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    count = options.images or (512 if options.device == "cpu" else 10_000)
    # Smooth random fields: no corruption's time depends on what an image shows.
    coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 255
    images = torch.nn.functional.interpolate(coarse, size=options.side, mode="bilinear").to(torch.uint8)
    print(f"torch {torch.__version__}, numpy {np.__version__}, {platform.processor() or platform.machine()}")
    (on_cpu if options.device == "cpu" else on_cuda)(images)


if __name__ == "__main__":
    main()
