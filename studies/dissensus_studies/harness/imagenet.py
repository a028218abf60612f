"""What settings on a folder of ImageNet's layout have in common: `train/<class>/*` and `val/<class>/*` in, arms and a page out.

Networks are torchvision's, or timm's where torchvision has none of that name.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dissensus.data.corruptions import corrupt
from dissensus.data.images import decode, find_pictures, open_picture
from dissensus.html import Section, Table
from dissensus.members import Members
from dissensus.training import Run, fit
from dissensus_studies.harness.arm_log import Arm, Arms, run_arms
from dissensus_studies.harness.image_sets import imagenet_folder, normalised
from dissensus_studies.harness.image_study import Options
from dissensus_studies.harness.outputs import Outputs, print_table

# Usual means and deviations of ImageNet's channels.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224
# Below so many images one process loads them as soon as several would.
FEW_IMAGES = 5000
SGD: Mapping[str, Any] = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}


@dataclass(frozen=True)
class FolderImages(Dataset[tuple[Tensor, int]]):
    """Image files as normalised tensors, cropped and flipped at random in training, cropped in the middle otherwise.

    Attributes:
        paths: The files.
        labels: Class of each.
        size: Height and width.
        training: Whether to crop and flip at random; draws come from torch's generator, which `fit` seeds.
        corruption: Name and severity of a corruption.
    """

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    size: int = SIZE
    training: bool = True
    corruption: tuple[str, int] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        picture = (_random_crop if self.training else _middle)(path, self.size)
        pixels = decode([picture], [str(path)], self.size).expand(1, 3, -1, -1)
        if self.training and torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        if self.corruption is not None:
            name, severity = self.corruption
            pixels = corrupt(pixels.contiguous(), name, severity, index=[index])
        return normalise(pixels)[0], self.labels[index]

    @property
    def workers(self) -> int:
        """Processes that load images."""
        return 0 if len(self) < FEW_IMAGES else min(16, max(1, (os.cpu_count() or 2) - 1))

    def spread(self, limit: int | None) -> "FolderImages":
        """Return at most so many images, evenly spread: files are in order of their classes."""
        count = len(self) if limit is None else min(limit, len(self))
        places = [place * len(self) // count for place in range(count)]
        return replace(
            self,
            paths=tuple(self.paths[place] for place in places),
            labels=tuple(self.labels[place] for place in places),
        )

    def pixels(self) -> Tensor:
        """Return all images as uint8, cropped in the middle."""
        x = decode(map(open_picture, self.paths), [str(path) for path in self.paths], self.size)
        return x.expand(-1, 3, -1, -1).contiguous()

    def batches(self) -> DataLoader[Any]:
        """Return a loader of the images, in order."""
        return DataLoader(self, batch_size=256, num_workers=self.workers)


def _random_crop(path: Path, size: int) -> Any:
    """Return a part of 8 to 100 per cent of a picture, of a shape between 3:4 and 4:3, in the wanted size."""
    picture = open_picture(path).convert("RGB")
    width, height = picture.size
    draw = torch.rand(4).tolist()
    area, shape = width * height * (0.08 + 0.92 * draw[0]), (3 / 4) ** (1 - 2 * draw[1])
    wide, high = min(width, round((area * shape) ** 0.5)), min(height, round((area / shape) ** 0.5))
    left, top = int(draw[2] * (width - wide + 1)), int(draw[3] * (height - high + 1))
    return picture.resize((size, size), box=(left, top, left + max(wide, 1), top + max(high, 1)))


def _middle(path: Path, size: int) -> Any:
    """Return the middle of a picture whose short side is made 256/224 of the wanted one."""
    picture = open_picture(path).convert("RGB")
    scale = size * 256 / 224 / min(picture.size)
    picture = picture.resize([max(size, round(side * scale)) for side in picture.size], 3)
    left, top = ((side - size) // 2 for side in picture.size)
    return picture.crop((left, top, left + size, top + size))


def normalise(x: Tensor) -> Tensor:
    """Return uint8 images as networks take them."""
    return normalised(x, MEAN, STD)


def read_folder(folder: Path, size: int) -> tuple[FolderImages, FolderImages, list[str]]:
    """Return the images of `train/` and `val/`, and the names of the classes."""
    train, val = (find_pictures(folder / part) for part in ("train", "val"))
    if train.labels is None or val.labels is None:
        raise ValueError(f"train/ and val/ of {folder} must have a subfolder for each class.")
    classes = sorted(set(train.labels))
    number = {name: place for place, name in enumerate(classes)}
    images = FolderImages(tuple(train.paths), tuple(number[name] for name in train.labels), size)
    return images, read_part(folder, "val", classes, size), classes


def read_part(folder: Path, part: str, classes: Sequence[str], size: int) -> FolderImages:
    """Return the images of a subfolder to judge by; without classes, all have the label -1."""
    found = find_pictures(folder / part)
    labels = found.labels or ("",) * len(found.paths)
    strange = sorted(set(labels) - set(classes)) if classes else []
    if strange:
        raise ValueError(f"{part}/ of {folder} has classes that train/ lacks: {', '.join(strange[:3])}.")
    number = {name: place for place, name in enumerate(classes)}
    return FolderImages(tuple(found.paths), tuple(number.get(name, -1) for name in labels), size, False)


def network(name: str, num_classes: int) -> nn.Module:
    """Make an untrained network of torchvision, or of timm where torchvision has none of this name."""
    try:
        from torchvision import models
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "The imagenet setting takes its networks from torchvision, which this environment lacks. "
            "Install with: pip install 'dissensus[vision]'"
        ) from None
    if name in models.list_models():
        made: nn.Module = models.get_model(name, weights=None, num_classes=num_classes)
        return made
    try:
        import timm
    except ModuleNotFoundError:
        # An arm that fails in this way is named, and the next is begun.
        raise RuntimeError(
            f"torchvision has no {name}, and timm, which may, is not installed: pip install timm."
        ) from None
    made = timm.create_model(name, pretrained=False, num_classes=num_classes)
    return made


def fit_folder(members: Members, images: FolderImages, *, batch_size: int, **options: Any) -> Run:
    """Train on a folder's images, on a GPU in bf16; `options` are those of `fit`."""
    return fit(
        members,
        images,
        batch_size=batch_size,
        # A batch of one image would stop batch normalisation.
        last_batch="drop" if len(images) >= batch_size else "keep",
        workers=images.workers,
        precision="bf16" if torch.cuda.is_available() else "fp32",
        progress=False,
        **options,
    )


