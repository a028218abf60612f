"""Records of `diversification` in, numbers over repeats out: found by what an ensemble is, with intervals, compared."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan, sqrt

from dissensus_studies.arm_log import Record
from dissensus_studies.diversification_settings import Setting
from dissensus_studies.intervals import NORMAL_95, share_ends
from dissensus_studies.repeats import Summary

Value = Sequence[float | None]
Read = Callable[[Record], Value | None]

METHODS = {
    "single": "one network",
    "deep": "deep ensemble",
    "diverse": "diverse hyperparameters",
    "a2d": "A2D",
    "divdis": "DivDis",
    "two-stage": "two-stage",
    "masksembles": "Masksembles",
    "dropout": "MC dropout",
    "batch": "BatchEnsemble",
}
PUBLISHED, GUARDED = "none", "share"
# The strength that tables show where one is shown: the document's for unknown classes.
SHOWN = 0.5
SCORES = {"BMA": "bma", "PDS": "predictive_diversity"}


@dataclass(frozen=True)
class Share:
    """Reads a number that lies in [0, 1], such as an accuracy or an AUROC, so that its interval does too."""

    read: Read

    def __call__(self, record: Record) -> Value | None:
        """Read it."""
        return self.read(record)


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error, over repeats where there are several, over inputs where there is one run.

    Attributes:
        value: The number.
        error: Its standard error; NaN where it is not known.
        ends: Ends of its 95 % interval; None where it is not known.
    """

    value: float
    error: float
    ends: tuple[float, float] | None = None

    @classmethod
    def of(cls, values: Sequence[Value], share: bool = False) -> "Estimate":
        """Pool the values of repeats, each `[value, low, high]`.

        Args:
            values: One for each repeat.
            share: Whether they lie in [0, 1].

        Example:
            >>> Estimate.of([[0.5, 0.4, 0.6]]).text
            '0.5000 [0.4000, 0.6000]'
        """
        middle = Summary(tuple(float(value[0]) for value in values if value[0] is not None))
        mean = middle.mean
        if len(middle.values) > 1:
            around = (mean - NORMAL_95 * middle.error, mean + NORMAL_95 * middle.error)
            return cls(mean, middle.error, share_ends(mean, middle.error) if share else around)
        low, high = (values[0][1], values[0][2]) if len(values[0]) == 3 else (None, None)
        if low is None or high is None:
            return cls(mean, nan)
        # Records of earlier versions may have ends outside.
        ends = (max(low, 0.0), min(high, 1.0)) if share else (low, high)
        return cls(mean, (high - low) / (2 * NORMAL_95), ends)

    @property
    def text(self) -> str:
        """The value and its 95 % interval."""
        if self.ends is None:
            return f"{self.value:.4f}"
        return f"{self.value:.4f} [{self.ends[0]:.4f}, {self.ends[1]:.4f}]"

    def above(self, other: "Estimate | None" = None) -> bool | None:
        """Whether this is larger, than 0 by itself; None where the difference is within two standard errors. Without errors, as it is."""
        other = other or Estimate(0.0, 0.0)
        difference = self.value - other.value
        errors = [0.0 if each.error != each.error else each.error for each in (self, other)]
        return None if abs(difference) <= 2 * sqrt(sum(e**2 for e in errors)) else difference > 0


@dataclass(frozen=True)
class Found:
    """Records of finished arms, found by what they are of."""

    records: Mapping[str, Record]

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Found":
        """Index records by their ensemble's name."""
        return cls({Setting(**record["setting"]).name: record for record in records})

    def all(self, wanted: Callable[[Setting], bool]) -> dict[Setting, list[Record]]:
        """Return records of ensembles that fit, repeats together, under the setting of the first."""
        found: dict[tuple[str, str], list[Record]] = {}
        first: dict[tuple[str, str], Setting] = {}
        for record in self.records.values():
            setting = Setting(**record["setting"])
            if wanted(setting):
                found.setdefault((setting.family, setting.row), []).append(record)
                first.setdefault((setting.family, setting.row), setting)
        return {first[key]: records for key, records in found.items()}

    def one(self, family: str, row: str) -> list[Record]:
        """Return all repeats of one ensemble; none where it was not run."""
        return [
            record for record in self.records.values() if (record["family"], record["row"]) == (family, row)
        ]

    @property
    def families(self) -> list[str]:
        """Return the families of which there are ensembles to compare, nets first."""
        there = dict.fromkeys(record["family"] for record in self.records.values() if "auroc" in record)
        return list(there)


