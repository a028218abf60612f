"""What happened in training, as a tidy table: one row for each check and member."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dissensus._files import replace_file

Row = dict[str, float | int]


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

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

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
