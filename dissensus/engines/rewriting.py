"""Rewriting traced programs: what changes nothing goes, results lie in memory as they are used, counters are taken out, one becomes two."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import dissensus.engines.row_updates  # noqa: F401, registers the operation that is looked for below

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def rewrite(graph: Graph) -> None:
    """Make a program cheaper, in place; it computes the same."""
    _simplify(graph)
    _turn_products(graph)
    _hand_over_parts(graph)


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
    for node in list(graph.nodes):
        source = node.args[0] if _turns(node) else None
        # Under autocast a gradient is cast before it is turned.
        cast = source if source is not None and _only_casts(source) and len(source.users) == 1 else None
        product = source if cast is None else cast.args[0]
        if product is None or product.target is not aten.bmm.default or len(product.users) > 1:
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
    while part.target in (*_VIEWS, aten.clone.default) or _widens(part):
        part = part.args[0]
    return part


def _is_new(node: Any) -> bool:
    """Whether a node gives a tensor with memory of its own."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return all(result.alias_info is None for result in node.target._schema.returns)


def _widens(node: Any) -> bool:
    return (
        _only_casts(node)
        and node.meta["val"].dtype == torch.float32
        and node.args[0].meta["val"].dtype in (torch.bfloat16, torch.float16)
        and node.args[0].meta["val"].device == node.meta["val"].device
    )


def take_out_counters(program: GraphModule, names: list[str]) -> dict[str, int]:
    """Remove from a program the counting of BatchNorm's passes; return how much it adds to each counter.

    A counter is one number, yet counting it in the program costs a kernel and a copy for each layer and member.
    """
    inputs = dict(zip((n for n in program.graph.nodes if n.op == "placeholder"), names, strict=True))
    found: dict[str, int] = {}
    for node in list(program.graph.nodes):
        name = inputs.get(node.args[0]) if node.target is aten.add_.Tensor else None
        if (
            name is not None
            and name.endswith("num_batches_tracked")
            and isinstance(node.args[1], int)
            and not node.users
        ):
            found[name] = found.get(name, 0) + node.args[1]
            program.graph.erase_node(node)
    program.recompile()
    return found


def _is_view(node: Node) -> bool:
    """Whether an operation only looks at its input another way. Looked up when needed: torch loads operators by and by."""
    aten = torch.ops.aten
    return node.target in (
        operator.getitem,
        aten.split_with_sizes.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.select.int,
        aten.squeeze.dim,
        aten.unsqueeze.default,
    )


def split_at_last_input(program: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Split a program, by the order of its operations, where its last input is first used.

    The first program takes the other inputs and returns `(result, *kept)`; the second takes all inputs and what was kept.
    Views of inputs are not kept but taken again.
    """
    nodes = list(program.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    first_late = min(nodes.index(user) for user in inputs[-1].users)
    (result,) = (node.args[0] for node in nodes if node.op == "output")
    early = [node for node in nodes[:first_late] if node.op != "placeholder"]
    late = [node for node in nodes[first_late:] if node.op != "output"]
    if result not in early and result not in inputs:
        raise RuntimeError("its outputs are not finished before their gradient is used")
    repeated = _views_of(inputs)
    needed = {source for node in late for source in node.all_input_nodes if source in set(early)}
    again = [node for node in early if node in repeated and node in _with_sources(needed & repeated)]
    kept = [node for node in early if node in needed and node not in repeated]

    forward, backward = Graph(), Graph()
    values: dict[Node, Node] = {node: _placeholder(forward, node) for node in inputs[:-1]}
    _copy_into(forward, early, values)
    forward.output((values[result], *(values[node] for node in kept)))
    values = {node: _placeholder(backward, node) for node in [*inputs, *kept]}
    _copy_into(backward, [*again, *late], values)
    backward.output(())
    forward.eliminate_dead_code()
    return GraphModule(program, forward), GraphModule(program, backward)


def _views_of(inputs: Sequence[Node]) -> set[Node]:
    """Return the operations that only look at inputs another way."""
    known = set(inputs)
    graph = inputs[0].graph
    found = set()
    for node in graph.nodes:
        if _is_view(node) and all(source in known for source in node.all_input_nodes):
            known.add(node)
            found.add(node)
    return found


def _with_sources(nodes: set[Node]) -> set[Node]:
    """Return these nodes and everything they come from."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _placeholder(graph: Graph, node: Node) -> Node:
    twin = graph.placeholder(node.name)
    twin.meta = dict(node.meta)
    return twin


def _copy_into(graph: Graph, nodes: Sequence[Node], values: dict[Node, Node]) -> None:
    for node in nodes:
        values[node] = graph.node_copy(node, lambda source: values[source])
