"""Same-shaped networks as stacked tensors, shells that run one row of them, and whether one vectorised program gives the same."""

import copy
import operator
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dissensus.data.trees import Output, Tree, WholeOutput, call_on_lent, pick
from dissensus.nets.dropout import dropout_keys, rewind_dropout

Tensors: TypeAlias = Mapping[str, Tensor]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSORS = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
_BOOKKEEPING = {*_HOOKS, *_TENSORS, "training", "calls"}


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, each tensor once (tied ones under their first name)."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def twin(net: nn.Module) -> nn.Module:
    """Return a copy of a network that shares its parameters and buffers."""
    if isinstance(net, torch.jit.ScriptModule):
        raise ValueError("A scripted network cannot be a member. Give the network that torch.jit.script was given.")
    try:
        return copy.deepcopy(net, {id(tensor): tensor for tensor in tensors_of(net).values()})
    except RuntimeError as problem:
        raise ValueError(
            f"A {type(net).__name__} holds tensors that are computed from others (pruned weights, the old weight_norm, a stored "
            "activation), which cannot be copied. Use prune.remove, nn.utils.parametrizations.weight_norm, or detach what is stored."
        ) from problem


def check_nets(nets: Sequence[nn.Module]) -> None:
    """Refuse what cannot be members: no modules, modules without shapes, and modules that share parameters."""
    seen: dict[int, tuple[int, str]] = {}
    for index, net in enumerate(nets):
        _check_net(index, net)
        for name, parameter in net.named_parameters():
            other, other_name = seen.setdefault(id(parameter), (index, name))
            if other != index:
                raise ValueError(
                    f"Members must not share parameters; {name!r} of member {index} is the same object as {other_name!r} of "
                    f"member {other}. Make a new network in every call of the factory, or copy it (for one frozen backbone under many "
                    "heads use HeadEnsemble)."
                )
    if len({id(net) for net in nets}) < len(nets):
        raise ValueError("The same object is a member twice. Make a new network in every call of the factory, or copy.")


def _check_net(index: int, net: object) -> None:
    if not isinstance(net, nn.Module):
        raise ValueError(f"Each member must be an nn.Module; member {index} is a {type(net).__name__}.")
    tensors = tensors_of(net)
    if {type(p).__name__ for p in (*tensors.values(), *net.modules())} & {"DTensor", "FullyShardedDataParallel"}:
        raise ValueError(
            f"Member {index} is sharded over processes (FSDP), and an ensemble keeps whole members. Spread members with `mesh`; "
            "train those that exceed a device one by one, and gather each before DeepEnsemble.from_members."
        )
    if lazy := [name for name, tensor in tensors.items() if torch.nn.parameter.is_lazy(tensor)]:
        raise ValueError(f"Parameter {lazy[0]!r} of member {index} has no shape yet. Run a batch through it before.")


def can_stack(nets: Sequence[nn.Module]) -> bool:
    """Whether all nets have tensors of the same names, shapes and dtypes, so that they can be stored as one."""
    layouts = []
    for net in nets:
        own = tensors_of(net).items()
        tensors = [(n, t.shape, t.dtype, t.requires_grad, isinstance(t, nn.Parameter)) for n, t in own]
        layouts.append((tensors, [name for name, _ in net.named_modules()]))
    return all(layout == layouts[0] for layout in layouts)


def own_states(net: nn.Module) -> list[nn.Module]:
    """Return the modules that put more than tensors into a state dict."""
    return [module for module in net.modules() if type(module).get_extra_state is not nn.Module.get_extra_state]


def why_not_one_program(nets: Sequence[nn.Module]) -> str | None:
    """Say why running the first net's code on another net's tensors would not be that net; None if it would."""
    if len(list(nets[0].named_modules(remove_duplicate=False))) > len(list(nets[0].modules())):
        return "a module is used under two names"
    return next(filter(None, (why_another(net, nets[0]) for net in nets)), None)


# What can be told to be the same from one moment to the next, and from one member to a copy of another.
PLAIN = (int, float, str, tuple, types.FunctionType)


