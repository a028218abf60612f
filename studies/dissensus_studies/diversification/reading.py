"""Records of `diversification` in, numbers over repeats out: found by what an ensemble is, with intervals, compared."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dissensus_studies.diversification.settings import Setting
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.statistics import Estimate, Value

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
BMA, PDS = SCORES["BMA"], SCORES["PDS"]
# What most tables and figures compare: heads of two layers, pairs drawn or all members.
USUAL: Mapping[str, Any] = {"layers": 2, "fixed": False, "active": (0, 2)}


@dataclass(frozen=True)
class Share:
    """Reads a number that lies in [0, 1], such as an accuracy or an AUROC, so that its interval does too."""

    read: Read

    def __call__(self, record: Record) -> Value | None:
        """Read it."""
        return self.read(record)


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
        found: dict[tuple[str, str], list[Record]] = {}
        first: dict[tuple[str, str], Setting] = {}
        for record in self.records.values():
            setting = Setting(**record["setting"])
            pairs = ((getattr(setting, name), value) for name, value in wanted.items())
            if all(own in value if isinstance(value, tuple) else own == value for own, value in pairs):
                found.setdefault((setting.family, setting.row), []).append(record)
                first.setdefault((setting.family, setting.row), setting)
        return {first[key]: records for key, records in found.items()}

    def guided(
        self, family: str, strength: float, guard: str, *, num_members: int = 5, layers: int = 2, active: int = -1
    ) -> list[Record]:
        """Return the usual loss-guided ensemble of a family: pairs drawn for heads, all members for networks."""
        if active < 0:
            active = 2 if family.startswith("heads") else 0
        found = self.where(
            family=family,
            method="ldr",
            strength=strength,
            # Without disagreement there is nothing to hold back.
            **({"guard": guard} if strength else {}),
            num_members=num_members,
            layers=layers,
            active=active,
            fixed=False,
        )
        return [record for records in found.values() for record in records]

    def one(self, family: str, row: str) -> list[Record]:
        """Return all repeats of one ensemble; none where it was not run."""
        return [record for record in self.records.values() if (record["family"], record["row"]) == (family, row)]

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


def counted(what: str, part: str) -> Read:
    """Read the mean number of different answers ("unique"), or of PDS as a sum over classes ("pds"), on a set."""
    return lambda record: record.get(what, {}).get(part)


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


def epoch(what: str) -> Read:
    """Read the "seconds" of an epoch, or their "deviation" over epochs."""
    return lambda record: _plain(record["training"].get(f"epoch_{what}"))


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


def plain_rows(found: Found, family: str, size: int = 5) -> dict[Setting, list[Record]]:
    """Return the ensembles of one size that are compared in most tables: two layers, pairs drawn or all, any method but two stages."""
    rows = found.where(family=family, num_members=(size, 1), guard=(PUBLISHED, GUARDED), **USUAL)
    return {s: records for s, records in rows.items() if s.method != "two-stage" and "auroc" in records[0]}
