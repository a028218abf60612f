"""What members believe about a batch, which scores share: probabilities, entropies, and how far members are from each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dissensus._checks import brought, check_member_logits, compute_dtype
from dissensus.objectives.losses import weighted_mean
from dissensus.types import Float, Int, MemberLogits, MemberWeights, Probs, Scores

Value = TypeVar("Value")


def computed_once(compute: Callable[[Any], Value]) -> Value:
    """`functools.cached_property` without its lock, which torch.compile cannot trace on Python 3.11."""
    name = compute.__name__

    def get(beliefs: Any) -> Value:
        if name not in beliefs.__dict__:
            beliefs.__dict__[name] = compute(beliefs)
        found: Value = beliefs.__dict__[name]
        return found

    return property(get, doc=compute.__doc__)  # type: ignore[return-value]


# Numbers in a vector register of float32, at most.
VECTOR = 16
# Numbers of a block of which a CPU's cache holds several.
_CACHED = 2**18


@dataclass(frozen=True, eq=False)
class Beliefs:
    """Member logits of one batch, and all that several scores need of them, computed when first asked for.

    Every score takes logits or `Beliefs`; with `Beliefs`, many scores cost one softmax. They hold up to three
    tensors of the size of the logits: make them batch by batch.

    Attributes:
        logits: Member outputs, `(members, batch, classes)`, detached, float32 or float64.
        weights: Member weights, `(members,)`, or `None` for equal ones.

    Example:
        >>> beliefs = Beliefs.of(torch.zeros(2, 1, 4))
        >>> beliefs.mean_probs
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    logits: MemberLogits
    weights: MemberWeights | None = None

    @classmethod
    def of(cls, logits: "MemberLogits | Beliefs", weights: MemberWeights | None = None) -> "Beliefs":
        """Check logits (and weights) and wrap them; what is wrapped already passes through unchanged."""
        if not isinstance(logits, Beliefs):
            check_member_logits(logits, weights)
            return cls.unchecked(logits, weights)
        if weights is not None:
            raise ValueError("`Beliefs` hold their own weights; got more. Give them to `Beliefs.of`.")
        return logits

    @classmethod
    def unchecked(cls, logits: MemberLogits, weights: MemberWeights | None = None) -> "Beliefs":
        """Wrap logits known to be good; nothing looks at values, so scores can be compiled and captured."""
        wide = logits.detach().to(compute_dtype(logits))
        if weights is not None:
            weights = brought(weights.detach(), wide.device, wide.dtype)
        return cls(wide, weights)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the first axis, members, by weight."""
        return weighted_mean(values, self.weights)

    def over_distinct_pairs(self, pair_mean: Scores) -> Scores:
        """Mean over pairs of two different members, from the mean over all pairs (zero on the diagonal)."""
        if self.weights is None:
            num_members = len(self.logits)
            return pair_mean * (num_members / max(num_members - 1, 1))
        mass = (self.weights * (1 - self.weights)).sum()
        # All weight on one member leaves no pair of two, and the mean is zero already.
        return pair_mean / torch.where(mass > 0, mass, 1.0)

    @computed_once
    def log_probs(self) -> MemberLogits:
        """Log-probabilities of each member."""
        if self.logits.device.type != "cpu" or self.logits.shape[-1] >= VECTOR:
            return self.logits.log_softmax(-1)
        # torch's own takes rows shorter than a vector register one number at a time: five times as long.
        shifted = self.logits - self._largest_logits.values[..., None]
        return shifted - shifted.exp().sum(-1, keepdim=True).log()

    @computed_once
    def probs(self) -> MemberLogits:
        """Probabilities of each member."""
        return self.log_probs.exp()

    @computed_once
    def mean_probs(self) -> Probs:
        """The mixture: the mean of the members' probabilities."""
        # From the first member on: the mean of equal numbers is then that number, and not a rounding beside it.
        return by_blocks(lambda probs: probs[0] + self.mean(probs - probs[0]), self.probs, axis=0)

    @computed_once
    def answer(self) -> tuple[Scores, Int[Tensor, " batch"]]:
        """Probability of the class that the mixture predicts, and that class."""
        confidence, predicted = self.mean_probs.max(-1)
        return confidence, predicted

    @computed_once
    def largest_probs(self) -> Probs:
        """For each class the largest probability that a member gives it."""
        return self.probs.amax(0)

    @computed_once
    def disagreement(self) -> "Disagreement":
        """How far members are from each other, exactly zero where they are equal."""
        of_members = (self.probs, self.log_probs)
        of_all = (self.mean_probs[None], self.largest_probs[None])
        return Disagreement(*by_blocks(self._disagreement, *of_members, *of_all))

    def _disagreement(self, probs: Tensor, log_probs: Tensor, mean_probs: Tensor, largest: Tensor) -> Tensor:
        apart = probs - mean_probs
        pairwise = self.mean((log_probs - log_probs[0]).mul_(apart)).clamp_min(0)
        # Divided before it is multiplied: the square of a small probability would underflow.
        floor = torch.finfo(probs.dtype).tiny
        largest, smallest = largest[0].clamp_min(floor), probs.amin(0).clamp_min(floor)
        lower = self.mean((apart / largest).mul_(apart)) / 2
        upper = torch.minimum(lower * (largest / smallest), pairwise)
        return torch.stack([lower.sum(-1), upper.sum(-1), pairwise.sum(-1)])

    @computed_once
    def mean_logits(self) -> Probs:
        """Mean of the members' logits."""
        return self.mean(self.logits)

    @computed_once
    def member_entropy(self) -> Float[Tensor, "members batch"]:
        """Entropy of each member."""
        return by_blocks(lambda probs, log_probs: -(probs * log_probs).sum(-1), self.probs, self.log_probs)

    @computed_once
    def expected_entropy(self) -> Scores:
        """Mean entropy of the members."""
        return self.mean(self.member_entropy)

    @computed_once
    def mixture_entropy(self) -> Scores:
        """Entropy of the mixture."""
        # The floor keeps 0 log 0 at 0. Unlike torch.special.entr, log runs vectorised on a CPU, three times faster.
        floor = torch.finfo(self.mean_probs.dtype).tiny
        return -(self.mean_probs * self.mean_probs.clamp_min(floor).log()).sum(-1)

    @computed_once
    def votes(self) -> Int[Tensor, "members batch"]:
        """The class that each member predicts."""
        # The first of equal ones, as `argmax`, which takes longer on a CPU.
        return self._largest_logits.indices

    @computed_once
    def _largest_logits(self) -> Any:
        return self.logits.max(-1)

    @computed_once
    def top_log_probs(self) -> Float[Tensor, "members batch"]:
        """Log-probability that each member gives the class it predicts."""
        return self.log_probs.gather(-1, self.votes[..., None]).squeeze(-1)

    @computed_once
    def energy(self) -> Float[Tensor, "members batch"]:
        """Free energy of each member, minus the logsumexp of its logits."""
        # log p_k = z_k - logsumexp(z) for every class k; at the largest z_k the difference loses no digits.
        return self.top_log_probs - self._largest_logits.values


