"""Predicted means and standard deviations, drawn as bands."""

from collections.abc import Sequence
from math import ceil, sqrt
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from dissensus.plots.figures import COLOURS, POINT_COLOUR, TRUTH_COLOUR, Values, flat_array, set_style, tint
from dissensus.predictions import Family, mixture

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure


def bands(
    x: Values,
    mean: Values,
    std: Values,
    ax: "matplotlib.axes.Axes",
    *,
    truth: Values | None = None,
    points: tuple[Values, Values] | None = None,
    levels: Sequence[float] = (1.0, 2.0, 3.0),
    label: str = "mean prediction",
) -> None:
    """Draw a mean with bands of so many standard deviations around it, the truth, and the data.

    Args:
        x: Where predictions were made, `(points,)`, in any order.
        mean: Predicted means, `(points,)`.
        std: Predicted standard deviations, `(points,)`; not a variance, not a Laplace distribution's b.
        ax: Where to draw.
        truth: Values of the true function at `x`.
        points: Inputs and targets of the data.
        levels: Half widths of the bands, in standard deviations.
        label: Name of the mean in the legend.

    Example:
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> bands([0.0, 1.0], [0.0, 1.0], [1.0, 1.0], ax)
        >>> len(ax.collections)
        3
    """
    place, centre, spread = (flat_array(values) for values in (x, mean, std))
    order = np.argsort(place, kind="stable")
    place, centre, spread = place[order], centre[order], spread[order]
    for depth, level in enumerate(sorted(levels, reverse=True), start=1):
        low, high = centre - level * spread, centre + level * spread
        # Opaque shades, the innermost the darkest: overlapping see-through ones would not match their legend.
        shade = tint(COLOURS[0], 0.45 * depth / len(levels))
        ax.fill_between(place, low, high, color=shade, linewidth=0, label=f"± {level:g} sd")
    if truth is not None:
        ax.plot(place, flat_array(truth)[order], color=TRUTH_COLOUR, linestyle="--", linewidth=1.2, label="truth")
    ax.plot(place, centre, color=COLOURS[0], linewidth=1.6, label=label)
    if points is not None:
        ax.plot(
            flat_array(points[0]), flat_array(points[1]), "o", color=POINT_COLOUR, markersize=3, alpha=0.8, label="data"
        )


def member_bands(
    x: Values,
    mean: Tensor,
    scale: Tensor,
    *,
    family: Family = "gaussian",
    truth: Values | None = None,
    points: tuple[Values, Values] | None = None,
    limits: tuple[float, float] | None = None,
) -> "matplotlib.figure.Figure":
    """Draw the bands of every member, small, beside those of their mixture.

    Args:
        x: Where predictions were made, `(points,)`.
        mean: Members' means, `(members, points)`.
        scale: Members' scales: sigma, or a Laplace distribution's b.
        family: `"gaussian"` or `"laplace"`.
        truth: Values of the true function at `x`.
        points: Inputs and targets of the data.
        limits: Lower and upper end of every panel's vertical axis.

    Returns:
        The figure: one panel a member, then the mixture's.

    Example:
        >>> import torch
        >>> figure = member_bands([0.0, 1.0], torch.zeros(6, 2), torch.ones(6, 2))
        >>> len(figure.axes)
        7
    """
    from matplotlib.figure import Figure

    if mean.ndim != 2 or mean.shape != scale.shape:
        raise ValueError(
            "`mean` and `scale` must both be shaped (members, points); got "
            f"{tuple(mean.shape)} and {tuple(scale.shape)}. Squeeze an output axis of size one."
        )
    std = scale * (sqrt(2) if family == "laplace" else 1.0)
    rows = ceil(len(mean) / 2)
    figure = Figure(figsize=(10, max(4.8, 1.6 * rows)), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1), squeeze=False)[0]
    small = left.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flat
    for member, ax in enumerate(small):
        if member >= len(mean):
            ax.remove()
            continue
        set_style(ax)
        bands(x, mean[member], std[member], ax, truth=truth, points=points)
        ax.set_title(f"member {member}", fontsize="small")
    large = right.subplots()
    set_style(large)
    bands(x, *mixture(mean, scale, family), large, truth=truth, points=points, label="mean")
    large.set(title=f"mixture of {len(mean)} members", xlabel="x", ylabel="y")
    for line in large.lines:
        if line.get_linestyle() != "None":
            end = line.get_xydata()[-1]
            large.annotate(
                str(line.get_label()), end, (4, 0), textcoords="offset points", color=line.get_color(), fontsize=9
            )
    large.text(0.5, 0.02, "shades: 1, 2 and 3 sd", transform=large.transAxes, fontsize=9, ha="center")
    if limits is not None:
        for ax in figure.axes:
            ax.set_ylim(limits)
    return figure
