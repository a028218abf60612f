"""Evaluations in, the sections of the report out; a section without data is left out."""

import platform
from collections.abc import Callable, Iterable, Sequence

import torch

from dissensus.evaluation import Evaluation, Number
from dissensus.evaluation.comparison import named_pairs
from dissensus.evaluation.results import ALL_CORRUPTIONS, ID
from dissensus.evaluation.tables import (
    Cells,
    comparison_table,
    corruption_table,
    detection_sets,
    detection_table,
    find,
    metrics_table,
    prediction_table,
    severities,
    title_of,
)
from dissensus.html import Block, Picture, Section, Table, Text
from dissensus.reporting import figures

Runs = Sequence[Evaluation]

# What curves show beside the chosen score, where it was computed.
_SHOWN_SCORES = ("total_entropy", "mutual_information", "predictive_diversity", "mean_energy")
_PARTS = {
    "classification": ("expected_entropy", "mutual_information"),
    "density": ("data_variance", "knowledge_variance"),
}
_MEMBER_METRIC = {"classification": "accuracy", "density": "rmse", "points": "rmse"}


def all_sections(runs: Runs, score: str) -> list[Section]:
    """Return every section that there is data for."""
    makers: list[Callable[[Runs, str], Section | None]] = [
        _main_numbers,
        _differences,
        _calibration,
        _detection,
        _corruptions,
        _uncertainty,
        _members,
        _gallery,
        _trade_offs,
        _settings,
    ]
    return [section for maker in makers if (section := maker(runs, score)) is not None]


def lead(runs: Runs, score: str) -> str:
    """Return the main finding of each run in a sentence."""
    return " ".join(_sentence(run, score, len(runs) > 1) for run in runs)


def _sentence(run: Evaluation, score: str, several: bool) -> str:
    who = (
        f"{run.name}, an ensemble of {run.num_members},"
        if several
        else f"An ensemble of {run.num_members} members"
    )
    if run.num_members == 1:
        who = f"{run.name}, a single network," if several else "A single network"
    size = next(part.size for part in run.sets if part.name == ID)
    if run.task == "classification":
        accuracy, ece = run.number("accuracy"), run.number("smooth_ece")
        text = f"{who} is right on {accuracy.value:.1%} of {size} known inputs, and its confidence is off by {ece.value:.1%} on average"
    else:
        text = f"{who} predicts {size} known inputs with an error (RMSE) of {run.number('rmse').value:.3g}"
    others = [part.name for part in run.sets if part.kind == "ood"]
    aurocs = [find(run, "auroc", name, score) for name in others]
    told = [f"{name} {number.value:.3f}" for name, number in zip(others, aurocs, strict=True) if number]
    return text + (
        f"; by {title_of(score)} it tells unknown inputs from known ones with AUROC {', '.join(told)}."
        if told
        else "."
    )


def _main_numbers(runs: Runs, score: str) -> Section:
    readings = {
        "classification": "Accuracy should be high. NLL and Brier score judge the whole predicted distribution; ECE and smooth ECE "
        "are the average gap between confidence and accuracy; these four should be low. A mean member accuracy below the "
        "ensemble's is what averaging gains.",
        "density": "RMSE is the typical error; NLL and CRPS judge the whole predicted distribution; these should be low. "
        "Intervals that claim 90 % should hold about 90 % of the targets.",
        "points": "RMSE and MAE are typical errors, in units of the target, and should be low.",
    }
    return Section(
        "Main numbers",
        Text(readings[runs[0].task] + _brackets(runs)),
        _table(prediction_table(runs), "Predictions on inputs with known answers"),
    )


def _brackets(runs: Runs) -> str:
    if not all(run.bootstrap for run in runs):
        return ""
    return " In brackets: 95 % intervals, within which the number would lie had other inputs of the same kind been drawn."


def _differences(runs: Runs, score: str) -> Section | None:
    pairs = named_pairs(runs)
    if not pairs:
        return None
    return Section(
        "Differences between runs",
        Text(
            "Runs saw the same inputs, so that differences are more certain than the numbers themselves. A run is "
            "clearly better where the interval of the difference leaves out zero. Other training seeds are another "
            "matter: these intervals are about the choice of test inputs alone."
        ),
        *(_table(comparison_table(pair, score), f"{pair.second} less {pair.first}") for pair in pairs),
    )


def _calibration(runs: Runs, score: str) -> Section | None:
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


