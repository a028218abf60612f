"""The data of a recipe: its settings, the rows that are trained on and held out, and from files to what members see."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.data.files import Loaded, LoadedPart, Missing, load, load_parts, sized
from dissensus.data.fingerprints import row_hashes
from dissensus.data.images import Layout, describe_shape, height_and_width, match_images
from dissensus.data.tables import TableEncoder
from dissensus.data.toy import BUILT_IN
from dissensus.randomness import derive, mix
from dissensus.training.checkpoints import CheckpointFolder

# The checkpoint of a finished run's ensemble, and what its tensors of rows are called.
ENSEMBLE = "ensemble"
ROWS = "rows."


def read_source(source: str | Path, target: str | None = None, **options: Any) -> Loaded:
    """Read a file or folder, or a built-in data set by its name."""
    if not is_built_in(source):
        return load(source, target, **options)
    return sized(BUILT_IN[str(source)](), options.get("size"))


def is_built_in(source: str | Path) -> bool:
    """Whether this names a built-in data set, and no file."""
    return str(source) in BUILT_IN and not Path(source).exists()


def label_names(loaded: Loaded) -> list[str]:
    """Return each row's label as text."""
    assert loaded.y is not None
    if loaded.y.is_floating_point() or loaded.y.ndim != 1:
        raise ValueError(
            f"Class labels must be whole numbers or text, one a row; the target holds {loaded.y.dtype} shaped "
            f"{tuple(loaded.y.shape)}. For regression choose a loss such as 'gaussian_nll' under [objective]."
        )
    return [str(value) if loaded.classes is None else loaded.classes[value] for value in loaded.y.tolist()]


def class_indices(loaded: Loaded, classes: Sequence[str]) -> Tensor:
    """Return the place of each row's label in the list of classes."""
    place = {name: index for index, name in enumerate(classes)}
    labels = label_names(loaded)
    if unknown := sorted(set(labels) - set(place)):
        raise ValueError(
            f"The data holds the classes {listed(unknown, 3)}, which the run does not know; it knows {listed(classes, 10)}."
        )
    return torch.tensor([place[label] for label in labels])


def listed(names: Sequence[str], most: int = 20) -> str:
    """Return names with commas between, and how many more there are where they are too many to show."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


# In the order in which rows are drawn for them.
_HELD_OUT = ("validation", "test", "calibration")
# A table's whole numbers are classes if there are so few of them.
_MOST_CLASSES_OF_NUMBERS = 20


@dataclass(frozen=True)
class DataSettings:
    """The table `[data]` of a recipe.

    Attributes:
        path: A file, a folder of images, or a built-in set (`digits`, `breast_cancer`, `diabetes`).
        target: Name of the target column or array.
        validation: Share of the rows to validate on, or a file of its own.
        calibration: Share of the rows that the alarm is calibrated on, or a file of its own; training never sees them. Where
            there are none the validation rows serve.
        test: Share of the rows that training never sees, for `dissensus evaluate`; or a file of its own.
        leave_out: Classes that training never sees; `dissensus evaluate` asks whether the ensemble notices them.
        unlabelled: A file of inputs without labels, for objectives that read them.
        standardise: Give every feature, or every channel of images, mean 0 and variance 1.
        standardise_target: Do the same to regression targets; predictions come back in the units of the data.
        inputs: Name of the inputs, where a file has several arrays or columns of images.
        size: Height and width to give images: one number for squares, or [height, width].
        layout: Where arrays of images have their channels: "auto", "channels_first" or "channels_last".
        drop: Columns of a table to leave out.
        keep: Columns of a table to read although they look like numbers of rows, or never change.
        missing: What to do where values of a table are missing: "impute" fills them in and marks them, "drop" leaves such
            rows out, "error" refuses them.
        seed: Decides which rows are held out; the ensemble's seed does not, so that runs can be compared.
    """

    path: str
    target: str | None = None
    validation: float | str = 0.1
    calibration: float | str = 0.0
    test: float | str = 0.0
    leave_out: Sequence[str | int] = ()
    unlabelled: str | None = None
    standardise: bool = True
    standardise_target: bool = True
    inputs: str | None = None
    size: int | list[int] | None = None
    layout: Layout = "auto"
    drop: Sequence[str] = ()
    keep: Sequence[str] = ()
    missing: Missing = "impute"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, share in self.shares.items():
            if not 0 <= share < 1:
                raise ValueError(f"{name} in [data] must be a share from 0 to 1, or a file; got {share}.")
        if sum(self.shares.values()) >= 1:
            raise ValueError(f"{', '.join(_HELD_OUT)} in [data] take all rows; nothing is left to train on.")
        if self.size is not None:
            height_and_width(self.size)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the rows that are held out, by their purpose; 0 where a file of its own serves."""
        return {name: 0.0 if isinstance(own := getattr(self, name), str) else own for name in _HELD_OUT}

    def resolved(self, folder: Path) -> "DataSettings":
        """Return the settings with paths that do not depend on where they are read from."""
        files: dict[str, Any] = {
            name: str((folder / Path(file).expanduser()).absolute())
            for name in ("path", *_HELD_OUT, "unlabelled")
            if isinstance(file := getattr(self, name), str) and file not in BUILT_IN
        }
        return replace(self, **files)

    def read(self, source: str, columns: TableEncoder | None = None) -> Loaded:
        """Read a file as the settings say, a table's columns as those of another where they are given."""
        of_tables = {"drop": tuple(self.drop), "keep": tuple(self.keep), "missing": self.missing, "columns": columns}
        return read_source(source, self.target, inputs=self.inputs, size=self.size, layout=self.layout, **of_tables)


