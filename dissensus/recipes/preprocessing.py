"""From data as it is in files to what members see, learned from the training data and kept with the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus.data.files import Loaded
from dissensus.data.images import Layout, describe_shape, match_images
from dissensus.data.tables import TableEncoder
from dissensus.recipes.sets import DataSettings, class_indices, read_source


@dataclass(frozen=True)
class Preprocessing:
    """What happens to inputs before members see them, and what members' outputs mean. Calling it prepares inputs.

    Attributes:
        shape: Shape of one input.
        pixels: Whether inputs are uint8 images, which are divided by 255.
        mean: Subtracted from each channel of an image or each feature; None leaves values as they are.
        std: What the difference is then divided by.
        classes: Names of the classes, in the order of the outputs; None for regression.
        target: Name of the target in files.
        inputs: Name of the inputs in files.
        layout: Where arrays of images have their channels.
        columns: How the columns of a table become features.
        target_mean: Subtracted from regression targets, one number a target.
        target_std: What the difference is then divided by.
    """

    shape: tuple[int, ...]
    pixels: bool
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    classes: tuple[str, ...] | None = None
    target: str | None = None
    inputs: str | None = None
    layout: Layout = "auto"
    columns: TableEncoder | None = None
    target_mean: tuple[float, ...] | None = None
    target_std: tuple[float, ...] | None = None

    @classmethod
    def learn(cls, train: Loaded, classes: Sequence[str] | None, settings: DataSettings) -> "Preprocessing":
        """Learn from the training rows: means and scales of inputs, and of targets in regression, as the settings ask."""
        plain = cls(
            shape=tuple(train.x.shape[1:]),
            pixels=train.x.dtype == torch.uint8,
            classes=None if classes is None else tuple(classes),
            target=settings.target,
            inputs=settings.inputs,
            layout=settings.layout,
            columns=train.columns,
        )
        if settings.standardise:
            mean, std = _moments(plain(train.x))
            plain = replace(plain, mean=mean, std=std)
        if classes is None and settings.standardise_target and train.y is not None:
            mean, std = _moments(train.y.float().reshape(len(train.y), -1))
            plain = replace(plain, target_mean=mean, target_std=std)
        return plain

    def __call__(self, x: Tensor) -> Tensor:
        """Return inputs as members see them, float32, on their device."""
        self._check(x)
        x = x.float() / 255 if self.pixels else x.float()
        if self.mean is None or self.std is None:
            return x
        spread = (-1, *(1 for _ in self.shape[1:])) if self.pixels or len(self.shape) == 3 else (self.shape[-1],)
        mean, std = (_on_device(values, x.device).reshape(spread) for values in (self.mean, self.std))
        return (x - mean) / std

    def _check(self, x: Tensor) -> None:
        if x.shape[1:] != self.shape:
            raise ValueError(
                f"This run was trained on {describe_shape(self.shape)}; got {describe_shape(x.shape[1:])}."
                + (" Grey images are uint8 arrays of range 0 to 255." if self.pixels and x.ndim == 3 else "")
            )
        if (x.dtype == torch.uint8) != self.pixels:
            wanted = "uint8 images of range 0 to 255" if self.pixels else "floating-point inputs"
            raise ValueError(f"This run was trained on {wanted}; got {x.dtype}.")

    def read(self, source: str | Path) -> Loaded:
        """Read further data as the training data was read; images get its size and channels.

        Targets that the data lacks are left out.
        """
        loaded = read_source(
            source,
            self.target,
            inputs=self.inputs,
            layout=self.layout,
            columns=self.columns,
            size=self.shape[1:] if len(self.shape) == 3 else None,
            strict=False,
        )
        if len(self.shape) == 3 and loaded.x.ndim == 4:
            x, notes = match_images(loaded.x, *self.shape)
            loaded = replace(loaded, x=x, notes=(*loaded.notes, *notes))
        self._check(loaded.x)
        return loaded

    def targets(self, loaded: Loaded) -> Tensor:
        """Return targets as members are trained on them: class indices, or standardised values."""
        y = self.targets_in_units(loaded)
        if self.target_mean is None or self.target_std is None:
            return y
        return (y - torch.tensor(self.target_mean)) / torch.tensor(self.target_std)

    def targets_in_units(self, loaded: Loaded) -> Tensor:
        """Return class indices, or values in the units of the data, `(rows, targets)`."""
        if loaded.y is None:
            raise ValueError("The data has no targets" + (f" called {self.target!r}." if self.target else "."))
        if self.classes is not None:
            return class_indices(loaded, self.classes)
        return loaded.y.float().reshape(len(loaded.y), -1)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        columns = None if self.columns is None else self.columns.to_json()
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "columns": columns}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Preprocessing":
        """Make it again from plain values."""
        columns = None if values["columns"] is None else TableEncoder.from_json(values["columns"])
        frozen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**frozen | {"columns": columns})


def _moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images, or of each feature (the last axis)."""
    axes = [0, 2, 3] if x.ndim == 4 else list(range(x.ndim - 1))
    std, mean = torch.std_mean(x.double(), dim=axes, correction=0)
    # A feature that never changes has nothing to scale.
    std = torch.where(std > 1e-12 * mean.abs().clamp_min(1e-30), std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())


@lru_cache(maxsize=64)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor that is copied to a device once: a pass that copies them again could not be captured."""
    return torch.tensor(values, device=device)
