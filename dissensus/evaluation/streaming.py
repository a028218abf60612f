"""An ensemble and a named set in, one value per input and quantity out: every input is predicted once.

Member outputs are dropped batch by batch, but for those of (some of) the known inputs, from which members are diagnosed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import nan
from operator import attrgetter
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.data.features import CachedFeatures
from dissensus.data.fingerprints import Fingerprint
from dissensus.data.sources import num_batches
from dissensus.data.trees import Batch, Tree, batch_of, describe
from dissensus.diagnostics import Finding, diagnose
from dissensus.engines.graphs import Captured
from dissensus.evaluation._tasks import Classification, Columns, Dense, Task, check_used
from dissensus.evaluation.corrupting import Cell, Corruptor
from dissensus.evaluation.inputs import NamedSet, check_not_twice, value_range, warn_of_ranges
from dissensus.evaluation.results import ID, Disputed, SetInfo
from dissensus.members import Members
from dissensus.randomness import mix

# So many outputs are diagnosed in a twentieth of a second. Beyond, some inputs stand for all.
_LARGEST = 125_000
# Fewer inputs say little; where even these have very many outputs, time and memory go first.
_FEWEST_ROWS, _TOO_LARGE, _FEWEST_OF_ALL = 500, 2_000_000, 100
# Members are dropped anew for every input, so many inputs need few repeats.
_DROPS, _FEWEST_REPEATS, _MOST_REPEATS = 20_000, 5, 20


class OutputSample:
    """Outputs and targets of known inputs: all of them, or as many, drawn at random, as are cheap to keep."""

    def __init__(self, largest: int = _LARGEST) -> None:
        self.largest = largest
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.seen = 0

    def add(self, outputs: Tensor, targets: Tensor, start: int) -> None:
        """Take in a batch whose first row has this number in the set."""
        index = torch.arange(start, start + outputs.shape[1])
        self._parts.append((index, outputs.detach(), targets.to(outputs.device)))
        self.seen += len(index)
        # Twice as many may pile up, so that not every batch sorts them.
        if sum(len(part[0]) for part in self._parts) > 2 * self._limit(outputs):
            self._parts = [self._chosen()]

    def diagnose(self, task: Task, weights: Tensor | None, seed: int) -> Finding | None:
        """Return what the outputs say; None of a single member, and of losses that cannot be diagnosed."""
        _, outputs, targets = self._chosen()
        if len(outputs) == 1 or (given := task.for_diagnosis(outputs, targets)) is None:
            return None
        outputs, targets, loss = given
        repeats = min(_MOST_REPEATS, max(_FEWEST_REPEATS, _DROPS // outputs.shape[1]))
        return diagnose(outputs, targets, loss, "probs", weights, repeats=repeats, seed=seed)

    def _limit(self, outputs: Tensor) -> int:
        of_a_row = outputs.shape[0] * outputs.shape[2]
        fewest = max(_FEWEST_OF_ALL, min(_FEWEST_ROWS, _TOO_LARGE // of_a_row))
        return max(fewest, self.largest // of_a_row)

    def _chosen(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows with the smallest hash of their number, in order: the same however they came in batches."""
        indices, all_outputs, all_targets = zip(*self._parts, strict=True)
        index, outputs, targets = torch.cat(indices), torch.cat(all_outputs, dim=1), torch.cat(all_targets)
        limit = self._limit(outputs)
        if len(index) <= limit:
            return index, outputs, targets
        rows = mix(index).argsort()[:limit].sort().values
        place = rows.to(outputs.device)
        return index[rows], outputs[:, place], targets[place]


_KEPT = 6
_LARGEST_SIDE = 96
# Needed of a batch for the gallery, and not kept.
_OF_A_BATCH = ("votes", "dispute", "map")


