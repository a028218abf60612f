"""Records of `diversification` in, what the document says beside what they show out."""

from collections.abc import Mapping, Sequence

from dissensus.scores import SCORES as ALL_SCORES
from dissensus_studies.arm_log import Record
from dissensus_studies.claims import Claim
from dissensus_studies.diversification_ablation_claims import ablation_claims, cost_claims, spurious_claims
from dissensus_studies.diversification_cases import (
    BMA,
    PDS,
    Case,
    compare,
    compared,
    guided_records,
    over_cases,
)
from dissensus_studies.diversification_guards import MARGIN, member_loss
from dissensus_studies.diversification_reading import (
    GUARDED,
    PUBLISHED,
    SCORES,
    SHOWN,
    Estimate,
    Found,
    aggregated,
    auroc,
    estimate,
    label,
    on_test,
    pds_minus,
    pooled_parts,
    unique,
)
from dissensus_studies.diversification_tables import plain_rows


def diversification_claims(found: Found) -> list[Claim]:
    """Judge the document's statements, as far as there are arms for them; one claim for each family of ensembles."""
    claims: list[Claim] = []
    for family in found.families:
        claims += [_named(family, claim) for claim in _of_family(found, family) if claim.measured]
    return claims + spurious_claims(found)


def _named(family: str, claim: Claim) -> Claim:
    words = {
        "nets": "networks from scratch",
        "heads half": "heads, backbone of half the classes",
        "heads whole": "heads, backbone of all classes",
    }
    return Claim(f"{claim.statement} ({words.get(family, family)})", claim.measured, claim.verdict)


def _of_family(found: Found, family: str) -> list[Claim]:
    claims: list[Claim] = []
    for guard, words in ((PUBLISHED, "published form"), (GUARDED, "guarded")):
        guided = guided_records(found, family, SHOWN, guard)
        deep = found.one(family, "deep M=5")
        if guided and deep:
            claims += [
                over_cases(
                    f"Loss-guided members give more different answers on every set than a deep ensemble's; {words}.",
                    _uniques(guided, deep),
                ),
                over_cases(
                    f"Loss-guided training with PDS detects better than any other method with BMA or PDS; {words}.",
                    _best_of_all(found, family, guided),
                ),
                over_cases(
                    f"PDS of loss-guided ensembles detects better than BMA; {words}.", _scores(guided)
                ),
                over_cases(f"PDS is the best of all scores for them; {words}.", _best_score(guided)),
                *_generalisation(guided, deep, words),
                _unharmed(guided, deep, words),
            ]
    deep = found.one(family, "deep M=5")
    if deep:
        claims.append(
            over_cases("PDS is poor without diversity: below BMA for a deep ensemble.", _poor(deep))
        )
        claims += _generalisation(guided_records(found, family, 0.0, PUBLISHED), deep, "strength 0")
    claims += [
        *_diverse_claims(found, family),
        *_strength_claims(found, family),
        *_size_claims(found, family),
        *ablation_claims(found, family),
        *cost_claims(found, family),
    ]
    return claims


def _generalisation(guided: Sequence[Record], deep: Sequence[Record], words: str) -> list[Claim]:
    """Judge table 3; at strength 0 drawing members is all there is to the method."""
    ways = {"averaged logits": "mean_logits", "averaged weights (soup)": "soup"}
    return [
        over_cases(
            f"Accuracy of {name} under corruption is higher than the deep ensemble's; {words}.",
            compared(guided, deep, {part: aggregated(part, way) for part in ("C-1", "C-5")}),
        )
        for name, way in ways.items()
    ]


def _diverse_claims(found: Found, family: str) -> list[Claim]:
    """Judge what table 2 says of hyperparameters."""
    diverse = found.one(family, "diverse M=5")
    others = {
        label(setting): records
        for setting, records in plain_rows(found, family).items()
        if setting.method != "diverse" and setting.strength in (0.0, SHOWN, 0.1, 1.0)
    }
    cases: dict[str, Case] = {}
    for part in pooled_parts(diverse):
        found_in = {name: estimate(records, auroc(part, BMA)) for name, records in others.items()}
        if (case := _against_best(estimate(diverse, auroc(part, BMA)), found_in)) is not None:
            cases[part] = case
    return [over_cases("By BMA, diverse hyperparameters detect best of all ensembles.", cases)]


def _against_best(own: Estimate | None, others: Mapping[str, Estimate | None]) -> Case | None:
    """Compare a value with the best of others, by name; None where one side is missing."""
    values = {name: value for name, value in others.items() if value is not None}
    if own is None or not values:
        return None
    best = max(values, key=lambda name: values[name].value)
    text = f"{own.value:.4f}, best other {values[best].value:.4f} ({best})"
    return text, own.above(values[best])


