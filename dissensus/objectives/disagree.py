"""Members that are made to disagree on inputs from outside: the objective that `fit` takes, and a split that finds such inputs."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dissensus._signatures import checked
from dissensus.data.features import CachedFeatures, content_of
from dissensus.data.sources import Array, Inputs, all_inputs, as_tensor
from dissensus.data.trees import join_rows
from dissensus.members import View
from dissensus.objectives.disagreement import Orientation, PairTerm, divdis, pair_term
from dissensus.objectives.likelihoods import full
from dissensus.objectives.loss_guided import DrawsMembers
from dissensus.objectives.losses import class_labels
from dissensus.objectives.objective import BatchNorm, Parts, Step
from dissensus.types import Correct


@checked
@dataclass(frozen=True)
class Disagree(DrawsMembers):
    r"""Train members to fit labelled data and to disagree on other inputs.

    $$M\left[\frac1A \sum_{m \in I} \mathrm{CE}_m(x, y) + \lambda\, R\big(p^m(x') : m \in I\big)\right]$$

    with I all M members, or the A drawn for the step, and R the mean of a pair term over pairs of them and inputs x', or `divdis`. The
    factor M keeps each member's gradient at the scale of that member trained alone, on average over draws; see `LossGuided`.

    With `sequential=True` members are trained one after another, each for the same share of the run, against all before it, which are
    frozen in evaluation mode. Members that come later stay as they were made until it is their turn. The schedule goes over the
    whole run; give a function of (epoch, epochs) to start it again for each member. Anchored networks are trained so too, each
    against every earlier network with each of its references.

    Args:
        ood_data: Inputs to disagree on; or give them to `fit` as `unlabelled`.
        regulariser: A name of `PAIR_TERMS`, `"divdis"`, or a function of two members' log-probabilities. DivDis holds members near their
            mean prediction on the labelled batch.
        strength: $\lambda$.
        active: Members drawn for a step, without replacement; None for all.
        sequential: Train members one after another.
        orientation: Which member of a pair names the class (or comes first in another term): the `"first"` by number, that is the
            earlier one in a sequence, the `"second"`, or `"both"`, summed.
        label_smoothing: Share of each target given to the uniform distribution.
        class_weights: Weight of each class in the cross-entropy: examples count by that of their label.
        batch_norm: What BatchNorm does with x'. `"mix"`: x and x' are one batch. `"eval"`: it takes its running statistics on x', as in
            use, and leaves them alone. `"train"`: x' is a batch of its own. `"mix"` and `"train"` update running statistics, and
            `regulariser_in_use` reports the term as in evaluation. In short runs of a small network `"eval"` cost 15 points of accuracy at
            strength 0.3 where `"mix"` cost 0 to 4, for the same disagreement.

    References:
        Pagliardini et al., 2023, <https://arxiv.org/abs/2202.04414>; Lee et al., 2023, <https://arxiv.org/abs/2202.03418>.
    """

    ood_data: Inputs | tuple[Array, Array] | None = field(default=None, repr=False, compare=False)
    regulariser: str | PairTerm = "a2d"
    strength: float = 1.0
    active: int | None = None
    sequential: bool = False
    orientation: Orientation = "first"
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    batch_norm: BatchNorm = "mix"

    streams: ClassVar[tuple[str, ...]] = ("unlabelled",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequential and (self.active is not None or self.regulariser == "divdis"):
            raise ValueError(
                "sequential=True trains one member at a time against pairs with the earlier ones. "
                "Leave `active` out, and use a pair term such as 'a2d'."
            )

    def stream_data(self) -> Mapping[str, Tensor]:
        """Return the inputs to disagree on, if they came with the objective."""
        if self.ood_data is None:
            return {}
        inputs = all_inputs(self.ood_data, "ood_data")
        if len(inputs) == 0:
            raise ValueError("`ood_data` must have inputs to disagree on; it is empty.")
        return {"unlabelled": inputs}

    def side_data(self) -> Mapping[str, object]:
        """Return the inputs to disagree on."""
        return {"unlabelled": self.ood_data}

    def pick(self, step: Step, num_members: int) -> Tensor | None:
        """Draw members, or take the one whose turn it is."""
        if not self.sequential:
            return super().pick(step, num_members)
        if step.total < num_members:
            raise ValueError(
                f"sequential=True trains one member after another; got {step.total} steps for {num_members} members. Train longer."
            )
        return (step.index * num_members // step.total).clamp(max=num_members - 1).reshape(1)

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the loss on labelled data plus the weighted regulariser on the others, and both."""
        others = step.inputs("unlabelled", x)
        if others is None:
            raise ValueError("Disagree needs inputs to disagree on: Disagree(ood_data), or unlabelled=... in `fit`.")
        outputs, elsewhere = self._run(members, x, others, rows=y.shape[0])
        losses = self.member_losses(outputs, y, step)
        value = self._term(members, outputs, elsewhere, others)
        parts = {"loss": losses.detach(), "regulariser": value.detach()}
        if self.batch_norm != "eval":
            with members.evaluating():
                in_use = full(members(others))
            parts["regulariser_in_use"] = self._term(members, outputs, in_use, others).detach()
        # In a sequence each member has its own share of the run, in which it trains as it would alone.
        scale = 1.0 if self.sequential else self.scale(step, outputs, members)
        loss = scale * len(outputs) * (losses.mean() + self.strength * value)
        return loss, parts

    def _run(self, members: View, x: Any, others: Any, rows: int) -> tuple[Tensor, Tensor]:
        """Return what members say of the batch and of the other inputs."""
        if self.batch_norm == "mix":
            both = full(members(join_rows([x, others])))
            return both[:, :rows], both[:, rows:]
        outputs = full(members(x))
        with members.normalised_as_in_use() if self.batch_norm == "eval" else nullcontext():
            return outputs, full(members(others))

    def _term(self, members: View, outputs: Tensor, elsewhere: Tensor, inputs: Tensor) -> Tensor:
        """Return how much members still agree on the other inputs."""
        if self.sequential:
            return self._against_earlier(members, elsewhere, inputs)
        self.check_enough(outputs)
        if self.regulariser == "divdis":
            return divdis(elsewhere.softmax(-1), prior=outputs.detach().softmax(-1).mean((0, 1)))
        return self.mean_over_pairs(elsewhere).mean()

    def _against_earlier(self, members: View, elsewhere: Tensor, inputs: Any) -> Tensor:
        """Return the pair term with each earlier member, averaged; 0 for the first member."""
        if members.rows is None or not members.members.separate:
            raise ValueError(
                "sequential=True freezes earlier members, so members must own their parameters, as those of a DeepEnsemble "
                "do. Leave it out."
            )
        everyone = members.whole
        with everyone.evaluating():
            frozen = full(everyone(inputs)).log_softmax(-1)
        term = pair_term(self.regulariser, self.orientation)
        # One row in training; in evaluation one for each reference of an anchored network.
        values = term(frozen[:, None], elsewhere.log_softmax(-1)).mean((-1, -2))
        # A network may be several members in evaluation, one for each of its references, side by side.
        members_each = len(frozen) // everyone.members.num_trained
        networks = torch.arange(len(frozen), device=inputs.device) // members_each
        earlier = networks < members.rows
        return torch.where(earlier, values, 0.0).sum() / earlier.sum().clamp_min(1)


@checked
def low_confidence(logits: Array, threshold: float = 0.2, labels: Array | None = None) -> Correct:
    r"""Which examples a trained model is unsure of: $\max_c p_c < t$, or $p_y < t$ where labels are given.

    Args:
        logits: Logits of one model, `(batch, classes)`.
        threshold: The confidence below which an example counts as such.
        labels: True class indices, `(batch,)`, to look at the probability of the true class instead.

    Returns:
        `(batch,)`, true for unsure ones.

    Example:
        >>> low_confidence(torch.tensor([[0.0, 0.0], [3.0, 0.0]]), threshold=0.6)
        tensor([ True, False])
    """
    logits = as_tensor(logits, "logits")
    if logits.ndim != 2:
        raise ValueError(
            f"`logits` must be those of one model, (batch, classes); got shape {tuple(logits.shape)}. Of an ensemble pass one member's, "
            "`logits[0]`, or their mean."
        )
    probs = full(logits.float() if not logits.is_floating_point() else logits).softmax(-1)
    if labels is None:
        return probs.amax(-1) < threshold
    return probs.gather(-1, class_labels(as_tensor(labels, "labels"), logits[None])[:, None]).squeeze(-1) < threshold


@checked
def two_stage(
    x: Array | CachedFeatures, y: Array | None, logits: Array, threshold: float = 0.2, **options: Any
) -> tuple[tuple[Tensor, Tensor] | CachedFeatures, Disagree]:
    """Split training data by a trained model's confidence: fit the sure examples, disagree on the unsure ones.

    The alternative to `LossGuided` that decides beforehand, once and for all, which examples are hard.

    Args:
        x: Training inputs, or features of `cache_features` in one pass.
        y: Their class indices; None for those that come with the features.
        logits: What a trained model says of them, `(batch, classes)`.
        threshold: Examples with a lower largest probability are to be disagreed on.
        **options: Those of `Disagree`, such as `strength` and `active`.

    Returns:
        The data and the objective that `ds.fit` takes; both hold features where `x` does.

    Example:
        >>> x, y = torch.randn(100, 4), torch.randint(0, 3, (100,))
        >>> data, objective = two_stage(x, y, torch.randn(100, 3), threshold=0.5, active=2)
        >>> len(data[0]) + len(objective.ood_data)
        100
    """
    unsure = low_confidence(logits, threshold)
    if len(unsure) != len(x):
        raise ValueError(
            f"`logits` must have a row for each training input; got {len(unsure)} rows for {len(x)} inputs. Predict on the same data."
        )
    if bool(unsure.all()) or not bool(unsure.any()):
        raise ValueError(
            f"The threshold must split the data; {int(unsure.sum())} of {len(unsure)} examples have a confidence below "
            f"{threshold:g}. Choose another."
        )
    if isinstance(x, CachedFeatures):
        return _some_rows(x, y, ~unsure), Disagree(_some_rows(x, y, unsure), **options)
    if y is None:
        raise ValueError(
            "`y` must be the class indices of the training inputs; got None, which only cached features may have."
        )
    x, y = as_tensor(x, "x"), as_tensor(y, "y")
    return (x[~unsure], y[~unsure]), Disagree(x[unsure], **options)


def _some_rows(data: CachedFeatures, y: Array | None, chosen: Tensor) -> CachedFeatures:
    """Return chosen rows of features of one pass, in memory, as features of the same backbone."""
    if data.passes > 1:
        raise ValueError(
            f"Features can be split where they are of one pass; these are of {data.passes}. Cache them again with passes=1."
        )
    labels = data.targets if y is None else as_tensor(y, "y")
    rows = data.features[chosen if isinstance(data.features, Tensor) else chosen.numpy()]
    features = rows if isinstance(rows, Tensor) else torch.from_numpy(rows)
    targets = None if labels is None else labels[chosen]
    content = content_of(features, targets, 0)
    return replace(data, features=features, targets=targets, data="", content=content, path=None)
