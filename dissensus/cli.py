"""The command line. Commands import what they need when they run, so that help and errors come at once."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# What a command may raise because of its input, and not because of a mistake of ours.
_USER_ERRORS = (ValueError, OSError, ModuleNotFoundError)
