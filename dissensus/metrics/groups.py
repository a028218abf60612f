"""Predictions, labels and group ids -> accuracy group by group."""

import torch

from dissensus.metrics._inputs import Array, indices, probabilities_and_labels


def group_accuracies(probs: Array, labels: Array, groups: Array) -> dict[int, float]:
    """Accuracy of each group of inputs.

    Reading: a wide spread means that the average hides a group the model fails on.

    Args:
        probs: Predicted probabilities, `(batch, classes)`.
        labels: True class indices, `(batch,)`.
        groups: Group ids, any integers, `(batch,)`.

    Returns:
        Group id to accuracy, in order of the ids; only groups that occur.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
        >>> group_accuracies(probs, torch.tensor([0, 1, 0]), torch.tensor([3, 3, 5]))
        {3: 0.5, 5: 1.0}
    """
    rows, truth = probabilities_and_labels(probs, labels)
    members = indices(groups, "groups", len(rows)).to(rows.device)
    ids, position = torch.unique(members, return_inverse=True)
    correct = rows.argmax(1) == truth
    sizes = torch.bincount(position, minlength=len(ids)).tolist()
    hits = torch.bincount(position[correct], minlength=len(ids)).tolist()
    return {group: hit / size for group, hit, size in zip(ids.tolist(), hits, sizes, strict=True)}


def worst_group_accuracy(probs: Array, labels: Array, groups: Array) -> float:
    """Accuracy of the group with the lowest accuracy.

    Reading: what the least well served group gets; never above `accuracy`.

    Args:
        probs: Predicted probabilities, `(batch, classes)`.
        labels: True class indices, `(batch,)`.
        groups: Group ids, any integers, `(batch,)`.

    Returns:
        A number in [0, 1].

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
        >>> worst_group_accuracy(probs, torch.tensor([0, 1, 0]), torch.tensor([3, 3, 5]))
        0.5

    References:
        Sagawa et al., 2020, <https://arxiv.org/abs/1911.08731>.
    """
    return min(group_accuracies(probs, labels, groups).values())