@dataclass(frozen=True)
class Sets:
    """The rows of a recipe's data.

    Attributes:
        train: Trained on.
        validation: Looked at during training; None where nothing is.
        calibration: What the alarm is calibrated on; None where nothing was held out for it.
        test: Never seen; None where nothing was held out.
        left_out: Rows of classes that training never sees; None where there are none.
        classes: Names of the classes that are trained; None for regression.
    """

    train: Loaded
    validation: Loaded | None
    test: Loaded | None
    calibration: Loaded | None
    left_out: Loaded | None
    classes: tuple[str, ...] | None


def load_sets(settings: DataSettings, classification: bool | None = None) -> Sets:
    """Read and split the data, the same rows for the same settings; whether targets are classes follows from them by default."""
    whole = settings.read(settings.path)
    if whole.y is None:
        raise ValueError(f"The data of {settings.path} has no targets. Name them with target under [data].")
    classification = not is_regression(whole) if classification is None else classification
    names = label_names(whole) if classification else _no_names(whole, settings)
    if lacking := sorted({str(name) for name in settings.leave_out} - set(names)):
        raise ValueError(
            f"leave_out in [data] names the class {lacking[0]!r}, which the data does not hold; it holds "
            f"{listed(_sorted_names(names))}."
        )
    known, unknown = split_classes(names, settings.leave_out)
    labels = [names[row] for row in known.tolist()]
    classes = _classes_of(labels) if classification else None
    train, *others = (known[rows] for rows in split_rows(labels, [*settings.shares.values()], settings.seed))
    if len(train) == 0:
        raise ValueError(f"Nothing is left to train on of {len(known)} rows. Hold out less.")
    whole = whole.learned_from(train)

    def part(name: str, rows: Tensor) -> Loaded | None:
        if isinstance(file := getattr(settings, name, None), str):
            return without_left_out(settings.read(file, whole.columns), settings.leave_out)
        return whole.rows(rows) if len(rows) else None

    validation, test, calibration, left_out = map(part, (*_HELD_OUT, "left_out"), (*others, unknown))
    return Sets(whole.rows(train), validation, test, calibration, left_out, classes)


def is_regression(loaded: Loaded) -> bool:
    """Whether targets are values: numbers with fractions, several a row, or many different whole numbers of a table."""
    assert loaded.y is not None
    if loaded.y.is_floating_point() or loaded.y.ndim > 1:
        return True
    numbers = loaded.classes is None and loaded.table is not None
    return numbers and len(loaded.y.unique()) > _MOST_CLASSES_OF_NUMBERS


def _no_names(whole: Loaded, settings: DataSettings) -> list[str]:
    """Return one name for all rows of a regression, whose targets must be numbers."""
    if settings.leave_out:
        raise ValueError("leave_out in [data] names classes; this run is a regression.")
    if whole.classes is not None:
        raise ValueError(
            f"The loss is one for numbers, but the target {settings.target or ''} holds the classes {listed(whole.classes, 5)}. Set "
            "loss = 'cross_entropy' under [objective], or name another target under [data]."
        )
    return ["all"] * len(whole)


def _classes_of(labels: Sequence[str]) -> tuple[str, ...]:
    classes, rows = _sorted_names(labels), len(labels)
    if len(classes) < 2:
        raise ValueError(f"There must be two classes or more to tell apart; the data holds {listed(classes)}.")
    if len(classes) > max(10, rows / 2):
        raise ValueError(
            f"The target holds {len(classes)} different classes in {rows} rows ({listed(classes, 3)}), too few rows of each. "
            "Name another target under [data], or for numbers a loss such as 'gaussian_nll' under [objective]."
        )
    return classes


