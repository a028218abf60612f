"""One configuration trained between independent and joint, for all values of beta as one program; and what its members do."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dissensus.architectures import mlp
from dissensus.members import DeepEnsemble, Members
from dissensus.objectives import Likelihood, OutputObjective, Step, debias, decompose, likelihood_of
from dissensus.predictions import predict
from dissensus.randomness import bits, derive
from dissensus.training import Run, fit
from dissensus_studies.collusion.uci_data import Split

DROP_SHARES = (0.2, 0.4, 0.6)
DROP_REPEATS = 100
PATIENCE = 5
# The document names no largest number of epochs.
MOST_EPOCHS = 300
# Recording a step takes as long as some hundred steps, which runs with fewer steps an epoch than this do not win back.
STEPS_WORTH_RECORDING = 50


@dataclass(frozen=True)
class Configuration:
    """What the search decides."""

    lr: float
    batch_size: int
    weight_decay: float
    num_members: int
    hidden: int
    layers: int


@dataclass(frozen=True)
class GroupedJoint(OutputObjective):
    r"""Several ensembles in one, each trained between independent and joint with a `beta` of its own, squared error.

    $$\sum_g M\left[(1-\beta_g)\,\overline{\mathrm{ERR}}_g + \beta_g\,\mathrm{ERR}_g\right]$$

    Members stand group by group. No group's gradient depends on another group.

    Attributes:
        betas: One for each group.
    """

    betas: tuple[float, ...]

    couples: ClassVar[bool] = True

    @property
    def likelihood(self) -> Likelihood:
        """Squared error of point predictions."""
        return likelihood_of("mse")

    def on_outputs(self, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum over groups, and each member's own error."""
        member, ensemble = group_errors(outputs, y, len(self.betas))
        own = member.mean(1)
        betas = torch.tensor(self.betas, dtype=own.dtype, device=own.device)[:, None]
        joint = (own + betas * (ensemble - own)).mean(-1)
        return member.shape[1] * joint.sum(), {"loss": member.detach().mean(-1).flatten()}


