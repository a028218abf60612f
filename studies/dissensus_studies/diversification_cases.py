"""Two ensembles of `diversification` compared in several cases, and what that says of a statement."""

from collections.abc import Mapping, Sequence

from dissensus_studies.arm_log import Record
from dissensus_studies.claims import Claim
from dissensus_studies.diversification_reading import SCORES, Estimate, Found, Read, estimate
from dissensus_studies.diversification_settings import Setting

Case = tuple[str, bool | None]
BMA, PDS = SCORES["BMA"], SCORES["PDS"]


def over_cases(statement: str, cases: Mapping[str, Case]) -> Claim:
    """Return the claim that a statement holds in all cases; each is what was measured and whether it holds, None if that is open."""
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


def compare(first: Estimate | None, second: Estimate | None) -> Case | None:
    """Return whether the first number is larger."""
    if first is None or second is None:
        return None
    return f"{first.value:.4f} against {second.value:.4f}", first.above(second)


def compared(first: Sequence[Record], second: Sequence[Record], reads: Mapping[str, Read]) -> dict[str, Case]:
    """Compare numbers of two ensembles."""
    cases = {name: compare(estimate(first, read), estimate(second, read)) for name, read in reads.items()}
    return {name: case for name, case in cases.items() if case is not None}


def guided_records(
    found: Found, family: str, strength: float, guard: str, **others: int | bool
) -> list[Record]:
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
