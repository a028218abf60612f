"""What people write by hand: a Python loop over modules, and one program over stacked parameters by `torch.func`.

Rivals draw their batches with replacement, which costs less than the shuffling that `ds.fit` does.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from dissensus.randomness import Noise
from dissensus_bench.problems import Problem


class Turn(NamedTuple):
    """What a rival does when it is its turn, and how many steps that is.

    `run` may return the seconds that count, where not all that it does is to count.
    """

    run: Callable[[], float | None]
    steps: int = 1


def plain_loop(problem: Problem) -> Turn:
    """Return the usual eager loop: for each step, for each member, a batch, a backward pass and an update."""
    nets = problem.new_nets()
    optimizers = [problem.torch_optimizer(net.parameters()) for net in nets]
    clock = torch.zeros((), dtype=torch.int64, device=problem.device)

    def turn() -> None:
        drawn = _draw(problem, 1 if problem.picked else problem.members)
        for step in range(problem.turn_steps):
            for index in _trained(problem):
                rows = drawn[index % len(drawn), step]
                x, y = problem.rows(rows)
                if problem.augment is not None:
                    x, y = problem.augment(x, y, Noise(clock.add_(1)))
                optimizers[index].zero_grad()
                with torch.autocast(problem.device.type, torch.bfloat16, enabled=problem.bf16):
                    loss = problem.mean_loss(problem.outputs(nets[index], x), y)
                loss.backward()
                optimizers[index].step()

    return Turn(turn, problem.turn_steps)


def _draw(problem: Problem, members: int) -> Tensor:
    """Return the rows of the data that each member sees in each step of a turn."""
    shape = (members, problem.turn_steps, problem.batch)
    return torch.randint(len(problem.y), shape, device=problem.device)


def _trained(problem: Problem) -> Sequence[int]:
    """Return the members that a step trains."""
    if problem.picked is None:
        return range(problem.members)
    return torch.randperm(problem.members)[: problem.picked].tolist()


def stacked_by_hand(problem: Problem) -> Turn:
    """Return one eager program over stacked parameters: `stack_module_state`, `functional_call`, `vmap`, a torch optimizer."""
    nets = problem.new_nets()
    parameters, buffers = stack_module_state(nets)
    optimizer = problem.torch_optimizer(list(parameters.values()))
    forward = stacked_forward(nets[0])
    clock = torch.zeros((), dtype=torch.int64, device=problem.device)

    def turn() -> None:
        for rows in _draw(problem, problem.members).unbind(1):
            x, y = problem.x[rows], problem.y[rows]
            if problem.augment is not None:
                changed, _ = problem.augment(x.flatten(0, 1), y.flatten(0, 1), Noise(clock.add_(1)))
                x = changed.unflatten(0, rows.shape)
            optimizer.zero_grad()
            with torch.autocast(problem.device.type, torch.bfloat16, enabled=problem.bf16):
                # The mean over members, times their number: each member's gradient is its own.
                loss = problem.mean_loss(forward(parameters, buffers, x), y) * problem.members
            loss.backward()
            optimizer.step()

    return Turn(turn, problem.turn_steps)


def stacked_forward(net: nn.Module, shared_inputs: bool = False) -> Callable[..., Tensor]:
    """Return a function of stacked parameters, stacked buffers and inputs `(members, batch, ...)`, or `(batch, ...)` if shared."""
    skeleton = copy.deepcopy(net).to("meta")

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(skeleton, (parameters, buffers), (x,))

    return vmap(one, in_dims=(0, 0, None if shared_inputs else 0))
