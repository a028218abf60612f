"""A finished run and new inputs in; for every input a prediction and how uncertain it is out, a part of a file at a time."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from dissensus._files import written_aside
from dissensus._signatures import need
from dissensus.data.files import TABLE_ENDINGS, LoadedPart
from dissensus.data.frames import Part as TablePart
from dissensus.data.frames import table_parts, unique_names
from dissensus.data.tables import LeftOut, columns_of, number_of, texts_of
from dissensus.predictions import predict
from dissensus.recipes.alarms import Calibration, by_target, calibrated_columns, scorable
from dissensus.recipes.data import label_names
from dissensus.recipes.recipe import LoadedRun
from dissensus.scores import REGRESSION_SCORES, all_scores

Table = dict[str, Any]
# Rows of a table that are in memory at once.
_ROWS = 1 << 15
# Images, whose pixels are many.
_PICTURES = 1024
_DRIFT = 100
_TOO_LARGE = "its values are so large that outputs of the ensemble are not finite, or too large to score"


@dataclass(frozen=True)
class Part:
    """Rows of a file: those that can be read, those that cannot and why, and what was assumed."""

    head: Table  # columns that go before predictions: row numbers, file names, labels
    carried: Table  # columns of the table that are copied, after the row numbers
    x: Tensor
    problems: dict[int, str]  # by number of the row in the file
    share: float  # how much of the file is read with this part, from 0 to 1
    notes: tuple[str, ...]

    def without(self, problems: Mapping[int, str]) -> "Part":
        """Return the part without some of its rows, given by their places in it, and why these are left out."""
        kept = np.array([place for place in range(len(self.x)) if place not in problems], dtype=np.int64)
        numbers = self.head["row"]
        return replace(
            self,
            head={name: _rows(values, kept) for name, values in self.head.items()},
            carried={name: _rows(values, kept) for name, values in self.carried.items()},
            x=self.x[torch.from_numpy(kept)],
            problems=self.problems | {int(numbers[place]): why for place, why in problems.items()},
        )


@dataclass
class Scored:
    """What came of scoring a file: rows written, rows left out and why, where these are listed, the least certain rows, and the alarm."""

    listing: Path
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

    Tables and images are read and written a part at a time, so memory does not grow with the file; the output appears when it is
    whole. Rows that cannot be read, or are so far out that outputs overflow, are listed in a file beside it that ends in .bad.csv.
    Columns named in `carry`, and those that identify rows, are copied as the file has them. `progress` gets rows
    done and the share of the file.
    """
    if output.suffix not in (".csv", ".parquet"):
        raise ValueError(f"Scores are written as .csv or .parquet; got {output.name!r}.")
    scored, flagged, say_once = Scored(output.with_suffix(".bad.csv")), 0, cache(say)
    if Path(source).expanduser().resolve() in (output.resolve(), scored.listing.resolve()):
        raise ValueError(f"{source} is the input itself, and would be written over. Write to another file.")
    calibration = None if calibration is None else calibration.for_a_stream()
    output.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(output) as temporary, table_writer(temporary, output.suffix) as write:
        for part in parts_of(run, source, carry):
            for note in part.notes:
                say_once(note)
            predicted, too_large = _predicted(run, part.x, calibration, batch_size)
            part = part.without(dict.fromkeys(too_large, _TOO_LARGE))
            scored.problems |= part.problems
            if predicted:
                write(_table(part, predicted, say_once))
                _keep_worst(scored, part, predicted)
            scored.rows += len(part.x)
            flagged += int(np.sum(predicted.get("flag", 0)))
            progress(scored.rows + len(scored.problems), part.share)
        if not scored.rows:
            row, why = next(iter(scored.problems.items()))
            raise ValueError(f"None of the rows of {source} can be read; row {row}: {why}.")
        _write_problems(scored)
    scored.alarm = _alarm_in_words(calibration, flagged, scored.rows)
    return scored


def _write_problems(scored: Scored) -> None:
    """List the rows that were left out; clear the list of an earlier call where there are none."""
    if not scored.problems:
        scored.listing.unlink(missing_ok=True)
        return
    with written_aside(scored.listing) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("row", "problem"), *sorted(scored.problems.items())])


