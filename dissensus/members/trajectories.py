"""Members from one network's training: the weights it had at the end of each cycle, or draws from a Gaussian around their average."""

import copy
from collections.abc import Callable
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import vector_to_parameters

from dissensus._signatures import checked
from dissensus.data.sources import device_of, pair_batches
from dissensus.data.trees import Output
from dissensus.data.trees import call as call_with
from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.members import Keys, Members, under
from dissensus.members.shared import SharedMembers, made
from dissensus.members.stacking import Tensors, tensors_of
from dissensus.nets.dropout import plain_dropout
from dissensus.randomness import Noise, seeded


class Trajectory(SharedMembers):
    """One network that trains, `net`, and members made of the weights it passes through, in the buffers of `kept`."""

    comparable: ClassVar[bool] = False
    keeps_weights: ClassVar[bool] = True

    def __init__(
        self, make_net: Callable[[], nn.Module], num_members: int = 5, seed: int = 0, *, output: Output = None
    ) -> None:
        super().__init__(made(make_net, num_members, seed), num_members, seed, "whole", output)
        self.one_pass = True
        copies = [plain_dropout(copy.deepcopy(self.net)) for _ in range(num_members)]
        self.kept = _in_buffers(DeepEnsemble.from_members(copies, seed, output=output))
        self.member_keys = self.member_keys.to(self.kept.member_keys.device)

    def run(self, tensors: Tensors, x: Any, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run members in evaluation; see `Members.run`. In training there is one network."""
        if self.training:
            return self.run_one_pass(tensors, x, own=own, rows=rows, keys=keys)
        kept = under("kept.", tensors)
        if rows is not None:
            kept = self.kept.rows_of(kept, rows)
        return self.kept.run(kept, x, own=own, rows=rows, keys=keys)

    @property
    def shared_buffers(self) -> frozenset[str]:  # type: ignore[override]
        """Names of what no pass of training changes."""
        return frozenset(name for name, _ in self.named_buffers() if not name.startswith("net."))

    @torch.no_grad()
    def keep(self, member: int, tensors: Tensors | None = None) -> None:
        """Make a member of these weights, by name as the network has them; of all that the network now has if none are given."""
        given = tensors_of(self.net) if tensors is None else tensors
        first = _first_names(self.net)
        for name, rows in tensors_of(self.kept).items():
            own = first.get(name.removeprefix("net."), "")
            if own in given and name != "member_keys":
                rows[member].copy_(given[own])

    def member(self, index: int) -> nn.Module:
        """Return one member as an independent plain module."""
        return self.kept.member(index).requires_grad_().train(self.training)

    def soup(self) -> nn.Module:
        """Return one plain module whose weights are the average of the members'."""
        return Members.soup(self)


@checked
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

    def after_epoch(self, epoch: int, epochs: int) -> None:
        """Keep the network as the member of its cycle and of those to come, which will be overwritten."""
        for member in range(self.num_members):
            if (epoch - 1) * self.num_members < (member + 1) * epochs:
                self.keep(member)


def _first_names(net: nn.Module) -> dict[str, str]:
    """Return every name of a tensor with the first one it has: buffers that were tied part when an ensemble's dtype or device changes."""
    first: dict[int, str] = {}
    every = (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in every}


def _in_buffers(ensemble: DeepEnsemble) -> DeepEnsemble:
    """Turn an ensemble's parameters into buffers: nothing trains them, and checkpoints of a run keep them."""
    for module in ensemble.modules():
        for name, parameter in list(module._parameters.items()):
            del module._parameters[name]
            module.register_buffer(name, None if parameter is None else parameter.detach())
    return ensemble


@checked
class SWAG(Trajectory):
    r"""Draws from a Gaussian fitted to the weights of one network in the later part of its training.

    $$\theta_m = \bar\theta + \frac{s}{\sqrt2}\left(\Sigma_{\mathrm{diag}}^{1/2} z_1
      + \frac{1}{\sqrt{K-1}} D z_2\right)$$

    From the share `start` of the run on, the weights at the end of every epoch enter the average $\bar\theta$, the variance
    $\Sigma_{\mathrm{diag}}$ and the last K = `rank` deviations D. Use a rate that stays high there (a constant schedule):
    weights that no longer move have no spread. When `fit` ends, members are drawn and their BatchNorm statistics are taken anew
    from the training data. Training costs what one network costs, and some 20 copies of its weights.

    Args:
        make_net: Makes the network.
        num_members: Draws.
        seed: Decides the initial weights and the draws; member j's draw depends on `(seed, j)` and the fitted Gaussian.
        start: Share of the run after which weights are collected.
        rank: Largest number of deviations kept; 0 for the diagonal alone.
        scale: Factor s on the deviations; 0 makes every member the average (stochastic weight averaging).

    Example:
        >>> from dissensus import fit
        >>> x, y = torch.randn(64, 3), torch.randint(0, 2, (64,))
        >>> ens = SWAG(lambda: nn.Linear(3, 2), num_members=10)
        >>> run = fit(ens, (x, y), epochs=8, lr=0.05, device="cpu")
        >>> int(ens.collected), ens.eval()(x).shape
        (4, torch.Size([10, 64, 2]))

    References:
        Maddox et al., 2019, <https://arxiv.org/abs/1902.02476>.
    """

    mean: Tensor
    variance: Tensor
    deviations: Tensor
    collected: Tensor
    decisive: ClassVar[tuple[str, ...]] = ("batches", "start", "rank", "scale")

    def __init__(
        self,
        make_net: Callable[[], nn.Module],
        num_members: int = 16,
        seed: int = 0,
        *,
        start: float = 0.5,
        rank: int = 20,
        scale: float = 1.0,
        output: Output = None,
    ) -> None:
        if not 0.0 <= start < 1.0 or rank < 0 or scale < 0:
            raise ValueError(f"`start` must be in [0, 1), `rank` and `scale` at least 0; got {start}, {rank}, {scale}.")
        super().__init__(make_net, num_members, seed, output=output)
        self.start, self.rank, self.scale = start, rank, scale
        weights = self._weights()
        if weights.is_complex():
            raise ValueError(
                "SWAG draws real weights, and the network has complex ones. Give them as two real tensors each."
            )
        self.register_buffer("mean", weights.clone())
        self.register_buffer("variance", torch.zeros_like(weights))
        self.register_buffer("deviations", weights.new_zeros(rank, len(weights)))
        self.register_buffer("collected", torch.zeros((), dtype=torch.int64, device=weights.device))

    def after_epoch(self, epoch: int, epochs: int) -> None:
        """Collect the network's weights if it is time; members follow the network until there are two to tell a spread from."""
        if epoch > self.start * epochs:
            self.collect()
        if int(self.collected) == 0:
            for member in range(self.num_members):
                self.keep(member)
        else:
            self.draw()

    def _weights(self) -> Tensor:
        """Return the network's weights as one vector, however they lie in memory."""
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    @torch.no_grad()
    def collect(self) -> None:
        """Let the network's weights enter the Gaussian."""
        weights, count = self._weights(), int(self.collected)
        away = weights - self.mean if count else torch.zeros_like(weights)
        self.mean.copy_(self.mean + away / (count + 1) if count else weights)
        # Not the mean of squares less the square of the mean, of which nothing is left where weights hardly move.
        self.variance.mul_(count / (count + 1)).add_(away * (weights - self.mean) / (count + 1))
        if self.rank:
            self.deviations.copy_(torch.cat([self.deviations[1:], (weights - self.mean)[None]]))
        self.collected.add_(1)

    @torch.no_grad()
    def draw(self) -> None:
        """Draw the members from the Gaussian as it now is; BatchNorm statistics are the network's."""
        spread = self.variance.clamp_min(0.0).sqrt()
        used = min(int(self.collected), self.rank)
        drawn = copy.deepcopy(self.net)
        for member, key in enumerate(self.member_keys):
            noise = Noise(key)
            step = spread * noise.at(0).normal(len(spread)).to(spread)
            if used > 1:
                weights = noise.at(1).normal(used).to(spread) / sqrt(used - 1)
                step = step + weights @ self.deviations[-used:]
            vector_to_parameters(self.mean + self.scale / sqrt(2) * step, drawn.parameters())
            self.keep(member, tensors_of(drawn))

    def after_training(self, data: Any) -> None:
        """Take the members' BatchNorm statistics from the training data."""
        if int(self.collected) and any(isinstance(module, _BatchNorm) for module in self.net.modules()):
            self.update_batch_norm(data)

    @torch.no_grad()
    def update_batch_norm(self, data: Any, batch_size: int = 256) -> None:
        """Take every member's BatchNorm statistics anew: averages over the batches of this data, as its weights see them.

        Layers that a network keeps in evaluation while it trains keep theirs. A batch of one row, of which many layers can take no
        statistics, is left out where a larger one came before.
        """
        device = device_of(self)
        for index in range(self.num_members):
            net = self.member(index).train()
            norms = [module for module in net.modules() if isinstance(module, _BatchNorm) and module.training]
            net.eval()
            for module in norms:
                module.reset_running_stats()
                module.train()
                module.momentum = None
            largest = 0
            with seeded(0):
                for x, _ in pair_batches(data, batch_size):
                    largest = max(largest, len(x))
                    if len(x) > 1 or largest == 1:
                        call_with(net, x.to(device))
            self.keep(index, tensors_of(copy.deepcopy(net)))
