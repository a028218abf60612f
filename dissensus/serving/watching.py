"""Every request is counted, timed and logged, without what was in it."""

import json
import logging
import sys
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dissensus.serving.service import Service

log = logging.getLogger("dissensus.server")


class Watched:
    """Middleware that counts, times and logs requests, and turns what nobody expected into a plain 500."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.metrics = app, service.metrics

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
                await _fail(noting)
        finally:
            self._note(scope, status, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # The route, not the address that was asked for: that may hold anything.
        route = getattr(scope.get("route"), "path", "none")
        self.metrics.requests.labels(route, status).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        if log.isEnabledFor(logging.INFO):
            log.info(
                "request",
                extra={
                    "method": scope["method"] if route != "none" else "",
                    "route": route,
                    "status": status,
                    "milliseconds": round(1000 * seconds, 2),
                    "rows": scope.get("dissensus.rows", 0),
                },
            )


async def _fail(send: Send) -> None:
    body = b'{"error":"The server made a mistake; its log says which."}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, what happened, and what goes with it."""

    _FIELDS = ("method", "route", "status", "milliseconds", "rows")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in self._FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_as_json(level: str) -> None:
    """Write what the server and uvicorn log as JSON lines to the error stream."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("dissensus.server", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = (
            [handler] if name != "uvicorn.error" else [],
            name == "uvicorn.error",
        )
        logger.setLevel(level.upper())
