"""Study `collusion-images`: what becomes of image classifiers between independent and joint training.

ResNets, a VGG and a small network, five or ten members, probability and score averaging: test accuracy, errors and diversity for
beta from 0 to 1; generalisation gaps over training; members left out at random.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan, sqrt
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal

from torch import Tensor

from dissensus.architectures import ARCHITECTURES
from dissensus.data.sources import weighted_batches
from dissensus.diagnostics import diagnose
from dissensus.members import DeepEnsemble
from dissensus.objectives import Joint, decompose
from dissensus.training import Run
from dissensus.training.validation import validate
from dissensus_studies.harness.arm_log import Arm, Arms, Record, file_name
from dissensus_studies.harness.claims import Case, Claim
from dissensus_studies.harness.figures import sweep
from dissensus_studies.harness.image_arms import (
    fit_images,
    measure,
    on_pixels,
    record_of,
    released_steps,
    save_outputs,
    summary_line,
)
from dissensus_studies.harness.image_study import ImageStudy, Page, Work, arms_table, at
from dissensus_studies.harness.statistics import Estimate

BETAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
EPOCHS, GAP_EPOCHS = 80, 100
QUICK_EPOCHS, QUICK_BATCH = 6, 32
RATE, DECAY, ADAM_RATE = 0.1, 5e-4, 1e-3
# Training images that gap curves look at after every epoch.
WATCHED_IMAGES = 10_000
# The small network stops when its validation error has not fallen for so many epochs.
CNN_PATIENCE = 5


@dataclass(frozen=True)
class JointSetting:
    """One ensemble of the study."""

    architecture: str = "resnet18"  # A name of `ARCHITECTURES`.
    num_members: int = 5  # Members.
    beta: float = 0.0  # From 0, independent, to 1, joint.
    average: Literal["probs", "scores"] = "probs"  # What the ensemble averages: probabilities or scores.
    member_dropout: float = 0.0  # Share of members left out of every training batch.
    # "sweep" selects on validation error; "gap" trains to the end and watches the test images.
    experiment: Literal["sweep", "gap"] = "sweep"
    seed: int = 0  # Of the run.

    @property
    def family(self) -> str:
        """What it is but for beta, dropped members and seed, such as "gap resnet18 M=5" or "resnet18 M=5 scores"."""
        first = "gap " if self.experiment == "gap" else ""
        last = " scores" if self.average == "scores" else ""
        return f"{first}{self.architecture} M={self.num_members}{last}"

    @property
    def name(self) -> str:
        """Name of the arm."""
        dropped = f" drop={self.member_dropout:g}" if self.member_dropout else ""
        return f"{self.family} beta={self.beta:g}{dropped} seed={self.seed}"


# The ends of the range first: they are what the claims are about.
_ORDER = (BETAS[0], *reversed(BETAS[1:]))
# Repeats, what differs from the first ensemble, what is varied, and its values. Repeats are the document's: six of the main figures,
# five of learner dropout, three of the others.
_EXPERIMENTS: Sequence[tuple[int, dict[str, Any], str, Sequence[float]]] = (
    (6, {}, "beta", _ORDER),
    (6, {"experiment": "gap"}, "beta", (0.0, 1.0)),
    (5, {"beta": 1.0}, "member_dropout", (0.2, 0.4, 0.6)),
    (3, {"architecture": "cnn"}, "beta", _ORDER),
    (3, {"average": "scores"}, "beta", _ORDER),
    (3, {"architecture": "cnn", "num_members": 10}, "beta", _ORDER),
    (6, {"architecture": "resnet34"}, "beta", _ORDER),
    (3, {"architecture": "vgg"}, "beta", _ORDER),
    (3, {"num_members": 10}, "beta", _ORDER),
)
_QUICK: Sequence[tuple[int, dict[str, Any], str, Sequence[float]]] = (
    (1, {"architecture": "cnn"}, "beta", (0.0, 1.0, 0.6)),
    (1, {"architecture": "cnn", "experiment": "gap"}, "beta", (0.0, 1.0)),
    (1, {"architecture": "cnn", "average": "scores"}, "beta", (1.0,)),
    (1, {"architecture": "cnn", "beta": 1.0}, "member_dropout", (0.4,)),
)


def settings_of(quick: bool, seed: int) -> list[JointSetting]:
    """Return all ensembles in order of importance: every experiment once, then again with other seeds."""
    return [
        JointSetting(seed=seed + repeat, **{**changes, varied: value})
        for repeat in range(6)
        for repeats, changes, varied, values in (_QUICK if quick else _EXPERIMENTS)
        for value in values
        if repeat < repeats
    ]


def training_of(setting: JointSetting, epochs: int | None, quick: bool) -> dict[str, Any]:
    """Return the arguments of `fit_images`."""
    gap, cnn = setting.experiment == "gap", setting.architecture == "cnn"
    if epochs is None:
        epochs = QUICK_EPOCHS if quick else GAP_EPOCHS if gap else EPOCHS
    elif gap:
        epochs = max(1, round(epochs * GAP_EPOCHS / EPOCHS))
    chosen: dict[str, Any] = {"epochs": epochs, "changes": "crop+rotation", "seed": setting.seed}
    if quick:
        chosen |= {"batch_size": QUICK_BATCH, "changes": "crop"}
    if gap or cnn:
        chosen |= {"optimizer": "adam", "lr": ADAM_RATE, "weight_decay": 0.0, "schedule": "constant"}
    else:
        rate, decay = RATE / setting.num_members, DECAY * setting.num_members
        chosen |= {"lr": rate, "weight_decay": decay, "schedule": released_steps(epochs)}
    if gap:
        return chosen | {"all_train": True, "watch": "test"}
    return chosen | {"select": "ensemble_loss"} | ({"patience": CNN_PATIENCE} if cnn else {})


def train_and_measure(setting: JointSetting, work: Work) -> Record:
    """Train one ensemble; return its record."""
    sets, training = work.sets, training_of(setting, work.epochs, work.quick)
    make = ARCHITECTURES[setting.architecture]
    ensemble = DeepEnsemble(lambda: on_pixels(make(classes=sets.num_classes), sets), setting.num_members, setting.seed)
    objective = Joint(beta=setting.beta, average=setting.average, member_dropout=setting.member_dropout)
    clean: dict[str, list[float]] = {"ensemble_error": [], "member_error": []}

    def watch(run: Run) -> None:
        """Look at training images as at test images: not augmented, without dropout, all members at one moment."""
        watched = weighted_batches((sets.train.x[:WATCHED_IMAGES], sets.train.y[:WATCHED_IMAGES]), 2048)
        members, whole = validate(run.members, list(watched), objective.likelihood)
        clean["ensemble_error"].append(whole["ensemble_loss"])
        clean["member_error"].append(fmean(members["validation_loss"]))

    training |= {"callback": watch} if setting.experiment == "gap" else {"part": "net"}
    run = fit_images(ensemble, sets, objective, **training)
    record = measure(ensemble, sets, name=setting.name, seed=setting.seed)
    logits = save_outputs(ensemble, sets, work.output / "outputs" / f"{file_name(setting.name)}.npz")
    record |= {
        **record_of(setting, run),
        "family": setting.family,
        **joint_numbers(logits, sets.test.y, setting.average),
        "diagnosis": diagnosis(logits, sets.test.y, setting.average),
    }
    record["training"]["clean"] = clean
    record["line"] = summary_line(record) + f", diversity {record['diversity']:.4f}"
    return record


def joint_numbers(logits: Tensor, labels: Tensor, average: str) -> dict[str, float]:
    """Return test numbers of the ensemble as it was trained to average: accuracy, ERR, ERRbar and DIV."""
    parts = decompose(logits.double(), labels, average=average)
    pooled = logits.softmax(-1).mean(0) if average == "probs" else logits.mean(0)
    return {
        "accuracy": float((pooled.argmax(-1) == labels).double().mean()),
        "member_accuracy": float((logits.argmax(-1) == labels).double().mean()),
        "ensemble_error": float(parts.ensemble_error.mean()),
        "member_error": float(parts.member_error.mean()),
        "diversity": float(parts.diversity.mean()),
    }


def diagnosis(logits: Tensor, labels: Tensor, average: Literal["probs", "scores"]) -> dict[str, Any]:
    """Return the verdict on test outputs, and the numbers that it rests on."""
    finding = diagnose(logits, labels, average=average, repeats=20)
    return {
        "verdict": ", ".join(finding.signs) or ("suspected" if finding.suspected else "no sign"),
        "diversity_ratio": finding.diversity_ratio,
        "bias_share": finding.bias_share,
        "class_share": finding.measures.class_share,
        "kept_mean": finding.measures.kept_mean,
        "codependence": finding.codependence,
    }


Family = Mapping[float, Sequence[Record]]

_COLUMNS: Mapping[str, Callable[[Record], object]] = {
    "accuracy": at("test", "accuracy"),
    "mean member": at("test", "member_accuracy"),
    "ERR": itemgetter("ensemble_error"),
    "member error": itemgetter("member_error"),
    "diversity": itemgetter("diversity"),
    "ECE": at("test", "ece"),
    "diagnosis": at("diagnosis", "verdict"),
    "far AUROC (BMA)": at("auroc", "far", "bma"),
    "epochs": at("training", "epochs"),
    "s": at("training", "seconds"),
}
_CAPTION = (
    "Test images; intervals are 95 % over images. Accuracy and ECE are of averaged probabilities, ERR and diversity of what each "
    "arm averages; the diagnosis is that of the test outputs alone."
)
_JUDGED = (
    "A difference within two standard errors (over runs; for a single run over test images) counts as unresolved. Diversity and gaps "
    "of single runs are compared as they are."
)
_HOW = (
    f"The document trains {EPOCHS} epochs ({GAP_EPOCHS} for gaps), six runs of its main figures, five of dropped members and three of the "
    "others. It averages its loss over members and takes a rate of 0.1; here losses are summed, so 0.1 divided by the number of members, "
    "with the decay of weights multiplied by it, takes the same steps."
)
_NUMBERS: Mapping[str, Callable[[Record], float]] = {
    "accuracy": itemgetter("accuracy"),
    "mean member": itemgetter("member_accuracy"),
    "ERR": itemgetter("ensemble_error"),
    "diversity": itemgetter("diversity"),
}


def estimate(records: Sequence[Record], name: str) -> Estimate:
    """Return a number of `joint_numbers` over runs; of one run, with its error over test images."""
    metric = "nll" if name == "ensemble_error" else name
    return Estimate.of([[float(record[name]), *interval_of(record, metric)[1:]] for record in records])


def estimates(family: Family, name: str) -> dict[float, Estimate]:
    """Return a number of every beta; a single run is known no better than other arms of the family repeat."""
    found = {beta: estimate(records, name) for beta, records in family.items()}
    spread = max((found[beta].error * sqrt(len(runs)) for beta, runs in family.items() if len(runs) > 1), default=0.0)
    for beta, runs in family.items():
        if len(runs) == 1 and spread:
            error = found[beta].error
            found[beta] = replace(found[beta], error=spread if isnan(error) else max(error, spread))
    return found


def interval_of(record: Record, metric: str) -> Sequence[Any]:
    """Return a metric's value and the ends of its interval over test images; compact records may lack the ends."""
    found = record["test"].get(metric)
    return found if isinstance(found, list) else [found, None, None]


