"""From an ensemble and inputs to member outputs, and from member outputs to the moments of their mixture."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from dissensus._checks import check_weights
from dissensus.data.sources import Inputs, device_of, input_batches
from dissensus.members import Members
from dissensus.randomness import seeded

Family = Literal["gaussian", "laplace"]


@contextmanager
def evaluation_mode(members: torch.nn.Module) -> Iterator[None]:
    """Run a block in evaluation mode and without gradients; set every module back as it was."""
    modes = [(module, module.training) for module in members.modules()]
    was_training = members.training
    members.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        members.train(was_training)
        for module, mode in modes:
            module.training = mode


def predict(
    members: Members, x: Inputs, *, batch_size: int = 1024, device: str | torch.device | None = None
) -> Tensor:
    """Return every member's output for every input, in batches and without gradients.

    Args:
        members: The ensemble; it is left in the mode (training or evaluation) in which it came.
        x: Inputs as a tensor, an array, a Dataset or a DataLoader (targets in them are passed over).
        batch_size: How many inputs go through the members at once.
        device: Where to run; by default where the ensemble is. The ensemble moves there and stays.

    Returns:
        `(members, inputs, ...)`, on the device of `x`, or on the CPU if `x` is not a tensor.

    Example:
        >>> from dissensus import DeepEnsemble
        >>> ens = DeepEnsemble(lambda: torch.nn.Linear(3, 2), num_members=5)
        >>> predict(ens, torch.zeros(10, 3)).shape
        torch.Size([5, 10, 2])
    """
    if device is not None:
        members.to(device)
    home = x.device if isinstance(x, Tensor) else torch.device("cpu")
    place = device_of(members)
    # Seeded: loaders, and members that draw even in evaluation, would move the global generators.
    with evaluation_mode(members), seeded(0):
        outputs = [members(batch.to(place)).to(home) for batch in input_batches(x, batch_size)]
    if not outputs:
        raise ValueError("There is nothing to predict: `x` gives no batch.")
    return torch.cat(outputs, dim=1)


def mixture(
    mean: Tensor, scale: Tensor, family: Family = "gaussian", weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return mean and standard deviation of the mixture of the members' distributions.

    $$\mu_* = \sum_m w_m \mu_m,\qquad \sigma_*^2 = \sum_m w_m(\sigma_m^2 + \mu_m^2) - \mu_*^2$$

    where $\sigma_m^2$ is the scale squared for a normal and twice that for a Laplace distribution.

    Args:
        mean: Members' means, `(members, batch, ...)`.
        scale: Members' scales (sigma of a normal, b of a Laplace distribution), same shape.
        family: `"gaussian"` or `"laplace"`.
        weights: Weights of the members, `(members,)`, summing to one; uniform by default.

    Returns:
        Mean and standard deviation, `(batch, ...)`. The variance is the members' mean variance (data uncertainty) plus the
        variance of their means (knowledge uncertainty).

    Example:
        >>> mean, std = mixture(torch.tensor([[0.0], [2.0]]), torch.ones(2, 1))
        >>> mean.item(), round(std.item() ** 2, 4)
        (1.0, 2.0)
    """
    if mean.shape != scale.shape:
        raise ValueError(
            f"`mean` and `scale` must have one shape; got {tuple(mean.shape)} and {tuple(scale.shape)}."
        )
    if family not in ("gaussian", "laplace"):
        raise ValueError(f"`family` must be 'gaussian' or 'laplace'; got {family!r}.")
    if weights is None:
        weights = torch.full((len(mean),), 1 / len(mean))
    check_weights(weights, len(mean))
    share = weights.to(mean).reshape(-1, *(1 for _ in mean.shape[1:]))
    spread = scale.square() * (2.0 if family == "laplace" else 1.0)
    centre = (share * mean).sum(0)
    # Around the centre: the difference of two second moments cancels when means are large.
    variance = (share * (spread + (mean - centre).square())).sum(0)
    return centre, variance.sqrt()