def estimate(records: Sequence[Record], read: Read) -> Estimate | None:
    """Return a number over repeats; None where no record has it."""
    values = [value for record in records if (value := read(record)) is not None and value[0] is not None]
    return Estimate.of(values, isinstance(read, Share)) if values else None


def auroc(part: str, score: str) -> Read:
    """Read the AUROC of a score on a set or group; there is none of PDS for one member, which always has the same."""

    def read(record: Record) -> Value | None:
        if score == SCORES["PDS"] and record["setting"]["num_members"] == 1:
            return None
        value: Value | None = record.get("auroc", {}).get(part, {}).get(score)
        return value

    return Share(read)


def pds_minus(part: str, score: str) -> Read:
    """Read by how much the AUROC of PDS is above that of another score, on the same inputs."""
    return lambda record: record.get("pds_minus", {}).get(part, {}).get(score)


def on_test(metric: str) -> Read:
    """Read a metric of the ensemble on the known test images."""

    def read(record: Record) -> Value | None:
        value: Value | None = record.get("test", {}).get(metric)
        return value

    return read if metric in ("nll", "brier") else Share(read)


def unique(part: str) -> Read:
    """Read the mean number of different answers on a set."""
    return lambda record: record.get("unique", {}).get(part)


def pds(part: str) -> Read:
    """Read the mean of PDS (as a sum over classes) on a set."""
    return lambda record: record.get("pds", {}).get(part)


def aggregated(part: str, way: str) -> Read:
    """Read the accuracy of one way to make one answer of many."""
    return Share(lambda record: record.get("accuracy", {}).get(part, {}).get(way))


@Share
def worst_member(record: Record) -> Value | None:
    """Read the accuracy of the worst member."""
    return _plain(min(record["members"])) if record.get("members") else None


def worst_group(way: str) -> Read:
    """Read the worst-group accuracy."""
    return Share(lambda record: record.get("worst_group", {}).get(way))


def epoch_seconds(record: Record) -> Value | None:
    """Read the seconds of an epoch."""
    return _plain(record["training"].get("epoch_seconds"))


def epoch_deviation(record: Record) -> Value | None:
    """Read their standard deviation over epochs."""
    return _plain(record["training"].get("epoch_deviation"))


def _plain(value: float | None) -> Value | None:
    return None if value is None else [value, None, None]


def label(setting: Setting) -> str:
    """Return what tables call an ensemble, without its size.

    Example:
        >>> label(Setting("heads", "ldr", strength=0.5, guard="none", active=2)), label(Setting("nets", "a2d", strength=0.1))
        ('LDR 0.5, published', 'A2D 0.1')
    """
    if setting.method == "ldr":
        guard = {PUBLISHED: "published", GUARDED: "guarded"}.get(setting.guard, setting.guard)
        if setting.strength == 0:
            return "LDR 0"
        return f"LDR {setting.strength:g}, {guard}"
    words = "one head" if (setting.kind, setting.method) == ("heads", "single") else METHODS[setting.method]
    if setting.method in ("a2d", "divdis", "two-stage"):
        words += f" {setting.strength:g}"
    return f"{words}, other source" if setting.source else words


def parts_of(records: Iterable[Record]) -> list[str]:
    """Return corruption levels, groups and sets that AUROCs are of: averages first."""
    there = dict.fromkeys(part for record in records for part in record.get("auroc", {}))
    first = [part for part in ("C-1", "C-5", "near", "far") if part in there]
    return [*first, *(part for part in there if part not in first)]


def pooled_parts(records: Iterable[Record]) -> list[str]:
    """Return the averages only."""
    return [part for part in parts_of(records) if part in ("C-1", "C-5", "near", "far")]
