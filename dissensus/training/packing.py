"""All trainable parameters of an ensemble as few flat arrays, one row a member, while it trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from dissensus.members import Members

# Columns are padded to a multiple of this, so that every row starts where vector loads and cuDNN want it.
ALIGNMENT = 64


def aligned_rows(values: Tensor) -> Tensor:
    """Return one value a row, `(rows,)`, with each row's memory as well aligned as a new tensor's."""
    spread = values.new_zeros(len(values), ALIGNMENT)[:, 0]
    return spread.copy_(values)


def computed_once(values: Tensor) -> Tensor:
    """Return few values by way of a reduction that changes nothing.

    A compiler keeps the result of a reduction; what leads to it without one, it computes again for every weight that it is
    used with. Powers and roots of a step count took three times as long so as the update itself.
    """
    return values[..., None].expand(*values.shape, 16).amax(-1)


@dataclass(frozen=True)
class Block:
    """Parameters of one dtype that share their rows: `flat` is `(rows, columns)`, each parameter a range of columns.

    Weights of 2-D convolutions lie in channels-last order, in which GPUs convolve fastest; it is an order of memory only.

    Attributes:
        names: Registered names of the parameters, in column order.
        shapes: Shape of each one's row.
        stacked: Whether a parameter's first axis is the row; if not there is one row, the whole parameter.
        members: Which member each row belongs to; None where members share the row.
        flat: The values.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    stacked: bool
    members: tuple[int, ...] | None
    flat: Tensor

    @property
    def sizes(self) -> list[int]:
        """Number of columns of each parameter."""
        return [prod(shape) for shape in self.shapes]

    @property
    def padding(self) -> int:
        """Number of columns at the end that belong to no parameter."""
        return -sum(self.sizes) % ALIGNMENT

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters as views of `flat`, which may hold fewer rows than the block."""
        # One split: its backward is a single concatenation, the gradient of the whole row.
        parts = torch.split(flat, [*self.sizes, self.padding], dim=1)
        lead = (len(flat),) if self.stacked else ()
        return {
            name: _shaped(part, lead, shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=False)
        }


def _shaped(part: Tensor, lead: tuple[int, ...], shape: torch.Size) -> Tensor:
    """Return one parameter's columns in its own shape."""
    if len(shape) != 4:
        return part.reshape(*lead, *shape)
    out, channels, height, width = shape
    return part.reshape(*lead, out, height, width, channels).movedim(-1, -3)


def _columns_of(parameter: Tensor, rows: int, shape: torch.Size) -> Tensor:
    """Return a parameter as `(rows, columns)`, in the order in which `_shaped` reads it."""
    values = parameter.detach()
    return (values.movedim(-3, -1) if len(shape) == 4 else values).reshape(rows, -1)


# Bytes of a member's row of parameters. A gradient is put together from those of a row's parameters, which takes twice their
# memory while it is done: with one row for everything that would be the most memory that training takes.
ROW_BYTES = 8 * 2**20


def _groups(parameters: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Return parameters of one dtype each, in order, as few groups as keep rows short; `count` is the number of rows."""
    groups: list[dict[str, nn.Parameter]] = []
    for dtype in dict.fromkeys(p.dtype for p in parameters.values()):
        group: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            if parameter.dtype != dtype:
                continue
            if group and sum(p.nbytes for p in (*group.values(), parameter)) > count * ROW_BYTES:
                groups.append(group)
                group = {}
            group[name] = parameter
        groups.append(group)
    return groups


def pack(members: Members) -> list[Block]:
    """Move every trainable parameter of the ensemble into flat arrays; the registered ones become views of them."""
    blocks = []
    for rows, names in members.parameter_rows():
        trainable = {
            name: members.get_parameter(name) for name in names if members.get_parameter(name).requires_grad
        }
        stacked = rows is not None and members.stacked
        count = len(rows) if stacked and rows is not None else 1
        for chosen in _groups(trainable, count):
            shapes = tuple(p.shape[1:] if stacked else p.shape for p in chosen.values())
            columns = [_columns_of(p, count, shape) for p, shape in zip(chosen.values(), shapes, strict=True)]
            padding = columns[0].new_zeros(count, -sum(c.shape[1] for c in columns) % ALIGNMENT)
            flat = torch.cat([*columns, padding], dim=1).contiguous()
            block = Block(tuple(chosen), shapes, stacked, None if rows is None else tuple(rows), flat)
            blocks.append(block)
            attach(members, block)
    if not blocks:
        raise ValueError("There is nothing to train: no parameter of the ensemble requires a gradient.")
    return blocks


def attach(members: nn.Module, block: Block) -> None:
    """Make the registered parameters views of the block."""
    for name, view in block.unpack(block.flat).items():
        members.get_parameter(name).data = view


def detach(members: nn.Module, blocks: Sequence[Block]) -> None:
    """Give every registered parameter memory of its own again."""
    for block in blocks:
        for name in block.names:
            parameter = members.get_parameter(name)
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def check_attached(members: nn.Module, blocks: Sequence[Block]) -> None:
    """Refuse to go on where somebody froze, unfroze or replaced parameters in the middle of a run, which would not notice."""
    home = {name: block.flat for block in blocks for name in block.names}
    found = dict(members.named_parameters())
    for name, parameter in found.items():
        if parameter.requires_grad != (name in home):
            what = "unfroze" if parameter.requires_grad else "froze"
            raise ValueError(
                f"A callback {what} {name!r}; which parameters train is decided when `fit` begins. Call `fit` once for each stage."
            )
        if name in home and parameter.untyped_storage().data_ptr() != home[name].untyped_storage().data_ptr():
            raise ValueError(f"A callback replaced the tensor of {name!r}. Change it in place, with `copy_`.")
    if gone := [name for name in home if name not in found]:
        raise ValueError(
            f"A callback removed {gone[0]!r}, which is being trained. Do so between two calls of `fit`."
        )
