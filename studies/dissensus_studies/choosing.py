"""Study `choosing`: which kind, objective and score to take for a given budget.

Combinations of kind and objective that a user would choose between, each trained for the same number of seconds on the same
images: accuracy, NLL, calibration, the worst member, corruptions, detection of near and far images by every score, and what they
cost to train and to run. No arm is judged on the images that A2D disagrees on.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.html import Section
from dissensus.training.schedules import Cyclic
from dissensus_studies.harness.arm_log import Arm, Arms, Record, run_arms
from dissensus_studies.harness.figures import pareto
from dissensus_studies.harness.image_arms import (
    as_in_training,
    fit_images,
    measure,
    on_pixels,
    summary_line,
    training_record,
)
from dissensus_studies.harness.image_sets import Images, ImageSets
from dissensus_studies.harness.image_study import ImageStudy, Page, Work, arms_table
from dissensus_studies.harness.outputs import Outputs
from dissensus_studies.harness.statistics import over_seeds
from dissensus_studies.masksembles import NETWORKS, MaskSetting
from dissensus_studies.masksembles import make_members as make_masked

NUM_MEMBERS, REPEATS = 4, 3
SECONDS, QUICK_SECONDS = 90.0, 5.0
RATE = 0.1
CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog", "jpeg_compression", "contrast")
# Images that A2D disagrees on: the first of these that the folder has, else the last unknown set.
ELSEWHERE = ("isun", "lsun_resize", "textures")
REFERENCES = 128
# These take normalised images: their first layer must be the network's own.
NORMALISED = ("anchored", "mimo")
PLAIN: Mapping[str, Callable[..., ds.Members]] = {
    "single": ds.DeepEnsemble,
    "deep": ds.DeepEnsemble,
    "packed": ds.PackedEnsemble,
    "batch ensemble": ds.BatchEnsemble,
    "snapshots": ds.SnapshotEnsemble,
    "swag": ds.SWAG,
}
_MASKED = {"masksembles": MaskSetting("masks", 2.0), "mc dropout": MaskSetting("dropout")}
# How kinds are trained whose members are made of one path: a cycle for each snapshot, and a rate that keeps moving.
TRAINING: Mapping[str, Mapping[str, Any]] = {
    "snapshots": {"schedule": Cyclic(NUM_MEMBERS)},
    "swag": {"schedule": "constant", "lr": 0.05},
}
# What the time of a step is taken on; the first epochs trace and capture.
TIMED_BATCHES, TIMED_EPOCHS = 24, 4

# In order of use: a study that stops early has what most users choose between.
COMBINATIONS: tuple[tuple[str, str], ...] = (
    ("deep", "independent"),
    ("single", "independent"),
    ("masksembles", "independent"),
    ("packed", "independent"),
    ("mc dropout", "independent"),
    ("heads", "independent"),
    ("batch ensemble", "independent"),
    ("deep", "loss-guided 0.5"),
    ("anchored", "independent"),
    ("deep", "joint 0.4"),
    ("deep", "a2d 0.1"),
    ("heads", "loss-guided 0.5"),
    ("packed", "loss-guided 0.5"),
    ("deep", "adversarial"),
    ("snapshots", "independent"),
    ("swag", "independent"),
    ("mimo", "independent"),
)


@dataclass(frozen=True)
class Setting:
    """One combination, with its seed."""

    kind: str
    objective: str
    seed: int = 0

    @property
    def family(self) -> str:
        """What it is but for the seed."""
        return f"{self.kind}, {self.objective}"


def network_of(work: Work) -> str:
    """Return the name of the network that every kind is made of."""
    name = work.network or ("small" if work.quick else "resnet18")
    if name not in NETWORKS:
        raise ValueError(f"`network` must be one of {', '.join(NETWORKS)}; got {name!r}.")
    return name


def arms_of(work: Work) -> list[Arm]:
    """Return an arm for every combination and seed."""
    network_of(work)  # A name that does not exist is told before images are trained on.
    return [
        # All arms take about as long: that is what they are made for.
        Arm(f"{each.family} seed={each.seed}", partial(train_and_measure, each, work))
        for each in (
            Setting(kind, objective, work.seed + repeat)
            for repeat in range(work.repeats or (1 if work.quick else REPEATS))
            for kind, objective in COMBINATIONS
        )
    ]


def reserved(sets: ImageSets) -> tuple[ImageSets, Tensor]:
    """Take the images to disagree on away from those that arms are judged by."""
    name = next((each for each in ELSEWHERE if each in sets.ood), list(sets.ood)[-1])
    rest = {each: x for each, x in sets.ood.items() if each != name}
    groups = {each: group for each, group in sets.groups.items() if each != name}
    return replace(sets, ood=rest, groups=groups), sets.ood[name]


def make_members(setting: Setting, sets: ImageSets, network: Callable[[], nn.Module]) -> ds.Members:
    """Make an untrained ensemble of this kind; it takes uint8 images, those of `NORMALISED` normalised ones."""

    def make() -> nn.Module:
        return on_pixels(network(), sets)

    if setting.kind in PLAIN:
        return PLAIN[setting.kind](make, 1 if setting.kind == "single" else NUM_MEMBERS, seed=setting.seed)
    if setting.kind in _MASKED:
        return make_masked(replace(_MASKED[setting.kind], seed=setting.seed), make, NUM_MEMBERS)
    if setting.kind == "mimo":
        return ds.MIMO(network, NUM_MEMBERS, setting.seed)
    references = sets.normalise(sets.train.x[:REFERENCES])
    return ds.Anchored(network, references, NUM_MEMBERS, seed=setting.seed, mask_probability=0.0625)


# Of images to disagree on; strengths are those that each objective's own study found to keep members.
OBJECTIVES: Mapping[str, Callable[[Tensor], obj.Objective]] = {
    "independent": lambda _: obj.Independent(),
    "joint 0.4": lambda _: obj.Joint(0.4),
    "loss-guided 0.5": lambda _: obj.LossGuided(0.5, active=None),
    "a2d 0.1": lambda elsewhere: obj.Disagree(elsewhere, regulariser="a2d", strength=0.1),
    "adversarial": lambda _: obj.Adversarial(obj.Independent(), epsilon=0.01),
}


def train_and_measure(setting: Setting, work: Work) -> Record:
    """Train one combination; return its record."""
    (sets, elsewhere), quick, attacked = work.material, work.quick, setting.objective == "adversarial"
    transform = sets.normalise if setting.kind in NORMALISED or attacked else None
    train = partial(_train, setting, sets, elsewhere, transform)
    budget = work.seconds or (QUICK_SECONDS if quick else SECONDS)
    network = partial(NETWORKS[network_of(work)], sets.num_classes)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    if setting.kind == "heads":
        # Train one network for three quarters of the budget, freeze it but for its last layer, and train heads on it for the rest.
        backbone = ds.DeepEnsemble(lambda: on_pixels(network(), sets), 1, setting.seed)
        first = train(backbone, "independent", 0.75 * budget, work.epochs)
        trained = backbone.member(0).eval()
        net = trained.get_submodule("net")
        body = nn.Sequential(trained.get_submodule("pixels"), ds.cut(net, 1)[0])
        with torch.no_grad():
            width = body(sets.train.x[:2].to(next(net.parameters()).device)).shape[-1]
        members: ds.Members = ds.HeadEnsemble(body, (width, sets.num_classes), NUM_MEMBERS, setting.seed)
        epochs = None if work.epochs is None else max(work.epochs // 4, 1)
        record = train(members, setting.objective, 0.25 * budget, epochs)
        seconds = first["seconds"] + record["seconds"]
    else:
        members = (
            ds.DeepEnsemble(network, NUM_MEMBERS, setting.seed) if attacked else make_members(setting, sets, network)
        )
        record = train(members, setting.objective, budget, work.epochs)
        seconds = record["seconds"]
    found = measure(
        members,
        sets,
        name=setting.family,
        corruptions=CORRUPTIONS,
        severities=(1, 5),
        corrupted_images=200 if quick else 1000,
        transform=transform,
        bootstrap=0,
        seed=setting.seed,
    )
    found |= {"setting": asdict(setting), "family": setting.family, "training": record, "train_seconds": seconds}
    # Seconds to predict the test images, and bytes: at most in use on a GPU, of parameters on a CPU.
    x = sets.test.x if transform is None else transform(sets.test.x)
    with as_in_training():
        # The first pass captures.
        ds.predict(members, x)
        start = time.monotonic()
        ds.predict(members, x)
        seconds = time.monotonic() - start
    parameters = sum(each.numel() * each.element_size() for each in members.parameters())
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else parameters
    found |= {
        "predict_seconds": seconds,
        "images_a_second": len(x) / seconds,
        "bytes": peak,
        "parameter_bytes": parameters,
        "threads": torch.get_num_threads(),
    }
    return found | {"line": summary_line(found)}


def _train(
    setting: Setting,
    sets: ImageSets,
    elsewhere: Tensor,
    transform: Callable[[Tensor], Tensor] | None,
    members: ds.Members,
    objective: str,
    budget: float,
    epochs: int | None,
) -> Record:
    """Train for the budget: the time of a step is taken first, on a few batches, and the run has as many epochs as fit."""
    other = elsewhere if transform is None else transform(elsewhere)
    options: dict[str, Any] = {
        "lr": RATE,
        "all_train": True,
        "watch": "nothing",
        "transform": transform,
        "seed": setting.seed,
        "batch_size": 32 if len(sets.train.x) < 10_000 else 128,
        "last_batch": "drop" if len(sets.train.x) >= 256 else "keep",
        "engine": "captured" if epochs is None else "auto",
        **TRAINING.get(setting.kind, {}),
    }
    # What is timed is not interrupted.
    part = None if epochs is None else type(members).__name__
    if epochs is None:
        start = {name: tensor.clone() for name, tensor in members.state_dict().items()}
        ticks: list[float] = []
        few = Images(*(part[: TIMED_BATCHES * options["batch_size"]] for part in sets.all_train))
        fit_images(
            members,
            replace(sets, train=few, validation=Images(few.x[:0], few.y[:0])),
            OBJECTIVES[objective](other),
            epochs=TIMED_EPOCHS,
            callback=lambda _: ticks.append(time.monotonic()),
            **options,
        )
        members.load_state_dict(start)
        an_image = min(after - before for before, after in pairwise(ticks)) / len(few.x)
        epochs = max(round(budget / max(an_image * len(sets.all_train.x), 1e-3)), 1)
    return training_record(fit_images(members, sets, OBJECTIVES[objective](other), epochs=epochs, part=part, **options))


def _best(group: str) -> Callable[[Record], float | None]:
    """Return what reads the AUROC of a group's best score."""
    return lambda record: max((value[0] for value in record["auroc"].get(group, {}).values()), default=None)


