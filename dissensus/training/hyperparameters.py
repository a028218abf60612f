"""Settings that differ from member to member: a baseline for methods that make members differ by training."""

import math

import torch

from dissensus.randomness import Noise, derive


def diverse_hyperparameters(
    num_members: int,
    seed: int = 0,
    *,
    lr: tuple[float, float] | None = (3e-4, 3e-3),
    weight_decay: tuple[float, float] | None = (1e-4, 1e-1),
    **others: tuple[float, float],
) -> dict[str, list[float]]:
    """Draw hyperparameters for each member: `ds.fit(ens, data, **diverse_hyperparameters(5))` is a hyper-deep ensemble.

    Each value is drawn between two bounds: evenly on a logarithmic scale, or evenly where the lower bound is 0. Member j's values
    depend on `(seed, j)` and the name alone, so more members leave the earlier ones as they were.

    Args:
        num_members: How many members there are.
        seed: Decides the draws.
        lr: Bounds of the learning rate; None leaves it out.
        weight_decay: Bounds of the weight decay; None leaves it out.
        **others: Bounds of values that `fit` does not take member by member, such as a dropout rate, for making the members.

    Returns:
        One list of `num_members` numbers for each name.

    Example:
        >>> drawn = diverse_hyperparameters(3, weight_decay=None, dropout=(0.0, 0.5))
        >>> sorted(drawn), all(3e-4 <= rate <= 3e-3 for rate in drawn["lr"])
        (['dropout', 'lr'], True)

    References:
        Wenzel et al., 2020, <https://arxiv.org/abs/2006.13570>.
    """
    bounds = {"lr": lr, "weight_decay": weight_decay, **others}
    return {
        name: _draw(name, low_high, num_members, seed)
        for name, low_high in bounds.items()
        if low_high is not None
    }


def _draw(name: str, bounds: tuple[float, float], num_members: int, seed: int) -> list[float]:
    low, high = bounds
    if not 0 <= low <= high < math.inf:
        raise ValueError(f"`{name}` must be two bounds, 0 <= low <= high; got {bounds}.")
    keys = torch.tensor([derive(seed, "hyperparameter", name, member) for member in range(num_members)])
    places = Noise(keys).uniform(1).flatten().double().tolist()
    if low == 0:
        return [high * place for place in places]
    return [low * (high / low) ** place for place in places]