def split_classes(labels: Sequence[str], left_out: Sequence[str | int]) -> tuple[Tensor, Tensor]:
    """Return the rows of classes that training is to see, and of those that it is not."""
    wanted = {str(name) for name in left_out}
    apart = torch.tensor([label in wanted for label in labels])
    return (~apart).nonzero().flatten(), apart.nonzero().flatten()


def without_left_out(other: Loaded, left_out: Sequence[str | int]) -> Loaded:
    """Leave the classes that training is not to see out of a file of its own, too; it need not have them."""
    return other.rows(split_classes(label_names(other), left_out)[0]) if left_out and other.y is not None else other


def row_digests(loaded: Loaded) -> Tensor:
    """Return a 64-bit hash of each row's inputs and target, `(rows,)`."""
    hashes = row_hashes(loaded.x)
    if loaded.y is None:
        return hashes
    if loaded.y.is_floating_point() or loaded.y.ndim > 1:
        return mix(hashes + row_hashes(loaded.y.float()))
    labels = label_names(loaded)
    of_label = {name: derive(0, "label", name) for name in set(labels)}
    return mix(hashes + torch.tensor([of_label[label] for label in labels]))


def stored_digests(folder: Path, part: str) -> Tensor | None:
    """Return the digests of the rows that a finished run trained on or held out; None where it has no such part."""
    return CheckpointFolder(folder).load(ENSEMBLE)[0].get(f"{ROWS}{part}")


def find_rows(loaded: Loaded, digests: Tensor) -> Tensor | None:
    """Return where rows of these digests are, each row once, in the order of the digests; None where one is not there."""
    places: dict[int, list[int]] = {}
    for row, digest in reversed(list(enumerate(row_digests(loaded).tolist()))):
        places.setdefault(digest, []).append(row)
    found = [places[digest].pop() for digest in digests.tolist() if places.get(digest)]
    return torch.tensor(found) if len(found) == len(digests) else None


