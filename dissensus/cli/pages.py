"""`dissensus report`: evaluated runs in, one page out."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dissensus.cli.measuring import evaluate_run
from dissensus.cli.options import DIAGNOSIS, EVALUATION, AllowImport, Device, load_trained, say
from dissensus.cli.sets import sets_of

if TYPE_CHECKING:
    from dissensus.evaluation import Evaluation


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or evaluations.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Write one HTML page about runs, side by side if there are several.

    A run that was not evaluated yet is evaluated first, on the rows that its recipe held out.
    """
    from dissensus.evaluation import Evaluation
    from dissensus.recipes.sweeps import arms_in
    from dissensus.reporting import report as write_report

    results = []
    for run in (arm for folder in runs for arm in arms_in(folder)):
        path = run if run.is_file() else run / EVALUATION
        if not _is_current(path, run):
            _evaluate(run, device, allow_import)
        results.append(_with_diagnosis(Evaluation.load(path), run))
    page = write_report(results, output)
    typer.echo(f"Page with pictures: {page}")


def _is_current(path: Path, run: Path) -> bool:
    """Whether there is an evaluation that is not older than the run's ensemble."""
    if not path.exists():
        if not (run / "recipe.toml").exists():
            raise ValueError(
                f"{run} is neither a run's folder nor an evaluation. Name folders that dissensus train wrote."
            )
        return False
    return path.stat().st_mtime >= _written(run, "ensemble")


def _written(run: Path, kind: str) -> float:
    """Return when the newest checkpoint of a kind was written; 0 where there is none."""
    return max((path.stat().st_mtime for path in run.glob(f"{kind}-*.safetensors")), default=0.0)


def _evaluate(run: Path, device: str, allow_import: bool) -> None:
    """Evaluate a run on the rows that its recipe held out, and put the result into its folder."""
    loaded = load_trained(run, device, allow_import)
    say(f"{run} has not been evaluated since it was trained; this is done first.")
    evaluate_run(loaded, run, sets_of(loaded, run, None, (), (), ())).save(run / EVALUATION)


def _with_diagnosis(result: "Evaluation", run: Path) -> "Evaluation":
    """Put what `dissensus diagnose` found in a run's folder in place of what the evaluation found by the way.

    It knows the training data and the history, too. One that is older than the run's last checkpoint is of other members.
    """
    from dissensus.diagnostics import Finding

    found = run / DIAGNOSIS
    if not found.exists() or found.stat().st_mtime < _written(run, "last"):
        return result
    return replace(result, diagnosis=Finding.load(found))
