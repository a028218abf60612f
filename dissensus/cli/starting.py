"""`dissensus init`: data in, a recipe to begin with out."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def init(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A .csv, .parquet or .npz file, or a folder of images.")],
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column or array to predict.", show_default="the last column of a table"),
    ] = None,
) -> None:
    """Look at data, say what is in it, and write a recipe for it.

    Says how each column is read, what is missing, and what looks like an identifier or gives the target away. Writes the recipe
    into the current folder under the name of the data, and never over a file that is there. Asks for the target only on a
    terminal.
    """
    from dissensus.data.files import TABLE_ENDINGS
    from dissensus.recipes.starting import look_at

    recipe = Path(f"{data.stem}.toml")
    if recipe.exists():
        raise ValueError(f"{recipe} is already there. Rename or delete it, or call init in another folder.")
    if not data.exists():
        raise ValueError(f"There is no file or folder {data}.")
    if target is None and data.suffix.lower() in TABLE_ENDINGS and sys.stdin.isatty():
        target = _ask(data)
    found, text = look_at(data, target)
    typer.echo(found)
    with open(recipe, "x", encoding="utf-8") as file:
        file.write(text)
    typer.echo(f"\nRecipe: {recipe}\nNext: dissensus train {recipe}")


def _ask(data: Path) -> str:
    """Ask which column is the target."""
    from dissensus.data.frames import read_table

    names = list(read_table(data)[0].columns)
    answer = typer.prompt(f"Columns: {', '.join(names)}\nWhich one is to be predicted?", default=names[-1])
    return str(answer).strip()
