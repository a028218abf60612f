"""Running modules as in evaluation, whatever mode they are in."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import Lock, RLock
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

_settled: WeakKeyDictionary[Module, int] = WeakKeyDictionary()
_numbers = count(1)
_locks: WeakKeyDictionary[Module, RLock] = WeakKeyDictionary()
_making_locks = Lock()


def settled_block(module: Module) -> int | None:
    """Return the number of the block of `evaluation_mode` that a module is in, in which its weights stay as they are."""
    return _settled.get(module)


@contextmanager
def evaluation_mode(members: Module) -> Iterator[None]:
    """Run a block in evaluation mode and without gradients; set every module back as it was.

    One thread at a time: a pass binds weights and modes to the modules, which another thread would see.
    """
    with _lock_of(members):
        modes = [(module, module.training) for module in members.modules()]
        newly = [module for module, _ in modes if module not in _settled]
        was_training = members.training
        members.eval()
        _settled.update(dict.fromkeys(newly, next(_numbers)))
        try:
            with torch.no_grad():
                yield
        finally:
            for module in newly:
                _settled.pop(module, None)
            members.train(was_training)
            for module, mode in modes:
                module.training = mode


def _lock_of(module: Module) -> RLock:
    with _making_locks:
        return _locks.setdefault(module, RLock())
