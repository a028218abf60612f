"""Predicted probabilities and labels of a whole data set -> how good the predictions are."""

import torch

from dissensus._signatures import checked
from dissensus.metrics._inputs import Array, indices, probabilities_and_labels


@checked
def accuracy(probs: Array, labels: Array) -> float:
    """Fraction of inputs whose most probable class is the true one.

    Args:
        probs: Predicted probabilities, `(batch, classes)`.
        labels: True class indices, `(batch,)`.

    Returns:
        A number in [0, 1]. Reading: 1 is perfect, 1 / classes is guessing. Between equal probabilities the first class
        wins.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]])
        >>> round(accuracy(probs, torch.tensor([0, 1, 1])), 4)
        0.6667
    """
    rows, truth = probabilities_and_labels(probs, labels)
    return int((rows.argmax(1) == truth).sum()) / len(rows)


@checked
def top_k_accuracy(probs: Array, labels: Array, k: int = 5) -> float:
    """Fraction of inputs whose true class is among the `k` most probable; other arguments as in `accuracy`.

    Returns:
        A number in [0, 1]. Reading: as `accuracy`, which it is for `k=1`. Equal probabilities are ranked by class index.

    Example:
        >>> probs = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
        >>> top_k_accuracy(probs, torch.tensor([1, 0]), k=2)
        0.5
    """
    rows, truth = probabilities_and_labels(probs, labels)
    if not 1 <= k <= rows.shape[1]:
        raise ValueError(f"`k` must lie between 1 and the number of classes, {rows.shape[1]}; got {k}.")
    own = rows.gather(1, truth[:, None])
    earlier = torch.arange(rows.shape[1], device=rows.device) < truth[:, None]
    ahead = (rows > own) | ((rows == own) & earlier)
    return int((ahead.sum(1) < k).sum()) / len(rows)


@checked
def nll(probs: Array, labels: Array) -> float:
    r"""Negative log-likelihood of the labels, in nats; arguments as in `accuracy`.

    $$-\frac{1}{B}\sum_b \log p(y_b \mid x_b)$$

    Returns:
        Nats, not negative. Reading: 0 is certain and right, log(classes) is the uniform guess. A true class of
        probability zero counts with the smallest normal number of the dtype (about 87 nats in float32), not infinity.

    Example:
        >>> round(nll(torch.full((8, 4), 0.25), torch.zeros(8, dtype=torch.long)), 4)
        1.3863
    """
    rows, truth = probabilities_and_labels(probs, labels)
    own = rows.gather(1, truth[:, None]).clamp(torch.finfo(rows.dtype).tiny, 1.0)
    # Subtraction turns the -0.0 of perfect predictions into 0.0.
    return 0.0 - float(own.double().log().mean())


@checked
def brier(probs: Array, labels: Array) -> float:
    r"""Brier score: squared distance to the one-hot label, summed over classes; arguments as in `accuracy`.

    $$\frac{1}{B}\sum_b \sum_c \big(p(c \mid x_b) - 1[c = y_b]\big)^2$$

    Returns:
        A number in [0, 2]. Reading: 0 is perfect, 1 - 1/classes is the uniform guess, 2 is certain and wrong. (Others
        divide by the number of classes, or count one of two classes only.)

    Example:
        >>> round(brier(torch.tensor([[0.8, 0.2]]), torch.tensor([0])), 4)
        0.08

    References:
        Brier, 1950, Verification of forecasts expressed in terms of probability.
    """
    rows, truth = probabilities_and_labels(probs, labels)
    own = rows.gather(1, truth[:, None])[:, 0].double()
    # Taken apart as (1 - p_y)^2 and the rest: the expanded square would cancel for confident, right
    # predictions.
    others = rows.square().scatter_(1, truth[:, None], 0.0).sum(1, dtype=torch.float64)
    return float(((1 - own).square() + others).mean())


@checked
def group_accuracies(probs: Array, labels: Array, groups: Array) -> dict[int, float]:
    """Accuracy of each group of inputs; `groups` are ids, any integers, `(batch,)`, and other arguments as in `accuracy`.

    Returns:
        Group id to accuracy, in order of the ids; only groups that occur. Reading: a wide spread means that the average
        hides a group the model fails on.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
        >>> group_accuracies(probs, torch.tensor([0, 1, 0]), torch.tensor([3, 3, 5]))
        {3: 0.5, 5: 1.0}
    """
    rows, truth = probabilities_and_labels(probs, labels)
    members = indices(groups, "groups", len(rows)).to(rows.device)
    ids, position, sizes = torch.unique(members, return_inverse=True, return_counts=True)
    hits = torch.bincount(position[rows.argmax(1) == truth], minlength=len(ids))
    return {group: hit / size for group, hit, size in zip(ids.tolist(), hits.tolist(), sizes.tolist(), strict=True)}


@checked
def worst_group_accuracy(probs: Array, labels: Array, groups: Array) -> float:
    """Accuracy of the group with the lowest accuracy; arguments as in `group_accuracies`.

    Returns:
        A number in [0, 1]. Reading: what the least well served group gets; never above `accuracy`.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
        >>> worst_group_accuracy(probs, torch.tensor([0, 1, 0]), torch.tensor([3, 3, 5]))
        0.5

    References:
        Sagawa et al., 2020, <https://arxiv.org/abs/1911.08731>.
    """
    return min(group_accuracies(probs, labels, groups).values())
