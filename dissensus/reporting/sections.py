"""Evaluations in, what stands in each section of a page out: how to read it, and tables and pictures, or nothing."""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from math import exp, floor, log, log10, sqrt
from operator import attrgetter
from statistics import fmean

import torch

from dissensus.evaluation import Evaluation, Histogram, Number, Reliability, tables
from dissensus.evaluation.comparison import BEST_HIGH, compare
from dissensus.evaluation.results import ALL_CORRUPTIONS, ID, MEMBER_METRICS, AlarmCheck, Examples
from dissensus.evaluation.tables import Cells, short, title_of, title_with_unit
from dissensus.html import Block, Picture, Section, Table, Text
from dissensus.plots import martingale_path, p_value_histogram
from dissensus.reporting import figures
from dissensus.reporting.diagnosis import Runs, collusion
from dissensus.scores import REGRESSION_SCORES


@dataclass(frozen=True)
class About:
    """What a page shows of a task: score and numbers, parts of uncertainty, how to read the main numbers, and what they claim."""

    score: str
    headlines: tuple[str, ...]
    parts: tuple[str, ...]
    reading: str
    claims: str = "confidence"


_ENTROPIES = ("expected_entropy", "mutual_information")
_VARIANCES = ("data_variance", "knowledge_variance")
TASKS: Mapping[str, About] = {
    "classification": About(
        "total_entropy",
        ("accuracy", "smooth_ece"),
        _ENTROPIES,
        "Accuracy should be high. NLL and Brier score judge the whole predicted distribution; ECE and smooth ECE "
        "are the average gap between confidence and accuracy; these four should be low. A mean member accuracy below the "
        "ensemble's is what averaging gains.",
    ),
    "labels": About(
        "total_entropy",
        ("label_accuracy", "ece"),
        _ENTROPIES,
        "Average precision and AUROC say how well inputs with a label are ranked before those without, averaged over labels; "
        "label accuracy is the share of answers that are right, subset accuracy that of inputs with all of them right. These should be "
        "high; NLL, Brier score and ECE, averaged over answers, should be low.",
    ),
    "density": About(
        "total_variance",
        ("rmse", "coverage_90"),
        _VARIANCES,
        "RMSE is the typical error; NLL and CRPS judge the whole predicted distribution; these should be low. "
        "Intervals that claim 90 % should hold about 90 % of the targets.",
        "intervals",
    ),
    "points": About(
        "knowledge_variance", ("rmse", "mae"), _VARIANCES, "RMSE and MAE are typical errors and should be low."
    ),
    "own": About(
        "knowledge_variance",
        ("loss",),
        (),
        "The loss is the one that the ensemble was trained by, of the members' mean output; it should be low.",
        "quantiles",
    ),
}
# What curves show beside the chosen score, where it was computed.
_SHOWN_SCORES = ("total_entropy", "mutual_information", "predictive_diversity", "mean_energy")


# What a section holds: first how to read it, of which there is no use where nothing follows.
Blocks = Iterator[Block]


def main_numbers(runs: Runs, score: str) -> Blocks:
    """Metrics of the predictions on every labelled set, with intervals."""
    table = as_table(tables.prediction_table(runs), "Predictions on inputs with known answers")
    reading = TASKS[runs[0].task].reading
    if all(run.bootstrap for run in runs):
        reading += " In brackets: 95 % intervals, within which the number would lie had other inputs of the same kind been drawn."
    if len(runs) > 1:
        yield Text(f"{reading} The best value of each set is bold.")
        yield replace(table, best=_best_runs(table))
    else:
        yield Text(reading)
        yield replace(table, main=[number for number, row in enumerate(table.rows) if row[0] == ID])


_LARGE_IS_GOOD = tuple(map(title_of, BEST_HIGH))


def _best_runs(table: Table) -> list[tuple[int, int]]:
    """Return the best cells of each set: rows of one set, in the second column, compete."""
    found = []
    for name in {row[1] for row in table.rows}:
        rows = [number for number, row in enumerate(table.rows) if row[1] == name]
        for column, title in enumerate(table.columns[2:], start=2):
            if title != title_of("coverage_90"):  # neither large nor small is good
                found += best_cells(table, rows, column, large=title in _LARGE_IS_GOOD)
    return found


