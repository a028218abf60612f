"""A finished run and new inputs in; for every input a prediction and how uncertain it is out, a part of a file at a time."""

import csv
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.data.files import TABLE_ENDINGS, Loaded
from dissensus.data.frames import table_parts
from dissensus.data.tables import LeftOut, columns_of, texts_of
from dissensus.objectives import mean_and_scale
from dissensus.predictions import predict
from dissensus.recipes.alarms import Calibration, calibrated_columns
from dissensus.recipes.runs import LoadedRun
from dissensus.recipes.sets import label_names
from dissensus.scores import REGRESSION_SCORES, all_scores

Table = dict[str, Any]
# Rows of a table that are in memory at once.
_ROWS = 1 << 15
_STALE_AFTER = 86400.0
_DRIFT = 100


@dataclass(frozen=True)
class Part:
    """Rows of a file.

    Attributes:
        start: Number of the first row.
        head: Columns that go before predictions: row numbers, identifiers, file names, labels.
        x: Inputs of the rows that can be read.
        problems: Rows that cannot be read, by their number in the file, and why.
        share: How much of the file is read with this part, from 0 to 1.
        notes: What was assumed or changed.
    """

    start: int
    head: Table
    x: Tensor
    problems: dict[int, str]
    share: float
    notes: tuple[str, ...] = ()


@dataclass
class Scored:
    """What came of scoring a file: rows written, rows that could not be read and why, the least certain rows, and the alarm."""

    rows: int = 0
    alarm: str = ""
    problems: dict[int, str] = field(default_factory=dict)
    worst: list[tuple[float, Any]] = field(default_factory=list)


def score_file(
    run: LoadedRun,
    source: str,
    output: Path,
    *,
    calibration: Calibration | None = None,
    carry: Sequence[str] = (),
    batch_size: int = 1024,
    progress: Callable[[int, float], None] = lambda rows, share: None,
    say: Callable[[str], None] = lambda note: None,
) -> Scored:
    """Predict every input of a file, and write one row for each: prediction, every score, and what the alarm says.

    Tables are read and written a part at a time, so memory does not grow with the file. Rows that cannot be read are left out
    and told. The output appears when it is whole.

    Args:
        run: What `load_run` returned; it runs where the ensemble is.
        source: A file or folder of inputs.
        output: A .csv or .parquet file.
        calibration: The run's alarm, for p-value, flag, and set or interval.
        carry: Columns of a table to copy into the output; those that identify rows are copied anyway.
        batch_size: How many inputs go through the members at once.
        progress: Called with rows done and the share of the file.
        say: Called with what was assumed or changed.
    """
    check_table_path(output)
    if Path(source).exists() and output.exists() and output.samefile(source):
        raise ValueError(f"{output} is the input itself. Write to another file.")
    scored, told, flagged = Scored(), set(), 0
    calibration = None if calibration is None else calibration.for_a_stream()
    with written_aside(output) as temporary, ExitStack() as stack:
        write: Callable[[Table], None] | None = None
        for part in parts_of(run, source, carry):
            for note in part.notes:
                if note not in told:
                    told.add(note)
                    say(note)
            scored.problems |= part.problems
            if len(part.x):
                table = part.head | predicted_columns(run, part.x, calibration, batch_size)
                write = write or stack.enter_context(table_writer(temporary, output.suffix))
                write(table)
                _keep_worst(scored, table)
                scored.rows += len(part.x)
                flagged += int(np.sum(table.get("flag", 0)))
            progress(scored.rows + len(scored.problems), part.share)
        if write is None:
            row, why = next(iter(scored.problems.items()))
            raise ValueError(f"None of the rows of {source} can be read; row {row}: {why}.")
    scored.alarm = "" if calibration is None else _alarm_in_words(calibration, flagged, scored.rows)
    return scored


