"""What `fit` minimises: `(members, x, y, step) -> (loss, parts)`."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from dissensus._signatures import checked, real_number, refuse
from dissensus.data.trees import Tree
from dissensus.members import View
from dissensus.objectives.likelihoods import (
    IGNORED,
    Likelihood,
    binary_losses,
    check_class_weights,
    class_weighted,
    likelihood_of,
    smooth_answers,
    smooth_labels,
)
from dissensus.objectives.losses import Others
from dissensus.randomness import Noise, fold

if TYPE_CHECKING:
    from dissensus.objectives.joint import Joint

Parts = dict[str, Tensor]
# From targets and weights of examples to weights of what is averaged.
Weigh = Callable[[Tensor, Tensor | None], Tensor | None]
Batches = Literal["own", "shared"]
BatchNorm = Literal["eval", "mix", "train"]


@dataclass(frozen=True)
class Whole:
    """The batch that a step takes part by part: its targets and weights, those of the part, and the part's share of its examples."""

    y: Tensor
    weights: Tensor | None
    part_y: Tensor
    part_weights: Tensor | None
    share: float

    @property
    def factor(self) -> Tensor | float:
        """By what a mean over the part is multiplied so that parts count by their weights where they are added up by their shares."""
        if self.weights is None or self.part_weights is None:
            return 1.0
        return _total(self.part_weights) / (self.share * _total(self.weights))


