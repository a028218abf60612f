"""Tensors recognised again: hashes of rows and sets that batch sizes and devices do not change."""

import hashlib
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.data.trees import Batch, Tree
from dissensus.randomness import mix, mix_in_place, multiples

# Words of eight bytes hashed at once: few enough to stay in a processor's cache. A GPU is given more, as each call costs it time.
_HASHED_AT_ONCE = 1 << 15
_MORE_ON_DEVICES = 32


class Fingerprint:
    """A hash of inputs and targets in order, fed batch by batch; batch sizes and devices change nothing."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, x: Batch, y: Tensor | None) -> None:
        """Take in a batch."""
        self._inputs.append(row_hashes(x))
        if y is not None:
            self._targets.append(row_hashes(y))

    def inputs(self) -> str:
        """Return the hash of the inputs alone."""
        return digest_of(self._inputs)

    def whole(self) -> str:
        """Return the hash of inputs and targets."""
        return digest_of(self._inputs + self._targets)


def row_hashes(x: Batch) -> Tensor:
    """Return a 64-bit hash of each row, `(batch,)`: wrapping integer sums, exact in any order and on any device.

    Every word is mixed with its place before it is added. Added as products, words could lose their highest bit, which is the
    sign of a number, or their changes could cancel.
    """
    if isinstance(x, Tree):
        parts = torch.stack([row_hashes(leaf) for leaf in x.leaves], -1)
        return mix(mix(parts + multiples(len(x.leaves), x.device)).sum(-1))
    words = _words(x)
    width, at_once = words.shape[1], _HASHED_AT_ONCE
    if words.device.type != "cpu":
        at_once *= _MORE_ON_DEVICES
    places = multiples(width, words.device).split(at_once)
    totals = words.new_zeros(len(words))
    rows = max(1, at_once // width)
    for total, block in zip(totals.split(rows), words.split(rows), strict=True):
        for part, place in zip(block.split(at_once, dim=1), places, strict=True):
            total += mix_in_place(part + place).sum(1)
    return mix(totals)


def _words(x: Tensor) -> Tensor:
    """Return the bytes of each row as words of eight, `(batch, words)`, the last one filled up with zeros."""
    raw = x.detach().contiguous().reshape(len(x), prod(x.shape[1:])).view(torch.uint8)
    missing = max(8, -(-raw.shape[1] // 8) * 8) - raw.shape[1]
    if missing:
        raw = F.pad(raw, (0, missing))
    elif raw.storage_offset() % 8:  # a part of a larger tensor, whose bytes do not lie as words
        raw = raw.clone()
    return raw.view(torch.int64)


def digest_of(hashes: list[Tensor]) -> str:
    """Return a short text for hashes in order."""
    joined = torch.cat([part.to(hashes[0].device) for part in hashes]) if hashes else torch.empty(0)
    return hashlib.sha256(joined.cpu().numpy().astype("<i8").tobytes()).hexdigest()[:16]


def sum_of_rows(x: Tensor, start: int) -> int:
    """Return a hash of rows `start` onwards of an array; those of consecutive parts add up (wrapping) to that of the whole."""
    places = mix(torch.arange(start, start + len(x), device=x.device))
    return int(mix(row_hashes(x) ^ places).sum())
