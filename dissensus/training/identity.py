"""What makes a run the same run: its settings and its network, as texts that a checkpoint can keep and compare."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dissensus.members import HeadEnsemble, Members
from dissensus.objectives import Objective
from dissensus.training.checkpoints import CheckpointError
from dissensus.training.feeds import Feed
from dissensus.training.run import Settings


def architecture(members: Members) -> dict[str, str]:
    """Return shape and dtype of every tensor by name, without the number of members, which backbone it is, and the kind's settings."""
    frozen = {"backbone": members.backbone_digest()} if isinstance(members, HeadEnsemble) else {}
    settings = {name: repr(value) for name, value in members.settings().items()}
    return (
        frozen
        | settings
        | {
            name: f"{list(t.shape[members.stacked and name not in members.shared_buffers :])} {t.dtype}"
            for name, t in members.state_dict().items()
        }
    )


def fingerprint(settings: Settings, objective: Objective, feed: Feed) -> dict[str, Any]:
    """Return every setting that decides the numbers."""
    return {
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
        "bf16": settings.bf16,
        "augment": describe(settings.augment),
        "select": settings.select,
        "seed": settings.seed,
    }


def describe(value: Any) -> str:
    """Return a text that is the same in every process for equal settings; functions go by their name."""
    if isinstance(value, Tensor):
        return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "__dataclass_fields__"):
        inner = {name: describe(getattr(value, name)) for name in value.__dataclass_fields__}
        return f"{type(value).__name__}({json.dumps(inner, sort_keys=True)})"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {describe(item)}' for key, item in sorted(value.items()))}}}"
    return repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__qualname__


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
