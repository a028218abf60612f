"""`collusion-images` with `setting="imagenet"`: independent against joint training for the architectures of the document's table 1.

The folder has ImageNet's layout: `train/<class>/*` and `val/<class>/*`. Networks are torchvision's, MobileViT is timm's. Images are
cropped and flipped at random in training and cropped in the middle in validation; the rate falls to a fifth when the validation
error has not fallen for six looks, and training ends after fifteen. A look is taken every 2000 batches. Only MobileViT's
learning rate is public; the others are torchvision's usual ones for the batch size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dissensus import plots
from dissensus.data.sources import device_of
from dissensus.html import Section, Table, Text
from dissensus.members import DeepEnsemble
from dissensus.members.members import evaluation_mode
from dissensus.objectives import Joint
from dissensus.training.schedules import Plateau
from dissensus_studies.harness.arm_log import Arm, Arms, Record
from dissensus_studies.harness.image_arms import training_record
from dissensus_studies.harness.image_study import Options
from dissensus_studies.harness.imagenet import SGD, SIZE, fit_folder, network, read_folder, run_folder
from dissensus_studies.harness.outputs import Outputs

if TYPE_CHECKING:
    import matplotlib.figure

EPOCHS = 90
CHECK_EVERY, PATIENCE, DROP_PATIENCE = 2000, 15, 6


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
    size: int = SIZE


TABLE_1: Sequence[Row] = (
    Row("resnet18", 5, (68.10, 88.43), (62.74, 84.03)),
    Row("resnet34", 3, (73.11, 91.25), (68.91, 88.01)),
    Row("densenet121", 3, (70.62, 89.51), (60.81, 81.35), batch_size=64, lr=0.025),
    Row("shufflenet_v2_x0_5", 10, (61.00, 81.94), (53.41, 74.88), weight_decay=4e-5),
    Row("shufflenet_v2_x1_0", 5, (68.56, 87.64), (61.96, 81.56), weight_decay=4e-5),
    Row("squeezenet1_1", 5, (56.25, 78.65), (42.69, 65.24), lr=0.005, weight_decay=2e-4),
    Row("mobilenet_v3_small", 5, (67.43, 86.82), (57.34, 78.30), weight_decay=4e-5),
    # The released rate of 0.5 and decay of 1e-7 are for a loss averaged over three members.
    Row("mobilevit_xs", 3, (61.29, 82.84), (54.69, 76.79), 0.5 / 3, 3e-7, batch_size=32, size=256),
)


def run_imagenet(options: Options, rows: Sequence[Row] = TABLE_1) -> Path:
    """Train every architecture independently and jointly; write the table beside the document's."""
    return run_folder(
        options,
        "Independent and joint training on ImageNet",
        "All members are judged as an ensemble; joint training minimises that ensemble's error.",
        lambda folder: [
            Arm(_arm_name(row, beta), partial(_work, row, beta, folder, options), row.name)
            for row in rows
            for beta in (0.0, 1.0)
        ],
        partial(_sections, rows),
    )


def _arm_name(row: Row, beta: float) -> str:
    return f"{row.name} M={row.num_members} beta={beta:g}"


def _work(row: Row, beta: float, folder: Path, options: Options) -> Record:
    train, validation, classes = read_folder(folder, row.size)
    validation = validation.spread(options.limit)
    ensemble = DeepEnsemble(lambda: network(row.name, len(classes)), row.num_members, options.seed)
    run = fit_folder(
        ensemble,
        train.spread(options.limit),
        objective=Joint(beta=beta),
        epochs=options.epochs or EPOCHS,
        batch_size=row.batch_size,
        **SGD,
        lr=row.lr,
        weight_decay=row.weight_decay,
        schedule=Plateau(0.2, DROP_PATIENCE),
        validation=validation.batches(),
        check_every=CHECK_EVERY,
        select="ensemble_loss",
        patience=PATIENCE,
        seed=options.seed,
    )
    record: Record = {
        "row": row.name,
        "beta": beta,
        "training": training_record(run),
        **_accuracies(ensemble, validation.batches()),
    }
    record["line"] = (
        f"top-1 {record['top1']:.4f}, top-5 {record['top5']:.4f}, mean member {record['member_top1']:.4f}, "
        f"{run.epoch} epochs in {run.seconds:.1f} s ({run.engine})"
    )
    return record


def _accuracies(ensemble: DeepEnsemble, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return top-1 and top-5 accuracy of the ensemble and mean top-1 accuracy of its members, batch by batch."""
    place, total = device_of(ensemble), 0
    sums = torch.zeros(3, dtype=torch.float64)
    with evaluation_mode(ensemble):
        for x, y in batches:
            sums += _hits(ensemble(x.to(place)).float(), y.to(place)).cpu()
            total += len(y)
    return dict(zip(("top1", "top5", "member_top1"), (sums / total).tolist(), strict=True))


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    probs = logits.softmax(-1).mean(0)
    best = probs.topk(min(5, probs.shape[-1])).indices == labels[:, None]
    members = (logits.argmax(-1) == labels).double().mean(0).sum()
    return torch.stack([best[:, 0].double().sum(), best.any(-1).double().sum(), members])


def _sections(rows: Sequence[Row], found: Arms, outputs: Outputs) -> tuple[list[Table], list[Section]]:
    ours = ("independent top-1", "top-5", "joint top-1", "top-5")
    cells = [
        [row.name, row.num_members, *_percents(row, found), _pair(row.independent), _pair(row.joint)] for row in rows
    ]
    columns = ("network", "members", *ours, "document: independent", "document: joint")
    table = Table(columns, cells, "Accuracy in per cent")
    how = Text(
        "Accuracy of the mean of the members' probabilities on the validation images. Learning rates are ours, but for "
        "MobileViT's: the document tuned its own and does not give them."
    )
    by_name: dict[str, list[Record]] = {}
    for record in found.done.values():
        by_name.setdefault(record["row"], []).append(record)
    curves = [
        Section(
            name,
            outputs.picture(f"imagenet_{name}", _curve_figure(records), f"validation accuracy of {name} over training"),
        )
        for name, records in by_name.items()
    ]
    return [table], [Section("Independent and joint training", how, table), *curves]


def _percents(row: Row, found: Arms) -> list[float | None]:
    records = [found.done.get(_arm_name(row, beta)) for beta in (0.0, 1.0)]
    return [None if r is None else round(100 * r[name], 2) for r in records for name in ("top1", "top5")]


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.2f} / {values[1]:.2f}"


def _curve_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Draw validation accuracy of ensembles and members over training, as the right half of the document's figure 6."""
    figure, (ax,) = plots.panels(width=5.2)
    for colour, record in zip(plots.COLOURS, records, strict=False):
        history, name = record["training"]["history"], f"beta = {record['beta']:g}"
        ax.plot(history["step"], history["ensemble_accuracy"], color=colour, label=f"{name}, ensemble")
        label = f"{name}, mean member"
        ax.plot(history["step"], history["validation_accuracy"], "--", color=colour, label=label)
    ax.set(xlabel="step", ylabel="validation accuracy")
    ax.legend(frameon=False, fontsize="small")
    return figure
