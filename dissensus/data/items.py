"""Data set objects of torchvision, Hugging Face datasets or your own, read item by item."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from dissensus.data.arrays import as_inputs, with_targets
from dissensus.data.images import decode
from dissensus.data.loaded import INPUT_NAMES, TARGET_NAMES, Loaded, Options, check_options

_OPTIONS = frozenset({"inputs", "size", "layout"})


@dataclass
class _Items:
    """What is collected from a data set's items."""

    pictures: list[Any] = field(default_factory=list)
    arrays: list[Tensor] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)


def load_items(source: Any, target: str | None, options: Options) -> Loaded:
    """Read all items, `(image, label)` or `{"image": ..., "label": ...}`, of an object that has a length."""
    name = type(source).__name__
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise ValueError(f"Data must be a path or an object with a length and items; got {name}.")
    check_options(options, _OPTIONS, name)
    if len(source) == 0:
        raise ValueError(f"{name} is empty.")
    items = _Items()
    for index in range(len(source)):
        image, label = _split_item(source[index], options.inputs, target, name)
        (items.pictures if hasattr(image, "convert") else items.arrays).append(image)
        items.labels.append(label)
    if items.pictures and items.arrays:
        raise ValueError(f"Some items of {name} are pictures and some are arrays. Give all of them one kind.")
    loaded = Loaded(_stack_items(items, options, name))
    if any(label is None for label in items.labels):
        return loaded
    found = with_targets(
        loaded, [label.item() if hasattr(label, "item") else label for label in items.labels], name
    )
    return found if found.classes is not None else _named_classes(found, source, target)


def _split_item(item: Any, inputs: str | None, target: str | None, name: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        keys = [key for key in ((inputs,) if inputs else INPUT_NAMES) if key in item]
        if not keys:
            raise ValueError(
                f"Items of {name} hold {', '.join(map(str, item))}; name the one that is the input."
            )
        wanted = [key for key in ((target,) if target else TARGET_NAMES) if key in item]
        return item[keys[0]], item[wanted[0]] if wanted else None
    if isinstance(item, tuple | list):
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def _stack_items(items: _Items, options: Options, name: str) -> Tensor:
    names = [f"item {index} of {name}" for index in range(len(items.labels))]
    if items.pictures:
        return decode([partial(_same, picture) for picture in items.pictures], names, options.size)
    arrays = [np.asarray(array) for array in items.arrays]
    different = next((i for i, array in enumerate(arrays) if array.shape != arrays[0].shape), None)
    if different is not None:
        raise ValueError(
            f"Inputs must have one shape; {names[0]} is shaped {arrays[0].shape} and item {different} {arrays[different].shape}."
        )
    stacked = np.stack(arrays)
    return as_inputs(stacked[:, None] if stacked.ndim == 1 else stacked, options.layout, name)


def _same(picture: Any) -> Any:
    return picture


def _named_classes(loaded: Loaded, source: Any, target: str | None) -> Loaded:
    """Add the class names that a data set object of torchvision or Hugging Face knows."""
    names = getattr(source, "classes", None)
    features = getattr(source, "features", None)
    if names is None and isinstance(features, Mapping):
        key = next((k for k in ((target,) if target else TARGET_NAMES) if k in features), None)
        names = getattr(features.get(key), "names", None)
    y = loaded.y
    if not names or y is None or y.is_floating_point() or int(y.min()) < 0 or int(y.max()) >= len(names):
        return loaded
    return replace(loaded, classes=tuple(map(str, names)))
