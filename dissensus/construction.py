"""How networks and ensembles were made, as JSON: the arguments of their constructors, and code by its name.

A description never holds code. Layers of torch.nn and nn.Sequential of them, reference networks and kinds of ensembles are made again as
they are; all else only where it is allowed by name; what has no name (a lambda around a class of your own) must be given again.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

P = ParamSpec("P")
Made = TypeVar("Made")
Net = TypeVar("Net", bound=nn.Module)
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
    nn.Module: lambda value: construction_of(value) or {"unknown": f"a {type(value).__name__}"},
}


def construction_of(net: nn.Module) -> Any:
    """Return how a network was made: as it says itself, or as its layers say; None where neither does."""
    known = getattr(net, "construction", None)
    return known if known is not None or not _is_plain(net) else _by_layers(net)


def told_how(net: Net) -> Net:
    """Return a network that says itself how it was made, where that can be told."""
    if (way := construction_of(net)) is not None:
        net.construction = way
    return net


def _is_plain(net: nn.Module) -> bool:
    """Whether making a network's layers again is all there is to it: none shared, tied, changed or frozen."""
    modules, parameters = list(net.modules()), list(net.parameters())
    shared = len(modules) < len(list(net.named_modules(remove_duplicate=False)))
    tied = len(parameters) < len(list(net.named_parameters(remove_duplicate=False)))
    changed = any(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in modules)
    return not (shared or tied or changed) and all(parameter.requires_grad for parameter in parameters)


def _by_layers(net: nn.Module) -> dict[str, Any] | None:
    """Return how a layer of torch.nn is made again, or nn.Sequential of such; None of all else."""
    if type(net) is nn.Sequential:
        parts = {name: _by_layers(part) for name, part in net.named_children()}
        return None if None in parts.values() else {"sequential": parts}
    kept = _arguments_of(net) if type(net).__module__.startswith("torch.nn.modules.") else None
    return None if kept is None else {"call": _name_of(type(net)), "arguments": describe(kept)}


def _arguments_of(layer: nn.Module) -> dict[str, Any] | None:
    """Return the arguments of a layer's constructor, which most keep as attributes of their names; None of a layer that does not."""
    names = [
        name for name in inspect.signature(type(layer)).parameters if name[0] != "_" and name not in ("device", "dtype")
    ]
    if not all(hasattr(layer, name) for name in names):
        return None
    kept = {name: getattr(layer, name) for name in names}
    if "bias" in kept:
        kept["bias"] = kept["bias"] is not None
    return kept if all(isinstance(value, (*_ATOMS, tuple)) for value in kept.values()) else None


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
    form = next((form for form in _FORMS if form in description), None)
    if form is not None:
        return _FORMS[form](description, allow)
    return {key: make_again(each, allow) for key, each in description.items()}


def _unknown(description: Mapping[str, Any], allow: Collection[str]) -> Any:
    raise UnknownNetwork(str(description["unknown"]))


# Descriptions by the key that tells them, and how what they describe is made.
_FORMS: Mapping[str, Callable[[Mapping[str, Any], Collection[str]], Any]] = {
    "unknown": _unknown,
    "zeros": lambda d, _: torch.zeros(d["zeros"], dtype=getattr(torch, str(d["dtype"]))),
    "array": lambda d, _: np.zeros(d["array"], dtype=d["dtype"]),
    "name": lambda d, allow: _imported(d["name"], allow),
    "partial": lambda d, allow: partial(make_again(d["partial"], allow), **make_again(d["arguments"], allow)),
    "function": lambda d, allow: partial(make_again, d["function"], allow),
    "sequential": lambda d, allow: nn.Sequential(
        OrderedDict((name, make_again(one, allow)) for name, one in d["sequential"].items())
    ),
    "call": lambda d, allow: _imported(d["call"], allow)(**make_again(d["arguments"], allow)),
}


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
