"""Named pieces of a study in, one line of JSON for each that is done: what was interrupted goes on where it stopped."""

import gc
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]

# Of arms that were not run, so many are named on the screen; the page has all of them.
_NAMED = 8
# Where the arm under way may keep checkpoints, so that it goes on where it was ended; see `fit_images`.
UNDER_WAY: ContextVar[Path | None] = ContextVar("UNDER_WAY", default=None)


@dataclass(frozen=True)
class Arm:
    """One piece of a study."""

    name: str  # Tells it from all others, such as "resnet18 M=5 beta=0.4 seed=0".
    # Does it; returns what is to be kept, as JSON takes it. `"line"` in it is what the screen shows.
    work: Callable[[], Record]
    like: str = ""  # Arms of the same kind take about as long; what one took tells whether there is time for the next.


@dataclass(frozen=True)
class Arms:
    """What came of a study's arms."""

    done: Mapping[str, Record]  # Record of each finished arm by name, in the order of the study.
    not_run: Mapping[str, str] = field(default_factory=dict)  # Arms that were not begun, or failed: name to reason.


def chosen(names: Iterable[str], patterns: Sequence[str] | None) -> list[str]:
    """Return the names that fit one of the patterns, all without patterns; refuse patterns that fit nothing.

    `*` is anything; a plain word fits every name that begins with it or, if none does, that has a word beginning with it.

    Example:
        >>> chosen(["cnn M=5 beta=0", "cnn M=5 beta=1", "vgg M=5 beta=0"], ["cnn", "*beta=0"])
        ['cnn M=5 beta=0', 'cnn M=5 beta=1', 'vgg M=5 beta=0']
        >>> chosen(["cnn M=5 beta=1", "cnn M=5 beta=1 drop=0.4", "cnn M=10 beta=1"], ["drop", "M=10"])
        ['cnn M=5 beta=1 drop=0.4', 'cnn M=10 beta=1']
    """
    names = list(names)
    if not patterns:
        return names
    fitting: set[str] = set()
    for pattern in patterns:
        tried = (pattern,) if "*" in pattern else (f"{pattern}*", f"* {pattern}*")
        found = next(filter(None, ([name for name in names if fnmatchcase(name, each)] for each in tried)), None)
        if found is None:
            raise ValueError(f"No arm of this study fits {pattern!r}; there are {'; '.join(names[:6])}; ...")
        fitting.update(found)
    return [name for name in names if name in fitting]


def file_name(name: str) -> str:
    """Return the name of an arm as that of a file."""
    return name.replace(" ", "_").replace("=", "")


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return a short name of settings, for folders: arms of other settings are others."""
    return sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:8]


# Prints a line that is seen at once, also in a file.
print_now = partial(print, flush=True)


def run_arms(
    arms: Sequence[Arm],
    folder: Path,
    *,
    settings: Mapping[str, Any],
    minutes: float | None = None,
    only: Sequence[str] | None = None,
    say: Callable[[str], None] = print_now,
) -> Arms:
    """Do arms in order of importance, keeping records in `arms.jsonl` of the folder as they come, checkpoints until then in `unfinished`.

    An arm that the file has, done with the same settings (what records depend on besides the arm's name), is not done again. No arm is
    begun once the `minutes` are spent, or where one like it took longer than what is left. One that fails (it diverged, memory ran out)
    is named, and the next is begun. `only` does arms that fit one of these patterns; see `chosen`.
    """
    wanted = set(chosen([arm.name for arm in arms], only))
    arms = [arm for arm in arms if arm.name in wanted]
    path = folder / "arms.jsonl"
    plain = json.loads(json.dumps(dict(settings)))
    found = read_records(path, plain)
    done = {arm.name: found[arm.name] for arm in arms if arm.name in found}
    took = {arm.like: found[arm.name]["arm_seconds"] for arm in arms if arm.name in done}
    not_run: dict[str, str] = {}
    start = time.monotonic()
    digest = digest_of(plain)
    if done:
        say(f"{len(done)} of {len(arms)} arms were done before")
    for number, arm in enumerate(arms, start=1):
        if arm.name in done:
            continue
        left = inf if minutes is None else 60 * minutes - (time.monotonic() - start)
        if left <= 0 or took.get(arm.like, 0.0) > left:
            not_run[arm.name] = "no time left"
            continue
        unfinished, begun = folder / "unfinished" / f"{file_name(arm.name)}-{digest}", time.monotonic()
        outside = UNDER_WAY.set(unfinished)
        try:
            record = dict(arm.work())
        except RuntimeError as failure:  # diverged, or out of memory
            not_run[arm.name] = (str(failure).splitlines() or [type(failure).__name__])[0]
            say(f"[{number}/{len(arms)}] {arm.name}: failed: {not_run[arm.name]}")
            continue
        finally:
            UNDER_WAY.reset(outside)
            # Graphs captured on a GPU keep their memory until the cycles they are part of are collected.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        took[arm.like] = record["arm_seconds"] = time.monotonic() - begun
        done[arm.name] = keep(path, arm.name, plain, record)
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # not there, or another arm's is in it
            unfinished.parent.rmdir()
        say(f"[{number}/{len(arms)}] {arm.name}: {record.get('line', 'done')}, {record['arm_seconds']:.1f} s")
    if not_run:
        more = f"; and {len(not_run) - _NAMED} more" if len(not_run) > _NAMED else ""
        say(f"{len(not_run)} arms were not run: {'; '.join(list(not_run)[:_NAMED])}{more}")
    return Arms({arm.name: done[arm.name] for arm in arms if arm.name in done}, not_run)


def read_records(path: Path, settings: Mapping[str, Any]) -> dict[str, Record]:
    """Return records that were made with these settings; a last line that was cut off is passed over."""
    found: dict[str, Record] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["settings"] == settings:
            found[entry["arm"]] = entry["record"]
    return found


def keep(path: Path, arm: str, settings: Mapping[str, Any], record: Record) -> Record:
    """Add a record to the file, with when and on what it was made: a page may be written elsewhere; return it."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    record["made"] = {"date": date.today().isoformat(), "torch": torch.__version__, "device": device}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"arm": arm, "settings": settings, "record": record})
    with open(path, "a+b") as file:
        # A line that was cut off must not swallow this one.
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write(b"\n")
        file.write(text.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return record


def processor() -> str:
    """Return the name of the processor; of machines that do not tell it, its architecture."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())
