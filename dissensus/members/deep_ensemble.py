"""Deep ensembles: members with weights of their own, stored stacked and run as one program where that is the same."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dissensus._signatures import checked
from dissensus.construction import describe, told_how
from dissensus.data.trees import Output, call, check_unwritten, pick, signature, writes
from dissensus.engines.graphs import for_each_member
from dissensus.engines.watching import Attributes, look_at
from dissensus.members.members import Keys, Members, check_networks, under
from dissensus.members.shared import fastest_layout
from dissensus.members.stacking import (
    FASTER_APART,
    PROBE_MEMBERS,
    PROBE_ROWS,
    RulesOfVmap,
    Shell,
    Tensors,
    attributes_of,
    can_stack,
    copies_of,
    has_layer,
    join,
    news_of,
    own_states,
    quiet_weights,
    stack,
    tensors_of,
    twin,
    why_another,
    why_not_one_program,
    why_not_vectorised,
)
from dissensus.nets.dropout import KeyedDropout, dropout_keys, key_dropout, plain_dropout, rewind_dropout
from dissensus.randomness import derive, seeded

# Operations of one member on a batch from which on, on a CPU, that is so: 0.6 to 0.8 of the time together with 13 million and
# fewer, equal at 22 million, 1.0 to 1.4 times as long with more (networks of 4 to 64 channels, one thread).
MUCH_WORK = 2e7
# On a CPU one large product of matrices is faster than its share of a batch of products.
LARGE_BATCH = 512

Execution = Literal["auto", "vectorised", "loop"]


@checked
class DeepEnsemble(Members):
    """Independent networks of any kind as one module: `forward(x)` gives `(members, batch, ...)`.

    Networks whose tensors have the same names and shapes are stored as one set of tensors with a leading member axis.
    With `execution="auto"` they run vectorised (`torch.func.vmap`) if a probe on the first batch shows that this gives
    the loop's outputs, buffers and gradients, and in a loop otherwise; `execution_reason` then says why.

    Args:
        make_member: Makes one new network each time it is called.
        num_members: How many to make.
        seed: Member j's initial weights depend on `(seed, j)` only.
        execution: `"auto"`, or `"vectorised"` / `"loop"` to decide yourself.
        output: What is scored of networks that return several tensors: a key, an index or a function.

    Example:
        >>> ens = DeepEnsemble(lambda: nn.Linear(3, 2), num_members=5, seed=0)
        >>> ens(torch.zeros(8, 3)).shape
        torch.Size([5, 8, 2])
    """

    def __init__(
        self,
        make_member: Callable[[], nn.Module],
        num_members: int = 5,
        seed: int = 0,
        *,
        execution: Execution = "auto",
        output: Output = None,
    ) -> None:
        super().__init__(num_members, seed)
        self.output = output
        if isinstance(make_member, nn.Module):
            raise ValueError(
                "`make_member` must be a function that makes a network; got a network. Write `lambda: Net(...)`, or use "
                "DeepEnsemble.from_members([...]) for networks that exist already."
            )
        nets = []
        for index in range(num_members):
            with seeded(derive(seed, "initial weights", index), alone=True):
                nets.append(make_member())
        self._adopt(nets, execution)

    @classmethod
    def from_members(
        cls, nets: Sequence[nn.Module], seed: int = 0, *, execution: Execution = "auto", output: Output = None
    ) -> "DeepEnsemble":
        """Make an ensemble of networks that exist already, trained or not, of one architecture or several.

        The networks are copied. Those of different architectures run in a loop and need only give outputs of one shape.
        """
        # An nn.Sequential is one network: its layers are not members.
        several = isinstance(nets, nn.ModuleList) or (isinstance(nets, Iterable) and not isinstance(nets, nn.Module))
        if not several or not (nets := list(nets)):
            got = "an empty one" if several else type(nets).__name__
            raise ValueError(f"`from_members` wants a list of networks, from_members([net_a, net_b]); got {got}.")
        ensemble = cls.__new__(cls)
        Members.__init__(ensemble, len(nets), seed)
        given = {"nets": nets, "seed": seed, "execution": execution, "output": output}
        ensemble.made_by, ensemble.output = ("from_members", describe(given)), output
        ensemble._adopt(nets, execution)
        return ensemble

    def _adopt(self, nets: list[nn.Module], execution: Execution) -> None:
        check_networks(nets)
        if execution not in ("auto", "vectorised", "loop"):
            raise ValueError(f"`execution` must be 'auto', 'vectorised' or 'loop'; got {execution!r}.")
        self.execution: Execution = execution
        self.training = nets[0].training
        self.net: nn.Module | None = None
        self.nets: nn.ModuleList | None = None
        # Twins: what a factory returns may be somebody's network, which must stay as it is.
        nets = [key_dropout(told_how(twin(net))) for net in nets]
        self._embeds, self._recurs = has_layer(nets, nn.Embedding), has_layer(nets, nn.RNNBase)
        self._drops = has_layer(nets, KeyedDropout)
        self.why_different = self._store(nets)
        # Keys of members and of dropout layers go where the networks are.
        self.to(next((p.device for net in nets for p in net.parameters()), self.member_keys.device))
        self._shells = [Shell(net) for net in nets]
        # Attributes of the registered networks as members' own modules were last told of them.
        self._shown = [attributes_of(self._registered(j)) for j in range(1 if self.nets is None else len(nets))]

    def _store(self, nets: list[nn.Module]) -> str | None:
        """Register networks, as one where that can be; say why one member's module is not every member's, tensors apart."""
        with_states = any(map(own_states, nets))
        if can_stack(nets) and not with_states:
            self.net = stack(nets)
            return why_not_one_program(nets)
        self.nets = nn.ModuleList(copy.deepcopy(net) for net in nets)
        if not with_states:
            return "members have different architectures"
        # A state dict holds the state of each registered network.
        self.register_load_state_dict_post_hook(_hand_on_states)  # type: ignore[no-untyped-call]
        return "members keep a state of their own beside tensors"

    @property
    def construction(self) -> list[Any]:
        """How each network was made: an ensemble that is handed over stands for the list of them."""
        return [describe(shell.net) for shell in self._shells]

    def why_not_single(self) -> str | None:
        """Say why one member's program would not be every member's; None if it would."""
        return "members are not stored as one" if not self.stacked else self.why_different

    def single(self) -> Members:
        """Return one member that runs tensors it is handed."""
        return SingleMember(self)

    @property
    def execution_reason(self) -> str | None:
        """Why members run in a loop, as found for the newest kind of batch; None if they do not."""
        why: str | None = next(reversed(self.decisions.values()), {"why_loop": None})["why_loop"]
        return why

    def networks(self) -> list[nn.Module]:
        """Return what a pass calls: each member's own module, and the one that stands for all."""
        return [shell.net for shell in self._shells] + ([] if self.net is None else [self.net])

    def run(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run members on the given tensors; see `Members.run`."""
        decision = self._decide(tensors, x, own, rows, keys)
        if decision["why_loop"] is None or self._has_changed():
            return self._run_vectorised(tensors, x, own, keys)
        return self._run_loop(tensors, x, own, rows, keys, random=decision["random"])

    def _decide(self, tensors: Tensors, x: Any, own: bool, rows: Tensor | None, keys: Keys) -> dict[str, Any]:
        kind_of_batch = " ".join(
            [
                "training" if self.training else "evaluating",
                "own" if own else "shared",
                f"{(x.shape[1 + own :], x.dtype) if isinstance(x, Tensor) else signature(x, 1 + own)} {x.device.type}",
                "autocast" if torch.is_autocast_enabled(x.device.type) else "plain",
                "large" if self._is_large(x, own) else "any size",
            ]
        )
        if kind_of_batch not in self.decisions:
            with seeded(0, alone=True), Attributes(self.parts()), self.returning_all(False):
                why, random = self._probe(tensors, x, own, rows, keys)
            self.decisions[kind_of_batch] = {"training": self.training, "why_loop": why, "random": random}
            self.release()  # of the copies that the probe lent
        return self.decisions[kind_of_batch]

    def _probe(self, tensors: Tensors, x: Any, own: bool, rows: Tensor | None, keys: Keys) -> tuple[str | None, bool]:
        """Return why members run in a loop, None if they do not, and whether they draw random numbers."""
        if self.execution == "vectorised":
            return None, False
        picked = (torch.arange(self.num_members, device=x.device) if rows is None else rows)[:PROBE_MEMBERS]
        count = len(picked)
        weights, buffers = self._of_few(tensors, count)
        with torch.inference_mode(False):  # a copy that says whether the network writes into it
            inputs = (x[:count, :PROBE_ROWS] if own else x[:PROBE_ROWS]).detach().clone()

        def loop(given: Tensors, batch: Any) -> Tensor:
            return self._run_loop(given, batch, own, picked, lambda: keys()[:count], random=False)

        def vectorised(given: Tensors, batch: Any) -> Tensor:
            return self._run_vectorised(given, batch, own, lambda: keys()[:count])

        tried = copies_of(weights)
        drawn, work = look_at(lambda: loop(tried | copies_of(buffers), inputs))
        # Further copies only for passes that write to weights: they may be most of the memory.
        changes = not all(map(torch.equal, tried.values(), weights.values()))

        def for_an_attempt() -> Tensors:
            return copies_of(weights) if changes else tried

        # Of one member on the whole batch.
        work *= x.shape[int(own)] / max(inputs.shape[int(own)], 1) / count
        trainable = {name for name, p in self.named_parameters() if p.requires_grad and self.training}
        why = (
            self._why_apart(drawn)
            or why_not_vectorised(loop, vectorised, for_an_attempt, buffers, inputs, trainable)
            or self._why_faster_apart(x, own, work)
        )
        return why, bool(drawn)

    def _of_few(self, tensors: Tensors, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return weights and buffers of the first members, or all where they are not stored as one."""
        few = {name: t.detach()[:count] if self.stacked else t.detach() for name, t in tensors.items()}
        return {name: few.pop(name) for name, _ in self.named_parameters() if name in few}, few

    def _why_apart(self, drawn: Collection[str]) -> str | None:
        """Say why members cannot run as one program, as far as that is known without trying it."""
        if self.execution == "loop":
            return "execution='loop' was asked for"
        if self.why_different is not None:
            return self.why_different
        if drawn:
            return f"it draws random numbers outside dropout layers ({', '.join(sorted(drawn))})"
        bags = [n for n, m in self.named_modules() if isinstance(m, nn.EmbeddingBag) and m.padding_idx is not None]
        # Whatever a probe's few rows show: vmap leaves the row alone for the first member only.
        return f"vmap trains the padding row of the embedding {bags[0]!r}" if bags and self.training else None

    def _why_faster_apart(self, x: Any, own: bool, work: float) -> str | None:
        """Say why members run faster one by one, by a rule: a run must not depend on what else the machine did."""
        # In training a GPU waits for launches, of which one program makes fewer; in evaluation it does not.
        slow = not self.training if x.is_cuda else work >= MUCH_WORK
        if slow and any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in self.modules()):
            return FASTER_APART
        return "large batches are faster one member at a time on a CPU" if self._is_large(x, own) else None

    def _is_large(self, x: Any, own: bool) -> bool:
        predicts = not self.training and not torch.is_grad_enabled()
        return predicts and x.device.type == "cpu" and x.shape[int(own)] >= LARGE_BATCH

    def _run_vectorised(self, tensors: Tensors, x: Any, own: bool, keys: Keys) -> Tensor:
        net = self.net
        if net is None:
            raise ValueError("Members of different architectures cannot run vectorised. Leave `execution` at 'auto'.")
        stacked = under("net.", tensors) | (dropout_keys(net, keys) if self._drops else {})

        def run_one(one: dict[str, Tensor], batch: Any) -> Any:
            # One tensor in and one out is all there is to it; the probe has called it as any other network.
            if isinstance(batch, Tensor):
                returned = functional_call(net, one, (batch,))
            else:
                returned = call(lambda *parts, **named: functional_call(net, one, parts, named), batch)
            return returned if isinstance(returned, Tensor) and self.output is None else pick(returned, self.picks)

        mended = self._embeds or torch.is_autocast_enabled(x.device.type)
        untried = self.execution == "vectorised"
        before = writes(x) if untried else ()
        with _quiet_vmap(), RulesOfVmap() if mended else nullcontext():
            outputs: Tensor = vmap(run_one, in_dims=(0, 0 if own else None), randomness="error")(stacked, x)
        if untried:
            check_unwritten(x, before)
        if self._drops:
            rewind_dropout(net)
        return outputs

    def _run_loop(self, tensors: Tensors, x: Any, own: bool, rows: Tensor | None, keys: Keys, random: bool) -> Tensor:
        members = list(range(self.num_members)) if rows is None else rows.tolist()
        self._follow(members)
        seeds = keys().tolist() if random and self.training else None
        split = self._split(tensors, members)
        outputs: list[Any] = [None] * len(members)

        def run(place: int) -> None:
            shell, batch = self._shells[members[place]], x[place] if own else x
            with nullcontext() if seeds is None else seeded(seeds[place], alone=True):
                outputs[place] = shell.run(split[place], batch, lambda: keys()[place], self.picks)

        with quiet_weights(self._recurs):
            for_each_member(run, len(members))
        return join(outputs)

    def _has_changed(self) -> bool:
        """Whether somebody hooked the network that stands for all, or put another layer in: members' own modules do not know."""
        if self.training or self.net is None or self.why_different is not None:
            return False
        return why_another(self.net, self._shells[0].net, ()) is not None

    def _registered(self, member: int) -> nn.Module:
        """Return the network that is registered for a member: its own, or the one that stands for all."""
        return cast("nn.Module", self.net if self.nets is None else self.nets[member])

    def _follow(self, members: Sequence[int]) -> None:
        """Have members' own modules keep what was changed in the registered ones, and those of these members train or evaluate likewise."""
        for place in [0] if self.nets is None else members:
            news, self._shown[place] = news_of(self._registered(place), self._shown[place])
            if any(news):
                for shell in self._shells if self.nets is None else [self._shells[place]]:
                    for module, new in zip(shell.net.modules(), news, strict=True):
                        module.__dict__.update(new)
        for member in members:
            for module, shown in zip(
                self._shells[member].net.modules(), self._registered(member).modules(), strict=True
            ):
                if module.training is not shown.training:
                    module.training = shown.training

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DeepEnsemble":
        """Change dtype or device of all tensors, also of plain ones that networks change by themselves."""
        for shell in self._shells:
            shell.release()
            shell.apply_to_constants(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _split(self, tensors: Tensors, members: Sequence[int]) -> list[dict[str, Tensor]]:
        if self.nets is not None:
            return [under(f"nets.{m}.", tensors) for m in members]
        # unbind, not indexing: its backward is one stack, where M selections would each fill a whole tensor.
        split = {name: t.unbind(0) for name, t in under("net.", tensors).items()}
        return [{name: parts[place] for name, parts in split.items()} for place in range(len(members))]

    @property
    def stacked(self) -> bool:
        """Whether members are stored as one; those of different architectures are not."""
        return self.net is not None

    def parameter_rows(self) -> list[tuple[list[int] | None, list[str]]]:
        """Return parameter names with the members that own them."""
        if self.nets is None:
            return super().parameter_rows()
        return [
            ([index], [f"nets.{index}.{name}" for name, _ in net.named_parameters()])
            for index, net in enumerate(self.nets)
        ]

    def member(self, index: int) -> nn.Module:
        """Return one member as an independent plain module with its current weights."""
        index = self.check_index(index)
        self._follow([index])
        row = self._split(tensors_of(self), range(self.num_members))[index]
        return plain_dropout(self._shells[index].materialise(row)).train(self.training)

    def keep_members(self, rows: Sequence[int] | Tensor) -> None:
        """Go on with these members only, in place; the others are gone."""
        before = self.member_ids
        super().keep_members(rows)
        places = [before.index(member) for member in self.member_ids]
        self._shells = [self._shells[place] for place in places]
        if self.nets is not None:
            self._shown = [self._shown[place] for place in places]
            self.nets = nn.ModuleList(self.nets[place] for place in places)

    def release(self) -> None:
        """Have each member's own modules let go of the tensors they were lent, and train or evaluate as the registered ones do."""
        for shell in self._shells:
            shell.release()
        self._follow(range(self.num_members))

    def __getstate__(self) -> dict[str, Any]:
        self.release()
        return self.__dict__


def _hand_on_states(ensemble: DeepEnsemble, _: object) -> None:
    """Have members' own modules take over what loading restored of the registered ones beside tensors."""
    for shell, net in zip(ensemble._shells, ensemble.nets or (), strict=True):
        for own, registered in zip(own_states(shell.net), own_states(net), strict=True):
            own.set_extra_state(registered.get_extra_state())


@contextmanager
def _quiet_vmap() -> Iterator[None]:
    """Keep torch from warning of operations that vmap runs one by one: whether that pays is for the probe to say."""
    switch = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    switch(False)
    try:
        yield
    finally:
        switch(True)


class SingleMember(Members):
    """Runs one member's tensors, which come with every call: with it a step is recorded that each member runs on its own."""

    def __init__(self, ensemble: DeepEnsemble) -> None:
        super().__init__(1, ensemble.seed)
        self.training, self.output = ensemble.training, ensemble.output
        ensemble.release()
        self._shells = [copy.deepcopy(ensemble._shells[0])]

    @property
    def stacked(self) -> bool:
        """Tensors have no member axis."""
        return False

    def run(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run the member on its tensors; see `Members.run`."""
        x = fastest_layout(x[0] if own else x)
        output: Tensor = self._shells[0].run(under("net.", tensors), x, lambda: keys()[0], self.picks)
        return output.unsqueeze(0)

    def member(self, index: int) -> nn.Module:
        """There is no weight to give; ask the ensemble."""
        raise ValueError("A recorded member has no weights of its own; call `member` on the ensemble.")


class OnDeepEnsemble(Members):
    """A kind whose trained parameters are those of a deep ensemble inside it, under the name `rows_in`."""

    rows_in: ClassVar[str]

    @property
    def _rows(self) -> DeepEnsemble:
        return cast("DeepEnsemble", self.get_submodule(self.rows_in))

    @property
    def stacked(self) -> bool:
        """Whether the networks inside are stored as one."""
        return self._rows.stacked

    @property
    def execution_reason(self) -> str | None:
        """Why the networks inside run in a loop; None if they do not."""
        return self._rows.execution_reason

    def parameter_rows(self) -> list[tuple[list[int] | None, list[str]]]:
        """Return the names of parameters inside with the networks that own them."""
        return [(rows, [f"{self.rows_in}.{name}" for name in names]) for rows, names in self._rows.parameter_rows()]

    def prefix(self, place: int) -> str:
        """Return what the registered names of a network's own tensors begin with."""
        return f"{self.rows_in}.{self._rows.prefix(place)}"

    def keep_members(self, rows: Sequence[int] | Tensor) -> None:
        """Go on with these networks only, in place; the others are gone."""
        self._rows.keep_members(rows)
        self.catch_up()

    def catch_up(self) -> None:
        """Have as many members as the networks inside make, also where some of them were dropped in training."""
        each = self.num_members // self.num_trained
        self.member_ids, self.member_keys = self._rows.member_ids, self._rows.member_keys.clone()
        self.num_members = each * self.num_trained
