"""Where a layer finds each of two inputs that come joined: looked up in what reaches it, not guessed from its shape."""

from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dissensus.randomness import seeded


@dataclass(frozen=True)
class Places:
    """Which input columns of a doubled layer hold what it took of the first input, and of the second; both in its old order.

    Attributes:
        first: Columns of the first input, `(columns,)`.
        second: Columns of the second.
    """

    first: Tensor
    second: Tensor

    @property
    def in_order(self) -> bool:
        """Whether all of the first input comes before all of the second."""
        count = len(self.first)
        both = torch.cat([self.first, self.second])
        return torch.equal(both, torch.arange(2 * count, device=both.device))


class _Reached(Exception):
    """Ends a run that got to the layer that was waited for."""


def run(net: nn.Module, x: Tensor) -> Tensor:
    """Run in evaluation mode, leaving modes and generators as they were."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        with torch.no_grad(), seeded(0):
            output: object = net(x)
    finally:
        for module, mode in modes:
            module.training = mode
    if not isinstance(output, Tensor):
        raise ValueError(
            f"A member must return one tensor; got {type(output).__name__}. Wrap it in a module that returns the tensor."
        )
    return output


def find_places(net: nn.Module, name: str, pair: tuple[Tensor, Tensor], axis: int) -> Places | None:
    """Return where a layer finds two inputs that are joined along an axis; None if it does not find them both.

    Networks may rearrange their inputs before the layer: flattened, cut into patches, channels moved to the end. So the layer's
    columns are told by the values that reach them, which are random and therefore differ.

    Args:
        net: A network from `(batch, ...)`; it is run up to the layer only.
        name: A linear or convolutional layer.
        pair: Two batches of random inputs.
        axis: Counted from the end.

    Example:
        >>> net = nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(8, 4, 1))
        >>> pair = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
        >>> find_places(net, "1", pair, axis=-3).second
        tensor([ 8,  9, 10, 11, 12, 13, 14, 15])
    """
    taken = [_taken(net, name, x) for x in (*pair, torch.cat(pair, dim=axis))]
    if any(each is None for each in taken):
        return None
    first, second, both = (_columns(net.get_submodule(name), each) for each in taken if each is not None)
    count = first.shape[-1]
    if both.shape != (*first.shape[:-1], 2 * count):
        return None
    if _close(both[..., :count], first) and _close(both[..., count:], second):
        order = torch.arange(2 * count, device=both.device)
        return Places(order[:count], order[count:])
    return _by_value(first, second, both)


def _taken(net: nn.Module, name: str, x: Tensor) -> Tensor | None:
    """Return what a layer takes when it first runs; None if it never does."""
    taken: list[Tensor] = []

    def stop(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        taken.append((args[0] if args else kwargs["input"]).detach().clone())
        raise _Reached

    hook = net.get_submodule(name).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        run(net, x)
    except _Reached:
        pass
    finally:
        hook.remove()
    return taken[0] if taken else None


def _columns(layer: nn.Module, taken: Tensor) -> Tensor:
    """Return what a layer takes with its columns, features or channels, last."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return taken.movedim(1 - weight.ndim, -1)


def _close(values: Tensor, wanted: Tensor) -> bool:
    """Whether values agree but for rounding, of which a resizing before the layer leaves some."""
    return torch.allclose(values, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))


def _by_value(first: Tensor, second: Tensor, both: Tensor) -> Places | None:
    # Columns that are alike, such as those of padding, are given out in turn.
    free: defaultdict[bytes, deque[int]] = defaultdict(deque)
    for place, column in enumerate(_as_bytes(both)):
        free[column].append(place)
    found = [[free[c].popleft() for c in _as_bytes(each) if free[c]] for each in (first, second)]
    if any(len(each) < first.shape[-1] for each in found):
        return None
    places = torch.tensor(found, device=both.device)
    return Places(places[0], places[1])


def _as_bytes(columns: Tensor) -> list[bytes]:
    # Adding 0 makes one zero of the two; float32 holds the shorter formats exactly.
    values = (columns.to(torch.promote_types(columns.dtype, torch.float32)) + 0.0).flatten(0, -2)
    return [column.tobytes() for column in values.T.contiguous().cpu().numpy()]
