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

import torch
from torch import Tensor, nn

from dissensus.aggregation import AGGREGATIONS
from dissensus.data.corruptions import STANDARD
from dissensus.data.features import CachedFeatures
from dissensus.data.sources import device_of
from dissensus.html import Section, Table, Text
from dissensus.members import HeadEnsemble
from dissensus.members.modes import evaluation_mode
from dissensus.scores import all_scores
from dissensus.studies.anchoring_imagenet import SIZE
from dissensus.studies.anchoring_tables import as_markdown
from dissensus.studies.arm_log import Arm, Arms, Record, run_arms
from dissensus.studies.diversification_configurations import ACCURACY, CONFIGURATIONS, Configuration
from dissensus.studies.diversification_folders import (
    DEIT3,
    PASSES,
    UNKNOWN,
    Backbone,
    FeatureStore,
    Folders,
    read_folders,
)
from dissensus.studies.diversification_measures import Scored, detection_record, mean_interval, score_names
from dissensus.studies.image_arms import training_record
from dissensus.studies.image_pages import with_interval
from dissensus.studies.image_sets import imagenet_folder
from dissensus.studies.outputs import Outputs, print_table
from dissensus.training import fit

EPOCHS = 10
# Inputs that heads look at together: fifty members with a thousand classes give much.
_ROWS = 512


@dataclass(frozen=True)
class Looked:
    """What heads say of one set.

    Attributes:
        scores: Of every input, `(scores, inputs)`.
        answers: Class by every aggregation, `(inputs,)`; among the set's own classes where it does not have all.
        members: Class by every member, `(members, inputs)`.
    """

    scores: Tensor
    answers: Mapping[str, Tensor]
    members: Tensor

    def accuracy(self, way: str, labels: Tensor) -> list[float]:
        """Return the accuracy with its interval; "oracle" is the best member by hindsight."""
        if way == "oracle":
            best = (self.members == labels).double().mean(1).argmax()
            return mean_interval((self.members[best] == labels).double())
        return mean_interval((self.answers[way] == labels).double())


@torch.no_grad()
def look(
    ensemble: HeadEnsemble,
    features: CachedFeatures,
    names: Sequence[str],
    classes: Sequence[int] | None = None,
) -> Looked:
    """Run heads over features in small batches, keeping scores and answers only."""
    heads, place = ensemble.heads, device_of(ensemble)
    scores, members = [], []
    answers: dict[str, list[Tensor]] = {way: [] for way in AGGREGATIONS}
    own = None if classes is None else torch.tensor(classes)
    with evaluation_mode(heads):
        for x in features.batches(_ROWS):
            logits = heads(x.to(place)).float()
            found = all_scores(logits, names)
            scores.append(torch.stack([found[name].float() for name in names]).cpu())
            members.append(logits.argmax(-1).cpu())
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
        **judge(ensemble, store, score_names(each.num_members)),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU",
    }
    val = record["accuracy"]["Val"]
    record["line"] = (
        f"Val {val['mean_logits'][0]:.4f}, best member {val['oracle'][0]:.4f}, {run.epoch} epochs in {run.seconds:.1f} s ({run.engine})"
    )
    return record


def judge(ensemble: HeadEnsemble, store: FeatureStore, names: Sequence[str]) -> Record:
    """Return accuracies on labelled and corrupted sets, AUROCs on corrupted and unknown ones, and mean numbers of answers."""
    images = store.images
    accuracy: dict[str, dict[str, list[float]]] = {}
    looked: dict[str, Looked] = {}
    for name, data in images.labelled.items():
        looked[name] = look(ensemble, store.of(name, data), names, images.restricted.get(name))
        accuracy[name] = _accuracies(looked[name], torch.tensor(data.labels))
    labels = torch.tensor(images.labelled["Val"].labels)
    corrupted: dict[str, dict[str, Looked]] = {}
    for level, sets in images.corrupted.items():
        corrupted[level] = {
            name: look(ensemble, store.of(f"{level} {name}", data), names) for name, data in sets.items()
        }
        each = [_accuracies(found, labels) for found in corrupted[level].values()]
        accuracy[level] = {way: [round(sum(part[way][0] for part in each) / len(each), 6)] for way in each[0]}
    unknown = {name: look(ensemble, store.of(name, data), names) for name, data in images.unknown.items()}
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
    return {"accuracy": accuracy, "unique": unique, **detection_record(scored.detected({}))}


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
    votes = [(f"{name}, vote", partial(_accuracy_of, name, "majority_vote")) for name in sets]
    return [
        _beside(
            "Accuracy of averaged logits in per cent; the document's in brackets.", found, columns, published
        ),
        _beside("AUROC in per cent; the document's in brackets.", found, scored, published),
        _beside(
            "Accuracy of votes: on sets of 200 classes members that answer with another class abstain, as in the public evaluation. "
            "Such votes gain from members that differ even where their average does not.",
            found,
            votes,
            {},
        ),
        Table(
            ("configuration", "Val", "#unique", "best member"),
            [
                (
                    name,
                    with_interval(record["accuracy"]["Val"]["mean_logits"]),
                    record["unique"].get("Val"),
                    with_interval(record["accuracy"]["Val"]["oracle"]),
                )
                for name, record in found.done.items()
            ],
            "Validation images",
        ),
    ]


_WORDS = {"BMA": "bma", "PDS": "predictive_diversity"}


def _accuracy_of(part: str, way: str, record: Record) -> float | None:
    value = record["accuracy"].get(part, {}).get(way)
    return None if value is None else 100 * value[0]


def _auroc_of(name: str, record: Record) -> float | None:
    word, part = name.split(" ", 1)
    value = record["auroc"].get(part, {}).get(_WORDS[word])
    return None if value is None else 100 * value[0]


def _beside(
    caption: str,
    found: Arms,
    columns: Sequence[tuple[str, Callable[[Record], Any]]],
    published: Mapping[str, Mapping[str, float]],
) -> Table:
    rows = []
    for name, record in found.done.items():
        cells = []
        for column, read in columns:
            own, theirs = read(record), published.get(name, {}).get(column)
            text = "" if own is None else f"{own:.1f}"
            cells.append(f"{text} ({theirs:.1f})".strip() if theirs is not None else text)
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
