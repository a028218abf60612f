"""An ensemble and a named set in, one value per input and quantity out: every input is predicted once.

What is kept of an input, beside the handful of gallery images: its scores, the pooled prediction's confidence,
probability of the true class and correctness, and which members were right. Exact ranks (AUROC, AUPR, risk-coverage),
calibration errors of the whole set and resamples need these values of all inputs together; member outputs are dropped
batch by batch, but for those of (some of) the known inputs, from which members are diagnosed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from dissensus._capture import Captured
from dissensus.data.features import CachedFeatures
from dissensus.data.fingerprints import Fingerprint
from dissensus.evaluation.classification import Classification, Columns
from dissensus.evaluation.diagnosing import OutputSample
from dissensus.evaluation.gallery import Gallery, shows_images
from dissensus.evaluation.inputs import NamedSet
from dissensus.evaluation.regression import Regression
from dissensus.evaluation.results import ID, Disputed, Kind
from dissensus.members import Members
from dissensus.members.heads import reader_of

Task: TypeAlias = Classification | Regression
Cell: TypeAlias = tuple[str, int]
# Needed of a batch for the gallery, and not kept.
_OF_A_BATCH = ("votes", "predicted")
_DISPUTE = "mutual_information"


@dataclass(frozen=True)
class Sample:
    """What was kept of a set.

    Attributes:
        name: Its name.
        kind: Its kind.
        columns: Values per input, on the CPU; the last axis of each is the input.
        inputs: Hash of the inputs.
        fingerprint: Hash of inputs and targets.
        disputed: Images for the gallery.
        corrupted: Columns of its corrupted copies, by corruption and severity.
    """

    name: str
    kind: Kind
    columns: Columns
    inputs: str
    fingerprint: str
    disputed: list[Disputed]
    corrupted: Mapping[Cell, Columns]

    @property
    def size(self) -> int:
        """How many inputs the set has."""
        return self.columns["scores"].shape[-1]


@dataclass
class Reader:
    """Runs the ensemble over sets.

    Attributes:
        members: The ensemble, in evaluation mode and where it shall run.
        task: How its outputs are read.
        transform: From a raw batch to what the members take.
        batch_size: How many inputs go through the members at once.
        place: Device of the ensemble.
        shape: Members and outputs that the first batch had; every other must have them too.
        known: Outputs of the known inputs, for the diagnosis of the members.
    """

    members: Members
    task: Task
    transform: Callable[[Tensor], Tensor] | None
    batch_size: int
    place: torch.device
    shape: tuple[int, int] | None = field(default=None, init=False)
    known: OutputSample = field(default_factory=OutputSample, init=False)
    _programs: dict[bool, "_Program"] = field(default_factory=dict, init=False)

    def read(self, part: NamedSet, cells: Sequence[Cell] = (), seed: int = 0) -> Sample:
        """Predict each input of a set once, and each of its corrupted copies; return what numbers need."""
        kept: list[Columns] = []
        corrupted: dict[Cell, list[Columns]] = {cell: [] for cell in cells}
        fingerprint, gallery, start = Fingerprint(), Gallery(), 0
        run = self._run_of(part)
        for x, y in part.batches(self.batch_size):
            raw = x.to(self.place)
            fingerprint.add(raw, y)
            columns = self._columns(run, raw, y, part.name, start)
            self._show(gallery, raw, columns, y)
            kept.append(_without_batch_columns(columns))
            for cell, parts in corrupted.items():
                copy = _corrupted(raw, cell, seed, start)
                columns = self._columns(
                    run, copy, y, f"{part.name} with {cell[0]} at severity {cell[1]}", start
                )
                parts.append(_without_batch_columns(columns))
            start += len(x)
        return Sample(
            name=part.name,
            kind=part.kind,
            columns=_joined(kept),
            inputs=fingerprint.inputs(),
            fingerprint=fingerprint.whole(),
            disputed=gallery.items(part.name),
            corrupted={cell: _joined(parts) for cell, parts in corrupted.items()},
        )

    def _run_of(self, part: NamedSet) -> "_Program":
        """Return what reads batches of a set: the heads alone where the set holds features of their backbone."""
        features = isinstance(part.data, CachedFeatures)
        if features not in self._programs:
            reader, transform = reader_of(self.members, part.data), self.transform
            plain = transform is None or features
            self._programs[features] = _Program(reader if plain else _chained(transform, reader), self.task)
        return self._programs[features]

    def _columns(self, program: "_Program", raw: Tensor, y: Tensor | None, name: str, start: int) -> Columns:
        targets = None if y is None else y.to(self.place)
        if self.shape is None:
            with _named(name, raw):
                outputs = program.run(raw)
            self._check_batch(outputs, y, len(raw), name, start)
            usable, columns = program.read(outputs, targets)
        else:
            if y is not None:
                # Before they are used as indices; of the outputs only the shape matters here.
                self.task.check_targets(y, raw.new_empty(self.shape[0], 0, self.shape[1]), name, start)
            with _named(name, raw):
                outputs, usable, columns = program.captured(raw, targets)
            self._check_batch(outputs, None, len(raw), name, start)
            if raw.is_cuda:
                # The program's next run overwrites what it returned.
                outputs, columns = outputs.clone(), {key: values.clone() for key, values in columns.items()}
        if y is not None and name == ID:
            self.known.add(outputs, y, start)
        # Asked last: on a GPU the answer waits for all that was queued.
        if not bool(usable.all()):
            member, row = _first_unusable(usable)
            raise ValueError(
                f"Outputs on set {name!r} must be finite; row {start + row} of member {member} is not. Leave such rows "
                "out, or train that member again."
            )
        return columns

    def _check_batch(self, outputs: Tensor, y: Tensor | None, size: int, name: str, start: int) -> None:
        self._check_shape(outputs, size, name)
        if y is not None:
            self.task.check_targets(y, outputs, name, start)

    def _check_shape(self, outputs: Tensor, size: int, name: str) -> None:
        if self.shape is None:
            self.task.check(outputs)
            self.shape = (len(outputs), outputs.shape[-1])
        wanted = (self.shape[0], size, self.shape[1])
        if tuple(outputs.shape) != wanted:
            raise ValueError(
                f"Outputs on set {name!r} must be shaped {wanted}, (members, batch, outputs) as before; got "
                f"{tuple(outputs.shape)}."
            )

    def _show(self, gallery: Gallery, raw: Tensor, columns: Columns, y: Tensor | None) -> None:
        if self.task.task != "classification" or _DISPUTE not in self.task.score_names:
            return
        if len(columns["votes"]) > 1 and shows_images(raw):
            dispute = columns["scores"][self.task.score_names.index(_DISPUTE)]
            labels = None if y is None else y.to(self.place)
            gallery.add(raw, dispute, columns["votes"], columns["predicted"], labels)


class _Program:
    """From a raw batch to columns; on a GPU members and scores become one captured program."""

    def __init__(self, run: Callable[[Tensor], Tensor], task: Task) -> None:
        self.run, self.task = run, task
        self.captured = Captured(self._whole)

    def read(self, outputs: Tensor, targets: Tensor | None) -> tuple[Tensor, Columns]:
        """Return which outputs are finite, `(members, batch)`, and the columns."""
        return outputs.isfinite().all(-1), self.task.columns(outputs, targets)

    def _whole(self, raw: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor, Columns]:
        outputs = self.run(raw)
        return outputs, *self.read(outputs, targets)


@contextmanager
def _named(name: str, raw: Tensor) -> Iterator[None]:
    """Say on which set members failed, which their own errors do not."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as problem:
        shape = tuple(raw.shape[1:])
        raise ValueError(
            f"Members cannot read set {name!r}, whose inputs are {raw.dtype} of shape {shape}: {problem}. Give inputs as in "
            "training, or a `transform` that makes them so."
        ) from problem


def _chained(
    first: Callable[[Tensor], Tensor] | None, second: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    return lambda raw: second(raw if first is None else first(raw))


def _corrupted(raw: Tensor, cell: Cell, seed: int, start: int) -> Tensor:
    from dissensus.data.corruptions import corrupt

    if raw.ndim != 4 or raw.dtype != torch.uint8:
        raise ValueError(
            f"Known inputs must be uint8 images (batch, channels, height, width) for `corruptions`; got {raw.dtype} of shape "
            f"{tuple(raw.shape)}. Give raw images and a `transform` that makes them what members take."
        )
    index = torch.arange(start, start + len(raw), device=raw.device)
    return corrupt(raw, *cell, seed=seed, index=index)


def _without_batch_columns(columns: Columns) -> Columns:
    return {name: values for name, values in columns.items() if name not in _OF_A_BATCH}


def _joined(parts: list[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts], dim=-1).cpu() for name in parts[0]}


def _first_unusable(usable: Tensor) -> tuple[int, int]:
    """Return member and row of the first row that is not finite; `usable` is `(members, batch)`."""
    row = int((~usable.all(0)).nonzero()[0])
    return int((~usable[:, row]).nonzero()[0]), row
