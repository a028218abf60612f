"""What corruptions are made of: keyed noise, bytes and grey, linear filters and warps, for whole batches.

Noise is counter-based: word `i` of an image is output `i` of the SplitMix64 generator started at the image's 64-bit key, so a
number depends on its key and its position only, and a batch is one vectorised expression. Every separable filter (a Gaussian,
a zoom, a box resize) is a matrix for the rows and one for the columns, applied in float64, so that the order in which a matrix
product adds its terms, which may change with the batch size, stays some nine decimal places below what decides a byte.
"""

import hashlib
import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.randomness import mix_in_place

# The increment of SplitMix64, as a signed 64-bit integer (torch has no unsigned arithmetic).
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def image_keys(seed: int, name: str, severity: int, index: Tensor) -> Tensor:
    """One key an image, `(batch,)`, decided by `(seed, name, severity, index)` alone."""
    digest = hashlib.blake2b(f"{seed}/{name}/{severity}".encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little", signed=True)
    return mix_in_place(index.to(torch.int64) * _GOLDEN + start)


def _words(keys: Tensor, count: int, stream: int) -> Tensor:
    """`count` independent 64-bit words an image, `(batch, count)`; streams of one key do not overlap."""
    positions = torch.arange(1, count + 1, device=keys.device) + (stream << 40)
    return mix_in_place(keys[:, None] + positions * _GOLDEN)


def bits(keys: Tensor, shape: tuple[int, ...], stream: int = 0) -> Tensor:
    """32 random bits an element, as int32 `(batch, *shape)` in memory of its own."""
    count = math.prod(shape)
    halves = _words(keys, (count + 1) // 2, stream).view(torch.int32)
    return halves[:, :count].reshape(-1, *shape)


def uniform(keys: Tensor, shape: tuple[int, ...] = (), low: float = 0.0, high: float = 1.0, stream: int = 0) -> Tensor:
    """Uniform numbers, float32 `(batch, *shape)`, on 2^23 midpoints: never exactly `low` or `high`."""
    # The upper 23 bits are a signed multiple of 2^9; every sum and product below is exact on (0, 1).
    unit = bits(keys, shape, stream).bitwise_and_(-(2**9)).to(torch.float32)
    unit.mul_(2.0**-32).add_(0.5 + 2.0**-24)
    return unit if (low, high) == (0.0, 1.0) else unit.mul_(high - low).add_(low)


def share_below(share: float) -> int:
    """The number below which `bits` lie as often as `uniform` lies below `share`: the same draws do."""
    single = float(torch.tensor(share, dtype=torch.float32))
    return math.ceil((single - 0.5 - 2.0**-24) * 2**23) * 2**9


def integers(keys: Tensor, high: Tensor | int, shape: tuple[int, ...] = (), stream: int = 0) -> Tensor:
    """Integers below `high` (a number, or one an image when `shape` is empty), int64 `(batch, *shape)`."""
    return (uniform(keys, shape, stream=stream).double() * high).long()


def normal(keys: Tensor, shape: tuple[int, ...] = (), stream: int = 0) -> Tensor:
    """Standard normal numbers, float32 `(batch, *shape)`, by Box and Muller's transform; |z| < 5.8."""
    count = math.prod(shape)
    pairs = (count + 1) // 2
    unit = uniform(keys, (2, pairs), stream=stream)
    radius, angle = unit[:, 0].log_().mul_(-2.0).sqrt_(), unit[:, 1].mul_(2 * math.pi)
    both = torch.empty_like(unit)
    torch.cos(angle, out=both[:, 0]).mul_(radius)
    torch.sin(angle, out=both[:, 1]).mul_(radius)
    return both.view(-1, 2 * pairs)[:, :count].reshape(-1, *shape)


# The published code truncates. A hair is added first, so that rounding in float32 cannot pull a whole number down.
_HAIR = 1 / 128

_LUMA = (0.299, 0.587, 0.114)


def to_uint8(values: Tensor, clamp: bool = True) -> Tensor:
    """Truncates float values to bytes, in place; means of bytes cannot leave the range from 0 to 255 and may skip the clamp."""
    values = values.add_(_HAIR)
    return to_bytes(values.clamp_(0.0, 255.0) if clamp else values)


def to_bytes(values: Tensor) -> Tensor:
    """By way of int16: three times as fast on a CPU as the conversion to bytes alone."""
    return values.to(torch.int16).to(torch.uint8)


def luma(images: Tensor) -> Tensor:
    """Grey value, float `(batch, 1, height, width)`; a single channel is its own."""
    values = images if images.is_floating_point() else images.float()
    if values.shape[1] == 1:
        return values
    red, green, blue = _LUMA
    return (values[:, :1] * red).add_(values[:, 1:2] * green).add_(values[:, 2:] * blue)


def tint(colour: tuple[float, float, float], like: Tensor) -> Tensor:
    """A colour as `(channels, 1, 1)`: its three values, or its luma for single-channel images."""
    values = list(colour) if like.shape[1] == 3 else [sum(c * w for c, w in zip(colour, _LUMA, strict=True))]
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None, None]


def separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`rows @ image @ columns.T` for every channel, in float64."""
    values = images.double() @ columns.T.to(images.device)
    return rows.to(images.device) @ values


def gaussian(images: Tensor, sd: float, truncate: float = 4.0, border: str = "edge") -> Tensor:
    """Gaussian blur of standard deviation `sd` pixels, float64."""
    height, width = images.shape[-2:]
    rows = gaussian_matrix(height, sd, truncate, border)
    return separable(images, rows, gaussian_matrix(width, sd, truncate, border))


@lru_cache(maxsize=128)
def gaussian_matrix(size: int, sd: float, truncate: float, border: str) -> Tensor:
    """Blur along one axis, `(size, size)`; the border is repeated ("edge") or mirrored ("reflect")."""
    radius = int(truncate * sd + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.ones(1) if radius == 0 else torch.exp(-0.5 * (offsets / sd).double() ** 2)
    sources = torch.arange(size)[:, None] + offsets
    if border == "edge":
        sources = sources.clamp(0, size - 1)
    else:
        sources = sources % (2 * size)
        sources = torch.minimum(sources, 2 * size - 1 - sources)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, sources, (weights / weights.sum()).double().expand_as(sources))


def zoom(images: Tensor, factor: float) -> Tensor:
    """The centre of the images enlarged by `factor` to their own size, float64."""
    return separable(images, *(zoom_matrix(size, factor) for size in images.shape[-2:]))


@lru_cache(maxsize=256)
def zoom_matrix(size: int, factor: float) -> Tensor:
    """Linear interpolation from the central `size / factor` pixels of an axis to `size` pixels."""
    kept = math.ceil(size / factor)
    enlarged = max(round(kept * factor), size)
    positions = torch.arange(size) + (enlarged - size) // 2
    sources = positions.double() * ((kept - 1) / max(enlarged - 1, 1))
    left = sources.long().clamp(max=max(kept - 2, 0))
    share = (sources - left)[:, None]
    left = left[:, None] + (size - kept) // 2
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix.scatter_add_(1, left, 1 - share)
    return matrix.scatter_add_(1, (left + 1).clamp(max=size - 1), share)


@lru_cache(maxsize=64)
def disk_kernel(radius: float, alias_sd: float) -> Tensor:
    """A disk of `radius` pixels softened by a small Gaussian, `(2 k + 1, 2 k + 1)`, sum 1."""
    # Three taps as published; more only where a larger image has scaled the Gaussian up.
    soft = max(1, round(2 * alias_sd))
    reach = int(radius) + soft
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).double()
    taps = torch.arange(-soft, soft + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (taps / alias_sd) ** 2)
    weights = (weights[:, None] * weights)[None, None]
    softened = F.conv2d(disk[None, None], weights, padding=soft)[0, 0]
    return softened / softened.sum()


def correlate(images: Tensor, kernel: Tensor) -> Tensor:
    """Weighted sum of shifted copies of real images, mirrored about their border pixels."""
    reach = len(kernel) // 2
    height, width = images.shape[-2:]
    padded, total = F.pad(images, (reach, reach, reach, reach), mode="reflect"), torch.zeros_like(images)
    for row, column in (kernel.abs() > 1e-6).nonzero().tolist():
        shifted = padded[..., row : row + height, column : column + width]
        total.add_(shifted, alpha=kernel[row, column].item())
    return total


def streak(images: Tensor, degrees: Tensor, radius: float, sd: float) -> Tensor:
    """Motion blur along one direction an image, float32: a one-sided Gaussian of `2 radius + 1` pixels.

    Pixel p becomes the weighted mean of the pixels nearest to `p + i * (cos, sin)`, i = 0, 1, …; the last pixel is repeated.
    """
    batch, channels, height, width = images.shape
    bell = torch.exp(-0.5 * (torch.arange(2 * round(radius) + 1).double() / sd) ** 2)
    weights = [weight for weight in (bell / bell.sum()).tolist() if weight >= 1e-5]
    radians = degrees.double() * (math.pi / 180)
    steps = torch.arange(len(weights), device=images.device)[:, None]
    # ceil(t - 1/2), not round: halves go one way, so that a streak has no kinks at steps to even numbers.
    right, down = ((steps * part - 0.5).ceil().long() for part in (radians.cos(), radians.sin()))
    # A step moves whole lines: each is one window of the image's memory, widened so that it may start anywhere.
    reach = len(weights) - 1
    padded = F.pad(images.float(), (reach, reach, 0, 0), mode="replicate")
    windows = padded.flatten().unfold(0, width, 1)
    planes = torch.arange(batch * channels, device=images.device).view(batch, channels, 1) * height
    lines = planes + (torch.arange(height, device=images.device) + down[:, :, None]).clamp(0, height - 1)[:, :, None]
    starts = lines * padded.shape[-1] + (right + reach)[:, :, None, None]
    total = windows.index_select(0, starts[0].flatten()).mul_(weights[0])
    for start, weight in zip(starts[1:], weights[1:], strict=True):
        total.add_(windows.index_select(0, start.flatten()), alpha=weight)
    return total.view(images.shape)


def positions(images: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every pixel, float32 `(height, 1)` and `(1, width)`."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, dtype=torch.float32, device=images.device)[:, None]
    return rows, torch.arange(width, dtype=torch.float32, device=images.device)[None]


def sample(images: Tensor, rows: Tensor, columns: Tensor, border: str = "mirror") -> Tensor:
    """Bilinear values of the images, float32, at `(rows, columns)` in pixels, `(batch, height, width)` each.

    Beyond the border: "mirror" reflects about the last pixel's centre, "reflect" about its outer side.
    """
    height, width = images.shape[-2:]
    mirror = border == "mirror"
    if mirror:
        across, down = columns * (2 / (width - 1)) - 1, rows * (2 / (height - 1)) - 1
    else:
        across, down = (columns + 0.5) * (2 / width) - 1, (rows + 0.5) * (2 / height) - 1
    # Places that all images share are stored once.
    grid = torch.empty(*torch.broadcast_shapes(across.shape, down.shape), 2, device=images.device)
    grid[..., 0], grid[..., 1] = across, down
    grid = grid.expand(len(images), -1, -1, -1)
    return F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=mirror)
