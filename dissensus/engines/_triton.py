# mypy: ignore-errors
"""Kernels in Triton's language; imported only where they run."""

import triton
import triton.language as tl


# fmt: off
@triton.jit
def adam_rows_kernel(values, first, second, part0, part1, part2, part3, size0, size1, size2, size3, start, rows,
                     kept, decay, rate, floor, columns, beta1: tl.float32, beta2: tl.float32,
                     KEEPS: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr):
    """Take a step of Adam on a stretch of one row; see `row_updates.update_by_adam`.

    The gradient is in up to four parts, of columns from `start` on; a program's stretch lies in one of them. Each branch does all
    of the work: what is known of a part's size, which decides how wide memory is read, would be lost where branches meet.
    """
    place = tl.program_id(0)
    stretch = tl.program_id(1)
    row = tl.load(rows + place) * columns + start
    keep = tl.load(kept + place)
    share = tl.load(decay + place)
    scale = tl.load(rate + place)
    least = tl.load(floor + place)
    end0 = tl.cdiv(size0, BLOCK)
    end1 = end0 + tl.cdiv(size1, BLOCK)
    end2 = end1 + tl.cdiv(size2, BLOCK)
    if stretch < end0:
        _adam(values, first, second, part0, size0, row, stretch,
              place, keep, share, scale, least, beta1, beta2, KEEPS, DECAYS, BLOCK)
    elif stretch < end1:
        _adam(values, first, second, part1, size1, row + size0, stretch - end0,
              place, keep, share, scale, least, beta1, beta2, KEEPS, DECAYS, BLOCK)
    elif stretch < end2:
        _adam(values, first, second, part2, size2, row + size0 + size1, stretch - end1,
              place, keep, share, scale, least, beta1, beta2, KEEPS, DECAYS, BLOCK)
    else:
        _adam(values, first, second, part3, size3, row + size0 + size1 + size2, stretch - end2,
              place, keep, share, scale, least, beta1, beta2, KEEPS, DECAYS, BLOCK)


@triton.jit
def _adam(values, first, second, gradient, size, row, stretch, place, keep, share, scale, least, beta1, beta2,
          KEEPS: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr):
    """Update a stretch of the columns that one part of the gradient is of, the first of them at `row`."""
    column = stretch * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at = row + column
    g = tl.load(gradient + place * size + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(values + at, mask=inside, other=0.0)
    m = tl.load(first + at, mask=inside, other=0.0)
    v = tl.load(second + at, mask=inside, other=0.0)
    if DECAYS:
        g += share * w
    if KEEPS:
        w *= keep
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    w += scale * (m / (tl.sqrt(v) + least))
    tl.store(values + at, w, mask=inside)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
