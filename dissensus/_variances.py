r"""How uncertain each regression output is: member means and scales in, variances out, higher = less certain.

Member $m$ predicts a Gaussian with mean $\mu_m$ and variance $v_m = \sigma_m^2$, or a Laplace distribution
with mean $\mu_m$ and variance $v_m = 2b_m^2$. Their mixture has mean $\bar\mu$ and a variance of two parts.
"""

from typing import Literal, TypeAlias

from torch import Tensor

from dissensus._beliefs import deviations, member_mean
from dissensus._checks import check_mean_and_scale, compute_dtype
from dissensus.types import Float, MemberOutputs, MemberWeights

Weights: TypeAlias = MemberWeights | None
Family: TypeAlias = Literal["gaussian", "laplace"]
Variances: TypeAlias = Float[Tensor, "batch ..."]

_VARIANCE_OF_UNIT_SCALE = {"gaussian": 1.0, "laplace": 2.0}


def total_variance(
    mean: MemberOutputs,
    scale: MemberOutputs,
    *,
    family: Family = "gaussian",
    weights: Weights = None,
) -> Variances:
    r"""Total uncertainty: variance of the members' mixture.

    $$\frac{1}{M}\sum_m (v_m + \mu_m^2) - \bar\mu^2$$

    Args:
        mean: Member means, `(members, batch)` or `(members, batch, outputs)`.
        scale: Member scales (sigma or b, never a variance), of the same shape.
        family: `"gaussian"` or `"laplace"`.
        weights: Member weights with sum 1; equal if `None`.

    Returns:
        `(batch,)` or `(batch, outputs)`, in squared target units. Reading: its root is the error to expect.

    Example:
        >>> import torch
        >>> mean, scale = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]])
        >>> total_variance(mean, scale)
        tensor([5.])
    """
    data, knowledge = _variance_parts(mean, scale, family, weights)
    return data + knowledge


def data_variance(
    mean: MemberOutputs,
    scale: MemberOutputs,
    *,
    family: Family = "gaussian",
    weights: Weights = None,
) -> Variances:
    r"""Data uncertainty: mean of the members' variances.

    $$\frac{1}{M}\sum_m v_m$$

    Args:
        mean: Member means, `(members, batch)` or `(members, batch, outputs)`.
        scale: Member scales (sigma or b, never a variance), of the same shape.
        family: `"gaussian"` or `"laplace"`.
        weights: Member weights with sum 1; equal if `None`.

    Returns:
        `(batch,)` or `(batch, outputs)`. Reading: the noise that members see in the target.

    Example:
        >>> import torch
        >>> mean, scale = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]])
        >>> data_variance(mean, scale, family="laplace")
        tensor([8.])
    """
    return _variance_parts(mean, scale, family, weights)[0]


def knowledge_variance(
    mean: MemberOutputs,
    scale: MemberOutputs,
    *,
    family: Family = "gaussian",
    weights: Weights = None,
) -> Variances:
    r"""Knowledge uncertainty: variance of the members' means.

    $$\frac{1}{M}\sum_m (\mu_m - \bar\mu)^2$$

    Args:
        mean: Member means, `(members, batch)` or `(members, batch, outputs)`.
        scale: Member scales, of the same shape; asked for so that the three variances are called alike.
        family: `"gaussian"` or `"laplace"`.
        weights: Member weights with sum 1; equal if `None`.

    Returns:
        `(batch,)` or `(batch, outputs)`. Reading: 0 where members agree; grows away from the data.

    Example:
        >>> import torch
        >>> mean, scale = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]])
        >>> knowledge_variance(mean, scale)
        tensor([1.])
    """
    return _variance_parts(mean, scale, family, weights)[1]


def _variance_parts(
    mean: MemberOutputs, scale: MemberOutputs, family: Family, weights: Weights
) -> tuple[Variances, Variances]:
    if family not in _VARIANCE_OF_UNIT_SCALE:
        raise ValueError(f'`family` must be "gaussian" or "laplace"; got {family!r}. Choose one of the two.')
    check_mean_and_scale(mean, scale, weights)
    mean, scale = mean.detach().to(compute_dtype(mean)), scale.detach().to(compute_dtype(scale))
    weights = None if weights is None else weights.detach().to(mean.device, mean.dtype, non_blocking=True)
    data = _VARIANCE_OF_UNIT_SCALE[family] * member_mean(scale.square(), weights)
    # Centred first: the mean square less the squared mean has no digits left where large means agree.
    knowledge = member_mean(deviations(mean, weights).square(), weights)
    return data, knowledge
