"""Results in, pictures out.

What is one picture is drawn into the `Axes` that it is given; what has several panels returns a `Figure`.
Nothing global is read or changed: no pyplot, no style, no settings of matplotlib. The colours are told apart
on white by readers with any kind of colour vision.
"""

from collections.abc import Mapping, Sequence
from math import ceil, log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dissensus.metrics import ReliabilityCurve
from dissensus.predictions import Family, mixture
from dissensus.training.history import History

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Values: TypeAlias = Tensor | NDArray[Any] | Sequence[float] | Sequence[int]

# Okabe and Ito's palette without its yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TRUTH_COLOUR = "#000000"
POINT_COLOUR = "#D55E00"
NOTE_COLOUR = "#555555"


def panels(
    columns: int = 1, rows: int = 1, *, width: float = 4.8, height: float = 3.6
) -> tuple["matplotlib.figure.Figure", list["matplotlib.axes.Axes"]]:
    """Return a new figure with panels of `width` by `height` inches, and its axes, row by row.

    Example:
        >>> figure, (left, right) = panels(columns=2)
        >>> figure.get_size_inches().tolist()
        [9.6, 3.6]
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def save(figure: "matplotlib.figure.Figure", path: Path | str, *, dpi: int = 150) -> list[Path]:
    """Write a figure as SVG and as PNG; the same figure gives the same bytes.

    Args:
        figure: What to write.
        path: Where to, without a suffix.
        dpi: Dots per inch of the PNG, and of what is drawn as dots inside the SVG.

    Returns:
        Both files' paths, the SVG first.

    Example:
        >>> import tempfile
        >>> figure, _ = panels()
        >>> [file.name for file in save(figure, Path(tempfile.mkdtemp()) / "empty", dpi=30)]
        ['empty.svg', 'empty.png']
    """
    from matplotlib import rc_context

    vector, raster = Path(f"{path}.svg"), Path(f"{path}.png")
    # Identifiers in an SVG are random and letters are outlines unless these two say otherwise.
    with rc_context({"svg.hashsalt": "dissensus", "svg.fonttype": "none"}):
        figure.savefig(vector, metadata={"Date": None}, dpi=dpi)
    figure.savefig(raster, metadata={"Software": None}, dpi=dpi)
    return [vector, raster]


def bands(
    x: Values,
    mean: Values,
    std: Values,
    ax: "matplotlib.axes.Axes",
    *,
    truth: Values | None = None,
    points: tuple[Values, Values] | None = None,
    levels: Sequence[float] = (1, 2, 3),
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
    place, centre, spread = (_flat(values) for values in (x, mean, std))
    order = np.argsort(place, kind="stable")
    place, centre, spread = place[order], centre[order], spread[order]
    for level in sorted(levels, reverse=True):
        low, high = centre - level * spread, centre + level * spread
        ax.fill_between(place, low, high, color=COLOURS[0], alpha=0.16, linewidth=0, label=f"± {level:g} sd")
    if truth is not None:
        ax.plot(place, _flat(truth)[order], color=TRUTH_COLOUR, linestyle="--", linewidth=1.2, label="truth")
    ax.plot(place, centre, color=COLOURS[0], linewidth=1.6, label=label)
    if points is not None:
        ax.plot(
            _flat(points[0]), _flat(points[1]), "o", color=POINT_COLOUR, markersize=3, alpha=0.8, label="data"
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
    figure = Figure(figsize=(11, max(5.0, 1.75 * rows)), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1), squeeze=False)[0]
    small = left.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flat
    for member, ax in enumerate(small):
        if member >= len(mean):
            ax.remove()
            continue
        bands(x, mean[member], std[member], ax, truth=truth, points=points)
        ax.set_title(f"member {member}", fontsize="small")
        ax.tick_params(labelsize="small")
    large = right.subplots()
    bands(x, *mixture(mean, scale, family), large, truth=truth, points=points, label="mean of the mixture")
    large.set(title=f"mixture of {len(mean)} members", xlabel="x", ylabel="y")
    large.legend(frameon=False)
    if limits is not None:
        for ax in figure.axes:
            ax.set_ylim(limits)
    return figure


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
    if num_classes > len(COLOURS):
        raise ValueError(f"There are colours for {len(COLOURS)} classes; got {num_classes}. Draw fewer.")
    figure, axes = panels(2, 2, width=4.6, height=4.1)
    figure.suptitle(title)
    _classes(points, labels, axes[0])
    ends = (float(axis[0]), float(axis[-1]))
    axes[1].imshow(_blend(mean_probs), extent=(*ends, *ends), origin="lower", interpolation="nearest")
    for ax, values in zip(axes[2:], (data_uncertainty, knowledge_uncertainty), strict=True):
        image = ax.imshow(
            _array(values),
            extent=(*ends, *ends),
            origin="lower",
            cmap="viridis",
            vmin=0,
            vmax=log(num_classes),
        )
        figure.colorbar(image, ax=ax, label="nats", shrink=0.85)
    titles = ("data", "mean prediction", "data uncertainty", "knowledge uncertainty")
    for ax, text in zip(axes, titles, strict=True):
        ax.set(title=text, xlim=ends, ylim=ends, aspect="equal")
    return figure


def _classes(points: Values, labels: Values, ax: "matplotlib.axes.Axes") -> None:
    place, kind = _array(points), _array(labels)
    for index in np.unique(kind):
        chosen = place[kind == index]
        colour = COLOURS[int(index)]
        # Thousands of points as vectors make files that viewers choke on.
        ax.plot(chosen[:, 0], chosen[:, 1], ".", color=colour, markersize=2, rasterized=True)


def _blend(probs: Tensor) -> NDArray[Any]:
    """Return the classes' colours mixed by probability: pure where the ensemble is sure."""
    from matplotlib.colors import to_rgb

    palette = np.array([to_rgb(colour) for colour in COLOURS[: probs.shape[-1]]])
    return np.clip(_array(probs) @ palette, 0.0, 1.0)