def _uniques(guided: Sequence[Record], deep: Sequence[Record]) -> dict[str, Case]:
    parts = [part for part in guided[0]["unique"] if part in deep[0]["unique"]]
    return compared(guided, deep, {part: unique(part) for part in parts})


def _best_of_all(found: Found, family: str, guided: Sequence[Record]) -> dict[str, Case]:
    others = {
        (label(setting), word): records
        for setting, records in plain_rows(found, family).items()
        for word in SCORES
        if setting.method != "ldr"
    }
    cases: dict[str, Case] = {}
    for part in pooled_parts(guided):
        found_in = {
            f"{name}, {word}": estimate(records, auroc(part, SCORES[word]))
            for (name, word), records in others.items()
        }
        if (case := _against_best(estimate(guided, auroc(part, PDS)), found_in)) is not None:
            cases[part] = case
    return cases


def _scores(guided: Sequence[Record]) -> dict[str, Case]:
    return {
        part: case for part in pooled_parts(guided) if (case := _pds_against(guided, part, BMA)) is not None
    }


def _pds_against(records: Sequence[Record], part: str, score: str) -> Case | None:
    """Compare PDS with another score of the same ensemble, input by input."""
    own, other, difference = (
        estimate(records, read) for read in (auroc(part, PDS), auroc(part, score), pds_minus(part, score))
    )
    if own is None or other is None or difference is None:
        return None
    return f"PDS {own.value:.4f}, {score} {other.value:.4f}", difference.above()


def _best_score(guided: Sequence[Record]) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for part in pooled_parts(guided):
        values = {
            score: value.value
            for score in ALL_SCORES
            if score != PDS and (value := estimate(guided, auroc(part, score))) is not None
        }
        case = _pds_against(guided, part, max(values, key=lambda score: values[score])) if values else None
        if case is not None:
            cases[part] = case
    return cases


def _unharmed(guided: Sequence[Record], deep: Sequence[Record], words: str) -> Claim:
    drops = [member_loss(record, deep) for record in guided]
    ensemble = compare(estimate(guided, on_test("accuracy")), estimate(deep, on_test("accuracy")))
    colluding = any(record.get("finding", {}).get("colluding") for record in guided)
    text = f"worst member loses {max(drops):.4f}; ensemble {ensemble[0] if ensemble else 'not compared'}"
    if colluding:
        text += "; members collude"
    statement = f"Members are made to differ without harm to what they learn (within {100 * MARGIN:.0f} points); {words}."
    # The spread of one member's accuracy over images, from that of all members' average, which is a little smaller.
    spread = estimate(deep, on_test("member_accuracy"))
    near = spread is not None and abs(max(drops) - MARGIN) <= 2 * spread.error
    return over_cases(statement, {"": (text, None if near else max(drops) <= MARGIN)})


def _poor(deep: Sequence[Record]) -> dict[str, Case]:
    cases = {part: _pds_against(deep, part, BMA) for part in pooled_parts(deep)}
    return {
        part: (case[0], None if case[1] is None else not case[1])
        for part, case in cases.items()
        if case is not None
    }


def _strength_claims(found: Found, family: str) -> list[Claim]:
    by_strength = {
        strength: records
        for strength in (0.0, 0.1, 0.5, 1.0, 5.0, 10.0)
        if (records := guided_records(found, family, strength, PUBLISHED))
    }
    if len(by_strength) < 3:
        return []
    means = {
        s: sum(record["pds"]["C-5"][0] for record in records) / len(records)
        for s, records in by_strength.items()
    }
    rising = list(means.values()) == sorted(means.values())
    cases: dict[str, Case] = {}
    for part in pooled_parts(by_strength[min(by_strength)]):
        values = {
            s: value
            for s, records in by_strength.items()
            if (value := estimate(records, auroc(part, PDS))) is not None
        }
        weakest = min(values)
        best = max(values, key=lambda s: values[s].value)
        text = f"best {values[best].value:.4f} at {best:g}, {values[weakest].value:.4f} at {weakest:g}"
        cases[part] = text, values[best].above(values[weakest]) if best != weakest else False
    return [
        Claim.checked(
            "Diversity (mean PDS on C-5) rises with the strength.",
            "; ".join(f"{value:.3f} at {s:g}" for s, value in means.items()),
            rising,
        ),
        over_cases("Some strength detects better with PDS than none.", cases),
    ]


def _size_claims(found: Found, family: str) -> list[Claim]:
    claims = []
    for large, small in ((5, 2), (50, 5)):
        first, second = (
            guided_records(found, family, SHOWN, PUBLISHED, num_members=size) for size in (large, small)
        )
        if first and second:
            cases = compared(first, second, {p: auroc(p, PDS) for p in pooled_parts(first)})
            claims.append(over_cases(f"{large} members detect better than {small}; published form.", cases))
    return claims
