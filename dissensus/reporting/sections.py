"""Evaluations in, the page of the report out: its head, and every section that there is data for."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from itertools import chain
from pathlib import Path

import torch

from dissensus.evaluation import Evaluation, Number
from dissensus.evaluation.results import ID
from dissensus.evaluation.tables import short, title_of, title_with_unit
from dissensus.html import Headline, Section, Text, write_page
from dissensus.reporting.alarm import alarm
from dissensus.reporting.diagnosis import collusion
from dissensus.reporting.doubts import (
    best_score,
    decomposition,
    detection,
    disputed_inputs,
    mean_auroc,
    single_inputs,
    told_apart,
    under_corruption,
)
from dissensus.reporting.quality import (
    Runs,
    as_table,
    calibration,
    differences,
    labels,
    main_numbers,
    members,
    trade_offs,
)


def settings(runs: Runs, score: str) -> Section:
    """How the page was made: what decides the numbers on it, run by run."""
    own = [_settings_of(run) for run in runs]
    rows = [[name, *(one.get(name, "–") for one in own)] for name in dict.fromkeys(chain(*own))]
    versions = f"Python {platform.python_version()} and PyTorch {torch.__version__}"
    return Section(
        "How this page was made",
        Text(
            f"By dissensus, with {versions}. Every input was predicted once; the seed decides resamples and corruptions."
        ),
        as_table((["setting", *(run.name for run in runs)], rows), "Settings"),
    )


def _settings_of(run: Evaluation) -> dict[str, str]:
    return {
        "members": str(run.num_members),
        "weights": ", ".join(f"{weight:.3g}" for weight in run.weights) or "equal",
        "loss": run.loss,
        "outputs": str(run.num_outputs),
        "resamples": str(run.bootstrap),
        "seed": str(run.seed),
        **{f"inputs of {part.name}": str(part.size) for part in run.sets},
    }


SECTIONS: tuple[Callable[[Runs, str], Section | None], ...] = (
    main_numbers,
    differences,
    labels,
    calibration,
    detection,
    under_corruption,
    decomposition,
    alarm,
    members,
    collusion,
    disputed_inputs,
    single_inputs,
    trade_offs,
    settings,
)


def write_report(path: Path | str, title: str, runs: Runs, score: str, *, first: Sequence[Section] = ()) -> Path:
    """Write the page: sections of the caller's, then every section that there is data for."""
    found = [section for make in SECTIONS if (section := make(runs, score)) is not None]
    several = len(runs) > 1
    return write_page(
        path,
        title,
        [*first, *found],
        " ".join(_sentence(run, score, several=several) for run in runs),
        subtitle=_subtitle(runs),
        headlines=_headlines(runs, score),
        remarks=[f"{run.name}: {remark}" if several else remark for run in runs for remark in run.remarks],
    )


def title_of_page(runs: Runs) -> str:
    """Return what is predicted from what data, as far as the runs know it."""
    first = runs[0]
    what = f"{first.target}, predicted from {first.data}" if first.target else f"Predictions on {first.data}"
    if len(runs) > 1:
        return f"{len(runs)} runs side by side" + (f" on {first.data}" if first.data else "")
    return what if first.data else f"{first.name} on {_size(first)} known inputs"


def _subtitle(runs: Runs) -> str:
    """Return when the runs were measured, and on how much."""
    dates = sorted({run.date for run in runs if run.date})
    days = [f"{(day := date.fromisoformat(text)).day} {day:%B %Y}" for text in (dates[:1] + dates[1:][-1:])]
    names = ", ".join(run.name for run in runs[:4]) + (", …" if len(runs) > 4 else "")
    sizes = [f"{part.size} {'known' if part.name == ID else part.name}" for part in runs[0].sets]
    return " · ".join([*([" to ".join(days)] if days else []), names, f"inputs: {', '.join(sizes)}"])


