"""The contract of every member kind: inputs go in, `(members, batch, ...)` comes out."""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from threading import Lock, RLock
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from dissensus._signatures import whole_number
from dissensus.construction import describe
from dissensus.data.features import CachedFeatures
from dissensus.data.trees import WHOLE, Batch, Output, Tree, WholeOutput, expand_rows, inputs_of
from dissensus.members.stacking import (
    FASTER_APART,
    Shell,
    Tensors,
    average,
    check_nets,
    check_one_architecture,
    tensors_of,
)
from dissensus.randomness import derive, evaluating, fold

_locks: WeakKeyDictionary[Module, RLock] = WeakKeyDictionary()
_making_locks = Lock()
_whole_outputs = ContextVar("whole outputs", default=False)


@contextmanager
def evaluation_mode(members: Module) -> Iterator[None]:
    """Run a block in evaluation mode, without gradients, one thread at a time (others would see its modes); set all back."""
    with _making_locks:
        lock = _locks.setdefault(members, RLock())
    with lock, evaluating(members), torch.no_grad():
        yield


Keys = Callable[[], Tensor]


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that notes its arguments, unless one of a subclass did before."""

    @wraps(init)
    def noting(self: "Members", *args: Any, **options: Any) -> None:
        if "made_by" not in self.__dict__:
            given = inspect.signature(init).bind(self, *args, **options).arguments
            self.__dict__["made_by"] = (None, describe(dict(list(given.items())[1:])))
        init(self, *args, **options)

    return noting


class Members(nn.Module, ABC):
    """An ensemble as one module.

    A kind implements `run`, a function of the tensors it is given, and `member`, and declares what training must know.
    Everything else follows: the forward passes, picking some members, passes that leave no trace, and training with the
    tensors held elsewhere. `dissensus.testing.check_members` tells whether what a kind declares is true.

    Attributes:
        loss_over_members: What `fit` minimises: the `"sum"` of the members' losses, where no two members have a parameter in
            common, so that each moves as if it were alone; or their `"mean"`, where members are views of one network.
        own_batches: Whether each member can be given a batch of its own in training.
        prefers_shared_batches: Whether members share batches unless batches of their own are asked for.
        separate: Whether a member can be updated without the others: clipped, dropped, given its own learning rate, left
            exactly as it was in a step that does not train it.
        keeps_weights: Whether `after_epoch` makes members of the weights that training passes through.
        comparable: Whether every member gives outputs of its own in training, so that objectives can compare them.
        one_pass: Whether training may run one cheaper pass (`run_one_pass`) where the objective does not compare members.
        shared_buffers: Names of tensors that belong to no member and that no pass changes.
        decisive: Names of attributes that decide training beside the tensors; a checkpoint belongs to a run that has the same.
        output: What is scored of a network that returns several tensors: a key, an index or a function; see `data.trees`.
    """

    loss_over_members: ClassVar[Literal["sum", "mean"]] = "sum"
    own_batches: ClassVar[bool] = True
    prefers_shared_batches: ClassVar[bool] = False
    separate: ClassVar[bool] = True
    keeps_weights: ClassVar[bool] = False
    comparable: ClassVar[bool] = True
    _in_words: ClassVar[str] = (
        "an ensemble, such as a DeepEnsemble (networks become one by `ds.DeepEnsemble.from_members([net, ...])`)"
    )
    one_pass: bool = False
    shared_buffers: frozenset[str] = frozenset()
    decisive: ClassVar[tuple[str, ...]] = ()
    output: Output = None
    # How it was made: which constructor (None for the class itself) with which arguments, as JSON could keep them.
    made_by: tuple[str | None, dict[str, Any]] = (None, {})
    member_keys: Tensor
    # Each member's own module where members run one by one; they are not registered as modules of the ensemble.
    _shells: Sequence[Shell] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Have constructors of kinds note how they were called."""
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = _noting(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, num_members: int, seed: int, num_trained: int | None = None) -> None:
        super().__init__()
        self.num_members, self.seed = whole_number("num_members", num_members, 1), whole_number("seed", seed)
        self.member_ids: tuple[int, ...] = tuple(range(num_trained or self.num_members))
        self.register_buffer("member_keys", keys_of(self.seed, self.member_ids), persistent=False)
        self._passes = 0
        # What was found out with the first batch of a kind and holds for all that follow, as JSON could keep it.
        self.decisions: dict[str, dict[str, Any]] = {}

    @abstractmethod
    def run(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run members on the given tensors instead of the registered ones.

        Args:
            tensors: Parameters and buffers by registered name; buffers are updated in place in training.
            x: Inputs, a tensor or a `Tree` of them, `(batch, ...)`, or `(members, batch, ...)` if `own`.
            own: Whether each member has inputs of its own.
            rows: Which members the tensors belong to, `(picked,)`; None for all.
            keys: Gives the noise keys of the members that run, `(members,)`; called only where noise is needed.

        Returns:
            Outputs, `(members, batch, ...)`.
        """

    def run_one_pass(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run the cheaper pass of training, for kinds with `one_pass`; arguments as those of `run`.

        Returns:
            `(1, batch, ...)` where members share their parameters (each example meets one), else `(trained, batch, ...)`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no such pass.")

    @abstractmethod
    def member(self, index: int) -> nn.Module:
        """Return one member as an independent plain module with its current weights."""

    def forward(self, *x: Any, update_buffers: bool = True, **named: Any) -> Tensor:
        """Run all members on the same batch `(batch, ...)`; return `(members, batch, ...)`.

        A batch is one tensor, or several as the networks take them: `ens(a, b)` or `ens((a, b))`, `ens(ids=..., mask=...)` or
        `ens({"ids": ..., "mask": ...})`. Without `update_buffers` a pass of training leaves no trace in them (BatchNorm's statistics).
        """
        return self.view()(_inputs_of(x, named), update_buffers=update_buffers)

    def each(self, *x: Any, update_buffers: bool = True, **named: Any) -> Tensor:
        """Run each member on inputs of its own, `(members, batch, ...)`."""
        return self.view().each(_inputs_of(x, named), update_buffers=update_buffers)

    @property
    def picks(self) -> Output | WholeOutput:
        """What a pass returns of all that networks do: what is scored, or all of it inside `returning_all`."""
        return WHOLE if _whole_outputs.get() else self.output

    @contextmanager
    def returning_all(self, everything: bool = True) -> Iterator[None]:
        """Passes inside return all that networks do, as trees with `(members, batch, ...)` leaves."""
        token = _whole_outputs.set(everything)
        try:
            yield
        finally:
            _whole_outputs.reset(token)

    def pick(self, rows: Tensor | Sequence[int] | int) -> "View":
        """Return only these members, or this one; nothing of the others is computed."""
        return self.view().pick(rows)

    def view(self) -> "View":
        """Return the ensemble as it now is, for passes that pick, perturb or leave buffers alone."""
        self._passes += 1
        number = self._passes
        return View(
            self, dict(self.named_parameters()), dict(self.named_buffers()), keys=lambda: fold(self.member_keys, number)
        )

    def picked(self, view: "View", rows: Tensor) -> "View":
        """Return some members of a view, whose rows are gathered, and those of buffers put back after each pass of training."""
        return View(
            self,
            self.rows_of(view.parameters, rows),
            self.rows_of(view.buffers, rows),
            keys=lambda: view.keys()[rows],
            rows=rows if view.rows is None else view.rows[rows],
            together=True,
            whole=lambda: view,
            gathered=rows,
        )

    def identity(self) -> dict[str, str]:
        """Return texts by which a checkpoint recognises the ensemble beside its tensors: it belongs to a run that has the same."""
        settings = {name: getattr(self, name) for name in self.decisive}
        if self.output is not None:
            settings["output"] = getattr(self.output, "__qualname__", self.output)
        return {name: repr(value) for name, value in settings.items()}

    def reader(self, data: object) -> "Members":
        """Return what of the ensemble runs on this data, such as heads on features of their backbone."""
        return self

    def catch_up(self) -> None:
        """Follow changes of a part that trained in the ensemble's place, `reader`."""

    def check_beside(self, data: object, side: object, name: str) -> None:
        """Refuse further data of a run that do not go with its training data; `name` says what they are."""
        if isinstance(side, CachedFeatures) and isinstance(data, CachedFeatures) and side.of_another_backbone(data):
            raise ValueError(f"The {name} data are features of another backbone than the training data's. Cache both.")

    def see(self, inputs: Tensor) -> None:
        """Take from the training inputs of a recipe what the kind needs of them, before it trains."""

    def adapt(self, objective: Any) -> Any:
        """Return an objective as this kind trains with it, or say why it cannot."""
        if objective.couples and not self.comparable:
            raise ValueError(
                f"{type(objective).__name__} compares members, and {type(self).__name__} trains one network: there is nothing to "
                "compare. Take an objective such as Independent."
            )
        return objective

    def after_epoch(self, epoch: int, epochs: int) -> None:
        """Take note that so many epochs of a run are done; kinds that keep weights on the way do so here."""

    def after_training(self, data: Any) -> None:
        """Finish a run on this data, such as with statistics of BatchNorm layers that need another pass."""

    def why_not_single(self) -> str | None:
        """Say why one member's program on every member's tensors would not be the ensemble; None if it would."""
        return f"only those of a deep ensemble can be; this is {type(self).__name__}"

    def single(self) -> "Members":
        """Return an ensemble of one member without tensors of its own, for kinds that have no reason not to."""
        raise NotImplementedError(self.why_not_single())

    @property
    def faster_apart(self) -> bool:
        """Whether a batch was seen in training for which members run faster one by one."""
        return any(d.get("training") and d.get("why_loop") == FASTER_APART for d in self.decisions.values())

    def all_decisions(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return what this ensemble and those inside it have decided by now; a checkpoint keeps it."""
        return {name: dict(part.decisions) for name, part in self.named_modules() if isinstance(part, Members)}

    def decide_as(self, decided: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
        """Go by what was decided before, in another sitting, rather than finding it out again with other weights."""
        for name, part in self.named_modules():
            if isinstance(part, Members):
                part.decisions.update(decided.get(name, {}))

    def parts(self) -> Iterator[nn.Module]:
        """Yield the modules that a pass may run."""
        for module in self.modules():
            yield module
            for shell in module._shells if isinstance(module, Members) else ():
                yield from shell.net.modules()

    def keep_members(self, rows: Sequence[int] | Tensor) -> None:
        """Go on with these members only, in place; the others are gone. For kinds whose members are `separate`."""
        if not self.separate:
            raise ValueError(f"{type(self).__name__} members share their parameters, so none can be left out.")
        given = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        kept = [self.check_index(whole_number("rows", row)) for row in given]
        if not kept or len(set(kept)) < len(kept):
            raise ValueError(f"`rows` must name at least one member, each once, by number; got {given}.")
        self.member_ids, self.num_members = tuple(self.member_ids[row] for row in kept), len(kept)
        self.member_keys = keys_of(self.seed, self.member_ids).to(self.member_keys.device)
        for name, tensor in tensors_of(self).items() if self.stacked else ():
            if name not in {*self.shared_buffers, "member_keys"}:
                tensor.data, tensor.grad = tensor.data[kept].clone(), None

    def soup(self) -> nn.Module:
        """Return one plain module whose weights are the average of the members'.

        Float buffers are averaged too; integer ones are the first member's. Members must be of one architecture: the same
        modules, whose plain attributes (numbers, words, functions) are the same. Only rates of dropout may differ.
        """
        nets = [self.member(index) for index in range(self.num_members)]
        check_one_architecture(nets)
        return self.averaged(nets)

    def averaged(self, nets: Sequence[nn.Module]) -> nn.Module:
        """Return a plain module whose weights are the average of those of these members, as `member` returned them."""
        one = copy.deepcopy(nets[0])
        one.load_state_dict(average([net.state_dict() for net in nets]))
        return one

    @property
    def num_trained(self) -> int:
        """How many rows of parameters are trained; fewer than members where several members are one network's."""
        return len(self.member_ids)

    @property
    def stacked(self) -> bool:
        """Whether the first axis of every trained parameter is the member."""
        return self.separate

    def parameter_rows(self) -> list[tuple[list[int] | None, list[str]]]:
        """Return groups of parameter names with the members that own their rows; None where members are not `separate`."""
        shared = self.shared_buffers
        names = [name for name, _ in self.named_parameters() if name not in shared]
        return [(list(range(self.num_trained)) if self.separate else None, names)]

    def prefix(self, place: int) -> str:
        """Return what the registered names of a member's own tensors begin with, before their names in its network."""
        return f"nets.{place}." if self.separate and not self.stacked else "net."

    def rows_of(self, tensors: Tensors, rows: Tensor) -> dict[str, Tensor]:
        """Return copies of some members' rows of these tensors; what members share, or do not have as rows, as it is."""
        shared = self.shared_buffers if self.stacked else tensors
        return {name: t if name in shared else t.index_select(0, rows) for name, t in tensors.items()}

    def put_rows(self, tensors: Tensors, rows: Tensor, new: Tensors) -> None:
        """Write rows that `rows_of` gathered back, in place."""
        shared = self.shared_buffers if self.stacked else tensors
        for name, tensor in new.items():
            # Keys stay as they are; writing them back would cost each step two kernels on a GPU.
            if name not in shared and name.rpartition(".")[2] != "member_keys":
                tensors[name].index_copy_(0, rows, tensor)

    def sums_by_member(self, values: Tensors, view: "View") -> Tensor:
        """Return sums of values shaped like a view's trained parameters, one a member; of all of them where members share them."""
        if self.stacked:
            return torch.stack([value.flatten(1).sum(1) for value in values.values()]).sum(0)
        if not self.separate or self.num_trained == 1:
            return torch.stack([value.sum() for value in values.values()]).sum().expand(view.num_members)
        groups = ([values[name].sum() for name in names if name in values] for _, names in self.parameter_rows())
        found = torch.stack([torch.stack(own).sum() for own in groups])
        return found if view.rows is None else found[view.rows]

    def __len__(self) -> int:
        """How many members there are."""
        return self.num_members

    def __getitem__(self, index: int) -> nn.Module:
        """Return one member, as `member` does."""
        return self.member(self.check_index(whole_number("index", index), IndexError))

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield the members, as `member` returns them."""
        return (self.member(place) for place in range(self.num_members))

    def __repr__(self) -> str:
        """Return kind, number of members, parameters and device; a member, or `ens.net`, shows the layers."""
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{type(self).__name__}({self.num_members} members, {count:,} parameters, {self.member_keys.device})"

    def check_index(self, index: int, error: type[Exception] = ValueError) -> int:
        """Return a member's index as a non-negative number, or say that there is no such member."""
        if not -self.num_members <= index < self.num_members:
            raise error(f"There are members 0 to {self.num_members - 1}; got {index}.")
        return index % self.num_members


def as_members(value: Any, name: str = "members") -> Members:
    """Return an ensemble, or say what came instead."""
    if not isinstance(value, Members):
        raise ValueError(f"`{name}` must be {Members._in_words}; got {type(value).__name__}.")
    return value


def check_networks(nets: Sequence[nn.Module]) -> None:
    """Refuse what cannot be members' networks, ensembles among them: one inside a network draws by its own count of passes and members."""
    check_nets(nets)
    for net in nets:
        inside = next((module for module in net.modules() if isinstance(module, Members)), None)
        if inside is not None:
            where = "" if inside is net else f"{type(net).__name__} with a "
            raise ValueError(
                f"A member must be one network; got a {where}{type(inside).__name__}, an ensemble. Take one of its members, or make one "
                "ensemble of several networks, such as Anchored(make_net, references, num_nets=3)."
            )


def _inputs_of(parts: tuple[Any, ...], named: Mapping[str, Any]) -> Batch:
    """Return the batch that a call of an ensemble was given, or say that it is not one of tensors."""
    x = inputs_of(parts, named)
    for leaf in x.leaves if isinstance(x, Tree) else (x,):
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"An ensemble is called with tensors; got {type(leaf).__name__}. Pass torch.as_tensor(x), or take ds.predict(ens, x), "
                "which reads arrays."
            )
    return x


def keys_of(seed: int, member_ids: Sequence[int]) -> Tensor:
    """Return the base key of each member's noise, `(members,)`: a hash of (seed, member) and nothing else."""
    return torch.tensor([derive(seed, "member", index) for index in member_ids], dtype=torch.int64)


def under(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


class View:
    """All or some members, run on tensors that may live elsewhere; what an objective calls `members`."""

    def __init__(
        self,
        members: Members,
        parameters: Tensors,
        buffers: Tensors,
        *,
        keys: Keys,
        rows: Tensor | None = None,
        together: bool = False,
        whole: "Callable[[], View] | None" = None,
        gathered: Tensor | None = None,
    ) -> None:
        """Make a view; `together` asks for every member's outputs, `gathered` rows are put back in `whole` after training passes."""
        self.members, self.parameters, self.buffers = members, parameters, buffers
        self.rows, self.together, self._whole, self._gathered = rows, together, whole, gathered
        # Gives the noise keys of the members that run, `(members,)`, made when first needed.
        self.keys: Keys = cache(keys)
        self._pass = 0
        self._traceless = False
        self._next: Callable[..., Tensor] | None = None

    @property
    def in_one_pass(self) -> bool:
        """Whether passes are the cheaper ones of training, in which not every member gives an output."""
        return self.members.one_pass and self.training and not self.together

    @property
    def num_members(self) -> int:
        """How many members this view runs: the first axis of what it returns."""
        networks = self._networks
        if self.in_one_pass:
            return networks if self.members.separate else 1
        return networks if self.training else networks * (self.members.num_members // self.members.num_trained)

    @property
    def _networks(self) -> int:
        """How many rows of parameters this view has, or would have if members had rows of their own."""
        return self.members.num_trained if self.rows is None else len(self.rows)

    @property
    def training(self) -> bool:
        """Whether the members are in training mode."""
        return self.members.training

    @property
    def whole(self) -> "View":
        """All members, where this view has only some of them; those that a step does not train carry no gradient."""
        return self if self._whole is None else self._whole()

    def __call__(self, x: Batch, *, update_buffers: bool = True) -> Tensor:
        """Run on one batch for all, `(batch, ...)`; without `update_buffers` as inside `perturbed`."""
        with nullcontext() if update_buffers else self.perturbed():
            return self.through(None, x)

    def each(self, x: Batch, *, update_buffers: bool = True) -> Tensor:
        """Run each member on inputs of its own, `(members, batch, ...)`."""
        if x.ndim < 2 or len(x) != self.num_members:
            raise ValueError(
                f"`each` wants inputs shaped (members={self.num_members}, batch, ...); got {tuple(x.shape)}. "
                "For one batch shared by all members call the ensemble itself."
            )
        with nullcontext() if update_buffers else self.perturbed():
            return self.through(None, x, own=True)

    def next_through(self, run: Callable[..., Tensor]) -> None:
        """Have the next pass of training go through `run`, with the arguments of `Members.run`, instead of the usual one."""
        self._next = run

    def pass_keys(self) -> Tensor:
        """Return the noise keys of the last pass, `(members,)`: what it drew can be drawn again from them."""
        return fold(self.keys(), self._pass)

    def through(self, run: Callable[..., Tensor] | None, x: Batch, *, own: bool = False) -> Tensor:
        """Run a pass that a kind has beside its usual ones: a method of its with the arguments of `Members.run`; or the usual one."""
        buffers = self.buffers
        if self._traceless:
            constant = self.members.shared_buffers
            buffers = {name: b if name in constant else b.clone() for name, b in buffers.items()}
        else:
            self._pass += 1
        number = self._pass
        if run is None:
            run = self._next or (self.members.run_one_pass if self.in_one_pass else self.members.run)
            self._next = None
        tensors = {**self.parameters, **buffers}
        outputs = run(tensors, x, own=own, rows=self.rows, keys=lambda: fold(self.keys(), number))
        if self._gathered is not None and self.training and not self._traceless:
            self.members.put_rows(self.whole.buffers, self._gathered, self.buffers)
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
    def normalised_as_in_use(self) -> Iterator[None]:
        """Passes inside normalise by running statistics (BatchNorm as in evaluation) and leave no trace; gradients flow."""
        with self.perturbed(), ExitStack() as stack:
            for module in self.members.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    stack.enter_context(evaluating(module))
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Passes inside are those of evaluation: without gradients, dropout and any trace."""
        with self.perturbed(), evaluation_mode(self.members):
            yield

    def pick(self, rows: Tensor | Sequence[int] | int) -> "View":
        """Return a view of these members only; in training their buffers are written back after each pass.

        Numbers in a list are checked, and count from the end where they are negative; those in a tensor are taken as they are.
        """
        if not isinstance(rows, Tensor):
            rows = [self._row(row) for row in (rows if isinstance(rows, Iterable) else [rows])]
        return self.members.picked(self, torch.as_tensor(rows, device=self.members.member_keys.device))

    def _row(self, row: Any) -> int:
        """Return a number of one of the members to pick from as a non-negative one, or say that there is none."""
        number, count = whole_number("rows", row), self._networks if self.in_one_pass else self.num_members
        if not -count <= number < count:
            raise ValueError(f"`rows` must name members from 0 to {count - 1}; got {number}.")
        return number % count

    def input_gradient(self, fn: Callable[[Any], Tensor], x: Any) -> tuple[Tensor, Any]:
        """Return `fn(x)`, with its graph, and the gradient of its sum with respect to `x`.

        `x` is `(members, batch, ...)`: since member m's value depends on row m alone, the gradient of the sum holds every
        member's own gradient. Of a tree it is that of the real numbers in it, and None for others.
        """
        with torch.enable_grad():
            x = tree_map(lambda t: t.detach().requires_grad_(t.is_floating_point()), x)
            value = fn(x)
            real = [leaf for leaf in tree_leaves(x) if leaf.requires_grad]
            found = torch.autograd.grad(value.sum(), real, retain_graph=True, allow_unused=not isinstance(x, Tensor))
        gradients = {id(leaf): gradient for leaf, gradient in zip(real, found, strict=True)}
        return value, tree_map(lambda leaf: gradients.get(id(leaf)), x)

    def parameter_norms(self) -> Tensor:
        """Return the norm of each member's trainable parameters, `(members,)`: of all of them where members share them."""
        squares = {name: p.square() for name, p in self.parameters.items() if p.requires_grad}
        totals = self.members.sums_by_member(squares, self)
        # The slope of a root is infinite at zero, where that of the norm counts as zero.
        return totals.clamp_min(torch.finfo(totals.dtype).tiny).sqrt()

    def expand(self, x: Any) -> Any:
        """Give every member the same inputs as its own: `(batch, ...)` to `(members, batch, ...)`."""
        return expand_rows(x, self.num_members)
