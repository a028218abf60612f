"""An ensemble and a named set in, one value per input and quantity out: every input is predicted once.

What is kept of an input, beside the handful of gallery images: its scores, the pooled prediction's confidence,
probability of the true class and correctness, and which members were right. Exact ranks (AUROC, AUPR, risk-coverage),
calibration errors of the whole set and resamples need these values of all inputs together; member outputs are dropped
batch by batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from dissensus.evaluation.classification import Classification, Columns
from dissensus.evaluation.gallery import Gallery, shows_images
from dissensus.evaluation.inputs import Fingerprint, NamedSet
from dissensus.evaluation.regression import Regression
from dissensus.evaluation.results import Disputed, Kind
from dissensus.members import Members

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
    """

    members: Members
    task: Task
    transform: Callable[[Tensor], Tensor] | None
    batch_size: int
    place: torch.device
    shape: tuple[int, int] | None = field(default=None, init=False)

    def read(self, part: NamedSet, cells: Sequence[Cell] = (), seed: int = 0) -> Sample:
        """Predict each input of a set once, and each of its corrupted copies; return what numbers need."""
        kept: list[Columns] = []
        corrupted: dict[Cell, list[Columns]] = {cell: [] for cell in cells}
        fingerprint, gallery, start = Fingerprint(), Gallery(), 0
        for x, y in part.batches(self.batch_size):
            raw = x.to(self.place)
            fingerprint.add(raw, y)
            columns = self._columns(raw, y, part.name, start)
            self._show(gallery, raw, columns, y)
            kept.append(_without_batch_columns(columns))
            for cell, parts in corrupted.items():
                copy = _corrupted(raw, cell, seed, start)
                columns = self._columns(copy, y, f"{part.name} with {cell[0]} at severity {cell[1]}", start)
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

    def _columns(self, raw: Tensor, y: Tensor | None, name: str, start: int) -> Columns:
        outputs = self.members(raw if self.transform is None else self.transform(raw))
        self._check_shape(outputs, len(raw), name)
        if y is not None:
            self.task.check_targets(y, outputs, name, start)
        usable = outputs.isfinite().all(-1)
        columns = self.task.columns(outputs, None if y is None else y.to(self.place))
        # Asked last: on a GPU the answer waits for all that was queued.
        if not bool(usable.all()):
            member, row = _first_unusable(usable)
            raise ValueError(
                f"Outputs on set {name!r} must be finite; row {start + row} of member {member} is not. Leave such rows "
                "out, or train that member again."
            )
        return columns

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


def _corrupted(raw: Tensor, cell: Cell, seed: int, start: int) -> Tensor:
    from dissensus.data.corruptions import corrupt

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
