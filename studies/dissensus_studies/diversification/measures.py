"""A trained ensemble in, everything that is measured of it out: accuracy, diversity, detection, gains over a deep ensemble, detectors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dissensus import metrics
from dissensus.aggregation import AGGREGATIONS, oracle_selection
from dissensus.data.sources import device_of
from dissensus.detectors import DETECTORS
from dissensus.diagnostics import diagnose
from dissensus.members import DeepEnsemble, Members
from dissensus.predictions import predict
from dissensus.scores import KNOWLEDGE_SCORES, SCORES, all_scores
from dissensus_studies.anchoring.arms import without_head
from dissensus_studies.diversification.ranks import Ranks, ranks_of
from dissensus_studies.diversification.settings import Setting
from dissensus_studies.harness.arm_log import Record, file_name
from dissensus_studies.harness.image_sets import ImageSets
from dissensus_studies.harness.statistics import Interval, mean_interval, share_interval

# Pairs of members are too many for this score from so many members on.
MANY_MEMBERS = 50
# Images that a diagnosis of collusion looks at.
DIAGNOSED = 5000
# Images that members differ most and least on.
SHOWN_IMAGES = 5
# Training images that detectors of features are fitted to.
DETECTOR_IMAGES = 10_000
_BATCH = 2048


@dataclass(frozen=True)
class Judged:
    """What an ensemble is judged by: inputs `(images, ...)`, or members' logits for them `(members, images, classes)`.

    `corrupted` has the first known inputs for each severity and corruption, `groups` names of averages over unknown sets.
    """

    test: Tensor
    labels: Tensor
    ood: Mapping[str, Tensor]
    corrupted: Mapping[str, Mapping[str, Tensor]]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor], inputs: int = 0, outputs: int = 1) -> "Judged":
        """Return what a function makes of every set, such as members' logits; inputs are on these axes of what it takes and returns.

        It is called once, with all sets joined: forty small calls cost more than the work in them.
        """
        corrupted = [x for sets in self.corrupted.values() for x in sets.values()]
        parts = [self.test, *self.ood.values(), *corrupted]
        made = iter(function(torch.cat(parts, inputs)).split([x.shape[inputs] for x in parts], outputs))
        return replace(
            self,
            test=next(made),
            ood={name: next(made) for name in self.ood},
            corrupted={level: {name: next(made) for name in sets} for level, sets in self.corrupted.items()},
        )


def score_names(num_members: int) -> list[str]:
    """Return the scores that are computed for so many members."""
    left_out = set(KNOWLEDGE_SCORES) | {"num_unique"} if num_members == 1 else set()
    if num_members >= MANY_MEMBERS:
        left_out.add("jensen_shannon")
    return [name for name in SCORES if name not in left_out]


def scores_of(logits: Tensor, names: Sequence[str]) -> Tensor:
    """Return scores of all inputs, `(scores, inputs)`; RuntimeError, which ends the arm only, where members diverged."""
    if not torch.isfinite(logits).all():
        raise RuntimeError("a member's logits are not finite")
    chunks = (all_scores(chunk.float(), names) for chunk in logits.split(_BATCH, dim=1))
    return torch.cat([torch.stack([found[name].float() for name in names]) for found in chunks], 1)


@dataclass(frozen=True)
class Scored:
    """Scores of an ensemble on everything it is judged by."""

    names: list[str]
    test: Tensor
    ood: dict[str, Tensor]
    corrupted: dict[str, dict[str, Tensor]]

    @classmethod
    def of(cls, judged: Judged) -> "Scored":
        """Compute all scores of members' logits."""
        names = score_names(len(judged.test))
        scores = judged.map(partial(scores_of, names=names), inputs=1)
        return cls(names, scores.test, dict(scores.ood), {k: dict(v) for k, v in scores.corrupted.items()})

    def ranks(self, groups: Mapping[str, Sequence[str]]) -> dict[str, Ranks]:
        """Return the AUROCs by input, on every set and group."""
        return ranks_of(self.test, self.ood, self.corrupted, groups)

    def save(self, path: Path) -> None:
        """Keep everything in a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> "Scored":
        """Read what `save` wrote."""
        return cls(**torch.load(path, map_location=device, weights_only=True))


def detection_record(names: Sequence[str], found: Mapping[str, Ranks]) -> Record:
    """Return the AUROC of every score on every set and group, and with paired intervals by how much PDS is above each."""
    pds = [names.index("predictive_diversity")] * len(names)
    return {
        "auroc": {part: dict(zip(names, ranks.intervals(), strict=True)) for part, ranks in found.items()},
        "pds_minus": {part: _gaps(names, ranks.rows(pds), ranks) for part, ranks in found.items()},
    }


def gains_over(
    names: Sequence[str], theirs: Mapping[str, Ranks], own: Mapping[str, Ranks]
) -> dict[str, dict[str, dict[str, Interval]]]:
    """Return how much larger AUROCs are than those of a reference ensemble on the same inputs, with paired intervals.

    `"gain"` is against the same score of the reference, `"gain_over_best"` against its best score on that set or group, which is what
    a user of the reference would take if they knew.
    """
    best = {part: [int(ranks.auroc.argmax())] * len(names) for part, ranks in theirs.items()}
    return {
        "gain": {part: _gaps(names, own[part], ranks) for part, ranks in theirs.items()},
        "gain_over_best": {part: _gaps(names, own[part], ranks.rows(best[part])) for part, ranks in theirs.items()},
    }


def _gaps(names: Sequence[str], own: Ranks, other: Ranks) -> dict[str, Interval]:
    return dict(zip(names, own.minus(other).differences(), strict=True))


def quality_record(judged: Judged, diagnosed: bool = True) -> Record:
    """Return accuracy, calibration and diversity from members' logits, as `[value, low, high]`.

    `"test"`: metrics of averaged probabilities; `"members"`: accuracies; `"unique"` and `"pds"`: mean number of different answers, and
    mean sum of the largest probabilities, on each set; `"accuracy"`: of every way to make one answer of many, on clean and corrupted
    images; `"finding"`: whether members collude, unless that takes too long.
    """
    logits, labels = judged.test, judged.labels
    probs = logits.float().softmax(-1)
    mixture = probs.mean(0)
    right = (logits.argmax(-1) == labels).float()
    negative = -mixture.gather(1, labels[:, None]).squeeze(1).clamp_min(1e-38).log()
    brier = (mixture - torch.nn.functional.one_hot(labels, mixture.shape[-1])).square().sum(-1)
    test: dict[str, Sequence[float | None]] = {
        "accuracy": hits_interval([mixture], labels),
        "member_accuracy": share_interval(right.mean(0)),
        "nll": mean_interval(negative),
        "brier": mean_interval(brier),
        "ece": [round(float(metrics.ece(mixture.cpu(), labels.cpu())), 6), None, None],
        "disagreement": share_interval(_pair_disagreement(logits)),
    }
    return {
        "test": test,
        "members": [round(value, 5) for value in right.mean(1).tolist()],
        "unique": {name: _mean_unique(found) for name, found in _all_sets(judged)},
        "pds": {name: _mean_pds(found) for name, found in _all_sets(judged)},
        "accuracy": accuracies(judged),
        "finding": collusion_record(logits[:, :DIAGNOSED], labels[:DIAGNOSED]) if diagnosed else {},
    }


def _all_sets(judged: Judged) -> list[tuple[str, list[Tensor]]]:
    unknown = [(name, [logits]) for name, logits in judged.ood.items()]
    (known, *corrupted) = labelled_sets(judged).items()
    return [known, *unknown, *corrupted]


def _mean_unique(sets: Sequence[Tensor]) -> list[float]:
    answers = [logits.argmax(-1).sort(0).values for logits in sets]
    return mean_interval(torch.stack([1 + (a[1:] != a[:-1]).sum(0) for a in answers]).double().mean(0))


def _mean_pds(sets: Sequence[Tensor]) -> list[float]:
    return mean_interval(torch.stack([x.float().softmax(-1).amax(0).sum(-1) for x in sets]).mean(0))


def _pair_disagreement(logits: Tensor) -> Tensor:
    """Return for each input the share of pairs of members that answer differently."""
    count = len(logits)
    votes = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).sum(0).double()
    agreeing = (votes * (votes - 1)).sum(-1)
    return 1 - agreeing / max(count * (count - 1), 1) if count > 1 else torch.zeros_like(agreeing)


def accuracies(judged: Judged) -> dict[str, dict[str, list[float]]]:
    """Return the accuracy of every aggregation of answers, and of the best member by hindsight, on clean and corrupted images."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, sets in labelled_sets(judged).items():
        labels = judged.labels[: sets[0].shape[1]]
        found[name] = {
            way: hits_interval([pool(logits.float()) for logits in sets], labels) for way, pool in AGGREGATIONS.items()
        }
        best = [oracle_selection(logits.float(), labels).member for logits in sets]
        own = [logits[member] for logits, member in zip(sets, best, strict=True)]
        found[name]["oracle"] = hits_interval(own, labels)
    return found