def why_another(
    net: nn.Module, other: nn.Module, kept: tuple[type, ...] = (object,), *, soup: bool = False
) -> str | None:
    """Say why a network does other things with its tensors than another; None if it does the same.

    It does if its modules and what they keep, as far as that is of the kinds `kept`, are the same, and none has hooks; for a `soup`
    hooks and rates of dropout do not count.
    """
    own, theirs = dict(net.named_modules()), dict(other.named_modules())
    if own.keys() != theirs.keys():
        return "they have other modules"
    for name, module in own.items():
        where, like = f"module {name!r}" if name else "the module itself", theirs[name]
        # By name: parametrised modules get a class of their own each.
        kind, wanted = ((type(m).__module__, type(m).__qualname__) for m in (module, like))
        if not soup and any(getattr(module, hooks, None) for hooks in _HOOKS):
            return f"{where} has hooks"
        if kind != wanted:
            return f"{where} is a {wanted[1]} in one member and a {kind[1]} in another"
        counts = () if soup and isinstance(module, nn.modules.dropout._DropoutNd) else kept
        for key, value in module.__dict__.items():
            if isinstance(value, counts) and key not in _BOOKKEEPING and not _equal(value, like.__dict__.get(key)):
                return f"attribute {key!r} of {where} differs between members"
    return None


# Of each module of a network.
PlainAttributes: TypeAlias = list[dict[str, Any]]


def attributes_of(net: nn.Module) -> PlainAttributes:
    """Return the plain attributes of each module of a network."""
    kinds = (*PLAIN, types.NoneType)
    return [
        {key: value for key, value in module.__dict__.items() if isinstance(value, kinds) and key not in _BOOKKEEPING}
        for module in net.modules()
    ]


def news_of(net: nn.Module, before: PlainAttributes) -> tuple[PlainAttributes, PlainAttributes]:
    """Return which plain attributes of each module are others than before, and all of them as they now are."""
    now = attributes_of(net)
    news = [
        {key: value for key, value in own.items() if key not in old or not _equal(value, old[key])}
        for own, old in zip(now, before, strict=True)
    ]
    return news, now


def copies_of(tensors: Tensors) -> dict[str, Tensor]:
    """Return copies of tensors, by the same names."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def average(states: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return averaged weights; what is neither real nor complex is the first one's."""
    return {
        name: torch.stack([state[name] for state in states]).mean(0)
        if tensor.is_floating_point() or tensor.is_complex()
        else tensor
        for name, tensor in states[0].items()
    }


def check_one_architecture(nets: Sequence[nn.Module]) -> None:
    """Refuse to average weights of networks that do different things with them; rates of dropout may differ."""
    first, shapes = nets[0], [{name: t.shape for name, t in net.state_dict().items()} for net in nets]
    why = "their tensors have other names or shapes" if any(each != shapes[0] for each in shapes) else None
    for net in nets[1:]:
        why = why or why_another(net, first, PLAIN, soup=True) or why_another(first, net, PLAIN, soup=True)
    if why is not None:
        raise ValueError(f"A soup averages members of one architecture; these differ: {why}. Average predictions.")


