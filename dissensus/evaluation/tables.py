"""Evaluations in, the tables that people read out: columns and rows of short text."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

from dissensus.evaluation.comparison import UNDIRECTED, Comparison
from dissensus.evaluation.estimates import IN_UNITS
from dissensus.evaluation.results import ALL_CORRUPTIONS, ID, Evaluation, find
from dissensus.metrics import OOD_METRICS

# Columns, and rows with a cell for each of them.
Cells: TypeAlias = tuple[list[str], list[list[str]]]

TITLES = {
    "member_accuracy": "mean member accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "smooth_ece": "smooth ECE",
    "mean_iou": "mean IoU",
    "macro_auroc": "mean AUROC of labels",
    "label_auroc": "AUROC",
    "auroc": "AUROC",
    "aupr_out": "AUPR out",
    "aupr_in": "AUPR in",
    "fpr95_ood_positive": "FPR at 95 % TPR (OOD positive)",
    "fpr95_id_positive": "FPR at 95 % TPR (ID positive)",
    "risk_coverage_area": "risk-coverage area",
    "rmse": "RMSE",
    "mae": "MAE",
    "gaussian_nll": "Gaussian NLL",
    "laplace_nll": "Laplace NLL",
    "mixture_nll": "mixture NLL",
    "gaussian_crps": "CRPS",
    "laplace_crps": "CRPS",
    "coverage_90": "coverage of 90 % intervals",
    "width_90": "width of 90 % intervals",
    "bma": "BMA (1 − confidence)",
    "num_unique": "number of unique votes",
    "mean_max_probability": "1 − mean max-probability",
    "max_logit": "−max-logit",
    "mean_pairwise_kl": "mean pairwise KL",
    "jensen_shannon": "Jensen-Shannon",
}
_PREDICTION_METRICS = {
    "classification": ("accuracy", "member_accuracy", "mean_iou", "nll", "brier", "ece", "smooth_ece"),
    "density": ("rmse", "mixture_nll", "gaussian_nll", "laplace_nll", "gaussian_crps", "laplace_crps", "coverage_90"),
    "points": ("rmse", "mae", "mixture_nll"),
    "labels": ("mean_average_precision", "macro_auroc", "label_accuracy", "subset_accuracy", "nll", "brier", "ece"),
    "own": ("loss",),
}


def _cell(result: Evaluation, metric: str, name: str, **about: Any) -> str:
    """Return what `find` finds with its interval, such as `0.934 [0.929, 0.939]`; a dash where it finds nothing."""
    number = find(result.numbers, metric, name, **about)
    if number is None:
        return "–"
    interval = "" if number.low is None or number.high is None else f" [{short(number.low)}, {short(number.high)}]"
    return short(number.value) + interval


def short(value: float) -> str:
    """Return a number with three decimals; with more where it is small, and four digits where it is large.

    Example:
        >>> short(0.98765), short(123.456), short(0.00042), short(0.0000123), short(-0.0)
        ('0.988', '123.5', '0.0004', '1.2e-05', '0.000')
        >>> short(30421.4).split(), short(1234567.8).split()
        (['30', '420'], ['1', '235', '000'])
    """
    size = abs(value)
    if size < 1e-12:
        return "0.000"
    if 1e4 <= size < 1e12:
        # Four digits, thousands apart by a narrow space that does not break.
        return f"{float(f'{value:.4g}'):,.0f}".replace(",", "\u202f")
    if size >= 100:
        return f"{value:.4g}"
    if size >= 1e-3:
        return f"{value:.3f}"
    return f"{value:.4f}" if size >= 1e-4 else f"{value:.1e}"


def title_of(name: str) -> str:
    """Return a metric's or score's name as people write it."""
    return TITLES.get(name, name.replace("_", " "))


def title_with_unit(name: str, target: str) -> str:
    """Return a metric's title, and the target's name where it is in the target's units."""
    return f"{title_of(name)} ({target})" if target and name in IN_UNITS else title_of(name)


def prediction_table(results: Sequence[Evaluation]) -> Cells:
    """Return how good predictions are, set by set and run by run."""
    found = {number.metric for result in results for number in result.numbers}
    metrics = [name for name in _PREDICTION_METRICS[results[0].task] if name in found]
    first = int(len(results) == 1)  # one run needs no column for its name
    rows = [
        [result.name, _name_of_set(name), *(_cell(result, metric, name) for metric in metrics)][first:]
        for result in results
        for name in _sets_but(result, "ood")
    ]
    unit = results[0].target if len({result.target for result in results}) == 1 else ""
    return ["run", "set", *map(partial(title_with_unit, target=unit), metrics)][first:], rows


def detection_table(result: Evaluation) -> Cells:
    """Return how well each score tells each set from the known inputs."""
    sets, scores = detection_sets(result), result.score_names
    rows = [[title_of(score), *(_cell(result, "auroc", name, score=score) for name in sets)] for score in scores]
    return ["AUROC by score", *(_name_of_group(result, name) for name in sets)], rows


