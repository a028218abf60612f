"""Predictions of all members on a batch in; how much their answers tell of each other, to be made small, out."""

from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dissensus._checks import compute_dtype
from dissensus.types import MemberLogits, Scalar


def divdis(probs: MemberLogits, prior: Tensor | None = None, weights: Tensor | None = None) -> Scalar:
    r"""How much members' answers tell of each other, and how far each strays from the known class frequencies.

    $$\frac{1}{|P|}\sum_{(h, g) \in P} \mathrm{KL}\Big(\sum_b w_b\, p^h_b (p^g_b)^\top \,\Big\Vert\, \bar p^h (\bar p^g)^\top\Big)
      + \frac1M \sum_h \mathrm{KL}(\bar p^h \Vert \text{prior}),\qquad \bar p^h = \sum_b w_b\, p^h_b$$

    Reading: the first part is the mutual information of two members' answers over the batch: 0 for independent
    answers, the entropy of the answers (at most $\log C$) for certain members that are copies. It looks at whole
    batches, so a small batch of many classes overstates it. The second part keeps members from becoming independent
    by all saying the same.

    Args:
        probs: Predicted probabilities on inputs to disagree on, `(members, batch, classes)`.
        prior: Class frequencies to stay near, `(classes,)`; the second part is left out if `None`.
        weights: Weight of each input, not negative, `(batch,)`; they are scaled to sum 1. Uniform if `None`.

    Returns:
        Scalar, in nats. Lower means more different answers.

    Example:
        >>> copies = torch.eye(4).expand(2, 4, 4)  # two members, each certain of another class on each input
        >>> round(divdis(copies).item(), 4)  # log 4
        1.3863

    References:
        Lee et al., 2023, <https://arxiv.org/abs/2202.03418>.
    """
    if probs.ndim != 3 or len(probs) < 2:
        raise ValueError(
            "`probs` must be shaped (members, batch, classes) with two members or more; "
            f"got {tuple(probs.shape)}."
        )
    probs = probs.to(compute_dtype(probs))
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
    log_prior = prior.to(probs).clamp_min(torch.finfo(probs.dtype).tiny).log()
    return redundancy + (_negative_entropy(marginals) - marginals @ log_prior).mean()


def _safe_log(values: Tensor) -> Tensor:
    return values.clamp_min(torch.finfo(values.dtype).tiny).log()


def _negative_entropy(probs: Tensor) -> Tensor:
    return (probs * _safe_log(probs)).sum(-1)


class _MeanNegativeJointEntropy(torch.autograd.Function):
    """Sum of J log J over the joint table J of two members' answers, averaged over pairs of members.

    Tables are classes by classes. They are made one at a time and made again for the gradient, so that one is in memory
    instead of one a pair.
    """

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
