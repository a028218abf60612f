"""What is drawn into one `Axes`, after what all drawings share: new figures, files of them, colours and conversions."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dissensus.diagnostics import Check, DropCurve, Pair
from dissensus.metrics import ReliabilityCurve, diversity_bounds
from dissensus.training.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Values: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]

# Okabe and Ito's palette without its yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
NOTE_COLOUR = "#555555"


def panels(
    columns: int = 1, rows: int = 1, *, width: float = 4.8, height: float = 3.6
) -> tuple["Figure", list["Axes"]]:
    """Return a new figure with panels of `width` by `height` inches, and its axes, row by row.

    Example:
        >>> figure, (left, right) = panels(columns=2)
        >>> figure.get_size_inches().tolist()
        [9.6, 3.6]
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        set_style(ax)
    return figure, axes


def set_style(ax: "Axes") -> None:
    """Give a panel the package's look: no box, light axes, few ticks with plain numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#B0B0B0")
    ax.tick_params(color="#B0B0B0", labelsize=9)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(tick_text))
        # Names of categories may still take their place.
        axis.isDefault_majloc = axis.isDefault_majfmt = True


def tick_text(value: float, place: int | None = None) -> str:
    """Return the label of a tick: plain digits, thousands apart, powers of ten only for what is tiny or huge.

    Example:
        >>> [tick_text(value) for value in (0.0, 0.25, 12.5, 2000.0, 1e-5)]
        ['0', '0.25', '12.5', '2000', '1e-05']
    """
    size = abs(value)
    if 1e4 <= size < 1e9:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value + 0.0:.4g}"


def as_written(name: str) -> str:
    r"""Return text that shows a name as it is: between two dollars matplotlib reads a formula.

    Example:
        >>> as_written("cost ($) of a $ sale")
        'cost (\\$) of a \\$ sale'
    """
    return name.replace("$", r"\$")


def hover(line: "Line2D", texts: Sequence[str]) -> None:
    """Name each point of a line; on a page of `html` the name appears where the pointer rests on it."""
    line.set_gid("hover:" + "|".join(text.replace("|", "/") for text in texts))


def save(figure: "Figure", path: Path | str, *, dpi: int = 110) -> list[Path]:
    """Write a figure as SVG and as PNG; drawn and written again, it gives the same bytes.

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


def as_array(values: Values) -> NDArray[Any]:
    """Return values as an array, from any device and without a gradient."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def flat_array(values: Values) -> NDArray[np.float64]:
    """Return values as one axis of float64; an axis of size one, as regression targets have, is dropped."""
    return as_array(values).astype(np.float64).reshape(-1)


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
    for colour, (name, values) in zip(cycle(COLOURS), arrays.items(), strict=False):
        ax.hist(values, edges, density=True, histtype="stepfilled", color=colour, alpha=0.25)
        ax.hist(values, edges, density=True, histtype="step", color=colour, linewidth=1.4, label=as_written(name))
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
    name = as_written(column.replace("_", " "))
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
        >>> figure, (ax,) = panels()
        >>> member_count_curves([1, 2, 4], {"RMSE": ([3.0, 2.5, 2.4], [0.1, 0.1, 0.1])}, ax)
        >>> ax.lines[0].get_ydata().tolist()
        [3.0, 2.5, 2.4]
    """
    for colour, (name, (values, errors)) in zip(cycle(COLOURS), curves.items(), strict=False):
        centre, spread = flat_array(values), flat_array(errors)
        ax.plot(counts, centre, "o-", color=colour, markersize=4, linewidth=1.5, label=as_written(name))
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
        >>> figure, (ax,) = panels()
        >>> p_value_histogram({"held out": [0.2, 0.7], "strange": [0.01, 0.02]}, ax, false_alarms=0.05)
        >>> ax.get_legend_handles_labels()[1]
        ['uniform', 'rings below 0.05', 'held out', 'strange']
    """
    ax.axhline(1, color=NOTE_COLOUR, linestyle="--", linewidth=1, label="uniform")
    if false_alarms is not None:
        ax.axvline(false_alarms, color=NOTE_COLOUR, linestyle=":", linewidth=1, label=f"rings below {false_alarms:g}")
    edges = np.linspace(0, 1, bins + 1)
    for colour, (name, values) in zip(cycle(COLOURS), p_values.items(), strict=False):
        height = np.histogram(flat_array(values), edges, density=True)[0]
        ax.stairs(height, edges, color=colour, linewidth=1.5, label=as_written(name))
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
        >>> figure, (ax,) = panels()
        >>> martingale_path({"stream": [0.0, 1.0, 5.0]}, ax)
        >>> [line.get_label() for line in ax.lines]
        ['stream', '20']
    """
    for colour, (name, values) in zip(cycle(COLOURS), log_values.items(), strict=False):
        logs = flat_array(values) / np.log(10)
        ax.plot(np.arange(1, len(logs) + 1), logs, color=colour, linewidth=1.2, label=as_written(name))
    for threshold in thresholds:
        ax.axhline(np.log10(threshold), color=NOTE_COLOUR, linestyle="--", linewidth=1, label=f"{threshold:g}")
    ax.set(xlabel="inputs", ylabel="value of the martingale, log10")
    ax.legend(frameon=False, fontsize="small")


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
