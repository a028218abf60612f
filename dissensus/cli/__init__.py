"""The command line. A command imports what it needs when it runs, so that help and mistakes are answered soon."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from dissensus.cli.deploying import export, serve
from dissensus.cli.measuring import diagnose, evaluate, report
from dissensus.cli.scoring import score
from dissensus.cli.training import init, train

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
    cls=Commands, no_args_is_help=True, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        from dissensus import __version__

        typer.echo(f"dissensus {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def dissensus(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train ensembles that agree where the data speaks and disagree where it does not.

    Begin with: dissensus demo
    """


@app.command()
def demo(
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Folder for the page.")] = Path("demo-report"),
    members: Annotated[int, Option(help="Size of the ensemble.")] = 5,
    seed: Annotated[int, Option(help="Decides everything that is random.")] = 0,
) -> None:
    """Train an ensemble on handwritten digits; see whether it notices what it does not know.

    The digits 0 to 6 of scikit-learn's images are learned; 7, 8, 9 and corrupted digits are unknown.

    Prints tables and writes one HTML page with pictures, in well under three minutes.
    """
    from dissensus.demo import run

    run(output, num_members=members, seed=seed)


# What the repository has and the wheel has not: packages that add a command of their own where they are installed.
_BESIDE = {
    "study": ("dissensus_studies", "studies", "Run an experiment of the papers by name (in the repository)."),
    "bench": ("dissensus_bench", "benchmarks", "Measure speed beside other libraries (in the repository)."),
}


def _missing(package: str, folder: str) -> Callable[[], None]:
    def explain() -> None:
        raise ValueError(
            f"{package} is not installed: it comes with the repository, not with the package. In a clone run `pip install ./{folder}`."
        )

    return explain


for command in (init, train, score, evaluate, diagnose, report, export, serve):
    app.command()(command)
for name, (package, folder, summary) in _BESIDE.items():
    if find_spec(package) is not None:
        import_module(f"{package}.command").register(app)
    else:
        any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(name, help=summary, context_settings=any_arguments)(_missing(package, folder))


def main() -> None:
    """Run the command line."""
    app()
