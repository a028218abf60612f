"""Splitting a recorded program in two where one of its inputs is first used."""

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node


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
