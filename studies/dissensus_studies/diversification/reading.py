"""Records of `diversification` in, numbers over repeats out: found by what an ensemble is, with intervals."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dissensus_studies.diversification.measures import PDS
from dissensus_studies.diversification.settings import PUBLISHED, Setting
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.statistics import Estimate, Value

# The strength that is shown where one is shown: the document's for unknown classes.
SHOWN = 0.5
BMA = "bma"
SCORES = {"BMA": BMA, "PDS": PDS}
# Averages that figures and claims are about.
POOLED = ("C-1", "C-5", "near", "far")
Records = Sequence[Record]
Rows = Mapping[Setting, Records]
# Where a number is in a record: keys one inside the other.
Place = tuple[str, ...]
WORST_MEMBER: Place = ("members",)
_NO_SHARES = {"unique", "pds", "nll", "brier", "training"}


def auroc(part: str, score: str) -> Place:
    """Return where the AUROC of a score on a set or average is."""
    return ("auroc", part, score)


def value_at(record: Record, place: Place) -> Value | None:
    """Return `[value, low, high]` at a place of a record, ends being None where it has no interval; None where it has nothing."""
    found: Any = record
    for key in place:
        found = (found or {}).get(key)
    if place == WORST_MEMBER and found:
        found = min(found)
    return found if found is None or isinstance(found, list) else [found, None, None]


def estimate(records: Records, place: Place) -> Estimate | None:
    """Return a number over repeats, with the interval over images where there is one run; None where no record has it."""
    values = [value for record in records if (value := value_at(record, place)) is not None and value[0] is not None]
    return Estimate.of(values, share=not _NO_SHARES & set(place)) if values else None


def text_of(records: Records, place: Place) -> str | None:
    """Return a number over repeats with its interval, as tables have it."""
    value = estimate(records, place)
    return None if value is None else value.text


def rows_of(records: Iterable[Record]) -> dict[Setting, list[Record]]:
    """Return records by what they are of; repeats are under the setting of seed 0."""
    rows: dict[Setting, list[Record]] = {}
    for record in records:
        rows.setdefault(replace(Setting(**record["setting"]), seed=0), []).append(record)
    return rows


def where(rows: Rows, **wanted: Any) -> dict[Setting, Records]:
    """Return ensembles whose settings have these values; a tuple: one of them."""
    choices = {name: value if isinstance(value, tuple) else (value,) for name, value in wanted.items()}
    return {s: own for s, own in rows.items() if all(getattr(s, name) in values for name, values in choices.items())}


@dataclass(frozen=True)
class Family:
    """All ensembles of one kind on one backbone; `base` is the deep ensemble of five that others are compared with."""

    base: Setting
    rows: Rows

    @classmethod
    def all_of(cls, rows: Rows) -> list["Family"]:
        """Return the families of which there are ensembles to compare, in order of appearance."""
        judged = {setting: records for setting, records in rows.items() if "auroc" in records[0]}
        bases = dict.fromkeys(Setting(setting.kind, backbone=setting.backbone) for setting in judged)
        return [cls(base, where(judged, kind=base.kind, backbone=base.backbone)) for base in bases]

    @property
    def name(self) -> str:
        """Kind and backbone."""
        return self.base.family

    @cached_property
    def parts(self) -> list[str]:
        """Averages, groups and sets that AUROCs are of: averages first."""
        there = dict.fromkeys(part for own in self.rows.values() for record in own for part in record["auroc"])
        return sorted(there, key=lambda part: POOLED.index(part) if part in POOLED else len(POOLED))

    @property
    def pooled(self) -> list[str]:
        """The averages only."""
        return [part for part in self.parts if part in POOLED]

    def usual(self, **wanted: Any) -> dict[Setting, Records]:
        """Return what is mostly compared: five members, heads of two layers, pairs drawn or all members."""
        return where(self.rows, **{"num_members": 5, "layers": 2, "fixed": False, "active": (0, 2), **wanted})

    def one(self, method: str = "deep", **wanted: Any) -> Records:
        """Return the runs of one ensemble; none where it was not run."""
        return next(iter(self.usual(method=method, **wanted).values()), ())

    def guided(self, strength: float = SHOWN, guard: str = PUBLISHED, **wanted: Any) -> Records:
        """Return the runs of a loss-guided ensemble; without disagreement there is nothing to hold back."""
        return self.one("ldr", strength=strength, guard=guard if strength else PUBLISHED, **wanted)
