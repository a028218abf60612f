r"""How uncertain each input is: `(members, batch, classes)` logits in, `(batch,)` out, higher = less certain.

Throughout, $M$ members with logits $z_m$ and probabilities $p_m = \mathrm{softmax}(z_m)$ see $C$ classes;
$\bar z$ and $\bar p$ are the means of $z_m$ and $p_m$ over members, by weight where weights are given; $H$ is
the entropy in nats. Half precision is computed in float32, and no gradient flows through a score. Every score
also takes `Beliefs` in place of logits, so that many scores share one softmax; `all_scores` does just that.

Dense outputs, such as of segmentation, have positions too: `(members, batch, classes, height, width)`. With `class_axis` a score says
where classes are and returns one value for each position, `(batch, height, width)`; `over_positions` makes one number an input of them.

A regression member $m$ predicts a Gaussian with mean $\mu_m$ and variance $v_m = \sigma_m^2$, or a Laplace distribution with variance
$v_m = 2b_m^2$. Their mixture has mean $\bar\mu$ and a variance of two parts, `data_variance` and `knowledge_variance`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from dissensus._beliefs import VECTOR, by_blocks, deviations
from dissensus._beliefs import Beliefs as Beliefs
from dissensus._checks import brought, check_mean_and_scale, check_tensor, compute_dtype
from dissensus._signatures import checked, whole_number
from dissensus.objectives.losses import shares_of, weighted_mean
from dissensus.types import Float, MemberLogits, MemberOutputs, MemberWeights, Scores

Logits: TypeAlias = MemberLogits | Beliefs
Weights: TypeAlias = MemberWeights | None
Family: TypeAlias = Literal["gaussian", "laplace"]
Variances: TypeAlias = Float[Tensor, "batch ..."]
Score: TypeAlias = Callable[..., Scores]


_scores: dict[str, Score] = {}


def _score(score: Callable[..., Scores]) -> Score:
    """Enter a score of `(members, batch, classes)` in `SCORES`, taking outputs with positions too, given the axis of their classes."""

    @wraps(score)
    def of_positions(logits: Tensor | Beliefs, *, class_axis: int | None = None, **options: Any) -> Tensor:
        if class_axis is None:
            return score(logits, **options)
        rows, shape = as_rows(logits, class_axis)
        return score(rows, **options).reshape(shape)

    _scores[score.__name__] = of_positions
    return of_positions


def as_rows(logits: Tensor | Beliefs, class_axis: int) -> tuple[Tensor, torch.Size]:
    """Return dense outputs with every position as a row, `(members, rows, classes)`, and the shape that rows had."""
    if isinstance(logits, Beliefs):
        raise ValueError("`Beliefs` hold (members, batch, classes); leave `class_axis` out.")
    check_tensor("logits", logits)
    class_axis = whole_number("class_axis", class_axis)
    if not -logits.ndim <= class_axis < logits.ndim or class_axis % logits.ndim < 2:
        raise ValueError(f"`class_axis` must be an axis after members and batch; got {class_axis} of {logits.ndim}.")
    last = logits.movedim(class_axis, -1)
    return last.flatten(1, -2), last.shape[1:-1]


def as_two_classes(logits: Tensor) -> Tensor:
    """Return logits of yes or no, `(members, batch, labels)`, as logits of the two classes no and yes.

    What scores say of each label is then `mutual_information(as_two_classes(logits), class_axis=-1)`, `(batch, labels)`.

    Example:
        >>> as_two_classes(torch.zeros(3, 8, 4)).shape
        torch.Size([3, 8, 4, 2])
    """
    return torch.stack([torch.zeros_like(logits), logits], -1)


@checked
def over_positions(
    values: Tensor,
    how: Literal["mean", "max", "share"] = "mean",
    *,
    limit: float | None = None,
    counts: Tensor | None = None,
) -> Scores:
    """One score an input from the scores of its positions.

    Args:
        values: Scores of positions, `(batch, ...)`, as a score with `class_axis` returns them.
        how: `"mean"`, `"max"`, or `"share"` of positions above `limit`.
        limit: For `"share"`.
        counts: Which positions count, boolean and shaped as `values`; all by default. An input without any gets 0.

    Returns:
        `(batch,)`. Reading: that of the score; the mean finds images that are uncertain all over, the maximum and the share
        those with something uncertain in them.

    Example:
        >>> over_positions(torch.tensor([[[0.0, 1.0], [0.0, 0.6]]]), "share", limit=0.5)
        tensor([0.5000])
    """
    if (how == "share") != (limit is not None):
        raise ValueError("`limit` is the value above which how='share' counts; give it there and nowhere else.")
    flat = values.flatten(1).to(compute_dtype(values))
    kept = torch.ones_like(flat, dtype=torch.bool) if counts is None else counts.flatten(1)
    if how == "max":
        return torch.where(kept, flat, -torch.inf).amax(1).where(kept.any(1), 0.0)
    counted = flat if limit is None else (flat > limit).to(flat.dtype)
    return torch.where(kept, counted, 0.0).sum(1) / kept.sum(1).clamp_min(1)


@_score
def predictive_diversity(logits: Logits) -> Scores:
    r"""Predictive diversity score (PDS): how much probability the members, all alike, claim between them.

    $$\frac{1}{C}\sum_c \max_m p_{m,c}$$

    Returns:
        `(batch,)`, from $1/C$ to $\min(M, C)/C$. Reading: times $C$, it is 1 where members agree, and as many
        as the classes they are sure of between them; for two members, 1 + their total variation distance. Copies of one member,
        and a single one, score exactly $1/C$: there is nothing to rank inputs by.

    Example:
        >>> predictive_diversity(100 * torch.eye(2, 4)[:, None])  # two members, each sure of another class
        tensor([0.5000])
    """
    beliefs = Beliefs.of(logits)
    # A member's probabilities sum to 1 but for rounding, which must not rank inputs: only what others add to them is summed.
    added = (beliefs.largest_probs - beliefs.probs[0]).sum(-1)
    return (1 + added) / beliefs.probs.shape[-1]


@_score
def bma(logits: Logits, *, average: Literal["probs", "logits"] = "probs", weights: Weights = None) -> Scores:
    r"""Doubt of the averaged prediction (Bayesian model average).

    $$1 - \max_c \bar p_c$$

    Args:
        logits: Member outputs, `(members, batch, classes)`.
        average: `"probs"` averages probabilities; `"logits"` takes the softmax of the mean logits instead.
        weights: Member weights with sum 1; equal if `None`.

    Returns:
        `(batch,)`, from 0 to $1 - 1/C$. Reading: the error rate to expect, if the ensemble is calibrated.

    Example:
        >>> bma(100 * torch.eye(2, 4)[:, None])
        tensor([0.5000])
    """
    beliefs = Beliefs.of(logits, weights)
    if average == "probs":
        return 1 - beliefs.answer[0]
    if average == "logits":
        return 1 - beliefs.mean_logits.softmax(-1).amax(-1)
    raise ValueError(f'`average` must be "probs" or "logits"; got {average!r}. Choose one of the two.')


@_score
def num_unique(logits: Logits) -> Scores:
    r"""Number of different classes that members predict.

    $$|\{\arg\max_c z_{m,c} : m = 1, \dots, M\}|$$

    Returns:
        `(batch,)`, whole numbers from 1 to $\min(M, C)$. Reading: 1 is a unanimous vote; many inputs tie.

    Example:
        >>> num_unique(100 * torch.eye(3, 4)[:, None])
        tensor([3.])
    """
    beliefs = Beliefs.of(logits)
    named = torch.zeros_like(beliefs.logits[0], dtype=torch.bool).scatter(-1, beliefs.votes.T, True)
    return named.sum(-1, dtype=beliefs.logits.dtype)


@_score
def mean_energy(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Mean free energy of the members.

    $$-\frac{1}{M}\sum_m \log\sum_c e^{z_{m,c}}$$

    Args:
        logits: Member outputs, `(members, batch, classes)`; a constant added to them is taken off the score.
        weights: Member weights with sum 1; equal if `None`.

    Returns:
        `(batch,)`, unbounded. Reading: high where no class has evidence; compare inputs of one ensemble only.

    Example:
        >>> mean_energy(torch.zeros(3, 1, 4))  # -log 4
        tensor([-1.3863])

    References:
        Liu et al., 2020, <https://arxiv.org/abs/2010.03759>.
    """
    beliefs = Beliefs.of(logits, weights)
    return beliefs.mean(beliefs.energy)


