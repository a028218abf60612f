"""Data from the user's files, or from a data set object, as tensors. Nothing is downloaded and nothing unpickled."""

import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dissensus.data.arrays import load_npy, load_npz
from dissensus.data.frames import label_indices, read_table, target_of
from dissensus.data.images import (
    IMAGE_ENDINGS,
    Pictures,
    decode,
    find_pictures,
    match_images,
    open_picture,
    read_list,
)
from dissensus.data.items import load_items
from dissensus.data.loaded import TARGET_NAMES, Loaded, Options, check_options
from dissensus.data.tables import TableEncoder

__all__ = ["TABLE_ENDINGS", "TAR_ENDINGS", "Loaded", "Options", "load"]

TABLE_ENDINGS = (".csv", ".tsv", ".parquet")
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")

_TABLE_OPTIONS = frozenset({"drop", "keep", "missing", "columns"})
_IMAGE_OPTIONS = frozenset({"size"})


def load(source: str | Path | Any, target: str | None = None, **options: Any) -> Loaded:
    """Read data from a file, a folder or a data set object.

    | source | inputs | targets |
    |---|---|---|
    | `.npz` | array `x` or `images`, ..., `x_test` of `"a.npz#test"` | array `y` or `labels`, ..., or `target` |
    | `.npz` of packed images | the images: see `dissensus.data.packed` | array `y` or `labels`, ..., or `target` |
    | `.npy` | the array | another `.npy` beside it, named `target` |
    | `.csv`, `.tsv`, `.parquet` | all columns but the target; text becomes 0/1 columns | column `target` |
    | `.parquet` with an image column | the images | column `label`, or `target` |
    | folder | its image files | the subfolder of each |
    | `.txt` | image files that it lists, one a line | what follows each path |
    | `.tar`, `.tar.gz` | its image files, by name | none |
    | data set object | image of each item `(image, label)` or `{"image": ..., "label": ...}` | its label |

    Args:
        source: A path, or an object with a length and items (of torchvision, Hugging Face datasets, or your own).
        target: Name of the target, as the table says; not needed where the table gives one.
        **options: See `Options`.

    Returns:
        Tensors, and what is known about them.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/a.npz", x=np.zeros((5, 8, 8), np.uint8), y=np.arange(5))
        ...     loaded = load(f"{folder}/a.npz")
        >>> loaded.x.shape, loaded.x.dtype, loaded.y.tolist()
        (torch.Size([5, 1, 8, 8]), torch.uint8, [0, 1, 2, 3, 4])
    """
    chosen = Options(**options)
    if not isinstance(source, str | Path):
        return _sized(load_items(source, target, chosen), chosen.size)
    path, chosen = _find(source, chosen)
    return _sized(_reader(path)(path, target, chosen), chosen.size)


def _find(source: str | Path, options: Options) -> tuple[Path, Options]:
    """Return the path, and the split that may follow it after a `#`."""
    path = Path(source).expanduser()
    before, mark, split = str(path).rpartition("#")
    if not path.exists() and mark and Path(before).exists():
        return Path(before), replace(options, split=split)
    if not path.exists():
        raise ValueError(f"There is no file or folder {path}.")
    return path, options


def _reader(path: Path) -> Callable[[Path, str | None, Options], Loaded]:
    if path.is_dir():
        return _load_folder
    readers = {".npz": load_npz, ".npy": load_npy, ".txt": _load_list}
    readers |= dict.fromkeys(TABLE_ENDINGS, _load_table)
    if path.name.lower().endswith(TAR_ENDINGS):
        return _load_tar
    if path.suffix.lower() not in readers:
        known = ", ".join((*readers, *TAR_ENDINGS))
        raise ValueError(
            f"{path} is of no known kind: files that end in {known} and folders of images can be read."
        )
    return readers[path.suffix.lower()]


def _sized(loaded: Loaded, size: int | None) -> Loaded:
    if loaded.x.ndim == 4 and len(loaded.x) and size is not None:
        x, notes = match_images(loaded.x, loaded.x.shape[1], size, size)
        return replace(loaded, x=x, notes=(*loaded.notes, *notes))
    if len(loaded.x) == 0:
        raise ValueError("The data is empty: it has no rows.")
    return loaded


def _load_table(path: Path, target: str | None, options: Options) -> Loaded:
    frame, notes = read_table(path)
    images = _image_column(frame, options.inputs)
    if images is not None:
        return _load_image_column(frame, images, target, options, path)
    check_options(options, _TABLE_OPTIONS, path.name)
    if target is not None and target not in frame.columns:
        if options.strict:
            raise ValueError(
                f"{path.name} has no column {target!r}; its columns are {', '.join(frame.columns)}."
            )
        target = None
    try:
        loaded = _read_frame(frame, target, options)
    except ValueError as problem:
        raise ValueError(f"{path.name}: {problem}") from None
    return replace(loaded, notes=(*notes, *loaded.notes))


def _read_frame(frame: Any, target: str | None, options: Options) -> Loaded:
    y, classes = None, None
    notes: tuple[str, ...] = ()
    if target is not None:
        y, classes, lacking = target_of(frame, target)
        if lacking.any():
            frame, notes = _without_rows(frame, lacking, "no target", options)
    inputs = frame if target is None else frame.drop(columns=target)
    columns = options.columns or _learn(inputs, None if target is None else frame[target], target, options)
    if options.columns is None and options.missing != "impute":
        lacking = np.any([np.zeros(len(frame), bool), *columns.missing(inputs).values()], axis=0)
        if lacking.any():
            inputs, dropped = _without_rows(inputs, lacking, "missing values", options)
            columns, notes = columns.refit(inputs, slice(None)), (*notes, *dropped)
            y = None if y is None else y[torch.from_numpy(~lacking)]
    x = torch.from_numpy(columns.transform(inputs))
    seen = () if options.columns is None else tuple(_filled_in(columns, inputs))
    return Loaded(x, y, classes, columns=columns, table=inputs, notes=(*notes, *seen))