def labelled_sets(judged: Judged) -> dict[str, list[Tensor]]:
    """Return the test images, and for each severity those of all corruptions."""
    return {"test": [judged.test], **{level: list(found.values()) for level, found in judged.corrupted.items()}}


def hits_interval(answers: Sequence[Tensor], labels: Tensor) -> list[float]:
    """Return the accuracy of the largest of `(images, classes)`, averaged over corruptions of the same images, with its 95 % interval."""
    return share_interval(torch.stack([each.argmax(-1) == labels for each in answers]).double().mean(0))


def collusion_record(logits: Tensor, labels: Tensor) -> Record:
    """Return what the diagnosis of collusion says of members; nothing for one."""
    if len(logits) < 2:
        return {}
    # Fifty members dropped a hundred times each would take longer than training.
    repeats = 20 if len(logits) < MANY_MEMBERS else 2
    found = diagnose(logits.float().cpu(), labels.cpu(), drop_fractions=(0.2,), repeats=repeats)
    return {
        "colluding": found.colluding,
        "members_useless": found.members_useless,
        "diversity_ratio": float(f"{found.diversity_ratio:.6g}"),
        "codependence": float(f"{found.codependence:.6g}"),
    }


def judge(members: Members, setting: Setting, inputs: Judged, references: Path, outputs: Path | None = None) -> Record:
    """Return everything that is measured of a trained ensemble, and compare it with its deep ensemble, whose scores are among `references`.

    `outputs` is a file for its logits on test and unknown inputs, as float16, for later diagnosis.
    """
    logits = inputs.map(partial(predict, members, batch_size=_BATCH))
    if outputs is not None:
        outputs.parent.mkdir(parents=True, exist_ok=True)
        halves = {name: x.half().cpu().numpy() for name, x in {"test": logits.test, **logits.ood}.items()}
        np.savez(outputs, labels=logits.labels.cpu().numpy(), **halves)  # type: ignore[arg-type]
    scored = Scored.of(logits)
    ranks = scored.ranks(inputs.groups)
    record = quality_record(logits) | detection_record(scored.names, ranks)
    path = reference_path(references, setting, "pt")
    if setting.num_members > 1:
        if setting.reference == setting.name:
            scored.save(path)
        elif path.is_file():
            groups = tuple((name, tuple(sets)) for name, sets in inputs.groups.items())
            reference = _reference(path, path.stat().st_mtime_ns, groups, logits.test.device)
            record |= gains_over(scored.names, reference, ranks)
        record["gallery"] = disputed(logits.test, scored)
        if isinstance(members, DeepEnsemble):
            _add_soup(record["accuracy"], members, inputs)
    return record


