"""Named lines in, a figure in the one style out: panels without boxes or legends, every line named at its end in its own colour."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from dissensus import plots
from dissensus.html import Section
from dissensus.plots.figures import tick_text
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.outputs import Outputs
from dissensus_studies.harness.statistics import Summary, over_seeds

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
    **axes: Any,
) -> Drawing:
    """Return a figure with a panel for each column: means over repeats against what was varied, with two standard errors.

    Points are the name of a line, what was varied, and the record of one arm; columns are the title of a panel and what it reads of
    a record, NaN where that was not measured; `levels` are records that others are compared with, drawn as dashed lines.
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
    return Drawing(name, title, panels, "Means over runs, with two standard errors where there are several.")


# A line: its value at each place, and half the width of the band around it.
Lines = Mapping[str, Mapping[float, tuple[float, float]]]


def sweeps(
    panels: Mapping[str, Lines], along: str, *, level: str = "", columns: int = 3, logs: Sequence[str] = ()
) -> "matplotlib.figure.Figure":
    """Draw quantities against what was varied, `along`, a panel each by its title.

    The line called `level` is drawn as one level, that of its only value; panels named in `logs` have a logarithmic upright axis.
    """
    names = [name for name in dict.fromkeys(name for lines in panels.values() for name in lines) if name != level]
    places = sorted({x for lines in panels.values() for name in lines if name != level for x in lines[name]})
    # Where 0 is among the places there is no logarithmic axis: they stand at even distances.
    at = {place: index if places[0] == 0 else place for index, place in enumerate(places)}
    axes: dict[str, Any] = {"xticks": list(at.values()), "xticklabels": [f"{place:g}" for place in places]}
    if places[0] > 0:
        axes["xscale"] = "log"

    def line(name: str, found: Mapping[float, tuple[float, float]]) -> Line:
        if name == level:
            ((height, _),) = found.values()
            return Line(name, [at[places[0]], at[places[-1]]], [height] * 2, colour=None, style="--")
        order = sorted(found)
        middle, low, high = ([found[x][0] + sign * found[x][1] for x in order] for sign in (0, -1, 1))
        return Line(name, [at[x] for x in order], middle, low, high, names.index(name))

    drawn = [
        Panel(title, along, [line(*each) for each in own.items()], axes | ({"yscale": "log"} if title in logs else {}))
        for title, own in panels.items()
    ]
    return draw(drawn, columns, width=4.1 if columns > 2 else 5.0, name_each=True)


