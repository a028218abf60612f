"""Clouds by the diamond-square algorithm, for a whole batch at once."""

from torch import Tensor

from dissensus.data.corruptions._draws import uniform


def plasma(keys: Tensor, size: int, decay: float) -> Tensor:
    """Diamond-square clouds on a torus, `(batch, size, size)` from 0 to 1; `size` is a power of two.

    Each halving of the step fills the centres of squares and then of diamonds with the mean of their four
    neighbours plus uniform noise, whose amplitude falls by `decay` squared from one step to the next.
    """
    draws = uniform(keys, (size * size,), low=-1.0, high=1.0)
    field = draws.new_zeros(len(keys), size, size)
    step, amplitude, used = size, 100.0, 0
    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        cells = corners.shape[1] ** 2
        noise = draws[:, used : used + 3 * cells].reshape(-1, 3, *corners.shape[1:]) * amplitude**2
        used += 3 * cells
        right, below = corners.roll(-1, 2), corners.roll(-1, 1)
        centres = (corners + right + below + right.roll(-1, 1)) / 4 + noise[:, 0]
        field[:, half::step, half::step] = centres
        field[:, ::step, half::step] = (corners + right + centres + centres.roll(1, 1)) / 4 + noise[:, 1]
        field[:, half::step, ::step] = (corners + below + centres + centres.roll(1, 2)) / 4 + noise[:, 2]
        step, amplitude = half, amplitude / decay
    field -= field.amin((1, 2), keepdim=True)
    return field / field.amax((1, 2), keepdim=True)