def mean_over(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return means over the last axis, sum(w · values) / sum(w) where there are weights."""
    if weights is None:
        return values.mean(-1)
    weights = weights.to(values.dtype)
    return (weights * values).sum(-1) / _total(weights)


def _total(weights: Tensor) -> Tensor:
    """Return the sum of weights; a batch in which nothing counts has loss zero."""
    return weights.sum(-1).clamp_min(torch.finfo(weights.dtype).tiny)


@dataclass
class Step:
    """Where training stands, the noise that belongs to it, and second streams of data.

    Attributes:
        index: Number of the step in the run, from 0; a tensor.
        total: Steps in the whole run.
        own: Whether `x`, `y`, `streams` and `weights` have a leading member axis (each member sees a batch of its own).
        member_keys: Keys of the members' noise, a hash of (seed, member), `(members,)`.
        shared_key: Key of the noise that all share.
        streams: Batches of further data by name (`"unlabelled"`, ...).
        weights: Weights of the batch's examples; None where all count the same.
        whole: The batch of which this one is a part; None where it is whole.
        others: Members that other processes run, for objectives that say they need no more than means over them.
    """

    index: Tensor
    total: int
    own: bool
    member_keys: Tensor
    shared_key: Tensor
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None
    whole: Whole | None = None
    others: Others | None = None
    _draws: int = 0

    @property
    def progress(self) -> Tensor:
        """Share of the run that is done, from 0 towards 1."""
        return self.index / self.total

    def mean(self, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return means over the batch, the last axis, of losses of its examples: sum(w · loss) / sum(w), by the step's own weights.

        Of a part of a batch it is sum(w · loss) over the part's share of the whole's sum(w), so that parts added up by their shares give
        the whole's mean; by weights that the whole does not have, the part's mean times `whole.factor`.
        """
        own, whole = weights is None, self.whole
        weights = self.weights if weights is None else weights
        if weights is None or whole is None or whole.weights is None:
            return mean_over(losses, weights)
        if own and self.weights is whole.part_weights:
            return (weights.to(losses.dtype) * losses).sum(-1) / (whole.share * _total(whole.weights.to(losses.dtype)))
        return mean_over(losses, weights) * whole.factor

    def weighing(self, y: Tensor, weigh: Weigh) -> "Step":
        """Return this step with other weights for `mean`, `weigh(targets, weights)`; the whole's too where these are a part's own."""
        whole, weights = self.whole, weigh(y, self.weights)
        if whole is not None and y is whole.part_y and self.weights is whole.part_weights:
            whole = replace(whole, weights=weigh(whole.y, whole.weights), part_weights=weights)
        return replace(self, weights=weights, whole=whole)

    def inputs(self, name: str, like: Any) -> Any:
        """Return the batch of a second stream of inputs, real numbers in the precision of `like`; None where there is none."""
        if isinstance(like, Tree):
            if f"{name}.0" not in self.streams:
                return None
            return Tree([self.inputs(f"{name}.{place}", leaf) for place, leaf in enumerate(like.leaves)], like.spec)
        batch = self.streams.get(name)
        if batch is None or not (batch.is_floating_point() and like.is_floating_point()):
            return batch
        return batch.to(like.dtype)

    def noise(self, *, shared: bool = False, rows: Tensor | None = None) -> Noise:
        """Return noise of this step that no earlier call returned: `step.noise().normal(3)` is `(members, 3)`, or of some `rows` of them.

        It depends on (seed, member, step); `shared` noise, `(3,)`, on (seed, step).
        """
        self._draws += 1
        keys = self.shared_key if shared else self.member_keys if rows is None else self.member_keys[rows]
        return Noise(fold(keys, self.index)).at(self._draws)

    def pass_keys(self, rows: Tensor | None = None) -> Tensor:
        """Return the keys of the noise inside members (dropout), `(members,)`; no call of `noise` shares it."""
        return fold(fold(self.member_keys if rows is None else self.member_keys[rows], self.index), 0)


class Objective(ABC):
    """What `fit` minimises. Subclasses are frozen dataclasses.

    Attributes:
        batches: Whether members see batches of their own by default, or must share them because they are compared.
        streams: Names of second data streams that it reads.
        couples: Whether one member's loss depends on other members.
    """

    batches: ClassVar[Batches] = "shared"
    streams: ClassVar[tuple[str, ...]] = ()
    couples: ClassVar[bool] = True
    _in_words: ClassVar[str] = "an objective, such as Independent()"

    @property
    @abstractmethod
    def likelihood(self) -> Likelihood:
        """What outputs mean, and the loss that validation reports."""

    @abstractmethod
    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the loss, summed over members, and named parts for the log: scalars or `(members,)`, detached."""

    def prepare(self, x: Any) -> Self:
        """Return this objective with what it needs to know of the training inputs."""
        return self

    def uniform_where_masked(self) -> "Objective":
        """Return this objective with the uniform distribution as the target of anchored networks' masked examples, or refuse."""
        from dissensus.objectives.hard_delta import MaskedUniform

        return MaskedUniform(self)

    def pick(self, step: Step, num_members: int) -> Tensor | None:
        """Return the distinct rows of the members that this step trains, or None for all."""
        return None

    def stream_data(self) -> Mapping[str, Any]:
        """Return data that the objective brings along, as `fit` takes `unlabelled`; a batch of each is in `step.streams` by its name.

        What has one name before a dot (`"held_out.x"`, `"held_out.y"`) is as long as each other and drawn together.
        """
        return {}


@dataclass(frozen=True)
class FunctionObjective(Objective):
    """A function of (members, x, y, step) as an objective; what it has of `batches`, `streams`, `couples` and `likelihood` holds."""

    function: Callable[..., tuple[Tensor, Parts]]
    usual: Likelihood

    batches = property(lambda self: getattr(self.function, "batches", "shared"))
    streams = property(lambda self: getattr(self.function, "streams", ()))
    couples = property(lambda self: getattr(self.function, "couples", True))
    likelihood = property(lambda self: getattr(self.function, "likelihood", self.usual))

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return what the function returns."""
        return self.function(members, x, y, step)


def as_objective(given: Any, usual: Likelihood) -> Objective:
    """Return an objective, or a function `(members, x, y, step) -> (loss, parts)` as one whose outputs are read as usual."""
    if isinstance(given, Objective):
        return given
    called = given.forward if isinstance(given, torch.nn.Module) else given
    try:
        inspect.signature(called).bind(*range(4))
        takes_four = not (isinstance(given, type) or str(getattr(called, "__module__", "")).startswith("torch."))
    except (TypeError, ValueError):
        takes_four = False
    if not takes_four:
        name = getattr(given, "__name__", type(given).__name__)
        raise ValueError(
            f"`objective` must be an objective, such as Independent(), or a function of (members, x, y, step); got {name}. A loss of "
            "(output, target), one value an example, goes into one: Independent(loss)."
        )
    return FunctionObjective(given, usual)


class OutputObjective(Objective):
    """An objective that needs nothing but the members' outputs.

    Attributes:
        needs: What of members that other processes run: `"nothing"`, `"means"` over members, which it takes through `step.others`, or all
            `"outputs"`.
    """

    needs: ClassVar[Literal["nothing", "means", "outputs"]] = "outputs"

    _in_words: ClassVar[str] = "an objective on outputs, such as Independent()"

    @property
    def outputs_only(self) -> bool:
        """Whether `on_outputs` is all there is to it; false where `__call__` also runs members on something else."""
        return True

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Run the members and judge their outputs."""
        return self.on_outputs(members.each(x) if step.own else members(x), y, step)

    @abstractmethod
    def on_outputs(self, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return loss and parts of outputs `(members, batch, ...)` for targets `(batch, ...)` or `(members, batch, ...)`."""

    def on_outputs_of(self, members: View, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return `on_outputs` for outputs of these members; what runs members itself calls this one.

        To be overridden where the loss depends on whether members share their parameters.
        """
        return self.on_outputs(outputs, y, step)


def as_rows(
    likelihood: Likelihood, class_weights: tuple[float, ...] | None, outputs: Tensor, y: Tensor, step: Step
) -> tuple[Tensor, Tensor, Step]:
    """Return outputs, targets and the step with what is averaged as rows: each position, weighed by example and class."""
    likelihood.check_ignored(outputs)
    has_positions = likelihood.has_positions(outputs)
    if has_positions and likelihood.kind == "labels" and class_weights is not None:
        raise ValueError(
            f"`class_weights` of {likelihood.name} are for outputs (batch, labels); these have positions, {tuple(outputs.shape[1:])} with "
            "the batch. Weigh them in a loss of your own."
        )
    rows, targets, _ = likelihood.rows(outputs, y, own=step.own)

    def weigh(y: Tensor, given: Tensor | None) -> Tensor | None:
        if has_positions:
            y, given = likelihood.positions(y, given, own=step.own)
        # Labels of yes or no are weighed in the loss of each.
        return given if likelihood.kind == "labels" else class_weighted(class_weights, rows, y, given)

    return rows, targets, step.weighing(y, weigh)


def one_answer(objective: Objective, outputs: Tensor) -> Tensor:
    """Return outputs `(members, batch, outputs)`, or refuse those with positions for an objective that takes none."""
    if objective.likelihood.has_positions(outputs):
        raise ValueError(
            f"{type(objective).__name__} takes one answer an input, (members, batch, outputs); these have positions, "
            f"{tuple(outputs.shape)}. Take Independent, Joint or LossGuided."
        )
    return outputs


def check_class_settings(objective: "Independent | Joint") -> None:
    """Refuse what an objective says of classes where its loss has none, and shares and weights that cannot be meant."""
    likelihood = objective.likelihood
    real_number("label_smoothing", objective.label_smoothing, below=1.0)
    check_class_weights(objective.class_weights, likelihood)
    answers, positions = likelihood.kind in ("classes", "labels"), likelihood.kind == "classes"
    set_positions = objective.class_axis is not None or objective.ignore_index != IGNORED
    refuse(
        {
            f"`label_smoothing` is for class labels; the loss is {likelihood.name!r}.": objective.label_smoothing > 0
            and not answers,
            f"`class_axis` and `ignore_index` are for class indices; the loss is {likelihood.name!r}.": set_positions
            and not positions,
        }
    )


@dataclass(frozen=True)
class Wrapper(Objective):
    """An objective around another one: what it does not say itself, the inner one says."""

    inner: Objective

    likelihood = property(attrgetter("inner.likelihood"))
    batches = property(attrgetter("inner.batches"))
    streams = property(attrgetter("inner.streams"))
    couples = property(attrgetter("inner.couples"))

    def prepare(self, x: Any) -> Self:
        """Prepare the inner objective."""
        inner = self.inner.prepare(x)
        return self if inner is self.inner else replace(self, inner=inner)

    def uniform_where_masked(self) -> Objective:
        """As the inner objective."""
        return replace(self, inner=self.inner.uniform_where_masked())

    def pick(self, step: Step, num_members: int) -> Tensor | None:
        """As the inner objective."""
        return self.inner.pick(step, num_members)

    def stream_data(self) -> Mapping[str, Any]:
        """That of the inner objective."""
        return self.inner.stream_data()


@checked
@dataclass(frozen=True)
class Independent(OutputObjective):
    r"""Train every member on its own.

    $$\sum_m \frac1B \sum_b \ell(f_m(x_{mb}), y_{mb})$$

    Args:
        loss: `"cross_entropy"`, `"brier"` (logits), `"mse"`, `"mae"`, `"gaussian_nll"` or `"laplace_nll"` (a head that gives mean and rho),
            `"poisson"` (log-rates), `"pinball"` (quantiles, see `Pinball`), `"binary_cross_entropy"` (several labels, yes or no each); or
            your own, a function of (output, target) that returns one value for each example. Losses of several targets are summed.
        label_smoothing: Share of each target given to the uniform distribution (classification).
        over_classes: Divide by the number of classes, as a mean over batch *and* classes does; it only rescales the loss.
        class_weights: Weight of each class, as in torch's `cross_entropy`: examples count by that of their label. With
            `"binary_cross_entropy"` as in torch's loss of that name: each label's loss times its weight.
        class_axis: Where classes are in outputs with positions, such as 2 of `(members, batch, classes, height, width)`; found by default.
        ignore_index: Class index of positions that do not count.

    Example:
        >>> Independent("gaussian_nll").likelihood.kind
        'density'
    """

    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy"
    label_smoothing: float = 0.0
    over_classes: bool = False
    class_weights: tuple[float, ...] | None = None
    class_axis: int | None = None
    ignore_index: int = IGNORED

    batches: ClassVar[Batches] = "own"
    couples: ClassVar[bool] = False
    needs = "nothing"

    def __post_init__(self) -> None:
        likelihood = self.likelihood  # kept from now on: a compiled step cannot make it
        check_class_settings(self)
        if likelihood.kind != "classes" and self.over_classes:
            raise ValueError(f"`over_classes` is for class labels; the loss is {self.loss!r}.")

    @cached_property
    def likelihood(self) -> Likelihood:
        """What outputs mean."""
        return replace(likelihood_of(self.loss), class_axis=self.class_axis, ignore_index=self.ignore_index)

    def on_outputs(self, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the sum of the members' mean losses, and each one's."""
        likelihood = self.likelihood
        outputs, y, step = as_rows(likelihood, self.class_weights, outputs, y, step)
        if likelihood.kind == "labels":
            targets = smooth_answers(y, self.label_smoothing)
            losses = step.mean(binary_losses(outputs, targets, self.class_weights))
        else:
            targets = smooth_labels(y, outputs.shape[-1], self.label_smoothing)
            losses = step.mean(likelihood.losses(outputs, targets, own=step.own))
        if self.over_classes:
            losses = losses / outputs.shape[-1]
        return losses.sum(), {"loss": losses.detach()}


@checked
@dataclass(frozen=True)
class NormPenalty(Wrapper):
    r"""Add the norm of each member's parameters, not squared as in weight decay: $w\,\lVert\theta_m\rVert_2$."""

    weight: float

    def __post_init__(self) -> None:
        real_number("weight", self.weight)

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the inner loss plus the weighted norms."""
        loss, parts = self.inner(members, x, y, step)
        norms = members.parameter_norms()
        return loss + self.weight * norms.sum(), {**parts, "norm": norms.detach()}
