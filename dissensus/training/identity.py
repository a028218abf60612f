"""What makes a run the same run: its settings and its network, as texts that a checkpoint can keep and compare."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dissensus.data.descriptions import attributes_of, described
from dissensus.members import Members
from dissensus.objectives import Objective
from dissensus.training.checkpoints import CheckpointError
from dissensus.training.feeds import Feed
from dissensus.training.run import Settings


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
    settings: Settings,
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
