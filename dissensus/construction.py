"""How networks and ensembles were made, as JSON: the arguments of their constructors, and code by its name.

A description never holds code. Names of torch.nn and of this package are made again as they are; those of other packages only where
they are allowed by name; what has no name (a lambda, a network that was handed over) must be given again.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
Made = TypeVar("Made")
_ATOMS = (bool, int, float, str, type(None))
# Packages whose names stand for nothing but layers, networks and ensembles.
_KNOWN = ("torch.nn.", "dissensus.")


class UnknownNetwork(ValueError):
    """A description of something that has no name."""


def remembers_how(make: Callable[P, Made]) -> Callable[P, Made]:
    """Let a function that makes a network note in it how: its name and arguments."""

    @wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> Made:
        net = make(*args, **options)
        given = inspect.signature(make).bind(*args, **options).arguments
        net.construction = {"call": _name_of(make), "arguments": describe(given)}  # type: ignore[attr-defined]
        return net

    return made


def describe(value: Any) -> Any:
    """Return a description of an argument that JSON can keep."""
    for kinds, described in _DESCRIPTIONS.items():
        if isinstance(value, kinds):
            return described(value)
    if callable(value) and (name := _name_of(value)) is not None:
        return {"name": name}
    return {"unknown": getattr(value, "__qualname__", repr(value)[:60]), "factory": callable(value)}


def _described_partial(value: partial[Any]) -> dict[str, Any]:
    positional = list(inspect.signature(value.func).bind_partial(*value.args).arguments.items())
    return {"partial": describe(value.func), "arguments": describe(dict(positional) | value.keywords)}


_DESCRIPTIONS: Mapping[Any, Callable[[Any], Any]] = {
    _ATOMS: lambda value: value,
    (tuple, list): lambda value: [describe(each) for each in value],
    Mapping: lambda value: {str(key): describe(each) for key, each in value.items()},
    Tensor: lambda value: {"zeros": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")},
    partial: _described_partial,
    nn.Module: lambda value: getattr(value, "construction", None) or {"unknown": f"a {type(value).__name__}"},
}


def _name_of(value: Any) -> str | None:
    """Return `module:name` of what can be imported by it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
    if module is None or module == "__main__" or "<" in name or inspect.ismethod(value):
        return None
    return f"{module}:{name}"


def make_again(description: Any, allow: Collection[str]) -> Any:
    """Return what a description says; names outside torch.nn and this package must be in `allow`."""
    if isinstance(description, list):
        return [make_again(each, allow) for each in description]
    if not isinstance(description, dict):
        return description
    if "unknown" in description:
        raise UnknownNetwork(str(description["unknown"]))
    if "zeros" in description:
        return torch.zeros(description["zeros"], dtype=getattr(torch, str(description["dtype"])))
    if "name" in description:
        return _imported(description["name"], allow)
    if "partial" in description:
        return partial(make_again(description["partial"], allow), **make_again(description["arguments"], allow))
    if "call" in description:
        return _imported(description["call"], allow)(**make_again(description["arguments"], allow))
    return {key: make_again(each, allow) for key, each in description.items()}


def _imported(name: Any, allow: Collection[str]) -> Any:
    module, _, attributes = str(name).partition(":")
    if not f"{module}.".startswith(_KNOWN) and name not in allow:
        raise ValueError(
            f"This ensemble was made with {name}, code of another package, which is not run unless you allow it: pass "
            f"allow=[{str(name)!r}], or make_member=."
        )
    found: Any = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found
