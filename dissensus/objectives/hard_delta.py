"""Objectives for anchored networks: tails of the normal law of residuals x - r say nothing; masked references say nothing."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from dissensus._signatures import checked, real_number, refuse, whole_number
from dissensus.data.sources import class_targets
from dissensus.members import View
from dissensus.members.members import Keys
from dissensus.objectives.likelihoods import full
from dissensus.objectives.objective import BatchNorm, Objective, OutputObjective, Parts, Step, Wrapper, one_answer
from dissensus.randomness import Noise, seeded

if TYPE_CHECKING:
    from dissensus.members import Anchored

# Values of training inputs that are looked at for principal directions: 512 MiB of float32.
_VALUES_LOOKED_AT = 1 << 27


@checked
def uniform_cross_entropy(logits: Tensor) -> Tensor:
    r"""Cross-entropy of a prediction to the uniform target: $\log\sum_c e^{z_c} - \frac1C\sum_c z_c$.

    Args:
        logits: `(..., classes)`.

    Returns:
        Nats, `(...)`; never below log C, which it is where all logits are equal. Higher: the prediction says more.

    Example:
        >>> round(uniform_cross_entropy(torch.zeros(4)).item(), 4)  # log 4
        1.3863
    """
    if not logits.is_floating_point() or not logits.ndim:
        came = f"got {logits.dtype} shaped {tuple(logits.shape)}."
        raise ValueError(f"`logits` must be floating point, (..., classes); {came}")
    logits = full(logits)
    return logits.logsumexp(-1) - logits.mean(-1)


def residual_scale(x: Tensor) -> Tensor:
    r"""Return $\sqrt{2\,\mathrm{Var}(x)}$, the deviation of residuals between inputs: `(..., batch, values)` to `(..., 1, values)`."""
    # A last batch of one input has no residuals: their deviation is then 0, not 0 / 0.
    return (2 * x.var(-2, keepdim=True, correction=min(1, x.shape[-2] - 1))).sqrt()


def residual_factor(x: Tensor, rank: int | None) -> Tensor:
    r"""Return rows F, `(rank, values)`, with $F^\top F \approx 2\Sigma$, the residuals' covariance along its largest directions.

    Of inputs `(batch, ...)` evenly spaced ones are looked at where there are many; without a `rank` all are, for all directions.
    """
    if rank is None:
        sizes, directions = torch.linalg.eigh(2 * torch.cov(x.flatten(1).double().T).reshape(x[0].numel(), -1))
        return (sizes.clamp_min(0).sqrt()[:, None] * directions.T).float()
    few = max(_VALUES_LOOKED_AT // max(x[0].numel(), 1), rank + 1)
    x = x[:: -(-len(x) // few)].flatten(1).float()
    centred = x - x.mean(0)
    rank = min(rank, *centred.shape)
    with seeded(0):
        _, sizes, directions = torch.svd_lowrank(centred, q=min(rank + 8, *centred.shape), niter=4)
    return (2 / (len(x) - 1)) ** 0.5 * sizes[:rank, None] * directions.T[:rank]


def drawn_factor(x: Tensor, rank: int) -> Tensor:
    r"""Return rows F, which sum to zero, with $F^\top F = 2S$, S the covariance of the first `rank + 1` inputs."""
    x = x[..., : rank + 1, :]
    return (2 / max(x.shape[-2] - 1, 1)) ** 0.5 * (x - x.mean(-2, keepdim=True))


def tail_radius(noise: Noise, count: int, draws: int, dimensions: int) -> Tensor:
    """Return how far the farthest of `draws` standard normal vectors is from zero, `(..., count)`, in time independent of `draws`."""
    # The largest length, by Wilson and Hilferty's approximation of a sum of squares (good to 2 %).
    # The middle of the cell that each draw stands for: never 0 and never 1.
    chances = noise.uniform(count).double() + 2.0**-25
    largest = torch.special.ndtri(chances ** (1 / draws))
    spread = 2 / (9 * dimensions)
    cube_root = (1 - spread + largest * spread**0.5).clamp_min(0)
    return (dimensions * cube_root**3).sqrt().float()


def tail_draws(noise: Noise, count: int, draws: int, size: int, centred: bool = False) -> Tensor:
    """Return the least likely of `draws` standard normal vectors, `(..., count, size)`; if `centred`, of those that sum to zero."""
    vectors = noise.at(0).normal(count, size)
    if centred:
        vectors = vectors - vectors.mean(-1, keepdim=True)
    lengths = tail_radius(noise.at(1), count, draws, max(size - centred, 1))
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12) * lengths[..., None]


def farthest_partner(x: Tensor, scale: Tensor) -> Tensor:
    """Return for each input, `(..., batch, values)`, the residual to the input farthest from it, in units of `scale`."""
    white = x / scale.clamp_min(1e-6)
    squares = white.square().sum(-1)
    distances = squares[..., :, None] + squares[..., None, :] - 2 * white @ white.transpose(-1, -2)
    farthest = distances.argmax(-1)
    return x - x.gather(-2, farthest[..., None].expand_as(x))


def mahalanobis(values: Tensor, known: Tensor, diagonal: bool = False) -> Tensor:
    """Return squared distances of `(..., batch, outputs)` values from the normal law fitted to `known`, `(..., batch)`.

    If `diagonal`, outputs count as independent: of more outputs than `known` rows what keeps the covariance invertible would decide.
    """
    values, known = full(values), full(known)
    mean = known.mean(-2, keepdim=True)
    centred, gaps = known - mean, values - mean
    count = max(known.shape[-2] - 1, 1)
    if diagonal:
        variances = centred.square().sum(-2, keepdim=True) / count
        return (gaps.square() / (variances + _ridge(variances))).sum(-1)
    covariance = centred.transpose(-1, -2) @ centred / count
    ridge = _ridge(covariance.diagonal(dim1=-2, dim2=-1)[..., None, :])
    eye = torch.eye(covariance.shape[-1], device=covariance.device)
    solved = torch.linalg.solve_ex(covariance + ridge * eye, gaps.transpose(-1, -2))[0]
    return (gaps * solved.transpose(-1, -2)).sum(-1)


def _ridge(variances: Tensor) -> Tensor:
    """As much as keeps a law invertible where the network gives fewer directions than outputs, `(..., 1, 1)`."""
    return 1e-4 * variances.mean(-1, keepdim=True).clamp_min(1e-12)


Law = Literal["diagonal", "full", "low_rank", "outputs", "features"]
# Laws of what the network makes of residuals, not of residuals themselves.
_OF_THE_NETWORK = ("outputs", "features")
# Laws whose draws are combinations of directions: rows of a factor of the covariance.
_WITH_FACTOR = ("low_rank", "full")


@checked
@dataclass(frozen=True)
class HardDelta(Wrapper):
    r"""Ask that an anchored network says nothing of residuals t from the tails of their law, under a masked reference.

    $$\ell + w\,\frac1n\sum_t \Big(\log\sum_c e^{z_c} - \frac1C\sum_c z_c\Big),\qquad z = F([0, 0 - t])$$

    The law is a normal one of mean zero: inputs and references of covariance $\Sigma$ leave residuals of covariance $2\Sigma$. t takes no
    gradient. In many dimensions a normal law hardly has tails, so there are other ways to find some: `law`, `tails`, `radius`.

    Args:
        inner: What is minimised besides.
        weight: w, how much the tails count against the mean loss.
        law: `"diagonal"`: values are independent, only their variances count. `"full"`: the multivariate normal with the whole
            covariance, of the batch or of all training inputs (values x values numbers). `"low_rank"`: combinations of `rank` + 1 real
            inputs of the batch. `"outputs"`: candidates are kept, one in `draws` of a batch and at least one, if what the network says of
            them is unlikely under the normal law of what it says of real residuals. `"features"`: the same for what the network's last
            linear layer takes, each feature counting as independent of the others.
        tails: `"drawn"`: the least likely of `draws` draws. `"real"`: for each input of the batch the residual to the input
            that is farthest away under the law.
        draws: How many each tail sample is the least likely of; by default 1000, and 8 for laws that look at the network.
        radius: Factor on the length of tail samples.
        rank: Directions of the low-rank law.
        samples: Tail samples a step; as many as the batch has by default. Not for laws that look at the network.
        warm_up: Share of the run before which tails do not count.
        statistics: Take the law of residuals from each `"batch"`, or from all `"training"` inputs (tensors or arrays, not a
            DataLoader). Laws of the network are measured on each batch either way; `"training"` then is what candidates are drawn from.
        batch_norm: What BatchNorm does with tails, as in `Disagree`; `tail_in_use` reports the term as in evaluation.

    References:
        The idea of outliers from the tails of a normal law: Du et al., 2022, <https://arxiv.org/abs/2202.01197>.
    """

    weight: float = 0.1
    law: Law = "diagonal"
    tails: Literal["drawn", "real"] = "drawn"
    draws: int | None = None
    radius: float = 1.0
    rank: int = 16
    samples: int | None = None
    warm_up: float = 0.1
    statistics: Literal["batch", "training"] = "batch"
    batch_norm: BatchNorm = "eval"
    measured: Tensor | None = None

    def __post_init__(self) -> None:
        law, real, of_network = f"law={self.law!r}", self.tails == "real", self.law in _OF_THE_NETWORK
        refuse(
            {
                f"HardDelta is for classification; the loss is {self.inner.likelihood.name!r}.": self.inner.likelihood.kind
                != "classes",
                f"Under {law} every residual of a batch is about as far out as any other, so none is a tail. Use another law "
                "with tails='real'.": real and self.law in _WITH_FACTOR,
                f"{law} keeps one candidate in `draws`; leave `samples` out and change `draws`.": of_network
                and self.samples is not None,
                f"{law} with tails='real' is measured on each batch; leave `statistics` out.": of_network
                and real
                and self.statistics == "training",
            }
        )
        for name in ("draws", "rank", "samples"):
            if (count := getattr(self, name)) is not None:
                whole_number(name, count, 1)
        real_number("weight", self.weight)
        real_number("radius", self.radius, above=True)
        real_number("warm_up", self.warm_up, below=1.0)

    @property
    def least_likely_of(self) -> int:
        """How many draws each tail sample is the least likely of: `draws`, or what suits the law."""
        # Many cost nothing where they are not made; under a law of the network they are a batch's.
        return self.draws or (8 if self.law in _OF_THE_NETWORK else 1000)

    def prepare(self, x: Any) -> Self:
        """Measure the law on all training inputs where that is wanted."""
        prepared = super().prepare(x)
        if self.statistics == "batch" or self.measured is not None:
            return prepared
        if self.law in _WITH_FACTOR:
            return replace(prepared, measured=residual_factor(x, self.rank if self.law == "low_rank" else None))
        return replace(prepared, measured=residual_scale(x.flatten(1).float()))

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the inner loss plus the weighted cross-entropy of tails to the uniform target, and both."""
        anchored = _anchored(members, self)
        if self.batch_norm == "mix":
            residuals = self._found(members, anchored, x, step)
            taken = _beside(members, anchored, residuals)
            loss, parts = self.inner(members, x, y, step)
            logits = taken[0]
        else:
            loss, parts = self.inner(members, x, y, step)
            residuals = self._found(members, anchored, x, step)
            with members.normalised_as_in_use() if self.batch_norm == "eval" else nullcontext():
                logits = _masked(members, anchored, anchored.run_pairs, residuals)
        tail = uniform_cross_entropy(one_answer(self, logits)).mean(-1)
        parts = {**parts, "tail": tail.detach()}
        if self.batch_norm != "eval":
            with members.evaluating():
                in_use = _masked(members, anchored, anchored.run_pairs, residuals)
            parts["tail_in_use"] = uniform_cross_entropy(in_use).mean(-1)
        weight = torch.where(step.progress >= self.warm_up, self.weight, 0.0)
        return loss + weight * tail.sum(), parts

    def _found(self, members: View, anchored: "Anchored", x: Tensor, step: Step) -> Tensor:
        noise = step.noise(rows=members.rows)
        inputs = (x if step.own else x[None]).flatten(2)
        quiet = members.normalised_as_in_use() if self.batch_norm == "eval" else members.perturbed()
        with torch.no_grad(), quiet:
            return self._tails(members, anchored, inputs, x.shape[1 + step.own :], noise)

    def _tails(self, members: View, anchored: "Anchored", x: Tensor, shape: torch.Size, noise: Noise) -> Tensor:
        """Return tail residuals, `(members, samples, ...)`, of inputs `(members or 1, batch, values)`."""
        if self.law in _OF_THE_NETWORK:
            return self._tails_by_network(members, anchored, x, shape, noise)
        count = x.shape[1] if self.samples is None else self.samples
        if self.tails == "real":
            found = farthest_partner(x, self._scale(x))[:, :count]
        else:
            found = self._drawn(x, count, self.least_likely_of, noise)
        found = found.to(x.dtype).expand(members.num_members, *found.shape[1:])
        return self.radius * found.reshape(*found.shape[:2], *shape)

    def _drawn(self, x: Tensor, count: int, draws: int, noise: Noise) -> Tensor:
        if self.law not in _WITH_FACTOR:
            return tail_draws(noise, count, draws, x.shape[-1]) * self._scale(x)
        rank = self.rank if self.law == "low_rank" else x.shape[-2] - 1
        factor = drawn_factor(full(x), rank) if self.measured is None else self.measured.to(x.device)
        drawn = tail_draws(noise, count, draws, factor.shape[-2], centred=self.measured is None)
        return drawn.to(factor.dtype) @ factor

    def _scale(self, x: Tensor) -> Tensor:
        return residual_scale(x) if self.measured is None else self.measured.to(x.device)

    def _tails_by_network(
        self, members: View, anchored: "Anchored", x: Tensor, shape: torch.Size, noise: Noise
    ) -> Tensor:
        """Return the candidates of which the network makes what is unlikely of a real residual."""
        x = x.expand(members.num_members, *x.shape[1:])
        count = x.shape[1]
        partners = noise.at(2).uniform(count).argsort(-1)
        real = x - x.gather(1, partners[..., None].expand_as(x))
        candidates = self.radius * (real if self.tails == "real" else self._drawn(x, count, 1, noise).to(x.dtype))
        # What the law is measured on, `(members, samples, values)`: what networks say of residuals, or their features.
        run = anchored.run_features if self.law == "features" else anchored.run_pairs
        known, said = (_masked(members, anchored, run, each.unflatten(-1, shape)) for each in (real, candidates))
        distances = mahalanobis(said, known, diagonal=self.law == "features")
        kept = distances.topk(max(count // self.least_likely_of, 1), dim=1).indices
        tails = candidates.gather(1, kept[..., None].expand(*kept.shape, x.shape[-1]))
        return tails.reshape(*kept.shape, *shape)


@checked
@dataclass(frozen=True)
class MaskedUniform(Wrapper, OutputObjective):
    """Give the uniform target to examples whose reference is masked, which keep their labels otherwise.

    Args:
        inner: An objective on class logits that neither compares members nor runs them, such as `Independent`; others, such as
            `Adversarial`, go around it.
    """

    def __post_init__(self) -> None:
        name = type(self.inner).__name__
        if isinstance(self.inner, Wrapper):
            raise ValueError(f"MaskedUniform goes inside of {name}: {name}(MaskedUniform(Independent()), ...).")
        if self.inner.couples or not isinstance(self.inner, OutputObjective):
            why = "compares networks on common ones" if self.inner.couples else "runs networks itself"
            raise ValueError(f"MaskedUniform gives each network its own targets; {name} {why}. Take Independent().")
        if self.inner.likelihood.kind != "classes":
            raise ValueError(f"MaskedUniform gives uniform class targets; the loss is {self.inner.likelihood.name!r}.")

    def uniform_where_masked(self) -> Objective:
        """It is so already."""
        return self

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the inner loss for these targets."""
        return self.on_outputs_of(members, members.each(x) if step.own else members(x), y, step)

    @property
    def outputs_only(self) -> bool:
        """No: networks say whose references were masked."""
        return False

    def on_outputs(self, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Refuse outputs of which it is not known whose references were masked."""
        raise ValueError("MaskedUniform asks the networks whose references are masked: call it with the members.")

    def on_outputs_of(self, members: View, outputs: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the inner loss of what these networks said in their last pass."""
        anchored = _anchored(members, self)
        masked = anchored.masked(members.pass_keys(), one_answer(self, outputs).shape[1])
        classes = outputs.shape[-1]
        targets = torch.where(masked[..., None], 1 / classes, class_targets(y, classes))
        assert isinstance(self.inner, OutputObjective)
        return self.inner.on_outputs_of(members, outputs, targets, step)


def _anchored(members: View, objective: Objective) -> "Anchored":
    from dissensus.members import Anchored

    if not isinstance(members.members, Anchored):
        name, came = type(objective).__name__, type(members.members).__name__
        raise ValueError(f"{name} is for anchored networks, ds.Anchored(net, references); got a {came}.")
    return members.members


def _masked(members: View, anchored: "Anchored", run: Callable[..., Tensor], residuals: Tensor) -> Tensor:
    """Run networks on [0, 0 - t], `(members, samples, ...)`."""
    return members.through(run, _masked_pairs(anchored, residuals), own=True)


def _masked_pairs(anchored: "Anchored", residuals: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(residuals), -residuals], dim=anchored.pair_axis)


def _beside(members: View, anchored: "Anchored", residuals: Tensor) -> list[Tensor]:
    """Have the next pass run [0, 0 - t] in one batch with the examples; what networks say of it is in the list afterwards."""
    taken: list[Tensor] = []

    def run(tensors: Mapping[str, Tensor], x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        examples = anchored.training_pairs(tensors, x, own=own, keys=keys)
        both = torch.cat([examples, _masked_pairs(anchored, residuals)], dim=1)
        outputs = anchored.run_pairs(tensors, both, own=True, rows=rows, keys=keys)
        taken.append(outputs[:, examples.shape[1] :])
        return outputs[:, : examples.shape[1]]

    members.next_through(run)
    return taken
