"""What happens in training: a tidy table, one row for each check and member, and one line on the terminal."""

import csv
import io
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from dissensus._files import replace_file

Row = dict[str, float | int]
# Of what a history holds, what a line of progress has no room for.
_NOT_SHOWN = (
    *("seconds", "lr_factor", "colluding", "train_member_error", "train_ensemble_error"),
    *("validation_member_error", "validation_ensemble_error", "validation_diversity"),
)


class History(Sequence[Row]):
    """Rows with the columns epoch, step, member, loss, every named part, validation values and seconds.

    Values that belong to the ensemble as a whole stand in the row of every member. `history["loss"]` is a column;
    `history.by_epoch("loss")` its mean over members for each check.

    Example:
        >>> history = History()
        >>> history.add({"epoch": 1, "step": 10}, members=[0, 1], per_member={"loss": [0.5, 0.7]}, whole={"lr": 0.1})
        >>> history["loss"], history.by_epoch("loss")
        ([0.5, 0.7], [0.6])
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.rows = list(rows)

    @classmethod
    def load(cls, path: Path) -> "History":
        """Read what `save` wrote."""
        with open(path, newline="", encoding="utf-8") as file:
            return cls([{n: float(v) for n, v in row.items() if v} for row in csv.DictReader(file)])

    def add(
        self,
        head: Mapping[str, int],
        members: Sequence[int],
        per_member: Mapping[str, Sequence[float]],
        whole: Mapping[str, float],
    ) -> None:
        """Append one row a member."""
        for place, member in enumerate(members):
            own = {name: values[place] for name, values in per_member.items()}
            self.rows.append({**head, "member": member, **own, **whole})

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        """Return a column by name, or a row by number."""
        if not isinstance(key, str):
            return self.rows[key]
        if key not in self.columns:
            raise KeyError(f"no column {key!r}; there are {', '.join(self.columns)}")
        return [row.get(key, float("nan")) for row in self.rows]

    def by_epoch(self, name: str) -> list[float]:
        """Return a column's mean over members for each check, in order; see `mean_of`."""
        groups: dict[int, list[float]] = {}
        for row in self.rows:
            if name in row:
                groups.setdefault(int(row["step"]), []).append(float(row[name]))
        return [mean_of(values) for values in groups.values()]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame (pandas must be installed)."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=self.columns)

    def to_csv(self) -> str:
        """Return the table as CSV text."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def save(self, path: Path) -> None:
        """Write the table as CSV, replacing the file in one step."""
        replace_file(path, self.to_csv())

    def __repr__(self) -> str:
        return f"History({len(self.rows)} rows: {', '.join(self.columns)})"


def mean_of(values: Sequence[float]) -> float:
    """Return the mean over members that have a value; one that no step drew since the last check has NaN.

    Example:
        >>> mean_of([1.0, math.nan, 3.0])
        2.0
    """
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def still_falls(curve: Sequence[float]) -> bool:
    """Whether a loss, check by check, was still falling when training ended: by more than a twentieth of its whole fall lately.

    Example:
        >>> still_falls([1.0, 0.8, 0.6, 0.4, 0.2]), still_falls([1.0, 0.5, 0.3, 0.2, 0.19, 0.2, 0.19])
        (True, False)
    """
    tail = max(1, len(curve) // 5)
    windows = [curve[start : start + tail] for start in range(len(curve) % tail, len(curve), tail)]
    means = [sum(window) / tail for window in windows]
    if len(means) < 2 or not all(map(math.isfinite, means)):
        return False
    return means[-1] <= min(means) and means[-2] - means[-1] > 0.05 * (curve[0] - means[-1])


class Progress:
    """Shows epoch, loss, its named parts and the time left: rewritten ten times a second on a terminal, else a line an epoch."""

    def __init__(
        self, total_steps: int, epochs: int, done: int = 0, stream: TextIO | None = None, show: bool | None = None
    ) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.show = self.stream.isatty() if show is None else show
        self.total, self.epochs = total_steps, epochs
        self.start_step, self.start = done, time.monotonic()
        self.terminal = self.stream.isatty()
        self._shown = 0.0
        self._epoch = 0
        self._values = ""

    def update(self, step: int, epoch: int) -> None:
        """Show that this many steps are done."""
        now = time.monotonic()
        due = now - self._shown >= 0.1 if self.terminal else epoch > self._epoch
        if not self.show or not due:
            return
        self._shown, self._epoch = now, epoch
        told = f"epoch {epoch}/{self.epochs}{self._values}  {self._left(step, now)}"
        bar = "█" * int(20 * step / self.total)
        self._write(f"\r\x1b[2K{bar:░<20} {told}" if self.terminal else f"{told}\n")

    def values(self, values: Mapping[str, float]) -> None:
        """Set the numbers that are shown."""
        self._values = "".join(f"  {name} {n:.4g}" for name, n in values.items() if name not in _NOT_SHOWN)

    def close(self) -> None:
        """Leave the last state on the screen and end the line."""
        if self._shown and self.terminal:
            self._write("\n")

    def note(self, text: str) -> None:
        """Say something on a line of its own."""
        self._write(f"\r\x1b[2K{text}\n" if self.terminal else f"{text}\n")

    def _write(self, text: str) -> None:
        if self.show:
            self.stream.write(text)
            self.stream.flush()

    def _left(self, step: int, now: float) -> str:
        made = step - self.start_step
        if made <= 0:
            return "…"
        seconds = int((now - self.start) / made * (self.total - step))
        return f"{seconds // 60}:{seconds % 60:02d} left"
