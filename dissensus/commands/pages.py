"""`dissensus report`: evaluated runs in, one page out."""

from pathlib import Path
from typing import Annotated

import typer

from dissensus.commands.options import EVALUATION


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
        results.append(Evaluation.load(path))
    page = write_report(results, output)
    typer.echo(f"Page with pictures: {page}")
