"""What an evaluation found: frozen numbers, curves and pictures, as tables, and as JSON and back."""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dissensus._files import replace_file
from dissensus.diagnostics import Finding
from dissensus.diagnostics.findings import restored

Kind = Literal["id", "shifted", "ood", "group", "corruption", "corruptions"]
Task = Literal["classification", "labels", "density", "points", "own"]

# What is measured of each member.
MEMBER_METRICS: Mapping[Task, str] = {
    "classification": "accuracy",
    "labels": "label_accuracy",
    "density": "rmse",
    "points": "rmse",
    "own": "loss",
}

Found = TypeVar("Found")

LEVEL = 0.95
COVERAGE_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Names of the average over corruptions, and of the set that all others are compared with.
ALL_CORRUPTIONS = "corruptions"
ID = "id"


@dataclass(frozen=True)
class Number:
    """One metric on one set, with the ends of its 95 % interval.

    Attributes:
        metric: What was measured, by the name it has in `dissensus.metrics`; "mean" is the mean of a score.
        set: On which inputs: "id", the name of a set or a group, a corruption, or "corruptions" for their average.
        kind: What kind of set it is: "id", "shifted" (labelled), "ood", "group" (an average over sets), "corruption"
            (one of them) or "corruptions" (their average).
        value: The metric.
        score: Which uncertainty score it is about; None for metrics of predictions.
        severity: Of a corruption; None elsewhere, and for the average over all severities.
        member: Which member it is about; None for the ensemble.
        low: Lower end of the interval; None without one.
        high: Upper end.
        label: Which of several labels it is about; None for all of them.
    """

    metric: str
    set: str
    kind: Kind
    value: float
    score: str | None = None
    severity: int | None = None
    member: int | None = None
    low: float | None = None
    high: float | None = None
    label: int | None = None

    @property
    def key(self) -> tuple[str, str, Kind, str | None, int | None, int | None, int | None]:
        """What the number is about: everything but its value and interval."""
        return (self.metric, self.set, self.kind, self.score, self.severity, self.member, self.label)


@dataclass(frozen=True)
class SetInfo:
    """A set of inputs that was evaluated.

    Attributes:
        name: Its name.
        kind: "id", "shifted" or "ood".
        size: How many inputs it has.
        fingerprint: A hash of its inputs and targets, in order; the same for the same data.
        targets: A hash of its targets alone; empty where it has none, or where the file was written before there was
            one.
    """

    name: str
    kind: Kind
    size: int
    fingerprint: str
    targets: str = ""


@dataclass(frozen=True)
class Reliability:
    """What was claimed against what came true on one set.

    For classes: mean confidence and accuracy, bin by bin. For densities: the probability of central intervals and the
    share of targets inside.

    Attributes:
        set: Name of the set.
        claimed: Mean confidence, or probability of the interval.
        observed: Accuracy, or coverage.
        share: Share of the inputs in each bin; for intervals, 1.
        lower: Left edge of each bin; for intervals, what is claimed.
        upper: Right edge.
    """

    set: str
    claimed: tuple[float, ...]
    observed: tuple[float, ...]
    share: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]


@dataclass(frozen=True)
class Histogram:
    """Shares of a set's inputs whose score falls between neighbouring edges.

    The edges are common to all sets of a score and leave out its most extreme thousandth at either end, which is
    counted in the outermost bins.

    Attributes:
        set: Name of the set.
        score: Name of the score.
        edges: Edges of the bins.
        shares: Share of the inputs in each bin.
        logarithmic: Whether edges grow by a factor, as they do where most scores are close to zero.
    """

    set: str
    score: str
    edges: tuple[float, ...]
    shares: tuple[float, ...]
    logarithmic: bool


@dataclass(frozen=True)
class Roc:
    """ROC curve of a score that should tell a set from the known inputs; `auroc` of the whole curve is a number."""

    set: str
    score: str
    fpr: tuple[float, ...]
    tpr: tuple[float, ...]


@dataclass(frozen=True)
class Disputed:
    """An input that members disagree about most, or least, in its set.

    Attributes:
        set: Name of the set.
        most: Whether it is one of the most disputed; else one of the least.
        index: Its number in the set.
        dispute: Mutual information, in nats.
        predicted: Class that the ensemble predicts.
        label: True class; None where there is none.
        votes: Class that each member predicts.
        shape: Channels, height and width of the picture.
        pixels: The picture, uint8, row by row.
    """

    set: str
    most: bool
    index: int
    dispute: float
    predicted: int
    label: int | None
    votes: tuple[int, ...]
    shape: tuple[int, int, int]
    pixels: bytes = field(repr=False)

    @property
    def image(self) -> NDArray[np.uint8]:
        """The picture, `(channels, height, width)`."""
        return np.frombuffer(self.pixels, dtype=np.uint8).reshape(self.shape)


