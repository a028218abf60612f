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
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dissensus import plots
from dissensus.architectures import resnet18
from dissensus.html import Section, Table, Text
from dissensus.members import (
    Anchored,
    BatchEnsemble,
    DeepEnsemble,
    HeadEnsemble,
    Masksembles,
    MCDropout,
    Members,
    PackedEnsemble,
    cut,
)
from dissensus.objectives import Adversarial, Disagree, Independent, Joint, LossGuided, Objective
from dissensus.predictions import predict
from dissensus.randomness import derive, seeded
from dissensus_studies.harness.arm_log import Arm, Arms, Record, run_arms
from dissensus_studies.harness.image_arms import (
    as_in_training,
    fit_images,
    measure,
    on_pixels,
    summary_line,
    training_record,
)
from dissensus_studies.harness.image_pages import over_seeds, sets_section
from dissensus_studies.harness.image_sets import Images, ImageSets, load_images
from dissensus_studies.harness.outputs import Outputs, print_table
from dissensus_studies.masksembles import DROPOUT, small_network, with_dropout

if TYPE_CHECKING:
    import matplotlib.figure

NUM_MEMBERS, REPEATS = 4, 3
SECONDS, QUICK_SECONDS = 90.0, 5.0
RATE = 0.1
CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog", "jpeg_compression", "contrast")
# Images that A2D disagrees on: the first of these that the folder has, else the last unknown set.
ELSEWHERE = ("isun", "lsun_resize", "textures")
REFERENCES = 128
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


def run(
    output: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    data: Path | None = None,
    epochs: int | None = None,
    minutes: float | None = None,
    limit: int | None = None,
    arms: Sequence[str] | None = None,
    known: str | None = None,
    seconds: float | None = None,
    repeats: int | None = None,
) -> Path:
    """Run the study; see `dissensus_studies.Study.run`.

    Args:
        output: Folder for the results. A study that was interrupted goes on from what `arms.jsonl` there has.
        quick: Five seconds an arm, a small network.
        seed: Of the first repeat; others follow it.
        data: Folder with an image set (see `image_sets.load_images`); digits that come along without one.
        epochs: So many epochs for every arm, instead of as many as fit into its seconds.
        minutes: Begin no arm after this time.
        limit: Train on so many images.
        arms: Run only arms whose names fit; see `arm_log.chosen`.
        known: Which image set of the folder.
        seconds: Training time of an arm, 90 by default. It is not exact: epochs are whole.
        repeats: Seeds, three by default.
    """
    quick = quick or data is None
    sets, elsewhere = reserved(load_images(data, quick=quick, known=known, limit=limit))
    wanted = [
        Setting(kind, objective, seed + repeat)
        for repeat in range(repeats or (1 if quick else REPEATS))
        for kind, objective in COMBINATIONS
    ]
    budget = seconds or (QUICK_SECONDS if quick else SECONDS)
    done = run_arms(
        [_arm(each, sets, elsewhere, budget, epochs, quick) for each in wanted],
        output,
        settings=sets.identity(epochs=epochs, limit=limit, quick=quick) | {"seconds": budget},
        minutes=minutes,
        only=arms,
    )
    if not done.done:
        raise ValueError("No arm was finished: there is nothing to show. Give more minutes, or fewer epochs.")
    return _report(Outputs(output), done, sets, budget)


def reserved(sets: ImageSets) -> tuple[ImageSets, Tensor]:
    """Take the images to disagree on away from those that arms are judged by."""
    name = next((each for each in ELSEWHERE if each in sets.ood), list(sets.ood)[-1])
    rest = {each: x for each, x in sets.ood.items() if each != name}
    groups = {each: group for each, group in sets.groups.items() if each != name}
    return replace(sets, ood=rest, groups=groups), sets.ood[name]


def make_members(setting: Setting, sets: ImageSets, network: Callable[[], nn.Module]) -> Members:
    """Make an untrained ensemble of this kind; it takes uint8 images, anchored networks normalised ones."""

    def make() -> nn.Module:
        return on_pixels(network(), sets)

    with seeded(derive(setting.seed, "initial weights", 0)):
        net = make()
    makers: Mapping[str, Callable[[], Members]] = {
        "single": lambda: DeepEnsemble(make, 1, setting.seed),
        "deep": lambda: DeepEnsemble(make, NUM_MEMBERS, setting.seed),
        "masksembles": lambda: Masksembles(net, NUM_MEMBERS, 2.0, seed=setting.seed, grow=True),
        "packed": lambda: PackedEnsemble(make, NUM_MEMBERS, seed=setting.seed),
        "batch ensemble": lambda: BatchEnsemble(make, NUM_MEMBERS, setting.seed),
        "mc dropout": lambda: MCDropout(with_dropout(net, DROPOUT), NUM_MEMBERS, setting.seed),
        "anchored": lambda: Anchored(
            network, sets.normalise(sets.train.x[:REFERENCES]), NUM_MEMBERS, seed=setting.seed, mask_probability=0.0625
        ),
    }
    return makers[setting.kind]()