def _alarm_in_words(calibration: Calibration | None, flagged: int, rows: int) -> str:
    """Say how many rows rang, and whether they are, in their order, a stream like the held-out rows."""
    if calibration is None:
        return ""
    text = f"Alarm: {flagged} of {rows} rows ({calibration.alarm.false_alarms:.3g} of ordinary ones may)"
    if calibration.monitor is None:
        return text
    reached = f"the drift monitor reached {np.exp(min(calibration.monitor.martingale.log_peak, 50)):.3g}"
    if calibration.monitor.alarm(_DRIFT):
        return f"{text}; THE INPUTS HAVE CHANGED: {reached}, once in so many streams like the held-out rows"
    return f"{text}; no sign of a change: {reached}, below {_DRIFT}"


def _table(part: Part, predicted: Table, say: Callable[[str], None]) -> Table:
    """Return the columns of the output; one of the table that is called like one of ours gets a number."""
    ours = part.head | predicted
    names = unique_names([*ours, *part.carried])[len(ours) :]
    for name, written in zip(part.carried, names, strict=True):
        if name != written:
            say(f"column {name!r} of the table is written as {written!r}, since {name!r} is a column of the answers")
    return {"row": ours["row"], **dict(zip(names, part.carried.values(), strict=True)), **ours}


def _keep_worst(scored: Scored, part: Part, predicted: Table) -> None:
    """Remember the five least certain rows."""
    by = next((name for name in ("total_entropy", "total_variance") if name in predicted), None)
    if by is None:
        return
    rows = zip(predicted[by].tolist(), part.head.get("file") or part.head["row"], strict=True)
    scored.worst = nlargest(5, [*scored.worst, *rows], key=itemgetter(0))


def parts_of(run: LoadedRun, source: str, carry: Sequence[str]) -> Iterator[Part]:
    """Yield the rows of a file, in order: tables and images a part at a time, arrays at once."""
    path = Path(source).expanduser()
    if run.preprocessing.columns is not None and path.is_file() and path.suffix.lower() in TABLE_ENDINGS:
        yield from _parts_of_table(run, path, carry)
        return
    if carry:
        raise ValueError(f"Columns of tables are carried, and {source} is none. Leave {carry[0]!r} out.")
    for loaded in run.preprocessing.read_parts(source, _PICTURES):
        yield _part_of_loaded(run, loaded)


def _parts_of_table(run: LoadedRun, path: Path, carry: Sequence[str]) -> Iterator[Part]:
    columns = run.preprocessing.columns
    assert columns is not None
    identifiers = [c.name for c in columns.columns if isinstance(c, LeftOut) and "no two alike" in c.note]
    copied = [name for name in dict.fromkeys([*identifiers, *carry]) if name != run.preprocessing.target]
    for part in table_parts(path, columns.texts, _ROWS, copied):
        if lacking := [name for name in carry if name not in part.frame]:
            raise ValueError(f"There is no column {lacking[0]!r} to carry; there are {', '.join(part.frame.columns)}.")
        yield _part_of_table(run, part, copied)


def _part_of_table(run: LoadedRun, part: TablePart, copied: Sequence[str]) -> Part:
    columns, target = run.preprocessing.columns, run.preprocessing.target
    assert columns is not None
    x, problems = columns.encode(part.frame)
    label = {"label": _labels(run, part.frame, target)} if target in part.frame else {}
    notes = tuple(
        f"column {name!r} holds values that training never saw ({', '.join(map(repr, texts[:3]))}), read as none of its own"
        for name, texts in columns.unseen(part.frame).items()
    )
    whole = Part(
        head={"row": np.arange(part.start, part.start + len(x)), **label},
        carried={name: part.carried[name] for name in copied if name in part.carried},
        x=torch.from_numpy(x),
        problems={},
        share=part.share,
        notes=notes,
    )
    return whole.without(problems)


def _labels(run: LoadedRun, frame: Any, target: str | None) -> Any:
    """Return the targets of rows as the run reads them: texts, as its predictions are, or numbers."""
    texts = texts_of(columns_of(frame[[target]])[str(target)])
    if run.preprocessing.classes is not None:
        return texts
    numbers = (None if text is None else number_of(text) for text in texts)
    return np.array([math.nan if number is None else number for number in numbers])


def _rows(values: Any, kept: np.ndarray) -> Any:
    """Return some rows of a column as a file has it: a list of texts, or an array of pyarrow."""
    return [values[row] for row in kept.tolist()] if isinstance(values, list) else values.take(kept)


