"""What a server counts, for Prometheus."""

import os
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from dissensus.serving.model import Arrays

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_P_VALUES = (0.001, 0.005, 0.01, 0.02, 0.05, *(tenth / 10 for tenth in range(1, 11)))
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


class Metrics:
    """Counters of one process; of several workers the sums, where `PROMETHEUS_MULTIPROC_DIR` names a folder they share."""

    def __init__(self) -> None:
        self._own = registry = CollectorRegistry()
        self.requests = Counter(
            "dissensus_requests", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "dissensus_request_seconds",
            "Time to answer.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.rows = Counter("dissensus_rows", "Rows predicted.", registry=registry)
        self.flagged = Counter(
            "dissensus_flagged_rows", "Rows flagged at the file's own limit.", registry=registry
        )
        self.p_values = Histogram(
            "dissensus_p_value",
            "P-values of rows; uniform while inputs are as the held-out ones.",
            buckets=_P_VALUES,
            registry=registry,
        )
        self.batches = Histogram(
            "dissensus_batch_rows", "Rows that ran together.", buckets=_ROWS, registry=registry
        )
        self.waiting = Gauge(
            "dissensus_waiting_rows", "Rows that wait.", registry=registry, multiprocess_mode="livesum"
        )
        self.martingale = Gauge(
            "dissensus_drift_log10",
            "Common logarithm of the drift martingale: at 2, inputs that have not changed would get here once in 100 streams.",
            registry=registry,
            multiprocess_mode="livemax",
        )

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
