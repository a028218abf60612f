"""Checkpoints: tensors as safetensors, everything else as JSON, written so that a kill at any moment loses nothing."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: damaged, or of another run."""


class CheckpointFolder:
    """A run's folder: `last.json` names the newest tensors and the ones before, `best.json` the best.

    A checkpoint is a tensor file under a name of its own, then a small JSON file replaced in one step. The JSON holds the
    tensors' digest, so a torn or changed file is noticed and the checkpoint before it is used.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def exists(self, kind: str = "last") -> bool:
        """Whether there is a checkpoint of this kind."""
        return (self.folder / f"{kind}.json").exists()

    def save(self, kind: str, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a checkpoint; the one before it stays until the next."""
        from safetensors.torch import save

        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        entry = {
            "file": f"{kind}-{step:09d}.safetensors",
            "sha256": hashlib.sha256(data).hexdigest(),
            "step": step,
        }
        entry["facts"] = dict(facts)
        _write(self.folder / str(entry["file"]), data)
        earlier = [old for old in self._entries(kind) if old["file"] != entry["file"]][:1]
        index = {"format": FORMAT, "checkpoints": [entry, *earlier]}
        _write(self.folder / f"{kind}.json", json.dumps(index, indent=1).encode())
        wanted = {e["file"] for e in (entry, *earlier)}
        for path in self.folder.glob(f"{kind}-*.safetensors"):
            if path.name not in wanted:
                path.unlink(missing_ok=True)

    def load(self, kind: str = "last") -> tuple[dict[str, Tensor], dict[str, Any], str | None]:
        """Return tensors and facts of the newest checkpoint that is whole, and what was wrong with newer ones."""
        problems: list[str] = []
        for entry in self._entries(kind, problems):
            try:
                return self._read(entry), entry["facts"], " ".join(problems) or None
            except CheckpointError as problem:
                problems.append(str(problem))
        raise CheckpointError(
            f"No usable checkpoint in {self.folder}: {' '.join(problems) or 'there is none.'} "
            "To start again, move or delete the folder."
        )

    def _entries(self, kind: str, problems: list[str] | None = None) -> list[dict[str, Any]]:
        path = self.folder / f"{kind}.json"
        if not path.exists():
            return []
        try:
            index = json.loads(path.read_text())
            if index["format"] != FORMAT:
                raise CheckpointError(f"{path} has format {index['format']}; this version reads {FORMAT}.")
            return list(index["checkpoints"])
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
            if problems is not None:
                problems.append(f"{path} is not a checkpoint index (damaged or changed).")
            return []

    def _read(self, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        from safetensors.torch import load

        path = self.folder / Path(str(entry["file"])).name
        if not path.exists():
            raise CheckpointError(f"{path} is missing.")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{path} is truncated or was changed: its digest is not the recorded one.")
        return load(data)


def _write(path: Path, data: bytes) -> None:
    """Replace a file in one step; after a power cut there is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
