"""`collusion-images` with `setting="imagenet"`: independent against joint training for the architectures of the document's table 1.

The folder has ImageNet's layout: `train/<class>/*` and `val/<class>/*`. Networks are torchvision's, MobileViT is timm's. Images are
cropped and flipped at random in training and cropped in the middle in validation; the rate falls to a fifth when the validation
error has not fallen for six looks, and training ends after fifteen. A look is taken every 2000 batches. Only MobileViT's
learning rate is public; the others are torchvision's usual ones for the batch size.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from dissensus import plots
from dissensus.data.sources import device_of
from dissensus.html import Section, Table, Text
from dissensus.members import DeepEnsemble
from dissensus.members.members import evaluation_mode
from dissensus.objectives import Joint
from dissensus.training import fit
from dissensus.training.schedules import Plateau
from dissensus_studies.arm_log import Arm, Arms, Record, run_arms
from dissensus_studies.image_arms import training_record
from dissensus_studies.image_sets import imagenet_folder
from dissensus_studies.outputs import Outputs, print_table

if TYPE_CHECKING:
    import matplotlib.figure

EPOCHS = 90
CHECK_EVERY, PATIENCE, DROP_PATIENCE = 2000, 15, 6
# Usual means and deviations of ImageNet's channels.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Below so many images one process loads them as soon as several would.
FEW_IMAGES = 5000


@dataclass(frozen=True)
class Row:
    """A row of the document's table 1.

    Attributes:
        name: What torchvision or timm calls the network.
        num_members: Members.
        independent: Top-1 and top-5 accuracy that the document gives for independent training, in per cent.
        joint: The same for joint training.
        lr: Learning rate of a member trained alone.
        weight_decay: Its decay of weights.
        batch_size: Images a step.
        size: Height and width of the images.
    """

    name: str
    num_members: int
    independent: tuple[float, float]
    joint: tuple[float, float]
    lr: float = 0.05
    weight_decay: float = 1e-4
    batch_size: int = 128
    size: int = 224


TABLE_1: Sequence[Row] = (
    Row("resnet18", 5, (68.10, 88.43), (62.74, 84.03)),
    Row("resnet34", 3, (73.11, 91.25), (68.91, 88.01)),
    Row("densenet121", 3, (70.62, 89.51), (60.81, 81.35), batch_size=64, lr=0.025),
    Row("shufflenet_v2_x0_5", 10, (61.00, 81.94), (53.41, 74.88), weight_decay=4e-5),
    Row("shufflenet_v2_x1_0", 5, (68.56, 87.64), (61.96, 81.56), weight_decay=4e-5),
    Row("squeezenet1_1", 5, (56.25, 78.65), (42.69, 65.24), lr=0.005, weight_decay=2e-4),
    Row("mobilenet_v3_small", 5, (67.43, 86.82), (57.34, 78.30), weight_decay=4e-5),
    # The released rate of 0.5 and decay of 1e-7 are for a loss averaged over three members.
    Row(
        "mobilevit_xs",
        3,
        (61.29, 82.84),
        (54.69, 76.79),
        lr=0.5 / 3,
        weight_decay=3e-7,
        batch_size=32,
        size=256,
    ),
)


@dataclass(frozen=True)
class Folder:
    """Training and validation images of a folder, transformed for networks of one size."""

    train: Dataset[Any]
    validation: Dataset[Any]
    num_classes: int

    @property
    def workers(self) -> int:
        """Processes that load images."""
        few = len(self.train) < FEW_IMAGES  # type: ignore[arg-type]
        return 0 if few else min(16, max(1, (os.cpu_count() or 2) - 1))

    def validation_batches(self) -> DataLoader[Any]:
        """Return a loader of validation images, in order."""
        return DataLoader(self.validation, batch_size=256, num_workers=self.workers)


def run_imagenet(
    output: Path,
    *,
    data: Path | None,
    epochs: int | None = None,
    minutes: float | None = None,
    limit: int | None = None,
    arms: Sequence[str] | None = None,
    seed: int = 0,
    rows: Sequence[Row] = TABLE_1,
) -> Path:
    """Train every architecture independently and jointly; write the table beside the document's."""
    folder = imagenet_folder(data)
    _vision()
    outputs = Outputs(output)
    wanted = [
        Arm(
            f"{row.name} M={row.num_members} beta={beta:g}",
            partial(_work, row, beta, folder, epochs, limit, seed),
            row.name,
        )
        for row in rows
        for beta in (0.0, 1.0)
    ]
    identity = {"data": folder.name, "epochs": epochs, "limit": limit, "seed": seed}
    found = run_arms(wanted, output, settings=identity, minutes=minutes, only=arms)
    if not found.done:
        raise ValueError(f"No arm was finished: {'; '.join(f'{k}: {v}' for k, v in found.not_run.items())}.")
    table = _table(rows, found)
    outputs.sections += [
        Section(
            "Independent and joint training",
            Text(
                "Accuracy of the mean of the members' probabilities on the validation images. Learning rates are ours, but for "
                "MobileViT's: the document tuned its own and does not give them."
            ),
            table,
        ),
        *_curves(outputs, found),
    ]
    if found.not_run:
        outputs.sections.append(Section("Not run", Table(("arm", "why"), list(found.not_run.items()))))
    outputs.results({"arms": found.done, "not_run": found.not_run, "settings": identity})
    print_table(table.columns, table.rows)
    return outputs.page(
        "Independent and joint training on ImageNet",
        "All members are judged as an ensemble; joint training minimises that ensemble's error.",
    )


