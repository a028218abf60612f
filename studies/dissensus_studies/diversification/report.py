"""Records of `diversification` in; numbers over repeats, what the document says beside what they show, and its tables out.

Ensembles are called as their arms: "ldr=0.5 none A=2 M=5" is loss-guided disagreement of strength 0.5 without a guard (the published
form; "share" is the library's), two of five members drawn a step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from statistics import NormalDist, fmean
from typing import Any

from dissensus.html import Table
from dissensus_studies.diversification.measures import PDS
from dissensus_studies.diversification.settings import FORMS, GUARDED, PUBLISHED, STRENGTHS, Setting
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.claims import Claim, over_cases
from dissensus_studies.harness.statistics import Estimate, Value

# The strength that is shown where one is shown: the document's for unknown classes.
SHOWN = 0.5
BMA = "bma"
SCORES = {"BMA": BMA, "PDS": PDS}
# Averages that figures and claims are about.
POOLED = ("C-1", "C-5", "near", "far")
# Differences in AUROC that the document calls small.
SMALL = 0.01
# Accuracy that a member may lose and still be called unharmed.
MARGIN = 0.02
Records = Sequence[Record]
Rows = Mapping[Setting, Records]
# Where a number is in a record: keys one inside the other.
Place = tuple[str, ...]
# A number of an ensemble, and those of others by name that it is said to be above.
Number = tuple[Records, Place]
Case = tuple[Number, Mapping[str, Number]]
WORST_MEMBER: Place = ("members",)
_NO_SHARES = {"unique", "pds", "nll", "brier", "training"}
_FORMS = {PUBLISHED: "published form", GUARDED: "guarded"}
_ANSWERS = {"mean logits": "mean_logits", "vote": "majority_vote", "soup": "soup", "oracle": "oracle"}
_FINDINGS = {"colluding": "members collude", "members_useless": "members of no use alone"}


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


def diversification_claims(rows: Rows) -> list[Claim]:
    """Judge the document's statements, as far as there are arms for them; one claim for each family of ensembles."""
    found = [
        replace(claim, statement=f"{claim.statement} ({family.name})")
        for family in Family.all_of(rows)
        for judge in (_guided_claims, _other_claims, _strength_claims, _cost_claims)
        for claim in judge(family)
    ]
    spurious = where(rows, kind="spurious")
    # Table 8.
    for statement, method, way in (
        ("Where backgrounds mislead, the loss-guided ensemble's worst group is best served.", "ldr", "ensemble"),
        ("DivDis has the best single member there (by hindsight).", "divdis", "oracle"),
    ):
        place = ("worst_group", way)
        others = {setting.row: (own, place) for setting, own in spurious.items() if setting.method != method}
        own = where(spurious, method=method)
        found.append(above(statement, {s.row: ((records, place), others) for s, records in own.items()}))
    return [claim for claim in found if claim.measured]


def above(statement: str, cases: Mapping[str, Case]) -> Claim:
    """Judge that a number is above the best of others, in every case that could be looked at."""
    texts, holds = [], {}
    for name, (own, others) in cases.items():
        value = estimate(*own)
        values = {other: found for other, number in others.items() if (found := estimate(*number)) is not None}
        if value is None or not values:
            continue
        best = max(values, key=lambda other: values[other].value)
        which = f" ({best})" if len(others) > 1 else ""
        texts.append(f"{name}: {value.value:.4f} against {values[best].value:.4f}{which}")
        holds[name] = value.above(values[best])
    return Claim(statement, "; ".join(texts), over_cases(holds))


def _pairs(
    first: Records, second: Records, places: Mapping[str, Place], others: Mapping[str, Place] | None = None
) -> dict[str, Case]:
    """Return the cases that one ensemble is above another, number by number."""
    return {name: ((first, place), {"": (second, (others or places)[name])}) for name, place in places.items()}


def _detection(family: Family, score: str) -> dict[str, Place]:
    return {part: auroc(part, score) for part in family.pooled}


