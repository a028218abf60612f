"""Evaluations in, sections on when and why an ensemble is unsure out."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import floor, log10, sqrt
from statistics import fmean

from dissensus.evaluation import Disputed, Evaluation, Histogram, Number
from dissensus.evaluation.results import ALL_CORRUPTIONS, ID, Examples
from dissensus.evaluation.tables import (
    corruption_table,
    detection_sets,
    detection_table,
    metrics_table,
    severities,
    short,
    title_of,
)
from dissensus.html import Picture, Section, Table, Text
from dissensus.reporting import figures
from dissensus.reporting.quality import Runs, as_table, best_cells

# What curves show beside the chosen score, where it was computed.
_SHOWN_SCORES = ("total_entropy", "mutual_information", "predictive_diversity", "mean_energy")
_PARTS = {
    "classification": ("expected_entropy", "mutual_information"),
    "labels": ("expected_entropy", "mutual_information"),
    "density": ("data_variance", "knowledge_variance"),
    "points": ("data_variance", "knowledge_variance"),
}


def detection(runs: Runs, score: str) -> Section | None:
    """How well scores tell unknown from known inputs: tables, histograms and ROC curves."""
    if not any(detection_sets(run) for run in runs):
        return None
    tables = [table for run in runs for table in _detection_tables(run, score, _of(run, runs))]
    return Section(
        "Telling known from unknown",
        Text(
            "A score is high where the ensemble is unsure. AUROC is the chance that an unknown input scores higher than "
            "a known one: 1 tells them apart, 0.5 is chance, below 0.5 the score points the wrong way. FPR is the share "
            "of false alarms at a threshold that catches 95 %. Averages over groups and corruptions are means of the "
            "single values. Rows on colour are the default score and the one that is best on average here; the best of each "
            "column is bold. To take the best row is to choose on the test: expect a little less elsewhere.",
            "In the histograms, the less known and unknown inputs overlap, the better. A ROC curve shows every "
            "threshold: the closer to the upper left corner, the better.",
        ),
        *tables,
        *_histograms(runs, score),
        *_rocs(runs, score),
    )


def _of(run: Evaluation, runs: Runs) -> str:
    """Return whose a table is, where a page has several runs."""
    return f" of {run.name}" if len(runs) > 1 else ""


def _detection_tables(run: Evaluation, score: str, of_run: str) -> list[Table]:
    told = as_table(detection_table(run), f"AUROC{of_run}: how well each score tells each set from known inputs")
    rows, columns = range(len(told.rows)), range(1, len(told.columns))
    best = [cell for column in columns for cell in best_cells(told, rows, column, large=True)]
    main = {run.score_names.index(name) for name in (score, best_score(run)) if name in run.score_names}
    others = as_table(metrics_table(run, score), f"Other metrics{of_run}, by {title_of(score)}")
    return [replace(told, best=best, main=main), others]


def told_apart(run: Evaluation) -> list[str]:
    """Return groups of unknown sets, and the sets that are in none."""
    inside = {name for sets in run.groups.values() for name in sets}
    alone = [part.name for part in run.sets if part.kind == "ood" and part.name not in inside]
    return [*run.groups, *alone]


def mean_auroc(run: Evaluation, score: str) -> float:
    """Return the AUROC of a score, averaged over what `told_apart` names."""
    return fmean(run.number("auroc", name, score=score).value for name in told_apart(run))


def best_score(run: Evaluation) -> str:
    """Return the score with the largest AUROC on average; of equal ones the first. Without unknown sets, the first."""
    if not told_apart(run):
        return run.score_names[0]
    return max(run.score_names, key=lambda name: round(mean_auroc(run, name), 3))


def _shown_scores(runs: Runs, score: str) -> list[str]:
    """Return the scores that curves show: the chosen one first, then others that all runs have."""
    others = runs[0].score_names if runs[0].score_names[-1].endswith("variance") else _SHOWN_SCORES
    shared = [name for name in others if all(name in run.score_names for run in runs)]
    return list(dict.fromkeys([score, *shared]))


def _histograms(runs: Runs, score: str) -> Iterable[Picture]:
    several = len(runs) > 1
    for name in _shown_scores(runs, score)[: 2 if several else None]:
        by_run = {run.name: _histograms_of(run, name) for run in runs}
        axis = figures.common_axis([part for parts in by_run.values() for part in parts])
        label = _deviation(name, runs[0].target) if name.endswith("_variance") else title_of(name)
        for run, parts in by_run.items():
            yield Picture(
                figures.score_histogram(parts, label, run if several else "", axis),
                f"Histograms of {title_of(name)} of {run} on {', '.join(part.set for part in parts)}.",
            )


def _histograms_of(run: Evaluation, score: str) -> list[Histogram]:
    """Return a score's histograms; those of variances as ones of standard deviations, which are in units of the target."""
    parts = [part for part in run.histograms if part.score == score]
    if not score.endswith("_variance"):
        return parts
    return [replace(part, edges=tuple(sqrt(max(0.0, edge)) for edge in part.edges)) for part in parts]


