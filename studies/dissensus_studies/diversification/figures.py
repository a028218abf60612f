"""Numbers of the record of `diversification` in; its figures out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dissensus import plots

if TYPE_CHECKING:
    import matplotlib.figure


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
