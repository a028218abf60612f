"""`dissensus init` and `train`: data in, a recipe to begin with out; a recipe in, a run's folder out."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dissensus.cli.options import UNDERTRAINED, AllowImport, is_undertrained, say

if TYPE_CHECKING:
    from dissensus.recipes import LoadedRun, Recipe
    from dissensus.training import Run


def init(
    data: Annotated[Path, Argument(metavar="DATA", help="A .csv, .parquet or .npz file, or a folder of images.")],
    target: Annotated[
        str | None,
        Option(metavar="NAME", help="Column or array to predict.", show_default="the last column of a table"),
    ] = None,
) -> None:
    """Look at data, say what is in it, and write a recipe for it.

    Says how each column is read, what is missing, and what looks like an identifier or gives the target away. Writes the recipe
    into the current folder under the name of the data, and never over a file that is there. Asks for the target only on a
    terminal.
    """
    from dissensus.data.files import TABLE_ENDINGS
    from dissensus.data.frames import read_table
    from dissensus.recipes.starting import look_at

    recipe = Path(f"{data.stem}.toml")
    if recipe.exists():
        raise ValueError(f"{recipe} is already there. Rename or delete it, or call init in another folder.")
    if not data.exists():
        raise ValueError(f"There is no file or folder {data}.")
    if target is None and data.suffix.lower() in TABLE_ENDINGS and sys.stdin.isatty():
        names = list(read_table(data)[0].columns)
        question = f"Columns: {', '.join(names)}\nWhich one is to be predicted?"
        target = str(typer.prompt(question, default=names[-1])).strip()
    found, text = look_at(data, target)
    typer.echo(found)
    with open(recipe, "x", encoding="utf-8") as file:
        file.write(text)
    typer.echo(f"\nRecipe: {recipe}\nNext: dissensus train {recipe}")


def train(
    recipe: Annotated[Path, Argument(metavar="RECIPE", help="A recipe in TOML, or with --resume a run's folder.")],
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="DIR", help="Folder for the run.", show_default="runs/RECIPE")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with a run that was interrupted.")] = False,
    change: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="TABLE.KEY=VALUE",
            help="Change a setting of the recipe, for all arms of a sweep; may be repeated.",
        ),
    ] = None,
    jobs: Annotated[int, Option(min=1, help=r"How many arms of a \[sweep] run at a time.")] = 1,
    ray: Annotated[
        bool, Option("--ray", help=r"Run the arms of a \[sweep] on a Ray cluster, those of a grid all at once.")
    ] = False,
    one: Annotated[bool, Option("--one", hidden=True, help="Train one run whatever [sweep] says.")] = False,
    allow_import: AllowImport = False,
    mesh: Annotated[
        str | None,
        Option(
            metavar="MxD",
            help="Under torchrun: over how many processes members and batches are spread.",
            show_default="all on members",
        ),
    ] = None,
) -> None:
    r"""Train an ensemble as a recipe says.

    Writes the resolved recipe, checkpoints, history.csv and the trained ensemble into the run's folder. Under torchrun all
    processes train together: torchrun --nproc-per-node 4 -m dissensus train RECIPE.toml. A recipe with a \[sweep] is
    trained once for each combination of values, or for what a search tries, each in a folder of its own; what is finished
    is not trained again.
    """
    from dissensus.recipes.sweeps import run_sweep, sweep_of

    changes = change or []
    folder = output or (recipe if recipe.is_dir() else Path("runs") / recipe.stem)
    sweep = None if one else sweep_of(recipe)
    if sweep is None:
        if ray or jobs > 1:
            raise ValueError(f"--jobs and --ray are for the arms of a [sweep], and {recipe} has none. Leave them out.")
        _train_one(recipe, folder, changes, resume, allow_import, mesh)
        return
    if mesh is not None:
        raise ValueError(
            "--mesh spreads one run under torchrun; arms of a [sweep] are runs of their own. Leave it out."
        )
    options = ["--allow-import"] * allow_import
    run_sweep(recipe, folder, sweep, jobs=jobs, changes=changes, options=options, say=typer.echo, ray=ray)
    typer.echo(f"Runs: {folder}\nNext: dissensus report {folder} -o report.html")


def _train_one(
    recipe: Path, folder: Path, changes: list[str], resume: bool, allow_import: bool, mesh: str | None
) -> None:
    from dissensus.recipes import Recipe, load_run
    from dissensus.recipes.recipe import RECIPE
    from dissensus.training import DivergedError
    from dissensus.training.mesh import together

    described = Recipe.read(recipe, changes)
    try:
        with together(mesh) as shape:
            run = described.train(folder, resume=resume, allow_import=allow_import, mesh=shape)
    except DivergedError as problem:
        raise ValueError(str(problem)) from None
    except KeyboardInterrupt:
        begun = (folder / RECIPE).exists()
        advice = f"Go on with: dissensus train {folder} --resume" if begun else "Nothing was written yet."
        say(f"\nInterrupted. {advice}")
        raise typer.Exit(130) from None
    if os.environ.get("RANK", "0") == "0":
        typer.echo(_summary(run, load_run(folder, allow_import=allow_import)))
        typer.echo(f"Run: {folder}\nNext: dissensus report {folder} -o report.html")


def _summary(run: "Run", trained: "LoadedRun") -> str:
    columns = trained.preprocessing.columns
    lines = [] if columns is None else [f"{columns.explain()}\n"]
    lines.append(
        f"Trained {run.members.num_members} members for {run.epoch} epochs ({run.step} steps) in {run.seconds:.1f} s"
        + (", stopped early." if run.stopped_early else ".")
    )
    if run.dropped:
        lines.append(f"Dropped because their loss was not finite: {', '.join(f'member {m}' for m in run.dropped)}.")
    if "ensemble_loss" in run.history.columns:
        lines.append(_validation(run, trained.recipe))
    if is_undertrained(run.history):
        lines.append(f"{UNDERTRAINED} Train longer: --set training.epochs={2 * run.epoch}")
    return "\n".join(lines)


def _validation(run: "Run", recipe: "Recipe") -> str:
    """Return how the ensemble, and its members alone, did on the validation rows when its weights were kept."""
    from dissensus.tracking import latest

    found, likelihood = latest(run, run.best_step), recipe.likelihood
    numbers = [
        f"{name} {found[f'ensemble_{kind}']:.4f} (members alone {found[f'validation_{kind}']:.4f})"
        for name, kind in {"accuracy": "accuracy", likelihood.name: "loss"}.items()
        if f"ensemble_{kind}" in found
    ]
    kept = "last" if run.best_step is None else "best"
    scaled = likelihood.kind != "classes" and recipe.data.standardise_target
    return f"Validation, {kept} check: {', '.join(numbers)}{', of standardised targets' if scaled else ''}."
