"""Sets as users hand them over (files, folders, objects, tensors) -> named, checked and read batch by batch."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dissensus._signatures import warn
from dissensus.data import trees
from dissensus.data.features import CachedFeatures
from dissensus.data.files import Loaded, load
from dissensus.data.sources import Inputs, Pairs, arrays_of, input_batches, pair_batches
from dissensus.data.trees import is_tree
from dissensus.evaluation.results import ALL_CORRUPTIONS, ID, Kind


class Items(Protocol):
    """A data set object with a length and items, such as one of Hugging Face."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...


Source: TypeAlias = str | Path | Loaded | Items


def _as_pairs(data: Any, name: str, class_names: Sequence[str] | None) -> Pairs:
    """Return inputs and targets; class labels that have names are numbered by the order of `class_names`."""
    if not isinstance(data, Loaded):
        return data
    if data.y is None:
        raise ValueError(f"Set {name!r} must have targets. Pass `dissensus.data.files.load(path, target=...)`.")
    if data.classes is None or class_names is None:
        return data.x, data.y
    place = {each: number for number, each in enumerate(class_names)}
    if unknown := [each for each in data.classes if each not in place]:
        among = f"among {', '.join(class_names)}; got {', '.join(unknown)}"
        raise ValueError(f"Classes of set {name!r} must be {among}. Leave its rows out, or give the set as `ood`.")
    return data.x, torch.tensor([place[each] for each in data.classes])[data.y.long()]


def _loaded_or_same(data: Any, name: str) -> Any:
    """Return what a path or a data set of pictures holds, as `Loaded`; all else as it came."""
    try:
        return load(data) if isinstance(data, str | Path) or _has_pictures(data) else data
    except ValueError as problem:
        raise ValueError(f"Set {name!r} cannot be read: {problem}") from None


def _has_pictures(data: Any) -> bool:
    """Whether data is of another library, such as Hugging Face's, or gives pictures of Pillow, which a loader cannot put into a batch."""
    known = (Tensor, np.ndarray, list, Loaded, CachedFeatures, DataLoader, TensorDataset)
    if isinstance(data, known) or is_tree(data) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return False
    rows = len(data)
    if not isinstance(data, Dataset):
        # An array of another library becomes one of numpy later.
        return not hasattr(data, "__array__")
    first = data[0] if rows else None
    return hasattr(first[0] if isinstance(first, tuple | list) and first else first, "convert")


# Images that are brighter than this somewhere are not in 0..1.
_NO_FRACTIONS = 32

Batch: TypeAlias = tuple[trees.Batch, Tensor | None]


