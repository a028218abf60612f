"""Tables of mixed columns as numbers: what each column is, decided once on the training rows, and the same ever after.

Nothing here needs torch, and encoding a mapping of plain lists needs no pandas either.
"""

import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime
from typing import Any, ClassVar

import numpy as np

MOST_LEVELS = 100
"""A text column keeps as many of its values, the most frequent ones; the others are read as none of them."""

MISSING = frozenset(
    [
        *["", "?", "NA", "N/A", "n/a", "#N/A", "#N/A N/A", "#NA", "<NA>", "NULL", "null", "None", "NaT"],
        *["NaN", "nan", "-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"],
    ]
)
"""Texts that stand for a missing value, in whatever kind of file."""

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_BOOLEAN = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
_ID_NAMES = re.compile(r"(unnamed: \d+|index|level_0|(.*[_ .-])?(id|uuid|guid)|row[_ ]?(id|number|nr)?)")
_DATE_FORMATS = ("ISO", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%Y/%m/%d", "%d-%m-%Y", "%b %d, %Y", "%d %b %Y")
_DAY = 86400.0
PERIODS = {"year": 365.2425, "week": 7.0, "day": 1.0}
# What chance alone would do less often than once in e^20 cases is no chance.
_SURELY = 20

Problems = dict[int, str]
"""Rows that cannot be read, and why."""


def columns_of(table: Any) -> dict[str, np.ndarray]:
    """Return the columns of a DataFrame of pandas or polars, of a mapping of lists, or of an array `(rows, columns)`.

    Missing values are NaN in columns of numbers, NaT in columns of times and None elsewhere.

    Example:
        >>> columns_of({"age": [31, 46], "town": ["Ulm", None]})["town"].tolist()
        ['Ulm', None]
    """
    if hasattr(table, "columns") or isinstance(table, Mapping):
        # A table of pyarrow calls its names otherwise.
        names = getattr(table, "column_names", getattr(table, "columns", table))
        return {str(name): _plain(table[name]) for name in names}
    array = np.asarray(table)
    if array.ndim != 2:
        raise ValueError(f"A table has rows and columns; got an array shaped {array.shape}.")
    return {str(number): _plain(array[:, number]) for number in range(array.shape[1])}


def _plain(values: Any) -> np.ndarray:
    """Return a column as numbers, booleans, times or objects of numpy."""
    if hasattr(values, "isna"):
        return _of_pandas(values)
    if hasattr(values, "to_numpy"):
        array = values.to_numpy()
    elif isinstance(values, np.ndarray):
        array = values
    else:
        found = list(values)
        # Beside numbers, numpy would write None as text, numbers as words and true as 1.
        kinds = set(map(type, found))
        mixed = (bool in kinds and len(kinds) > 1) or any(isinstance(value, str) or value is None for value in found)
        array = np.array(found, dtype=object if mixed else None)
    return array if array.dtype.kind in "biufM" else array.astype(object)


def _of_pandas(values: Any) -> np.ndarray:
    """Return a column of pandas, whose own types know more kinds of missing values."""
    missing = values.isna().to_numpy()
    kind = values.dtype.kind if not hasattr(values, "cat") else "O"
    if kind == "M":
        return (values.dt.tz_convert(None) if getattr(values.dt, "tz", None) else values).to_numpy()
    if kind in "iufb" and not missing.any():
        return values.to_numpy()
    if kind in "iuf":
        return values.to_numpy(np.float64, na_value=np.nan)
    array = values.to_numpy(object).copy()
    array[missing] = None
    return array


def texts_of(values: np.ndarray) -> list[str | None]:
    """Return each value as text without blanks around it, whatever stands beside it; None where it is missing."""
    if values.dtype.kind == "M":
        return _times(values)
    return [_text(value) for value in values.tolist()]


_FLOATS, _DATES = (float, np.floating), (datetime, np.datetime64)


def _text(value: Any) -> str | None:
    if isinstance(value, _FLOATS):
        return None if value != value else _short(float(value))
    text = str(value).strip()
    if text in MISSING:
        return None
    if isinstance(value, _DATES):
        if isinstance(value, datetime) and value.tzinfo is not None:
            value = value.astimezone(UTC).replace(tzinfo=None)
        return _times(np.array([value], dtype="datetime64[us]"))[0]
    return text


def _short(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**63 else repr(value)


def _times(values: np.ndarray) -> list[str | None]:
    texts = np.datetime_as_string(values.astype("datetime64[us]")).tolist()
    return [None if text == "NaT" else text.removesuffix(".000000") for text in texts]


def number_of(text: str) -> float | None:
    """Return what a text says as a number; commas may stand between thousands.

    Example:
        >>> number_of("12,000"), number_of("1e3"), number_of("12 of 20")
        (12000.0, 1000.0, None)
    """
    plain = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    try:
        return float(plain) if "_" not in plain else None
    except ValueError:
        return None


@dataclass(frozen=True)
class _Readable:
    """A column that becomes features; with an `indicator`, a further one says where values are missing, as some were in training."""

    name: str
    indicator: bool = field(default=False, kw_only=True)
    note: str = field(default="", kw_only=True)

    @abstractmethod
    def codes(self, values: np.ndarray, problems: Problems) -> np.ndarray:
        """Return a number for each value, `(rows,)`, NaN where it is missing; rows that cannot be read are added to the problems."""

    @property
    @abstractmethod
    def _own_features(self) -> tuple[str, ...]: ...

    @abstractmethod
    def _made_of(self, codes: Any, xp: Any) -> Any:
        """Return its own features of codes, `(rows, features)`."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        return (*self._own_features, f"{self.name} missing") if self.indicator else self._own_features

    def of_codes(self, codes: Any, xp: Any = np) -> Any:
        """Return the features of codes, `(rows, features)`: arrays of numpy, or with torch for `xp` tensors, so that files can hold it."""
        parts = [self._made_of(codes, xp), *([xp.isnan(codes)[:, None]] if self.indicator else [])]
        return xp.concatenate([xp.asarray(part, dtype=codes.dtype) for part in parts], 1)

    def learn(self, values: np.ndarray) -> "Column":
        """Return the column with what training rows tell about it."""
        codes = self.codes(values, {})
        known = codes[~np.isnan(codes)]
        if not len(known):
            return LeftOut(self.name, "it is empty")
        learned = self._learned(known)
        return replace(self, indicator=len(known) < len(codes), **learned)  # type: ignore[return-value]

    def _learned(self, known: np.ndarray) -> dict[str, Any]:
        return {"fill": float(np.median(known))}

    def _refuse(self, rows: Iterable[int], wanted: str, values: Any, problems: Problems) -> None:
        for row in rows:
            must = f"column {self.name!r} must hold {wanted}"
            problems.setdefault(row, f"{must}, as in training; it holds {values[row]!r} there")


@dataclass(frozen=True)
class Number(_Readable):
    """A column of numbers, or (`boolean`) of true and false; words in `empty` stand for a missing value, beside the usual ones.

    `fill`, the median of the training rows, stands for a missing value.
    """

    kind: ClassVar[str] = "number"
    fill: float = math.nan
    boolean: bool = False
    empty: tuple[str, ...] = ()

    @property
    def read_as(self) -> str:
        """What the column is, in a word."""
        return "true or false" if self.boolean else "number"

    @property
    def _own_features(self) -> tuple[str, ...]:
        return (self.name,)

    def codes(self, values: np.ndarray, problems: Problems) -> np.ndarray:
        """Return the numbers, as `_Readable.codes` says."""
        if values.dtype.kind == "b" or (values.dtype.kind in "iuf" and not self.boolean):
            numbers = values.astype(np.float64)
        else:
            texts = texts_of(values)
            known = {text: self._number(text) for text in set(texts)}
            wrong = [row for row, text in enumerate(texts) if known[text] is None]
            self._refuse(wrong, "true or false" if self.boolean else "numbers", texts, problems)
            numbers = np.array([known[text] for text in texts], dtype=np.float64)
        too_large = np.abs(numbers) > np.finfo(np.float32).max
        for row in np.flatnonzero(too_large).tolist():
            problems.setdefault(row, f"column {self.name!r} must hold finite numbers; it holds {numbers[row]:g} there")
        return np.where(too_large, np.nan, numbers)

    def _number(self, text: str | None) -> float | None:
        if text is None or text in self.empty:
            return math.nan
        number = None if self.boolean else number_of(text)
        return _BOOLEAN.get(text.lower()) if number is None else number

    def _made_of(self, codes: Any, xp: Any) -> Any:
        return xp.where(xp.isnan(codes), _number_like(codes, self.fill, xp), codes)[:, None]


@dataclass(frozen=True)
class Category(_Readable):
    """A column of words: one 0/1 feature for each of its `levels`; all are 0 for others, such as the `rarer` ones of the training rows."""

    kind: ClassVar[str] = "category"
    levels: tuple[str, ...] = ()
    rarer: int = 0

    @property
    def read_as(self) -> str:
        """What the column is, in words."""
        return f"category of {len(self.levels)}" + (f", {self.rarer} rarer ones" if self.rarer else "")

    @property
    def _own_features(self) -> tuple[str, ...]:
        return tuple(f"{self.name}={level}" for level in self.levels)

    def learn(self, values: np.ndarray) -> "Column":
        """Return the column with the levels of training rows."""
        texts = texts_of(values)
        counts = Counter(text for text in texts if text is not None)
        if not counts:
            return LeftOut(self.name, "it is empty")
        often = sorted(counts, key=lambda text: (-counts[text], text))[:MOST_LEVELS]
        return replace(self, levels=tuple(sorted(often)), indicator=None in texts, rarer=len(counts) - len(often))

    def codes(self, values: np.ndarray, problems: Problems) -> np.ndarray:
        """Return the place of each value among the levels, `(rows,)`; -1 for others, NaN for missing values."""
        place: dict[str | None, float] = {level: number for number, level in enumerate(self.levels)}
        place[None] = math.nan
        return np.array([place.get(text, -1) for text in texts_of(values)], dtype=np.float64)

    def _made_of(self, codes: Any, xp: Any) -> Any:
        return codes[:, None] == xp.arange(len(self.levels))


@dataclass(frozen=True)
class Date(_Readable):
    """A column of dates or times: days since the first of the training rows, and where in the year, week and day they lie.

    Attributes:
        fill: The median of the training rows, which stands for a missing value, in days since 1970.
        origin: The first date of the training rows, in days since 1970.
        parts: Which of "year", "week" and "day" differ in the training rows; each becomes a sine and a cosine.
        form: How texts are read: "ISO", or a format of `datetime.strptime`.
    """

    kind: ClassVar[str] = "date"
    read_as: ClassVar[str] = "date"
    fill: float = math.nan
    origin: float = 0.0
    parts: tuple[str, ...] = ()
    form: str = "ISO"

    @property
    def _own_features(self) -> tuple[str, ...]:
        waves = (f"{self.name} {wave} of {part}" for part in self.parts for wave in ("sine", "cosine"))
        return (f"{self.name} days", *waves)

    def _learned(self, known: np.ndarray) -> dict[str, Any]:
        parts = tuple(part for part in PERIODS if np.ptp(_phase(known, part)) > 1e-9)
        return {**super()._learned(known), "origin": float(known.min()), "parts": parts}

    def codes(self, values: np.ndarray, problems: Problems) -> np.ndarray:
        """Return days since 1970, as `_Readable.codes` says."""
        if values.dtype.kind == "M":
            seconds = values.astype("datetime64[us]").astype(np.int64) / 1e6
            return np.where(np.isnat(values), np.nan, seconds / _DAY)
        texts = texts_of(values)
        # What is a date already need not be written as those of the training rows were.
        forms = ["ISO" if isinstance(value, date | np.datetime64) else self.form for value in values.tolist()]
        written = list(zip(texts, forms, strict=True))
        known = {(text, form): math.nan if text is None else _day(text, form) for text, form in set(written)}
        wrong = [row for row, each in enumerate(written) if each[0] is not None and math.isnan(known[each])]
        self._refuse(wrong, "dates", texts, problems)
        return np.array([known[each] for each in written], dtype=np.float64)

    def _made_of(self, codes: Any, xp: Any) -> Any:
        days = xp.where(xp.isnan(codes), _number_like(codes, self.fill, xp), codes)
        angles = [2 * np.pi * _phase(days, part, xp) for part in self.parts]
        waves = (wave(angle) for angle in angles for wave in (xp.sin, xp.cos))
        return xp.stack([days - _number_like(days, self.origin, xp), *waves], 1)


def _day(text: str, form: str) -> float:
    try:
        moment = datetime.fromisoformat(text) if form == "ISO" else datetime.strptime(text, form)
    except ValueError:
        return math.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() / _DAY


def _phase(days: Any, part: str, xp: Any = np) -> Any:
    """Return where in the year, the week or the day a time lies, from 0 to 1."""
    period = _number_like(days, PERIODS[part], xp)
    return (xp.floor(days) if part == "week" else days) % period / period


def _number_like(codes: Any, number: float, xp: Any) -> Any:
    """Return a number as an array of its own: in a traced program of torch others are float32, whatever they are used with."""
    return xp.asarray(number, dtype=codes.dtype)


@dataclass(frozen=True)
class LeftOut:
    """A column that is no feature; its note says why."""

    kind: ClassVar[str] = "left out"
    name: str
    note: str
    read_as: ClassVar[str] = "left out"
    features: ClassVar[tuple[str, ...]] = ()

    def learn(self, values: np.ndarray) -> "Column":
        """Return the column as it is."""
        return self


Readable = Number | Category | Date
Column = Readable | LeftOut
_KINDS: dict[str, Any] = {kind.kind: kind for kind in (Number, Category, Date, LeftOut)}


@dataclass(frozen=True)
class TableEncoder:
    """How the columns of a table become features: learned on the training rows, then the same for every table.

    Numbers may have missing values, also written as `?`, and commas between thousands; text becomes one feature for each value,
    dates become days and their place in year, week and day. Missing values are filled in, and marked by a feature of their own.
    Columns that never change, that number the rows or that copy the target are left out.

    Attributes:
        columns: What became of each column, in order.

    Example:
        >>> rows = {"age": ["31", "?", "1,046"], "town": ["Ulm", "Bonn", None], "unit": ["kg", "kg", "kg"]}
        >>> encoder = TableEncoder.fit(rows)
        >>> encoder.features
        ('age', 'age missing', 'town=Bonn', 'town=Ulm', 'town missing')
        >>> encoder.transform({"age": [20], "town": ["Oslo"]}).tolist()
        [[20.0, 0.0, 0.0, 0.0, 0.0]]
        >>> TableEncoder.from_json(encoder.to_json()) == encoder
        True
    """

    columns: tuple[Column, ...]

    @classmethod
    def fit(
        cls, table: Any, target: Any = None, *, drop: Sequence[str] = (), keep: Sequence[str] = ()
    ) -> "TableEncoder":
        """Decide what each column is, and learn what reading it takes.

        Args:
            table: What `columns_of` takes, without the target.
            target: The target of each row, to find columns that give it away.
            drop: Columns to leave out.
            keep: Columns to read whatever they look like.
        """
        found = columns_of(table)
        for name in (*drop, *keep):
            _check_column(name, found)
        wanted = None if target is None else _plain(target)
        learned = {name: _learn(name, values, wanted, drop, keep) for name, values in found.items()}
        if not cls(tuple(learned.values())).features:
            # What numbers the rows is read after all where there is nothing else.
            numbering = [name for name, column in learned.items() if column.note.startswith("numbers rows")]
            learned |= {name: _decide(name, found[name]).learn(found[name]) for name in numbering}
        return cls(tuple(learned.values()))._with_features()

    def refit(self, table: Any, rows: Any) -> "TableEncoder":
        """Return the same reading with what is filled in and which categories there are learned from some rows only."""
        found = columns_of(table)
        learned = tuple(column.learn(found[column.name][rows]) for column in self.columns)
        return TableEncoder(learned)._with_features()

    def _with_features(self) -> "TableEncoder":
        """Refuse an encoder that leaves everything out."""
        if not self.features:
            told = "; ".join(f"{column.name!r}: {column.note}" for column in self.columns)
            raise ValueError(f"There is no column left for features ({told}).")
        return self

    @property
    def _readable(self) -> list[Readable]:
        return [column for column in self.columns if not isinstance(column, LeftOut)]

    @property
    def names(self) -> tuple[str, ...]:
        """Columns that are read, in order."""
        return tuple(column.name for column in self._readable)

    @property
    def texts(self) -> tuple[str, ...]:
        """Columns of words and dates, whose cells are texts whatever they look like."""
        return tuple(column.name for column in self._readable if not isinstance(column, Number))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features, in order."""
        return tuple(feature for column in self.columns for feature in column.features)

    def encode(self, table: Any, dtype: Any = np.float32) -> tuple[np.ndarray, Problems]:
        """Return the features of a table, `(rows, features)`, and the rows that cannot be read with the reason for each."""
        codes, problems = self.codes(table)
        return self.of_codes(codes).astype(dtype), problems

    def of_codes(self, codes: Any, xp: Any = np) -> Any:
        """Return the features of what `codes` returned, `(rows, features)`; with torch for `xp`, of a tensor."""
        return xp.concatenate([own.of_codes(code, xp) for own, code in zip(self._readable, codes.T, strict=True)], 1)

    def codes(self, table: Any) -> tuple[np.ndarray, Problems]:
        """Return one number for each column that is read, `(rows, columns)`, and the rows that cannot be read.

        Numbers are as they are, words are their place among the levels (-1 for others), dates are days since 1970, missing
        values are NaN: what an exported file takes, which makes features of them itself.
        """
        found = columns_of(table)
        for name in self.names:
            _check_column(name, found)
        problems: Problems = {}
        parts = [column.codes(found[column.name], problems) for column in self._readable]
        return np.stack(parts, 1), dict(sorted(problems.items()))

    def transform(self, table: Any, dtype: Any = np.float32, numbers: Any = None) -> np.ndarray:
        """Return the features of a table, `(rows, features)`; refuse rows that cannot be read, by their `numbers` if these are given."""
        features, problems = self.encode(table, dtype)
        if problems:
            row, why = next(iter(problems.items()))
            row = row if numbers is None else numbers[row]
            more = "" if len(problems) == 1 else f" ({len(problems)} rows are like that)"
            raise ValueError(f"Row {row} cannot be read: {why}{more}.")
        return features

    def missing(self, table: Any) -> dict[str, np.ndarray]:
        """Return, for each column that is read, where its values are missing."""
        codes, problems = self.codes(table)
        missing = np.isnan(codes)
        missing[list(problems)] = False
        return dict(zip(self.names, missing.T, strict=True))

    def unseen(self, table: Any) -> dict[str, tuple[str, ...]]:
        """Return, for each column of words, values that the training rows did not have."""
        found = columns_of(table)
        words = [column for column in self.columns if isinstance(column, Category) and not column.rarer]
        new = {column.name: set(filter(None, texts_of(found[column.name]))) - {*column.levels} for column in words}
        return {name: tuple(sorted(texts)) for name, texts in new.items() if texts}

    def rows(self) -> list[tuple[str, str, str]]:
        """Return name, reading and remark of each column."""
        filled = {column.name: "missing values filled in" for column in self._readable if column.indicator}
        remarks = (", ".join(filter(None, [filled.get(column.name), column.note])) for column in self.columns)
        return [(column.name, column.read_as, remark) for column, remark in zip(self.columns, remarks, strict=True)]

    def explain(self) -> str:
        """Return what became of every column, as a table in plain text."""
        rows = [("column", "read as", "remark"), *self.rows()]
        widths = [max(len(row[place]) for row in rows) for place in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows)

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain values."""
        return [{"kind": column.kind, **asdict(column)} for column in self.columns]

    @classmethod
    def from_json(cls, values: Iterable[Mapping[str, Any]]) -> "TableEncoder":
        """Make it again from plain values."""
        plain = [{key: tuple(v) if isinstance(v, list) else v for key, v in each.items()} for each in values]
        return cls(tuple(_KINDS[str(each.pop("kind"))](**each) for each in plain))


def _check_column(name: str, found: Mapping[str, Any]) -> None:
    if name not in found:
        raise ValueError(f"The table has no column {name!r}; its columns are {', '.join(found)}.")


def _learn(
    name: str, values: np.ndarray, target: np.ndarray | None, drop: Sequence[str], keep: Sequence[str]
) -> Column:
    """Decide what a column is, if it should be a feature at all, and learn what reading it takes."""
    why = "as asked" if name in drop else "" if name in keep else _why_left_out(name, values, target)
    if why:
        return LeftOut(name, why)
    column = _decide(name, values).learn(values)
    return replace(column, note="; ".join(filter(None, [column.note, _giveaway(values, target)])))


def _decide(name: str, values: np.ndarray) -> Readable:
    """Decide what a column is."""
    if values.dtype.kind in "biuf":
        return Number(name, boolean=values.dtype.kind == "b")
    if values.dtype.kind == "M":
        return Date(name)
    counts = Counter(text for text in texts_of(values) if text is not None)
    return _numbers(name, counts) or _dates(name, counts) or Category(name)


def _numbers(name: str, counts: Counter[str]) -> Number | None:
    """Return the column that texts are which say numbers, or true and false; None where they do not."""
    if {text.lower() for text in counts} <= {"true", "false"}:
        return Number(name, boolean=True)
    words = sorted(text for text in counts if number_of(text) is None)
    # A few words among many different numbers stand for missing values.
    few = sum(counts[word] for word in words) <= counts.total() / 10 and len(counts) - len(words) > _SURELY
    if words and not few:
        return None
    return Number(name, empty=tuple(words), note=f"{shown(words)} read as missing" if words else "")


def _dates(name: str, counts: Counter[str]) -> Date | None:
    """Return the column that texts are which say dates; None where they do not."""
    fitting = [form for form in _DATE_FORMATS if not any(math.isnan(_day(text, form)) for text in counts)]
    if not fitting:
        return None
    unsure = fitting[:2] == ["%d/%m/%Y", "%m/%d/%Y"]
    return Date(name, form=fitting[0], note="read as day/month/year" if unsure else "")


def shown(texts: Sequence[str]) -> str:
    """Return the first of some texts, for a message."""
    return ", ".join(map(repr, texts[:3])) + (", ..." if len(texts) > 3 else "")


def _why_left_out(name: str, values: np.ndarray, target: np.ndarray | None) -> str:
    """Say why a column should not be a feature; empty where it should."""
    codes, different = _numbered(values)
    if different == 1:
        (always,) = texts_of(values[:1])
        return "it is empty" if always is None else f"it is always {always!r}"
    if target is not None and _pairs(codes, target) == different and texts_of(values) == texts_of(target):
        return "a copy of the target"
    if different < len(values):
        return ""
    return _why_identifier(values, _ID_NAMES.fullmatch(name.lower()) is not None)


def _numbered(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Number the different values of a column, missing ones as one of them; return each row's number and how many there are."""
    if values.dtype != object:
        found, codes = np.unique(values, return_inverse=True)
        return codes, len(found)
    place: dict[str | None, int] = {}
    codes = np.array([place.setdefault(text, len(place)) for text in texts_of(values)], dtype=np.int64)
    return codes, len(place)


def _pairs(codes: np.ndarray, target: np.ndarray) -> int:
    """Return how many different pairs a numbered column and the target make: as many as numbers if it determines the target."""
    of_target, different = _numbered(target)
    return len(np.unique(codes.astype(np.int64) * different + of_target))


def _why_identifier(values: np.ndarray, named: bool) -> str:
    """Say why a column of different values (`named` as identifiers are) names rows; empty where it may describe them."""
    column = _decide("", values).learn(values)
    if isinstance(column, Category):
        return "names rows, no two alike" if named or len(values) > _SURELY else ""
    if not isinstance(column, Number):
        return ""
    numbers = column.of_codes(column.codes(values, {}))[:, 0]
    if not np.equal(np.floor(numbers), numbers).all():
        return ""
    # Whole numbers drawn from so small a range would have met.
    surely = len(values) * (len(values) - 1) / 2 > _SURELY * (np.ptp(numbers) + 1)
    return "numbers rows, no two alike" if surely or named else ""


def _giveaway(values: np.ndarray, target: np.ndarray | None) -> str:
    """Say so where a column alone tells the target; empty where it does not."""
    if target is None or len(values) <= _SURELY:
        return ""
    codes, different = _numbered(values)
    if len(values) - different > _SURELY and different > 1 and _pairs(codes, target) == different:
        return "CAREFUL: it determines the target"
    numeric = values.dtype.kind in "iuf" and np.isfinite(values.astype(np.float64)).all()
    return _numeric_giveaway(values.astype(np.float64), target) if numeric else ""


def _numeric_giveaway(numbers: np.ndarray, target: np.ndarray) -> str:
    if np.ptp(numbers) == 0:
        return ""
    if target.dtype.kind == "f":
        differs = np.isfinite(target).all() and np.ptp(target) > 0
        same = differs and abs(float(np.corrcoef(numbers, target)[0, 1])) > 1 - 1e-6
        return "CAREFUL: it is the target in other units" if same else ""
    labels, classes = _numbered(target)
    turns = int((np.diff(labels[np.argsort(numbers, kind="stable")]) != 0).sum())
    enough = min(np.bincount(labels)) > _SURELY
    return "CAREFUL: alone it tells the classes apart" if enough and turns == classes - 1 > 0 else ""
