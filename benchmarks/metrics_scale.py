"""Time and memory of the metrics on millions of inputs, beside scikit-learn and relplot in the same run.

    python benchmarks/metrics_scale.py [--size 10000000] [--threads 2] [--repeats 3] [--output FILE.json]

Each row is one metric: the fastest of the repeats, the memory it needed at its peak beyond its inputs, and
the same for a peer where one is installed. Nothing is saved unless `--output` is given.
"""

import argparse
import ctypes
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dissensus import metrics

MEGABYTE = 2**20


@dataclass(frozen=True)
class Cost:
    """Seconds, and peak memory beyond what was there before (None where it cannot be read)."""

    seconds: float
    megabytes: float | None


@dataclass(frozen=True)
class Row:
    """One metric and, where there is one and it is installed, its peer."""

    name: str
    inputs: str
    ours: Cost
    peer_name: str = ""
    peer: Cost | None = None


def measure(call: Callable[[], Any], repeats: int) -> Cost:
    """Fastest time and largest extra memory of several calls."""
    times, peaks = [], []
    for _ in range(repeats):
        before = reset_peak_memory()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        peaks.append(None if before is None else (peak_memory() - before) / MEGABYTE)
    known = [peak for peak in peaks if peak is not None]
    return Cost(min(times), max(known) if known else None)


def reset_peak_memory() -> float | None:
    """Bytes resident now, from which the peak is counted anew; None where the system does not offer it."""
    try:
        # Hand freed memory back first: reused, it would not show.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return status_bytes("VmRSS")
    except (OSError, AttributeError, TypeError):
        return None


def peak_memory() -> float:
    """Largest number of resident bytes since the last reset."""
    return status_bytes("VmHWM")


def status_bytes(field: str) -> float:
    """A memory field of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024.0 * int(line.split()[1])
    raise OSError(f"no {field} in /proc/self/status")


def scores(size: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(1, 1, size // 2).astype(dtype), rng.normal(size=size // 2).astype(dtype)


def confidences(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    confidence = rng.beta(4, 1, size=size)
    return confidence, rng.uniform(size=size) < confidence**1.3


def detection_rows(size: int, repeats: int) -> list[Row]:
    """AUROC in both precisions, beside scikit-learn; and the other detection metrics."""
    rows = []
    for dtype in (np.float64, np.float32):
        ood, known = scores(size, dtype)
        inputs = f"2 x {size // 2:,} {dtype.__name__}"
        rows.append(
            Row(
                "auroc",
                inputs,
                measure(partial(metrics.auroc, ood, known), repeats),
                "scikit-learn",
                peer_auroc(ood, known, repeats),
            )
        )
    others = {
        "aupr": lambda: metrics.aupr(ood, known),
        "fpr_at_tpr": lambda: metrics.fpr_at_tpr(ood, known),
        "roc_curve": lambda: metrics.roc_curve(ood, known),
    }
    return rows + [Row(name, inputs, measure(call, repeats)) for name, call in others.items()]


def peer_auroc(ood: np.ndarray, known: np.ndarray, repeats: int) -> Cost | None:
    if find_spec("sklearn") is None:
        return None
    from sklearn.metrics import roc_auc_score

    labels = np.concatenate([np.ones(len(ood), np.int8), np.zeros(len(known), np.int8)])
    pooled = np.concatenate([ood, known])
    assert abs(roc_auc_score(labels, pooled) - metrics.auroc(ood, known)) < 1e-9
    return measure(lambda: roc_auc_score(labels, pooled), min(repeats, 2))


def calibration_rows(size: int, repeats: int) -> list[Row]:
    """Smooth ECE beside relplot on a million inputs, and the calibration metrics at full size."""
    rows = []
    million = confidences(1_000_000)
    for label, truncate in (("smooth_ece", None), ("smooth_ece, truncate=0.5", 0.5)):
        ours = measure(partial(metrics.smooth_ece, *million, truncate=truncate), repeats)
        rows.append(Row(label, "1,000,000 float64", ours, "relplot", peer_smooth_ece(*million, repeats)))
    confidence, correct = confidences(size)
    calls = {
        "smooth_ece": lambda: metrics.smooth_ece(confidence, correct),
        "ece": lambda: metrics.confidence_reliability(confidence, correct).ece,
        "ece, equal mass": lambda: metrics.confidence_reliability(confidence, correct, binning="mass").ece,
        "risk_coverage_area": lambda: metrics.risk_coverage_area(-confidence, correct),
    }
    return rows + [Row(name, f"{size:,} float64", measure(call, repeats)) for name, call in calls.items()]


def peer_smooth_ece(confidence: np.ndarray, correct: np.ndarray, repeats: int) -> Cost | None:
    if find_spec("relplot") is None:
        return None
    from relplot import smECE

    outcome = correct.astype(np.float64)
    assert abs(smECE(confidence, outcome) - metrics.smooth_ece(confidence, outcome, truncate=0.5)) < 1e-3
    return measure(lambda: smECE(confidence, outcome), repeats)


def classification_rows(size: int, repeats: int) -> list[Row]:
    """Every metric of probabilities and labels, at ten classes and a tenth of the inputs."""
    batch, classes = size // 10, 10
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(batch, classes, generator=generator).mul_(2).softmax(-1)
    labels = torch.randint(classes, (batch,), generator=generator)
    return [
        Row(name, f"{batch:,} x {classes} float32", measure(partial(metric, probs, labels), repeats))
        for name, metric in metrics.CLASSIFICATION_METRICS.items()
    ]


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    header = ("metric", "inputs", "seconds", "extra MB", "peer", "seconds", "extra MB", "speed-up")
    lines = [header, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def cells(row: Row) -> tuple[str, ...]:
    ours = (row.name, row.inputs, f"{row.ours.seconds:.3f}", megabytes(row.ours))
    if not row.peer_name:
        return (*ours, "", "", "", "")
    if row.peer is None:
        return (*ours, f"{row.peer_name}: not installed", "", "", "")
    ratio = row.peer.seconds / row.ours.seconds
    return (*ours, row.peer_name, f"{row.peer.seconds:.3f}", megabytes(row.peer), f"{ratio:.1f} x")


def megabytes(cost: Cost) -> str:
    return "n/a" if cost.megabytes is None else f"{cost.megabytes:.0f}"


def environment(threads: int) -> dict[str, str]:
    """What the numbers were measured on."""
    versions = {}
    for package in ("numpy", "torch", "scikit-learn", "relplot"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    machine = {"date": date.today().isoformat(), "machine": platform.machine(), "cores": str(os.cpu_count())}
    return {**machine, "threads": str(threads), "python": platform.python_version(), **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=10_000_000, help="number of scores")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch may use")
    parser.add_argument("--repeats", type=int, default=3, help="calls of which the fastest counts")
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = environment(options.threads)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    rows = [
        *detection_rows(options.size, options.repeats),
        *calibration_rows(options.size, options.repeats),
        *classification_rows(options.size, options.repeats),
    ]
    print(table(rows))
    if options.output is not None:
        options.output.write_text(json.dumps({"environment": facts, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
