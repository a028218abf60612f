"""Predictions of members in; how much they still agree, or tell of each other, to be made small, out."""

from collections.abc import Callable, Mapping
from itertools import combinations
from math import log
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dissensus._checks import compute_dtype
from dissensus._signatures import checked
from dissensus.objectives.likelihoods import full
from dissensus.types import MemberLogits, Probs, Scalar, Scores

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
        `(batch,)`, in nats. Reading: 0 when exactly one of the two is certain of the class; $\log 2$ when the first gives it one half,
        whatever the second says; $-\log\epsilon$ when both are certain of it. Lower means that they disagree more.

    Example:
        >>> a2d(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]]))
        tensor([0.6931])

    References:
        Pagliardini et al., 2023, <https://arxiv.org/abs/2202.04414>.
    """
    _check_classes(probs_m, probs_l, "probs")
    if probs_m.shape != probs_l.shape:
        raise ValueError(
            f"`probs_m` and `probs_l` must have one shape; got {tuple(probs_m.shape)} and {tuple(probs_l.shape)}."
        )
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
        `(..., batch)`, in nats. Reading: as `a2d`, but two members that are both certain of a class get a value that grows with how certain
        they are, and a gradient that points apart, however saturated their logits.

    Example:
        >>> one_hot = torch.tensor([[200.0, 0.0]])
        >>> round(a2d_from_logits(one_hot, one_hot).item(), 3)
        199.307
    """
    _check_classes(logits_m, logits_l, "logits")
    log_m, log_l = (full(logits).log_softmax(-1) for logits in (logits_m, logits_l))
    return pair_term("a2d", orientation)(log_m, log_l)


def _check_classes(first: Tensor, second: Tensor, name: str) -> None:
    real = first.is_floating_point() and second.is_floating_point()
    if not real or not first.ndim or not second.ndim or first.shape[-1] != second.shape[-1]:
        raise ValueError(
            f"`{name}_m` and `{name}_l` must be real numbers with the same classes on the last axis; got {first.dtype} "
            f"{tuple(first.shape)} and {second.dtype} {tuple(second.shape)}."
        )


def _a2d(log_probs_m: Tensor, log_probs_l: Tensor) -> Tensor:
    # A mask, not gather and scatter: scattering into an expanded tensor is compiled to wrong values (torch 2.13, CPU).
    classes = torch.arange(log_probs_m.shape[-1], device=log_probs_m.device)
    chosen = classes == log_probs_m.argmax(-1, keepdim=True)
    said_m, said_l = (torch.where(chosen, each, 0.0).sum(-1) for each in (log_probs_m, log_probs_l))
    denied_m, denied_l = (_log_rest(each, chosen) for each in (log_probs_m, log_probs_l))
    return -torch.logaddexp(said_m + denied_l, said_l + denied_m)


def _log_rest(log_probs: Tensor, chosen: Tensor) -> Tensor:
    """Return log(1 - p) of the chosen class, as the sum of the others: 1 - p itself rounds to 0 near certainty."""
    return torch.where(chosen, float("-inf"), log_probs).logsumexp(-1)


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

All are to be made small: lower means that the two predictions differ more. `"a2d"` is `a2d_from_logits` (from 0 up), `"kl"`
minus the divergence of the second from the first (without a lower bound), `"jensen_shannon"` minus that divergence (from -log 2
to 0), `"cosine"` the cosine of the two probability vectors (from 0 to 1).
"""


def pair_term(regulariser: str | PairTerm, orientation: Orientation = "first") -> PairTerm:
    """Return the pair term of this name, or the function itself, with its arguments as they are, exchanged, or both ways summed."""
    if not callable(regulariser) and regulariser not in PAIR_TERMS:
        raise ValueError(
            f"`regulariser` must be one of {', '.join([*PAIR_TERMS, 'divdis'])}, or a function of two members' "
            f"log-probabilities; got {regulariser!r}."
        )
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
        the batch: 0 for independent answers, their entropy (at most $\log C$) for certain members that are copies; a small batch of many
        classes overstates it. The second part keeps members from becoming independent by all saying the same.

    Example:
        >>> copies = torch.eye(4).expand(2, 4, 4)  # two members, each certain of another class on each input
        >>> round(divdis(copies).item(), 4)  # log 4
        1.3863

    References:
        Lee et al., 2023, <https://arxiv.org/abs/2202.03418>.
    """
    if probs.ndim != 3 or len(probs) < 2:
        raise ValueError(
            f"`probs` must be shaped (members, batch, classes) with two members or more; got {tuple(probs.shape)}."
        )
    for name, given, size in (("prior", prior, probs.shape[2]), ("weights", weights, probs.shape[1])):
        if given is not None and given.shape != (size,):
            raise ValueError(f"`{name}` must be shaped ({size},); got {tuple(given.shape)}.")
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
