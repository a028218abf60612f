"""How networks and ensembles were made, as JSON: the arguments of their constructors, and code by its name.

A description never holds code. Layers of torch.nn, reference networks and kinds of ensembles are made again as they are; all else only
where it is allowed by name; what has no name (a lambda, a network that was handed over) must be given again.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

P = ParamSpec("P")
Made = TypeVar("Made")
_ATOMS = (bool, int, float, str, type(None))
# Modules whose functions make networks or compute, and packages whose classes are layers and ensembles.
_KNOWN_FUNCTIONS = ("dissensus.architectures", "torch.nn.functional")
_KNOWN_LAYERS = ("torch.nn.modules.", "dissensus.members.")


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
    (tuple, list, nn.ModuleList): lambda value: [describe(each) for each in value],
    Mapping: lambda value: {str(key): describe(each) for key, each in value.items()},
    Tensor: lambda value: {"zeros": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")},
    np.ndarray: lambda value: {"array": list(value.shape), "dtype": str(value.dtype)},
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
    """Return what a description says; names that are no layer's, ensemble's or reference network's must be in `allow`."""
    if isinstance(description, list):
        return [make_again(each, allow) for each in description]
    if not isinstance(description, dict):
        return description
    if "unknown" in description:
        raise UnknownNetwork(str(description["unknown"]))
    if "zeros" in description:
        return torch.zeros(description["zeros"], dtype=getattr(torch, str(description["dtype"])))
    if "array" in description:
        return np.zeros(description["array"], dtype=description["dtype"])
    if "name" in description:
        return _imported(description["name"], allow)
    if "partial" in description:
        return partial(make_again(description["partial"], allow), **make_again(description["arguments"], allow))
    if "call" in description:
        return _imported(description["call"], allow)(**make_again(description["arguments"], allow))
    return {key: make_again(each, allow) for key, each in description.items()}


def _imported(name: Any, allow: Collection[str]) -> Any:
    """Return what is called so in its own module: what was imported into a module from elsewhere is not known by that one's name."""
    name = str(name)
    module, _, attributes = name.partition(":")
    may_be_known = module in _KNOWN_FUNCTIONS or module.startswith(_KNOWN_LAYERS)
    if name not in allow and not may_be_known:
        raise _not_allowed(name)
    try:
        found: Any = import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as problem:
        raise ValueError(
            f"This ensemble was made with {name}, which is not there: {problem}. Make it importable, or give the function that makes "
            "the network as make_member=."
        ) from problem
    own = f"{getattr(found, '__module__', None)}:{getattr(found, '__qualname__', None)}"
    if own != name or not (name in allow or _is_known(module, found)):
        raise _not_allowed(name)
    return found


def _is_known(module: str, found: Any) -> bool:
    """Whether something of a module that may be known is a layer, an ensemble or a public function that makes a network or computes."""
    if module.startswith(_KNOWN_LAYERS):
        return isinstance(found, type) and issubclass(found, nn.Module)
    return inspect.isfunction(found) and not found.__name__.startswith("_")


def _not_allowed(name: str) -> ValueError:
    return ValueError(
        f"This ensemble was made with {name}, which is no layer of torch.nn and nothing of dissensus that makes networks, and is not run "
        f"unless you allow it: pass allow=[{name!r}] if you trust the folder, or make_member=."
    )
