"""Settings from a file: what a function can be given, names and types checked, and the way back to TOML."""

import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse a name that is not known, and say which one may have been meant.

    Example:
        >>> check_names(["epoch"], ["epochs", "lr"], "[training]")
        Traceback (most recent call last):
        ValueError: unknown key 'epoch' in [training]; did you mean 'epochs'?
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}."
        raise ValueError(f"unknown key {name!r} in {where}; {hint}")


def choose(table: Mapping[str, Any], name: Any, where: str) -> Any:
    """Return a table's entry, or say which there are."""
    if name not in table:
        close = get_close_matches(str(name), list(table), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(table))}."
        raise ValueError(f"unknown name {name!r} in {where}; {hint}")
    return table[name]


def parameters(make: Callable[..., Any], without: Sequence[str] = ()) -> dict[str, inspect.Parameter]:
    """Return what a function or class takes by name and a file can give, each annotated with its type."""
    # A class's own signature is meant, whatever subclasses do.
    hints = get_type_hints(make.__init__ if isinstance(make, type) else make)  # type: ignore[misc]
    return {
        name: parameter.replace(annotation=hints.get(name, Any))
        for name, parameter in inspect.signature(make).parameters.items()
        if name not in without
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and _describe(hints.get(name, Any))
    }


def check_values(given: Mapping[str, Any], known: Mapping[str, inspect.Parameter], where: str) -> None:
    """Refuse values of a wrong type, and say what is wanted."""
    for name, value in given.items():
        hint = known[name].annotation
        if not _fits(value, hint):
            raise ValueError(f"{name} in {where} must be {_describe(hint)}; got {value!r}.")


def checked(
    make: Callable[..., Any], given: Mapping[str, Any], where: str, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Return arguments for a function, with its defaults filled in; names, types and what must be there are checked."""
    known = parameters(make, without)
    check_names(given, known, where)
    check_values(given, known, where)
    lacking = [n for n, p in known.items() if p.default is p.empty and n not in given]
    if lacking:
        raise ValueError(f"{where} needs {' and '.join(lacking)}.")
    defaults = {
        n: p.default for n, p in known.items() if p.default is not None and _fits(p.default, p.annotation)
    }
    chosen = {**defaults, **given}
    return {name: _as_hinted(chosen[name], known[name].annotation) for name in known if name in chosen}


def _as_hinted(value: Any, hint: Any) -> Any:
    """Return a whole number as a float, and a list as a tuple, where such is wanted."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if _fits(value, part))
    if hint is float:
        return float(value)
    if isinstance(value, list) and get_args(hint):
        items = [_as_hinted(item, get_args(hint)[0]) for item in value]
        return tuple(items) if get_origin(hint) is tuple else items
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value that a TOML file can hold is of this type."""
    if hint is Any:
        return True
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in args)
    if origin is Literal:
        return any(value == part and type(value) is type(part) for part in args)
    kind = origin if isinstance(origin, type) else NoneType
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if issubclass(kind, Sequence):
        return isinstance(value, list | tuple) and all(_fits(item, args[0]) for item in value)
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return isinstance(hint, type) and type(value) is hint


def _describe(hint: Any) -> str:
    """Say in words what a file can give for a type; empty where it can give nothing."""
    if hint is Any:
        return "any value"
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(filter(None, map(_describe, args)))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        inner = {"a number": "numbers", "a whole number": "whole numbers", "text": "texts"}
        return f"a list of {inner.get(_describe(args[0]), 'values')}" if _describe(args[0]) else ""
    return "" if hint is NoneType else _PLAIN.get(hint, "")


def changed(tables: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return tables with some values replaced, each given as `table.key=value` with the value in TOML; text needs no quotes.

    Example:
        >>> changed({"training": {"lr": 0.1}}, ["training.epochs=3", "model.name=cnn"])
        {'training': {'lr': 0.1, 'epochs': 3}, 'model': {'name': 'cnn'}}
    """
    result = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()}
    for change in changes:
        path, equals, text = change.partition("=")
        names = path.strip().split(".")
        if not equals or len(names) < 2 or not all(names):
            raise ValueError(f"A change must be table.key=value, such as training.epochs=3; got {change!r}.")
        place = result
        for name in names[:-1]:
            inner = place.get(name, {})
            place[name] = place = dict(inner) if isinstance(inner, Mapping) else {}
        place[names[-1]] = _value(text.strip())
    return result


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Write tables of plain values as TOML; values that are None and empty tables are left out.

    Example:
        >>> print(to_toml({"training": {"epochs": 3, "schedule": {"name": "step", "every": 10.0}}}), end="")
        [training]
        epochs = 3
        schedule = { name = "step", every = 10.0 }
    """
    parts = []
    for name, table in tables.items():
        lines = [f"{_key(key)} = {_toml(value)}\n" for key, value in table.items() if value is not None]
        if lines:
            parts.append(f"[{_key(name)}]\n" + "".join(lines))
    return "\n".join(parts)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's basic strings are JSON's, but that DEL must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_toml, value))}]"
    raise ValueError(f"TOML has no way to write a {type(value).__name__}.")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)
