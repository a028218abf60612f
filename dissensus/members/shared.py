"""Kinds whose members are one network seen in several ways: all members' examples are rows of one batch."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import functional_call
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from dissensus._signatures import whole_number
from dissensus.construction import told_how
from dissensus.data import trees
from dissensus.data.trees import Batch, Output, Tree, WholeOutput, pick, repeat_rows
from dissensus.engines.watching import Attributes, look_at
from dissensus.members.members import Keys, Members, check_networks, under
from dissensus.members.stacking import Tensors, copies_of, has_layer, keep_weights_apart, quiet_weights
from dissensus.nets.dropout import dropout_keys, key_dropout, plain_dropout, put_layer, rewind_dropout
from dissensus.randomness import derive, seeded

BatchUse = Literal["split", "whole"]


class PerRow(nn.Module):
    """A layer that treats rows of a batch by the member they belong to."""

    # Set by the ensemble before each pass; they stay after it, as activation checkpointing runs layers again.
    rows: Tensor | None = None

    def copies(self, x: Tensor) -> int:
        """Return how often each row of the batch stands on the first axis of `x`, or say that the batch is not there."""
        if self.rows is None:
            raise ValueError("This layer belongs to an ensemble and runs only inside it; use `ens.member(j)`.")
        # A net may fold positions into its batch axis, as long as each example's rows stay together.
        copies, rest = divmod(len(x), max(len(self.rows), 1))
        if rest:
            raise self._misplaced(x, "")
        return copies

    def take(self, values: Tensor, x: Tensor, axis: int) -> Tensor:
        """Return each row's own values, `(members, features)`, shaped to multiply `x` along `axis`."""
        copies = self.copies(x)
        if x.shape[axis] != values.shape[1]:
            raise self._misplaced(x, f" and {values.shape[1]} features on axis {axis}")
        taken = values.index_select(0, cast("Tensor", self.rows))
        if copies > 1:
            taken = taken.repeat_interleave(copies, 0)
        shape = [1] * x.ndim
        shape[0], shape[axis] = len(x), values.shape[1]
        return taken.reshape(shape)

    def _misplaced(self, x: Tensor, more: str) -> ValueError:
        return ValueError(
            f"A layer of an ensemble wants the batch, {len(cast('Tensor', self.rows))} rows, on the first axis of its input{more}; got a "
            f"tensor shaped {tuple(x.shape)}. Put the batch first (batch_first=True in torch's layers), or make a DeepEnsemble."
        )

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "rows"}


class OwnLayer(PerRow, ABC):
    """A layer of which members have parameters of their own; rows of a batch are member after member."""

    def check_rows(self, x: Tensor, num_members: int) -> None:
        """Refuse inputs whose first axis is not that of the batch, of which members could not be told apart."""
        if num_members > 1:
            self.copies(x)

    @abstractmethod
    def alone(self, index: int) -> nn.Module:
        """Return one member's layer as a module of its own."""