def detection_sets(result: Evaluation) -> list[str]:
    """Return the names of all that is told from known inputs: groups, sets, and corruptions together."""
    return [*result.groups, *_sets_but(result, "id")]


def _sets_but(result: Evaluation, kind: str) -> list[str]:
    """Return the names of the sets of other kinds than this, and at the end that of all corruptions together."""
    corrupted = any(number.kind == "corruptions" for number in result.numbers)
    return [part.name for part in result.sets if part.kind != kind] + [ALL_CORRUPTIONS] * corrupted


def severity_table(result: Evaluation, score: str) -> Cells:
    """Return accuracy, calibration and AUROC of one score at each severity, averaged over corruptions."""
    columns: dict[str, tuple[str, str | None]] = {f"AUROC of {title_of(score)}": ("auroc", score)}
    columns = {title_of(metric): (metric, None) for metric in ("accuracy", "nll", "ece", "smooth_ece")} | columns
    rows = [
        [
            str(level),
            *(_cell(result, metric, ALL_CORRUPTIONS, score=of, severity=level) for metric, of in columns.values()),
        ]
        for level in severities(result)
    ]
    return ["severity", *columns], rows


def corruption_table(results: Sequence[Evaluation], severity: int) -> Cells:
    """Return accuracies of every corruption at one severity, run by run."""
    names = dict.fromkeys(n.set for result in results for n in result.numbers if n.kind == "corruption")
    rows = [
        [name.replace("_", " "), *(_cell(result, "accuracy", name, severity=severity) for result in results)]
        for name in names
    ]
    return ["corruption", *([result.name for result in results] if len(results) > 1 else ["accuracy"])], rows


def label_table(results: Sequence[Evaluation], name: str = ID) -> Cells:
    """Return average precision and AUROC of every label on one set, run by run; a dash where all, or none, have it."""
    names = results[0].class_names or map(str, range(results[0].num_outputs))
    columns = [(result, metric) for result in results for metric in ("average_precision", "label_auroc")]
    rows = [[label, *(_cell(*column, name, label=place) for column in columns)] for place, label in enumerate(names)]
    heads = [(f"{result.name}: " if len(results) > 1 else "") + title_of(metric) for result, metric in columns]
    return ["label", *heads], rows


def metrics_table(result: Evaluation, score: str) -> Cells:
    """Return every metric of telling each set from the known inputs by one score."""
    rows = [
        [_name_of_group(result, name), *(_cell(result, metric, name, score=score) for metric in OOD_METRICS)]
        for name in detection_sets(result)
        if name != ALL_CORRUPTIONS
    ]
    return ["set", *map(title_of, OOD_METRICS)], rows


def comparison_table(comparison: Comparison, score: str | None = None) -> Cells:
    """Return the differences of predictions, and of AUROCs of one score or all, between two runs."""
    verdicts = {"first": comparison.first, "second": comparison.second, "": "–"}
    whole = [one for one in comparison.differences if one.member is one.severity is one.label is None]
    shown = [one for one in whole if one.score is None or (one.metric == "auroc" and score in (None, one.score))]
    rows = [
        [
            title_of(one.metric) + (f" of {title_of(one.score)}" if one.score else ""),
            _name_of_set(one.set),
            short(one.first),
            short(one.second),
            f"{_signed(one.value)} [{_signed(one.low)}, {_signed(one.high)}]",
            verdicts[one.better],
        ]
        for one in shown
        if one.metric not in UNDIRECTED
    ]
    return ["number", "set", comparison.first, comparison.second, "difference", "clearly better"], rows


def severities(result: Evaluation) -> list[int]:
    """Return the severities that were evaluated."""
    return sorted({number.severity for number in result.numbers if number.severity is not None})


def as_text(result: Evaluation) -> str:
    """Return the main tables of an evaluation as text."""
    members = f"{result.num_members} member" + ("s" if result.num_members > 1 else "")
    sizes = ", ".join(f"{part.name} {part.size}" for part in result.sets)
    intervals = "; in brackets: 95 % intervals" if result.bootstrap else ""
    parts = [f"{result.name}: {members}; inputs: {sizes}{intervals}", text_table(*prediction_table([result]))]
    if detection_sets(result):
        parts.append(text_table(*detection_table(result)))
    if severities(result):
        score = "total_entropy" if "total_entropy" in result.score_names else result.score_names[0]
        parts.append(text_table(*severity_table(result, score)))
    return "\n\n".join(parts)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns and rows as aligned text."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([texts[0], "  ".join("-" * width for width in widths), *texts[1:]])


def _name_of_set(name: str) -> str:
    return "mean over corruptions" if name == ALL_CORRUPTIONS else name


def _name_of_group(result: Evaluation, name: str) -> str:
    if name not in result.groups:
        return _name_of_set(name)
    size = len(result.groups[name])
    return f"{name} ({f'mean of {size}' if size > 1 else '1 set'})"


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + short(value)
