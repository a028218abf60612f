"""The arms of `diversification`: how each ensemble is made and trained."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from dissensus import objectives as obj
from dissensus.architectures import mlp
from dissensus.data.features import CachedFeatures
from dissensus.members import DeepEnsemble, HeadEnsemble, Members
from dissensus.objectives import Objective
from dissensus.objectives.loss_guided import Weighting
from dissensus.predictions import predict
from dissensus.training import Run, diverse_hyperparameters, fit
from dissensus_studies.diversification.data import Features, Material
from dissensus_studies.diversification.measures import detector_record, image_detectors, judge, reference_path
from dissensus_studies.diversification.settings import Setting
from dissensus_studies.harness.arm_log import Record, file_name
from dissensus_studies.harness.image_arms import fit_images, summary_line, training_record
from dissensus_studies.harness.image_sets import Images, ImageSets
from dissensus_studies.masksembles import MaskSetting, make_members

HEAD_BATCH, HEAD_RATE, HEAD_DECAY = 256, 1e-3, 0.01
# Share of the training images that the two-stage variant disagrees on: 18 002 of 1 281 167 in the document.
UNSURE_SHARE = 0.014
# Images that networks under a guard with held-out data are not trained on, of fifty thousand.
HELD_OUT_SHARE = 0.04
_MASK_KINDS = {
    "masksembles": MaskSetting("masks", 2.0),
    "dropout": MaskSetting("dropout"),
    "batch": MaskSetting("batch"),
}


class EpochTimer:
    """Notes when each epoch ends; the first ones, in which programs are made, are not counted."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __call__(self, run: Run) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())

    def record(self) -> Record:
        """Return mean and standard deviation of an epoch's seconds; None where there were too few epochs."""
        lengths = [after - before for before, after in pairwise(self.ends)][-10:]
        return {
            "epoch_seconds": round(fmean(lengths), 5) if lengths else None,
            "epoch_deviation": round(stdev(lengths), 5) if len(lengths) > 1 else None,
        }


def _nets(setting: Setting, material: Material) -> Record:
    """Train networks from scratch on all training images."""
    if setting.method in _MASK_KINDS:
        kind = replace(_MASK_KINDS[setting.method], seed=setting.seed)
        members: Members = make_members(kind, material.network, setting.num_members)
    else:
        members = DeepEnsemble(material.network, setting.num_members, setting.seed)
    chosen: dict[str, Any] = {**material.training, "seed": setting.seed}
    if setting.method == "diverse":
        rate = chosen["lr"]
        ranges = {"lr": (rate / 4, 2 * rate), "weight_decay": (1e-4, 2e-3)}
        chosen |= diverse_hyperparameters(setting.num_members, setting.seed, **ranges)
    if setting.active:
        chosen["epochs"] = ceil(chosen["epochs"] * setting.num_members / setting.active)
    timer = EpochTimer()
    images, guard = _held_out_images(setting, material)
    objective = objective_of(setting, material.source_images, guard)
    run = fit_images(members, images, objective, watch="nothing", callback=timer, **chosen)
    record = {"training": training_record(run) | timer.record()}
    outputs = material.folder / "outputs" / f"{file_name(setting.name)}.npz"
    record |= judge(members, setting, material.images, material.references, outputs)
    if setting.method == "single":
        record["detectors"] = image_detectors(members, material.sets, material.images)
    return with_line(record)


def _held_out_images(setting: Setting, material: Material) -> tuple[ImageSets, obj.Guard | None]:
    """Return what networks train on, all training images or all but those that their guard looks at, and that guard."""
    everything = material.sets.all_train
    whole = replace(material.sets, train=everything)
    if not setting.guard.startswith("held-out"):
        return whole, None
    count = max(1, round(HELD_OUT_SHARE * len(everything.x)))
    rest = replace(whole, train=Images(everything.x[:-count], everything.y[:-count]))
    x, y = (part[-count:].to(material.device) for part in everything)
    if setting.guard == "held-out loss":
        return rest, obj.HeldOutLoss(x, y)
    alone = DeepEnsemble(material.network, 1, setting.seed)
    fit_images(alone, rest, watch="nothing", seed=setting.seed, **material.training)  # type: ignore[arg-type]
    return rest, obj.HeldOutAccuracy(x, y, reference=_accuracy_of(alone, x, y))


