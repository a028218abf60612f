"""The main job on real data: an ensemble learns some handwritten digits and is asked about others too.

The data comes with scikit-learn, so nothing is downloaded. The digits 0 to 6 are known; 7, 8 and 9 are never
shown in training, and known digits are corrupted by noise, shifts and covers. Tables and page show how good
the predictions are, and whether the ensemble notices what it does not know. The page is that of `ds.report`,
after a picture of the data.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dissensus._signatures import need
from dissensus.data.toy import digits as all_digits
from dissensus.evaluation import Evaluation, evaluate
from dissensus.evaluation.tables import short, text_table
from dissensus.html import Picture, Section, Text
from dissensus.members import DeepEnsemble
from dissensus.plots import panels
from dissensus.randomness import derive
from dissensus.reporting import report
from dissensus.training import fit

__all__ = ["DemoResult", "run"]

# Digits below this one are known; this one and those above it are never shown in training.
KNOWN = 7
NEW = "new digits"
_TRAINING_SHARE = 0.6

Corrupt: TypeAlias = Callable[[Tensor, Generator], Tensor]
Images: TypeAlias = tuple[Tensor, Tensor]


class DemoResult(NamedTuple):
    """Where the demo's page is, every number of it, and the time that it took, training and page together."""

    page: Path
    evaluation: Evaluation
    seconds: float


class Digits(NamedTuple):
    """Images `(batch, 1, 8, 8)` in [0, 1], and the digits that they show, `(batch,)`: known ones, and `new` ones that are never shown."""

    train: Images
    test: Images
    new: Images
    corrupted: Mapping[str, Images]


def run(output: Path | str = "demo-report", *, num_members: int = 5, epochs: int = 40, seed: int = 0) -> DemoResult:
    """Train the ensemble, measure it, print the tables and write the page.

    Args:
        output: Folder for the page, `report.html`.
        num_members: Members of the ensemble; at least two, or nobody can disagree.
        epochs: How often each member goes through the training digits.
        seed: Decides everything.

    Returns:
        The numbers of the tables, and where the page is.
    """
    need("The demo", "demo", "sklearn", "matplotlib")
    if num_members < 2:
        raise ValueError(f"The demo needs at least 2 members, or nobody can disagree; got {num_members}.")
    folder, start = Path(output), time.perf_counter()
    # Before training, so that a folder which cannot be made costs no time.
    folder.mkdir(parents=True, exist_ok=True)
    digits = load(seed)
    print(f"Training {num_members} networks on {len(digits.train[0])} images of the digits 0 to {KNOWN - 1} …")
    ensemble = DeepEnsemble(make_member, num_members=num_members, seed=seed)
    training = fit(
        ensemble,
        digits.train,
        epochs=epochs,
        batch_size=64,
        lr=5e-3,
        schedule="cosine",
        seed=seed,
        device="cpu",  # a GPU would not shorten steps this small
    )
    print(f"Trained in {training.seconds:.1f} s.\n")
    result = evaluate(ensemble, digits.test, {NEW: digits.new[0]}, shifted=digits.corrupted, seed=seed)
    # A terminal has no room for intervals; the page has them.
    numbers = tuple(replace(number, low=None, high=None) for number in result.numbers)
    print(f"{replace(result, numbers=numbers, bootstrap=0).table()}\n\n{_uncertainties(result)}\n")
    title = "What an ensemble knows about handwritten digits"
    page = report(result, folder / "report.html", title=title, first=[_shown(digits)])
    seconds = time.perf_counter() - start
    print(f"Page with pictures: {page} ({seconds:.1f} s in all)")
    return DemoResult(page, result, seconds)


def _uncertainties(result: Evaluation) -> str:
    """Return the mean uncertainty about each set as text, its total and its parts."""
    kinds = {"total": "total_entropy", "data": "expected_entropy", "knowledge": "mutual_information"}
    rows = [
        [part.name, *(short(result.number("mean", part.name, score=name).value) for name in kinds.values())]
        for part in result.sets
    ]
    return text_table(["mean uncertainty, nats", *kinds], rows)


