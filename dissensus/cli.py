"""The command line. A command imports what it needs when it runs, so that help and mistakes are answered soon."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dissensus.bench.command import register as register_bench
from dissensus.commands import register

# What is raised because of what a user gave or has installed, and not because of a mistake of ours.
_USER_ERRORS = (ValueError, OSError, ModuleNotFoundError)


class Commands(TyperGroup):
    """Commands whose users' errors end in one sentence and exit code 2, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Whoever read the output has seen enough.
            raise
        except _USER_ERRORS as error:
            typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Seed = Annotated[int, typer.Option(help="Decides everything that is random.")]


def _print_version(wanted: bool) -> bool:
    if wanted:
        from dissensus import __version__

        typer.echo(f"dissensus {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def dissensus(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Train ensembles that agree where the data speaks and disagree where it does not.

    Begin with: dissensus demo
    """


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the page.")
    ] = Path("demo-report"),
    members: Annotated[int, typer.Option(help="Size of the ensemble.")] = 5,
    seed: Seed = 0,
) -> None:
    """Train an ensemble on handwritten digits; see whether it notices what it does not know.

    The digits 0 to 6 of scikit-learn's images are learned; 7, 8, 9 and corrupted digits are unknown.

    Prints tables and writes one HTML page with pictures, in well under three minutes.
    """
    from dissensus.demo import run

    run(output, num_members=members, seed=seed)


@app.command()
def study(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Which study; leave it out to list them.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Folder for the results.", show_default="runs/NAME"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short version, to see that it runs.")] = False,
    seed: Seed = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder with the real data, for studies that need it.", show_default=False
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Train so long instead of as long as the study does.", show_default=False),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0, help="Begin no further part after this time; what is done is kept.", show_default=False
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most so many training images.", show_default=False)
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(
            help="Run only these parts: names or their beginnings, with commas between.", show_default=False
        ),
    ] = None,
    known: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Which of the folder's image sets to train on.", show_default=False
        ),
    ] = None,
    setting: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Another setting of the study, such as imagenet.", show_default=False
        ),
    ] = None,
) -> None:
    """Run an experiment by name, or list the experiments there are.

    Writes results.json, the figures and report.html. Options that a study does not have are refused.
    """
    from dissensus.studies import STUDIES

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
    }
    options = {option: value for option, value in further.items() if value is not None}
    page = STUDIES[name].run(output or Path("runs") / name, quick=quick, seed=seed, data=data, **options)
    typer.echo(f"Page with pictures: {page}")


register(app)
register_bench(app)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