@_score
def energy_of_mean(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Free energy of the mean logits; arguments as in `mean_energy`.

    $$-\log\sum_c e^{\bar z_c}$$

    Returns:
        `(batch,)`, unbounded. Reading: as `mean_energy`, and higher the more members contradict each other.

    Example:
        >>> energy_of_mean(torch.zeros(3, 1, 4))  # -log 4
        tensor([-1.3863])
    """
    return -Beliefs.of(logits, weights).mean_logits.logsumexp(-1)


@_score
def max_logit(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Minus the largest mean logit; arguments as in `mean_energy`.

    $$-\max_c \bar z_c$$

    Returns:
        `(batch,)`, unbounded. Reading: high where no class has evidence; compare inputs of one ensemble only.

    Example:
        >>> max_logit(torch.tensor([[[3.0, 0.0]], [[1.0, 0.0]]]))
        tensor([-2.])
    """
    return -Beliefs.of(logits, weights).mean_logits.amax(-1)


@_score
def total_entropy(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Total uncertainty: entropy of the averaged prediction.

    $$H(\bar p)$$

    Args:
        logits: Member outputs, `(members, batch, classes)`.
        weights: Member weights with sum 1; equal if `None`.

    Returns:
        `(batch,)` nats, from 0 to $\log C$. Reading: 0 is sure, $\log C$ knows nothing, for whichever reason.

    Example:
        >>> total_entropy(100 * torch.eye(2, 4)[:, None])  # log 2
        tensor([0.6931])
    """
    return Beliefs.of(logits, weights).mixture_entropy


@_score
def expected_entropy(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Data uncertainty: mean entropy of the members; arguments as in `total_entropy`.

    $$\frac{1}{M}\sum_m H(p_m)$$

    Returns:
        `(batch,)` nats, from 0 to $\log C$. Reading: high where each member by itself is unsure, as on noise.

    Example:
        >>> expected_entropy(torch.zeros(3, 1, 4))  # log 4
        tensor([1.3863])
    """
    return Beliefs.of(logits, weights).expected_entropy


@_score
def mutual_information(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Knowledge uncertainty: total minus data uncertainty, the members' mean divergence from their mixture.

    $$H(\bar p) - \frac{1}{M}\sum_m H(p_m) = \frac{1}{M}\sum_m \mathrm{KL}(p_m \,\|\, \bar p)$$

    Arguments as in `total_entropy`.

    Returns:
        `(batch,)` nats, from 0 to $\log\min(M, C)$. Reading: 0 where members agree, however unsure they are.

    Example:
        >>> mutual_information(100 * torch.eye(2, 4)[:, None])  # log 2
        tensor([0.6931])

    References:
        Depeweg et al., 2018, <https://arxiv.org/abs/1710.07283>.
    """
    beliefs = Beliefs.of(logits, weights)
    # Of nearly equal entropies the difference is rounding noise, which would rank inputs; the bounds are not.
    bounds = beliefs.disagreement
    return (beliefs.mixture_entropy - beliefs.expected_entropy).clamp(bounds.lower, bounds.upper)


@_score
def mean_max_probability(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Mean doubt of the members, each about its own prediction; arguments as in `total_entropy`.

    $$1 - \frac{1}{M}\sum_m \max_c p_{m,c}$$

    Returns:
        `(batch,)`, from 0 to $1 - 1/C$. Reading: 0 where each is sure, even of another class; at most `bma`.

    Example:
        >>> mean_max_probability(torch.zeros(3, 1, 4))
        tensor([0.7500])
    """
    beliefs = Beliefs.of(logits, weights)
    return 1 - beliefs.mean(beliefs.top_log_probs.exp())


@_score
def predicted_class_variance(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Variance over members of the probability of the class that the ensemble predicts; arguments as in `total_entropy`.

    $$\frac{1}{M}\sum_m (p_{m,k} - \bar p_k)^2, \qquad k = \arg\max_c \bar p_c$$

    Returns:
        `(batch,)`, from 0 to 1/4. Reading: its root is how far members' confidence in the answer differs.

    Example:
        >>> predicted_class_variance(100 * torch.eye(2, 4)[:, None])
        tensor([0.2500])
    """
    beliefs = Beliefs.of(logits, weights)
    index = beliefs.answer[1][None, :, None].expand(len(beliefs.logits), -1, 1)
    member_confidence = beliefs.probs.gather(-1, index).squeeze(-1)
    return beliefs.mean(deviations(member_confidence, beliefs.weights).square())


@_score
def mean_pairwise_kl(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Mean divergence of one member from another.

    $$\frac{1}{M(M-1)}\sum_{m \ne l} \mathrm{KL}(p_m \,\|\, p_l)$$

    Args:
        logits: Member outputs, `(members, batch, classes)`.
        weights: Member weights with sum 1, a pair weighing their product; equal if `None`.

    Returns:
        `(batch,)` nats, from 0, unbounded; 0 for one member. Reading: dominated by members that rule out what
        another believes; `jensen_shannon` is not.

    Example:
        >>> mean_pairwise_kl(torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]]))  # 2 tanh(1)
        tensor([1.5232])
    """
    beliefs = Beliefs.of(logits, weights)
    return beliefs.over_distinct_pairs(beliefs.disagreement.pairwise)


@_score
def jensen_shannon(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Mean Jensen-Shannon divergence of two members.

    $$\frac{2}{M(M-1)}\sum_{m < l} H\left(\frac{p_m + p_l}{2}\right) - \frac{H(p_m) + H(p_l)}{2}$$

    The mean over pairs: the divergence of all members at once is `mutual_information`, which is the same for
    two members of equal weight. Time grows with the square of the number of members, memory does not. Arguments as
    in `mean_pairwise_kl`.

    Returns:
        `(batch,)` nats, from 0 to $\log 2$; 0 for one member. Reading: $\log 2$ where no two share a class.

    Example:
        >>> jensen_shannon(100 * torch.eye(3, 4)[:, None])  # log 2
        tensor([0.6931])
    """
    beliefs = Beliefs.of(logits, weights)
    # For each pair it is at least half of what bounds the mutual information, and at most a quarter of the pair's KL.
    bounds = beliefs.disagreement
    shares = shares_of(beliefs.weights, beliefs.logits)
    pair_mean = by_blocks(partial(_pair_divergence, shares=shares), beliefs.probs, beliefs.member_entropy)
    return beliefs.over_distinct_pairs(pair_mean.clamp(bounds.lower / 2, bounds.pairwise / 4))


def _pair_divergence(probs: Tensor, member_entropy: Tensor, *, shares: MemberWeights) -> Scores:
    """Jensen-Shannon divergence, mean over all pairs of members, those of a member with itself included."""
    # Halved and kept from zero once, not for each pair; the floor is the one of `mixture_entropy`.
    halves = (probs / 2).clamp_min(torch.finfo(probs.dtype).tiny)
    if halves.shape[-1] < VECTOR:
        # Inputs side by side in memory: a sum over few classes then adds whole vectors of inputs.
        halves = halves.mT.contiguous().mT
    pair_mean = torch.zeros_like(member_entropy[0])
    for last in range(1, len(halves)):
        midpoint = halves[:last] + halves[last]
        midpoint_entropy = -(midpoint * midpoint.log()).sum(-1)
        divergence = midpoint_entropy - (member_entropy[:last] + member_entropy[last]) / 2
        pair_mean = pair_mean + 2 * shares[last] * (shares[:last, None] * divergence).sum(0)
    return pair_mean


@_score
def variation_ratio(logits: Logits, *, weights: Weights = None) -> Scores:
    r"""Share of members, or of their weight, outside the largest group that votes alike; arguments as in `total_entropy`.

    $$1 - \frac{1}{M}\max_c |\{m : \arg\max_k z_{m,k} = c\}|$$

    Returns:
        `(batch,)`, from 0 to $1 - 1/\min(M, C)$. Reading: 0 is a unanimous vote, 0.2 one dissenter in five.

    Example:
        >>> variation_ratio(100 * torch.eye(4)[[0, 0, 0, 0, 1]][:, None])
        tensor([0.2000])
    """
    beliefs = Beliefs.of(logits, weights)
    ballots = torch.ones_like(beliefs.logits[:, 0, 0]) if beliefs.weights is None else beliefs.weights
    tally = torch.zeros_like(beliefs.logits[0])
    tally = tally.scatter_add(-1, beliefs.votes.T, ballots.expand(len(tally), -1))
    # The tally's own sum: of one class only it is that class, whichever way weights round.
    return (1 - tally.amax(-1) / tally.sum(-1)).clamp_min(0)


_VARIANCE_OF_UNIT_SCALE = {"gaussian": 1.0, "laplace": 2.0}


@checked
def total_variance(
    mean: MemberOutputs, scale: MemberOutputs, *, family: Family = "gaussian", weights: Weights = None
) -> Variances:
    r"""Total uncertainty: variance of the members' mixture.

    $$\frac{1}{M}\sum_m (v_m + \mu_m^2) - \bar\mu^2$$

    Args:
        mean: Member means, `(members, batch, ...)`.
        scale: Member scales (sigma or b, never a variance), of the same shape.
        family: `"gaussian"` or `"laplace"`.
        weights: Member weights with sum 1; equal if `None`.

    Returns:
        `(batch, ...)`, in squared target units. Reading: its root is the error to expect.

    Example:
        >>> mean, scale = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]])
        >>> total_variance(mean, scale)
        tensor([5.])
    """
    _, data, knowledge = moments(mean, scale, family, weights)
    return (data + knowledge).detach()


@checked
def data_variance(
    mean: MemberOutputs, scale: MemberOutputs, *, family: Family = "gaussian", weights: Weights = None
) -> Variances:
    r"""Data uncertainty: mean of the members' variances; arguments are those of `total_variance`.

    $$\frac{1}{M}\sum_m v_m$$

    Returns:
        `(batch, ...)`. Reading: the noise that members see in the target.

    Example:
        >>> data_variance(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]]), family="laplace")
        tensor([8.])
    """
    return moments(mean, scale, family, weights)[1].detach()


@checked
def knowledge_variance(
    mean: MemberOutputs, scale: MemberOutputs, *, family: Family = "gaussian", weights: Weights = None
) -> Variances:
    r"""Knowledge uncertainty: variance of the members' means; arguments are those of `total_variance`.

    $$\frac{1}{M}\sum_m (\mu_m - \bar\mu)^2$$

    Returns:
        `(batch, ...)`. Reading: 0 where members agree; grows away from the data.

    Example:
        >>> knowledge_variance(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]]))
        tensor([1.])
    """
    return moments(mean, scale, family, weights)[2].detach()


def moments(
    mean: MemberOutputs, scale: MemberOutputs, family: Family, weights: Weights
) -> tuple[Variances, Variances, Variances]:
    """Return the mean of the members' mixture, and the two parts of its variance: from data, and from knowledge."""
    check_mean_and_scale(mean, scale, weights)
    mean, scale = mean.to(compute_dtype(mean)), scale.to(compute_dtype(scale))
    weights = None if weights is None else brought(weights.detach(), mean.device, mean.dtype)
    data = _VARIANCE_OF_UNIT_SCALE[family] * weighted_mean(scale.square(), weights)
    # Centred first: the mean square less the squared mean has no digits left where large means agree.
    knowledge = weighted_mean(deviations(mean, weights).square(), weights)
    return weighted_mean(mean, weights), data, knowledge


