# mypy: ignore-errors
"""Kernels in Triton's language; imported only where they run."""

import triton
import triton.language as tl


@triton.jit
def adam_rows_kernel(
    values,
    first,
    second,
    gradient,
    rows,
    kept,
    decay,
    rate,
    floor,
    columns,
    beta1: tl.float32,
    beta2: tl.float32,
    KEEPS: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take a step of Adam on a stretch of one row; see `row_updates.update_by_adam`."""
    place = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = tl.load(rows + place) * columns + column
    g = tl.load(gradient + place * columns + column, mask=inside, other=0.0)
    w = tl.load(values + at, mask=inside, other=0.0)
    m = tl.load(first + at, mask=inside, other=0.0)
    v = tl.load(second + at, mask=inside, other=0.0)
    if DECAYS:
        g += tl.load(decay + place) * w
    if KEEPS:
        w *= tl.load(kept + place)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    w += tl.load(rate + place) * (m / (tl.sqrt(v) + tl.load(floor + place)))
    tl.store(values + at, w, mask=inside)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
