"""`diagnose`: member outputs and targets, or a file of them, in; a `Finding` out."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import combinations, product
from math import isfinite, isinf, nan
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dissensus._checks import check_labels
from dissensus._signatures import checked, whole_number
from dissensus.data.files import open_arrays, read_array
from dissensus.diagnostics.drops import drop_curves
from dissensus.diagnostics.findings import Check, Finding, Pair
from dissensus.metrics import diversity_bounds, pair_diversity
from dissensus.objectives import debias
from dissensus.objectives.collusion import measure, predictions, ratio, wide
from dissensus.objectives.losses import CLASS_LOSSES, Loss, errors, output_sum, shares_of, weighted_mean
from dissensus.types import MemberOutputs

OUTPUT_NAMES = ("outputs", "logits", "predictions")
TARGET_NAMES = ("targets", "target", "labels", "label", "y")
TRAINING_NAMES = ("training_outputs", "training_targets")

_COLUMN = re.compile(r"(?:output|member)_(\d+)(?:_(\d+))?")


class Predictions(NamedTuple):
    """Member outputs `(members, batch, ...)`, and targets; and the same of training data, where a file has them."""

    outputs: Tensor
    targets: Tensor
    training: tuple[Tensor, Tensor] | None = None

    @property
    def loss(self) -> str:
        """The loss that such targets have: cross-entropy for whole numbers beside several outputs, else squared error."""
        classes = not self.targets.is_floating_point() and self.outputs.ndim == 3 and self.outputs.shape[-1] > 1
        return "cross_entropy" if classes else "mse"


def read_predictions(path: Path | str) -> Predictions:
    """Read stored predictions.

    | file | outputs | targets |
    |---|---|---|
    | `.npz` | array `outputs` (or `logits`), `(members, batch, ...)` | array `targets` (or `labels`, `y`) |
    | `.parquet`, `.csv` | columns `output_MEMBER_CLASS`, or `output_MEMBER` | column `target` (or `label`, `y`) |

    Members and classes are counted from 0; tables have a row an input. Arrays `training_outputs` and `training_targets` of a `.npz` are
    outputs on data that every member was trained on.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/p.npz", outputs=np.zeros((3, 8, 2)), targets=np.arange(8) % 2)
        ...     found = read_predictions(f"{folder}/p.npz")
        >>> found.outputs.shape, found.loss
        (torch.Size([3, 8, 2]), 'cross_entropy')
    """
    source = Path(path)
    if not source.is_file():
        raise ValueError(f"There is no file {source}.")
    readers = {".npz": _read_npz, ".parquet": _read_table, ".csv": _read_table}
    if source.suffix not in readers:
        told = f"Predictions are read from {', '.join(readers)}; got {source.name!r}"
        raise ValueError(f"{told}. For a run, give its folder.")
    held_out, *training = [_pair(*found, source) for found in readers[source.suffix](source)]
    return Predictions(*held_out, *training)


def _pair(outputs: Any, targets: Any, source: Path) -> tuple[Tensor, Tensor]:
    arrays = [np.asarray(outputs), np.asarray(targets)]
    for name, array in zip(("outputs", "targets"), arrays, strict=True):
        if array.dtype.kind not in "biuf":
            raise ValueError(f"The {name} in {source.name} must be numbers; got {array.dtype}. Number classes from 0.")
    shapes = [array.shape for array in arrays]
    if len(shapes[0]) < 2 or shapes[0][1:2] != shapes[1][:1]:
        raise ValueError(
            f"Outputs in {source.name} must be shaped (members, batch, ...), with a target for each of the batch; got "
            f"{shapes[0]} and targets {shapes[1]}."
        )
    # A copy: what pandas and npz files give may not be written to, which torch warns about.
    kinds = np.float64, np.float64 if arrays[1].dtype.kind == "f" else np.int64
    held = [torch.from_numpy(np.array(array, dtype=kind, order="C")) for array, kind in zip(arrays, kinds, strict=True)]
    return held[0], held[1]


def _read_npz(source: Path) -> list[tuple[Any, Any]]:
    with open(source, "rb") as file:
        arrays = open_arrays(file, source)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError(f"{source} is not an .npz archive, whatever its name says.")
        names = [tuple(_first(arrays.files, names, source) for names in (OUTPUT_NAMES, TARGET_NAMES))]
        there = tuple(name for name in TRAINING_NAMES if name in arrays.files)
        if len(there) == 1:
            raise ValueError(f"{source.name} has {there[0]} alone; give {' and '.join(TRAINING_NAMES)}, or neither.")
        return [
            (read_array(arrays, pair[0], source), read_array(arrays, pair[1], source))
            for pair in [*names, there]
            if pair
        ]


def _read_table(source: Path) -> list[tuple[Any, Any]]:
    import pandas as pd

    frame = pd.read_parquet(source) if source.suffix == ".parquet" else pd.read_csv(source)
    columns = _output_columns([*map(str, frame.columns)], source)
    members = 1 + columns[-1][0]
    shaped = np.stack([frame[name].to_numpy() for *_, name in columns]).reshape(members, -1, len(frame))
    return [(shaped.transpose(0, 2, 1), frame[_first(list(frame.columns), TARGET_NAMES, source)].to_numpy())]


def _output_columns(names: list[str], source: Path) -> list[tuple[int, int, str]]:
    """Return member, output and name of each column of outputs, in order; one output a member has no number, and is -1."""
    found = filter(None, map(_COLUMN.fullmatch, names))
    columns = sorted((int(match[1]), int(match[2] or -1), match[0]) for match in found)
    members, outputs = ({column[axis] for column in columns} for axis in (0, 1))
    whole = product(range(len(members)), [-1] if outputs == {-1} else range(len(outputs)))
    if columns and [column[:2] for column in columns] == [*whole]:
        return columns
    raise ValueError(
        f"{source.name} must have columns output_0_0, output_0_1, ... (member, then class), or output_0, output_1, ... "
        f"(member), without gaps; it has {', '.join(names[:8])}."
    )


def _first(found: list[str], names: tuple[str, ...], source: Path) -> str:
    if there := [name for name in names if name in found]:
        return there[0]
    raise ValueError(f"{source.name} has none of {', '.join(names)}; it has {', '.join(map(str, found[:8]))}.")


# Beyond so many members, pairs are of some of them: their number grows with the square.
_MEMBERS_IN_PAIRS = 24


@checked
def diagnose(
    outputs: MemberOutputs,
    targets: Tensor,
    loss: Loss = "cross_entropy",
    average: Literal["probs", "scores"] = "probs",
    weights: Tensor | None = None,
    *,
    training: tuple[Tensor, Tensor] | None = None,
    history: Iterable[Mapping[str, Any]] | None = None,
    drop_fractions: Sequence[float] = (0.2, 0.4, 0.6),
    repeats: int = 100,
    drop_per: Literal["example", "set"] = "example",
    seed: int = 0,
) -> Finding:
    r"""Tell whether the members of an ensemble know different things, or only cancel each other (collude).

    $$\underbrace{\overline{\mathrm{ERR}}}_{\text{mean member}} = \underbrace{\mathrm{ERR}}_{\text{ensemble}} + \mathrm{DIV},
      \qquad \text{diversity\_ratio} = \mathrm{DIV} / \mathrm{ERR}$$

    Works on predictions of any ensemble, from anywhere. Held-out data tell most cases apart; members of a classifier
    whose *probabilities* are averaged often show on their training data only, so give that too where you can.

    Args:
        outputs: Member outputs, `(members, batch, ...)`, on data that members were not trained on; logits for classes.
        targets: Targets as `objectives.decompose` takes them for this loss.
        loss: A name or a callable; see `objectives.decompose`.
        average: What the ensemble averages: "probs", or "scores" (logits).
        weights: Non-negative member weights with sum 1, `(members,)`; `None` is uniform.
        training: Outputs and targets on training data that every member was trained on (so not for bagged members).
        history: `run.history` of `fit(..., watch_collusion=True)`, or its rows: errors over training.
        drop_fractions: Shares of the members to drop at test time; `int(members * share)` are dropped.
        repeats: How often members are dropped at random.
        drop_per: Drop a fresh choice of members for each "example", or one for the whole "set".
        seed: Decides which members are dropped.

    Returns:
        A `Finding`: `.diversity_ratio`, `.bias_share`, `.codependence`, `.colluding`, `.explain()` and more.

    Example:
        >>> truth = torch.linspace(-1, 1, 100)
        >>> wave = torch.sin(20 * truth)
        >>> finding = diagnose(torch.stack([truth + wave, truth - wave]), truth, loss="mse")
        >>> finding.colluding, finding.ensemble_error < 1e-9, round(finding.member_error, 2)
        (True, True, 0.49)

    References:
        Jeffares et al., 2023, sections 6.1 and 6.2, <https://arxiv.org/abs/2301.11323>.
    """
    whole_number("repeats", repeats, 1)
    _check(outputs, targets, loss)
    values = wide(outputs)
    targets = targets.detach().to(values.device)
    weights = None if weights is None else weights.detach().to(values)
    measures = measure(values, targets, loss, average, weights)
    trained = None
    if training is not None:
        _check(*training, loss, " of `training`", len(outputs))
        seen = wide(training[0])
        trained = measure(seen, training[1].detach().to(seen.device), loss, average, weights)
    checks, watched = _checks(history)
    curves, examples = drop_curves(
        values, targets, loss, average, weights, fractions=drop_fractions, repeats=repeats, per=drop_per, seed=seed
    )
    member, codependence = errors(values, targets, loss, average)[0], 0.0
    # Members that tie share an example.
    best = (member == member.min(0).values).to(values)
    if curves:
        # Infinite where there is no error to raise.
        codependence = ratio(curves[0].increase[0], 0.0 if isinf(measures.diversity_ratio) else abs(curves[0].full))
    scale_share, example_share = _shares(values, targets, loss, average, weights)
    return Finding(
        loss=loss if isinstance(loss, str) else "custom",
        average=average,
        weights=() if weights is None else tuple(weights.tolist()),
        measures=measures,
        training=trained,
        signs=measures.signs(),
        training_signs=watched if trained is None else trained.signs(trained_on=True),
        offsets=_offsets(values, loss, average, weights),
        scale_share=scale_share,
        example_share=example_share,
        codependence=codependence,
        drops=curves,
        drop_per=drop_per,
        drop_examples=examples,
        dominance=float((best / best.sum(0)).mean(1).max()),
        error_spread=ratio(max(measures.member_errors) - min(measures.member_errors), abs(measures.member_error)),
        num_classes=values.shape[-1] if loss in CLASS_LOSSES else 0,
        pairs=_pairs(values, targets) if loss in CLASS_LOSSES else (),
        checks=checks,
    )


def _check(outputs: Tensor, targets: Tensor, loss: Loss, of: str = "", num_members: int | None = None) -> None:
    """Refuse outputs and targets of some set that cannot be diagnosed, or are of another number of members."""
    if outputs.ndim < 2 or outputs.shape[1] == 0:
        raise ValueError(f"`outputs`{of} must be shaped (members, batch, ...), not empty; got {tuple(outputs.shape)}.")
    if num_members not in (None, len(outputs)):
        raise ValueError(f"`outputs`{of} must be those of the {num_members} members; got {len(outputs)}.")
    if loss in CLASS_LOSSES and outputs.ndim == 3 and not targets.is_floating_point():
        check_labels(targets, outputs.shape[1], outputs.shape[2])
    if not bool(outputs.isfinite().all()):
        member, example = (~outputs.isfinite()).nonzero()[0].tolist()[:2]
        raise ValueError(f"`outputs`{of} must be finite; example {example} of member {member} is not. Leave it out.")
    if not bool(targets.isfinite().all()):
        example = int((~targets.isfinite()).nonzero()[0, 0])
        raise ValueError(f"`targets`{of} must be finite; that of example {example} is not. Leave it out.")


def _offsets(outputs: Tensor, loss: Loss, average: str, weights: Tensor | None) -> tuple[float, ...]:
    """Length of each member's constant offset, of what is averaged."""
    if loss in CLASS_LOSSES and average == "probs":
        outputs = outputs.softmax(-1)
    elif loss in CLASS_LOSSES:
        # A softmax does not see a constant that all classes have.
        outputs = outputs - outputs.mean(-1, keepdim=True)
    bias = debias(outputs, weights).bias
    return tuple(output_sum(bias.square(), leading=1).sqrt().tolist())


