"""`dissensus score`: a trained run and files of inputs in, a table of predictions and uncertainty for each out."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from glob import glob, has_magic
from os.path import commonpath, dirname, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dissensus.cli.options import AllowImport, BatchSize, Device, RunFolder, load_trained, note, say

if TYPE_CHECKING:
    from dissensus.recipes.scoring import Scored

SOME_ROWS_BAD = 3
_SHOWN = 10


def score(
    run: RunFolder,
    data: Annotated[
        str,
        Argument(
            metavar="DATA", help="A file or folder of inputs; FILE.npz#test for a split; 'in/*.parquet' for many files."
        ),
    ],
    output: Annotated[
        Path,
        Option("--output", "-o", metavar="FILE|DIR", help="Where to write: .csv or .parquet; a folder for many files."),
    ],
    carry: Annotated[
        list[str] | None,
        Option(metavar="COLUMN", help="A column of the table to copy; may be repeated. Identifiers are copied anyway."),
    ] = None,
    false_alarms: Annotated[
        float | None, Option(help="Rate of false alarms to allow.", show_default="the recipe's")
    ] = None,
    coverage: Annotated[
        float | None, Option(help="How often sets and intervals are to hold the truth.", show_default="the recipe's")
    ] = None,
    shard: Annotated[
        str | None,
        Option(
            metavar="I/N", help="Of many files only every Nth, from the Ith (0 to N-1, or 1 to N).", show_default=False
        ),
    ] = None,
    ray: Annotated[
        bool, Option("--ray", help="Score files side by side on a Ray cluster, or this machine's CPUs.")
    ] = False,
    batch_size: BatchSize = 1024,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Predict inputs with a run, and say how uncertain each prediction is.

    Writes one row an input: prediction, confidence, every score (higher where the ensemble is less certain), the alarm's p-value
    and flag, and a prediction set or interval. Rows and images that cannot be read, or whose values are far too large, are listed
    in a file that ends in .bad.csv, the others are written, and the exit code is 3. Of many files one output is written for each;
    those that are there are not made again, and files in their folder are no inputs.
    """
    if has_magic(data) and not Path(data).exists():
        files = [pair for pair in _many_files(data, output, shard) if not _is_there(pair[1])]
    elif shard is None:
        files = [(data, output)]
    else:
        raise ValueError("--shard is for many files, such as 'in/*.parquet'; one file has no parts.")
    settings = (run, device, allow_import, (false_alarms, coverage), tuple(carry or ()), batch_size)
    if files and sum((_score_with_ray if ray else _score_here)(files, *settings)):
        raise typer.Exit(SOME_ROWS_BAD)


def _scorer(folder: Path, device: str, allow_import: bool, rates: Any, carry: Sequence[str], batch_size: int) -> Any:
    """Read a run; return what scores a file with it."""
    from dissensus.recipes.alarms import load_calibration
    from dissensus.recipes.scoring import score_file

    run = load_trained(folder, device, allow_import)
    calibration = load_calibration(folder, run, *rates)
    return partial(score_file, run, calibration=calibration, carry=carry, batch_size=batch_size)


def _score_here(files: Sequence[tuple[str, Path]], *settings: Any) -> Iterator[int]:
    """Score files one after another; yield how many rows of each could not be read."""
    score_file = _scorer(*settings)
    for source, target in files:
        scored = partial(score_file, source, target, progress=_Line(source), say=partial(note, source))
        yield _told(source, target, scored, alone=len(files) == 1)


_ready = cache(_scorer)


def _score_one(source: str, target: Path, *settings: Any) -> "Scored":
    """Score a file in a process of a cluster, which reads the run once."""
    return _ready(*settings)(source, target, say=partial(note, source))


def _score_with_ray(
    files: Sequence[tuple[str, Path]], folder: Path, device: str, allow_import: bool, *others: Any
) -> Iterator[int]:
    """Score files on a Ray cluster, each on a GPU, or a CPU where there is none."""
    from dissensus.recipes.sweeps import ray_task

    load_trained(folder, "cpu", allow_import)  # says here, and not in a cluster, what is wrong with it
    ray, task = ray_task(_score_one)
    settings = (folder.absolute(), device, allow_import, *others)
    scored = [task.remote(os.path.abspath(source), target.absolute(), *settings) for source, target in files]
    begun = time.monotonic()
    try:
        for done, ((source, target), result) in enumerate(zip(files, scored, strict=True), start=1):
            yield _told(source, target, partial(ray.get, result), alone=len(files) == 1)
            say(f"{done} of {len(files)} files, {_left((time.monotonic() - begun) / done * (len(files) - done))}")
    except ray.exceptions.RayTaskError as problem:
        raise problem.cause from None


