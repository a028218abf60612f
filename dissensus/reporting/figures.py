"""Parts of evaluations in, figures out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dissensus.evaluation import Disputed, Histogram, Number, Reliability, Roc
from dissensus.evaluation.tables import short
from dissensus.metrics import ReliabilityCurve
from dissensus.plots import COLOURS, NOTE_COLOUR, panels, reliability
from dissensus.plots.figures import as_written, hover

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = ("-", "--", ":")
_PICTURES_A_ROW = 3
# As many as fit under a picture.
_LETTERS_A_LINE = 20


def style(place: int) -> dict[str, Any]:
    """Return colour and line style of the nth line of a figure; both change when the colours are used up."""
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": _LINES[place // len(COLOURS) % len(_LINES)]}


def panel(title: str, height: float = 3.3) -> tuple["Figure", "Axes"]:
    """Return a figure of the width that most have on a page, with one panel."""
    figure, (ax,) = panels(width=4.4, height=height)
    ax.set_title(as_written(title))
    return figure, ax


def reliability_diagram(curve: Reliability, name: str) -> "Figure":
    """Draw confidence against accuracy, bin by bin."""
    figure, ax = panel(curve.set, 3.8)
    columns = (curve.claimed, curve.observed, curve.share, curve.lower, curve.upper)
    reliability(ReliabilityCurve(*(torch.tensor(c, dtype=torch.float64) for c in columns)), ax, label=as_written(name))
    return figure


def _square(title: str, diagonal: str, xlabel: str, ylabel: str) -> tuple["Figure", "Axes"]:
    """Return a figure of two shares, and its diagonal named."""
    figure, ax = panel(title, 3.8)
    ax.plot([0, 1], [0, 1], color=NOTE_COLOUR, linestyle="--", linewidth=1, label=diagonal)
    ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, 1), ylim=(0, 1))
    return figure, ax


def coverage_diagram(curves: Mapping[str, Reliability], title: str, *, quantiles: bool = False) -> "Figure":
    """Draw the probability that intervals (or quantiles) claim against the share of targets inside (or below), run by run."""
    inside = "below" if quantiles else "inside"
    claim = "level of the quantile" if quantiles else "probability of the interval"
    figure, ax = _square(title, "calibrated", claim, f"share of targets {inside}")
    for place, (name, curve) in enumerate(curves.items()):
        dots = (curve.claimed, curve.observed)
        (line,) = ax.plot(*dots, marker="o", markersize=4, label=as_written(name), clip_on=False, **style(place))
        hover(line, [f"{name}: claimed {c:.2f}, {inside} {o:.2f}" for c, o in zip(*dots, strict=True)])
    ax.legend(frameon=False, fontsize="small")
    return figure


def common_axis(histograms: Sequence[Histogram]) -> dict[str, Any]:
    """Return scale and ends of an axis that histograms of several runs share: logarithmic if one of them is and all allow it."""
    edges = [edge for part in histograms for edge in part.edges]
    if any(part.logarithmic for part in histograms) and min(edges) >= 0:
        return {"xscale": "log", "xlim": (min(edge for edge in edges if edge > 0), max(edges))}
    return {"xscale": "linear", "xlim": (min(edges), max(edges))}


def score_histogram(histograms: Sequence[Histogram], xlabel: str, title: str, axis: Mapping[str, Any]) -> "Figure":
    """Draw the distributions of a score on several sets, in common bins; the first is filled."""
    figure, ax = panel(title)
    for place, part in enumerate(histograms):
        look = style(place)
        if place == 0:
            ax.stairs(part.shares, part.edges, fill=True, color=look["color"], alpha=0.2)
        ax.stairs(part.shares, part.edges, linewidth=1.4, label=as_written(part.set), **look)
    ax.set(xlabel=as_written(xlabel), ylabel="share of inputs", **axis)
    ax.legend(frameon=False, fontsize="small")
    return figure


def roc_diagram(curves: Mapping[str, Roc], title: str) -> "Figure":
    """Draw ROC curves, one for each label."""
    figure, ax = _square(title, "chance", "known inputs flagged", "unknown inputs flagged")
    for place, (label, curve) in enumerate(curves.items()):
        ax.plot(curve.fpr, curve.tpr, linewidth=1.6, label=as_written(label), **style(place))
    ax.set(ylim=(0, 1.01))
    ax.legend(frameon=False, fontsize="small", loc="lower right")
    return figure


def severity_curves(curves: Mapping[str, Mapping[int, Number]], ylabel: str) -> "Figure":
    """Draw a metric against the severity of corruptions, with its intervals; 0 is the clean set."""
    figure, ax = panel("")
    for place, (label, numbers) in enumerate(curves.items()):
        levels, look = sorted(numbers), style(place)
        values, low, high = ([getattr(numbers[level], end) for level in levels] for end in ("value", "low", "high"))
        (line,) = ax.plot(levels, values, marker="o", markersize=4, label=as_written(label), **look)
        pairs = zip(levels, values, strict=True)
        hover(line, [f"{label}, severity {level}: {value:.3f}" for level, value in pairs])
        if None not in low:
            ax.fill_between(levels, low, high, color=look["color"], alpha=0.18, linewidth=0)
    ax.set(xlabel="severity (0 is clean)", ylabel=ylabel)
    ax.set_xticks(sorted(set().union(*curves.values())))
    if len(curves) > 1:
        ax.legend(frameon=False, fontsize="small")
    return figure


def uncertainty_bars(parts: Mapping[str, Mapping[str, float]], unit: str, title: str) -> "Figure":
    """Draw data and knowledge uncertainty of each set end to end; together they are the total."""
    names = list(parts)
    figure, (ax,) = panels(width=5.4, height=1.1 + 0.36 * len(names))
    starts = np.zeros(len(names))
    for place, part in enumerate(("data", "knowledge")):
        values = np.array([parts[name][part] for name in names])
        ax.barh(list(map(as_written, names)), values, left=starts, height=0.62, color=COLOURS[place], label=part)
        starts = starts + values
    for row, total in enumerate(starts):
        ax.annotate(short(total), (total, row), (5, 0), textcoords="offset points", va="center", fontsize="small")
    ax.invert_yaxis()
    ax.margins(x=0.14)
    ax.set(title=as_written(title), xlabel=as_written(f"mean uncertainty ({unit}); the number is the total"))
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(*ax.get_legend_handles_labels(), frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    return figure


def member_dots(members: Sequence[Number], ensemble: Number, ylabel: str, title: str) -> "Figure":
    """Draw a dot with its interval for each member, and a line with a band for the ensemble."""
    figure, ax = panel(title, 3.0)
    places = range(len(members))
    values = [number.value for number in members]
    (dots,) = ax.plot(places, values, "o", color=COLOURS[0], label="members", zorder=3)
    hover(dots, [f"member {place}: {short(value)}" for place, value in enumerate(values)])
    if ensemble.low is not None and ensemble.high is not None:
        ends = [(number.low or 0.0, number.high or 0.0) for number in members]
        ax.vlines(places, *zip(*ends, strict=True), color=COLOURS[0], linewidth=1.2, zorder=2)
        ax.axhspan(ensemble.low, ensemble.high, color=COLOURS[1], alpha=0.15, linewidth=0)
    ax.axhline(ensemble.value, color=COLOURS[1], linewidth=1.6, label="ensemble")
    ax.set(xlabel="member", ylabel=as_written(ylabel), xlim=(-0.6, len(members) - 0.4))
    if len(members) <= 20:
        ax.set_xticks(places)
    ax.margins(y=0.2)
    figure.legend(*ax.get_legend_handles_labels(), frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    return figure


def votes_sheet(items: Sequence[Disputed], class_names: Sequence[str]) -> "Figure":
    """Draw pictures in rows of three, each with what it is, what the ensemble says, and what the members say."""
    from matplotlib.figure import Figure

    rows = ceil(len(items) / _PICTURES_A_ROW)
    look: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 8}
    figure = Figure(figsize=(1.5 * _PICTURES_A_ROW, 2.3 * rows))
    # Under each picture there is room for its lines.
    figure.subplots_adjust(0.016, 0.378 / rows, 0.984, 1 - 0.03 / rows, wspace=0.1, hspace=0.69)
    for place, item in enumerate(items, start=1):
        ax = figure.add_subplot(rows, _PICTURES_A_ROW, place)
        ax.set_axis_off()
        image = item.image.transpose(1, 2, 0)
        ax.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)
        for number, text in enumerate(votes_lines(item, class_names)):
            weight = "bold" if number == 1 else "normal"
            ax.text(0.5, -0.04 - 0.107 * number, as_written(text), transform=ax.transAxes, weight=weight, **look)
    return figure


def votes_lines(item: Disputed, class_names: Sequence[str]) -> list[str]:
    """Return the lines under a picture: what it is, the ensemble's answer, and the votes; of maps, how disputed it is."""
    if not item.votes:
        return [f"disputed {item.dispute:.2g}"]
    votes = Counter(_name(vote, class_names) for vote in item.votes)
    counted = [f"{name} \N{MULTIPLICATION SIGN}{number}" for name, number in votes.most_common(4)]
    truth = "unknown" if item.label is None else _name(item.label, class_names)
    return [f"is {truth}", f"says {_name(item.predicted, class_names)}", *_wrapped(counted)[:3]]


def _wrapped(words: Sequence[str]) -> list[str]:
    """Put words into as few lines as they need."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 2 > _LETTERS_A_LINE:
            lines.append("")
        lines[-1] = f"{lines[-1]}, {word}".removeprefix(", ")
    return lines


def _name(index: int, class_names: Sequence[str]) -> str:
    name = class_names[index] if class_names else str(index)
    return name if len(name) <= _LETTERS_A_LINE else name[: _LETTERS_A_LINE - 1] + "…"
