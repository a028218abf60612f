"""Finding out, by running both, whether one vectorised program gives what the loop over members gives."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PROBE_ROWS = 4
PROBE_MEMBERS = 2

# Kernels of another algorithm differ by rounding, which grows with depth; a wrong program differs by far more.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_TOLERANCE_OF_HALF = 5e-2

Run = Callable[[Mapping[str, Tensor], Tensor], Tensor]


def why_not_vectorised(
    loop: Run,
    vectorised: Run,
    weights: Callable[[], Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    trainable: Collection[str],
) -> str | None:
    """Compare outputs, updated buffers and gradients of both on the same tensors; say how they differ, None if they agree.

    `weights` gives those of one attempt: the same ones each time unless a pass changes them. Numbers are compared without
    autocast, under which rounding hides what is wrong and shows what is not.
    """
    device = x.device.type
    try:
        if torch.is_autocast_enabled(device):
            _attempt(vectorised, weights(), buffers, x, trainable)
        with torch.autocast(device, enabled=False):
            got = _attempt(vectorised, weights(), buffers, x, trainable)
    except Exception as problem:  # whatever vmap or the net under it cannot do is a reason to run the loop
        return f"vmap cannot run it ({_first_line(problem)})"
    with torch.autocast(device, enabled=False):
        wanted = _attempt(loop, weights(), buffers, x, trainable)
    tolerance = _tolerance([*wanted.gradients, *wanted.buffers.values(), wanted.outputs, got.outputs])
    if got.outputs.shape != wanted.outputs.shape or not _close(got.outputs, wanted.outputs, tolerance):
        return "its outputs under vmap differ from the loop's"
    for name, tensor in wanted.buffers.items():
        if not _close(got.buffers[name], tensor, tolerance):
            return f"buffer {name!r} after a pass under vmap differs from the loop's"
    # Against the largest of all: a bias before BatchNorm has no gradient but rounding.
    scale = max((_largest(gradient) for gradient in wanted.gradients), default=1.0)
    for own, other in zip(got.gradients, wanted.gradients, strict=True):
        if not _close(own, other, tolerance, scale):
            return "its gradients under vmap differ from the loop's"
    return None


def trains_wrongly_under_vmap(net: nn.Module) -> str | None:
    """Name a layer whose gradient torch gets wrong under vmap, whatever a probe's few rows show; None if there is none.

    A row of an embedding that is not to be trained (`padding_idx`) is left alone for the first member only.
    """
    for name, module in net.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None:
            return f"vmap trains the padding row of the embedding {name!r}"
    return None


class WholeBatchNorm(TorchFunctionMode):
    """Has BatchNorm compute in the precision of its statistics.

    Under autocast its inputs have fewer digits than its statistics, and torch's rules for vmap make kernels that want both alike.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm and len(args) > 1 and args[1] is not None:
            args = (args[0].to(args[1].dtype), *args[1:])
        return func(*args, **(kwargs or {}))


class _Attempt(NamedTuple):
    outputs: Tensor
    buffers: dict[str, Tensor]
    gradients: list[Tensor]


def _attempt(
    run: Run,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    trainable: Collection[str],
) -> _Attempt:
    """Run on copies of the buffers; return outputs, the copies as the pass left them, and gradients."""
    copies = {name: tensor.clone() for name, tensor in buffers.items()}
    leaves = [t.requires_grad_() for n, t in weights.items() if n in trainable and t.is_floating_point()]
    gradients: Sequence[Tensor] = ()
    with torch.enable_grad():
        outputs = run({**weights, **copies}, x)
        if leaves and outputs.requires_grad:
            # Not their sum, which may be a constant: softmax.
            places = torch.arange(outputs.numel(), device=outputs.device).reshape(outputs.shape)
            loss = (outputs * places.cos().to(outputs.dtype)).sum()
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return _Attempt(
        outputs.detach(),
        {name: tensor.detach() for name, tensor in copies.items()},
        [part for gradient in gradients for part in _summary(gradient)],
    )


def _summary(gradient: Tensor) -> list[Tensor]:
    """Return what a gradient is compared by: whole ones of two attempts would be the most memory that a run takes."""
    return [gradient] if gradient.ndim < 3 else [gradient.sum(-1), gradient.norm(dim=-1)]


def copy_in_order(tensor: Tensor) -> Tensor:
    """Return a copy whose axes lie in memory in the same order, without gaps: some kernels go by that order."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    back = sorted(range(tensor.ndim), key=order.__getitem__)
    return tensor.detach().permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:120]


def _tolerance(tensors: Sequence[Tensor]) -> float:
    """Return by how much results may differ: by the rounding of the coarsest of them."""
    return max(
        (_TOLERANCES.get(t.dtype, _TOLERANCE_OF_HALF) for t in tensors if t.is_floating_point()), default=0.0
    )


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _close(a: Tensor, b: Tensor, tolerance: float, scale: float | None = None) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = max(_largest(b) if scale is None else scale, 1e-6)
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)