def reference_path(folder: Path, setting: Setting, suffix: str) -> Path:
    """Return the file about the deep ensemble that an ensemble is compared with."""
    return folder / f"{file_name(setting.reference)}.{suffix}"


@lru_cache(maxsize=2)
def _reference(
    path: Path, written: int, groups: tuple[tuple[str, tuple[str, ...]], ...], device: torch.device
) -> dict[str, Ranks]:
    """Return the AUROCs of a deep ensemble; most arms in a row are compared with the same one."""
    return Scored.load(path, device).ranks(dict(groups))


def disputed(logits: Tensor, scored: Scored) -> Record:
    """Return the known images of the largest and of the smallest PDS: their places, the ensemble's answer and every member's."""
    values = scored.test[scored.names.index("predictive_diversity")]
    order = values.argsort(descending=True).cpu()
    count = min(SHOWN_IMAGES, len(order) // 2)
    answers = logits.argmax(-1).cpu()
    together = logits.float().mean(0).argmax(-1).cpu()
    chosen = {"most": order[:count], "least": order[-count:]}
    return {
        name: [
            {
                "image": int(i),
                "ensemble": int(together[i]),
                "answers": answers[:, i].tolist(),
                "pds": round(float(values[i]), 5),
            }
            for i in places
        ]
        for name, places in chosen.items()
    }


def _add_soup(found: Record, members: DeepEnsemble, inputs: Judged) -> None:
    """Add the accuracy of the average of all members' weights."""
    soup = DeepEnsemble.from_members([members.soup()])
    soup.to(device_of(members))
    answered = replace(inputs, ood={}).map(partial(_single, soup), outputs=0)
    for name, answers in labelled_sets(answered).items():
        found[name]["soup"] = hits_interval(answers, inputs.labels[: len(answers[0])])


def image_detectors(members: Members, sets: ImageSets, images: Judged) -> Record:
    """Return the AUROC of detectors fitted to the last features of a network."""
    place = images.test.device
    net = DeepEnsemble.from_members([without_head(members.member(0))])
    net.to(place)
    run = partial(_single, net)
    train = run(sets.train.x[:DETECTOR_IMAGES].to(place))
    return detector_record(train, sets.train.y, images.map(run, outputs=0))


def _single(net: DeepEnsemble, x: Tensor) -> Tensor:
    return predict(net, x, batch_size=_BATCH)[0]


def detector_record(train: Tensor, labels: Tensor, judged: Judged) -> Record:
    """Return the AUROC of each detector, fitted to features of training images, as of scores."""
    train, labels = train[:DETECTOR_IMAGES].float(), labels[:DETECTOR_IMAGES].to(train.device)
    fitted = [
        make(train, labels, **({"k": min(50, len(train))} if name == "nearest_neighbours" else {}))
        for name, make in DETECTORS.items()
    ]

    def run(x: Tensor) -> Tensor:
        return torch.stack([each.score(x.float()).double() for each in fitted])

    scores = judged.map(run)
    found = ranks_of(scores.test, scores.ood, scores.corrupted, judged.groups)
    return {part: dict(zip(DETECTORS, ranks.intervals(), strict=True)) for part, ranks in found.items()}
