"""Counter-based randomness: every draw is a pure function of its key, the same in a loop, under vmap, compiled or captured.

A key is a 64-bit integer. `fold` derives a new key from a key and a number, so that the noise of one member in one
step is keyed by a hash of (seed, member, step, call) and needs no generator whose state would have to be saved.
"""

import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from operator import index
from threading import RLock
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Item = TypeVar("Item")
_MASK64 = (1 << 64) - 1


def signed(value: int) -> int:
    """Return an integer as a signed one of 64 bits, as sums and products of tensors wrap."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


# Constants of the splitmix64 generator; torch has only signed 64-bit integers, whose products wrap as wanted.
_GOLDEN = signed(0x9E3779B97F4A7C15)
_MIX_1 = signed(0xBF58476D1CE4E5B9)
_MIX_2 = signed(0x94D049BB133111EB)


def mix(z: Tensor) -> Tensor:
    """Return a bijective 64-bit hash of each element (the splitmix64 finaliser)."""
    # `>>` keeps the sign on int64, so the copied sign bits are masked away.
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def mix_in_place(z: Tensor) -> Tensor:
    """Do as `mix` does, in the memory of its argument: for values too many to have copies of."""
    shifted = torch.empty_like(z)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        torch.bitwise_right_shift(z, shift, out=shifted)
        z ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            z *= factor
    return z


def fold(key: Tensor, value: Tensor | int) -> Tensor:
    """Derive a new key (or keys) from a key and a number; broadcasts."""
    if not isinstance(value, int):
        return mix(key + (value + 1) * _GOLDEN)
    if torch.compiler.is_compiling():  # where a number may be a symbol, which has no remainder; `^ 0` as in `multiples`
        return mix(key + (key.new_full((), value + 1) ^ 0) * _GOLDEN)
    return mix(key + signed((value + 1) * _GOLDEN))


def derive(*parts: int | str) -> int:
    """Return one signed 64-bit key from any numbers and words, on the host.

    Example:
        >>> derive(0, "order", 3) == derive(0, "order", 3), derive(0, 1) == derive(1, 0)
        (True, False)
    """
    key = 0
    for part in parts:
        value = int.from_bytes(part.encode(), "little") if isinstance(part, str) else index(part)
        while True:
            key = _mix_host(key + (value & _MASK64) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019)
            value >>= 64
            if value in (0, -1):
                break
    return signed(key)


def _mix_host(z: int) -> int:
    z &= _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def bits(keys: Tensor, *shape: int) -> Tensor:
    """Return hashed integers shaped `keys.shape + shape`: counter i under key k gives splitmix64's i-th output."""
    counters = multiples(math.prod(shape), keys.device)
    return mix(keys.reshape((*keys.shape, *(1 for _ in shape))) + counters.reshape(shape))


def multiples(count: int, device: torch.device) -> Tensor:
    """Return the first multiples of splitmix64's step, wrapped to 64 bits."""
    # `^ 0` changes nothing but keeps the compiler from folding the product into its 32-bit index arithmetic.
    numbers = torch.arange(1, count + 1, device=device) ^ 0
    if device.type != "cpu":
        return numbers * _GOLDEN
    # Compiled for a CPU this is C++, where a signed product must not wrap: from its factor, the loop's counter, the compiler
    # concluded that the loop ends early. Unsigned ones may wrap.
    return (numbers.view(torch.uint64) * (_GOLDEN & _MASK64)).view(torch.int64)


def uniform(keys: Tensor, *shape: int) -> Tensor:
    """Return float32 draws from [0, 1), shaped `keys.shape + shape`."""
    return ((bits(keys, *shape) >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def normal(keys: Tensor, *shape: int) -> Tensor:
    """Return standard normal float32 draws, shaped `keys.shape + shape` (Box-Muller)."""
    hashed = bits(keys, *shape)
    # Both uniforms come from one hash: 24 high bits for the radius (never 0), 24 low ones for the angle.
    radius = (((hashed >> 40) & 0xFFFFFF) + 1).to(torch.float32) * 2.0**-24
    angle = (hashed & 0xFFFFFF).to(torch.float32) * (2.0**-24 * 2 * math.pi)
    return torch.sqrt(-2 * torch.log(radius)) * torch.cos(angle)


def permutation(keys: Tensor, count: int) -> Tensor:
    """Return a random order of `range(count)` for each key, shaped `keys.shape + (count,)`."""
    return bits(keys, count).argsort(dim=-1)


@dataclass(frozen=True)
class Noise:
    """Keyed noise: draws are shaped `keys.shape + shape`; successive purposes take `at(number)`.

    Example:
        >>> noise = Noise(torch.tensor([1, 2]))  # two members
        >>> noise.uniform(3).shape, bool((noise.at(0).uniform(3) == noise.at(1).uniform(3)).any())
        (torch.Size([2, 3]), False)
    """

    keys: Tensor

    def at(self, value: Tensor | int) -> "Noise":
        """Return an independent noise for this number."""
        return Noise(fold(self.keys, value))

    def uniform(self, *shape: int) -> Tensor:
        """Return float32 draws from [0, 1)."""
        return uniform(self.keys, *shape)

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal float32 draws."""
        return normal(self.keys, *shape)


# Threads share the global generators. Whoever draws from them holds the lock; how many blocks are under way, and what the first of
# them found, is what the last one puts back.
_alone = RLock()
_under_way = 0
_found: Callable[[], None] | None = None


def _new_lock() -> None:
    global _alone
    _alone = RLock()


if hasattr(os, "register_at_fork"):
    # Another thread may have held it when a worker process was forked.
    os.register_at_fork(after_in_child=_new_lock)


@contextmanager
def seeded(seed: int, *, alone: bool = False) -> Iterator[None]:
    """Run a block under generators seeded by `seed`; leave every global generator as it was found.

    Other threads' blocks do not begin or end within one that is `alone`, which is for short ones whose draws matter.
    """
    global _under_way, _found
    with _alone if alone else nullcontext():
        with _alone:
            put_back = _seed_all(seed)
            if _under_way == 0:
                _found = put_back
            _under_way += 1
        try:
            yield
        finally:
            with _alone:
                _under_way -= 1
                (_found if _under_way == 0 and _found is not None else put_back)()


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Have a network evaluate inside, so that it draws nothing; give every module back its mode."""
    modes, was_training = [(module, module.training) for module in net.modules()], net.training
    net.eval()
    try:
        yield
    finally:
        net.train(was_training)
        for module, mode in modes:
            module.training = mode


def each_seeded(items: Iterable[Item], seed: int) -> Iterator[Item]:
    """Yield items, such as a loader's batches, each made under a seed of its own while no other thread draws."""
    with seeded(derive(seed, "begin"), alone=True):
        iterator = iter(items)
    for position in count():
        with seeded(derive(seed, position), alone=True):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def _seed_all(seed: int) -> Callable[[], None]:
    """Seed every global generator; return what undoes it."""
    # Not torch.manual_seed: it also queues a seed for CUDA devices that are not initialised yet.
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    cpu_state = torch.default_generator.get_state()
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    device_states = [generator.get_state() for generator in devices]
    for generator in (torch.default_generator, *devices):
        generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    random.seed(seed)

    def put_back() -> None:
        torch.default_generator.set_state(cpu_state)
        for generator, state in zip(devices, device_states, strict=True):
            generator.set_state(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)

    return put_back