# What a page begins with.
_QUALITY = {
    "classification": ("accuracy", "smooth_ece"),
    "labels": ("label_accuracy", "ece"),
    "density": ("rmse", "coverage_90"),
    "points": ("rmse", "mae"),
    "own": ("loss",),
}


def _headlines(runs: Runs, score: str) -> list[Headline]:
    """Return the numbers that a page begins with: quality, and how well the default and the best score do."""
    if len(runs) > 1:
        metric = _QUALITY[runs[0].task][0]
        return [
            Headline(run.name, _value(run.number(metric), run), f"{title_of(metric)}{_between(run, metric)}")
            for run in runs[:8]
        ]
    (run,) = runs
    shown = ("accuracy", "mean_iou") if _is_dense(run) else _QUALITY[run.task]
    found = [
        Headline(title_with_unit(metric, run.target), _value(run.number(metric), run), _between(run, metric)[2:])
        for metric in shown
    ]
    if told_apart(run):
        best = best_score(run)
        for name, role in {score: "default score", best: "best score"}.items():
            role = "default and best score" if score == best else role
            note = f"{title_of(name)}, the {role}"
            found.append(Headline("AUROC, known against unknown", f"{mean_auroc(run, name):.3f}", note))
    return found


def _value(number: Number, run: Evaluation) -> str:
    """Return a number as people say it: shares in percent, errors in the target's units."""
    shares = ("accuracy", "label_accuracy", "ece", "smooth_ece", "coverage_90")
    return _percent(number.value) if number.metric in shares else short(number.value)


def _between(run: Evaluation, metric: str) -> str:
    number = run.number(metric)
    if number.low is None or number.high is None:
        return ""
    ends = replace(number, value=number.low), replace(number, value=number.high)
    return f", {' to '.join(_value(end, run) for end in ends)}"


def _is_dense(run: Evaluation) -> bool:
    """Whether metrics are those of positions (pixels, tokens), of which there is no smooth error: it would need them all at once."""
    return any(number.metric == "mean_iou" for number in run.numbers)


def _sentence(run: Evaluation, score: str, *, several: bool) -> str:
    """Return the main finding of a run."""
    who = "A single network" if run.num_members == 1 else f"An ensemble of {run.num_members} members"
    who += f" ({run.name})" if several else ""
    text = f"{who} {_quality(run)}"
    told = [f"{run.number('auroc', name, score=score).value:.3f} ({name})" for name in told_apart(run)]
    if not told:
        return text + "."
    text += f"; by {title_of(score)} it tells unknown inputs from known ones with AUROC {', '.join(told)}."
    if several:
        return text
    best = best_score(run)
    if best == score:
        return f"{text} None of the {len(run.score_names)} scores does better."
    return (
        f"{text} The best of {len(run.score_names)} scores on these very inputs, so by a choice that flatters it, is "
        f"{title_of(best)}: {mean_auroc(run, best):.3f} against {mean_auroc(run, score):.3f} on average."
    )


def _quality(run: Evaluation) -> str:
    """Return how good a run's predictions on known inputs are."""
    size = _size(run)
    if run.task == "own":
        return f"has a loss ({run.loss}) of {short(run.number('loss').value)} on {size} known inputs"
    if run.task == "labels":
        right, off = (_percent(run.number(metric).value) for metric in ("label_accuracy", "ece"))
        return (
            f"gives {right} of the answers on {run.num_outputs} labels of {size} known inputs right, and its confidence is off by {off} "
            "on average"
        )
    if run.task != "classification":
        what = f"{run.target} of {size}" if run.target else str(size)
        return f"predicts {what} known inputs with an error (RMSE) of {short(run.number('rmse').value)}"
    what, gap = ("positions of ", "ece") if _is_dense(run) else ("", "smooth_ece")
    accuracy, off = (_percent(run.number(metric).value) for metric in ("accuracy", gap))
    return f"is right on {accuracy} of {what}{size} known inputs, and its confidence is off by {off} on average"


def _size(run: Evaluation) -> int:
    return next(part.size for part in run.sets if part.name == ID)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"
