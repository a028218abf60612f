"""Watching a function run: what it draws, how much it computes, and what its modules keep in Python."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class _Seen(TorchDispatchMode):
    """Records the operations that draw from a generator, and counts numbers that are multiplied and added."""

    drawn: frozenset[str] = frozenset()
    work: float = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            self.drawn |= {str(func.overloadpacket)}
        result = func(*args, **kwargs)
        self.work += work_of(func, args, kwargs, result)
        return result


def look_at(run: Callable[[], object]) -> tuple[frozenset[str], float]:
    """Return the names of operations that drew random numbers while `run` ran, and how many numbers it multiplied and added."""
    with _Seen() as seen:  # type: ignore[no-untyped-call]
        run()
    return seen.drawn, seen.work


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return how many numbers a call of an operation multiplies and adds, counted for products and convolutions."""
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call of an operation takes numbers from a generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    # Attention kernels carry the tag whatever their dropout is.
    rates = [given[name] for name in ("dropout_p", "p", "dropout") if isinstance(given.get(name), int | float)]
    if not rates and "scaled_dot_product" in str(func):
        return False
    return given.get("train") is not False and (not rates or any(rates))


# What every module keeps for itself, and what our own keep beside it.
_OF_MODULES = frozenset(nn.Module().__dict__) | {"_keyed_layers"}
_BOXES = (list, deque, dict, set)


class Attributes:
    """What modules keep in Python, as it was: put back after a `with` block, and to see what a function changed."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [(module, dict(module.__dict__)) for module in dict.fromkeys(modules)]
        self._boxes = [
            (value, value.copy())
            for _, kept in self._kept
            for key, value in kept.items()
            if key not in _OF_MODULES - {"_buffers", "_parameters"} and isinstance(value, _BOXES)
        ]
        self._plain = self._now()

    def changed(self) -> bool:
        """Whether a number, a word, or what is in a list or dictionary is another than before."""
        return self._now() != self._plain

    def replaced(self) -> list[Tensor]:
        """Return tensors that were attributes and are others now."""
        return [
            value
            for module, kept in self._kept
            for key, value in kept.items()
            if isinstance(value, Tensor) and module.__dict__.get(key) is not value
            if not torch._C._functorch.is_functorch_wrapped_tensor(value)
        ]

    def __enter__(self) -> "Attributes":
        return self

    def __exit__(self, *_: object) -> None:
        """Give every module back what it had."""
        for module, kept in self._kept:
            for key in [key for key in module.__dict__ if key not in kept]:
                del module.__dict__[key]
            module.__dict__.update(kept)
        for box, content in self._boxes:
            box.clear()
            box.extend(content) if isinstance(box, list | deque) else box.update(content)

    def _now(self) -> list[tuple[str, object]]:
        return [
            (key, _plain(value))
            for module, _ in self._kept
            for key, value in module.__dict__.items()
            if key not in _OF_MODULES
            if key != "calls" or not type(module).__module__.startswith("dissensus.")
        ]


def _plain(value: object) -> object:
    """Return a picture of a value that no longer changes with it; None of what cannot be told."""
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, dict):
        return tuple((str(key), _plain(inner)) for key, inner in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(map(_plain, value))
    return tuple(map(_plain, value)) if isinstance(value, list | tuple | deque) else None
