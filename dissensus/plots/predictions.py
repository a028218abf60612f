"""Predictions as pictures: classes and uncertainty on a plane, means and standard deviations as bands."""

from collections.abc import Sequence
from math import ceil, log, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dissensus.plots.figures import COLOURS, Values, as_array, as_written, flat_array, panels, set_style
from dissensus.predictions import mixture
from dissensus.scores import Family

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


def four_panels(
    points: Values,
    labels: Values,
    axis: Values,
    mean_probs: Tensor,
    data_uncertainty: Tensor,
    knowledge_uncertainty: Tensor,
    *,
    title: str = "",
) -> "Figure":
    """Draw a plane: the data, the mean prediction, data uncertainty and knowledge uncertainty.

    Args:
        points: The data's inputs, `(points, 2)`.
        labels: Their classes, `(points,)`.
        axis: Coordinates of the square grid along either side, `(side,)`, evenly spaced.
        mean_probs: The ensemble's probabilities on the grid, `(side, side, classes)`; the first axis is the
            vertical one.
        data_uncertainty: Nats on the grid, `(side, side)`.
        knowledge_uncertainty: Nats on the grid, `(side, side)`.
        title: Title of the whole.

    Returns:
        The figure. Both uncertainties have one colour scale, from 0 to the log of the number of classes.

    Example:
        >>> import torch
        >>> flat = torch.zeros(2, 2)
        >>> probs = torch.full((2, 2, 3), 1 / 3)
        >>> figure = four_panels(torch.zeros(1, 2), [0], [-1.0, 1.0], probs, flat, flat)
        >>> [ax.get_title() for ax in figure.axes[:2]]
        ['data', 'mean prediction']
    """
    side, num_classes = len(axis), mean_probs.shape[-1]
    for name, values in (("data", data_uncertainty), ("knowledge", knowledge_uncertainty)):
        if values.shape != (side, side) or mean_probs.shape[:2] != (side, side):
            got = f"got {tuple(values.shape)} and {tuple(mean_probs.shape)}"
            raise ValueError(
                f"`{name}_uncertainty` and `mean_probs` must cover the {side} by {side} grid of `axis`; {got}."
            )
    figure, axes = panels(2, 2, width=4.2, height=3.9)
    # Panels of a fixed shape leave gaps in the usual layout.
    figure.set_layout_engine("compressed")
    if title:
        figure.suptitle(title)
    class_points(points, labels, axes[0])
    ends = (float(axis[0]), float(axis[-1]))
    _image(_blend(mean_probs), axis, axes[1])
    for ax, values in zip(axes[2:], (data_uncertainty, knowledge_uncertainty), strict=True):
        image = _image(as_array(values), axis, ax, cmap="viridis", vmin=0, vmax=log(num_classes))
    figure.colorbar(image, ax=axes, label="nats", shrink=0.44, anchor=(0.0, 0.03))
    titles = ("data", "mean prediction", "data uncertainty", "knowledge uncertainty")
    for ax, text in zip(axes, titles, strict=True):
        ax.set(title=text, xlim=ends, ylim=ends, aspect="equal")
    return figure


def class_maps(axis: Values, probs: Tensor, names: Sequence[str]) -> "Figure":
    """Draw several predictions of a plane side by side, such as those of the members of an ensemble.

    Args:
        axis: Coordinates of the square grid along either side, `(side,)`, evenly spaced.
        probs: Probabilities, `(maps, side, side, classes)`.
        names: Title of each map.

    Returns:
        The figure. Colours are those of the classes, mixed by probability.

    Example:
        >>> import torch
        >>> figure = class_maps([-1.0, 1.0], torch.full((2, 2, 2, 3), 1 / 3), ["first", "second"])
        >>> [ax.get_title() for ax in figure.axes]
        ['first', 'second']
    """
    figure, axes = panels(len(names), width=2.4, height=2.5)
    for ax, values, name in zip(axes, probs, names, strict=True):
        _image(_blend(values), axis, ax)
        ax.set_title(as_written(name), fontsize="medium")
        ax.tick_params(labelsize="small")
    return figure


