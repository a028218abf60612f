"""New figures, files of them, and what all drawings share: colours and conversions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Values: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]

# Okabe and Ito's palette without its yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TRUTH_COLOUR = "#000000"
POINT_COLOUR = "#D55E00"
NOTE_COLOUR = "#555555"


def panels(
    columns: int = 1, rows: int = 1, *, width: float = 4.8, height: float = 3.6
) -> tuple["Figure", list["Axes"]]:
    """Return a new figure with panels of `width` by `height` inches, and its axes, row by row.

    Example:
        >>> figure, (left, right) = panels(columns=2)
        >>> figure.get_size_inches().tolist()
        [9.6, 3.6]
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        set_style(ax)
    return figure, axes


def set_style(ax: "Axes") -> None:
    """Give a panel the package's look: no box, light axes, few ticks with plain numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#B0B0B0")
    ax.tick_params(color="#B0B0B0", labelsize=9)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(tick_text))
        # Names of categories may still take their place.
        axis.isDefault_majloc = axis.isDefault_majfmt = True


def tick_text(value: float, place: int | None = None) -> str:
    """Return the label of a tick: plain digits, thousands apart, powers of ten only for what is tiny or huge.

    Example:
        >>> [tick_text(value) for value in (0.0, 0.25, 12.5, 2000.0, 1e-5)]
        ['0', '0.25', '12.5', '2000', '1e-05']
    """
    size = abs(value)
    if 1e4 <= size < 1e9:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value + 0.0:.4g}"


def hover(line: "Line2D", texts: Sequence[str]) -> None:
    """Name each point of a line; on a page of `html` the name appears where the pointer rests on it."""
    line.set_gid("hover:" + "|".join(text.replace("|", "/") for text in texts))


def save(figure: "Figure", path: Path | str, *, dpi: int = 110) -> list[Path]:
    """Write a figure as SVG and as PNG; drawn and written again, it gives the same bytes.

    Args:
        figure: What to write.
        path: Where to, without a suffix.
        dpi: Dots per inch of the PNG, and of what is drawn as dots inside the SVG.

    Returns:
        Both files' paths, the SVG first.

    Example:
        >>> import tempfile
        >>> figure, _ = panels()
        >>> [file.name for file in save(figure, Path(tempfile.mkdtemp()) / "empty", dpi=30)]
        ['empty.svg', 'empty.png']
    """
    from matplotlib import rc_context

    vector, raster = Path(f"{path}.svg"), Path(f"{path}.png")
    # Identifiers in an SVG are random and letters are outlines unless these two say otherwise.
    with rc_context({"svg.hashsalt": "dissensus", "svg.fonttype": "none"}):
        figure.savefig(vector, metadata={"Date": None}, dpi=dpi)
    figure.savefig(raster, metadata={"Software": None}, dpi=dpi)
    return [vector, raster]


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """Return a colour thinned with white to this strength."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def as_array(values: Values) -> NDArray[Any]:
    """Return values as an array, from any device and without a gradient."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def flat_array(values: Values) -> NDArray[np.float64]:
    """Return values as one axis of float64; an axis of size one, as regression targets have, is dropped."""
    return as_array(values).astype(np.float64).reshape(-1)
