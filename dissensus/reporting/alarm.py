"""Evaluations in, a section on the alarm, on sets and intervals, and on drift out."""

from collections.abc import Iterable
from math import exp, log, sqrt

from dissensus.evaluation import Evaluation
from dissensus.evaluation.results import ID, AlarmCheck
from dissensus.evaluation.tables import title_of
from dissensus.html import Picture, Section, Text
from dissensus.plots import martingale_path, p_value_histogram, panels
from dissensus.reporting.quality import Runs, as_table

# The stream of known inputs ever gets here with a probability of one in twenty or less, unless it changed.
_THRESHOLD = 20.0


def alarm(runs: Runs, score: str) -> Section | None:
    """What the alarm promised and what it did, set by set."""
    found = {run.name: run.alarm for run in runs if run.alarm is not None}
    if not found:
        return None
    sets = list(dict.fromkeys(name for check in found.values() for name in check.flagged))
    columns = ["run", "score", "calibrated on", "allowed", *sets, "covered", "wanted"]
    rows = [_row(name, check, sets) for name, check in found.items()]
    return Section(
        "The alarm",
        Text(
            "The alarm rings where an input is stranger than held-out ones: at most the allowed share of ordinary inputs (id) "
            "ring, and the more of the unknown ones the better. Around the allowed rate the share scatters with the number of "
            "inputs that the alarm was calibrated on and tested on. Covered is the share of known inputs whose prediction set, or "
            "interval, holds the truth; it should be about what was wanted.",
            "P-values of ordinary inputs are flat; those of inputs that the alarm can tell pile up at 0.",
            *(_verdict(name, check, several=len(found) > 1) for name, check in found.items()),
        ),
        as_table((columns, rows), "Share of each set that raised the alarm, and coverage"),
        *(picture for run in runs if run.alarm is not None for picture in _pictures(run, run.alarm)),
    )


def _row(name: str, check: AlarmCheck, sets: Iterable[str]) -> list[str]:
    shares = [f"{check.flagged[one]:.3f}" if one in check.flagged else "–" for one in sets]
    head = [name, title_of(check.score), str(check.calibrated_on), f"{check.false_alarms:g}"]
    return [*head, *shares, f"{check.covered:.3f}", f"{check.coverage:g}"]


def _verdict(name: str, check: AlarmCheck, *, several: bool) -> str:
    """Say whether the known inputs ring more often than they may, and whether their source seems to have changed."""
    who = f"{name}: " if several else ""
    if check.false_alarms * (check.calibrated_on + 1) < 1 - 1e-9:
        return (
            f"{who}The alarm was calibrated on {check.calibrated_on} inputs, too few for a rate of {check.false_alarms:g}: "
            "it can never ring. Hold out more, or allow more false alarms."
        )
    rate, tested = check.false_alarms, len(check.p_values[ID])
    scatter = sqrt(rate * (1 - rate) * (1 / check.calibrated_on + 1 / tested))
    ordinary = "as often as it may" if check.flagged[ID] <= rate + 3 * scatter else "MORE OFTEN THAN IT MAY"
    changed = max(check.drift) > log(_THRESHOLD)
    drift = (
        f"the drift monitor reached {exp(min(max(check.drift), 50)):.3g}: these inputs are unlike those held out"
        if changed
        else "the drift monitor sees no change between held-out and known inputs"
    )
    text = f"{who}on known inputs the alarm rings {ordinary}; {drift}."
    return text[0].upper() + text[1:]


def _pictures(run: Evaluation, check: AlarmCheck) -> Iterable[Picture]:
    figure, (ax,) = panels(width=4.4, height=3.3)
    p_value_histogram(check.p_values, ax, false_alarms=check.false_alarms)
    ax.set_title(run.name)
    shares = ", ".join(f"{name} {share:.3f}" for name, share in check.flagged.items())
    yield Picture(figure, f"P-values of {run.name}. Share that raised the alarm: {shares}.")
    figure, (ax,) = panels(width=4.4, height=3.3)
    martingale_path({"known inputs": check.drift}, ax, thresholds=(_THRESHOLD,))
    ax.set_title(f"{run.name}: drift")
    yield Picture(
        figure,
        f"Drift martingale of {run.name} over its known inputs; the last value is {exp(min(check.drift[-1], 50)):.3g}.",
    )