def _accuracy_of(members: Members, x: Tensor, y: Tensor) -> float:
    """Return the accuracy of the least accurate member, never 0."""
    right = predict(members, x).argmax(-1) == y
    return max(float(right.float().mean(-1).min()), 1e-3)


def objective_of(setting: Setting, sources: tuple[Tensor, ...], guard: obj.Guard | str | None = None) -> Objective:
    """Return what an ensemble minimises; `sources` are inputs to disagree on, `guard` is one that is more than a name."""
    active = setting.active or None
    if setting.method == "ldr":
        falling = partial(_falling, setting.strength)
        strength: Any = falling if setting.guard == "falling" else setting.strength
        weighting: Weighting = "inverse_probability" if setting.guard == "inverse probability" else "loss"
        return obj.LossGuided(strength, active=active, guard=guard or _guard_of(setting.guard), weighting=weighting)
    if setting.method in ("a2d", "divdis"):
        other = sources[setting.source]
        return obj.Disagree(other, regulariser=setting.method, strength=setting.strength, active=active)
    return obj.Joint(setting.strength) if setting.method == "joint" else obj.Independent()


def _falling(strength: float, progress: Tensor) -> Tensor:
    return strength * (1 - progress) ** 2


def _guard_of(name: str) -> obj.Guard | str | None:
    if name.startswith("share="):
        return obj.LossShare(float(name.removeprefix("share=")))
    return {"falling": "none", "inverse probability": "none"}.get(name, name)


def _backbone(setting: Setting, material: Material) -> Record:
    """Train a backbone, and look how far its features alone tell unknown images."""
    features = material.features(setting.backbone)
    train, labels = features.train.resident(material.device), features.train.targets
    assert labels is not None
    detectors = detector_record(train, labels, features.judged)
    trained = material.backbone_records[setting.backbone]
    line = (
        f"{trained['classes']} classes, {trained['images']} images, {features.width} features, "
        f"{trained['training']['seconds']:.1f} s"
    )
    return {**trained, "detectors": detectors, "line": line}


def _heads(setting: Setting, material: Material) -> Record:
    """Train heads on the features of a frozen backbone."""
    compared = setting.num_members > 1 and setting.reference != setting.name
    if compared and not reference_path(material.references, setting, "pt").is_file():
        # Its arm was not asked for, or done where the folder was another one.
        _heads(setting.plain, material)
    features = material.features(setting.backbone)
    timer = EpochTimer()
    ensemble, run, extra = train_heads(setting, features, material, timer)
    record = {"training": training_record(run) | timer.record(), **extra}
    record["training"].pop("history")
    right = predict(ensemble.heads, features.validation[0]).argmax(-1) == features.validation[1]
    record["validation_members"] = [round(value, 5) for value in right.float().mean(1).tolist()]
    if setting.reference == setting.name:
        path = reference_path(material.references, setting, "json")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"validation_accuracy": min(record["validation_members"])})
        path.write_text(text, encoding="utf-8")
    record |= judge(ensemble.heads, setting, features.judged, material.references)
    return with_line(record)


