"""A trained ensemble in, everything that is measured of it out: accuracy, calibration, diversity, detection by scores and detectors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from dissensus import metrics
from dissensus.aggregation import AGGREGATIONS, oracle_selection
from dissensus.data.sources import device_of
from dissensus.detectors import DETECTORS
from dissensus.diagnostics import diagnose
from dissensus.members import DeepEnsemble, Members
from dissensus.predictions import predict
from dissensus.scores import KNOWLEDGE_SCORES, SCORES, all_scores, num_unique
from dissensus_studies.anchoring.arms import without_head
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.image_sets import ImageSets
from dissensus_studies.harness.statistics import Interval, ece_floor, mean_interval, share_ends, share_interval

PDS = "predictive_diversity"
# Pairs of members are too many for this score from so many members on.
MANY_MEMBERS = 50
# Images that a diagnosis of collusion looks at.
DIAGNOSED = 5000
# Training images that detectors of features are fitted to.
DETECTOR_IMAGES = 10_000
_BATCH = 2048


@dataclass(frozen=True)
class Judged:
    """What an ensemble is judged by: inputs `(images, ...)`, or what it makes of them, such as logits `(members, images, classes)`.

    `corrupted` has the first known inputs for each severity and corruption, `groups` names of averages over unknown sets.
    """

    test: Tensor
    labels: Tensor
    ood: Mapping[str, Tensor]
    corrupted: Mapping[str, Mapping[str, Tensor]]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor], inputs: int = 0, outputs: int = 1) -> "Judged":
        """Return what a function makes of every set, such as members' logits; inputs are on these axes of what it takes and returns."""
        parts = [self.test, *self.ood.values(), *(x for sets in self.corrupted.values() for x in sets.values())]
        # Once, with all sets joined: forty small calls cost more than the work in them.
        made = iter(function(torch.cat(parts, inputs)).split([x.shape[inputs] for x in parts], outputs))
        return replace(
            self,
            test=next(made),
            ood={name: next(made) for name in self.ood},
            corrupted={level: {name: next(made) for name in sets} for level, sets in self.corrupted.items()},
        )

    @property
    def labelled(self) -> dict[str, list[Tensor]]:
        """The test images, and for each severity those of all corruptions."""
        return {"test": [self.test], **{level: list(found.values()) for level, found in self.corrupted.items()}}


def judge(members: Members, inputs: Judged, diagnosed: bool = True) -> Record:
    """Return everything that is measured of a trained ensemble; whether its members collude only where that is asked for."""
    logits = inputs.map(partial(predict, members, batch_size=_BATCH))
    names = score_names(len(logits.test))
    scores = logits.map(partial(scores_of, names=names), inputs=1)
    record = quality_record(logits) | {"auroc": detection_record(names, scores)}
    if len(logits.test) > 1:
        if diagnosed:
            record["finding"] = collusion_record(logits)
        if isinstance(members, DeepEnsemble):
            # The average of all members' weights.
            soup = replace(inputs, ood={}).map(_alone(members.soup(), device_of(members)), outputs=0)
            for name, answers in soup.labelled.items():
                record["accuracy"][name]["soup"] = hits_interval(answers, inputs.labels[: len(answers[0])])
    return record


def score_names(num_members: int) -> list[str]:
    """Return the scores that are computed for so many members: those of disagreement say nothing of one."""
    left_out = {*KNOWLEDGE_SCORES, "num_unique", PDS} if num_members == 1 else set()
    if num_members >= MANY_MEMBERS:
        left_out.add("jensen_shannon")
    return [name for name in SCORES if name not in left_out]


def scores_of(logits: Tensor, names: Sequence[str]) -> Tensor:
    """Return scores of all inputs, `(scores, inputs)`; RuntimeError, which ends the arm only, where members diverged."""
    if not torch.isfinite(logits).all():
        raise RuntimeError("a member's logits are not finite")
    chunks = (all_scores(chunk.float(), names) for chunk in logits.split(_BATCH, dim=1))
    return torch.cat([torch.stack([found[name].float() for name in names]) for found in chunks], 1)


def detection_record(names: Sequence[str], scores: Judged) -> dict[str, dict[str, Interval]]:
    """Return the AUROC of each score, `(scores, inputs)` for every set: on unknown sets, their groups, and over corruptions."""
    sets = {name: [found] for name, found in scores.ood.items()}
    sets |= {group: [scores.ood[name] for name in own] for group, own in scores.groups.items() if own}
    found = {part: aurocs(scores.test, own) for part, own in sets.items()}
    for level, corrupted in scores.corrupted.items():
        few = next(x.shape[1] for x in corrupted.values())
        found[level] = aurocs(scores.test[:, :few], list(corrupted.values()), paired=True)
    return {part: dict(zip(names, values, strict=True)) for part, values in found.items()}


def aurocs(known: Tensor, unknown: Sequence[Tensor], paired: bool = False) -> list[Interval]:
    """Return the AUROC of each score, `(scores, inputs)`, averaged over unknown sets, with its 95 % interval over inputs.

    An AUROC is the mean over unknown inputs of the share of known inputs below each, ties counting one half. The spread of these
    shares, and of those of the known inputs, gives its standard error: DeLong et al., 1988, <https://doi.org/10.2307/2531595>.
    `paired` where unknown input i was made from known input i, so that the two vary together.

    Example:
        >>> aurocs(torch.tensor([[0.0, 1.0]]), [torch.tensor([[1.0, 2.0]])])[0][0]
        0.875
    """
    below = [_share_below(known, own) for own in unknown]
    above = torch.stack([1 - _share_below(own, known) for own in unknown]).mean(0)
    if paired:
        squared = _squared_error(above + torch.stack(below).mean(0))
    else:
        squared = _squared_error(above) + torch.stack([_squared_error(own) for own in below]).mean(0) / len(below)
    values = torch.stack([own.mean(1) for own in below]).mean(0).tolist()
    least = min(own.shape[1] for own in (above, *below))
    return [
        [round(number, 6) for number in (value, *share_ends(value, error, least))]
        for value, error in zip(values, squared.sqrt().tolist(), strict=True)
    ]


