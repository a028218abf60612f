"""An ensemble and its alarm in, one file out that predicts, says how sure it is, and knows when to say no."""

import copy
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from dissensus._beliefs import deviations
from dissensus._checks import explained
from dissensus._files import written_aside
from dissensus._signatures import checked, need
from dissensus.conformal import Alarm, DriftMonitor
from dissensus.conformal.alarm import scorer_of
from dissensus.data.fingerprints import network_digest
from dissensus.data.sources import device_of
from dissensus.data.trees import Tree, plain
from dissensus.members import Members
from dissensus.members.loop import as_loop
from dissensus.members.members import evaluation_mode
from dissensus.objectives.likelihoods import Likelihood, likelihood_of
from dissensus.onnx_files import Session, finish, quiet_export
from dissensus.predictions import predict
from dissensus.scores import SCORES, Beliefs

Precision = Literal["fp32", "fp16", "int8"]
Outputs = dict[str, NDArray[Any]]
Given = Mapping[str, Tensor]  # a file's inputs beside the example: the alarm's limit

# Rows at which a file is compared with the ensemble; the most is cut where inputs are large.
_CHECKED_ROWS = (1, 7, 4096)
_CHECKED_VALUES = 1 << 22
_TOLERANCE = 1e-5
# Fewer rows than this do not show whether rounding changes the order of scores.
_ROWS_TO_RANK = 64
_LEAST_RANK_CORRELATION = 0.999


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compares with the ensemble.

    Attributes:
        path: The file.
        size: Bytes.
        largest_error: Largest difference from the ensemble's own outputs, relative where these exceed 1.
        rank_correlation: Spearman correlation of the file's scores with the ensemble's; 1 keeps every order.
    """

    path: Path
    size: int
    largest_error: float
    rank_correlation: float


@checked
def export(
    members: Members,
    path: str | Path,
    *,
    example: Any,
    alarm: Alarm | None = None,
    loss: str | None = None,
    preprocess: nn.Module | None = None,
    precision: Precision = "fp32",
    member_outputs: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> Exported:
    """Write an ensemble as one file that needs neither this package nor, as ONNX, torch.

    Outputs: `prediction`, mean probabilities `(batch, classes)` or the mixture's mean `(batch, targets)`; `total`, `data` and
    `knowledge`, its uncertainty and the two parts of it, `(batch,)`: entropies in nats, or variances (mean over the targets);
    `score`, the alarm's. With an alarm also `p_value` and `flag`, which is `p_value <= limit`; `limit` is then an input, the
    false-alarm rate, that in an ONNX file is the alarm's unless it is given.

    The file is run on 1, 7 and 4096 rows and compared with the ensemble before it is called done.

    Args:
        members: The ensemble, of any kind.
        path: Where to write; `.onnx`, or `.pt2` for `torch.export.load`.
        example: Some inputs, a tensor or a tree of them as `predict` takes. Keys of a dictionary name the file's inputs; one tensor is
            `x`, those of a tuple `x0`, `x1`, .... Real ones: the file is compared with the ensemble on them.
        alarm: What `ds.Alarm.calibrate` returned.
        loss: How outputs are read, as in `ds.evaluate`; by default the alarm's, or else "mse" for one output and
            "cross_entropy" for more.
        preprocess: What inputs go through first; it becomes part of the file.
        precision: "fp32"; "fp16" runs members in half precision; "int8" stores weights in 8 bits (ONNX only). Uncertainty is
            computed in float32. Where the order of scores changes (rank correlation below 0.999), nothing is written.
        member_outputs: Whether `members`, each member's own prediction `(batch, members, ...)`, is an output too.
        facts: Further entries for the metadata of the file, such as names of classes; of values that JSON has.

    Returns:
        Where the file is, and how it compares.

    Example:
        >>> import tempfile
        >>> import dissensus as ds
        >>> ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3), num_members=5)
        >>> done = export(ens, Path(tempfile.mkdtemp()) / "model.pt2", example=torch.randn(8, 4))
        >>> done.largest_error < 1e-5, done.path.name
        (True, 'model.pt2')
    """
    path = Path(path)
    if path.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"Files are written as .onnx or .pt2; got {path.name!r}.")
    if path.suffix == ".onnx":
        need(f"Writing {path.name}", "export", "onnx", "onnxscript", "onnxruntime")
    elif precision == "int8":
        raise ValueError("8-bit weights are written to .onnx files only; choose that, or precision='fp16'.")
    example = _checked_example(example, precision)
    theirs = None if alarm is None else alarm.members
    if theirs not in (None, members) and network_digest(theirs) != network_digest(members):
        raise ValueError(
            "`alarm` was calibrated with another ensemble: calibrate one with this, by `ds.Alarm.calibrate`."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with evaluation_mode(members), written_aside(path, f".tmp{path.suffix}") as temporary:
        graph = _Graph(members, example, preprocess, alarm, loss, precision == "fp16", member_outputs)
        given = {} if alarm is None else {"limit": torch.tensor(alarm.false_alarms)}
        known = {**_facts(members, graph, alarm), "precision": precision, **(facts or {})}
        _write(graph, example, given, temporary, known, precision == "int8")
        error, correlation = _compare(temporary, graph, members, example, given, precision)
    return Exported(path, path.stat().st_size, error, correlation)


def _checked_example(example: Any, precision: str) -> Any:
    try:
        example = tree_map(lambda leaf: torch.as_tensor(leaf).cpu(), plain(example))
        leaves = tree_flatten(example)[0]
        usable = bool(leaves) and all(leaf.ndim and len(leaf) for leaf in leaves)
    except (TypeError, RuntimeError, ValueError):
        usable = False
    if not usable:
        raise ValueError("`example` must be a tensor of at least one input, or a tree of such tensors.")
    if precision != "fp32" and len(leaves[0]) < _ROWS_TO_RANK:
        raise ValueError(
            f"Whether {precision} keeps the order of scores is seen on at least {_ROWS_TO_RANK} inputs; got {len(leaves[0])}."
        )
    return example


class _Graph(nn.Module):
    """All that the file does: inputs in, predictions, uncertainty and alarm out."""

    def __init__(
        self,
        members: Members,
        example: Any,
        preprocess: nn.Module | None,
        alarm: Alarm | None,
        loss: str | None,
        half: bool,
        member_outputs: bool,
    ) -> None:
        super().__init__()
        self.preprocess = nn.Identity() if preprocess is None else copy.deepcopy(preprocess).cpu()
        few = self.preprocess(tree_map(lambda leaf: leaf[:2], example))
        self.loop = as_loop(members, tree_map(lambda leaf: leaf.to(device_of(members)), few)).cpu()
        outputs = explained(self.loop, self.loop)(few)
        self.likelihood = _likelihood(outputs, loss, alarm)
        self.classes = self.likelihood.kind == "classes"
        own = scorer_of(members, None, None, "auto", "cross_entropy" if self.classes else "mse")
        self.scorer = own if alarm is None else alarm.scorer
        held_out = {} if alarm is None else alarm.calibration
        self.ranks = nn.ModuleList(_Ranks(torch.from_numpy(scores)) for scores in held_out.values())
        self.in_half, self.member_outputs = half, member_outputs
        if half:
            self.loop.half()

    def forward(self, x: Any, limit: Tensor | None = None) -> dict[str, Tensor]:
        seen = x = self.preprocess(x)
        if self.in_half:
            x = tree_map(lambda leaf: leaf.half() if leaf.is_floating_point() else leaf, x)
        return self.read(seen, self.loop(x).float(), limit)

    def read(self, x: Any, outputs: Tensor, limit: Tensor | None = None) -> dict[str, Tensor]:
        """Return what the file gives, from what members see and their outputs `(members, batch, outputs)`."""
        found, each = self._of_classes(outputs) if self.classes else self._of_values(outputs)
        if not isinstance(self.scorer.score, str):
            found["score"] = self.scorer.score(x if self.scorer.of_inputs else outputs)
        if limit is not None:
            found["p_value"] = self.p_value(found["score"])
            found["flag"] = found["p_value"] <= limit
        # Runtimes give empty batches wrong shapes; the first row of nothing makes them fail instead.
        found["prediction"] = found["prediction"] + torch.zeros_like(found["total"])[0]
        return found | ({"members": each.transpose(0, 1)} if self.member_outputs else {})

    def p_value(self, score: Tensor) -> Tensor:
        """Of an alarm by classes the largest p-value: an input is strange if it is strange in every class."""
        return torch.stack([rank(score) for rank in self.ranks]).amax(0)

    def _of_classes(self, logits: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return what outputs say of each input, and each member's own prediction."""
        beliefs = Beliefs.unchecked(logits)
        names = {"total": "total_entropy", "data": "expected_entropy", "knowledge": "mutual_information"}
        if isinstance(self.scorer.score, str):
            names["score"] = self.scorer.name
        found = {"prediction": beliefs.mean_probs} | {key: SCORES[name](beliefs) for key, name in names.items()}
        return found, logits.softmax(-1)

    def _of_values(self, outputs: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        mean, scale = self.likelihood.mean_and_scale(outputs)
        spread = scale.square() * (2.0 if self.likelihood.family == "laplace" else 1.0)
        data, knowledge = spread.mean(0).mean(-1), deviations(mean, None).square().mean(0).mean(-1)
        found = {"prediction": mean.mean(0), "total": data + knowledge, "data": data, "knowledge": knowledge}
        if isinstance(self.scorer.score, str):
            # A copy: one tensor under two names would be one output.
            found["score"] = found[self.scorer.name.removesuffix("_variance")].clone()
        return found, mean


def _likelihood(outputs: Tensor, loss: str | None, alarm: Alarm | None) -> Likelihood:
    """Return how outputs are read: as asked for, as the alarm does, or as their number tells."""
    if outputs.ndim != 3:
        raise ValueError(f"Members must return (batch, outputs); the ensemble gives {tuple(outputs.shape)}.")
    single = outputs.shape[-1] == 1
    given = "auto" if alarm is None else alarm.scorer.loss
    told = given if given != "auto" else "mse" if single else "cross_entropy"
    likelihood = likelihood_of(loss or told)
    if likelihood.kind in ("labels", "own") or likelihood.name == "poisson":
        raise ValueError(
            f"Files give classes, point predictions or a likelihood's mean and variance; the loss is {likelihood.name!r}. "
            "Export ens.member(j) with torch for other outputs."
        )
    if likelihood.kind == "classes" and single:
        raise ValueError("Classes need two outputs or more, and these members have one. Give loss='mse'.")
    return likelihood


class _Ranks(nn.Module):
    """Conformal p-values among held-out scores, `(calibration,)`."""

    table: Tensor

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.count = len(scores)
        # Filled up with infinity to one less than a power of two, so that halving it ends at single numbers.
        table = torch.full(((1 << self.count.bit_length()) - 1,), torch.inf)
        table[: self.count] = scores.float().sort().values
        self.register_buffer("table", table)

    def forward(self, score: Tensor) -> Tensor:
        # Binary search, which ONNX has no operator for: `below` becomes the number of held-out scores under each score.
        below = torch.zeros_like(score, dtype=torch.int64)
        step = (len(self.table) + 1) // 2
        while step:
            below = below + step * (self.table[below + step - 1] < score)
            step //= 2
        return (1 + self.count - below).float() / (self.count + 1)


def _facts(members: Members, graph: _Graph, alarm: Alarm | None) -> dict[str, Any]:
    from dissensus import __version__

    facts: dict[str, Any] = {
        "dissensus": __version__,
        "task": "classification" if graph.classes else "regression",
        "loss": graph.likelihood.name,
        "kind": type(members).__name__,
        "num_members": members.num_members,
        "score": graph.scorer.name,
        "units": "nats" if graph.classes else "squares of the target's",  # of total, data and knowledge
    }
    if alarm is None:
        return facts
    facts |= {"false_alarms": alarm.false_alarms, "calibration_inputs": sum(map(len, alarm.calibration.values()))}
    monitor = DriftMonitor.of_alarm(alarm)  # what a server watches its inputs with
    return facts if monitor is None else facts | {"drift": monitor.state()}


def _input_names(example: Any) -> list[str]:
    """Return what the file calls its inputs: `x`, the keys of a dictionary, or `x0`, `x1`, ... of a tuple."""
    if isinstance(example, Tensor):
        return ["x"]
    return [f"x{name}" if name[0].isdigit() else name for name, _ in Tree.of(example).named()]


def _write(graph: _Graph, example: Any, given: Given, path: Path, facts: Mapping[str, Any], int8: bool) -> None:
    arguments = {"x": _rows(example, 3), **given}
    shapes = {"x": tree_map(lambda leaf: {0: torch.export.Dim.DYNAMIC}, example), **dict.fromkeys(given)}
    names = [*_input_names(example), *given]
    with quiet_export():
        try:
            program = torch.export.export(graph.eval(), (), arguments, dynamic_shapes=shapes)
        except Exception as problem:
            raise ValueError(
                "torch.export cannot follow this network for batches of every size: "
                f"{str(problem).strip().splitlines()[0]} Forward passes must not read values of tensors or fix the batch."
            ) from problem
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # names of files on the machine that exported
        if path.suffix == ".pt2":
            with open(path, "wb") as file:  # of a path, the archive would keep the name
                torch.export.save(program, file, extra_files={name: json.dumps(fact) for name, fact in facts.items()})
            return
        from onnx_ir.passes.common import ClearMetadataAndDocStringPass, DeduplicateInitializersPass

        outputs = list(graph(**arguments))
        traced = torch.onnx.export(program, input_names=names, output_names=outputs, dynamo=True, verbose=False)
    assert traced is not None
    # Members that share weights were traced with copies of them; notes about nodes name files of the machine that exported.
    for tidy in (DeduplicateInitializersPass(size_limit=sys.maxsize), ClearMetadataAndDocStringPass()):
        tidy(traced.model)
    defaults = {name: value.numpy() for name, value in given.items()}
    path.write_bytes(finish(traced.model_proto, defaults, facts, int8))


def _rows(tree: Any, count: int) -> Any:
    """Return so many rows of every tensor, the first again after the last."""
    return tree_map(lambda leaf: leaf[torch.arange(count) % len(leaf)], tree)


def _compare(
    path: Path, graph: _Graph, members: Members, example: Any, given: Given, precision: Precision
) -> tuple[float, float]:
    """Run a file and the ensemble itself on the same rows; return the largest error and the rank correlation of scores."""
    run = _runner(path, example, given)
    values = sum(leaf[0].numel() for leaf in tree_flatten(example)[0])
    error, correlation = 0.0, 1.0
    for size in _CHECKED_ROWS:
        rows = _rows(example, min(size, max(_CHECKED_VALUES // values, 8)))
        x = graph.preprocess(rows)
        own = graph.read(x, predict(members, x).float(), **given)
        wanted = {name: value.numpy() for name, value in own.items()}
        found = _outputs(run, rows, wanted)
        if given:
            # P-values must be those of the file's own scores: next to a held-out score, rounding may decide a rank.
            assert np.array_equal(found["p_value"], graph.p_value(torch.from_numpy(found["score"])).numpy())
            assert np.array_equal(found["flag"], found["p_value"] <= given["limit"].numpy())
        error = max(error, _error(found, wanted, graph.classes))
        correlation = _rank_correlation(found["score"], wanted["score"])
    if precision == "fp32":
        if error > _TOLERANCE:
            raise ValueError(
                f"The file's outputs differ from the ensemble's by {error:.1e}, so it is not written. Does the network draw at "
                "random, or mix rows of a batch, in evaluation?"
            )
    elif correlation < _LEAST_RANK_CORRELATION:
        raise ValueError(
            f"In {precision} scores keep their order only to a rank correlation of {correlation:.4f}. Choose a higher precision."
        )
    return error, correlation


def _runner(path: Path, example: Any, given: Given) -> Callable[[Any], Outputs]:
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        return lambda rows: {name: value.numpy() for name, value in module(x=rows, **given).items()}
    session, names = Session(path), _input_names(example)
    return lambda rows: session.run({n: x.numpy() for n, x in zip(names, tree_flatten(rows)[0], strict=True)})


def _outputs(run: Callable[[Any], Outputs], rows: Any, wanted: Outputs) -> Outputs:
    """Return what the file gives; refuse one that does not run on so many rows."""
    try:
        found = run(rows)
        got: Any = {name: value.shape for name, value in found.items()}
    except Exception as problem:  # whatever the runtime raises
        got = str(problem).splitlines()[0]
    if got != {name: value.shape for name, value in wanted.items()}:
        raise ValueError(
            f"The file does not run on {len(wanted['score'])} inputs, so the network's forward pass fixes the batch. It gave {got}."
        )
    return found


def _error(found: Outputs, wanted: Outputs, classes: bool) -> float:
    """Return the largest difference, relative where values exceed 1; p-values follow from scores and are checked by themselves."""
    errors = []
    for name in wanted.keys() - {"p_value", "flag"}:
        ours, theirs = found[name].astype(np.float64), wanted[name].astype(np.float64)
        size = np.maximum(1, np.abs(theirs))
        if not classes and name not in ("prediction", "members"):
            # Roots of variances have the unit of predictions, whose digits are what they are computed from.
            ours, theirs = np.sqrt(np.abs(ours)), np.sqrt(np.abs(theirs))
            size = np.maximum(1, np.abs(wanted["prediction"]).max())
        errors.append(float((np.abs(ours - theirs) / size).max()))
    return max(errors)


def _rank_correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return Spearman's correlation, ties at their mean rank."""
    ranks = []
    for values in (a, b):
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - counts / 2)[place])
    constant = [np.ptp(each) == 0 for each in ranks]
    return float(all(constant)) if any(constant) else float(np.asarray(np.corrcoef(np.stack(ranks)))[0, 1])
