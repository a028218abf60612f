"""Members that are made to disagree on training examples that the ensemble finds hard: the objective that `fit` takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dissensus.members import View
from dissensus.objectives.disagreement import (
    Orientation,
    PairTerm,
    mean_over_pairs,
    oriented,
    pair_term,
)
from dissensus.objectives.guards import Guard, Seen, guard_of
from dissensus.objectives.likelihoods import (
    Likelihood,
    check_class_weights,
    class_weighted,
    full,
    likelihood_of,
    smooth_labels,
)
from dissensus.objectives.loss_weights import Weighting, ensemble_losses, weights_from_losses
from dissensus.objectives.objective import OutputObjective, Parts, Step
from dissensus.objectives.redundancy import divdis
from dissensus.randomness import fold

# Up to so many members are drawn one by one, in arithmetic that compiles into the step around it; more by sorting.
_ONE_BY_ONE = 4


def draw_members(step: Step, count: int | None, num_members: int) -> Tensor | None:
    """Draw distinct members for a step, in order of their numbers; None where all take part."""
    if count is None or count >= num_members:
        return None
    noise = step.noise(shared=True)
    # In order, so that which of two members is the first does not depend on the draw.
    if count > _ONE_BY_ONE:
        return noise.uniform(num_members).topk(count).indices.sort().values
    chosen: list[Tensor] = []
    for number in range(count):
        draw = ((fold(noise.keys, number) >> 33) & 0x7FFFFFFF).remainder(num_members - number)
        # It counts the members that are left: pass by those already drawn, lowest first, then take its place among them.
        for drawn in chosen:
            draw = draw + (draw >= drawn)
        for place, drawn in enumerate(chosen):
            chosen[place], draw = torch.minimum(drawn, draw), torch.maximum(drawn, draw)
        chosen.append(draw)
    return torch.stack(chosen)


def drawn_scale(step: Step, outputs: Tensor, members: View | None = None) -> float:
    """Return by what a sum over drawn members is multiplied to estimate that over all: M/A.

    Members that share their parameters train on the mean over those drawn: 1.
    """
    if members is not None and members.members.loss_over_members == "mean":
        return 1.0
    return len(step.member_keys) / len(outputs)


@dataclass(frozen=True)
class LossGuided(OutputObjective):
    r"""Train members to fit the data and to disagree on those examples that the ensemble gets wrong.

    $$M\left[\frac1A \sum_{m \in I} \mathrm{CE}_m + \frac{\lambda}{B}\sum_n \alpha_n \frac{1}{|P|} \sum_{(m, l) \in P}
      G\big(p^m(x_n), p^l(x_n)\big)\right]$$

    with I the A of M members drawn for the step, P their pairs, G a pair term and $\alpha_n$ the weights of `loss_guided_weights`,
    which carry no gradient. Only the drawn members are run, and of members that own their parameters only they are changed, so a step
    costs the same for any number of members.

    The factor M makes the draw an estimate of the step with `active=M`, in which each member's gradient has the scale of that member
    trained alone: with `weights_from="all"`, `reduction="mean"` and a fixed orientation, the gradient averaged over all draws is
    exactly the one of all members at once (but not with a guard that looks at held-out data: its factor depends on who was drawn). With
    `weights_from="active"` it is biased, for an example's weight then depends on who was drawn: the average of few members errs more
    than that of all. A drawn member's gradient is so M/A times that of the member alone, in A/M of the steps. Adam and AdamW do not
    notice the scale; for SGD with few of many members divide the learning rate by M/A, and train for more epochs.

    Members that share parameters (Masksembles, MC dropout, BatchEnsemble) train on the mean over those drawn.

    Look at each member's own accuracy: at large strength members become useless while the ensemble still looks fine.

    Args:
        strength: $\lambda$; or a function of the run's progress (a tensor from 0 towards 1) that gives it, as a tensor or a number. It must
            depend on nothing else: a recorded step asks it once. One that reads the progress in Python (`if t > 0.5`) runs eagerly.
        active: Members drawn for a step, without replacement; None, or as many as there are, for all.
        regulariser: A name of `PAIR_TERMS`, `"divdis"` (weighted by $\alpha$ over the batch, times the mean weight), or a function of two
            members' log-probabilities.
        weights_from: Whose average prediction decides the weights: the `"active"` members', or that of `"all"`, the others being run
            forward only.
        reduction: `"mean"` over pairs, or `"document"`: the published formula, whose constant makes it half of that.
        weighting: In proportion to the `"loss"`, or to the `"inverse_probability"` of the true class, with the same mean.
        orientation: Which member of a pair names the class (or comes first in another term): the `"first"` by number, the `"second"`,
            or `"both"`, summed.
        label_smoothing: Share of each target given to the uniform distribution in the cross-entropy; weights use the label itself.
        guard: Keeps disagreement from taking over once the training loss is small: a guard, or the name of one in `GUARDS`. None or
            `"none"` is the published form.
        class_weights: Weight of each class in the cross-entropy: examples count by that of their label.

    Example:
        >>> import dissensus as ds
        >>> ens = ds.DeepEnsemble(lambda: torch.nn.Linear(2, 3), num_members=10)
        >>> data = torch.randn(64, 2), torch.randint(0, 3, (64,))
        >>> run = ds.fit(ens, data, objective=LossGuided(0.5), epochs=2, device="cpu")
        >>> run.history.columns[3:6]
        ['loss', 'pair_term', 'weight']

    References:
        Pagliardini et al., 2023, <https://arxiv.org/abs/2202.04414>, for the pair term; docs/loss_guided.md for the method.
    """

    strength: float | Callable[[Tensor], Tensor | float] = 0.5
    active: int | None = 2
    regulariser: str | PairTerm = "a2d"
    weights_from: Literal["active", "all"] = "active"
    reduction: Literal["mean", "document"] = "mean"
    weighting: Weighting = "loss"
    orientation: Orientation = "first"
    label_smoothing: float = 0.0
    guard: Guard | str | None = "share"
    class_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_class_weights(self.class_weights, self.likelihood)
        if not callable(self.strength):
            check_strength(self.strength)
        check_active(self.active)
        _check_choice("weights_from", self.weights_from, ("active", "all"))
        _check_choice("reduction", self.reduction, ("mean", "document"))
        _check_choice("weighting", self.weighting, get_args(Weighting))
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"`label_smoothing` must be in [0, 1); got {self.label_smoothing}.")
        if self.regulariser != "divdis":
            oriented(pair_term(self.regulariser), self.orientation)
        guard_of(self.guard)

    @property
    def likelihood(self) -> Likelihood:
        """Outputs are logits."""
        return likelihood_of("cross_entropy")

    @property
    def outputs_only(self) -> bool:
        """Whether outputs on the batch are enough; a guard may want to see held-out examples too."""
        guard = guard_of(self.guard)
        return guard is None or guard.data is None

    def stream_data(self) -> Mapping[str, Tensor]:
        """Return the guard's held-out data."""
        guard = guard_of(self.guard)
        if guard is None or guard.data is None:
            return {}
        return dict(zip(("held_out.x", "held_out.y"), guard.data, strict=True))

    def side_data(self) -> Mapping[str, object]:
        """Return the guard's held-out data."""
        return {"held-out": getattr(guard_of(self.guard), "given", None)}

    def pick(self, step: Step, num_members: int) -> Tensor | None:
        """Draw the members of this step."""
        return draw_members(step, self.active, num_members)

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Run the drawn members, and what else the weights depend on."""
        outputs = members(x)
        total = outputs.detach().sum(0)
        count = len(outputs)
        if self.weights_from == "all" and members.rows is not None:
            others = members.whole.pick(_others(members.rows, members.whole.num_members))
            with torch.no_grad(), others.perturbed():
                total = total + others(x).sum(0)
            count += others.num_members
        held_out = None
        if not self.outputs_only:
            with members.evaluating():
                inputs = step.inputs("held_out.x", x)
                assert inputs is not None
                held_out = members(inputs), step.streams["held_out.y"]
        return self._judge(outputs, y, step, total / count, held_out, drawn_scale(step, outputs, members))

    def on_outputs(self, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the loss of outputs of members that own their parameters, where nothing else needs to be run."""
        return self._on_outputs(outputs, y, step, drawn_scale(step, outputs))

    def on_outputs_of(self, members: View, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the loss of these members' outputs, where nothing else needs to be run."""
        return self._on_outputs(outputs, y, step, drawn_scale(step, outputs, members))

    def _on_outputs(self, outputs: Tensor, y: Tensor, step: Step, scale: float) -> tuple[Tensor, Parts]:
        if not self.outputs_only:
            raise ValueError(
                "A guard with held-out data runs members on that data, which nothing around LossGuided provides for. "
                "Use LossGuided by itself, or a guard such as 'share'."
            )
        if self.weights_from == "all" and len(outputs) < len(step.member_keys):
            raise ValueError(
                "weights_from='all' runs the members that were not drawn, which nothing around LossGuided provides for. "
                "Use LossGuided by itself, or weights_from='active'."
            )
        return self._judge(outputs, y, step, outputs.detach().mean(0), None, scale)

    def _judge(
        self,
        outputs: Tensor,
        y: Tensor,
        step: Step,
        mean_logits: Tensor,
        held_out: tuple[Tensor, Tensor] | None,
        scale: float,
    ) -> tuple[Tensor, Parts]:
        check_enough(self, outputs)
        outputs = full(outputs)
        targets = smooth_labels(y, outputs.shape[-1], self.label_smoothing)
        shares = class_weighted(self.class_weights, outputs, y, step.weights)
        losses = step.mean(self.likelihood.per_example(outputs, targets), shares)
        strength = self._strength(step, losses)
        with torch.no_grad():
            hardness = ensemble_losses(mean_logits, y)
            weights = weights_from_losses(hardness, self.weighting)
            if (guard := guard_of(self.guard)) is not None:
                weights = weights * guard.factor(Seen(weights, hardness, strength, held_out))
        weighted, value = self._regulariser(outputs, weights)
        loss = losses.mean() + strength * weighted
        parts = {"loss": losses.detach(), "pair_term": value.detach(), "weight": weights.mean()}
        return scale * len(outputs) * loss, parts

    def _strength(self, step: Step, like: Tensor) -> Tensor:
        strength = self.strength(step.progress) if callable(self.strength) else self.strength
        if isinstance(strength, Tensor) and strength.numel() == 1:
            return strength.reshape(()).to(like)
        check_strength(strength)
        return torch.full((), float(strength), dtype=like.dtype, device=like.device)

    def _regulariser(self, logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted term, and the unweighted one for the log."""
        half = 0.5 if self.reduction == "document" else 1.0
        if self.regulariser == "divdis":
            value = divdis(logits.softmax(-1), weights=weights)
            return half * weights.mean() * value, value
        term = oriented(pair_term(self.regulariser), self.orientation)
        values = mean_over_pairs(logits.log_softmax(-1), term)
        return half * (weights * values).mean(), values.mean()


def _others(rows: Tensor, num_members: int) -> Tensor:
    """Return the members that are not among the rows; their number is known beforehand."""
    drawn = torch.zeros(num_members, dtype=torch.int64, device=rows.device).index_fill(0, rows, 1)
    return drawn.argsort(stable=True)[: num_members - len(rows)]


def check_strength(strength: object) -> None:
    """Refuse what is no strength of disagreement."""
    if not isinstance(strength, Real) or not 0 <= float(strength) < inf:
        raise ValueError(
            f"`strength` must be a finite number that is not negative; got {strength!r:.60}. Choose one, such as 0.5."
        )


def check_active(active: int | None) -> None:
    """Refuse to compare fewer than two members."""
    if active is not None and (not isinstance(active, Integral) or active < 2):
        raise ValueError(
            f"`active` must be a whole number from 2 on, or None for all members; got {active!r}."
        )


def check_enough(objective: object, outputs: Tensor) -> None:
    """Refuse a single member."""
    if len(outputs) < 2:
        raise ValueError(
            f"{type(objective).__name__} compares members, and this ensemble has one. Give it two or more."
        )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be {' or '.join(map(repr, allowed))}; got {value!r}.")