def reliability(curve: ReliabilityCurve, ax: "matplotlib.axes.Axes", *, label: str = "ensemble") -> None:
    """Draw how often confidences were right, bin by bin, above the share of inputs in each bin.

    Reading: a line below the diagonal is overconfident, above it underconfident; bins with few inputs wobble.

    Args:
        curve: What `metrics.reliability_curve` returns.
        ax: Where to draw.
        label: Name in the legend, beside the expected calibration error.

    Example:
        >>> import torch
        >>> from dissensus.metrics import reliability_curve
        >>> figure, (ax,) = panels()
        >>> reliability(reliability_curve(torch.tensor([[0.8, 0.2]]), torch.tensor([0])), ax)
        >>> [line.get_label() for line in ax.lines]
        ['calibrated', 'ensemble (ECE 0.2000)']
    """
    edges, width = _array(curve.lower), _array(curve.upper) - _array(curve.lower)
    ax.bar(
        edges,
        _array(curve.weight),
        width=width,
        align="edge",
        color="#BBBBBB",
        linewidth=0,
        label="share of inputs",
    )
    ax.plot([0, 1], [0, 1], color=NOTE_COLOUR, linestyle="--", linewidth=1, label="calibrated")
    ax.plot(
        _array(curve.confidence),
        _array(curve.accuracy),
        "o-",
        color=COLOURS[0],
        markersize=4,
        label=f"{label} (ECE {curve.ece:.4f})",
    )
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    ax.legend(frameon=False, fontsize="small", loc="upper left")