def draw(
    panels: Sequence[Panel],
    columns: int = 3,
    *,
    title: str = "",
    width: float = 3.6,
    height: float = 2.7,
    name_each: bool = False,
) -> "matplotlib.figure.Figure":
    """Draw panels side by side; lines of the same names are named in the first panel that has them, or in each."""
    columns = min(columns, len(panels))
    width = max(width, 4.8) if columns == 1 else width
    figure, axes = plots.panels(columns, -(-len(panels) // columns), width=width, height=height)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    named: set[str] = set()
    for place, (ax, panel) in enumerate(zip(axes, panels, strict=False)):
        for line in panel.lines:
            colour = plots.NOTE_COLOUR if line.colour is None else plots.COLOURS[line.colour % len(plots.COLOURS)]
            ax.plot(line.x, line.y, line.style, color=colour, markersize=3.5, linewidth=1.5, label=line.name or None)
            if line.low:
                ax.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        _set_axes(ax, panel.axes)
        ax.set_title(panel.title, loc="left", fontsize=10)
        if place >= len(panels) - columns:
            ax.set_xlabel(panel.xlabel)
        names = {line.name for line in panel.lines if line.name}
        if name_each or not names <= named:
            name_lines(ax)
        named |= names
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    return figure


def _set_axes(ax: "matplotlib.axes.Axes", wanted: Mapping[str, Any]) -> None:
    """Set scales, limits and ticks; logarithmic axes have plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set(**wanted)
    for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
        if scale == "log":
            axis.set_major_formatter(FuncFormatter(tick_text))
            axis.set_minor_formatter(NullFormatter())
            low, high = axis.get_view_interval()
            if high < 100 * low:
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if "xticks" in wanted:
        # On a logarithmic axis both would be lost.
        ax.set_xticks(wanted["xticks"], wanted.get("xticklabels"))
        ax.set_xticks([], minor=True)


def name_lines(ax: "matplotlib.axes.Axes") -> None:
    """Write the name of each line of a finished panel beside its end, in its colour, moved apart where names would overlap."""
    ax.autoscale_view()
    to_axes = ax.transData + ax.transAxes.inverted()
    named = [line for line in ax.lines if not str(line.get_label()).startswith("_")]
    ends = [(line, *to_axes.transform(np.asarray(line.get_xydata())[-1]).tolist()) for line in named]
    ends.sort(key=lambda end: end[2])
    figure, spec = ax.get_figure(root=True), ax.get_subplotspec()
    assert figure is not None
    assert spec is not None
    height = figure.get_size_inches()[1] / spec.get_gridspec().nrows
    heights = apart([min(up, 1.0) for *_, up in ends], 1.25 * LABEL_SIZE / (72 * 0.75 * height))
    for (line, right, _), up in zip(ends, heights, strict=True):
        look: dict[str, Any] = {"color": line.get_color(), "fontsize": LABEL_SIZE, "va": "center"}
        ax.text(right + 0.025, up, str(line.get_label()), transform=ax.transAxes, **look)


def apart(values: Sequence[float], gap: float) -> list[float]:
    """Return values, in order, moved so that neighbours are at least a gap apart.

    Example:
        >>> apart([0.0, 0.1, 1.0], 0.4)
        [-0.15, 0.25, 1.0]
    """
    found = list(values)
    for _ in range(50):
        for (low, a), (high, b) in pairwise(enumerate(found)):
            short = gap - (b - a)
            if short > 1e-9:
                found[low], found[high] = a - short / 2, found[high] + short / 2
    return [round(value, 6) for value in found]


def save_figure(figure: "matplotlib.figure.Figure", path: Path) -> None:
    """Write a figure; drawn again from the same record, it gives the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "dissensus"}):
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


def pareto(
    points: Mapping[str, tuple[float, float]], beside: Mapping[str, tuple[float, float]] | None = None
) -> "matplotlib.figure.Figure":
    """Draw NLL against microseconds an image, every point with its name; what nothing beats in both is joined by a line.

    Names stand to the right of their points, or `beside` them by so many points.
    """
    figure, (ax,) = plots.panels(width=7.2, height=4.2)
    front = sorted(
        p for p in points.values() if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points.values())
    )
    ax.plot(*zip(*front, strict=True), "--", color=plots.NOTE_COLOUR, linewidth=1)
    for family, point in points.items():
        ax.plot(*point, "o", color=plots.COLOURS[1 if point in front else 0], markersize=5)
        name = family.removesuffix(", independent")
        place = (beside or {}).get(name, (6, -3))
        side = "right" if place[0] < 0 else "left"
        ax.annotate(name, point, place, textcoords="offset points", fontsize=8, ha=side)
    ax.set(xlabel="microseconds an image, all members", ylabel="NLL on test images, nats")
    ax.set_xlim(0, 1.17 * max(cost for cost, _ in points.values()))
    return figure


