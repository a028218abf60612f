"""`dissensus report`: evaluated runs in, one page out."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dissensus.commands.options import DIAGNOSIS, EVALUATION

if TYPE_CHECKING:
    from dissensus.evaluation import Evaluation


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of evaluated runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about evaluated runs, side by side if there are several."""
    from dissensus.evaluation import Evaluation
    from dissensus.recipes.runs import RECIPE
    from dissensus.reporting import report as write_report

    results = []
    for run in runs:
        path = run if run.is_file() else run / EVALUATION
        if not path.exists():
            if not (run / RECIPE).exists():
                raise ValueError(
                    f"{run} is neither a run's folder nor an evaluation. Name folders that dissensus train wrote."
                )
            raise ValueError(f"{run} has not been evaluated yet. First run: dissensus evaluate {run}")
        results.append(_with_diagnosis(Evaluation.load(path), run))
    page = write_report(results, output)
    typer.echo(f"Page with pictures: {page}")


def _with_diagnosis(result: "Evaluation", run: Path) -> "Evaluation":
    """Put what `dissensus diagnose` found in a run's folder in place of what the evaluation found by the way.

    It knows the training data and the history, too. One that is older than the run's last checkpoint is of other members.
    """
    from dissensus.diagnostics import Finding

    found, trained = run / DIAGNOSIS, run / "last.json"
    if not found.exists() or (trained.exists() and found.stat().st_mtime < trained.stat().st_mtime):
        return result
    return replace(result, diagnosis=Finding.load(found))