SCORES: Mapping[str, Score] = MappingProxyType(_scores)

# These measure disagreement and nothing else: zero where all members are copies of one.
KNOWLEDGE_SCORES: frozenset[str] = frozenset(
    {"mutual_information", "predicted_class_variance", "mean_pairwise_kl", "jensen_shannon", "variation_ratio"}
)

REGRESSION_SCORES: Mapping[str, Score] = MappingProxyType(
    {"total_variance": total_variance, "data_variance": data_variance, "knowledge_variance": knowledge_variance}
)


@checked
def all_scores(
    logits: Tensor | Beliefs,
    names: Iterable[str] | None = None,
    *,
    weights: Weights = None,
    class_axis: int | None = None,
) -> dict[str, Tensor]:
    """Many scores of one batch; the softmax, and whatever else they share, is computed once.

    Args:
        logits: Member outputs, `(members, batch, classes)`; `Beliefs.unchecked(logits)` skips all checks.
        names: Keys of `SCORES`; all of them if `None`.
        weights: Member weights with sum 1; equal if `None`. `predictive_diversity` and `num_unique` do not
            use them: they ask what any member says.
        class_axis: Where classes are in outputs with positions, `(members, batch, classes, height, width)`; the last of three axes
            by default.

    Returns:
        Each name with its score, `(batch,)` (or `(batch, height, width)`), in the order of `names`. Reading: that of each score.

    Example:
        >>> all_scores(torch.zeros(2, 1, 4), ["num_unique", "total_entropy"])
        {'num_unique': tensor([1.]), 'total_entropy': tensor([1.3863])}
    """
    chosen = list(SCORES if names is None else names)
    unknown = [name for name in chosen if name not in SCORES]
    if unknown:
        raise ValueError(f"`names` must be among {sorted(SCORES)}; got {unknown}. Correct them or leave them out.")
    if class_axis is None:
        beliefs = Beliefs.of(logits, weights)
        return {name: SCORES[name](beliefs) for name in chosen}
    rows, shape = as_rows(logits, class_axis)
    return {name: score.reshape(shape) for name, score in all_scores(rows, chosen, weights=weights).items()}
