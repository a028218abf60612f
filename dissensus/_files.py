"""Files that outlive a kill: replaced in one step, and folders that one process at a time writes to."""

import contextlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import Any

log = logging.getLogger("dissensus")
_STALE_AFTER = 86400.0


@contextlib.contextmanager
def written_aside(path: Path, ending: str = ".tmp") -> Iterator[Path]:
    """Give a new file beside `path` to write to, which takes its name in one step when all went well.

    Its own name is one that nobody else has, so a link that lies there is not followed; it has the `ending`. Those of the same `path`
    that killed processes left are cleared.
    """
    here = f".{path.name}.{platform.node()}."
    for left in path.parent.glob(f".{escape(path.name)}.*{ending}"):
        with contextlib.suppress(FileNotFoundError):  # another process may do the same
            process = left.name.removeprefix(here).partition(".")[0]
            if _is_gone(process) or time.time() - left.stat().st_mtime > _STALE_AFTER:
                left.unlink()
    handle, name = tempfile.mkstemp(prefix=f"{here}{os.getpid()}.", suffix=ending, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # A file made by `mkstemp` is its owner's alone; one made by `open` follows the user's mask.
        os.umask(mask := os.umask(0))
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_gone(process: str) -> bool:
    """Whether this is the number of a process that this machine has no more."""
    if not process.isdecimal() or os.name == "nt":  # a signal of 0 is Ctrl-C there
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # somebody else's
        pass
    return False


def replace_file(path: Path, data: bytes | str) -> None:
    """Replace a file in one step: after a kill or a power cut there is the old one or the new one."""
    with written_aside(path) as temporary, open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())


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


def checkpoint_digest(folder: Path, kind: str) -> str:
    """Return the digest of a folder's newest checkpoint of a kind; empty where there is none.

    Example:
        >>> checkpoint_digest(Path("no/such/folder"), "ensemble")
        ''
    """
    newest = max(folder.glob(f"{kind}-*.json"), default=None)
    return "" if newest is None else str(json.loads(newest.read_text(encoding="utf-8"))["sha256"])


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