def _shares(outputs: Tensor, targets: Tensor, loss: Loss, average: str, weights: Tensor | None) -> tuple[float, float]:
    """Shares of the squared distances between members: multiples of the ensemble's prediction; beyond independence."""
    found = predictions(outputs, targets, loss, average, weights)
    if found is None or len(outputs) < 2:
        return 0.0, 0.0
    members, truth, _ = found
    centre = weighted_mean(members, weights)
    without_offsets = debias(members, weights).outputs - centre
    spread = float(weighted_mean((members - centre).square().sum(-1), weights).mean())
    if spread <= 0:
        return 0.0, 0.0
    centred = centre - centre.mean(0)
    # Least squares of each member's deviation on the ensemble's prediction.
    slopes = (without_offsets * centred).sum((1, 2)) / centred.square().sum().clamp_min(1e-300)
    stretched = float(weighted_mean(slopes.square(), weights) * centred.square().sum(-1).mean())
    left = float(weighted_mean(without_offsets.square().sum(-1), weights).mean())
    # Members of equal error that err independently: DIV = (1 / sum of squared weights - 1) ERR.
    error = float((centre - truth).square().sum(-1).mean())
    possible = (1 / float(shares_of(weights, outputs).square().sum()) - 1) * error
    return stretched / spread, max(0.0, left - possible) / spread


