"""Data from the user's files, or from a data set object, as tensors. Nothing is downloaded and nothing unpickled."""

import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dissensus.data import images
from dissensus.data.frames import check_not_a_pipe, label_indices, read_table, target_of
from dissensus.data.images import Layout, Size
from dissensus.data.tables import TableEncoder, shown
from dissensus.data.trees import as_tensor

__all__ = ["TABLE_ENDINGS", "TAR_ENDINGS", "Loaded", "Options", "load"]

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


class LoadedPart(NamedTuple):
    """Rows of data that can be read, by their numbers in it; those that cannot and why; and how much is read with this part."""

    numbers: np.ndarray
    loaded: Loaded
    problems: Mapping[int, str]
    share: float  # from 0 to 1


@dataclass(frozen=True)
class Encoded:
    """Images that are not decoded yet, with what `Loaded` knows about them.

    Attributes:
        pictures: Files, or what files hold; None where there is none.
        called: What to call each in messages.
        y: Numbers of their classes, or other targets.
        classes: Names of the classes.
        names: File of each, where they are files.
    """

    pictures: Sequence[Path | bytes | None]
    called: Sequence[str]
    y: Tensor | None = None
    classes: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None

    def decoded(self, size: Size | None) -> Loaded:
        """Return all of them."""
        return Loaded(images.decode(self.pictures, self.called, size), self.y, self.classes, self.names)

    def part(self, start: int, end: int, size: Size | None) -> LoadedPart:
        """Return those from one place to another that can be read."""
        problems: dict[int, str] = {}
        x = images.decode(self.pictures[start:end], self.called[start:end], size, problems)
        numbers = np.array(
            [row for row in range(start, min(end, len(self.called))) if row - start not in problems], int
        )
        y = None if self.y is None else self.y[torch.from_numpy(numbers)]
        names = None if self.names is None else tuple(self.names[row] for row in numbers.tolist())
        why = {start + row: problem for row, problem in problems.items()}
        return LoadedPart(numbers, Loaded(x, y, self.classes, names), why, min(end / max(len(self.called), 1), 1.0))


@dataclass(frozen=True)
class Options:
    """How to read data; what each kind of file does not have a use for must be left at its default.

    Attributes:
        inputs: Name of the inputs in an .npz file, of the image column in parquet, or in a data set's items.
        split: Which part of an .npz file: "test" reads x_test and y_test.
        size: Height and width to give images, one number for squares or a pair: scaled until they cover it, then cropped in the middle.
        layout: Where an array of images has its channels, where its shape does not tell.
        drop: Columns of a table to leave out.
        keep: Columns of a table to read although they look like numbers of rows, or never change.
        missing: What to do with missing values of a table: "impute" fills them in, marked by a feature of their own; "drop" leaves
            such rows out; "error" refuses them.
        columns: Read a table in the same way as another one, `Loaded.columns` of that one.
        root: Folder that the paths of an image list start from; by default that of the list.
        strict: Whether options that a file has no use for, and a target that it lacks, are errors, or passed over.
    """

    inputs: str | None = None
    split: str | None = None
    size: Size | None = None
    layout: Layout = "auto"
    drop: Sequence[str] = ()
    keep: Sequence[str] = ()
    missing: Missing = "impute"
    columns: TableEncoder | None = None
    root: str | Path | None = None
    strict: bool = True


def _check_options(options: Options, useful: Container[str], name: str) -> None:
    """Refuse options that this kind of data has no use for."""
    for each in fields(Options) if options.strict else ():
        given = getattr(options, each.name)
        if each.name not in useful and given != each.default:
            raise ValueError(f"{name} has no use for {each.name} = {given!r}. Leave it out.")


_UNREADABLE = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, TokenError)


def _load_npz(path: Path, target: str | None, options: Options) -> Loaded:
    """Read inputs and targets of an archive of arrays."""
    _check_options(options, {"inputs", "split", "size", "layout"}, path.name)
    with open(path, "rb") as file:
        arrays = open_arrays(file, path)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} is not an .npz archive, whatever its name says.")
        needed = target is not None and options.strict
        targets = _find_array(arrays.files, "target", target, options, path, needed)
        inputs = _find_array(arrays.files, "inputs", options.inputs, options, path, needed=True)
        x = _as_inputs(read_array(arrays, inputs, path), options.layout, f"{inputs} of {path.name}")
        y = None if targets is None else read_array(arrays, targets, path)
    return _with_targets(Loaded(x), y, f"{targets} of {path.name}")


