"""How many threads torch uses."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

log = logging.getLogger("dissensus")

# Numbers multiplied and added in a step for each thread that shares it: about 10 ms of one core. Waking threads costs some
# microseconds an operation on an idle machine and milliseconds on one that does other work (a fit of 13 s took 109 s so).
WORK_OF_A_THREAD = 2e8


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Have torch use so many threads in a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Have torch use one thread in a block: many small operations on several spend their time waiting for each other."""
    return threads(1)


@contextmanager
def threads_for(work: float) -> Iterator[None]:
    """Have torch use as many threads as steps of so many multiplications and additions keep busy, of those that it may use."""
    most = torch.get_num_threads()
    count = max(1, min(most, round(work / WORK_OF_A_THREAD)))
    if count < most:
        log.info("training uses %d of %d threads: a step takes about %.1g operations", count, most, work)
    with threads(count):
        yield
