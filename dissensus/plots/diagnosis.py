"""Findings about members, each drawn into one `Axes`: drop curves, offsets, errors over training, diversity of pairs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dissensus.diagnostics import Check, DropCurve, Pair
from dissensus.metrics import diversity_bounds
from dissensus.plots.figures import COLOURS, NOTE_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def drop_curve(curve: DropCurve, ax: "Axes", *, label: str = "measured", colour: str = COLOURS[0]) -> None:
    """Draw a metric against the number of members that are dropped at test time.

    Reading: a flat curve means that members can be spared; one that leaves at once means that they need each other.

    Args:
        curve: One of `Finding.drops`.
        ax: Where to draw.
        label: Name in the legend.
        colour: Colour of the line; its bars are one standard deviation over the repeats.

    Example:
        >>> import torch
        >>> from dissensus.diagnostics import diagnose
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> drop_curve(diagnose(torch.randn(5, 50), torch.zeros(50), loss="mse").drops[0], ax)
        >>> ax.get_legend_handles_labels()[1]
        ['exact', 'measured']
    """
    dropped, values, spread = [0, *curve.dropped], [curve.full, *curve.values], [0.0, *curve.deviations]
    if curve.exact:
        exact = [curve.full, *curve.exact]
        ax.plot(dropped, exact, color=NOTE_COLOUR, linestyle="--", linewidth=1.2, label="exact")
    ax.errorbar(dropped, values, spread, color=colour, marker="o", markersize=4, linewidth=1.5, capsize=3, label=label)
    ax.set_xticks(dropped)
    ax.set(xlabel="members dropped", ylabel=curve.metric)
    ax.legend(frameon=False, fontsize="small")


def offset_bars(offsets: Sequence[float], ax: "Axes", *, ensemble_error: float) -> None:
    """Draw how far each member sits beside the ensemble by a constant.

    Reading: bars that reach the dashed line, the typical error of the ensemble, are members that err more by their offset than
    the ensemble does by everything.

    Args:
        offsets: `Finding.offsets`.
        ax: Where to draw.
        ensemble_error: Typical error of the ensemble in the units of the offsets; drawn where it is positive.

    Example:
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> offset_bars([0.5, 0.5], ax, ensemble_error=0.2)
        >>> [float(bar.get_height()) for bar in ax.patches]
        [0.5, 0.5]
    """
    ax.bar(range(len(offsets)), offsets, color=COLOURS[0], width=0.7)
    if ensemble_error > 0:
        ax.axhline(ensemble_error, color=COLOURS[1], linestyle="--", linewidth=1.4, label="ensemble's typical error")
        ax.legend(frameon=False, fontsize="small")
    ax.set(xlabel="member", ylabel="constant offset", xlim=(-0.6, len(offsets) - 0.4))
    if len(offsets) <= 20:
        ax.set_xticks(range(len(offsets)))
    ax.margins(y=0.15)


def error_curves(checks: Sequence[Check], ax: "Axes") -> None:
    """Draw errors of mean member and ensemble over training, on training and held-out data.

    Reading: the space between two lines of one colour is the diversity. Members collude where it opens while the ensemble's
    line goes on down; the space between the two thick lines is the generalisation gap.

    Args:
        checks: `Finding.checks`.
        ax: Where to draw; the vertical axis becomes logarithmic where errors are positive and span a decade.

    Example:
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> error_curves([Check(1, 10, 2.0, 1.0), Check(2, 20, 1.5, 0.5)], ax)
        >>> ax.get_legend_handles_labels()[1]
        ['ensemble, training', 'mean member, training']
    """
    epochs = [check.epoch for check in checks]
    drawn = []
    for place, (name, data) in enumerate({"train": "training", "validation": "held out"}.items()):
        ensemble = np.array([getattr(check, f"{name}_ensemble_error") for check in checks])
        member = np.array([getattr(check, f"{name}_member_error") for check in checks])
        if not np.isfinite(ensemble).any():
            continue
        colour = COLOURS[place]
        ax.plot(epochs, ensemble, linewidth=2.0, label=f"ensemble, {data}", color=colour)
        ax.plot(epochs, member, linewidth=1.2, linestyle="--", label=f"mean member, {data}", color=colour)
        ax.fill_between(epochs, ensemble, member, alpha=0.12, linewidth=0, color=colour)
        drawn += [ensemble, member]
    values = np.concatenate(drawn)
    if values.min() > 0 and values.max() > 10 * values.min():
        from matplotlib.ticker import LogLocator, NullFormatter

        ax.set_yscale("log")
        # Plain decimals, also between the powers of ten.
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="epoch", ylabel="error")
    ax.legend(frameon=False, fontsize="small")


def diversity_accuracy(pairs: Sequence[Pair], num_classes: int, ax: "Axes") -> None:
    """Draw how differently pairs of members err against their accuracy, between two bounds.

    Reading: each dot is a pair, at the accuracy of its less accurate member. On the lower line that member is a noisy copy of
    the ensemble's most accurate one, on the upper line both err independently; above it, they avoid each other's answers.

    Args:
        pairs: `Finding.pairs`.
        num_classes: Number of classes.
        ax: Where to draw.

    Example:
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> diversity_accuracy([Pair((0, 1), 0.8, 0.9, 1.0, 0.56, 1.39)], 10, ax)
        >>> ax.get_legend_handles_labels()[1]
        ['independent errors', 'noisy copy', 'pairs of members']
    """
    accuracies = [pair.accuracy for pair in pairs]
    best = max(pair.base_accuracy for pair in pairs)
    # The bounds are of members that are right more often than chance, not always, and less often than the best.
    room = max(0.02, 0.15 * (best - min(accuracies)))
    low, high = max(1 / num_classes, min(accuracies) - room), max(*accuracies, min(best, 0.999))
    grid = np.linspace(low, high, 60)
    bounds = [diversity_bounds(float(accuracy), best, num_classes) for accuracy in grid]
    lines = {"independent errors": "upper", "noisy copy": "lower"}
    for (label, name), colour in zip(lines.items(), (COLOURS[1], COLOURS[2]), strict=True):
        ax.plot(grid, [getattr(bound, name) for bound in bounds], color=colour, linestyle="--", label=label)
    diversities = [pair.diversity for pair in pairs]
    ax.plot(accuracies, diversities, "o", color=COLOURS[0], alpha=0.7, markersize=5, label="pairs of members")
    ax.set(xlabel="accuracy of the less accurate member", ylabel="disagreement / error rate")
    ax.margins(y=0.12)
    ax.legend(frameon=False, fontsize="small")