def _part_of_loaded(run: LoadedRun, part: LoadedPart) -> Part:
    """Return data that is no table; rows that hold NaN or infinity cannot be predicted."""
    rows = part.loaded
    head: Table = {"row": part.numbers}
    if rows.names is not None:
        head["file"] = list(rows.names)
    if rows.y is not None and rows.y.ndim == 1 and run.preprocessing.classes is not None:
        head["label"] = label_names(rows)
    elif rows.y is not None:
        head |= by_target({"label": rows.y.reshape(len(rows), -1)})
    bad = (~torch.isfinite(rows.x).flatten(1).all(1)).nonzero().flatten().tolist()
    whole = Part(head, {}, rows.x, dict(part.problems), part.share, rows.notes)
    return whole.without(dict.fromkeys(bad, "its inputs hold NaN or infinity"))


def predicted_columns(
    run: LoadedRun, x: Tensor, calibration: Calibration | None = None, batch_size: int = 1024
) -> Table:
    """Return one value an input of each column: its prediction, every score (higher = less certain), and the alarm's answers.

    Columns are `prediction`; `confidence` for classes or `std` for regression; every score; and with a calibration
    `distance` (of tables), `p_value`, `flag`, and `set` or `low` and `high`. With several targets, columns of each end in its number.
    """
    columns, too_large = _predicted(run, x, calibration, batch_size)
    if too_large:
        raise ValueError(f"Row {too_large[0]} cannot be scored: {_TOO_LARGE}.")
    return columns


def _predicted(run: LoadedRun, x: Tensor, calibration: Calibration | None, batch_size: int) -> tuple[Table, list[int]]:
    """Return the columns of inputs whose outputs can be scored, and the places of the others."""
    parts, too_large = [], list[int]()
    for start in range(0, len(x), batch_size):
        inputs = run.preprocessing(x[start : start + batch_size])
        outputs = predict(run.ensemble, inputs, batch_size=batch_size)
        fine = scorable(inputs, outputs).cpu()
        too_large += [start + place for place in (~fine).nonzero().flatten().tolist()]
        if fine.any():
            parts.append(_of_outputs(run, inputs[fine], outputs[:, fine], calibration))
    names = parts[0] if parts else ()
    return {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in names}, too_large


def _of_outputs(run: LoadedRun, x: Tensor, outputs: Tensor, calibration: Calibration | None) -> Table:
    classes = run.preprocessing.classes
    if classes is not None:
        scores = all_scores(outputs)
        confidence, best = outputs.softmax(-1).mean(0).max(-1)
        head = {"prediction": [classes[i] for i in best.tolist()], "confidence": confidence.cpu().numpy()}
        columns = head | {name: values.cpu().numpy() for name, values in scores.items()}
    else:
        likelihood = run.recipe.likelihood
        mean, scale = likelihood.mean_and_scale(outputs)
        scores = {name: score(mean, scale, family=likelihood.family) for name, score in REGRESSION_SCORES.items()}
        columns = by_target({"prediction": mean.mean(0), "std": scores["total_variance"].sqrt(), **scores})
    return columns if calibration is None else columns | calibrated_columns(run, calibration, x, outputs, scores)


@contextmanager
def table_writer(path: Path, ending: str) -> Iterator[Callable[[Table], None]]:
    """Give a function that appends rows, as columns by name, to a .csv or .parquet file."""
    if ending == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            yield partial(_append, file)
        return
    need("Writing .parquet", "data", "pyarrow")
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    with ExitStack() as stack:
        writer = None

        def write(table: Table) -> None:
            nonlocal writer
            # Lists are of texts, also where all of a part are missing.
            columns = {
                name: pyarrow.array(own, "string") if isinstance(own, list) else own for name, own in table.items()
            }
            rows = pyarrow.table(columns, schema=None if writer is None else writer.schema)
            writer = writer or stack.enter_context(ParquetWriter(path, rows.schema))
            writer.write_table(rows)

        yield write


def _append(file: TextIO, table: Table) -> None:
    writer = csv.writer(file, lineterminator="\n")
    if file.tell() == 0:
        writer.writerow(table)
    writer.writerows(zip(*map(_cells, table.values()), strict=True))


def _cells(values: Any) -> list[Any]:
    if isinstance(values, list):
        return values
    if not isinstance(values, np.ndarray):
        return list(values.to_pylist())
    # Predictions: nine digits tell any two float32 numbers apart; more are noise.
    return [f"{value:.9g}" for value in values.tolist()] if values.dtype.kind == "f" else values.tolist()
