"""What reading data gives, and how reading can be told to go."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus.data.images import Layout
from dissensus.data.tables import TableEncoder

Missing = Literal["impute", "drop", "error"]

INPUT_NAMES = ("x", "inputs", "images", "image", "img", "data", "features", "pixel_values")
TARGET_NAMES = ("y", "targets", "target", "labels", "label", "fine_label")


@dataclass(frozen=True)
class Loaded:
    """Data of a file.

    Attributes:
        x: Inputs: uint8 or floating-point images `(rows, channels, height, width)`, or float32 features `(rows, ...)`.
        y: Targets `(rows, ...)`, integers where they are whole numbers or classes; None where the file has none.
        classes: Names of the classes that `y` numbers; None where `y` holds numbers as the file has them.
        names: File of each image, where they came from files.
        columns: How the columns of a table became features.
        table: The columns of a table as they were read.
        notes: What was assumed or changed, in words.
    """

    x: Tensor
    y: Tensor | None = None
    classes: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None
    columns: TableEncoder | None = None
    table: Any = field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, index: Tensor) -> "Loaded":
        """Return some of the rows."""
        names = None if self.names is None else tuple(self.names[i] for i in index.tolist())
        table = None if self.table is None else self.table.iloc[index.numpy()]
        y = None if self.y is None else self.y[index]
        return replace(self, x=self.x[index], y=y, names=names, table=table)

    def learned_from(self, rows: Tensor) -> "Loaded":
        """Return the same data with a table's categories, and what stands for missing values, learned from these rows only."""
        if self.columns is None or self.table is None:
            return self
        columns = self.columns.refit(self.table, rows.numpy())
        return replace(self, x=torch.from_numpy(columns.transform(self.table)), columns=columns)


@dataclass(frozen=True)
class Options:
    """How to read data; what each kind of file does not have a use for must be left at its default.

    Attributes:
        inputs: Name of the inputs in an .npz file, of the image column in parquet, or in a data set's items.
        split: Which part of an .npz file: "test" reads x_test and y_test.
        size: Height and width to give images: scaled until they cover it, then cropped in the middle.
        layout: Where an array of images has its channels, where its shape does not tell.
        drop: Columns of a table to leave out.
        keep: Columns of a table to read although they look like numbers of rows, or never change.
        missing: What to do where values of a table are missing: "impute" fills them in, and marks them by a feature of their
            own; "drop" leaves such rows out; "error" refuses them.
        columns: Read a table in the same way as another one, `Loaded.columns` of that one.
        root: Folder that the paths of an image list start from; by default that of the list.
        strict: Whether options that a file has no use for, and a target that it lacks, are errors. Where not, they are
            passed over: files of several kinds can then be read with the same options.
    """

    inputs: str | None = None
    split: str | None = None
    size: int | None = None
    layout: Layout = "auto"
    drop: Sequence[str] = ()
    keep: Sequence[str] = ()
    missing: Missing = "impute"
    columns: TableEncoder | None = None
    root: str | Path | None = None
    strict: bool = True


def check_options(options: Options, useful: frozenset[str], name: str) -> None:
    """Refuse options that this kind of data has no use for."""
    if not options.strict:
        return
    plain = Options()
    for option in vars(options):
        if option not in useful and getattr(options, option) != getattr(plain, option):
            raise ValueError(f"{name} has no use for {option} = {getattr(options, option)!r}. Leave it out.")