def noise(images: Tensor, generator: Generator) -> Tensor:
    """Add normal noise, its standard deviation half of full ink."""
    return (images + 0.5 * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def shift(images: Tensor, generator: Generator) -> Tensor:
    """Move each digit two pixels left, right, up or down; what leaves the image is lost."""
    side = images.shape[-1]
    padded = F.pad(images, (2, 2, 2, 2))
    corners = torch.tensor([(2, 0), (2, 4), (0, 2), (4, 2)])
    chosen = corners[torch.randint(0, len(corners), (len(images),), generator=generator)]
    pairs = zip(padded, chosen.tolist(), strict=True)
    return torch.stack([image[:, top : top + side, left : left + side] for image, (top, left) in pairs])


def cover(images: Tensor, generator: Generator) -> Tensor:
    """Lay a grey square of four by four pixels somewhere over each digit."""
    corners = torch.randint(0, images.shape[-1] - 3, (len(images), 2), generator=generator)
    covered = images.clone()
    for image, (top, left) in zip(covered, corners.tolist(), strict=True):
        image[:, top : top + 4, left : left + 4] = 0.5
    return covered


# The corruptions of `dissensus.data` are made for photographs and need at least 16 pixels a side.
CORRUPTIONS: Mapping[str, Corrupt] = MappingProxyType({"noise": noise, "shift": shift, "cover": cover})


def load(seed: int = 0) -> Digits:
    """Return the digits, split at random into training and test images."""
    loaded = all_digits()
    assert loaded.y is not None
    x, y = loaded.x.float() / 255, loaded.y
    known = torch.nonzero(y < KNOWN).flatten()
    known = known[torch.randperm(len(known), generator=_generator(seed, "split"))]
    train, test = known.tensor_split([round(_TRAINING_SHARE * len(known))])
    corrupted = {name: (corrupt(x[test], _generator(seed, name)), y[test]) for name, corrupt in CORRUPTIONS.items()}
    return Digits((x[train], y[train]), (x[test], y[test]), (x[y >= KNOWN], y[y >= KNOWN]), corrupted)


def _generator(seed: int, purpose: str) -> Generator:
    return Generator().manual_seed(derive(seed, "demo", purpose))


def make_member() -> nn.Module:
    """Return a small convolutional network with one output a known digit."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 64),
        nn.ReLU(),
        nn.Linear(64, KNOWN),
    )


def _shown(digits: Digits) -> Section:
    """Show known digits in order, new ones, and the known ones corrupted."""
    labels = digits.test[1].tolist()
    known = [labels.index(digit) for digit in range(KNOWN)]
    rows = {"known": digits.test[0][known], "new": digits.new[0][:KNOWN]}
    rows |= {name: images[known] for name, (images, _) in digits.corrupted.items()}
    # One image of all rows, with a white pixel around every digit.
    sheet = torch.cat([torch.cat(list(F.pad(images[:, 0], (1, 1, 1, 1))), dim=1) for images in rows.values()])
    figure, (ax,) = panels(width=5.2, height=0.2 + 4.5 * len(sheet) / sheet.shape[1])
    ax.imshow(sheet.numpy(), cmap="gray_r", vmin=0, vmax=1)
    pitch = len(sheet) / len(rows)
    ax.set(xticks=[], yticks=[(number + 0.5) * pitch - 0.5 for number in range(len(rows))], yticklabels=list(rows))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    text = f"Digits 0 to {KNOWN - 1} are learned from {len(digits.train[0])} images of 8 by 8 pixels; {KNOWN} to 9 are never shown."
    alt = f"Five rows of digits: known ones from 0 to {KNOWN - 1}, new ones, and the known ones with noise, shifted and partly covered."
    return Section("What the ensemble is shown", Text(text), Picture(figure, alt))
