"""`dissensus train`: a recipe in, a run's folder out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dissensus.commands.options import AllowImport, say

if TYPE_CHECKING:
    from dissensus.recipes import Recipe
    from dissensus.training import Run


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A recipe in TOML, or the folder of a run to go on with.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for the run.", show_default="runs/RECIPE"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="TABLE.KEY=VALUE", help="Change a setting of the recipe; may be repeated."
        ),
    ] = None,
    allow_import: AllowImport = False,
) -> None:
    """Train an ensemble as a recipe says.

    Writes the resolved recipe, checkpoints, history.csv and the trained ensemble into the run's folder.
    """
    from dissensus.recipes import Recipe
    from dissensus.training import DivergedError

    if recipe.is_dir():
        output, recipe = output or recipe, recipe / "recipe.toml"
    folder = output or Path("runs") / recipe.stem
    described = Recipe.read(recipe, change or ())
    try:
        run = described.train(folder, resume=resume, allow_import=allow_import)
    except DivergedError as problem:
        raise ValueError(str(problem)) from None
    except KeyboardInterrupt:
        say(f"\nInterrupted. Go on with: dissensus train {folder} --resume")
        raise typer.Exit(130) from None
    typer.echo(_summary(run, described))
    typer.echo(f"Run: {folder}\nNext: dissensus evaluate {folder}")


def _summary(run: "Run", recipe: "Recipe") -> str:
    lines = [
        f"Trained {run.members.num_members} members for {run.epoch} epochs ({run.step} steps) in {run.seconds:.1f} s"
        + (", stopped early." if run.stopped_early else ".")
    ]
    if run.dropped:
        lines.append(
            f"Dropped because their loss was not finite: {', '.join(f'member {m}' for m in run.dropped)}."
        )
    columns = run.history.columns
    if "ensemble_loss" in columns:
        steps = list(dict.fromkeys(row["step"] for row in run.history))
        at = steps.index(run.best_step) if run.best_step in steps else -1
        shown = {
            "accuracy": ("ensemble_accuracy", "validation_accuracy"),
            recipe.likelihood.name: ("ensemble_loss", "validation_loss"),
        }
        numbers = [
            f"{name} {run.history.by_epoch(whole)[at]:.4f} (members alone {run.history.by_epoch(one)[at]:.4f})"
            for name, (whole, one) in shown.items()
            if whole in columns
        ]
        kept = "last" if run.best_step is None else "best"
        scaled = recipe.likelihood.kind != "classes" and recipe.data.standardise_target
        lines.append(
            f"Validation, {kept} check: {', '.join(numbers)}{', of standardised targets' if scaled else ''}."
        )
    return "\n".join(lines)
