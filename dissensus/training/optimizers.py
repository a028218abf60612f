"""What training needs once: parameters packed into rows, and the optimizer that was asked for made of them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from dissensus._signatures import checked, whole_number
from dissensus.members import Members
from dissensus.randomness import Noise, derive
from dissensus.training.state import TrainState
from dissensus.training.step import ALIGNMENT, SGD, Adam, AdamW, Block, RowOptimizer, Rule

# Bytes of a member's row of parameters. A gradient is put together from those of a row's parameters, which takes twice their
# memory while it is done: with one row for everything that would be the most memory that training takes.
ROW_BYTES = 8 * 2**20


def _groups(parameters: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Return parameters of one dtype each, in order, as few groups as keep rows short; `count` is the number of rows."""
    groups: list[dict[str, nn.Parameter]] = []
    for dtype in dict.fromkeys(p.dtype for p in parameters.values()):
        groups.append({})
        for name, parameter in parameters.items():
            if parameter.dtype == dtype:
                if groups[-1] and sum(p.nbytes for p in (*groups[-1].values(), parameter)) > count * ROW_BYTES:
                    groups.append({})
                groups[-1][name] = parameter
    return groups


def pack(members: Members) -> list[Block]:
    """Move every trainable parameter of the ensemble into flat arrays; the registered ones become views of them."""
    blocks = []
    for rows, names in members.parameter_rows():
        trainable = {name: members.get_parameter(name) for name in names if members.get_parameter(name).requires_grad}
        stacked = rows is not None and members.stacked
        for chosen in _groups(trainable, len(rows) if stacked and rows is not None else 1):
            block = _packed(chosen, rows, stacked)
            blocks.append(block)
            for name, view in block.unpack(block.flat).items():
                members.get_parameter(name).data = view
    if not blocks:
        raise ValueError("There is nothing to train: no parameter of the ensemble requires a gradient.")
    return blocks


def _packed(parameters: Mapping[str, nn.Parameter], rows: Sequence[int] | None, stacked: bool) -> Block:
    """Return parameters of one dtype as a block of so many rows; `Block.unpack` reads them in the same order."""
    values = [parameter.detach() for parameter in parameters.values()]
    count = len(values[0]) if stacked else 1
    shapes = tuple(p.shape[1:] if stacked else p.shape for p in values)
    columns = [
        (p.movedim(-3, -1) if len(shape) == 4 else p).reshape(count, -1)
        for p, shape in zip(values, shapes, strict=True)
    ]
    padding = columns[0].new_zeros(count, -sum(c.shape[1] for c in columns) % ALIGNMENT)
    flat = torch.cat([*columns, padding], dim=1).contiguous()
    return Block(tuple(parameters), shapes, stacked, None if rows is None else tuple(rows), flat)


def detach(members: nn.Module, blocks: Sequence[Block]) -> None:
    """Give every registered parameter memory of its own again."""
    for block in blocks:
        for name in block.names:
            parameter = members.get_parameter(name)
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def check_attached(members: nn.Module, blocks: Sequence[Block]) -> None:
    """Refuse to go on where somebody froze, unfroze or replaced parameters in the middle of a run, which would not notice."""
    home = {name: block.flat.untyped_storage().data_ptr() for block in blocks for name in block.names}
    found = dict(members.named_parameters())
    if gone := [name for name in home if name not in found]:
        raise ValueError(f"A callback removed {gone[0]!r}, which is being trained. Do so between two calls of `fit`.")
    for name, parameter in found.items():
        if parameter.requires_grad != (name in home):
            what = "unfroze" if parameter.requires_grad else "froze"
            raise ValueError(f"A callback {what} {name!r}: what trains is fixed. Call `fit` once for each stage.")
        if home.get(name, 0) not in (0, parameter.untyped_storage().data_ptr()):
            raise ValueError(f"A callback replaced the tensor of {name!r}. Change it in place, with `copy_`.")


