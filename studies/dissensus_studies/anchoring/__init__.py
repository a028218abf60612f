"""Study `anchoring`: what references, masked or not, do to a network's calibration, robustness, detection and adaptation.

Plain, anchored and masked networks on one image set: accuracy on clean and corrupted images, smooth ECE, AUROC for unknown images,
linear probes on other labelled sets; and hard-delta mining at a masking probability of 1/4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, nan, sqrt
from statistics import fmean
from typing import Any

from dissensus.data.images import match_images
from dissensus.data.toy import digits
from dissensus_studies.anchoring.adaptation import ADAPTATION, UNUSABLE, Task, Tasks, load_tasks
from dissensus_studies.anchoring.arms import ANCHORS, EPOCHS, SCORES, SHORT, arms_of
from dissensus_studies.harness.arm_log import Arms, Record, print_now
from dissensus_studies.harness.claims import Claim, over_cases
from dissensus_studies.harness.figures import Drawing, sweep
from dissensus_studies.harness.image_sets import image_folder
from dissensus_studies.harness.image_study import ImageStudy, Page, Work, arms_table, at
from dissensus_studies.harness.labelled import SHAPE, Images
from dissensus_studies.harness.statistics import NORMAL_95, Estimate, Value

Records = Sequence[Record]
# Architecture and `AnchorSetting.row` to the records of all seeds.
Row = tuple[str, str]
Rows = Mapping[Row, Records]
# Two standard errors of a difference of two networks trained once each, from five kinds of network with three seeds each on
# CIFAR-10: of probes, and below of accuracy and smooth ECE under corruption and of mean AUROC.
SINGLE_RUN_NOISE = 0.012
MASKED = ("alpha=0.0625", "alpha=0.125", "alpha=0.25")


@dataclass(frozen=True)
class Quality:
    """What networks are compared by."""

    name: str  # What figures call it.
    read: Callable[[Record], Value]  # `[value, low, high]` over images of a record; None where it was not measured.
    # How far the difference of two single runs may be chance, however many images there are.
    between_runs: float = SINGLE_RUN_NOISE

    def value(self, record: Record) -> float:
        """Return its value in one run."""
        value = self.read(record)[0]
        return nan if value is None else value

    def mean(self, records: Records) -> float:
        """Return its mean over runs."""
        return fmean(map(self.value, records))

    def error(self, records: Records) -> float:
        """Return the standard error of its mean, over runs or over images, whichever is larger: all runs are judged on the same images."""
        errors = [fmean(Estimate.of([self.read(record)]).error for record in records)]
        if len(records) > 1:
            errors.append(Estimate.of(list(map(self.read, records))).error)
        return max((error for error in errors if isfinite(error)), default=0.0)

    def noise(self, first: Records, second: Records) -> float:
        """Return how far two networks may differ by chance: two standard errors, between single runs `between_runs` at least."""
        noise = 2 * sqrt(self.error(first) ** 2 + self.error(second) ** 2)
        return noise if min(len(first), len(second)) > 1 else max(noise, self.between_runs)


def mean_auroc(record: Record) -> Value:
    """Return the mean AUROC over unknown sets, not counting groups again, with the mean of their ends: they share the known images."""
    found = [scores[SCORES[0]] for name, scores in record["auroc"].items() if name not in ("near", "far")]
    ends = zip(*found, strict=True)
    return [None if None in values else fmean(values) for values in ends] if found else [None]


def mean_adaptation(record: Record) -> Value:
    """Return the mean accuracy of linear classifiers over tasks, which share no images, with its binomial interval."""
    found = list(record["adaptation"].values())
    if not found:
        return [None]
    mean = fmean(each["accuracy"] for each in found)
    half = NORMAL_95 * sqrt(sum(e["accuracy"] * (1 - e["accuracy"]) / e["images"] for e in found)) / len(found)
    return [mean, mean - half, mean + half]


CLEAN = Quality("test accuracy", at("test", "accuracy"), 0.0)
ROBUSTNESS = Quality("corruption accuracy", at("corrupted", "all", "accuracy"), 0.022)
CALIBRATION = Quality("smooth ECE under corruption", at("corrupted", "all", "smooth_ece"), 0.015)
DETECTION = Quality("mean AUROC", mean_auroc, 0.022)
PROBES = Quality("adaptation accuracy", mean_adaptation)
QUALITIES = (CLEAN, ROBUSTNESS, CALIBRATION, DETECTION, PROBES)


def same_sets(records: Mapping[str, Record]) -> tuple[dict[str, Record], list[str]]:
    """Return records with the sets only that all of them have, so that means compare; and what was left out, in words."""
    shared: dict[str, dict[str, Any]] = {name: dict(record) for name, record in records.items()}
    notes = []
    for part, title in (("auroc", "unknown images"), ("adaptation", "adaptation")):
        names = dict.fromkeys(name for record in records.values() for name in record[part])
        partly = [name for name in names if any(name not in record[part] for record in records.values())]
        for record in shared.values():
            record[part] = {name: found for name, found in record[part].items() if name not in partly}
        notes += [f"Not in means, because only some arms have it: {name} ({title})." for name in partly]
    return shared, notes


def anchoring_claims(records: Rows) -> list[Claim]:
    """Judge the document's statements, as far as there are arms for them."""
    claims = []
    for architecture in dict.fromkeys(architecture for architecture, _ in records):
        rows = {row: found for (other, row), found in records.items() if other == architecture}
        claims += [Claim(c.statement, f"{architecture}: {c.measured}", c.verdict) for c in claims_of(rows)]
    return claims


