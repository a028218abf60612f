"""Arrays as tensors, and arrays in files as rows that are read when they are asked for."""

import mmap
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dissensus._signatures import check_dense
from dissensus.data.trees import Tree, is_tree

# Bytes that are read at once where a whole file is gone through.
_AT_ONCE = 8 << 20
# Rows that are read before their pages are let go of: with each the system may map a megabyte around it.
_FEW = 16


def as_tensor(array: Any, name: str) -> Tensor:
    """Return an array as a tensor: float64 arrays of numpy become float32, the default of networks; integers int64."""
    if isinstance(array, Tensor):
        check_dense(name, array)
        return array
    try:
        values = np.asarray(array)
    except ValueError:
        raise ValueError(
            f"`{name}` must be one array; its rows have different shapes. Pad them to one, or give a DataLoader that pads each batch."
        ) from None
    if not values.flags.writeable:
        values = values.copy()
    if values.dtype.kind not in "biufc":
        held = f"dtype {values.dtype}."
        if values.dtype.kind in "US":
            held = "strings. Number classes from 0, such as by np.unique(labels, return_inverse=True)[1]."
        raise ValueError(f"`{name}` must be a tensor or a numeric array; got {type(array).__name__} of {held}")
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if tensor.dtype == torch.float64:
        return tensor.float()
    return tensor.long() if tensor.dtype in (torch.int32, torch.int16, torch.int8) else tensor


class OnDisk:
    """An array in a file. Rows that are asked for are read, and tensors of their own; the file never is in memory whole."""

    def __init__(self, array: np.ndarray, dtype: torch.dtype) -> None:
        self.array, self.dtype = np.asarray(array), dtype
        # Pages may be let go of, but not where they hold changes that the file does not have.
        mapped = _map_of(array)
        self._pages = mapped._mmap if mapped.mode != "c" and hasattr(mmap, "MADV_DONTNEED") else None

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole."""
        return torch.Size(self.array.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole as a tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            part = self.array[rows].copy()
            self._release()
            return torch.from_numpy(part).to(self.dtype)
        part = np.empty((len(rows), *self.shape[1:]), self.array.dtype)
        for start in range(0, len(rows), _FEW):
            some = slice(start, start + _FEW)
            part[some] = self.array[rows[some].numpy()]
            self._release()
        return torch.from_numpy(part).to(self.dtype)

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield all rows in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def to(self, device: torch.device) -> Tensor:
        """Return everything as one tensor on a device, without a second copy beside it."""
        whole, size = torch.empty(self.shape, dtype=self.dtype, device=device), rows_at_once(self)
        for held, part in zip(whole.split(size), self.split(size), strict=False):
            held.copy_(part)
        return whole

    def _release(self) -> None:
        """Let go of the pages that were read; the system keeps them as long as it has room, as with any file."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)


Rows: TypeAlias = Tensor | OnDisk | Tree


def rows_of(array: Any, name: str) -> Tensor | OnDisk:
    """Return an array as a tensor, or as rows to be read where it lies in a file."""
    if isinstance(array, OnDisk):
        return array
    in_a_file = isinstance(array, np.ndarray) and array.ndim > 0 and _map_of(array) is not None
    return OnDisk(array, as_tensor(array[:0], name).dtype) if in_a_file else as_tensor(array, name)


def tree_rows(value: Any, name: str) -> Rows:
    """Return inputs as rows: an array as `rows_of` does, a tuple, dictionary or dataclass of arrays as a `Tree` of such."""
    if not is_tree(value):
        return rows_of(value, name)
    parts = Tree.of(value)
    rows = Tree([rows_of(leaf, f"{name}: {part}") for part, leaf in parts.named()], parts.spec)
    lengths = {leaf.shape[:1] for leaf in rows.leaves}
    if len(lengths) > 1 or () in lengths:
        told = ", ".join(f"{part} shaped {tuple(leaf.shape)}" for part, leaf in rows.named())
        raise ValueError(f"All parts of `{name}` must have one row for each input; got {told}.")
    return rows


def rows_at_once(values: Tensor | OnDisk) -> int:
    """Return how many rows to go through at a time, so that what is computed of them stays small."""
    each = values.shape[1:].numel() * values.dtype.itemsize
    return max(1, _AT_ONCE // max(each, 1))


def _map_of(array: Any) -> Any:
    """Return the `np.memmap` that an array's memory belongs to; None where it is no file's."""
    while array is not None and getattr(array, "_mmap", None) is None:
        array = getattr(array, "base", None)
    return array
