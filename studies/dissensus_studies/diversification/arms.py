"""The arms of `diversification`: how each ensemble is made and trained."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from dissensus import objectives as obj
from dissensus.architectures import mlp
from dissensus.members import DeepEnsemble, Members
from dissensus.objectives import Objective
from dissensus.objectives.loss_guided import Weighting
from dissensus.predictions import predict
from dissensus.training import Run, diverse_hyperparameters, fit
from dissensus_studies.diversification.data import Features, Material
from dissensus_studies.diversification.measures import PDS, detector_record, image_detectors, judge
from dissensus_studies.diversification.settings import Setting
from dissensus_studies.diversification.spurious import group_record, spurious_sets
from dissensus_studies.harness.arm_log import Record, file_name
from dissensus_studies.harness.image_arms import fit_images, save_outputs, summary_line, training_record
from dissensus_studies.masksembles import MaskSetting, make_members

HEAD_BATCH, HEAD_RATE, HEAD_DECAY = 256, 1e-3, 0.01
# Share of the training images that the two-stage variant disagrees on: 18 002 of 1 281 167 in the document.
UNSURE_SHARE = 0.014
# Images that networks under a guard with held-out data are not trained on, of fifty thousand.
HELD_OUT_SHARE = 0.04
# Features, hidden units and classes as in the document, of heads whose time is taken.
TIMED_WIDTHS, TIMED_EPOCHS = (768, 768, 1000), 8
# The small set with misleading backgrounds is gone through more often.
SPURIOUS_EPOCHS = 2
_MASK_KINDS = {
    "masksembles": MaskSetting("masks", 2.0),
    "dropout": MaskSetting("dropout"),
    "batch": MaskSetting("batch"),
}


def record_of(setting: Setting, material: Material) -> Record:
    """Train and judge one ensemble; return its record."""
    named = {"setting": asdict(setting), "family": setting.family, "row": setting.row}
    return _WORKS[setting.kind](setting, material) | named


def _nets(setting: Setting, material: Material) -> Record:
    """Train networks from scratch on all training images."""
    if setting.method in _MASK_KINDS:
        kind = replace(_MASK_KINDS[setting.method], seed=setting.seed)
        members: Members = make_members(kind, material.network, setting.num_members)
    else:
        members = DeepEnsemble(material.network, setting.num_members, setting.seed)
    everything, guard = material.sets.all_train, None
    images = replace(material.sets, train=everything)
    if setting.guard.startswith("held-out"):
        count = max(1, round(HELD_OUT_SHARE * len(everything.x)))
        images = replace(material.sets, train=everything.rows(slice(-count)))
        held_out = tuple(part[-count:].to(material.device) for part in everything)

        def alone() -> DeepEnsemble:
            net = DeepEnsemble(material.network, 1, setting.seed)
            fit_images(net, images, watch="nothing", seed=setting.seed, part="alone", **material.training)
            return net

        guard = _held_out_guard(setting, held_out, alone)
    chosen = {**material.training, "seed": setting.seed}
    if setting.method == "diverse":
        ranges = {"lr": (chosen["lr"] / 4, 2 * chosen["lr"]), "weight_decay": (1e-4, 2e-3)}
        chosen |= diverse_hyperparameters(setting.num_members, setting.seed, **ranges)
    chosen["epochs"] = scaled_epochs(setting, chosen["epochs"])
    objective = objective_of(setting, material.source_images, guard)
    run = fit_images(members, images, objective, watch="nothing", part="net", **chosen)
    save_outputs(members, material.sets, material.folder / "outputs" / f"{file_name(setting.name)}.npz")
    record = {"training": training_record(run), **judge(members, material.images)}
    if setting.method == "single":
        record["detectors"] = image_detectors(members, material.sets, material.images)
    return _with_line(record)


def _held_out_guard(setting: Setting, held_out: tuple[Tensor, ...], alone: Callable[[], DeepEnsemble]) -> obj.Guard:
    """Return a guard that looks at held-out data; one by accuracy asks for that of a member trained alone."""
    x, y = held_out
    if setting.guard == "held-out loss":
        return obj.HeldOutLoss(x, y)
    right = predict(alone(), x).argmax(-1) == y
    return obj.HeldOutAccuracy(x, y, reference=max(float(right.float().mean()), 1e-3))


def objective_of(setting: Setting, sources: tuple[Tensor, ...], guard: obj.Guard | str | None = None) -> Objective:
    """Return what an ensemble minimises; `sources` are inputs to disagree on, `guard` is one that is more than a name."""
    name, strength, active = setting.guard, setting.strength, setting.active or None
    if setting.method == "ldr":
        if name.startswith("share="):
            guard = obj.LossShare(float(name.removeprefix("share=")))
        named = "none" if name in ("falling", "inverse probability") else name
        falling: Any = partial(_falling, strength) if name == "falling" else strength
        weighting: Weighting = "inverse_probability" if name == "inverse probability" else "loss"
        return obj.LossGuided(falling, active=active, guard=guard or named, weighting=weighting)
    if setting.method in ("a2d", "divdis"):
        return obj.Disagree(sources[setting.source], regulariser=setting.method, strength=strength, active=active)
    return obj.Joint(strength) if setting.method == "joint" else obj.Independent()


def _falling(strength: float, progress: Tensor) -> Tensor:
    return strength * (1 - progress) ** 2


def scaled_epochs(setting: Setting, epochs: int) -> int:
    """Return for how many epochs members train: where few are drawn a step, for so many more that each takes as many steps."""
    share = 1 if setting.fixed or not setting.active else setting.num_members / setting.active
    return ceil(epochs * share)


def _backbone(setting: Setting, material: Material) -> Record:
    """Train a backbone, and look how far its features alone tell unknown images."""
    features = material.features(setting.backbone)
    trained, labels = features.record, features.train.targets
    assert trained is not None
    assert labels is not None
    detectors = detector_record(features.train.resident(material.device), labels, features.judged)
    size = f"{trained['classes']} classes, {trained['images']} images, {features.judged.test.shape[1]} features"
    return {**trained, "detectors": detectors, "line": f"{size}, {trained['training']['seconds']:.1f} s"}


def _heads(setting: Setting, material: Material) -> Record:
    """Train heads on the features of a frozen backbone."""
    features = material.features(setting.backbone)
    heads, run, extra = train_heads(setting, features, material)
    training = {key: entry for key, entry in training_record(run).items() if key != "history"}
    if setting.method in ("a2d", "divdis"):
        extra["elsewhere"] = material.source_names[min(setting.source, len(material.source_names) - 1)]
    record = judge(heads, features.judged, diagnosed=material.whole_records)
    record = _with_line({"training": training, **extra, **record})
    if not material.whole_records:
        # There are several seeds: values without their intervals over images, and no diagnosis.
        record = with_values(record)
    return record


def with_values(record: Record) -> Record:
    """Return a record with values alone where it has them with their intervals over images."""
    return record | {key: _values(record[key]) for key in ("test", "unique", "pds", "accuracy", "auroc")}


def _values(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return {key: _values(each) for key, each in entry.items()}
    return round(entry[0], 5) if isinstance(entry, list) else entry


def train_heads(setting: Setting, features: Features, material: Material) -> tuple[DeepEnsemble, Run, Record]:
    """Return trained heads on features, the run, and what else is to be kept of it."""
    train, hidden = features.train, [features.hidden] * (setting.layers - 1)
    make = partial(mlp, features.judged.test.shape[1], hidden, features.num_classes, activation=nn.GELU)
    heads = DeepEnsemble(make, setting.num_members, setting.seed)
    chosen: dict[str, Any] = {
        "lr": HEAD_RATE,
        "weight_decay": HEAD_DECAY,
        "schedule": "cosine",
        "batch_size": min(HEAD_BATCH, max(16, train.num_examples // 32)),
        # One size of batches: each takes as long to record as a short run.
        "last_batch": "drop",
        "seed": setting.seed,
        "engine": material.engine,
        "progress": False,
    }
    if setting.method == "diverse":
        chosen |= diverse_hyperparameters(setting.num_members, setting.seed)
    epochs = scaled_epochs(setting, material.head_epochs)
    if setting.method == "two-stage":
        # Fit one head, and disagree on the training features that it is least sure of.
        x, y = train.features, train.targets
        assert isinstance(x, Tensor)
        assert y is not None
        y = y.to(x.device)
        alone = DeepEnsemble.from_members([heads.member(0)])
        fit(alone, replace(train, targets=y), epochs=material.head_epochs, **chosen)
        logits = predict(alone, x)[0]
        threshold = float(torch.quantile(logits.softmax(-1).amax(-1).float()[: 10**6], UNSURE_SHARE))
        active = setting.active or None
        data, staged = obj.two_stage(x, y, logits, threshold, strength=setting.strength, active=active)
        run = fit(heads, data, objective=staged, epochs=ceil(epochs / train.passes), **chosen)
        return heads, run, {"threshold": round(threshold, 5), "unsure": len(staged.ood_data)}  # type: ignore[arg-type]
    guard = None
    if setting.guard.startswith("held-out"):
        assert features.validation is not None
        single = replace(setting, method="single", num_members=1, guard="none", active=0)
        guard = _held_out_guard(setting, features.validation, lambda: train_heads(single, features, material)[0])
    objective = objective_of(setting, features.sources, guard)
    return heads, fit(heads, train, objective=objective, epochs=epochs, **chosen), {}


def _spurious(setting: Setting, material: Material) -> Record:
    """Train networks on the set whose backgrounds mislead; return what they are worth on the worst group."""
    sets, test_groups, backgrounds = spurious_sets(material.sets, material.seed)
    members = DeepEnsemble(lambda: material.network(2), setting.num_members, setting.seed)
    chosen = {**material.training, "seed": setting.seed, "epochs": SPURIOUS_EPOCHS * material.epochs}
    # The others' data to disagree on are the validation images, whose backgrounds do not go with the class.
    objective = objective_of(setting, (sets.validation.x, sets.validation.x))
    run = fit_images(members, sets, objective, watch="nothing", part="net", **chosen)
    logits = predict(members, sets.test.x.to(material.device)).float().cpu()
    found = group_record(logits, sets.test.y, test_groups)
    worst = {way: f"{value[0]:.4f}" for way, value in found["worst_group"].items()}
    line = (
        f"worst group {worst['ensemble']}, best member {worst['oracle']}, accuracy {found['group_accuracy']['ensemble']:.4f}, "
        f"{run.epoch} epochs in {run.seconds:.1f} s"
    )
    sizes = [len(part.x) for part in (sets.train, sets.validation, sets.test)]
    return {"training": training_record(run), "images": sizes, "backgrounds": backgrounds, **found, "line": line}


def _timed(setting: Setting, material: Material) -> Record:
    """Take the time of a step of heads of ImageNet's size, on features that are noise; the fastest epoch counts."""
    width, hidden, classes = TIMED_WIDTHS
    noise = torch.Generator().manual_seed(setting.seed)
    # On a GPU so many that what an epoch takes besides its steps does not count.
    steps = 1000 if material.device.type == "cuda" else 20
    x = torch.randn(steps * HEAD_BATCH, width, generator=noise).to(material.device)
    y = torch.randint(classes, (len(x),), generator=noise).to(material.device)
    heads = DeepEnsemble(partial(mlp, width, [hidden], classes, activation=nn.GELU), setting.num_members, setting.seed)
    chosen: dict[str, Any] = {"lr": HEAD_RATE, "weight_decay": HEAD_DECAY, "batch_size": HEAD_BATCH}
    ticks: list[float] = []
    run = fit(
        heads,
        (x, y),
        objective=objective_of(setting, ()),
        epochs=TIMED_EPOCHS,
        callback=lambda _: ticks.append(time.monotonic()),
        engine="captured",
        seed=setting.seed,
        progress=False,
        **chosen,
    )
    ms = 1e3 * min(after - before for before, after in pairwise(ticks)) / steps
    return {"ms": ms, "engine": run.engine, "line": f"{ms:.3g} ms a step"}


def _with_line(record: Record) -> Record:
    """Add what the screen shows."""
    parts = [summary_line(record), f"#unique {record['unique']['test'][0]:.2f}"]
    shown = record["auroc"].get("C-5", {})
    parts += [f"C-5 {word} {shown[name][0]:.3f}" for word, name in (("BMA", "bma"), ("PDS", PDS)) if name in shown]
    return record | {"line": ", ".join(parts)}


_WORKS = {"nets": _nets, "backbone": _backbone, "heads": _heads, "spurious": _spurious, "timed": _timed}