class Gallery:
    """The most and least disputed images of a set so far, the most (or least) disputed first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.best: dict[bool, list[Disputed]] = {True: [], False: []}

    def add(self, raw: Batch, columns: Columns, labels: Tensor | None, start: int) -> None:
        """Take in a batch of images, with their members' votes or, of several answers each, maps of dispute beside them."""
        if not _can_be_shown(raw, columns):
            return
        for most, best in self.best.items():
            best += self._items(raw, columns, labels, start, most)
            # Stable: of equals the earliest is kept, however the set was cut into batches.
            best.sort(key=attrgetter("dispute"), reverse=most)
            del best[_KEPT:]

    def _items(
        self, raw: Tensor, columns: Columns, labels: Tensor | None, start: int, most: bool
    ) -> Iterator[Disputed]:
        rows = columns["dispute"].argsort(descending=most, stable=True)[:_KEPT]
        named = ((key, columns[key]) for key in (*_OF_A_BATCH, "predicted") if key in columns)
        kept = {key: values[..., rows].movedim(-1, 0).cpu() for key, values in named}
        images = _with_maps(raw[rows].cpu(), kept["map"]) if "map" in kept else raw[rows].cpu()
        for place, row in enumerate(rows.tolist()):
            predicted, label, votes = -1, None, ()
            if "votes" in kept:
                predicted, votes = int(kept["predicted"][place]), tuple(kept["votes"][place].tolist())
                label = None if labels is None else int(labels[row])
            picture, dispute = _picture(images[place]).numpy(), float(kept["dispute"][place])
            shown = picture.shape, picture.tobytes()
            yield Disputed(self.name, most, start + row, dispute, predicted, label, votes, *shown)


def _can_be_shown(raw: Batch, columns: Columns) -> TypeGuard[Tensor]:
    """Whether inputs can be shown: one or three channels, and more than one pixel a side; maps must be flat."""
    flat = "map" not in columns or columns["map"].ndim == 3
    if not isinstance(raw, Tensor) or raw.ndim != 4 or "dispute" not in columns or not flat:
        return False
    return (raw.dtype == torch.uint8 or raw.is_floating_point()) and raw.shape[1] in (1, 3) and min(raw.shape[2:]) > 1


def _with_maps(images: Tensor, maps: Tensor) -> Tensor:
    """Return pictures, 0 to 1, of each image, and beside it the same in grey with its map in red over it, the largest value full."""
    values = torch.stack([_scaled(image) for image in images]).expand(-1, 3, -1, -1)
    red = F.interpolate(maps[:, None].float(), values.shape[2:], mode="nearest")
    red = red / red.amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
    over = (values.mean(1, keepdim=True) * (1 - red)).expand(-1, 3, -1, -1).clone()
    over[:, :1] += red
    return torch.cat([values, over], dim=3)


def _picture(image: Tensor) -> Tensor:
    """Return an image as uint8."""
    values = _scaled(image)
    shrink = _LARGEST_SIDE / max(values.shape[1:])
    if shrink < 1:
        size = [max(1, round(side * shrink)) for side in values.shape[1:]]
        values = F.interpolate(values[None], size, mode="area")[0]
    return (255 * values).round().to(torch.uint8)


def _scaled(image: Tensor) -> Tensor:
    """Return an image with values from 0 to 1; those beyond (normalised inputs) are stretched to its own range."""
    values = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    low, high = values.aminmax()
    outside = (low < 0) | (high > 1)
    return torch.where(outside, (values - low) / (high - low).clamp_min(1e-12), values)


@dataclass(frozen=True)
class Sample:
    """What was kept of a set: columns, on the CPU, of it and of its corrupted copies, and the gallery's images."""

    info: SetInfo
    columns: Columns
    disputed: list[Disputed]
    corrupted: Mapping[Cell, Columns]


# Outputs of a batch, which of them are finite, `(members, batch)`, and the columns.
Read: TypeAlias = tuple[Tensor, Tensor, Columns]


