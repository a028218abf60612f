"""Batches of cached features: gathered on the device where they fit, streamed from their file where they do not."""

import hashlib
from collections.abc import Iterator, MutableMapping

import torch
from torch import Tensor

from dissensus.data.features import CachedFeatures, as_real
from dissensus.data.sources import Triple
from dissensus.randomness import bits, derive, fold, permutation
from dissensus.training.feeds import ArrayFeed, PlacedFeed, free_memory
from dissensus.training.prefetch import Parts

# Rows that lie together in the file are read together, so many bytes of them, in an order of their own.
CHUNK_BYTES = 1 << 20
# Chunks that are in memory at once, so many bytes of them: rows are shuffled among them.
BUFFER_BYTES = 256 << 20


def fits(cached: CachedFeatures, device: torch.device) -> bool:
    """Whether features are moved to the device whole: up to their limit, or half of the memory that is free there."""
    limit = cached.resident_limit
    if limit is None:
        limit = free_memory(device) // 2
    return isinstance(cached.features, Tensor) or cached.nbytes <= limit


class FeatureFeed(ArrayFeed):
    """Features on the device. Each epoch takes every example once, from another pass than the epoch before."""

    def __init__(
        self,
        cached: CachedFeatures,
        y: Tensor,
        batch_size: int,
        order_keys: Tensor,
        own: bool,
        drop_last: bool = False,
    ) -> None:
        x = cached.resident(order_keys.device)
        self.count, self.passes = cached.num_examples, cached.passes
        super().__init__((x[: self.count], y[: self.count], None), batch_size, order_keys, own, drop_last)
        self.tensors = {**self.tensors, **dict(zip(self.layout.names, (x, y), strict=True))}

    def identity(self) -> str:
        """Return what tells other features apart, and how often the data was gone through for them."""
        return f"features, {self.passes} passes, {super().identity()}"

    def epoch(self, number: int, skip: int, state: MutableMapping[str, Tensor]) -> Iterator[int]:
        """Draw the epoch's order, and from which pass each example is taken."""
        order = permutation(fold(self.order_keys, number), self.count)
        if self.passes > 1:
            first = bits(fold(self.order_keys, -2), self.count).remainder(self.passes)
            order = order + self.count * (first.gather(-1, order) + number).remainder(self.passes)
        state["order"].copy_(order)
        yield from self.sizes[skip:]

    def batch(self, state: MutableMapping[str, Tensor], size: int) -> Triple:
        """Gather the batch, in the precision in which networks compute."""
        x, y, weights = super().batch(state, size)
        assert isinstance(x, Tensor)
        return as_real(x), y, weights


class MappedFeed(PlacedFeed):
    """Features read from their file by a thread that is ahead of training; all members share the batches.

    Chunks of neighbouring rows are read in a shuffled order, and rows are shuffled among as many chunks as the buffer
    holds: the order is a function of (seed, epoch). Each epoch takes every example once; a chunk comes from another pass
    than in the epoch before.
    """

    def __init__(
        self,
        cached: CachedFeatures,
        y: Tensor,
        batch_size: int,
        seed: int,
        device: torch.device,
        drop_last: bool = False,
    ) -> None:
        super().__init__(device)
        self.cached, self.y, self.seed = cached, y, seed
        self.batch_size = min(batch_size, cached.num_examples)
        full, rest = divmod(cached.num_examples, self.batch_size)
        self.steps_per_epoch = full + bool(rest and not drop_last)
        self.smallest = rest if rest and not drop_last else self.batch_size
        row_bytes = max(1, cached.nbytes // len(cached))
        self.chunk = max(1, CHUNK_BYTES // row_bytes)
        self.chunks_at_once = max(1, BUFFER_BYTES // (self.chunk * row_bytes))

    def identity(self) -> str:
        """Return sizes, and a digest of the first rows and targets."""
        digest = hashlib.sha256(self.cached.stored_rows(0, 32).cpu().numpy().tobytes())
        digest.update(self.y[:4096].cpu().numpy().tobytes())
        return (
            f"features from a file, {self.cached.passes} passes, {self.cached.num_examples} examples in batches of "
            f"{self.batch_size}, chunks of {self.chunk} by {self.chunks_at_once}, {digest.hexdigest()[:12]}"
        )

    def epoch(self, number: int, skip: int, state: MutableMapping[str, Tensor]) -> Iterator[int]:
        """Yield batch sizes as the thread brings batches."""
        batches = self._batches(number, skip)

        def make(_: int) -> Parts | None:
            pair = next(batches, None)
            return None if pair is None else self.laid_out((*pair, None))

        for parts in self.carrier.ahead(make, range(skip, self.steps_per_epoch)):
            yield self.place(parts, state)

    def _batches(self, number: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the epoch's batches after the first `skip`, joined across the ends of buffers."""
        waiting: list[tuple[Tensor, Tensor]] = []
        held = position = 0
        for x, y, order in self._buffers(number):
            place = 0
            while place < len(order):
                rows = order[place : place + self.batch_size - held]
                waiting.append((x.index_select(0, rows), y.index_select(0, rows)))
                place, held = place + len(rows), held + len(rows)
                if held == self.batch_size:
                    if position >= skip:
                        yield self._joined(waiting)
                    waiting, held, position = [], 0, position + 1
        if held and self.steps_per_epoch > position >= skip:
            yield self._joined(waiting)

    def _buffers(self, number: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the epoch's rows, buffer by buffer, and the order in which to take them."""
        count, passes = self.cached.num_examples, self.cached.passes
        key = torch.tensor(derive(self.seed, "chunks", number))
        starts = range(0, count, self.chunk)
        chunks = permutation(key, len(starts)).tolist()
        first = bits(torch.tensor(derive(self.seed, "passes")), len(starts)).remainder(passes)
        from_pass = (first + number).remainder(passes).tolist()
        for place in range(0, len(chunks), self.chunks_at_once):
            spans = [
                slice(
                    from_pass[chunk] * count + starts[chunk],
                    from_pass[chunk] * count + min(starts[chunk] + self.chunk, count),
                )
                for chunk in chunks[place : place + self.chunks_at_once]
            ]
            x, y = self.cached.spans(spans), torch.cat([self.y[span] for span in spans])
            yield x, y, permutation(fold(key, place), len(x))

    def _joined(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = (part[0] if len(part) == 1 else torch.cat(part) for part in zip(*parts, strict=True))
        return x, y