def _sorted_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the different labels: by value where all are whole numbers, else by name."""
    names = set(labels)
    try:
        return tuple(sorted(names, key=int))
    except ValueError:
        return tuple(sorted(names))


def split_rows(labels: Sequence[str], shares: Sequence[float], seed: int) -> list[Tensor]:
    """Split rows at random: what is left, then one part for each share. Each class is split in the same proportion.

    Example:
        >>> [len(part) for part in split_rows(["all"] * 100, [0.1, 0.2], seed=0)]
        [70, 10, 20]
    """
    generator = torch.Generator().manual_seed(derive(seed, "held-out rows"))
    order = torch.randperm(len(labels), generator=generator)
    by_class: dict[str, list[int]] = {}
    for row in order.tolist():
        by_class.setdefault(labels[row], []).append(row)
    parts: list[list[int]] = [[] for _ in range(len(shares) + 1)]
    for rows in by_class.values():
        ends = [*accumulate(round(share * len(rows)) for share in shares), len(rows)]
        for part, start, end in zip([*parts[1:], parts[0]], [0, *ends], ends, strict=False):
            part += rows[start:end]
    return [torch.tensor(sorted(part), dtype=torch.int64) for part in parts]


@dataclass(frozen=True)
class Preprocessing:
    """What happens to inputs before members see them, and what members' outputs mean. Calling it prepares inputs.

    Attributes:
        shape: Shape of one input.
        pixels: Whether inputs are uint8 images, which are divided by 255.
        mean: Subtracted from each channel of an image or each feature; None leaves values as they are.
        std: What the difference is then divided by.
        classes: Names of the classes, in the order of the outputs; None for regression.
        target: Name of the target in files.
        inputs: Name of the inputs in files.
        layout: Where arrays of images have their channels.
        columns: How the columns of a table become features.
        target_mean: Subtracted from regression targets, one number a target.
        target_std: What the difference is then divided by.
    """

    shape: tuple[int, ...]
    pixels: bool
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    classes: tuple[str, ...] | None = None
    target: str | None = None
    inputs: str | None = None
    layout: Layout = "auto"
    columns: TableEncoder | None = None
    target_mean: tuple[float, ...] | None = None
    target_std: tuple[float, ...] | None = None

    @classmethod
    def learn(cls, train: Loaded, classes: Sequence[str] | None, settings: DataSettings) -> "Preprocessing":
        """Learn from the training rows: means and scales of inputs, and of targets in regression, as the settings ask."""
        plain = cls(
            shape=tuple(train.x.shape[1:]),
            pixels=train.x.dtype == torch.uint8,
            classes=None if classes is None else tuple(classes),
            target=settings.target,
            inputs=settings.inputs,
            layout=settings.layout,
            columns=train.columns,
        )
        if settings.standardise:
            mean, std = _moments(plain(train.x))
            plain = replace(plain, mean=mean, std=std)
        if classes is None and settings.standardise_target and train.y is not None:
            mean, std = _moments(train.y.float().reshape(len(train.y), -1))
            plain = replace(plain, target_mean=mean, target_std=std)
        return plain

    def __call__(self, x: Tensor) -> Tensor:
        """Return inputs as members see them, float32, on their device."""
        self._check(x)
        return self.scaled(x, *self.scaling(x.device))

    def scaled(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return inputs, float32, of mean 0 and standard deviation 1."""
        return ((x.float() / 255 if self.pixels else x.float()) - mean) / std

    def scaling(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return what is subtracted and divided by, shaped to fit inputs; 0 and 1 where values are left as they are."""
        by_channel = self.pixels or len(self.shape) == 3
        shape = (-1, *(1 for _ in self.shape[1:])) if by_channel else (-1,)
        mean, std = (_on_device(values, device) for values in (self.mean or (0.0,), self.std or (1.0,)))
        return mean.reshape(shape), std.reshape(shape)

    def _check(self, x: Tensor) -> None:
        if x.shape[1:] != self.shape:
            raise ValueError(
                f"This run was trained on {describe_shape(self.shape)}; got {describe_shape(x.shape[1:])}."
                + (" Grey images are uint8 arrays of range 0 to 255." if self.pixels and x.ndim == 3 else "")
            )
        if (x.dtype == torch.uint8) != self.pixels:
            wanted = "uint8 images of range 0 to 255" if self.pixels else "floating-point inputs"
            raise ValueError(f"This run was trained on {wanted}; got {x.dtype}.")

    def read(self, source: str | Path) -> Loaded:
        """Read further data as the training data was read; images get its size and channels, targets may be lacking."""
        return self._fitted(read_source(source, self.target, **self._reading()))

    def read_parts(self, source: str | Path, rows: int) -> Iterator[LoadedPart]:
        """Read further data so many images at a time, those that can be read, and all else at once."""
        if is_built_in(source):
            whole = self.read(source)
            yield LoadedPart(np.arange(len(whole)), whole, {}, 1.0)
            return
        for part in load_parts(source, rows, self.target, **self._reading()):
            none = replace(part.loaded, x=torch.empty(0, *self.shape))
            yield part._replace(loaded=self._fitted(part.loaded) if len(part.loaded) else none)

    def _reading(self) -> dict[str, Any]:
        size = self.shape[1:] if len(self.shape) == 3 else None
        return {"inputs": self.inputs, "layout": self.layout, "columns": self.columns, "size": size, "strict": False}

    def _fitted(self, loaded: Loaded) -> Loaded:
        if len(self.shape) == 3 and loaded.x.ndim == 4:
            x, notes = match_images(loaded.x, *self.shape)
            loaded = replace(loaded, x=x, notes=(*loaded.notes, *notes))
        self._check(loaded.x)
        return loaded

    def pair(self, loaded: Loaded) -> tuple[Tensor, Tensor]:
        """Return inputs and targets as members are trained on them."""
        return self(loaded.x), self.targets(loaded)

    def targets(self, loaded: Loaded) -> Tensor:
        """Return targets as members are trained on them: class indices, or standardised values."""
        y = self.targets_in_units(loaded)
        if self.target_mean is None or self.target_std is None:
            return y
        return (y - torch.tensor(self.target_mean)) / torch.tensor(self.target_std)

    def targets_in_units(self, loaded: Loaded) -> Tensor:
        """Return class indices, or values in the units of the data, `(rows, targets)`."""
        if loaded.y is None:
            raise ValueError("The data has no targets" + (f" called {self.target!r}." if self.target else "."))
        if self.classes is not None:
            return class_indices(loaded, self.classes)
        return loaded.y.float().reshape(len(loaded.y), -1)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        columns = None if self.columns is None else self.columns.to_json()
        return {**vars(self), "columns": columns}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Preprocessing":
        """Make it again from plain values."""
        columns = None if values["columns"] is None else TableEncoder.from_json(values["columns"])
        frozen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**frozen | {"columns": columns})


def _moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images, or of each feature (the last axis)."""
    axes = [0, 2, 3] if x.ndim == 4 else list(range(x.ndim - 1))
    std, mean = torch.std_mean(x.double(), dim=axes, correction=0)
    # A feature that never changes has nothing to scale.
    std = torch.where(std > 1e-12 * mean.abs().clamp_min(1e-30), std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())


@lru_cache(maxsize=64)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor that is copied to a device once: a pass that copies them again could not be captured."""
    return torch.tensor(values, device=device)