@dataclass
class Reader:
    """Runs the ensemble, in evaluation mode and at its `place`, over sets.

    The first batch, of known inputs, tells whether outputs have positions, and their `shape`, members and outputs, which every other
    must have too. `known` are outputs of the known inputs, for the diagnosis of the members.
    """

    members: Members
    task: Task
    transform: Callable[[Any], Any] | None
    batch_size: int
    place: torch.device
    corruptor: Corruptor
    class_names: tuple[str, ...] = ()
    shape: tuple[int, int] | None = field(default=None, init=False)
    known: OutputSample = field(default_factory=OutputSample, init=False)
    _programs: dict[bool, Captured[Read]] = field(default_factory=dict, init=False)
    _hashes: dict[str, str] = field(default_factory=dict, init=False)
    _range: tuple[float, float] | None = field(default=None, init=False)

    def check(self, sets: Iterable[NamedSet]) -> None:
        """Refuse sets of another backbone's features, before any is read."""
        for part in sets:
            try:
                self.members.reader(part.data)
            except ValueError as problem:
                raise ValueError(f"Set {part.name!r} cannot be read: {problem}") from None

    def read(self, part: NamedSet) -> Sample:
        """Predict each input of a set once, and of the known one each corrupted copy; refuse a set that came before by another name."""
        cells = self.corruptor.cells if part.kind == "id" else ()
        kept, corrupted = _Kept(), {cell: _Kept() for cell in cells}
        fingerprint, targets, gallery = Fingerprint(), Fingerprint(), Gallery(part.name)
        program, batches = self._program(part), num_batches(part.data, self.batch_size)
        program.expect(None if batches is None else batches * (1 + len(cells)))
        start, span = 0, (nan, nan)
        for x, y in part.batches(self.batch_size):
            raw, plain = x.to(self.place), None
            if y is not None:
                # The same targets in numbers of another width are the same.
                plain = y.float() if y.is_floating_point() else y.long()
                targets.add(plain, None)
            fingerprint.add(raw, plain)
            columns = self._columns(program, raw, y, part.name, start)
            gallery.add(raw, columns, y, start)
            kept.add(columns)
            for cell, copy in self.corruptor.copies(raw, y, start) if cells else ():
                columns = self._columns(program, copy, y, f"{part.name} with {cell[0]} at severity {cell[1]}", start)
                corrupted[cell].add(columns)
            span = value_range(raw) if start == 0 else span
            start += len(x)
        check_not_twice(part.name, fingerprint.inputs(), self._hashes)
        self._range = self._range or span
        warn_of_ranges(ID, self._range, part.name, span)
        hashed = "" if part.kind == "ood" else targets.inputs()
        return Sample(
            SetInfo(part.name, part.kind, start, fingerprint.whole(), hashed),
            kept.columns(),
            [*gallery.best[True], *gallery.best[False]],
            {cell: parts.columns() for cell, parts in corrupted.items()},
        )

    def _program(self, part: NamedSet) -> Captured[Read]:
        """Return what reads batches of a set, on a GPU captured: the heads alone where the set holds features of their backbone."""
        features = isinstance(part.data, CachedFeatures)
        if features not in self._programs:
            transform, members = None if features else self.transform, self.members.reader(part.data)

            def read(raw: Batch, targets: Tensor | None) -> Read:
                if transform is not None:
                    raw = batch_of(transform(raw.value() if isinstance(raw, Tree) else raw))
                outputs = members(raw)
                if self.shape is None:
                    self._begin(outputs, targets)
                return outputs, outputs.isfinite().flatten(2).all(-1), self.task.columns(outputs, targets)

            name = f"evaluation {' '.join(self.task.score_names)}"
            self._programs[features] = Captured(read, self.members, name)
        return self._programs[features]

    def _columns(self, program: Captured[Read], raw: Batch, y: Tensor | None, name: str, start: int) -> Columns:
        targets = None if y is None else y.to(self.place)
        if self.shape is not None and y is not None:
            # Before they are used as indices.
            self.task.check_targets(y, self.shape[1], name, start)
        # The first batch is looked at, which cannot be captured.
        run = program.function if self.shape is None else program
        try:
            outputs, usable, columns = run(raw, targets)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            raise ValueError(
                f"Members cannot read set {name!r}, whose inputs are {describe(raw)}: {problem}. Give inputs as in training, or a "
                "`transform` that makes them so."
            ) from problem
        self._check_batch(outputs, len(raw), name)
        if raw.is_cuda:
            # The program's next run overwrites what it returned.
            outputs, columns = outputs.clone(), {key: values.clone() for key, values in columns.items()}
        if targets is not None and name == ID:
            self._keep(outputs, targets, start)
        # Asked last: on a GPU the answer waits for all that was queued.
        if not bool(usable.all()):
            row, member = (~usable).T.nonzero()[0].tolist()
            raise ValueError(
                f"Outputs on set {name!r} must be finite; row {start + row} of member {member} is not. Leave rows out, or train it again."
            )
        return columns

    def _begin(self, outputs: Tensor, targets: Tensor | None) -> None:
        """Learn from the first batch, of known inputs, what outputs look like."""
        if outputs.ndim > 3:
            self.task = Dense.of(self.task, outputs, targets)
        check_used(self.task, outputs)
        if self.corruptor.cells and not isinstance(self.task, Classification):
            raise ValueError(
                f"`corruptions` are for classifiers of images, one class each; the loss is {self.task.loss!r}. Leave them out."
            )
        self.task.check(outputs)
        width = self.task.size if isinstance(self.task, Dense) else outputs.shape[-1]
        num_outputs = self.task.num_outputs(width)
        if self.class_names and len(self.class_names) != num_outputs:
            raise ValueError(
                f"`class_names` must name each of the {num_outputs} outputs, in their order; got {len(self.class_names)} names: "
                f"{', '.join(self.class_names)}. Where it is not given, it is what the known data holds."
            )
        self.shape = (len(outputs), width)
        if targets is not None:
            self.task.check_targets(targets, width, ID, 0)

    def _check_batch(self, outputs: Tensor, size: int, name: str) -> None:
        assert self.shape is not None
        wanted = (self.shape[0], size, self.shape[1])
        if isinstance(self.task, Dense):
            self.task.check(outputs)
        elif tuple(outputs.shape) != wanted:
            raise ValueError(
                f"Outputs on set {name!r} must be shaped {wanted}, (members, batch, outputs) as before; got {tuple(outputs.shape)}."
            )

    def _keep(self, outputs: Tensor, targets: Tensor, start: int) -> None:
        """Keep outputs of known inputs for the diagnosis; of dense ones those of positions that count."""
        if isinstance(self.task, Dense):
            outputs, truth, counts = self.task.flat(outputs, targets)
            assert truth is not None
            outputs, targets, start = outputs[:, counts.flatten()], truth[counts.flatten()], self.known.seen
        self.known.add(outputs, targets, start)


class _Kept:
    """Columns of the batches so far, in memory that doubles when it is full.

    Kept one by one, small columns would lie between the freed outputs of large batches, whose memory could then not be
    used again.
    """

    def __init__(self) -> None:
        self._memory: Columns = {}
        self._rows = 0

    def add(self, columns: Columns) -> None:
        """Take in the columns of a batch."""
        before, rows = self._rows, self._rows + columns["scores"].shape[-1]
        for name, values in columns.items():
            if name in _OF_A_BATCH:
                continue
            memory = self._memory.get(name)
            if memory is None or memory.shape[-1] < rows:
                larger = self._memory[name] = values.new_empty(*values.shape[:-1], 2 * rows)
                if memory is not None:
                    larger[..., :before] = memory[..., :before]
            self._memory[name][..., before:rows] = values
        self._rows = rows

    def columns(self) -> Columns:
        """Return the columns of the whole set, on the CPU."""
        return {name: memory[..., : self._rows].contiguous().cpu() for name, memory in self._memory.items()}
