"""The first layer of any network, found by running it, made to take two inputs in place of one."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dissensus.nets.graphs import LAYERS
from dissensus.randomness import derive, evaluating, seeded


class _GroupedPairs(nn.modules.conv._ConvNd):
    """A convolution in groups over two inputs, joined on their channels: each group's channels of both."""

    def forward(self, input: Tensor) -> Tensor:
        axis = 1 - self.weight.ndim
        apart = input.unflatten(axis, (2, self.groups, -1))
        output: Tensor = super().forward(apart.transpose(axis - 2, axis - 1).flatten(axis - 2, axis))
        return output


class GroupedPairs1d(_GroupedPairs, nn.Conv1d):
    """In one dimension."""


class GroupedPairs2d(_GroupedPairs, nn.Conv2d):
    """In two dimensions."""


class GroupedPairs3d(_GroupedPairs, nn.Conv3d):
    """In three dimensions."""


_IN_GROUPS: dict[type, type] = {nn.Conv1d: GroupedPairs1d, nn.Conv2d: GroupedPairs2d, nn.Conv3d: GroupedPairs3d}


class Places(NamedTuple):
    """Which input columns of a doubled layer hold what it took of the first input, and of the second; both in its old order."""

    first: Tensor
    second: Tensor


class _Reached(Exception):
    """Ends a run that got to the layer that was waited for."""


# Returns the tensor that is scored of what a network returned.
Read = Callable[[Any], Tensor]


def run(net: nn.Module, x: Tensor) -> Any:
    """Run in evaluation mode, leaving modes and generators as they were."""
    with evaluating(net), torch.no_grad(), seeded(0):
        return net(x)


def _taken(net: nn.Module, x: Tensor, until: str | None = None) -> dict[str, Tensor]:
    """Return what each layer with weights takes when it first runs, in the order of running; the run ends at the layer `until`."""
    taken: dict[str, Tensor] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
        given = next(iter((*args, *kwargs.values())), None)
        if isinstance(given, Tensor):
            taken.setdefault(name, given.detach().clone())
        if name == until:
            raise _Reached

    with ExitStack() as hooks, suppress(_Reached):
        for name, module in net.named_modules():
            is_leaf = next(module.children(), None) is None and next(module.parameters(), None) is not None
            if isinstance(module, LAYERS) or is_leaf:
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name=name), with_kwargs=True))
        run(net, x)
    return taken


def _found(first: Tensor, second: Tensor, both: Tensor) -> Places | None:
    """Return in which columns of what a layer takes of two joined inputs those of each are; None if not all of them are there."""

    def as_bytes(columns: Tensor) -> list[bytes]:
        # Adding 0 makes one zero of the two; float32 holds the shorter formats exactly.
        values = (columns.to(torch.promote_types(columns.dtype, torch.float32)) + 0.0).flatten(0, -2)
        return [column.tobytes() for column in values.T.contiguous().cpu().numpy()]

    count = first.shape[-1]
    if both.shape != (*first.shape[:-1], 2 * count):
        return None
    # But for rounding, of which a resizing before the layer leaves some.
    if _close(both[..., :count], first) and _close(both[..., count:], second):
        return Places(*torch.arange(2 * count, device=both.device).split(count))
    # Columns that are alike, such as those of padding, are given out in turn.
    free: defaultdict[bytes, deque[int]] = defaultdict(deque)
    for place, column in enumerate(as_bytes(both)):
        free[column].append(place)
    found = [[free[c].popleft() for c in as_bytes(each) if free[c]] for each in (first, second)]
    return None if min(map(len, found)) < count else Places(*torch.tensor(found, device=both.device))


Initialise = Literal["fresh", "sum"]

_PUT_ONE_IN_FRONT = "Only a linear or convolutional layer can be: put one in front of the network, or move what comes before one out of it."


