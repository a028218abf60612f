"""Commands that train a run from a recipe, and score, evaluate and report it. Each imports what it needs when it runs."""

import typer

from dissensus.commands.deploying import export, serve
from dissensus.commands.measuring import diagnose, evaluate
from dissensus.commands.pages import report
from dissensus.commands.scoring import score
from dissensus.commands.starting import init
from dissensus.commands.training import train

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for command in (init, train, score, evaluate, diagnose, report, export, serve):
        app.command()(command)
