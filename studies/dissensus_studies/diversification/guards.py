"""Records of `diversification` in, what each guard costs members and gains in detection out, and which of them may be the default."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean

from dissensus.html import Table
from dissensus.objectives import LossShare
from dissensus_studies.diversification.reading import (
    GUARDED,
    PUBLISHED,
    SHOWN,
    USUAL,
    Found,
    label,
    on_test,
    parts_of,
    text_of,
)
from dissensus_studies.diversification.settings import Setting
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.statistics import Estimate

_UNGUARDED = (PUBLISHED, "inverse probability")
_FINDINGS = {"colluding": "members collude", "members_useless": "members of no use alone"}
# Accuracy that a member may lose and still be called unharmed.
MARGIN = 0.02


@dataclass(frozen=True)
class Gain:
    """By how much an AUROC is above that of the deep ensemble, mean over runs; `spread` is half its interval, widened for all looks."""

    part: str
    score: str
    value: float
    spread: float

    @property
    def sure(self) -> bool | None:
        """True for a gain, False for a loss, None where the interval holds 0."""
        return None if abs(self.value) <= self.spread else self.value > 0

    def __str__(self) -> str:
        low, high = self.value - self.spread, self.value + self.spread
        return f"{self.value:+.4f} [{low:+.4f}, {high:+.4f}] ({self.score}, {self.part})"


def gains(records: Sequence[Record], kind: str) -> list[Gain]:
    """Return the gains of all scores on all sets and averages against the same score, or over the best one (`"gain_over_best"`).

    Intervals are over images, or over runs where these differ more: all runs are judged by the same images, so more of them do
    not make the images more. With n looks each interval has 1 - 0.05/n.
    """
    parts = [part for part in parts_of(records) if all(part in record.get(kind, {}) for record in records)]
    looks = [(part, score) for part in parts for score in records[0][kind][part]]
    errors = bonferroni(len(looks))
    found = []
    for part, score in looks:
        entries = [record[kind][part][score] for record in records]
        over_images = fmean(Estimate.of([entry]).error for entry in entries)
        value = fmean(entry[0] for entry in entries)
        found.append(Gain(part, score, value, errors * max(over_images, Estimate.of(entries).error)))
    return found


def bonferroni(looks: int) -> float:
    """Return how many standard errors a two-sided 95 % interval has after so many looks.

    Example:
        >>> round(bonferroni(1), 3), round(bonferroni(20), 3)
        (1.96, 3.023)
    """
    return NormalDist().inv_cdf(1 - 0.025 / max(looks, 1))


def best_gain(found: Sequence[Gain]) -> Gain | None:
    """Return the largest gain that is more than chance; where there is none, the largest."""
    sure = [gain for gain in found if gain.sure]
    return max(sure or found, key=lambda gain: gain.value, default=None)


def member_loss(record: Record, independent: Sequence[Record]) -> float:
    """Return how much less accurate the worst member is than independent ones on average, those of the same seed if they are there."""
    seed = record["setting"]["seed"]
    same = [each for each in independent if each["setting"]["seed"] == seed] or independent
    return fmean(fmean(each["members"]) for each in same) - min(record["members"])


@dataclass(frozen=True)
class Guarded:
    """Runs of a loss-guided ensemble beside those of the deep one."""

    setting: Setting
    records: Sequence[Record]
    independent: Sequence[Record]

    @cached_property
    def loss(self) -> float:
        """Accuracy that its worst member of all runs has lost."""
        return max(member_loss(record, self.independent) for record in self.records)

    @property
    def harmless(self) -> bool:
        """Whether every member is within the margin."""
        return self.loss <= MARGIN

    @property
    def diagnosis(self) -> str:
        """What the diagnosis of collusion says of members in any run, and whether the ensemble's accuracy hides a lost member.

        Hidden is one that the ensemble loses at most two points by, or a quarter of what the member lost.
        """
        there = [text for key, text in _FINDINGS.items() if any(r.get("finding", {}).get(key) for r in self.records)]
        before, after = (fmean(r["test"]["accuracy"][0] for r in runs) for runs in (self.independent, self.records))
        if not self.harmless and before - after <= max(MARGIN, self.loss / 4):
            there.append("a lost member is hidden")
        return ", ".join(there)

    @cached_property
    def gains(self) -> list[Gain]:
        """Gains against the same score."""
        return gains(self.records, "gain")

    def counts(self) -> tuple[int, int, int]:
        """Return how many AUROCs are really higher, really lower, and how many there are."""
        sure = [gain.sure for gain in self.gains]
        return sure.count(True), sure.count(False), len(sure)


def guarded_rows(found: Found, family: str) -> list[Guarded]:
    """Return all loss-guided ensembles of five members of a family, drawn in pairs or all at once; none without a deep ensemble."""
    independent = found.one(family, "deep M=5")
    rows = found.where(family=family, method="ldr", num_members=5, **USUAL) if independent else {}
    return [Guarded(setting, records, independent) for setting, records in rows.items()]


def guard_table(found: Found, family: str) -> Table:
    """What each guard costs members, and what is gained over the deep ensemble."""
    cells = []
    for row in guarded_rows(found, family):
        higher, lower, looks = row.counts()
        best, over_best = best_gain(row.gains), best_gain(gains(row.records, "gain_over_best"))
        cells.append(
            (
                label(row.setting),
                round(row.loss, 4),
                "yes" if row.harmless else "no",
                row.diagnosis,
                text_of(row.records, on_test("accuracy")),
                text_of(row.records, on_test("ece")),
                f"{higher} / {lower} of {looks}",
                *(None if gain is None else str(gain) for gain in (best, over_best)),
                len(row.records),
            )
        )
    columns = (
        "ensemble",
        "worst member's loss",
        "within 2 points",
        "diagnosis",
        "accuracy",
        "ECE",
        "AUROCs gained / lost",
    )
    return Table(
        (*columns, "best gain, same score", "best gain over the deep ensemble's best score", "runs"),
        cells,
        "Guards: accuracy that the worst member of all runs has lost against independent ones on average, and AUROCs over all scores, "
        "sets and averages that are really above or below those of the deep ensemble: intervals are paired and widened for the "
        "number of looks.",
    )


@dataclass(frozen=True)
class Verdict:
    """Which guard may be the default, in words and as an outcome.

    `"default"`: the library's does both, keeps members and gains; `"other"`: another one does; `"harmless"`: none does, and
    the default harms nobody; `"harmful"`: none does, and the default harms members.
    """

    outcome: str
    text: str


def guard_verdict(found: Found) -> Verdict | None:
    """Look for guards that keep every member within two points in all families that the default was tried in, and gain somewhere.

    Returns:
        None without arms of the default.
    """
    by_guard: dict[tuple[str, float], list[Guarded]] = {}
    for row in (row for family in found.families for row in guarded_rows(found, family)):
        if row.setting.strength > 0:
            by_guard.setdefault((row.setting.guard, row.setting.strength), []).append(row)
    default = by_guard.get((GUARDED, SHOWN), [])
    if not default:
        return None
    families = {row.setting.family for row in default}
    both = {
        key: rows
        for key, rows in by_guard.items()
        if key[0] not in _UNGUARDED
        and families <= {row.setting.family for row in rows}
        and all(row.harmless for row in rows)
        and any(row.counts()[0] for row in rows)
    }
    harmed = [row.setting.family for row in default if not row.harmless]
    words = (
        f"The default (share of the loss {LossShare().share:g}, strength {SHOWN:g}): {'; '.join(map(_words, default))}."
    )
    if (GUARDED, SHOWN) in both:
        outcome, rest = "default", "It keeps every member within two points and gains."
    elif both:
        outcome, rest = "other", "It does not do both; others do."
    elif not harmed:
        outcome, rest = "harmless", "No guard does both; the default harms no member."
    else:
        outcome, rest = "harmful", f"No guard does both, and the default costs members in {', '.join(harmed)}."
    return Verdict(outcome, f"{words} {rest}{_listed(both)}")


def _words(row: Guarded) -> str:
    best, (higher, lower, looks) = best_gain(row.gains), row.counts()
    gained = f"largest gain {best}" if best is not None and best.sure else "no gain beyond chance"
    counts = f"{higher} AUROCs of {looks} higher, {lower} lower"
    return f"{row.setting.family}: worst member loses {row.loss:.4f}, {counts}, {gained}"


def _listed(both: Mapping[tuple[str, float], Sequence[Guarded]]) -> str:
    if not both:
        return ""
    names = (f"{label(rows[0].setting)} ({', '.join(row.setting.family for row in rows)})" for rows in both.values())
    return f" Both: {'; '.join(names)}."
