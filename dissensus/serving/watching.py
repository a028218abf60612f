"""What a server tells its operators: counters for Prometheus, and a log line a request, without what was in it."""

import json
import logging
import os
import sys
import time
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dissensus.serving.model import Arrays

log = logging.getLogger("dissensus.server")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_P_VALUES = (0.001, 0.005, 0.01, 0.02, 0.05, *(tenth / 10 for tenth in range(1, 11)))
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


class Metrics:
    """Counters of one process; of several workers the sums, where `PROMETHEUS_MULTIPROC_DIR` names a folder they share."""

    def __init__(self) -> None:
        self._own = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self._own), partial(Gauge, registry=self._own)
        histogram = partial(Histogram, registry=self._own)
        self.requests = counter("dissensus_requests", "Requests by route and status.", ["route", "status"])
        self.seconds = histogram("dissensus_request_seconds", "Time to answer.", ["route"], buckets=_SECONDS)
        self.rows = counter("dissensus_rows", "Rows predicted.")
        self.flagged = counter("dissensus_flagged_rows", "Rows flagged at the file's own limit.")
        uniform = "P-values of rows; uniform while inputs are as the held-out ones."
        self.p_values = histogram("dissensus_p_value", uniform, buckets=_P_VALUES)
        self.batches = histogram("dissensus_batch_rows", "Rows that ran together.", buckets=_ROWS)
        self.waiting = gauge("dissensus_waiting_rows", "Rows that wait.", multiprocess_mode="livesum")
        drift = "Common logarithm of the drift martingale: at 2, inputs that have not changed would get here once in 100 streams."
        self.martingale = gauge("dissensus_drift_log10", drift, multiprocess_mode="livemax")

    def count(self, outputs: Arrays) -> None:
        """Count the rows of a batch."""
        rows = len(outputs["prediction"])
        self.rows.inc(rows)
        self.batches.observe(rows)
        if "p_value" in outputs:
            self.flagged.inc(int(outputs["flag"].sum()))
            for p in outputs["p_value"].tolist():
                self.p_values.observe(p)

    def text(self) -> bytes:
        """Return everything as Prometheus reads it."""
        registry: Any = self._own
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class Watched:
    """Middleware that counts, times and logs requests, and turns what nobody expected into a plain 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception:
            log.exception("a request failed")
            if not status:
                failed = JSONResponse({"error": "The server made a mistake; its log says which."}, 500)
                await failed(scope, receive, noting)
        finally:
            self._note(scope, status, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # The route, not the address that was asked for: that may hold anything.
        route = getattr(scope.get("route"), "path", "none")
        self.metrics.requests.labels(route, status).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        method = scope["method"] if route != "none" else ""
        taken, rows = round(1000 * seconds, 2), scope.get("dissensus.rows", 0)
        facts = {"method": method, "route": route, "status": status, "milliseconds": taken, "rows": rows}
        log.info("request", extra={"facts": facts})


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, what happened, and what goes with it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_as_json(level: str) -> None:
    """Write what the server and uvicorn log as JSON lines to the error stream."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("dissensus.server", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.propagate = name == "uvicorn.error"
        logger.handlers = [] if logger.propagate else [handler]
        logger.setLevel(level.upper())
