"""`diversification` with `setting="imagenet"`: the document's own experiment on a folder of ImageNet's layout.

The folder has `train/<class>/*` and `val/<class>/*`, and what is there of `imagenet-a/<class>/*`, `imagenet-r/<class>/*`,
`inaturalist/` and `openimages-o/`. The backbone is timm's DeiT-III base, frozen up to the attention of its last block; each member is a
newly initialised copy of that block's MLP, the norm and the head, on the class token. Training images go through the backbone in four
augmented passes, once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dissensus.aggregation import AGGREGATIONS
from dissensus.caching import cache_features
from dissensus.data.corruptions import STANDARD
from dissensus.data.features import CachedFeatures
from dissensus.data.sources import device_of
from dissensus.html import Section, Table, Text
from dissensus.members import DeepEnsemble, HeadEnsemble, Members, cut
from dissensus.members.members import evaluation_mode
from dissensus.predictions import predict
from dissensus.scores import all_scores
from dissensus.training import fit
from dissensus_studies.diversification.configurations import ACCURACY, CONFIGURATIONS, Configuration
from dissensus_studies.diversification.measures import Scored, collusion_record, detection_record, score_names
from dissensus_studies.harness.arm_log import Arm, Arms, Record
from dissensus_studies.harness.image_arms import device_name, training_record
from dissensus_studies.harness.image_pages import with_interval
from dissensus_studies.harness.image_sets import imagenet_folder
from dissensus_studies.harness.image_study import Options
from dissensus_studies.harness.imagenet import SIZE, FolderImages, read_folder, read_part, run_folder
from dissensus_studies.harness.outputs import Outputs
from dissensus_studies.harness.statistics import share_interval

PASSES = 4
SEVERITIES = (1, 5)
# Sets beside train/ and val/, by the name of their folder: labelled ones, and those of unknown classes.
LABELLED = {"A": "imagenet-a", "R": "imagenet-r"}
UNKNOWN = {"iNat": "inaturalist", "OI": "openimages-o"}
EPOCHS = 10
# Inputs that heads look at together: fifty members with a thousand classes give much.
_ROWS = 512
# Validation images that a diagnosis of collusion looks at, for the same reason.
_DIAGNOSED = 1000


@dataclass(frozen=True)
class Backbone:
    """A network to cut heads from.

    Attributes:
        make: Makes it, trained.
        at: First layer of the heads.
        token: Which token crosses the cut.
    """

    make: Callable[[], nn.Module]
    at: str
    token: int = 0

    def parts(self, classes: int) -> tuple[nn.Module, Callable[[], nn.Module]]:
        """Return the frozen part, and what makes a head for so many classes."""
        return cut(self.make(), self.at, token=self.token, outputs=classes)


def deit3_base() -> nn.Module:
    """Load timm's DeiT-III base: pre-trained on ImageNet-21k, then trained on ImageNet-1k."""
    try:
        import timm
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "The imagenet setting takes its backbone from timm, which this environment lacks. Install with: pip install timm"
        ) from None
    model: nn.Module = timm.create_model("deit3_base_patch16_224.fb_in22k_ft_in1k", pretrained=True)
    return model


DEIT3 = Backbone(deit3_base, "blocks.11.norm2")


@dataclass(frozen=True)
class Folders:
    """The images of a folder.

    Attributes:
        train: Training images.
        labelled: "Val" and what is there of the other labelled sets.
        corrupted: Validation images under every corruption: severity ("C-5") and name.
        unknown: What is there of the unknown sets.
        classes: How many there are.
        restricted: The classes of labelled sets that do not have all.
        missing: Sets that are not there.
    """

    train: FolderImages
    labelled: Mapping[str, FolderImages]
    corrupted: Mapping[str, Mapping[str, FolderImages]]
    unknown: Mapping[str, FolderImages]
    classes: int
    restricted: Mapping[str, list[int]]
    missing: Sequence[str]


