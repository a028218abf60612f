"""What figures of all studies share: lines named at their ends, and files that are the same bytes when drawn again."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dissensus import plots
from dissensus.plots.figures import tick_text

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

    Figure = matplotlib.figure.Figure
    Axes = matplotlib.axes.Axes


def in_rows(count: int, columns: int = 3) -> tuple["Figure", list["Axes"]]:
    """Return a figure of so many panels, three a row: more side by side cannot be read on a page."""
    columns = min(count, columns)
    figure, axes = plots.panels(columns, ceil(count / columns), width=3.2 if columns > 2 else 4.4, height=2.6)
    for ax in axes[count:]:
        ax.axis("off")
    return figure, axes[:count]


def name_lines(ax: "Axes", *, gap: float = 0.085, size: float = 8) -> None:
    """Write the name of each line of a finished panel beside its end, in its colour; names that would lie on each other move apart."""
    place = ax.transData + ax.transAxes.inverted()
    named = [line for line in ax.lines if not str(line.get_label()).startswith("_")]
    last = (place.transform(np.asarray(line.get_xydata())[-1])[1] for line in named)
    ends = sorted((float(height), index) for index, height in enumerate(last))
    heights = apart([end for end, _ in ends], gap)
    for height, (_, index) in zip(heights, ends, strict=True):
        line = named[index]
        ax.annotate(
            str(line.get_label()),
            (1.02, height),
            xycoords="axes fraction",
            va="center",
            fontsize=size,
            color=line.get_color(),
            annotation_clip=False,
        )


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


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure; drawn again from the same record, it gives the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "dissensus"}):
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


Lines = Mapping[str, Mapping[float, float]]


def sweeps(
    panels: Mapping[str, Lines],
    along: str,
    *,
    spreads: Mapping[str, Lines] | None = None,
    level: str = "",
    columns: int = 3,
    logs: Sequence[str] = (),
) -> "Figure":
    """Draw quantities against what was varied, a panel each.

    Args:
        panels: Title of a panel to its lines: name of a line to its value at each place.
        along: What was varied.
        spreads: Half the width of a band around each value, laid out alike.
        level: Name of a line that is drawn as one level, that of its only value.
        columns: Panels a row.
        logs: Titles of panels whose upright axis is logarithmic.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure, axes = in_rows(len(panels), columns)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = dict(zip(names, plots.COLOURS, strict=False)) | {level: plots.NOTE_COLOUR}
    places = sorted(
        {place for lines in panels.values() for name, line in lines.items() if name != level for place in line}
    )
    # Where 0 is among the places there is no logarithmic axis: they stand at even distances.
    even = places[0] == 0

    def at(some: Sequence[float]) -> list[float]:
        return [places.index(place) for place in some] if even else list(some)

    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, line in lines.items():
            if name == level:
                (height,) = line.values()
                ax.plot(at([places[0], places[-1]]), [height] * 2, "--", color=colours[name], linewidth=1, label=name)
                continue
            x = sorted(line)
            ax.plot(
                at(x), [line[each] for each in x], "o-", color=colours[name], markersize=4, linewidth=1.5, label=name
            )
            half = (spreads or {}).get(title, {}).get(name, {})
            low, high = ([line[each] + sign * half.get(each, 0.0) for each in x] for sign in (-1, 1))
            ax.fill_between(at(x), low, high, color=colours[name], alpha=0.2, linewidth=0)
        if not even:
            ax.set_xscale("log")
        ax.set_xticks(at(places), [f"{place:g}" for place in places])
        ax.set_xticks([], minor=True)
        if title in logs:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(FuncFormatter(tick_text))
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_minor_locator(NullLocator())
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xlabel(along)
        name_lines(ax)
    return figure


def pareto(
    points: Mapping[str, tuple[float, float]], beside: Mapping[str, tuple[float, float]] | None = None
) -> "Figure":
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