def _share_below(others: Tensor, values: Tensor) -> Tensor:
    """Return for each value the share of the others below it, ties counting one half, row by row."""
    ordered, values = others.sort(dim=1).values, values.contiguous()
    below, not_above = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return (below + not_above).double() / (2 * ordered.shape[1])


def _squared_error(values: Tensor) -> Tensor:
    count = values.shape[1]
    return values.var(1) / count if count > 1 else torch.zeros_like(values[:, 0])


def quality_record(judged: Judged) -> Record:
    """Return accuracy, calibration and diversity from members' logits, as `[value, low, high]`.

    `"test"`: metrics of averaged probabilities; `"members"`: accuracies; `"unique"` and `"pds"`: mean number of different answers, and
    mean sum of the largest probabilities, on each set; `"accuracy"`: of every way to make one answer of many, and of the best member by
    hindsight, on clean and corrupted images.
    """
    logits, labels = judged.test, judged.labels
    mixture, answers = logits.float().softmax(-1).mean(0), logits.argmax(-1)
    right = (answers == labels).float()
    whole = {
        "nll": metrics.nll(mixture, labels),
        "brier": metrics.brier(mixture, labels),
        "ece": metrics.ece(mixture.cpu(), labels.cpu()),
        "ece_floor": ece_floor(mixture.amax(-1).numpy(force=True)),
        "disagreement": metrics.mean_disagreement(answers) if len(logits) > 1 else 0.0,
    }
    test: dict[str, Sequence[float | None]] = {
        "accuracy": hits_interval([mixture], labels),
        "member_accuracy": share_interval(right.mean(0)),
        **{name: [round(float(value), 6), None, None] for name, value in whole.items()},
    }
    sets = {"test": [logits], **{name: [found] for name, found in judged.ood.items()}, **judged.labelled}

    def means(function: Callable[[Tensor], Tensor]) -> dict[str, Interval]:
        return {name: mean_interval(torch.stack([function(x) for x in own]).mean(0)) for name, own in sets.items()}

    return {
        "test": test,
        "members": [round(value, 5) for value in right.mean(1).tolist()],
        "unique": means(lambda x: num_unique(x).double()),
        "pds": means(lambda x: x.float().softmax(-1).amax(0).sum(-1)),
        "accuracy": {name: _accuracies(found, labels[: found[0].shape[1]]) for name, found in judged.labelled.items()},
    }


def _accuracies(sets: Sequence[Tensor], labels: Tensor) -> dict[str, list[float]]:
    found = {way: hits_interval([pool(x.float()) for x in sets], labels) for way, pool in AGGREGATIONS.items()}
    best = [x[oracle_selection(x.float(), labels).member] for x in sets]
    return found | {"oracle": hits_interval(best, labels)}


def hits_interval(answers: Sequence[Tensor], labels: Tensor) -> list[float]:
    """Return the accuracy of the largest of `(images, classes)`, averaged over corruptions of the same images, with its 95 % interval."""
    return share_interval(torch.stack([each.argmax(-1) == labels for each in answers]).double().mean(0))


def collusion_record(judged: Judged) -> Record:
    """Return what the diagnosis of collusion says of members."""
    logits, labels = judged.test[:, :DIAGNOSED], judged.labels[:DIAGNOSED]
    # Fifty members dropped a hundred times each would take longer than training.
    repeats = 20 if len(logits) < MANY_MEMBERS else 2
    found = diagnose(logits.float().cpu(), labels.cpu(), drop_fractions=(0.2,), repeats=repeats)
    numbers = {name: float(f"{getattr(found, name):.6g}") for name in ("diversity_ratio", "codependence")}
    return {"colluding": found.colluding, "members_useless": found.members_useless, **numbers}


def _alone(net: nn.Module, place: torch.device) -> Callable[[Tensor], Tensor]:
    """Return what one network says of inputs."""
    ensemble = DeepEnsemble.from_members([net])
    ensemble.to(place)
    return lambda x: predict(ensemble, x, batch_size=_BATCH)[0]


def image_detectors(members: Members, sets: ImageSets, images: Judged) -> Record:
    """Return the AUROC of detectors fitted to the last features of a network."""
    place = images.test.device
    run = _alone(without_head(members.member(0)), place)
    train = run(sets.train.x[:DETECTOR_IMAGES].to(place))
    return detector_record(train, sets.train.y, images.map(run, outputs=0))


def detector_record(train: Tensor, labels: Tensor, judged: Judged) -> Record:
    """Return the AUROC of each detector, fitted to features of training images, as of scores."""
    train, labels = train[:DETECTOR_IMAGES].float(), labels[:DETECTOR_IMAGES].to(train.device)
    options = {"nearest_neighbours": {"k": min(50, len(train))}}
    fitted = [make(train, labels, **options.get(name, {})) for name, make in DETECTORS.items()]
    scores = judged.map(lambda x: torch.stack([each.score(x.float()).double() for each in fitted]))
    return detection_record(list(DETECTORS), scores)
