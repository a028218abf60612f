"""Sources that a recipe can name, and class labels by their names."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus.data.builtin import BUILT_IN
from dissensus.data.files import Loaded, load
from dissensus.data.images import match_images


def read_source(source: str | Path, target: str | None = None, **options: Any) -> Loaded:
    """Read a file or folder, or a built-in data set by its name."""
    if str(source) not in BUILT_IN or Path(source).exists():
        return load(source, target, **{key: value for key, value in options.items() if value is not None})
    loaded = BUILT_IN[str(source)]()
    size = options.get("size")
    if size is None or loaded.x.ndim != 4:
        return loaded
    x, notes = match_images(loaded.x, loaded.x.shape[1], size, size)
    return replace(loaded, x=x, notes=(*loaded.notes, *notes))


def label_names(loaded: Loaded) -> list[str]:
    """Return each row's label as text."""
    assert loaded.y is not None
    if loaded.y.is_floating_point() or loaded.y.ndim != 1:
        raise ValueError(
            f"Class labels must be whole numbers or text, one a row; the target holds {loaded.y.dtype} shaped "
            f"{tuple(loaded.y.shape)}. For regression choose a loss such as 'gaussian_nll' under [objective]."
        )
    if loaded.classes is not None:
        return [loaded.classes[index] for index in loaded.y.tolist()]
    return [str(value) for value in loaded.y.tolist()]


def class_indices(loaded: Loaded, classes: Sequence[str]) -> Tensor:
    """Return the place of each row's label in the list of classes."""
    place = {name: index for index, name in enumerate(classes)}
    labels = label_names(loaded)
    unknown = sorted(set(labels) - set(place))
    if unknown:
        raise ValueError(
            f"The data holds the classes {listed(unknown, 3)}, which the run does not know; it knows {listed(classes, 10)}."
        )
    return torch.tensor([place[label] for label in labels])


def listed(names: Sequence[str], most: int = 20) -> str:
    """Return names with commas between, and how many more there are where they are too many to show.

    Example:
        >>> listed(["ant", "bee", "cow", "dog"], most=2)
        'ant, bee and 2 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