@dataclass(frozen=True)
class Examples:
    """Single inputs of a set, the least certain first.

    Attributes:
        set: Name of the set.
        index: Their numbers in the set.
        predicted: Class that the ensemble predicts, or its mean.
        truth: True class, or target; empty where there is none.
        confidence: Probability of the predicted class; empty for regression.
        scores: Total, data and knowledge uncertainty, those of them that were computed, by the score's name.
    """

    set: str
    index: tuple[int, ...]
    predicted: tuple[float, ...]
    truth: tuple[float, ...]
    confidence: tuple[float, ...]
    scores: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class AlarmCheck:
    """How a run's alarm, and its sets or intervals, did on the sets that were evaluated.

    Attributes:
        score: Which score raises the alarm.
        false_alarms: The rate of false alarms that was allowed.
        calibrated_on: How many held-out inputs the alarm ranks among.
        flagged: Name of a set to the share of its inputs that raised the alarm.
        p_values: Name of a set to p-values of (some of) its inputs, in order.
        coverage: How often sets or intervals were to hold the truth.
        covered: How often they did, on the known inputs.
        drift: Log of the drift martingale after (some of) the known inputs, in their order.
    """

    score: str
    false_alarms: float
    calibrated_on: int
    flagged: Mapping[str, float]
    p_values: Mapping[str, tuple[float, ...]] = field(repr=False)
    coverage: float
    covered: float
    drift: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True)
