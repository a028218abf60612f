"""Member outputs of the known inputs, batch by batch, in; a diagnosis of the members out."""

import torch
from torch import Tensor

from dissensus.diagnostics import Finding, diagnose
from dissensus.objectives.likelihoods import mean_and_scale
from dissensus.randomness import mix

# So many outputs are diagnosed in a twentieth of a second. Beyond, some inputs stand for all.
_LARGEST = 125_000
# Fewer inputs say little; where even these have very many outputs, time and memory go first.
_FEWEST_ROWS, _TOO_LARGE, _FEWEST_OF_ALL = 500, 2_000_000, 100
# Members are dropped anew for every input, so many inputs need few repeats.
_DROPS, _FEWEST_REPEATS, _MOST_REPEATS = 20_000, 5, 20


class OutputSample:
    """Outputs and targets of known inputs: all of them, or as many, drawn at random, as are cheap to keep."""

    def __init__(self, largest: int = _LARGEST) -> None:
        self.largest = largest
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rows = 0

    def add(self, outputs: Tensor, targets: Tensor, start: int) -> None:
        """Take in a batch whose first row has this number in the set."""
        index = torch.arange(start, start + outputs.shape[1])
        self._parts.append((index, outputs.detach(), targets.to(outputs.device)))
        self._rows += len(index)
        # Twice as many may pile up, so that not every batch sorts them.
        if self._rows > 2 * self._limit(outputs):
            self._parts = [self._chosen()]
            self._rows = len(self._parts[0][0])

    def diagnose(self, loss: str, density: bool, weights: Tensor | None, seed: int) -> Finding | None:
        """Return what the outputs say; None of a single member."""
        _, outputs, targets = self._chosen()
        if len(outputs) == 1:
            return None
        if density:
            outputs = mean_and_scale(outputs)[0]
        if loss not in ("cross_entropy", "brier"):
            loss, targets = "mse", targets.reshape(outputs.shape[1:])
        repeats = min(_MOST_REPEATS, max(_FEWEST_REPEATS, _DROPS // outputs.shape[1]))
        return diagnose(outputs, targets, loss, "probs", weights, repeats=repeats, seed=seed)

    def _limit(self, outputs: Tensor) -> int:
        of_a_row = outputs.shape[0] * outputs.shape[2]
        fewest = max(_FEWEST_OF_ALL, min(_FEWEST_ROWS, _TOO_LARGE // of_a_row))
        return max(fewest, self.largest // of_a_row)

    def _chosen(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows with the smallest hash of their number, in order: the same however they came in batches."""
        index = torch.cat([part[0] for part in self._parts])
        outputs = torch.cat([part[1] for part in self._parts], dim=1)
        targets = torch.cat([part[2] for part in self._parts])
        limit = self._limit(outputs)
        if len(index) <= limit:
            return index, outputs, targets
        rows = mix(index).argsort()[:limit].sort().values
        place = rows.to(outputs.device)
        return index[rows], outputs[:, place], targets[place]
