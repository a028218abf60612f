"""Tracing: the tensor operations of a function as a program that can be replayed, compiled, or captured in a CUDA graph.

A function is traced on fake tensors, which have shapes and no values. Nothing is computed, so nothing has to be undone, and what depends on
values (branches, numbers that are read, shapes) cannot be traced at all. What a trace cannot see is refused where it shows: numbers from
generators, attributes that modules change, tensors that they keep from call to call. Counters in closures do not show.
"""

import linecache
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from dissensus.engines.rewriting import rewrite
from dissensus.engines.watching import Attributes, draws, work_of
from dissensus.randomness import seeded

Program = Callable[..., Any]

# Tracing and capturing change torch for all threads.
alone = RLock()


class NotTraceableError(RuntimeError):
    """A function that a program would not repeat; the message says why."""


class _ChangesAttributesError(NotTraceableError):
    """A function whose modules keep other attributes after it."""


def trace(
    function: Callable[..., object], tensors: Sequence[Tensor], modules: Iterable[nn.Module] = ()
) -> torch.fx.GraphModule:
    """Return the tensor operations of a function, gradients that it takes and changes of its arguments in place included.

    Args:
        function: A function of tensors.
        tensors: Arguments as it will get them. They stay as they are: only their shapes, strides and types count.
        modules: What it runs; they are left as they were.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(before: Attributes) -> torch.fx.GraphModule:
        drawn = _generators()
        # The dispatcher in Python takes decompositions that are the same on every device (no cuDNN BatchNorm, for one).
        with _fakes() as fake, torch._dispatch.python.enable_python_dispatcher():  # type: ignore[attr-defined]
            program = make_fx(function)(*map(fake.from_tensor, tensors))
        _check(program, before, _generators() == drawn)
        return program

    modules = list(modules)
    with alone, seeded(0, alone=True), no_sources_kept():
        kept = Attributes(modules)
        try:
            try:
                program = traced(kept)
            except _ChangesAttributesError:
                # Some are set when first called, and not again.
                program = traced(Attributes(modules))
        except NotTraceableError:
            raise
        except Exception as failure:  # whatever a user's module does that cannot be traced
            raise NotTraceableError(_in_words(failure)) from failure
        finally:
            kept.put_back()
        rewrite(program.graph)
        program.recompile()
    return program


def shapes_of(function: Callable[..., Any], tensors: Sequence[Tensor], modules: Iterable[nn.Module]) -> Any:
    """Return what a function gives for such arguments as fake tensors; nothing is computed."""
    kept = Attributes(modules)
    try:
        with seeded(0, alone=True), _fakes() as fake:
            return function(*map(fake.from_tensor, tensors))
    except Exception as failure:
        raise NotTraceableError(_in_words(failure)) from failure
    finally:
        kept.put_back()


def _fakes() -> FakeTensorMode:
    # Without symbols for shapes and numbers: what depends on values fails at once.
    return FakeTensorMode(allow_non_fake_inputs=True)


def _in_words(failure: Exception) -> str:
    """Say in one line why a function cannot be traced."""
    if isinstance(failure, DataDependentOutputException):
        return "it reads the value of a tensor, for a branch or a number"
    if isinstance(failure, DynamicOutputShapeException):
        return f"shapes in it depend on values ({failure.func})"
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]


def _generators() -> list[object]:
    """Return the state of the generators outside torch."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return [random.getstate(), numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["has_gauss"]]


def _check(program: torch.fx.GraphModule, kept: Attributes, drew_nothing: bool) -> None:
    """Refuse what a program would not repeat."""
    if kept.changed():
        raise _ChangesAttributesError("its modules change Python attributes from step to step")
    if not drew_nothing:
        raise NotTraceableError("it draws from Python's or NumPy's generator")
    replaced = {tensor.untyped_storage().data_ptr() for tensor in kept.replaced() if _is_real(tensor)}
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            if draws(node.target, node.args, node.kwargs):
                raise NotTraceableError(f"it draws random numbers outside dropout layers ({node.target})")
            if any(source.op == "get_attr" for source in _written(node)):
                raise NotTraceableError("it changes a tensor that is neither parameter nor buffer")
        elif node.op == "get_attr":
            constant = getattr(program, str(node.target))
            if _is_real(constant) and constant.untyped_storage().data_ptr() in replaced:
                raise NotTraceableError("it reads a tensor that it kept from the step before")


def _is_real(value: object) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def _written(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that an operation changes."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    return [
        given
        for argument, given in zip(schema.arguments, node.args, strict=False)
        if isinstance(given, torch.fx.Node)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@contextmanager
def no_sources_kept() -> Iterator[None]:
    """Have torch forget the source of programs made inside, which it keeps for ever."""
    from torch.fx.graph_module import _loader

    before = set(_loader.eval_cache)
    try:
        yield
    finally:
        for name in [name for name in _loader.eval_cache if name not in before]:
            del _loader.eval_cache[name]
            linecache.cache.pop(name, None)


def work_in(program: torch.fx.GraphModule) -> tuple[int, float]:
    """Return how many operations a program has, and how many numbers they multiply and add."""
    count, work = 0, 0.0
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            count += 1
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
            work += work_of(node.target, args, kwargs, node.meta.get("val"))
    return count, work


def compile_program(program: torch.fx.GraphModule, combine: bool = False) -> Program:
    """Return a program compiled for its shapes when it is first called; gradients are part of it already.

    With `combine` small kernels that do not depend on each other are made into one.
    """
    compiled: Program | None = None

    def run(*tensors: Tensor) -> Any:
        nonlocal compiled
        with torch.no_grad():
            if compiled is not None:
                return compiled(*tensors)
            # Compiling warns of torch's own affairs: deprecations inside it, settings that might be faster.
            with alone, no_sources_kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                options: dict[str, Any] | None = {"combo_kernels": True} if combine else None
                compiled = torch.compile(program, dynamic=False, options=options)
                return compiled(*tensors)

    return run
