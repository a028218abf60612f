"""Records of `collusion-images` in, its figures out."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from dissensus import plots
from dissensus_studies.arm_log import Record
from dissensus_studies.image_pages import band, over_seeds, sweep

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
        name = f"beta = {beta:g}"
        train, trained, test = (
            _lines(by_beta[beta], part) for part in (_train_error, _trained_error, _test_error)
        )
        pairs = zip(train, test, strict=True)
        gaps = [[after - before for before, after in zip(*pair, strict=True)] for pair in pairs]
        band(gaps, gap, label=name, colour=colour)
        band(train, error, label=f"{name}, train", colour=colour, style="--")
        band(trained, error, label=f"{name}, train, as augmented", colour=colour, style=":")
        band(test, error, label=f"{name}, test", colour=colour)
    gap.set(xlabel="epoch", ylabel="test minus training error, nats")
    error.set(xlabel="epoch", ylabel="ensemble error (ERR), nats")
    _logarithmic(error)
    gap.legend(frameon=False, fontsize="small")
    _legend_below(error, columns=2)
    return figure


def decomposition_figure(by_beta: Mapping[float, Sequence[Record]]) -> "matplotlib.figure.Figure":
    """Draw member error and diversity over epochs, on training and on test images."""
    figure, axes = plots.panels(2, width=4.6, height=3.4)
    parts = (
        ("training images", (_train_member_error, _train_diversity)),
        ("test images", (_test_member_error, _test_diversity)),
    )
    for ax, (title, (member, diversity)) in zip(axes, parts, strict=True):
        for beta, colour in zip(sorted(by_beta), (INDEPENDENT, JOINT), strict=False):
            band(_lines(by_beta[beta], member), ax, label=f"beta = {beta:g}, member error", colour=colour)
            band(
                _lines(by_beta[beta], diversity),
                ax,
                label=f"beta = {beta:g}, diversity",
                colour=colour,
                style="--",
            )
        ax.set(xlabel="epoch", ylabel="nats", title=title)
        _logarithmic(ax)
    limits = [limit for ax in axes for limit in ax.get_ylim()]
    for ax in axes:
        ax.set_ylim(min(limits), max(limits))
    _legend_below(axes[0], columns=2)
    return figure


def _logarithmic(ax: "matplotlib.axes.Axes") -> None:
    """Make the vertical axis logarithmic, with plain decimals also between the powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 2, 3, 5, 7)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def _legend_below(ax: "matplotlib.axes.Axes", columns: int) -> None:
    ax.legend(frameon=False, fontsize="small", ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def final_gap(record: Record) -> float:
    """Return test minus training error of a gap arm, averaged over the last tenth of its epochs."""
    train, test = _train_error(record), _test_error(record)
    last = max(1, len(train) // 10)
    return sum(after - before for before, after in zip(train[-last:], test[-last:], strict=True)) / last


def _lines(records: Sequence[Record], read: Callable[[Record], list[float]]) -> list[list[float]]:
    return [read(record) for record in records]


def _history(record: Record, column: str) -> list[float]:
    return list(record["training"]["history"][column])


def _train_error(record: Record) -> list[float]:
    return list(record["training"]["clean"]["ensemble_error"])


def _trained_error(record: Record) -> list[float]:
    return _history(record, "ensemble_error")


def _test_error(record: Record) -> list[float]:
    return _history(record, "ensemble_loss")


def _train_member_error(record: Record) -> list[float]:
    return list(record["training"]["clean"]["member_error"])


def _test_member_error(record: Record) -> list[float]:
    return _history(record, "validation_loss")


def _train_diversity(record: Record) -> list[float]:
    return _differences(_train_member_error(record), _train_error(record))


def _test_diversity(record: Record) -> list[float]:
    return _differences(_test_member_error(record), _test_error(record))


def _differences(member: Sequence[float], ensemble: Sequence[float]) -> list[float]:
    # Of two nearly equal errors: rounding must not take them off a logarithmic axis.
    return [max(own - pooled, 1e-9) for own, pooled in zip(member, ensemble, strict=True)]