def image_claims(families: Mapping[str, Family], gaps: Mapping[str, Family], dropped: Family) -> list[Claim]:
    """Judge the document's statements about images, as far as there are arms for them; by family; `dropped` by share left out."""
    ends, gap_ends = (
        {name: found for name, found in each.items() if {0.0, 1.0} <= set(found)} for each in (families, gaps)
    )
    small = {name: found for name, found in ends.items() if name.startswith("cnn") and len(found) > 2}
    statements: tuple[tuple[str, Mapping[str, Family], Callable[[Family], Case]], ...] = (
        ("Joint training has the lowest test accuracy of all beta.", ends, least_accurate),
        ("It has the highest ensemble error, the very quantity that it minimises.", ends, most_wrong),
        ("Its members are far worse than independent ones.", ends, compare_members),
        ("Diversity is larger in joint than in independent training.", ends, compare_diversity),
        ("Joint training has the larger generalisation gap.", gap_ends, _gap),
        ("The small network has its lowest test error between 0 and 1.", small, _between),
    )
    judged = [(text, {name: judge(found) for name, found in own.items()}) for text, own, judge in statements if own]
    return [*(Claim.over(*each) for each in judged), *_dropout_claims(dropped)]


def _within(one: Estimate, other: Estimate) -> str:
    noise = one.noise(other)
    return f" (± {noise:.4f})" if noise else ""