def read_folders(folder: Path, size: int, limit: int | None = None, corruptions: Sequence[str] = STANDARD) -> Folders:
    """Find the images of all sets; `limit` takes so many of each, evenly spread."""
    train, val, classes = read_folder(folder, size)
    there = {name: place for name, place in LABELLED.items() if (folder / place).is_dir()}
    unknown = {name: place for name, place in UNKNOWN.items() if (folder / place).is_dir()}
    labelled = {"Val": val, **{name: read_part(folder, place, classes, size) for name, place in there.items()}}
    labelled = {name: images.spread(limit) for name, images in labelled.items()}
    return Folders(
        train.spread(limit),
        labelled,
        {
            f"C-{level}": {name: replace(labelled["Val"], corruption=(name, level)) for name in corruptions}
            for level in SEVERITIES
        },
        {name: read_part(folder, place, (), size).spread(limit) for name, place in unknown.items()},
        len(classes),
        {name: sorted(set(labelled[name].labels)) for name in there},
        [place for name, place in {**LABELLED, **UNKNOWN}.items() if name not in {**there, **unknown}],
    )


class FeatureStore:
    """Features of all sets, cached in a folder; the backbone runs where they are not there yet."""

    def __init__(self, folder: Path, images: Folders, backbone: nn.Module, device: torch.device) -> None:
        self.folder, self.images, self.backbone, self.device = folder, images, backbone.to(device), device
        # To open a cache is to hash the backbone and some images: once a run, not once a configuration.
        self._opened: dict[str, CachedFeatures] = {}

    def of(self, name: str, data: FolderImages, passes: int = 1) -> CachedFeatures:
        """Return the features of one set."""
        if name not in self._opened:
            self._opened[name] = cache_features(
                self.backbone,
                data,
                self.folder / name.replace(" ", "_"),
                passes=passes,
                dtype=torch.float16,
                precision="bf16" if self.device.type == "cuda" else "fp32",
                workers=data.workers,
            )
        return self._opened[name]

    def train(self) -> CachedFeatures:
        """Return the augmented passes of the training images."""
        return self.of("train", self.images.train, PASSES)


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
    heads: Members, features: CachedFeatures, names: Sequence[str], classes: Sequence[int] | None = None
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
    options: Options,
    size: int = SIZE,
    backbone: Backbone = DEIT3,
    corruptions: Sequence[str] = STANDARD,
    configurations: Sequence[Configuration] = CONFIGURATIONS,
) -> Path:
    """Cache the backbone's features of all sets, train every configuration's heads, and write the tables beside the document's."""
    folder = imagenet_folder(options.data, known=options.known, quick=options.quick)
    images = read_folders(folder, size, options.limit, corruptions)
    frozen, make_head = backbone.parts(images.classes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store = FeatureStore(options.output / "features", images, frozen, device)

    def sections(found: Arms, outputs: Outputs) -> tuple[list[Table], list[Section]]:
        tables = _tables(found, configurations)
        sizes = [("train", images.train), *images.labelled.items(), *images.unknown.items()]
        return tables, [
            Section("The document's numbers beside ours", _how(images, corruptions), *tables),
            Section(
                "Sets",
                Table(("set", "images"), [(name, len(data)) for name, data in sizes]),
                Text(*(f"Missing: {name}." for name in images.missing)),
            ),
        ]

    return run_folder(
        options,
        "Loss-guided diversification on ImageNet",
        "Heads on a frozen DeiT-III base, trained as the public configurations say.",
        lambda folder: [
            Arm(each.name, partial(_work, each, store, make_head, options), f"M={each.num_members}")
            for each in configurations
        ],
        sections,
        settings={"size": size},
    )


def _work(each: Configuration, store: FeatureStore, make_head: Callable[[], nn.Module], options: Options) -> Record:
    train = store.train()
    ensemble = HeadEnsemble(store.backbone, make_head, each.num_members, options.seed)
    chosen = {"schedule": "constant", **each.training}
    chosen["batch_size"] = min(chosen["batch_size"], train.num_examples)
    run = fit(
        ensemble,
        train,
        objective=each.objective,
        epochs=options.epochs or EPOCHS,
        seed=options.seed,
        progress=False,
        **chosen,
    )
    record = {
        "configuration": each.name,
        "training": training_record(run),
        **judge(ensemble.heads, store, score_names(each.num_members)),
        "device": device_name(),
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
    accuracy = {name: _accuracies(looked[name], torch.tensor(data.labels)) for name, data in images.labelled.items()}
    labels = torch.tensor(images.labelled["Val"].labels)
    corrupted: dict[str, dict[str, Looked]] = {}
    for level, sets in images.corrupted.items():
        corrupted[level] = {name: look(heads, store.of(f"{level} {name}", data), names) for name, data in sets.items()}
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


def _numbers(record: Record) -> dict[str, float]:
    """Return what tables show of a record, under the names of `published.json`."""
    ways = {"": "mean_logits", "soup ": "soup", "oracle ": "oracle", "vote ": "majority_vote"}
    words = {"BMA": "bma", "PDS": "predictive_diversity"}
    accuracy = {
        f"{word}{part}": 100 * found[way][0]
        for part, found in record["accuracy"].items()
        for word, way in ways.items()
        if way in found
    }
    auroc = {
        f"{word} {part}": 100 * found[score][0]
        for part, found in record["auroc"].items()
        for word, score in words.items()
        if score in found
    }
    return accuracy | auroc | {f"#unique {part}": value for part, value in record["unique"].items()}


def _tables(found: Arms, configurations: Sequence[Configuration]) -> list[Table]:
    published = {each.name: each.published for each in configurations}
    sets = [name for name in ACCURACY if any(name in r["accuracy"] for r in found.done.values())]
    parts = ("C-1", "C-5", *UNKNOWN)
    shown = {
        "Accuracy of averaged logits in per cent; the document's in brackets (its table 3).": sets,
        "AUROC in per cent; the document's in brackets (its table 2).": [
            f"{word} {part}" for word in ("BMA", "PDS") for part in parts
        ],
        "Mean number of different answers; the document's (its table 1).": [
            f"#unique {part}" for part in ("Val", *parts)
        ],
        "Accuracy of averaged weights (uniform soup), table 3.": [f"soup {name}" for name in sets],
        "Accuracy of the best member on each set by hindsight (oracle: never a result), table 3.": [
            f"oracle {name}" for name in sets
        ],
        "Accuracy of votes: on sets of 200 classes members that answer with another class abstain, as in the public evaluation. "
        "Such votes gain from members that differ even where their average does not.": [
            f"vote {name}" for name in sets
        ],
    }
    tables = []
    for caption, columns in shown.items():
        rows = [
            (name, *(_beside(_numbers(record).get(each), published.get(name, {}).get(each), each) for each in columns))
            for name, record in found.done.items()
        ]
        tables.append(Table(("configuration", *columns), rows, caption))
    words = {"colluding": "members collude", "members_useless": "members of no use alone"}
    of_members = [
        (
            name,
            with_interval(record["accuracy"]["Val"]["mean_logits"]),
            with_interval(record["accuracy"]["Val"]["oracle"]),
            ", ".join(text for key, text in words.items() if record.get("finding", {}).get(key)),
        )
        for name, record in found.done.items()
    ]
    caption = "What becomes of members: validation images, and the diagnosis of collusion on some of them."
    return [*tables, Table(("configuration", "Val", "best member", "diagnosis"), of_members, caption)]


def _beside(own: float | None, theirs: float | None, column: str) -> str:
    digits = 2 if column.startswith("#") else 1
    text = "" if own is None else f"{own:.{digits}f}"
    return text if theirs is None else f"{text} ({theirs:.{digits}f})".strip()


def _how(images: Folders, corruptions: Sequence[str]) -> Text:
    return Text(
        f"{PASSES} augmented passes over {len(images.train)} training images. {len(corruptions)} corruptions of the validation images by "
        "our own code, in the manner of ImageNet-C; AUROCs are taken for each and averaged. Sets with fewer classes are answered among "
        "these.",
        "The document's rows come from four trainings: unknown classes, corruptions, accuracy, and fifty members. In the second, members "
        "are of no use by themselves (best member in the last table).",
    )
