"""Conformal p-values and the drift martingale, each drawn into one `Axes`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dissensus.plots.figures import COLOURS, NOTE_COLOUR, Values, flat_array

if TYPE_CHECKING:
    import matplotlib.axes


def p_value_histogram(
    p_values: Mapping[str, Values], ax: "matplotlib.axes.Axes", *, bins: int = 20, false_alarms: float | None = None
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


def martingale_path(
    log_values: Mapping[str, Values], ax: "matplotlib.axes.Axes", *, thresholds: Sequence[float] = (20.0,)
) -> None:
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