def score_histograms(
    scores: Mapping[str, Values], ax: "matplotlib.axes.Axes", *, bins: int = 40, xlabel: str = "score"
) -> None:
    """Draw the distributions of a score on several sets, in common bins; each has area one.

    Reading: the less known and unknown inputs overlap, the better the score tells them apart.

    Args:
        scores: Name of a set to its scores, `(batch,)`.
        ax: Where to draw.
        bins: Number of bins between the smallest and the largest score of all.
        xlabel: Name of the score.

    Example:
        >>> figure, (ax,) = panels()
        >>> score_histograms({"known": [0.1, 0.2], "unknown": [0.6, 0.9]}, ax)
        >>> ax.get_legend_handles_labels()[1]
        ['known', 'unknown']
    """
    arrays = {name: _flat(values) for name, values in scores.items()}
    for name, values in arrays.items():
        if not len(values) or not np.isfinite(values).all():
            raise ValueError(
                f"Scores of {name!r} must be finite, one or more; got {len(values)}, not all finite or none."
            )
    if not arrays:
        raise ValueError("`scores` must name at least one set; got none.")
    edges = np.histogram_bin_edges(np.concatenate(list(arrays.values())), bins).tolist()
    for index, (name, values) in enumerate(arrays.items()):
        colour = COLOURS[index % len(COLOURS)]
        ax.hist(values, edges, density=True, histtype="stepfilled", color=colour, alpha=0.25)
        ax.hist(values, edges, density=True, histtype="step", color=colour, linewidth=1.4, label=name)
    ax.set(xlabel=xlabel, ylabel="density")
    ax.legend(frameon=False, fontsize="small")


def training_curves(
    history: History, ax: "matplotlib.axes.Axes", *, column: str = "loss", colour: str = COLOURS[0]
) -> None:
    """Draw a column of a training history: a thin line for each member, a thick one for their mean.

    Args:
        history: `run.history`.
        ax: Where to draw.
        column: Which column; one that belongs to the ensemble as a whole gives one line.
        colour: Colour of the lines.

    Example:
        >>> history = History()
        >>> history.add({"epoch": 1, "step": 5}, [0, 1], {"loss": [1.0, 3.0]}, {})
        >>> history.add({"epoch": 2, "step": 10}, [0, 1], {"loss": [0.5, 0.7]}, {})
        >>> figure, (ax,) = panels()
        >>> training_curves(history, ax)
        >>> [line.get_ydata().tolist() for line in ax.lines]
        [[1.0, 0.5], [3.0, 0.7], [2.0, 0.6]]
    """
    if column not in history.columns:
        raise ValueError(f"`column` must be one of {', '.join(history.columns)}; got {column!r}.")
    rows = [row for row in history if column in row]
    members = sorted({int(row["member"]) for row in rows})
    lines = [[(row["step"], row[column]) for row in rows if row["member"] == member] for member in members]
    if any(line != lines[0] for line in lines):
        for line in lines:
            ax.plot(*zip(*line, strict=True), color=colour, linewidth=0.7, alpha=0.45)
    steps = sorted({int(row["step"]) for row in rows})
    ax.plot(steps, history.by_epoch(column), color=colour, linewidth=1.8, label=column.replace("_", " "))
    ax.set(xlabel="step", ylabel=column.replace("_", " "))


def member_count_curves(
    counts: Sequence[int],
    curves: Mapping[str, tuple[Values, Values]],
    ax: "matplotlib.axes.Axes",
    *,
    ylabel: str = "",
) -> None:
    """Draw how quantities change with the number of members, each with its standard error.

    Args:
        counts: Numbers of members.
        curves: Name of a line to its values and their standard errors, one for each count.
        ax: Where to draw; the horizontal axis becomes logarithmic.
        ylabel: What is measured.

    Example:
        >>> figure, (ax,) = panels()
        >>> member_count_curves([1, 2, 4], {"RMSE": ([3.0, 2.5, 2.4], [0.1, 0.1, 0.1])}, ax)
        >>> ax.lines[0].get_ydata().tolist()
        [3.0, 2.5, 2.4]
    """
    for index, (name, (values, errors)) in enumerate(curves.items()):
        centre, spread = _flat(values), _flat(errors)
        colour = COLOURS[index % len(COLOURS)]
        ax.plot(counts, centre, "o-", color=colour, markersize=4, linewidth=1.5, label=name)
        ax.fill_between(counts, centre - spread, centre + spread, color=colour, alpha=0.2, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(counts), [str(count) for count in counts])
    ax.minorticks_off()
    ax.set(xlabel="members", ylabel=ylabel)
    ax.legend(frameon=False, fontsize="small")


def _array(values: Values) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _flat(values: Values) -> NDArray[np.float64]:
    """Return values as one axis of float64; an axis of size one, as regression targets have, is dropped."""
    return _array(values).astype(np.float64).reshape(-1)