def _left(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"


def _many_files(data: str, output: Path, shard: str | None) -> list[tuple[str, Path]]:
    """Return the files to score, and where the answers go."""
    found = _inputs(data, output)
    place, number = (0, 1) if shard is None else _shard(shard)
    base = Path(commonpath(map(dirname, found)))
    targets = [output / Path(path).relative_to(base) for path in found]
    endings = [".parquet" if target.suffix.lower() == ".parquet" else ".csv" for target in targets]
    pairs = list(zip(found, map(Path.with_suffix, targets, endings), strict=True))
    _check_apart(pairs)
    return pairs[place::number]


def _inputs(data: str, output: Path) -> list[str]:
    """Return the files that a pattern names, without those that lie where the answers go."""
    found = sorted(filter(isfile, glob(data, recursive=True)))
    if not found:
        raise ValueError(f"No file is called like {data}.")
    if output.suffix in (".csv", ".parquet"):
        raise ValueError(f"Many files are written into a folder; {output} is named like a file.")
    others = [path for path in found if not Path(path).resolve().is_relative_to(output.resolve())]
    if len(others) in (0, len(found)):  # inputs may all lie in or below the folder of the answers
        return found
    say(f"{len(found) - len(others)} files lie where the answers go, in {output}, and are not scored.")
    return others


def _check_apart(pairs: Sequence[tuple[str, Path]]) -> None:
    """Refuse answers that would be written over an input, or over each other."""
    inputs = {Path(source).resolve() for source, _ in pairs}
    sources: dict[Path, str] = {}
    for source, target in pairs:
        if target.resolve() in inputs:
            raise ValueError(f"The answers for {source} would be written to {target}, an input. Name another folder.")
        if (other := sources.setdefault(target, source)) != source:
            raise ValueError(
                f"{other} and {source} would both be written to {target}. Rename one, or score them apart."
            )


def _is_there(target: Path) -> bool:
    if target.exists():
        say(f"{target} is there already.")
    return target.exists()


def _shard(text: str) -> tuple[int, int]:
    place, _, number = text.partition("/")
    if not (place.isdigit() and number.isdigit() and int(number) > 0 and int(place) <= int(number)):
        raise ValueError(f"A shard is I/N, such as 2/8 with I from 0 to 7 or 1 to 8; got {text!r}.")
    return int(place) % int(number), int(number)


def _told(source: str, target: Path, score: Callable[[], "Scored"], *, alone: bool) -> int:
    """Score a file and say what came of it; return how many rows could not be read, 1 for a whole file that is not `alone`."""
    try:
        scored = score()
    except ValueError as problem:
        if alone:
            raise
        say(f"{source} was left out: {getattr(problem, 'cause', problem)}")  # Ray's errors have a cause
        return 1
    typer.echo(f"{scored.rows} inputs scored: {target}")
    if scored.alarm:
        typer.echo(scored.alarm)
    if scored.worst:
        typer.echo(f"Least certain: {', '.join(str(name) for _, name in scored.worst)}")
    if scored.problems:
        say(f"{len(scored.problems)} rows could not be read and were left out; all are listed in {scored.listing}:")
        for row, why in list(scored.problems.items())[:_SHOWN]:
            say(f"  row {row}: {why}")
    return len(scored.problems)


class _Line:
    """How far a file is: one line that is rewritten on a terminal, one every ten seconds in a log."""

    def __init__(self, source: str) -> None:
        self.source, self.terminal = source, sys.stderr.isatty()
        self.start = self.shown = time.monotonic()

    def __call__(self, rows: int, share: float) -> None:
        """Say that so many rows, and this share of the file, are done."""
        now = time.monotonic()
        if self.terminal and share == 1.0:
            typer.echo("\r\x1b[2K", err=True, nl=False)
        elif share < 1.0 and now - self.shown > (0.2 if self.terminal else 10.0):
            self.shown = now
            left = _left((now - self.start) / max(share, 1e-9) * (1 - share))
            text = f"{self.source}: {rows} rows, {100 * share:.0f} %, {left}"
            typer.echo(f"\r\x1b[2K{text}" if self.terminal else text, err=True, nl=not self.terminal)
