"""One network seen through references: the pairs it takes, its view through one, and how far several lead apart."""

from typing import Literal

import torch
from torch import Tensor, nn

from dissensus.types import MemberLogits, Scores

TemperatureForm = Literal["exponential", "deviation"]

# Sigmoids that differ by less cannot be told from rounded ones in half precision.
_LEAST_DEVIATION = 1e-3


def paired(reference: Tensor, x: Tensor, axis: int) -> Tensor:
    """Return `[reference, x - reference]`, joined along an axis counted from the end; references spread over the inputs."""
    residual = x - reference
    return torch.cat([reference.expand_as(residual), residual], dim=axis)


class AnchoredNet(nn.Module):
    """One doubled network that sees every input through one reference."""

    reference: Tensor

    def __init__(self, net: nn.Module, reference: Tensor, axis: int | None = None) -> None:
        """Take a doubled network, a reference, and the axis on which pairs are joined, from the end; an input's first by default."""
        super().__init__()
        self.net = net
        self.axis = -reference.ndim if axis is None else axis
        self.register_buffer("reference", reference.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Run the network on `[reference, x - reference]`."""
        output: Tensor = self.net(paired(self.reference, x, self.axis))
        return output


def anchor_temperature(logits: MemberLogits, form: TemperatureForm = "exponential") -> Scores:
    r"""Return how much one network's logits are cooled for each input, from how much they differ between references.

    With $c$ the mean over classes of the standard deviation (of a sample) over references of the *sigmoid* of the logits,
    `"exponential"` is $1 + e^c$ and `"deviation"` is $c$ itself, but at least 0.001: where all references agree, logits become a
    thousand times as large, not infinite.

    Args:
        logits: One network's outputs with each of at least two references, `(references, batch, classes)`.
        form: Which of the two.

    Returns:
        What to divide logits by, `(batch,)`; higher where references disagree. `"exponential"` is never below 2: it makes
        predictions less confident even where all references agree.

    Example:
        >>> anchor_temperature(torch.zeros(3, 4, 2))
        tensor([2., 2., 2., 2.])

    References:
        Thiagarajan et al., 2022, <https://arxiv.org/abs/2207.07235>.
    """
    if len(logits) < 2:
        raise ValueError(f"A temperature compares at least two references; got {len(logits)}.")
    spread = logits.sigmoid().std(0).mean(-1)
    return 1 + spread.exp() if form == "exponential" else spread.clamp_min(_LEAST_DEVIATION)
