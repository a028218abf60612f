"""Records of `anchoring` in; what networks are compared by, and how far chance moves it, out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import fmean
from typing import Any

from torch import Tensor

from dissensus_studies.anchoring.arms import SCORES
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.statistics import Summary

Records = Sequence[Record]
Read = Callable[[Record], float]
# Two standard errors of a difference of two networks trained once each, from five kinds of network with three seeds each on
# CIFAR-10: of probes, and below of accuracy and smooth ECE under corruption and of mean AUROC.
SINGLE_RUN_NOISE = 0.012
# Intervals of records are 95 %.
_ERRORS_AN_INTERVAL = 2 * 1.96


@dataclass(frozen=True)
class Quality:
    """What networks are compared by.

    Attributes:
        name: What figures call it.
        read: Its value in a record; NaN where it was not measured.
        error: Its standard error over the images it was judged on; 0 where the record does not tell.
        lacking: Why it may not have been measured.
        between_runs: How far the difference of two single runs may be chance, however many images there are.
    """

    name: str
    read: Read
    error: Read
    lacking: str = "not measured"
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
