"""Settings from a file: what a function can be given, names and types checked, and the way back to TOML."""

import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Any: "any value"}
_PLURALS = {"a number": "numbers", "a whole number": "whole numbers", "text": "texts"}
_OTHER = object()
AUTO = "auto"  # what a recipe says where the data is to decide


def check_names(given: Iterable[str], known: Iterable[str], where: str, what: str = "key") -> None:
    """Refuse a name that is not known, and say which one may have been meant.

    Example:
        >>> check_names(["epoch"], ["epochs", "lr"], "[training]")
        Traceback (most recent call last):
        ValueError: unknown key 'epoch' in [training]; did you mean 'epochs'?
    """
    known = list(known)
    for name in given:
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            meant = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}."
            raise ValueError(f"unknown {what} {name!r} in {where}; {meant}")


def choose(table: Mapping[str, Any], name: Any, where: str) -> Any:
    """Return a table's entry, or say which there are."""
    check_names([name], table, where, "name")
    return table[name]


def parameters(make: Callable[..., Any], skip: Sequence[str] = ()) -> dict[str, inspect.Parameter]:
    """Return what a function or class takes by name and a file can give, each annotated with its type."""
    # A class's own signature is meant, whatever subclasses do.
    hints = get_type_hints(make.__init__ if isinstance(make, type) else make)  # type: ignore[misc]
    return {
        name: parameter.replace(annotation=hints.get(name, Any))
        for name, parameter in inspect.signature(make).parameters.items()
        if name not in skip
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and _words(hints.get(name, Any))
    }


def checked(
    make: Callable[..., Any], given: Mapping[str, Any], where: str, skip: Sequence[str] = (), auto: Sequence[str] = ()
) -> dict[str, Any]:
    """Return arguments for a function, names and types checked, with its defaults, or "auto" for those that it names, filled in."""
    known = parameters(make, skip)
    check_names(given, known, where)
    if lacking := [name for name, own in known.items() if own.default is own.empty and name not in given]:
        raise ValueError(f"{where} needs {' and '.join(lacking)}.")
    chosen = {}
    for name, own in known.items():
        value = _read(own.annotation, given.get(name, own.default))
        if name in auto and given.get(name, AUTO) == AUTO:
            chosen[name] = AUTO
        elif value is not _OTHER and (name in given or value is not None):
            chosen[name] = value
        elif name in given:
            raise ValueError(f"{name} in {where} must be {_words(own.annotation)}; got {given[name]!r}.")
    return chosen


def _read(hint: Any, value: Any) -> Any:
    """Return a value of a file as a type has it: whole numbers as floats, lists as tuples; `_OTHER` if it is of another type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return next((used for arg in args if (used := _read(arg, value)) is not _OTHER), _OTHER)
    if _is_kind(origin, Sequence):
        items = [_read(args[0], item) for item in value] if isinstance(value, list | tuple) else [_OTHER]
        whole = tuple(items) if tuple in (origin, type(value)) else items
        return _OTHER if _OTHER in items else whole
    if hint is float and type(value) is int:
        return float(value)
    return value if _is_of(value, hint, origin) else _OTHER


def _is_of(value: Any, hint: Any, origin: Any) -> bool:
    if origin is Literal:  # 1 is not True here
        return (value, type(value)) in [(word, type(word)) for word in get_args(hint)]
    if _is_kind(origin, Mapping):
        return isinstance(value, Mapping)
    return hint is Any or type(value) is hint


def _words(hint: Any) -> str:
    """Return what a file can give for a type, in words; none where it can give nothing."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(filter(None, map(_words, args)))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if _is_kind(origin, Mapping):
        return "a table"
    if _is_kind(origin, Sequence):
        return f"a list of {_PLURALS.get(words, 'values')}" if (words := _words(args[0])) else ""
    return _PLAIN.get(hint, "")


def _is_kind(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


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
        lines = [f"{_key(key)} = {toml_value(value)}\n" for key, value in table.items() if value is not None]
        if lines:
            parts.append(f"[{_key(name)}]\n" + "".join(lines))
    return "\n".join(parts)


def toml_value(value: Any) -> str:
    """Write a plain value as TOML.

    Example:
        >>> print(toml_value({"name": "joint", "beta": 0.4}))
        { name = "joint", beta = 0.4 }
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's basic strings are JSON's, but that DEL must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(toml_value, value))}]"
    raise ValueError(f"TOML has no way to write a {type(value).__name__}.")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)