def _guided_claims(family: Family) -> Iterator[Claim]:
    """Judge what is said of loss-guided ensembles, without and with a guard."""
    deep, pds = family.one(), _detection(family, PDS)
    usual = family.usual(num_members=(1, 5)).items()
    rivals = {
        (f"{setting.row}, {word}", score): own
        for setting, own in usual
        if setting.method not in ("ldr", "two-stage")
        for word, score in SCORES.items()
    }
    for guard, words in _FORMS.items():
        guided = family.guided(guard=guard)
        if not guided or not deep:
            continue
        scores = {part: [score for score in guided[0]["auroc"][part] if score != PDS] for part in pds}
        judged: dict[str, Mapping[str, Case]] = {
            "Loss-guided members give more different answers on every set than a deep ensemble's": _pairs(
                guided, deep, {part: ("unique", part) for part in deep[0]["unique"]}
            ),
            "Loss-guided training with PDS detects better than any other method with BMA or PDS": {
                part: ((guided, place), {name: (own, auroc(part, score)) for (name, score), own in rivals.items()})
                for part, place in pds.items()
            },
            "PDS of loss-guided ensembles detects better than BMA": _pairs(
                guided, guided, pds, _detection(family, BMA)
            ),
            "PDS is the best of all scores for them": {
                part: ((guided, place), {score: (guided, auroc(part, score)) for score in scores[part]})
                for part, place in pds.items()
            },
        }
        for statement, cases in judged.items():
            yield above(f"{statement}; {words}.", cases)
        yield from _generalisation(guided, deep, words)
        lost = member_loss(guided, deep)
        yield Claim.checked(
            f"Members differ without harm to what they learn (within {100 * MARGIN:.0f} points); {words}.",
            f"worst member loses {lost:.4f}",
            lost <= MARGIN,
        )


def _generalisation(guided: Records, deep: Records, words: str) -> Iterator[Claim]:
    """Judge table 3; at strength 0 drawing members is all there is to the method."""
    for name, way in (("averaged logits", "mean_logits"), ("averaged weights (soup)", "soup")):
        places = {part: ("accuracy", part, way) for part in ("C-1", "C-5")}
        statement = f"Accuracy of {name} under corruption is higher than the deep ensemble's; {words}."
        yield above(statement, _pairs(guided, deep, places))


def _other_claims(family: Family) -> Iterator[Claim]:
    """Judge what is said of other ensembles, and of what the method is made of: tables 2 to 5, 7 and 9."""
    deep, pds, bma = family.one(), _detection(family, PDS), _detection(family, BMA)
    yield above("PDS is poor without diversity: below BMA for a deep ensemble.", _pairs(deep, deep, bma, pds))
    yield from _generalisation(family.guided(0.0), deep, "strength 0")
    others = {s.row: own for s, own in family.usual(strength=(0, 0.1, SHOWN, 1)).items() if s.method != "diverse"}
    diverse = family.one("diverse")
    yield above(
        "By BMA, diverse hyperparameters detect best of all ensembles.",
        {part: ((diverse, place), {row: (own, place) for row, own in others.items()}) for part, place in bma.items()},
    )
    two, one = family.guided(), family.guided(layers=1)
    staged, inverse = family.one("two-stage", strength=SHOWN), family.guided(guard="inverse probability")
    answers = {part: ("unique", part) for part in ("C-1", "C-5")}
    for statement, first, second, places in (
        ("5 members detect better than 2; published form.", two, family.guided(num_members=2), pds),
        ("50 members detect better than 5; published form.", family.guided(num_members=50), two, pds),
        ("Heads of two layers detect better than heads of one.", two, one, pds),
        ("Also with one layer, loss-guided heads beat independent ones by PDS.", one, family.one(layers=1), pds),
        ("Loss-guided weights detect better than two stages.", two, staged, pds),
        ("Weights by the loss diversify more than by one over the probability.", two, inverse, answers),
    ):
        yield above(statement, _pairs(first, second, places))
    gaps = {}
    for setting, own in where(family.rows, method=("a2d", "divdis"), source=0).items():
        for other in where(family.rows, method=setting.method, strength=setting.strength, source=1).values():
            pairs = [(estimate(own, p), estimate(other, p)) for p in (*bma.values(), *pds.values())]
            gaps[setting.row] = max(abs(a.value - b.value) for a, b in pairs if a is not None and b is not None)
    yield Claim(
        f"Where the images to disagree on come from matters little ({SMALL:g}).",
        "; ".join(f"{row}: largest difference in AUROC {gap:.4f}" for row, gap in gaps.items()),
        over_cases({row: gap <= SMALL for row, gap in gaps.items()}),
    )