def _worst(family: Family, name: str, choose: Callable[..., float]) -> Case:
    """Compare beta = 1 with the worst of the others, which `choose` finds among their values: `min` or `max`."""
    found = estimates(family, name)
    joint = found.pop(1.0)
    beta = choose(found, key=lambda each: found[each].value)
    above = joint.above(found[beta])
    text = f"{joint.value:.4f} at beta = 1, {'lowest' if choose is min else 'highest'} of the others {found[beta].value:.4f} at {beta:g}"
    text += f", {found[0.0].value:.4f} at 0" if beta else ""
    text += _within(joint, found[beta])
    return text, None if above is None else above == (choose is max)


least_accurate = partial(_worst, name="accuracy", choose=min)
most_wrong = partial(_worst, name="ensemble_error", choose=max)


def _ends(family: Family, read: Callable[[Sequence[Record]], Estimate], text: str, *, falls: bool = False) -> Case:
    """Compare joint with independent training: a text of both numbers and their ratio, and whether it is as expected."""
    independent, joint = (read(family[beta]) for beta in (0.0, 1.0))
    found = text.format(independent.value, joint.value, joint.value / max(independent.value, 1e-12))
    found += _within(joint, independent)
    return found, independent.above(joint) if falls else joint.above(independent)


_MEMBERS, _DIVERSITY = (partial(estimate, name=name) for name in ("member_accuracy", "diversity"))
compare_members = partial(_ends, read=_MEMBERS, text="mean accuracy {:.4f} at 0, {:.4f} at 1", falls=True)
compare_diversity = partial(_ends, read=_DIVERSITY, text="{:.4f} at 0, {:.4f} at 1 ({:.1f} times)")


