"""Study `alarms`: which score an alarm should go by where there are no examples of what should ring.

Ensembles learn all classes of an image set but a fifth. Those classes, and the other sets of the folder, are what should ring; for every
score an alarm is calibrated on held-out images of the classes that the members know.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import dissensus as ds
from dissensus.architectures import mlp
from dissensus.html import Section
from dissensus_studies.diversification.arms import HEAD_BATCH, HEAD_DECAY, HEAD_RATE
from dissensus_studies.diversification.data import HEAD_EPOCHS, HIDDEN, features_of, load_backbone
from dissensus_studies.harness.arm_log import Arm, Arms, Record
from dissensus_studies.harness.figures import shares_figure
from dissensus_studies.harness.image_arms import fit_images, measure, on_pixels, summary_line, training_record
from dissensus_studies.harness.image_sets import Images, ImageSets
from dissensus_studies.harness.image_study import ImageStudy, Page, Work, arms_table, at
from dissensus_studies.harness.outputs import Outputs
from dissensus_studies.masksembles import NETWORKS

NUM_MEMBERS, PARTS = 5, 5
# False alarms that are allowed, and those that tables show.
RATES, SHOWN_RATE = (0.01, 0.05), "0.05"
HELD_OUT = "classes held out"
EPOCHS = {"small": 15, "resnet18": 30, "heads": HEAD_EPOCHS}


@dataclass(frozen=True)
class Setting:
    """One ensemble: its networks, which part of the classes it is not shown, and its seed."""

    network: str
    part: int
    seed: int = 0

    @property
    def name(self) -> str:
        """What tells it from all others."""
        return f"{self.network} part={self.part} seed={self.seed}"


def arms_of(work: Work) -> list[Arm]:
    """Return an arm for every part of the classes; with a backbone members are heads on it."""
    networks = ("heads",) if work.backbone else ("small",) if work.quick else tuple(NETWORKS)
    seeds = range(work.seed, work.seed + (work.repeats or 1))
    return [
        Arm(each.name, partial(train_and_measure, each, work), like=each.network)
        for each in (Setting(network, part, seed) for network, seed, part in product(networks, seeds, range(PARTS)))
    ]


def seen(work: Work) -> ImageSets:
    """Return the images; with a backbone its features of them, in their place."""
    if not work.backbone:
        return work.sets
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    body, _ = load_backbone(work.backbone, device)

    def read(x: Tensor) -> Tensor:
        return features_of(body, x, device=device, batch_size=500).cpu()

    sets = work.sets
    parts = {name: getattr(sets, name) for name in ("train", "validation", "test")}
    features: dict[str, Any] = {name: Images(read(images.x), images.y) for name, images in parts.items()}
    return replace(sets, **features, ood={name: read(x) for name, x in sets.ood.items()})


def without(sets: ImageSets, part: int) -> ImageSets:
    """Return the sets without a fifth of the classes, whose test images are unknown ones and near.

    Example:
        >>> from dissensus_studies.harness.image_sets import load_images
        >>> found = without(load_images(None, limit=200), 1)
        >>> found.num_classes, found.train.y.unique().tolist(), list(found.ood)[0]
        (6, [0, 1, 2, 3, 4, 5], 'classes held out')
    """
    left_out = torch.tensor_split(torch.arange(sets.num_classes), PARTS)[part]
    known = ~torch.isin(torch.arange(sets.num_classes), left_out)
    places = known.cumsum(0) - 1

    def of_known(images: Images) -> Images:
        own = images.rows(known[images.y])
        return Images(own.x, places[own.y])

    train, validation, test = map(of_known, (sets.train, sets.validation, sets.test))
    unknown = {HELD_OUT: sets.test.rows(~known[sets.test.y]).x, **sets.ood}
    groups = {HELD_OUT: "near", **dict.fromkeys(sets.ood, "far")}
    changed: dict[str, Any] = {"train": train, "validation": validation, "test": test, "ood": unknown, "groups": groups}
    return replace(sets, num_classes=int(known.sum()), **changed)


def train_and_measure(setting: Setting, work: Work) -> Record:
    """Train one ensemble on the classes it is shown; return its record."""
    sets: ImageSets = without(work.material, setting.part)
    epochs = work.epochs or EPOCHS[setting.network]
    if setting.network == "heads":
        make = partial(mlp, sets.train.x.shape[1], [HIDDEN], sets.num_classes)
        members = ds.DeepEnsemble(make, NUM_MEMBERS, setting.seed)
        chosen: dict[str, Any] = {
            "optimizer": "adamw",
            "lr": HEAD_RATE,
            "weight_decay": HEAD_DECAY,
            "batch_size": HEAD_BATCH,
        }
        run = ds.fit(members, sets.train, epochs=epochs, schedule="cosine", seed=setting.seed, progress=False, **chosen)
    else:
        network = partial(NETWORKS[setting.network], sets.num_classes)
        members = ds.DeepEnsemble(lambda: on_pixels(network(), sets), NUM_MEMBERS, setting.seed)
        run = fit_images(members, sets, epochs=epochs, watch="nothing", seed=setting.seed, part="net")
    found = measure(members, sets, bootstrap=0, seed=setting.seed)
    found |= {"setting": asdict(setting), "family": setting.network, "training": training_record(run)}
    found["rings"] = rings(members, sets)
    return found | {"line": summary_line(found)}


def rings(members: ds.Members, sets: ImageSets) -> Record:
    """Return the share of each set that rings, by rate of false alarms, set and score; "test" is what rings for nothing.

    "far" is the mean over all unknown sets but the classes held out.
    """
    scores = list(ds.scores.SCORES)
    held_out = ds.predict_scores(members, sets.validation.x, scores)
    judged = {name: ds.predict_scores(members, x, scores) for name, x in {"test": sets.test.x, **sets.ood}.items()}
    found: Record = {}
    for rate in RATES:
        alarms = {each: ds.Alarm.of_scores(held_out[each].cpu().numpy(), false_alarms=rate) for each in scores}
        shares = {
            name: {each: float((alarms[each].p_values_of(own[each].cpu().numpy()) <= rate).mean()) for each in scores}
            for name, own in judged.items()
        }
        far = sets.ood_groups.get("far", [])
        shares["far"] = {each: sum(shares[name][each] for name in far) / len(far) for each in scores} if far else {}
        found[f"{rate:g}"] = shares
    return found


def share(place: str, score: str) -> Callable[[Record], Any]:
    """Return what reads how much of a set rings at the rate that tables show."""
    return at("rings", SHOWN_RATE, place, score)


COLUMNS: Mapping[str, Callable[[Record], Any]] = {"accuracy": lambda record: record["test"]["accuracy"][0]} | {
    f"{score}, {place}": share(place, score)
    for score, place in product(("mutual_information", "total_entropy", "energy_of_mean"), (HELD_OUT, "far"))
}


def page(work: Work, found: Arms) -> Page:
    """Return what the study makes of its records."""
    table = arms_table(found.done, COLUMNS, f"Share that rings at {SHOWN_RATE} false alarms.")

    def figure(outputs: Outputs) -> Section:
        shares = {work.sets.name: mean_shares(list(found.done.values()))}
        drawn = shares_figure(shares, "share that rings", float(SHOWN_RATE))
        return Section("What rings", outputs.picture("alarms", drawn, "share of unknown images that ring, by score"))

    return Page([], "", table, figure)


def mean_shares(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return how much rings of the classes held out and of the other sets, by score, the mean over ensembles."""
    return {
        name: {score: fmean(share(place, score)(record) for record in records) for score in ds.scores.SCORES}
        for name, place in {HELD_OUT: HELD_OUT, "other sets": "far"}.items()
    }


run = ImageStudy(
    "Which score for an alarm?",
    "Ensembles that were not shown some classes: which score rings at these, and at other sets, at the same false-alarm rate?",
    arms_of,
    page,
    seen,
    options=("backbone", "repeats"),
).run
