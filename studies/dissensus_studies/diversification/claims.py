"""Records of `diversification` in, what the document says beside what they show out."""

from collections.abc import Callable, Mapping, Sequence

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
    plain_rows,
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
    return claims + _spurious_claims(found)


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


def _of_family(found: Found, family: str) -> list[Claim]:
    claims: list[Claim] = []
    deep = found.one(family, "deep M=5")
    for guard, words in ((PUBLISHED, "published form"), (GUARDED, "guarded")):
        guided = found.guided(family, SHOWN, guard)
        if guided and deep:
            claims += _guided_claims(found, family, guided, deep, words)
    if deep:
        poor = {part: _pds_against(deep, part, BMA) for part in pooled_parts(deep)}
        claims.append(
            _claim(
                "PDS is poor without diversity: below BMA for a deep ensemble.",
                {part: case and (case[0], None if case[1] is None else not case[1]) for part, case in poor.items()},
            )
        )
        claims += _generalisation(found.guided(family, 0.0, PUBLISHED), deep, "strength 0")
    return [
        *claims,
        _diverse_claim(found, family),
        *_strength_claims(found, family),
        *_size_claims(found, family),
        *_ablation_claims(found, family),
        *_source_claims(found, family),
        *_cost_claims(found, family),
    ]


def _guided_claims(found: Found, family: str, guided: Records, deep: Records, words: str) -> list[Claim]:
    parts = pooled_parts(guided)
    answers = {part: counted("unique", part) for part in guided[0]["unique"] if part in deep[0]["unique"]}
    others = {
        (label(setting), word): records
        for setting, records in plain_rows(found, family).items()
        for word in SCORES
        if setting.method != "ldr"
    }
    best_of_all = {
        part: _against_best(
            estimate(guided, auroc(part, PDS)),
            {
                f"{name}, {word}": estimate(records, auroc(part, SCORES[word]))
                for (name, word), records in others.items()
            },
        )
        for part in parts
    }
    return [
        _claim(
            f"Loss-guided members give more different answers on every set than a deep ensemble's; {words}.",
            _compared(guided, deep, answers),
        ),
        _claim(
            f"Loss-guided training with PDS detects better than any other method with BMA or PDS; {words}.", best_of_all
        ),
        _claim(
            f"PDS of loss-guided ensembles detects better than BMA; {words}.",
            {part: _pds_against(guided, part, BMA) for part in parts},
        ),
        _claim(
            f"PDS is the best of all scores for them; {words}.", {part: _best_score(guided, part) for part in parts}
        ),
        *_generalisation(guided, deep, words),
        _unharmed(guided, deep, words),
    ]


def _best_score(guided: Records, part: str) -> Case | None:
    values = {
        score: value.value
        for score in ALL_SCORES
        if score != PDS and (value := estimate(guided, auroc(part, score))) is not None
    }
    return _pds_against(guided, part, max(values, key=lambda score: values[score])) if values else None


