"""Tracing: the tensor operations of a function as a program that can be replayed, compiled, or captured in a CUDA graph.

A function is traced on fake tensors, which have shapes and no values. Nothing is computed, so nothing has to be undone, and what depends on
values (branches, numbers that are read, shapes) cannot be traced at all. What a trace cannot see is refused where it shows: numbers from
generators, attributes that modules change, tensors that they keep from call to call. Counters in closures do not show.

Traced programs are then rewritten: what changes nothing goes, results lie in memory as they are used, counters are taken out, one
becomes two.
"""

import linecache
import operator
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx import Graph, GraphModule, Node

import dissensus.engines.row_updates  # noqa: F401, registers the operation that is looked for below
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

    Of the tensors only shapes, strides and types count; they and the modules that it runs stay as they are.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(before: Attributes) -> torch.fx.GraphModule:
        drawn = _generators()
        # The dispatcher in Python takes decompositions that are the same on every device (no cuDNN BatchNorm, for one).
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch._dispatch.python.enable_python_dispatcher():  # type: ignore[attr-defined]
            program = make_fx(function)(*map(fake.from_tensor, tensors))
        _check(program, before, _generators() == drawn)
        return program

    modules = list(modules)
    with alone, seeded(0, alone=True), no_sources_kept():
        with _understood(modules) as kept:
            try:
                program = traced(kept)
            except _ChangesAttributesError:
                # Some are set when first called, and not again.
                program = traced(Attributes(modules))
        # It computes the same, cheaper.
        _simplify(program.graph)
        _turn_products(program.graph)
        _hand_over_parts(program.graph)
        program.recompile()
    return program


def shapes_of(function: Callable[..., Any], tensors: Sequence[Tensor], modules: Iterable[nn.Module]) -> Any:
    """Return what a function gives for such arguments as fake tensors; nothing is computed."""
    with _understood(modules), seeded(0, alone=True), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        return function(*map(fake.from_tensor, tensors))


@contextmanager
def _understood(modules: Iterable[nn.Module]) -> Iterator[Attributes]:
    """Say of whatever fails inside why it cannot be traced, and give modules back what they kept in Python."""
    with Attributes(modules) as kept:
        try:
            yield kept
        except NotTraceableError:
            raise
        except Exception as failure:
            raise NotTraceableError(_in_words(failure)) from failure


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
            _check_operation(node)
        elif node.op == "get_attr":
            constant = getattr(program, str(node.target))
            if _is_real(constant) and constant.untyped_storage().data_ptr() in replaced:
                raise NotTraceableError("it reads a tensor that it kept from the step before")


def _is_real(value: object) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def _check_operation(node: Node) -> None:
    target: Any = node.target
    if draws(target, node.args, node.kwargs):
        raise NotTraceableError(f"it draws random numbers outside dropout layers ({target})")
    given = zip(target._schema.arguments, node.args, strict=False)
    written = [source for argument, source in given if argument.alias_info and argument.alias_info.is_write]
    if any(isinstance(source, Node) and source.op == "get_attr" for source in written):
        raise NotTraceableError("it changes a tensor that is neither parameter nor buffer")


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


aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def _simplify(graph: Graph) -> None:
    """Remove operations that do nothing when replayed: detaching, and views that keep the shape."""
    for node in list(graph.nodes):
        if node.target not in (aten.detach.default, aten.expand.default, *_VIEWS):
            continue
        source = node.args[0]
        if node.target is aten.detach.default or source.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _turn_products(graph: Graph) -> None:
    """Compute products of which only the transpose is used as such, so that they lie in memory as they are used.

    Gradients of stacked weights are of that kind. Turned afterwards, number by number, they took as long as the update.
    """
    for node in filter(_turns, list(graph.nodes)):
        source = node.args[0]
        # Under autocast a gradient is cast before it is turned.
        cast = source if _only_casts(source) and len(source.users) == 1 else None
        product = source if cast is None else cast.args[0]
        if product.target is not aten.bmm.default or len(product.users) > 1:
            continue
        with graph.inserting_before(node):
            factors = tuple(_turned(graph, factor) for factor in reversed(product.args))
            new = graph.call_function(aten.bmm.default, factors)
            new.meta = {"val": product.meta["val"].transpose(1, 2)}
            if cast is not None:
                new = graph.call_function(cast.target, (new,), dict(cast.kwargs))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _turns(node: Any) -> bool:
    """Whether a node exchanges the last two of three axes."""
    return node.target is aten.transpose.int and {axis % 3 for axis in node.args[1:]} == {1, 2}


