"""Recording a training step: its tensor operations as a program that can be replayed, compiled or captured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dissensus.members import DeepEnsemble, SingleMember
from dissensus.members.probe import draws
from dissensus.objectives.objective import OutputObjective
from dissensus.training.feeds import Feed
from dissensus.training.step import State, TrainStep

Program = Callable[..., Any]


def record(
    train_step: TrainStep, state: State, names: list[str], size: int, advance: bool = True
) -> torch.fx.GraphModule:
    """Return the step's tensor operations, with every named tensor of the state as an input that is changed in place."""

    def step(*tensors: Tensor) -> tuple[()]:
        train_step(dict(zip(names, tensors, strict=True)), size, advance=advance)
        return ()

    scratch = clone(state)
    return record_function(step, [scratch[name] for name in names])


def record_function(function: Callable[..., object], tensors: Sequence[Tensor]) -> torch.fx.GraphModule:
    """Return the tensor operations of a function of tensors, gradients that it takes included."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # The dispatcher in Python takes decompositions that are the same on every device (no cuDNN BatchNorm, for one).
    with _NoValues(), torch._dispatch.python.enable_python_dispatcher():  # type: ignore[attr-defined]
        program = make_fx(function)(*tensors)
    _refuse_random(program.graph)
    _simplify(program.graph)
    _turn_products(program.graph)
    program.recompile()
    return program


class _NoValues(TorchFunctionMode):
    """Refuses what would turn a tensor's present values into constants of the recording."""

    refused = (Tensor.tolist, Tensor.numpy, Tensor.__array__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.refused:
            raise RuntimeError("it reads the values of a tensor")
        return func(*args, **(kwargs or {}))


def _refuse_random(graph: torch.fx.Graph) -> None:
    """Refuse operations that draw from a generator: replayed they would not follow the run's seed."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and draws(node.target, node.args, node.kwargs):
            raise RuntimeError(f"it draws random numbers outside dropout layers ({node.target})")


def _simplify(graph: torch.fx.Graph) -> None:
    """Remove operations that do nothing when replayed: detaching, and views that keep the shape."""
    aten = torch.ops.aten
    views = (aten.view.default, aten.expand.default, aten._unsafe_view.default)
    for node in list(graph.nodes):
        if node.target is not aten.detach.default and node.target not in views:
            continue
        source = node.args[0]
        if node.target is aten.detach.default or source.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _turn_products(graph: torch.fx.Graph) -> None:
    """Compute products of which only the transpose is used as such, so that they lie in memory as they are used.

    Gradients of stacked weights are of that kind. Turned afterwards, number by number, they took as long as the update.
    """
    for node in list(graph.nodes):
        product = node.args[0] if _turns(node) else None
        if product is None or product.target is not torch.ops.aten.bmm.default or len(product.users) > 1:
            continue
        with graph.inserting_before(node):
            factors = tuple(_turned(graph, factor) for factor in reversed(product.args))
            new = graph.call_function(torch.ops.aten.bmm.default, factors)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _turns(node: Any) -> bool:
    """Whether a node exchanges the last two of three axes."""
    return node.target is torch.ops.aten.transpose.int and {axis % 3 for axis in node.args[1:]} == {1, 2}


def _turned(graph: torch.fx.Graph, node: Any) -> Any:
    if _turns(node):
        return node.args[0]
    new = graph.call_function(torch.ops.aten.transpose.int, (node, 1, 2))
    new.meta = {"val": node.meta["val"].transpose(1, 2)}
    return new


def take_out_counters(program: torch.fx.GraphModule, names: list[str]) -> dict[str, int]:
    """Remove from a program the counting of BatchNorm's passes; return how much it adds to each counter.

    A counter is one number, yet counting it in the program costs a kernel and a copy for each layer and member.
    """
    inputs = dict(zip((n for n in program.graph.nodes if n.op == "placeholder"), names, strict=True))
    found: dict[str, int] = {}
    for node in list(program.graph.nodes):
        name = inputs.get(node.args[0]) if node.target is torch.ops.aten.add_.Tensor else None
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


def clone(state: State) -> State:
    """Return a copy of everything that a step changes; data is shared."""
    return {
        name: tensor
        if name.startswith(("data.", "stream.", "frozen.", "batch.", "factors"))
        else _copy(tensor)
        for name, tensor in state.items()
    }


def _copy(tensor: Tensor) -> Tensor:
    # With the same strides, for which a program is compiled; `Tensor.clone` would close the gaps between rows.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def restore(state: State, saved: State) -> None:
    """Put back, in place, what `clone` copied."""
    for name, tensor in saved.items():
        if tensor is not state[name]:
            state[name].copy_(tensor)


def compile_program(program: torch.fx.GraphModule) -> Program:
    """Return the recorded program compiled for its shapes; gradients are part of it already."""
    compiled = torch.compile(program, dynamic=False)

    def run(*tensors: Tensor) -> Any:
        with torch.no_grad():
            return compiled(*tensors)

    return run


def row_of(state: State, index: int, feed: Feed) -> State:
    """Return one member's part of the state, as views; what members share stays whole.

    The member's own tensors (buffers, frozen parameters) lose the member axis, so that a program can change them in place;
    what is logged and optimized keeps it.
    """

    def part(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        if name.startswith(("buffer.", "frozen.")):
            return tensor[index]
        kept = name.startswith(("flat.", "sum.", "seen.", "noise_keys")) or (name == "order" and feed.own)
        if kept or (name.startswith("optimizer.") and not name.startswith("optimizer.column")):
            return tensor[index : index + 1]
        return tensor

    return {name: part(name, tensor) for name, tensor in state.items()}


def why_not_by_member(train_step: TrainStep, state: State) -> str | None:
    """Say why the step is not the same as one separate step for each member; None if it is."""
    if train_step.objective.couples:
        return "the objective couples members"
    if any(state[name].ndim == 0 for name in state if name.startswith("sum.")):
        return "the objective logs values of the whole ensemble"
    return why_not_one_program_each(train_step, state)


def why_not_in_parts(train_step: TrainStep, state: State) -> str | None:
    """Say why the step is not members' forward passes, a comparison of outputs, and members' backward passes."""
    if not isinstance(train_step.objective, OutputObjective) or not train_step.objective.outputs_only:
        return "the objective needs more than the members' outputs"
    return why_not_one_program_each(train_step, state)


def why_not_one_program_each(train_step: TrainStep, state: State) -> str | None:
    """Say why one member's program on every member's tensors is not the ensemble; None if it is."""
    members = train_step.members
    if not isinstance(members, DeepEnsemble) or not members.stacked:
        return "members are not stored as one"
    if members.why_different is not None:
        return members.why_different
    if train_step.picks(state):
        return "the objective picks members"
    return None


def single_member_step(train_step: TrainStep) -> TrainStep:
    """Return the step for an ensemble of one member; its tensors come with the state."""
    assert isinstance(train_step.members, DeepEnsemble)
    blocks = [replace(block, stacked=False, members=(0,), flat=block.flat[:1]) for block in train_step.blocks]
    return replace(train_step, members=SingleMember(train_step.members), blocks=blocks)