def double_first_layers(
    nets: Sequence[nn.Module], like: Tensor, name: str | None, initialise: Initialise, seeds: Sequence[int], read: Read
) -> int:
    """Have the first layer of each network take `[a, b]`, two inputs joined along one of their axes; change it in place.

    With `initialise="sum"` the network on `[a, b]` is the network as it was on `a + b`; with `"fresh"` the first input meets new normal
    weights of the same standard deviation, by a network's seed. Of the inputs, `like`, only shape, dtype and device count; of what
    networks return, what `read` makes of it. The axis, counted from the end, is returned: the first one of an input on which it can be
    done for all networks, or the last, or any.
    """
    with seeded(0):
        first, second = (torch.randn_like(like[:1].expand(4, *like.shape[1:])) for _ in range(2))
    for net in nets:
        _check_runs(net, first + second, read)
    names = [_find(net, first, name) for net in nets]
    axis, places = _common_axis(nets, names, (first, second))
    pair = torch.cat([first, second], dim=axis)
    for net, found, there, seed in zip(nets, names, places, seeds, strict=True):
        layer = net.get_submodule(found)
        assert isinstance(layer, LAYERS)
        old = layer.weight.detach()
        before = _outputs(net, layer, first + second, read)
        _widen(layer, there)
        _check_equal(net, pair, before, found, layer, read)
        if initialise == "fresh":
            with seeded(derive(seed, "reference weights"), alone=True), torch.no_grad():
                drawn = torch.cat([old, old], dim=1)[:, : old.shape[1]]
                layer.weight[:, there.first] = drawn.normal_(0, float(old.double().std(correction=0)))
    return axis


def _check_runs(net: nn.Module, x: Tensor, read: Read) -> None:
    """Refuse a network that does not run on such inputs, or could not be changed."""
    if compiled := [n or "The network" for n, m in net.named_modules() if type(m).__name__ == "OptimizedModule"]:
        raise ValueError(
            f"{compiled[0]} was compiled, and what is compiled cannot be changed. Hand over the network that torch.compile was "
            "given; fit(engine='compiled') compiles its training."
        )
    try:
        read(run(net, x))
    except ValueError:
        raise
    except Exception as problem:  # whatever a network does with inputs that do not suit it
        raise ValueError(
            f"`references` must be inputs of the network, and it cannot run on ({', '.join(map(str, x.shape[1:]))}) of "
            f"{x.dtype}: {first_line(problem)}"
        ) from problem


def _find(net: nn.Module, x: Tensor, name: str | None) -> str:
    """Return the name of the layer to double, the first with weights that runs unless it is named, or say why it cannot be."""
    found = next(iter(_taken(net, x)), None) if name is None else name
    if found is None:
        raise ValueError(f"The first layer cannot be doubled: no layer with weights runs. {_PUT_ONE_IN_FRONT}")
    if found not in dict(net.named_modules()):
        raise ValueError(f"The network has no layer {found!r}.{_others(net, x, found)}")
    if (why := _why_not(net, found)) is not None:
        which = f"The {'first ' if name is None else ''}layer cannot be doubled"
        raise ValueError(f"{which}: {found or 'the network itself'} {why}{_others(net, x, found)}")
    return found


def _why_not(net: nn.Module, name: str) -> str | None:
    """Say why a layer cannot take twice the inputs, and what to do; None if nothing speaks against it."""
    layer = net.get_submodule(name)
    if not isinstance(layer, LAYERS):
        return f"is a {type(layer).__name__}. {_PUT_ONE_IN_FRONT}"
    if layer._parameters.get("weight") is None:
        by = "torch.nn.utils.parametrize.remove_parametrizations"
        return f"has a weight that is computed from others (weight_norm, spectral_norm or the like). Take that off first, with {by}."
    modules = net.named_modules()
    if tied := [n for n, m in modules if m is not layer and any(p is layer.weight for p in m._parameters.values())]:
        return f"shares its weight with {', '.join(tied)}, which would not be doubled. Give each a weight of its own."
    if _groups(layer) > 1 and type(layer) not in _IN_GROUPS:
        return f"is a {type(layer).__name__} in groups, as only torch's own convolutions may be. {_PUT_ONE_IN_FRONT}"
    return None


def _groups(layer: nn.Module) -> int:
    return 1 if isinstance(layer, nn.Linear) else int(layer.groups)  # type: ignore[arg-type]


def _others(net: nn.Module, x: Tensor, tried: str) -> str:
    """Name further layers that take the inputs."""
    some = x[0].flatten()[:64]
    takers = [name for name, taken in _taken(net, x).items() if bool(torch.isin(some, taken).all())]
    fit = [repr(name) for name in takers if name != tried and _why_not(net, name) is None]
    return f" Layers that take the inputs: {', '.join(fit)}; name one with `first_layer`." if fit else ""


def _common_axis(
    nets: Sequence[nn.Module], names: Sequence[str], pair: tuple[Tensor, Tensor]
) -> tuple[int, list[Places]]:
    """Return an axis along which inputs can be joined for all networks, and where their layers then find them."""
    size = pair[0].ndim - 1
    problems = []
    for axis in dict.fromkeys([-size, -1, *range(-size, 0)]):
        try:
            return axis, [_places(net, name, pair, axis) for net, name in zip(nets, names, strict=True)]
        except ValueError as problem:
            problems.append(problem)
    raise problems[0]