def _gap(family: Family) -> Case:
    text = "{:.4f} nats at 0, {:.4f} at 1 over the last tenth of epochs"
    return _ends(family, lambda records: Estimate.of([[final_gap(record)] for record in records]), text)


def _between(family: Family) -> Case:
    errors = {beta: estimate(records, "ensemble_error").value for beta, records in family.items()}
    best = min(errors, key=errors.__getitem__)
    return f"lowest {errors[best]:.4f} at {best:g}, {errors[0.0]:.4f} at 0", best not in (0.0, 1.0)


def _dropout_claims(dropped: Family) -> list[Claim]:
    if 0.0 not in dropped or len(dropped) < 2:
        return []
    shares = sorted(dropped)
    diversity, accuracy = (
        {share: estimate(dropped[share], name) for share in shares} for name in ("diversity", "accuracy")
    )
    gains = max((accuracy[share] for share in shares[1:]), key=lambda each: each.value).above(accuracy[0.0])
    spread, right = ([f"{found[p].value:.4f} at p = {p:g}" for p in shares] for found in (diversity, accuracy))
    lowers = "Leaving out members of every batch lowers the diversity of joint training."
    better = "; ".join(f"accuracy {each}" for each in right)
    return [
        Claim.checked(lowers, "; ".join(spread), diversity[shares[-1]].value < diversity[0.0].value),
        Claim.checked("It does not make the ensemble better.", better, not gains),
    ]


def final_gap(record: Record) -> float:
    """Return test minus training error of a gap arm, averaged over the last tenth of its epochs."""
    before, after = record["training"]["clean"]["ensemble_error"], record["training"]["history"]["ensemble_loss"]
    gap = [test - train for train, test in zip(before, after, strict=True)]
    return fmean(gap[-max(1, len(gap) // 10) :])


def page(work: Work, found: Arms) -> Page:
    """Return what the study makes of its records."""
    sweeps: dict[str, dict[float, list[Record]]] = {}
    gaps: dict[str, dict[float, list[Record]]] = {}
    dropped: dict[float, list[Record]] = {}
    with_dropout = {r["family"] for r in found.done.values() if r["setting"]["member_dropout"] > 0.0}
    for record in found.done.values():
        setting = JointSetting(**record["setting"])
        if setting.member_dropout == 0.0:
            family = (gaps if setting.experiment == "gap" else sweeps).setdefault(setting.family, {})
            family.setdefault(setting.beta, []).append(record)
        if setting.family in with_dropout and setting.beta == 1.0:
            dropped.setdefault(setting.member_dropout, []).append(record)
    points = [
        (name, beta, record)
        for name, family in sweeps.items()
        if len(family) > 1
        for beta, runs in family.items()
        for record in runs
    ]
    title, places = "Between independent and joint training", sorted({beta for _, beta, _ in points})
    figure = sweep("collusion_beta", title, points, _NUMBERS, "β", xticks=places).section if points else None
    table = arms_table(found.done, _COLUMNS, _CAPTION)
    return Page(image_claims(sweeps, gaps, dropped), _JUDGED, table, figure, [_HOW])


run = ImageStudy(
    "Learner collusion on images",
    "Members are trained between each for itself (beta = 0) and all as one model (beta = 1). What does that do to the ensemble, "
    "to its members, and to the difference between training and test error?",
    lambda work: [
        Arm(each.name, partial(train_and_measure, each, work), each.family)
        for each in settings_of(work.quick, work.seed)
    ],
    page,
).run