def shares_figure(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]], xlabel: str, chance: float
) -> "matplotlib.figure.Figure":
    """Draw shares as dots: panels by title, in each a row for each name, the largest on average first, and a colour for each kind.

    A line marks what is shown by chance alone.
    """
    every = [shares for kinds in panels.values() for shares in kinds.values()]
    names = sorted(every[0], key=lambda name: -sum(shares[name] for shares in every))
    figure, axes = plots.panels(len(panels), width=2.5, height=0.25 * len(names) + 1.1)
    rows = range(len(names), 0, -1)
    # Kinds are named once, above the first row, where their dots are furthest apart.
    first = {title: [shares[names[0]] for shares in kinds.values()] for title, kinds in panels.items()}
    named = max(first, key=lambda title: max(first[title]) - min(first[title]))
    for ax, (title, kinds) in zip(axes, panels.items(), strict=True):
        for colour, (kind, shares) in enumerate(kinds.items()):
            look: dict[str, Any] = {"color": plots.COLOURS[colour]}
            ax.plot([shares[name] for name in names], rows, "o", markersize=5, **look)
            if title == named:
                side = "right" if shares[names[0]] == min(first[title]) else "left"
                look |= {"textcoords": "offset points", "ha": side, "fontsize": LABEL_SIZE}
                ax.annotate(kind, (shares[names[0]], len(names)), (6 if side == "right" else -6, 7), **look)
        ax.axvline(chance, color=plots.NOTE_COLOUR, linestyle="--", linewidth=1)
        ax.grid(axis="y", color="#EDEDED")
        ax.set_yticks(rows, names if ax is axes[0] else [""] * len(names))
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.set(
            xlim=(0, 1.05 * max(max(shares.values()) for shares in every)), ylim=(0.5, len(names) + 1.2), xlabel=xlabel
        )
        ax.set_title(title.replace(", ", "\n", 1), loc="left", fontsize=10)
    return figure


def baseline_figure(bars: Mapping[str, tuple[float, float, float]]) -> "matplotlib.figure.Figure":
    """Draw figure 4: every method we have, by AUROC, with its 95 % interval; loss-guided ones stand out."""
    figure, (ax,) = plots.panels(width=6.5, height=0.25 * len(bars) + 0.8)
    for place, (name, (value, low, high)) in enumerate(bars.items()):
        colour = plots.COLOURS[1] if name.lower().startswith("ldr") else plots.COLOURS[0]
        ax.plot((low, high), (place, place), color=colour, linewidth=1.5, alpha=0.5)
        ax.plot(value, place, "o", color=colour, markersize=6)
        # On the far side of the line of chance.
        end, offset, side = (low, -5, "right") if value < 0.5 else (high, 5, "left")
        style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "ha": side}
        ax.annotate(f"{value:.3f}", (end, place), (offset, 0), **style)
    ax.set_yticks(range(len(bars)), list(bars))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    values = [value for value, *_ in bars.values()]
    if min(values) < 0.55:
        # What is left of chance orders images the wrong way round.
        ax.axvline(0.5, color=plots.NOTE_COLOUR, linestyle="--", linewidth=1)
        ax.annotate(
            "chance", (0.5, len(bars) - 0.4), (4, 0), textcoords="offset points", fontsize=8, color=plots.NOTE_COLOUR
        )
    ax.set(xlim=(min(values) - 0.07, max(values) + 0.04), xlabel="AUROC at severity 5")
    return figure


def trade_figure(points: Mapping[str, Sequence[tuple[float, float, float]]]) -> "matplotlib.figure.Figure":
    """Draw what members lose against what detection gains, one point (worst member's accuracy, AUROC, strength) for each arm."""
    figure, (ax,) = plots.panels(width=6.2, height=3.6)
    for index, (name, own) in enumerate(points.items()):
        colour = plots.COLOURS[index % len(plots.COLOURS)]
        order = sorted(own, key=lambda point: point[2])
        ax.plot([p[0] for p in order], [p[1] for p in order], "o-", color=colour, markersize=5, linewidth=0.8)
        style: dict[str, Any] = {"textcoords": "offset points", "color": colour}
        if name == "published":
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            named: dict[tuple[float, float], list[str]] = {}
            for across, up, strength in order:
                # Weak ones are at one place.
                named.setdefault((round(across, 2), round(up, 3)), []).append(f"{strength:g}")
            for place, words in named.items():
                ax.annotate(", ".join(words), place, (-4, 5), ha="right", fontsize=8, bbox=paper, **style)
        ax.annotate(name, own[-1][:2], (8, -11), fontsize=9, **style)
    ax.margins(0.1)
    ax.set(xlabel="worst member's accuracy", ylabel="AUROC of PDS, severity 5")
    return figure
