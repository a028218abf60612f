"""A run described in TOML: `Recipe.read(path).train(folder)`, and `load_run(folder)` to have it back."""

from dissensus.recipes.choices import ACTIVATIONS, AUGMENTATIONS, KINDS, OBJECTIVES, SCHEDULES
from dissensus.recipes.data import DataSettings, Preprocessing, Sets
from dissensus.recipes.recipe import LoadedRun, Recipe, load_run

__all__ = [
    "ACTIVATIONS",
    "AUGMENTATIONS",
    "KINDS",
    "OBJECTIVES",
    "SCHEDULES",
    "DataSettings",
    "LoadedRun",
    "Preprocessing",
    "Recipe",
    "Sets",
    "load_run",
]
