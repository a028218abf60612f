"""Data in; what it holds in words, and a commented recipe to begin with, out."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from dissensus.data.files import TABLE_ENDINGS, Loaded, load
from dissensus.data.frames import read_table
from dissensus.data.images import describe_shape, find_pictures
from dissensus.evaluation.tables import text_table
from dissensus.recipes.data import is_regression, label_names, listed

_LARGEST_SIZE = 64
_CALIBRATION = 0.15


def look_at(path: Path, target: str | None = None) -> tuple[str, str]:
    """Look at a file or folder of data; return what was found, in words, and a commented recipe that trains on it.

    By default a table's last column is predicted, and of an .npz file an array of a usual name.
    """
    if path.suffix.lower() in TABLE_ENDINGS and target is None:
        target = str(read_table(path)[0].columns[-1])
    size = _common_size(path) if path.is_dir() else None
    loaded = load(path, target, **({} if size is None else {"size": size}))
    if loaded.y is None:
        raise ValueError(f"{path} holds no targets that could be found. Name them with --target.")
    regression = is_regression(loaded)
    shape = f" of {describe_shape(loaded.x.shape[1:])}" if loaded.table is None else ""
    rows = "\n  ".join([f"{path}: {len(loaded)} rows{shape}", *loaded.notes])
    words = (rows, _columns_in_words(loaded), _target_in_words(loaded, target, regression))
    return "\n\n".join(filter(None, words)), _recipe(loaded, path, target, regression, size)


def _common_size(folder: Path) -> int | None:
    """Return a size to give the images of a folder; None where all have one already."""
    from PIL import Image

    paths: list[Path] = []
    with suppress(ValueError):  # reading the folder itself says what is wrong
        paths = sorted(find_pictures(folder)[0])
    sizes = set()
    for path in paths[:1000]:
        with Image.open(path) as picture:
            sizes.add(picture.size)
    return min(_LARGEST_SIZE, round(median(min(size) for size in sizes))) if len(sizes) > 1 else None


def _columns_in_words(loaded: Loaded) -> str:
    """Return a table of columns: what each is read as, how many values are missing, and what looks wrong."""
    if loaded.columns is None or loaded.table is None:
        return ""
    missing = {name: int(where.sum()) for name, where in loaded.columns.missing(loaded.table).items()}
    columns = loaded.columns.columns
    rows = [[own.name, own.read_as, str(missing.get(own.name) or ""), own.note] for own in columns]
    return text_table(["column", "read as", "missing", "remark"], rows)


def _target_in_words(loaded: Loaded, target: str | None, regression: bool) -> str:
    assert loaded.y is not None
    name = "Target" if target is None else f"Target {target!r}"
    if regression:
        y = loaded.y.float()
        return f"{name}: numbers from {y.min():g} to {y.max():g}, mean {y.mean():g}: a regression"
    counts = Counter(label_names(loaded)).most_common()
    shown = [f"{label} ({100 * count / len(loaded):.3g} %)" for label, count in counts]
    return f"{name}: {len(counts)} classes: {listed(shown, 10)}"


def _recipe(loaded: Loaded, path: Path, target: str | None, regression: bool, size: int | None) -> str:
    """Return a recipe with a comment on every line that one may want to change."""
    loss = "gaussian_nll" if regression else "cross_entropy"
    # A rate of false alarms that the rows held out for the alarm can keep.
    held_out = _CALIBRATION * len(loaded)
    rate = 0.01 if held_out > 300 else 0.05 if held_out > 40 else 0.1
    lines = [
        f"# Written by dissensus init {path.name}. Train it, then look at the page:",
        f"#   dissensus train {path.stem}.toml",
        f"#   dissensus report runs/{path.stem} -o {path.stem}.html",
        "",
        "[data]",
        f"path = {json.dumps(str(path), ensure_ascii=False)}",
        None if target is None else f"target = {json.dumps(target, ensure_ascii=False)}",
        f"size = {size}                  # height and width to give the images, which have several" if size else None,
        "validation = 0.1           # share of the rows that decides which weights are kept",
        f"calibration = {_CALIBRATION}         # share of the rows that the alarm is calibrated on",
        "test = 0.2                 # share of the rows that dissensus report measures on",
        *_about_columns(loaded),
        "",
        "[model]",
        *_model(loaded),
        "",
        "[ensemble]",
        "members = 5",
        "seed = 0                   # decides everything that is random",
        "",
        "[objective]",
        f'loss = "{loss}"' + ("      # mean and standard deviation of the target" if regression else ""),
        "",
        "[training]",
        "lr = 1e-3",
        "# epochs = 100             # by default until about 2 000 steps are made",
        "# batch_size = 64          # by default 16 to 128, by the number of rows",
        "",
        "[alarm]",
        f"false_alarms = {rate}        # how often ordinary inputs may raise it",
        "",
    ]
    return "\n".join(line for line in lines if line is not None)


def _about_columns(loaded: Loaded) -> list[str]:
    """Say what is left out of a table, and what may have to be."""
    if loaded.columns is None or loaded.table is None:
        return []
    lines, careful = [], []
    for column in loaded.columns.columns:
        if not column.features:
            lines.append(f"# {column.name!r} is left out: {column.note}.")
        elif column.note.startswith("CAREFUL"):
            careful.append(column.name)
            lines.append(f"# {column.name!r}: {column.note}. Is it known before the target is?")
    drop = json.dumps(careful or [loaded.columns.names[0]], ensure_ascii=False)
    return [
        *lines,
        f"# drop = {drop}             # columns to leave out",
        '# missing = "drop"          # by default missing values are filled in and marked',
    ]


def _model(loaded: Loaded) -> Sequence[str]:
    if loaded.x.ndim == 4 and min(loaded.x.shape[2:]) >= 16:
        about = "64 is the published network: slower, and better with many images"
        return 'name = "resnet18"', f"width = 16                 # {about}"
    return 'name = "mlp"', "hidden = [128, 128]        # width of each hidden layer"