def _learn(inputs: Any, target: Any, named: str | None, options: Options) -> TableEncoder:
    """Learn how to read a table; columns that share the target's name are no features."""
    twins = [
        name
        for name in inputs.columns
        if named is not None and re.fullmatch(rf"{re.escape(named)}\.\d+", name)
    ]
    return TableEncoder.fit(inputs, target, drop=[*options.drop, *twins], keep=options.keep)


def _without_rows(
    frame: Any, lacking: np.ndarray, what: str, options: Options
) -> tuple[Any, tuple[str, ...]]:
    """Leave out rows that lack something, or refuse them."""
    count, rows = int(lacking.sum()), len(frame)
    if options.missing == "error":
        raise ValueError(
            f"{count} of {rows} rows have {what}; the first is row {int(lacking.argmax())}. Fill them in, or set "
            "missing = 'drop'."
        )
    if count == rows:
        raise ValueError(f"every row has {what}. Leave columns out with drop, or fill them in.")
    return frame[~lacking], (f"{count} of {rows} rows with {what} left out",)


def _filled_in(columns: TableEncoder, inputs: Any) -> Iterator[str]:
    """Say what a table holds that the training rows did not."""
    for name, texts in columns.unseen(inputs).items():
        shown = ", ".join(map(repr, texts[:3])) + (", ..." if len(texts) > 3 else "")
        yield f"column {name!r} holds values that training never saw ({shown}), which are read as none of its own"
    marked = {column.name for column in columns.columns if getattr(column, "indicator", False)}
    for name, missing in columns.missing(inputs).items():
        if missing.any() and name not in marked:
            yield f"column {name!r} lacks {int(missing.sum())} values, which training never did; they are filled in"


def _image_column(frame: Any, named: str | None) -> str | None:
    """Return the column that holds encoded images, as Hugging Face writes them; None where there is none."""
    for column in frame.columns if named is None else [named]:
        if (
            column in frame.columns
            and isinstance(frame[column].iloc[0], Mapping)
            and "bytes" in frame[column].iloc[0]
        ):
            return str(column)
    return None


def _load_image_column(frame: Any, column: str, target: str | None, options: Options, path: Path) -> Loaded:
    check_options(options, _IMAGE_OPTIONS | {"inputs"}, path.name)
    openers = [partial(open_picture, cell["bytes"]) for cell in frame[column]]
    names = [f"row {row} of {path.name}" for row in range(len(frame))]
    loaded = Loaded(decode(openers, names, options.size))
    if target is None or (target not in frame.columns and not options.strict):
        target = next((name for name in TARGET_NAMES if name in frame.columns), None)
    if target is None:
        return loaded
    if target not in frame.columns:
        raise ValueError(f"{path.name} has no column {target!r}; its columns are {', '.join(frame.columns)}.")
    y, classes, lacking = target_of(frame, target)
    if lacking.any():
        raise ValueError(
            f"{int(lacking.sum())} rows of {path.name} have no target, the first is row {int(lacking.argmax())}."
        )
    return replace(loaded, y=y, classes=classes)


def _load_folder(path: Path, target: str | None, options: Options) -> Loaded:
    if any(path.glob("*.parquet")) and not any(p.is_dir() for p in path.iterdir()):
        return _load_table(path, target, options)
    check_options(options, _IMAGE_OPTIONS, path.name)
    _check_no_target(target, options, f"the folder {path.name}")
    return _load_pictures(find_pictures(path), path, options.size)


def _load_list(path: Path, target: str | None, options: Options) -> Loaded:
    check_options(options, _IMAGE_OPTIONS | {"root"}, path.name)
    _check_no_target(target, options, path.name)
    root = path.parent if options.root is None else Path(options.root)
    return _load_pictures(read_list(path, root), root, options.size)


def _load_tar(path: Path, target: str | None, options: Options) -> Loaded:
    check_options(options, _IMAGE_OPTIONS, path.name)
    _check_no_target(target, options, path.name)
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None and Path(member.name).suffix.lower() in IMAGE_ENDINGS:
                    found[member.name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error) as problem:
        raise ValueError(f"{path} cannot be read as an archive: {problem}. Fetch it again.") from None
    names = tuple(sorted(found))
    openers = [partial(open_picture, found[name]) for name in names]
    return Loaded(decode(openers, names, options.size), names=names)


def _check_no_target(target: str | None, options: Options, name: str) -> None:
    if target is not None and options.strict:
        raise ValueError(f"The classes of images are in {name} itself; leave target = {target!r} out.")


def _load_pictures(pictures: Pictures, root: Path, size: int | None) -> Loaded:
    names = tuple(str(path.relative_to(root)) for path in pictures.paths)
    loaded = Loaded(
        decode([partial(open_picture, path) for path in pictures.paths], names, size), names=names
    )
    if pictures.labels is None:
        return loaded
    y, classes = label_indices(pictures.labels)
    return replace(loaded, y=y, classes=classes)
