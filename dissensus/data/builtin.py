"""Small real data sets that come with an installed package, by name; nothing is downloaded."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.data.files import Loaded
from dissensus.data.tables import Number, TableEncoder


def digits() -> Loaded:
    """1 797 handwritten digits, grey images of 8 x 8 pixels, ten classes."""
    data = _datasets().load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    return Loaded(torch.from_numpy(pixels)[:, None], torch.from_numpy(data.target.astype(np.int64)))


def photographs() -> list[Tensor]:
    """Two colour photographs, uint8 `(3, height, width)`: a temple, a flower (Pillow must be installed)."""
    return [
        torch.from_numpy(image.copy()).permute(2, 0, 1) for image in _datasets().load_sample_images().images
    ]


def breast_cancer() -> Loaded:
    """569 tumours, 30 measurements of each, malignant or benign."""
    return _table(_datasets().load_breast_cancer())


def diabetes() -> Loaded:
    """442 patients, 10 measurements of each, and the progression of their disease (regression)."""
    return _table(_datasets().load_diabetes())


BUILT_IN: Mapping[str, Callable[[], Loaded]] = MappingProxyType(
    {"digits": digits, "breast_cancer": breast_cancer, "diabetes": diabetes}
)


def _datasets() -> Any:
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "The built-in data comes with scikit-learn, which this environment lacks. "
            "Install with: pip install 'dissensus[demo]'"
        ) from None
    return datasets


def _table(data: Any) -> Loaded:
    classes = tuple(map(str, data.target_names)) if "target_names" in data else None
    y = torch.from_numpy(data.target.astype(np.float32 if classes is None else np.int64))
    names = tuple(map(str, data.feature_names))
    columns = TableEncoder(
        tuple(Number(name, float(np.median(data.data[:, i]))) for i, name in enumerate(names))
    )
    return Loaded(torch.from_numpy(data.data.astype(np.float32)), y, classes, columns=columns)
