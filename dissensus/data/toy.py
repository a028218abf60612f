"""Small sets: toy ones that a seed determines to the last bit, and real ones that come with an installed package.

Toy sets are drawn from numpy's legacy generator, whose streams are frozen, so a seed gives the same numbers on
every machine and in every version. numpy's global generator is neither read nor touched.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dissensus._signatures import need, whole_number
from dissensus.data.files import Loaded
from dissensus.data.tables import Number, TableEncoder

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]

CUBIC_SEED = 173


def cubic(
    num_points: int = 40, low: float = -4.0, high: float = 4.0, noise: float = 3.0, seed: int = CUBIC_SEED
) -> tuple[Floats, Floats]:
    r"""Draw points of a cubic with normal noise: first all inputs, then all noise.

    $$x \sim U(\text{low}, \text{high}),\qquad y = x^3 + \mathcal N(0, \text{noise}^2)$$

    Args:
        num_points: How many points.
        low: Smallest input.
        high: Largest input.
        noise: Standard deviation of the noise.
        seed: Seed of numpy's legacy generator; the default gives the practical's 40 points.

    Returns:
        Inputs `(points, 1)` and targets `(points,)`, float64, as `ds.fit` takes them. Reading: at noise 3 the
        true function has an expected negative log-likelihood of 2.518 nats; nothing learnt does better.

    Example:
        >>> x, y = cubic()
        >>> x.shape, [round(float(value), 4) for value in (x[0, 0], y[0])]
        ((40, 1), [-3.2539, -35.7691])
    """
    whole_number("num_points", num_points, 1)
    stream = np.random.RandomState(seed)
    x = stream.uniform(low, high, (num_points, 1))
    return x, x[:, 0] ** 3 + stream.normal(0, noise, num_points)


def spirals(
    points_per_class: int = 1000, num_classes: int = 3, noise: float = 0.3, seed: int = 0
) -> tuple[Floats, Integers]:
    r"""Draw spiral arms, one a class, inside the unit circle.

    $$x = r\,(\sin\theta, \cos\theta)$$

    with the radius r going from 0 to 1 and the angle as `spiral_angles` gives it.

    Args:
        points_per_class: Points of each arm.
        num_classes: How many arms.
        noise: Standard deviation of the angle at the centre; twice that at the rim.
        seed: Seed of numpy's legacy generator.

    Returns:
        Inputs `(points, 2)`, float64, and labels `(points,)`, arm by arm. Reading: arms overlap at the centre
        and near the rim, so no classifier is right everywhere.

    Example:
        >>> x, y = spirals(points_per_class=10)
        >>> x.shape, y.tolist()[::10]
        ((30, 2), [0, 1, 2])
    """
    angles = spiral_angles(points_per_class, num_classes, noise, seed).reshape(-1)
    radius = np.tile(np.linspace(0.0, 1.0, points_per_class), num_classes)
    x = np.stack([radius * np.sin(angles), radius * np.cos(angles)], axis=1)
    return x, np.repeat(np.arange(num_classes, dtype=np.int64), points_per_class)


def spiral_angles(points_per_class: int = 1000, num_classes: int = 3, noise: float = 0.3, seed: int = 0) -> Floats:
    r"""Return the angles of the points of `spirals`, in radians, not reduced to one turn.

    $$\theta = 8\,(j + r) + \mathcal N(0, \text{noise}^2)\,(1 + r)$$

    Args are those of `spirals`; returns `(classes, points_per_class)` for arms j, each of 8 radians, a turn and a quarter.

    Example:
        >>> [round(float(angle), 4) for angle in spiral_angles()[0, [0, -1]]]
        [0.5292, 7.7851]
    """
    whole_number("points_per_class", points_per_class, 1)
    whole_number("num_classes", num_classes, 1)
    # Arm by arm, as the frozen stream is drawn.
    wobble = np.random.RandomState(seed).randn(num_classes, points_per_class) * noise
    radius = np.linspace(0.0, 1.0, points_per_class)
    arms = [np.linspace(8 * j, 8 * (j + 1), points_per_class) for j in range(num_classes)]
    return np.stack(arms) + wobble * (radius + 1)


def digits() -> Loaded:
    """1 797 handwritten digits, grey images of 8 x 8 pixels, ten classes."""
    data = _datasets().load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    return Loaded(torch.from_numpy(pixels)[:, None], torch.from_numpy(data.target.astype(np.int64)))


def photographs() -> list[Tensor]:
    """Two colour photographs, uint8 `(3, height, width)`: a temple, a flower (Pillow must be installed)."""
    return [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in _datasets().load_sample_images().images]


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
    need("The built-in data", "demo", "sklearn")
    from sklearn import datasets

    return datasets


def _table(data: Any) -> Loaded:
    classes = tuple(map(str, data.target_names)) if "target_names" in data else None
    y = torch.from_numpy(data.target.astype(np.float32 if classes is None else np.int64))
    names = tuple(map(str, data.feature_names))
    columns = TableEncoder(tuple(Number(name, float(np.median(data.data[:, i]))) for i, name in enumerate(names)))
    return Loaded(torch.from_numpy(data.data.astype(np.float32)), y, classes, columns=columns)