def _alarm_in_words(calibration: Calibration, flagged: int, rows: int) -> str:
    """Say how many rows rang, and whether they are, in their order, a stream like the held-out rows."""
    text = f"Alarm: {flagged} of {rows} rows ({calibration.alarm.false_alarms:.3g} of ordinary ones may)"
    if calibration.monitor is None:
        return text
    reached = f"the drift monitor reached {np.exp(min(calibration.monitor.martingale.log_peak, 50)):.3g}"
    changed = calibration.monitor.alarm(_DRIFT)
    return f"{text}; " + (
        f"THE INPUTS HAVE CHANGED: {reached}, once in so many streams like the held-out rows"
        if changed
        else f"no sign of a change: {reached}, below {_DRIFT}"
    )


def _keep_worst(scored: Scored, table: Table) -> None:
    """Remember the five least certain rows."""
    by = next((name for name in ("total_entropy", "total_variance") if name in table), None)
    if by is None:
        return
    names = table["file"] if "file" in table else table["row"]
    values = np.asarray(table[by])
    for row in np.argsort(-values, kind="stable")[:5].tolist():
        scored.worst.append((float(values[row]), names[row]))
    scored.worst = sorted(scored.worst, key=lambda pair: -pair[0])[:5]


def parts_of(run: LoadedRun, source: str, carry: Sequence[str]) -> Iterator[Part]:
    """Yield the rows of a file, in order: those of a table a part at a time, all else at once."""
    path = Path(source).expanduser()
    columns = run.preprocessing.columns
    if columns is not None and path.is_file() and path.suffix.lower() in TABLE_ENDINGS:
        texts = [c.name for c in columns.columns if c.kind in ("category", "date")]
        identifiers = [c.name for c in columns.columns if isinstance(c, LeftOut) and "no two alike" in c.note]
        for start, frame, share in table_parts(path, texts, _ROWS):
            yield _part_of_table(run, start, frame, share, [*identifiers, *carry])
        return
    yield _part_of_loaded(run, run.preprocessing.read(source))


def _part_of_table(run: LoadedRun, start: int, frame: Any, share: float, carry: Sequence[str]) -> Part:
    columns, target = run.preprocessing.columns, run.preprocessing.target
    assert columns is not None
    x, problems = columns.encode(frame)
    kept = np.array([row for row in range(len(frame)) if row not in problems], dtype=np.int64)
    head: Table = {"row": kept + start, **_carried(frame, carry, target, kept)}
    notes = tuple(
        f"column {name!r} holds values that training never saw ({', '.join(map(repr, texts[:3]))}), read as none of its own"
        for name, texts in columns.unseen(frame).items()
    )
    named = {start + row: why for row, why in problems.items()}
    return Part(start, head, torch.from_numpy(x[kept]), named, share, notes)


def _carried(frame: Any, carry: Sequence[str], target: str | None, kept: Any) -> Table:
    """Return the columns of a table that go into the output as they are, the target last, as `label`."""
    names = [name for name in dict.fromkeys(carry) if name in frame and name != target]
    if target is not None and target in frame:
        names.append(target)
    found = {}
    for name in names:
        values = columns_of(frame[[name]])[name][kept]
        own = texts_of(values) if values.dtype.kind not in "biuf" else values
        found["label" if name == target else name] = own
    return found


def _part_of_loaded(run: LoadedRun, loaded: Loaded) -> Part:
    """Return data that was read whole; rows that hold NaN or infinity cannot be predicted."""
    finite = torch.ones(len(loaded), dtype=torch.bool)
    if loaded.x.is_floating_point():
        finite = torch.isfinite(loaded.x).flatten(1).all(1)
    kept = finite.nonzero().flatten()
    rows = loaded.rows(kept)
    head: Table = {"row": kept.numpy()}
    if rows.names is not None:
        head["file"] = list(rows.names)
    if rows.y is not None and rows.y.ndim == 1:
        classes = run.preprocessing.classes is not None
        head["label"] = label_names(rows) if classes else rows.y.numpy()
    elif rows.y is not None:
        head |= {f"label_{target}": own.numpy() for target, own in enumerate(rows.y.flatten(1).T)}
    bad = (~finite).nonzero().flatten().tolist()
    return Part(0, head, rows.x, dict.fromkeys(bad, "its inputs hold NaN or infinity"), 1.0, loaded.notes)


