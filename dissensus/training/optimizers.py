"""What training needs once: parameters packed into rows, and the optimizer that was asked for made of them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
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


class SeparateOptimizers:
    """Any torch optimizer, one for each member's own slices; for those whose update is not elementwise."""

    def __init__(self, factory: Factory, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.tensors: list[dict[str, Tensor]] = [{} for _ in blocks]
        self.columns: list[dict[str, Tensor]] = [{} for _ in blocks]
        self._rows = [[_optimizer_of(factory, block, row) for row in range(len(block.flat))] for block in blocks]

    def state(self) -> dict[str, Tensor]:
        """Return the optimizers' state as tensors by name."""
        return {
            f"{index}.{row}.{position}.{key}": torch.as_tensor(value)
            for index, rows in enumerate(self._rows)
            for row, (parameters, optimizer) in enumerate(rows)
            for position, parameter in enumerate(parameters.values())
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        for name, value in tensors.items():
            index, row, position, key = name.split(".", 3)
            parameters, optimizer = self._rows[int(index)][int(row)]
            parameter = list(parameters.values())[int(position)]
            home = torch.device("cpu") if value.ndim == 0 else parameter.device
            optimizer.state[parameter][key] = value.to(home, copy=True)

    def update(self, state: TrainState, index: int, gradient: Tensor, factor: Tensor, rows: Tensor | None) -> None:
        """Take one step on block `index`, member by member, straight on the block."""
        block = self.blocks[index]
        scale = float(factor)
        for place, row in enumerate(range(len(block.flat)) if rows is None else rows.tolist()):
            parameters, optimizer = self._rows[index][row]
            pieces = block.unpack(gradient[place : place + 1])
            for name, parameter in parameters.items():
                parameter.grad = pieces[name].reshape(parameter.shape)
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * scale
            optimizer.step()


def _optimizer_of(factory: Factory, block: Block, row: int) -> tuple[dict[str, nn.Parameter], Optimizer]:
    """Return one row's parameters as leaves that share the block's memory, and an optimizer of them as the member names them."""
    views = block.unpack(block.flat[row : row + 1])
    parameters = {name: nn.Parameter((v[0] if block.stacked else v).detach()) for name, v in views.items()}
    plain = []
    for name, parameter in parameters.items():
        head, _, rest = name.partition(".")
        plain.append((rest.partition(".")[2] if head == "nets" else rest if head == "net" else name, parameter))
    return parameters, factory(plain)


def make_optimizer(
    optimizer: str | type[Optimizer] | Factory,
    blocks: Sequence[Block],
    num_members: int,
    lr: Rates,
    weight_decay: Rates | None,
    options: Mapping[str, Any],
) -> RowOptimizer | SeparateOptimizers:
    """Make the optimizer that `fit` was asked for: row-wise where its update is elementwise, one a member otherwise."""
    rates = per_member(lr, num_members, "lr", blocks)
    has_complex = any(block.flat.is_complex() for block in blocks)
    if isinstance(optimizer, str):
        rule = _named_rule(optimizer, options)
        decay = rule.default_decay if weight_decay is None else weight_decay
        decays = per_member(decay, num_members, "weight_decay", blocks)
        if has_complex:
            raise ValueError(f"Complex parameters need a torch optimizer class, torch.optim.Adam; got {optimizer!r}.")
        return RowOptimizer(rule, blocks, rates, decays)
    factory = _factory_of(optimizer, lr, weight_decay, options)
    _, trial = _optimizer_of(factory, blocks[0], 0)
    if not isinstance(trial, Optimizer):
        raise ValueError(f"`optimizer` must make a torch optimizer; it returned {type(trial).__name__}.")
    if isinstance(trial, torch.optim.LBFGS):
        raise ValueError("LBFGS calls the loss several times a step, which `fit` does not. Choose another optimizer.")
    same_rule = _row_rule(trial)
    if same_rule is None or has_complex:
        return SeparateOptimizers(factory, blocks)
    columns = [_columns(factory, block) for block in blocks]
    return RowOptimizer(same_rule, blocks, [1.0] * num_members, [0.0] * num_members, columns)


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
        if options or weight_decay is not None:
            raise ValueError("An optimizer factory sets its own options and decay; leave those of `fit` out.")
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
        rules.append(kind(**{f.name: group[f.name] for f in fields(kind)}))
    return rules[0] if all(rule == rules[0] for rule in rules) else None


def _columns(factory: Factory, block: Block) -> dict[str, Tensor]:
    """Return learning rate and decay of every column, from the groups that the factory makes of one member."""
    row, optimizer = _optimizer_of(factory, block, 0)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for name, key in (("column_lr", "lr"), ("column_decay", "weight_decay")):
        numbers = [float(group_of[id(p)][key]) if id(p) in group_of else 0.0 for p in row.values()]
        columns = torch.tensor(numbers, dtype=torch.float64).repeat_interleave(torch.tensor(block.sizes))
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