def _strength_claims(family: Family) -> Iterator[Claim]:
    found = {strength: own for strength in STRENGTHS if (own := family.guided(strength))}
    if len(found) < 3:
        return

    def means(place: Place) -> dict[float, float]:
        return {strength: value.value for strength, own in found.items() if (value := estimate(own, place)) is not None}

    part = "C-5" if "C-5" in family.parts else "test"
    diversity = means(("pds", part))
    yield Claim.checked(
        f"Diversity (mean PDS, {part}) rises with the strength.",
        "; ".join(f"{value:.3f} at {strength:g}" for strength, value in diversity.items()),
        list(diversity.values()) == sorted(diversity.values()),
    )
    weakest = min(found)
    cases: dict[str, Case] = {}
    for part, place in _detection(family, PDS).items():
        values = means(place)
        best = max(values, key=values.__getitem__)
        cases[f"{part}, {best:g} and {weakest:g}"] = (found[best], place), {"": (found[weakest], place)}
    yield above("Some strength detects better with PDS than none.", cases)


def _cost_claims(family: Family) -> Iterator[Claim]:
    """Judge table 10's seconds."""
    place = ("training", "epoch_seconds")
    pairs = _pairs(family.guided(active=5), family.guided(active=2), {"five drawn, and two": place})
    yield above("An epoch takes longer the more members a step draws (M = 5).", pairs)
    small, large = (estimate(family.guided(num_members=size), place) for size in (5, 50))
    if small is not None and large is not None:
        yield Claim.checked(
            "With pairs, the cost of a step does not depend on the number of members.",
            f"{small.value:.3f} s for M = 5, {large.value:.3f} s for M = 50 (the document: 53 s and 2189 s)",
            large.value <= 1.2 * small.value,
        )


def family_tables(family: Family) -> list[Table]:
    """Return the document's tables, with all ensembles of a family as rows: what it varies one by one is beside each other."""
    parts = dict.fromkeys(part for own in family.rows.values() for part in own[0]["unique"])
    shown = {s: own for s, own in family.usual(strength=(0, SHOWN), guard=FORMS).items() if s.method in ("deep", "ldr")}
    scores = {score: None for own in shown.values() for found in own[0]["auroc"].values() for score in found}
    differ = {
        f"{word} {part}": (what, part) for word, what in (("#unique", "unique"), ("PDS", "pds")) for part in parts
    }
    detect = {f"{word} {part}": auroc(part, score) for part in family.parts for word, score in SCORES.items()}
    every = {f"{score} {part}": auroc(part, score) for score in scores for part in family.pooled}
    answers: dict[str, Place] = {
        **{
            f"{word} {part}": ("accuracy", part, way)
            for word, way in _ANSWERS.items()
            for part in ("test", "C-1", "C-5")
        },
        "worst member": WORST_MEMBER,
        "NLL": ("test", "nll"),
        "ECE": ("test", "ece"),
        "s an epoch": ("training", "epoch_seconds"),
        "epochs": ("training", "epochs"),
    }
    tables: tuple[tuple[str, Rows, Mapping[str, Place]], ...] = (
        (
            "Table 1: mean number of different answers (#unique), and mean of PDS as a sum over classes.",
            family.rows,
            differ,
        ),
        (
            "Tables 2, 4, 5, 7, 9 and 10: AUROC for corrupted and unknown images. C-1 and C-5 are means over corruptions.",
            *(family.rows, detect),
        ),
        (
            "Tables 3, 4, 5, 7, 9 and 10: accuracy of averaged logits, of a vote, of averaged weights (soup) and of the best member by "
            "hindsight (oracle: never a result), calibration, and seconds an epoch.",
            *(family.rows, answers),
        ),
        ("Table 6: AUROC of every score.", shown, every),
    )
    return [*(_table(*each) for each in tables), guard_table(family)]


