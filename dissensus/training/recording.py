"""Recording a training step: its tensor operations as a program that can be replayed, compiled or captured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dissensus.members import DeepEnsemble, SingleMember
from dissensus.members.probe import draws
from dissensus.objectives.objective import OutputObjective
from dissensus.training.feeds import Feed
from dissensus.training.rewriting import rewrite
from dissensus.training.step import State, TrainStep
from dissensus.training.undoing import clone

Program = Callable[..., Any]


def record(
    train_step: TrainStep, state: State, names: list[str], size: int, advance: bool = True
) -> torch.fx.GraphModule:
    """Return the step's tensor operations, with every named tensor of the state as an input that is changed in place."""

    def step(*tensors: Tensor) -> tuple[()]:
        train_step(dict(zip(names, tensors, strict=True)), size, advance=advance)
        return ()

    def scratch(weights: float) -> list[Tensor]:
        copies = clone(state, weights)
        return [copies[name] for name in names]

    return record_function(step, scratch, twice=has_foreign_code(train_step))


def record_function(
    function: Callable[..., object], scratch: Callable[[float], Sequence[Tensor]], *, twice: bool = False
) -> torch.fx.GraphModule:
    """Return the tensor operations of a function of tensors, gradients that it takes included.

    Args:
        function: What is recorded.
        scratch: Gives tensors to record it with, which it may change; a function of a factor on the weights.
        twice: Record it before with other weights, and refuse it if that gives another program.
    """
    before = _traced(function, scratch(1.01)) if twice else None
    program = _traced(function, scratch(1.0))
    if before is not None and not _same(before, program):
        raise RuntimeError("it does not do the same each time it is called")
    _refuse_random(program.graph)
    rewrite(program.graph)
    program.recompile()
    return program


def _traced(function: Callable[..., object], tensors: Sequence[Tensor]) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    # The dispatcher in Python takes decompositions that are the same on every device (no cuDNN BatchNorm, for one).
    with _NoValues(), _NoDynamicShapes(), torch._dispatch.python.enable_python_dispatcher():  # type: ignore[attr-defined]
        return make_fx(function)(*tensors)


def _same(a: torch.fx.GraphModule, b: torch.fx.GraphModule) -> bool:
    """Whether two recordings are one program, numbers in it included."""
    if a.code != b.code:
        return False
    kept, others = (
        {n.target: getattr(p, n.target) for n in p.graph.nodes if n.op == "get_attr"} for p in (a, b)
    )
    return all(torch.equal(kept[name], others[name]) for name in kept if isinstance(kept[name], Tensor))


# Packages whose networks do nothing but compute.
_TRUSTED = ("torch.", "dissensus.", "torchvision.", "timm.")


def has_foreign_code(train_step: TrainStep) -> bool:
    """Whether modules or the objective come from elsewhere, so that it is not known what else they do when they are called."""
    kinds = {type(module) for module in train_step.members.parts()} | {type(train_step.objective)}
    return not all(kind.__module__.startswith(_TRUSTED) for kind in kinds)


class _NoValues(TorchFunctionMode):
    """Refuses what would turn a tensor's present values into constants of the recording."""

    refused = (Tensor.tolist, Tensor.numpy, Tensor.__array__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.refused:
            raise RuntimeError("it reads the values of a tensor")
        return func(*args, **(kwargs or {}))


class _NoDynamicShapes(TorchDispatchMode):
    """Refuses results whose shapes depend on values: a recording would keep the shapes of its own batch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags and _picks_by_values(func, args):
            raise RuntimeError(f"shapes in it depend on values ({func})")
        return func(*args, **(kwargs or {}))


def _picks_by_values(func: Any, args: Any) -> bool:
    # The tag is on all indexing, for the sake of masks.
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _refuse_random(graph: torch.fx.Graph) -> None:
    """Refuse operations that draw from a generator: replayed they would not follow the run's seed."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and draws(node.target, node.args, node.kwargs):
            raise RuntimeError(f"it draws random numbers outside dropout layers ({node.target})")


def compile_program(program: torch.fx.GraphModule, combine: bool = False) -> Program:
    """Return the recorded program compiled for its shapes; gradients are part of it already.

    With `combine` small kernels that do not depend on each other are made into one.
    """
    compiled = torch.compile(program, dynamic=False, options={"combo_kernels": True} if combine else None)

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
    if not isinstance(members, DeepEnsemble):
        return f"only those of a deep ensemble can be; this is {type(members).__name__}"
    if not members.stacked:
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