class SharedMembers(Members):
    """One network whose layers know which member a row belongs to; members run as rows of one batch.

    Where the objective does not compare members, `batches` says what one sees of a training batch: a share (`"split"`) or the `"whole"`.
    """

    loss_over_members: ClassVar[Literal["sum", "mean"]] = "mean"
    own_batches: ClassVar[bool] = False
    separate: ClassVar[bool] = False
    decisive: ClassVar[tuple[str, ...]] = ("batches",)

    def __init__(self, net: nn.Module, num_members: int, seed: int, batches: BatchUse, output: Output = None) -> None:
        super().__init__(num_members, seed)
        self.output = output
        self.batches: BatchUse = batches
        self.one_pass = batches == "split"
        self.net = key_dropout(net)
        self.training = net.training
        for module in self.net.modules():
            keep_weights_apart(module)
        self._recurs = has_layer([self.net], nn.RNNBase)
        self._per_row = [module for module in self.net.modules() if isinstance(module, PerRow)]

    def run(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run members as rows of one batch, member after member; see `Members.run`."""
        members = torch.arange(self.num_members, device=x.device) if rows is None else rows
        count, batch = len(members), x.shape[1] if own else x.shape[0]
        every = x.flatten(0, 1) if own else repeat_rows(x, count)
        owners = members[:, None].expand(count, batch).reshape(-1)
        return self.run_rows(tensors, every, owners, keys).unflatten(0, (count, batch))

    def run_one_pass(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Give each member its share of the batch: row i of B meets member `i * M // B`, turned by a random number."""
        x = x[0] if own else x
        members = torch.arange(self.num_members, device=x.device) if rows is None else rows
        # Turned anew in every step, so that batches smaller than the ensemble reach all members.
        place = torch.arange(len(x), device=x.device) * len(members) // max(len(x), 1)
        turn = keys()[0].remainder(len(members))
        owners = members.index_select(0, (place + turn).remainder(len(members)))
        return self.run_rows(tensors, x, owners, keys).unsqueeze(0)

    def run_rows(self, tensors: Tensors, x: Batch, owners: Tensor, keys: Keys) -> Tensor:
        """Run rows that each belong to a member, `owners`; return their outputs."""
        if self.net.training and "training" not in self.decisions:
            # Whether the network draws random numbers that are not a dropout layer's.
            with seeded(0, alone=True), Attributes(self.parts()), torch.no_grad():
                drawn, _ = look_at(lambda: self._run_net(copies_of(tensors), x.detach().clone(), owners, keys))
            self.decisions["training"] = {"random": bool(drawn)}
        random = self.net.training and self.decisions["training"]["random"]
        with seeded(keys().tolist()[0], alone=True) if random else nullcontext():
            return self._run_net(tensors, x, owners, keys)

    def _run_net(self, tensors: Tensors, x: Batch, owners: Tensor, keys: Keys) -> Tensor:
        own = under("net.", tensors) | dropout_keys(self.net, lambda: keys()[0])
        for layer in self._per_row:
            layer.rows = owners
        with layers_as_written(), quiet_weights(self._recurs):
            outputs = call(self.net, own, fastest_layout(x), self.picks)
        rewind_dropout(self.net)
        return outputs

    def member(self, index: int) -> nn.Module:
        """Return one member as an independent plain module: a copy of the network with that member's layers."""
        index = self.check_index(index)
        net = copy.deepcopy(self.net)
        for name, layer in list(net.named_modules()):
            if isinstance(layer, OwnLayer):
                net = put_layer(net, name, layer.alone(index))
        return plain_dropout(net).train(self.net.training)

    def soup(self) -> nn.Module:
        """Return the average of members that have weights of their own; there is none of views of one network."""
        if self.loss_over_members == "sum":
            return super().soup()
        raise ValueError(f"{type(self).__name__} members share their weights: average their predictions, or take one.")


def has_values(x: Any) -> bool:
    """Whether a batch holds the values it stands for: not while a pass is recorded, compiled or mapped."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    return not any(map(is_functorch_wrapped_tensor, tree_leaves(x)))


@contextmanager
def layers_as_written() -> Iterator[None]:
    """Keep torch's transformer layers from their fused path, which in evaluation reads weights and passes over layers inside."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def fastest_layout(x: Any) -> Any:
    """Return images, or weights of convolutions, in the memory order in which GPUs convolve fastest."""
    if isinstance(x, Tree):
        return x.map(fastest_layout)
    if x.is_cuda and x.ndim == 4 and x.is_floating_point():
        return x.contiguous(memory_format=torch.channels_last)
    return x


def call(
    net: nn.Module, tensors: dict[str, Tensor], x: Batch, output: Output | WholeOutput = None, lent: bool = False
) -> Any:
    """Run a network on the given tensors; buffers that it replaces are copied into those that were given.

    Inputs that are `lent`, which others get too, it must leave alone.
    """
    given, run = dict(tensors), trees.call_on_lent if lent else trees.call
    outputs = pick(run(lambda *parts, **named: functional_call(net, given, parts, named), x), output)
    for name, tensor in tensors.items():
        if given[name] is not tensor:
            tensor.copy_(given[name].detach())
    if not outputs.ndim or len(outputs) != len(x):
        raise ValueError(f"A network must give one output for each of {len(x)} inputs; got {tuple(outputs.shape)}.")
    return outputs


def made(make_net: Callable[[], nn.Module], num_members: int, seed: int) -> nn.Module:
    """Return the one network that members share; its initial weights depend on the seed only."""
    with seeded(derive(seed, "initial weights", 0), alone=True):
        return new(make_net, num_members)


def new(make_net: Callable[[], nn.Module], num_members: int) -> nn.Module:
    """Return what a function makes, or say what is wrong with it or with the number of members."""
    if isinstance(make_net, nn.Module):
        raise ValueError("`make_net` must be a function that makes a network; got a network. Write `lambda: Net(...)`.")
    return adopt(make_net(), num_members)


def adopt(net: nn.Module, num_members: int) -> nn.Module:
    """Return a copy of a user's network, or say what is wrong with it or with the number of members."""
    whole_number("num_members", num_members, 1)
    check_networks([net])
    for name, layer in net.named_modules():
        if old := [
            hook for hook in layer._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")
        ]:
            raise ValueError(
                f"{name or 'The network itself'} has a weight that is computed from others before each pass ({type(old[0]).__name__}). "
                "Take that off first, or use torch.nn.utils.parametrizations."
            )
    return told_how(copy.deepcopy(net))
