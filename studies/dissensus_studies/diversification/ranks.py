"""Scores of known and unknown inputs in, AUROCs with intervals out; and whether two ensembles' AUROCs really differ.

An AUROC is the mean over unknown inputs of the share of known inputs that lie below each. The spread of these shares, and of those
of the known inputs, gives its standard error in closed form; the spread of their *differences* that of the difference between two
ensembles that saw the same inputs. References: DeLong et al., 1988, <https://doi.org/10.2307/2531595>.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dissensus_studies.harness.statistics import NORMAL_95, Interval, share_ends


@dataclass(frozen=True)
class Ranks:
    """AUROCs of several scores on one or more unknown sets, by input.

    Attributes:
        known: For each score and known input, the share of unknown inputs above it, averaged over the sets, `(scores, known)`.
        unknown: For each set the share of known inputs below each of its inputs, `(scores, inputs)`.
        paired: Whether unknown input i was made from known input i, so that the two are resampled together.
    """

    known: Tensor
    unknown: tuple[Tensor, ...]
    paired: bool = False

    @classmethod
    def of(cls, known: Tensor, unknown: Tensor, paired: bool = False) -> "Ranks":
        """Compare scores of known with those of unknown inputs, `(scores, inputs)` each; ties count one half.

        Example:
            >>> Ranks.of(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 2.0]])).auroc
            tensor([0.8750], dtype=torch.float64)
        """
        return cls(1 - _share_below(unknown, known), (_share_below(known, unknown),), paired)

    @classmethod
    def mean(cls, parts: Sequence["Ranks"]) -> "Ranks":
        """Return the mean over sets that were compared with the same known inputs."""
        known = torch.stack([part.known for part in parts]).mean(0)
        return cls(known, tuple(u for part in parts for u in part.unknown), all(p.paired for p in parts))

    @property
    def auroc(self) -> Tensor:
        """AUROC of each score, averaged over sets, `(scores,)`."""
        return torch.stack([values.mean(1) for values in self.unknown]).mean(0)

    def rows(self, places: Sequence[int]) -> "Ranks":
        """Return some of the scores, in this order."""
        return Ranks(self.known[places], tuple(u[places] for u in self.unknown), self.paired)

    def minus(self, other: "Ranks") -> "Ranks":
        """Return the differences by input; its `auroc` is that of the AUROCs."""
        unknown = tuple(a - b for a, b in zip(self.unknown, other.unknown, strict=True))
        return Ranks(self.known - other.known, unknown, self.paired)

    @property
    def error(self) -> Tensor:
        """Standard error of each AUROC over known and unknown inputs, `(scores,)`."""
        if self.paired:
            both = self.known + torch.stack(self.unknown).mean(0)
            return (_variance(both) / both.shape[1]).sqrt()
        count = len(self.unknown)
        sets = sum(_variance(values) / values.shape[1] / count**2 for values in self.unknown)
        return (_variance(self.known) / self.known.shape[1] + sets).sqrt()

    def intervals(self) -> list[Interval]:
        """Return value, low and high of each score's AUROC, all in [0, 1]."""
        least = min(self.known.shape[1], *(values.shape[1] for values in self.unknown))
        return [
            [round(number, 6) for number in (value, *share_ends(value, error, least))]
            for value, error in zip(self.auroc.tolist(), self.error.tolist(), strict=True)
        ]

    def differences(self) -> list[Interval]:
        """Return value, low and high of each score, where these are differences of AUROCs: what `minus` returns."""
        return [
            [round(value + sign * NORMAL_95 * error, 6) for sign in (0, -1, 1)]
            for value, error in zip(self.auroc.tolist(), self.error.tolist(), strict=True)
        ]


def _share_below(sorted_from: Tensor, values: Tensor) -> Tensor:
    """Return for each value the share of the others below it, ties counting one half, row by row."""
    ordered = sorted_from.sort(dim=1).values
    values = values.contiguous()
    below = torch.searchsorted(ordered, values, right=False)
    not_above = torch.searchsorted(ordered, values, right=True)
    return (below + not_above).double() / (2 * ordered.shape[1])


def _variance(values: Tensor) -> Tensor:
    return values.var(1) if values.shape[1] > 1 else torch.zeros_like(values[:, 0])


def ranks_of(
    known: Tensor,
    unknown: Mapping[str, Tensor],
    corrupted: Mapping[str, Mapping[str, Tensor]],
    groups: Mapping[str, Sequence[str]],
) -> dict[str, Ranks]:
    """Compare scores of unknown sets and of corrupted first known inputs with those of known ones, `(scores, inputs)`.

    Returns:
        Every set, every group that is not empty, and every severity's ("C-5") average over corruptions.
    """
    found = {name: Ranks.of(known, scores) for name, scores in unknown.items()}
    means = {name: Ranks.mean([found[part] for part in parts]) for name, parts in groups.items() if parts}
    for severity, sets in corrupted.items():
        parts = [Ranks.of(known[:, : scores.shape[1]], scores, paired=True) for scores in sets.values()]
        means[severity] = Ranks.mean(parts)
    return {**found, **means}