def make_objective(name: str, elsewhere: Tensor) -> Objective:
    """Return the objective of this name; strengths are those that its own study found to keep members."""
    objectives: Mapping[str, Callable[[], Objective]] = {
        "independent": Independent,
        "joint 0.4": lambda: Joint(0.4),
        "loss-guided 0.5": lambda: LossGuided(0.5, active=None),
        "a2d 0.1": lambda: Disagree(elsewhere, regulariser="a2d", strength=0.1),
        "adversarial": lambda: Adversarial(Independent(), epsilon=0.01),
    }
    return objectives[name]()


def _arm(setting: Setting, sets: ImageSets, elsewhere: Tensor, budget: float, epochs: int | None, quick: bool) -> Arm:
    def network() -> nn.Module:
        return (small_network if quick else resnet18)(sets.num_classes)

    def work() -> Record:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        transform = sets.normalise if setting.kind in ("anchored",) or setting.objective == "adversarial" else None
        if setting.kind == "heads":
            members, seconds, record = _heads(setting, sets, elsewhere, network, budget, epochs)
        else:
            plain = transform is not None and setting.kind != "anchored"
            members = (
                DeepEnsemble(network, NUM_MEMBERS, setting.seed) if plain else make_members(setting, sets, network)
            )
            run = _train(members, setting, sets, elsewhere, budget, epochs, transform)
            seconds, record = run["seconds"], run
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
        found |= _cost(members, sets, transform)
        found["line"] = summary_line(found)
        return found

    # All arms take about as long: that is what they are made for.
    return Arm(f"{setting.family} seed={setting.seed}", work)


def _train(
    members: Members,
    setting: Setting,
    sets: ImageSets,
    elsewhere: Tensor,
    budget: float,
    epochs: int | None,
    transform: Callable[[Tensor], Tensor] | None = None,
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
    }
    if epochs is None:
        start = {name: tensor.clone() for name, tensor in members.state_dict().items()}
        ticks: list[float] = []
        few = Images(*(part[: TIMED_BATCHES * options["batch_size"]] for part in sets.all_train))
        fit_images(
            members,
            replace(sets, train=few, validation=Images(few.x[:0], few.y[:0])),
            make_objective(setting.objective, other),
            epochs=TIMED_EPOCHS,
            callback=lambda _: ticks.append(time.monotonic()),
            **options,
        )
        members.load_state_dict(start)
        an_image = min(after - before for before, after in pairwise(ticks)) / len(few.x)
        epochs = max(round(budget / max(an_image * len(sets.all_train.x), 1e-3)), 1)
    run = fit_images(members, sets, make_objective(setting.objective, other), epochs=epochs, **options)
    return training_record(run)