def open_arrays(file: BinaryIO, path: Path) -> Any:
    """Open an array or an archive of them; nothing is unpickled."""
    try:
        return np.load(file, allow_pickle=False)
    except _UNREADABLE as problem:
        raise ValueError(f"{path} cannot be read as arrays: {problem}") from None


def read_array(arrays: Any, key: str | None, path: Path) -> np.ndarray:
    """Read an array of an archive that `open_arrays` opened."""
    try:
        return arrays[key]
    except _UNREADABLE as problem:
        objects = "allow_pickle" in str(problem)
        reason = "it holds Python objects, which are not read" if objects else str(problem)
        raise ValueError(f"Array {key!r} of {path} cannot be read: {reason}.") from None


def _find_array(
    keys: Sequence[str], what: str, named: str | None, options: Options, path: Path, needed: bool
) -> str | None:
    """Return the key of the array that was named, or is called as inputs or targets usually are."""
    usual = INPUT_NAMES if what == "inputs" else TARGET_NAMES
    spellings = _spellings(usual, named, options)
    by_name = {key.lower(): key for key in keys}
    found = first_there(map(str.lower, spellings), by_name)
    if found is None and needed:
        one = "" if options.split is not None else _one_part(keys, usual, path)
        called = f"{path.name} holds {', '.join(keys)}; none of them is called {' or '.join(spellings[:6])}."
        raise ValueError(f"{called} {one or f'Name the {what}.'}")
    return None if found is None else by_name[found]


def _spellings(usual: Sequence[str], named: str | None, options: Options) -> list[str]:
    bases = usual if named is None else (named,) if options.strict else (named, *usual)
    forms = ("{0}",) if options.split is None else ("{0}_{1}", "{1}_{0}", "{0}")
    return [form.format(base, options.split) for base in bases for form in forms]


def _one_part(keys: Sequence[str], usual: Sequence[str], path: Path) -> str:
    """Say how to read a part that keys such as x_test or test_images speak of; empty where none does."""
    parts = [(key.rpartition("_")[::2], key.partition("_")[::-2]) for key in keys if "_" in key]
    splits = sorted({split for pair in parts for base, split in pair if base.lower() in usual})
    return f"Read one part of it, such as {path.name}#{splits[0]}." if splits else ""


def first_there(names: Iterable[str], there: Container[str]) -> str | None:
    """Return the first of some names that is there; None where none is."""
    return next((name for name in names if name in there), None)


def _load_npy(path: Path, target: str | None, options: Options) -> Loaded:
    """Read an array of inputs, and another of targets beside it."""
    _check_options(options, {"size", "layout"}, path.name)
    with open(path, "rb") as file:
        loaded = Loaded(_as_inputs(open_arrays(file, path), options.layout, path.name))
    beside = path.parent / (target or "")
    if target is not None and beside.exists():
        with open(beside, "rb") as file:
            return _with_targets(loaded, open_arrays(file, beside), beside.name)
    if target is not None and options.strict:
        raise ValueError(f"The target of an .npy file is the name of another one beside it; there is no {beside}.")
    return loaded


def _as_inputs(array: np.ndarray, layout: Layout, name: str) -> Tensor:
    """Return an array as images, channels first, or as float32 features."""
    if array.dtype.kind not in "buif":
        raise ValueError(f"Inputs must be numbers; {name} holds {array.dtype}.")
    if array.ndim < 2:
        raise ValueError(f"Inputs need an axis of rows and one of features or more; {name} is shaped {array.shape}.")
    x = as_tensor(array, name)
    if x.ndim == 4 or (x.ndim == 3 and x.dtype == torch.uint8):
        return images.as_images(x if x.dtype == torch.uint8 else x.float(), layout, name)
    return x.float()


