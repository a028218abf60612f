"""Draws the picture of the README: two moons, what ten networks find noisy, and where they disagree.

Run `python examples/readme_picture.py` to write docs/images/two_moons.png and, for phones, two_moons_tall.png; `--smoke` trains
for one epoch and writes to a temporary folder. Needs scikit-learn (for the moons) and matplotlib.
"""

import argparse
import tempfile
from math import log
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import make_moons

import dissensus as ds
from dissensus import plots, scores
from dissensus.architectures import mlp

REACH = 3.0
TITLES = ("the data", "data uncertainty: each network is unsure", "knowledge uncertainty: the networks disagree")


def moons() -> tuple[np.ndarray, np.ndarray]:
    """Two noisy half circles, one a class, around the origin."""
    x, y = make_moons(400, noise=0.2, random_state=0)
    return x - x.mean(0), y


def draw(ens: ds.DeepEnsemble, x: np.ndarray, y: np.ndarray, side: int, tall: bool) -> Figure:
    """The data, and both uncertainties on a grid of `side` by `side` points around it, on one colour scale."""
    axis = np.linspace(-REACH, REACH, side)
    logits = ds.predict(ens, np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2))
    maps = (scores.expected_entropy(logits), scores.mutual_information(logits))
    figure, axes = plots.panels(1, 3, width=4.2, height=3.3) if tall else plots.panels(3, width=3.7, height=3.6)
    figure.set_layout_engine("compressed")
    extent = (-REACH, REACH, -REACH, REACH)
    for ax, values in zip(axes[1:], maps, strict=True):
        shown = values.reshape(side, side).numpy()
        image = ax.imshow(shown, extent=extent, origin="lower", cmap="Purples", vmin=0, vmax=log(2))
    bar = figure.colorbar(image, ax=axes[1:], shrink=0.6, aspect=25, ticks=[0, log(2)])
    bar.ax.set_yticklabels(["0: sure", "log 2:\nno idea"], fontsize=9, color=plots.NOTE_COLOUR)
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)
    for ax, title in zip(axes, TITLES, strict=True):
        plots.class_points(x, y, ax)
        ax.set_title(title, fontsize=9 if tall else 10, loc="left")
        ax.set(xlim=extent[:2], ylim=extent[2:], aspect="equal", xticks=[], yticks=[])
        for spine in ax.spines.values():
            spine.set(visible=True, color="#D0D0D0")
    for place, name, colour in (((-1.2, 1.35), "one class", 0), ((1.0, -1.6), "the other", 1)):
        axes[0].text(*place, name, color=plots.COLOURS[colour], fontsize=9, ha="center")
    return figure


def main() -> None:
    """Train and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "docs" / "images")
    parser.add_argument("--smoke", action="store_true", help="one epoch, into a temporary folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) if options.smoke else options.folder
    folder.mkdir(parents=True, exist_ok=True)
    x, y = moons()
    ens = ds.DeepEnsemble(lambda: mlp(2, [64, 64], 2), num_members=10, seed=0)
    ds.fit(ens, (x, y), epochs=1 if options.smoke else 100, batch_size=64, lr=5e-3, device="cpu")
    for name, tall in (("two_moons", False), ("two_moons_tall", True)):
        figure = draw(ens, x, y, side=20 if options.smoke else 400, tall=tall)
        figure.savefig(folder / f"{name}.png", dpi=130, metadata={"Software": None})
        print(f"wrote {folder.name}/{name}.png")


if __name__ == "__main__":
    main()
