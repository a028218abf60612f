"""The figures of `masksembles` as lines: laws of masks, diversity against accuracy, calibration."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dissensus import masks, metrics
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.figures import Line, Panel

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


def laws_panels(rows: Sequence[Mapping[str, float]]) -> list[Panel]:
    """Return expected width and overlap over the scale as lines, simulations as marks."""
    curve = np.linspace(1.0, max(SCALES), 101).tolist()
    widths, overlaps = [], [Line("1 / (2 S - 1)", curve, list(map(masks.expected_iou, curve)), colour=None, style="-")]
    for colour, num_masks in enumerate(NUM_MASKS):
        found = [row for row in rows if row["num_masks"] == num_masks]
        scales, width, overlap = ([row[key] for row in found] for key in ("scale", "width", "overlap"))
        expected = [masks.expected_width(ONES, scale, num_masks) for scale in curve]
        widths.append(Line(f"{num_masks} masks", curve, expected, colour=colour, style="-"))
        widths.append(Line("", scales, width, colour=colour, style="s"))
        overlaps.append(Line("", scales, overlap, colour=colour, style="s"))
    return [
        Panel("width after trimming", "scale S", widths, {"ylim": (0, None)}),
        Panel("intersection over union", "scale S", overlaps, {"ylim": (0, 1.03)}),
    ]


def diversity_panel(families: Mapping[str, Sequence[Record]], single: Sequence[float], num_classes: int) -> Panel:
    """Return every pair of members as a point: diversity against accuracy, between that pair's noisy copy and independent errors.

    Args:
        families: Records by what was trained.
        single: Accuracies of single networks; their diversity is 0 by definition.
        num_classes: Classes.
    """
    lines, bounded = [], []
    for colour, (name, records) in enumerate(families.items()):
        pairs = [(record, pair) for record in records for pair in record["pairs"]]
        across, up = ([pair[part] for _, pair in pairs] for part in ("accuracy", "diversity"))
        lines.append(Line(name, across, up, colour=colour, style="o"))
        bounded += [[record["members"][member] for member in pair["members"]] for record, pair in pairs]
    bounded = [pair for pair in bounded if 1 / num_classes <= min(pair) and max(pair) < 1]
    bounds = [pair_bounds(pair, num_classes) for pair in bounded]
    places = [sum(pair) / 2 for pair in bounded]
    lines.append(Line("single network", single, [0.0] * len(single), colour=None, style="x"))
    for end, name in enumerate(("a noisy copy", "independent errors")):
        if bounds:
            lines.append(Line(name, places, [bound[end] for bound in bounds], colour=None, style="_"))
    return Panel("diversity: disagreement / error rate", "accuracy", lines)


def pair_bounds(accuracies: Sequence[float], num_classes: int) -> tuple[float, float]:
    """Return the diversity of a pair with these accuracies: a noisy copy of the better one, and one that errs independently of it.

    As the points of the figure, both are divided by the error rate of the pair.
    """
    first, second = accuracies
    bounds = metrics.diversity_bounds(first, second, num_classes)
    scale = (1 - first) / (1 - (first + second) / 2)
    return scale * bounds.lower, scale * bounds.upper


def calibration_panels(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Panel]:
    """Return accuracy over confidence, and their difference where inputs lie close together.

    Args:
        curves: Name to confidence, accuracy and weight of every bin.
    """
    left = [Line("", [0, 1], [0, 1], colour=None, style="--")]
    right = [Line("", [0, 1], [0, 0], colour=None, style="--")]
    for colour, (name, curve) in enumerate(curves.items()):
        confidence, accuracy, weight = (np.array(curve[part]) for part in ("confidence", "accuracy", "weight"))
        gap = accuracy - confidence
        error = float((weight * np.abs(gap)).sum())
        left.append(Line("", confidence.tolist(), accuracy.tolist(), colour=colour))
        right.append(Line(f"{name} ({error:.4f})", confidence.tolist(), (gap * weight).tolist(), colour=colour))
    return [
        Panel("accuracy", "confidence", left, {"xlim": (0, 1), "ylim": (0, 1)}),
        Panel("(accuracy - confidence) x share of images", "confidence", right, {"xlim": (0, 1)}),
    ]
