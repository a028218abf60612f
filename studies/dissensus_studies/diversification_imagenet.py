"""`diversification` with `setting="imagenet"`: the document's own experiment on a folder of ImageNet's layout.

The folder has `train/<class>/*` and `val/<class>/*`, and what is there of `imagenet-a/<class>/*`, `imagenet-r/<class>/*`,
`inaturalist/` and `openimages-o/`. The backbone is timm's DeiT-III base, frozen up to the attention of its last block; each member is a
newly initialised copy of that block's MLP, the norm and the head, on the class token. Training images go through the backbone in four
augmented passes, once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dissensus.aggregation import AGGREGATIONS
from dissensus.data.corruptions import STANDARD
from dissensus.data.features import CachedFeatures
from dissensus.data.sources import device_of
from dissensus.html import Section, Table, Text
from dissensus.members import DeepEnsemble, HeadEnsemble, Members
from dissensus.members.members import evaluation_mode
from dissensus.predictions import predict
from dissensus.scores import all_scores
from dissensus.training import fit
from dissensus_studies.anchoring_imagenet import SIZE
from dissensus_studies.anchoring_tables import as_markdown
from dissensus_studies.arm_log import Arm, Arms, Record, run_arms
from dissensus_studies.diversification_configurations import ACCURACY, CONFIGURATIONS, Configuration
from dissensus_studies.diversification_folders import (
    DEIT3,
    PASSES,
    UNKNOWN,
    Backbone,
    FeatureStore,
    Folders,
    read_folders,
)
from dissensus_studies.diversification_measures import (
    Scored,
    collusion_record,
    detection_record,
    score_names,
)
from dissensus_studies.image_arms import training_record
from dissensus_studies.image_pages import with_interval
from dissensus_studies.image_sets import imagenet_folder
from dissensus_studies.intervals import share_interval
from dissensus_studies.outputs import Outputs, print_table

EPOCHS = 10
# Inputs that heads look at together: fifty members with a thousand classes give much.
_ROWS = 512
# Validation images that a diagnosis of collusion looks at, for the same reason.
_DIAGNOSED = 1000


@dataclass(frozen=True)
class Looked:
    """What heads say of one set.

    Attributes:
        scores: Of every input, `(scores, inputs)`.
        answers: Class by every aggregation, `(inputs,)`; among the set's own classes where it does not have all.
        members: Class by every member, `(members, inputs)`; among the same classes.
    """

    scores: Tensor
    answers: Mapping[str, Tensor]
    members: Tensor

    def accuracy(self, way: str, labels: Tensor) -> list[float]:
        """Return the accuracy with its interval; "oracle" is the best member by hindsight."""
        if way == "oracle":
            best = (self.members == labels).double().mean(1).argmax()
            return share_interval((self.members[best] == labels).double())
        return share_interval((self.answers[way] == labels).double())


@torch.no_grad()
def look(
    heads: Members,
    features: CachedFeatures,
    names: Sequence[str],
    classes: Sequence[int] | None = None,
) -> Looked:
    """Run heads over features in small batches, keeping scores and answers only."""
    place = device_of(heads)
    scores, members = [], []
    answers: dict[str, list[Tensor]] = {way: [] for way in AGGREGATIONS}
    own = None if classes is None else torch.tensor(classes)
    with evaluation_mode(heads):
        for x in features.batches(_ROWS):
            logits = heads(x.to(place)).float()
            found = all_scores(logits, names)
            scores.append(torch.stack([found[name].float() for name in names]).cpu())
            alone = logits.argmax(-1) if own is None else logits[..., own.to(place)].argmax(-1)
            members.append(alone.cpu() if own is None else own[alone.cpu()])
            for way, pool in AGGREGATIONS.items():
                best = pool(logits, classes).argmax(-1).cpu()
                answers[way].append(best if own is None else own[best])
    return Looked(
        torch.cat(scores, 1), {way: torch.cat(parts) for way, parts in answers.items()}, torch.cat(members, 1)
    )


def run_imagenet(
    output: Path,
    *,
    data: Path | None,
    epochs: int | None = None,
    minutes: float | None = None,
    limit: int | None = None,
    arms: Sequence[str] | None = None,
    seed: int = 0,
    size: int = SIZE,
    backbone: Backbone = DEIT3,
    corruptions: Sequence[str] = STANDARD,
    configurations: Sequence[Configuration] = CONFIGURATIONS,
) -> Path:
    """Cache the backbone's features of all sets, train every configuration's heads, and write the tables beside the document's."""
    folder = imagenet_folder(data)
    images = read_folders(folder, size, limit, corruptions)
    frozen, make_head = backbone.parts(images.classes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store = FeatureStore(output / "features", images, frozen, device)
    outputs = Outputs(output)
    wanted = [
        Arm(
            each.name, partial(_work, each, store, make_head, epochs or EPOCHS, seed), f"M={each.num_members}"
        )
        for each in configurations
    ]
    identity = {"data": folder.name, "epochs": epochs, "limit": limit, "seed": seed, "size": size}
    found = run_arms(wanted, output, settings=identity, minutes=minutes, only=arms)
    if not found.done:
        raise ValueError(f"No arm was finished: {'; '.join(f'{k}: {v}' for k, v in found.not_run.items())}.")
    tables = _tables(found, configurations)
    outputs.sections += [
        Section("The document's numbers beside ours", _how(images, corruptions), *tables),
        Section(
            "Sets",
            Table(("set", "images"), _sizes(images)),
            Text(*(f"Missing: {name}." for name in images.missing)),
        ),
    ]
    if found.not_run:
        outputs.sections.append(Section("Not run", Table(("arm", "why"), list(found.not_run.items()))))
    (output / "tables.md").write_text("\n".join(map(as_markdown, tables)), encoding="utf-8")
    outputs.results({"arms": found.done, "not_run": found.not_run, "settings": identity})
    print_table(tables[0].columns, tables[0].rows)
    return outputs.page(
        "Loss-guided diversification on ImageNet",
        "Heads on a frozen DeiT-III base, trained as the public configurations say.",
    )


def _work(
    each: Configuration, store: FeatureStore, make_head: Callable[[], nn.Module], epochs: int, seed: int
) -> Record:
    train = store.train()
    ensemble = HeadEnsemble(store.backbone, make_head, each.num_members, seed)
    chosen = {"schedule": "constant", **each.training}
    chosen["batch_size"] = min(chosen["batch_size"], train.num_examples)
    run = fit(ensemble, train, objective=each.objective, epochs=epochs, seed=seed, progress=False, **chosen)
    record = {
        "configuration": each.name,
        "training": training_record(run),
        **judge(ensemble.heads, store, score_names(each.num_members)),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU",
    }
    val = record["accuracy"]["Val"]
    record["line"] = (
        f"Val {val['mean_logits'][0]:.4f}, best member {val['oracle'][0]:.4f}, {run.epoch} epochs in {run.seconds:.1f} s ({run.engine})"
    )
    return record


def judge(heads: DeepEnsemble, store: FeatureStore, names: Sequence[str]) -> Record:
    """Return accuracies on labelled and corrupted sets, AUROCs on corrupted and unknown ones, mean numbers of answers, and a diagnosis."""
    images = store.images
    looked, corrupted, accuracy = _labelled(heads, store, names)
    if heads.num_members > 1:
        soup = DeepEnsemble.from_members([heads.soup()])
        soup.to(device_of(heads))
        for part, found in _labelled(soup, store, score_names(1))[2].items():
            accuracy[part]["soup"] = found["mean_logits"]
    unknown = {name: look(heads, store.of(name, data), names) for name, data in images.unknown.items()}
    scored = Scored(
        list(names),
        looked["Val"].scores,
        {name: found.scores for name, found in unknown.items()},
        {level: {n: found.scores for n, found in sets.items()} for level, sets in corrupted.items()},
    )
    place = list(names).index("num_unique") if "num_unique" in names else None
    unique = (
        {}
        if place is None
        else {
            "Val": float(looked["Val"].scores[place].mean()),
            **{name: float(found.scores[place].mean()) for name, found in unknown.items()},
            **{
                level: float(torch.stack([found.scores[place].mean() for found in sets.values()]).mean())
                for level, sets in corrupted.items()
            },
        }
    )
    return {
        "accuracy": accuracy,
        "unique": unique,
        "finding": _finding(heads, store),
        **detection_record(scored.detected({})),
    }


def _labelled(
    heads: Members, store: FeatureStore, names: Sequence[str]
) -> tuple[dict[str, Looked], dict[str, dict[str, Looked]], dict[str, dict[str, list[float]]]]:
    """Look at the sets that have labels: what heads say of the plain ones, of the corrupted ones, and accuracies on both."""
    images = store.images
    looked = {
        name: look(heads, store.of(name, data), names, images.restricted.get(name))
        for name, data in images.labelled.items()
    }
    accuracy = {
        name: _accuracies(looked[name], torch.tensor(data.labels)) for name, data in images.labelled.items()
    }
    labels = torch.tensor(images.labelled["Val"].labels)
    corrupted: dict[str, dict[str, Looked]] = {}
    for level, sets in images.corrupted.items():
        corrupted[level] = {
            name: look(heads, store.of(f"{level} {name}", data), names) for name, data in sets.items()
        }
        each = [_accuracies(found, labels) for found in corrupted[level].values()]
        accuracy[level] = {way: [round(sum(part[way][0] for part in each) / len(each), 6)] for way in each[0]}
    return looked, corrupted, accuracy


def _finding(heads: Members, store: FeatureStore) -> Record:
    """Diagnose members on some validation images, evenly spread: files are in order of their classes."""
    data = store.images.labelled["Val"]
    step = max(1, len(data) // _DIAGNOSED)
    rows = torch.from_numpy(np.array(store.of("Val", data).features[::step])).float()
    return collusion_record(predict(heads, rows, batch_size=_ROWS), torch.tensor(data.labels)[::step])


def _accuracies(looked: Looked, labels: Tensor) -> dict[str, list[float]]:
    return {way: looked.accuracy(way, labels) for way in (*AGGREGATIONS, "oracle")}


def _tables(found: Arms, configurations: Sequence[Configuration]) -> list[Table]:
    published = {each.name: each.published for each in configurations}
    sets = [
        name for name in (*ACCURACY.split(","),) if any(name in r["accuracy"] for r in found.done.values())
    ]
    columns: list[tuple[str, Callable[[Record], Any]]] = [
        (name, partial(_accuracy_of, name, "mean_logits")) for name in sets
    ]
    detected = [f"{word} {part}" for word in _WORDS for part in ("C-1", "C-5", *UNKNOWN)]
    scored = [(name, partial(_auroc_of, name)) for name in detected]
    ways = {
        way: [(f"{way} {name}", partial(_accuracy_of, name, key)) for name in sets]
        for way, key in (("soup", "soup"), ("oracle", "oracle"), ("vote", "majority_vote"))
    }
    answers = [(f"#unique {name}", partial(_unique_of, name)) for name in ("Val", "C-1", "C-5", *UNKNOWN)]
    return [
        _beside(
            "Accuracy of averaged logits in per cent; the document's in brackets (its table 3).",
            found,
            columns,
            published,
        ),
        _beside("AUROC in per cent; the document's in brackets (its table 2).", found, scored, published),
        _beside(
            "Mean number of different answers; the document's (its table 1).", found, answers, published, 2
        ),
        _beside("Accuracy of averaged weights (uniform soup), table 3.", found, ways["soup"], published),
        _beside(
            "Accuracy of the best member on each set by hindsight (oracle: never a result), table 3.",
            found,
            ways["oracle"],
            published,
        ),
        _beside(
            "Accuracy of votes: on sets of 200 classes members that answer with another class abstain, as in the public evaluation. "
            "Such votes gain from members that differ even where their average does not.",
            found,
            ways["vote"],
            {},
        ),
        Table(
            ("configuration", "Val", "best member", "diagnosis"),
            [
                (
                    name,
                    with_interval(record["accuracy"]["Val"]["mean_logits"]),
                    with_interval(record["accuracy"]["Val"]["oracle"]),
                    _diagnosis(record.get("finding", {})),
                )
                for name, record in found.done.items()
            ],
            "What becomes of members: validation images, and the diagnosis of collusion on some of them.",
        ),
    ]


_WORDS = {"BMA": "bma", "PDS": "predictive_diversity"}


def _accuracy_of(part: str, way: str, record: Record) -> float | None:
    value = record["accuracy"].get(part, {}).get(way)
    return None if value is None else 100 * value[0]


def _unique_of(part: str, record: Record) -> float | None:
    value: float | None = record["unique"].get(part)
    return value


def _diagnosis(finding: Record) -> str:
    words = {"colluding": "members collude", "members_useless": "members of no use alone"}
    return ", ".join(text for key, text in words.items() if finding.get(key))


def _auroc_of(name: str, record: Record) -> float | None:
    word, part = name.split(" ", 1)
    value = record["auroc"].get(part, {}).get(_WORDS[word])
    return None if value is None else 100 * value[0]


def _beside(
    caption: str,
    found: Arms,
    columns: Sequence[tuple[str, Callable[[Record], Any]]],
    published: Mapping[str, Mapping[str, float]],
    digits: int = 1,
) -> Table:
    rows = []
    for name, record in found.done.items():
        cells = []
        for column, read in columns:
            own, theirs = read(record), published.get(name, {}).get(column)
            text = "" if own is None else f"{own:.{digits}f}"
            cells.append(f"{text} ({theirs:.{digits}f})".strip() if theirs is not None else text)
        rows.append((name, *cells))
    return Table(("configuration", *(column for column, _ in columns)), rows, caption)


def _sizes(images: Folders) -> list[tuple[str, int]]:
    others = {**images.labelled, **images.unknown}
    return [("train", len(images.train)), *((name, len(data)) for name, data in others.items())]


def _how(images: Folders, corruptions: Sequence[str]) -> Text:
    return Text(
        f"{PASSES} augmented passes over {len(images.train)} training images. {len(corruptions)} corruptions of the validation images by "
        "our own code, in the manner of ImageNet-C; AUROCs are taken for each and averaged. Sets with fewer classes are answered among "
        "these.",
        "The document's rows come from four trainings: unknown classes, corruptions, accuracy, and fifty members. In the second, members "
        "are of no use by themselves (best member in the last table).",
    )