def spurious_table(rows: Rows) -> Table:
    """Table 8: worst-group accuracy."""
    said = "Table 8: accuracy on the worst of four groups. Averages of logits; the best member by hindsight (oracle)."
    return _table(said, rows, {way: ("worst_group", way) for way in ("oracle", "ensemble", "mean member")})


def _table(caption: str, rows: Rows, columns: Mapping[str, Place]) -> Table:
    found = {setting.row: [estimate(own, place) for place in columns.values()] for setting, own in rows.items()}
    cells = [(row, *(None if value is None else value.text for value in own)) for row, own in found.items()]
    return Table(("ensemble", *columns), cells, caption)


def guard_table(family: Family) -> Table:
    """What each guard costs members, and what is gained over the deep ensemble."""
    deep = family.one()
    cells = []
    for setting, own in (family.usual(method="ldr") if deep else {}).items():
        lost, found = member_loss(own, deep), gains(family, own, deep)
        signs = [sign for *_, sign in found]
        name, value, _ = max(found, key=lambda gain: (gain[2], gain[1]), default=("", 0.0, 0))
        kept, counts = "yes" if lost <= MARGIN else "no", f"{signs.count(1)} / {signs.count(-1)} of {len(signs)}"
        said = diagnosis(own, deep)
        cells.append((setting.row, round(lost, 4), kept, said, counts, f"{value:+.4f} ({name})", len(own)))
    header = (
        "ensemble",
        "worst member's loss",
        "within 2 points",
        "diagnosis",
        "AUROCs gained / lost",
        "best gain",
        "runs",
    )
    caption = (
        "Guards: accuracy that the worst member of all runs has lost against independent ones on average, and AUROCs over all scores, "
        "sets and averages that are above or below those of the deep ensemble by more than chance in as many looks."
    )
    return Table(header, cells, caption)


def member_loss(records: Records, independent: Records) -> float:
    """Return how much less accurate the worst member of all runs is than independent ones of its seed, or of all, on average."""

    def loss(record: Record) -> float:
        seed = record["setting"]["seed"]
        same = [each for each in independent if each["setting"]["seed"] == seed] or independent
        return fmean(fmean(each["members"]) for each in same) - min(record["members"])

    return max(map(loss, records))


def gains(family: Family, own: Records, deep: Records) -> list[tuple[str, float, int]]:
    """Return what AUROCs are above a deep ensemble's: where and by which score, by how much, and 1 or -1 where that is no chance.

    With n looks each has an interval of 1 - 0.05/n, over runs, or over images where there is one run.
    """
    looks = [(part, score) for part in family.parts for score in deep[0]["auroc"][part]]
    errors = NormalDist().inv_cdf(1 - 0.025 / max(len(looks), 1))
    found = []
    for part, score in looks:
        first, second = (estimate(records, auroc(part, score)) for records in (own, deep))
        if first is not None and second is not None:
            value, spread = first.value - second.value, errors * sqrt(first.error**2 + second.error**2)
            found.append((f"{score}, {part}", value, (value > spread) - (value < -spread)))
    return found


def diagnosis(own: Records, deep: Records) -> str:
    """Return what the diagnosis of collusion says of members in any run, and whether the ensemble's accuracy hides a lost member.

    Hidden is one that the ensemble loses at most two points by, or a quarter of what the member lost.
    """
    there = [text for key, text in _FINDINGS.items() if any(record.get("finding", {}).get(key) for record in own)]
    lost = member_loss(own, deep)
    before, after = (estimate(records, ("test", "accuracy")) for records in (deep, own))
    shown = before.value - after.value if before is not None and after is not None else 1.0
    if lost > MARGIN and shown <= max(MARGIN, lost / 4):
        there.append("a lost member is hidden")
    return ", ".join(there)
