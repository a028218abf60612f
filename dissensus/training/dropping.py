"""Going on without some members: what of the data orders and the training state belongs to those that stay."""

from collections.abc import Sequence

from dissensus.training.feeds import Feed, OrderedFeed
from dissensus.training.packing import Block, aligned_rows
from dissensus.training.step import State


def keep_orders(feed: Feed, keep: Sequence[int]) -> None:
    """Let go of the data orders of members that are gone."""
    if isinstance(feed, OrderedFeed) and feed.own:
        feed.order_keys = feed.order_keys[list(keep)]
        feed.tensors = {**feed.tensors, "order": feed.tensors["order"][list(keep)].clone()}


def carry_over(
    old: State, old_blocks: Sequence[Block], new: State, new_blocks: Sequence[Block], keep: Sequence[int]
) -> None:
    """Copy what goes on from a state with more members: position, logged sums, and the optimizer's rows."""
    for name in ("index", "position", "plateau"):
        new[name].copy_(old[name])
    for name, tensor in old.items():
        if name.startswith(("sum.", "seen.")):
            new[name] = aligned_rows(tensor[list(keep)]) if tensor.ndim else tensor
        elif name.startswith("batch."):
            new[name] = tensor
    kept = [
        i for i, b in enumerate(old_blocks) if b.stacked or (b.members is not None and b.members[0] in keep)
    ]
    for now, before in enumerate(kept):
        rows = list(keep) if old_blocks[before].stacked else [0]
        for name in [n for n in old if n.startswith("optimizer.") and n.endswith(f".{before}")]:
            if "column" not in name:
                new[f"{name.removesuffix(f'.{before}')}.{now}"].copy_(old[name][rows])
