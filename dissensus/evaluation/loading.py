"""Files, folders, data set objects and what was read of them -> inputs, and targets by the order of the classes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dissensus.data.features import CachedFeatures
from dissensus.data.files import Loaded, load
from dissensus.data.sources import Inputs, Pairs
from dissensus.data.trees import is_tree


class Items(Protocol):
    """A data set object with a length and items, such as one of Hugging Face."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...


Source: TypeAlias = str | Path | Loaded | Items


def loaded_or_same(data: Any, name: str) -> Any:
    """Return what a path or a data set of pictures holds, as `Loaded`; all else as it came."""
    if not _must_be_read(data):
        return data
    try:
        return load(data)
    except ValueError as problem:
        raise ValueError(f"Set {name!r} cannot be read: {problem}") from None


def as_inputs(data: Any) -> Inputs | Pairs:
    """Return inputs of a set without targets."""
    return data.x if isinstance(data, Loaded) else data


def as_pairs(data: Any, name: str, class_names: Sequence[str] | None) -> Pairs:
    """Return inputs and targets; class labels that have names are numbered by the order of `class_names`."""
    if not isinstance(data, Loaded):
        return data
    if data.y is None:
        raise ValueError(
            f"Set {name!r} must have targets; its data has none. Read it with `dissensus.data.files.load(path, target=...)` "
            "and pass what that returns."
        )
    if data.classes is None or class_names is None:
        return data.x, data.y
    return data.x, _numbered(data.y, data.classes, class_names, name)


def _must_be_read(data: Any) -> bool:
    if isinstance(data, str | Path):
        return True
    known = (Tensor, np.ndarray, list, Loaded, CachedFeatures, DataLoader, TensorDataset)
    if (
        isinstance(data, known)
        or is_tree(data)
        or not hasattr(data, "__len__")
        or not hasattr(data, "__getitem__")
    ):
        return False
    rows = len(data)
    if not isinstance(data, Dataset):
        # Such as of Hugging Face; an array of another library becomes one of numpy later.
        return not hasattr(data, "__array__")
    first = data[0] if rows else None
    picture = first[0] if isinstance(first, tuple | list) and first else first
    # Pictures of Pillow, which a loader cannot put into a batch.
    return hasattr(picture, "convert")


def _numbered(labels: Tensor, names: Sequence[str], wanted: Sequence[str], name: str) -> Tensor:
    place = {each: number for number, each in enumerate(wanted)}
    unknown = [each for each in names if each not in place]
    if unknown:
        raise ValueError(
            f"Classes of set {name!r} must be among {', '.join(wanted)}; got {', '.join(unknown)}. Leave its rows out, or "
            "give the set as `ood`."
        )
    return torch.tensor([place[each] for each in names])[labels.long()]
