"""Tensors recognised again: hashes of rows, sets and networks that batch sizes and devices do not change."""

import hashlib
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.randomness import mix

# Words of eight bytes hashed at once, so that a batch of large images needs no second copy of itself in memory.
_HASHED_AT_ONCE = 1 << 20


class Fingerprint:
    """A hash of inputs and targets in order, fed batch by batch; batch sizes and devices change nothing."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, x: Tensor, y: Tensor | None) -> None:
        """Take in a batch."""
        self._inputs.append(row_hashes(x))
        if y is not None:
            self._targets.append(row_hashes(y))

    def inputs(self) -> str:
        """Return the hash of the inputs alone."""
        return _digest(self._inputs)

    def whole(self) -> str:
        """Return the hash of inputs and targets."""
        return _digest(self._inputs + self._targets)


def row_hashes(x: Tensor) -> Tensor:
    """Return a 64-bit hash of each row, `(batch,)`: wrapping integer sums, exact in any order and on any device."""
    raw = x.detach().contiguous().reshape(len(x), -1).view(torch.uint8)
    padding = -raw.shape[1] % 8
    words = (F.pad(raw, (0, padding)) if padding else raw).view(torch.int64)
    factors = mix(torch.arange(1, words.shape[1] + 1, device=x.device))
    width = max(1, _HASHED_AT_ONCE // max(1, len(x)))
    total = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    for part, factor in zip(words.split(width, dim=1), factors.split(width), strict=True):
        total += (part * factor).sum(1)
    return mix(total)


def _digest(hashes: list[Tensor]) -> str:
    return hashlib.sha256(
        torch.cat([part.cpu() for part in hashes]).numpy().astype("<i8").tobytes()
    ).hexdigest()[:16]


def sum_of_rows(x: Tensor, start: int) -> int:
    """Return a hash of rows `start` onwards of an array; those of consecutive parts add up (wrapping) to that of the whole."""
    places = mix(torch.arange(start, start + len(x), device=x.device))
    return int(mix(row_hashes(x) ^ places).sum())


def network_digest(net: nn.Module) -> str:
    """Return a hash of a network: its modules as they print, and names, types, shapes and values of all its tensors."""
    # An address in what a module prints would make the same network another one in every process.
    digest = hashlib.sha256(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(net)).encode())
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        parts = tensor.detach().reshape(-1).split(_HASHED_AT_ONCE)
        hashes = [row_hashes(part[None]).cpu() for part in parts if part.numel()]
        digest.update(b"".join(part.numpy().astype("<i8").tobytes() for part in hashes))
    return digest.hexdigest()[:16]
