"""Losses of the ensemble on a batch in; how much each example counts in the disagreement out."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dissensus.objectives.likelihoods import LIKELIHOODS, full
from dissensus.types import Labels, MemberLogits, Scores

Weighting: TypeAlias = Literal["loss", "inverse_probability"]


def loss_guided_weights(logits: MemberLogits, labels: Labels) -> Scores:
    r"""Weight of each example in loss-guided disagreement: its loss over the squared mean loss of the batch.

    $$\alpha_n = \frac{\ell_n}{\big(\frac1B\sum_b \ell_b\big)^2},\qquad
      \ell_n = -\log \mathrm{softmax}\Big(\frac1M \sum_m f^m(x_n)\Big)_{y_n}$$

    Reading: the mean over the batch is exactly one over the mean loss. So the weights are small while the ensemble
    knows little, and without bound once it fits its training data; see the guards of `LossGuided`.

    Args:
        logits: Member logits, `(members, batch, classes)`; they are averaged.
        labels: True class indices, `(batch,)`.

    Returns:
        `(batch,)`, without gradient.

    Example:
        >>> weights = loss_guided_weights(torch.zeros(3, 4, 10), torch.arange(4))
        >>> [round(weight, 4) for weight in weights.tolist()]  # every loss is log 10
        [0.4343, 0.4343, 0.4343, 0.4343]
    """
    return weights_from_losses(ensemble_losses(logits.mean(0), labels))


def ensemble_losses(mean_logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits averaged over members, `(batch, classes)` to `(batch,)`, without gradient."""
    return LIKELIHOODS["cross_entropy"].per_example(full(mean_logits.detach()), targets)


def weights_from_losses(losses: Tensor, weighting: Weighting = "loss") -> Tensor:
    """Return weights with mean one over the mean loss: in proportion to the loss, or to one over the true class's probability."""
    mean = losses.mean()
    share = losses / mean if weighting == "loss" else losses.softmax(-1) * len(losses)
    # Not the loss over the squared mean: the square of a small mean underflows.
    return torch.where(mean > 0, share / mean, 0.0)
