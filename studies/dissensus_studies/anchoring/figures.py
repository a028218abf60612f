"""Records of `anchoring` in, its figures out."""

from collections.abc import Mapping, Sequence
from math import ceil, isfinite, pi
from typing import TYPE_CHECKING

from dissensus import plots
from dissensus_studies.anchoring.qualities import (
    ADAPTATION,
    CALIBRATION,
    CLEAN,
    DETECTION,
    ROBUSTNESS,
    Quality,
    Records,
    measured,
)

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# Each is better when it is larger.
QUALITIES: Sequence[Quality] = (
    ROBUSTNESS,
    Quality("1 - smooth ECE under corruption", lambda record: 1 - CALIBRATION.read(record), CALIBRATION.error),
    ADAPTATION,
    DETECTION,
)
TAIL_QUALITIES: Sequence[Quality] = (DETECTION, ROBUSTNESS)
BANDS = "Bands are two standard errors to either side, over runs or over images, whichever is larger."
# A polygon has three corners at least.
_CORNERS = 3


def alpha_figure(plain: Records, anchored: Mapping[float, Records]) -> "matplotlib.figure.Figure":
    """Draw clean accuracy and every quality that was measured against the masking probability; a dashed line is the plain network.

    Args:
        plain: Records of plain networks.
        anchored: Masking probability (0 for none) to records of anchored networks.
    """
    shown = [each for each in (CLEAN, *QUALITIES) if measured(each, plain, *anchored.values())]
    columns = min(3, len(shown) + 1)
    figure, axes = plots.panels(columns, ceil((len(shown) + 1) / columns), width=3.2, height=2.8)
    for ax, quality in zip(axes, shown, strict=False):
        _line(ax, anchored, quality, "anchored", plots.COLOURS[0], band=True)
        _level(ax, plain, quality, "plain", plots.COLOURS[1])
        ax.set(xlabel="masking probability", ylabel=_in_lines(quality.name))
    for ax in axes[len(shown) :]:
        ax.axis("off")
    axes[len(shown)].legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="center left")
    return figure


def _line(
    ax: "matplotlib.axes.Axes",
    found: Mapping[float, Records],
    quality: Quality,
    label: str,
    colour: str,
    *,
    band: bool = False,
) -> None:
    """Draw means over runs against what was varied, with two standard errors to either side if so told."""
    places = sorted(found)
    means = [quality.summary(found[place]).mean for place in places]
    ax.plot(places, means, "o-", color=colour, markersize=4, linewidth=1.5, label=label)
    if band:
        spreads = [2 * quality.standard_error(found[place]) for place in places]
        low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        ax.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)


def _level(ax: "matplotlib.axes.Axes", records: Records, quality: Quality, label: str, colour: str) -> None:
    """Draw what others are compared with, with two standard errors."""
    mean, spread = quality.summary(records).mean, 2 * quality.standard_error(records)
    ax.axhline(mean, color=colour, linestyle="--", linewidth=1.2, label=label)
    ax.axhspan(mean - spread, mean + spread, color=colour, alpha=0.12, linewidth=0)


def _in_lines(name: str) -> str:
    return name.replace(" accuracy", "\naccuracy").replace(" under", "\nunder")


def tail_figure(masked: Records, mined: Mapping[str, Mapping[float, Records]]) -> "matplotlib.figure.Figure | None":
    """Draw mean AUROC and corruption accuracy against the weight of hard-delta mining, a line for each way to find tails.

    Args:
        masked: Records without mining: the dashed line.
        mined: Way to find tails, to weight, to records.

    Returns:
        The figure, with panels for what was measured; None where nothing was.
    """
    groups = [records for by_weight in mined.values() for records in by_weight.values()]
    shown = [each for each in TAIL_QUALITIES if measured(each, masked, *groups)]
    if not shown:
        return None
    figure, axes = plots.panels(len(shown), width=4.2, height=3.2)
    for ax, quality in zip(axes, shown, strict=True):
        for index, (tails, by_weight) in enumerate(mined.items()):
            _line(ax, by_weight, quality, tails, plots.COLOURS[index % len(plots.COLOURS)])
        _level(ax, masked, quality, "no mining", plots.NOTE_COLOUR)
        ax.set(xlabel="weight of the tail term", ylabel=quality.name, xscale="log")
    axes[-1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def improvements(plain: Records, others: Records) -> dict[str, float]:
    """Return by how many per cent each quality is better than the plain network's.

    Qualities that were not measured, or in which the plain network has 0, are left out.
    """
    found = {}
    for quality in QUALITIES:
        before, after = (quality.summary(records).mean for records in (plain, others))
        if isfinite(before) and isfinite(after) and before != 0:
            found[quality.name] = 100 * (after / before - 1)
    return found


def radar_figure(plain: Records, arms: Mapping[str, Records]) -> "matplotlib.figure.Figure | None":
    """Draw improvements over the plain network, which is the dashed ring at 0, around a circle.

    Args:
        plain: Records of plain networks.
        arms: Name to records of other networks.

    Returns:
        The figure; None where fewer than three qualities can be compared.
    """
    from matplotlib.figure import Figure
    from matplotlib.projections.polar import PolarAxes

    values = {name: improvements(plain, records) for name, records in arms.items()}
    names = [each.name for each in QUALITIES if all(each.name in found for found in values.values())]
    if len(names) < _CORNERS:
        return None
    figure = Figure(figsize=(6.4, 5.0), layout="constrained")
    ax = figure.add_subplot(projection="polar")
    assert isinstance(ax, PolarAxes)
    angles = [2 * pi * place / len(names) for place in range(len(names))]
    for index, (arm, found) in enumerate(values.items()):
        line = [found[name] for name in names]
        colour = plots.COLOURS[index % len(plots.COLOURS)]
        ax.plot([*angles, angles[0]], [*line, line[0]], "o-", color=colour, markersize=3, label=arm)
    circle = [2 * pi * step / 90 for step in range(91)]
    ax.plot(circle, [0.0] * len(circle), "--", color=plots.NOTE_COLOUR, linewidth=1.2, label="plain")
    drawn = [found[name] for found in values.values() for name in names]
    lowest, highest = min(0.0, *drawn), max(0.0, *drawn)
    margin = 0.15 * max(highest - lowest, 0.1)
    ax.set_ylim(lowest - 2 * margin, highest + margin)
    ax.set_xticks(angles, [_in_lines(name) for name in names])
    ax.yaxis.set_major_formatter("{x:g} %")
    ax.set_rlabel_position(315)
    ax.tick_params(axis="x", labelsize="small", pad=22)
    ax.tick_params(axis="y", labelsize="x-small")
    for text in ax.get_yticklabels():
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.1, 1.05))
    return figure


def not_drawn(qualities: Sequence[Quality], *groups: Records) -> list[str]:
    """Say which qualities figures leave out, and why."""
    return [
        f"Not drawn: {quality.name}, because {quality.lacking}."
        for quality in qualities
        if not measured(quality, *groups)
    ]
