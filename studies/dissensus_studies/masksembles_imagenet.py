"""`masksembles` with `setting="imagenet"`: calibration curves on a folder of ImageNet's layout, the document's figure 3, right.

The folder has `train/<class>/*` and `val/<class>/*`; the network is torchvision's ResNet-18. Images are cropped and flipped at
random in training and cropped in the middle in validation.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from dissensus.html import Section, Table
from dissensus.predictions import predict
from dissensus.training import fit
from dissensus_studies.arm_log import Arm, Record, run_arms
from dissensus_studies.collusion_imagenet import network, read_folder
from dissensus_studies.image_arms import training_record
from dissensus_studies.image_sets import imagenet_folder
from dissensus_studies.masksembles_arms import (
    NUM_MEMBERS,
    MaskSetting,
    calibration_numbers,
    make_members,
    pair_numbers,
)
from dissensus_studies.masksembles_figures import calibration_figure
from dissensus_studies.outputs import Outputs, print_table

EPOCHS, RATE, DECAY, BATCH_SIZE, SIZE = 90, 0.1, 1e-4, 256, 224
COLUMNS = ("arm", "accuracy", "mean member", "diversity", "ECE", "ECE of a member")


def settings_of(seed: int) -> list[MaskSetting]:
    """Return the ensembles in order of importance."""
    masks = [MaskSetting("masks", scale, seed=seed) for scale in (2.0, 3.0)]
    return [MaskSetting("deep", seed=seed), *masks, MaskSetting("dropout", seed=seed)]


def run_imagenet(
    output: Path,
    *,
    data: Path | None,
    epochs: int | None = None,
    minutes: float | None = None,
    limit: int | None = None,
    arms: Sequence[str] | None = None,
    seed: int = 0,
    size: int = SIZE,
) -> Path:
    """Train every ensemble; write calibration curves and a table."""
    folder = imagenet_folder(data)
    outputs = Outputs(output)
    wanted = [
        Arm(each.name, partial(_work, each, folder, epochs or EPOCHS, limit, size), each.family)
        for each in settings_of(seed)
    ]
    identity = {"data": folder.name, "epochs": epochs, "limit": limit, "seed": seed, "size": size}
    found = run_arms(wanted, output, settings=identity, minutes=minutes, only=arms)
    if not found.done:
        raise ValueError(f"No arm was finished: {'; '.join(f'{k}: {v}' for k, v in found.not_run.items())}.")
    records = list(found.done.values())
    curves = {record["family"]: record["curve"] for record in records}
    deep = [record["member_curve"] for record in records if record["setting"]["kind"] == "deep"]
    if deep:
        curves = {"single network": deep[0], **curves}
    table = Table(COLUMNS, [_row(record) for record in records], "Validation images")
    outputs.sections += [
        Section(
            "Calibration",
            outputs.picture(
                "masksembles_imagenet", calibration_figure(curves), "accuracy against confidence"
            ),
            table,
        )
    ]
    if found.not_run:
        outputs.sections.append(Section("Not run", Table(("arm", "why"), list(found.not_run.items()))))
    outputs.results({"arms": found.done, "not_run": found.not_run, "settings": identity})
    print_table(table.columns, table.rows)
    return outputs.page(
        "Masks on ImageNet",
        "Calibration of one network with masks, beside single networks, MC dropout and a deep ensemble.",
    )


def _work(setting: MaskSetting, folder: Path, epochs: int, limit: int | None, size: int) -> Record:
    images = read_folder(folder, size, limit)
    members = make_members(setting, lambda: network("resnet18", images.num_classes), NUM_MEMBERS)
    run = fit(
        members,
        images.train,
        epochs=epochs,
        batch_size=BATCH_SIZE,
        optimizer="sgd",
        optimizer_options={"momentum": 0.9},
        lr=RATE,
        weight_decay=DECAY,
        schedule="cosine",
        last_batch="drop" if len(images.train) >= BATCH_SIZE else "keep",  # type: ignore[arg-type]
        workers=images.workers,
        precision="bf16" if torch.cuda.is_available() else "fp32",
        seed=setting.seed,
        progress=False,
    )
    logits = predict(members, images.validation_batches())
    labels = torch.cat([y for _, y in images.validation_batches()])
    accuracy = float((logits.softmax(-1).mean(0).argmax(-1) == labels).double().mean())
    record: Record = {
        "setting": asdict(setting),
        "family": setting.family,
        "accuracy": accuracy,
        "member_accuracy": float((logits.argmax(-1) == labels).double().mean()),
        "training": training_record(run),
        **pair_numbers(logits, labels),
        **calibration_numbers(logits, labels),
    }
    record["line"] = (
        f"accuracy {accuracy:.4f}, ece {record['ece']:.4f}, diversity {record['diversity']:.4f}, "
        f"{run.epoch} epochs in {run.seconds:.1f} s ({run.engine})"
    )
    return record


def _row(record: Record) -> list[object]:
    names = ("family", "accuracy", "member_accuracy", "diversity", "ece", "member_ece")
    return [record[name] for name in names]
