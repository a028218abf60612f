"""Ratios of this run against stored ones: what became slower."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# A ratio this many times smaller than the stored one is a regression; less is noise of a shared machine.
TOLERANCE = 1.5


class Slower(NamedTuple):
    """A ratio that became worse."""

    name: str
    stored: float
    now: float

    def __str__(self) -> str:
        return f"{self.name}: {self.now:.3g}, stored {self.stored:.3g} ({self.stored / self.now:.2f} x worse)"


def flat_ratios(results: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return every ratio under one name.

    Example:
        >>> flat_ratios([{"case": "heads", "what": "2 of 50", "ratios": {"eager against plain loop": 3.0}}])
        {'heads | 2 of 50 | eager against plain loop': 3.0}
    """
    return {
        f"{result['case']} | {result['what']} | {name}": float(value)
        for result in results
        for name, value in result["ratios"].items()
    }


def read_stored(path: Path) -> dict[str, Any]:
    """Read a stored `results.json`; ValueError if it is none."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        flat_ratios(stored["results"])
        stored["about"]["device"], stored["about"]["quick"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} must be a results.json that `dissensus bench` wrote; it is not.") from None
    return stored


def check_comparable(about: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Refuse to compare a quick run with a full one, or a CPU with a GPU."""
    for key in ("device", "quick"):
        if about[key] != stored["about"][key]:
            raise ValueError(
                f"Stored ratios were measured with {key} = {stored['about'][key]}, these with {key} = {about[key]}. "
                "Measure in the same way."
            )


def find_slower(now: Mapping[str, float], stored: Mapping[str, float], tolerance: float = TOLERANCE) -> list[Slower]:
    """Return the ratios that are worse than the stored ones by more than the tolerance.

    Ratios that only one side has are passed over, `find_unmatched` names them; ValueError if they have none in common.

    Example:
        >>> find_slower({"a": 2.0, "b": 1.0}, {"a": 2.9, "b": 2.0})
        [Slower(name='b', stored=2.0, now=1.0)]
    """
    common = [name for name in now if name in stored]
    if not common:
        raise ValueError("None of the stored ratios was measured in this run; name the same cases and engines.")
    return [Slower(name, stored[name], now[name]) for name in common if stored[name] > tolerance * now[name]]


def find_unmatched(
    now: Mapping[str, float], stored: Mapping[str, float], cases: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Return the ratios that only this run has, and those of its cases that only the stored file has.

    Example:
        >>> find_unmatched({"heads | new | a": 1.0}, {"heads | old | a": 1.0, "scaling | b | a": 1.0}, ["heads"])
        (['heads | new | a'], ['heads | old | a'])
    """
    run = set(cases)
    return (
        [name for name in now if name not in stored],
        [name for name in stored if name not in now and name.split(" | ")[0] in run],
    )


def keep_better(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result measured twice, each ratio and time as the better of both."""
    return _merge(first, second, max)


def keep_worse(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result measured twice, each ratio as the worse of both and each time as the better: what to store."""
    return _merge(first, second, min)


def _merge(
    first: Mapping[str, Any], second: Mapping[str, Any], pick: Callable[[float, float], float]
) -> dict[str, Any]:
    ratios = {name: pick(value, second["ratios"][name]) for name, value in first["ratios"].items()}
    sides = {
        name: min(side, second["sides"][name], key=lambda timed: timed["ms"]) for name, side in first["sides"].items()
    }
    return {**first, "ratios": ratios, "sides": sides}