def class_points(points: Values, labels: Values, ax: "Axes") -> None:
    """Draw points of a plane, `(points, 2)`, in the colours of their classes.

    Example:
        >>> figure, (ax,) = panels()
        >>> class_points([[0.0, 1.0], [2.0, 3.0]], [0, 1], ax)
        >>> len(ax.lines)
        2
    """
    place, kind = as_array(points), as_array(labels)
    if kind.size:
        _check_colours(int(kind.max()) + 1)
    for index in np.unique(kind):
        chosen = place[kind == index]
        colour = COLOURS[int(index)]
        # Thousands of points as vectors make files that viewers choke on.
        ax.plot(chosen[:, 0], chosen[:, 1], ".", color=colour, markersize=2, rasterized=True, label=f"class {index}")


def _image(values: NDArray[Any], axis: Values, ax: "Axes", **look: Any) -> "AxesImage":
    ends = (float(axis[0]), float(axis[-1]))
    return ax.imshow(values, extent=(*ends, *ends), origin="lower", interpolation="none", **look)


def _blend(probs: Tensor) -> NDArray[Any]:
    """Return the classes' colours mixed by probability: pure where the ensemble is sure."""
    from matplotlib.colors import to_rgb

    _check_colours(num_classes := probs.shape[-1])
    palette = np.array([to_rgb(colour) for colour in COLOURS[:num_classes]])
    return np.clip(as_array(probs) @ palette, 0.0, 1.0)


def _check_colours(num_classes: int) -> None:
    if num_classes > len(COLOURS):
        raise ValueError(f"There are colours for {len(COLOURS)} classes; got {num_classes}. Draw fewer.")


def bands(
    x: Values,
    mean: Values,
    std: Values,
    ax: "Axes",
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
        >>> figure, (ax,) = panels()
        >>> bands([0.0, 1.0], [0.0, 1.0], [1.0, 1.0], ax)
        >>> len(ax.collections)
        3
    """
    from matplotlib.colors import to_rgb

    place, centre, spread = (flat_array(values) for values in (x, mean, std))
    order = np.argsort(place, kind="stable")
    place, centre, spread = place[order], centre[order], spread[order]
    for depth, level in enumerate(sorted(levels, reverse=True), start=1):
        low, high = centre - level * spread, centre + level * spread
        # Opaque shades, the innermost the darkest: overlapping see-through ones would not match their legend.
        strength = 0.45 * depth / len(levels)
        shade = tuple(1 - strength * (1 - part) for part in to_rgb(COLOURS[0]))
        ax.fill_between(place, low, high, color=shade, linewidth=0, label=f"± {level:g} sd")
    if truth is not None:
        ax.plot(place, flat_array(truth)[order], color="black", linestyle="--", linewidth=1.2, label="truth")
    ax.plot(place, centre, color=COLOURS[0], linewidth=1.6, label=label)
    if points is not None:
        ax.plot(*map(flat_array, points), "o", color=COLOURS[1], markersize=3, alpha=0.8, label="data")


def member_bands(
    x: Values,
    mean: Tensor,
    scale: Tensor,
    *,
    family: Family = "gaussian",
    truth: Values | None = None,
    points: tuple[Values, Values] | None = None,
    limits: tuple[float, float] | None = None,
) -> "Figure":
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
        got = f"got {tuple(mean.shape)} and {tuple(scale.shape)}. Squeeze an output axis of size one"
        raise ValueError(f"`mean` and `scale` must both be shaped (members, points); {got}.")
    std = scale * (sqrt(2) if family == "laplace" else 1.0)
    rows = ceil(len(mean) / 2)
    figure = Figure(figsize=(10, max(4.8, 1.6 * rows)), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1), squeeze=False)[0]
    small = list(left.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flat)
    for ax in small[len(mean) :]:
        ax.remove()
    for member, ax in enumerate(small[: len(mean)]):
        set_style(ax)
        bands(x, mean[member], std[member], ax, truth=truth, points=points)
        ax.set_title(f"member {member}", fontsize="small")
    large = right.subplots()
    set_style(large)
    bands(x, *mixture(mean, scale, family), large, truth=truth, points=points, label="mean")
    large.set(title=f"mixture of {len(mean)} members", xlabel="x", ylabel="y")
    for line in large.lines:
        if line.get_linestyle() != "None":
            look = {"textcoords": "offset points", "color": line.get_color(), "fontsize": 9}
            large.annotate(str(line.get_label()), line.get_xydata()[-1], (4, 0), **look)
    large.text(0.5, 0.02, "shades: 1, 2 and 3 sd", transform=large.transAxes, fontsize=9, ha="center")
    if limits is not None:
        for ax in figure.axes:
            ax.set_ylim(limits)
    return figure
