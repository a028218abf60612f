"""Members' predictions on test rows in; error, diversity, what debiasing removes and what dropping members costs, out."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dissensus.objectives import debias, decompose
from dissensus.randomness import bits, derive

DROP_SHARES = (0.2, 0.4, 0.6)
DROP_REPEATS = 100


def measure(outputs: Tensor, targets: Tensor, *, seed: int = 0) -> dict[str, Any]:
    """Return every number of figures 2 to 4 for one ensemble.

    Args:
        outputs: Members' predictions, `(members, rows)`.
        targets: `(rows,)`.
        seed: Decides which members are dropped.
    """
    outputs, targets = outputs.double(), targets.double()
    parts = decompose(outputs, targets, loss="mse")
    found: dict[str, Any] = {
        "mse": float(parts.ensemble_error.mean()),
        "member_mse": float(parts.member_error.mean()),
        "best_member_mse": float((outputs - targets).square().mean(1).min()),
        "diversity": float(parts.diversity.mean()),
        "bias_share": bias_share(outputs),
    }
    for share in DROP_SHARES:
        found[f"drop_{share:g}"] = drop_increase(outputs, targets, share, seed=seed)
        found[f"drop_{share:g}_expected"] = expected_drop_increase(outputs, share)
    return found


def bias_share(outputs: Tensor) -> float:
    """Return the share of diversity that goes when each member's constant offset is taken away.

    Reading: 0 where members differ from row to row, 1 where they are shifted copies of each other.

    Args:
        outputs: Members' predictions, `(members, rows)`.

    Example:
        >>> bias_share(torch.tensor([[5.0, 6.0], [1.0, 2.0]]))
        1.0
    """
    before, after = (spread(values) for values in (outputs, debias(outputs).outputs))
    return 1 - after / before


def spread(outputs: Tensor) -> float:
    """Return the mean variance of members around their mean: diversity for squared error."""
    return float(outputs.var(0, correction=0).mean())


def num_dropped(num_members: int, share: float) -> int:
    """Return how many members are dropped: the share of them, rounded down."""
    return int(num_members * share)


def drop_increase(
    outputs: Tensor, targets: Tensor, share: float, *, repeats: int = DROP_REPEATS, seed: int = 0
) -> float:
    """Return by how much the squared error rises when a share of the members is dropped at random.

    Each row loses members of its own, and the others are averaged.

    Args:
        outputs: Members' predictions, `(members, rows)`.
        targets: `(rows,)`.
        share: Share of members to drop.
        repeats: How often.
        seed: Decides which.
    """
    left = len(outputs) - num_dropped(len(outputs), share)
    keys = torch.tensor([derive(seed, "drop", repeat) for repeat in range(repeats)])
    total = 0.0
    for key in keys:
        # Members in a random order for each row; the first ones stay.
        chosen = bits(key, *outputs.shape).argsort(0)[:left]
        total += float((outputs.gather(0, chosen).mean(0) - targets).square().mean())
    return total / repeats - float((outputs.mean(0) - targets).square().mean())


def expected_drop_increase(outputs: Tensor, share: float) -> float:
    r"""Return what `drop_increase` is on average over all choices of members.

    $$\mathrm{DIV}\;\frac{M-m}{m\,(M-1)}$$

    with m of M members left: for squared error it depends on the diversity alone.

    Args:
        outputs: Members' predictions, `(members, rows)`.
        share: Share of members to drop.

    Example:
        >>> expected_drop_increase(torch.tensor([[1.0], [-1.0]]), 0.5)
        1.0
    """
    count = len(outputs)
    left = count - num_dropped(count, share)
    return spread(outputs) * (count - left) / (left * (count - 1))


def population_sd(values: Sequence[float]) -> float:
    """Return the standard deviation over runs, divided by their number, as the document's figures have it."""
    return float(torch.tensor(values, dtype=torch.float64).std(correction=0))
