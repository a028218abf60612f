"""A run described in TOML: `Recipe.read(path).train(folder)`, and `load_run(folder)` to have it back."""

from dissensus.recipes.choices import ACTIVATIONS, AUGMENTATIONS, KINDS, OBJECTIVES, SCHEDULES
from dissensus.recipes.preprocessing import Preprocessing
from dissensus.recipes.recipe import Recipe
from dissensus.recipes.runs import LoadedRun, load_run
from dissensus.recipes.sets import DataSettings, Sets

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
