"""Settings from a file: what a function can be given, names and types checked, and the way back to TOML."""

import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_PLURALS = {"a number": "numbers", "a whole number": "whole numbers", "text": "texts"}
_OTHER = object()


def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse a name that is not known, and say which one may have been meant.

    Example:
        >>> check_names(["epoch"], ["epochs", "lr"], "[training]")
        Traceback (most recent call last):
        ValueError: unknown key 'epoch' in [training]; did you mean 'epochs'?
    """
    known = list(known)
    for name in given:
        if name not in known:
            raise ValueError(f"unknown key {name!r} in {where}; {_meant(name, known)}")


def choose(table: Mapping[str, Any], name: Any, where: str) -> Any:
    """Return a table's entry, or say which there are."""
    if name not in table:
        raise ValueError(f"unknown name {name!r} in {where}; {_meant(str(name), list(table))}")
    return table[name]


def _meant(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}."


def parameters(make: Callable[..., Any], without: Sequence[str] = ()) -> dict[str, inspect.Parameter]:
    """Return what a function or class takes by name and a file can give, each annotated with its type."""
    # A class's own signature is meant, whatever subclasses do.
    hints = get_type_hints(make.__init__ if isinstance(make, type) else make)  # type: ignore[misc]
    return {
        name: parameter.replace(annotation=hints.get(name, Any))
        for name, parameter in inspect.signature(make).parameters.items()
        if name not in without
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and _wanted(hints.get(name, Any))[1]
    }


def checked(
    make: Callable[..., Any], given: Mapping[str, Any], where: str, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Return arguments for a function, with its defaults filled in; names, types and what must be there are checked."""
    known = parameters(make, without)
    check_names(given, known, where)
    chosen = {}
    for name, parameter in known.items():
        read, words = _wanted(parameter.annotation)
        if name in given:
            chosen[name] = read(given[name])
            if chosen[name] is _OTHER:
                raise ValueError(f"{name} in {where} must be {words}; got {given[name]!r}.")
        elif parameter.default is not None and read(parameter.default) is not _OTHER:
            chosen[name] = read(parameter.default)
    lacking = [n for n, p in known.items() if p.default is p.empty and n not in given]
    if lacking:
        raise ValueError(f"{where} needs {' and '.join(lacking)}.")
    return chosen


def _wanted(hint: Any) -> tuple[Callable[[Any], Any], str]:
    """Return what reads values of a TOML file for a type, and its words; no words where a file can give nothing.

    Reading returns the value, a whole number as a float and a list as a tuple where such is wanted, or `_OTHER` for another type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        readers, texts = zip(*map(_wanted, args), strict=True)
        return partial(_first_of, readers), " or ".join(filter(None, texts))
    if origin is Literal:
        return partial(_among, args), " or ".join(map(repr, args))
    kind = origin if isinstance(origin, type) else NoneType
    if issubclass(kind, Mapping):
        return partial(_instance, Mapping), "a table"
    if issubclass(kind, Sequence):
        read, words = _wanted(args[0])
        return partial(_several, read, kind), f"a list of {_PLURALS.get(words, 'values')}" if words else ""
    if hint is Any:
        return partial(_instance, object), "any value"
    return _number if hint is float else partial(_exactly, hint), _PLAIN.get(hint, "")


def _instance(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else _OTHER


def _exactly(kind: Any, value: Any) -> Any:
    return value if type(value) is kind else _OTHER


def _first_of(readers: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    return next((used for read in readers if (used := read(value)) is not _OTHER), _OTHER)


def _among(words: Sequence[Any], value: Any) -> Any:
    return value if any(value == word and type(value) is type(word) for word in words) else _OTHER


def _several(read: Callable[[Any], Any], kind: type, value: Any) -> Any:
    items = [read(item) for item in value] if isinstance(value, list | tuple) else [_OTHER]
    if any(item is _OTHER for item in items):
        return _OTHER
    return tuple(items) if kind is tuple or isinstance(value, tuple) else items


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, float | int) and not isinstance(value, bool) else _OTHER


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
