"""How far inputs lie from the training data: `(batch, features)` of one network in, `(batch,)` out, higher = further away."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus._checks import check_features, check_labels, compute_dtype
from dissensus.types import Float, Labels, Scores

Features: TypeAlias = Float[Tensor, "batch features"]

_NEIGHBOURS = 5  # training rows that `RowDistance` looks at
_ROWS = 1024  # inputs looked at together
_BANK_ROWS = 16384  # training rows they are compared with together: 64 MiB of similarities in float32


class Detector(Protocol):
    """Whatever was fitted to the features of a training set and scores those of other inputs, `(batch, features)`, of the same network."""

    def score(self, features: Features) -> Scores:
        """Distance of each input from the training set, `(batch,)`."""


@dataclass(frozen=True, eq=False)
class Mahalanobis:
    r"""Squared distance to the nearest class mean, in units of the covariance that all classes share.

    $$\min_c\,(x - \mu_c)^\top \Sigma^{-1} (x - \mu_c)$$

    The relative form subtracts the distance to one Gaussian without classes. Computed in float64. Reading: on training data at most the
    number of features on average; the relative form at most 0 there, and above 0 where no class fits as well as all data together.

    Attributes:
        centre: Mean of the training features, `(features,)`.
        whitening: Matrix that makes the shared covariance the identity, `(features, features)`.
        means: Class means, centred and whitened, `(classes, features)`.
        background: The Gaussian without classes, if distances are relative to it.

    Example:
        >>> features = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, -1.0], [0.0, 1.0]])
        >>> detector = Mahalanobis.fit(features, torch.tensor([0, 0, 0, 0]), shrinkage=0.0)
        >>> detector.score(torch.tensor([[0.0, 0.0], [3.0, 0.0]]))  # the variance is 1/2
        tensor([ 0., 18.])

    References:
        Lee et al., 2018, <https://arxiv.org/abs/1807.03888>; Ren et al., 2021, <https://arxiv.org/abs/2106.09022>.
    """

    centre: Float[Tensor, " features"]
    whitening: Float[Tensor, "features features"]
    means: Float[Tensor, "classes features"]
    background: "Mahalanobis | None" = None

    @classmethod
    def fit(
        cls, features: Features, labels: Labels, *, shrinkage: float = 1e-3, relative: bool = False
    ) -> "Mahalanobis":
        """Fit class means and the covariance about them.

        Args:
            features: Features of the training set, `(batch, features)`.
            labels: True class of each, `(batch,)`. Classes without a row are left out.
            shrinkage: From 0 to 1, how far the covariance is drawn to the identity; needed where features outnumber rows.
            relative: Whether to subtract the distance to a Gaussian without classes.
        """
        check_features(features)
        check_labels(labels, len(features))
        if not 0 <= shrinkage <= 1:
            raise ValueError(f"`shrinkage` must lie in [0, 1]; got {shrinkage}. Try 0.001.")
        features = features.detach()
        groups = torch.unique(labels.to(features.device), return_inverse=True)[1]
        means = _group_means(features, groups)
        centre = features.mean(0, dtype=torch.float64)
        covariance = _covariance(features, groups, means)
        identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
        shrunk = (1 - shrinkage) * covariance + shrinkage * covariance.diagonal().mean() * identity
        factor, failed = torch.linalg.cholesky_ex(shrunk)
        if failed:
            raise ValueError("The covariance of `features` must be invertible. Raise `shrinkage`.")
        # W with covariance^-1 = W W^T, so that x @ W has unit covariance.
        whitening = torch.linalg.solve_triangular(factor, identity, upper=False).T
        background = cls.fit(features, torch.zeros_like(labels), shrinkage=shrinkage) if relative else None
        return cls(centre, whitening, (means - centre) @ whitening, background)

    def score(self, features: Features) -> Scores:
        """Distance of each input from the training set, `(batch,)`."""
        return _by_rows(self._score_rows, features, len(self.centre))

    def _score_rows(self, rows: Features) -> Scores:
        whitened = (rows.to(self.centre) - self.centre) @ self.whitening
        nearest = torch.cdist(whitened, self.means).amin(-1).square()
        return nearest if self.background is None else nearest - self.background._score_rows(rows)


@dataclass(frozen=True, eq=False)
class KNearestNeighbours:
    r"""Distance to the k-th nearest training input, all features scaled to length 1.

    $$\lVert x / |x| - x_{(k)} / |x_{(k)}| \rVert$$

    Reading: from 0 to 2; 0 points the way of k training inputs, at 1.41 all but k - 1 of them are at right angles or further.

    Attributes:
        bank: Training features scaled to length 1, `(batch, features)`.
        k: Which neighbour counts.

    Example:
        >>> detector = KNearestNeighbours.fit(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), k=1)
        >>> detector.score(torch.tensor([[5.0, 0.0], [-1.0, 0.0]]))
        tensor([0.0000, 1.4142])

    References:
        Sun et al., 2022, <https://arxiv.org/abs/2204.06507>.
    """

    bank: Features
    k: int

    @classmethod
    def fit(cls, features: Features, labels: Labels | None = None, *, k: int = 50) -> "KNearestNeighbours":
        """Remember the training features.

        Args:
            features: Features of the training set, `(batch, features)`.
            labels: Not used; taken so that all detectors are fitted alike.
            k: Which neighbour counts, from 1 to the number of rows: larger is smoother.
        """
        check_features(features)
        if not 1 <= k <= len(features):
            raise ValueError(f"`k` must lie in 1..{len(features)}, the number of rows; got {k}. Change `k`.")
        return cls(_unit_length(features), k)

    def score(self, features: Features) -> Scores:
        """Distance of each input from the training set, `(batch,)`."""
        return _by_rows(self._score_rows, features, self.bank.shape[1])

    def _score_rows(self, rows: Features) -> Scores:
        rows = _unit_length(rows).to(self.bank)
        similarity = rows.new_empty(len(rows), 0)
        neighbour = torch.empty_like(similarity, dtype=torch.long)
        for start in range(0, len(self.bank), _BANK_ROWS):
            part = rows @ self.bank[start : start + _BANK_ROWS].T
            value, index = part.topk(min(self.k, part.shape[1]))
            similarity, neighbour = torch.cat([similarity, value], 1), torch.cat([neighbour, start + index], 1)
            similarity, kept = similarity.topk(min(self.k, similarity.shape[1]))
            neighbour = neighbour.gather(1, kept)
        # From the difference, not as sqrt(2 - 2 similarity), which has three digits for close neighbours.
        return (rows - self.bank[neighbour[:, -1]]).norm(dim=-1)


class RowDistance(nn.Module):
    r"""How far rows of a table are from the training rows: the root of the mean squared distance to the nearest five.

    Far outside the training rows members may agree; distances grow there. `ds.Alarm.calibrate` takes it as `score`.

    Args:
        bank: Standardised training rows, `(rows, features)`.

    Example:
        >>> distance = RowDistance(torch.zeros(9, 4))
        >>> distance(torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 4.0, 0.0]])).tolist()
        [0.0, 5.0]
    """

    __name__ = "distance"
    of_inputs = True
    bank: Tensor

    def __init__(self, bank: Features) -> None:
        super().__init__()
        self.register_buffer("bank", bank)

    def forward(self, features: Features) -> Scores:
        """Return the distance of each row, `(batch,)`. Reading: in standard deviations of the columns; higher is stranger."""
        if not torch.compiler.is_compiling():  # an exported program looks at no values
            _check_width(features, self.bank.shape[1])
        return self.gaps(features).sum(1).sqrt().to(compute_dtype(features))

    def gaps(self, features: Features) -> Float[Tensor, "batch features"]:
        """Return the mean squared difference to the nearest rows in each feature, float64 `(batch, features)`."""
        # In double precision the products lose no digits that matter where the nearest are looked for. As a linear layer: of
        # `bank.T` an exported file would hold a second copy.
        rows, bank = features.double(), self.bank.to(features.device).double()
        closeness = F.linear(rows, bank, -bank.square().sum(1) / 2)
        nearest = closeness.topk(min(_NEIGHBOURS, len(bank))).indices
        return (rows[:, None] - bank[nearest]).square().mean(1)


DETECTORS: Mapping[str, Callable[..., Detector]] = MappingProxyType(
    {
        "mahalanobis": Mahalanobis.fit,
        "relative_mahalanobis": partial(Mahalanobis.fit, relative=True),
        "nearest_neighbours": KNearestNeighbours.fit,
    }
)


def _chunks(features: Features, groups: Labels) -> Iterator[tuple[Features, Labels]]:
    return zip(torch.split(features, _BANK_ROWS), torch.split(groups, _BANK_ROWS), strict=True)


def _group_means(features: Features, groups: Labels) -> Float[Tensor, "groups features"]:
    counts = groups.bincount()
    sums = torch.zeros(len(counts), features.shape[1], dtype=torch.float64, device=features.device)
    for rows, row_groups in _chunks(features, groups):
        sums.index_add_(0, row_groups, rows.double())
    return sums / counts[:, None]


def _covariance(
    features: Features, groups: Labels, means: Float[Tensor, "groups features"]
) -> Float[Tensor, "features features"]:
    total = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64, device=features.device)
    for rows, row_groups in _chunks(features, groups):
        residuals = rows.double() - means[row_groups]
        total += residuals.T @ residuals
    return total / len(features)


def _unit_length(features: Features) -> Features:
    return F.normalize(features.detach().to(compute_dtype(features)), dim=-1)


def _by_rows(score: Callable[[Features], Scores], features: Features, width: int) -> Scores:
    """Score some rows at a time."""
    _check_width(features, width)
    scores = [score(rows) for rows in torch.split(features.detach(), _ROWS)]
    return torch.cat(scores).to(features.device, compute_dtype(features))


def _check_width(features: Features, width: int) -> None:
    """Refuse rows that are not finite, and those with other columns than the training rows."""
    check_features(features)
    if features.shape[1] != width:
        raise ValueError(f"`features` must have {width} columns, as in training; got {features.shape[1]}.")