def run_folder(
    options: Options,
    title: str,
    lead: str,
    arms: Callable[[Path], Sequence[Arm]],
    sections: Callable[[Arms, Outputs], tuple[Sequence[Table], Sequence[Section]]],
    *,
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Run the arms of a study's setting on a folder of ImageNet's layout; write results and a page.

    Args:
        options: What was asked for.
        title: Of the page.
        lead: What it opens with.
        arms: The arms on a folder.
        sections: Returns the tables of `tables.md`, the first of which the screen shows too, and the sections of the page.
        settings: What records depend on besides data, epochs, limit and seed.
    """
    folder = imagenet_folder(options.data, known=options.known, quick=options.quick)
    identity: dict[str, object] = {
        "data": folder.name,
        "epochs": options.epochs,
        "limit": options.limit,
        "seed": options.seed,
    }
    identity.update(settings or {})
    outputs = Outputs(options.output)
    found = run_arms(arms(folder), options.output, settings=identity, minutes=options.minutes, only=options.arms)
    if not found.done:
        raise ValueError(f"No arm was finished: {'; '.join(f'{k}: {v}' for k, v in found.not_run.items())}.")
    outputs.results({"arms": found.done, "not_run": found.not_run, "settings": identity})
    tables, made = sections(found, outputs)
    outputs.sections += made
    if found.not_run:
        outputs.sections.append(Section("Not run", Table(("arm", "why"), list(found.not_run.items()))))
    outputs.markdown(tables)
    print_table(tables[0].columns, tables[0].rows)
    return outputs.page(title, lead)
