"""Members that are made to disagree: terms on their predictions, the objective that `fit` takes, and a split that finds inputs for it."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import log
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dissensus._checks import compute_dtype
from dissensus._signatures import checked, real_number, whole_number
from dissensus.data.features import CachedFeatures, content_of
from dissensus.data.sources import Array, Inputs
from dissensus.data.trees import as_tensor, join_rows
from dissensus.members import View
from dissensus.objectives.likelihoods import LIKELIHOODS, check_class_weights, full, in_full_precision, smooth_labels
from dissensus.objectives.losses import class_labels
from dissensus.objectives.objective import BatchNorm, Objective, Parts, Step, as_rows, mean_over, one_answer
from dissensus.randomness import fold
from dissensus.types import Correct, MemberLogits, Probs, Scalar, Scores

PairTerm: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Orientation: TypeAlias = Literal["first", "second", "both"]


@checked
def a2d(probs_m: Probs, probs_l: Probs, eps: float = 1e-9) -> Scores:
    r"""Agreement of two members on the class that the first one predicts.

    $$-\log\big(p^m_{\hat y}(1 - p^l_{\hat y}) + p^l_{\hat y}(1 - p^m_{\hat y}) + \epsilon\big),
      \qquad \hat y = \arg\max_c p^m_c$$

    Args:
        probs_m: Probabilities of the member that names the class, `(batch, classes)`.
        probs_l: Probabilities of the other member, `(batch, classes)`.
        eps: Keeps the logarithm finite. Training uses `a2d_from_logits`, which needs none.

    Returns:
        `(batch,)`, in nats. Reading: 0 when exactly one of the two is certain of the class; $\log 2$ when the first gives it one half;
        $-\log\epsilon$ when both are certain of it. Lower means that they disagree more.

    Example:
        >>> a2d(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]]))
        tensor([0.6931])

    References:
        Pagliardini et al., 2023, <https://arxiv.org/abs/2202.04414>.
    """
    _check_classes(probs_m, probs_l, "probs", same=probs_m.shape == probs_l.shape)
    chosen = probs_m.argmax(-1, keepdim=True)
    said_m, said_l = (probs.gather(-1, chosen).squeeze(-1) for probs in (probs_m, probs_l))
    return -torch.log(said_m * (1 - said_l) + said_l * (1 - said_m) + eps)


@checked
def a2d_from_logits(logits_m: Tensor, logits_l: Tensor, orientation: Orientation = "first") -> Tensor:
    r"""`a2d` without `eps`, computed in logarithms.

    Args:
        logits_m: Logits of one member, `(..., batch, classes)`.
        logits_l: Logits of the other; leading axes broadcast.
        orientation: Who names the class: the `"first"` member, the `"second"`, or `"both"`, which is the sum of the two forms.

    Returns:
        `(..., batch)`, in nats. Reading: as `a2d`, but of two members certain of one class it grows with how certain they are, and its
        gradient points apart, however saturated their logits.

    Example:
        >>> one_hot = torch.tensor([[200.0, 0.0]])
        >>> round(a2d_from_logits(one_hot, one_hot).item(), 3)
        199.307
    """
    _check_classes(logits_m, logits_l, "logits")
    log_m, log_l = (full(logits).log_softmax(-1) for logits in (logits_m, logits_l))
    return pair_term("a2d", orientation)(log_m, log_l)


def _check_classes(first: Tensor, second: Tensor, name: str, same: bool = True) -> None:
    real = first.is_floating_point() and second.is_floating_point()
    if not real or not same or not first.ndim or not second.ndim or first.shape[-1] != second.shape[-1]:
        came = " and ".join(f"{each.dtype} {tuple(each.shape)}" for each in (first, second))
        raise ValueError(f"`{name}_m` and `{name}_l` must be real numbers of one shape, classes last; got {came}.")


def _a2d(log_probs_m: Tensor, log_probs_l: Tensor) -> Tensor:
    # A mask, not gather and scatter: scattering into an expanded tensor is compiled to wrong values (torch 2.13, CPU).
    classes = torch.arange(log_probs_m.shape[-1], device=log_probs_m.device)
    chosen = classes == log_probs_m.argmax(-1, keepdim=True)
    said_m, said_l = (torch.where(chosen, each, 0.0).sum(-1) for each in (log_probs_m, log_probs_l))
    # log(1 - p) as the sum of the others: 1 - p itself rounds to 0 near certainty.
    denied_m, denied_l = (torch.where(chosen, -torch.inf, each).logsumexp(-1) for each in (log_probs_m, log_probs_l))
    return -torch.logaddexp(said_m + denied_l, said_l + denied_m)


def _negative_kl(log_probs_m: Tensor, log_probs_l: Tensor) -> Tensor:
    return -(log_probs_m.exp() * (log_probs_m - log_probs_l)).sum(-1)


def _negative_jensen_shannon(log_probs_m: Tensor, log_probs_l: Tensor) -> Tensor:
    log_middle = torch.logaddexp(log_probs_m, log_probs_l) - log(2)
    return (_negative_kl(log_probs_m, log_middle) + _negative_kl(log_probs_l, log_middle)) / 2


def _cosine(log_probs_m: Tensor, log_probs_l: Tensor) -> Tensor:
    return F.cosine_similarity(log_probs_m.exp(), log_probs_l.exp(), dim=-1)


PAIR_TERMS: Mapping[str, PairTerm] = MappingProxyType(
    {"a2d": _a2d, "kl": _negative_kl, "jensen_shannon": _negative_jensen_shannon, "cosine": _cosine}
)
"""Name to function of the log-probabilities of two members, `(..., batch, classes)` each, to `(..., batch)`.

