"""Initial scales of the practical's regression members, as its generator drew them."""

from typing import NamedTuple

import numpy as np

from dissensus.data.toy import CUBIC_SEED


class MemberScales(NamedTuple):
    """The seed drawn for each member and the scale of its initial parameters drawn under that seed."""

    seeds: tuple[int, ...]
    scales: tuple[float, ...]


def practical_scales(num_members: int = 6) -> MemberScales:
    r"""Return the scales of the initial parameters of the practical's regression members.

    $$s_j = 100 + \lfloor 10^4\,|z_j|\rfloor,\qquad \text{scale}_j = |u_j|,\ u_j \sim \mathcal N(0, 0.1^2)$$

    The stream goes on where `cubic` left it and gives the standard normal $z_1$. Each seed $s_j$ starts a new
    stream, which gives $u_j$ and then the next member's $z$.

    Args:
        num_members: How many members; the first six are those of the practical.

    Returns:
        Seeds and scales. Reading: member j's weights and biases start as its scale times normal draws.

    Example:
        >>> practical_scales(2)
        MemberScales(seeds=(672, 7888), scales=(0.05341477341995916, 0.12899350046504218))
    """
    stream = np.random.RandomState(CUBIC_SEED)
    # The forty points of `cubic`.
    stream.uniform(size=40)
    stream.normal(size=40)
    seeds, scales = [], []
    for _ in range(num_members):
        seeds.append(100 + abs(int(stream.normal(0, 1) * 10_000)))
        stream = np.random.RandomState(seeds[-1])
        scales.append(abs(float(stream.normal(0, 0.1))))
    return MemberScales(tuple(seeds), tuple(scales))
