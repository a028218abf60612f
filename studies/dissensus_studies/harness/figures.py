"""Named lines in, a figure in the one style out: panels without boxes or legends, every line named at its end in its own colour."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dissensus import plots
from dissensus.html import Section
from dissensus.plots.figures import tick_text
from dissensus_studies.drawing import apart
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.image_pages import over_seeds
from dissensus_studies.harness.outputs import Outputs
from dissensus_studies.harness.statistics import Summary

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

LABEL_SIZE = 9


@dataclass(frozen=True)
class Line:
    """A line of a panel."""

    name: str  # What stands at its end.
    x: Sequence[float]  # Places.
    y: Sequence[float]  # Heights.
    low: Sequence[float] = ()  # Lower end of a band at each place, if there is one.
    high: Sequence[float] = ()  # Upper end.
    colour: int | None = 0  # Place in `plots.COLOURS`; None is the grey of what others are compared with.
    style: str = "o-"  # As matplotlib's `plot` takes it.

    @classmethod
    def over(cls, name: str, found: Mapping[float, Summary], colour: int | None = 0, style: str = "o-") -> "Line":
        """Return means over repeats against what was varied, with two standard errors where there are repeats."""
        places = sorted(found)
        means = [found[place].mean for place in places]
        if any(len(found[place].values) == 1 for place in places):
            return cls(name, places, means, colour=colour, style=style)
        low, high = ([found[place].mean + sign * found[place].error for place in places] for sign in (-2, 2))
        return cls(name, places, means, low, high, colour, style)


@dataclass(frozen=True)
class Panel:
    """Lines against one axis; `axes` are further arguments of `Axes.set`, such as scales, limits and ticks."""

    title: str
    xlabel: str
    lines: Sequence[Line]
    axes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawing:
    """A figure of a page: name of its files, title of its section, what it is drawn of, and what to know of it."""

    name: str
    title: str
    panels: Sequence[Panel]
    caption: str = ""

    def section(self, outputs: Outputs) -> Section:
        """Draw it; return its section."""
        alt = f"{self.title}: {', '.join(panel.title for panel in self.panels)}"
        return Section(self.title, outputs.picture(self.name, draw(self.panels), alt, self.caption))


def sweep(
    name: str,
    title: str,
    points: Iterable[tuple[str, float, Record]],
    columns: Mapping[str, Callable[[Record], float]],
    xlabel: str,
    *,
    levels: Mapping[str, Sequence[Record]] | None = None,
    caption: str = "",
    **axes: Any,
) -> Drawing:
    """Return a figure with a panel for each column: means over repeats against what was varied, with two standard errors.

    Args:
        name: Of its files.
        title: Of its section.
        points: Name of a line, what was varied, and the record of one arm.
        columns: Title of each panel, and what it reads of a record; NaN where that was not measured.
        xlabel: What was varied.
        levels: Records that others are compared with, drawn as dashed lines.
        caption: What to know of it.
        axes: Further arguments of `Axes.set`.
    """
    points = list(points)
    ends = [min(x for _, x, _ in points), max(x for _, x, _ in points)]
    panels = []
    for column, read in columns.items():
        if not all(isfinite(read(record)) for _, _, record in points):
            continue
        lines = []
        for place, line in enumerate(dict.fromkeys(line for line, _, _ in points)):
            own = ((x, record) for other, x, record in points if other == line)
            lines.append(Line.over(line, over_seeds(own, read), place))
        for level, records in (levels or {}).items():
            colour = len(lines) if levels and len(levels) > 1 else None
            lines.append(Line(level, ends, [fmean(map(read, records))] * 2, colour=colour, style="--"))
        panels.append(Panel(column, xlabel, lines, axes))
    return Drawing(name, title, panels, caption or "Means over runs, with two standard errors where there are several.")


def draw(
    panels: Sequence[Panel], columns: int = 3, *, title: str = "", width: float = 3.6, height: float = 2.7
) -> "matplotlib.figure.Figure":
    """Draw panels side by side; lines of the same names are named in the first panel that has them."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    columns = min(columns, len(panels))
    width = max(width, 4.8) if columns == 1 else width
    figure, axes = plots.panels(columns, -(-len(panels) // columns), width=width, height=height)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    named: set[str] = set()
    for place, (ax, panel) in enumerate(zip(axes, panels, strict=False)):
        for line in panel.lines:
            colour = colour_of(line)
            ax.plot(line.x, line.y, line.style, color=colour, markersize=3.5, linewidth=1.5)
            if line.low:
                ax.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        ax.set(**panel.axes)
        for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
            if scale == "log":
                axis.set_major_formatter(FuncFormatter(tick_text))
                axis.set_minor_formatter(NullFormatter())
        ax.set_title(panel.title, loc="left", fontsize=10)
        if place >= len(panels) - columns:
            ax.set_xlabel(panel.xlabel)
        names = {line.name for line in panel.lines if line.name}
        if not names <= named:
            _name_lines(ax, panel.lines, height)
        named |= names
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    return figure


def _name_lines(ax: "matplotlib.axes.Axes", lines: Sequence[Line], height: float) -> None:
    """Write names at the right ends of lines, moved apart where they would overlap."""
    ax.autoscale_view()
    to_axes = ax.transData + ax.transAxes.inverted()
    ends = [(line, *to_axes.transform((line.x[-1], line.y[-1])).tolist()) for line in lines if line.name]
    ends.sort(key=lambda end: end[2])
    heights = apart([min(up, 1.0) for *_, up in ends], 1.25 * LABEL_SIZE / (72 * 0.75 * height))
    for (line, right, _), up in zip(ends, heights, strict=True):
        look: dict[str, Any] = {"color": colour_of(line), "fontsize": LABEL_SIZE, "va": "center"}
        ax.text(right + 0.025, up, line.name, transform=ax.transAxes, **look)


def colour_of(line: Line) -> str:
    """Return a line's colour."""
    return plots.NOTE_COLOUR if line.colour is None else plots.COLOURS[line.colour % len(plots.COLOURS)]