def best_cells(table: Table, rows: Iterable[int], column: int, *, large: bool) -> list[tuple[int, int]]:
    """Return the best cells of a column among some rows, as printed; none where all are equal or one is alone."""
    texts = {row: str(table.rows[row][column]).split("[")[0].replace("\u202f", "").strip() for row in rows}
    values = {row: float(text) for row, text in texts.items() if text != "–"}
    if len(set(values.values())) < 2:
        return []
    best = (max if large else min)(values.values())
    return [(row, column) for row, value in values.items() if value == best]


def differences(runs: Runs, score: str) -> Blocks:
    """What further runs gain or lose against the first, with paired intervals."""
    found: list[Block] = []
    for other in runs[1:]:
        try:
            pair = compare(runs[0], other)
        except ValueError as reason:
            found.append(Text(f"{other.name} is not compared with {runs[0].name}, input by input. {reason}"))
            continue
        table = as_table(tables.comparison_table(pair, score), f"{pair.second} less {pair.first}")
        # Clear differences stand out.
        found.append(replace(table, main=[number for number, row in enumerate(table.rows) if row[-1] != "–"]))
    reading = (
        "Runs saw the same inputs, so that differences are more certain than the numbers themselves. A run is "
        "clearly better where the interval of the difference leaves out zero. Other training seeds are another "
        "matter: these intervals are about the choice of test inputs alone."
    )
    yield Text(reading) if any(isinstance(block, Table) for block in found) else Text()
    yield from sorted(found, key=lambda block: isinstance(block, Text))


def labels(runs: Runs, score: str) -> Blocks:
    """How well each of several labels is found, on every labelled set."""
    yield Text(
        "Average precision is that of a list of all inputs, those first that most probably have the label; guessing gives the share "
        "of inputs that have it. A dash: all inputs have the label, or none."
    )
    for part in runs[0].sets:
        if part.kind != "ood" and runs[0].task == "labels":
            yield as_table(tables.label_table(runs, part.name), f"Labels on {part.name}")


_CLAIMS = {
    "confidence": "A dot says how often predictions of that confidence were right: on the dashed line confidence is honest, below it "
    "the ensemble claims more than it knows, above it less. Dots over short grey bars rest on few inputs and wobble.",
    "intervals": "An interval that claims some probability should hold that share of the targets: on the dashed line it does, "
    "below it intervals are too narrow (overconfident), above it too wide.",
    "quantiles": "Below a quantile should lie as many of the targets as its level says: on the dashed line they do.",
}


def calibration(runs: Runs, score: str) -> Blocks:
    """Confidence against accuracy, or claimed against observed coverage."""
    claims = TASKS[runs[0].task].claims
    yield Text(_CLAIMS[claims])
    found = [(run.name, curve) for run in runs for curve in run.reliability]
    if claims == "confidence":
        for run, curve in found:
            alt = f"Confidence against accuracy of {run} on {curve.set}: {_claimed(curve, '; ')}"
            yield Picture(figures.reliability_diagram(curve, run), alt)
        return
    for name in dict.fromkeys(curve.set for _, curve in found):
        curves = {run: curve for run, curve in found if curve.set == name}
        listed = "; ".join(f"{run}: {_claimed(curve, ', ')}" for run, curve in curves.items())
        figure = figures.coverage_diagram(curves, name, quantiles=claims == "quantiles")
        yield Picture(figure, f"Claimed against observed coverage on {name}. {listed}.")


def _claimed(curve: Reliability, between: str) -> str:
    """Return what was claimed and what came true as text."""
    return between.join(f"{c:.2f} to {o:.2f}" for c, o in zip(curve.claimed, curve.observed, strict=True))


