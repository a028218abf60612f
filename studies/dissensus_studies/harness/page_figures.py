"""Lines of the record in, the figures of the pages on collusion, anchoring and masks out.

A row of the table `NAME/figures` is one line: its arm is the figure, the panel and the line's name, its numbers are x, y and the ends of a
band. They were read off the figures that were drawn when the runs ended; of their values the record has only some.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dissensus_studies.harness.figures import Line, Panel, draw

if TYPE_CHECKING:
    import matplotlib.figure

_TICKS = {"xticks": (0, 0.2, 0.4, 0.6, 0.8, 1)}
_BETAS, _SETS = {"xlabel": "β", "axes": _TICKS}, {"xlabel": "β", "columns": 2, "axes": _TICKS}
_EPOCHS = {"xlabel": "epoch", "width": 4.4, "height": 3.2}
_ALPHAS = {
    "xlabel": "masking probability",
    "axes": {"xticks": (0, 1 / 16, 1 / 8, 1 / 4), "xticklabels": ("0", "1/16", "1/8", "1/4")},
}
# For each figure: its horizontal axis, title, columns, size of a panel, and how its axes are set.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "collusion_diversity": {**_SETS, "title": "Error and diversity on test rows", "axes": {**_TICKS, "yscale": "log"}},
    "collusion_change": {**_SETS, "title": "Test error against that of β = 0 in the same run, %"},
    "collusion_bias": {**_SETS, "title": "Diversity that debiasing removes, %", "axes": {**_TICKS, "ylim": (0, 100)}},
    "collusion_drop": {**_SETS, "title": "Rise of the error when members are dropped"},
    "collusion-images": _BETAS,
    "collusion-cnn": _BETAS,
    "collusion-dropped": {"xlabel": "share of members left out"},
    "collusion-gap": _EPOCHS,
    "collusion-gap-parts": {**_EPOCHS, "axes": {"yscale": "log"}},
    "anchoring-alpha": _ALPHAS,
    "anchoring-alpha-wrn": _ALPHAS,
    "anchoring-tails": {"xlabel": "weight of the tail term", "axes": {"xscale": "log"}, "width": 4.2, "height": 3.2},
    "masksembles-calibration": {"xlabel": "confidence", "width": 4.4, "height": 3.6},
}


def page_figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, "matplotlib.figure.Figure"]:
    """Return the figures of one study's record by name."""
    found: dict[str, dict[str, list[Line]]] = {}
    for row in rows:
        if row["table"] == f"{row['study']}/figures":
            figure, panel, name = row["arm"]
            points = {key: [float(value) for value in values] for key, values in row["numbers"].items()}
            colour = row["line"]["colour"]
            line = Line(name, **points, colour=None if colour is None else int(colour), style=row["line"]["style"])
            found.setdefault(figure, {}).setdefault(panel, []).append(line)
    figures = {}
    for figure, lines in found.items():
        layout = dict(LAYOUTS[figure])
        xlabel, axes = layout.pop("xlabel"), layout.pop("axes", {})
        panels = [Panel(title, xlabel, own, axes) for title, own in lines.items()]
        figures[figure] = draw(panels, **layout)
    return figures