RULES: Mapping[str, type[Rule]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
TORCH_RULES: Mapping[type[Optimizer], type[Rule]] = {getattr(torch.optim, r.__name__): r for r in RULES.values()}

Factory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
# One for all members, or one for each.
Rates = float | Sequence[float]


# Who a row belongs to where members share it.
_ALL = -1


def _owners(block: Block) -> Sequence[int]:
    """Return whose each row of a block is: a member's place, or `_ALL`."""
    return (_ALL,) if block.members is None else block.members


class _MemberOptimizer:
    """One member's parameters as leaves that share the blocks' memory, by registered name, and an optimizer of them."""

    def __init__(self, factory: Factory, members: Members, blocks: Sequence[Block], owner: int) -> None:
        leaves = _leaves(blocks, owner)
        # In the network's order, whatever blocks they lie in.
        self.parameters = {n: leaves[n] for _, names in members.parameter_rows() for n in names if n in leaves}
        prefix = members.prefix(owner)
        self.optimizer = factory([(name.removeprefix(prefix), leaf) for name, leaf in self.parameters.items()])
        if not isinstance(self.optimizer, Optimizer):
            raise ValueError(f"`optimizer` must make a torch optimizer; it returned {type(self.optimizer).__name__}.")
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS calls the loss several times a step, which `fit` does not. Choose another optimizer."
            )
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._made = [_settings(group) for group in self.optimizer.param_groups]

    def step(self, scale: float) -> None:
        """Take one step with the gradients that the parameters have, at this share of the rates."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        self.optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return what the optimizer keeps of each parameter, and what of its groups is not as it was made, as tensors by name."""
        found, places = {}, {id(parameter): place for place, parameter in enumerate(self.parameters.values())}
        for parameter, kept in self.optimizer.state.items():
            if id(parameter) not in places:
                raise self._not_kept(parameter, kept)
            for key, value in kept.items():
                form, tensor = self._as_tensor(key, value)
                found[f"state.{places[id(parameter)]}.{form}.{key}"] = tensor
        for place, (group, made) in enumerate(zip(self.optimizer.param_groups, self._made, strict=True)):
            now = _settings(group)
            for key, value in group.items():
                if key != "params" and (isinstance(value, Tensor) or now[key] != made.get(key)):
                    form, tensor = self._as_tensor(key, value)
                    found[f"group.{place}.{form}.{key}"] = tensor.clone()  # groups may hold the same tensor
        return found

    def _as_tensor(self, key: str, value: Any) -> tuple[str, Tensor]:
        """Return a value as a tensor that loses nothing, and what it was."""
        if isinstance(value, Tensor):
            return "host" if value.ndim == 0 and value.device.type == "cpu" else "tensor", value
        if value is None:
            return "none", torch.zeros(())
        if isinstance(value, bool | int | float):
            return "number", torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        raise self._not_kept(key, value)

    def _not_kept(self, key: Any, value: Any) -> ValueError:
        return ValueError(
            f"{type(self.optimizer).__name__} keeps {key!r} ({type(value).__name__}), and a checkpoint holds numbers and tensors of "
            "parameters and of their groups. Train without `checkpoint_dir`, or choose another optimizer."
        )

    def take(self, name: str, tensor: Tensor) -> bool:
        """Take back one of the tensors of `state`; return whether it is one."""
        what, place, form, key = (name.split(".", 3) + [""] * 3)[:4]
        if what not in ("state", "group"):
            return False
        parameters, optimizer = list(self.parameters.values()), self.optimizer
        holder = optimizer.state[parameters[int(place)]] if what == "state" else optimizer.param_groups[int(place)]
        if form in ("number", "none"):
            holder[key] = tensor.item() if form == "number" else None
        else:
            holder[key] = tensor.to("cpu" if form == "host" else parameters[0].device, copy=True)
        return True


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    """Return what a group of parameters holds beside them and beside tensors, as texts."""
    return {key: repr(value) for key, value in group.items() if key != "params" and not isinstance(value, Tensor)}


def _leaves(blocks: Sequence[Block], owner: int) -> dict[str, nn.Parameter]:
    """Return a member's parameters in all blocks, as leaves that share their memory."""
    leaves: dict[str, nn.Parameter] = {}
    for block in (block for block in blocks if owner in _owners(block)):
        row = _owners(block).index(owner)
        views = block.unpack(block.flat[row : row + 1])
        leaves |= {name: nn.Parameter((v[0] if block.stacked else v).detach()) for name, v in views.items()}
    return leaves


