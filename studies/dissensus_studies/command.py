"""The command `dissensus study`."""

from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the command to a command line."""
    app.command()(study)


def _option(words: str, **rest: Any) -> Any:
    return typer.Option(help=words, show_default=False, **rest)


Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Which study; leave it out to list them.", show_default=False)
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder for the results.", show_default="runs/NAME")
]
_BACKBONE = (
    "A pretrained network: a function of an importable module that returns two networks, images to features and "
    "features to logits."
)


def study(
    ctx: typer.Context,
    name: Name = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short version, to see that it runs.")] = False,
    seed: Annotated[int, typer.Option(help="Decides everything that is random.")] = 0,
    data: Annotated[Path | None, _option("Folder with the real data, for studies that need it.", metavar="DIR")] = None,
    epochs: Annotated[int | None, _option("Train so long instead of as long as the study does.", min=1)] = None,
    minutes: Annotated[
        float | None, _option("Begin no further part after this time; what is done is kept.", min=0)
    ] = None,
    limit: Annotated[int | None, _option("Use at most so many training images.", min=1)] = None,
    arms: Annotated[
        str | None, _option("Run only these parts: names or their beginnings, with commas between.")
    ] = None,
    known: Annotated[str | None, _option("Which of the folder's image sets to train on.", metavar="NAME")] = None,
    setting: Annotated[str | None, _option("Another setting of the study, such as pretrained.", metavar="NAME")] = None,
    backbone: Annotated[str | None, _option(_BACKBONE, metavar="MODULE:FUNCTION")] = None,
    seconds: Annotated[float | None, _option("Train each part for about so many seconds.", min=0)] = None,
    network: Annotated[str | None, _option("Ensembles of these networks: small, for a CPU, or resnet18.")] = None,
    repeats: Annotated[int | None, _option("Run so many seeds instead of the study's.", min=1)] = None,
) -> None:
    """Run an experiment by name, or list the experiments there are.

    Writes results.json, the figures and report.html. Options that a study does not have are refused.
    """
    from dissensus_studies import STUDIES

    if name is None:
        width = max(map(len, STUDIES))
        for entry in STUDIES.values():
            typer.echo(f"{entry.name:<{width}}  {entry.summary}")
        return
    if name not in STUDIES:
        raise ValueError(f"There is no study {name!r}; there are {', '.join(STUDIES)}.")
    own = ("name", "output", "quick", "seed", "data")
    options = {option: value for option, value in ctx.params.items() if value is not None and option not in own}
    if arms is not None:
        options["arms"] = [part.strip() for part in arms.split(",")]
    page = STUDIES[name].run(output or Path("runs") / name, quick=quick, seed=seed, data=data, **options)
    typer.echo(f"Page with pictures: {page}")
