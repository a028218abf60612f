"""Data and settings recognised again: hashes of rows that batch sizes and devices do not change, and Python values as texts."""

import functools
import hashlib
import random
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from math import prod
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    width = prod(x.shape[1:])
    # A view by strides: an axis of length one keeps whatever stride it had, and bytes are seen only of values side by side.
    raw = x.detach().contiguous().as_strided((len(x), width), (width, 1)).view(torch.uint8)
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


_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, torch.dtype)
_NAMED = (type, FunctionType, BuiltinFunctionType)
# What every module keeps for itself, and what compiling leaves in it.
_OF_MODULES = frozenset(nn.Module().__dict__) | {"_compiled_call_impl", "_torchdynamo_wrapper_id", "_is_torch_compile"}
# Values of a network's tensor that are hashed as one row.
_PART = 1 << 20


class _NoText(Exception):
    """A value shows nothing that would be the same in another process."""


def described(value: Any) -> str | None:
    """Return a text that is the same for equal values in every process; None where nothing stable can be told.

    Objects go by their class and attributes, functions by their name, code, defaults and what they close over, arrays by a hash.

    Example:
        >>> described((1, "a", abs)), described(iter([]))
        ("(1, 'a', builtins.abs)", None)
    """
    try:
        return _text(value, depth=8)
    except _NoText:
        return None


def _text(value: Any, depth: int) -> str:
    if depth == 0:  # it may hold itself
        raise _NoText
    if isinstance(value, _ATOMS):
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, Tensor | np.ndarray):
        values = torch.as_tensor(value)
        return f"{values.dtype} {tuple(values.shape)} {digest_of([_hashes(values)])}"
    if isinstance(value, nn.Module):
        return f"{_name(type(value))} {network_digest(value)}"
    if isinstance(value, _NAMED) and not isinstance(value, FunctionType):
        return _name(value)
    return _text_of_parts(value, functools.partial(_text, depth=depth - 1))


def _text_of_parts(value: Any, tell: Callable[[Any], str]) -> str:
    """Return the text of what consists of other values, which `tell` makes texts of."""
    if isinstance(value, FunctionType):
        return _function(value, tell)
    if isinstance(value, functools.partial):
        return f"functools.partial({tell(value.func)}, {tell(value.args)}, {tell(value.keywords)})"
    if isinstance(value, MethodType):
        return f"{tell(value.__self__)}.{tell(value.__func__)}"
    if isinstance(value, Mapping):
        pairs = sorted(f"{tell(key)}: {tell(held)}" for key, held in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(tell, value)))}}}"
    if isinstance(value, tuple | list):
        inner = ", ".join(map(tell, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if is_dataclass(value):
        return f"{_name(type(value))}{tell({field.name: getattr(value, field.name) for field in fields(value)})}"
    if not hasattr(value, "__dict__") or isinstance(value, random.Random):
        raise _NoText  # it holds what Python does not show
    return f"{_name(type(value))}{tell(vars(value))}"


def _function(value: FunctionType, tell: Callable[[Any], str]) -> str:
    try:
        closure = tuple(cell.cell_contents for cell in value.__closure__ or ())
    except ValueError:  # a name that has no value yet
        raise _NoText from None
    code = hashlib.sha256(_code(value.__code__).encode()).hexdigest()[:16]
    return f"{_name(value)} {code} {tell((value.__defaults__, value.__kwdefaults__, closure))}"


def _code(value: Any) -> str:
    """Return what a function's code does, without where it is written; constants in it as they are."""
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} [{', '.join(map(_code, value.co_consts))}]"
    # The order of a set of words differs between processes.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}"


def _hashes(values: Tensor) -> Tensor:
    """Return hashes of a tensor's parts, on its device."""
    parts = values.detach().reshape(-1).split(_PART)
    return torch.cat([row_hashes(part[None]) for part in parts])


def network_digest(net: nn.Module, changing: Collection[str] = ()) -> str:
    """Return a hash of a network: its modules as they print, their plain attributes but `changing` ones, and all its tensors."""
    # An address in what a module prints would make the same network another one in every process.
    digest = hashlib.sha256(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(net)).encode())
    kept = {name: text for name, text in attributes_of(net).items() if name not in changing}
    digest.update(repr(sorted(kept.items())).encode())
    hashes = []
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashes.append(_hashes(tensor))
    digest.update(digest_of(hashes).encode())
    return digest.hexdigest()[:16]


def attributes_of(net: nn.Module) -> dict[str, str]:
    """Return what modules keep as plain attributes (numbers, words, types, functions by name, tuples of these), by module and name."""
    found = {}
    for name, module in net.named_modules():
        for key, value in vars(module).items():
            # Where nothing is kept yet, such as a last activation, there may be something after a pass.
            if key not in _OF_MODULES and value is not None:
                with suppress(_NoText):
                    found[f"{name}.{key}".lstrip(".")] = _plain(value)
    return found


def _plain(value: Any) -> str:
    if isinstance(value, _NAMED):
        # Not by its code: that of torch's own functions differs between versions.
        return _name(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, (*_ATOMS, np.generic, Enum)):
        return _text(value, depth=1)
    raise _NoText