@dataclass(frozen=True)
class NamedSet:
    """A set of inputs, with targets unless it is OOD."""

    name: str
    kind: Kind
    data: Any

    @property
    def inputs(self) -> Any:
        """The inputs alone; labels of unknown ones mean nothing to the ensemble."""
        return self.data[0] if isinstance(self.data, tuple) and self.data else self.data

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield (inputs, targets or None) in order; refuse a set without inputs."""
        found: Iterable[Batch]
        if self.kind == "ood":
            data = self.inputs
            empty = hasattr(data, "__len__") and not isinstance(data, DataLoader) and not len(data)
            found = () if empty else ((x, None) for x in input_batches(data, batch_size))
        else:
            if (arrays := arrays_of(self.data)) is not None:
                self._check_lengths(*arrays[:2])
            found = pair_batches(self.data, batch_size)
        some = False
        for x, y in found:
            self._check_lengths(x, y)
            if len(x):
                some = True
                yield x, y
        if not some:
            raise ValueError(f"Set {self.name!r} is empty; give it one input or more, or leave it out.")

    def _check_lengths(self, x: Sized, y: Sized | None) -> None:
        if y is not None and len(y) != len(x):
            got = f"got {len(x)} inputs and {len(y)} targets"
            raise ValueError(f"Set {self.name!r} must have one target for each input; {got}.")


def named_sets(
    id_data: Pairs | Source,
    shifted: Mapping[str, Pairs | Source] | None,
    ood: Mapping[str, Inputs | Pairs | Source] | None,
    class_names: Sequence[str] | None,
) -> tuple[list[NamedSet], tuple[str, ...]]:
    """Return all sets, the known one first, and the names of its classes; refuse names that clash, and one set under two."""
    shifted, ood = shifted or {}, ood or {}
    _check_names([ID, *shifted, *ood])
    known = _loaded_or_same(id_data, ID)
    named = known.classes if class_names is None and isinstance(known, Loaded) else class_names
    classes = None if named is None else [str(name) for name in named]
    if twice := _repeated(classes or ()):
        raise ValueError(f"`class_names` must name each class once; got {twice[0]!r} twice.")
    sets = [NamedSet(ID, "id", _as_pairs(known, ID, classes))]
    for name, pairs in shifted.items():
        sets.append(NamedSet(name, "shifted", _as_pairs(_loaded_or_same(pairs, name), name, classes)))
    for name, given in ood.items():
        inputs = _loaded_or_same(given, name)
        sets.append(NamedSet(name, "ood", inputs.x if isinstance(inputs, Loaded) else inputs))
    seen: dict[int, str] = {}
    for part in sets:
        check_not_twice(part.name, id(part.inputs), seen)
    return sets, tuple(classes or ())


def checked_groups(groups: Mapping[str, Iterable[str]] | None, sets: list[NamedSet]) -> dict[str, tuple[str, ...]]:
    """Return groups of OOD sets; refuse unknown sets, empty groups and clashing names."""
    known = [part.name for part in sets if part.kind == "ood"]
    given = (groups or {}).items()
    checked = {name: (parts,) if isinstance(parts, str) else tuple(parts) for name, parts in given}
    _check_names([*(part.name for part in sets), *checked])
    for name, parts in checked.items():
        check_each_once(f"Group {name!r} must list OOD sets, each once", parts, known)
    return checked


def check_each_once(wanted: str, values: Collection[Any], allowed: Collection[Any], given: Any = None) -> None:
    """Refuse no values, one that is not allowed, and one that comes twice; say what was `given`, where values were made of it."""
    if not (0 < len(values) == len(set(values)) and set(values) <= set(allowed)):
        among, got = (", ".join(map(str, each)) or "none" for each in (allowed, given or values))
        raise ValueError(f"{wanted}, among {among}; got {got}.")


def check_not_twice(name: str, inputs: Any, seen: dict[Any, str]) -> None:
    """Refuse inputs, known by any key, that came under another name before; `seen` maps keys to names."""
    if seen.setdefault(inputs, name) != name:
        raise ValueError(f"Sets {seen[inputs]!r} and {name!r} hold the same inputs; leave one of them out.")


def value_range(raw: trees.Batch) -> tuple[float, float]:
    """Return the lowest and the highest number of a batch of images, and NaN for what cannot be one."""
    if not isinstance(raw, Tensor) or raw.ndim != 4 or not raw.numel() or raw.is_complex():
        return nan, nan
    if raw.dtype == torch.uint8:
        return 0.0, 255.0
    low, high = raw.aminmax()
    return float(low), float(high)


def warn_of_ranges(known: str, known_range: tuple[float, float], name: str, its_range: tuple[float, float]) -> None:
    """Warn where one of two sets of images has pixels from 0 to 1 and the other from 0 to 255."""
    for small, large in ((known_range, its_range), (its_range, known_range)):
        if 0 <= small[0] <= small[1] <= 1 and large[0] >= 0 and large[1] > _NO_FRACTIONS:
            warn(
                f"Images of set {known!r} have values from {known_range[0]:g} to {known_range[1]:g}, those of {name!r} from "
                f"{its_range[0]:g} to {its_range[1]:g}: one seems to be in 0..1 and the other in 0..255, and any score would "
                "tell them apart. Bring both to one range."
            )


def _check_names(names: Collection[str]) -> None:
    for name in names:
        if not isinstance(name, str) or name in ("", ALL_CORRUPTIONS):
            wanted = f"other than {ALL_CORRUPTIONS!r}, which stands for their average"
            raise ValueError(f"A set needs a name {wanted}; got {name!r}.")
    if repeated := sorted(_repeated(names)):
        got = f"and {ID!r} is the in-distribution data; got {', '.join(repeated)} twice"
        raise ValueError(f"Every set and group needs a name of its own, {got}. Rename one of them.")


def _repeated(names: Collection[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
