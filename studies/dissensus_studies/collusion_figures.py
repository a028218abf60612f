"""Runs of the collusion study in; its figures, over beta, out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dissensus import plots
from dissensus_studies.collusion_measures import DROP_SHARES

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


def diversity_figure(sets: Sets) -> "matplotlib.figure.Figure":
    """Draw figure 2: error and diversity of ensembles over beta."""
    figure, axes = _panels(sets)
    for ax, (name, runs) in zip(axes, sets.items(), strict=False):
        for colour, (column, label) in zip(
            plots.COLOURS, (("mse", "ensemble MSE"), ("diversity", "diversity")), strict=False
        ):
            _band(ax, runs.betas, runs[column], colour, label)
        ax.set(title=name, yscale="log")
    _finish(axes, sets, "on test rows")
    return figure


def bias_figure(sets: Sets) -> "matplotlib.figure.Figure":
    """Draw figure 3: the share of diversity that debiasing removes."""
    figure, axes = _panels(sets)
    for ax, (name, runs) in zip(axes, sets.items(), strict=False):
        _band(ax, runs.betas, 100 * runs["bias_share"], plots.COLOURS[0], "")
        ax.axhline(50, color=plots.NOTE_COLOUR, linewidth=1, linestyle=":")
        ax.set(title=name, ylim=(0, 100))
    _finish(axes, sets, "diversity removed, %", legend=False)
    return figure


def drop_figure(sets: Sets) -> "matplotlib.figure.Figure":
    """Draw figure 4: how much the error rises when members are dropped, and what the closed form says."""
    figure, axes = _panels(sets)
    for ax, (name, runs) in zip(axes, sets.items(), strict=False):
        for colour, share in zip(plots.COLOURS, DROP_SHARES, strict=False):
            _band(ax, runs.betas, runs[f"drop_{share:g}"], colour, f"{100 * share:.0f} % dropped")
            expected = runs[f"drop_{share:g}_expected"].mean(0)
            ax.plot(runs.betas, expected, linestyle="none", marker="x", markersize=4, color=colour)
        ax.set(title=name)
    _finish(axes, sets, "increase of MSE")
    return figure


def change_figure(sets: Sets) -> "matplotlib.figure.Figure":
    """Draw how the test error changes against independent training: median and quartiles over runs."""
    figure, axes = _panels(sets)
    for ax, (name, runs) in zip(axes, sets.items(), strict=False):
        change = 100 * (runs["mse"] / runs["mse"][:, :1] - 1)
        low, middle, high = np.quantile(change, (0.25, 0.5, 0.75), axis=0)
        ax.plot(runs.betas, middle, "o-", color=plots.COLOURS[0], markersize=4, linewidth=1.5)
        ax.fill_between(runs.betas, low, high, color=plots.COLOURS[0], alpha=0.2, linewidth=0)
        ax.axhline(0, color=plots.NOTE_COLOUR, linewidth=1, linestyle=":")
        ax.set(title=name)
    _finish(axes, sets, "change of MSE, %", legend=False)
    return figure


def _panels(sets: Sets) -> tuple["matplotlib.figure.Figure", list["matplotlib.axes.Axes"]]:
    columns = min(2, len(sets))
    figure, axes = plots.panels(columns, -(-len(sets) // columns), width=3.6, height=2.6)
    for ax in axes[len(sets) :]:
        ax.set_visible(False)
    return figure, axes


def _band(
    ax: "matplotlib.axes.Axes", betas: Sequence[float], values: Column, colour: str, label: str
) -> None:
    """Draw a mean over runs, and one standard deviation to each side as far as there are values."""
    mean, deviation = values.mean(0), values.std(0)
    low = np.maximum(mean - deviation, values.min(0))
    ax.plot(betas, mean, "o-", color=colour, markersize=3.5, linewidth=1.5, label=label)
    ax.fill_between(betas, low, mean + deviation, color=colour, alpha=0.2, linewidth=0)


def _finish(axes: Sequence["matplotlib.axes.Axes"], sets: Sets, ylabel: str, *, legend: bool = True) -> None:
    columns = min(2, len(sets))
    for place, ax in enumerate(axes[: len(sets)]):
        if place >= len(sets) - columns:
            ax.set_xlabel("β")
        if place % columns == 0:
            ax.set_ylabel(ylabel)
    if legend:
        axes[0].legend(frameon=False, fontsize="small")