class Evaluation:
    """Everything that `evaluate` measured. `print(result.table())` is the short form, `ds.report` the long one.

    Attributes:
        name: Name of the ensemble, for tables and pages.
        task: "classification", "labels" (several an input), "density", "points" or "own" (a loss of one's own).
        loss: The loss that says how outputs are read.
        num_members: Number of members.
        num_outputs: Number of classes, of labels, or of targets.
        class_names: Names of the classes or labels; empty where none were given.
        weights: Weights of the members; empty if they are equal.
        score_names: The uncertainty scores.
        bootstrap: Number of resamples behind each interval.
        seed: What decided the resamples and the corruptions.
        sets: The sets of inputs.
        groups: Name of a group to the sets that it averages.
        numbers: Every metric.
        replicates: `(rows, bootstrap)`, float32: row i holds the resampled values of `numbers[i]`. Numbers past the
            last row have none: single corruptions, and smooth calibration errors under corruption.
        reliability: One curve for each labelled set.
        rocs: One curve for each score and set that is not "id".
        histograms: One for each score and set.
        gallery: The most and least disputed inputs of each set, where inputs are images.
        diagnosis: Whether members collude, from their outputs on the known inputs; None of a single member.
        remarks: What to keep in mind when reading, such as that the training was too short.
        alarm: How the run's alarm did; None where there is none.
        examples: The least certain inputs of each set; none where there are several targets.
        data: What the known inputs are called, such as the name of their file; empty where nobody said.
        target: What is predicted, such as the name of a column; empty where nobody said.
        date: When it was measured, as 2026-11-18.
        ensemble: Digest of the run's ensemble that was measured; empty where it is of no run.
    """

    name: str
    task: Task
    loss: str
    num_members: int
    num_outputs: int
    class_names: tuple[str, ...]
    weights: tuple[float, ...]
    score_names: tuple[str, ...]
    bootstrap: int
    seed: int
    sets: tuple[SetInfo, ...]
    groups: Mapping[str, tuple[str, ...]]
    numbers: tuple[Number, ...] = field(repr=False)
    replicates: NDArray[np.float32] = field(repr=False, compare=False)
    reliability: tuple[Reliability, ...] = field(repr=False)
    rocs: tuple[Roc, ...] = field(repr=False)
    histograms: tuple[Histogram, ...] = field(repr=False)
    gallery: tuple[Disputed, ...] = field(repr=False)
    diagnosis: Finding | None = field(default=None, repr=False, compare=False)
    remarks: tuple[str, ...] = ()
    alarm: AlarmCheck | None = field(default=None, repr=False)
    examples: tuple[Examples, ...] = field(default=(), repr=False)
    data: str = ""
    target: str = ""
    date: str = field(default="", compare=False)
    ensemble: str = field(default="", compare=False)

    def number(
        self,
        metric: str,
        set: str = ID,
        *,
        score: str | None = None,
        severity: int | None = None,
        member: int | None = None,
        label: int | None = None,
    ) -> Number:
        """Return one number, with its interval: `.value`, `.low` and `.high`.

        Arguments are the attributes of `Number` that have their names: what is not about a score, a severity, a member or a
        label has None there.
        """
        found = find(self.numbers, metric, set, score=score, severity=severity, member=member, label=label)
        if found is not None:
            return found
        known = sorted({number.metric for number in self.numbers if number.set == set})
        there = f"that set has {', '.join(known)}" if known else f"sets are {', '.join(self.set_names)}"
        about = f"score {score!r}, severity {severity!r}, member {member!r} and label {label!r}"
        raise ValueError(f"There is no {metric!r} of set {set!r} with {about}; {there}.")

    @property
    def set_names(self) -> list[str]:
        """Names of all sets, groups and corruptions that numbers are about."""
        return list(dict.fromkeys(number.set for number in self.numbers))

    def rows(self) -> list[dict[str, Any]]:
        """Return every number as a dict: metric, set, kind, value, score, severity, member, low, high, label."""
        return [asdict(number) for number in self.numbers]

    def to_pandas(self) -> Any:
        """Return every number as a row of a pandas DataFrame (pandas must be installed)."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def table(self) -> str:
        """Return the main numbers with their intervals as text."""
        from dissensus.evaluation.tables import as_text

        return as_text(self)

    def save(self, path: Path | str) -> Path:
        """Write everything as one JSON file, replacing it in one step; folders on the way to it are made."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, to_json(self))
        return target

    @classmethod
    def load(cls, path: Path | str) -> "Evaluation":
        """Read what `save` wrote, or say why the file is no evaluation."""
        try:
            return from_json(Path(path).read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise ValueError(f"{path} holds no evaluation that can be read: {error}. Evaluate again.") from None


def find(numbers: Iterable[Found], metric: str, set: str = ID, **about: str | int | None) -> Found | None:
    """Return the number, or the difference of two, that is about all this; None where it was not measured."""
    wanted = (metric, set, *(about.get(name) for name in ("score", "severity", "member", "label")))
    own = attrgetter("metric", "set", "score", "severity", "member", "label")
    return next((number for number in numbers if own(number) == wanted), None)


def floats(values: Sequence[float] | NDArray[Any]) -> tuple[float, ...]:
    """Return numbers rounded to the seven digits that a picture can need, as a tuple."""
    # Python's own numbers print faster than numpy's.
    plain = values.tolist() if isinstance(values, np.ndarray) else values
    return tuple(float(f"{value:.7g}") for value in plain)


FORMAT = "dissensus evaluation 1"


def to_json(result: Evaluation) -> str:
    """Return an evaluation as JSON text."""
    whole = asdict(replace(result, numbers=(), diagnosis=None))
    columns = [entry.name for entry in fields(Number)]
    rows = [[getattr(number, name) for name in columns] for number in result.numbers]
    whole["numbers"] = {"columns": columns, "rows": rows}
    packed = _packed(result.replicates.astype("<f4").tobytes())
    whole["replicates"] = {"shape": result.replicates.shape, "float32": packed}
    for item in whole["gallery"]:
        item["pixels"] = _packed(item["pixels"])
    whole["diagnosis"] = None if result.diagnosis is None else result.diagnosis.to_dict()
    return json.dumps({"format": FORMAT, **whole}, allow_nan=False)


def from_json(text: str) -> Evaluation:
    """Return the evaluation that `to_json` wrote; files of earlier versions lack what has a default."""
    whole = json.loads(text)
    if not isinstance(whole, dict) or whole.pop("format", None) != FORMAT:
        raise KeyError(f"its format is not {FORMAT!r}")
    packed, numbers = whole["replicates"], whole["numbers"]
    array = np.frombuffer(_unpacked(packed["float32"]), dtype="<f4").reshape(packed["shape"])
    whole["replicates"] = array.astype(np.float32)
    whole["numbers"] = [dict(zip(numbers["columns"], row, strict=True)) for row in numbers["rows"]]
    for item in whole["gallery"]:
        item["pixels"] = _unpacked(item["pixels"])
    found: Evaluation = restored(Evaluation, whole)
    return found


def _packed(raw: bytes) -> str:
    return b64encode(zlib.compress(raw)).decode("ascii")


def _unpacked(text: str) -> bytes:
    return zlib.decompress(b64decode(text))
