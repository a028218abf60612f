"""Draws the laws of masks, theory against simulation: expected width and expected overlap over the scale.

Run `python examples/mask_laws.py` to write docs/images/mask_laws.svg; `--smoke` makes few draws and writes to
a temporary folder. Needs matplotlib.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from dissensus import masks as mk
from dissensus import plots

ONES = 32
SCALES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
CURVE = np.linspace(1.0, 6.0, 101)


def simulated_widths(scale: float, num_masks: int, draws: int) -> np.ndarray:
    """Slots that at least one of `num_masks` independent masks uses, draw by draw."""
    keys = np.random.default_rng(0).random((draws, num_masks, round(ONES * scale)))
    return (keys.argsort(-1).argsort(-1) < ONES).any(1).sum(1)


def simulated_overlap(scale: float, num_masks: int, draws: int) -> float:
    """Mean overlap of two masks that `generate` makes for a layer of the expected width."""
    width = round(mk.expected_width(ONES, scale, num_masks))
    overlaps = [mk.overlap(mk.generate(width, num_masks, scale, seed)) for seed in range(draws)]
    return float(np.mean([matrix[~np.eye(num_masks, dtype=bool)].mean() for matrix in overlaps]))


def draw_widths(axes: Axes, draws: int) -> None:
    """Lines: expected width; dots and bars: mean and standard deviation of simulated widths."""
    for num_masks, colour in zip((8, 4, 2), plots.COLOURS, strict=False):
        expected = [mk.expected_width(ONES, s, num_masks) for s in CURVE]
        axes.plot(CURVE, expected, color=colour, lw=1.5)
        widths = [simulated_widths(s, num_masks, draws) for s in SCALES]
        means, deviations = [w.mean() for w in widths], [w.std() for w in widths]
        axes.errorbar(SCALES, means, deviations, fmt="o", ms=4, color=colour)
        axes.annotate(f"{num_masks} masks", (6.15, expected[-1]), color=colour, fontsize=9, va="center")
    axes.set(xlabel="scale", ylabel="width after trimming", ylim=(0, None), xlim=(0.8, 7.2))
    axes.set_title(f"Width of a layer, {ONES} ones a mask", fontsize=10, loc="left")
    note = "lines: expected\ndots: simulated ± sd"
    axes.text(0.03, 0.97, note, transform=axes.transAxes, fontsize=9, va="top", color=plots.NOTE_COLOUR)


def draw_overlap(axes: Axes, draws: int) -> None:
    """Lines: the approximation and the exact mean for few ones; marks: masks of `generate`."""
    axes.plot(CURVE, [mk.expected_iou(s) for s in CURVE], color="black", lw=1.5)
    quarters = np.arange(1.0, 6.01, 0.25)  # four ones times these are whole numbers of slots
    exact = [mk.expected_iou(s, ones=4) for s in quarters]
    axes.plot(quarters, exact, "--", color=plots.NOTE_COLOUR, lw=1.2)
    for num_masks, colour, marker in zip((8, 4, 2), plots.COLOURS, "so^", strict=False):
        values = [simulated_overlap(s, num_masks, draws) for s in SCALES]
        axes.plot(SCALES, values, marker, color=colour, ms=4.5, mfc="none")
        height = 0.72 - 0.07 * "so^".index(marker)
        axes.plot([3.6], [height], marker, color=colour, ms=4.5, mfc="none")
        axes.text(3.75, height, f"generated, {num_masks} masks", color=colour, fontsize=9, va="center")
    axes.annotate("1 / (2 scale − 1)", (1.7, mk.expected_iou(1.7)), (2.1, 0.5), fontsize=9)
    axes.text(4.2, 0.21, "exact, 4 ones a mask", fontsize=9, color=plots.NOTE_COLOUR)
    axes.set(xlabel="scale", ylabel="intersection over union", ylim=(0, 1.03))
    axes.set_title("Overlap of two masks", fontsize=10, loc="left")


def main() -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "docs" / "images")
    parser.add_argument("--smoke", action="store_true", help="few draws, into a temporary folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) if options.smoke else options.folder
    folder.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plots.panels(2)
    draw_widths(left, draws=20 if options.smoke else 2000)
    draw_overlap(right, draws=2 if options.smoke else 100)
    _, raster = plots.save(figure, folder / "mask_laws")
    raster.unlink()
    print(f"wrote {folder.name}/mask_laws.svg")


if __name__ == "__main__":
    main()