def _pairs(outputs: Tensor, targets: Tensor) -> tuple[Pair, ...]:
    labels = targets.argmax(-1) if targets.is_floating_point() else targets.long()
    votes, classes = outputs.argmax(-1), outputs.shape[-1]
    accuracies = (votes == labels).double().mean(1).tolist()
    count = len(votes)
    chosen = torch.linspace(0, count - 1, min(count, _MEMBERS_IN_PAIRS)).round().long().tolist()
    pairs = []
    for pair in combinations(chosen, 2):
        worse, better = sorted(pair, key=accuracies.__getitem__)
        own, other = accuracies[worse], accuracies[better]
        # The bounds are of members that are right more often than chance, and not always.
        if 1 / classes <= own < 1:
            bounds = diversity_bounds(own, other, classes)
            diversity = pair_diversity(votes[worse], votes[better], labels, accuracy_of="a")
            pairs.append(Pair((worse, better), own, other, diversity, bounds.lower, bounds.upper))
    return tuple(pairs)


def _checks(history: Iterable[Mapping[str, Any]] | None) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """Errors over training, and the signs that the last check of a watched run found."""
    if history is None:
        return (), ()
    rows = {int(row["step"]): row for row in history if isfinite(_cell(row, "train_ensemble_error"))}
    if not rows:
        raise ValueError("`history` must be of fit(..., watch_collusion=True): it has no column train_ensemble_error.")
    names = [each.name for each in fields(Check)][2:]
    steps = sorted(rows.items())
    checks = (Check(int(row["epoch"]), step, *(_cell(row, name) for name in names)) for step, row in steps)
    return tuple(checks), ("watched",) if _cell(rows[max(rows)], "colluding") > 0 else ()


def _cell(row: Mapping[str, Any], name: str) -> float:
    """Return a number of a history's row, which files hold as text; NaN where it has none."""
    value = row.get(name)
    return nan if value in (None, "") else float(value)
