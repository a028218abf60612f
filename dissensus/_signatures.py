"""A signature's annotations in; arguments of another kind refused in one sentence, before anything else happens.

`@checked` stands on what users call. It looks at kinds only: sizes, ranges and contents are the function's own affair, and so is data in
its many forms. torch is not imported here: the conformal functions serve without it.
"""

import inspect
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from math import inf, isnan
from operator import index
from os import sep
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

Public = TypeVar("Public", bound=Callable[..., Any])
# A reader returns the value to use, or `_OTHER` if it is of another kind; the words say what is wanted.
Reader = Callable[[Any], Any]
Wanted = tuple[Reader, str]
_OTHER = object()
_TENSOR = "a torch tensor of real numbers"


def checked(public: Public) -> Public:
    """Refuse arguments of another kind than the annotations of a function, or of a class's construction, name.

    Where a number is wanted, NumPy's numbers and tensors of one become Python's own.

    Example:
        >>> @checked
        ... def power(base: float, times: int = 1) -> float:
        ...     return base**times
        >>> power(2.0, np.int64(3))
        8.0
        >>> power(2.0, times=1.5)
        Traceback (most recent call last):
        ValueError: `times` must be a whole number; got 1.5.
    """
    if isinstance(public, type):
        made: Any = public
        made.__init__ = checked(made.__init__)
        return public
    positions = [
        name for name, own in inspect.signature(public).parameters.items() if own.kind <= own.POSITIONAL_OR_KEYWORD
    ]
    wanted: dict[str, Wanted] = {}

    @wraps(public)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not wanted:  # not at import: annotations may name what is defined later
            wanted.update({name: _wanted(kind) for name, kind in _hints(public).items()})
        positional = [_read(wanted, name, value) for name, value in zip(positions, args, strict=False)]
        named = {name: _read(wanted, name, value) for name, value in kwargs.items()}
        return public(*positional, *args[len(positional) :], **named)

    return call  # type: ignore[return-value]


def refuse(reasons: Mapping[str, object]) -> None:
    """Raise the first sentence whose reason is true."""
    for sentence, wrong in reasons.items():
        if wrong:
            raise ValueError(sentence)


def warn(message: str) -> None:
    """Warn at the user's line: the nearest one that is neither this package's nor torch's."""
    own = tuple(
        f"{Path(sys.modules[name].__file__ or '').parent}{sep}"
        for name in ("dissensus", "torch")
        if name in sys.modules
    )
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def need(purpose: str, extra: str, *modules: str) -> None:
    """Refuse a purpose whose packages are not installed, and say which extra brings them.

    Example:
        >>> need("Flying", "wings", "no_such_package")
        Traceback (most recent call last):
        ModuleNotFoundError: Flying needs no_such_package, which this environment lacks. Install with: pip install 'dissensus[wings]'
    """
    for name in modules:
        if find_spec(name) is None:
            raise ModuleNotFoundError(
                f"{purpose} needs {name}, which this environment lacks. Install with: pip install 'dissensus[{extra}]'"
            )


def whole_number(name: str, value: Any, least: int | None = None, *, tail: str = "") -> int:
    """Return a whole number of any origin (NumPy's, a tensor of one) as Python's own, or say what is wrong with it.

    Example:
        >>> whole_number("epochs", 2.5, 1)
        Traceback (most recent call last):
        ValueError: `epochs` must be a whole number of at least 1; got 2.5.
    """
    number = _whole(value)
    if number is _OTHER or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"`{name}` must be a whole number{bound}{tail}; got {value!r}.")
    return int(number)


def real_number(name: str, value: Any, *, least: float = 0.0, above: bool = False, below: float = inf) -> float:
    """Return a finite number of any origin as Python's own, at least (or above) a bound and below another, or say what is wrong.

    Example:
        >>> real_number("lr", float("nan"))
        Traceback (most recent call last):
        ValueError: `lr` must be a number of at least 0; got nan.
    """
    number = _real(value)
    if number is _OTHER or not least <= number < below or (above and number == least):
        most = "" if below == inf else f" and below {below:g}"
        bounds = f"{'above' if above else 'of at least'} {least:g}{most}"
        raise ValueError(f"`{name}` must be a number {bounds}; got {value!r}.")
    return float(number)


def real_numbers(name: str, value: Any) -> float | list[float]:
    """Return one number of at least 0, or a list of them, one a member."""
    if isinstance(value, list | tuple) or (_is_array(value) and value.ndim == 1):
        return [real_number(f"{name}[{place}]", one) for place, one in enumerate(value)]
    return real_number(name, value)


def check_dense(name: str, tensor: Any) -> None:
    """Refuse a tensor that holds no values, or not all of them."""
    if tensor.layout != sys.modules["torch"].strided or tensor.is_meta:
        kind = "one without values (meta)" if tensor.is_meta else "a sparse one"
        raise ValueError(f"`{name}` must be a dense tensor; got {kind}. Use `{name}.to_dense()`, or load the values.")


def _hints(public: Callable[..., Any]) -> dict[str, Any]:
    """Return annotations; names that only a type checker imports are looked up in torch, and else stand for anything."""
    torch, names = sys.modules.get("torch"), dict[str, Any]()
    while True:
        try:
            return get_type_hints(inspect.unwrap(public), localns=names)
        except NameError as problem:
            names[str(problem.name)] = getattr(torch, str(problem.name), Any)


