"""Image sets and an ensemble in; the trained ensemble, a compact record of what it is worth, and its outputs out."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dissensus.data.augment import Augmentation, Compose, HorizontalFlip, RandomCrop, Rotation
from dissensus.evaluation import Number, evaluate
from dissensus.evaluation.results import ALL_CORRUPTIONS
from dissensus.members import Members
from dissensus.objectives import Objective
from dissensus.predictions import predict
from dissensus.randomness import Noise
from dissensus.training import Run, fit
from dissensus.training.schedules import MultiStep
from dissensus_studies.harness.arm_log import UNDER_WAY, Record
from dissensus_studies.harness.image_sets import ImageSets

Changes = Literal["crop", "crop+rotation"]
BATCH_SIZE = 128
BOOTSTRAP = 200
# Of the images that are corrupted, in each severity: 19 corruptions of 10 000 images would take longer than training.
CORRUPTED_IMAGES = 2000
_METRICS = ("accuracy", "member_accuracy", "nll", "brier", "ece", "smooth_ece", "disagreement")


class PixelNorm(nn.Module):
    """First layer of a network: images of bytes, or of numbers in [0, 1], to channels of mean 0 and variance 1."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        """Return images as the next layer takes them, float32."""
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        return (x - self.mean) / self.std


def on_pixels(net: nn.Module, sets: ImageSets) -> nn.Sequential:
    """Put a `PixelNorm` with the training images' moments before a network: it then takes uint8 images.

    Example:
        >>> from dissensus.architectures import cnn
        >>> from dissensus_studies.harness.image_sets import load_images
        >>> sets = load_images(None, limit=50)
        >>> on_pixels(cnn(sets.num_classes), sets)(sets.test.x[:2]).shape
        torch.Size([2, 8])
    """
    return nn.Sequential(OrderedDict(pixels=PixelNorm(sets.mean, sets.std), net=net))


@dataclass(frozen=True)
class UnitRange:
    """An augmentation's first step: bytes become numbers in [0, 1]."""

    def __call__(self, x: Tensor, y: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Return floating-point images."""
        return (x.float() / 255 if x.dtype == torch.uint8 else x), y


_STEPS: Mapping[Changes, tuple[Augmentation, ...]] = {
    "crop": (RandomCrop(4),),
    "crop+rotation": (UnitRange(), RandomCrop(4), Rotation(15.0)),
}


def augmentation(sets: ImageSets, changes: Changes = "crop") -> Augmentation:
    """Return random crops after padding by 4, flips where a mirrored image is as good, and rotation by up to 15 degrees."""
    return Compose((*_STEPS[changes], *((HorizontalFlip(),) if sets.mirrored else ())))


def released_steps(epochs: int) -> MultiStep:
    """Return the decay by 0.2 after 30, 50 and 70 of 80 epochs, at the same shares of a run of another length.

    Example:
        >>> released_steps(8).milestones
        (3.0, 5.0, 7.0)
    """
    return MultiStep(tuple(epochs * share / 80 for share in (30, 50, 70)), 0.2)


def fit_images(
    members: Members,
    sets: ImageSets,
    objective: Objective | None = None,
    *,
    epochs: int,
    lr: float | Sequence[float] = 0.1,
    optimizer: str = "sgd",
    changes: Changes = "crop",
    all_train: bool = False,
    watch: Literal["validation", "test", "nothing"] = "validation",
    transform: Callable[[Tensor], Tensor] | None = None,
    part: str | None = None,
    **options: Any,
) -> Run:
    """Train on images, on a GPU where there is one and then in bf16; a step's augmentation runs on the device too.

    Members take uint8 images (see `on_pixels`), or what `transform`, applied to all images once, makes of them. `changes` are those of
    `augmentation`; `all_train` trains on the validation images too; `watch` is what `validation` of `fit` is. `part` is the name of this
    training among those of its arm, which goes on from its last checkpoint if it was ended; None begins anew, for trainings that are
    timed or have a callback that gathers something. All else is as for `fit`; "sgd" has momentum 0.9 unless `optimizer_options` differ.
    """
    prepare = transform or (lambda x: x)
    train = sets.all_train if all_train else sets.train
    watched = {"validation": sets.validation, "test": sets.test, "nothing": None}[watch]
    usual: dict[str, Any] = {
        "optimizer_options": {"momentum": 0.9} if optimizer == "sgd" else {},
        "weight_decay": 5e-4,
        "schedule": "one_cycle",
        "batch_size": BATCH_SIZE,
        "precision": "bf16" if torch.cuda.is_available() else "fp32",
        "progress": False,
    }
    if part is not None and (folder := UNDER_WAY.get()) is not None:
        usual |= {"checkpoint_dir": folder / part, "checkpoint_every": max(1, epochs // 8), "resume": True}
    return fit(
        members,
        (prepare(train.x), train.y),
        objective=objective,
        epochs=epochs,
        lr=lr,
        optimizer=optimizer,
        augment=augmentation(sets, changes),
        validation=None if watched is None else (prepare(watched.x), watched.y),
        **(usual | options),
    )


def training_record(run: Run) -> Record:
    """Return what is kept of a training run: time, engine, and the history as one list for each column."""
    columns = [name for name in run.history.columns if name != "member"]
    return {
        "epochs": run.epoch,
        "steps": run.step,
        **{name: getattr(run, name) for name in ("seconds", "engine", "best", "best_step", "stopped_early")},
        "history": {name: [_rounded(value) for value in run.history.by_epoch(name)] for name in columns},
    }


def record_of(setting: Any, run: Run) -> Record:
    """Return what every record has besides numbers: the setting (a dataclass) and the training."""
    return {"setting": asdict(setting), "training": training_record(run)}


def measure(
    members: Members,
    sets: ImageSets,
    *,
    corruptions: Iterable[str] | None = None,
    severities: Iterable[int] = (1, 2, 3, 4, 5),
    corrupted_images: int = CORRUPTED_IMAGES,
    scores: Sequence[str] | None = None,
    **options: Any,
) -> Record:
    """Evaluate on test and unknown images, on a GPU in bf16 as in training; return the numbers of a results file.

    `corruptions` are applied at each of the severities to the first `corrupted_images` test images; none by default. `options` are
    what `evaluate` takes, such as `name`, `seed`, and `transform=sets.normalise` for members without a `PixelNorm`.

    Returns:
        `{"test": {metric: [value, low, high]}, "members": [accuracy, ...], "auroc": {set: {score: [value, low, high]}}}`;
        sets of "auroc" are the unknown ones and "near" and "far", their averages. With corruptions also
        `{"corrupted": {"1": {metric: [...]}, ..., "all": ...}, "corruption": {name: {"1": {...}}}}`.
    """
    common: dict[str, Any] = {"bootstrap": BOOTSTRAP, "name": "ensemble", **options}
    with as_in_training():
        result = evaluate(members, sets.test, dict(sets.ood), groups=sets.ood_groups, scores=scores, **common)
    detected = [n for n in result.numbers if n.metric == "auroc" and n.score and n.kind in ("ood", "group")]
    parts = dict.fromkeys(n.set for n in detected)
    record: Record = {
        "test": _metrics(result.numbers, "id"),
        "members": [round(n.value, 5) for n in result.numbers if n.member is not None and n.set == "id"],
        "auroc": {part: {n.score: _interval(n) for n in detected if n.set == part} for part in parts},
    }
    if corruptions is None:
        return record
    few, levels = (sets.test.x[:corrupted_images], sets.test.y[:corrupted_images]), list(severities)
    with as_in_training():
        corrupted = evaluate(
            members, few, corruptions=corruptions, severities=levels, scores=scores or ["bma"], **common
        )

    def by_severity(name: str) -> Record:
        return {str(level): _metrics(corrupted.numbers, name, level) for level in sorted(levels)}

    everywhere = by_severity(ALL_CORRUPTIONS) | {"all": _metrics(corrupted.numbers, ALL_CORRUPTIONS)}
    names = [name for name in corrupted.set_names if name not in ("id", ALL_CORRUPTIONS)]
    return record | {"corrupted": everywhere, "corruption": {name: by_severity(name) for name in names}}


def summary_line(record: Mapping[str, Any]) -> str:
    """Return the main numbers of an arm as one line for the screen."""
    test, members, training = record["test"], record.get("members"), record.get("training")
    parts = [
        f"accuracy {test['accuracy'][0]:.4f}",
        members and f"members {min(members):.4f}-{max(members):.4f}",
        f"nll {test['nll'][0]:.4f}, ece {test['ece'][0]:.4f}",
        training and f"{training['epochs']} epochs in {training['seconds']:.1f} s ({training['engine']})",
    ]
    return ", ".join(filter(None, parts))


def save_outputs(members: Members, sets: ImageSets, path: Path) -> Tensor:
    """Keep all members' logits on test images as float16, for later diagnosis; return them.

    The file has `test` (members, images, classes) and `labels`.
    """
    with as_in_training():
        test = predict(members, sets.test.x, batch_size=1024).float().cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, labels=sets.test.y.numpy(), test=test.numpy().astype(np.float16))
    return test


def as_in_training() -> AbstractContextManager[Any]:
    """Return the precision of `fit_images`."""
    return torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else nullcontext()


def _metrics(numbers: Iterable[Number], part: str, severity: int | None = None) -> dict[str, list[float | None]]:
    wanted = (part, severity, None, None)
    return {
        n.metric: _interval(n)
        for n in numbers
        if n.metric in _METRICS and (n.set, n.severity, n.score, n.member) == wanted
    }


def _interval(number: Number) -> list[float | None]:
    return [None if end is None else _rounded(end) for end in (number.value, number.low, number.high)]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