class SeparateOptimizers:
    """Any torch optimizer, one for each member's own parameters; for those whose update is not elementwise."""

    def __init__(self, blocks: Sequence[Block], by_owner: Mapping[int, _MemberOptimizer]) -> None:
        self.blocks = blocks
        self.tensors: list[dict[str, Tensor]] = [{} for _ in blocks]
        self.columns: list[dict[str, Tensor]] = [{} for _ in blocks]
        self._by_owner = by_owner
        self._scales: dict[int, float] = {}

    def state(self) -> dict[str, Tensor]:
        """Return the optimizers' state as tensors by name, which begins with the member."""
        return {f"{owner}.{name}": t for owner, own in self._by_owner.items() for name, t in own.state().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Take back what `state` gave; return what does not fit, None if all does."""
        for name, tensor in tensors.items():
            owner, _, rest = name.partition(".")
            if int(owner) not in self._by_owner or not self._by_owner[int(owner)].take(rest, tensor):
                return name
        return None

    def update(self, state: TrainState, index: int, gradient: Tensor, factor: Tensor, rows: Tensor | None) -> None:
        """Hand members their gradients of block `index`; `step` changes it."""
        block, scale = self.blocks[index], float(factor)
        for place, row in enumerate(range(len(block.flat)) if rows is None else rows.tolist()):
            owner = _owners(block)[row]
            for name, piece in block.unpack(gradient[place : place + 1]).items():
                parameter = self._by_owner[owner].parameters[name]
                parameter.grad = piece.reshape(parameter.shape)
            self._scales[owner] = scale

    def step(self) -> None:
        """Have each member that has gradients take its step, straight on the blocks."""
        for owner, scale in self._scales.items():
            self._by_owner[owner].step(scale)
        self._scales.clear()


def make_optimizer(
    optimizer: str | type[Optimizer] | Factory,
    members: Members,
    blocks: Sequence[Block],
    lr: Rates,
    weight_decay: Rates | None,
    options: Mapping[str, Any],
) -> RowOptimizer | SeparateOptimizers:
    """Make the optimizer that `fit` was asked for: row-wise where its update is elementwise, one a member otherwise."""
    _check_dense(members)
    count = members.num_trained
    has_complex = any(block.flat.is_complex() for block in blocks)
    if isinstance(optimizer, str):
        rule = _named_rule(optimizer, options)
        rates = per_member(lr, count, "lr", blocks)
        decays = per_member(rule.default_decay if weight_decay is None else weight_decay, count, "weight_decay", blocks)
        if has_complex:
            raise ValueError(f"Complex parameters need a torch optimizer class, torch.optim.Adam; got {optimizer!r}.")
        return RowOptimizer(rule, blocks, rates, decays)
    return _of_factory(_factory_of(optimizer, lr, weight_decay, options), members, blocks, has_complex)


def _of_factory(
    factory: Factory, members: Members, blocks: Sequence[Block], has_complex: bool
) -> RowOptimizer | SeparateOptimizers:
    """Return what a factory makes, row-wise where one rule is all of it."""
    # The rows of a block are alike: the groups of the first one's owner are those of all.
    firsts = dict.fromkeys(_owners(block)[0] for block in blocks)
    made = {owner: _MemberOptimizer(factory, members, blocks, owner) for owner in firsts}
    same, *others = [_row_rule(own.optimizer) for own in made.values()]
    if same is not None and not has_complex and others == [same] * len(others):
        columns = [_columns(made[_owners(block)[0]], block) for block in blocks]
        ones = [1.0] * members.num_trained
        return RowOptimizer(same, blocks, ones, [0.0] * len(ones), columns)
    owners = dict.fromkeys(chain.from_iterable(map(_owners, blocks)))
    more = {owner: _MemberOptimizer(factory, members, blocks, owner) for owner in owners if owner not in made}
    return SeparateOptimizers(blocks, made | more)


def _check_dense(members: Members) -> None:
    """Refuse layers whose gradients are sparse."""
    for name, layer in members.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            raise ValueError(
                f"{name!r} was made with sparse=True, and members train by dense gradients. Make it with sparse=False."
            )


def _named_rule(name: str, options: Mapping[str, Any]) -> Rule:
    if name not in RULES:
        raise ValueError(
            f"`optimizer` must be one of {', '.join(RULES)}, a torch optimizer class, or a function of named parameters; got {name!r}."
        )
    known = {f.name for f in fields(RULES[name])}
    if unknown := set(options) - known:
        raise ValueError(f"{name} has no option {sorted(unknown)[0]!r}; it takes {', '.join(sorted(known))}.")
    return RULES[name](**options)


def _factory_of(
    optimizer: type[Optimizer] | Factory, lr: Rates, weight_decay: Rates | None, options: Mapping[str, Any]
) -> Factory:
    """Return the function that makes an optimizer of one member's named parameters."""
    if not isinstance(optimizer, type):
        if options or weight_decay is not None or not isinstance(lr, int | float):
            raise ValueError(
                "An optimizer factory sets rates, decay and options itself; leave a list of `lr`, `weight_decay` and "
                "`optimizer_options` out."
            )
        return optimizer
    kind = optimizer
    if not isinstance(lr, int | float) or not isinstance(weight_decay, int | float | None):
        raise ValueError("Rates for each member are for sgd, adam and adamw by name; give one number here.")
    settings = {"lr": lr, **options} | ({} if weight_decay is None else {"weight_decay": weight_decay})
    return lambda named: kind([parameter for _, parameter in named], **settings)


def _row_rule(optimizer: Optimizer) -> Rule | None:
    """Return the row-wise rule that is this torch optimizer with all its groups of parameters, None if there is none."""
    rules = []
    for group in optimizer.param_groups:
        kind = TORCH_RULES.get(type(optimizer))
        if kind is None or group.get("amsgrad") or group.get("maximize"):
            return None
        if kind is Adam and group.get("decoupled_weight_decay"):
            kind = AdamW
        try:
            rules.append(kind(**{f.name: group[f.name] for f in fields(kind)}))
        except ValueError:  # torch checks its defaults only, not what a group has instead
            return None
    return rules[0] if all(rule == rules[0] for rule in rules) else None


def _columns(own: _MemberOptimizer, block: Block) -> dict[str, Tensor]:
    """Return learning rate and decay of every column of a block, from the groups that the factory makes of one member."""
    group_of = {id(p): group for group in own.optimizer.param_groups for p in group["params"]}
    found = {}
    for name, key in (("column_lr", "lr"), ("column_decay", "weight_decay")):
        groups = [group_of.get(id(own.parameters[parameter]), {key: 0.0}) for parameter in block.names]
        numbers = torch.tensor([float(group[key]) for group in groups], dtype=torch.float64)
        columns = numbers.repeat_interleave(torch.tensor(block.sizes))
        found[name] = F.pad(columns, (0, block.padding)).to(block.flat.device)[None]
    return found


def per_member(value: Rates, count: int, name: str, blocks: Sequence[Block]) -> list[float]:
    """Return one number a member."""
    if not isinstance(value, Sequence):
        return [float(value)] * count
    values = [float(v) for v in value]
    if len(values) != count:
        raise ValueError(f"`{name}` must be one number or one for each of {count} members; got {len(values)}.")
    if any(block.members is None for block in blocks):
        raise ValueError(f"`{name}` cannot differ between members that share their parameters; give one number.")
    return values


@checked
def diverse_hyperparameters(
    num_members: int,
    seed: int = 0,
    *,
    lr: tuple[float, float] | None = (3e-4, 3e-3),
    weight_decay: tuple[float, float] | None = (1e-4, 1e-1),
    **others: tuple[float, float],
) -> dict[str, list[float]]:
    """Draw hyperparameters for each member: `ds.fit(ens, data, **diverse_hyperparameters(5))` is a hyper-deep ensemble.

    Each value is drawn between two bounds: evenly on a logarithmic scale, or evenly where the lower bound is 0. Member j's values
    depend on `(seed, j)` and the name alone, so more members leave the earlier ones as they were.

    Args:
        num_members: How many members there are.
        seed: Decides the draws.
        lr: Bounds of the learning rate; None leaves it out.
        weight_decay: Bounds of the weight decay; None leaves it out.
        **others: Bounds of values that `fit` does not take member by member, such as a dropout rate, for making the members.

    Returns:
        One list of `num_members` numbers for each name.

    Example:
        >>> drawn = diverse_hyperparameters(3, weight_decay=None, dropout=(0.0, 0.5))
        >>> sorted(drawn), all(3e-4 <= rate <= 3e-3 for rate in drawn["lr"])
        (['dropout', 'lr'], True)

    References:
        Wenzel et al., 2020, <https://arxiv.org/abs/2006.13570>.
    """
    num_members = whole_number("num_members", num_members, 1)
    found: dict[str, list[float]] = {}
    for name, bounds in {"lr": lr, "weight_decay": weight_decay, **others}.items():
        if bounds is None:
            continue
        low, high = bounds
        if not 0 <= low <= high < math.inf:
            raise ValueError(f"`{name}` must be two bounds, 0 <= low <= high; got {bounds}.")
        keys = torch.tensor([derive(seed, "hyperparameter", name, member) for member in range(num_members)])
        places = Noise(keys).uniform(1).flatten().double().tolist()
        found[name] = [low * (high / low) ** place if low else high * place for place in places]
    return found