Lower: the two predictions differ more. `"a2d"` is `a2d_from_logits` (from 0 up), `"kl"` minus the divergence of the second from the first
(without a lower bound), `"jensen_shannon"` minus that (from -log 2 to 0), `"cosine"` that of the two probability vectors (from 0 to 1).
"""


def pair_term(regulariser: str | PairTerm, orientation: Orientation = "first") -> PairTerm:
    """Return the pair term of this name, or the function itself, with its arguments as they are, exchanged, or both ways summed."""
    if not callable(regulariser) and regulariser not in PAIR_TERMS:
        names = ", ".join([*PAIR_TERMS, "divdis"])
        raise ValueError(f"`regulariser` must be one of {names}, or a function; got {regulariser!r}.")
    term = regulariser if callable(regulariser) else PAIR_TERMS[regulariser]
    if orientation == "first":
        return term
    if orientation == "second":
        return lambda m, l: term(l, m)  # noqa: E741
    return lambda m, l: term(m, l) + term(l, m)  # noqa: E741


def mean_over_pairs(log_probs: Tensor, term: PairTerm) -> Tensor:
    """Return a pair term averaged over all pairs of members, the earlier one first: `(members, batch, classes)` to `(batch,)`."""
    count = len(log_probs)
    sums = [term(log_probs[m], log_probs[m + 1 :]).sum(0) for m in range(count - 1)]
    return torch.stack(sums).sum(0) / (count * (count - 1) / 2)


@checked
def divdis(probs: MemberLogits, prior: Tensor | None = None, weights: Tensor | None = None) -> Scalar:
    r"""How much members' answers tell of each other, and how far each strays from the known class frequencies.

    $$\frac{1}{|P|}\sum_{(h, g) \in P} \mathrm{KL}\Big(\sum_b w_b\, p^h_b (p^g_b)^\top \,\Big\Vert\, \bar p^h (\bar p^g)^\top\Big)
      + \frac1M \sum_h \mathrm{KL}(\bar p^h \Vert \text{prior}),\qquad \bar p^h = \sum_b w_b\, p^h_b$$

    Args:
        probs: Predicted probabilities on inputs to disagree on, `(members, batch, classes)`.
        prior: Class frequencies to stay near, `(classes,)`; the second part is left out if `None`.
        weights: Weight of each input, not negative, `(batch,)`; they are scaled to sum 1. Uniform if `None`.

    Returns:
        Scalar, in nats. Reading: lower means more different answers. The first part is the mutual information of two members' answers over
        the batch: 0 for independent answers, their entropy (at most $\log C$) for certain copies; a small batch of many classes overstates
        it. The second keeps members from becoming independent by all saying the same.

    Example:
        >>> copies = torch.eye(4).expand(2, 4, 4)  # two members, each certain of another class on each input
        >>> round(divdis(copies).item(), 4)  # log 4
        1.3863

    References:
        Lee et al., 2023, <https://arxiv.org/abs/2202.03418>.
    """
    if probs.ndim != 3 or len(probs) < 2:
        raise ValueError(f"`probs` must be (members, batch, classes), two members or more; got {tuple(probs.shape)}.")
    for name, given, size in (("prior", prior, probs.shape[2]), ("weights", weights, probs.shape[1])):
        if given is not None and given.shape != (size,):
            raise ValueError(f"`{name}` must be shaped ({size},); got {tuple(given.shape)}.")
    # Autocast would multiply in half precision, of which a difference of entropies keeps nothing.
    with in_full_precision(probs):
        return _divdis(probs.to(compute_dtype(probs)), prior, weights)


def _divdis(probs: Tensor, prior: Tensor | None, weights: Tensor | None) -> Tensor:
    if weights is None:
        share = probs.new_full((probs.shape[1],), 1 / probs.shape[1])
    else:
        share = weights.to(probs) / weights.to(probs).sum().clamp_min(torch.finfo(probs.dtype).tiny)
    marginals = torch.einsum("b,mbc->mc", share, probs)
    # I(h; g) = H(h) + H(g) - H(h, g); each member is in M - 1 of the M (M - 1) / 2 pairs.
    joint: Tensor = _MeanNegativeJointEntropy.apply(probs, share)  # type: ignore[no-untyped-call]
    redundancy = joint - 2 * _negative_entropy(marginals).mean()
    if prior is None:
        return redundancy
    return redundancy + (_negative_entropy(marginals) - marginals @ _safe_log(prior.to(probs))).mean()


def _safe_log(values: Tensor) -> Tensor:
    return values.clamp_min(torch.finfo(values.dtype).tiny).log()


def _negative_entropy(probs: Tensor) -> Tensor:
    return (probs * _safe_log(probs)).sum(-1)


class _MeanNegativeJointEntropy(torch.autograd.Function):
    """Sum of J log J over the joint table J of two members' answers, averaged over pairs; one table a time is in memory."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(probs, share)
        pairs = list(combinations(range(len(probs)), 2))
        total = probs.new_zeros(())
        for h, g in pairs:
            joint = (share[:, None] * probs[h]).T @ probs[g]
            total = total + (joint * _safe_log(joint)).sum()
        return total / len(pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        probs, share = ctx.saved_tensors
        pairs = list(combinations(range(len(probs)), 2))
        slopes = [torch.zeros_like(probs[0]) for _ in probs]
        for h, g in pairs:
            slope = _safe_log((share[:, None] * probs[h]).T @ probs[g]) + 1
            slopes[h] = slopes[h] + probs[g] @ slope.T
            slopes[g] = slopes[g] + probs[h] @ slope
        return torch.stack(slopes) * (gradient * share[:, None] / len(pairs)), None


# Up to so many members are drawn one by one, in arithmetic that compiles into the step around it; more by sorting.
_ONE_BY_ONE = 4


class DrawsMembers(Objective):
    """What `LossGuided` and `Disagree` share: members are drawn for a step, fit class labels, and are compared in pairs."""

    strength: float | Callable[[Tensor], Tensor | float]
    active: int | None
    regulariser: str | PairTerm
    orientation: Orientation
    label_smoothing: float
    class_weights: tuple[float, ...] | None

    def __post_init__(self) -> None:
        check_class_weights(self.class_weights, self.likelihood)
        if not callable(self.strength):
            real_number("strength", self.strength)
        whole_number("active", 2 if self.active is None else self.active, 2, tail=", or None for all members")
        real_number("label_smoothing", self.label_smoothing, below=1.0)
        if self.regulariser != "divdis":
            pair_term(self.regulariser)

    likelihood = property(lambda objective: LIKELIHOODS["cross_entropy"])

    def pick(self, step: Step, num_members: int) -> Tensor | None:
        """Draw distinct members for a step, in order of their numbers; None where all take part."""
        count = self.active
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

    def scale(self, step: Step, outputs: Tensor, members: View | None) -> float:
        """Return by what a sum over drawn members is multiplied: M/A to estimate that over all; 1 where they share their parameters."""
        shared = members is not None and members.members.loss_over_members == "mean"
        return 1.0 if shared else len(step.member_keys) / len(outputs)

    def member_losses(self, outputs: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return each drawn member's mean cross-entropy on labelled examples, `(members,)`."""
        outputs, y, step = as_rows(self.likelihood, self.class_weights, outputs, y, step)
        targets = smooth_labels(y, outputs.shape[-1], self.label_smoothing)
        return step.mean(self.likelihood.per_example(outputs, targets))

    def mean_over_pairs(self, logits: Tensor) -> Tensor:
        """Return the pair term of each example, `(batch,)`, the mean over pairs of drawn members; refuse a single member."""
        if len(logits) < 2:
            raise ValueError(f"{type(self).__name__} compares members, and this ensemble has one. Give it two or more.")
        return mean_over_pairs(logits.log_softmax(-1), pair_term(self.regulariser, self.orientation))


@checked
@dataclass(frozen=True)
class Disagree(DrawsMembers):
    r"""Train members to fit labelled data and to disagree on other inputs.

    $$M\left[\frac1A \sum_{m \in I} \mathrm{CE}_m(x, y) + \lambda\, R\big(p^m(x') : m \in I\big)\right]$$

    with I all M members, or the A drawn for the step, and R the mean of a pair term over pairs of them and inputs x', or `divdis`.

    With `sequential=True` members are trained one after another, each for the same share of the run, against all before it, frozen. The
    schedule goes over the whole run; give a function of (epoch, epochs) to start it again for each member.

    Args:
        ood_data: Inputs to disagree on; or give them to `fit` as `unlabelled`.
        regulariser: A name of `PAIR_TERMS`, `"divdis"`, or a function of two members' log-probabilities. DivDis holds members near their
            mean prediction on the labelled batch.
        strength: $\lambda$.
        active: Members drawn for a step, without replacement; None for all.
        sequential: Train members one after another.
        orientation: As in `LossGuided`; the first of a pair is the earlier one in a sequence.
        label_smoothing: As in `LossGuided`.
        class_weights: As in `LossGuided`.
        batch_norm: What BatchNorm does with x'. `"mix"`: x and x' are one batch. `"eval"`: it takes its running statistics on x', as in
            use, and leaves them alone. `"train"`: x' is a batch of its own. `"mix"` and `"train"` update running statistics, and
            `regulariser_in_use` reports the term as in evaluation.
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
            raise ValueError("sequential=True trains one member at a time: no `active`, and a pair term, not 'divdis'.")

    def stream_data(self) -> Mapping[str, Any]:
        """Return the inputs to disagree on, if they came with the objective."""
        return {} if self.ood_data is None else {"unlabelled": self.ood_data}

    def pick(self, step: Step, num_members: int) -> Tensor | None:
        """Draw members, or take the one whose turn it is."""
        if not self.sequential:
            return super().pick(step, num_members)
        if step.total < num_members:
            raise ValueError(f"sequential=True wants more than {step.total} steps for {num_members} members.")
        return (step.index * num_members // step.total).clamp(max=num_members - 1).reshape(1)

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the loss on labelled data plus the weighted regulariser on the others, and both."""
        others = step.inputs("unlabelled", x)
        if others is None:
            raise ValueError("Disagree needs inputs to disagree on: Disagree(ood_data), or unlabelled=... in `fit`.")
        outputs, elsewhere = self._run(members, x, others, rows=y.shape[0])
        losses = self.member_losses(one_answer(self, outputs), y, step)
        value = self._term(members, outputs, elsewhere, others, step)
        parts = {"loss": losses.detach(), "regulariser": value.detach()}
        if self.batch_norm != "eval":
            with members.evaluating():
                in_use = full(members(others))
            parts["regulariser_in_use"] = self._term(members, outputs, in_use, others, step).detach()
        # In a sequence each member has its own share of the run, in which it trains as it would alone.
        scale = 1.0 if self.sequential else self.scale(step, outputs, members)
        return scale * len(outputs) * (losses.mean() + self.strength * value), parts

    def _run(self, members: View, x: Any, others: Any, rows: int) -> tuple[Tensor, Tensor]:
        """Return what members say of the batch and of the other inputs."""
        if self.batch_norm == "mix":
            both = full(members(join_rows([x, others])))
            return both[:, :rows], both[:, rows:]
        outputs = full(members(x))
        with members.normalised_as_in_use() if self.batch_norm == "eval" else nullcontext():
            return outputs, full(members(others))

    def _term(self, members: View, outputs: Tensor, elsewhere: Tensor, inputs: Tensor, step: Step) -> Tensor:
        """Return how much members still agree on the other inputs."""
        if self.sequential:
            return self._against_earlier(members, elsewhere, inputs)
        if self.regulariser == "divdis":
            known = outputs.detach().softmax(-1)
            prior = known.mean((0, 1)) if step.weights is None else mean_over(known.mean(0).T, step.weights)
            return divdis(elsewhere.softmax(-1), prior=prior)
        return self.mean_over_pairs(elsewhere).mean()

    def _against_earlier(self, members: View, elsewhere: Tensor, inputs: Any) -> Tensor:
        """Return the pair term with each earlier member, averaged; 0 for the first member."""
        if members.rows is None or not members.members.separate:
            raise ValueError("sequential=True freezes earlier members; they must own their parameters (DeepEnsemble).")
        everyone = members.whole
        with everyone.evaluating():
            frozen = full(everyone(inputs)).log_softmax(-1)
        term = pair_term(self.regulariser, self.orientation)
        values = term(frozen[:, None], elsewhere.log_softmax(-1)).mean((-1, -2))
        # An anchored network is one row in training; in evaluation several members, one for each of its references, side by side.
        members_each = len(frozen) // everyone.members.num_trained
        networks = torch.arange(len(frozen), device=inputs.device) // members_each
        earlier = networks < members.rows
        return torch.where(earlier, values, 0.0).sum() / earlier.sum().clamp_min(1)


@checked
def low_confidence(logits: Array, threshold: float = 0.2, labels: Array | None = None) -> Correct:
    r"""Which examples a trained model is unsure of, `(batch,)`: $\max_c p_c < t$, or $p_y < t$ where labels are given.

    Args:
        logits: Logits of one model, `(batch, classes)`.
        threshold: The confidence below which an example counts as such.
        labels: True class indices, `(batch,)`, to look at the probability of the true class instead.

    Example:
        >>> low_confidence(torch.tensor([[0.0, 0.0], [3.0, 0.0]]), threshold=0.6)
        tensor([ True, False])
    """
    logits = as_tensor(logits, "logits")
    if logits.ndim != 2:
        raise ValueError(f"`logits` must be of one model, (batch, classes): `logits[0]`; got {tuple(logits.shape)}.")
    probs = logits.to(compute_dtype(logits)).softmax(-1)
    if labels is None:
        return probs.amax(-1) < threshold
    return probs.gather(-1, class_labels(as_tensor(labels, "labels"), logits[None])[:, None]).squeeze(-1) < threshold


@checked
def two_stage(
    x: Array | CachedFeatures, y: Array | None, logits: Array, threshold: float = 0.2, **options: Any
) -> tuple[tuple[Tensor, Tensor] | CachedFeatures, Disagree]:
    """Split training data by a trained model's confidence, once and for all: fit the sure examples, disagree on the unsure ones.

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
        raise ValueError(f"`logits` must have a row for each input; got {len(unsure)} rows for {len(x)} inputs.")
    if (count := int(unsure.sum())) in (0, len(x)):
        raise ValueError(f"The threshold must split the data; {count} of {len(x)} examples are below {threshold:g}.")
    if isinstance(x, CachedFeatures):
        return _some_rows(x, y, ~unsure), Disagree(_some_rows(x, y, unsure), **options)
    if y is None:
        raise ValueError("`y` must be the class indices of the inputs; got None, which only cached features may have.")
    x, y = as_tensor(x, "x"), as_tensor(y, "y")
    return (x[~unsure], y[~unsure]), Disagree(x[unsure], **options)


def _some_rows(data: CachedFeatures, y: Array | None, chosen: Tensor) -> CachedFeatures:
    """Return chosen rows of features of one pass, in memory, as features of the same backbone."""
    if data.passes > 1:
        raise ValueError(f"Features can be split if cached with passes=1; these are of {data.passes} passes.")
    labels = data.targets if y is None else as_tensor(y, "y")
    features = torch.as_tensor(data.features[chosen.numpy()])
    targets = None if labels is None else labels[chosen]
    content = content_of(features, targets, 0)
    return replace(data, features=features, targets=targets, data="", content=content, path=None)
