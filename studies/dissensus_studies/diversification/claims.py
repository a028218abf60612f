"""Records of `diversification` in, what the document says beside what they show out."""

from collections.abc import Iterator, Mapping, Sequence

from dissensus.scores import SCORES as ALL_SCORES
from dissensus_studies.diversification.guards import MARGIN, member_loss
from dissensus_studies.diversification.reading import (
    BMA,
    GUARDED,
    PDS,
    PUBLISHED,
    SCORES,
    SHOWN,
    Found,
    Read,
    aggregated,
    auroc,
    counted,
    epoch,
    estimate,
    label,
    on_test,
    pds_minus,
    pooled_parts,
    worst_group,
)
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.claims import Claim, over_cases
from dissensus_studies.harness.statistics import Estimate

# What was measured, and whether a statement holds; None if that is open.
Case = tuple[str, bool | None]
Records = Sequence[Record]
# Differences in AUROC that the document calls small.
SMALL = 0.01
FAMILIES = {
    "nets": "networks from scratch",
    "heads half": "heads, backbone of half the classes",
    "heads whole": "heads, backbone of all classes",
}


def diversification_claims(found: Found) -> list[Claim]:
    """Judge the document's statements, as far as there are arms for them; one claim for each family of ensembles."""
    claims = [
        Claim(f"{claim.statement} ({FAMILIES.get(family, family)})", claim.measured, claim.verdict)
        for family in found.families
        for claim in _of_family(found, family)
        if claim.measured
    ]
    return [*claims, *_spurious_claims(found)]


def _of_family(found: Found, family: str) -> Iterator[Claim]:
    deep = found.one(family, "deep M=5")
    if deep:
        for guard, words in ((PUBLISHED, "published form"), (GUARDED, "guarded")):
            guided = found.guided(family, SHOWN, guard)
            if guided:
                yield from _guided_claims(found, family, guided, deep, words)
        poor = {part: _pds_against(deep, part, BMA) for part in pooled_parts(deep)}
        yield _claim(
            "PDS is poor without diversity: below BMA for a deep ensemble.",
            {part: case and (case[0], None if case[1] is None else not case[1]) for part, case in poor.items()},
        )
        yield from _generalisation(found.guided(family, 0.0, PUBLISHED), deep, "strength 0")
    yield _diverse_claim(found, family)
    for judge in (_strength_claims, _size_claims, _ablation_claims, _source_claims, _cost_claims):
        yield from judge(found, family)


def _claim(statement: str, cases: Mapping[str, Case | None]) -> Claim:
    """Return the claim that a statement holds in all cases that could be looked at."""
    there = {name: case for name, case in cases.items() if case is not None}
    measured = "; ".join(f"{name}: {text}" if name else text for name, (text, _) in there.items())
    return Claim(statement, measured, over_cases({name: holds for name, (_, holds) in there.items()}))


def _compare(first: Estimate | None, second: Estimate | None) -> Case | None:
    """Say whether the first number is larger."""
    if first is None or second is None:
        return None
    return f"{first.value:.4f} against {second.value:.4f}", first.above(second)


def _compared(first: Records, second: Records, reads: Mapping[str, Read]) -> dict[str, Case | None]:
    return {name: _compare(estimate(first, read), estimate(second, read)) for name, read in reads.items()}


def _against_best(own: Estimate | None, others: Mapping[str, Estimate | None]) -> Case | None:
    """Compare a value with the best of others, by name; None where one side is missing."""
    values = {name: value for name, value in others.items() if value is not None}
    if own is None or not values:
        return None
    best = max(values, key=lambda name: values[name].value)
    return f"{own.value:.4f}, best other {values[best].value:.4f} ({best})", own.above(values[best])


def _pds_against(records: Records, part: str, score: str) -> Case | None:
    """Compare PDS with another score of the same ensemble, input by input."""
    reads = (auroc(part, PDS), auroc(part, score), pds_minus(part, score))
    own, other, difference = (estimate(records, read) for read in reads)
    if own is None or other is None or difference is None:
        return None
    return f"PDS {own.value:.4f}, {score} {other.value:.4f}", difference.above()


