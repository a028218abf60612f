"""Results in, pictures out.

What is one picture is drawn into the `Axes` that it is given; what has several panels returns a `Figure`.
Nothing global is read or changed: no pyplot, no style, no settings of matplotlib. The colours are told apart
on white by readers with any kind of colour vision.
"""

from dissensus.plots.figures import (
    COLOURS,
    NOTE_COLOUR,
    diversity_accuracy,
    drop_curve,
    error_curves,
    martingale_path,
    member_count_curves,
    offset_bars,
    p_value_histogram,
    panels,
    reliability,
    save,
    score_histograms,
    training_curves,
)
from dissensus.plots.predictions import bands, class_maps, class_points, four_panels, member_bands

__all__ = [
    "COLOURS",
    "NOTE_COLOUR",
    "bands",
    "class_maps",
    "class_points",
    "diversity_accuracy",
    "drop_curve",
    "error_curves",
    "four_panels",
    "martingale_path",
    "member_bands",
    "member_count_curves",
    "offset_bars",
    "p_value_histogram",
    "panels",
    "reliability",
    "save",
    "score_histograms",
    "training_curves",
]
