"""Arrays of numpy files as inputs and targets."""

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from dissensus.data.frames import label_indices
from dissensus.data.images import Layout, as_images
from dissensus.data.loaded import INPUT_NAMES, TARGET_NAMES, Loaded, Options, check_options
from dissensus.data.packed import is_packed, unpack
from dissensus.data.sources import as_tensor

_OPTIONS = frozenset({"size", "layout"})


def load_npz(path: Path, target: str | None, options: Options) -> Loaded:
    """Read inputs and targets of an archive of arrays."""
    check_options(options, _OPTIONS | {"inputs", "split"}, path.name)
    with open(path, "rb") as file:
        arrays = _numpy(file, path)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} is not an .npz archive, whatever its name says.")
        wanted = _pick_array(
            arrays.files, target, TARGET_NAMES, options.split, path, "target", options.strict
        )
        x = _inputs(arrays, options, path)
        y = None if wanted is None else _read_array(arrays, wanted, path)
    return with_targets(Loaded(x), y, f"{wanted} of {path.name}")


def _inputs(arrays: Any, options: Options, path: Path) -> Tensor:
    if options.inputs is None and is_packed(arrays.files):
        return torch.from_numpy(unpack(arrays, path.name))
    inputs = _pick_array(
        arrays.files, options.inputs, INPUT_NAMES, options.split, path, "inputs", options.strict
    )
    assert inputs is not None
    return as_inputs(_read_array(arrays, inputs, path), options.layout, f"{inputs} of {path.name}")


def _open(path: Path) -> Any:
    with open(path, "rb") as file:
        return _numpy(file, path)


def _numpy(file: BinaryIO, path: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as problem:
        raise ValueError(f"{path} cannot be read as arrays: {problem}") from None


def _read_array(arrays: Any, key: str, path: Path) -> np.ndarray:
    try:
        return arrays[key]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as problem:
        reason = (
            "it holds Python objects, which are not read" if "allow_pickle" in str(problem) else str(problem)
        )
        raise ValueError(f"Array {key!r} of {path} cannot be read: {reason}.") from None


def _pick_array(
    keys: Sequence[str],
    named: str | None,
    usual: Sequence[str],
    split: str | None,
    path: Path,
    what: str,
    strict: bool,
) -> str | None:
    """Return the key of the inputs or targets; None where there are no targets."""
    own = () if named is None else (named,)
    bases = own if own and strict else (*own, *usual)
    wanted = [
        w
        for base in bases
        for w in ((base,) if split is None else (f"{base}_{split}", f"{split}_{base}", base))
    ]
    by_name = {key.lower(): key for key in keys}
    found = next((by_name[w.lower()] for w in wanted if w.lower() in by_name), None)
    if found is not None or (what == "target" and (named is None or not strict)):
        return found
    splits = _splits(keys, usual)
    hint = f"Set split to one of {', '.join(splits)}." if splits and split is None else f"Name the {what}."
    raise ValueError(
        f"{path.name} holds {', '.join(keys)}; none of them is called {' or '.join(wanted[:6])}. {hint}"
    )


def _splits(keys: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Return the splits that keys such as x_test or test_images speak of."""
    parts = [(key.rsplit("_", 1), key.split("_", 1)) for key in keys if "_" in key]
    after = {split for (base, split), _ in parts if base.lower() in usual}
    before = {split for _, (split, base) in parts if base.lower() in usual}
    return sorted(after | before)


def load_npy(path: Path, target: str | None, options: Options) -> Loaded:
    """Read an array of inputs, and another of targets beside it."""
    check_options(options, _OPTIONS, path.name)
    loaded = Loaded(as_inputs(_open(path), options.layout, path.name))
    if target is None:
        return loaded
    beside = path.parent / target
    if not beside.exists():
        if not options.strict:
            return loaded
        raise ValueError(
            f"The target of an .npy file is the name of another one beside it; there is no {beside}."
        )
    return with_targets(loaded, _open(beside), beside.name)


def as_inputs(array: np.ndarray, layout: Layout, name: str) -> Tensor:
    """Return an array as images, channels first, or as float32 features."""
    if array.dtype.kind not in "buif":
        raise ValueError(f"Inputs must be numbers; {name} holds {array.dtype}.")
    if array.ndim < 2:
        raise ValueError(
            f"Inputs need an axis of rows and one of features or more; {name} is shaped {array.shape}."
        )
    x = as_tensor(array, name)
    if x.ndim == 4 or (x.ndim == 3 and x.dtype == torch.uint8):
        return as_images(x if x.dtype == torch.uint8 else x.float(), layout, name)
    return x.float()


def with_targets(loaded: Loaded, y: Any, name: str) -> Loaded:
    """Add targets: whole numbers and values as they are, text and booleans as numbered classes."""
    if y is None:
        return loaded
    array = np.asarray(y)
    if array.ndim > 1 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim == 0 or len(array) != len(loaded.x):
        raise ValueError(
            f"There must be one target for each of {len(loaded.x)} inputs; {name} is shaped {array.shape}."
        )
    if array.dtype.kind in "USb":
        text = array.astype(str).tolist()
        indices, classes = label_indices(text)
        return replace(loaded, y=indices, classes=classes)
    if array.dtype.kind not in "uif":
        raise ValueError(f"Targets must be numbers or text; {name} holds {array.dtype}.")
    return replace(
        loaded, y=torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))
    )
