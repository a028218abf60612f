"""Records of `anchoring` in, its figures out."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, pi
from typing import TYPE_CHECKING

from dissensus import plots
from dissensus.studies.anchoring_arms import corrupted, mean_adaptation, mean_auroc
from dissensus.studies.anchoring_claims import SINGLE_RUN_NOISE
from dissensus.studies.arm_log import Record
from dissensus.studies.image_pages import over_seeds, sweep
from dissensus.studies.repeats import Summary

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Records = Sequence[Record]
Read = Callable[[Record], float]

# Each is better when it is larger.
QUALITIES: Mapping[str, Read] = {
    "corruption accuracy": lambda record: corrupted(record, "accuracy"),
    "1 - smooth ECE under corruption": lambda record: 1 - corrupted(record, "smooth_ece"),
    "adaptation accuracy": mean_adaptation,
    "mean AUROC": mean_auroc,
}


def alpha_figure(plain: Records, anchored: Mapping[float, Records]) -> "matplotlib.figure.Figure":
    """Draw clean accuracy and every quality against the masking probability; a dashed line is the plain network.

    Bands of single runs are `SINGLE_RUN_NOISE` wide to either side.

    Args:
        plain: Records of plain networks.
        anchored: Masking probability (0 for none) to records of anchored networks.
    """
    shown: dict[str, Read] = {"test accuracy": lambda record: record["test"]["accuracy"][0], **QUALITIES}
    figure, axes = plots.panels(3, 2, width=3.2, height=2.8)
    pairs = [(alpha, record) for alpha, records in sorted(anchored.items()) for record in records]
    for ax, (name, read) in zip(axes, shown.items(), strict=False):
        found = {alpha: values for alpha, values in over_seeds(pairs, read).items() if isfinite(values.mean)}
        if found:
            sweep(found, ax, label="anchored")
            _level(ax, [read(record) for record in plain], "plain", plots.COLOURS[1])
        ax.set(xlabel="masking probability", ylabel=_in_lines(name))
    last = axes[len(shown)]
    last.axis("off")
    last.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="center left")
    return figure


def _level(ax: "matplotlib.axes.Axes", values: Sequence[float], label: str, colour: str) -> None:
    """Draw what others are compared with; a single run with a band as wide as repeats of one run differed by."""
    mean = Summary(tuple(values)).mean
    ax.axhline(mean, color=colour, linestyle="--", linewidth=1.2, label=label)
    if len(values) == 1:
        low, high = mean - SINGLE_RUN_NOISE, mean + SINGLE_RUN_NOISE
        ax.axhspan(low, high, color=colour, alpha=0.12, linewidth=0, label=f"{label} ± {SINGLE_RUN_NOISE:g}")


def _in_lines(name: str) -> str:
    return name.replace(" accuracy", "\naccuracy").replace(" under", "\nunder")


def tail_figure(masked: Records, mined: Mapping[str, Mapping[float, Records]]) -> "matplotlib.figure.Figure":
    """Draw mean AUROC and corruption accuracy against the weight of hard-delta mining, a line for each way to find tails.

    Args:
        masked: Records without mining: the dashed line.
        mined: Way to find tails, to weight, to records.
    """
    figure, axes = plots.panels(2, width=4.2, height=3.2)
    names = ("mean AUROC", "corruption accuracy")
    for ax, name in zip(axes, names, strict=True):
        read = QUALITIES[name]
        for index, (tails, by_weight) in enumerate(mined.items()):
            pairs = [(weight, record) for weight, records in by_weight.items() for record in records]
            sweep(over_seeds(pairs, read), ax, label=tails, colour=plots.COLOURS[index % len(plots.COLOURS)])
        _level(ax, [read(record) for record in masked], "no mining", plots.NOTE_COLOUR)
        ax.set(xlabel="weight of the tail term", ylabel=name, xscale="log")
    axes[-1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def improvements(plain: Records, others: Records) -> dict[str, float]:
    """Return by how many per cent each quality is better than the plain network's; qualities not measured are left out."""
    found = {}
    for name, read in QUALITIES.items():
        before, after = (Summary(tuple(map(read, records))).mean for records in (plain, others))
        if isfinite(before) and isfinite(after):
            found[name] = 100 * (after / before - 1)
    return found


def radar_figure(plain: Records, arms: Mapping[str, Records]) -> "matplotlib.figure.Figure":
    """Draw improvements over the plain network, which is the dashed ring at 0, around a circle.

    Args:
        plain: Records of plain networks.
        arms: Name to records of other networks.
    """
    from matplotlib.figure import Figure
    from matplotlib.projections.polar import PolarAxes

    figure = Figure(figsize=(6.4, 5.0), layout="constrained")
    ax = figure.add_subplot(projection="polar")
    assert isinstance(ax, PolarAxes)
    values = {name: improvements(plain, records) for name, records in arms.items()}
    names = list(next(iter(values.values())))
    angles = [2 * pi * place / len(names) for place in range(len(names))]
    for index, (arm, found) in enumerate(values.items()):
        line = [found[name] for name in names]
        colour = plots.COLOURS[index % len(plots.COLOURS)]
        ax.plot([*angles, angles[0]], [*line, line[0]], "o-", color=colour, markersize=3, label=arm)
    circle = [2 * pi * step / 90 for step in range(91)]
    ax.plot(circle, [0.0] * len(circle), "--", color=plots.NOTE_COLOUR, linewidth=1.2, label="plain")
    lowest = min(0.0, *(value for found in values.values() for value in found.values()))
    highest = max(0.0, *(value for found in values.values() for value in found.values()))
    margin = 0.15 * max(highest - lowest, 0.1)
    ax.set_ylim(lowest - 2 * margin, highest + margin)
    ax.set_xticks(angles, [_in_lines(name) for name in names])
    ax.yaxis.set_major_formatter("{x:g} %")
    ax.set_rlabel_position(315)
    ax.tick_params(axis="x", labelsize="small", pad=22)
    ax.tick_params(axis="y", labelsize="x-small")
    for text in ax.get_yticklabels():
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.1, 1.05))
    return figure
