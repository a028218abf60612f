"""Records of `diversification` in, what the document says beside what they show out."""

from collections.abc import Iterable, Mapping, Sequence

from dissensus.scores import SCORES as ALL_SCORES
from dissensus.studies.arm_log import Record
from dissensus.studies.claims import Claim
from dissensus.studies.diversification_reading import (
    GUARDED,
    PUBLISHED,
    SCORES,
    SHOWN,
    Estimate,
    Found,
    Read,
    aggregated,
    auroc,
    epoch_seconds,
    estimate,
    label,
    on_test,
    pds_minus,
    pooled_parts,
    unique,
    worst_group,
)
from dissensus.studies.diversification_settings import Setting
from dissensus.studies.diversification_tables import member_drop, plain_rows

Case = tuple[str, bool | None]
BMA, PDS = SCORES["BMA"], SCORES["PDS"]
# Differences in AUROC that the document calls small.
SMALL = 0.01
# Accuracy that a member may lose and still be called unharmed.
MARGIN = 0.02


def diversification_claims(found: Found) -> list[Claim]:
    """Judge the document's statements, as far as there are arms for them; one claim for each family of ensembles."""
    claims: list[Claim] = []
    for family in found.families:
        claims += [_named(family, claim) for claim in _of_family(found, family) if claim.measured]
    return claims + _spurious(found)


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
        guided = _ldr(found, family, SHOWN, guard)
        deep = found.one(family, "deep M=5")
        if guided and deep:
            claims += [
                _over_cases(
                    f"Loss-guided members give more different answers on every set than a deep ensemble's; {words}.",
                    _uniques(guided, deep),
                ),
                _over_cases(
                    f"Loss-guided training with PDS detects better than any other method with BMA or PDS; {words}.",
                    _best_of_all(found, family, guided),
                ),
                _over_cases(
                    f"PDS of loss-guided ensembles detects better than BMA; {words}.", _scores(guided)
                ),
                _over_cases(f"PDS is the best of all scores for them; {words}.", _best_score(guided)),
                _over_cases(
                    f"Accuracy under corruption is higher than the deep ensemble's; {words}.",
                    _compared(guided, deep, {p: aggregated(p, "mean_logits") for p in ("C-1", "C-5")}),
                ),
                _unharmed(guided, deep, words),
            ]
    deep = found.one(family, "deep M=5")
    if deep:
        claims.append(
            _over_cases("PDS is poor without diversity: below BMA for a deep ensemble.", _poor(deep))
        )
    claims += [
        *_strength_claims(found, family),
        *_size_claims(found, family),
        *_ablation_claims(found, family),
        *_cost_claims(found, family),
    ]
    return claims


def _ldr(found: Found, family: str, strength: float, guard: str, **others: int | bool) -> list[Record]:
    """Return the usual loss-guided ensemble of a family: pairs drawn for heads, all members for networks."""
    chosen = {"num_members": 5, "layers": 2, "fixed": False} | others

    def wanted(setting: Setting) -> bool:
        plain = (setting.family, setting.method, setting.strength) == (family, "ldr", strength)
        drawn = setting.active == others.get("active", 2 if setting.kind == "heads" else 0)
        guards = setting.guard == guard or strength == 0
        return (
            plain
            and drawn
            and guards
            and all(getattr(setting, k) == v for k, v in chosen.items() if k != "active")
        )

    return [record for records in found.all(wanted).values() for record in records]


def _over_cases(statement: str, cases: Mapping[str, Case]) -> Claim:
    measured = "; ".join(f"{name}: {text}" if name else text for name, (text, _) in cases.items())
    held = [name for name, (_, holds) in cases.items() if holds]
    if held and len(held) == len(cases):
        verdict = "reproduced"
    elif held:
        verdict = f"reproduced for {', '.join(held)} only"
    elif cases and all(holds is None for _, holds in cases.values()):
        verdict = "unresolved"
    else:
        verdict = "not reproduced"
    return Claim(statement, measured, verdict)


def _compare(first: Estimate | None, second: Estimate | None) -> Case | None:
    if first is None or second is None:
        return None
    return f"{first.value:.4f} against {second.value:.4f}", first.above(second)


def _compared(
    first: Sequence[Record], second: Sequence[Record], reads: Mapping[str, Read]
) -> dict[str, Case]:
    """Compare two ensembles; detection by paired differences where there are any."""
    cases = {name: _compare(estimate(first, read), estimate(second, read)) for name, read in reads.items()}
    return {name: case for name, case in cases.items() if case is not None}


def _uniques(guided: Sequence[Record], deep: Sequence[Record]) -> dict[str, Case]:
    parts = [part for part in guided[0]["unique"] if part in deep[0]["unique"]]
    return _compared(guided, deep, {part: unique(part) for part in parts})


def _best_of_all(found: Found, family: str, guided: Sequence[Record]) -> dict[str, Case]:
    others = {
        (label(setting), word): records
        for setting, records in plain_rows(found, family).items()
        for word in SCORES
        if setting.method != "ldr"
    }
    cases: dict[str, Case] = {}
    for part in pooled_parts(guided):
        own = estimate(guided, auroc(part, PDS))
        values = {
            key: value
            for key, records in others.items()
            if (value := estimate(records, auroc(part, SCORES[key[1]]))) is not None
        }
        if own is None or not values:
            continue
        best = max(values, key=lambda key: values[key].value)
        text = f"{own.value:.4f}, best other {values[best].value:.4f} ({best[0]}, {best[1]})"
        cases[part] = text, own.above(values[best])
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
    drops = [member_drop(record, deep) for record in guided]
    ensemble = _compare(estimate(guided, on_test("accuracy")), estimate(deep, on_test("accuracy")))
    colluding = any(record.get("finding", {}).get("colluding") for record in guided)
    text = f"worst member loses {max(drops):.4f}; ensemble {ensemble[0] if ensemble else 'not compared'}"
    if colluding:
        text += "; members collude"
    statement = f"Members are made to differ without harm to what they learn (within {100 * MARGIN:.0f} points); {words}."
    # The spread of one member's accuracy over images, from that of all members' average, which is a little smaller.
    spread = estimate(deep, on_test("member_accuracy"))
    near = spread is not None and abs(max(drops) - MARGIN) <= 2 * spread.error
    return _over_cases(statement, {"": (text, None if near else max(drops) <= MARGIN)})


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
        if (records := _ldr(found, family, strength, PUBLISHED))
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
        _over_cases("Some strength detects better with PDS than none.", cases),
    ]


