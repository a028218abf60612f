"""Checkpoints: one file each, which says itself whether it is whole; a kill at any moment loses nothing."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus._files import replace_file

FORMAT = 2


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: damaged, or of another run."""


class CheckpointFolder:
    """A run's folder of checkpoints, `KIND-STEP.safetensors`: the newest of a kind, and the one before it.

    A file holds tensors, everything else as JSON, and the digest of both. It appears in one step; where the newest is damaged,
    the one before it is used.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def exists(self, kind: str = "last") -> bool:
        """Whether there is a checkpoint of this kind, whole or not."""
        return bool(self._paths(kind)) or self._old(kind).exists()

    def save(
        self,
        kind: str,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        final: bool = False,
    ) -> None:
        """Write a checkpoint; the one before it stays until the next. After the final one a copy of it stays instead."""
        from safetensors.torch import save

        self.folder.mkdir(parents=True, exist_ok=True)
        values = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        told = json.dumps({"format": FORMAT, "facts": dict(facts)})
        values[_FACTS] = torch.frombuffer(bytearray(told.encode()), dtype=torch.uint8)
        data = save(values, {"sha256": _digest(values)})
        for name in ("", "-copy") if final else ("",):
            replace_file(self.folder / f"{kind}-{step:09d}{name}.safetensors", data)
        for old in self._paths(kind)[2:]:
            old.unlink(missing_ok=True)

    def load(self, kind: str = "last") -> tuple[dict[str, Tensor], dict[str, Any], str | None]:
        """Return tensors and facts of the newest checkpoint that is whole, and what was wrong with newer ones."""
        problems: list[str] = []
        for path in self._paths(kind):
            try:
                tensors, facts = _read(path)
                return tensors, facts, " ".join(problems) or None
            except CheckpointError as problem:
                problems.append(str(problem))
        if self._old(kind).exists():
            problems.append(
                "It was written by an earlier version of dissensus, whose checkpoints this one does not read."
            )
        raise CheckpointError(
            f"No usable checkpoint in {self.folder}: {' '.join(problems) or 'there is none.'} "
            "To start again, move or delete the folder."
        )

    def _paths(self, kind: str) -> list[Path]:
        """Return the files of a kind, the newest first."""
        return sorted(self.folder.glob(f"{kind}-*.safetensors"), reverse=True)

    def _old(self, kind: str) -> Path:
        return self.folder / f"{kind}.json"


# Facts lie among the tensors as bytes: metadata of safetensors is limited in size, a history is not.
_FACTS = "__facts__"


def _digest(values: Mapping[str, Tensor]) -> str:
    """Return the hash of the tensors' names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(values.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        # Copied: one value in memory that is aligned for many has a stride that no view of bytes takes.
        in_order = tensor.new_empty(tensor.numel()).copy_(tensor.reshape(-1))
        digest.update(in_order.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = path.read_bytes()
    try:
        values = load(data)
        (length,) = struct.unpack("<Q", data[:8])
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        whole = metadata["sha256"] == _digest(values)
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} is truncated or was changed: its digest is not the recorded one.")
    told = json.loads(values.pop(_FACTS).numpy().tobytes())
    if told["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {told['format']}; this version reads {FORMAT}.")
    return values, told["facts"]