def _equal(a: Any, b: Any) -> bool:
    """Whether two attributes of modules are the same; what cannot be compared is not."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    same = next((same for kind, same in _SAME.items() if isinstance(a, kind)), operator.eq)
    try:
        return bool(same(a, b))
    except Exception:  # an attribute of any class
        return False


def _same_parts(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(_equal, a, b))


_SAME: Mapping[type, Callable[[Any, Any], bool]] = {
    types.FunctionType: lambda a, b: (
        a.__code__ is b.__code__ and _equal((a.__defaults__, a.__closure__), (b.__defaults__, b.__closure__))
    ),
    types.CellType: lambda a, b: _equal(a.cell_contents, b.cell_contents),
    list: _same_parts,
    tuple: _same_parts,
    dict: lambda a, b: a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items()),
    Tensor: lambda a, b: a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b),
}


def stack(nets: Sequence[nn.Module]) -> nn.Module:
    """Return a copy of the first net whose parameters and buffers are those of all nets, stacked along a new first axis."""
    skeleton = copy.deepcopy(nets[0])
    for module in skeleton.modules():
        keep_weights_apart(module)
    rows = [tensors_of(net) for net in nets]
    replace_tensors(skeleton, lambda name, _: torch.stack([row[name].detach() for row in rows]))
    return skeleton


def as_held(values: Tensor, tensor: Tensor) -> Tensor:
    """Return values as a parameter where the tensor in whose place they come is one."""
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def replace_tensors(net: nn.Module, make: Callable[[str, Tensor], Tensor]) -> None:
    """Give a network other tensors, in place; what is tied stays tied."""
    made = {id(tensor): as_held(make(name, tensor), tensor) for name, tensor in tensors_of(net).items()}
    for module in net.modules():
        for name, held in [*module._parameters.items(), *module._buffers.items()]:
            if held is not None:
                setattr(module, name, made[id(held)])


def keep_weights_apart(module: nn.Module) -> None:
    """Stop a recurrent layer from moving its weights, which are stacked or lent, into memory of its own on a GPU."""
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters = _nothing  # type: ignore[method-assign]


def _nothing() -> None:
    """Stand in for a method that must not run."""


@contextmanager
def quiet_weights(recurs: bool) -> Iterator[None]:
    """Networks, that recur or not, run inside on slices of weights, of which torch says on a GPU that they lie in pieces."""
    with warnings.catch_warnings() if recurs else nullcontext():
        if recurs:
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous", UserWarning)
        yield


def has_layer(nets: Sequence[nn.Module], kind: type[nn.Module]) -> bool:
    """Whether one of the networks has a layer of this kind."""
    return any(isinstance(module, kind) for net in nets for module in net.modules())


class Shell:
    """One member's own module without tensors of its own: it is lent a row of the stacked ones for each pass."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        owner: dict[int, str] = {id(t): name for name, t in reversed(tensors_of(net).items())}
        self._parameters: list[tuple[nn.Module, str, str]] = []
        self._buffers: list[tuple[nn.Module, str, str]] = []
        for module in net.modules():
            keep_weights_apart(module)
            stores = ((module._parameters, self._parameters), (module._buffers, self._buffers))
            for store, noted in stores:
                noted += [(module, name, owner[id(t)]) for name, t in store.items() if t is not None]
        # Weights that old hooks, such as those of nn.utils.spectral_norm, compute before each pass.
        self._computed = [
            (module, name)
            for module in net.modules()
            if module._forward_pre_hooks
            for name, value in module.__dict__.items()
            if isinstance(value, Tensor)
        ]
        self.release()

    def release(self) -> None:
        """Let go of all tensors, so that the shell can be copied and keeps nothing alive."""
        for module, name, _ in self._parameters:
            module._parameters.pop(name, None)
            setattr(module, name, None)
        for module, name, _ in self._buffers:
            module._buffers[name] = None
        for module, name in self._computed:
            if isinstance(weight := module.__dict__.get(name), Tensor):
                module.__dict__[name] = weight.detach()

    def apply_to_constants(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Change plain tensors of modules that see to them in an `_apply` of their own."""
        for module in self.net.modules():
            if type(module)._apply is not nn.Module._apply:
                module.__dict__.update({key: fn(t) for key, t in module.__dict__.items() if isinstance(t, Tensor)})

    def run(self, row: dict[str, Tensor], x: Any, keys: Callable[[], Tensor], output: Output | WholeOutput) -> Any:
        """Return what the member says of a batch with these tensors, and with dropout by this key."""
        row.update(dropout_keys(self.net, keys))
        for module, name, source in self._parameters:
            value = row[source]
            # Through setattr: recurrent layers keep a second list of their weights up to date there. A Parameter would be
            # registered by it, so it is lent as a view.
            setattr(module, name, value.view_as(value) if isinstance(value, nn.Parameter) else value)
        for module, name, source in self._buffers:
            module._buffers[name] = row[source]
        said = pick(call_on_lent(self.net, x), output)
        for module, name, source in self._buffers:
            now = module._buffers[name]
            if now is not None and now is not row[source]:  # replaced, rather than changed in place
                row[source].copy_(now.detach())
        rewind_dropout(self.net)
        return said

    def materialise(self, row: Tensors) -> nn.Module:
        """Return an independent plain module with copies of these tensors."""
        self.release()
        twin = copy.deepcopy(self)
        copies = {source: row[source].detach().clone() for _, _, source in (*twin._parameters, *twin._buffers)}
        made = {source: nn.Parameter(copies[source], row[source].requires_grad) for _, _, source in twin._parameters}
        for module, name, source in twin._parameters:
            del module.__dict__[name]
            setattr(module, name, made[source])
        for module in twin.net.modules():
            if isinstance(module, nn.RNNBase):
                module.__dict__.pop("flatten_parameters")
                module.flatten_parameters()
        for module, name, source in twin._buffers:
            module._buffers[name] = copies[source]
        return twin.net


def join(outputs: Sequence[Any]) -> Any:
    """Stack what members returned, or say what is wrong with it."""
    if isinstance(outputs[0], Tree):
        leaves = zip(*(output.leaves for output in outputs), strict=True)
        return Tree([join(parts) for parts in leaves], outputs[0].spec)
    if len(shapes := {tuple(output.shape) for output in outputs}) > 1:
        raise ValueError(f"Members must give outputs of one shape; got {' and '.join(map(str, sorted(shapes)))}.")
    return torch.stack(list(outputs))


FASTER_APART = "convolutions are faster one member at a time"
PROBE_ROWS = 4
PROBE_MEMBERS = 2

# Kernels of another algorithm differ by rounding, which grows with depth; a wrong program differs by far more.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_TOLERANCE_OF_HALF = 5e-2

Run = Callable[[Tensors, Tensor], Tensor]


def why_not_vectorised(
    loop: Run, vectorised: Run, weights: Callable[[], Tensors], buffers: Tensors, x: Tensor, trainable: Collection[str]
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
        line = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        return f"vmap cannot run it ({line[:120]})"
    with torch.autocast(device, enabled=False):
        wanted = _attempt(loop, weights(), buffers, x, trainable)
    compared = [*chain(*wanted.values()), *got[_OUTPUTS]]
    # By the rounding of the coarsest of them.
    coarse = (_TOLERANCES.get(tensor.dtype, _TOLERANCE_OF_HALF) for tensor in compared if tensor.is_floating_point())
    tolerance = max(coarse, default=0.0)
    for differs, part in wanted.items():
        # Against the largest of all: a bias before BatchNorm has no gradient but rounding.
        scale = max([1e-6, *map(_largest, part)])
        if not all(_close(own, other, tolerance, scale) for own, other in zip(got[differs], part, strict=True)):
            return f"{differs} from the loop's"
    return None


class RulesOfVmap(TorchFunctionMode):
    """Mends what torch's rules for vmap get wrong.

    BatchNorm computes in the precision of its statistics: under autocast its inputs have fewer digits, and the rules make kernels that
    want both alike. No gradient reaches the padding row of an embedding: the rules leave it out for the first member only.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm and len(args) > 1 and args[1] is not None:
            args = (args[0].to(args[1].dtype), *args[1:])
        # A function hands what follows its tensors on by name.
        if func is F.embedding and kwargs and (padding := kwargs.get("padding_idx")) is not None:
            rows: Tensor = func(*args, **kwargs | {"padding_idx": None})
            return torch.where((args[0] == padding)[..., None], rows.detach(), rows)
        return func(*args, **(kwargs or {}))


# What an attempt gave, outputs, each buffer and gradients, by how one says that it differs.
_Attempt: TypeAlias = dict[str, list[Tensor]]
_OUTPUTS = "its outputs under vmap differ"


def _attempt(run: Run, weights: Tensors, buffers: Tensors, x: Tensor, trainable: Collection[str]) -> _Attempt:
    """Run on copies of the buffers; return what the pass gave."""
    copies = copies_of(buffers)
    leaves = [t.requires_grad_() for n, t in weights.items() if n in trainable and t.is_floating_point()]
    gradients: Sequence[Tensor] = ()
    with torch.enable_grad():
        outputs = run({**weights, **copies}, x)
        if leaves and outputs.requires_grad:
            # Not their sum, which may be a constant: softmax.
            places = torch.arange(outputs.numel(), device=outputs.device).reshape(outputs.shape)
            loss = (outputs * places.cos().to(outputs.dtype)).sum()
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    # Whole gradients of two attempts would be the most memory that a run takes.
    compared = [part for g in gradients for part in ([g] if g.ndim < 3 else [g.sum(-1), g.norm(dim=-1)])]
    after = {f"buffer {name!r} after a pass under vmap differs": [tensor.detach()] for name, tensor in copies.items()}
    return {_OUTPUTS: [outputs.detach()], **after, "its gradients under vmap differ": compared}


def _largest(tensor: Tensor) -> float:
    real = tensor.numel() > 0 and tensor.is_floating_point()
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if real else 0.0


def _close(a: Tensor, b: Tensor, tolerance: float, scale: float) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)