def _guided_claims(found: Found, family: str, guided: Records, deep: Records, words: str) -> Iterator[Claim]:
    parts = pooled_parts(guided)
    answers = {part: counted("unique", part) for part in guided[0]["unique"] if part in deep[0]["unique"]}
    others = [
        (f"{label(setting)}, {word}", records, score)
        for setting, records in found.plain(family).items()
        for word, score in SCORES.items()
        if setting.method != "ldr"
    ]
    best_of_all = {
        part: _against_best(
            estimate(guided, auroc(part, PDS)),
            {name: estimate(records, auroc(part, score)) for name, records, score in others},
        )
        for part in parts
    }
    yield _claim(
        f"Loss-guided members give more different answers on every set than a deep ensemble's; {words}.",
        _compared(guided, deep, answers),
    )
    yield _claim(
        f"Loss-guided training with PDS detects better than any other method with BMA or PDS; {words}.", best_of_all
    )
    yield _claim(
        f"PDS of loss-guided ensembles detects better than BMA; {words}.",
        {part: _pds_against(guided, part, BMA) for part in parts},
    )
    yield _claim(f"PDS is the best of all scores for them; {words}.", {p: _best_score(guided, p) for p in parts})
    yield from _generalisation(guided, deep, words)
    yield _unharmed(guided, deep, words)


def _best_score(guided: Records, part: str) -> Case | None:
    values = {
        score: value.value
        for score in ALL_SCORES
        if score != PDS and (value := estimate(guided, auroc(part, score))) is not None
    }
    return _pds_against(guided, part, max(values, key=values.__getitem__)) if values else None


def _generalisation(guided: Records, deep: Records, words: str) -> list[Claim]:
    """Judge table 3; at strength 0 drawing members is all there is to the method."""
    return [
        _claim(
            f"Accuracy of {name} under corruption is higher than the deep ensemble's; {words}.",
            _compared(guided, deep, {part: aggregated(part, way) for part in ("C-1", "C-5")}),
        )
        for name, way in (("averaged logits", "mean_logits"), ("averaged weights (soup)", "soup"))
    ]


def _unharmed(guided: Records, deep: Records, words: str) -> Claim:
    lost = max(member_loss(record, deep) for record in guided)
    ensemble = _compare(estimate(guided, on_test("accuracy")), estimate(deep, on_test("accuracy")))
    text = f"worst member loses {lost:.4f}; ensemble {ensemble[0] if ensemble else 'not compared'}"
    if any(record.get("finding", {}).get("colluding") for record in guided):
        text += "; members collude"
    # The spread of one member's accuracy over images, from that of all members' average, which is a little smaller.
    spread = estimate(deep, on_test("member_accuracy"))
    near = spread is not None and abs(lost - MARGIN) <= 2 * spread.error
    within = f"within {100 * MARGIN:.0f} points"
    statement = f"Members are made to differ without harm to what they learn ({within}); {words}."
    return _claim(statement, {"": (text, None if near else lost <= MARGIN)})


def _diverse_claim(found: Found, family: str) -> Claim:
    """Judge what table 2 says of hyperparameters."""
    diverse = found.one(family, "diverse M=5")
    others = {
        label(setting): records
        for setting, records in found.plain(family).items()
        if setting.method != "diverse" and setting.strength in (0.0, SHOWN, 0.1, 1.0)
    }
    cases = {}
    for part in pooled_parts(diverse):
        values = {name: estimate(records, auroc(part, BMA)) for name, records in others.items()}
        cases[part] = _against_best(estimate(diverse, auroc(part, BMA)), values)
    return _claim("By BMA, diverse hyperparameters detect best of all ensembles.", cases)


def _strength_claims(found: Found, family: str) -> list[Claim]:
    by_strength = {
        strength: records
        for strength in (0.0, 0.1, 0.5, 1.0, 5.0, 10.0)
        if (records := found.guided(family, strength, PUBLISHED))
    }
    if len(by_strength) < 3:
        return []
    means = {s: sum(record["pds"]["C-5"][0] for record in records) / len(records) for s, records in by_strength.items()}
    cases: dict[str, Case] = {}
    for part in pooled_parts(by_strength[min(by_strength)]):
        found_at = {s: estimate(records, auroc(part, PDS)) for s, records in by_strength.items()}
        values = {s: value for s, value in found_at.items() if value is not None}
        weakest, best = min(values), max(values, key=lambda s: values[s].value)
        text = f"best {values[best].value:.4f} at {best:g}, {values[weakest].value:.4f} at {weakest:g}"
        cases[part] = text, values[best].above(values[weakest]) if best != weakest else False
    return [
        Claim.checked(
            "Diversity (mean PDS on C-5) rises with the strength.",
            "; ".join(f"{value:.3f} at {s:g}" for s, value in means.items()),
            list(means.values()) == sorted(means.values()),
        ),
        _claim("Some strength detects better with PDS than none.", cases),
    ]