def detection(runs: Runs, score: str) -> Blocks:
    """How well scores tell unknown from known inputs: tables, histograms and ROC curves."""
    yield Text(
        "A score is high where the ensemble is unsure. AUROC is the chance that an unknown input scores higher than "
        "a known one: 1 tells them apart, 0.5 is chance, below 0.5 the score points the wrong way. FPR is the share "
        "of false alarms at a threshold that catches 95 %. Averages over groups and corruptions are means of the "
        "single values. Rows on colour are the default score and the one that is best on average here; the best of each "
        "column is bold. To take the best row is to choose on the test: expect a little less elsewhere.",
        "In the histograms, the less known and unknown inputs overlap, the better. A ROC curve shows every "
        "threshold: the closer to the upper left corner, the better.",
    )
    if any(tables.detection_sets(run) for run in runs):
        for run in runs:
            of_run = _of(run, runs)
            caption = f"AUROC{of_run}: how well each score tells each set from known inputs"
            told = as_table(tables.detection_table(run), caption)
            rows, columns = range(len(told.rows)), range(1, len(told.columns))
            best = [cell for column in columns for cell in best_cells(told, rows, column, large=True)]
            yield replace(told, best=best, main={run.score_names.index(name) for name in (score, best_score(run))})
            yield as_table(tables.metrics_table(run, score), f"Other metrics{of_run}, by {title_of(score)}")
        yield from _histograms(runs, score)
        yield from _rocs(runs, score)


def _of(run: Evaluation, runs: Runs) -> str:
    """Return whose a table is, where a page has several runs."""
    return f" of {run.name}" if len(runs) > 1 else ""


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
    others = runs[0].score_names if runs[0].score_names[-1] in REGRESSION_SCORES else _SHOWN_SCORES
    shared = [name for name in others if all(name in run.score_names for run in runs)]
    return list(dict.fromkeys([score, *shared]))


def _histograms(runs: Runs, score: str) -> Blocks:
    several = len(runs) > 1
    for name in _shown_scores(runs, score)[: 2 if several else None]:
        by_run = {run.name: [_rooted(part) for part in run.histograms if part.score == name] for run in runs}
        axis = figures.common_axis(list(chain(*by_run.values())))
        for run, parts in by_run.items():
            yield Picture(
                figures.score_histogram(parts, _deviation(name, runs[0].target), run if several else "", axis),
                f"Histograms of {title_of(name)} of {run} on {', '.join(map(attrgetter('set'), parts))}.",
            )


def _rooted(part: Histogram) -> Histogram:
    """Return the histogram of a variance as that of its root, which is in units of the target; others as they are."""
    if part.score not in REGRESSION_SCORES:
        return part
    return replace(part, edges=tuple(sqrt(max(0.0, edge)) for edge in part.edges))


def _deviation(score: str, target: str) -> str:
    if score not in REGRESSION_SCORES:
        return title_of(score)
    return title_of(score).replace("variance", "standard deviation") + (f" ({target})" if target else "")


def _rocs(runs: Runs, score: str) -> Blocks:
    curves = {(run.name, roc.set, roc.score): roc for run in runs for roc in run.rocs}
    for name in dict.fromkeys(roc.set for roc in curves.values()):
        if len(runs) > 1:
            title, lines = f"{name}, by {title_of(score)}", {run.name: (run.name, name, score) for run in runs}
        else:
            title, lines = name, {title_of(own): (runs[0].name, name, own) for own in _shown_scores(runs, score)}
        shown = {label: curves[key] for label, key in lines.items() if key in curves}
        yield Picture(figures.roc_diagram(shown, title), f"ROC curves for {title}: {', '.join(shown)}.")


def under_corruption(runs: Runs, score: str) -> Blocks:
    """Accuracy, calibration and AUROC as images are corrupted more and more."""
    yield Text(
        "The same images, corrupted ever more strongly. Accuracy will fall; calibration error should not rise with it, "
        "and AUROC, corrupted against clean, should: an ensemble that knows what it does not know grows unsure as it "
        "grows wrong. Every value is the mean over the corruptions, computed for each of them alone."
    )
    corrupted = [run for run in runs if tables.severities(run)]
    shown = {
        "accuracy": ("accuracy", None),
        "smooth ECE": ("smooth_ece", None),
        f"AUROC of {title_of(score)}": ("auroc", score),
    }
    for label, what in shown.items() if corrupted else ():
        lines = {run.name: _by_severity(run, *what) for run in corrupted}
        values = {run: ", ".join(f"{level}: {n.value:.3f}" for level, n in own.items()) for run, own in lines.items()}
        listed = " ".join(f"{run}: {own}." for run, own in values.items())
        yield Picture(figures.severity_curves(lines, label), f"{label} against severity. {listed}")
    if corrupted:
        worst = max(tables.severities(corrupted[0]))
        yield as_table(tables.corruption_table(corrupted, worst), f"Accuracy under each corruption at severity {worst}")


