"""Prediction sets and intervals that hold the truth with a guaranteed probability."""

from math import ceil
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dissensus._signatures import checked, real_number
from dissensus.conformal.ranks import Floats, Values, array, fraction, labels_of, like, vector, warn_of_few

SetMethod: TypeAlias = Literal["lac", "aps", "raps"]
IntervalMethod: TypeAlias = Literal["normalised", "cqr"]


@checked
def sets(
    probs_cal: Values,
    y_cal: Values,
    probs: Values,
    coverage: float = 0.9,
    *,
    method: SetMethod = "lac",
    per_class: bool = False,
    penalty: float = 0.01,
    free_ranks: int = 1,
) -> Any:
    r"""Return for each input the classes that it may belong to: the true one is among them with probability `coverage`.

    Each class of each input gets a score, and stays if that is at most the $\lceil (n+1)\,\text{coverage}\rceil$-th smallest
    among the scores of true classes of held-out inputs. With $p_{(1)} \ge p_{(2)} \ge \dots$ and the class at rank $r$:

    - `"lac"`: $1 - p_{(r)}$. The smallest sets on average; empty where no class is likely enough.
    - `"aps"`: $\sum_{k \le r} p_{(k)}$. Sets grow where the ensemble is unsure, so hard inputs are covered better.
    - `"raps"`: the same plus $\lambda \max(0, r - k_0)$, which cuts the long tails of sets of many classes.

    Args:
        probs_cal: Predicted probabilities of held-out inputs, `(n, classes)`, such as the members' mean.
        y_cal: Their classes, `(n,)`, from 0.
        probs: Predicted probabilities of new inputs, `(batch, classes)`.
        coverage: The probability to guarantee, over held-out and new input together.
        method: Which score.
        per_class: Whether to guarantee it within each class: scores are compared with those of the class in question only.
        penalty: $\lambda$ of "raps".
        free_ranks: $k_0$ of "raps": so many classes are not penalised.

    Returns:
        `(batch, classes)` bool, a tensor where `probs` is one. Reading: one class is sure, many are doubt.

    Example:
        >>> held_out = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
        >>> sets(held_out, [0, 0, 1, 1], np.array([[0.95, 0.05], [0.5, 0.5]]), coverage=0.8)
        array([[ True, False],
               [ True,  True]])

    References:
        Sadinle et al., 2019, <https://arxiv.org/abs/1609.00451>; Romano et al., 2020, <https://arxiv.org/abs/2006.02544>;
        Angelopoulos et al., 2021, <https://arxiv.org/abs/2009.14193>.
    """
    level = fraction(coverage, "coverage")
    held_out, new = _probabilities(probs_cal, "probs_cal"), _probabilities(probs, "probs")
    if held_out.shape[1] != new.shape[1]:
        raise ValueError(f"`probs` must have the classes of `probs_cal`, {held_out.shape[1]}; got {new.shape[1]}.")
    y = labels_of(y_cal, "y_cal", len(held_out))
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= held_out.shape[1]:
        got = "words" if y.dtype.kind == "U" else f"{y.min()} to {y.max()}"
        raise ValueError(
            f"`y_cal` must be classes from 0 to {held_out.shape[1] - 1}; got {got}. Give columns' numbers."
        )
    slope = real_number("penalty", penalty) if method == "raps" else 0.0
    of_true = _class_scores(held_out, method, slope, free_ranks)[np.arange(len(y)), y]
    classes = range(held_out.shape[1]) if per_class else ()
    limits = [_limit(of_true[y == c], level, f" of class {c}") for c in classes] or [_limit(of_true, level)]
    return like(_class_scores(new, method, slope, free_ranks) <= np.array(limits), probs)


