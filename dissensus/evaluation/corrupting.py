"""Known images in, corrupted copies out: made here, or read from the files of a published set."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from dissensus.data.trees import Batch
from dissensus.evaluation.inputs import check_each_once

Cell: TypeAlias = tuple[str, int]
_IN_ORDER = "Evaluate the test set that the folder of corruptions was made of, in its order."


def corruptor_of(
    corruptions: Iterable[str] | str | None,
    severities: Iterable[int] | int,
    seed: int,
    folder: Path | str | None,
    frost_folder: Path | str | None,
) -> "Corruptor":
    """Return what makes every corruption at every severity, or say what is wrong with the names, severities or folders."""
    from dissensus.data.corruptions import CORRUPTIONS, SEVERITIES

    if corruptions is None:
        if not (folder is None and frost_folder is None):
            raise ValueError(
                "`corruption_folder` and `frost_folder` are for `corruptions`, of which none is named. Add corruptions='standard'."
            )
        return Corruptor()
    families = corruption_families()
    given = [corruptions] if isinstance(corruptions, str) else list(corruptions)
    names = [name for one in given for name in families.get(one, (one,))]
    check_each_once("`corruptions` must name each corruption once", names, (*families, *CORRUPTIONS), given)
    levels = [severities] if isinstance(severities, int) else list(severities)
    check_each_once("`severities` must name each severity once", levels, SEVERITIES)
    paths = (None if given is None else Path(given).expanduser() for given in (folder, frost_folder))
    return Corruptor(tuple(product(names, levels)), seed, *paths)


def corruption_families() -> Mapping[str, tuple[str, ...]]:
    """Return corruptions by the word that stands for several."""
    from dissensus.data.corruptions import CBAR, CORRUPTIONS, EXTRA, STANDARD

    return {"standard": STANDARD, "extra": EXTRA, "cbar": CBAR, "c-bar": CBAR, "all": tuple(CORRUPTIONS)}


@dataclass(frozen=True)
class Corruptor:
    """Which corruptions at which severities are made of images, or read from the `folder` of a published set."""

    cells: tuple[Cell, ...] = ()
    seed: int = 0
    folder: Path | None = None
    frost_folder: Path | None = None

    def copies(self, raw: Batch, labels: Tensor | None, start: int) -> Iterable[tuple[Cell, Tensor]]:
        """Yield each cell with its copy of a batch whose first row has this number in the set; of floats from 0 to 1, in 256 steps."""
        pixels = _pixels(raw)
        if self.folder is not None and labels is not None:
            self._check_labels(self.folder, labels, start)
        for cell in self.cells:
            copy = self._copy(pixels, cell, start)
            yield cell, copy if raw.dtype == torch.uint8 else copy.to(raw.dtype) / 255

    def _copy(self, raw: Tensor, cell: Cell, start: int) -> Tensor:
        from dissensus.data.corruptions import corrupt, load_corrupted

        if self.folder is None:
            frost = str(self.frost_folder) if self.frost_folder is not None and cell[0] == "frost" else None
            index = torch.arange(start, start + len(raw), device=raw.device)
            return corrupt(raw, *cell, seed=self.seed, index=index, frost_folder=frost)
        copy = load_corrupted(self.folder, *cell, rows=slice(start, start + len(raw)))
        if copy.shape != raw.shape:
            rows = f"rows {start} to {start + len(raw) - 1} are shaped {tuple(copy.shape)} there and {tuple(raw.shape)} here"
            raise ValueError(f"{cell[0]}.npy must hold a copy of every known image; {rows}. {_IN_ORDER}")
        return copy.to(raw.device)

    def _check_labels(self, folder: Path, labels: Tensor, start: int) -> None:
        """Refuse known images in another order than that of the files, where these come with labels."""
        import numpy as np

        path = folder / "labels.npy"
        if not path.exists():
            return
        theirs = torch.from_numpy(np.load(path, mmap_mode="r")[start : start + len(labels)].astype(np.int64))
        same = labels.cpu() == theirs if labels.shape == theirs.shape else torch.zeros(1, dtype=torch.bool)
        if not bool(same.all()):
            row = start + int((~same).nonzero()[0])
            raise ValueError(f"Labels of the known images must be those of {path.name}; row {row} differs. {_IN_ORDER}")


def _pixels(raw: Batch) -> Tensor:
    """Return images as uint8, or say that they are none."""
    if isinstance(raw, Tensor) and raw.ndim == 4:
        if raw.dtype == torch.uint8:
            return raw
        if raw.is_floating_point() and bool(((raw >= 0) & (raw <= 1)).all()):
            return (255 * raw).round().to(torch.uint8)
    raise ValueError(
        f"Known inputs must be images (batch, channels, height, width) for `corruptions`, uint8 or from 0 to 1; got {raw.dtype} of "
        f"shape {tuple(raw.shape)}. Give raw images and a `transform` that makes them what members take."
    )
