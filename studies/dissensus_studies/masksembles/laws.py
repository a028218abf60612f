"""The laws of masks: expected width and overlap, simulated, and of generated masks."""

import numpy as np
from numpy.typing import NDArray

from dissensus import masks

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
