"""The arms of `anchoring`: which networks are trained, how, and what each is measured by.

The published recipe for CIFAR is 200 epochs of SGD at 0.1 with momentum 0.9 and decay of weights 5e-4, the rate divided by five
after 60, 120 and 160 epochs, crops and flips, the last weights taken. Runs of fewer than 100 epochs go up to 0.2 and down again
in one cycle instead, for all arms alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from dissensus.architectures import resnet18, wide_resnet
from dissensus.data.corruptions import EXTRA, STANDARD
from dissensus.members import Anchored, DeepEnsemble, Members
from dissensus.objectives import HardDelta, Independent, MaskedUniform, Objective
from dissensus.probing import linear_probe
from dissensus.training.schedules import MultiStep
from dissensus_studies.anchoring.adaptation import Task
from dissensus_studies.harness.arm_log import Arm, Record
from dissensus_studies.harness.image_arms import CORRUPTED_IMAGES, fit_images, measure, record_of, summary_line
from dissensus_studies.harness.image_sets import ImageSets
from dissensus_studies.harness.image_study import Work

ALPHAS = (1 / 16, 1 / 8, 1 / 4)
TAIL_WEIGHTS = (0.01, 0.1, 1.0)
EPOCHS, SHORT, QUICK_EPOCHS = 200, 100, 6
RATE, SHORT_RATE = 0.1, 0.2
# Answers with one reference, as the released CIFAR code, and with several.
ANCHORS = 5
SCORES = ("mean_energy", "bma", "total_entropy")
CORRUPTIONS = (*STANDARD, *EXTRA)
# Validation chose 0.1 or 1 for every task that was tried with more; later steps no longer change the accuracy.
PROBE_STRENGTHS, PROBE_STEPS = (1e-2, 1e-1, 1.0), 200
QUICK_CORRUPTIONS = ("gaussian_noise", "defocus_blur", "contrast")
# Ways to find tails, by the name of the arm.
TAILS: Mapping[str, dict[str, Any]] = {
    "diagonal": {},
    "radius": {"radius": 2.0},
    "low-rank": {"law": "low_rank"},
    "real": {"tails": "real"},
    "outputs": {"law": "outputs", "draws": 8},
    "features": {"law": "features", "draws": 8},
}


@dataclass(frozen=True)
class AnchorSetting:
    """One network of the study."""

    architecture: str = "resnet18"  # "resnet18" or "wrn-40-2".
    anchored: bool = True  # Whether it sees inputs through references.
    alpha: float = 0.0  # Chance that the reference of a batch is masked.
    tail_weight: float = 0.0  # Weight of hard-delta mining; 0 for none.
    tails: str = "diagonal"  # How its tails are found, a name of `TAILS`.
    # "" for the usual; "uniform" for uniform targets of masked batches, "example" for masks by example.
    variant: str = ""
    seed: int = 0  # Of the run.

    @property
    def row(self) -> str:
        """What it is but for architecture and seed, such as "plain" or "alpha=0.25 tail=0.1 diagonal"."""
        if not self.anchored:
            return "plain"
        parts = [f"alpha={self.alpha:g}" if self.alpha else "anchored", self.variant]
        if self.tail_weight:
            parts.append(f"tail={self.tail_weight:g} {self.tails}")
        return " ".join(filter(None, parts))

    @property
    def name(self) -> str:
        """Name of the arm."""
        return f"{self.architecture} {self.row} seed={self.seed}"


def settings_of(quick: bool, seed: int) -> list[AnchorSetting]:
    """Return all networks in order of importance."""
    plain, anchored, masked = AnchorSetting(anchored=False), AnchorSetting(), AnchorSetting(alpha=0.25)
    main = [plain, anchored, *(AnchorSetting(alpha=alpha) for alpha in reversed(ALPHAS))]
    others = [tails for tails in TAILS if tails != "diagonal"]
    wanted = [
        *main,
        *(replace(masked, tail_weight=weight) for weight in TAIL_WEIGHTS),
        *(replace(masked, tail_weight=0.1, tails=tails) for tails in others),
        replace(masked, variant="uniform"),
        *(replace(each, seed=repeat) for repeat in (1, 2) for each in main),
        *(replace(each, architecture="wrn-40-2") for each in (plain, anchored, masked)),
        replace(masked, variant="example"),
        *(replace(masked, tail_weight=1.0, tails=tails) for tails in others),
    ]
    if quick:
        wanted = [plain, anchored, masked, replace(masked, tail_weight=0.1)]
    return [replace(each, seed=seed + each.seed) for each in wanted]


def arms_of(work: Work) -> list[Arm]:
    """Return an arm for every network: it is trained, measured, and adapted to other sets."""
    return [
        Arm(each.name, partial(train_and_measure, each, work), f"{each.architecture} tail={bool(each.tail_weight)}")
        for each in settings_of(work.quick, work.seed)
    ]


def train_and_measure(setting: AnchorSetting, work: Work) -> Record:
    """Train one network; return its record."""
    sets, quick = work.sets, work.quick
    members = build(setting, sets, quick)
    training = _training(setting, work.epochs, quick)
    run = fit_images(members, sets, objective_of(setting), transform=sets.normalise, part="net", **training)
    few = min(100 if quick else CORRUPTED_IMAGES, len(sets.test.x))
    single = members if isinstance(members, DeepEnsemble) else DeepEnsemble.from_members([members.member(0)])
    how: dict[str, Any] = {"corruptions": CORRUPTIONS}
    if quick:
        how = {"corruptions": QUICK_CORRUPTIONS, "severities": (1, 3, 5)}
    how |= {"corrupted_images": few, "scores": SCORES, "transform": sets.normalise}
    record = measure(single, sets, name=setting.name, seed=setting.seed, **how)
    if isinstance(members, Anchored):
        several = measure(members, sets, scores=(*SCORES, "mutual_information"), transform=sets.normalise)
        record["anchors"] = {"count": ANCHORS, **{k: several[k] for k in ("test", "auroc")}}
    adapted, skipped = adapt(single.member(0), sets, work.material.found, quick)
    record |= {**record_of(setting, run), "row": setting.row, "images": {"test": len(sets.test.x), "corrupted": few}}
    record |= {"adaptation": adapted, "adaptation_skipped": skipped}
    accuracy, error = (record["corrupted"]["all"][name][0] for name in ("accuracy", "smooth_ece"))
    record["line"] = f"{summary_line(record)}, corrupted {accuracy:.4f}, smooth ECE {error:.4f}"
    return record


def build(setting: AnchorSetting, sets: ImageSets, quick: bool = False) -> Members:
    """Make the untrained network, as an ensemble of one or with `ANCHORS` references."""
    wide = partial(wide_resnet, 40, 2, classes=sets.num_classes)
    small = partial(resnet18, sets.num_classes, width=8 if quick else 64)
    network = wide if setting.architecture == "wrn-40-2" else small
    if not setting.anchored:
        return DeepEnsemble(network, 1, setting.seed)
    masks: dict[str, Any] = {"mask_probability": setting.alpha, "initialise": "fresh"}
    masks["mask_per"] = "example" if setting.variant == "example" else "batch"
    return Anchored(network, sets.normalise(sets.all_train.x), ANCHORS, setting.seed, **masks)


def objective_of(setting: AnchorSetting) -> Objective:
    """Return what the network is trained with."""
    inner = MaskedUniform(Independent()) if setting.variant == "uniform" else Independent()
    return HardDelta(inner, setting.tail_weight, **TAILS[setting.tails]) if setting.tail_weight else inner


def _training(setting: AnchorSetting, epochs: int | None, quick: bool) -> dict[str, Any]:
    epochs = epochs or (QUICK_EPOCHS if quick else EPOCHS)
    chosen: dict[str, Any] = {"lr": RATE, "schedule": MultiStep(tuple(epochs * s for s in (0.3, 0.6, 0.8)), 0.2)}
    if quick:
        chosen = {"lr": 0.05, "schedule": "one_cycle", "batch_size": 64}
    elif epochs < SHORT:
        chosen = {"lr": SHORT_RATE, "schedule": "one_cycle"}
    common = {"all_train": True, "watch": "nothing", "last_batch": "drop"}
    return {**common, **chosen, "epochs": epochs, "seed": setting.seed}


def adapt(
    net: nn.Module, sets: ImageSets, tasks: Mapping[str, Task], quick: bool = False
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Fit a linear classifier to a network's last features for every task; return numbers of each, and why others were skipped."""
    found, skipped = {}, {}
    backbone = without_head(net)
    strengths = (1e-2, 1.0) if quick else PROBE_STRENGTHS
    for name, task in tasks.items():
        train, test = ((sets.normalise(part.x), part.y) for part in (task.train, task.test))
        try:
            probe = linear_probe(backbone, train, test, strengths=strengths, max_steps=PROBE_STEPS, batch_size=512)
        except (ValueError, RuntimeError) as problem:
            # A set that does not fit must not cost a trained network.
            skipped[name] = (str(problem).splitlines() or [type(problem).__name__])[0]
        else:
            numbers = {"accuracy": probe.accuracy, "ece": probe.ece, "strength": probe.strength}
            found[name] = {**numbers, "images": len(task.test.x)}
    return found, skipped


def without_head(net: nn.Module) -> nn.Module:
    """Replace the last linear layer of a network by nothing, in place: it then gives features; return the network."""
    linear = [name for name, layer in net.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ValueError("The network has no linear layer that could be its head.")
    parent, _, last = linear[-1].rpartition(".")
    setattr(net.get_submodule(parent), last, nn.Identity())
    return net
