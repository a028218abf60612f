"""Checkpoints: blocks of tensors and the JSON that names them, which is written last; a kill at any moment loses nothing."""

import hashlib
import json
import re
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
    from dissensus.training.mesh import Mesh
    from dissensus.training.trainer import Settings

FORMAT = 3


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: damaged, or of another run."""


class CheckpointFolder:
    """A run's folder of checkpoints: the newest of a kind, and the one before it.

    Tensors lie in `KIND-STEP.safetensors`; where members are spread over processes, each writes those of its own,
    `KIND-STEP-0-of-4.safetensors`. `KIND-STEP.json` names these blocks with their digests and holds everything else. It
    appears in one step when all blocks are there, and is the checkpoint; where the newest or a block of it is damaged, the
    one before it is used.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def exists(self, kind: str = "last") -> bool:
        """Whether there is a checkpoint of this kind, whole or not."""
        return bool(self._paths(kind))

    def save(
        self,
        kind: str,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        final: bool = False,
        mesh: "Mesh | None" = None,
    ) -> None:
        """Write a checkpoint; the one before it stays until the next. After the final one a copy of it stays instead.

        On a mesh every process calls this with the tensors of its own block.
        """
        from safetensors.torch import save

        if mesh is not None and mesh.data_rank > 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        names = [f"{kind}-{step:09d}"] + [f"{kind}-{step:09d}-copy"] * final
        rank, count = (0, 1) if mesh is None else (mesh.member_rank, mesh.members)
        for name in names:
            replace_file(self.folder / _block(name, rank, count), data)
        digest = hashlib.sha256(data).hexdigest()
        digests = [digest] if mesh is None else mesh.collect(digest)
        if rank == 0:
            for name in names:
                blocks = {_block(name, place, count): digest for place, digest in enumerate(digests)}
                body = {"format": FORMAT, "blocks": blocks, "facts": dict(facts)}
                told = json.dumps({"sha256": _digest(body), "checkpoint": body})
                replace_file(self.folder / f"{name}.json", told)
            self._clear(kind, names[0])

    def load(self, kind: str = "last") -> tuple[dict[str, Tensor], dict[str, Any], str | None]:
        """Return tensors and facts of the newest checkpoint that is whole, and what was wrong with newer ones."""
        problems: list[str] = []
        for path in self._paths(kind):
            try:
                tensors, facts = _read(path)
                return tensors, facts, " ".join(problems) or None
            except CheckpointError as problem:
                problems.append(str(problem))
        raise CheckpointError(
            f"No usable checkpoint in {self.folder}: {' '.join(problems) or 'there is none.'} To start again, move or delete it."
        )

    def _paths(self, kind: str) -> list[Path]:
        """Return the checkpoints of a kind, the newest first."""
        return sorted(self.folder.glob(f"{kind}-*.json"), reverse=True)

    def _clear(self, kind: str, newest: str) -> None:
        """Remove all but two checkpoints, and blocks that belong to none; another process may write the next ones already."""
        kept = [path.stem for path in self._paths(kind)[:2]]
        for path in (*self._paths(kind), *self.folder.glob(f"{kind}-*.safetensors")):
            name = re.sub(r"-\d+-of-\d+$", "", path.stem)
            if name not in kept and name < newest:
                path.unlink(missing_ok=True)


def _block(name: str, place: int, count: int) -> str:
    return f"{name}{'' if count == 1 else f'-{place}-of-{count}'}.safetensors"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors.torch import load

    changed = "is truncated or was changed: its digest is not the recorded one."
    try:
        told = json.loads(path.read_bytes())
        body = told["checkpoint"]
        whole = told["sha256"] == _digest(body)
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} {changed}")
    if body["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {body['format']}; this version reads {FORMAT}.")
    found: dict[str, list[Tensor]] = {}
    for name, digest in body["blocks"].items():
        block = path.parent / name
        if not block.exists():
            raise CheckpointError(f"{block} is missing.")
        data = block.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(f"{block} {changed}")
        for key, tensor in load(data).items():
            found.setdefault(key, []).append(tensor)
    # What several blocks hold are rows of their members; what belongs to all is in the first one only.
    tensors = {key: torch.cat(parts) if len(parts) > 1 else parts[0] for key, parts in found.items()}
    return tensors, body["facts"]


def architecture(members: Members) -> dict[str, str]:
    """Return shape and dtype of tensors, without the number of members, what layers compute, and what else the kind is known by."""
    tensors = {
        name: f"{list(t.shape[members.stacked and name not in members.shared_buffers :])} {t.dtype}"
        for name, t in members.state_dict().items()
    }
    return members.identity() | _modules(members) | tensors


def _modules(members: Members) -> dict[str, str]:
    """Return what members compute beside their tensors: kinds of layers, and what those keep as plain attributes."""
    found: dict[str, set[str]] = {}
    for module in members.parts():
        if not isinstance(module, Members):
            kind = type(module)
            # Whole numbers of other layers than torch's may be counters.
            ours = kind.__module__.startswith("torch.")
            kept = {
                key: text
                for key, text in attributes_of(module).items()
                if "." not in key and (ours or not text.lstrip("(-").rstrip(",)").isdecimal())
            }
            found.setdefault(f"layer {kind.__qualname__}", set()).add(repr(sorted(kept.items())))
    return {name: " ".join(sorted(texts)) for name, texts in found.items()}


_DESCRIBED = ("optimizer", "optimizer_options", "lr", "weight_decay", "schedule", "augment")
_TOLD = ("epochs", "clip_norm", "clip_value", "accumulate", "ema", "bf16", "select", "per_member", "seed")


def fingerprint(
    settings: "Settings", objective: Objective, feed: Feed, streams: Mapping[str, Tensor], validation: Any
) -> dict[str, Any]:
    """Return every setting that decides the numbers."""
    return {
        "streams": describe(dict(streams)),
        "validation": describe(validation),
        "steps an epoch": feed.steps_per_epoch,
        "own batches": feed.own,
        "data": feed.identity(),
        "objective": describe(objective),
        **{name: describe(getattr(settings, name)) for name in _DESCRIBED},
        **{name: getattr(settings, name) for name in _TOLD},
    }


def describe(value: Any) -> str:
    """Return a text that is the same in every process for equal settings; its class alone where nothing more can be told."""
    return described(value) or type(value).__qualname__


def check_same_run(facts: Mapping[str, Any], where: str, identity: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a checkpoint of another network or of a run with other settings; `where` names it."""
    for what, refusal, advice in (
        ("architecture", "is of another architecture", "Use the network it was made with."),
        ("settings", "belongs to a run with other settings", "Give the same settings, or choose another folder."),
    ):
        stored, now = facts[what], identity[what]
        for key in [*stored, *now]:
            if stored.get(key) != now.get(key):
                difference = f"{key} is {stored.get(key, 'absent')} there and {now.get(key, 'absent')} here"
                raise CheckpointError(f"{where} {refusal}: {difference}. {advice}")
