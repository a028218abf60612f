"""One worker's state: the file, the requests that wait for it, what it counted, and whether inputs have drifted."""

import time
from math import log
from typing import Any

import numpy as np

from dissensus.conformal import DriftMonitor
from dissensus.serving.batching import Batcher
from dissensus.serving.measuring import Metrics
from dissensus.serving.model import Arrays, BadInput, Model
from dissensus.serving.settings import Settings

_LOG_10 = log(10)
# Points of the drift chart; when they are full, every second one goes.
_POINTS = 400


class Service:
    """Everything that one process keeps between requests."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = Model(settings.path, settings.threads)
        self.metrics = Metrics()
        self.batcher = Batcher(self._run, settings.queue_rows)
        self.started = time.time()
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