def _deviation(score: str, target: str) -> str:
    return title_of(score).replace("variance", "standard deviation") + (f" ({target})" if target else "")


def _rocs(runs: Runs, score: str) -> Iterable[Picture]:
    curves = {(run.name, roc.set, roc.score): roc for run in runs for roc in run.rocs}
    for name in dict.fromkeys(roc.set for roc in curves.values()):
        if len(runs) > 1:
            lines = {run.name: (run.name, name, score) for run in runs}
            title = f"{name}, by {title_of(score)}"
        else:
            lines = {title_of(other): (runs[0].name, name, other) for other in _shown_scores(runs, score)}
            title = name
        shown = {label: curves[key] for label, key in lines.items() if key in curves}
        yield Picture(figures.roc_diagram(shown, title), f"ROC curves for {title}: {', '.join(shown)}.")


def under_corruption(runs: Runs, score: str) -> Section | None:
    """Accuracy, calibration and AUROC as images are corrupted more and more."""
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
        as_table(corruption_table(corrupted, worst), f"Accuracy under each corruption at severity {worst}"),
    )


def _by_severity(run: Evaluation, metric: str, score: str | None) -> dict[int, Number]:
    """Return a metric at each severity; 0 is the clean set, which nothing can tell from itself."""
    itself = Number(metric, ID, "id", 0.5, score, low=0.5, high=0.5)
    numbers = {0: itself if metric == "auroc" else run.number(metric, score=score)}
    return numbers | {
        level: run.number(metric, ALL_CORRUPTIONS, score=score, severity=level) for level in severities(run)
    }


def _listed(lines: dict[str, dict[int, Number]]) -> str:
    return " ".join(
        f"{name}: " + ", ".join(f"{level}: {number.value:.3f}" for level, number in numbers.items()) + "."
        for name, numbers in lines.items()
    )


def decomposition(runs: Runs, score: str) -> Section | None:
    """Data and knowledge uncertainty of every set."""
    parts = _PARTS.get(runs[0].task, ())
    shown = [run for run in runs if parts and set(parts) <= set(run.score_names)]
    if not shown:
        return None
    classes = runs[0].task in ("classification", "labels")
    return Section(
        "How uncertain it is, and why",
        Text(
            "Total uncertainty has two parts: data uncertainty, which each member has by itself (noise, ambiguity), and "
            "knowledge uncertainty, what members disagree about (too little was learned there). Knowledge uncertainty "
            "should be small on known inputs and larger on unknown ones." + ("" if classes else _HOW_BARS_SPLIT)
        ),
        *(_uncertainty_bars(run, parts, classes, run.name if len(runs) > 1 else "") for run in shown),
    )


_HOW_BARS_SPLIT = " A bar is as long as the standard deviation of a prediction, root of the mean variance, and is split as the variance is."


def _uncertainty_bars(run: Evaluation, parts: Sequence[str], classes: bool, title: str) -> Picture:
    places: list[tuple[str, str, int | None]] = [(part.name, part.name, None) for part in run.sets]
    places += [(f"corrupted, severity {level}", ALL_CORRUPTIONS, level) for level in severities(run)]
    rows = {
        label: {
            kind: run.number("mean", name, score=part, severity=level).value
            for kind, part in zip(("data", "knowledge"), parts, strict=True)
        }
        for label, name, level in places
    }
    rows = rows if classes else {name: _as_deviations(own) for name, own in rows.items()}
    listed = "; ".join(
        f"{name}: data {short(p['data'])}, knowledge {short(p['knowledge'])}" for name, p in rows.items()
    )
    unit = "nats" if classes else f"standard deviation, {run.target or 'in units of the target'}"
    figure = figures.uncertainty_bars(rows, unit, title)
    return Picture(figure, f"Data and knowledge uncertainty of {run.name}. {listed}.")


