"""Small data sets and the recipe that the tests of recipes and runs share."""

import numpy as np

from dissensus.recipes import Recipe


def save_blobs(folder):
    """Three classes of points in the plane, as an .npz file."""
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = rng.normal(size=(90, 2)) + 4 * np.stack([np.cos(2 * y), np.sin(2 * y)], 1)
    np.savez(folder / "blobs.npz", x=x, y=y)
    return folder


def save_line(folder):
    """A line with noise, far from standard units, as a table."""
    rng = np.random.default_rng(0)
    u = rng.normal(size=80)
    y = 1000 + 50 * u + 5 * rng.normal(size=80)
    rows = "".join(f"{a},{b}\n" for a, b in zip(u, y, strict=True))
    (folder / "line.csv").write_text("u,y\n" + rows)
    return folder


def recipe(folder, path="blobs.npz", **tables):
    default = {
        "data": {"path": path},
        "model": {"name": "mlp", "hidden": [8]},
        "ensemble": {"members": 2},
        "training": {"epochs": 2, "batch_size": 16, "device": "cpu"},
    }
    return Recipe.from_tables(
        {name: {**default.get(name, {}), **tables.get(name, {})} for name in {**default, **tables}}, folder
    )