# Statement, quality, what masked networks are compared with, and what is expected of them.
_MASKED_CLAIMS = (
    ("Masked anchoring raises accuracy under corruption.", ROBUSTNESS, "plain", "higher"),
    ("Masked anchoring lowers the smooth ECE under corruption.", CALIBRATION, "plain", "lower"),
    ("Masking detects unknown images better than anchoring alone.", DETECTION, "anchored", "higher"),
    ("Masking detects unknown images better than a plain network.", DETECTION, "plain", "higher"),
    ("Masked networks adapt better (linear probes).", PROBES, "plain", "higher"),
)
# The same, of every two masking probabilities; and of mining beside none.
_PROBABILITY_CLAIMS = (
    ("The smooth ECE under corruption falls with the masking probability.", CALIBRATION, "lower"),
    ("Accuracy under corruption grows with the masking probability.", ROBUSTNESS, "higher"),
)
_MINING_CLAIMS = (
    ("Hard-delta mining raises AUROC.", DETECTION, "higher"),
    ("Hard-delta mining costs accuracy under corruption.", ROBUSTNESS, "lower"),
)


def claims_of(rows: Mapping[str, Records]) -> Iterator[Claim]:
    """Judge the document's statements about networks of one architecture, by row."""
    for statement, quality, against, expected in _MASKED_CLAIMS:
        yield from _judged(statement, quality, rows, [(against, row) for row in MASKED], expected)
    order = [row for row in ("anchored", *MASKED) if row in rows]
    if len(order) > 2:
        for statement, quality, expected in _PROBABILITY_CLAIMS:
            yield from _judged(statement, quality, rows, list(combinations(order, 2)), expected)
    # Of each way to find tails, the largest weight.
    mined: dict[str, str] = {}
    for row in sorted((row for row in rows if "tail=" in row), key=_tail_weight):
        mined[row.split()[-1]] = row
    for statement, quality, expected in _MINING_CLAIMS:
        yield from _judged(statement, quality, rows, [("alpha=0.25", row) for row in mined.values()], expected)


def _tail_weight(row: str) -> float:
    return float(row.split("tail=")[1].split()[0])


def _judged(
    statement: str, quality: Quality, rows: Mapping[str, Records], pairs: Sequence[tuple[str, str]], expected: str
) -> Iterator[Claim]:
    """Judge that the second of each pair of networks is as expected beside the first; say nothing where there are none."""
    pairs = [pair for pair in pairs if pair[0] in rows and pair[1] in rows]
    means = {row: quality.mean(rows[row]) for pair in pairs for row in pair}
    if not all(map(isfinite, means.values())):
        yield Claim(statement, "nothing", f"not tested: there is no {quality.name}")
    elif pairs:
        noises = [quality.noise(rows[base], rows[other]) for base, other in pairs]
        gains = [means[other] - means[base] for base, other in pairs]
        gains = [gain if expected == "higher" else -gain for gain in gains]
        told = [None if abs(gain) <= noise else gain > 0 for gain, noise in zip(gains, noises, strict=True)]
        holds = dict(zip((f"{base} to {other}" for base, other in pairs), told, strict=True))
        numbers = ", ".join(f"{row} {mean:.4f}" for row, mean in means.items())
        runs = min(len(rows[row]) for row in means)
        text = f"{numbers} ({runs} run{'s' if runs > 1 else ''}, noise of a difference up to {max(noises):.4f})"
        yield Claim(statement, text, over_cases(holds))