def network(name: str, num_classes: int) -> nn.Module:
    """Make an untrained network of torchvision, or of timm where torchvision has none of this name."""
    models = _vision().models
    if name in models.list_models():
        made: nn.Module = models.get_model(name, weights=None, num_classes=num_classes)
        return made
    try:
        import timm
    except ModuleNotFoundError:
        raise ValueError(
            f"torchvision has no {name}, and timm, which may, is not installed: pip install timm."
        ) from None
    made = timm.create_model(name, pretrained=False, num_classes=num_classes)
    return made


def read_folder(folder: Path, size: int, limit: int | None = None) -> Folder:
    """Return the images of `train/` and `val/`, with random crops and flips in training; `limit` takes so many, evenly spread."""
    vision = _vision()
    change = vision.transforms
    last = [change.ToTensor(), change.Normalize(MEAN, STD)]
    train = vision.datasets.ImageFolder(
        folder / "train",
        change.Compose([change.RandomResizedCrop(size), change.RandomHorizontalFlip(), *last]),
    )
    enlarged = round(size * 256 / 224)
    validation = vision.datasets.ImageFolder(
        folder / "val", change.Compose([change.Resize(enlarged), change.CenterCrop(size), *last])
    )
    if train.classes != validation.classes:
        raise ValueError(f"train/ and val/ of {folder} must have the same classes; they differ.")
    return Folder(_few(train, limit), _few(validation, limit), len(train.classes))


