"""Counter-based noise: one 64-bit key an image in, uniforms and normals out, whatever the batch.

Word `i` of an image is output `i` of the SplitMix64 generator started at the image's key, so a number depends
on its key and its position only. There is no generator state, nothing is drawn from torch's own generators,
and a batch is one vectorised expression.
"""

import hashlib
import math

import torch
from torch import Tensor

# The increment and the two multipliers of SplitMix64, as signed 64-bit integers (torch has no unsigned
# arithmetic).
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def _xorshift_(words: Tensor, bits: int, shifted: Tensor) -> Tensor:
    # `>>` carries the sign along; the mask turns it into the unsigned shift that the finaliser needs.
    torch.bitwise_right_shift(words, bits, out=shifted)
    return words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1))


def _scramble_(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place: a bijection in which every output bit depends on every input bit."""
    shifted = torch.empty_like(words)
    _xorshift_(words, 30, shifted).mul_(_FIRST)
    _xorshift_(words, 27, shifted).mul_(_SECOND)
    return _xorshift_(words, 31, shifted)


def image_keys(seed: int, name: str, severity: int, index: Tensor) -> Tensor:
    """One key an image, `(batch,)`, decided by `(seed, name, severity, index)` alone."""
    digest = hashlib.blake2b(f"{seed}/{name}/{severity}".encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little", signed=True)
    return _scramble_(index.to(torch.int64) * _GOLDEN + start)


def _words(keys: Tensor, count: int, stream: int) -> Tensor:
    """`count` independent 64-bit words an image, `(batch, count)`; streams of one key do not overlap."""
    positions = torch.arange(1, count + 1, device=keys.device) + (stream << 40)
    return _scramble_(keys[:, None] + positions * _GOLDEN)


def bits(keys: Tensor, shape: tuple[int, ...], stream: int = 0) -> Tensor:
    """32 random bits an element, as int32 `(batch, *shape)` in memory of its own."""
    count = math.prod(shape)
    halves = _words(keys, (count + 1) // 2, stream).view(torch.int32)
    return halves[:, :count].reshape(-1, *shape)


def uniform(
    keys: Tensor, shape: tuple[int, ...] = (), low: float = 0.0, high: float = 1.0, stream: int = 0
) -> Tensor:
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