def _turned(graph: Graph, node: Any) -> Any:
    if _turns(node):
        return node.args[0]
    new = graph.call_function(aten.transpose.int, (node, 1, 2))
    new.meta = {"val": node.meta["val"].transpose(1, 2)}
    return new


def _only_casts(node: Any) -> bool:
    return node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype", "layout", "device"}


def _hand_over_parts(graph: Graph) -> None:
    """Give updates of rows the gradients of the parameters as they come, instead of one row put together from them.

    Put together, and cast, they take as long as the update itself.
    """
    update = torch.ops.dissensus.update_by_adam.default
    for node in list(graph.nodes):
        if node.target is not update or len(node.args[3]) > 1:
            continue
        (row,) = node.args[3]
        if row.target is not aten.cat.default or row.args[1:] != (1,):
            continue
        parts = list(row.args[0])
        if parts[-1].target is aten.zeros.default:  # of the padding, which stays as it is
            parts.pop()
        found = [_as_computed(part) for part in parts]
        # What is another tensor's memory may change before the update reads it.
        if all(map(_is_new, found)):
            node.update_arg(3, found)
    graph.eliminate_dead_code()


def _as_computed(part: Any) -> Any:
    """Return what a part of a row was before it was cast to more digits and put in line."""
    while part.target in (*_VIEWS, aten.clone.default) or _only_casts(part):
        before, after = part.args[0].meta["val"], part.meta["val"]
        widens = after.dtype == torch.float32 and before.dtype in (torch.bfloat16, torch.float16)
        if _only_casts(part) and not (widens and before.device == after.device):
            break
        part = part.args[0]
    return part


def _is_new(node: Any) -> bool:
    """Whether a node gives a tensor with memory of its own."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return all(result.alias_info is None for result in node.target._schema.returns)


def take_out_counters(program: GraphModule, names: list[str]) -> dict[str, int]:
    """Remove from a program the counting of BatchNorm's passes; return how much it adds to each counter.

    A counter is one number, yet counting it in the program costs a kernel and a copy for each layer and member.
    """
    inputs = dict(zip((n for n in program.graph.nodes if n.op == "placeholder"), names, strict=True))
    found: dict[str, int] = {}
    for node in list(program.graph.nodes):
        name = inputs.get(node.args[0], "") if node.target is aten.add_.Tensor else ""
        if name.endswith("num_batches_tracked") and isinstance(node.args[1], int) and not node.users:
            found[name] = found.get(name, 0) + node.args[1]
            program.graph.erase_node(node)
    program.recompile()
    return found


def split_at_last_input(program: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Split a program, by the order of its operations, where its last input is first used.

    The first program takes the other inputs and returns `(result, *kept)`; the second takes all inputs and what was kept, and
    returns what the program returns after its first result. Views of inputs are not kept but taken again.
    """
    *nodes, output = program.graph.nodes
    inputs = program.graph.find_nodes(op="placeholder")
    first_late = min(map(nodes.index, inputs[-1].users))
    results = output.args[0]
    result, *late_results = results if isinstance(results, tuple | list) else (results,)
    early, late = nodes[len(inputs) : first_late], nodes[first_late:]
    if result not in nodes[:first_late]:
        raise RuntimeError("its outputs are not finished before their gradient is used")
    needed = {*late_results, *(source for node in late for source in node.all_input_nodes)}
    views = _views_of(inputs)
    kept = [node for node in early if node in needed and node not in views]

    forward = _graph_of(inputs[:-1], early, [result, *kept])
    backward = _graph_of([*inputs, *kept], [*filter(views.__contains__, early), *late], late_results)
    for graph in (forward, backward):
        graph.eliminate_dead_code()
    return GraphModule(program, forward), GraphModule(program, backward)


def _views_of(inputs: Sequence[Node]) -> set[Node]:
    """Return the operations that only look at inputs another way."""
    known = set(inputs)
    for node in inputs[0].graph.nodes:
        looks = getattr(node.target, "is_view", False) or node.target in (aten._unsafe_view.default, operator.getitem)
        if looks and known.issuperset(node.all_input_nodes):
            known.add(node)
    return known.difference(inputs)


def _graph_of(inputs: Sequence[Node], operations: Sequence[Node], results: Sequence[Node]) -> Graph:
    """Return a graph of copies of nodes of another one."""
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in operations:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in results))
    return graph
