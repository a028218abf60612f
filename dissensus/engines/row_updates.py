"""Adam on some rows of large arrays, in place: on a GPU one kernel that touches nothing else.

Written with gathers and scatters a compiler makes three kernels of it, which move half as much memory again: it may not
write to rows that it still reads.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, library

# Columns that one program of the kernel updates.
_BLOCK = 1024


def runs_as_kernel(values: Tensor) -> bool:
    """Whether rows of these values are updated by a kernel of their own."""
    return values.is_cuda and values.dtype == torch.float32 and find_spec("triton") is not None


@library.custom_op("dissensus::update_by_adam", mutates_args=("values", "first", "second"), device_types="cuda")
def update_by_adam(
    values: Tensor,  # (all rows, columns)
    first: Tensor,  # moments, as values
    second: Tensor,
    gradient: list[
        Tensor
    ],  # (rows, ...), of any precision: in order the columns from the first on; others stay as they are
    rows: Tensor,  # which, all different
    kept: Tensor | None,  # factor on the values before the step, (rows, 1); None for 1
    decay: Tensor | None,  # share of the values that is added to the gradient, (rows, 1); None for 0
    rate: Tensor,  # signed, with the corrections of both moments, (rows, 1)
    floor: Tensor,  # what is added to the root of the second moments, (rows, 1)
    beta1: float,
    beta2: float,
) -> None:
    """Take a step of Adam on some rows, in place; the same as `optimizers.Adam.update` on copies of them."""
    columns = values.shape[1]
    assert all(tensor.stride() == (columns, 1) for tensor in (values, first, second))
    parts = [part.reshape(len(rows), -1).contiguous() for part in gradient]
    start = 0
    for four in (parts[index : index + 4] for index in range(0, len(parts), 4)):
        sizes = [part.shape[1] for part in four]
        blocks = sum(-(-size // _BLOCK) for size in sizes)
        missing = 4 - len(four)
        pointers = [values, first, second, *four, *[four[0]] * missing]
        factors = [rate if factor is None else factor.contiguous() for factor in (kept, decay, rate, floor)]
        numbers = [*sizes, *[0] * missing, start, rows.contiguous(), *factors, columns, beta1, beta2]
        flags = {"KEEPS": kept is not None, "DECAYS": decay is not None, "BLOCK": _BLOCK}
        _kernel()[len(rows), blocks](*pointers, *numbers, **flags, num_warps=4)
        start += sum(sizes)
    assert start <= columns


@cache
def _kernel() -> Any:
    """Return the kernel; Triton is there only where torch computes on a GPU."""
    from dissensus.engines._triton import adam_rows_kernel

    return adam_rows_kernel