def _read(wanted: Mapping[str, Wanted], name: str, value: Any) -> Any:
    if name not in wanted:
        return value
    read, words = wanted[name]
    if (used := read(value)) is _OTHER:
        outputs = words.startswith(_TENSOR) and hasattr(value, "forward")
        advice = " Pass ds.predict(ens, x) in its place." if outputs else ""
        raise ValueError(f"`{name}` must be {words}; got {_shown(value)}.{advice}")
    return used


def _shown(value: Any) -> str:
    """Return a value as a sentence names it: itself if it is short, else what it is."""
    if is_tensor(value):
        layout = "" if value.layout == sys.modules["torch"].strided else "sparse "
        return f"a {layout}tensor of {value.dtype} shaped {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} shaped {value.shape}"
    if value is None or isinstance(value, str | bytes | int | float | complex | list | tuple | dict | set):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:50]}... ({type(value).__name__})"
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _wanted(annotation: Any) -> Wanted:
    """Return what reads values for an annotation, and its words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    # jaxtyping's shapes have the type they are of
    kind = getattr(annotation, "array_type", origin or annotation)
    if origin in (Union, types.UnionType):
        return _any_of([_wanted(part) for part in parts])
    if origin is Literal:
        return _that(lambda value: isinstance(value, str) and value in parts), _listed(map(repr, parts))
    if kind in (Sequence, Iterable, Collection, list, tuple) and parts:
        return _several(parts, kind in (Iterable, Collection))
    return _KINDS[kind] if kind in _KINDS else _instance(kind)


def _instance(kind: Any) -> Wanted:
    """Read objects of a class; of protocols and data, which comes in many forms, anything."""
    torch = sys.modules.get("torch")
    if torch and kind is torch.Tensor:
        return _that(_is_real_tensor), _TENSOR
    if torch and kind is torch.nn.Module:
        return _of(kind), "an nn.Module (a network)"
    data = (torch.utils.data.Dataset, torch.utils.data.DataLoader) if torch else ()
    if not isinstance(kind, type) or kind in data or getattr(kind, "_is_protocol", False):
        return _ANYTHING
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return _of(kind), getattr(kind, "_in_words", f"{article} {kind.__name__}")


def _any_of(wanted: list[Wanted]) -> Wanted:
    # Tensors stay tensors, whose values are not read, where they are wanted beside numbers.
    readers = [read for read, words in sorted(wanted, key=lambda one: one[1] != _TENSOR)]

    def read(value: Any) -> Any:
        return next((used for read in readers if (used := read(value)) is not _OTHER), _OTHER)

    return _ANYTHING if _ANYTHING in wanted else (read, _listed(words for _, words in wanted))


def _listed(words: Iterable[str]) -> str:
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} or {last}" if others else last


def _several(parts: tuple[Any, ...], unordered: bool) -> Wanted:
    """Read a list, a tuple or an array with one axis; `parts` stand in the brackets of `Sequence[...]` or `tuple[...]`."""
    read, words = _wanted(parts[0])
    length = len(parts) if len(parts) > 1 and parts[-1] is not ... else None
    listed = (list, tuple, set) if unordered else (list, tuple)
    others = Iterable if unordered else Sequence  # they may be gone through once only

    def several(value: Any) -> bool:
        if isinstance(value, str | bytes):
            return False
        if _is_array(value):
            return _holds_numbers(value) and value.ndim == 1 and length in (None, len(value))
        if isinstance(value, listed):
            return length in (None, len(value)) and all(read(one) is not _OTHER for one in value)
        return isinstance(value, others)

    of = (f" of {length}" if length else "") + ("" if words == "anything" else f", each {words}")
    return _that(several), f"a list or tuple{of}"


def _that(fits: Callable[[Any], bool]) -> Reader:
    return lambda value: value if fits(value) else _OTHER


def _of(*kinds: type) -> Reader:
    return _that(lambda value: isinstance(value, kinds))


def _whole(value: Any) -> Any:
    try:
        return _OTHER if isinstance(value, bool) else index(value)
    except TypeError:
        return _OTHER


def _real(value: Any) -> Any:
    array = _is_array(value) and value.ndim == 0 and _holds_numbers(value)
    if isinstance(value, bool) or not (array or isinstance(value, float | int | np.number)):
        return _OTHER
    try:
        number = value if isinstance(value, float | int) else float(value)
    except (TypeError, ValueError):
        return _OTHER
    return _OTHER if isnan(number) else number


def _makes_array(value: Any) -> bool:
    """Whether this is an array, or something that NumPy makes one of: a list, a column of a table."""
    if isinstance(value, np.ndarray):
        return _holds_numbers(value)
    column = hasattr(value, "__array__") and not isinstance(value, type) and not is_tensor(value)
    return column or isinstance(value, list | tuple)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_tensor(value: Any) -> bool:
    """Return whether this is a torch tensor, without importing torch."""
    return (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor)


def _is_real_tensor(value: Any) -> bool:
    return is_tensor(value) and _holds_numbers(value)


def _holds_numbers(array: Any) -> bool:
    """Whether an array or a tensor, which must be dense, is of real numbers."""
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "biuf"
    return array.layout == sys.modules["torch"].strided and not array.is_complex()


_ANYTHING: Wanted = (lambda value: value, "anything")
_KINDS: dict[Any, Wanted] = {
    Any: _ANYTHING,
    int: (_whole, "a whole number"),
    float: (_real, "a number"),
    bool: (_of(bool, np.bool_), "True or False"),
    str: (_of(str), "a string"),
    Path: (_of(Path), "a path"),
    type(None): (_of(type(None)), "None"),
    type: (_of(type), "a class"),
    Callable: (_that(callable), "a function"),
    Mapping: (_of(Mapping), "a dict"),
    np.ndarray: (_that(_makes_array), "an array of numbers"),
}
