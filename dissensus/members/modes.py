"""Running modules as in evaluation, whatever mode they are in."""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch

_settled: WeakSet[torch.nn.Module] = WeakSet()


def is_settled(module: torch.nn.Module) -> bool:
    """Whether a module is in a block of `evaluation_mode`, in which its weights stay as they are."""
    return module in _settled


@contextmanager
def evaluation_mode(members: torch.nn.Module) -> Iterator[None]:
    """Run a block in evaluation mode and without gradients; set every module back as it was."""
    modes = [(module, module.training) for module in members.modules()]
    newly = [module for module, _ in modes if module not in _settled]
    was_training = members.training
    members.eval()
    _settled.update(newly)
    try:
        with torch.no_grad():
            yield
    finally:
        _settled.difference_update(newly)
        members.train(was_training)
        for module, mode in modes:
            module.training = mode
