"""Evaluations in, sections on how good predictions, confidences and members are out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dissensus.evaluation import Evaluation
from dissensus.evaluation.comparison import named_pairs
from dissensus.evaluation.results import ALL_CORRUPTIONS, ID
from dissensus.evaluation.tables import (
    Cells,
    comparison_table,
    find,
    prediction_table,
    short,
    title_of,
    title_with_unit,
)
from dissensus.html import Picture, Section, Table, Text
from dissensus.reporting import figures

Runs = Sequence[Evaluation]

_MEMBER_METRIC = {"classification": "accuracy", "density": "rmse", "points": "rmse"}


def main_numbers(runs: Runs, score: str) -> Section:
    """Metrics of the predictions on every labelled set, with intervals."""
    readings = {
        "classification": "Accuracy should be high. NLL and Brier score judge the whole predicted distribution; ECE and smooth ECE "
        "are the average gap between confidence and accuracy; these four should be low. A mean member accuracy below the "
        "ensemble's is what averaging gains.",
        "density": "RMSE is the typical error; NLL and CRPS judge the whole predicted distribution; these should be low. "
        "Intervals that claim 90 % should hold about 90 % of the targets.",
        "points": "RMSE and MAE are typical errors and should be low.",
    }
    table = as_table(prediction_table(runs), "Predictions on inputs with known answers")
    if len(runs) > 1:
        table = replace(table, best=_best_runs(table))
    else:
        table = replace(table, main=[number for number, row in enumerate(table.rows) if row[0] == ID])
    marks = " The best value of each set is bold." if len(runs) > 1 else ""
    return Section("Main numbers", Text(readings[runs[0].task] + _brackets(runs) + marks), table)


_LARGE_IS_GOOD = (title_of("accuracy"), title_of("member_accuracy"))


def _best_runs(table: Table) -> list[tuple[int, int]]:
    """Return the best cells of each set: rows of one set, in the second column, compete."""
    found = []
    for name in dict.fromkeys(str(row[1]) for row in table.rows):
        rows = [number for number, row in enumerate(table.rows) if row[1] == name]
        for column, title in enumerate(table.columns[2:], start=2):
            if title == title_of("coverage_90"):
                continue  # neither large nor small is good
            values = {row: value_of(str(table.rows[row][column])) for row in rows}
            found += [(row, column) for row in best_of(values, large=title in _LARGE_IS_GOOD)]
    return found


def value_of(cell: str) -> float | None:
    """Return the number that a cell begins with; None of a dash."""
    text = cell.split("[")[0].replace("\u202f", "").strip()
    return None if text == "–" else float(text)


def best_of(values: Mapping[int, float | None], *, large: bool) -> list[int]:
    """Return the keys of the best values, as printed; none where all are equal or one is alone."""
    present = {key: value for key, value in values.items() if value is not None}
    if len(set(present.values())) < 2:
        return []
    best = (max if large else min)(present.values())
    return [key for key, value in present.items() if value == best]


def _brackets(runs: Runs) -> str:
    if not all(run.bootstrap for run in runs):
        return ""
    return " In brackets: 95 % intervals, within which the number would lie had other inputs of the same kind been drawn."


def differences(runs: Runs, score: str) -> Section | None:
    """What further runs gain or lose against the first, with paired intervals."""
    pairs, refused = named_pairs(runs)
    if not pairs and not refused:
        return None
    reading = (
        "Runs saw the same inputs, so that differences are more certain than the numbers themselves. A run is "
        "clearly better where the interval of the difference leaves out zero. Other training seeds are another "
        "matter: these intervals are about the choice of test inputs alone."
    )
    return Section(
        "Differences between runs",
        *([Text(reading)] if pairs else []),
        *(_differences(comparison_table(pair, score), f"{pair.second} less {pair.first}") for pair in pairs),
        *(
            Text(f"{name} is not compared with {runs[0].name}, input by input. {reason}")
            for name, reason in refused.items()
        ),
    )


def _differences(cells: Cells, caption: str) -> Table:
    """Return differences as a table in which clear ones stand out."""
    table = as_table(cells, caption)
    return replace(table, main=[number for number, row in enumerate(table.rows) if row[-1] != "–"])


def calibration(runs: Runs, score: str) -> Section | None:
    """Confidence against accuracy, or claimed against observed coverage."""
    if not any(run.reliability for run in runs):
        return None
    if runs[0].task == "density":
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
                f"Confidence against accuracy of {run.name} on {curve.set}: "
                + "; ".join(
                    f"{c:.2f} to {a:.2f}" for c, a in zip(curve.claimed, curve.observed, strict=True)
                ),
            )
            for run in runs
            for curve in run.reliability
        ),
    )


def _coverage(runs: Runs) -> Section:
    names = list(dict.fromkeys(curve.set for run in runs for curve in run.reliability))
    pictures = []
    for name in names:
        curves = {run.name: curve for run in runs for curve in run.reliability if curve.set == name}
        listed = "; ".join(
            f"{run}: "
            + ", ".join(f"{c:.2f} to {o:.2f}" for c, o in zip(curve.claimed, curve.observed, strict=True))
            for run, curve in curves.items()
        )
        pictures.append(
            Picture(
                figures.coverage_diagram(curves, name),
                f"Claimed against observed coverage on {name}. {listed}.",
            )
        )
    return Section(
        "Can its intervals be believed?",
        Text(
            "An interval that claims some probability should hold that share of the targets: on the dashed line it does, "
            "below it intervals are too narrow (overconfident), above it too wide."
        ),
        *pictures,
    )


def members(runs: Runs, score: str) -> Section | None:
    """Each member's accuracy or error beside the ensemble's."""
    several = [run for run in runs if run.num_members > 1]
    if not several:
        return None
    metric = _MEMBER_METRIC[runs[0].task]
    pictures = []
    for run in several:
        for name in [part.name for part in run.sets if part.kind != "ood"]:
            own = [n for n in run.numbers if (n.metric, n.set) == (metric, name) and n.member is not None]
            ensemble = run.number(metric, name)
            title = f"{run.name}, {name}" if len(runs) > 1 else name
            listed = ", ".join(short(number.value) for number in own)
            pictures.append(
                Picture(
                    figures.member_dots(own, ensemble, title_with_unit(metric, run.target), title),
                    f"{title_of(metric)} on {title}: members {listed}; ensemble {short(ensemble.value)}.",
                )
            )
    side = "above" if metric == "accuracy" else "below"
    unit = "" if metric == "accuracy" else " Errors are in units of the target."
    return Section(
        "Members and ensemble",
        Text(
            f"Each dot is one member, the line is the ensemble, with their intervals. A line {side} most dots means that "
            "members make different mistakes, which averaging evens out; a dot far off is a member to look at. Rest the "
            f"pointer on a dot to read it.{unit}"
        ),
        *pictures,
    )


def trade_offs(runs: Runs, score: str) -> Section | None:
    """Numbers that should all be large, run by run, on a radar."""
    if runs[0].task != "classification":
        return None
    values = {run.name: _good_numbers(run, score) for run in runs}
    shared = [axis for axis in values[runs[0].name] if all(axis in own for own in values.values())]
    if len(shared) < 3:
        return None
    values = {name: {axis: own[axis] for axis in shared} for name, own in values.items()}
    read = "; ".join(
        f"{name}: " + ", ".join(f"{' '.join(axis.split())} {value:.3f}" for axis, value in own.items())
        for name, own in values.items()
    )
    return Section(
        "Trade-offs",
        Text(
            "Every axis is a number that should be large, on one scale, which begins at "
            f"{figures.radar_floor(values):.1f} in the middle and ends at 1. Further out is better; a run that gains on one side "
            "often gives up another. Compare axis by axis: the area means nothing."
        ),
        Picture(figures.radar(values), f"Radar of trade-offs. {read}."),
    )


def _good_numbers(run: Evaluation, score: str) -> dict[str, float]:
    """Return numbers in [0, 1] that should be large, by the name of their axis."""
    found = {
        "accuracy": find(run, "accuracy"),
        "corruption\naccuracy": find(run, "accuracy", ALL_CORRUPTIONS),
        "1 −\nsmooth ECE": find(run, "smooth_ece"),
        "1 − smooth ECE\n(corrupted)": find(run, "smooth_ece", ALL_CORRUPTIONS),
    }
    values = {
        name: 1 - number.value if name.startswith("1") else number.value
        for name, number in found.items()
        if number
    }
    told = list(run.groups) or [part.name for part in run.sets if part.kind == "ood"]
    for name in told[:6]:
        number = find(run, "auroc", name, score)
        values |= {f"AUROC\n{name}": number.value} if number else {}
    number = find(run, "auroc", ALL_CORRUPTIONS, score)
    return values | ({"AUROC\ncorruptions": number.value} if number else {})


def as_table(cells: Cells, caption: str) -> Table:
    """Return cells as a table of the page."""
    columns, rows = cells
    # Where a cell is narrow, the interval goes to a line of its own and stays in one piece.
    return Table(
        columns, [[cell.replace(", ", ",\N{NO-BREAK SPACE}") for cell in row] for row in rows], caption
    )
