"""What was measured about a step before, kept on disk, so that a choice of engine is made once for each step and machine."""

import contextlib
import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor


def cache_file() -> Path:
    """Return where timings are kept: `dissensus/engines.json` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dissensus" / "engines.json"


def step_key(code: str, tensors: list[Tensor], parallel: int) -> str:
    """Return a name for a recorded step: its operations, shapes, device and torch version."""
    shapes = [(tuple(t.shape), tuple(t.stride()), str(t.dtype)) for t in tensors]
    device = tensors[0].device
    machine = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )
    text = json.dumps([code, shapes, machine, torch.__version__, parallel])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def recall(key: str) -> dict[str, float] | None:
    """Return what was measured for this step, if anything was."""
    try:
        return json.loads(cache_file().read_text()).get(key)
    except (OSError, ValueError, AttributeError):
        return None


def remember(key: str, timings: dict[str, float]) -> None:
    """Keep measurements for the next run; a cache that cannot be written is no reason to fail."""
    with contextlib.suppress(OSError):
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = {}
        known[key] = timings
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=1))
        os.replace(temporary, path)