def _as_deviations(parts: dict[str, float]) -> dict[str, float]:
    """Return parts of a variance as parts of its root, in the same proportion."""
    total = sum(parts.values())
    return {name: value / sqrt(total) if total > 0 else 0.0 for name, value in parts.items()}


def disputed_inputs(runs: Runs, score: str) -> Section | None:
    """Pictures that members disagree about most and least, with their votes."""
    shown: dict[tuple[str, str, bool], list[Disputed]] = {}
    for run in runs:
        for item in run.gallery:
            shown.setdefault((run.name, item.set, item.most), []).append(item)
    if not shown:
        return None
    names = {run.name: run.class_names for run in runs}
    several = len(runs) > 1
    return Section(
        "Disputed inputs",
        Text(
            "Inputs that members disagree about most, and least (by mutual information). Under each stand what it is, what "
            "the ensemble says (bold), and how many members vote for what. Disputed inputs are often ambiguous, mislabelled or unlike "
            "the training data; unknown inputs that nobody disputes are the dangerous ones. Where outputs have positions, the map stands "
            "beside the picture: red where members disagree, each map on its own scale."
        ),
        *(
            _votes(
                items, names[run], f"{'Most' if most else 'Least'} disputed of {part}" + (f", {run}" if several else "")
            )
            for (run, part, most), items in shown.items()
        ),
    )


def _votes(items: Sequence[Disputed], class_names: Sequence[str], caption: str) -> Picture:
    read = "; ".join(", ".join(figures.votes_lines(item, class_names)) for item in items)
    return Picture(figures.votes_sheet(items, class_names), f"{caption}. Input by input: {read}.", caption)


def single_inputs(runs: Runs, score: str) -> Section | None:
    """The inputs that each run is least certain about, in a table that can be searched and sorted."""
    if not any(run.examples for run in runs):
        return None
    limit = 300 if len(runs) == 1 else 100
    blocks = [_examples(run, limit, _of(run, runs)) for run in runs if run.examples]
    return Section(
        "Input by input",
        Text(
            "Every row is one input, numbered from 0 as in its set. Type to search, such as the name of a class or of a set; press a "
            "heading to sort. What is wrong and certain is worth a look: an ensemble cannot warn of it."
        ),
        *blocks,
    )


def _examples(run: Evaluation, limit: int, of_run: str) -> Table:
    most = max(len(part.index[:limit]) for part in run.examples)
    names = list(run.examples[0].scores)
    if run.task == "classification":
        head = ["predicted", "truth", "right", "confidence", *map(title_of, names)]
        answer = _class_answer
    else:
        what = run.target or "target"
        head = [f"predicted {what}", f"true {what}", "error", *(_deviation(name, "") for name in names)]
        answer = _value_answer
    rows = [
        [part.set, index, *answer(run, part, place)]
        for part in run.examples
        for place, index in enumerate(part.index[:limit])
    ]
    caption = f"The {most} least certain inputs{of_run} of each set"
    return Table(["set", "input", *head], rows, caption, search=True)


def _class_answer(run: Evaluation, part: Examples, place: int) -> list[object]:
    predicted, truth = part.predicted[place], part.truth[place] if part.truth else None
    right = None if truth is None else predicted == truth
    names = [None if value is None else _class_name(run, int(value)) for value in (predicted, truth)]
    own = (short(values[place]) for values in part.scores.values())
    return [*names, right, f"{part.confidence[place]:.3f}", *own]


def _value_answer(run: Evaluation, part: Examples, place: int) -> list[object]:
    predicted = part.predicted[place]
    truth = part.truth[place] if part.truth else None
    known = [None, None] if truth is None else [truth, predicted - truth]
    deviations = (sqrt(max(0.0, values[place])) for values in part.scores.values())
    # One number of decimals for a set: four digits of its largest prediction.
    size = max(map(abs, part.predicted))
    decimals = max(0, 3 - floor(log10(size))) if 1e-4 < size < 1e12 else None
    texts = (None if value is None else _fixed(value, decimals) for value in [predicted, *known, *deviations])
    return list(texts)


def _fixed(value: float, decimals: int | None) -> str:
    return short(value) if decimals is None else f"{value:,.{decimals}f}".replace(",", "\u202f")


def _class_name(run: Evaluation, index: int) -> str:
    return run.class_names[index] if run.class_names else str(index)
