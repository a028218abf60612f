"""Evaluations in, one self-contained HTML page out."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from dissensus._signatures import checked
from dissensus.evaluation import Evaluation, Number
from dissensus.evaluation.results import ID
from dissensus.evaluation.tables import short, title_of, title_with_unit
from dissensus.html import Headline, Section, write_page
from dissensus.reporting.diagnosis import Runs
from dissensus.reporting.sections import TASKS, best_score, mean_auroc, sections_of, told_apart

__all__ = ["report"]


@checked
def report(
    results: Evaluation | Sequence[Evaluation],
    path: Path | str,
    *,
    title: str | None = None,
    score: str | None = None,
    first: Sequence[Section] = (),
) -> Path:
    """Write one HTML page on one evaluation, or on several side by side.

    The page needs no network and no files beside it, and says of every table and figure how to read it. It has a
    section for everything that was measured, and none for what was not.

    Args:
        results: What `evaluate` returned; several must be of one task. The first is what others are compared with.
        path: The file to write.
        title: Title of the page; by default what is predicted, and from what data.
        score: The uncertainty score of curves; total entropy (or variance) by default. Tables have all.
        first: Sections of one's own that come before all others.

    Returns:
        The path of the page.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from dissensus import DeepEnsemble
        >>> from dissensus.evaluation import evaluate
        >>> ens = DeepEnsemble(lambda: torch.nn.Linear(2, 3), num_members=4)
        >>> result = evaluate(ens, (torch.randn(50, 2), torch.randint(3, (50,))), bootstrap=50)
        >>> page = report(result, Path(tempfile.mkdtemp()) / "report.html", title="A small test")
        >>> "A small test" in page.read_text(encoding="utf-8")
        True
    """
    runs = _named_apart([results] if isinstance(results, Evaluation) else results)
    if not runs:
        raise ValueError("`results` must be what `evaluate` returned, or several of them; got none.")
    tasks = sorted({run.task for run in runs})
    if len(tasks) > 1:
        raise ValueError(f"A page shows evaluations of one task; got {', '.join(tasks)}. Write one page for each.")
    score, several = _main_score(runs, score), len(runs) > 1
    return write_page(
        path,
        title or _title(runs),
        [*first, *sections_of(runs, score)],
        " ".join(_sentence(run, score, several=several) for run in runs),
        subtitle=_subtitle(runs),
        headlines=_headlines(runs, score),
        remarks=[f"{run.name}: {remark}" if several else remark for run in runs for remark in run.remarks],
    )


def _named_apart(runs: Sequence[Evaluation]) -> list[Evaluation]:
    """Number runs whose name was there before."""
    named: list[Evaluation] = []
    for run in runs:
        taken = {other.name for other in named}
        names = (run.name if number == 1 else f"{run.name} ({number})" for number in range(1, len(runs) + 1))
        named.append(replace(run, name=next(name for name in names if name not in taken)))
    return named


def _main_score(runs: Sequence[Evaluation], asked: str | None) -> str:
    shared = [name for name in runs[0].score_names if all(name in run.score_names for run in runs)]
    if not shared:
        raise ValueError("Runs on one page must have a score in common. Evaluate them with one set of scores.")
    if asked is not None and asked not in shared:
        raise ValueError(f"`score` must be one that every run has, {', '.join(shared)}; got {asked!r}.")
    usual = TASKS[runs[0].task].score
    return asked or (usual if usual in shared else shared[0])


def _title(runs: Runs) -> str:
    """Return what is predicted from what data, as far as the runs know it."""
    first = runs[0]
    if len(runs) > 1:
        return f"{len(runs)} runs side by side" + (f" on {first.data}" if first.data else "")
    if not first.data:
        return f"{first.name} on {_size(first)} known inputs"
    return f"{first.target}, predicted from {first.data}" if first.target else f"Predictions on {first.data}"


def _subtitle(runs: Runs) -> str:
    """Return when the runs were measured, and on how much."""
    dates = [date.fromisoformat(text) for text in sorted({run.date for run in runs if run.date})]
    days = " to ".join(f"{day.day} {day:%B %Y}" for day in dates[:1] + dates[1:][-1:])
    names = ", ".join(run.name for run in runs[:4]) + (", …" if len(runs) > 4 else "")
    sizes = ", ".join(f"{part.size} {'known' if part.name == ID else part.name}" for part in runs[0].sets)
    return " · ".join([*filter(None, [days]), names, f"inputs: {sizes}"])


def _headlines(runs: Runs, score: str) -> list[Headline]:
    """Return the numbers that a page begins with: quality, and how well the default and the best score do."""
    if len(runs) > 1:
        metric = TASKS[runs[0].task].headlines[0]
        return [
            Headline(
                run.name, _value(run.number(metric)), ", ".join(filter(None, (title_of(metric), _between(run, metric))))
            )
            for run in runs[:8]
        ]
    (run,) = runs
    shown = ("accuracy", "mean_iou") if _is_dense(run) else TASKS[run.task].headlines
    found = [Headline(title_with_unit(one, run.target), _value(run.number(one)), _between(run, one)) for one in shown]
    if told_apart(run):
        best = best_score(run)
        roles = {score: "default and best score"} if score == best else {score: "default score", best: "best score"}
        for name, role in roles.items():
            note = f"{title_of(name)}, the {role}"
            found.append(Headline("AUROC, known against unknown", f"{mean_auroc(run, name):.3f}", note))
    return found


def _value(number: Number) -> str:
    """Return a number as people say it: shares in percent, errors in the target's units."""
    shares = ("accuracy", "label_accuracy", "ece", "smooth_ece", "coverage_90")
    return _percent(number.value) if number.metric in shares else short(number.value)


