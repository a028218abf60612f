"""Records of `anchoring` in; what networks are compared by, how far chance moves it, and what the document says beside that, out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, nan, sqrt
from statistics import fmean
from typing import Any

from dissensus_studies.anchoring.arms import SCORES
from dissensus_studies.anchoring.tables import Row
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.claims import Claim, over_cases
from dissensus_studies.harness.image_pages import with_interval
from dissensus_studies.harness.statistics import NORMAL_95, Estimate, Value

Records = Sequence[Record]
Rows = Mapping[str, Records]
# Two standard errors of a difference of two networks trained once each, from five kinds of network with three seeds each on
# CIFAR-10: of probes, and below of accuracy and smooth ECE under corruption and of mean AUROC.
SINGLE_RUN_NOISE = 0.012
MASKED = ("alpha=0.0625", "alpha=0.125", "alpha=0.25")
# A loss of accuracy that still counts as none.
KEPT = 0.01


@dataclass(frozen=True)
class Quality:
    """What networks are compared by."""

    name: str  # What figures call it.
    read: Callable[
        [Mapping[str, Any]], Value
    ]  # `[value, low, high]` over images of a record; None where it was not measured.
    # How far the difference of two single runs may be chance, however many images there are.
    between_runs: float = SINGLE_RUN_NOISE

    def value(self, record: Mapping[str, Any]) -> float:
        """Return its value in one run."""
        value = self.read(record)[0]
        return nan if value is None else value

    def text(self, record: Mapping[str, Any]) -> str | None:
        """Return its value in one run with its interval, as tables have it."""
        return with_interval(self.read(record))

    def mean(self, records: Records) -> float:
        """Return its mean over runs."""
        return fmean(map(self.value, records))

    def error(self, records: Records) -> float:
        """Return the standard error of its mean, over runs or over images, whichever is larger: all runs are judged on the same images."""
        errors = [fmean(Estimate.of([self.read(record)]).error for record in records)]
        if len(records) > 1:
            errors.append(Estimate.of([self.read(record) for record in records]).error)
        return max((error for error in errors if isfinite(error)), default=0.0)

    def noise(self, first: Records, second: Records) -> float:
        """Return how far two networks may differ by chance: two standard errors, between single runs `between_runs` at least."""
        noise = 2 * sqrt(self.error(first) ** 2 + self.error(second) ** 2)
        return noise if min(len(first), len(second)) > 1 else max(noise, self.between_runs)


def _corrupted(metric: str) -> Callable[[Mapping[str, Any]], Value]:
    """Return what reads a metric under corruption, averaged over corruptions and severities."""
    return lambda record: record["corrupted"]["all"][metric]


def mean_auroc(record: Mapping[str, Any]) -> Value:
    """Return the mean AUROC over unknown sets, not counting groups again, with the mean of their ends: they share the known images."""
    found = [scores[SCORES[0]] for name, scores in record["auroc"].items() if name not in ("near", "far")]
    ends = zip(*found, strict=True)
    return [None if None in values else fmean(values) for values in ends] if found else [None]


def mean_adaptation(record: Mapping[str, Any]) -> Value:
    """Return the mean accuracy of linear classifiers over tasks, which share no images, with its binomial interval."""
    found = list(record["adaptation"].values())
    if not found:
        return [None]
    mean = fmean(each["accuracy"] for each in found)
    if not all("images" in each for each in found):
        return [mean]
    half = NORMAL_95 * sqrt(sum(e["accuracy"] * (1 - e["accuracy"]) / e["images"] for e in found)) / len(found)
    return [mean, mean - half, mean + half]


CLEAN = Quality("test accuracy", lambda record: record["test"]["accuracy"], 0.0)
ROBUSTNESS = Quality("corruption accuracy", _corrupted("accuracy"), 0.022)
CALIBRATION = Quality("smooth ECE under corruption", _corrupted("smooth_ece"), 0.015)
DETECTION = Quality("mean AUROC", mean_auroc, 0.022)
ADAPTATION = Quality("adaptation accuracy", mean_adaptation)
QUALITIES = (CLEAN, ROBUSTNESS, CALIBRATION, DETECTION, ADAPTATION)


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


def anchoring_claims(records: Mapping[Row, Records]) -> list[Claim]:
    """Judge the document's statements, as far as there are arms for them; `records` are those of all seeds by (architecture, row)."""
    claims = []
    for architecture in dict.fromkeys(architecture for architecture, _ in records):
        rows = {row: found for (other, row), found in records.items() if other == architecture}
        claims += [Claim(c.statement, f"{architecture}: {c.measured}", c.verdict) for c in _claims(rows)]
    return claims


def _claims(rows: Rows) -> Iterator[Claim]:
    masked = [row for row in MASKED if row in rows]
    for statement, quality, against, expected in (
        ("Masked anchoring keeps clean accuracy (within one point).", CLEAN, "plain", "kept"),
        ("Masked anchoring raises accuracy under corruption.", ROBUSTNESS, "plain", "higher"),
        ("Masked anchoring lowers the smooth ECE under corruption.", CALIBRATION, "plain", "lower"),
        ("Masking detects unknown images better than anchoring alone.", DETECTION, "anchored", "higher"),
        ("Masking detects unknown images better than a plain network.", DETECTION, "plain", "higher"),
        ("Masked networks adapt better (linear probes).", ADAPTATION, "plain", "higher"),
    ):
        yield from _judged(statement, quality, rows, [(against, row) for row in masked], expected)
    order = [row for row in ("anchored", *MASKED) if row in rows]
    if len(order) > 2:
        statement = "Accuracy under corruption grows with the masking probability."
        yield from _judged(statement, ROBUSTNESS, rows, list(combinations(order, 2)), "higher")
    for tails in dict.fromkeys(row.split()[-1] for row in rows if "tail=" in row):
        mined = [row for row in rows if "tail=" in row and row.endswith(f" {tails}")]
        heaviest = max(mined, key=lambda row: float(row.split("tail=")[1].split()[0]))
        pairs = [("alpha=0.25", heaviest)]
        yield from _judged(f"Hard-delta mining ({tails} tails) raises AUROC.", DETECTION, rows, pairs, "higher")
        cost = f"Hard-delta mining ({tails} tails) costs accuracy under corruption."
        yield from _judged(cost, ROBUSTNESS, rows, pairs, "lower")


def _judged(
    statement: str, quality: Quality, rows: Rows, pairs: Sequence[tuple[str, str]], expected: str
) -> Iterator[Claim]:
    """Judge that the second of each pair of networks is as expected beside the first; say nothing where there are none."""
    pairs = [pair for pair in pairs if pair[0] in rows and pair[1] in rows]
    means = {row: quality.mean(rows[row]) for pair in pairs for row in pair}
    if not all(map(isfinite, means.values())):
        yield Claim(statement, "nothing", f"not tested: there is no {quality.name}")
    elif pairs:
        holds, noises = {}, []
        for base, other in pairs:
            noise = quality.noise(rows[base], rows[other])
            gain = means[other] - means[base]
            gain = {"higher": gain, "lower": -gain, "kept": gain + KEPT}[expected]
            holds[f"{base} to {other}"] = None if abs(gain) <= noise else gain > 0
            noises.append(noise)
        numbers = "; ".join(f"{row} {mean:.4f}" for row, mean in means.items())
        runs = min(len(rows[row]) for row in means)
        text = f"{numbers} ({runs} run{'s' if runs > 1 else ''}, noise of a difference up to {max(noises):.4f})"
        yield Claim(statement, text, over_cases(holds))