def _heads(
    setting: Setting,
    sets: ImageSets,
    elsewhere: Tensor,
    network: Callable[[], nn.Module],
    budget: float,
    epochs: int | None,
) -> tuple[Members, float, Record]:
    """Train one network for three quarters of the budget, freeze it but for its last layer, and train heads on it for the rest."""
    backbone = DeepEnsemble(lambda: on_pixels(network(), sets), 1, setting.seed)
    first = _train(backbone, replace(setting, objective="independent"), sets, elsewhere, 0.75 * budget, epochs)
    trained = backbone.member(0).eval()
    pixels, net = trained.get_submodule("pixels"), trained.get_submodule("net")
    body = nn.Sequential(pixels, cut(net, 1)[0])
    with torch.no_grad():
        width = body(sets.train.x[:2].to(next(net.parameters()).device)).shape[-1]
    members = HeadEnsemble(body, (width, sets.num_classes), NUM_MEMBERS, setting.seed)
    second = _train(members, setting, sets, elsewhere, 0.25 * budget, None if epochs is None else max(epochs // 4, 1))
    return members, first["seconds"] + second["seconds"], second


def _cost(members: Members, sets: ImageSets, transform: Callable[[Tensor], Tensor] | None) -> Record:
    """Return seconds to predict the test images, and bytes: at most in use on a GPU, of parameters on a CPU."""
    x = sets.test.x if transform is None else transform(sets.test.x)
    with as_in_training():
        # The first pass captures.
        predict(members, x)
        start = time.monotonic()
        predict(members, x)
        seconds = time.monotonic() - start
    parameters = sum(each.numel() * each.element_size() for each in members.parameters())
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else parameters
    return {
        "predict_seconds": seconds,
        "images_a_second": len(x) / seconds,
        "bytes": peak,
        "parameter_bytes": parameters,
    }


def numbers(record: Record) -> dict[str, float]:
    """Return the numbers of an arm that are compared."""
    auroc = record["auroc"]
    best = {
        group: max((value[0], score) for score, value in auroc[group].items())
        for group in ("near", "far")
        if group in auroc
    }
    found = {
        "accuracy": record["test"]["accuracy"][0],
        "NLL": record["test"]["nll"][0],
        "ECE": record["test"]["ece"][0],
        "smooth ECE": record["test"]["smooth_ece"][0],
        "worst member": min(record["members"] or [record["test"]["accuracy"][0]]),
        "corrupted accuracy": record["corrupted"]["all"]["accuracy"][0],
        "training s": record["train_seconds"],
        "images / s": record["images_a_second"],
        "MB": record["bytes"] / 1e6,
    }
    return found | {f"{group} AUROC, best score": value for group, (value, _) in best.items()}


def _number(record: Record, name: str) -> float:
    return numbers(record).get(name, float("nan"))


def _report(outputs: Outputs, done: Arms, sets: ImageSets, budget: float) -> Path:
    families = {record["family"]: record for record in done.done.values()}
    pairs = [(record["family"], record) for record in done.done.values()]
    names = list(numbers(next(iter(done.done.values()))))
    table = {name: over_seeds(pairs, partial(_number, name=name)) for name in names}
    rows = [(family, *(table[name][family].mean for name in names)) for family in families]
    scores = _scores_by_family(pairs)
    outputs.sections += [
        Section(
            "Kinds and objectives",
            Text(
                f"Each arm trained for about {budget:g} seconds, or the epochs that were asked for. Means over seeds."
            ),
            Table(("arm", *names), rows),
            outputs.picture(
                "choosing_pareto", pareto_figure(table), "negative log-likelihood against the cost of a prediction"
            ),
        ),
        Section(
            "Scores",
            Table(
                ("score", *families),
                [(score, *values) for score, values in scores.items()],
                "Mean AUROC over near and far sets",
            ),
        ),
        sets_section(sets, done),
    ]
    outputs.results({"arms": done.done, "not_run": done.not_run, "sets": sets.describe()})
    print_table(("arm", *names), rows)
    return outputs.page(
        "Which ensemble?", "Kinds, objectives and scores beside each other, for the same seconds of training."
    )


def _scores_by_family(pairs: Sequence[tuple[str, Record]]) -> dict[str, list[float | None]]:
    families = dict.fromkeys(family for family, _ in pairs)
    names = dict.fromkeys(score for _, record in pairs for group in record["auroc"].values() for score in group)
    found: dict[str, list[float | None]] = {}
    for name in names:
        found[name] = []
        for family in families:
            values = [
                record["auroc"][group][name][0]
                for other, record in pairs
                if other == family
                for group in ("near", "far")
                if name in record["auroc"].get(group, ())
            ]
            found[name].append(fmean(values) if values else None)
    return found


def pareto_figure(table: Mapping[str, Mapping[str, Any]]) -> "matplotlib.figure.Figure":
    """Draw NLL against the time of a prediction; what nothing else beats in both is joined by a line."""
    figure, (ax,) = plots.panels(width=6.8, height=4.2)
    points = {family: (1e3 / table["images / s"][family].mean, found.mean) for family, found in table["NLL"].items()}
    for index, (family, (cost, loss)) in enumerate(points.items()):
        ax.scatter(
            cost, loss, color=plots.COLOURS[index % len(plots.COLOURS)], marker="osD^vP*X"[index % 8], label=family
        )
    front = sorted(p for p in points.values() if not any(q[0] < p[0] and q[1] < p[1] for q in points.values()))
    ax.plot(*zip(*front, strict=True), "--", color=plots.NOTE_COLOUR, linewidth=1)
    ax.set(xlabel="milliseconds an image", ylabel="NLL, nats", xscale="log")
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