def train_heads(
    setting: Setting, features: Features, material: Material, timer: EpochTimer
) -> tuple[HeadEnsemble, Run, Record]:
    """Return trained heads on features, the run, and what else is to be kept of it."""
    width, train = features.width, features.train
    # Hidden layers are as wide as the features.
    make = partial(mlp, width, [width] * (setting.layers - 1), material.sets.num_classes, activation=nn.GELU)
    ensemble = HeadEnsemble(features.backbone, make, setting.num_members, setting.seed)
    chosen = head_training(setting, train.num_examples) | {"callback": timer, "engine": material.engine}
    if setting.method == "diverse":
        chosen |= diverse_hyperparameters(setting.num_members, setting.seed)
    epochs = head_epochs(setting, material.head_epochs)
    if setting.method == "two-stage":
        place = features.validation[0].device
        assert train.targets is not None
        rows = CachedFeatures(train.resident(place), train.targets.to(place), train.passes)
        return ensemble, *two_stage(setting, ensemble.heads, rows, (material.head_epochs, epochs), chosen)
    objective = objective_of(setting, features.sources, _held_out_guard(setting, features, material))
    return ensemble, fit(ensemble, train, objective=objective, epochs=epochs, **chosen), {}


def head_training(setting: Setting, images: int) -> dict[str, Any]:
    """Return how heads are trained, as arguments of `fit`."""
    return {
        "lr": HEAD_RATE,
        "weight_decay": HEAD_DECAY,
        "schedule": "cosine",
        "batch_size": min(HEAD_BATCH, max(16, images // 32)),
        # One size of batches: each takes as long to record as a short run.
        "last_batch": "drop",
        "seed": setting.seed,
        "progress": False,
    }


def head_epochs(setting: Setting, epochs: int) -> int:
    """Return for how many epochs heads train: where few are drawn a step, for so many more that each takes as many steps."""
    share = 1 if setting.fixed or not setting.active else setting.num_members / setting.active
    return ceil(epochs * share)


def _held_out_guard(setting: Setting, features: Features, material: Material) -> obj.Guard | None:
    """Return the guard that looks at held-out features; one by accuracy asks for that of the least accurate independent head."""
    if setting.guard == "held-out loss":
        return obj.HeldOutLoss(*features.validation)
    if setting.guard != "held-out accuracy":
        return None
    path = reference_path(material.references, setting, "json")
    if path.is_file():
        reference = float(json.loads(path.read_text(encoding="utf-8"))["validation_accuracy"])
    else:
        alone = Setting("heads", num_members=1, backbone=setting.backbone, seed=setting.seed)
        reference = _accuracy_of(train_heads(alone, features, material, EpochTimer())[0].heads, *features.validation)
    return obj.HeldOutAccuracy(*features.validation, reference=reference)


def two_stage(
    setting: Setting, heads: DeepEnsemble, rows: CachedFeatures, epochs: tuple[int, int], chosen: dict[str, Any]
) -> tuple[Run, Record]:
    """Fit one head, and disagree on the training features that it is least sure of."""
    x, y = rows.features, rows.targets
    assert isinstance(x, Tensor)
    assert y is not None
    alone = DeepEnsemble.from_members([heads.member(0)])
    fit(alone, rows, epochs=epochs[0], **{**chosen, "callback": None})
    logits = predict(alone, x)[0]
    threshold = float(torch.quantile(logits.softmax(-1).amax(-1).float()[: 10**6], UNSURE_SHARE))
    data, objective = obj.two_stage(x, y, logits, threshold, strength=setting.strength, active=setting.active or None)
    run = fit(heads, data, objective=objective, epochs=ceil(epochs[1] / rows.passes), **chosen)
    return run, {"threshold": round(threshold, 5), "unsure": len(objective.ood_data)}  # type: ignore[arg-type]


def with_line(record: Record) -> Record:
    """Add what the screen shows."""
    parts = [summary_line(record)]
    if "unique" in record:
        parts.append(f"#unique {record['unique']['test'][0]:.2f}")
    shown = record.get("auroc", {}).get("C-5", {})
    parts += [f"C-5 {word} {shown[name][0]:.3f}" for word, name in _SHOWN.items() if name in shown]
    return record | {"line": ", ".join(parts)}


_SHOWN = {"BMA": "bma", "PDS": "predictive_diversity"}

WORKS: Mapping[str, Callable[[Setting, Material], Record]] = {"nets": _nets, "backbone": _backbone, "heads": _heads}
