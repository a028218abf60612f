"""Classes and uncertainty on a plane."""

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dissensus.plots.figures import COLOURS, Values, as_array, panels

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure


def four_panels(
    points: Values,
    labels: Values,
    axis: Values,
    mean_probs: Tensor,
    data_uncertainty: Tensor,
    knowledge_uncertainty: Tensor,
    *,
    title: str = "",
) -> "matplotlib.figure.Figure":
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
            raise ValueError(
                f"`{name}_uncertainty` and `mean_probs` must cover the {side} by {side} grid of `axis`; got "
                f"{tuple(values.shape)} and {tuple(mean_probs.shape)}. Reshape them to (side, side, ...)."
            )
    _check_colours(num_classes)
    figure, axes = panels(2, 2, width=4.2, height=3.9)
    # Panels of a fixed shape leave gaps in the usual layout.
    figure.set_layout_engine("compressed")
    if title:
        figure.suptitle(title)
    class_points(points, labels, axes[0])
    ends = (float(axis[0]), float(axis[-1]))
    _class_image(mean_probs, axis, axes[1])
    for ax, values in zip(axes[2:], (data_uncertainty, knowledge_uncertainty), strict=True):
        image = ax.imshow(
            as_array(values),
            extent=(*ends, *ends),
            origin="lower",
            cmap="viridis",
            vmin=0,
            vmax=log(num_classes),
            interpolation="none",
        )
    figure.colorbar(image, ax=axes, label="nats", shrink=0.44, anchor=(0.0, 0.03))
    titles = ("data", "mean prediction", "data uncertainty", "knowledge uncertainty")
    for ax, text in zip(axes, titles, strict=True):
        ax.set(title=text, xlim=ends, ylim=ends, aspect="equal")
    return figure


def class_maps(axis: Values, probs: Tensor, names: Sequence[str]) -> "matplotlib.figure.Figure":
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
    _check_colours(probs.shape[-1])
    figure, axes = panels(len(names), width=2.4, height=2.5)
    for ax, values, name in zip(axes, probs, names, strict=True):
        _class_image(values, axis, ax)
        ax.set_title(name, fontsize="medium")
        ax.tick_params(labelsize="small")
    return figure


def class_points(points: Values, labels: Values, ax: "matplotlib.axes.Axes") -> None:
    """Draw points of a plane, `(points, 2)`, in the colours of their classes.

    Example:
        >>> figure, (ax,) = panels()
        >>> class_points([[0.0, 1.0], [2.0, 3.0]], [0, 1], ax)
        >>> len(ax.lines)
        2
    """
    place, kind = as_array(points), as_array(labels)
    for index in np.unique(kind):
        chosen = place[kind == index]
        colour = COLOURS[int(index)]
        # Thousands of points as vectors make files that viewers choke on.
        ax.plot(chosen[:, 0], chosen[:, 1], ".", color=colour, markersize=2, rasterized=True, label=f"class {index}")


def _class_image(probs: Tensor, axis: Values, ax: "matplotlib.axes.Axes") -> None:
    ends = (float(axis[0]), float(axis[-1]))
    ax.imshow(_blend(probs), extent=(*ends, *ends), origin="lower", interpolation="none")


def _check_colours(num_classes: int) -> None:
    if num_classes > len(COLOURS):
        raise ValueError(f"There are colours for {len(COLOURS)} classes; got {num_classes}. Draw fewer.")


def _blend(probs: Tensor) -> NDArray[Any]:
    """Return the classes' colours mixed by probability: pure where the ensemble is sure."""
    from matplotlib.colors import to_rgb

    palette = np.array([to_rgb(colour) for colour in COLOURS[: probs.shape[-1]]])
    return np.clip(as_array(probs) @ palette, 0.0, 1.0)