def _places(net: nn.Module, name: str, pair: tuple[Tensor, Tensor], axis: int) -> Places:
    """Return which columns of a layer's weight are to meet each of two inputs, joined along an axis, or say why there are none."""
    # Networks may flatten inputs or cut them into patches before: columns are told by the random values that reach them.
    layer = net.get_submodule(name)
    assert isinstance(layer, LAYERS)
    try:
        runs = (_taken(net, x, until=name) for x in (*pair, torch.cat(pair, dim=axis)))
        columns = [taken[name].movedim(1 - layer.weight.ndim, -1) for taken in takewhile(lambda t: name in t, runs)]
    except Exception as problem:  # whatever a network does with inputs that do not suit it
        why = f"what the network does before that layer does not go with them: {first_line(problem)}"
        advice = "Move it (normalisation, checks of shape) out of the network."
        raise _cannot(name, layer, f"{why}. {advice}{_others(net, pair[0], name)}") from problem
    found = _found(*columns) if len(columns) == 3 else None
    if found is None:
        why = "they do not reach it as they are: the network makes something else of them before. Move that out of the network."
        raise _cannot(name, layer, why + _others(net, pair[0], name))
    groups = _groups(layer)
    if groups == 1:
        return found
    order = torch.cat(found)
    if not torch.equal(order, torch.arange(len(order), device=order.device)):
        why = f"it convolves in {groups} groups, among which the network has dealt out its inputs anew"
        raise _cannot(name, layer, f"{why}. Move that out of the network.")
    # Each group meets its own share of both inputs.
    share = len(found.first) // groups
    return Places(found.first[:share], found.first[share : 2 * share])


def _cannot(name: str, layer: nn.Module, why: str) -> ValueError:
    where = f"{name or 'The network itself'} ({type(layer).__name__})"
    return ValueError(f"{where} was to take twice its inputs, but {why}")


def _widen(layer: nn.Module, places: Places) -> None:
    """Have a layer take two inputs, each with the weights that it had."""
    assert isinstance(layer, LAYERS)
    old = layer.weight.detach()
    weight = torch.cat([old, old], dim=1)
    weight[:, places.first], weight[:, places.second] = old, old
    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    if isinstance(layer, nn.Linear):
        layer.in_features *= 2
        return
    layer.in_channels *= 2
    if layer.groups > 1:
        # Another class, not a module around it: parameters keep their names.
        layer.__class__ = _IN_GROUPS[type(layer)]


def _outputs(net: nn.Module, layer: nn.Module, x: Tensor, read: Read) -> list[Tensor]:
    """Return what a network says, as it is and with random values for parameters that are all zero, which hide what it does."""
    outputs = [read(run(net, x))]
    real = (p for p in net.parameters() if p is not layer.weight and p.is_floating_point())
    zero = {p: p.data for p in real if not bool(p.detach().any())}
    try:
        with seeded(0, alone=True):
            for p, values in zero.items():
                # None near zero, and what a layer gives about as large as what it takes.
                sizes = (torch.rand_like(values) + 0.5) / max(p.shape[1:].numel(), 1) ** 0.5
                p.data = torch.where(torch.rand_like(values) < 0.5, -sizes, sizes)
        return [*outputs, read(run(net, x))] if zero else outputs
    finally:
        for p, values in zero.items():
            p.data = values


def _check_equal(net: nn.Module, pair: Tensor, before: list[Tensor], name: str, layer: nn.Module, read: Read) -> None:
    """Refuse a network whose inputs go elsewhere too, so that doubling one layer is not enough."""
    try:
        after = _outputs(net, layer, pair, read)
    except Exception as problem:  # whatever a network does with inputs that do not suit it
        why = f"the network does not run on them: {first_line(problem)}"
        raise _cannot(name, layer, f"{why}. Move what else is done with its inputs out of the network.") from problem
    if not all(_close(new, old) for new, old in zip(after, before, strict=True)):
        why = "the network's inputs go elsewhere too, or are changed before it"
        raise _cannot(name, layer, f"{why}. Move that out of the network, or name the layer with `first_layer`.")


def _close(after: Tensor, before: Tensor) -> bool:
    """Whether values agree but for rounding."""
    scale = float(before.abs().max().nan_to_num(1.0).clamp_min(1e-6))
    return after.shape == before.shape and torch.allclose(after, before, rtol=1e-2, atol=1e-2 * scale, equal_nan=True)


def first_line(problem: Exception) -> str:
    """Return what a problem says, in one line."""
    if isinstance(problem, KeyError):  # its text is the key alone
        return repr(problem)
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
