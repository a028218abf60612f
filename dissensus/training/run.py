"""What a training run was asked for and what it found."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer

from dissensus.data.augment import Augmentation
from dissensus.members import Members
from dissensus.training.engines import EngineName
from dissensus.training.history import History
from dissensus.training.optimizers import Factory
from dissensus.training.schedules import AnySchedule

if TYPE_CHECKING:
    from dissensus.training.mesh import Mesh


class DivergedError(RuntimeError):
    """A member's loss is no longer a finite number."""


@dataclass(frozen=True)
class Settings:
    """What `fit` was asked for."""

    epochs: int
    optimizer: str | type[Optimizer] | Factory
    lr: float | Sequence[float]
    weight_decay: float | Sequence[float] | None
    optimizer_options: Mapping[str, Any]
    schedule: AnySchedule
    clip_norm: float | None
    clip_value: float | None
    bf16: bool
    augment: Augmentation | None
    check_every: Literal["epoch"] | int
    select: str | None
    patience: int | None
    per_member: bool
    accumulate: int
    ema: float | None
    seed: int
    engine: EngineName
    concurrent_members: int | None
    mesh: "Mesh | None"
    checkpoint_dir: str | Path | None
    checkpoint_every: int
    resume: bool
    on_divergence: Literal["stop", "drop"]
    progress: bool | None
    callback: "Callable[[Run], None] | None"


@dataclass
class Run:
    """A training run and what it found.

    Attributes:
        members: The trained ensemble.
        history: One row for each check and member.
        best: Value of the selected column at the best check, None if nothing was selected.
        best_step: Step of that check.
        best_steps: The same of each member, by its number, where members were selected one by one.
        dropped: Members that diverged and were left out.
        engine: How steps were executed.
        seconds: Time in training, over all sittings.
        stopped_early: Whether patience ran out.
        step: Steps taken.
        epoch: Epochs finished.
    """

    members: Members
    history: History = field(default_factory=History)
    best: float | None = None
    best_step: int | None = None
    best_steps: dict[int, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    engine: str = ""
    seconds: float = 0.0
    stopped_early: bool = False
    step: int = 0
    epoch: int = 0

    def __repr__(self) -> str:
        found = "" if self.best is None else f", best {self.best:.4g} at step {self.best_step}"
        return f"Run({self.members.num_members} members, {self.epoch} epochs, {self.seconds:.1f} s, engine {self.engine}{found})"
