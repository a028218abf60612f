"""Files that outlive a kill: replaced in one step, and folders that one process at a time writes to."""

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("dissensus")


def replace_file(path: Path, data: bytes | str) -> None:
    """Replace a file in one step: after a kill or a power cut there is the old one or the new one.

    The temporary file has a name that nobody else has and is made anew, so a link that lies there is not followed.
    """
    content = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # A file made by `mkstemp` is its owner's alone; one made by `open` follows the user's mask.
        os.chmod(temporary, 0o666 & ~_mask())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_state(path: Path | str, kind: str, state: Mapping[str, Any]) -> None:
    """Write a small state as JSON that says which kind it is."""
    replace_file(Path(path), json.dumps({"format": kind, **state}))


def read_state(path: Path | str, kind: str) -> dict[str, Any]:
    """Read a state of this kind, or say what the file is instead."""
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{path} is not a file of JSON. Save it again.") from None
    if not isinstance(state, dict) or state.get("format") != kind:
        raise ValueError(f"{path} does not hold a {kind!r}. Save it again with this version.")
    return state


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def only_writer(folder: Path, name: str = ".writing") -> Iterator[None]:
    """Have a folder for this block alone; refuse it where another process or thread has it.

    The lock ends with the process, however that ends. What a killed process left half-written is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        _lock(handle, path)
        for left in folder.glob(".*.tmp"):
            left.unlink(missing_ok=True)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # a system without such locks
        return
    taken = ValueError(f"Another process is training into {path.parent} now. Wait for it, or choose another folder.")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise taken from None
    except OSError as problem:  # a file system without locks
        log.warning("%s cannot be locked (%s): let one process at a time use it", path.parent, problem)
        return
    # Whoever had it before may have removed the file in between: then somebody else may have made and locked another one.
    if not path.exists() or not os.path.samestat(os.fstat(handle), os.stat(path)):
        raise taken
