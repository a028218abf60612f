"""What a training step is a function of, as typed state: run on as it is, cut into members, saved, loaded and carried over."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from dissensus.training.step import Block

# How one member's part is taken: without its axis (what its network sees), as one row, or the whole, which members share.
Rows = Literal["member", "row", "shared"]


@dataclass(frozen=True)
class Part:
    """What of a part is one member's, and whether checkpoints hold it."""

    rows: Rows
    saved: bool


@dataclass
class TrainState:
    """What a step is a function of, changed by it in place.

    Attributes:
        parameters: The trained parameters, one flat array `(rows, columns)` for each block.
        optimizer: What the optimizer keeps of each block: moments, counts, rates, by name.
        averages: The running average of each block's parameters and its number of steps, where one is kept.
        columns: Rates and decays of single columns, for each block, where parameter groups differ.
        buffers: Buffers of the networks by name.
        frozen: Parameters that are not trained, by name.
        sums: Logged parts, summed since the last check: `()`, or one number a member.
        seen: How many steps each sum is of.
        noise_keys: Key of each member's noise.
        shared_key: Key of the noise that all members share.
        index: Number of the step.
        plateau: Factor on the learning rate that a plateau has left.
        factors: The schedule's factor for every step.
        data: The feed's tensors, the same dictionary; see `Feed.tensors`.
        streams: Further data, such as unlabelled inputs, by name.
    """

    parameters: Annotated[list[Tensor], Part("row", saved=True)]
    optimizer: Annotated[list[dict[str, Tensor]], Part("row", saved=True)]
    averages: Annotated[list[dict[str, Tensor]], Part("row", saved=True)]
    columns: Annotated[list[dict[str, Tensor]], Part("shared", saved=False)]
    buffers: Annotated[dict[str, Tensor], Part("member", saved=True)]
    frozen: Annotated[dict[str, Tensor], Part("member", saved=False)]
    sums: Annotated[dict[str, Tensor], Part("row", saved=True)]
    seen: Annotated[dict[str, Tensor], Part("row", saved=True)]
    noise_keys: Annotated[Tensor, Part("row", saved=False)]
    shared_key: Annotated[Tensor, Part("shared", saved=False)]
    index: Annotated[Tensor, Part("shared", saved=True)]
    plateau: Annotated[Tensor, Part("shared", saved=True)]
    factors: Annotated[Tensor, Part("shared", saved=False)]
    data: Annotated[dict[str, Any], Part("shared", saved=False)]
    streams: Annotated[dict[str, Tensor], Part("shared", saved=False)]

    def leaves(self) -> list[Tensor]:
        """Return every tensor, in a fixed order."""
        return tree_leaves([getattr(self, part) for part in PARTS])

    def names(self) -> list[str]:
        """Return where each of the leaves is, such as `buffers.net.1.running_mean`."""
        return [name for part in PARTS for name, _ in _walk(getattr(self, part), part)]

    def with_leaves(self, leaves: Sequence[Tensor]) -> "TrainState":
        """Return a state like this one of other tensors."""
        left = iter(leaves)
        return self._changed(lambda *_: next(left))

    def row(self, index: int, own_order: bool) -> "TrainState":
        """Return one member's part as views; `own_order`: whether members go through the data each in its own order."""

        def part(rows: Rows, tensor: Tensor) -> Tensor:
            if tensor.ndim == 0 or rows == "shared":
                return tensor
            return tensor[index] if rows == "member" else tensor[index : index + 1]

        one = self._changed(part)
        if own_order:
            one.data = {**self.data, "order": self.data["order"][index : index + 1]}
        return one

    def saved(self, *, without: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return what a checkpoint holds, by name, except these parts."""
        return {
            name: tensor
            for part, kind in PARTS.items()
            if kind.saved and part not in without
            for name, tensor in _walk(getattr(self, part), part)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Take in place what `saved` gave, or some of it; return what does not fit, None if all does."""
        known = self.saved()
        for name, tensor in tensors.items():
            if name not in known or known[name].shape != tensor.shape:
                return name
            known[name].copy_(tensor)
        return None

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors that make the ensemble what it is, by name."""
        return self.saved(without=("optimizer", "averages", "sums", "seen", "index", "plateau"))

    def carry_over(self, old: "TrainState", blocks: "Sequence[Block]", keep: Sequence[int]) -> None:
        """Go on from a state with more members, whose parameters lay in these blocks: position, logged sums, the optimizer's rows."""
        self.index.copy_(old.index)
        self.plateau.copy_(old.plateau)
        for logged, kept in ((old.sums, self.sums), (old.seen, self.seen)):
            for name, tensor in logged.items():
                kept[name].copy_(tensor[list(keep)] if tensor.ndim else tensor)
        left = [(place, rows) for place, block in enumerate(blocks) if (rows := block.rows_of(keep))]
        for now, before in ((self.optimizer, old.optimizer), (self.averages, old.averages)):
            for slots, (place, rows) in zip(now, left, strict=False):
                for name, tensor in slots.items():
                    tensor.copy_(before[place][name][rows])

    def _changed(self, change: Callable[[Rows, Tensor], Tensor]) -> "TrainState":
        return replace(
            self, **{name: tree_map(partial(change, part.rows), getattr(self, name)) for name, part in PARTS.items()}
        )


PARTS: dict[str, Part] = {part.name: part.type.__metadata__[0] for part in fields(TrainState)}  # type: ignore[union-attr]


def _walk(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of lists and dictionaries with their places; those of a batch share one."""
    if not isinstance(value, dict | list):
        yield from ((name, tensor) for tensor in tree_leaves(value))
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _walk(inner, f"{name}.{key}")