def _size_claims(found: Found, family: str) -> Iterator[Claim]:
    for large, small in ((5, 2), (50, 5)):
        first, second = (found.guided(family, SHOWN, PUBLISHED, num_members=size) for size in (large, small))
        if first and second:
            cases = _compared(first, second, {part: auroc(part, PDS) for part in pooled_parts(first)})
            yield _claim(f"{large} members detect better than {small}; published form.", cases)


def _ablation_claims(found: Found, family: str) -> list[Claim]:
    """Judge tables 4, 5 and 7, and the other kind of weights."""
    two, one = (found.guided(family, SHOWN, PUBLISHED, layers=layers) for layers in (2, 1))
    independent, staged, inverse = (
        found.one(family, row.format(SHOWN))
        for row in ("deep layers=1 M=5", "two-stage={:g} A=2 M=5", "ldr={:g} inverse probability A=2 M=5")
    )
    parts = pooled_parts(two or one)
    reads = {part: auroc(part, PDS) for part in parts}
    answers = {part: counted("unique", part) for part in parts if two and part in two[0]["unique"]}
    weights = "Weights in proportion to the loss diversify more than to one over the probability (#unique)."
    compared = (
        ("Heads of two layers detect better than heads of one.", two, one, reads),
        ("Also with one layer, PDS of loss-guided heads beats that of independent ones.", one, independent, reads),
        ("Loss-guided weights detect better than two stages.", two, staged, reads),
        (weights, two, inverse, answers),
    )
    return [
        _claim(words, _compared(first, second, read)) for words, first, second, read in compared if first and second
    ]


def _source_claims(found: Found, family: str) -> Iterator[Claim]:
    """Judge table 9."""
    rows = found.where(family=family, method=("a2d", "divdis"))
    others = {(s.method, s.strength): records for s, records in rows.items() if s.source == 1}
    cases: dict[str, Case] = {}
    for setting, records in rows.items():
        other = others.get((setting.method, setting.strength))
        if setting.source == 0 and other:
            gaps = [
                abs(a.value - b.value)
                for part in pooled_parts(records)
                for score in (BMA, PDS)
                if (a := estimate(records, auroc(part, score))) is not None
                and (b := estimate(other, auroc(part, score))) is not None
            ]
            cases[label(setting)] = f"largest difference in AUROC {max(gaps):.4f}", max(gaps) <= SMALL
    if cases:
        yield _claim("Where the images to disagree on come from matters little (0.01).", cases)


def _cost_claims(found: Found, family: str) -> Iterator[Claim]:
    """Judge table 10's seconds."""

    def seconds(size: int, active: int) -> Estimate | None:
        return estimate(found.guided(family, SHOWN, PUBLISHED, num_members=size, active=active), epoch("seconds"))

    drawn = {active: value.value for active in (2, 3, 4, 5) if (value := seconds(5, active)) is not None}
    if len(drawn) > 1:
        text = "; ".join(f"{value:.3f} s for {active}" for active, value in drawn.items())
        ratio = drawn[max(drawn)] / drawn[min(drawn)]
        yield _timed("An epoch takes longer the more members a step draws (M = 5).", text, ratio, ratio > 1)
    small, large = (seconds(size, 2) for size in (5, 50))
    if small is not None and large is not None:
        ratio = large.value / small.value
        text = f"{small.value:.3f} s for M = 5, {large.value:.3f} s for M = 50 ({ratio:.2f} times; the document: 53 s and 2189 s)"
        statement = "With pairs, the cost of a step does not depend on the number of members."
        yield _timed(statement, text, ratio, ratio <= 1.2)


def _timed(statement: str, measured: str, ratio: float, holds: bool) -> Claim:
    """Judge a ratio of times of more work to less; where more work took much less time, the times are of something else."""
    if ratio < 1 / 1.2:
        return Claim(statement, f"{measured}: the machine did other things meanwhile", "unresolved")
    return Claim.checked(statement, measured, holds)


def _spurious_claims(found: Found) -> Iterator[Claim]:
    """Judge table 8."""
    rows = found.where(kind="spurious")
    methods = {setting.method for setting in rows}

    def cases(method: str, way: str) -> dict[str, Case | None]:
        values = {setting: estimate(records, worst_group(way)) for setting, records in rows.items()}
        others = {label(setting): value for setting, value in values.items() if setting.method != method}
        return {label(s): _against_best(value, others) for s, value in values.items() if s.method == method}

    if "ldr" in methods and len(methods) > 1:
        statement = "Where backgrounds mislead, the loss-guided ensemble's worst group is best served."
        yield _claim(statement, cases("ldr", "ensemble"))
        if "divdis" in methods:
            yield _claim("DivDis has the best single member there (by hindsight).", cases("divdis", "oracle"))
