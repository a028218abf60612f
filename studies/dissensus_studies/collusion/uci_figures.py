"""Runs of the collusion study in; its figures, over beta, out."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dissensus import plots
from dissensus_studies.collusion.uci_training import DROP_SHARES

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Column = NDArray[np.float64]


class SetRuns:
    """All runs of one set as columns: `runs["mse"]` is `(runs, betas)`."""

    def __init__(self, found: Sequence[Mapping[str, Any]]) -> None:
        self.found = found
        self.betas = [row["beta"] for row in found[0]["betas"]]

    def __getitem__(self, name: str) -> Column:
        return np.array([[row[name] for row in result["betas"]] for result in self.found], dtype=np.float64)

    def __len__(self) -> int:
        return len(self.found)

    def at(self, name: str, beta: float) -> list[float]:
        """Return a quantity at one beta, run by run."""
        values: list[float] = self[name][:, self.betas.index(beta)].tolist()
        return values


Sets = Mapping[str, SetRuns]


def by_set(found: Sequence[Mapping[str, Any]]) -> dict[str, SetRuns]:
    """Return runs by the set they belong to."""
    names = dict.fromkeys(result["set"] for result in found)
    return {name: SetRuns([result for result in found if result["set"] == name]) for name in names}


def over_beta(
    sets: Sets, ylabel: str, draw: Callable[["matplotlib.axes.Axes", SetRuns], None]
) -> "matplotlib.figure.Figure":
    """Draw a panel over beta for each set; lines with names get a legend in the first."""
    columns = min(2, len(sets))
    figure, axes = plots.panels(columns, -(-len(sets) // columns), width=3.6, height=2.6)
    for place, (ax, (name, runs)) in enumerate(zip(axes, sets.items(), strict=False)):
        draw(ax, runs)
        ax.set(title=name)
        if place >= len(sets) - columns:
            ax.set_xlabel("β")
        if place % columns == 0:
            ax.set_ylabel(ylabel)
    for ax in axes[len(sets) :]:
        ax.set_visible(False)
    if axes[0].get_legend_handles_labels()[1]:
        axes[0].legend(frameon=False, fontsize="small")
    return figure


def errors(ax: "matplotlib.axes.Axes", runs: SetRuns) -> None:
    """Draw figure 2: error and diversity of ensembles."""
    _band(ax, runs.betas, runs["mse"], plots.COLOURS[0], "ensemble MSE")
    _band(ax, runs.betas, runs["diversity"], plots.COLOURS[1], "diversity")
    ax.set(yscale="log")


def bias(ax: "matplotlib.axes.Axes", runs: SetRuns) -> None:
    """Draw figure 3: the share of diversity that debiasing removes."""
    _band(ax, runs.betas, 100 * runs["bias_share"], plots.COLOURS[0], "")
    ax.axhline(50, color=plots.NOTE_COLOUR, linewidth=1, linestyle=":")
    ax.set(ylim=(0, 100))


def drop(ax: "matplotlib.axes.Axes", runs: SetRuns) -> None:
    """Draw figure 4: how much the error rises when members are dropped, and what the closed form says."""
    for colour, share in zip(plots.COLOURS, DROP_SHARES, strict=False):
        _band(ax, runs.betas, runs[f"drop_{share:g}"], colour, f"{100 * share:.0f} % dropped")
        expected = runs[f"drop_{share:g}_expected"].mean(0)
        ax.plot(runs.betas, expected, linestyle="none", marker="x", markersize=4, color=colour)


def change(ax: "matplotlib.axes.Axes", runs: SetRuns) -> None:
    """Draw how the test error changes against independent training: median and quartiles over runs."""
    changes = 100 * (runs["mse"] / runs["mse"][:, :1] - 1)
    low, middle, high = np.quantile(changes, (0.25, 0.5, 0.75), axis=0)
    ax.plot(runs.betas, middle, "o-", color=plots.COLOURS[0], markersize=4, linewidth=1.5)
    ax.fill_between(runs.betas, low, high, color=plots.COLOURS[0], alpha=0.2, linewidth=0)
    ax.axhline(0, color=plots.NOTE_COLOUR, linewidth=1, linestyle=":")


def _band(ax: "matplotlib.axes.Axes", betas: Sequence[float], values: Column, colour: str, label: str) -> None:
    """Draw a mean over runs, and one standard deviation to each side as far as there are values."""
    mean, deviation = values.mean(0), values.std(0)
    low = np.maximum(mean - deviation, values.min(0))
    ax.plot(betas, mean, "o-", color=colour, markersize=3.5, linewidth=1.5, label=label)
    ax.fill_between(betas, low, mean + deviation, color=colour, alpha=0.2, linewidth=0)
