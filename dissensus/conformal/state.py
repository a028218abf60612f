"""Small states as JSON files: written whole or not at all, and refused where they are something else."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_state(path: Path | str, kind: str, state: Mapping[str, Any]) -> None:
    """Write a state; a process that dies leaves the old file."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": kind, **state}, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_state(path: Path | str, kind: str) -> dict[str, Any]:
    """Read a state of this kind, or say what the file is instead."""
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{path} is not a file of JSON. Save it again.") from None
    if not isinstance(state, dict) or state.get("format") != kind:
        raise ValueError(f"{path} does not hold a {kind!r}. Save it again with this version.")
    return state
