"""An ensemble and sets of inputs in, one pass over each, an Evaluation out."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dissensus import metrics
from dissensus._checks import as_weights
from dissensus._signatures import checked, whole_number
from dissensus.data.sources import Inputs, Pairs, arrays_of, device_named, device_of
from dissensus.data.suites import LoadedSuite
from dissensus.data.trees import Tree
from dissensus.evaluation import results
from dissensus.evaluation._tasks import Classification, Over, Regression, Task, task_of
from dissensus.evaluation.corrupting import corruptor_of
from dissensus.evaluation.estimates import Found, SetNumbers, Statistic, averages, replicates_of, with_intervals
from dissensus.evaluation.inputs import NamedSet, Source, checked_groups, named_sets
from dissensus.evaluation.results import ALL_CORRUPTIONS, Evaluation, Number, floats
from dissensus.evaluation.streaming import Reader, Sample
from dissensus.members import Members
from dissensus.members.members import as_members, evaluation_mode
from dissensus.objectives.likelihoods import likelihood_of, regression_loss
from dissensus.predictions import predict
from dissensus.scores import REGRESSION_SCORES
from dissensus.types import MemberWeights

log = logging.getLogger("dissensus")

_HISTOGRAM_BINS = 32
# How many single inputs of a set are kept for the page, and by what: the first that was computed decides on the order.
_EXAMPLES = 300
_SHOWN = {"total_entropy", "expected_entropy", "mutual_information", *REGRESSION_SCORES}
_ROC_POINTS = 129
# With fewer, an end of a 95 % interval is one resample.
_FEW_RESAMPLES = 40


@checked
def evaluate(
    members: Members,
    id_data: Pairs | Source,
    ood: Mapping[str, Inputs | Pairs | Source] | LoadedSuite | None = None,
    *,
    shifted: Mapping[str, Pairs | Source] | None = None,
    corruptions: Iterable[str] | str | None = None,
    severities: Iterable[int] | int = (1, 2, 3, 4, 5),
    corruption_folder: Path | str | None = None,
    frost_folder: Path | str | None = None,
    groups: Mapping[str, Iterable[str]] | None = None,
    scores: Iterable[str] | None = None,
    loss: str | Callable[[Tensor, Tensor], Tensor] = "auto",
    weights: MemberWeights | NDArray[Any] | Sequence[float] | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
    class_names: Sequence[str] | None = None,
    over: Over = "mean",
    class_axis: int | None = None,
    ignore_index: int = -100,
    class_weights: Sequence[float] | None = None,
    batch_size: int = 1024,
    bootstrap: int = 1000,
    seed: int = 0,
    device: str | torch.device | None = None,
    name: str = "ensemble",
) -> Evaluation:
    """Measure an ensemble: every score and metric on every set, from one prediction of each input.

    Sets are read batch by batch; of each input there stay about a hundred bytes, and a few for each member,
    however many classes there are. Intervals are 95 % bootstrap intervals over inputs, by the percentiles of the replicates; for `ece` and
    `smooth_ece`, which count noise as error, these are reflected around the estimate. Averages over corruptions and over the
    sets of a group are means of the single values, never values of pooled inputs.

    Args:
        members: The ensemble; it is left in the mode (training or evaluation) in which it came.
        id_data: Known inputs and their labels (or targets): a pair of arrays, a Dataset, a DataLoader, a file or folder
            that `data.files.load` reads, or what it returned.
        ood: Unknown inputs by name, from the same sources; labels that come with them are passed over. Or a suite that
            `data.suites.load_suite` loaded, which brings its groups along.
        shifted: Further labelled sets by name, such as data of another year: measured as `id_data`, and told from it as
            `ood`.
        corruptions: Names of `data.corruptions.CORRUPTIONS` to apply to `id_data`, which must then be images, uint8 or floats from 0 to 1;
            "standard" stands for the 15 of the benchmark, "extra" for its other 4, "cbar" (or "c-bar") for 10 more,
            "all" for all.
        severities: At which severities, from 1 to 5.
        corruption_folder: Where the files of a published set such as CIFAR-10-C are, to read corrupted images from
            instead of making them; `id_data` must then be the test set that they were made of, in its order.
        frost_folder: Pictures to take frost from; by default it is grown.
        groups: Names of groups to the OOD sets that they average, such as `{"near": ["cifar100"], "far": ["svhn"]}`.
        scores: Names of `scores.SCORES` (for regression, of `scores.REGRESSION_SCORES`). By default all, but from 50
            members on without `jensen_shannon`, and for one member without those that measure disagreement.
        loss: How outputs are read: "cross_entropy" for logits, "gaussian_nll" or "laplace_nll" for likelihood heads
            (mean, rho), "mse" or "mae" for point predictions, "poisson" for logs of rates, "binary_cross_entropy" for
            several labels an input, "pinball" for quantiles, or a loss of your own, of which the mean is reported. By
            default float targets in tensors or arrays tell regression, "mse" with one output a target or "gaussian_nll"
            with two, whole numbers shaped as the outputs several labels, and all else is "cross_entropy".
        weights: Member weights with sum 1, as a tensor, an array or a list; equal if None.
        transform: From a raw batch, on the ensemble's device, to what the members take, such as a normalisation of
            uint8 images.
        class_names: Names of the classes in the order of the outputs, for the report. Labels that files give as names
            are numbered by it; by default by the names that `id_data` holds.
        over: Of outputs with positions (pixels, tokens) or several labels: one score an input is the `"mean"` or the
            `"max"` of the scores of these, or the share of them above a number, given here. Metrics are those of
            positions; intervals resample inputs.
        class_axis: Of outputs with positions: the axis of the classes in `(members, batch, ...)`; found by the labels'
            shape.
        ignore_index: Label of positions that do not count.
        class_weights: How much a position counts by its true class. These four are refused where outputs have no use for them.
        batch_size: How many inputs go through the members at once.
        bootstrap: Number of resamples; 0 for no intervals.
        seed: Decides resamples and corruptions.
        device: Where to run; by default where the ensemble is. The ensemble moves there and stays.
        name: What tables and pages call the ensemble.

    Returns:
        The evaluation. Reading: `print(result.table())`; `ds.report(result, "report.html")` explains each part.

    Example:
        >>> from dissensus import DeepEnsemble
        >>> ens = DeepEnsemble(lambda: torch.nn.Linear(2, 3), num_members=4)
        >>> x, y = torch.randn(50, 2), torch.randint(3, (50,))
        >>> result = evaluate(ens, (x, y), ood={"far": 10 * torch.randn(40, 2)}, bootstrap=100)
        >>> result.number("accuracy").low <= result.number("accuracy").value
        True
        >>> sorted(number.metric for number in result.numbers if number.score == "bma" and number.set == "far")
        ['aupr_in', 'aupr_out', 'auroc', 'fpr95_id_positive', 'fpr95_ood_positive', 'mean']
    """
    members = as_members(members)
    bootstrap, batch_size = whole_number("bootstrap", bootstrap, 0), whole_number("batch_size", batch_size, 1)
    if 0 < bootstrap < _FEW_RESAMPLES:
        log.warning("%d resamples are too few for 95 %% intervals; take 1000, or 0 for no intervals", bootstrap)
    seed, shares = whole_number("seed", seed), as_weights(weights, members.num_members)
    if isinstance(ood, LoadedSuite):
        groups, ood = (ood.grouped if groups is None else groups), ood.sets
    sets, names = named_sets(id_data, shifted, ood, class_names)
    checked = checked_groups(groups, sets)
    if device is not None:
        members.to(device_named(device))
    if loss == "auto":
        loss = _told_loss(members, sets[0], transform)
    positions = {"over": over, "class_axis": class_axis, "ignore_index": ignore_index, "class_weights": class_weights}
    task = task_of(likelihood_of(loss), scores, shares, members.num_members, **positions)
    corruptor = corruptor_of(corruptions, severities, seed, corruption_folder, frost_folder)
    reader = Reader(members, task, transform, batch_size, device_of(members), corruptor, names)
    reader.check(sets)
    with evaluation_mode(members):
        samples = list(map(reader.read, sets))
    assert reader.shape is not None
    task = reader.task
    curves = (task.reliability(part.info.name, part.columns) for part in samples if part.info.kind != "ood")
    numbers, replicates = _numbers(task, samples, checked, bootstrap, seed)
    num_outputs = task.num_outputs(reader.shape[1])
    return Evaluation(
        name=name,
        task=task.task,
        loss=task.loss,
        num_members=reader.shape[0],
        num_outputs=num_outputs,
        class_names=names,
        weights=() if shares is None else tuple(shares.tolist()),
        score_names=task.score_names,
        bootstrap=bootstrap,
        seed=seed,
        sets=tuple(part.info for part in samples),
        groups=checked,
        numbers=tuple(numbers),
        replicates=replicates,
        reliability=tuple(filter(None, curves)),
        rocs=tuple(_rocs(task, samples)),
        histograms=tuple(_histograms(task, samples)),
        gallery=tuple(chain.from_iterable(part.disputed for part in samples)),
        diagnosis=reader.known.diagnose(task, shares, seed),
        examples=tuple(_examples(task, samples, num_outputs)),
        data=Path(id_data).name if isinstance(id_data, str | Path) else "",
        date=date.today().isoformat(),
    )


def _told_loss(members: Members, known: NamedSet, transform: Callable[[Tensor], Tensor] | None) -> str:
    """Return how outputs are read: as class logits, unless targets, given as an array, say otherwise."""
    arrays = arrays_of(known.data)
    if arrays is None or not len(arrays[1]) or (arrays[1].ndim != 2 and not arrays[1].is_floating_point()):
        return "cross_entropy"
    x, y = arrays[0][:2], arrays[1]
    placed = x.to(device_of(members))
    given = placed.value() if isinstance(placed, Tree) else placed
    outputs = predict(members, given if transform is None else transform(given))
    if outputs.shape[2:] != y.shape[1:] or bool(((y != 0) & (y != 1)).any()):
        return regression_loss(outputs.shape[-1], y) or "cross_entropy"
    if y.is_floating_point():
        raise ValueError("All targets are 0 or 1, labels or numbers: say which, loss='binary_cross_entropy' or 'mse'.")
    return "binary_cross_entropy"


def _numbers(
    task: Task, samples: Sequence[Sample], groups: Mapping[str, tuple[str, ...]], count: int, seed: int
) -> Found:
    """Return all numbers with intervals, and the replicates of the first of them."""
    known = samples[0]
    statistics: list[Statistic] = []
    for part in samples:
        on = SetNumbers(part.info.kind, part.info.name)
        statistics += task.statistics(on, part.columns)
        if part is not known:
            pairs = zip(task.score_names, part.columns["scores"], known.columns["scores"], strict=True)
            statistics += [on.detection(score, ood, own, known.info.name) for score, ood, own in pairs]
    main = replicates_of(statistics, {part.info.name: part.info.size for part in samples}, count, seed)
    given = (known.columns, known.corrupted)
    corrupted, without = task.corrupted(*given) if isinstance(task, Classification) else ([], [])
    single = replicates_of(corrupted, {known.info.name: known.info.size}, count, seed)
    parts = [main, averages(main, _group_rows(main[0], groups)), averages(single, _severity_rows(single[0]))]
    replicated = [number for numbers, _ in parts for number in numbers]
    replicates = np.concatenate([rows for _, rows in parts])
    points: Found = (without, np.zeros((len(without), 0), np.float32))
    unresampled = without + averages(points, _severity_rows(without))[0]
    return with_intervals((replicated, replicates)) + with_intervals(single) + unresampled, replicates


def _group_rows(numbers: Sequence[Number], groups: Mapping[str, tuple[str, ...]]) -> dict[Number, list[int]]:
    """Return which numbers each mean over the sets of a group is of."""
    place = {(n.set, n.metric, n.score): row for row, n in enumerate(numbers) if n.kind == "ood"}
    return {
        Number(metric, group, "group", 0.0, score): [place[part, metric, score] for part in parts]
        for group, parts in groups.items()
        for name, metric, score in place
        if name == parts[0]
    }


def _severity_rows(numbers: Sequence[Number]) -> dict[Number, list[int]]:
    """Return which numbers each mean over corruptions is of, for each severity and for all."""
    rows: dict[Number, list[int]] = {}
    for row, number in enumerate(numbers):
        for level in (number.severity, None):
            mean = Number(number.metric, ALL_CORRUPTIONS, "corruptions", 0.0, number.score, level)
            rows.setdefault(mean, []).append(row)
    order = sorted(rows, key=lambda mean: (mean.severity or inf, mean.metric, mean.score or ""))
    return {mean: rows[mean] for mean in order}


def _examples(task: Task, samples: Sequence[Sample], num_outputs: int) -> Iterator[results.Examples]:
    """Yield the inputs of each set that the ensemble is least certain about; none where each has several predictions."""
    single = isinstance(task, Classification) or (isinstance(task, Regression) and num_outputs == 1)
    shown = [name for name in task.score_names if name in _SHOWN] or [task.score_names[0]]
    for part in samples if single else ():
        columns = dict(zip(task.score_names, part.columns["scores"], strict=True)) | part.columns
        order = columns[shown[0]].argsort(descending=True, stable=True)[:_EXAMPLES]
        names = ("predicted", "truth", "confidence", *shown)
        values = {name: floats(columns[name][order].double().numpy()) if name in columns else () for name in names}
        scores = {name: values.pop(name) for name in shown}
        yield results.Examples(part.info.name, tuple(order.tolist()), **values, scores=scores)


def _rocs(task: Task, samples: Sequence[Sample]) -> Iterator[results.Roc]:
    known = samples[0].columns["scores"]
    for part in samples[1:]:
        for score, ood_scores, id_scores in zip(task.score_names, part.columns["scores"], known, strict=True):
            curve = metrics.roc_curve(ood_scores, id_scores, points=_ROC_POINTS)
            yield results.Roc(part.info.name, score, floats(curve.fpr.numpy()), floats(curve.tpr.numpy()))


def _histograms(task: Task, samples: Sequence[Sample]) -> Iterator[results.Histogram]:
    ranked = {part.info.name: np.sort(part.columns["scores"].numpy()).astype(np.float64) for part in samples}
    for place, score in enumerate(task.score_names):
        low, middle, high = np.quantile(np.concatenate([own[place] for own in ranked.values()]), [0.001, 0.5, 0.999])
        # In even bins most of a skewed score would be in one: there edges grow by a factor.
        logarithmic = bool(low >= 0 and 0 < middle < high / 6)
        edges = np.histogram_bin_edges([], _HISTOGRAM_BINS, (low, high))
        if logarithmic:
            edges = np.geomspace(max(low, high * 1e-5), high, _HISTOGRAM_BINS + 1)
        shown = floats(edges)
        for name, values in ranked.items():
            # What lies outside counts in the first and in the last bin.
            below = np.append(np.searchsorted(values[place], edges[1:-1]), values.shape[1])
            shares = np.diff(below, prepend=0) / values.shape[1]
            yield results.Histogram(name, score, shown, floats(shares), logarithmic)