def _with_targets(loaded: Loaded, y: Any, name: str) -> Loaded:
    """Add targets: whole numbers and values as they are, text and booleans as numbered classes."""
    if y is None:
        return loaded
    array = np.asarray(y)
    if array.ndim > 1 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim == 0 or len(array) != len(loaded.x):
        raise ValueError(f"There must be one target for each of {len(loaded.x)} inputs; {name} is {array.shape}.")
    if array.dtype.kind in "USb":
        indices, classes = label_indices(array.astype(str).tolist())
        return replace(loaded, y=indices, classes=classes)
    if array.dtype.kind not in "uif":
        raise ValueError(f"Targets must be numbers or text; {name} holds {array.dtype}.")
    wide = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    return replace(loaded, y=torch.from_numpy(wide))


def _load_items(source: Any, target: str | None, options: Options) -> Loaded:
    """Read all items, `(image, label)` or `{"image": ..., "label": ...}`, of an object that has a length."""
    name = type(source).__name__
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise ValueError(f"Data must be a path or an object with a length and items; got {name}.")
    _check_options(options, {"inputs", "size", "layout"}, name)
    if len(source) == 0:
        raise ValueError(f"{name} is empty.")
    items = map(source.__getitem__, range(len(source)))
    inputs, labels = zip(*(_split_item(item, options.inputs, target, name) for item in items), strict=True)
    loaded = Loaded(_stack_items(inputs, options, name))
    if any(label is None for label in labels):
        return loaded
    plain = [label.item() if hasattr(label, "item") else label for label in labels]
    return _named_classes(_with_targets(loaded, plain, name), source, target)


