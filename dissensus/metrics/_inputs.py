"""What callers pass (tensors on any device, numpy arrays, mixed) -> checked tensors, for all metrics in the same words."""

from math import isnan
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = Tensor | NDArray[Any]


def as_tensor(values: Array, name: str) -> Tensor:
    """Detached tensor of a real dtype, on the CPU or a CUDA device."""
    tensor = values.detach() if isinstance(values, Tensor) else _from_numpy(np.asarray(values), name)
    if tensor.numel() == 0:
        raise ValueError(f"`{name}` is empty (shape {tuple(tensor.shape)}); a metric needs at least one value.")
    # Sums are taken in float64, which other devices (mps) do not have.
    return tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu()


def floats(values: Array, name: str) -> Tensor:
    """Floating-point tensor without NaN: float32 and float64 as they are, half precision widened."""
    tensor = as_tensor(values, name)
    if not tensor.is_floating_point():
        # Integers up to 2^53 are exact in float64, and so are their ties.
        return tensor.to(torch.float32 if tensor.dtype == torch.bool else torch.float64)
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    # NaN reaches both extremes, so there is no mask of the whole tensor unless there is something to find.
    if isnan(extremes(tensor)[0]):
        place = tensor.isnan().nonzero()[0].tolist()
        raise ValueError(f"`{name}` must not hold NaN; the first one is at index {place}. Repair that input.")
    return tensor


def extremes(tensor: Tensor) -> tuple[float, float]:
    """Smallest and largest value; both NaN where there is one."""
    if tensor.is_cuda:
        low, high = torch.stack(tensor.aminmax()).tolist()
        return low, high
    # One vectorised thread: for so little work, torch's threads wait for each other on a busy machine.
    array = tensor.numpy()
    return float(array.min()), float(array.max())


def vector(values: Array, name: str) -> Tensor:
    """Floating-point tensor of shape `(batch,)`."""
    tensor = floats(values, name)
    if tensor.ndim != 1:
        raise ValueError(f"`{name}` must be shaped (batch,); got shape {tuple(tensor.shape)}.")
    return tensor


def probabilities(probs: Array) -> Tensor:
    """Floating-point tensor of shape `(batch, classes)` whose rows are distributions."""
    tensor = floats(probs, "probs")
    if tensor.ndim != 2 or tensor.shape[1] < 2:
        raise ValueError(
            f"`probs` must be shaped (batch, classes) with two classes or more; got {tuple(tensor.shape)}. "
            "For logits of members, pass `logits.softmax(-1).mean(0)`."
        )
    low, high = extremes(tensor)
    total = tensor.sum(1)
    # Half-precision softmax rows miss 1 by up to about 4e-3 however many classes they have.
    if low < 0 or high > 1.01 or float((total - 1).abs().max()) > 1e-2:
        came = f"values from {low:.4g} to {high:.4g}, sums from {float(total.min()):.4g} to {float(total.max()):.4g}"
        raise ValueError(f"`probs` must have rows that sum to 1, as those of `logits.softmax(-1)`; got {came}.")
    return tensor


def indices(values: Array, name: str, size: int | None = None) -> Tensor:
    """Integer tensor of shape `(batch,)`, as int64, of `size` rows where that is given."""
    tensor = as_tensor(values, name)
    if tensor.is_floating_point() or tensor.ndim != 1:
        came = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ValueError(f"`{name}` must hold integers, shaped (batch,), such as an `argmax(-1)`; got {came}.")
    if size is not None and len(tensor) != size:
        raise ValueError(f"`{name}` must have one entry per input; got {len(tensor)} entries for {size} inputs.")
    return tensor.long()


def probabilities_and_labels(probs: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """Distributions `(batch, classes)` and class indices `(batch,)`, on the device of the former."""
    rows = probabilities(probs)
    return rows, class_indices(labels, "labels", *rows.shape).to(rows.device)


def class_indices(values: Array, name: str, size: int, num_classes: int) -> Tensor:
    """Class indices `(size,)`, each in `[0, num_classes)`."""
    tensor = indices(values, name, size)
    low, high = extremes(tensor)
    if low < 0 or high >= num_classes:
        raise ValueError(f"`{name}` must lie in [0, {num_classes}); got values from {low:.0f} to {high:.0f}.")
    return tensor


def confidences_and_correct(confidence: Array, correct: Array) -> tuple[Tensor, Tensor]:
    """Confidences in [0, 1] and booleans, both `(batch,)`, on the device of the former."""
    stated = vector(confidence, "confidence")
    low, high = extremes(stated)
    # The mean of float32 softmaxes may round to a hair above 1.
    if low < 0 or high > 1 + 1e-5:
        raise ValueError(f"`confidence` must lie in [0, 1]; got values from {low:.4g} to {high:.4g}.")
    stated = stated.clamp(max=1.0) if high > 1 else stated
    return stated, outcomes(correct, "correct", len(stated)).to(stated.device)


def outcomes(values: Array, name: str, size: int) -> Tensor:
    """Boolean tensor of shape `(size,)`, from booleans or from zeros and ones."""
    tensor = as_tensor(values, name)
    if tuple(tensor.shape) != (size,):
        raise ValueError(f"`{name}` must be shaped ({size},), one per input; got shape {tuple(tensor.shape)}.")
    if tensor.dtype == torch.bool:
        return tensor
    answer = tensor == 1
    if not (answer | (tensor == 0)).all():
        raise ValueError(f"`{name}` must be boolean, or hold only 0 and 1; got other values.")
    return answer


def scores_pair(ood_scores: Array, id_scores: Array) -> tuple[Tensor, Tensor]:
    """Two score vectors, of one dtype and on the device of the former."""
    ood, known = vector(ood_scores, "ood_scores"), vector(id_scores, "id_scores")
    dtype = torch.promote_types(ood.dtype, known.dtype)
    return ood.to(dtype), known.to(ood.device, dtype)


def alike(**values: Array) -> list[Tensor]:
    """Floating-point tensors of one shape, on the device of the first."""
    first, *others = tensors = [floats(one, name) for name, one in values.items()]
    for name, tensor in zip(list(values)[1:], others, strict=True):
        if tensor.shape != first.shape:
            wanted, came = tuple(first.shape), tuple(tensor.shape)
            raise ValueError(f"`{name}` must have the shape of the other arguments, {wanted}; got shape {came}.")
    return [tensor.to(first.device) for tensor in tensors]


def _from_numpy(array: NDArray[Any], name: str) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"`{name}` must hold real numbers; got an array of {array.dtype}.")
    kind, size = array.dtype.kind, array.dtype.itemsize
    wide = np.float64 if kind == "f" and size > 8 else np.int64 if kind == "u" and size > 1 else None
    array = array.astype(wide or array.dtype.newbyteorder("="), copy=False)
    # Torch warns about memory it may not write to (pandas, memory maps) and refuses negative strides.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
