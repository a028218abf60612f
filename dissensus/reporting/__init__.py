"""Evaluations in, one self-contained HTML page out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dissensus._signatures import checked
from dissensus.evaluation import Evaluation
from dissensus.reporting.sections import title_of_page, write_report

__all__ = ["report"]

_MAIN_SCORES = {
    "classification": "total_entropy",
    "density": "total_variance",
    "points": "knowledge_variance",
    "labels": "total_entropy",
    "own": "knowledge_variance",
}


@checked
def report(
    results: Evaluation | Sequence[Evaluation], path: Path | str, *, title: str | None = None, score: str | None = None
) -> Path:
    """Write one HTML page on one evaluation, or on several side by side.

    The page needs no network and no files beside it, and says of every table and figure how to read it. It has a
    section for everything that was measured, and none for what was not.

    Args:
        results: What `evaluate` returned; several must be of one task. The first is what others are compared with.
        path: The file to write.
        title: Title of the page; by default what is predicted, and from what data.
        score: The uncertainty score of curves and trade-offs; total entropy (or variance) by default. Tables have all.

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
    given = [results] if isinstance(results, Evaluation) else list(results)
    if not given or not all(isinstance(result, Evaluation) for result in given):
        kinds = ", ".join(type(result).__name__ for result in given) or "none"
        raise ValueError(
            f"`results` must be what `evaluate` returned, or several of them; got {kinds}. `ds.Evaluation.load` reads files."
        )
    runs = _named_apart(given)
    tasks = sorted({run.task for run in runs})
    if len(tasks) > 1:
        raise ValueError(f"A page shows evaluations of one task; got {', '.join(tasks)}. Write one page for each.")
    return write_report(path, title or title_of_page(runs), runs, _main_score(runs, score))


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
    if asked is not None and asked not in shared:
        raise ValueError(
            f"`score` must be one that every run has, {', '.join(shared) or 'of which there is none'}; got {asked!r}."
        )
    if not shared:
        raise ValueError(
            "Runs on one page must have a score in common; these have none. Evaluate them with one set of scores."
        )
    usual = _MAIN_SCORES[runs[0].task]
    return asked or (usual if usual in shared else shared[0])