def _few(images: Any, limit: int | None) -> Dataset[Any]:
    if limit is None or limit >= len(images):
        chosen: Dataset[Any] = images
        return chosen
    return Subset(images, [place * len(images) // limit for place in range(limit)])


def _vision() -> Any:
    try:
        import torchvision
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "The imagenet setting takes its networks from torchvision, which this environment lacks. "
            "Install with: pip install 'dissensus[vision]'"
        ) from None
    return torchvision


def _untrained(row: Row, num_classes: int, seed: int) -> DeepEnsemble:
    try:
        return DeepEnsemble(lambda: network(row.name, num_classes), row.num_members, seed)
    except ValueError as problem:
        # A network that is missing is a reason to leave out its row, not to end the study.
        raise RuntimeError(str(problem)) from None


def _work(row: Row, beta: float, folder: Path, epochs: int | None, limit: int | None, seed: int) -> Record:
    images = read_folder(folder, row.size, limit)
    ensemble = _untrained(row, images.num_classes, seed)
    run = fit(
        ensemble,
        images.train,
        objective=Joint(beta=beta),
        epochs=epochs or EPOCHS,
        batch_size=row.batch_size,
        optimizer="sgd",
        optimizer_options={"momentum": 0.9},
        lr=row.lr,
        weight_decay=row.weight_decay,
        schedule=Plateau(0.2, DROP_PATIENCE),
        # A batch of one image would stop batch normalisation.
        last_batch="drop" if len(images.train) >= row.batch_size else "keep",  # type: ignore[arg-type]
        workers=images.workers,
        validation=images.validation_batches(),
        check_every=CHECK_EVERY,
        select="ensemble_loss",
        patience=PATIENCE,
        precision="bf16" if torch.cuda.is_available() else "fp32",
        seed=seed,
        progress=False,
    )
    record: Record = {
        "row": row.name,
        "beta": beta,
        "training": training_record(run),
        **_accuracies(ensemble, images),
    }
    record["line"] = (
        f"top-1 {record['top1']:.4f}, top-5 {record['top5']:.4f}, mean member {record['member_top1']:.4f}, "
        f"{run.epoch} epochs in {run.seconds:.1f} s ({run.engine})"
    )
    return record


def _accuracies(ensemble: DeepEnsemble, images: Folder) -> dict[str, float]:
    """Return top-1 and top-5 accuracy of the ensemble and mean top-1 accuracy of its members, batch by batch."""
    place, total = device_of(ensemble), 0
    sums = torch.zeros(3, dtype=torch.float64)
    with evaluation_mode(ensemble):
        for x, y in images.validation_batches():
            sums += _hits(ensemble(x.to(place)).float(), y.to(place)).cpu()
            total += len(y)
    return dict(zip(("top1", "top5", "member_top1"), (sums / total).tolist(), strict=True))


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    probs = logits.softmax(-1).mean(0)
    best = probs.topk(min(5, probs.shape[-1])).indices == labels[:, None]
    members = (logits.argmax(-1) == labels).double().mean(0).sum()
    return torch.stack([best[:, 0].double().sum(), best.any(-1).double().sum(), members])


def _table(rows: Sequence[Row], found: Arms) -> Table:
    columns = (
        "network",
        "members",
        "independent top-1",
        "top-5",
        "joint top-1",
        "top-5",
        "document: independent",
        "document: joint",
    )
    cells = [
        [row.name, row.num_members, *_percents(row, found), _pair(row.independent), _pair(row.joint)]
        for row in rows
    ]
    return Table(columns, cells, "Accuracy in per cent")


def _percents(row: Row, found: Arms) -> list[float | None]:
    records = [found.done.get(f"{row.name} M={row.num_members} beta={beta:g}") for beta in (0.0, 1.0)]
    return [None if r is None else round(100 * r[name], 2) for r in records for name in ("top1", "top5")]


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.2f} / {values[1]:.2f}"


def _curves(outputs: Outputs, found: Arms) -> list[Section]:
    """Draw validation accuracy of ensembles and members over training, as the right half of the document's figure 6."""
    by_name: dict[str, list[Record]] = {}
    for record in found.done.values():
        by_name.setdefault(record["row"], []).append(record)
    alt = "validation accuracy of {} over training"
    return [
        Section(name, outputs.picture(f"imagenet_{name}", _curve_figure(records), alt.format(name)))
        for name, records in by_name.items()
    ]


def _curve_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    figure, (ax,) = plots.panels(width=5.2)
    for index, record in enumerate(records):
        history = record["training"]["history"]
        colour, name = plots.COLOURS[index], f"beta = {record['beta']:g}"
        ax.plot(history["step"], history["ensemble_accuracy"], color=colour, label=f"{name}, ensemble")
        ax.plot(
            history["step"], history["validation_accuracy"], "--", color=colour, label=f"{name}, mean member"
        )
    ax.set(xlabel="step", ylabel="validation accuracy")
    ax.legend(frameon=False, fontsize="small")
    return figure
