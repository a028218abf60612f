"""Records of `anchoring` in; what networks are compared by, how far chance moves it, and what the document says beside that, out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, isfinite, sqrt
from statistics import fmean
from typing import Any

from torch import Tensor

from dissensus_studies.anchoring.arms import SCORES
from dissensus_studies.anchoring.tables import Row
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.claims import Claim
from dissensus_studies.harness.statistics import Summary

Records = Sequence[Record]
Read = Callable[[Record], float]
# Two standard errors of a difference of two networks trained once each, from five kinds of network with three seeds each on
# CIFAR-10: of probes, and below of accuracy and smooth ECE under corruption and of mean AUROC.
SINGLE_RUN_NOISE = 0.012
# Intervals of records are 95 %.
_ERRORS_AN_INTERVAL = 2 * 1.96

MASKED = ("alpha=0.0625", "alpha=0.125", "alpha=0.25")
# A loss of accuracy that still counts as none.
KEPT = 0.01
_UNRESOLVED = "not told apart from noise"


@dataclass(frozen=True)
class Quality:
    """What networks are compared by."""

    name: str  # What figures call it.
    read: Read  # Its value in a record; NaN where it was not measured.
    error: Read  # Its standard error over the images it was judged on; 0 where the record does not tell.
    lacking: str = "not measured"  # Why it may not have been measured.
    # How far the difference of two single runs may be chance, however many images there are.
    between_runs: float = SINGLE_RUN_NOISE

    def summary(self, records: Records) -> Summary:
        """Return its values in several runs."""
        return Summary(tuple(map(self.read, records)))

    def standard_error(self, records: Records) -> float:
        """Return the standard error of its mean, over runs or over images, whichever is larger.

        All runs are judged on the same images: more runs do not make the error over images smaller.
        """
        over_images = fmean(map(self.error, records))
        return max(over_images, self.summary(records).error) if len(records) > 1 else over_images

    def noise(self, first: Records, second: Records) -> float:
        """Return how far two networks may differ by chance: two standard errors, between single runs `between_runs` at least."""
        noise = 2 * sqrt(self.standard_error(first) ** 2 + self.standard_error(second) ** 2)
        return noise if min(len(first), len(second)) > 1 else max(noise, self.between_runs)


def interval_error(value: Sequence[float | None]) -> float:
    """Return the standard error behind `[value, low, high]` of a record; 0 where it has no interval.

    Example:
        >>> round(interval_error([0.5, 0.5 - 0.196, 0.5 + 0.196]), 6)
        0.1
    """
    low, high = (value[1], value[2]) if len(value) == 3 else (None, None)
    return 0.0 if low is None or high is None else (high - low) / _ERRORS_AN_INTERVAL


def _least_error(record: Record, part: str) -> float:
    """Return the least standard error on a part's images (older records do not tell): all alike, they leave a share of 3 / images open."""
    return 1.5 / float(record.get("images", {}).get(part, inf))


def _corrupted(record: Mapping[str, Any], metric: str) -> float:
    """Return a metric under corruption, averaged over corruptions and severities."""
    return float(record["corrupted"]["all"][metric][0])


def _detected(record: Mapping[str, Any]) -> list[Sequence[float | None]]:
    """Return the AUROC of every unknown set; averages of groups are not counted again."""
    return [found[SCORES[0]] for name, found in record["auroc"].items() if name not in ("near", "far")]


def mean_auroc(record: Mapping[str, Any]) -> float:
    """Return the mean AUROC over unknown sets; NaN where there are none."""
    return float(Tensor([found[0] for found in _detected(record)]).mean())


def mean_adaptation(record: Mapping[str, Any]) -> float:
    """Return the mean accuracy of linear classifiers over tasks; NaN where there are none."""
    return float(Tensor([found["accuracy"] for found in record["adaptation"].values()]).mean())


def _clean_error(record: Record) -> float:
    return max(interval_error(record["test"]["accuracy"]), _least_error(record, "test"))


def _corrupted_error(record: Record) -> float:
    # Smooth ECE has no interval of its own. It is a distance of accuracies from confidences, which vary less.
    error = interval_error(record["corrupted"]["all"]["accuracy"])
    return max(error, _least_error(record, "corrupted"))


def _auroc_error(record: Record) -> float:
    """Return the mean of the sets' errors: they share the known images, so they do not average out."""
    parts = _detected(record)
    return max(fmean(map(interval_error, parts)), _least_error(record, "test")) if parts else 0.0


def _adaptation_error(record: Record) -> float:
    """Return the binomial error of each set's accuracy, averaged over sets, which share no images."""
    found = record["adaptation"].values()
    variances = [
        max(each["accuracy"] * (1 - each["accuracy"]) / each["images"], (1.5 / each["images"]) ** 2)
        for each in found
        if "images" in each
    ]
    return sqrt(sum(variances)) / len(found) if found else 0.0


CLEAN = Quality("test accuracy", lambda record: float(record["test"]["accuracy"][0]), _clean_error, between_runs=0.0)
ROBUSTNESS = Quality("corruption accuracy", lambda r: _corrupted(r, "accuracy"), _corrupted_error, between_runs=0.022)
CALIBRATION = Quality(
    "smooth ECE under corruption", lambda r: _corrupted(r, "smooth_ece"), _corrupted_error, between_runs=0.015
)
ADAPTATION = Quality(
    "adaptation accuracy", mean_adaptation, _adaptation_error, "there were no labelled sets to adapt to"
)
DETECTION = Quality("mean AUROC", mean_auroc, _auroc_error, "there were no unknown sets", 0.022)


def same_sets(records: Mapping[str, Record]) -> tuple[dict[str, Record], list[str]]:
    """Return records with the sets only that all of them have, so that means compare; and what was left out, in words.

    Example:
        >>> first, second = {"auroc": {}, "adaptation": {"dtd": {}}}, {"auroc": {}, "adaptation": {"dtd": {}, "mnist": {}}}
        >>> compared, notes = same_sets({"first": first, "second": second})
        >>> compared["second"]["adaptation"], notes
        ({'dtd': {}}, ['Not in means, because only some arms have it: mnist (adaptation).'])
    """
    shared: dict[str, dict[str, Any]] = {name: dict(record) for name, record in records.items()}
    notes = []
    for part, title in (("auroc", "unknown images"), ("adaptation", "adaptation")):
        names = dict.fromkeys(name for record in records.values() for name in record[part])
        partly = [name for name in names if any(name not in record[part] for record in records.values())]
        for record in shared.values():
            record[part] = {name: found for name, found in record[part].items() if name not in partly}
        notes += [f"Not in means, because only some arms have it: {name} ({title})." for name in partly]
    return shared, notes


def measured(quality: Quality, *groups: Records) -> bool:
    """Whether all records of all groups, at least one of each, have a quality."""
    return all(records and isfinite(quality.summary(records).mean) for records in groups)


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