def group_errors(outputs: Tensor, y: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return squared errors of members, `(groups, members, batch)`, and of each group's mean, `(groups, batch)`."""
    grouped = outputs.unflatten(0, (num_groups, -1))
    return (grouped - y).square().sum(-1), (grouped.mean(1) - y).square().sum(-1)


class AllStopped(Exception):
    """Every group has stopped improving, so that training may end."""


class BestOfGroups:
    """After every epoch, keeps the weights of the groups whose ensemble error on held-out rows is the best so far.

    A group without a better check for `patience` epochs has stopped: what it does later does not count. Once all have,
    `AllStopped` ends the training (`fit` has no other way to be ended from outside).
    """

    def __init__(self, num_groups: int, x: Tensor, y: Tensor, patience: int) -> None:
        self.x, self.y, self.patience = x, y, patience
        self.errors = torch.full((num_groups,), torch.inf)
        self.epochs = torch.zeros(num_groups, dtype=torch.int64)
        self.stopped = torch.zeros(num_groups, dtype=torch.bool)
        self.weights: dict[str, Tensor] = {}

    def __call__(self, run: Run) -> None:
        """Look at the members; see `fit`'s `callback`."""
        outputs = predict(run.members, self.x, batch_size=4096)
        found = group_errors(outputs, self.y, len(self.errors))[1].mean(-1)
        better = (found < self.errors) & ~self.stopped
        self.errors = torch.where(better, found, self.errors)
        self.epochs = torch.where(better, run.epoch, self.epochs)
        self._keep(run.members, better)
        self.stopped |= run.epoch - self.epochs >= self.patience
        if self.stopped.all():
            raise AllStopped

    def _keep(self, members: Members, better: Tensor) -> None:
        rows = better.repeat_interleave(members.num_members // len(better))
        for name, parameter in members.named_parameters():
            kept = self.weights.setdefault(name, parameter.detach().clone())
            kept[rows] = parameter.detach()[rows]

    def restore(self, members: Members) -> None:
        """Give every group the weights of its best epoch."""
        with torch.no_grad():
            for name, parameter in members.named_parameters():
                parameter.copy_(self.weights[name])


class AtEpochs(BestOfGroups):
    """Keeps each group's weights of an epoch chosen before; training ends with the last."""

    def __init__(self, epochs: Tensor) -> None:
        self.epochs = epochs
        self.weights = {}

    def __call__(self, run: Run) -> None:
        """Look at the epoch; see `fit`'s `callback`."""
        self._keep(run.members, self.epochs == run.epoch)
        if run.epoch >= int(self.epochs.max()):
            raise AllStopped


@dataclass(frozen=True)
class Trained:
    """Ensembles for several values of beta, each as it was at its best epoch.

    Attributes:
        train_outputs: On the training rows, `(betas, members, rows)`.
        test_outputs: On the test rows, `(betas, members, rows)`.
        validation_errors: Squared error of each ensemble on the validation rows, `(betas,)`.
        epochs: Best epoch of each, `(betas,)`.
    """

    train_outputs: Tensor
    test_outputs: Tensor
    validation_errors: Tensor
    epochs: Tensor


def train(
    split: Split,
    configuration: Configuration,
    betas: Sequence[float],
    *,
    seed: int,
    most_epochs: int = MOST_EPOCHS,
    on_validation_too: bool = False,
) -> Trained:
    """Train one ensemble for each beta, all in one call of `fit`.

    They differ in nothing but beta: member j of each starts with the same weights and all see the same batches. With
    `on_validation_too` they are then trained again on training and validation rows, each beta for its own best number of epochs.
    """
    widths = [configuration.hidden] * configuration.layers
    start = DeepEnsemble(lambda: mlp(split.x.shape[1], widths, 1), configuration.num_members, derive(seed, "start"))

    def fit_groups(x: Tensor, y: Tensor, keep: BestOfGroups) -> DeepEnsemble:
        nets = [start.member(j) for _ in betas for j in range(configuration.num_members)]
        ensemble = DeepEnsemble.from_members(nets, seed)
        long = len(x) >= STEPS_WORTH_RECORDING * configuration.batch_size
        with suppress(AllStopped):
            fit(
                ensemble,
                (x, y),
                objective=GroupedJoint(tuple(betas)),
                epochs=most_epochs,
                batch_size=configuration.batch_size,
                optimizer="adam",
                lr=configuration.lr,
                weight_decay=configuration.weight_decay,
                seed=seed,
                device="cpu",
                # Not "auto", which would compile for all epochs: it cannot know that runs end early.
                engine="captured" if long else "eager",
                progress=False,
                callback=keep,
            )
        keep.restore(ensemble)
        return ensemble

    best = BestOfGroups(len(betas), split.validation_x, split.validation_y, PATIENCE)
    ensemble = fit_groups(split.x, split.y, best)
    if on_validation_too:
        x, y = torch.cat([split.x, split.validation_x]), torch.cat([split.y, split.validation_y])
        ensemble = fit_groups(x, y, AtEpochs(best.epochs))
    train_outputs, test_outputs = (
        predict(ensemble, x, batch_size=4096)[..., 0].unflatten(0, (len(betas), -1)) for x in (split.x, split.test_x)
    )
    return Trained(train_outputs, test_outputs, best.errors, best.epochs)


def measure(outputs: Tensor, targets: Tensor, *, seed: int = 0) -> dict[str, Any]:
    """Return every number of figures 2 to 4 for one ensemble, of its members' predictions `(members, rows)` and targets `(rows,)`."""
    outputs, targets = outputs.double(), targets.double()
    parts = decompose(outputs, targets, loss="mse")
    found: dict[str, Any] = {
        "mse": float(parts.ensemble_error.mean()),
        "member_mse": float(parts.member_error.mean()),
        "best_member_mse": float((outputs - targets).square().mean(1).min()),
        "diversity": float(parts.diversity.mean()),
        "bias_share": bias_share(outputs),
    }
    for share in DROP_SHARES:
        found[f"drop_{share:g}"] = drop_increase(outputs, targets, share, seed=seed)
        found[f"drop_{share:g}_expected"] = expected_drop_increase(outputs, share)
    return found


def bias_share(outputs: Tensor) -> float:
    """Return the share of diversity that goes when each member's constant offset is taken away.

    Reading: 0 where members differ from row to row, 1 where they are shifted copies of each other.

    Example:
        >>> bias_share(torch.tensor([[5.0, 6.0], [1.0, 2.0]]))
        1.0
    """
    return 1 - spread(debias(outputs).outputs) / spread(outputs)


def spread(outputs: Tensor) -> float:
    """Return the mean variance of members around their mean: diversity for squared error."""
    return float(outputs.var(0, correction=0).mean())


def _num_left(num_members: int, share: float) -> int:
    """Return how many members are left where a share of them, rounded down, is dropped."""
    return num_members - int(num_members * share)


def drop_increase(
    outputs: Tensor, targets: Tensor, share: float, *, repeats: int = DROP_REPEATS, seed: int = 0
) -> float:
    """Return by how much the squared error rises when a share of the members is dropped at random, of each row others."""
    left = _num_left(len(outputs), share)
    total = 0.0
    for repeat in range(repeats):
        # Members in a random order for each row; the first ones stay.
        key = torch.tensor(derive(seed, "drop", repeat))
        chosen = bits(key, *outputs.shape).argsort(0)[:left]
        total += float((outputs.gather(0, chosen).mean(0) - targets).square().mean())
    return total / repeats - float((outputs.mean(0) - targets).square().mean())


def expected_drop_increase(outputs: Tensor, share: float) -> float:
    r"""Return what `drop_increase` is on average over all choices of members.

    $$\mathrm{DIV}\;\frac{M-m}{m\,(M-1)}$$

    with m of M members left: for squared error it depends on the diversity alone.

    Example:
        >>> expected_drop_increase(torch.tensor([[1.0], [-1.0]]), 0.5)
        1.0
    """
    count, left = len(outputs), _num_left(len(outputs), share)
    return spread(outputs) * (count - left) / (left * (count - 1))
