"""Checkpoints: one file each, which says itself whether it is whole and of which run; a kill at any moment loses nothing."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dissensus._files import replace_file
from dissensus.data.fingerprints import attributes_of, described
from dissensus.members import Members
from dissensus.objectives import Objective
from dissensus.training.feeds import Feed

if TYPE_CHECKING:
    from dissensus.training.trainer import Settings

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


def architecture(members: Members) -> dict[str, str]:
    """Return shape and dtype of tensors, without the number of members, what layers compute, and what else the kind is known by."""
    tensors = {
        name: f"{list(t.shape[members.stacked and name not in members.shared_buffers :])} {t.dtype}"
        for name, t in members.state_dict().items()
    }
    return members.identity() | _modules(members) | tensors


def _modules(members: Members) -> dict[str, str]:
    """Return what members compute beside their tensors: kinds of layers, and what those keep as plain attributes.

    Whole numbers of layers that are not torch's may be counters, which say nothing of what a layer is.
    """
    found: dict[str, set[str]] = {}
    for module in members.parts():
        if not isinstance(module, Members):
            kind = type(module)
            ours = kind.__module__.startswith("torch.")
            kept = {
                key: text
                for key, text in attributes_of(module).items()
                if "." not in key and (ours or not text.lstrip("(-").rstrip(",)").isdecimal())
            }
            found.setdefault(f"layer {kind.__qualname__}", set()).add(repr(sorted(kept.items())))
    return {name: " ".join(sorted(texts)) for name, texts in found.items()}


def fingerprint(
    settings: "Settings",
    objective: Objective,
    feed: Feed,
    streams: Mapping[str, Tensor],
    validation: Any,
) -> dict[str, Any]:
    """Return every setting that decides the numbers."""
    return {
        "streams": describe(dict(streams)),
        "validation": describe(validation),
        "epochs": settings.epochs,
        "steps an epoch": feed.steps_per_epoch,
        "own batches": feed.own,
        "data": feed.identity(),
        "objective": describe(objective),
        "optimizer": describe(settings.optimizer),
        "optimizer_options": describe(settings.optimizer_options),
        "lr": describe(settings.lr),
        "weight_decay": describe(settings.weight_decay),
        "schedule": describe(settings.schedule),
        "clip_norm": settings.clip_norm,
        **({} if settings.clip_value is None else {"clip_value": settings.clip_value}),
        **({} if settings.accumulate == 1 else {"accumulate": settings.accumulate}),
        **({} if settings.ema is None else {"ema": settings.ema}),
        **({"per_member": True} if settings.per_member else {}),
        "bf16": settings.bf16,
        "augment": describe(settings.augment),
        "select": settings.select,
        "seed": settings.seed,
    }


def describe(value: Any) -> str:
    """Return a text that is the same in every process for equal settings; its class alone where nothing more can be told."""
    return described(value) or type(value).__qualname__


def first_difference(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Say what differs first between two descriptions; None if nothing does."""
    for key in [*stored, *now]:
        if stored.get(key) != now.get(key):
            return f"{key} is {stored.get(key, 'absent')} there and {now.get(key, 'absent')} here"
    return None


def check_same_run(
    facts: Mapping[str, Any], where: str, network: Mapping[str, str], settings: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint of another network or of a run with other settings; `where` names it."""
    if (difference := first_difference(facts["architecture"], network)) is not None:
        raise CheckpointError(
            f"{where} is of another architecture: {difference}. Use the network it was made with."
        )
    if (difference := first_difference(facts["settings"], settings)) is not None:
        raise CheckpointError(
            f"{where} belongs to a run with other settings: {difference}. Give the same settings, or choose another folder."
        )
