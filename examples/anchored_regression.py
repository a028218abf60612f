"""Draws what an anchored network does not know: 32 points, 30 references, and how far their answers spread.

Run `python examples/anchored_regression.py` to write docs/images/anchored_regression.svg; `--smoke` trains for a
few epochs and writes to a temporary folder. Needs matplotlib.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import dissensus as ds
from dissensus import objectives as obj
from dissensus import plots
from dissensus.architectures import mlp
from dissensus.randomness import permutation

NUM_POINTS, NUM_REFERENCES = 32, 30


def points() -> tuple[Tensor, Tensor]:
    """A sine on two stretches of the line, with a gap between them."""
    half = NUM_POINTS // 2
    x = torch.cat([torch.linspace(-1.5, -0.5, half), torch.linspace(0.5, 1.5, half)])[:, None]
    return x, torch.sin(3 * x)


def draw(ens: ds.Anchored, x: Tensor, y: Tensor) -> Figure:
    """The data, the mean over references with two standard deviations, and the standard deviation alone."""
    grid = torch.linspace(-4, 4, 401)[:, None]
    outputs = ds.predict(ens, grid)[..., 0]
    mean, deviation = outputs.mean(0), outputs.std(0)
    figure, (left, right) = plots.panels(2, width=4.6, height=3.2)
    plots.bands(grid, mean, deviation, left, points=(x, y), levels=(2.0,))
    left.set(xlabel="x", ylabel="y")
    left.set_title("Mean over 30 references, and two standard deviations", fontsize=10, loc="left")
    right.plot(grid[:, 0], deviation, color=plots.COLOURS[0])
    right.plot(x[:, 0], torch.zeros(len(x)), "|", color=plots.COLOURS[1])
    right.annotate("the 32 points", (0, 0), (0, 0.012), color=plots.COLOURS[1], fontsize=9, ha="center")
    right.set(xlabel="x", ylabel="standard deviation")
    right.set_title("The spread grows away from the points", fontsize=10, loc="left")
    return figure


def main() -> None:
    """Train and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "docs" / "images")
    parser.add_argument("--smoke", action="store_true", help="a few epochs, into a temporary folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) if options.smoke else options.folder
    folder.mkdir(parents=True, exist_ok=True)
    x, y = points()
    references = x[permutation(torch.tensor(0), len(x))]
    ens = ds.Anchored(lambda: mlp(1, [128, 128, 128], 1), references, num_members=NUM_REFERENCES, initialise="fresh")
    epochs = 5 if options.smoke else 1000
    ds.fit(ens, (x, y), objective=obj.Independent("mse"), epochs=epochs, batch_size=NUM_POINTS, lr=1e-3, device="cpu")
    spread = [float(ds.predict(ens, torch.tensor([[place]])).std()) for place in (1.0, 2.0, 4.0)]
    _, raster = plots.save(draw(ens, x, y), folder / "anchored_regression")
    raster.unlink()
    print("standard deviation over references at x = 1, 2 and 4:", ", ".join(f"{value:.3f}" for value in spread))


if __name__ == "__main__":
    main()
