"""Where new scores rank among those of held-out inputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dissensus._signatures import checked, is_tensor, real_number, warn

if TYPE_CHECKING:
    from torch import Tensor

    Values: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]
else:
    Values = Any  # torch is not needed here; `array` looks at values

Floats: TypeAlias = NDArray[np.float64]


@checked
def p_values(calibration: Values, scores: Values) -> Floats:
    r"""Return the conformal p-value of each score: how rare it is among scores of held-out inputs.

    $$p = \frac{1 + \#\{i : c_i \ge s\}}{n + 1}$$

    For an input that is exchangeable with the held-out ones, $P(p \le \alpha) \le \alpha$ for every $\alpha$, whatever the
    score and whatever ties there are: equal scores count as at least as strange, and nothing is drawn at random.

    Args:
        calibration: Scores of held-out inputs, `(n,)`, in any order; higher is stranger.
        scores: Scores of new inputs, `(batch,)`.

    Returns:
        `(batch,)` float64, from $1/(n+1)$ to 1. Reading: small is strange.

    Example:
        >>> p_values([1.0, 2.0, 2.0, 3.0], [0.0, 2.0, 9.0])
        array([1. , 0.8, 0.2])

    References:
        Vovk et al., 2005, *Algorithmic Learning in a Random World*; Bates et al., 2023, <https://arxiv.org/abs/2104.08279>.
    """
    return p_values_among(np.sort(vector(calibration, "calibration")), vector(scores, "scores"))


def p_values_among(calibration: Floats, scores: Floats) -> Floats:
    """Return p-values among scores that are sorted already."""
    at_least = len(calibration) - np.searchsorted(calibration, scores, side="left")
    return (1 + at_least) / (len(calibration) + 1)


def array(values: Values, name: str) -> Floats:
    """Return numbers, from a tensor on any device, an array or a list, as float64; refuse NaN and emptiness."""
    given: Any = values
    try:
        if is_tensor(values):
            given = given.detach().cpu()
            given = given.double().numpy() if not given.is_complex() else given.numpy()
        given = np.asarray(given)
        found = given.astype(np.float64, casting="unsafe" if given.dtype == object else "same_kind", copy=False)
    except (TypeError, ValueError, NotImplementedError):
        raise ValueError(f"`{name}` must hold numbers; got {type(values).__name__}. Pass an array.") from None
    if found.size == 0:
        raise ValueError(f"`{name}` must not be empty; got shape {found.shape}. Pass one value or more.")
    if np.isnan(found).any():
        row = int(np.argwhere(np.isnan(np.atleast_1d(found)))[0][0])
        raise ValueError(f"`{name}` must not hold NaN; row {row} does. Leave such inputs out.")
    return found


def vector(values: Values, name: str, size: int | None = None) -> Floats:
    """Return numbers shaped `(batch,)`, of `size` rows where that is given."""
    found = array(values, name)
    if found.ndim != 1 or (size is not None and len(found) != size):
        wanted = "(batch,)" if size is None else f"({size},)"
        raise ValueError(f"`{name}` must be shaped {wanted}; got {found.shape}. Pass one number an input.")
    return found


def labels_of(values: Any, name: str, size: int) -> NDArray[Any]:
    """Return the class of each input, whole numbers or words, `(size,)`."""
    found = np.asarray(values.detach().cpu() if is_tensor(values) else values)
    if found.dtype == object and all(isinstance(word, str) for word in found.flat):
        found = found.astype(np.str_)  # columns of pandas hold words as objects
    if found.shape != (size,) or found.dtype.kind not in "iubU":
        raise ValueError(
            f"`{name}` must be {size} whole numbers or words, one class an input; got {found.dtype} shaped {found.shape}."
        )
    return found


def fraction(value: float, name: str) -> float:
    """Return a number between 0 and 1, both excluded."""
    return real_number(name, value, above=True, below=1.0)


def warn_of_few(num: int, rate: float, who: str, effect: str) -> None:
    """Warn where so few held-out inputs can never be ranked past the rate."""
    if 1 / (num + 1) > rate:
        warn(
            f"{who}, {num}, are too few: {effect}. For a rate of {rate:g}, hold out {round(1 / rate + 0.4999) - 1} or more."
        )


def like(found: NDArray[Any], given: Any) -> Any:
    """Return an array as a tensor on the device of what was given, if that is a tensor."""
    if not is_tensor(given):
        return found
    import torch

    return torch.from_numpy(found).to(given.device)
