"""The contract of every member kind: inputs go in, `(members, batch, ...)` comes out."""

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dissensus.members.dropout import KeyedDropout
from dissensus.members.modes import evaluation_mode
from dissensus.members.stacking import average, check_one_architecture
from dissensus.randomness import derive, fold

Keys = Callable[[], Tensor]
PythonState = list[tuple[nn.Module, str, object]]


class Members(nn.Module, ABC):
    """An ensemble as one module.

    A kind implements `run`, a function of the tensors it is given, and says whether each member owns its parameters
    (their first axis is then the member). Everything else follows: the forward passes, picking some members, passes that
    leave no trace, and training with the tensors held elsewhere.
    """

    owns_parameters: ClassVar[bool] = True
    # Whether training may run one cheaper pass (`run_one_pass`) where the objective does not compare members.
    one_pass: bool = False
    # Buffers that belong to no member and that no pass changes.
    shared_buffers: ClassVar[frozenset[str]] = frozenset()
    member_keys: Tensor

    def __init__(self, num_members: int, seed: int, num_trained: int | None = None) -> None:
        super().__init__()
        if num_members < 1:
            raise ValueError(f"An ensemble needs at least one member; got num_members={num_members}.")
        self.num_members = num_members
        self.seed = seed
        self.member_ids: tuple[int, ...] = tuple(range(num_trained or num_members))
        self.register_buffer("member_keys", keys_of(seed, self.member_ids), persistent=False)
        self._passes = 0

    @abstractmethod
    def run(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
        """Run members on the given tensors instead of the registered ones.

        Args:
            tensors: Parameters and buffers by registered name; buffers are updated in place in training.
            x: Inputs, `(batch, ...)`, or `(members, batch, ...)` if `own`.
            own: Whether each member has inputs of its own.
            rows: Which members the tensors belong to, `(picked,)`; None for all.
            keys: Gives the noise keys of the members that run, `(members,)`; called only where noise is needed.

        Returns:
            Outputs, `(members, batch, ...)`.
        """

    def run_one_pass(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
        """Run the cheaper pass of training, for kinds with `one_pass`; arguments as those of `run`.

        Returns:
            `(1, batch, ...)` where members share their parameters (each example meets one member), else
            `(trained, batch, ...)`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no such pass.")

    @abstractmethod
    def member(self, index: int) -> nn.Module:
        """Return one member as an independent plain module with its current weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Run all members on the same batch `(batch, ...)`; return `(members, batch, ...)`."""
        return self.view()(x)

    def each(self, x: Tensor) -> Tensor:
        """Run each member on inputs of its own, `(members, batch, ...)`."""
        return self.view().each(x)

    def pick(self, rows: Tensor | Sequence[int]) -> "View":
        """Return only these members; nothing of the others is computed."""
        return self.view().pick(rows)

    def view(self) -> "View":
        """Return the ensemble as it now is, for passes that pick, perturb or leave buffers alone."""
        self._passes += 1
        number = self._passes
        return View(
            self,
            dict(self.named_parameters()),
            dict(self.named_buffers()),
            keys=lambda: fold(self.member_keys, number),
        )

    def picked(self, view: "View", rows: Tensor) -> "View":
        """Return some members of a view."""
        return PickedView(view, rows)

    def settings(self) -> dict[str, object]:
        """Return settings of the kind that decide training beside the tensors: a checkpoint belongs to a run that has the same."""
        return {}

    def parts(self) -> Iterator[nn.Module]:
        """Yield the modules that a pass runs."""
        return self.modules()

    def python_state(self) -> PythonState:
        """Return what modules keep as attributes in Python, to see whether a pass changes it."""
        return plain_attributes(self)

    def training_state(self) -> PythonState:
        """Return the same of the modules that run in training, as far as that is known by now."""
        return self.python_state()

    def keep_members(self, rows: Sequence[int]) -> None:
        """Go on with these members only, in place; for kinds whose members own their parameters."""
        raise ValueError(f"{type(self).__name__} members share their parameters, so none can be left out.")

    def soup(self) -> nn.Module:
        """Return one plain module whose weights are the average of the members'.

        Float buffers are averaged too; integer ones are the first member's. Members must be of one architecture: the same
        modules, whose plain attributes (numbers, words, functions) are the same. Only rates of dropout may differ.
        """
        nets = [self.member(index) for index in range(self.num_members)]
        check_one_architecture(nets)
        nets[0].load_state_dict(average([net.state_dict() for net in nets]))
        return nets[0]

    @property
    def num_trained(self) -> int:
        """How many rows of parameters are trained; fewer than members where several members are one network's."""
        return len(self.member_ids)

    @property
    def stacked(self) -> bool:
        """Whether the first axis of every trained parameter is the member."""
        return self.owns_parameters

    def parameter_rows(self) -> list[tuple[list[int] | None, list[str]]]:
        """Return groups of parameter names with the members that own their rows; None where members share them."""
        names = [name for name, _ in self.named_parameters()]
        return [(list(range(self.num_trained)) if self.owns_parameters else None, names)]

    def rows_of(self, tensors: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        """Return copies of some members' rows of these tensors; what members share stays whole."""
        if not self.owns_parameters:
            return dict(tensors)
        return {name: tensor.index_select(0, rows) for name, tensor in tensors.items()}

    def put_rows(self, tensors: Mapping[str, Tensor], rows: Tensor, new: Mapping[str, Tensor]) -> None:
        """Write rows that `rows_of` gathered back, in place."""
        if not self.owns_parameters:
            return
        for name, tensor in new.items():
            tensors[name].index_copy_(0, rows, tensor)

    def check_index(self, index: int) -> int:
        """Return a member's index as a non-negative number, or say that there is no such member."""
        if not -self.num_members <= index < self.num_members:
            raise ValueError(f"There are members 0 to {self.num_members - 1}; got {index}.")
        return index % self.num_members


def plain_attributes(module: nn.Module) -> PythonState:
    """Return what modules keep in Python, except what belongs to our own bookkeeping; tensors by how often they were changed."""
    return [
        (part, key, found)
        for part in module.modules()
        if not isinstance(part, Members)
        for key, value in part.__dict__.items()
        if key not in _OF_MODULES and not (isinstance(part, KeyedDropout) and key != "p")
        # Our own layers are told by attributes what a pass is about.
        if isinstance(value, int | float | str) or not type(part).__module__.startswith("dissensus.")
        if (found := _snapshot(value)) is not None
    ] + [(part, "its hooks and mode", _hooks_and_mode(part)) for part in module.modules()]


def _hooks_and_mode(module: nn.Module) -> tuple[object, ...]:
    """Return the numbers of a module's hooks on its passes, and whether it is in training."""
    return (*module._forward_pre_hooks, None, *module._forward_hooks, module.training)


# What every module keeps for itself.
_OF_MODULES = frozenset(nn.Module().__dict__)


def _snapshot(value: object, depth: int = 3) -> object:
    """Return a picture of a value that no longer changes with it; None of what cannot be told."""
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, Tensor):
        # Not which tensor it is: networks that keep their last activation do no harm. One that reads it is recorded differently
        # the next time.
        return Tensor, None if value.is_inference() else value._version
    if depth == 0 or isinstance(value, nn.Module | type | ModuleType):
        return None
    if isinstance(value, Mapping):
        return tuple(
            (key, _snapshot(each, depth - 1)) for key, each in value.items() if isinstance(key, int | str)
        )
    if isinstance(value, set | frozenset):
        return frozenset(_snapshot(each, depth - 1) for each in value)
    if isinstance(value, list | tuple | deque):
        return tuple(_snapshot(each, depth - 1) for each in value)
    return _snapshot(vars(value), depth - 1) if hasattr(value, "__dict__") else None


@contextmanager
def kept_as_is(members: Members) -> Iterator[None]:
    """Give modules back, after a block, the numbers and words that they had, and what was in their lists and dictionaries."""
    before = members.python_state()
    boxes = [
        (box, copy.copy(box)) for part, key, _ in before if isinstance(box := part.__dict__.get(key), _BOXES)
    ]
    try:
        yield
    finally:
        for part, key, value in before:
            if isinstance(value, int | float | str):
                part.__dict__[key] = value
        for box, content in boxes:
            box.clear()
            box.extend(content) if isinstance(box, list | deque) else box.update(content)


_BOXES = (list, deque, dict, set)


def keys_of(seed: int, member_ids: Sequence[int]) -> Tensor:
    """Return the base key of each member's noise, `(members,)`: a hash of (seed, member) and nothing else."""
    return torch.tensor([derive(seed, "member", index) for index in member_ids], dtype=torch.int64)


class View:
    """All or some members, run on tensors that may live elsewhere; what an objective calls `members`."""

    def __init__(
        self,
        members: Members,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        *,
        keys: Keys,
        rows: Tensor | None = None,
        together: bool = False,
        whole: "Callable[[], View] | None" = None,
    ) -> None:
        """Make a view; `together` asks for every member's outputs where training could do with fewer."""
        self.members = members
        self._whole = whole
        self.together = together
        self.parameters, self.buffers = parameters, buffers
        self.rows = rows
        self._make_keys = keys
        self._keys: Tensor | None = None
        self._pass = 0
        self._traceless = False

    def keys(self) -> Tensor:
        """Return the noise keys of the members that run, `(members,)`, made when first needed."""
        if self._keys is None:
            self._keys = self._make_keys()
        return self._keys

    @property
    def in_one_pass(self) -> bool:
        """Whether passes are the cheaper ones of training, in which not every member gives an output."""
        return self.members.one_pass and self.training and not self.together

    @property
    def num_members(self) -> int:
        """How many members this view runs: the first axis of what it returns."""
        if self.in_one_pass and not self.members.owns_parameters:
            return 1
        networks = self.members.num_trained if self.rows is None else len(self.rows)
        return (
            networks if self.training else networks * (self.members.num_members // self.members.num_trained)
        )

    @property
    def training(self) -> bool:
        """Whether the members are in training mode."""
        return self.members.training

    @property
    def whole(self) -> "View":
        """All members, where this view has only some of them; those that a step does not train carry no gradient."""
        return self if self._whole is None else self._whole()

    def __call__(self, x: Tensor) -> Tensor:
        """Run on one batch for all, `(batch, ...)`."""
        return self._forward(x, own=False)

    def each(self, x: Tensor) -> Tensor:
        """Run each member on inputs of its own, `(members, batch, ...)`."""
        if x.ndim < 2 or len(x) != self.num_members:
            raise ValueError(
                f"`each` wants inputs shaped (members={self.num_members}, batch, ...); got {tuple(x.shape)}. "
                "For one batch shared by all members call the ensemble itself."
            )
        return self._forward(x, own=True)

    def through(self, run: Callable[..., Tensor], x: Tensor, *, own: bool = False) -> Tensor:
        """Run a pass that a kind has beside its usual ones: a method of its with the arguments of `Members.run`."""
        return self._forward(x, own, run)

    def pass_keys(self) -> Tensor:
        """Return the noise keys of the last pass, `(members,)`: what it drew can be drawn again from them."""
        return fold(self.keys(), self._pass)

    def _forward(self, x: Tensor, own: bool, run: Callable[..., Tensor] | None = None) -> Tensor:
        buffers = self.buffers
        if self._traceless:
            constant = self.members.shared_buffers
            buffers = {name: b if name in constant else b.clone() for name, b in buffers.items()}
        else:
            self._pass += 1
        number = self._pass
        if run is None:
            run = self.members.run_one_pass if self.in_one_pass else self.members.run
        outputs: Any = run(
            {**self.parameters, **buffers}, x, own=own, rows=self.rows, keys=lambda: fold(self.keys(), number)
        )
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"A member must return one tensor; got {type(outputs).__name__}. Wrap it in a module that returns the tensor."
            )
        return outputs

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Passes inside leave no trace in buffers (BatchNorm statistics) and repeat the noise of the last pass."""
        before, self._traceless = self._traceless, True
        try:
            yield
        finally:
            self._traceless = before

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Passes inside are those of evaluation: without gradients, dropout and any trace."""
        with self.perturbed(), evaluation_mode(self.members):
            yield

    def pick(self, rows: Tensor | Sequence[int]) -> "View":
        """Return a view of these members only; in training their buffers are written back after each pass."""
        return self.members.picked(self, torch.as_tensor(rows, device=self.members.member_keys.device))

    def input_gradient(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `fn(x)`, with its graph, and the gradient of its sum with respect to `x`.

        `x` is `(members, batch, ...)`: since member m's value depends on row m alone, the gradient of the sum holds every
        member's own gradient.
        """
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = fn(x)
            (gradient,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
        return value, gradient.detach()

    def parameter_norms(self) -> Tensor:
        """Return the norm of each member's trainable parameters, `(members,)`: of all of them where members share them."""
        squares = {name: p.square() for name, p in self.parameters.items() if p.requires_grad}
        if not self.members.owns_parameters:
            totals = torch.stack([square.sum() for square in squares.values()]).sum().expand(self.num_members)
        elif self.members.stacked:
            totals = torch.stack([square.flatten(1).sum(1) for square in squares.values()]).sum(0)
        else:
            rows = self.members.parameter_rows()
            groups = [list(squares)] if self.num_members == 1 else [names for _, names in rows]
            if len(groups) != self.num_members:
                raise ValueError(
                    "The norm of each member's parameters is asked for, and these members share theirs."
                )
            sums = [[squares[name].sum() for name in names if name in squares] for names in groups]
            totals = torch.stack([torch.stack(each).sum() for each in sums])
        # The slope of a root is infinite at zero, where that of the norm counts as zero.
        return totals.clamp_min(torch.finfo(totals.dtype).tiny).sqrt()

    def expand(self, x: Tensor) -> Tensor:
        """Give every member the same inputs as its own: `(batch, ...)` to `(members, batch, ...)`."""
        return x.expand(self.num_members, *x.shape)


class PickedView(View):
    """Rows of another view, gathered for a pass and scattered back."""

    def __init__(self, whole: View, rows: Tensor) -> None:
        members = whole.members
        super().__init__(
            members,
            members.rows_of(whole.parameters, rows),
            members.rows_of(whole.buffers, rows),
            keys=lambda: whole.keys()[rows],
            rows=rows if whole.rows is None else whole.rows[rows],
            together=True,
            whole=lambda: whole,
        )
        self.local_rows = rows

    def _forward(self, x: Tensor, own: bool, run: Callable[..., Tensor] | None = None) -> Tensor:
        outputs = super()._forward(x, own, run)
        if self.training and not self._traceless:
            self.members.put_rows(self.whole.buffers, self.local_rows, self.buffers)
        return outputs