def _by_severity(run: Evaluation, metric: str, score: str | None) -> dict[int, Number]:
    """Return a metric at each severity; 0 is the clean set, which nothing can tell from itself."""
    itself = Number(metric, ID, "id", 0.5, score, low=0.5, high=0.5)
    numbers = {0: itself if metric == "auroc" else run.number(metric, score=score)}
    return numbers | {
        level: run.number(metric, ALL_CORRUPTIONS, score=score, severity=level) for level in tables.severities(run)
    }


def decomposition(runs: Runs, score: str) -> Blocks:
    """Data and knowledge uncertainty of every set."""
    parts = TASKS[runs[0].task].parts
    classes = parts == _ENTROPIES
    split = " A bar is as long as the standard deviation of a prediction, root of the mean variance, and is split as the variance is."
    yield Text(
        "Total uncertainty has two parts: data uncertainty, which each member has by itself (noise, ambiguity), and "
        "knowledge uncertainty, what members disagree about (too little was learned there). Knowledge uncertainty "
        "should be small on known inputs and larger on unknown ones." + ("" if classes else split)
    )
    for run in runs:
        if parts and set(parts) <= set(run.score_names):
            rows = _decomposed(run, parts, classes)
            texts = (
                f"{row}: data {short(own['data'])}, knowledge {short(own['knowledge'])}" for row, own in rows.items()
            )
            unit = "nats" if classes else f"standard deviation, {run.target or 'in units of the target'}"
            figure = figures.uncertainty_bars(rows, unit, run.name if len(runs) > 1 else "")
            yield Picture(figure, f"Data and knowledge uncertainty of {run.name}. {'; '.join(texts)}.")


def _decomposed(run: Evaluation, parts: tuple[str, ...], classes: bool) -> dict[str, dict[str, float]]:
    """Return data and knowledge uncertainty of each set and severity; parts of a variance as parts of its root, in proportion."""
    places: list[tuple[str, str, int | None]] = [(part.name, part.name, None) for part in run.sets]
    places += [(f"corrupted, severity {level}", ALL_CORRUPTIONS, level) for level in tables.severities(run)]
    rows = {}
    for label, name, level in places:
        data, knowledge = (run.number("mean", name, score=part, severity=level).value for part in parts)
        root = 1.0 if classes else sqrt(data + knowledge) or 1.0
        rows[label] = {"data": data / root, "knowledge": knowledge / root}
    return rows


# The stream of known inputs ever gets here with a probability of one in twenty or less, unless it changed.
_THRESHOLD = 20.0


def alarm(runs: Runs, score: str) -> Blocks:
    """What the alarm promised and what it did, set by set."""
    found = {run.name: run.alarm for run in runs if run.alarm is not None}
    yield Text(
        "The alarm rings where an input is stranger than held-out ones: at most the allowed share of ordinary inputs (id) "
        "ring, and the more of the unknown ones the better. Around the allowed rate the share scatters with the number of "
        "inputs that the alarm was calibrated on and tested on. Covered is the share of known inputs whose prediction set, or "
        "interval, holds the truth; it should be about what was wanted.",
        "P-values of ordinary inputs are flat; those of inputs that the alarm can tell pile up at 0.",
        *(_alarm_verdict(check, f"{name}: " if len(found) > 1 else "") for name, check in found.items()),
    )
    if found:
        sets = list(dict.fromkeys(name for check in found.values() for name in check.flagged))
        columns = ["run", "score", "calibrated on", "allowed", *sets, "covered", "wanted"]
        rows = []
        for name, check in found.items():
            flagged = [f"{check.flagged[one]:.3f}" if one in check.flagged else "–" for one in sets]
            head = [name, title_of(check.score), str(check.calibrated_on), f"{check.false_alarms:g}"]
            rows.append([*head, *flagged, f"{check.covered:.3f}", f"{check.coverage:g}"])
        yield as_table((columns, rows), "Share of each set that raised the alarm, and coverage")
    for name, check in found.items():
        figure, ax = figures.panel(name)
        p_value_histogram(check.p_values, ax, false_alarms=check.false_alarms)
        shares = ", ".join(f"{one} {share:.3f}" for one, share in check.flagged.items())
        yield Picture(figure, f"P-values of {name}. Share that raised the alarm: {shares}.")
        figure, ax = figures.panel(f"{name}: drift")
        martingale_path({"known inputs": check.drift}, ax, thresholds=(_THRESHOLD,))
        last = exp(min(check.drift[-1], 50))
        yield Picture(figure, f"Drift martingale of {name} over its known inputs; the last value is {last:.3g}.")


