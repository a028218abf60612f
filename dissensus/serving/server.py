"""Processes that listen: one, or several that a supervisor keeps alive."""

import asyncio
import json
import os
import tempfile
from dataclasses import asdict
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from dissensus.serving.app import Settings, make_app
from dissensus.serving.watching import log_as_json

_SETTINGS = "DISSENSUS_SERVER"
_HEADER_SECONDS = 10.0
_STOP_SECONDS = 30


def serve(settings: Settings, log_level: str = "info") -> None:
    """Listen until told to stop (SIGTERM or SIGINT); requests that were accepted are answered first.

    Args:
        settings: How to run.
        log_level: What to log, as JSON lines on the error stream: debug, info (one line a request), warning or error.
    """
    os.environ[_SETTINGS] = json.dumps({**asdict(settings), "log_level": log_level})
    with tempfile.TemporaryDirectory(prefix="dissensus-metrics-") as shared:
        if settings.workers > 1:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared
        uvicorn.run(
            "dissensus.serving.server:app_of_environment",
            factory=True,
            host=settings.host,
            port=settings.port,
            workers=settings.workers,
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.key,
            http=_Impatient,
            ws="none",
            access_log=False,
            log_config=None,
            log_level=log_level,
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )


def app_of_environment() -> FastAPI:
    """Return the application of a worker, which learns its settings from its environment."""
    values: dict[str, Any] = json.loads(os.environ[_SETTINGS])
    log_as_json(values.pop("log_level"))
    return make_app(Settings(**values))


class _Impatient(H11Protocol):
    """Closes connections whose next request does not become whole: uvicorn itself waits for headers without end."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not busy and self._timer is None:
            self._wait()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