def predicted_columns(
    run: LoadedRun, x: Tensor, calibration: Calibration | None = None, batch_size: int = 1024
) -> Table:
    """Return one value an input of each column: its prediction, every score (higher = less certain), and the alarm's answers.

    Columns are `prediction`; `confidence` for classes or `std` for regression; every score; and with a calibration
    `distance` (of tables), `p_value`, `flag`, and `set` or `low` and `high`. With several targets, columns of each end in its number.
    """
    prepared = (run.preprocessing(part) for part in x.split(batch_size))
    parts = [
        _of_outputs(run, part, predict(run.ensemble, part, batch_size=batch_size), calibration) for part in prepared
    ]
    return {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}


def _of_outputs(run: LoadedRun, x: Tensor, outputs: Tensor, calibration: Calibration | None) -> Table:
    classes = run.preprocessing.classes
    if classes is not None:
        scores = all_scores(outputs)
        confidence, best = outputs.softmax(-1).mean(0).max(-1)
        head = {"prediction": [classes[i] for i in best.tolist()], "confidence": confidence.cpu().numpy()}
        columns = head | {name: values.cpu().numpy() for name, values in scores.items()}
    else:
        mean, scores = _variances(run, outputs)
        columns = _by_target({"prediction": mean.mean(0), "std": scores["total_variance"].sqrt(), **scores})
    return columns if calibration is None else columns | calibrated_columns(run, calibration, x, outputs, scores)


def _variances(run: LoadedRun, outputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    likelihood = run.recipe.likelihood
    density = likelihood.kind == "density"
    mean, scale = mean_and_scale(outputs) if density else (outputs, torch.zeros_like(outputs))
    family = "laplace" if likelihood.name == "laplace_nll" else "gaussian"
    return mean, {name: score(mean, scale, family=family) for name, score in REGRESSION_SCORES.items()}


def _by_target(columns: dict[str, Tensor]) -> Table:
    targets = columns["prediction"].shape[-1]
    return {
        name if targets == 1 else f"{name}_{target}": values[:, target].cpu().numpy()
        for target in range(targets)
        for name, values in columns.items()
    }


def check_table_path(path: Path) -> None:
    """Refuse a file name that says no format."""
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"Scores are written as .csv or .parquet; got {path.name!r}.")


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a file beside `path` to write to, which takes its name when all went well; clear those that dead processes left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        if _is_stale(left):
            left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{_host()}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _host() -> str:
    return platform.node().replace(".", "-")


def _is_stale(path: Path) -> bool:
    """Whether nobody writes to a file any more: its process is gone, or, on another machine, it was left alone for a day."""
    host, process = path.name.removesuffix(".tmp").split(".")[-2:]
    with suppress(OSError, ValueError):
        if host != _host():
            return time.time() - path.stat().st_mtime > _STALE_AFTER
        os.kill(int(process), 0)
        return int(process) == os.getpid()
    return True


@contextmanager
def table_writer(path: Path, ending: str) -> Iterator[Callable[[Table], None]]:
    """Give a function that appends rows, as columns by name, to a .csv or .parquet file."""
    if ending == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            yield lambda table: _append(writer, table, first=file.tell() == 0)
        return
    pyarrow = _pyarrow()
    writers: list[Any] = []

    def write(table: Table) -> None:
        rows = pyarrow.table(table) if not writers else pyarrow.table(table, schema=writers[0].schema)
        if not writers:
            writers.append(pyarrow.parquet.ParquetWriter(path, rows.schema))
        writers[0].write_table(rows)

    try:
        yield write
    finally:
        for writer in writers:
            writer.close()


def _append(writer: Any, table: Table, *, first: bool) -> None:
    if first:
        writer.writerow(table)
    columns = [map(_cell, np.asarray(values).tolist()) for values in table.values()]
    writer.writerows(zip(*columns, strict=True))


def _cell(value: Any) -> Any:
    """Nine digits tell any two float32 numbers apart; more are noise."""
    return f"{value:.9g}" if isinstance(value, float) else value


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Writing .parquet needs pyarrow, which this environment lacks. Write .csv, or install with: "
            "pip install 'dissensus[data]'"
        ) from None
    return pyarrow
