"""Which files of the package a call passes: those in which a function is called."""

import sys
from collections.abc import Callable
from pathlib import Path

import dissensus

PACKAGE = Path(dissensus.__file__).parent


def files_passed(call: Callable[[], object]) -> dict[str, set[str]]:
    """Return the files of the package, each with the functions of it that are called."""
    found: dict[str, set[str]] = {}

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)) and frame.f_code.co_name != "<module>":
            name = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
            found.setdefault(name, set()).add(frame.f_code.co_qualname)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found
