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
    """What a step is a function of, changed by it in place; lists have one entry for each block of parameters."""

    parameters: Annotated[list[Tensor], Part("row", saved=True)]  # trained ones, flat, `(rows, columns)`
    optimizer: Annotated[list[dict[str, Tensor]], Part("row", saved=True)]  # moments, counts, rates, by name
    averages: Annotated[list[dict[str, Tensor]], Part("row", saved=True)]  # of the parameters, and of how many steps
    columns: Annotated[list[dict[str, Tensor]], Part("shared", saved=False)]  # their rates, where groups differ
    buffers: Annotated[dict[str, Tensor], Part("member", saved=True)]
    frozen: Annotated[dict[str, Tensor], Part("member", saved=False)]  # parameters that are not trained
    sums: Annotated[dict[str, Tensor], Part("row", saved=True)]  # logged since the last check: `()` or `(members,)`
    seen: Annotated[dict[str, Tensor], Part("row", saved=True)]  # how many steps each sum is of
    noise_keys: Annotated[Tensor, Part("row", saved=False)]  # of each member
    shared_key: Annotated[Tensor, Part("shared", saved=False)]  # of the noise that all members share
    index: Annotated[Tensor, Part("shared", saved=True)]  # number of the step
    plateau: Annotated[Tensor, Part("shared", saved=True)]  # factor on the learning rate that a plateau has left
    factors: Annotated[Tensor, Part("shared", saved=False)]  # the schedule's, for every step
    data: Annotated[dict[str, Any], Part("shared", saved=False)]  # the feed's tensors, the same dictionary
    streams: Annotated[dict[str, Tensor], Part("shared", saved=False)]  # further data, such as unlabelled inputs

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