_JUDGED = (
    "A difference counts beyond two standard errors, over runs or over the images judged, whichever is larger; between single runs "
    f"beyond what runs differed by on CIFAR-10 ({', '.join(f'{each.name} {each.between_runs}' for each in QUALITIES)}). Means are over "
    "the unknown and labelled sets that were there."
)
_HOW = (
    f"The document trains {EPOCHS} epochs; runs of fewer than {SHORT} use a one-cycle schedule, the same for every arm. References are all "
    f"training images without augmentation; answers are given with the first of them, and in a further column with the first {ANCHORS}.",
    "The networks of a row are trained side by side, each in an order of its own, as members of one ensemble: s is the time of all. "
    "`together` is that ensemble, of anchored networks with all their references.",
    f"AUROC is that of the score {SCORES[0]}; the document does not say which it uses. Corruptions are ours, as those of CIFAR-10-C.",
    "Adaptation: a linear classifier on the features before the last layer, by L-BFGS, its regularisation chosen on a fifth of the "
    "training images.",
)


def page(work: Work, found: Arms) -> Page:
    """Return what the study makes of its records."""
    tasks: Tasks = work.material
    # What all networks of a row are together has a line of the table only.
    same, notes = same_sets({name: record for name, record in found.done.items() if "together" not in record})
    records: dict[Row, list[Record]] = {}
    for record in same.values():
        records.setdefault((record["setting"]["architecture"], record["row"]), []).append(record)
    columns: dict[str, Callable[[Record], object]] = {each.name: each.read for each in QUALITIES}
    columns["smooth ECE"] = at("test", "smooth_ece")
    columns[f"mean AUROC, {ANCHORS} references"] = lambda record: mean_auroc(record.get("anchors", {"auroc": {}}))
    columns["s"] = at("training", "seconds")
    drawn = drawing(records)
    return Page(
        anchoring_claims(records),
        _JUDGED,
        arms_table({**found.done, **same}, columns, "Intervals are 95 % over images."),
        drawn.section if drawn else None,
        [*_HOW, *notes, f"Sets to adapt to: {', '.join(tasks.found) or 'none'}."],
        {"tasks": {name: task.notes for name, task in tasks.found.items()}, "tasks_missing": tasks.missing},
        {"score": SCORES[0], "anchors": [1, ANCHORS]},
    )


def drawing(records: Rows) -> Drawing | None:
    """Return every quality against the masking probability, a line for each architecture that has its plain network."""
    plain = {f"{architecture}, plain": found for (architecture, row), found in records.items() if row == "plain"}
    masked = [
        (architecture, record["setting"]["alpha"], record)
        for (architecture, row), found in records.items()
        if row in ("anchored", *MASKED) and f"{architecture}, plain" in plain
        for record in found
    ]
    columns = {each.name: each.value for each in QUALITIES}
    if not masked:
        return None
    return sweep("anchoring_alpha", "How much to mask", masked, columns, "masking probability", levels=plain)


def tasks_of(work: Work) -> Tasks:
    """Return the sets to adapt to; say which they are before any time is spent on training, and which cannot be used."""
    few = work.limit or (1000 if work.quick else None)
    if work.data is not None:
        tasks = load_tasks(image_folder(work.data), without=(work.sets.name,), limit=few)
    else:
        loaded = digits()
        assert loaded.y is not None
        x, _ = match_images(loaded.x, *SHAPE)
        train, test = (Images(x[start::2][:few], loaded.y[start::2][:few]) for start in (0, 1))
        tasks = Tasks(
            {"digits": Task(train, test, ("all ten digits",))}, dict.fromkeys(ADAPTATION, "no folder was given")
        )
    print_now(f"sets to adapt to: {', '.join(tasks.found) or 'none'}")
    for name, reason in tasks.missing.items():
        if reason.startswith(UNUSABLE):
            print_now(f"{name} {reason}")
    return tasks


run = ImageStudy(
    "Masked anchoring",
    "A network that sees every input through a reference, and sometimes without it: what does that change on clean, corrupted, "
    "unknown and new images?",
    arms_of,
    page,
    prepare=tasks_of,
).run
