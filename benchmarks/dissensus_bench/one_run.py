"""One run of the benchmark: cases measured, written down, and compared with stored ratios."""

import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dissensus._machine import one_thread
from dissensus.training.engines import ENGINES
from dissensus_bench.cases import CASES, Options, Result, default_cases
from dissensus_bench.check import (
    Slower,
    check_comparable,
    find_slower,
    find_unmatched,
    flat_ratios,
    keep_better,
    read_stored,
)
from dissensus_bench.report import print_results, store, write_results

_PEER_PACKAGES = ("jax", "torchensemble", "torch-uncertainty", "lightning-uq-box", "lightning")

# How often a case with a worse ratio is measured again before that is believed.
_REPEATS = 3


def run(
    output: Path,
    *,
    device: str = "auto",
    cases: Sequence[str] | None = None,
    engines: Sequence[str] | None = None,
    quick: bool = False,
    check: Path | None = None,
) -> list[Slower]:
    """Measure, print a table, and write `results.json`, figures and `report.html`.

    Args:
        output: Folder for what is written.
        device: `"cpu"`, `"cuda"` or `"auto"`, which takes a GPU if there is one.
        cases: Keys of `CASES`; all by default (a quick run leaves out the longest).
        engines: Engines of `ds.fit` to measure; each case has its own default.
        quick: Smaller and fewer.
        check: A stored `results.json` to compare ratios with. A case with a ratio that is much worse is measured up to
            three times more before that is believed. Ratios that only one side has are named.

    Returns:
        The ratios that are worse than the stored ones by more than 1.5 times; empty without `check`.
    """
    options = _options(device, engines, quick)
    names = list(cases) if cases is not None else default_cases(quick)
    _check_cases(names)
    stored = None if check is None else read_stored(check)
    about = about_this_run(options)
    if stored is not None:
        check_comparable(about, stored)
    with one_thread():
        results: list[Result] = []
        for name in names:
            results += _measure(name, options)
            store(output, about, results)  # what was measured stays when a later case is interrupted
        slower: list[Slower] = []
        if stored is not None:
            results, slower = _compare(results, flat_ratios(stored["results"]), options)
            _tell_unmatched(flat_ratios(results), flat_ratios(stored["results"]), names)
    print_results(results)
    page = write_results(output, about, results)
    print(f"Page with pictures: {page}")
    return slower


def _options(device: str, engines: Sequence[str] | None, quick: bool) -> Options:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"`device` must be cpu, cuda or auto; got {device!r}.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("There is no CUDA device on this machine. Use --device cpu.")
    unknown = [engine for engine in engines or () if engine not in ENGINES]
    if unknown:
        raise ValueError(f"There is no engine {unknown[0]!r}; there are {', '.join(ENGINES)}.")
    return Options(device, tuple(engines) if engines else None, quick)


def _check_cases(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in CASES]
    if unknown or not names:
        raise ValueError(f"There is no case {' '.join(unknown[:1])!r}; there are {', '.join(CASES)}.")


def _measure(name: str, options: Options) -> list[Result]:
    print(f"{name}: {CASES[name].summary}", file=sys.stderr, flush=True)
    return CASES[name].run(options)


def _compare(results: list[Result], stored: dict[str, float], options: Options) -> tuple[list[Result], list[Slower]]:
    """Return results, and what is slower than stored however often its case is measured."""
    slower = find_slower(flat_ratios(results), stored)
    for _ in range(_REPEATS):
        for name in dict.fromkeys(worse.name.split(" | ")[0] for worse in slower):
            again = {result["what"]: result for result in _measure(name, options)}
            results = [
                keep_better(result, again[result["what"]]) if result["case"] == name else result for result in results
            ]
        slower = find_slower(flat_ratios(results), stored)
    return results, slower


def _tell_unmatched(now: dict[str, float], stored: dict[str, float], names: Sequence[str]) -> None:
    """Name the ratios that could not be compared."""
    new, gone = find_unmatched(now, stored, names)
    for name in new:
        print(f"Not compared, as it is not stored: {name}", file=sys.stderr)
    for name in gone:
        print(f"Not compared, as it was not measured in this run: {name}", file=sys.stderr)


def about_this_run(options: Options) -> dict[str, Any]:
    """Return what figures depend on: hardware, versions, date and load."""
    packages = ("dissensus", "torch", "numpy", *_PEER_PACKAGES)
    about: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": options.device,
        "quick": options.quick,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": 1,
        "clock": "wall" if options.cuda else "processor time of one thread",
        "load": [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := _version(name)) is not None},
    }
    if options.cuda:
        about |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return about


def _version(package: str) -> str | None:
    try:
        return torch.__version__ if package == "torch" else version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's name, as far as the system tells."""
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
