"""Finding out, by running both, whether one vectorised program gives what the loop over members gives."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PROBE_ROWS = 4
PROBE_MEMBERS = 3

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}

Run = Callable[[Mapping[str, Tensor], Tensor], Tensor]


class _RandomOps(TorchDispatchMode):
    """Records the operations that draw from a generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            self.names.add(str(func.overloadpacket))
        return func(*args, **kwargs)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call of an operation takes numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs)


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    # Attention kernels carry the tag whatever their dropout is.
    rates = [
        given[name] for name in ("dropout_p", "p", "dropout") if isinstance(given.get(name), int | float)
    ]
    if not rates and "scaled_dot_product" in str(func):
        return True
    return given.get("train") is False or (bool(rates) and not any(rates))


def look_at(run: Callable[[], object]) -> tuple[set[str], float]:
    """Return the names of operations that drew random numbers while `run` ran, and how many numbers it multiplied and added."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, _RandomOps() as recorder:
        run()
    return recorder.names, float(counter.get_total_flops())


def why_not_vectorised(
    loop: Run,
    vectorised: Run,
    weights: Callable[[], Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    trainable: Collection[str],
) -> str | None:
    """Compare outputs and updated buffers of both on the same tensors; say how they differ, None if they agree.

    `weights` gives those of one attempt: the same ones each time unless a pass changes them.
    """
    wanted, wanted_buffers = _attempt(loop, weights(), buffers, x, trainable)
    try:
        got, got_buffers = _attempt(vectorised, weights(), buffers, x, trainable)
    except Exception as problem:  # whatever vmap or the net under it cannot do is a reason to run the loop
        return f"vmap cannot run it ({_first_line(problem)})"
    if got.shape != wanted.shape or not _close(got, wanted):
        return "its outputs under vmap differ from the loop's"
    for name, tensor in wanted_buffers.items():
        if not _close(got_buffers[name], tensor):
            return f"buffer {name!r} after a pass under vmap differs from the loop's"
    return None


def _attempt(
    run: Run,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    trainable: Collection[str],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run on copies of the buffers; return outputs and the copies as the pass left them."""
    copies = {name: tensor.clone() for name, tensor in buffers.items()}
    leaves = [t.requires_grad_() for n, t in weights.items() if n in trainable and t.is_floating_point()]
    with torch.enable_grad():
        outputs = run({**weights, **copies}, x)
        if leaves and outputs.requires_grad:
            # Some operations run under vmap and fail only in their backward.
            torch.autograd.grad(outputs.sum(), leaves, allow_unused=True)
    return outputs.detach(), {name: tensor.detach() for name, tensor in copies.items()}


def copy_in_order(tensor: Tensor) -> Tensor:
    """Return a copy whose axes lie in memory in the same order, without gaps: some kernels go by that order."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    back = sorted(range(tensor.ndim), key=order.__getitem__)
    return tensor.detach().permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:120]


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    # Kernels of another algorithm differ by rounding, which grows with depth; a wrong program differs by far more. Under
    # autocast vmap adds biases in float32, the loop in the lower precision.
    tolerance = max(_TOLERANCES.get(t.dtype, 5e-2) for t in (a, b))
    a, b = a.double(), b.double()
    scale = max(float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()), 1e-6) if b.numel() else 1.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
