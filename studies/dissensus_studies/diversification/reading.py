"""Records of `diversification` in, numbers over repeats out: found by what an ensemble is, with intervals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dissensus_studies.diversification.settings import Setting
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.statistics import Estimate, Value

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
BMA, PDS = SCORES["BMA"], SCORES["PDS"]
# What most tables and figures compare: heads of two layers, pairs drawn or all members.
USUAL: Mapping[str, Any] = {"layers": 2, "fixed": False, "active": (0, 2)}
Rows = Mapping[Setting, Sequence[Record]]


@dataclass(frozen=True)
class Read:
    """Reads `[value, low, high]` from its place in a record, keys one inside the other; None where it is not there.

    A share lies in [0, 1], and so does its interval. `made` makes the value of what is there.
    """

    place: tuple[str, ...]
    share: bool = True
    made: Callable[[Any], Value] = lambda found: found

    def __call__(self, record: Record) -> Value | None:
        """Read it; there is no PDS of one member, which always has the same."""
        if self.place[-1] == PDS and record["setting"]["num_members"] == 1:
            return None
        found: Any = record
        for key in self.place:
            found = (found or {}).get(key)
        return self.made(found) if found else None


def auroc(part: str, score: str) -> Read:
    """Read the AUROC of a score on a set or group."""
    return Read(("auroc", part, score))


def pds_minus(part: str, score: str) -> Read:
    """Read by how much the AUROC of PDS is above that of another score, on the same inputs."""
    return Read(("pds_minus", part, score), share=False)


def on_test(metric: str) -> Read:
    """Read a metric of the ensemble on the known test images."""
    return Read(("test", metric), share=metric not in ("nll", "brier"))


def counted(what: str, part: str) -> Read:
    """Read the mean number of different answers ("unique"), or of PDS as a sum over classes ("pds"), on a set."""
    return Read((what, part), share=False)


def aggregated(part: str, way: str) -> Read:
    """Read the accuracy of one way to make one answer of many."""
    return Read(("accuracy", part, way))


def worst_group(way: str) -> Read:
    """Read the worst-group accuracy."""
    return Read(("worst_group", way))


def epoch(what: str) -> Read:
    """Read the "seconds" of an epoch, or their "deviation" over epochs."""
    return Read(("training", f"epoch_{what}"), share=False, made=lambda value: [value, None, None])


worst_member = Read(("members",), made=lambda members: [min(members), None, None])


def estimate(records: Sequence[Record], read: Read) -> Estimate | None:
    """Return a number over repeats; None where no record has it."""
    values = [value for record in records if (value := read(record)) is not None and value[0] is not None]
    return Estimate.of(values, read.share) if values else None


def text_of(records: Sequence[Record], read: Read) -> str | None:
    """Return a number over repeats with its interval, as tables have it."""
    value = estimate(records, read)
    return None if value is None else value.text


@dataclass(frozen=True)
class Found:
    """Records of finished arms, found by what they are of."""

    records: Mapping[str, Record]

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Found":
        """Index records by their ensemble's name."""
        return cls({Setting(**record["setting"]).name: record for record in records})

    def where(self, **wanted: Any) -> dict[Setting, list[Record]]:
        """Return records of ensembles whose settings have these values (a tuple: one of them), repeats under the first's setting."""
        found: dict[tuple[str, str], tuple[Setting, list[Record]]] = {}
        for record in self.records.values():
            setting = Setting(**record["setting"])
            pairs = ((getattr(setting, name), value) for name, value in wanted.items())
            if all(own in value if isinstance(value, tuple) else own == value for own, value in pairs):
                found.setdefault((setting.family, setting.row), (setting, []))[1].append(record)
        return dict(found.values())

    def guided(
        self, family: str, strength: float, guard: str, *, num_members: int = 5, layers: int = 2, active: int = -1
    ) -> list[Record]:
        """Return the usual loss-guided ensemble of a family: pairs drawn for heads, all members for networks."""
        if active < 0:
            active = 2 if family.startswith("heads") else 0
        # Without disagreement there is nothing to hold back.
        wanted = {"strength": strength, **({"guard": guard} if strength else {}), "num_members": num_members}
        found = self.where(family=family, method="ldr", layers=layers, active=active, fixed=False, **wanted)
        return [record for records in found.values() for record in records]

    def one(self, family: str, row: str) -> list[Record]:
        """Return all repeats of one ensemble; none where it was not run."""
        return [record for record in self.records.values() if (record["family"], record["row"]) == (family, row)]

    def plain(self, family: str, size: int = 5) -> dict[Setting, list[Record]]:
        """Return the ensembles of one size that most tables compare: two layers, pairs drawn or all, any method but two stages."""
        rows = self.where(family=family, num_members=(size, 1), guard=(PUBLISHED, GUARDED), **USUAL)
        return {s: records for s, records in rows.items() if s.method != "two-stage" and "auroc" in records[0]}

    @property
    def families(self) -> list[str]:
        """Return the families of which there are ensembles to compare, nets first."""
        return list(dict.fromkeys(record["family"] for record in self.records.values() if "auroc" in record))


def label(setting: Setting) -> str:
    """Return what tables call an ensemble, without its size.

    Example:
        >>> label(Setting("heads", "ldr", strength=0.5, guard="none", active=2)), label(Setting("nets", "a2d", strength=0.1))
        ('LDR 0.5, published', 'A2D 0.1')
    """
    if setting.method == "ldr":
        guard = {PUBLISHED: "published", GUARDED: "guarded"}.get(setting.guard, setting.guard)
        return f"LDR {setting.strength:g}, {guard}" if setting.strength else "LDR 0"
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
