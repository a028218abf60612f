"""How a server is to run, and what one worker keeps: the file, requests that wait for it, counters, and whether inputs drift."""

from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from dissensus.conformal import DriftMonitor
from dissensus.serving.batching import Batcher
from dissensus.serving.model import Arrays, BadInput, Model
from dissensus.serving.watching import Metrics

_LOG_10 = log(10)
# Points of the drift chart; when they are full, every second one goes.
_POINTS = 400


@dataclass(frozen=True)
class Settings:
    """How a server is to run.

    Attributes:
        path: The exported file.
        name: What the model is called in addresses.
        host: Address to listen on.
        port: Port to listen on.
        workers: Processes that answer, each with the file in memory; one that dies is started again.
        threads: Processor threads of one run; 0 for as many as there are processors.
        api_key: What requests must bring along as `Authorization: Bearer KEY`; None lets all in. Health and the page stay open.
        certificate: File of the TLS certificate; None for plain HTTP.
        key: File of its private key.
        queue_rows: Rows that may wait; further requests get 429.
        most_rows: Rows that one request may have.
        most_bytes: Bytes that one request may have.
        seconds: How long a request may take to arrive.
        drift_threshold: Where the drift alarm rings: inputs that do not change ring it with a probability of one in so many.
    """

    path: str
    name: str = "model"
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    threads: int = 1
    api_key: str | None = None
    certificate: str | None = None
    key: str | None = None
    queue_rows: int = 1024
    most_rows: int = 4096
    most_bytes: int = 8 << 20
    seconds: float = 10.0
    drift_threshold: float = 100.0


class Service:
    """Everything that one process keeps between requests."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = Model(settings.path, settings.threads)
        self.metrics = Metrics()
        self.batcher = Batcher(self._run, settings.queue_rows)
        state = self.model.facts.get("drift")
        self.monitor = None if state is None else DriftMonitor.from_state(state)
        self._points: list[tuple[int, float]] = []
        self._every = 1

    def _run(self, feed: Arrays) -> Arrays:
        """Run a batch, and look at its scores; in the batcher's thread, which is the only one that does."""
        outputs = self.model.run(feed)
        if not (finite := np.isfinite(outputs["score"])).all():
            raise BadInput(f"Row {int(finite.argmin())} has no finite score: are its values far too large?")
        if self.monitor is not None:
            self.monitor.update_scores(outputs["score"])
            self._note(self.monitor)
        self.metrics.count(outputs)
        self.metrics.waiting.set(self.batcher.waiting_rows)
        return outputs

    def _note(self, monitor: DriftMonitor) -> None:
        seen, value = monitor.martingale.seen, monitor.log_value / _LOG_10
        self.metrics.martingale.set(value)
        if not self._points or seen - self._points[-1][0] >= self._every:
            self._points.append((seen, round(value, 3)))
        if len(self._points) > _POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def drift(self) -> dict[str, Any]:
        """Return where the drift monitor stands, and how it got there."""
        if self.monitor is None:
            return {"watched": False}
        return {
            "watched": True,
            "seen": self.monitor.martingale.seen,
            "log10": self.monitor.log_value / _LOG_10,
            "threshold": self.settings.drift_threshold,
            "alarm": self.monitor.alarm(self.settings.drift_threshold),
            "points": [list(point) for point in self._points],
        }
