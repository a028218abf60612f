"""Predictions of two members in; how much they still agree, to be made small, out."""

from collections.abc import Callable, Mapping
from math import log
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.objectives.likelihoods import full
from dissensus.types import Probs, Scores

PairTerm: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Orientation: TypeAlias = Literal["first", "second", "both"]


def a2d(probs_m: Probs, probs_l: Probs, eps: float = 1e-9) -> Scores:
    r"""Agreement of two members on the class that the first one predicts.

    $$-\log\big(p^m_{\hat y}(1 - p^l_{\hat y}) + p^l_{\hat y}(1 - p^m_{\hat y}) + \epsilon\big),
      \qquad \hat y = \arg\max_c p^m_c$$

    Reading: 0 when exactly one of the two is certain of the class; $\log 2$ when the first gives it one half,
    whatever the second says; $-\log\epsilon$ when both are certain of it. Training uses `a2d_from_logits`, which
    needs no `eps` and still has a slope where probabilities round to 0 and 1.

    Args:
        probs_m: Probabilities of the member that names the class, `(batch, classes)`.
        probs_l: Probabilities of the other member, `(batch, classes)`.
        eps: Keeps the logarithm finite.

    Returns:
        One value an input, `(batch,)`, in nats. Lower means that they disagree more.

    Example:
        >>> a2d(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]]))
        tensor([0.6931])

    References:
        Pagliardini et al., 2023, <https://arxiv.org/abs/2202.04414>.
    """
    chosen = probs_m.argmax(-1, keepdim=True)
    said_m, said_l = (probs.gather(-1, chosen).squeeze(-1) for probs in (probs_m, probs_l))
    return -torch.log(said_m * (1 - said_l) + said_l * (1 - said_m) + eps)


def a2d_from_logits(logits_m: Tensor, logits_l: Tensor, orientation: Orientation = "first") -> Tensor:
    r"""`a2d` without `eps`, computed in logarithms.

    Reading: as `a2d`, but two members that are both certain of a class get a value that grows with how certain
    they are, and a gradient that points apart, however saturated their logits.

    Args:
        logits_m: Logits of one member, `(..., batch, classes)`.
        logits_l: Logits of the other; leading axes broadcast.
        orientation: Who names the class: the `"first"` member, the `"second"`, or `"both"`, which is the sum of
            the two forms.

    Returns:
        `(..., batch)`, in nats.

    Example:
        >>> one_hot = torch.tensor([[200.0, 0.0]])
        >>> round(a2d_from_logits(one_hot, one_hot).item(), 3)
        199.307

    References:
        Pagliardini et al., 2023, <https://arxiv.org/abs/2202.04414>.
    """
    log_m, log_l = (full(logits).log_softmax(-1) for logits in (logits_m, logits_l))
    return oriented(_a2d, orientation)(log_m, log_l)


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


def pair_term(regulariser: str | PairTerm) -> PairTerm:
    """Return the pair term of this name, or the function itself."""
    if callable(regulariser):
        return regulariser
    if regulariser not in PAIR_TERMS:
        raise ValueError(
            f"`regulariser` must be one of {', '.join([*PAIR_TERMS, 'divdis'])}, or a function of two members' "
            f"log-probabilities; got {regulariser!r}."
        )
    return PAIR_TERMS[regulariser]


def oriented(term: PairTerm, orientation: Orientation) -> PairTerm:
    """Return the term with its arguments as they are, exchanged, or both ways summed."""
    if orientation not in get_args(Orientation):
        raise ValueError(f"`orientation` must be 'first', 'second' or 'both'; got {orientation!r}.")
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