def _alarm_verdict(check: AlarmCheck, who: str) -> str:
    """Say whether the known inputs ring more often than they may, and whether their source seems to have changed."""
    if check.false_alarms * (check.calibrated_on + 1) < 1 - 1e-9:
        return (
            f"{who}The alarm was calibrated on {check.calibrated_on} inputs, too few for a rate of {check.false_alarms:g}: "
            "it can never ring. Hold out more, or allow more false alarms."
        )
    rate, tested = check.false_alarms, len(check.p_values[ID])
    scatter = sqrt(rate * (1 - rate) * (1 / check.calibrated_on + 1 / tested))
    ordinary = "as often as it may" if check.flagged[ID] <= rate + 3 * scatter else "MORE OFTEN THAN IT MAY"
    drift = "the drift monitor sees no change between held-out and known inputs"
    if max(check.drift) > log(_THRESHOLD):
        reached = exp(min(max(check.drift), 50))
        drift = f"the drift monitor reached {reached:.3g}: these inputs are unlike those held out"
    text = f"{who}on known inputs the alarm rings {ordinary}; {drift}."
    return text[0].upper() + text[1:]


def members(runs: Runs, score: str) -> Blocks:
    """Each member's accuracy or error beside the ensemble's."""
    metric = MEMBER_METRICS[runs[0].task]
    side = "above" if metric in BEST_HIGH else "below"
    unit = " Errors are in units of the target." if metric == "rmse" else ""
    yield Text(
        f"Each dot is one member, the line is the ensemble, with their intervals. A line {side} most dots means that "
        "members make different mistakes, which averaging evens out; a dot far off is a member to look at. Rest the "
        f"pointer on a dot to read it.{unit}"
    )
    labelled = [(run, part.name) for run in runs for part in run.sets if run.num_members > 1 and part.kind != "ood"]
    for run, part in labelled:
        title = f"{run.name}, {part}" if len(runs) > 1 else part
        own = [n for n in run.numbers if (n.metric, n.set) == (metric, part) and n.member is not None]
        ensemble, listed = run.number(metric, part), ", ".join(short(number.value) for number in own)
        figure = figures.member_dots(own, ensemble, title_with_unit(metric, run.target), title)
        yield Picture(figure, f"{title_of(metric)} on {title}: members {listed}; ensemble {short(ensemble.value)}.")


def disputed_inputs(runs: Runs, score: str) -> Blocks:
    """Pictures that members disagree about most and least, with their votes."""
    yield Text(
        "Inputs that members disagree about most, and least (by mutual information). Under each stand what it is, what the "
        "ensemble says (bold), and how many members vote for what. Disputed inputs are often ambiguous, mislabelled or unlike the "
        "training data; unknown inputs that nobody disputes are the dangerous ones. Where outputs have positions, the map stands "
        "beside the picture: red where members disagree, each map on its own scale."
    )
    for run in runs:
        for (part, most), group in groupby(run.gallery, key=attrgetter("set", "most")):
            items, whose = list(group), f", {run.name}" if len(runs) > 1 else ""
            caption = f"{'Most' if most else 'Least'} disputed of {part}{whose}"
            read = "; ".join(", ".join(figures.votes_lines(item, run.class_names)) for item in items)
            yield Picture(figures.votes_sheet(items, run.class_names), f"{caption}. Input by input: {read}.", caption)