def _size_claims(found: Found, family: str) -> list[Claim]:
    claims = []
    for large, small in ((5, 2), (50, 5)):
        first, second = (_ldr(found, family, SHOWN, PUBLISHED, num_members=size) for size in (large, small))
        if first and second:
            cases = _compared(first, second, {p: auroc(p, PDS) for p in pooled_parts(first)})
            claims.append(_over_cases(f"{large} members detect better than {small}; published form.", cases))
    return claims


def _ablation_claims(found: Found, family: str) -> list[Claim]:
    two, one = (_ldr(found, family, SHOWN, PUBLISHED, layers=layers) for layers in (2, 1))
    single_layer = found.one(family, "deep layers=1 M=5")
    stages = found.one(family, f"two-stage={SHOWN:g} A=2 M=5")
    parts = pooled_parts(two or one)
    reads = {part: auroc(part, PDS) for part in parts}
    claims = []
    if two and one:
        claims.append(
            _over_cases("Heads of two layers detect better than heads of one.", _compared(two, one, reads))
        )
    if one and single_layer:
        cases = _compared(one, single_layer, reads)
        claims.append(
            _over_cases(
                "Also with one layer, PDS of loss-guided heads beats that of independent ones.", cases
            )
        )
    if two and stages:
        cases = _compared(two, stages, reads)
        claims.append(_over_cases("Loss-guided weights detect better than two stages.", cases))
    return claims + _source_claims(found, family)


def _source_claims(found: Found, family: str) -> list[Claim]:
    rows = found.all(lambda setting: setting.family == family and setting.method in ("a2d", "divdis"))
    cases: dict[str, Case] = {}
    for setting, records in rows.items():
        if setting.source:
            continue
        other = next(
            (
                found_records
                for each, found_records in rows.items()
                if (each.method, each.strength, each.source) == (setting.method, setting.strength, 1)
            ),
            None,
        )
        if other:
            gaps = [
                abs(a.value - b.value)
                for part in pooled_parts(records)
                for score in (BMA, PDS)
                if (a := estimate(records, auroc(part, score))) is not None
                and (b := estimate(other, auroc(part, score))) is not None
            ]
            cases[label(setting)] = f"largest difference in AUROC {max(gaps):.4f}", max(gaps) <= SMALL
    return (
        [_over_cases("Where the images to disagree on come from matters little (0.01).", cases)]
        if cases
        else []
    )


def _cost_claims(found: Found, family: str) -> list[Claim]:
    def seconds(size: int, active: int) -> Estimate | None:
        return estimate(_ldr(found, family, SHOWN, PUBLISHED, num_members=size, active=active), epoch_seconds)

    claims = []
    all_drawn = {active: value for active in (2, 3, 4, 5) if (value := seconds(5, active)) is not None}
    if len(all_drawn) > 1:
        text = "; ".join(f"{value.value:.3f} s for {active}" for active, value in all_drawn.items())
        holds = all_drawn[max(all_drawn)].value > all_drawn[min(all_drawn)].value
        claims.append(
            Claim.checked("An epoch takes longer the more members a step draws (M = 5).", text, holds)
        )
    small, large = (seconds(size, 2) for size in (5, 50))
    if small is not None and large is not None:
        ratio = large.value / small.value
        text = f"{small.value:.3f} s for M = 5, {large.value:.3f} s for M = 50 ({ratio:.2f} times; the document: 53 s and 2189 s)"
        claims.append(
            Claim.checked(
                "With pairs, the cost of a step does not depend on the number of members.", text, ratio <= 1.2
            )
        )
    return claims


def _spurious(found: Found) -> list[Claim]:
    rows = found.all(lambda setting: setting.kind == "spurious")
    guided = {s: r for s, r in rows.items() if s.method == "ldr"}
    others = {s: r for s, r in rows.items() if s.method != "ldr"}
    if not guided or not others:
        return []
    cases = {
        label(setting): _against_best(records, others.items(), "ensemble")
        for setting, records in guided.items()
    }
    claims = [
        _over_cases(
            "Where backgrounds mislead, the loss-guided ensemble's worst group is best served.", cases
        )
    ]
    divdis = {s: r for s, r in others.items() if s.method == "divdis"}
    if divdis:
        rest = [(s, r) for s, r in rows.items() if s.method != "divdis"]
        found_cases = {label(s): _against_best(r, rest, "oracle") for s, r in divdis.items()}
        claims.append(_over_cases("DivDis has the best single member there (by hindsight).", found_cases))
    return claims


def _against_best(
    records: Sequence[Record], others: Iterable[tuple[Setting, Sequence[Record]]], way: str
) -> Case:
    own = estimate(records, worst_group(way))
    values = {
        label(setting): value
        for setting, found in others
        if (value := estimate(found, worst_group(way))) is not None
    }
    assert own is not None
    best = max(values, key=lambda name: values[name].value)
    return f"{own.value:.4f}, best other {values[best].value:.4f} ({best})", own.above(values[best])
