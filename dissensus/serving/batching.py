"""Requests that arrive while the file is busy go through it together; a full queue turns new ones away."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dissensus.serving.model import Arrays


class QueueFull(Exception):
    """So many rows wait that another request would wait too long."""


@dataclass
class _Waiting:
    feed: Arrays
    rows: int
    done: "asyncio.Future[Arrays]"

    @property
    def shapes(self) -> tuple[Any, ...]:
        """What must be equal of requests that run together."""
        return tuple((name, values.shape[1:]) for name, values in self.feed.items())


class Batcher:
    """Runs requests in batches: whatever waits when a run ends is the next batch. Nobody waits for company.

    `run`, from the inputs of a batch to its outputs, all with the row first, is called in a thread, one batch at a time. A request is
    taken where nobody waits or at most `queue_rows` rows then do; at most `batch_rows` of several requests run at once.
    """

    def __init__(self, run: Callable[[Arrays], Arrays], queue_rows: int = 1024, batch_rows: int = 256) -> None:
        self._run, self.queue_rows, self.batch_rows = run, queue_rows, batch_rows
        self._queue: deque[_Waiting] = deque()
        self.waiting_rows = 0
        self._thread = ThreadPoolExecutor(1, "batches")
        self._task: asyncio.Task[None] | None = None  # runs as long as somebody waits

    async def stop(self) -> None:
        """Finish what was accepted, then end."""
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def submit(self, feed: Arrays) -> Arrays:
        """Return the outputs of one request; where the queue is full, nothing of it was or will be run."""
        rows = len(next(iter(feed.values())))
        if self._queue and self.waiting_rows + rows > self.queue_rows:
            raise QueueFull
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Arrays] = loop.create_future()
        self._queue.append(_Waiting(feed, rows, done))
        self.waiting_rows += rows
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._serve())
        return await done

    async def _serve(self) -> None:
        while self._queue:
            await self._answer(self._next())

    async def _answer(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        try:
            names = batch[0].feed if len(batch) > 1 else ()
            joined = {name: np.concatenate([each.feed[name] for each in batch]) for name in names}
            outputs = await loop.run_in_executor(self._thread, self._run, joined or batch[0].feed)
        except Exception as problem:  # whatever a run raises must not end the service
            if len(batch) > 1:
                for each in batch:  # one request's error is not the others'
                    await self._answer([each])
            elif not batch[0].done.done():
                batch[0].done.set_exception(problem)
        else:
            start = 0
            for each in batch:
                own = slice(start, start + each.rows)
                if not each.done.done():  # its client may have gone
                    each.done.set_result({name: values[own] for name, values in outputs.items()})
                start += each.rows

    def _next(self) -> list[_Waiting]:
        """Take the requests that run next: the first, and those after it of the same shapes."""
        batch = [self._queue.popleft()]
        rows = batch[0].rows
        while (
            self._queue and (each := self._queue[0]).shapes == batch[0].shapes and rows + each.rows <= self.batch_rows
        ):
            batch.append(self._queue.popleft())
            rows += each.rows
        self.waiting_rows -= rows
        return batch