def single_inputs(runs: Runs, score: str) -> Blocks:
    """The inputs that each run is least certain about, in a table that can be searched and sorted."""
    limit = 300 if len(runs) == 1 else 100
    yield Text(
        "Every row is one input, numbered from 0 as in its set. Type to search, such as the name of a class or of a set; press a "
        "heading to sort. What is wrong and certain is worth a look: an ensemble cannot warn of it."
    )
    for run in runs:
        if not run.examples:
            continue
        what, answer = run.target or "target", _value_answer
        head = [f"predicted {what}", f"true {what}", "error"]
        if run.task == "classification":
            head, answer = ["predicted", "truth", "right", "confidence"], _class_answer
        head += map(partial(_deviation, target=""), run.examples[0].scores)
        shown = [(part, place, index) for part in run.examples for place, index in enumerate(part.index[:limit])]
        rows = [[part.set, index, *answer(run, part, place)] for part, place, index in shown]
        most = max(len(part.index[:limit]) for part in run.examples)
        caption = f"The {most} least certain inputs{_of(run, runs)} of each set"
        yield Table(["set", "input", *head], rows, caption, search=True)


def _class_answer(run: Evaluation, part: Examples, place: int) -> list[object]:
    known = run.class_names or range(run.num_outputs)
    predicted, confidence = str(known[int(part.predicted[place])]), f"{part.confidence[place]:.3f}"
    truth = str(known[int(part.truth[place])]) if part.truth else None
    right = part.predicted[place] == part.truth[place] if part.truth else None
    return [predicted, truth, right, confidence, *(short(own[place]) for own in part.scores.values())]


def _value_answer(run: Evaluation, part: Examples, place: int) -> list[object]:
    predicted = part.predicted[place]
    known = [part.truth[place], predicted - part.truth[place]] if part.truth else [None, None]
    deviations = (sqrt(max(0.0, values[place])) for values in part.scores.values())
    # One number of decimals for a set: four digits of its largest prediction.
    size = max(map(abs, part.predicted))
    decimals = max(0, 3 - floor(log10(size))) if 1e-4 < size < 1e12 else None
    return [None if value is None else _fixed(value, decimals) for value in (predicted, *known, *deviations)]


def _fixed(value: float, decimals: int | None) -> str:
    return short(value) if decimals is None else f"{value:,.{decimals}f}".replace(",", "\u202f")


def settings(runs: Runs, score: str) -> Blocks:
    """How the page was made: what decides the numbers on it, run by run."""
    versions = f"Python {platform.python_version()} and PyTorch {torch.__version__}"
    yield Text(
        f"By dissensus, with {versions}. Every input was predicted once; the seed decides resamples and corruptions."
    )
    own = [
        {
            "members": str(run.num_members),
            "weights": ", ".join(f"{weight:.3g}" for weight in run.weights) or "equal",
            "loss": run.loss,
            "outputs": str(run.num_outputs),
            "resamples": str(run.bootstrap),
            "seed": str(run.seed),
            **{f"inputs of {part.name}": str(part.size) for part in run.sets},
        }
        for run in runs
    ]
    rows = [[name, *(one.get(name, "–") for one in own)] for name in dict.fromkeys(chain(*own))]
    yield as_table((["setting", *(run.name for run in runs)], rows), "Settings")


def as_table(cells: Cells, caption: str) -> Table:
    """Return cells as a table of the page."""
    columns, rows = cells
    # Where a cell is narrow, the interval goes to a line of its own and stays in one piece.
    return Table(columns, [[cell.replace(", ", ",\N{NO-BREAK SPACE}") for cell in row] for row in rows], caption)


_SECTIONS: Mapping[str, Callable[[Runs, str], Blocks]] = {
    "Main numbers": main_numbers,
    "Differences between runs": differences,
    "Label by label": labels,
    "Can its {claims} be believed?": calibration,
    "Telling known from unknown": detection,
    "Under corruption": under_corruption,
    "How uncertain it is, and why": decomposition,
    "The alarm": alarm,
    "Members and ensemble": members,
    "Do members collude?": collusion,
    "Disputed inputs": disputed_inputs,
    "Input by input": single_inputs,
    "How this page was made": settings,
}


def sections_of(runs: Runs, score: str) -> Iterator[Section]:
    """Yield the sections of a page, without those that have nothing but how to read them."""
    for title, make in _SECTIONS.items():
        blocks = list(make(runs, score))
        if len(blocks) > 1:
            yield Section(title.format(claims=TASKS[runs[0].task].claims), *blocks)
