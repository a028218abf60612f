"""The ten corruptions named by CIFAR-10-C-bar: uint8 images and per-image keys in, uint8 images out.

Names and ideas are those of Mintun et al., 2021 (<https://arxiv.org/abs/2102.11273>). Implementations and severities are our own
(the signal-to-noise ratio falls from each to the next): numbers are not comparable with those on the official files. All lengths
are fractions of the image's shorter side.
"""

import math
from functools import lru_cache
from itertools import permutations

import torch
from torch import Tensor

from dissensus.data.corruptions._images import (
    bits,
    gaussian_matrix,
    integers,
    luma,
    normal,
    positions,
    sample,
    separable,
    share_below,
    to_uint8,
    uniform,
)

_GREY = 128.0
_WHITE = 255.0
_RAYS = 96


def blue_noise_sample(images: Tensor, keys: Tensor, dropped: float) -> Tensor:
    """Blacks out a fraction `dropped` of the pixels, evenly spread: where high-pass noise is smallest."""
    height, width = images.shape[-2:]
    noise = normal(keys, (1, height, width)).double()
    rows, columns = (gaussian_matrix(size, 1.0, 4.0, "reflect") for size in (height, width))
    high = noise - separable(noise, rows, columns)
    # The variance that the filter leaves far from the border: the sum of its squared weights.
    weights = rows[height // 2]
    peak = weights.max().item() ** 2
    spread = math.sqrt(1 - 2 * peak + (weights**2).sum().item() ** 2)
    threshold = spread * torch.special.ndtri(torch.tensor(dropped, dtype=torch.float64)).item()
    # Masks of bits: comparisons in place keep the type and vectorise, and need no branch afterwards.
    return images & high.ge_(threshold).neg_().to(torch.int16).to(torch.uint8)


def checkerboard_cutout(images: Tensor, keys: Tensor, fraction: float) -> Tensor:
    """Greys out a fraction of the black squares of a checkerboard of random size and direction."""
    side, (rows, columns) = _side(images), positions(images)
    size = uniform(keys, (1, 1), low=0.1, high=0.25).double() * side
    angle = uniform(keys, (1, 1), high=2 * math.pi, stream=1).double()
    down, right = rows - (images.shape[2] - 1) / 2, columns - (images.shape[3] - 1) / 2
    sine, cosine = angle.sin(), angle.cos()
    first = (down * cosine + right * sine).div_(size).floor_().int()
    second = (right * cosine - down * sine).div_(size).floor_().int()
    # Enough squares of the smallest size to cover the diagonal, counted from the centre.
    reach = math.ceil(math.hypot(*images.shape[2:]) / (2 * 0.1 * side)) + 1
    cut = bits(keys, (2 * reach, 2 * reach), stream=2).lt_(share_below(fraction)).neg_()
    black = (first + second).bitwise_and_(1).sub_(1)
    square = first.add_(reach).mul_(2 * reach).add_(second).add_(reach)
    # Masks of bits, all set where a pixel is greyed out.
    grey = _looked_up(cut.flatten(1), square).bitwise_and_(black).to(torch.uint8)[:, None]
    return images.bitwise_and(~grey).bitwise_or_(grey & int(_GREY))


def lines(images: Tensor, keys: Tensor, density: float) -> Tensor:
    """Draws grey antialiased lines through random points, `density * 32` of them on average."""
    rows, columns = positions(images)
    height, width = images.shape[-2:]
    most = math.ceil(density * 32)
    point = uniform(keys, (2, most, 1, 1))
    direction = uniform(keys, (1, 1, 1), high=math.pi, stream=1)
    spread = uniform(keys, (1, 1, 1), low=0.1, high=1.0, stream=2)
    angle = direction + spread * uniform(keys, (most, 1, 1), low=-math.pi / 2, high=math.pi / 2, stream=3)
    sine, cosine = angle.double().sin().float(), angle.double().cos().float()
    # The last line is drawn in as many images as the fraction asks for.
    drawn = uniform(keys, (most,), stream=4) < density * 32 / most
    thickness = max(1.0, _side(images) / 32)
    clear = torch.ones(len(images), height, width, device=images.device)
    for i in range(most):
        down, right = rows - point[:, 0, i] * height, columns - point[:, 1, i] * width
        distance = (down * cosine[:, i] - right * sine[:, i]).abs_()
        cover = distance.neg_().add_(0.5 + thickness / 2).clamp_(0.0, 1.0)
        clear.mul_(cover.mul_(drawn[:, i, None, None]).neg_().add_(1.0))
    return to_uint8(images.float().sub_(_GREY).mul_(clear[:, None]).add_(_GREY))


def sparkles(images: Tensor, keys: Tensor, radius: float, number: int = 5) -> Tensor:
    """Lights `number` white stars of about `radius` at random places."""
    dark = torch.ones(images.shape[0], *images.shape[2:], dtype=torch.float64, device=images.device)
    for i in range(number):
        centre = uniform(keys, (2,), stream=4 * i)
        dark.mul_(_star(images, keys, centre, radius, stream=4 * i + 1).neg_().add_(1.0))
    return _blend(images, dark)


def inverse_sparkles(images: Tensor, keys: Tensor, sharpness: float) -> Tensor:
    """Whitens the image outside one large star, the more abruptly the larger `sharpness`."""
    centre = uniform(keys, (2,), low=0.25, high=0.75)
    # By way of the logarithm, which is faster than a power.
    light = _star(images, keys, centre, 0.25, stream=1).log_().mul_(sharpness).exp_()
    return _blend(images, light)


def _star(images: Tensor, keys: Tensor, centre: Tensor, radius: float, stream: int) -> Tensor:
    """Light of a star with rays of random length, from 0 to 1, float64 `(batch, height, width)`."""
    (rows, columns), (height, width) = positions(images), images.shape[-2:]
    down = rows.double() - centre[:, 0, None, None] * (height - 1)
    right = columns.double() - centre[:, 1, None, None] * (width - 1)
    around = torch.atan2(down, right).div_(2 * math.pi).add_(0.5).mul_(_RAYS)
    ray = around.floor()
    share, ray = around.sub_(ray), ray.int()
    length = (normal(keys, (_RAYS,), stream=stream) * 0.25 + 1).clamp_(min=0.1).double() * (radius * _side(images))
    # The last rays are followed by the first.
    length = torch.cat([length, length[:, :2]], dim=1)
    reach = _looked_up(length[:, :-1], ray).addcmul_(_looked_up(length.diff(dim=1), ray), share)
    # Brightest along the middle of a ray.
    middle = share.sub_(0.5).square_().neg_().add_(1.0)
    return reach.square_().mul_(middle).div_(down.square() + (right.square() + 1e-4)).clamp_(0.0, 1.0)


def _looked_up(table: Tensor, places: Tensor) -> Tensor:
    """Values of each image's row of a table, `(batch, size)`, at int32 places `(batch, height, width)`."""
    first = torch.arange(len(table), dtype=torch.int32, device=table.device) * table.shape[1]
    return table.flatten().index_select(0, (places + first[:, None, None]).flatten()).view(places.shape)


def _blend(images: Tensor, weight: Tensor) -> Tensor:
    """The image where `weight` is 1, white where it is 0."""
    return to_uint8(images.float().sub_(_WHITE).mul_(weight[:, None].float()).add_(_WHITE))


def pinch_and_twirl(images: Tensor, keys: Tensor, angle: float, amount: float) -> Tensor:
    """Pinches and turns the image inside each cell of a 3 x 3 grid, up to `angle` radians either way."""
    rows, columns = positions(images)
    height, width = images.shape[-2:]
    cells = 3
    cell_row, cell_column = ((p / (n / cells)).floor() for p, n in ((rows, height), (columns, width)))
    down = rows - (cell_row + 0.5) * (height / cells) + 0.5
    right = columns - (cell_column + 0.5) * (width / cells) + 0.5
    radius = _side(images) / cells / 2
    distance = ((down**2 + right**2).sqrt() / radius).double()
    inside = (distance < 1) & (distance > 1e-3)
    pinch = torch.where(inside, (math.pi / 2 * distance.clamp(1e-3, 1.0)).sin() ** -amount, 1.0)
    turns = uniform(keys, (cells * cells,), low=0.5, high=1.0) * angle
    turns = torch.where(uniform(keys, (cells * cells,), stream=1) < 0.5, turns, -turns).double()
    turn = turns[:, (cell_row * cells + cell_column).long()] * torch.where(inside, (1 - distance) ** 2, 0.0)
    source_rows = rows - down + pinch * (down * turn.cos() + right * turn.sin())
    source_columns = columns - right + pinch * (right * turn.cos() - down * turn.sin())
    return to_uint8(sample(images, source_rows, source_columns))


def ripple(images: Tensor, keys: Tensor, amplitude: float) -> Tensor:
    """Moves rows and columns along sine waves of random length and phase."""
    (rows, columns), side = positions(images), _side(images)
    length = uniform(keys, (2, 1, 1), low=0.1, high=0.3).double() * side
    phase = uniform(keys, (2, 1, 1), high=2 * math.pi, stream=1).double()
    down = (2 * math.pi * columns / length[:, 0] + phase[:, 0]).sin() * (amplitude * side)
    right = (2 * math.pi * rows / length[:, 1] + phase[:, 1]).sin() * (amplitude * side)
    return to_uint8(sample(images, rows + down, columns + right))


def brownish_noise(images: Tensor, keys: Tensor, sd: float) -> Tensor:
    """Adds noise of standard deviation `sd` (range 0 to 1) whose amplitude falls as frequency^-1.5."""
    height, width = images.shape[-2:]
    noise = normal(keys, tuple(images.shape[1:])).double()
    spectrum = torch.fft.rfft2(noise).mul_(_brown_gain(height, width).to(images.device))
    brown = torch.fft.irfft2(spectrum, s=(height, width))
    return to_uint8(brown.mul_(255 * sd).float().add_(images.float()))


@lru_cache(maxsize=16)
def _brown_gain(height: int, width: int) -> Tensor:
    """Gain at each frequency of a half spectrum; white noise keeps its variance and loses its mean."""
    side = min(height, width)
    rows = torch.fft.fftfreq(height, dtype=torch.float64)[:, None] * side
    gain = (rows**2 + (torch.fft.fftfreq(width, dtype=torch.float64) * side) ** 2).sqrt()
    gain = torch.where(gain > 0, gain.clamp(min=1e-9) ** -1.5, 0.0)
    return (gain / (gain**2).mean().sqrt())[:, : width // 2 + 1]


def circular_motion_blur(images: Tensor, keys: Tensor, degrees: float, steps: int = 15) -> Tensor:
    """Weighted mean of the image turned about its centre by up to `degrees` either way."""
    rows, columns = positions(images)
    middle_row, middle_column = (images.shape[2] - 1) / 2, (images.shape[3] - 1) / 2
    down, right = rows - middle_row, columns - middle_column
    fractions = [2 * i / (steps - 1) - 1 for i in range(steps)]
    weights = [math.exp(-2 * fraction**2) for fraction in fractions]
    values, total = images.float(), torch.zeros(images.shape, device=images.device)
    for fraction, weight in zip(fractions, weights, strict=True):
        sine, cosine = math.sin(math.radians(fraction * degrees)), math.cos(math.radians(fraction * degrees))
        source_rows = middle_row + down * cosine + right * sine
        source_columns = middle_column + right * cosine - down * sine
        total.add_(sample(values, source_rows, source_columns), alpha=weight / sum(weights))
    return to_uint8(total)


def transverse_chromatic_abberation(images: Tensor, keys: Tensor, spread: float) -> Tensor:
    """Enlarges the channels by 1, 1 + `spread` / 2 and 1 + `spread`, in random order.

    A single channel counts as three equal ones, whose luma is returned.
    """
    rows, columns = positions(images)
    middle_row, middle_column = (images.shape[2] - 1) / 2, (images.shape[3] - 1) / 2
    order = torch.tensor(list(permutations(range(3))), device=images.device)[integers(keys, 6)]
    factor = (1 + order * (spread / 2)).view(-1, 1, 1)
    channels = images.expand(-1, 3, -1, -1).reshape(-1, 1, *images.shape[2:])
    down, right = (rows - middle_row) / factor, (columns - middle_column) / factor
    coloured = sample(channels, middle_row + down, middle_column + right).view(-1, 3, *images.shape[2:])
    return to_uint8(luma(coloured) if images.shape[1] == 1 else coloured)


def _side(images: Tensor) -> int:
    return min(images.shape[-2:])
