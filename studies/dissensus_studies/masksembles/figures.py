"""The figures of `masksembles`: laws of masks, diversity against accuracy, calibration."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dissensus import masks, metrics, plots
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.image_pages import marked

if TYPE_CHECKING:
    import matplotlib.figure

ONES = 32
SCALES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
NUM_MASKS = (8, 4, 2)


def simulate(scale: float, num_masks: int, draws: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw masks as the document does, each of `ONES` of the slots; return trimmed widths and overlaps of the first two."""
    keys = np.random.default_rng(0).random((draws, num_masks, round(ONES * scale)))
    on = keys.argsort(-1).argsort(-1) < ONES
    shared = (on[:, 0] & on[:, 1]).sum(1)
    return on.any(1).sum(1), shared / (2 * ONES - shared)


def laws(draws: int) -> list[dict[str, float]]:
    """Return width and overlap for each scale and number of masks: expected, simulated, and of generated masks."""
    rows = []
    for num_masks in NUM_MASKS:
        for scale in SCALES:
            widths, overlaps = simulate(scale, num_masks, draws)
            expected = masks.expected_width(ONES, scale, num_masks)
            made = [
                float(masks.overlap(masks.generate(round(expected), num_masks, scale, seed))[0, 1])
                for seed in range(max(2, draws // 20))
            ]
            rows.append(
                {
                    "num_masks": num_masks,
                    "scale": scale,
                    "expected_width": expected,
                    "width": float(widths.mean()),
                    "width_sd": float(widths.std()),
                    "expected_overlap": masks.expected_iou(scale),
                    "exact_overlap": masks.expected_iou(scale, ONES),
                    "overlap": float(overlaps.mean()),
                    "generated_overlap": float(np.mean(made)),
                }
            )
    return rows


def laws_figure(rows: Sequence[Mapping[str, float]]) -> "matplotlib.figure.Figure":
    """Draw expected width and overlap over the scale as lines, simulations as marks."""
    figure, (left, right) = plots.panels(2, width=4.6, height=3.4)
    curve = np.linspace(1.0, max(SCALES), 101)
    for colour, num_masks, marker in zip(plots.COLOURS, NUM_MASKS, "so^", strict=False):
        found = [row for row in rows if row["num_masks"] == num_masks]
        scales = [row["scale"] for row in found]
        left.plot(curve, [masks.expected_width(ONES, s, num_masks) for s in curve], color=colour)
        left.errorbar(
            scales,
            [row["width"] for row in found],
            [row["width_sd"] for row in found],
            fmt=marker,
            markersize=4,
            color=colour,
            label=f"{num_masks} masks",
        )
        label = f"simulated, {num_masks} masks"
        right.plot(scales, [row["overlap"] for row in found], marker, color=colour, mfc="none", ms=5, label=label)
    right.plot(curve, [masks.expected_iou(s) for s in curve], color=plots.NOTE_COLOUR, label="1 / (2 S - 1)")
    left.set(xlabel="scale S", ylabel="width after trimming", ylim=(0, None))
    right.set(xlabel="scale S", ylabel="intersection over union", ylim=(0, 1.03))
    for ax in (left, right):
        ax.legend(frameon=False, fontsize="small")
    return figure


def diversity_figure(
    families: Mapping[str, Sequence[Record]], single: Sequence[float], num_classes: int
) -> "matplotlib.figure.Figure":
    """Draw every pair of members as a point: diversity against accuracy, between that pair's noisy copy and independent errors.

    Args:
        families: Records by what was trained.
        single: Accuracies of single networks; their diversity is 0 by definition.
        num_classes: Classes.
    """
    figure, (ax,) = plots.panels(width=6.4, height=4.4)
    accuracies: list[Sequence[float]] = []
    for index, (name, records) in enumerate(families.items()):
        pairs = [(record, pair) for record in records for pair in record["pairs"]]
        accuracies += [[record["members"][member] for member in pair["members"]] for record, pair in pairs]
        across, up = ([pair[part] for _, pair in pairs] for part in ("accuracy", "diversity"))
        ax.scatter(across, up, s=26, **marked(index), label=name, alpha=0.8, linewidth=0)
    ax.scatter(single, [0.0] * len(single), s=40, color=plots.NOTE_COLOUR, marker="x", label="single network")
    bounded = [pair for pair in accuracies if 1 / num_classes <= min(pair) and max(pair) < 1]
    bounds = [pair_bounds(pair, num_classes) for pair in bounded]
    # As the document has them: green is the worst that is possible, red the best.
    ends = (("#2CA02C", "worst: a noisy copy of the other"), ("#D62728", "best: independent errors"))
    for end, (colour, label) in enumerate(ends):
        places = [sum(pair) / 2 for pair in bounded]
        ax.scatter(places, [bound[end] for bound in bounds], marker="_", color=colour, label=label)
    ax.set(xlabel="accuracy", ylabel="diversity: disagreement / error rate")
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def pair_bounds(accuracies: Sequence[float], num_classes: int) -> tuple[float, float]:
    """Return the diversity of a pair with these accuracies: a noisy copy of the better one, and one that errs independently of it.

    As the points of the figure, both are divided by the error rate of the pair.
    """
    first, second = accuracies
    bounds = metrics.diversity_bounds(first, second, num_classes)
    scale = (1 - first) / (1 - (first + second) / 2)
    return scale * bounds.lower, scale * bounds.upper


def calibration_figure(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> "matplotlib.figure.Figure":
    """Draw accuracy over confidence, and their difference where inputs lie close together.

    Args:
        curves: Name to confidence, accuracy and weight of every bin.
    """
    figure, (left, right) = plots.panels(2, width=4.6, height=3.8)
    left.plot([0, 1], [0, 1], "--", color=plots.NOTE_COLOUR, linewidth=1)
    right.axhline(0, linestyle="--", color=plots.NOTE_COLOUR, linewidth=1)
    for index, (name, curve) in enumerate(curves.items()):
        confidence, accuracy, weight = (np.array(curve[part]) for part in ("confidence", "accuracy", "weight"))
        error = float((weight * np.abs(accuracy - confidence)).sum())
        style = {**marked(index), "ms": 4}
        left.plot(confidence, accuracy, **style, label=f"{name} ({error:.4f})")
        right.plot(confidence, (accuracy - confidence) * weight, **style)
    left.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    right.set(xlabel="confidence", ylabel="(accuracy - confidence) x share of images", xlim=(0, 1))
    right.legend(
        *left.get_legend_handles_labels(),
        frameon=False,
        fontsize="small",
        title="calibration error",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
    return figure
