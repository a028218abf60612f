"""Records of `anchoring` in, what the document says beside what they show out."""

from collections.abc import Callable, Mapping, Sequence

from dissensus.studies.anchoring_arms import corrupted, mean_adaptation, mean_auroc
from dissensus.studies.anchoring_tables import Row
from dissensus.studies.arm_log import Record
from dissensus.studies.claims import Claim
from dissensus.studies.repeats import Summary

Records = Sequence[Record]
Read = Callable[[Record], float]
MASKED = ("alpha=0.0625", "alpha=0.125", "alpha=0.25")
# Networks trained again on a GPU with the same seed differed by up to so much: smooth ECE under corruption by 0.012, accuracy
# under corruption and of probes by 0.008, mean AUROC by 0.005.
SINGLE_RUN_NOISE = 0.012


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
    accuracy = _metric("accuracy")
    return [
        _compared(
            architecture,
            rows,
            "Masked anchoring keeps clean accuracy (within one point).",
            _clean,
            "plain",
            "kept",
        ),
        _compared(
            architecture,
            rows,
            "Masked anchoring raises accuracy under corruption.",
            accuracy,
            "plain",
            "higher",
        ),
        _compared(
            architecture,
            rows,
            "Masked anchoring lowers the smooth ECE under corruption.",
            _metric("smooth_ece"),
            "plain",
            "lower",
        ),
        _compared(
            architecture,
            rows,
            "Masking detects unknown images better than anchoring alone.",
            mean_auroc,
            "anchored",
            "higher",
        ),
        _compared(
            architecture,
            rows,
            "Masking detects unknown images better than a plain network.",
            mean_auroc,
            "plain",
            "higher",
        ),
        _compared(
            architecture,
            rows,
            "Masked networks adapt better (linear probes).",
            mean_adaptation,
            "plain",
            "higher",
        ),
        _rising(architecture, rows),
        *_mined(architecture, rows),
    ]


def _clean(record: Record) -> float:
    return float(record["test"]["accuracy"][0])


def _metric(name: str) -> Read:
    return lambda record: corrupted(record, name)


def _compared(
    architecture: str, rows: Mapping[str, Records], statement: str, read: Read, against: str, expected: str
) -> Claim | None:
    """Compare every masked network with another one."""
    masked = [row for row in MASKED if row in rows]
    if not masked or against not in rows:
        return None
    base = Summary(tuple(map(read, rows[against])))
    found = {row: Summary(tuple(map(read, rows[row]))) for row in masked}
    gains = {row: _gain(base, values, expected) for row, values in found.items()}
    measured = f"{architecture}: {against} {base.mean:.4f}; " + "; ".join(
        f"{row} {values.mean:.4f}" for row, values in found.items()
    )
    if len(base.values) > 1:
        measured += f" ({len(base.values)} runs, standard error {base.error:.4f})"
    return Claim(statement, measured, _verdict(gains))


def _gain(base: Summary, values: Summary, expected: str) -> bool | None:
    """Return whether values are as expected, None where the difference may be noise."""
    if expected == "kept":
        return values.mean > base.mean - 0.01
    several = min(len(base.values), len(values.values)) > 1
    noise = 2 * (base.error**2 + values.error**2) ** 0.5 if several else SINGLE_RUN_NOISE
    gain = values.mean - base.mean if expected == "higher" else base.mean - values.mean
    return None if abs(gain) <= noise else gain > 0


def _verdict(gains: Mapping[str, bool | None]) -> str:
    held = [row for row, gain in gains.items() if gain]
    if len(held) == len(gains):
        return "reproduced"
    if held:
        return f"reproduced for {', '.join(held)} only"
    return "not told apart from noise" if None in gains.values() else "not reproduced"


def _rising(architecture: str, rows: Mapping[str, Records]) -> Claim | None:
    """The text says that corruption accuracy grows with the masking probability."""
    order = [row for row in ("anchored", *MASKED) if row in rows]
    if len(order) < 3:
        return None
    means = [Summary(tuple(corrupted(record, "accuracy") for record in rows[row])).mean for row in order]
    return Claim.checked(
        "Accuracy under corruption grows with the masking probability.",
        f"{architecture}: " + "; ".join(f"{row} {mean:.4f}" for row, mean in zip(order, means, strict=True)),
        means == sorted(means),
    )


def _mined(architecture: str, rows: Mapping[str, Records]) -> list[Claim | None]:
    """Mining with a larger weight detects better and is less accurate under corruption."""
    if "alpha=0.25" not in rows:
        return []
    reads = {"mean AUROC": mean_auroc, "accuracy under corruption": _metric("accuracy")}
    expected = {"mean AUROC": "higher", "accuracy under corruption": "lower"}
    claims: list[Claim | None] = []
    for tails in dict.fromkeys(row.split()[-1] for row in rows if "tail=" in row):
        mined = {row: found for row, found in rows.items() if "tail=" in row and row.endswith(f" {tails}")}
        heaviest = max(mined, key=lambda row: float(row.split("tail=")[1].split()[0]))
        found = {
            name: (
                Summary(tuple(map(read, rows["alpha=0.25"]))),
                Summary(tuple(map(read, mined[heaviest]))),
            )
            for name, read in reads.items()
        }
        measured = ", ".join(
            f"{name} {before.mean:.4f} to {after.mean:.4f}" for name, (before, after) in found.items()
        )
        claims.append(
            Claim(
                f"Hard-delta mining ({tails} tails) raises AUROC at the cost of accuracy under corruption.",
                f"{architecture}, {heaviest}: {measured}",
                _all_held([_gain(*found[name], expected[name]) for name in reads]),
            )
        )
    return claims


def _all_held(gains: Sequence[bool | None]) -> str:
    """Judge a statement of several parts."""
    if all(gains):
        return "reproduced"
    return "not reproduced" if False in gains else "not told apart from noise"