def _detection(runs: Runs, score: str) -> Section | None:
    if not any(detection_sets(run) for run in runs):
        return None
    blocks: list[Block] = []
    for run in runs:
        of_run = f" of {run.name}" if len(runs) > 1 else ""
        blocks.append(
            _table(
                detection_table(run), f"AUROC{of_run}: how well each score tells each set from known inputs"
            )
        )
        blocks.append(_table(metrics_table(run, score), f"Other metrics{of_run}, by {title_of(score)}"))
    return Section(
        "Telling known from unknown",
        Text(
            "A score is high where the ensemble is unsure. AUROC is the chance that an unknown input scores higher than "
            "a known one: 1 tells them apart, 0.5 is chance, below 0.5 the score points the wrong way. FPR is the share "
            "of false alarms at a threshold that catches 95 %. Averages over groups and corruptions are means of the "
            "single values.",
            "In the histograms, the less known and unknown inputs overlap, the better. A ROC curve shows every "
            "threshold: the closer to the upper left corner, the better.",
        ),
        *blocks,
        *_histograms(runs, score),
        *_rocs(runs, score),
    )


def _shown_scores(run: Evaluation, score: str) -> list[str]:
    if run.task != "classification":
        return list(run.score_names)
    return list(dict.fromkeys([score, *(name for name in _SHOWN_SCORES if name in run.score_names)]))


def _histograms(runs: Runs, score: str) -> Iterable[Picture]:
    for run in runs:
        for name in _shown_scores(run, score)[: 2 if len(runs) > 1 else None]:
            parts = [part for part in run.histograms if part.score == name]
            title = run.name if len(runs) > 1 else title_of(name)
            sets = ", ".join(part.set for part in parts)
            yield Picture(
                figures.score_histogram(parts, title_of(name), title),
                f"Histograms of {title_of(name)} of {run.name} on {sets}.",
            )


def _rocs(runs: Runs, score: str) -> Iterable[Picture]:
    for name in dict.fromkeys(roc.set for run in runs for roc in run.rocs):
        if len(runs) > 1:
            curves = {
                run.name: roc for run in runs for roc in run.rocs if (roc.set, roc.score) == (name, score)
            }
            title = f"{name}, by {title_of(score)}"
        else:
            shown = _shown_scores(runs[0], score)
            curves = {
                title_of(roc.score): roc for roc in runs[0].rocs if roc.set == name and roc.score in shown
            }
            title = name
        yield Picture(figures.roc_diagram(curves, title), f"ROC curves for {title}: {', '.join(curves)}.")


def _corruptions(runs: Runs, score: str) -> Section | None:
    corrupted = [run for run in runs if severities(run)]
    if not corrupted:
        return None
    worst = max(severities(corrupted[0]))
    curves = {
        "accuracy": {run.name: _by_severity(run, "accuracy", None) for run in corrupted},
        "smooth ECE": {run.name: _by_severity(run, "smooth_ece", None) for run in corrupted},
        f"AUROC of {title_of(score)}": {run.name: _by_severity(run, "auroc", score) for run in corrupted},
    }
    return Section(
        "Under corruption",
        Text(
            "The same images, corrupted ever more strongly. Accuracy will fall; calibration error should not rise with it, "
            "and AUROC, corrupted against clean, should: an ensemble that knows what it does not know grows unsure as it "
            "grows wrong. Every value is the mean over the corruptions, computed for each of them alone."
        ),
        *(
            Picture(figures.severity_curves(lines, label), f"{label} against severity. {_listed(lines)}")
            for label, lines in curves.items()
        ),
        _table(corruption_table(corrupted, worst), f"Accuracy under each corruption at severity {worst}"),
    )


def _by_severity(run: Evaluation, metric: str, score: str | None) -> dict[int, Number]:
    """Return a metric at each severity; 0 is the clean set, where the metric is known there."""
    numbers = {level: find(run, metric, ALL_CORRUPTIONS, score, level) for level in severities(run)}
    if score is None:
        numbers[0] = find(run, metric)
    return {level: number for level, number in sorted(numbers.items()) if number is not None}


def _listed(lines: dict[str, dict[int, Number]]) -> str:
    return " ".join(
        f"{name}: " + ", ".join(f"{level}: {number.value:.3f}" for level, number in numbers.items()) + "."
        for name, numbers in lines.items()
    )


def _uncertainty(runs: Runs, score: str) -> Section | None:
    parts = _PARTS.get(runs[0].task)
    shown = [run for run in runs if parts is not None and set(parts) <= set(run.score_names)]
    if parts is None or not shown:
        return None
    classes = runs[0].task == "classification"
    pictures = []
    for run in shown:
        rows = _parts_of_sets(run, parts)
        listed = "; ".join(
            f"{name}: data {p['data']:.3g}, knowledge {p['knowledge']:.3g}" for name, p in rows.items()
        )
        title = run.name if len(runs) > 1 else ""
        figure = figures.uncertainty_bars(rows, "nats" if classes else "squared target units", title)
        pictures.append(Picture(figure, f"Data and knowledge uncertainty of {run.name}. {listed}."))
    return Section(
        "How uncertain it is, and why",
        Text(
            "Total uncertainty has two parts: data uncertainty, which each member has by itself (noise, ambiguity), and "
            "knowledge uncertainty, what members disagree about (too little was learned there). Knowledge uncertainty "
            "should be small on known inputs and larger on unknown ones."
        ),
        *pictures,
    )