COLUMNS: Mapping[str, Callable[[Record], float | None]] = {
    "accuracy": lambda record: record["test"]["accuracy"][0],
    "NLL": lambda record: record["test"]["nll"][0],
    "ECE": lambda record: record["test"]["ece"][0],
    "smooth ECE": lambda record: record["test"]["smooth_ece"][0],
    "worst member": lambda record: min(record["members"] or [record["test"]["accuracy"][0]]),
    "corrupted accuracy": lambda record: record["corrupted"]["all"]["accuracy"][0],
    "training s": lambda record: record["train_seconds"],
    "images / s": lambda record: record["images_a_second"],
    "MB": lambda record: record["bytes"] / 1e6,
    "near AUROC, best score": _best("near"),
    "far AUROC, best score": _best("far"),
}


def page(work: Work, found: Arms) -> Page:
    """Return what the study makes of its records."""
    sets, _ = work.material
    budget = work.seconds or (QUICK_SECONDS if work.quick else SECONDS)
    table = arms_table(
        found.done, COLUMNS, f"Each arm trained for about {budget:g} seconds, or the epochs that were asked for."
    )

    def figure(outputs: Outputs) -> Section:
        pairs = [(record["family"], record) for record in found.done.values()]
        costs = over_seeds(pairs, lambda record: 1e6 / record["images_a_second"])
        losses = over_seeds(pairs, lambda record: record["test"]["nll"][0])
        points = {family: (costs[family].mean, losses[family].mean) for family in costs}
        alt = "negative log-likelihood against the cost of a prediction"
        return Section("Loss against cost", outputs.picture("choosing_pareto", pareto(points), alt))

    remarks = [f"A2D disagrees on {name}, which no arm is judged by." for name in work.sets.ood if name not in sets.ood]
    return Page([], "", table, figure, remarks, {"sets": sets.describe()}, {"seconds": budget})


def _done(arms: Sequence[Arm], output: Path, *, settings: Record, **asked: Any) -> Arms:
    """Do the arms; those that were trained for other seconds are others."""
    seconds = QUICK_SECONDS if settings["quick"] else SECONDS
    return run_arms(arms, output, settings={"seconds": seconds, **settings}, **asked)


run = ImageStudy(
    "Which ensemble?",
    "Kinds, objectives and scores beside each other, for the same seconds of training.",
    arms_of,
    page,
    lambda work: reserved(work.sets),
    options=("seconds", "network", "repeats"),
    do=_done,
).run