def _generalisation(guided: Records, deep: Records, words: str) -> list[Claim]:
    """Judge table 3; at strength 0 drawing members is all there is to the method."""
    ways = {"averaged logits": "mean_logits", "averaged weights (soup)": "soup"}
    return [
        _claim(
            f"Accuracy of {name} under corruption is higher than the deep ensemble's; {words}.",
            _compared(guided, deep, {part: aggregated(part, way) for part in ("C-1", "C-5")}),
        )
        for name, way in ways.items()
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
    statement = (
        f"Members are made to differ without harm to what they learn (within {100 * MARGIN:.0f} points); {words}."
    )
    return _claim(statement, {"": (text, None if near else lost <= MARGIN)})


def _diverse_claim(found: Found, family: str) -> Claim:
    """Judge what table 2 says of hyperparameters."""
    diverse = found.one(family, "diverse M=5")
    others = {
        label(setting): records
        for setting, records in plain_rows(found, family).items()
        if setting.method != "diverse" and setting.strength in (0.0, SHOWN, 0.1, 1.0)
    }
    cases = {
        part: _against_best(
            estimate(diverse, auroc(part, BMA)),
            {name: estimate(records, auroc(part, BMA)) for name, records in others.items()},
        )
        for part in pooled_parts(diverse)
    }
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
        values = {
            s: value for s, records in by_strength.items() if (value := estimate(records, auroc(part, PDS))) is not None
        }
        weakest = min(values)
        best = max(values, key=lambda s: values[s].value)
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


def _size_claims(found: Found, family: str) -> list[Claim]:
    claims = []
    for large, small in ((5, 2), (50, 5)):
        first, second = (found.guided(family, SHOWN, PUBLISHED, num_members=size) for size in (large, small))
        if first and second:
            cases = _compared(first, second, {part: auroc(part, PDS) for part in pooled_parts(first)})
            claims.append(_claim(f"{large} members detect better than {small}; published form.", cases))
    return claims


def _ablation_claims(found: Found, family: str) -> list[Claim]:
    """Judge tables 4, 5 and 7, and the other kind of weights."""
    two, one = (found.guided(family, SHOWN, PUBLISHED, layers=layers) for layers in (2, 1))
    parts = pooled_parts(two or one)
    reads = {part: auroc(part, PDS) for part in parts}
    answers = {part: counted("unique", part) for part in parts if two and part in two[0]["unique"]}
    compared = (
        ("Heads of two layers detect better than heads of one.", two, one, reads),
        (
            "Also with one layer, PDS of loss-guided heads beats that of independent ones.",
            one,
            found.one(family, "deep layers=1 M=5"),
            reads,
        ),
        (
            "Loss-guided weights detect better than two stages.",
            two,
            found.one(family, f"two-stage={SHOWN:g} A=2 M=5"),
            reads,
        ),
        (
            "Weights in proportion to the loss diversify more than to one over the probability (#unique).",
            two,
            found.one(family, f"ldr={SHOWN:g} inverse probability A=2 M=5"),
            answers,
        ),
    )
    return [
        _claim(statement, _compared(first, second, read))
        for statement, first, second, read in compared
        if first and second
    ]


def _source_claims(found: Found, family: str) -> list[Claim]:
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
    statement = "Where the images to disagree on come from matters little (0.01)."
    return [_claim(statement, cases)] if cases else []


def _cost_claims(found: Found, family: str) -> list[Claim]:
    """Judge table 10's seconds."""

    def seconds(size: int, active: int) -> Estimate | None:
        records = found.guided(family, SHOWN, PUBLISHED, num_members=size, active=active)
        return estimate(records, epoch("seconds"))

    claims = []
    drawn = {active: value.value for active in (2, 3, 4, 5) if (value := seconds(5, active)) is not None}
    if len(drawn) > 1:
        claims.append(
            _timed(
                "An epoch takes longer the more members a step draws (M = 5).",
                "; ".join(f"{value:.3f} s for {active}" for active, value in drawn.items()),
                drawn[max(drawn)] / drawn[min(drawn)],
                lambda ratio: ratio > 1,
            )
        )
    small, large = (seconds(size, 2) for size in (5, 50))
    if small is not None and large is not None:
        ratio = large.value / small.value
        text = f"{small.value:.3f} s for M = 5, {large.value:.3f} s for M = 50 ({ratio:.2f} times; the document: 53 s and 2189 s)"
        statement = "With pairs, the cost of a step does not depend on the number of members."
        claims.append(_timed(statement, text, ratio, lambda found: found <= 1.2))
    return claims


def _timed(statement: str, measured: str, ratio: float, holds: Callable[[float], bool]) -> Claim:
    """Judge a ratio of times of more work to less; where more work took much less time, the times are of something else."""
    if ratio < 1 / 1.2:
        return Claim(statement, f"{measured}: the machine did other things meanwhile", "unresolved")
    return Claim.checked(statement, measured, holds(ratio))


def _spurious_claims(found: Found) -> list[Claim]:
    """Judge table 8."""
    rows = found.where(kind="spurious")

    def cases(method: str, way: str) -> dict[str, Case | None]:
        values = {setting: estimate(records, worst_group(way)) for setting, records in rows.items()}
        others = {label(setting): value for setting, value in values.items() if setting.method != method}
        return {
            label(setting): _against_best(value, others)
            for setting, value in values.items()
            if setting.method == method
        }

    methods = {setting.method for setting in rows}
    claims = []
    if "ldr" in methods and len(methods) > 1:
        statement = "Where backgrounds mislead, the loss-guided ensemble's worst group is best served."
        claims.append(_claim(statement, cases("ldr", "ensemble")))
        if "divdis" in methods:
            statement = "DivDis has the best single member there (by hindsight)."
            claims.append(_claim(statement, cases("divdis", "oracle")))
    return claims
