"""Records of `collusion-images` in, its figures out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from dissensus import plots
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.image_pages import band, over_seeds, sweep

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

INDEPENDENT, JOINT = plots.COLOURS[0], plots.COLOURS[1]
MEMBERS = plots.COLOURS[2]


def sweep_figure(records: Sequence[Record], varied: str, label: str) -> "matplotlib.figure.Figure":
    """Draw test accuracy of ensemble and members, ensemble error and diversity against one setting.

    Args:
        records: Arms that differ in this setting and their seeds.
        varied: Name of the setting, "beta" or "member_dropout".
        label: What the horizontal axis is called.
    """
    pairs = [(float(record["setting"][varied]), record) for record in records]
    figure, (accuracy, error, diversity) = plots.panels(3, width=3.8, height=3.0)
    shown = (
        (accuracy, "accuracy", "ensemble", INDEPENDENT),
        (accuracy, "member_accuracy", "mean member", MEMBERS),
        (error, "ensemble_error", "ensemble", INDEPENDENT),
        (diversity, "diversity", "diversity", JOINT),
    )
    for ax, name, line, colour in shown:
        sweep(over_seeds(pairs, itemgetter(name)), ax, label=line, colour=colour)
    for ax, title in (
        (accuracy, "test accuracy"),
        (error, "test error (ERR), nats"),
        (diversity, "test diversity, nats"),
    ):
        ax.set(xlabel=label, ylabel=title)
        # Only what was run: a line between two values far apart shows nothing of what lies between them.
        ax.set_xticks(sorted({value for value, _ in pairs}))
    accuracy.legend(frameon=False, fontsize="small")
    return figure


def gap_figure(by_beta: Mapping[float, Sequence[Record]]) -> "matplotlib.figure.Figure":
    """Draw the generalisation gap over epochs, and the errors on training and test images that it is the difference of."""
    figure, (gap, error) = plots.panels(2, width=4.6, height=3.4)
    for beta, colour in zip(sorted(by_beta), (INDEPENDENT, JOINT), strict=False):
        name, found = f"beta = {beta:g}", [Curves.of(record) for record in by_beta[beta]]
        band([each.gap for each in found], gap, label=name, colour=colour)
        band([each.train for each in found], error, label=f"{name}, train", colour=colour, style="--")
        augmented = f"{name}, train, as augmented"
        band([each.augmented for each in found], error, label=augmented, colour=colour, style=":")
        band([each.test for each in found], error, label=f"{name}, test", colour=colour)
    gap.set(xlabel="epoch", ylabel="test minus training error, nats")
    error.set(xlabel="epoch", ylabel="ensemble error (ERR), nats")
    _logarithmic(error)
    gap.legend(frameon=False, fontsize="small")
    _legend_below(error)
    return figure


def decomposition_figure(by_beta: Mapping[float, Sequence[Record]]) -> "matplotlib.figure.Figure":
    """Draw member error and diversity over epochs, on training and on test images."""
    figure, axes = plots.panels(2, width=4.6, height=3.4)
    for ax, part in zip(axes, ("train", "test"), strict=True):
        for beta, colour in zip(sorted(by_beta), (INDEPENDENT, JOINT), strict=False):
            found = [Curves.of(record) for record in by_beta[beta]]
            members = [getattr(each, f"{part}_members") for each in found]
            diversity = [
                # Of two nearly equal errors: rounding must not take them off a logarithmic axis.
                [max(own - pooled, 1e-9) for own, pooled in zip(member, getattr(each, part), strict=True)]
                for member, each in zip(members, found, strict=True)
            ]
            band(members, ax, label=f"beta = {beta:g}, member error", colour=colour)
            band(diversity, ax, label=f"beta = {beta:g}, diversity", colour=colour, style="--")
        ax.set(xlabel="epoch", ylabel="nats", title={"train": "training images"}.get(part, "test images"))
        _logarithmic(ax)
    limits = [limit for ax in axes for limit in ax.get_ylim()]
    for ax in axes:
        ax.set_ylim(min(limits), max(limits))
    _legend_below(axes[0])
    return figure


def _logarithmic(ax: "matplotlib.axes.Axes") -> None:
    """Make the vertical axis logarithmic, with plain decimals also between the powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 2, 3, 5, 7)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def _legend_below(ax: "matplotlib.axes.Axes") -> None:
    ax.legend(frameon=False, fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))


@dataclass(frozen=True)
class Curves:
    """Errors of one arm by epoch: of the ensemble on training images, as they are and augmented, and on test images; of members."""

    train: list[float]
    augmented: list[float]
    test: list[float]
    train_members: list[float]
    test_members: list[float]

    @classmethod
    def of(cls, record: Record) -> "Curves":
        """Read a record."""
        clean, history = record["training"]["clean"], record["training"]["history"]
        return cls(
            clean["ensemble_error"],
            history.get("ensemble_error", []),
            history["ensemble_loss"],
            clean.get("member_error", []),
            history.get("validation_loss", []),
        )

    @property
    def gap(self) -> list[float]:
        """Test minus training error."""
        return [after - before for before, after in zip(self.train, self.test, strict=True)]


def final_gap(record: Record) -> float:
    """Return test minus training error of a gap arm, averaged over the last tenth of its epochs."""
    gap = Curves.of(record).gap
    last = max(1, len(gap) // 10)
    return sum(gap[-last:]) / last
