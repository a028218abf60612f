"""Evaluations in, sections on how good predictions, confidences and members are out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dissensus.evaluation import Evaluation, Reliability
from dissensus.evaluation.comparison import BEST_HIGH, named_pairs
from dissensus.evaluation.results import ALL_CORRUPTIONS, ID, find
from dissensus.evaluation.tables import (
    Cells,
    comparison_table,
    label_table,
    prediction_table,
    short,
    title_of,
    title_with_unit,
)
from dissensus.html import Picture, Section, Table, Text
from dissensus.reporting import figures

Runs = Sequence[Evaluation]


def main_numbers(runs: Runs, score: str) -> Section:
    """Metrics of the predictions on every labelled set, with intervals."""
    readings = {
        "classification": "Accuracy should be high. NLL and Brier score judge the whole predicted distribution; ECE and smooth ECE "
        "are the average gap between confidence and accuracy; these four should be low. A mean member accuracy below the "
        "ensemble's is what averaging gains.",
        "density": "RMSE is the typical error; NLL and CRPS judge the whole predicted distribution; these should be low. "
        "Intervals that claim 90 % should hold about 90 % of the targets.",
        "points": "RMSE and MAE are typical errors and should be low.",
        "labels": "Average precision and AUROC say how well inputs with a label are ranked before those without, averaged over labels; "
        "label accuracy is the share of answers that are right, subset accuracy that of inputs with all of them right. These should be "
        "high; NLL, Brier score and ECE, averaged over answers, should be low.",
        "own": "The loss is the one that the ensemble was trained by, of the members' mean output; it should be low.",
    }
    table = as_table(prediction_table(runs), "Predictions on inputs with known answers")
    if len(runs) > 1:
        table = replace(table, best=_best_runs(table))
    else:
        table = replace(table, main=[number for number, row in enumerate(table.rows) if row[0] == ID])
    marks = " The best value of each set is bold." if len(runs) > 1 else ""
    return Section("Main numbers", Text(readings[runs[0].task] + _brackets(runs) + marks), table)


_LARGE_IS_GOOD = tuple(map(title_of, BEST_HIGH))


def _best_runs(table: Table) -> list[tuple[int, int]]:
    """Return the best cells of each set: rows of one set, in the second column, compete."""
    by_set: dict[object, list[int]] = {}
    for number, row in enumerate(table.rows):
        by_set.setdefault(row[1], []).append(number)
    return [
        cell
        for rows in by_set.values()
        for column, title in enumerate(table.columns[2:], start=2)
        if title != title_of("coverage_90")  # neither large nor small is good
        for cell in best_cells(table, rows, column, large=title in _LARGE_IS_GOOD)
    ]


def best_cells(table: Table, rows: Iterable[int], column: int, *, large: bool) -> list[tuple[int, int]]:
    """Return the best cells of a column among some rows, as printed; none where all are equal or one is alone."""
    texts = {row: str(table.rows[row][column]).split("[")[0].replace("\u202f", "").strip() for row in rows}
    values = {row: float(text) for row, text in texts.items() if text != "–"}
    if len(set(values.values())) < 2:
        return []
    best = (max if large else min)(values.values())
    return [(row, column) for row, value in values.items() if value == best]


def _brackets(runs: Runs) -> str:
    if not all(run.bootstrap for run in runs):
        return ""
    return (
        " In brackets: 95 % intervals, within which the number would lie had other inputs of the same kind been drawn."
    )


def differences(runs: Runs, score: str) -> Section | None:
    """What further runs gain or lose against the first, with paired intervals."""
    pairs, refused = named_pairs(runs)
    if not pairs and not refused:
        return None
    tables = [as_table(comparison_table(pair, score), f"{pair.second} less {pair.first}") for pair in pairs]
    reading = (
        "Runs saw the same inputs, so that differences are more certain than the numbers themselves. A run is "
        "clearly better where the interval of the difference leaves out zero. Other training seeds are another "
        "matter: these intervals are about the choice of test inputs alone."
    )
    return Section(
        "Differences between runs",
        *([Text(reading)] if pairs else []),
        # Clear differences stand out.
        *(replace(table, main=[number for number, row in enumerate(table.rows) if row[-1] != "–"]) for table in tables),
        *(
            Text(f"{name} is not compared with {runs[0].name}, input by input. {reason}")
            for name, reason in refused.items()
        ),
    )


def calibration(runs: Runs, score: str) -> Section | None:
    """Confidence against accuracy, or claimed against observed coverage."""
    if not any(run.reliability for run in runs):
        return None
    if runs[0].task in ("density", "own"):
        return _coverage(runs)
    return Section(
        "Can its confidence be believed?",
        Text(
            "A dot says how often predictions of that confidence were right: on the dashed line confidence is honest, "
            "below it the ensemble claims more than it knows, above it less. Dots over short grey bars rest on few "
            "inputs and wobble."
        ),
        *(
            Picture(
                figures.reliability_diagram(curve, run.name),
                f"Confidence against accuracy of {run.name} on {curve.set}: {_listed(curve, '; ')}",
            )
            for run in runs
            for curve in run.reliability
        ),
    )


def _listed(curve: Reliability, between: str) -> str:
    """Return what was claimed and what came true as text."""
    return between.join(f"{c:.2f} to {o:.2f}" for c, o in zip(curve.claimed, curve.observed, strict=True))


def _coverage(runs: Runs) -> Section:
    by_set: dict[str, dict[str, Reliability]] = {}
    for run in runs:
        for curve in run.reliability:
            by_set.setdefault(curve.set, {})[run.name] = curve
    quantiles = runs[0].task == "own"
    reading = (
        "An interval that claims some probability should hold that share of the targets: on the dashed line it does, "
        "below it intervals are too narrow (overconfident), above it too wide."
    )
    if quantiles:
        reading = "Below a quantile should lie as many of the targets as its level says: on the dashed line they do."
    return Section(
        f"Can its {'quantiles' if quantiles else 'intervals'} be believed?",
        Text(reading),
        *(
            Picture(
                figures.coverage_diagram(curves, name, quantiles=quantiles),
                f"Claimed against observed coverage on {name}. "
                + "; ".join(f"{run}: {_listed(curve, ', ')}" for run, curve in curves.items())
                + ".",
            )
            for name, curves in by_set.items()
        ),
    )


def labels(runs: Runs, score: str) -> Section | None:
    """How well each of several labels is found, on every labelled set."""
    if runs[0].task != "labels":
        return None
    shown = [part.name for part in runs[0].sets if part.kind != "ood"]
    return Section(
        "Label by label",
        Text(
            "Average precision is that of a list of all inputs, those first that most probably have the label; guessing gives the share "
            "of inputs that have it. A dash: all inputs have the label, or none."
        ),
        *(as_table(label_table(runs, name), f"Labels on {name}") for name in shown),
    )


_MEMBER_METRIC = {"classification": "accuracy", "labels": "label_accuracy", "own": "loss"}


def members(runs: Runs, score: str) -> Section | None:
    """Each member's accuracy or error beside the ensemble's."""
    metric = _MEMBER_METRIC.get(runs[0].task, "rmse")
    pictures = [
        _member_dots(run, part.name, metric, f"{run.name}, {part.name}" if len(runs) > 1 else part.name)
        for run in runs
        if run.num_members > 1
        for part in run.sets
        if part.kind != "ood"
    ]
    if not pictures:
        return None
    side = "above" if metric in BEST_HIGH else "below"
    unit = " Errors are in units of the target." if metric == "rmse" else ""
    return Section(
        "Members and ensemble",
        Text(
            f"Each dot is one member, the line is the ensemble, with their intervals. A line {side} most dots means that "
            "members make different mistakes, which averaging evens out; a dot far off is a member to look at. Rest the "
            f"pointer on a dot to read it.{unit}"
        ),
        *pictures,
    )


def _member_dots(run: Evaluation, name: str, metric: str, title: str) -> Picture:
    own = [n for n in run.numbers if (n.metric, n.set) == (metric, name) and n.member is not None]
    ensemble = run.number(metric, name)
    listed = ", ".join(short(number.value) for number in own)
    return Picture(
        figures.member_dots(own, ensemble, title_with_unit(metric, run.target), title),
        f"{title_of(metric)} on {title}: members {listed}; ensemble {short(ensemble.value)}.",
    )


def trade_offs(runs: Runs, score: str) -> Section | None:
    """Numbers that should all be large, run by run, on a radar."""
    found = {run.name: _good_numbers(run, score) for run in runs}
    shared = [axis for axis in found[runs[0].name] if all(axis in own for own in found.values())]
    if runs[0].task != "classification" or len(shared) < 3:
        return None
    values = {name: {axis: own[axis] for axis in shared} for name, own in found.items()}
    return Section(
        "Trade-offs",
        Text(
            "Every axis is a number that should be large, on one scale, which begins at "
            f"{figures.radar_floor(values):.1f} in the middle and ends at 1. Further out is better; a run that gains on one side "
            "often gives up another. Compare axis by axis: the area means nothing."
        ),
        Picture(figures.radar(values), f"Radar of trade-offs. {_in_words(values)}."),
    )


def _in_words(values: Mapping[str, Mapping[str, float]]) -> str:
    return "; ".join(
        f"{name}: " + ", ".join(f"{' '.join(axis.split())} {value:.3f}" for axis, value in own.items())
        for name, own in values.items()
    )


def _good_numbers(run: Evaluation, score: str) -> dict[str, float]:
    """Return numbers in [0, 1] that should be large, by the name of their axis."""
    told = list(run.groups) or [part.name for part in run.sets if part.kind == "ood"]
    found = {
        "accuracy": find(run.numbers, "accuracy"),
        "corruption\naccuracy": find(run.numbers, "accuracy", ALL_CORRUPTIONS),
        "1 −\nsmooth ECE": find(run.numbers, "smooth_ece"),
        "1 − smooth ECE\n(corrupted)": find(run.numbers, "smooth_ece", ALL_CORRUPTIONS),
        **{f"AUROC\n{name}": find(run.numbers, "auroc", name, score) for name in told[:6]},
        "AUROC\ncorruptions": find(run.numbers, "auroc", ALL_CORRUPTIONS, score),
    }
    return {
        axis: 1 - number.value if axis.startswith("1") else number.value
        for axis, number in found.items()
        if number is not None
    }


def as_table(cells: Cells, caption: str) -> Table:
    """Return cells as a table of the page."""
    columns, rows = cells
    # Where a cell is narrow, the interval goes to a line of its own and stays in one piece.
    return Table(columns, [[cell.replace(", ", ",\N{NO-BREAK SPACE}") for cell in row] for row in rows], caption)