def _split_item(item: Any, inputs: str | None, target: str | None, name: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        key = first_there((inputs,) if inputs else INPUT_NAMES, item)
        if key is None:
            raise ValueError(f"Items of {name} hold {', '.join(map(str, item))}; name the one that is the input.")
        return item[key], item.get(first_there((target,) if target else TARGET_NAMES, item))
    if isinstance(item, tuple | list):
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def _stack_items(inputs: Sequence[Any], options: Options, name: str) -> Tensor:
    pictures = [hasattr(each, "convert") for each in inputs]
    if all(pictures):
        return images.decode(inputs, [f"item {index} of {name}" for index in range(len(inputs))], options.size)
    if any(pictures):
        raise ValueError(f"Some items of {name} are pictures and some are arrays. Give all of them one kind.")
    arrays = [np.asarray(each) for each in inputs]
    for index, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise ValueError(
                f"Inputs must have one shape; item 0 of {name} has {arrays[0].shape}, item {index} {array.shape}."
            )
    stacked = np.stack(arrays)
    return _as_inputs(stacked[:, None] if stacked.ndim == 1 else stacked, options.layout, name)


def _named_classes(loaded: Loaded, source: Any, target: str | None) -> Loaded:
    """Add the class names that a data set object of torchvision or Hugging Face knows."""
    names = getattr(source, "classes", None)
    features = getattr(source, "features", None)
    if names is None and isinstance(features, Mapping):
        key = first_there((target,) if target else TARGET_NAMES, features)
        names = getattr(features.get(key), "names", None)
    assert loaded.y is not None
    if names and loaded.classes is None and set(loaded.y.flatten().tolist()) <= set(range(len(names))):
        return replace(loaded, classes=tuple(map(str, names)))
    return loaded


TABLE_ENDINGS = (".csv", ".tsv", ".parquet")
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")


def load(source: str | Path | Any, target: str | None = None, **options: Any) -> Loaded:
    """Read data from a file, a folder or a data set object.

    | source | inputs | targets |
    |---|---|---|
    | `.npz` | array `x` or `images`, ..., `x_test` of `"a.npz#test"` | array `y` or `labels`, ..., or `target` |
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
        return sized(_load_items(source, target, chosen), chosen.size)
    path, chosen = _find(source, chosen)
    found = _reader(path)(path, target, chosen)
    return sized(found.decoded(chosen.size) if isinstance(found, Encoded) else found, chosen.size)


def load_parts(source: str | Path, rows: int, target: str | None = None, **options: Any) -> Iterator[LoadedPart]:
    """Yield what `load` would return, so many images at a time without those that cannot be read, and all else at once."""
    path, chosen = _find(source, Options(**options))
    found = _reader(path)(path, target, chosen)
    if not isinstance(found, Encoded):
        yield LoadedPart(np.arange(len(found)), sized(found, chosen.size), {}, 1.0)
        return
    for start in range(0, max(len(found.called), 1), rows):
        yield found.part(start, start + rows, chosen.size)


def as_data(data: Any, name: str, *, targets: bool = True) -> Any:
    """Return the tensors that a path or what `load` returned holds, a pair unless targets are not wanted; all else as it came."""
    loaded = load(data) if isinstance(data, str | Path) else data
    if not isinstance(loaded, Loaded):
        return data
    if targets and loaded.y is None:
        raise ValueError(f"`{name}` must have targets; its data has none. Pass `data.files.load(path, target=...)`.")
    return (loaded.x, loaded.y) if targets else loaded.x


def _find(source: str | Path, options: Options) -> tuple[Path, Options]:
    """Return the path, and the split that may follow it after a `#`."""
    path = Path(source).expanduser()
    before, mark, split = str(path).rpartition("#")
    if not path.exists() and mark and Path(before).exists():
        return Path(before), replace(options, split=split)
    if not path.exists():
        raise ValueError(f"There is no file or folder {path}.")
    check_not_a_pipe(path)
    return path, options


_Reader: TypeAlias = Callable[[Path, str | None, Options], Loaded | Encoded]


def _reader(path: Path) -> _Reader:
    if path.is_dir():
        return _load_folder
    readers: dict[str, _Reader] = {".npz": _load_npz, ".npy": _load_npy, ".txt": _load_list}
    readers |= dict.fromkeys(TABLE_ENDINGS, _load_table) | dict.fromkeys(TAR_ENDINGS, _load_tar)
    ending = next((ending for ending in readers if path.name.lower().endswith(ending)), None)
    if ending is None:
        raise ValueError(f"{path} is of no known kind: folders of images and {', '.join(readers)} can be read.")
    return readers[ending]


def sized(loaded: Loaded, size: Size | None) -> Loaded:
    """Return images of a size; other data as it is, if there is any."""
    if loaded.x.ndim == 4 and len(loaded.x) and size is not None:
        x, notes = images.match_images(loaded.x, loaded.x.shape[1], *images.height_and_width(size))
        return replace(loaded, x=x, notes=(*loaded.notes, *notes))
    if len(loaded.x) == 0:
        raise ValueError("The data is empty: it has no rows.")
    return loaded


def _load_table(path: Path, target: str | None, options: Options) -> Loaded | Encoded:
    frame, notes = read_table(path, () if options.columns is None else options.columns.texts)
    encoded = _image_column(frame, options.inputs)
    if encoded is not None:
        return _load_image_column(frame, encoded, target, options, path)
    _check_options(options, {"drop", "keep", "missing", "columns"}, path.name)
    target = _target_column(frame, target, options, path)
    try:
        loaded = _read_frame(frame, target, options)
    except ValueError as problem:
        raise ValueError(f"{path.name}: {problem}") from None
    return replace(loaded, notes=(*notes, *loaded.notes))


def _target_column(frame: Any, target: str | None, options: Options, path: Path) -> str | None:
    if target is None or target in frame.columns:
        return target
    if options.strict:
        raise ValueError(f"{path.name} has no column {target!r}; its columns are {', '.join(frame.columns)}.")
    return None


def _read_frame(frame: Any, target: str | None, options: Options) -> Loaded:
    y, classes = None, None
    notes: tuple[str, ...] = ()
    if target is not None:
        y, classes, lacking = target_of(frame, target)
        frame, notes = _without_rows(frame, lacking, "no target", options)
    inputs = frame if target is None else frame.drop(columns=target)
    if options.columns is not None:
        columns = options.columns
        notes = (*notes, *_filled_in(columns, inputs))
    else:
        # Columns that share the target's name are no features.
        twins = [name for name in inputs if target is not None and re.fullmatch(rf"{re.escape(target)}\.\d+", name)]
        wanted = None if target is None else frame[target]
        columns = TableEncoder.fit(inputs, wanted, drop=[*options.drop, *twins], keep=options.keep)
        if options.missing != "impute":
            lacking = np.any([np.zeros(len(frame), bool), *columns.missing(inputs).values()], axis=0)
            inputs, dropped = _without_rows(inputs, lacking, "missing values", options)
            columns, notes = columns.refit(inputs, slice(None)), (*notes, *dropped)
            y = None if y is None else y[torch.from_numpy(~lacking)]
    x = torch.from_numpy(columns.transform(inputs))
    return Loaded(x, y, classes, columns=columns, table=inputs, notes=notes)


def _without_rows(frame: Any, lacking: np.ndarray, what: str, options: Options) -> tuple[Any, tuple[str, ...]]:
    """Leave out rows that lack something, or refuse them."""
    count, rows = int(lacking.sum()), len(frame)
    if count == 0:
        return frame, ()
    if options.missing == "error":
        raise ValueError(
            f"{count} of {rows} rows have {what}; the first is row {int(lacking.argmax())}. Fill them in, or set missing = 'drop'."
        )
    if count == rows:
        raise ValueError(f"every row has {what}. Leave columns out with drop, or fill them in.")
    return frame[~lacking], (f"{count} of {rows} rows with {what} left out",)


def _filled_in(columns: TableEncoder, inputs: Any) -> Iterator[str]:
    """Say what a table holds that the training rows did not."""
    for name, texts in columns.unseen(inputs).items():
        yield f"column {name!r} holds values that training never saw ({shown(texts)}), which are read as none of its own"
    marked = {column.name for column in columns.columns if getattr(column, "indicator", False)}
    for name, missing in columns.missing(inputs).items():
        if missing.any() and name not in marked:
            yield f"column {name!r} lacks {int(missing.sum())} values, which training never did; they are filled in"


def _image_column(frame: Any, named: str | None) -> str | None:
    """Return the column that holds encoded images, as Hugging Face writes them; None where there is none."""
    for column in frame.columns if named is None else {named} & set(frame.columns):
        first = next((cell for cell in frame[column] if cell is not None), None)
        if isinstance(first, Mapping) and "bytes" in first:
            return str(column)
    return None


def _load_image_column(frame: Any, column: str, target: str | None, options: Options, path: Path) -> Encoded:
    _check_options(options, {"inputs", "size"}, path.name)
    called = [f"row {row} of {path.name}" for row in range(len(frame))]
    pictures = [cell and cell["bytes"] for cell in frame[column]]
    target = _target_column(frame, target, options, path) or first_there(TARGET_NAMES, frame.columns)
    if target is None:
        return Encoded(pictures, called)
    y, classes, lacking = target_of(frame, target)
    if lacking.any():
        raise ValueError(f"{lacking.sum()} rows of {path.name} have no target, the first is row {lacking.argmax()}.")
    return Encoded(pictures, called, y, classes)


def _load_folder(path: Path, target: str | None, options: Options) -> Loaded | Encoded:
    if any(path.glob("*.parquet")) and not any(p.is_dir() for p in path.iterdir()):
        return _load_table(path, target, options)
    _check_images(target, options, f"the folder {path.name}")
    return _encoded(*images.find_pictures(path), path)


def _load_list(path: Path, target: str | None, options: Options) -> Encoded:
    _check_images(target, options, path.name, {"root"})
    root = path.parent if options.root is None else Path(options.root)
    return _encoded(*images.read_list(path, root), root)


def _encoded(paths: Sequence[Path], labels: Sequence[str] | None, root: Path) -> Encoded:
    names = tuple(str(path.relative_to(root)) for path in paths)
    y, classes = (None, None) if labels is None else label_indices(labels)
    return Encoded(paths, names, y, classes, names)


def _load_tar(path: Path, target: str | None, options: Options) -> Encoded:
    _check_images(target, options, path.name)
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None and Path(member.name).suffix.lower() in images.IMAGE_ENDINGS:
                    found[member.name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error) as problem:
        raise ValueError(f"{path} cannot be read as an archive: {problem}. Fetch it again.") from None
    names = tuple(sorted(found))
    return Encoded([found[name] for name in names], names, names=names)


def _check_images(target: str | None, options: Options, name: str, useful: Iterable[str] = ()) -> None:
    _check_options(options, {"size", *useful}, name)
    if target is not None and options.strict:
        raise ValueError(f"The classes of images are in {name} itself; leave target = {target!r} out.")
