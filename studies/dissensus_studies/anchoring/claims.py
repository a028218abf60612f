"""Records of `anchoring` in, what the document says beside what they show out."""

from collections.abc import Mapping
from itertools import combinations

from dissensus_studies.anchoring.qualities import (
    ADAPTATION,
    CALIBRATION,
    CLEAN,
    DETECTION,
    ROBUSTNESS,
    Quality,
    Records,
    measured,
)
from dissensus_studies.anchoring.tables import Row
from dissensus_studies.harness.claims import Claim

MASKED = ("alpha=0.0625", "alpha=0.125", "alpha=0.25")
# A loss of accuracy that still counts as none.
KEPT = 0.01
_UNRESOLVED = "not told apart from noise"


def anchoring_claims(records: Mapping[Row, Records]) -> list[Claim]:
    """Judge the document's statements, as far as there are arms for them.

    Args:
        records: (architecture, row) to the records of all seeds.
    """
    claims = []
    for architecture in dict.fromkeys(architecture for architecture, _ in records):
        rows = {row: found for (other, row), found in records.items() if other == architecture}
        claims += [claim for claim in _claims(architecture, rows) if claim is not None]
    return claims


def _claims(architecture: str, rows: Mapping[str, Records]) -> list[Claim | None]:
    statements = (
        ("Masked anchoring keeps clean accuracy (within one point).", CLEAN, "plain", "kept"),
        ("Masked anchoring raises accuracy under corruption.", ROBUSTNESS, "plain", "higher"),
        ("Masked anchoring lowers the smooth ECE under corruption.", CALIBRATION, "plain", "lower"),
        ("Masking detects unknown images better than anchoring alone.", DETECTION, "anchored", "higher"),
        ("Masking detects unknown images better than a plain network.", DETECTION, "plain", "higher"),
        ("Masked networks adapt better (linear probes).", ADAPTATION, "plain", "higher"),
    )
    return [
        *(_compared(architecture, rows, *statement) for statement in statements),
        _rising(architecture, rows),
        *_mined(architecture, rows),
    ]


def _compared(
    architecture: str, rows: Mapping[str, Records], statement: str, quality: Quality, against: str, expected: str
) -> Claim | None:
    """Compare every masked network with another one."""
    masked = [row for row in MASKED if row in rows]
    if not masked or against not in rows:
        return None
    if not measured(quality, rows[against], *(rows[row] for row in masked)):
        return _not_tested(statement, architecture, quality)
    base = quality.summary(rows[against])
    gains = {row: _gain(quality, rows[against], rows[row], expected) for row in masked}
    numbers = f"{architecture}: {against} {base.mean:.4f}; " + "; ".join(
        f"{row} {quality.summary(rows[row]).mean:.4f}" for row in masked
    )
    noise = max(quality.noise(rows[against], rows[row]) for row in masked)
    runs = f"{len(base.values)} runs, " if len(base.values) > 1 else ""
    return Claim(statement, f"{numbers} ({runs}noise of a difference up to {noise:.4f})", _verdict(gains))


def _not_tested(statement: str, architecture: str, *qualities: Quality) -> Claim:
    reasons = " and ".join(quality.lacking for quality in qualities)
    return Claim(statement, f"{architecture}: nothing", f"not tested: {reasons}")


def _gain(quality: Quality, base: Records, others: Records, expected: str) -> bool | None:
    """Return whether others are as expected, None where the difference may be noise."""
    gain = quality.summary(others).mean - quality.summary(base).mean
    if expected == "lower":
        gain = -gain
    if expected == "kept":
        gain += KEPT
    return None if abs(gain) <= quality.noise(base, others) else gain > 0


def _verdict(gains: Mapping[str, bool | None]) -> str:
    held, failed = ([row for row, gain in gains.items() if gain is wanted] for wanted in (True, False))
    if len(held) == len(gains):
        return "reproduced"
    if held:
        return f"reproduced for {', '.join(held)} only"
    if len(failed) == len(gains):
        return "not reproduced"
    return f"not reproduced for {', '.join(failed)}, else {_UNRESOLVED}" if failed else _UNRESOLVED


def _rising(architecture: str, rows: Mapping[str, Records]) -> Claim | None:
    """The text says that corruption accuracy grows with the masking probability."""
    order = [row for row in ("anchored", *MASKED) if row in rows]
    if len(order) < 3:
        return None
    means = [ROBUSTNESS.summary(rows[row]).mean for row in order]
    steps = [_gain(ROBUSTNESS, rows[a], rows[b], "higher") for a, b in combinations(order, 2)]
    whole = _gain(ROBUSTNESS, rows[order[0]], rows[order[-1]], "higher")
    verdict = _UNRESOLVED
    if False in steps or whole is False:
        verdict = "not reproduced"
    elif whole and means == sorted(means):
        verdict = "reproduced"
    return Claim(
        "Accuracy under corruption grows with the masking probability.",
        f"{architecture}: " + "; ".join(f"{row} {mean:.4f}" for row, mean in zip(order, means, strict=True)),
        verdict,
    )


def _mined(architecture: str, rows: Mapping[str, Records]) -> list[Claim | None]:
    """Mining with a larger weight detects better and is less accurate under corruption."""
    masked = rows.get("alpha=0.25")
    if not masked:
        return []
    expected = {DETECTION: "higher", ROBUSTNESS: "lower"}
    claims: list[Claim | None] = []
    for tails in dict.fromkeys(row.split()[-1] for row in rows if "tail=" in row):
        mined = {row: found for row, found in rows.items() if "tail=" in row and row.endswith(f" {tails}")}
        heaviest = max(mined, key=lambda row: float(row.split("tail=")[1].split()[0]))
        statement = f"Hard-delta mining ({tails} tails) raises AUROC at the cost of accuracy under corruption."
        lacking = [quality for quality in expected if not measured(quality, masked, mined[heaviest])]
        if lacking:
            claims.append(_not_tested(statement, architecture, *lacking))
            continue
        numbers = ", ".join(
            f"{quality.name} {quality.summary(masked).mean:.4f} to {quality.summary(mined[heaviest]).mean:.4f}"
            for quality in expected
        )
        gains = [_gain(quality, masked, mined[heaviest], wanted) for quality, wanted in expected.items()]
        verdict = "reproduced" if all(gains) else "not reproduced" if False in gains else _UNRESOLVED
        claims.append(Claim(statement, f"{architecture}, {heaviest}: {numbers}", verdict))
    return claims
