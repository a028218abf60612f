"""Members found on the way of one network's training: the weights it had at the end of each cycle."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dissensus.data.trees import Output
from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.members import Keys, Members
from dissensus.members.shared import SharedMembers, adopt
from dissensus.members.stacking import tensors_of
from dissensus.nets.dropout import plain_dropout
from dissensus.randomness import derive, seeded

_KEPT = "kept."


class Trajectory(SharedMembers):
    """One network that trains, and members that are made of the weights it passes through.

    `net` trains as any network does. `kept` has the members, in buffers; until there are any they are copies of the network.
    Training gives one network's outputs, evaluation those of all members.
    """

    comparable: ClassVar[bool] = False

    def __init__(
        self, make_net: Callable[[], nn.Module], num_members: int, seed: int, output: Output = None
    ) -> None:
        if isinstance(make_net, nn.Module):
            raise ValueError(
                "`make_net` must be a function that makes a network; got a network. Write `lambda: Net(...)`."
            )
        with seeded(derive(seed, "initial weights", 0), alone=True):
            net = adopt(make_net(), num_members, "make_net()")
        super().__init__(net, num_members, seed, "whole", output)
        self.one_pass = True
        copies = [copy.deepcopy(plain_dropout(copy.deepcopy(self.net))) for _ in range(num_members)]
        self.kept = _in_buffers(DeepEnsemble.from_members(copies, seed, output=output))
        self.member_keys = self.member_keys.to(self.kept.member_keys.device)

    def run(
        self, tensors: Mapping[str, Tensor], x: Any, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
        """Run members in evaluation; see `Members.run`. In training there is one network."""
        if self.training:
            return self.run_one_pass(tensors, x, own=own, rows=rows, keys=keys)
        kept = {name.removeprefix(_KEPT): t for name, t in tensors.items() if name.startswith(_KEPT)}
        if rows is not None:
            kept = self.kept.rows_of(kept, rows)
        return self.kept.run(kept, x, own=own, rows=rows, keys=keys)

    def run_one_pass(
        self, tensors: Mapping[str, Tensor], x: Any, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
        """Run the network that trains: `(1, batch, ...)`."""
        x = x[0] if own else x
        owners = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return self.run_rows(tensors, x, owners, keys).unsqueeze(0)

    @property
    def shared_buffers(self) -> frozenset[str]:  # type: ignore[override]
        """Names of what no pass of training changes."""
        return frozenset(name for name, _ in self.named_buffers() if not name.startswith("net."))

    @torch.no_grad()
    def keep(self, member: int, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Make a member of these weights, by name as the network has them; of all that the network now has if none are given."""
        given = tensors_of(self.net) if tensors is None else tensors
        for name, rows in tensors_of(self.kept).items():
            own = name.removeprefix("net.")
            if own in given and name != "member_keys":
                rows[member].copy_(given[own])

    def member(self, index: int) -> nn.Module:
        """Return one member as an independent plain module."""
        return self.kept.member(index).requires_grad_().train(self.training)

    def soup(self) -> nn.Module:
        """Return one plain module whose weights are the average of the members'."""
        return Members.soup(self)


class SnapshotEnsemble(Trajectory):
    """The weights of one network at the end of each cycle of its training, as members.

    A run of `fit` is cut into as many cycles as there are members; at the end of each (the end of an epoch) the network's weights are
    kept. With a rate that restarts in every cycle, `schedules.Cyclic(cycles=num_members)`, the network settles in one
    place after another; with a constant rate members are the last stretches of one path (a checkpoint ensemble). Training costs
    what one network costs. Give at least as many epochs as members: fewer leave some members alike.

    Args:
        make_net: Makes the network.
        num_members: Snapshots.
        seed: Decides the initial weights.
        output: What is scored of a network that returns several tensors: a key, an index or a function.

    Example:
        >>> from dissensus import fit, schedules
        >>> x, y = torch.randn(64, 3), torch.randint(0, 2, (64,))
        >>> ens = SnapshotEnsemble(lambda: nn.Linear(3, 2), num_members=4)
        >>> run = fit(ens, (x, y), epochs=8, schedule=schedules.Cyclic(cycles=4), device="cpu")
        >>> ens.eval()(x).shape
        torch.Size([4, 64, 2])

    References:
        Huang et al., 2017, <https://arxiv.org/abs/1704.00109>.
    """

    def __init__(
        self,
        make_net: Callable[[], nn.Module],
        num_members: int = 5,
        seed: int = 0,
        *,
        output: Output = None,
    ) -> None:
        super().__init__(make_net, num_members, seed, output)

    def after_epoch(self, epoch: int, epochs: int) -> None:
        """Keep the network as the member of its cycle and of those to come, which will be overwritten."""
        for member in range(self.num_members):
            if (epoch - 1) * self.num_members < (member + 1) * epochs:
                self.keep(member)


def _in_buffers(ensemble: DeepEnsemble) -> DeepEnsemble:
    """Turn an ensemble's parameters into buffers: nothing trains them, and checkpoints of a run keep them."""
    for module in ensemble.modules():
        for name, parameter in list(module._parameters.items()):
            del module._parameters[name]
            module.register_buffer(name, None if parameter is None else parameter.detach())
    return ensemble
