"""The command `dissensus study`."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to a command line."""
    app.command()(study)


def study(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which study; leave it out to list them.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for the results.", show_default="runs/NAME"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short version, to see that it runs.")] = False,
    seed: Annotated[int, typer.Option(help="Decides everything that is random.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with the real data, for studies that need it.", show_default=False),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Train so long instead of as long as the study does.", show_default=False)
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Begin no further part after this time; what is done is kept.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most so many training images.", show_default=False)
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(help="Run only these parts: names or their beginnings, with commas between.", show_default=False),
    ] = None,
    known: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which of the folder's image sets to train on.", show_default=False),
    ] = None,
    setting: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another setting of the study, such as pretrained.", show_default=False),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A pretrained network: a function of an importable module that returns two networks, images to features and "
            "features to logits.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Train each part for about so many seconds.", show_default=False)
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Run so many seeds instead of the study's.", show_default=False)
    ] = None,
) -> None:
    """Run an experiment by name, or list the experiments there are.

    Writes results.json, the figures and report.html. Options that a study does not have are refused.
    """
    from dissensus_studies import STUDIES

    if name is None:
        width = max(map(len, STUDIES), default=0)
        for entry in STUDIES.values():
            typer.echo(f"{entry.name:<{width}}  {entry.summary}")
        return
    if name not in STUDIES:
        raise ValueError(f"There is no study {name!r}; there are {', '.join(STUDIES)}.")
    further = {
        "epochs": epochs,
        "minutes": minutes,
        "limit": limit,
        "arms": None if arms is None else [part.strip() for part in arms.split(",")],
        "known": known,
        "setting": setting,
        "backbone": backbone,
        "seconds": seconds,
        "repeats": repeats,
    }
    options = {option: value for option, value in further.items() if value is not None}
    page = STUDIES[name].run(output or Path("runs") / name, quick=quick, seed=seed, data=data, **options)
    typer.echo(f"Page with pictures: {page}")
