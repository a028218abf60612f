"""The demo's own figures: digits with votes, parts of uncertainty, members beside the ensemble."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, log10
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.plots import COLOURS, NOTE_COLOUR, panels

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# More votes than this do not fit under a digit one by one; they are counted instead.
_VOTES_ONE_BY_ONE = 6


def sample_sheet(rows: Mapping[str, Tensor]) -> "matplotlib.figure.Figure":
    """Draw rows of digits, each with its name; `rows` holds images `(columns, 1, 8, 8)`."""
    # Each row becomes one image, with a white pixel around every digit.
    sheet = torch.cat([torch.cat(list(F.pad(images[:, 0], (1, 1, 1, 1))), dim=1) for images in rows.values()])
    figure, (ax,) = panels(width=5.2, height=0.2 + 4.5 * sheet.shape[0] / sheet.shape[1])
    _draw_ink(sheet, ax)
    pitch = len(sheet) / len(rows)
    ax.set_xticks([])
    ax.set_yticks([(number + 0.5) * pitch for number in range(len(rows))], list(rows))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure


def votes_sheet(
    images: Tensor, votes: Tensor, names: Sequence[str], *, columns: int = 5
) -> "matplotlib.figure.Figure":
    """Draw digits, each with what it is and what the members say it is; `votes` is `(members, images)`."""
    side = images.shape[-1]
    # In pixels of the digits; two lines of text stand under each.
    across, down = side + 3, side + 6
    rows = ceil(len(images) / columns)
    figure, (ax,) = panels(height=0.1 + 4.7 * rows * down / (columns * across))
    for place, image in enumerate(images):
        left, top = place % columns * across, place // columns * down
        _draw_ink(image[0], ax, left, top)
        middle, bottom = left + side / 2, top + side
        ax.text(middle, bottom + 0.6, vote_text(votes[:, place]), ha="center", va="top", fontsize=11)
        ax.text(middle, bottom + 3.0, names[place], ha="center", va="top", fontsize=9, color=NOTE_COLOUR)
    ax.set(xlim=(-1.5, columns * across - 1.5), ylim=(rows * down, -0.5))
    ax.set_axis_off()
    return figure


def vote_text(votes: Tensor) -> str:
    """Return the members' votes in order, or, if they are many, the two digits with most votes.

    Example:
        >>> vote_text(torch.tensor([3, 3, 5])), vote_text(torch.tensor([3, 3, 5, 3, 3, 3, 3]))
        ('3 3 5', '6× 3, 1× 5')
    """
    ballots = votes.tolist()
    if len(ballots) <= _VOTES_ONE_BY_ONE:
        return " ".join(map(str, ballots))
    return ", ".join(f"{number}× {digit}" for digit, number in Counter(ballots).most_common(2))


def uncertainty_bars(
    data: Sequence[float], knowledge: Sequence[float], names: Sequence[str]
) -> "matplotlib.figure.Figure":
    """Draw data and knowledge uncertainty of each set end to end; together they are the total."""
    figure, (ax,) = panels(height=0.9 + 0.42 * len(names))
    for values, starts, label, colour in (
        (data, [0.0] * len(data), "data", COLOURS[0]),
        (knowledge, data, "knowledge", COLOURS[1]),
    ):
        ax.barh(names, values, left=starts, height=0.62, color=colour, label=label)
    for place, (first, second) in enumerate(zip(data, knowledge, strict=True)):
        ax.annotate(
            f"{first + second:.2f}", (first + second, place), (5, 0), textcoords="offset points", va="center"
        )
    ax.invert_yaxis()
    ax.set(xlabel="mean uncertainty (nats); the number is the total")
    ax.margins(x=0.12)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", loc="lower right")
    return figure


def member_dots(members: Sequence[float], ensemble: float) -> "matplotlib.figure.Figure":
    """Draw accuracies: a dot for each member, a line for the ensemble."""
    figure, (ax,) = panels(height=2.8)
    ax.plot(range(len(members)), members, "o", color=COLOURS[0])
    ax.axhline(ensemble, color=COLOURS[1], linewidth=1.6)
    ax.text(1.02, ensemble, "ensemble", color=COLOURS[1], va="center", transform=ax.get_yaxis_transform())
    ax.set_xticks(range(len(members)))
    ax.margins(y=0.25)
    ax.set(xlabel="member", ylabel="accuracy", xlim=(-0.5, len(members) - 0.5))
    return figure


def uncertainty_histograms(scores: Mapping[str, Tensor], name: str) -> "matplotlib.figure.Figure":
    """Draw how often each size of an uncertainty occurs in several sets.

    The horizontal axis is logarithmic: known digits differ from unknown ones by orders of magnitude. What is below
    its left end is counted there.
    """
    lowest, highest = 1e-5, max(float(values.max()) for values in scores.values())
    edges = torch.logspace(log10(lowest), log10(highest), 31, dtype=torch.float64)
    edges[-1] = highest
    figure, (ax,) = panels()
    for (label, values), colour in zip(scores.items(), COLOURS, strict=False):
        counts, _ = torch.histogram(values.double().clamp(lowest, highest), edges)
        shares = (counts / len(values)).numpy()
        ax.stairs(shares, edges.numpy(), color=colour, fill=True, alpha=0.2)
        ax.stairs(shares, edges.numpy(), color=colour, linewidth=1.4, label=label)
    ax.set(xscale="log", xlabel=f"{name} (nats)", ylabel="share of digits")
    ax.legend(frameon=False, fontsize="small")
    return figure


def _draw_ink(values: Tensor, ax: "matplotlib.axes.Axes", left: int = 0, top: int = 0) -> None:
    """Draw an image, dark on white, with its upper left corner at a place."""
    height, width = values.shape
    ax.imshow(
        values.numpy(),
        cmap="gray_r",
        vmin=0,
        vmax=1,
        extent=(left, left + width, top + height, top),
        interpolation="nearest",
    )