@dataclass(frozen=True, eq=False)
class Disagreement:
    """Divergences that are sums of products of two differences, and so have digits left where members nearly agree.

    With v the variance over members of a class's probability, summed over classes:
    """

    lower: Scores  # v / (2 max p), at most the mutual information
    upper: Scores  # v / (2 min p), at least the mutual information; `pairwise` of a class where that is less
    pairwise: Scores  # mean KL divergence over all pairs of members, those of a member with itself included


def deviations(values: Float[Tensor, "members ..."], weights: MemberWeights | None) -> Float[Tensor, "members ..."]:
    """Members less their mean; exactly zero where all are equal, which the rounded mean of equal numbers is not."""
    from_first = values - values[:1]
    return from_first - weighted_mean(from_first, weights)


def by_blocks(compute: Callable[..., Tensor], *tensors: Tensor, axis: int = -1) -> Tensor:
    """What `compute` makes of each input of the tensors, `(members, batch, ...)`, with inputs on `axis`.

    It is computed in blocks of inputs that stay in a CPU's cache; a GPU takes all at once.
    """
    first = tensors[0]
    if torch.compiler.is_exporting():  # an exported program is for batches of every size
        return compute(*tensors)
    size = max(_CACHED * first.shape[1] // first.numel(), 1)
    if first.device.type != "cpu" or first.shape[1] <= size:
        return compute(*tensors)
    cut = zip(*(tensor.split(size, dim=1) for tensor in tensors), strict=True)
    return torch.cat([compute(*block) for block in cut], dim=axis)
