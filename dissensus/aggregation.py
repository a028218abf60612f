"""Many members into one answer: averaged or voted predictions, averaged weights, and the best member by hindsight."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from dissensus._checks import check_labels, check_member_logits, compute_dtype, explained
from dissensus._signatures import checked, whole_number
from dissensus.data.sources import Pairs, device_of, pair_batches
from dissensus.data.trees import Output, call, pick
from dissensus.members import HeadEnsemble, Members
from dissensus.members.members import evaluation_mode
from dissensus.members.stacking import check_one_architecture
from dissensus.randomness import seeded
from dissensus.types import Float, Labels, MemberLogits

Aggregation: TypeAlias = Callable[..., Tensor]


def mean_logits(logits: MemberLogits, classes: Sequence[int] | None = None) -> Float[Tensor, "batch chosen"]:
    """Average the members' logits, then make one prediction of them.

    Args:
        logits: Member logits, `(members, batch, classes)`.
        classes: Choose among these classes only; the result then has as many columns, in this order.

    Returns:
        Probabilities, `(batch, classes)`. Reading: a geometric mean of the members'; one that rules a class out rules it out for all.

    Example:
        >>> mean_logits(torch.tensor([[[4.0, 0.0]], [[-4.0, 0.0]]]))
        tensor([[0.5000, 0.5000]])
    """
    return _restricted(logits, classes).mean(0).softmax(-1)


def mean_probs(logits: MemberLogits, classes: Sequence[int] | None = None) -> Float[Tensor, "batch chosen"]:
    """Average the members' probabilities: the prediction of the ensemble as a mixture; arguments as in `mean_logits`.

    Example:
        >>> mean_probs(torch.tensor([[[4.0, 0.0]], [[0.0, 0.0]]]))
        tensor([[0.7410, 0.2590]])
    """
    return _restricted(logits, classes).softmax(-1).mean(0)


def majority_vote(logits: MemberLogits, classes: Sequence[int] | None = None) -> Float[Tensor, "batch chosen"]:
    """Let every member vote for one class; arguments as in `mean_logits`.

    With `classes`, members vote among *all* classes and those whose vote falls outside abstain; where all do every share is equal.

    Returns:
        Shares of the votes that count, `(batch, classes)`.

    Example:
        >>> majority_vote(torch.tensor([[[2.0, 0.0, 1.0]], [[3.0, 1.0, 0.0]], [[0.0, 0.0, 5.0]]]))
        tensor([[0.6667, 0.0000, 0.3333]])
    """
    check_member_logits(logits)
    width = logits.shape[-1]
    counted = torch.arange(width) if classes is None else _class_indices(classes, width)
    votes = logits.argmax(-1)
    ballots = (votes[..., None] == counted.to(votes.device)).to(compute_dtype(logits)).sum(0)
    total = ballots.sum(-1, keepdim=True)
    return torch.where(total > 0, ballots / total.clamp_min(1), 1 / len(counted))


AGGREGATIONS: Mapping[str, Aggregation] = MappingProxyType(
    {"mean_logits": mean_logits, "mean_probs": mean_probs, "majority_vote": majority_vote}
)
"""Name to function of member logits `(members, batch, classes)` to probabilities `(batch, classes)`."""


@dataclass(frozen=True)
class OracleSelection:
    """The member that is best on the very data it is judged on: an upper bound of choosing one member, never a result.

    Attributes:
        member: Its number.
        accuracy: Its accuracy on that data.
        accuracies: All members' accuracies.
    """

    member: int
    accuracy: float
    accuracies: tuple[float, ...]


def oracle_selection(logits: MemberLogits, labels: Labels) -> OracleSelection:
    """Choose the member with the highest accuracy on these labels, which a user of the model would not have; the first of equals.

    Example:
        >>> oracle_selection(torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]]), torch.tensor([1])).member
        1
    """
    check_member_logits(logits)
    check_labels(labels, logits.shape[1], logits.shape[-1])
    hits = (logits.argmax(-1) == labels.to(logits.device)).sum(-1).tolist()
    accuracies = tuple(hit / logits.shape[1] for hit in hits)
    best = accuracies.index(max(accuracies))
    return OracleSelection(best, accuracies[best], accuracies)


@dataclass(frozen=True)
class GreedySoup:
    """Averaged weights of those members that make the average better.

    Attributes:
        net: A plain module with the averaged weights.
        members: Whose weights they are, in the order in which they were taken.
        accuracy: Accuracy of `net` on the data by which members were taken.
    """

    net: nn.Module
    members: tuple[int, ...]
    accuracy: float


@checked
def greedy_soup(members: Members, data: Pairs, *, batch_size: int = 1024) -> GreedySoup:
    """Average the weights of members one by one, best first, keeping each that does not make the average less accurate.

    Args:
        members: An ensemble whose members have one architecture: the same modules with the same plain attributes.
        data: Held-out inputs and labels by which to decide; not the data that the result is judged on. For a HeadEnsemble
            they may be the features of `cache_features`; the result still takes inputs.
        batch_size: How many inputs go through a network at once.

    Returns:
        The network, and whose weights it has. Reading: never less accurate on `data` than the best member; with one member taken,
        averaging did not help. `ens.soup()` is the average of all.

    Example:
        >>> import dissensus as ds
        >>> ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3), num_members=3)
        >>> len(greedy_soup(ens, (torch.randn(32, 4), torch.arange(32) % 3)).members) >= 1
        True

    References:
        Wortsman et al., 2022, <https://arxiv.org/abs/2203.05482>.
    """
    batch_size = whole_number("batch_size", batch_size, 1)
    reader = members.reader(data)
    nets = [reader.member(index) for index in range(reader.num_members)]
    check_one_architecture(nets)
    accuracies = [_accuracy(net, data, batch_size, members.output) for net in nets]
    order = sorted(range(len(nets)), key=lambda index: -accuracies[index])
    taken, best = [order[0]], accuracies[order[0]]
    for index in order[1:]:
        accuracy = _accuracy(reader.averaged([nets[i] for i in (*taken, index)]), data, batch_size, members.output)
        if accuracy >= best:
            taken, best = [*taken, index], accuracy
    soup = reader.averaged([nets[index] for index in taken])
    net = members.on_backbone(soup) if isinstance(members, HeadEnsemble) and reader is not members else soup
    return GreedySoup(net, tuple(taken), best)


def _accuracy(net: nn.Module, data: Pairs, batch_size: int, output: Output = None) -> float:
    device, hits, count = device_of(net), 0, 0
    read = explained(partial(call, net), net)
    with evaluation_mode(net), seeded(0):
        for x, y in pair_batches(data, batch_size):
            outputs, labels = pick(read(x.to(device)), output), y.to(device)
            if outputs.ndim != 2:
                raise ValueError(
                    f"A greedy soup is chosen by class logits, (batch, classes); got {tuple(outputs.shape)}."
                )
            check_labels(labels, len(outputs), outputs.shape[-1])
            hits += int((outputs.argmax(-1) == labels).sum())
            count += len(x)
    if count == 0:
        raise ValueError("There is nothing to choose by: `data` gives no batch.")
    return hits / count


def _restricted(logits: Tensor, classes: Sequence[int] | None) -> Tensor:
    check_member_logits(logits)
    logits = logits.to(compute_dtype(logits))
    return logits if classes is None else logits[..., _class_indices(classes, logits.shape[-1]).to(logits.device)]


def _class_indices(classes: Any, width: int) -> Tensor:
    listed = classes.tolist() if hasattr(classes, "tolist") else classes
    whole = isinstance(listed, Sequence) and all(isinstance(one, int | np.integer) for one in listed)
    # True and False are numbers to Python: a mask would be taken for the classes 0 and 1.
    if not whole or not listed or any(isinstance(one, bool) or not 0 <= one < width for one in listed):
        raise ValueError(f"`classes` must be a list of class indices from 0 to {width - 1}; got {classes!r}.")
    return torch.tensor([int(one) for one in listed])
