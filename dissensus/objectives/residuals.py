"""The normal law of residuals x - r, its tails, and how surely a prediction says nothing."""

import torch
from torch import Tensor

from dissensus.objectives.likelihoods import full
from dissensus.randomness import Noise, seeded

# Values of training inputs that are looked at for principal directions: 512 MiB of float32.
_VALUES_LOOKED_AT = 1 << 27


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    r"""Cross-entropy of a prediction to the uniform target: $\log\sum_c e^{z_c} - \frac1C\sum_c z_c$.

    Args:
        logits: `(..., classes)`.

    Returns:
        Nats, `(...)`; never below log C, which it is where all logits are equal. Higher: the prediction says more.

    Example:
        >>> round(uniform_cross_entropy(torch.zeros(4)).item(), 4)  # log 4
        1.3863
    """
    logits = full(logits)
    return logits.logsumexp(-1) - logits.mean(-1)


def residual_scale(x: Tensor) -> Tensor:
    r"""Return the standard deviation of residuals between independent inputs, value by value: $\sqrt{2\,\mathrm{Var}(x)}$.

    Inputs and references of one law leave residuals of mean zero and covariance $2\Sigma$.

    Args:
        x: Inputs, `(..., batch, values)`.

    Returns:
        `(..., 1, values)`.
    """
    # A last batch of one input has no residuals: their deviation is then 0, not 0 / 0.
    return (2 * x.var(-2, keepdim=True, correction=min(1, x.shape[-2] - 1))).sqrt()


def residual_factor(x: Tensor, rank: int | None) -> Tensor:
    r"""Return rows F of a factor $F^\top F \approx 2\Sigma$ of the residuals' covariance, along its `rank` largest directions.

    Args:
        x: Inputs, `(batch, ...)`; evenly spaced ones are looked at where there are many.
        rank: Directions; None for all, of all inputs.

    Returns:
        `(rank, values)`.
    """
    if rank is None:
        sizes, directions = torch.linalg.eigh(
            2 * torch.cov(x.flatten(1).double().T).reshape(x[0].numel(), -1)
        )
        return (sizes.clamp_min(0).sqrt()[:, None] * directions.T).float()
    few = max(_VALUES_LOOKED_AT // max(x[0].numel(), 1), rank + 1)
    x = x[:: -(-len(x) // few)].flatten(1).float()
    centred = x - x.mean(0)
    rank = min(rank, *centred.shape)
    with seeded(0):
        _, sizes, directions = torch.svd_lowrank(centred, q=min(rank + 8, *centred.shape), niter=4)
    return (2 / (len(x) - 1)) ** 0.5 * sizes[:rank, None] * directions.T[:rank]


def drawn_factor(x: Tensor, rank: int) -> Tensor:
    r"""Return rows F with $F^\top F = 2S$, S the covariance of the first `rank + 1` inputs: combinations of real residuals.

    Args:
        x: Inputs, `(..., batch, values)`.
        rank: Directions.

    Returns:
        `(..., rows, values)`; the rows sum to zero, so one direction less than rows.
    """
    x = x[..., : rank + 1, :]
    return (2 / max(x.shape[-2] - 1, 1)) ** 0.5 * (x - x.mean(-2, keepdim=True))


def tail_radius(noise: Noise, count: int, draws: int, dimensions: int) -> Tensor:
    """Return how far the farthest of `draws` standard normal vectors is from zero, `(..., count)`.

    Length and direction of a normal vector are independent. So the least likely of many draws is a random direction at the
    largest of their lengths, and that length can be drawn at once (by Wilson and Hilferty's approximation of a sum of
    squares, good to 2 %): neither time nor memory depends on `draws`.

    Example:
        >>> lengths = tail_radius(Noise(torch.tensor(0)), 1000, 2000, 3072)
        >>> round(lengths.mean().item() / 3072**0.5, 2)  # in many dimensions there is hardly a tail
        1.04
    """
    # The middle of the cell that each draw stands for: never 0 and never 1.
    chances = noise.uniform(count).double() + 2.0**-25
    largest = torch.special.ndtri(chances ** (1 / draws))
    spread = 2 / (9 * dimensions)
    cube_root = (1 - spread + largest * spread**0.5).clamp_min(0)
    return (dimensions * cube_root**3).sqrt().float()


def tail_draws(noise: Noise, count: int, draws: int, size: int, centred: bool = False) -> Tensor:
    """Return the least likely of `draws` standard normal vectors, `(..., count, size)`.

    Args:
        noise: Where they come from.
        count: How many are wanted.
        draws: How many each is the farthest of; 1 gives plain draws.
        size: Values of each.
        centred: Whether the values of each must sum to zero, which leaves one dimension less.
    """
    vectors = noise.at(0).normal(count, size)
    if centred:
        vectors = vectors - vectors.mean(-1, keepdim=True)
    lengths = tail_radius(noise.at(1), count, draws, max(size - centred, 1))
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12) * lengths[..., None]


def farthest_partner(x: Tensor, scale: Tensor) -> Tensor:
    """Return for each input the residual to the input farthest from it, in units of `scale`.

    Args:
        x: Inputs, `(..., batch, values)`.
        scale: Standard deviations of residuals, `(..., 1, values)`.

    Returns:
        `(..., batch, values)`. Needs no more than distances between inputs, batch x batch.
    """
    white = x / scale.clamp_min(1e-6)
    squares = white.square().sum(-1)
    distances = squares[..., :, None] + squares[..., None, :] - 2 * white @ white.transpose(-1, -2)
    farthest = distances.argmax(-1)
    return x - x.gather(-2, farthest[..., None].expand_as(x))


def mahalanobis(values: Tensor, known: Tensor, diagonal: bool = False) -> Tensor:
    """Return the squared distances of `values` from the normal law fitted to `known`, `(..., batch)`.

    Args:
        values: `(..., batch, outputs)`.
        known: `(..., others, outputs)`.
        diagonal: Whether outputs count as independent. With more outputs than others their covariance has no inverse, and
            what keeps it invertible would decide the distances.
    """
    values, known = full(values), full(known)
    mean = known.mean(-2, keepdim=True)
    centred, gaps = known - mean, values - mean
    count = max(known.shape[-2] - 1, 1)
    if diagonal:
        variances = centred.square().sum(-2, keepdim=True) / count
        return (gaps.square() / (variances + _ridge(variances))).sum(-1)
    covariance = centred.transpose(-1, -2) @ centred / count
    ridge = _ridge(covariance.diagonal(dim1=-2, dim2=-1)[..., None, :])
    eye = torch.eye(covariance.shape[-1], device=covariance.device)
    solved = torch.linalg.solve_ex(covariance + ridge * eye, gaps.transpose(-1, -2))[0]
    return (gaps * solved.transpose(-1, -2)).sum(-1)


def _ridge(variances: Tensor) -> Tensor:
    """As much as keeps a law invertible where the network gives fewer directions than outputs, `(..., 1, 1)`."""
    return 1e-4 * variances.mean(-1, keepdim=True).clamp_min(1e-12)
