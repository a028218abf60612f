"""Calibration, scores, training, numbers of members, p-values and drift, each drawn into one `Axes`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dissensus.metrics import ReliabilityCurve
from dissensus.plots.figures import COLOURS, NOTE_COLOUR, Values, as_array, flat_array, hover
from dissensus.training.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def reliability(curve: ReliabilityCurve, ax: "Axes", *, label: str = "ensemble") -> None:
    """Draw how often confidences were right, bin by bin, above the share of inputs in each bin.

    Reading: a line below the diagonal is overconfident, above it underconfident; bins with few inputs wobble.

    Args:
        curve: What `metrics.reliability_curve` returns.
        ax: Where to draw.
        label: Name in the legend, beside the expected calibration error.

    Example:
        >>> import torch
        >>> from dissensus.metrics import reliability_curve
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> reliability(reliability_curve(torch.tensor([[0.8, 0.2]]), torch.tensor([0])), ax)
        >>> [line.get_label() for line in ax.lines]
        ['calibrated', 'ensemble (ECE 0.2000)']
    """
    lower, share, width = as_array(curve.lower), as_array(curve.weight), as_array(curve.upper - curve.lower)
    ax.bar(lower, share, width=width, align="edge", color="#BBBBBB", linewidth=0, label="share of inputs")
    ax.plot([0, 1], [0, 1], color=NOTE_COLOUR, linestyle="--", linewidth=1, label="calibrated")
    dots, name = (as_array(curve.confidence), as_array(curve.accuracy)), f"{label} (ECE {curve.ece:.4f})"
    (line,) = ax.plot(*dots, "o-", color=COLOURS[0], markersize=4, clip_on=False, label=name)
    rows = zip(*dots, share, strict=True)
    hover(line, [f"confidence {c:.3f}, accuracy {a:.3f}, {100 * w:.1f} % of inputs" for c, a, w in rows])
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    ax.legend(frameon=True, framealpha=0.85, edgecolor="none", fontsize="small", loc="best")


def score_histograms(scores: Mapping[str, Values], ax: "Axes", *, bins: int = 40, xlabel: str = "score") -> None:
    """Draw the distributions of a score on several sets, in common bins; each has area one.

    Reading: the less known and unknown inputs overlap, the better the score tells them apart.

    Args:
        scores: Name of a set to its scores, `(batch,)`.
        ax: Where to draw.
        bins: Number of bins between the smallest and the largest score of all.
        xlabel: Name of the score.

    Example:
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> score_histograms({"known": [0.1, 0.2], "unknown": [0.6, 0.9]}, ax)
        >>> ax.get_legend_handles_labels()[1]
        ['known', 'unknown']
    """
    arrays = {name: flat_array(values) for name, values in scores.items()}
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
    history: History, ax: "Axes", *, column: str = "loss", colour: str = COLOURS[0], label: str = ""
) -> None:
    """Draw a column of a training history: a thin line for each member, a thick one for their mean.

    Args:
        history: `run.history`.
        ax: Where to draw.
        column: Which column; one that belongs to the ensemble as a whole gives one line.
        colour: Colour of the lines.
        label: Name of the mean in the legend; the column's by default.

    Example:
        >>> history = History()
        >>> history.add({"epoch": 1, "step": 5}, [0, 1], {"loss": [1.0, 3.0]}, {})
        >>> history.add({"epoch": 2, "step": 10}, [0, 1], {"loss": [0.5, 0.7]}, {})
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> training_curves(history, ax)
        >>> [line.get_ydata().tolist() for line in ax.lines]
        [[1.0, 0.5], [3.0, 0.7], [2.0, 0.6]]
    """
    if column not in history.columns:
        raise ValueError(f"`column` must be one of {', '.join(history.columns)}; got {column!r}.")
    lines: dict[int, list[tuple[int, float]]] = {}
    for row in history:
        if column in row:
            lines.setdefault(int(row["member"]), []).append((int(row["step"]), row[column]))
    own = list(lines.values())
    if own.count(own[0]) < len(own):
        for line in own:
            ax.plot(*zip(*line, strict=True), color=colour, linewidth=0.7, alpha=0.45)
    steps = sorted({step for line in own for step, _ in line})
    name = column.replace("_", " ")
    ax.plot(steps, history.by_epoch(column), color=colour, linewidth=1.8, label=label or name)
    ax.set(xlabel="step", ylabel=name)


def member_count_curves(
    counts: Sequence[int],
    curves: Mapping[str, tuple[Values, Values]],
    ax: "Axes",
    *,
    ylabel: str = "",
    legend: bool = True,
) -> None:
    """Draw how quantities change with the number of members, each with its standard error.

    Args:
        counts: Numbers of members.
        curves: Name of a line to its values and their standard errors, one for each count.
        ax: Where to draw; the horizontal axis becomes logarithmic.
        ylabel: What is measured.
        legend: Name the lines; for one of several panels with the same lines, leave it to another.

    Example:
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> member_count_curves([1, 2, 4], {"RMSE": ([3.0, 2.5, 2.4], [0.1, 0.1, 0.1])}, ax)
        >>> ax.lines[0].get_ydata().tolist()
        [3.0, 2.5, 2.4]
    """
    for index, (name, (values, errors)) in enumerate(curves.items()):
        centre, spread = flat_array(values), flat_array(errors)
        colour = COLOURS[index % len(COLOURS)]
        ax.plot(counts, centre, "o-", color=colour, markersize=4, linewidth=1.5, label=name)
        ax.fill_between(counts, centre - spread, centre + spread, color=colour, alpha=0.2, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(counts), [str(count) for count in counts])
    ax.minorticks_off()
    ax.set(xlabel="members", ylabel=ylabel)
    if legend:
        ax.legend(frameon=False, fontsize="small")


def p_value_histogram(
    p_values: Mapping[str, Values], ax: "Axes", *, bins: int = 20, false_alarms: float | None = None
) -> None:
    """Draw the p-values of several sets, in common bins from 0 to 1; each has area one.

    Reading: ordinary inputs are flat at 1; what an alarm can tell piles up at 0.

    Args:
        p_values: Name of a set to its p-values, `(batch,)`.
        ax: Where to draw.
        bins: Number of bins.
        false_alarms: The alarm's rate, marked where given: what lies left of it rings.

    Example:
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> p_value_histogram({"held out": [0.2, 0.7], "strange": [0.01, 0.02]}, ax, false_alarms=0.05)
        >>> ax.get_legend_handles_labels()[1]
        ['uniform', 'rings below 0.05', 'held out', 'strange']
    """
    ax.axhline(1, color=NOTE_COLOUR, linestyle="--", linewidth=1, label="uniform")
    if false_alarms is not None:
        ax.axvline(false_alarms, color=NOTE_COLOUR, linestyle=":", linewidth=1, label=f"rings below {false_alarms:g}")
    edges = np.linspace(0, 1, bins + 1)
    for place, (name, values) in enumerate(p_values.items()):
        height = np.histogram(flat_array(values), edges, density=True)[0]
        ax.stairs(height, edges, color=COLOURS[place % len(COLOURS)], linewidth=1.5, label=name)
    ax.set(xlabel="p-value", ylabel="density", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize="small")


def martingale_path(log_values: Mapping[str, Values], ax: "Axes", *, thresholds: Sequence[float] = (20.0,)) -> None:
    """Draw how the drift martingales of several streams went, in powers of ten.

    Reading: a stream without a change ever reaches c with a probability of 1/c or less; after a change the line climbs.

    Args:
        log_values: Name of a stream to the natural log of its value after each input, `(n,)`.
        ax: Where to draw.
        thresholds: Values to mark.

    Example:
        >>> from dissensus.plots import panels
        >>> figure, (ax,) = panels()
        >>> martingale_path({"stream": [0.0, 1.0, 5.0]}, ax)
        >>> [line.get_label() for line in ax.lines]
        ['stream', '20']
    """
    for place, (name, values) in enumerate(log_values.items()):
        logs = flat_array(values) / np.log(10)
        ax.plot(np.arange(1, len(logs) + 1), logs, color=COLOURS[place % len(COLOURS)], linewidth=1.2, label=name)
    for threshold in thresholds:
        ax.axhline(np.log10(threshold), color=NOTE_COLOUR, linestyle="--", linewidth=1, label=f"{threshold:g}")
    ax.set(xlabel="inputs", ylabel="value of the martingale, log10")
    ax.legend(frameon=False, fontsize="small")
