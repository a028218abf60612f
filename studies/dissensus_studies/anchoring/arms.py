"""The arms of `anchoring`: which networks are trained, how, and what each is measured by.

The published recipe for CIFAR is 200 epochs of SGD at 0.1 with momentum 0.9 and decay of weights 5e-4, the rate divided by five
after 60, 120 and 160 epochs, crops and flips, the last weights taken. Runs of fewer than 100 epochs go up to 0.2 and down again
in one cycle instead, for all arms alike.

The networks of a row, each of a seed of its own, are trained side by side as members of one ensemble, and measured one by one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from torch import nn

from dissensus.architectures import resnet18, wide_resnet
from dissensus.data.corruptions import EXTRA, STANDARD
from dissensus.members import Anchored, DeepEnsemble, Members
from dissensus.objectives import HardDelta, Independent, MaskedUniform, Objective
from dissensus.probing import linear_probe
from dissensus.training import Run
from dissensus.training.schedules import MultiStep
from dissensus_studies.anchoring.adaptation import Task
from dissensus_studies.harness.arm_log import Arm, Record, digest_of, file_name
from dissensus_studies.harness.image_arms import CORRUPTED_IMAGES, fit_images, measure, record_of, summary_line
from dissensus_studies.harness.image_sets import ImageSets
from dissensus_studies.harness.image_study import Work

# Networks of a row, which are trained side by side.
NETS, QUICK_NETS = 5, 2
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


def settings_of(quick: bool) -> list[AnchorSetting]:
    """Return what is trained, in order of importance, with the first seed of each."""
    plain, anchored, masked = AnchorSetting(anchored=False), AnchorSetting(), AnchorSetting(alpha=1 / 4)
    if quick:
        return [plain, anchored, masked, replace(masked, tail_weight=0.1)]
    others = [tails for tails in TAILS if tails != "diagonal"]
    return [
        *(plain, anchored, masked, replace(masked, tail_weight=1.0)),
        *(AnchorSetting(alpha=alpha) for alpha in (1 / 8, 1 / 16)),
        *(replace(masked, tail_weight=weight) for weight in (0.1, 0.01)),
        *(replace(masked, tail_weight=weight, tails=tails) for weight in (0.1, 1.0) for tails in others),
        replace(masked, variant="uniform"),
        *(replace(each, architecture="wrn-40-2") for each in (plain, anchored, masked)),
        replace(masked, variant="example"),
    ]


def arms_of(work: Work) -> list[Arm]:
    """Return the arms of every row: each network is measured and adapted to other sets, and all of them are measured together."""
    # Arms of a row follow one another, so that the last one is all that is kept.
    trained = lru_cache(maxsize=1)(partial(train, work))
    return [
        arm for each in settings_of(work.quick) for arm in _arms_of_row(replace(each, seed=work.seed), work, trained)
    ]


def _arms_of_row(row: AnchorSetting, work: Work, trained: "Trained") -> list[Arm]:
    kind = f"{row.architecture} tail={bool(row.tail_weight)}"
    seeds = []
    for place in range(_nets(work.quick)):
        setting = replace(row, seed=row.seed + place)
        # The first arm of a row takes as long as training, others as long as measuring.
        like = f"{kind} {'measured' if place else 'trained'}"
        seeds.append(Arm(setting.name, partial(measure_one, setting, place, row, work, trained), like))
    name = f"{row.architecture} {row.row} together seed={row.seed}"
    like = f"{row.architecture} anchored={row.anchored} together"
    return [seeds[0], Arm(name, partial(measure_together, row, work, trained), like), *seeds[1:]]


Trained = Callable[[AnchorSetting], Run]


def train(work: Work, row: AnchorSetting) -> Run:
    """Train the networks of a row side by side; go on from the checkpoints that the study's folder has of them."""
    members, training = build(row, work.sets, work.quick), _training(row, work.epochs, work.quick)
    folder = work.output / "trained" / f"{file_name(row.name)}-{digest_of(work.identity)}"
    kept = {"checkpoint_dir": folder, "checkpoint_every": max(1, training["epochs"] // 16), "resume": True}
    return fit_images(members, work.sets, objective_of(row), transform=work.sets.normalise, **training, **kept)


def measure_one(setting: AnchorSetting, place: int, row: AnchorSetting, work: Work, trained: Trained) -> Record:
    """Measure one network of a row, with the first reference and with several; return its record."""
    sets, quick, run = work.sets, work.quick, trained(row)
    seen = one_network(run.members, place)
    single = DeepEnsemble.from_members(seen[:1])
    record = measure(single, sets, name=setting.name, seed=setting.seed, scores=SCORES, **_corrupted(work))
    if len(seen) > 1:
        scores = (*SCORES, "mutual_information")
        several = measure(DeepEnsemble.from_members(seen), sets, scores=scores, transform=sets.normalise)
        record["anchors"] = {"count": len(seen), **{k: several[k] for k in ("test", "auroc")}}
    adapted, skipped = adapt(single.member(0), sets, work.material.found, quick)
    record |= {"row": setting.row, "adaptation": adapted, "adaptation_skipped": skipped}
    return _finished(record, setting, run, work)


def measure_together(row: AnchorSetting, work: Work, trained: Trained) -> Record:
    """Measure all networks of a row, with all references, as one ensemble by every score; return its record."""
    run = trained(row)
    record = measure(run.members, work.sets, name=row.name, seed=row.seed, **_corrupted(work))
    nets = run.members.num_trained
    record["together"] = {"nets": nets, "references": run.members.num_members // nets if row.anchored else 0}
    record |= {"row": f"{row.row} together", "adaptation": {}, "adaptation_skipped": {}}
    return _finished(record, row, run, work)


def _corrupted(work: Work) -> dict[str, Any]:
    """Return which images are corrupted, and how."""
    quick: dict[str, Any] = {"corruptions": QUICK_CORRUPTIONS, "severities": (1, 3, 5)}
    chosen = quick if work.quick else {"corruptions": CORRUPTIONS}
    return {**chosen, "corrupted_images": _few(work), "transform": work.sets.normalise}


def _few(work: Work) -> int:
    return min(100 if work.quick else CORRUPTED_IMAGES, len(work.sets.test.x))


def _finished(record: Record, setting: AnchorSetting, run: Run, work: Work) -> Record:
    """Return a record with how it was trained, what it was measured on, and its line for the screen."""
    record |= {**record_of(setting, run), "nets": run.members.num_trained}
    record["images"] = {"test": len(work.sets.test.x), "corrupted": _few(work)}
    accuracy, error = (record["corrupted"]["all"][name][0] for name in ("accuracy", "smooth_ece"))
    record["line"] = f"{summary_line(record)}, corrupted {accuracy:.4f}, smooth ECE {error:.4f}"
    return record


def one_network(members: Members, place: int) -> list[nn.Module]:
    """Return one network of a row: as it is or, of an anchored one, with each of its references."""
    each = members.num_members // members.num_trained
    return [members.member(place * each + reference) for reference in range(each)]


def build(setting: AnchorSetting, sets: ImageSets, quick: bool = False) -> Members:
    """Make the untrained networks of a row as one ensemble, anchored ones with `ANCHORS` references each."""
    wide = partial(wide_resnet, 40, 2, classes=sets.num_classes)
    small = partial(resnet18, sets.num_classes, width=8 if quick else 64)
    network, nets = wide if setting.architecture == "wrn-40-2" else small, _nets(quick)
    if not setting.anchored:
        return DeepEnsemble(network, nets, setting.seed)
    masks: dict[str, Any] = {"mask_probability": setting.alpha, "initialise": "fresh"}
    masks["mask_per"] = "example" if setting.variant == "example" else "batch"
    return Anchored(network, sets.normalise(sets.all_train.x), ANCHORS, setting.seed, num_nets=nets, **masks)


def _nets(quick: bool) -> int:
    return QUICK_NETS if quick else NETS


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
