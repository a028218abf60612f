"""The data of a recipe: its settings, and the rows that are trained on, validated on, tested on and left out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus.data.builtin import BUILT_IN
from dissensus.data.files import Loaded
from dissensus.data.images import Layout
from dissensus.data.tables import Missing
from dissensus.randomness import derive
from dissensus.recipes.reading import label_names, read_source

Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class DataSettings:
    """The table `[data]` of a recipe.

    Attributes:
        path: A file, a folder of images, or a built-in set (`digits`, `breast_cancer`, `diabetes`).
        target: Name of the target column or array.
        validation: Share of the rows to validate on, or a file of its own.
        test: Share of the rows that training never sees, for `dissensus evaluate`; or a file of its own.
        leave_out: Classes that training never sees; `dissensus evaluate` asks whether the ensemble notices them.
        unlabelled: A file of inputs without labels, for objectives that read them.
        standardise: Give every feature, or every channel of images, mean 0 and variance 1.
        standardise_target: Do the same to regression targets; predictions come back in the units of the data.
        inputs: Name of the inputs, where a file has several arrays or columns of images.
        size: Height and width to give images.
        layout: Where arrays of images have their channels: "auto", "channels_first" or "channels_last".
        drop: Columns of a table to leave out.
        missing: What to do with rows that have missing values: "error" or "drop".
        seed: Decides which rows are held out; the ensemble's seed does not, so that runs can be compared.
    """

    path: str
    target: str | None = None
    validation: float | str = 0.1
    test: float | str = 0.0
    leave_out: Sequence[str | int] = ()
    unlabelled: str | None = None
    standardise: bool = True
    standardise_target: bool = True
    inputs: str | None = None
    size: int | None = None
    layout: Layout = "auto"
    drop: Sequence[str] = ()
    missing: Missing = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        shares = {n: v for n in ("validation", "test") if isinstance(v := getattr(self, n), float | int)}
        for name, share in shares.items():
            if not 0 <= share < 1:
                raise ValueError(f"{name} in [data] must be a share from 0 to 1, or a file; got {share}.")
        if sum(shares.values()) >= 1:
            raise ValueError("validation and test in [data] take all rows; nothing is left to train on.")
        if self.size is not None and self.size < 1:
            raise ValueError(f"size in [data] must be at least 1; got {self.size}.")

    def resolved(self, folder: Path) -> "DataSettings":
        """Return the settings with paths that do not depend on where they are read from."""
        files: dict[str, Any] = {
            name: _absolute(value, folder)
            for name in ("path", "validation", "test", "unlabelled")
            if isinstance(value := getattr(self, name), str)
        }
        return replace(self, **files)

    def read(self, source: str) -> Loaded:
        """Read a file as the settings say."""
        given = {
            "inputs": self.inputs,
            "size": self.size,
            "layout": None if self.layout == "auto" else self.layout,
            "drop": self.drop or None,
            "missing": None if self.missing == "error" else self.missing,
        }
        return read_source(source, self.target, **given)


def _absolute(path: str, folder: Path) -> str:
    return path if path in BUILT_IN else str((folder / Path(path).expanduser()).absolute())


@dataclass(frozen=True)
class Sets:
    """The rows of a recipe's data.

    Attributes:
        train: Trained on.
        validation: Looked at during training; None where nothing is.
        test: Never seen; None where nothing was held out.
        left_out: Rows of classes that training never sees; None where there are none.
        classes: Names of the classes that are trained; None for regression.
    """

    train: Loaded
    validation: Loaded | None
    test: Loaded | None
    left_out: Loaded | None
    classes: tuple[str, ...] | None


def load_sets(settings: DataSettings, classification: bool) -> Sets:
    """Read and split the data. The same settings give the same rows, whatever else a recipe says."""
    whole = settings.read(settings.path)
    if whole.y is None:
        raise ValueError(f"The data of {settings.path} has no targets. Name them with target under [data].")
    if settings.leave_out and not classification:
        raise ValueError("leave_out in [data] names classes; this run is a regression.")
    kept, left_out = _leave_out(whole, settings.leave_out) if settings.leave_out else (whole, None)
    labels = label_names(kept) if classification else None
    classes = None if labels is None else _sorted_names(labels)
    if classes is not None and len(classes) < 2:
        raise ValueError(
            f"There must be two classes or more to tell apart; the data holds {', '.join(classes)}."
        )
    shares = [v if not isinstance(v, str) else 0.0 for v in (settings.validation, settings.test)]
    train, validation, test = split_rows(len(kept), labels, shares, settings.seed)
    if len(train) == 0:
        raise ValueError(f"Nothing is left to train on of {len(kept)} rows. Hold out less.")

    def part(value: float | str, rows: Tensor) -> Loaded | None:
        if isinstance(value, str):
            return _known(settings.read(value), settings.leave_out)
        return kept.rows(rows) if len(rows) else None

    return Sets(
        kept.rows(train), part(settings.validation, validation), part(settings.test, test), left_out, classes
    )


def _leave_out(whole: Loaded, names: Sequence[str | int]) -> tuple[Loaded, Loaded]:
    labels = label_names(whole)
    wanted = {str(name) for name in names}
    unknown = sorted(wanted - set(labels))
    if unknown:
        raise ValueError(
            f"leave_out in [data] names the class {unknown[0]!r}, which the data does not hold; it holds "
            f"{', '.join(_sorted_names(labels)[:20])}."
        )
    out = torch.tensor([label in wanted for label in labels])
    return whole.rows((~out).nonzero().flatten()), whole.rows(out.nonzero().flatten())


def _known(loaded: Loaded, left_out: Sequence[str | int]) -> Loaded:
    """Leave the unknown classes out of a file of its own too."""
    if not left_out or loaded.y is None:
        return loaded
    wanted = {str(name) for name in left_out}
    return loaded.rows(
        torch.tensor([label not in wanted for label in label_names(loaded)]).nonzero().flatten()
    )


def _sorted_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the different labels: by value where all are whole numbers, else by name."""
    names = set(labels)
    try:
        return tuple(sorted(names, key=int))
    except ValueError:
        return tuple(sorted(names))


def split_rows(count: int, labels: Sequence[str] | None, shares: Sequence[float], seed: int) -> list[Tensor]:
    """Split rows at random: what is left, then one part for each share. Each class is split in the same proportion.

    Example:
        >>> [len(part) for part in split_rows(100, None, [0.1, 0.2], seed=0)]
        [70, 10, 20]
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(seed, "held-out rows")))
    names = ["all"] * count if labels is None else list(labels)
    by_class: dict[str, list[int]] = {}
    for row in order.tolist():
        by_class.setdefault(names[row], []).append(row)
    parts: list[list[int]] = [[] for _ in range(len(shares) + 1)]
    for rows in by_class.values():
        start = 0
        for part, share in zip(parts[1:], shares, strict=True):
            end = start + round(share * len(rows))
            part += rows[start:end]
            start = end
        parts[0] += rows[start:]
    return [torch.tensor(sorted(part), dtype=torch.int64) for part in parts]
