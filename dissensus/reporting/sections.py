"""Evaluations in, all sections of the report out; a section without data is left out."""

import platform
from collections.abc import Callable

import torch

from dissensus.evaluation import Evaluation
from dissensus.evaluation.results import ID
from dissensus.evaluation.tables import title_of
from dissensus.html import Section, Text
from dissensus.reporting.alarm import alarm
from dissensus.reporting.diagnosis import collusion
from dissensus.reporting.doubts import decomposition, detection, disputed_inputs, under_corruption
from dissensus.reporting.quality import (
    Runs,
    as_table,
    calibration,
    differences,
    main_numbers,
    members,
    trade_offs,
)


def all_sections(runs: Runs, score: str) -> list[Section]:
    """Return every section that there is data for."""
    makers: list[Callable[[Runs, str], Section | None]] = [
        main_numbers,
        differences,
        calibration,
        detection,
        under_corruption,
        decomposition,
        alarm,
        members,
        collusion,
        disputed_inputs,
        trade_offs,
        _settings,
    ]
    return [section for maker in makers if (section := maker(runs, score)) is not None]


def lead(runs: Runs, score: str) -> str:
    """Return the main finding of each run in a sentence, and what is to be kept in mind."""
    several = len(runs) > 1
    remarks = [f"{run.name}: {remark}" if several else remark for run in runs for remark in run.remarks]
    return " ".join([*(_sentence(run, score, several=several) for run in runs), *remarks])


def _sentence(run: Evaluation, score: str, *, several: bool) -> str:
    who = "A single network" if run.num_members == 1 else f"An ensemble of {run.num_members} members"
    who += f" ({run.name})" if several else ""
    size = next(part.size for part in run.sets if part.name == ID)
    if run.task == "classification":
        accuracy, gap = (_percent(run.number(metric).value) for metric in ("accuracy", "smooth_ece"))
        text = f"{who} is right on {accuracy} of {size} known inputs, and its confidence is off by {gap} on average"
    else:
        text = f"{who} predicts {size} known inputs with an error (RMSE) of {run.number('rmse').value:.3g}"
    told = [f"{run.number('auroc', name, score=score).value:.3f} ({name})" for name in _told_apart(run)]
    if not told:
        return text + "."
    return (
        f"{text}; by {title_of(score)} it tells unknown inputs from known ones with AUROC {', '.join(told)}."
    )


def _told_apart(run: Evaluation) -> list[str]:
    """Return groups of unknown sets, and the sets that are in none."""
    inside = {name for sets in run.groups.values() for name in sets}
    alone = [part.name for part in run.sets if part.kind == "ood" and part.name not in inside]
    return [*run.groups, *alone]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


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
        as_table(
            (columns, [[str(cell) if cell is not None else "–" for cell in row] for row in rows]), "Settings"
        ),
    )