def _parts_of_sets(run: Evaluation, parts: tuple[str, str]) -> dict[str, dict[str, float]]:
    places: list[tuple[str, str, int | None]] = [(part.name, part.name, None) for part in run.sets]
    places += [(f"corrupted, severity {level}", ALL_CORRUPTIONS, level) for level in severities(run)]
    rows = {}
    for label, name, level in places:
        found = [find(run, "mean", name, part, level) for part in parts]
        rows[label] = {
            kind: number.value for kind, number in zip(("data", "knowledge"), found, strict=True) if number
        }
    return rows


def _members(runs: Runs, score: str) -> Section | None:
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
            listed = ", ".join(f"{number.value:.3g}" for number in own)
            pictures.append(
                Picture(
                    figures.member_dots(own, ensemble, title_of(metric), title),
                    f"{title_of(metric)} on {title}: members {listed}; ensemble {ensemble.value:.3g}.",
                )
            )
    side = "above" if metric == "accuracy" else "below"
    return Section(
        "Members and ensemble",
        Text(
            f"Each dot is one member, the line is the ensemble, with their intervals. A line {side} most dots means that "
            "members make different mistakes, which averaging evens out; a dot far off is a member to look at."
        ),
        *pictures,
    )


def _gallery(runs: Runs, score: str) -> Section | None:
    pictures = []
    for run in runs:
        for name in dict.fromkeys(item.set for item in run.gallery):
            for most in (True, False):
                items = [item for item in run.gallery if (item.set, item.most) == (name, most)]
                caption = f"{'Most' if most else 'Least'} disputed of {name}" + (
                    f", {run.name}" if len(runs) > 1 else ""
                )
                read = "; ".join(
                    figures.votes_text(item, run.class_names).replace("\n", ", ") for item in items
                )
                pictures.append(
                    Picture(
                        figures.votes_sheet(items, run.class_names),
                        f"{caption}. Input by input: {read}.",
                        caption,
                    )
                )
    if not pictures:
        return None
    return Section(
        "Disputed inputs",
        Text(
            "Inputs that members disagree about most, and least (by mutual information). Under each stand what it is, what "
            "the ensemble says, and the votes of the members. Disputed inputs are often ambiguous, mislabelled or unlike "
            "the training data; unknown inputs that nobody disputes are the dangerous ones."
        ),
        *pictures,
    )


def _trade_offs(runs: Runs, score: str) -> Section | None:
    if runs[0].task != "classification":
        return None
    values = {run.name: _good_numbers(run, score) for run in runs}
    shared = [axis for axis in values[runs[0].name] if all(axis in own for own in values.values())]
    if len(shared) < 3:
        return None
    values = {name: {axis: own[axis] for axis in shared} for name, own in values.items()}
    read = "; ".join(
        f"{name}: " + ", ".join(f"{a} {v:.3f}" for a, v in own.items()) for name, own in values.items()
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
        "1 − smooth ECE": find(run, "smooth_ece"),
        "1 − smooth ECE,\ncorrupted": find(run, "smooth_ece", ALL_CORRUPTIONS),
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


def _settings(runs: Runs, score: str) -> Section:
    columns = ["setting", *(run.name for run in runs)]
    rows: list[list[object]] = [
        ["members", *(run.num_members for run in runs)],
        [
            "weights",
            *("equal" if not run.weights else ", ".join(f"{w:.3g}" for w in run.weights) for run in runs),
        ],
        ["loss", *(run.loss for run in runs)],
        ["outputs", *(run.num_outputs for run in runs)],
        ["resamples", *(run.bootstrap for run in runs)],
        ["seed", *(run.seed for run in runs)],
    ]
    for name in dict.fromkeys(part.name for run in runs for part in run.sets):
        sizes = [{part.name: part.size for part in run.sets}.get(name) for run in runs]
        rows.append([f"inputs of {name}", *sizes])
    versions = f"Python {platform.python_version()} and PyTorch {torch.__version__}"
    return Section(
        "How this page was made",
        Text(
            f"By dissensus, with {versions}. Every input was predicted once; the seed decides resamples and corruptions."
        ),
        _table(
            (columns, [[str(cell) if cell is not None else "–" for cell in row] for row in rows]), "Settings"
        ),
    )


def _table(cells: Cells, caption: str) -> Table:
    columns, rows = cells
    return Table(columns, rows, caption)
