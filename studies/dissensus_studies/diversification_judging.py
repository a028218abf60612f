"""A trained ensemble of `diversification` in, everything that is measured of it out; and detectors that look at features alone."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dissensus.data.sources import device_of
from dissensus.detectors import DETECTORS
from dissensus.members import DeepEnsemble, Members
from dissensus.predictions import predict
from dissensus_studies.anchoring_arms import without_head
from dissensus_studies.arm_log import Record
from dissensus_studies.diversification_measures import (
    Detected,
    Judged,
    Scored,
    detection_record,
    gains_over,
    hits_interval,
    labelled_sets,
    quality_record,
)
from dissensus_studies.diversification_ranks import ranks_of
from dissensus_studies.diversification_settings import Setting, file_name
from dissensus_studies.image_sets import ImageSets

# Images that members differ most and least on.
SHOWN_IMAGES = 5
# Training images that detectors of features are fitted to.
DETECTOR_IMAGES = 10_000
_BATCH = 2048


def judge(
    members: Members, setting: Setting, inputs: Judged, references: Path, outputs: Path | None = None
) -> Record:
    """Return everything that is measured of a trained ensemble, and compare it with its deep ensemble.

    Args:
        members: The ensemble.
        setting: What it is.
        inputs: What it is judged by.
        references: Folder of the deep ensembles' scores.
        outputs: File to keep its logits on test and unknown inputs in.
    """
    logits = inputs.map(partial(predict, members, batch_size=_BATCH))
    if outputs is not None:
        _save_outputs(logits, outputs)
    scored = Scored.of(logits)
    detected = scored.detected(inputs.groups)
    record = quality_record(logits) | detection_record(detected)
    path = reference_path(references, setting, "npz")
    if setting.reference == setting.name:
        scored.save(path)
    elif path.is_file() and setting.num_members > 1:
        groups = tuple((name, tuple(sets)) for name, sets in inputs.groups.items())
        reference = _reference(path, path.stat().st_mtime_ns, groups, logits.test.device)
        record |= gains_over(reference, detected)
    if setting.num_members > 1:
        record["gallery"] = disputed(logits.test, scored)
    if setting.num_members > 1 and isinstance(members, DeepEnsemble):
        record["accuracy"] = _with_soup(record["accuracy"], members, inputs)
    return record


def reference_path(folder: Path, setting: Setting, suffix: str) -> Path:
    """Return the file about the deep ensemble that an ensemble is compared with."""
    return folder / f"{file_name(setting.reference)}.{suffix}"


@lru_cache(maxsize=2)
def _reference(
    path: Path, written: int, groups: tuple[tuple[str, tuple[str, ...]], ...], device: torch.device
) -> Detected:
    """Return the AUROCs of a deep ensemble; most arms in a row are compared with the same one."""
    return Scored.load(path, device).detected(dict(groups))


def _save_outputs(logits: Judged, path: Path) -> None:
    """Keep logits as float16, as `image_arms.save_outputs` does, for later diagnosis."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: Mapping[str, Tensor] = {"test": logits.test, **logits.ood}
    halves = {name: values.half().cpu().numpy() for name, values in arrays.items()}
    np.savez(path, labels=logits.labels.cpu().numpy(), **halves)  # type: ignore[arg-type]


def disputed(logits: Tensor, scored: Scored) -> Record:
    """Return the known images of the largest and of the smallest PDS: their places, the ensemble's answer and every member's."""
    values = scored.test[scored.names.index("predictive_diversity")]
    order = values.argsort(descending=True).cpu()
    count = min(SHOWN_IMAGES, len(order) // 2)
    answers = logits.argmax(-1).cpu()
    together = logits.float().mean(0).argmax(-1).cpu()
    chosen = {"most": order[:count], "least": order[-count:]}
    return {
        name: [
            {
                "image": int(i),
                "ensemble": int(together[i]),
                "answers": answers[:, i].tolist(),
                "pds": round(float(values[i]), 5),
            }
            for i in places
        ]
        for name, places in chosen.items()
    }


def _with_soup(found: Record, members: DeepEnsemble, inputs: Judged) -> Record:
    """Add the accuracy of the average of all members' weights."""
    soup = DeepEnsemble.from_members([members.soup()])
    soup.to(device_of(members))
    answered = replace(inputs, ood={}).map(partial(_single, soup), outputs=0)
    for name, answers in labelled_sets(answered).items():
        found[name]["soup"] = hits_interval(answers, inputs.labels[: len(answers[0])])
    return found


def image_detectors(members: Members, sets: ImageSets, images: Judged) -> Record:
    """Return the AUROC of detectors fitted to the last features of a network."""
    place = images.test.device
    net = DeepEnsemble.from_members([without_head(members.member(0))])
    net.to(place)
    run = partial(_single, net)
    train = run(sets.train.x[:DETECTOR_IMAGES].to(place))
    return detector_record(train, sets.train.y, images.map(run, outputs=0))


def _single(net: DeepEnsemble, x: Tensor) -> Tensor:
    return predict(net, x, batch_size=_BATCH)[0]


def detector_record(train: Tensor, labels: Tensor, judged: Judged) -> Record:
    """Return the AUROC of each detector of features, as of scores.

    Args:
        train: Features of training images.
        labels: Their classes.
        judged: Features of what is judged by.
    """
    train, labels = train[:DETECTOR_IMAGES].float(), labels[:DETECTOR_IMAGES].to(train.device)
    fitted = [
        make(train, labels, **({"k": min(50, len(train))} if name == "nearest_neighbours" else {}))
        for name, make in DETECTORS.items()
    ]

    def run(x: Tensor) -> Tensor:
        return torch.stack([each.score(x.float()).double() for each in fitted])

    scores = judged.map(run)
    found = ranks_of(scores.test, scores.ood, scores.corrupted, judged.groups)
    return {part: dict(zip(DETECTORS, ranks.intervals(), strict=True)) for part, ranks in found.items()}
