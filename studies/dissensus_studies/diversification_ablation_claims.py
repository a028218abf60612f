"""Records of `diversification` in, the document's smaller experiments judged out: layers, two stages, sources, cost, backgrounds."""

from collections.abc import Callable, Iterable, Sequence

from dissensus_studies.arm_log import Record
from dissensus_studies.claims import Claim
from dissensus_studies.diversification_cases import BMA, PDS, Case, compared, guided_records, over_cases
from dissensus_studies.diversification_reading import (
    PUBLISHED,
    SHOWN,
    Estimate,
    Found,
    auroc,
    epoch_seconds,
    estimate,
    label,
    pooled_parts,
    unique,
    worst_group,
)
from dissensus_studies.diversification_settings import Setting

# Differences in AUROC that the document calls small.
SMALL = 0.01


def ablation_claims(found: Found, family: str) -> list[Claim]:
    """Judge tables 4, 5, 7 and 9, and the other kind of weights."""
    two, one = (guided_records(found, family, SHOWN, PUBLISHED, layers=layers) for layers in (2, 1))
    single_layer = found.one(family, "deep layers=1 M=5")
    stages = found.one(family, f"two-stage={SHOWN:g} A=2 M=5")
    parts = pooled_parts(two or one)
    reads = {part: auroc(part, PDS) for part in parts}
    claims = []
    if two and one:
        claims.append(
            over_cases("Heads of two layers detect better than heads of one.", compared(two, one, reads))
        )
    if one and single_layer:
        cases = compared(one, single_layer, reads)
        claims.append(
            over_cases("Also with one layer, PDS of loss-guided heads beats that of independent ones.", cases)
        )
    if two and stages:
        cases = compared(two, stages, reads)
        claims.append(over_cases("Loss-guided weights detect better than two stages.", cases))
    other = found.one(family, f"ldr={SHOWN:g} inverse probability A=2 M=5")
    if two and other:
        answers = {part: unique(part) for part in parts if part in two[0]["unique"]}
        cases = compared(two, other, answers)
        statement = (
            "Weights in proportion to the loss diversify more than to one over the probability (#unique)."
        )
        claims.append(over_cases(statement, cases))
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
        [over_cases("Where the images to disagree on come from matters little (0.01).", cases)]
        if cases
        else []
    )


def cost_claims(found: Found, family: str) -> list[Claim]:
    """Judge table 10's seconds."""

    def seconds(size: int, active: int) -> Estimate | None:
        return estimate(
            guided_records(found, family, SHOWN, PUBLISHED, num_members=size, active=active), epoch_seconds
        )

    claims = []
    all_drawn = {active: value for active in (2, 3, 4, 5) if (value := seconds(5, active)) is not None}
    if len(all_drawn) > 1:
        text = "; ".join(f"{value.value:.3f} s for {active}" for active, value in all_drawn.items())
        claims.append(
            _timed(
                "An epoch takes longer the more members a step draws (M = 5).",
                text,
                all_drawn[max(all_drawn)].value / all_drawn[min(all_drawn)].value,
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


def spurious_claims(found: Found) -> list[Claim]:
    """Judge table 8."""
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
        over_cases("Where backgrounds mislead, the loss-guided ensemble's worst group is best served.", cases)
    ]
    divdis = {s: r for s, r in others.items() if s.method == "divdis"}
    if divdis:
        rest = [(s, r) for s, r in rows.items() if s.method != "divdis"]
        found_cases = {label(s): _against_best(r, rest, "oracle") for s, r in divdis.items()}
        claims.append(over_cases("DivDis has the best single member there (by hindsight).", found_cases))
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