@checked
def intervals(
    prediction_cal: tuple[Values, Values],
    y_cal: Values,
    prediction: tuple[Values, Values],
    coverage: float = 0.9,
    *,
    method: IntervalMethod = "normalised",
    groups_cal: Any = None,
    groups: Any = None,
) -> Any:
    r"""Return intervals that hold the target with probability `coverage`, from predictions that need not be calibrated.

    - `"normalised"`: predictions are (mean, sd), such as those of `ds.mixture`; the interval is $\mu \pm q\sigma$, where $q$ is the
      $\lceil (n+1)\,\text{coverage}\rceil$-th smallest $|y-\mu|/\sigma$ of held-out inputs. Wide where the mixture is unsure.
    - `"cqr"`: predictions are (low, high), such as quantiles; both move outwards by $q$, of $\max(\text{low} - y, y - \text{high})$,
      or inwards where they were too far out (an interval whose ends then cross is empty).

    Args:
        prediction_cal: Two arrays `(n,)` for held-out inputs.
        y_cal: Their targets, `(n,)`.
        prediction: The same two for new inputs, `(batch,)` each.
        coverage: The probability to guarantee, over held-out and new input together.
        method: How predictions are read.
        groups_cal: Group of each held-out input, `(n,)`, for the guarantee within each group.
        groups: Group of each new input, `(batch,)`.

    Returns:
        `(batch, 2)`, low and high; a tensor where the prediction is one. Infinite where held-out inputs are too few.

    Example:
        >>> mean, sd, y = np.zeros(9), np.ones(9), np.arange(-4.0, 5.0)
        >>> intervals((mean, sd), y, ([10.0], [0.5]), coverage=0.9)
        array([[ 8., 12.]])

    References:
        Lei et al., 2018, <https://arxiv.org/abs/1604.04173>; Romano et al., 2019, <https://arxiv.org/abs/1905.03222>.
    """
    level = fraction(coverage, "coverage")
    y = vector(y_cal, "y_cal")
    low, high, unit = _ends(prediction_cal, "prediction_cal", method, len(y))
    new_low, new_high, new_unit = _ends(prediction, "prediction", method)
    reach = _limits_by_group(np.maximum(low - y, y - high) / unit, level, groups_cal, groups, len(new_low))
    return like(np.stack([new_low - reach * new_unit, new_high + reach * new_unit], axis=1), prediction[0])


def _limits_by_group(scores: Floats, level: float, groups_cal: Any, groups: Any, num: int) -> Floats:
    """Return the limit for each new input, that of its own group where there are groups."""
    if (groups_cal is None) != (groups is None):
        raise ValueError("Groups must be given for held-out and new inputs alike: pass `groups_cal` and `groups`.")
    if groups_cal is None:
        return np.array(_limit(scores, level))
    known, new = labels_of(groups_cal, "groups_cal", len(scores)), labels_of(groups, "groups", num)
    names, places = np.unique(new, return_inverse=True)
    return np.array([_limit(scores[known == name], level, f" of group {name!r}") for name in names.tolist()])[places]


def _limit(scores: Floats, level: float, of: str = "") -> float:
    """Return the score that the next one exceeds with probability 1 - level or less; infinite where there are too few."""
    # The product may come out a hair above the whole number that it is.
    rank = ceil((len(scores) + 1) * level - 1e-9)
    if rank <= len(scores):
        return float(np.partition(scores, rank - 1)[rank - 1])
    warn_of_few(len(scores), 1 - level, f"The held-out inputs{of}", "the answer is everything")
    return float("inf")


def _class_scores(probs: Floats, method: str, slope: float, free_ranks: int) -> Floats:
    """Return how strange each class would be, `(batch, classes)`."""
    if method == "lac":
        return 1 - probs
    order = np.argsort(-probs, axis=1, kind="stable")
    ranks = np.arange(1, probs.shape[1] + 1)
    ranked = np.cumsum(np.take_along_axis(probs, order, 1), axis=1) + slope * np.maximum(0, ranks - free_ranks)
    scores = np.empty_like(probs)
    np.put_along_axis(scores, order, ranked, 1)
    return scores


def _probabilities(values: Values, name: str) -> NDArray[np.float64]:
    found = array(values, name)
    if found.ndim != 2 or found.shape[1] < 2:
        raise ValueError(f"`{name}` must be shaped (inputs, classes); got {found.shape}. For members, pass their mean.")
    if found.min() < 0 or np.abs(found.sum(1) - 1).max() > 1e-2:
        raise ValueError(f"`{name}` must be probabilities, each row with sum 1. For logits, pass `logits.softmax(-1)`.")
    return found


def _ends(
    values: tuple[Values, Values], name: str, method: IntervalMethod, size: int | None = None
) -> tuple[Floats, Floats, Floats]:
    """Return both ends of intervals before they move outwards, and the unit in which they do."""
    first = vector(values[0], name, size)
    second = vector(values[1], name, len(first))
    if method == "cqr":
        return first, second, np.ones_like(first)
    if second.min() <= 0:
        raise ValueError("Standard deviations must be positive; got 0 or less. Pass (mean, sd).")
    return first, first, second
