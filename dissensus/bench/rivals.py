"""What people write by hand: a Python loop over modules, and one program over stacked parameters by `torch.func`."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from dissensus.bench.problems import Problem
from dissensus.randomness import Noise

# Takes a rival's steps of one turn.
Turn = Callable[[], None]


def plain_loop(problem: Problem) -> Turn:
    """Return the usual eager loop: for each step, for each member, a batch, a backward pass and an update."""
    nets = problem.new_nets()
    optimizers = [problem.torch_optimizer(net.parameters()) for net in nets]
    clock = torch.zeros((), dtype=torch.int64, device=problem.device)

    def turn() -> None:
        orders = _orders(problem)
        for step in range(problem.turn_steps):
            for index in _trained(problem):
                rows = orders[index][step * problem.batch : (step + 1) * problem.batch]
                x, y = problem.x[rows], problem.y[rows]
                if problem.augment is not None:
                    x, y = problem.augment(x, y, Noise(clock.add_(1)))
                optimizers[index].zero_grad()
                with torch.autocast(problem.device.type, torch.bfloat16, enabled=problem.bf16):
                    loss = problem.mean_loss(nets[index](x.contiguous(memory_format=problem.layout)), y)
                loss.backward()
                optimizers[index].step()

    return turn


def _orders(problem: Problem) -> Sequence[Tensor]:
    """Return the order in which each member sees the data."""
    count = 1 if problem.picked else problem.members
    orders = [torch.randperm(len(problem.x), device=problem.device) for _ in range(count)]
    return orders * (problem.members // count)


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
        orders = torch.rand(problem.members, len(problem.x), device=problem.device).argsort(1)
        for step in range(problem.turn_steps):
            rows = orders[:, step * problem.batch : (step + 1) * problem.batch]
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

    return turn


def stacked_forward(net: nn.Module, shared_inputs: bool = False) -> Callable[..., Tensor]:
    """Return a function of stacked parameters, stacked buffers and inputs `(members, batch, ...)`, or `(batch, ...)` if shared."""
    skeleton = copy.deepcopy(net).to("meta")

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(skeleton, (parameters, buffers), (x,))

    return vmap(one, in_dims=(0, 0, None if shared_inputs else 0))
