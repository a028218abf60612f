"""Arguments that commands share, the run they are about, and what is said beside results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from dissensus.recipes import LoadedRun
    from dissensus.training.history import History

UNDERTRAINED = "Probably undertrained: the loss was still falling when training ended."

RunFolder = Annotated[Path, Argument(metavar="RUN", help="Folder of a trained run.")]
AllowImport = Annotated[
    bool, Option("--allow-import", help="Let the recipe import its network from a module; runs that module's code.")
]
Device = Annotated[str, Option(help="Where to run: auto, cpu, cuda, cuda:1, ...")]
BatchSize = Annotated[int, Option(min=1, help="Inputs that go through the members at once.")]


def load_trained(folder: Path, device: str, allow_import: bool) -> "LoadedRun":
    """Read a trained run and put its ensemble on a device."""
    from dissensus.data.sources import device_named
    from dissensus.recipes import load_run

    run = load_run(folder, allow_import=allow_import)
    try:
        run.ensemble.to(device_named(device))
    except (ValueError, RuntimeError) as problem:
        raise ValueError(f"The device {device!r} cannot be used: {str(problem).splitlines()[0]}") from None
    return run


def note(name: str, *notes: str) -> None:
    """Tell the user what was assumed or changed about a set."""
    for note in notes:
        say(f"{name}: {note}")


def say(text: str) -> None:
    """Tell the user something that is not a result."""
    typer.echo(text, err=True)


def is_undertrained(history: "History") -> bool:
    """Whether the loss of a run, on its validation rows if it has such, was still falling when training ended."""
    from dissensus.training.history import still_falls

    curve = "ensemble_loss" if "ensemble_loss" in history.columns else "loss"
    return still_falls(history.by_epoch(curve))