def _between(run: Evaluation, metric: str) -> str:
    number = run.number(metric)
    ends = [replace(number, value=end) for end in (number.low, number.high) if end is not None]
    return " to ".join(_value(end) for end in ends)


def _is_dense(run: Evaluation) -> bool:
    """Whether metrics are those of positions (pixels, tokens), of which there is no smooth error: it would need them all at once."""
    return any(number.metric == "mean_iou" for number in run.numbers)


def _sentence(run: Evaluation, score: str, *, several: bool) -> str:
    """Return the main finding of a run."""
    who = "A single network" if run.num_members == 1 else f"An ensemble of {run.num_members} members"
    who += f" ({run.name})" if several else ""
    told = [f"{run.number('auroc', name, score=score).value:.3f} ({name})" for name in told_apart(run)]
    if not told:
        return f"{who} {_quality(run)}."
    aurocs = f"by {title_of(score)} it tells unknown inputs from known ones with AUROC {', '.join(told)}"
    text, best = f"{who} {_quality(run)}; {aurocs}.", best_score(run)
    if several:
        return text
    if best == score:
        return f"{text} None of the {len(run.score_names)} scores does better."
    return (
        f"{text} The best of {len(run.score_names)} scores on these very inputs, so by a choice that flatters it, is "
        f"{title_of(best)}: {mean_auroc(run, best):.3f} against {mean_auroc(run, score):.3f} on average."
    )


def _quality(run: Evaluation) -> str:
    """Return how good a run's predictions on known inputs are."""
    size = f"{_size(run)} known inputs"
    if run.task == "own":
        return f"has a loss ({run.loss}) of {short(run.number('loss').value)} on {size}"
    if run.task not in ("labels", "classification"):
        what = f"{run.target} of {size}" if run.target else size
        return f"predicts {what} with an error (RMSE) of {short(run.number('rmse').value)}"
    metric, gap = ("accuracy" if run.task == "classification" else "label_accuracy"), "ece"
    if run.task == "classification" and not _is_dense(run):
        gap = "smooth_ece"
    right, off = (_percent(run.number(name).value) for name in (metric, gap))
    trust = f"and its confidence is off by {off} on average"
    if run.task == "labels":
        return f"gives {right} of the answers on {run.num_outputs} labels of {size} right, {trust}"
    return f"is right on {right} of {'positions of ' if _is_dense(run) else ''}{size}, {trust}"


def _size(run: Evaluation) -> int:
    return next(part.size for part in run.sets if part.name == ID)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"
